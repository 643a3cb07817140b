"""The compiled regions of this process: one for each shape of layer, made when the first such layer asks."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from inductor_passes.vllm.compiled_region import CompiledRegion, compile_region, compile_region_with_checkpoints
from inductor_passes.vllm.decline import counters
from inductor_passes.vllm.options import Options
from inductor_passes.vllm.region import LayerShape
from inductor_passes.vllm.self_check import self_check
from inductor_passes.vllm.writing import write_down

logger = logging.getLogger("vllm.mamba_ops")

_regions: dict[tuple[LayerShape, bool, Options], Region | Exception] = {}


class Region:
    """A compiled region as a layer uses it.

    Attributes:
        shape: of the layers. run, run_with_checkpoints: see `CompiledRegion`.
        row_bytes: what divides the size of a token's row in both activations.
        misaligned: bits of an address that must be zero.
    """

    __slots__ = ("misaligned", "row_bytes", "run", "run_with_checkpoints", "shape")

    def __init__(self, compiled: CompiledRegion, with_checkpoints: CompiledRegion | None) -> None:
        self.shape = compiled.shape
        self.run: Callable[[list[Any]], Any] = compiled.run
        self.run_with_checkpoints: Callable[[list[Any]], Any] | None = None
        if with_checkpoints is not None:
            self.run_with_checkpoints = with_checkpoints.run
        self.row_bytes = math.gcd(self.shape.projected, self.shape.inner) * self.shape.dtype.itemsize
        self.misaligned = 0 if self.shape.device.type == "cpu" else 15


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


def _make(shape: LayerShape, checkpoints: bool, options: Options) -> Region:
    compiled = [
        compiler(shape, eliminate=options.eliminate, cpp_host_code=options.cpp_host_code)
        for compiler in (compile_region, *([compile_region_with_checkpoints] if checkpoints else []))
    ]
    for region in compiled:
        counters.compiled(region.report)
        if options.dump:
            write_down(region, Path(options.dump))
        if options.self_check:
            self_check(region)
    logger.info("mamba_ops: Mamba2 prefill of %s compiled; %s", _name(shape), _outcome(compiled[0]))
    return Region(compiled[0], compiled[1] if checkpoints else None)


def _name(shape: LayerShape) -> str:
    return f"{shape.nheads} heads x {shape.headdim} x {shape.dstate}"


def _outcome(compiled: CompiledRegion) -> str:
    if any(rewrite.into == "state_passing_indexed" for rewrite in compiled.report.rewrites):
        return "the snapshot of cached states is gone"
    reasons = "; ".join(str(decline) for decline in compiled.report.declines)
    return f"the snapshot of cached states has stayed: {reasons or 'the pass is off'}"
