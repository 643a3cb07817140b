"""Looking on while graphs are compiled, without a say in it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch._functorch.config
import torch._inductor.config
from torch import fx
from torch._inductor.graph import GraphLowering

from inductor_passes.inspection.describing import describe
from inductor_passes.inspection.recorded import Change, Recording
from inductor_passes.observing import observed_by
from inductor_passes.report import GraphReport


@contextlib.contextmanager
def recorded(recording: Recording, *, title: str = "", inputs: Sequence[str] = ()) -> Iterator[None]:
    """Keep what is compiled in this block: the graphs that the pass gets and leaves, and all generated code.

    Args:
        recording: where it goes.
        title: what the graphs are called.
        inputs: what their inputs are called, where Dynamo does not know.
    """

    def keep_graph(graph: fx.Graph) -> Callable[[GraphReport], None]:
        before = describe(graph, inputs)

        def finish(report: GraphReport) -> None:
            recording.changes.append(Change(before, describe(graph, inputs), report, title))

        return finish

    with observed_by(keep_graph), _code_kept(recording):
        yield


@contextlib.contextmanager
def without_caches() -> Iterator[None]:
    """Compile what is compiled in this block: from a cache would come finished code, without its graph."""
    with (
        torch._inductor.config.patch(fx_graph_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
    ):
        yield


@contextlib.contextmanager
def _code_kept(recording: Recording) -> Iterator[None]:
    others = getattr(GraphLowering, "save_output_code", None)

    def keep_code(code: str) -> None:
        if recording.changes and recording.changes[-1].code is None:
            recording.changes[-1].code = len(recording.codes)
        recording.codes.append(code)
        if others is not None:
            others(code)

    GraphLowering.save_output_code = keep_code
    try:
        yield
    finally:
        GraphLowering.save_output_code = others
