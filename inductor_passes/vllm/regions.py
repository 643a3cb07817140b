"""The compiled regions of this process: one for each shape of layer, made when the first such layer asks."""

from __future__ import annotations

import functools
import itertools
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch

from inductor_passes.inspection.recorded import Recording
from inductor_passes.vllm.compile_ahead import compiled_beside, launches
from inductor_passes.vllm.compiled_region import (
    CompiledRegion,
    compile_region,
    compile_region_in_one_pass,
    compile_region_with_checkpoints,
)
from inductor_passes.vllm.decline import counters
from inductor_passes.vllm.direct_launches import sequences_for_heads
from inductor_passes.vllm.direct_region import direct_region, direct_region_in_one_pass, direct_region_of_heads
from inductor_passes.vllm.options import Options
from inductor_passes.vllm.region_inputs import LayerShape
from inductor_passes.vllm.self_check import check_against, self_check
from inductor_passes.vllm.workspace import KEPT
from inductor_passes.vllm.writing import write_down
from mamba_ops.kernels.one_pass import most_tokens

logger = logging.getLogger("vllm.mamba_ops")

_regions: dict[tuple[LayerShape, bool, Options], Region | Exception] = {}
_recordings: list[Recording] = []


# Longest sequences for which the one-pass kernels are built, ascending. Beyond them the staged kernels are as fast.
ONE_PASS_TOKENS = (32, 64)
# Beyond so many chunks a GPU takes longer over them than the host takes to launch the kernels in any way.
MOST_DIRECT_CHUNKS = 64


class Region:
    """A compiled region as a layer uses it.

    Attributes:
        shape: of the layers.
        keeps_checkpoints: whether a step may keep states in the middle of a prefill.
        in_full_step: for short steps that are captured as one graph, or None. They are launched by address.
        row_bytes: what divides the size of a token's row in both activations.
        projected_bytes, out_bytes: of a token's row in either.
        misaligned: bits of an address that must be zero.
    """

    __slots__ = (
        "_choices",
        "_general",
        "_staged",
        "_with_checkpoints",
        "in_full_step",
        "keeps_checkpoints",
        "misaligned",
        "out_bytes",
        "projected_bytes",
        "row_bytes",
        "shape",
    )

    def __init__(
        self,
        general: CompiledRegion,
        with_checkpoints: list[CompiledRegion],
        one_pass: list[CompiledRegion],
        of_heads: CompiledRegion | None,
        staged: CompiledRegion | None,
    ) -> None:
        self.shape = shape = general.shape
        self._general, self._staged = general, staged
        self._with_checkpoints, self.keeps_checkpoints = with_checkpoints, bool(with_checkpoints)
        with_edges = (each for each in reversed(one_pass) if each.direct and not each.one_chunk)
        self.in_full_step = next(with_edges, None)
        choices = [(region.max_tokens or 0, region.one_chunk, 0, region) for region in one_pass]
        if of_heads is not None:
            least = sequences_for_heads(shape, of_heads.max_tokens or 0) or 0
            choices.insert(0, (of_heads.max_tokens or 0, True, least, of_heads))
        self._choices = tuple(choices)
        self.projected_bytes = shape.projected * shape.dtype.itemsize
        self.out_bytes = shape.inner * shape.dtype.itemsize
        self.row_bytes = math.gcd(self.projected_bytes, self.out_bytes)
        self.misaligned = 0 if shape.device.type == "cpu" else 15

    def for_step(self, max_tokens: int, one_chunk: bool, nchunks: int) -> CompiledRegion:
        """The fastest for a step without checkpoints.

        Args:
            max_tokens: no sequence of the step is longer.
            one_chunk: whether each is one chunk, so that there are `nchunks` sequences.
            nchunks: of all of them.
        """
        for most, only_one_chunk, least, region in self._choices:
            if max_tokens <= most and least <= nchunks and (one_chunk or not only_one_chunk):
                return region
        if self._staged is not None and nchunks <= MOST_DIRECT_CHUNKS:
            return self._staged
        return self._general

    def for_step_with_checkpoints(self, max_tokens: int) -> CompiledRegion:
        """The fastest for a step with checkpoints, where it `keeps_checkpoints`."""
        fits = (
            region for region in self._with_checkpoints if region.max_tokens is None or max_tokens <= region.max_tokens
        )
        return next(fits)


def region_for(shape: LayerShape, checkpoints: bool, options: Options) -> Region:
    """The region for layers of this shape, compiled on the first call.

    Args:
        shape: of the layers.
        checkpoints: whether a step may keep states in the middle of a prefill.
        options: the user's.

    Raises:
        Exception: why there is none; the same one for every layer of the shape.
    """
    key = (shape, checkpoints, options)
    if key not in _regions:
        try:
            _regions[key] = _make(*key)
        except Exception as error:
            _regions[key] = error
        if shape.device.type == "cuda":
            # What the checks used: vLLM does not always give it back, and graphs are captured into memory of their own.
            torch.accelerator.empty_cache()
    region = _regions[key]
    if isinstance(region, Exception):
        raise region
    return region


def recordings() -> list[Recording]:
    """What there is to see of the regions with a snapshot that this process has compiled."""
    return _recordings


def _make(shape: LayerShape, checkpoints: bool, options: Options) -> Region:
    began = time.monotonic()
    forms = tuple(_one_pass_forms(shape)) if options.one_pass and options.eliminate else ()
    by_address = options.direct and options.eliminate and shape.device.type == "cuda"
    makes = launches(shape, forms, checkpoints) if by_address else ()
    with compiled_beside(makes, shape.device):
        compiled = compile_region(shape, eliminate=options.eliminate)
    general = _checked(compiled, options)
    compiler = direct_region_in_one_pass if by_address else compile_region_in_one_pass
    one_pass = _tried((functools.partial(compiler, shape, *form) for form in forms), general, options)
    of_heads, staged, with_checkpoints = None, None, []
    if by_address:
        if one_pass and sequences_for_heads(shape, ONE_PASS_TOKENS[0]) is not None:
            # First with all heads of a group in a program, as only steps of many more sequences than a check has.
            chosen = (shape.nheads // shape.ngroups, None)
            makers = [functools.partial(direct_region_of_heads, shape, ONE_PASS_TOKENS[0], heads) for heads in chosen]
            of_heads = next(iter(_tried(makers, general, options)[1:]), None)
        staged = next(iter(_tried([lambda: direct_region(shape)], general, options)), None)
        if checkpoints:
            with_checkpoints = _launched_with_checkpoints(shape, one_pass, general, options)
    if checkpoints and not with_checkpoints:
        compiled = _checked(compile_region_with_checkpoints(shape, eliminate=options.eliminate), options)
        if options.self_check:
            check_against(compiled, general)
        with_checkpoints = [compiled]
    shortcut = f"; up to {one_pass[-1].max_tokens} new tokens run in one pass" if one_pass else ""
    memory = f"; at most {KEPT >> 20} MiB of GPU memory kept for each stream" if by_address else ""
    name, seconds, how = _name(shape), time.monotonic() - began, f"{_outcome(general)}{shortcut}{memory}"
    logger.info("mamba_ops: Mamba2 prefill of %s compiled in %.0f s; %s", name, seconds, how)
    return Region(general, with_checkpoints, one_pass, of_heads, staged)


def _checked(region: CompiledRegion, options: Options) -> CompiledRegion:
    counters.compiled(region.report)
    _recordings.append(region.recording)
    if options.dump:
        write_down(region, Path(options.dump))
    if options.self_check:
        self_check(region)
    return region


def _launched_with_checkpoints(
    shape: LayerShape, one_pass: list[CompiledRegion], general: CompiledRegion, options: Options
) -> list[CompiledRegion]:
    """By the number of tokens that they take, the last any number; empty if there are none, or not for any number."""
    any_length = _tried([lambda: direct_region(shape, checkpoints=True)], general, options)
    if not any_length:
        return []
    lengths = [region.max_tokens for region in one_pass if region.max_tokens and not region.one_chunk]
    makers = [functools.partial(direct_region_in_one_pass, shape, most, False, checkpoints=True) for most in lengths]
    return _tried(makers, general, options) + any_length


def _tried(
    makers: Iterable[Callable[[], CompiledRegion]], general: CompiledRegion, options: Options
) -> list[CompiledRegion]:
    """The faster regions that there are, up to the first that fails or differs from the general one."""
    made: list[CompiledRegion] = []
    try:
        for make in makers:
            region = make()
            if options.dump:
                write_down(region, Path(options.dump))
            if options.self_check:
                check_against(region, general)
            made.append(region)
    except Exception as error:
        logger.warning("mamba_ops: some prefills of %s take a slower way: %s", _name(general.shape), error)
    return made


def _one_pass_forms(shape: LayerShape) -> Iterator[tuple[int, bool]]:
    """The most tokens of a sequence, and whether each is one chunk."""
    # What knows that each sequence is one chunk is faster on a GPU. On a CPU both are the same code.
    row_bytes = shape.dstate * shape.dtype.itemsize
    forms = (False,) if shape.device.type == "cpu" else (True, False)
    for max_tokens, one_chunk in itertools.product(ONE_PASS_TOKENS, forms):
        if max_tokens <= min(shape.chunk_size, most_tokens(row_bytes, one_chunk)):
            yield max_tokens, one_chunk


def _name(shape: LayerShape) -> str:
    return f"{shape.nheads} heads x {shape.headdim} x {shape.dstate}"


def _outcome(compiled: CompiledRegion) -> str:
    if any(rewrite.into == "state_passing_indexed" for rewrite in compiled.report.rewrites):
        return "the snapshot of cached states is gone"
    reasons = "; ".join(str(decline) for decline in compiled.report.declines)
    return f"the snapshot of cached states has stayed: {reasons or 'the pass is off'}"
