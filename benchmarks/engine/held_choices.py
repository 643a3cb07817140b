"""What is chosen by time where the choice changes last bits, held, so that two engines can be compared bit by bit.

vLLM tunes `_chunk_cumsum_fwd_kernel`, the running sums of dA over a chunk, by time. Where a program has few heads and
chunks are short, fewer tokens of a chunk are in a thread, which is another order of sums: at a chunk size of 128 the
choice of two heads leaves two tokens to a thread, and every other choice four. So stock vLLM may differ in last bits
from one start to the next. The comparisons leave out what has fewer than four; at a chunk size of 256 none has.

Inductor, which compiles what has no kernel of its own, times block sizes and warps too. Its deterministic mode keeps it
from that where sums would change, but not in combo kernels, several in one launch, which vLLM turns on.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

# Of a process from its start, and of its workers.
ENVIRONMENT = {"TORCHINDUCTOR_DETERMINISTIC": "1"}

TOKENS_PER_THREAD = 4
_THREADS_PER_WARP = 32

# vLLM sets neither if one is set.
_NO_COMBO_KERNELS = {"combo_kernels": False, "benchmark_combo_kernel": False}

_dropped: list[Any] = []


def without_combo_kernels(engine: dict[str, Any]) -> dict[str, Any]:
    """Arguments of vLLM's LLM with combo kernels off, unless they say something about these themselves."""
    given = engine.get("compilation_config", {})
    compilation = {"mode": given} if isinstance(given, int) else given  # vLLM takes the number of a mode as well
    inductor = {**_NO_COMBO_KERNELS, **compilation.get("inductor_compile_config", {})}
    return {**engine, "compilation_config": {**compilation, "inductor_compile_config": inductor}}


def hold_sums(_: Any, chunk_size: int) -> int:
    """Drop the other choices in this process; how many have been so far.

    It is to be called before the engine is built, and again in its workers before the first step, where `_` is their
    model: those of tensor parallelism are processes of their own, whose warm-up has then chosen already. What was
    chosen is forgotten with the choice, and the next launch tunes again among the rest.
    """
    from vllm.triton_utils import HAS_TRITON

    if not HAS_TRITON:  # an engine for CPUs has kernels of its own
        return 0
    from vllm.model_executor.layers.mamba.ops import ssd_chunk_state, triton_helpers

    tuner = ssd_chunk_state._chunk_cumsum_fwd_kernel
    other = [config for config in tuner.configs if not in_order(config, chunk_size)]
    if other:
        tuner.configs = [config for config in tuner.configs if config not in other]
        tuner.cache.clear()
        triton_helpers._autotuned_configs.clear()
        _dropped.extend(other)
    return len(_dropped)


def in_order(config: Any, chunk_size: int) -> bool:
    """Whether a choice gives each thread at least `TOKENS_PER_THREAD` tokens of a chunk.

    Args:
        config: of the tuner, with `BLOCK_SIZE_H` heads in a program. chunk_size: of the model.
    """
    threads = config.num_warps * _THREADS_PER_WARP
    padded = 1 << (chunk_size - 1).bit_length()
    return bool(config.kwargs["BLOCK_SIZE_H"] * padded >= TOKENS_PER_THREAD * threads)


def chunk_size(model: str) -> int:
    """Of the Mamba2 layers of the model in a folder, before an engine is there to say it."""
    config = json.loads(Path(model, "config.json").read_text())
    return int(config.get("mamba_chunk_size") or config.get("chunk_size", 256))
