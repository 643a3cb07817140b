"""The two ways to continue a batch of sequences: vLLM's, with the snapshot, and ours, in place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import triton
from torch import Tensor

from benchmarks.inputs import Inputs
from mamba_ops import ssd_chunk_scan
from mamba_ops.kernels import bmm_chunk, chunk_cumsum, chunk_scan, chunk_state, state_passing


def ours(inputs: Inputs, out: Tensor, state_cache: Tensor | None = None) -> None:
    """Continue from the cache in place."""
    ssd_chunk_scan(
        **inputs.arguments(),
        dt_softplus=True,
        state_cache=inputs.state_cache if state_cache is None else state_cache,
        read_slots=inputs.slots,
        has_initial_state=inputs.has_initial_state,
        write_slots=inputs.slots,
        out=out,
    )


def stock(inputs: Inputs, out: Tensor, state_cache: Tensor | None = None) -> None:
    """Continue as vLLM's own layer does: gather, `torch.where`, scan with a fused write of the final states."""
    from vllm.model_executor.layers.mamba.ops.ssd_combined import mamba_chunk_scan_combined_varlen

    cache = inputs.state_cache if state_cache is None else state_cache
    metadata = inputs.metadata
    snapshot = torch.where(inputs.has_initial_state[:, None, None, None], cache[inputs.slots], 0)
    mamba_chunk_scan_combined_varlen(
        inputs.x,
        inputs.dt,
        inputs.A,
        inputs.B,
        inputs.C,
        chunk_size=metadata.chunk_size,
        cu_seqlens=metadata.cu_seqlens,
        cu_chunk_seqlens=metadata.cu_chunk_seqlens,
        last_chunk_indices=metadata.last_chunk_indices,
        seq_idx=metadata.seq_idx,
        out=out,
        D=inputs.D,
        dt_bias=inputs.dt_bias,
        initial_states=snapshot,
        dt_softplus=True,
        state_dtype=cache.dtype,
        final_states_out=cache,
        final_state_indices=inputs.slots,
    )


def stock_kernels() -> dict[str, Any]:
    """vLLM's autotuned kernels by the name of the stage."""
    from vllm.model_executor.layers.mamba.ops import ssd_bmm, ssd_chunk_scan, ssd_chunk_state, ssd_state_passing

    return {
        "chunk_cumsum": ssd_chunk_state._chunk_cumsum_fwd_kernel,
        "chunk_state": ssd_chunk_state._chunk_state_fwd_kernel,
        "state_passing": ssd_state_passing._state_passing_fwd_kernel,
        "bmm_chunk": ssd_bmm._bmm_chunk_fwd_kernel,
        "chunk_scan": ssd_chunk_scan._chunk_scan_fwd_kernel,
    }


def our_blocks(headdim: int, dstate: int, chunk_size: int) -> dict[str, triton.Config]:
    """The blocks that our kernels run with, as configurations of vLLM's kernels."""

    def padded(size: int, most: int) -> int:
        return min(most, max(16, triton.next_power_of_2(size)))

    def config(m: int, n: int, k: int, kernel: Any) -> triton.Config:
        blocks = {"BLOCK_SIZE_M": m, "BLOCK_SIZE_N": n, "BLOCK_SIZE_K": k}
        return triton.Config(blocks, num_warps=kernel.NUM_WARPS, num_stages=kernel.NUM_STAGES)

    block_heads = chunk_cumsum.block_heads(chunk_size, chunk_cumsum.NUM_WARPS)
    return {
        "chunk_cumsum": triton.Config({"BLOCK_SIZE_H": block_heads}, num_warps=chunk_cumsum.NUM_WARPS),
        "chunk_state": config(
            padded(headdim, chunk_state.BLOCK_HEADDIM),
            padded(dstate, chunk_state.BLOCK_DSTATE),
            min(chunk_state.BLOCK_TOKENS, chunk_size),
            chunk_state,
        ),
        "state_passing": triton.Config({"BLOCK_SIZE": state_passing.BLOCK_SIZE}, num_warps=state_passing.NUM_WARPS),
        "bmm_chunk": config(
            min(bmm_chunk.BLOCK_M, chunk_size),
            min(bmm_chunk.BLOCK_K, chunk_size),
            padded(dstate, bmm_chunk.BLOCK_DSTATE),
            bmm_chunk,
        ),
        "chunk_scan": config(
            min(chunk_scan.BLOCK_M, chunk_size),
            padded(headdim, chunk_scan.BLOCK_HEADDIM),
            min(chunk_scan.BLOCK_K, chunk_size),
            chunk_scan,
        ),
    }


@contextmanager
def stock_blocks(configs: dict[str, triton.Config | None]) -> Iterator[None]:
    """Run vLLM's stages at given blocks; None lets a stage tune itself afresh on its next launch."""
    from vllm.model_executor.layers.mamba.ops import triton_helpers

    tuners = stock_kernels()
    saved = {name: tuners[name].configs for name in configs}
    for name, config in configs.items():
        tuners[name].configs = saved[name] if config is None else [config]
        tuners[name].cache.clear()
    triton_helpers._autotuned_configs.clear()
    try:
        yield
    finally:
        for name, old in saved.items():
            tuners[name].configs = old
            tuners[name].cache.clear()
        triton_helpers._autotuned_configs.clear()
