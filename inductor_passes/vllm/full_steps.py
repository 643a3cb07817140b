"""Whole steps as one captured graph: short prefills, alone or beside decodes. Option `full_steps`.

vLLM captures whole steps of decodes, and of other steps only what lies between the layers with a state. With metadata
at fixed addresses a Mamba2 layer can be captured in any step that is short, so vLLM's own manager of graphs is given
some more of them for each of its sizes up to a few dozen tokens. Steps in which every request has one token keep
their graphs, longer steps theirs.
"""

from __future__ import annotations

import logging
import sys
import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor

from inductor_passes.vllm.contract import missing_from_graphs
from inductor_passes.vllm.full_tables import FullTables, PaddedSizes
from inductor_passes.vllm.once import say_once
from inductor_passes.vllm.options import read_options

# The name of a step's `FullStep` among the attributes of its metadata.
FULL_STEP = "_mamba_ops_full_step"
_RUNNER = "vllm.v1.worker.gpu.model_runner"

_known: weakref.WeakValueDictionary[int, FullSteps] = weakref.WeakValueDictionary()


class FullSteps:
    """What the groups of layers and the graphs of an engine have in common.

    Attributes:
        tables: of a step.
        captured: token counts that a graph is captured for, ascending, all above 1.
        failure: why the graphs must not be used, found out while they were captured; or None.
    """

    def __init__(self, tables: FullTables, captured: list[int], layers: Any = None) -> None:
        self.tables, self.captured = tables, captured
        self._layers = layers  # kept, so that no other engine's have their id
        self.failure: str | None = None

    def may_run(self, ntokens: int, longest: int) -> bool:
        """Whether a graph of ours may be replayed for a step of so many tokens, of which one request has `longest`."""
        return longest > 1 and ntokens <= self.captured[-1]

    def has_graph_of_decodes(self, max_query_len: int) -> bool:
        """Whether a step that is captured with this longest query is one of decodes alone."""
        return max_query_len <= 1


class GroupSlots:
    """The slots of a group of layers in a step, at the same addresses in every step.

    Attributes:
        of_requests: (max_reqs,) int32. of_decodes: likewise, the null slot for what is no decode.
    """

    def __init__(self, steps: FullSteps, device: torch.device) -> None:
        self._steps = steps
        self.of_requests, self.of_decodes = (
            torch.zeros(steps.tables.most_reqs, dtype=torch.int32, device=device) for _ in range(2)
        )
        self._is_decode = steps.tables.is_decode(self.of_decodes.shape[0])

    def fill(self, of_decodes: Tensor, of_prefills: Tensor | None) -> None:
        """Take those of a step.

        Args:
            of_decodes: (ndecodes,). of_prefills: (nprefills,), or None for none.
        """
        ndecodes = of_decodes.shape[0]
        if ndecodes:
            self.of_requests[:ndecodes].copy_(of_decodes)
        if of_prefills is not None:
            self.of_requests[ndecodes : ndecodes + of_prefills.shape[0]].copy_(of_prefills)
        # The null slot is 0, and decodes are marked by 1.
        torch.mul(self.of_requests, self._is_decode, out=self.of_decodes)

    def clear(self) -> None:
        """Take those of a step without decodes; `of_requests` is read only where the tables have a sequence."""
        self.of_decodes.zero_()

    def step(self, sizes: PaddedSizes) -> FullStep:
        """What the layers of the group take while a graph of this size is captured."""
        tables = self._steps.tables
        of_step = tables.step(sizes, self.of_requests[: sizes.nseqs])
        return FullStep(self._steps, sizes, tuple(table.data_ptr() for table in of_step))


class FullStep(NamedTuple):
    """A step that is being captured.

    Attributes:
        steps: of the engine. sizes: padded.
        addresses: of `StepTensors`.
    """

    steps: FullSteps
    sizes: PaddedSizes
    addresses: tuple[int, ...]


def full_steps_for(config: Any, block_size: int, device: torch.device, pinned: bool) -> FullSteps | None:
    """Those of an engine, or None if its steps are not captured; the log says why not if they are asked for.

    Called when vLLM builds its builders of metadata, before it plans its graphs.

    Args:
        config: vLLM's.
        block_size: tokens of a block of the layers' caches.
        device: of the layers. pinned: whether the host's memory can be pinned.
    """
    options = read_options(config.additional_config)
    if not (options.enabled and options.full_steps):
        return None
    layers = config.compilation_config.static_forward_context
    steps = _known.get(id(layers))
    if steps is None:
        try:
            captured = _captured(config, block_size, device, layers)
        except _NotCapturedError as reason:
            say_once(logging.WARNING, f"no whole step with a prefill is captured: {reason}")
            return None
        max_reqs, chunk_size = config.scheduler_config.max_num_seqs, config.model_config.get_mamba_chunk_size()
        with torch.inference_mode(False):
            tables = FullTables(captured[-1], max_reqs, chunk_size, device, pinned)
        steps = _known[id(layers)] = FullSteps(tables, captured, layers)
        _offer_graphs()
    return steps


class _NotCapturedError(Exception):
    """Why no step can be captured."""


def _captured(config: Any, block_size: int, device: torch.device, layers: dict[str, Any]) -> list[int]:
    """The numbers of tokens that a graph can be captured for, ascending."""
    if device.type != "cuda":
        raise _NotCapturedError("there is no GPU")
    if _RUNNER not in sys.modules:
        raise _NotCapturedError("another model runner than vLLM's V2 is in use")
    missing = missing_from_graphs()
    if missing:
        raise _NotCapturedError(f"this vLLM lacks {', '.join(missing)}")
    parallel = config.parallel_config
    if parallel.data_parallel_size > 1 or parallel.pipeline_parallel_size > 1:
        raise _NotCapturedError("several engines or stages share the work")
    if any(getattr(parallel, f"{kind}_context_parallel_size", 1) > 1 for kind in ("prefill", "decode")):
        raise _NotCapturedError("the tokens of a sequence are on several devices")
    mixers = [layer for layer in layers.values() if hasattr(layer, "full_step_tokens")]
    ours = [layer.full_step_tokens for layer in mixers]
    if not all(ours):
        raise _NotCapturedError("a Mamba2 layer does not launch short prefills by address")
    # Whether a builder of metadata is ours depends on what it is for, and a step has to be written for every layer.
    if len({layer.get_kv_cache_spec(config) for layer in mixers}) > 1:
        raise _NotCapturedError("the Mamba2 layers do not all keep their states in the same way")
    _require_other_backends(config, layers)
    # A state is kept in the middle of a prefill only if that is longer than a block.
    limit = min(block_size, *ours)
    sizes = sorted(config.compilation_config.cudagraph_capture_sizes or [])
    mode = getattr(config.compilation_config.cudagraph_mode, "name", "NONE")
    if mode == "FULL":
        if not sizes or sizes[-1] > limit:
            raise _NotCapturedError(
                f"with `cudagraph_mode` FULL all of `cudagraph_capture_sizes` must be from 1 to {limit}"
            )
    elif mode != "FULL_AND_PIECEWISE":
        raise _NotCapturedError(f"`cudagraph_mode` is {mode}, neither FULL nor FULL_AND_PIECEWISE")
    captured = [size for size in sizes if 1 < size <= limit]
    if not captured:
        raise _NotCapturedError(f"no size in `cudagraph_capture_sizes` is from 2 to {limit}")
    return captured


def _require_other_backends(config: Any, layers: dict[str, Any]) -> None:
    """Those of attention can be captured in a step with a prefill, too."""
    from vllm.v1.attention.backend import AttentionCGSupport

    for name, layer in layers.items():
        if hasattr(layer, "full_step_tokens") or not hasattr(layer, "get_attn_backend"):
            continue
        builder = layer.get_attn_backend().get_builder_cls()
        support = builder.get_cudagraph_support(config, layer.get_kv_cache_spec(config))
        if support != AttentionCGSupport.ALWAYS:
            raise _NotCapturedError(f"the backend of {name} cannot be: {builder.__name__} says {support.name}")


def _offer_graphs() -> None:
    """Have the runner make our manager of graphs. It makes it after the builders."""
    from inductor_passes.vllm.full_graphs import FullStepManager

    runner: Any = sys.modules[_RUNNER]
    if not issubclass(runner.ModelCudaGraphManager, FullStepManager):
        runner.ModelCudaGraphManager = FullStepManager


def known_steps(config: Any) -> FullSteps | None:
    """What `full_steps_for` has made for an engine."""
    return _known.get(id(config.compilation_config.static_forward_context))
