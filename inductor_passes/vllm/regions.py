"""The compiled regions of this process: one for each shape of layer, made when the first such layer asks."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from inductor_passes.inspection.recorded import Recording
from inductor_passes.vllm.compiled_region import (
    CompiledRegion,
    compile_region,
    compile_region_in_one_pass,
    compile_region_with_checkpoints,
)
from inductor_passes.vllm.decline import counters
from inductor_passes.vllm.direct_region import direct_region_in_one_pass
from inductor_passes.vllm.options import Options
from inductor_passes.vllm.region_inputs import LayerShape
from inductor_passes.vllm.self_check import check_against, self_check
from inductor_passes.vllm.writing import write_down
from mamba_ops.kernels.one_pass import most_tokens

logger = logging.getLogger("vllm.mamba_ops")

_regions: dict[tuple[LayerShape, bool, Options], Region | Exception] = {}
_recordings: list[Recording] = []


# Longest sequences for which the one-pass kernels are built, ascending. Beyond them the staged kernels are as fast.
ONE_PASS_TOKENS = (32, 64)

Run = Callable[[list[Any]], Any]


class Region:
    """A compiled region as a layer uses it.

    Attributes:
        shape: of the layers. run, run_with_checkpoints: see `CompiledRegion`.
        one_pass: longest sequence, whether each must be one chunk, and `run` of the regions for short sequences; the
            first that fits is the fastest.
        row_bytes: what divides the size of a token's row in both activations.
        misaligned: bits of an address that must be zero.
    """

    __slots__ = ("misaligned", "one_pass", "row_bytes", "run", "run_with_checkpoints", "shape")

    def __init__(
        self, compiled: CompiledRegion, with_checkpoints: CompiledRegion | None, one_pass: list[CompiledRegion]
    ) -> None:
        self.shape = compiled.shape
        self.run: Run = compiled.run
        self.run_with_checkpoints: Run | None = None
        if with_checkpoints is not None:
            self.run_with_checkpoints = with_checkpoints.run
        self.one_pass = tuple((region.max_tokens or 0, region.one_chunk, region.run) for region in one_pass)
        self.row_bytes = math.gcd(self.shape.projected, self.shape.inner) * self.shape.dtype.itemsize
        self.misaligned = 0 if self.shape.device.type == "cpu" else 15

    def run_for(self, max_tokens: int, one_chunk: bool) -> Run:
        """What runs a step without checkpoints.

        Args:
            max_tokens: no sequence of the step is longer.
            one_chunk: whether each is one chunk.
        """
        for most, only_one_chunk, run in self.one_pass:
            if max_tokens <= most and (one_chunk or not only_one_chunk):
                return run
        return self.run


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
    region = _regions[key]
    if isinstance(region, Exception):
        raise region
    return region


def recordings() -> list[Recording]:
    """What there is to see of the regions with a snapshot that this process has compiled."""
    return _recordings


def _make(shape: LayerShape, checkpoints: bool, options: Options) -> Region:
    compiled = [
        compiler(shape, eliminate=options.eliminate)
        for compiler in (compile_region, *([compile_region_with_checkpoints] if checkpoints else []))
    ]
    for region in compiled:
        counters.compiled(region.report)
        _recordings.append(region.recording)
        if options.dump:
            write_down(region, Path(options.dump))
        if options.self_check:
            self_check(region)
    one_pass = _make_one_pass(compiled[0], options) if options.one_pass else []
    shortcut = f"; up to {one_pass[-1].max_tokens} new tokens run in one pass" if one_pass else ""
    logger.info("mamba_ops: Mamba2 prefill of %s compiled; %s%s", _name(shape), _outcome(compiled[0]), shortcut)
    return Region(compiled[0], compiled[1] if checkpoints else None, one_pass)


def _make_one_pass(general: CompiledRegion, options: Options) -> list[CompiledRegion]:
    made: list[CompiledRegion] = []
    # What knows that each sequence is one chunk is faster on a GPU. On a CPU both are the same code.
    row_bytes = general.shape.dstate * general.shape.dtype.itemsize
    forms = (False,) if general.shape.device.type == "cpu" else (True, False)
    try:
        for max_tokens, one_chunk in itertools.product(ONE_PASS_TOKENS, forms):
            if max_tokens <= min(general.shape.chunk_size, most_tokens(row_bytes, one_chunk)):
                region = _one_pass(general.shape, max_tokens, one_chunk, options)
                if options.dump:
                    write_down(region, Path(options.dump))
                if options.self_check:
                    check_against(region, general)
                made.append(region)
    except Exception as error:
        logger.warning("mamba_ops: short prefills of %s run in stages: %s", _name(general.shape), error)
    return made


def _one_pass(shape: LayerShape, max_tokens: int, one_chunk: bool, options: Options) -> CompiledRegion:
    if shape.device.type == "cuda":
        return direct_region_in_one_pass(shape, max_tokens, one_chunk)
    return compile_region_in_one_pass(shape, max_tokens, one_chunk)


def _name(shape: LayerShape) -> str:
    return f"{shape.nheads} heads x {shape.headdim} x {shape.dstate}"


def _outcome(compiled: CompiledRegion) -> str:
    if any(rewrite.into == "state_passing_indexed" for rewrite in compiled.report.rewrites):
        return "the snapshot of cached states is gone"
    reasons = "; ".join(str(decline) for decline in compiled.report.declines)
    return f"the snapshot of cached states has stayed: {reasons or 'the pass is off'}"
