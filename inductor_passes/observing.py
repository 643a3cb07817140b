"""Watching the pass: who looks on sees every graph before and after it, whichever way the pass was switched on.

An observer cannot break a compilation: what it raises is logged.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator

from torch import fx

from inductor_passes.report import GraphReport

logger = logging.getLogger("inductor_passes")

# Takes the graph as the pass gets it; what it returns takes the pass's report once the graph is rewritten.
Observer = Callable[[fx.Graph], Callable[[GraphReport], None]]

_observers: list[Observer] = []
_suspensions: list[None] = []


@contextlib.contextmanager
def observed_by(observer: Observer) -> Iterator[None]:
    """Show the observer every graph that the pass gets in this block."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


@contextlib.contextmanager
def suspended() -> Iterator[None]:
    """Let every instance of the pass leave graphs alone in this block, and report nothing.

    Compile caches do not know of it: a block that compiles must do without them.
    """
    _suspensions.append(None)
    try:
        yield
    finally:
        _suspensions.pop()


def is_suspended() -> bool:
    """Whether the pass is to leave graphs alone."""
    return bool(_suspensions)


def watch(graph: fx.Graph) -> Callable[[GraphReport], None]:
    """Show a graph to all observers; call the result with the report when the graph is rewritten."""
    waiting: list[Callable[[GraphReport], None]] = []
    for observer in _observers:
        with _logged():
            waiting.append(observer(graph))

    def finish(report: GraphReport) -> None:
        for rest in waiting:
            with _logged():
                rest(report)

    return finish


@contextlib.contextmanager
def _logged() -> Iterator[None]:
    try:
        yield
    except Exception:
        logger.warning("a graph could not be looked at; its compilation goes on", exc_info=True)
