"""Four ways to continue the sequence: eager and compiled, each with and without the copy of the state."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from demo.continuation import STATE_SHAPE, Continuation, Result
from demo.graphs import SNAPSHOT_OPS, first_run
from inductor_passes import SnapshotElimination, inductor_options
from inductor_passes.inspection.decompiling import decompiled_to
from inductor_passes.inspection.granite_layer import NUM_SLOTS, SLOT, make_layer
from inductor_passes.inspection.recorded import Recording
from inductor_passes.inspection.recording import recorded

ROUNDS = 15


@dataclass
class Run:
    """One way to continue the sequence, and what came of it.

    A compiled run has a `graph`, with the pass its `report`, and a `recording` of what was compiled.
    """

    name: str
    snapshot_nodes: tuple[str, ...]
    copied_bytes: int
    result: Result
    function: Callable[..., Tensor]
    graph: str = ""
    report: str = ""
    recording: Recording = field(default_factory=Recording)
    seconds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """Seconds of one continuation."""
        return statistics.median(self.seconds)


def run_eager(case: Continuation, device: torch.device, *, snapshot: bool) -> Run:
    """Continue without compiling: the operations that ran are counted as the nodes of a graph would be."""
    layer = make_layer(device, snapshot=snapshot)
    inputs = case.inputs()
    with CopyCounter() as counter:
        output = layer(*inputs)
    name = "eager" if snapshot else "eager, in place"
    return Run(name, tuple(counter.names), counter.copied_bytes, Result(output, inputs[2], inputs[3]), layer)


def run_compiled(case: Continuation, device: torch.device, folder: Path, *, with_pass: bool) -> Run:
    """Compile the layer that spells the snapshot, with or without the pass, and continue with it."""
    elimination, recording = SnapshotElimination(), Recording()
    options = inductor_options(elimination) if with_pass else None
    layer = torch.compile(make_layer(device), fullgraph=True, options=options)
    inputs = case.inputs()
    with decompiled_to(folder, recording.problems, recording.codes), recorded(recording):
        graph = first_run(layer, inputs, STATE_SHAPE)
    name = "compiled + pass" if with_pass else "compiled"
    result = Result(graph.output, inputs[2], inputs[3])
    report = str(elimination.report()) if with_pass else ""
    return Run(name, graph.snapshot_nodes, graph.copied_bytes, result, layer, graph.text, report, recording)


def time_interleaved(case: Continuation, runs: list[Run], progress: Callable[[], Any]) -> None:
    """Time all runs in turn, so that a machine that slows down slows all of them; the caches are copied beforehand."""
    for _ in range(ROUNDS):
        for run in runs:
            inputs = case.inputs()
            _synchronize(inputs[0].device)
            start = time.perf_counter()
            run.function(*inputs)
            _synchronize(inputs[0].device)
            run.seconds.append(time.perf_counter() - start)
        progress()


def largest_difference(a: Tensor, b: Tensor) -> float:
    """The largest absolute difference; NaN in both is none, NaN in one of them gives NaN."""
    both_nan = a.isnan() & b.isnan()
    return (a.double() - b.double()).abs().masked_fill(both_nan, 0.0).max().item()


@dataclass(frozen=True)
class Comparison:
    """A run that makes no copy of the state, beside the same run with the copy.

    Both differences are the largest absolute ones; NaN where only one of the two is NaN.
    """

    cache: str
    reference: Run
    run: Run

    @property
    def output_difference(self) -> float:
        """Of the layer's output."""
        return largest_difference(self.reference.result.output, self.run.result.output)

    @property
    def cache_difference(self) -> float:
        """Of both caches, all slots."""
        pairs = zip(self.reference.result[1:], self.run.result[1:], strict=True)
        return max((largest_difference(*pair) for pair in pairs), key=lambda value: (value != value, value))

    @property
    def holds(self) -> bool:
        """Whether only the copy is gone: results equal in every bit, finite, and nothing in a slot of nobody's."""
        reference, run = self.reference.result, self.run.result
        others = torch.arange(NUM_SLOTS) != SLOT
        return (
            bool(self.reference.snapshot_nodes)
            and not self.run.snapshot_nodes
            and self.run.copied_bytes == 0
            and all(torch.equal(_bits(a), _bits(b)) for a, b in zip(reference, run, strict=True))
            and bool(run.output.isfinite().all())
            and all(bool(cache[SLOT].isfinite().all() and cache[others].isnan().all()) for cache in run[1:])
        )


class CopyCounter(TorchDispatchMode):
    """Counts the copies of cached states that uncompiled code makes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []
        self.copied_bytes = 0

    def __torch_dispatch__(  # type: ignore[no-untyped-def]  # the signature is PyTorch's
        self, func, types, args=(), kwargs=None
    ):
        result = func(*args, **(kwargs or {}))
        is_copy = SNAPSHOT_OPS.match(str(func)) and isinstance(result, Tensor)
        if is_copy and tuple(result.shape[1:]) == STATE_SHAPE:
            self.names.append(func.__name__)
            self.copied_bytes += result.numel() * result.element_size()
        return result


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
