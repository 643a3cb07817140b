"""Switching the pass on: for a block, for one `torch.compile`, or for the process.

The pass goes into `torch._inductor.config.post_grad_custom_post_pass`, in front of whatever is there: a pass that makes
ops work in place, as vLLM's does last, would hide the versions of the cache. What was there still runs, and its own
`uuid()` stays part of the cache key. If it is a plain function, PyTorch cannot identify it and bypasses its caches, as
it does without us.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch._inductor
import torch._inductor.config
from torch._inductor.custom_graph_pass import get_custom_graph_passes

from inductor_passes.snapshot_elimination import SnapshotElimination

_SLOT = "post_grad_custom_post_pass"


@contextlib.contextmanager
def eliminate_snapshots(*, masked_gather: bool = True) -> Iterator[SnapshotElimination]:
    """Run the pass on every graph that is compiled in this block.

    `torch.compile` compiles when the function is first called, and not again for what it has compiled before: make that
    first call inside the block.

    Args:
        masked_gather: see `SnapshotElimination`.

    Yields:
        The pass; its `report()` tells what happened.
    """
    elimination = SnapshotElimination(masked_gather=masked_gather)
    with torch._inductor.config.patch({_SLOT: _in_front(elimination)}):
        yield elimination


def inductor_options(elimination: SnapshotElimination | None = None, *, mode: str | None = None) -> dict[str, Any]:
    """Options for `torch.compile(model, options=...)` that run the pass.

    Args:
        elimination: the pass to run; give one to read its `report()` later.
        mode: a mode of `torch.compile`, such as "reduce-overhead", which takes no `mode` together with `options`.
    """
    options: dict[str, Any] = dict(torch._inductor.list_mode_options(mode)) if mode is not None else {}
    return options | {_SLOT: _in_front(elimination or SnapshotElimination())}


def install(elimination: SnapshotElimination | None = None) -> SnapshotElimination:
    """Run the pass on every graph that this process compiles from now on; a pass installed before is replaced.

    Returns:
        The pass; its `report()` tells what happened.
    """
    elimination = elimination or SnapshotElimination()
    setattr(torch._inductor.config, _SLOT, _in_front(elimination))
    return elimination


def uninstall() -> None:
    """Undo `install`; other passes stay. Does nothing if the pass is not installed."""
    others = _others()
    setattr(torch._inductor.config, _SLOT, others[0] if len(others) == 1 else list(others) or None)


def _others() -> tuple[Any, ...]:
    present = get_custom_graph_passes(torch._inductor.config.post_grad_custom_post_pass)
    return tuple(other for other in present if not isinstance(other, SnapshotElimination))


def _in_front(elimination: SnapshotElimination) -> Any:
    others = _others()
    return [elimination, *others] if others else elimination
