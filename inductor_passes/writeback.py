"""How final states reach the cache, and which nodes hold the cache afterwards.

A cache that is a view (`view = base[1:5]`) is written in two steps on a functional graph: a node that holds the new
view, and a scatter that puts it back into the base. `writeback_over` follows them to the new version of the base.
"""

from __future__ import annotations

import dataclasses

from torch import fx

from inductor_passes.cache_view import CacheView
from inductor_passes.nodes import (
    SAME_ORDER,
    ViewStep,
    aten,
    have_same_layout,
    input_of,
    is_call,
    is_view,
    tensor,
    view_chain,
    view_step,
)

_SCATTER_OF_VIEW = {
    aten.slice.Tensor: aten.slice_scatter.default,
    aten.select.int: aten.select_scatter.default,
    aten.as_strided.default: aten.as_strided_scatter.default,
}


@dataclasses.dataclass(frozen=True)
class Writeback:
    """How the final states reach the cache.

    Attributes:
        nodes: the nodes that write.
        cache: the version of the cache that is written over.
        slots: the slots that are written; None if the view is overwritten as a whole, one row a sequence.
        new_view: nodes that hold the same view of the new version.
        new_root: nodes that hold the new version of the whole tensor.
        write_empty: whether a sequence without chunks writes its initial state too.
    """

    nodes: tuple[fx.Node, ...]
    cache: CacheView
    slots: fx.Node | None
    new_view: tuple[fx.Node, ...]
    new_root: tuple[fx.Node, ...]
    write_empty: bool


def writeback_over(
    base: fx.Node,
    new: tuple[fx.Node, ...],
    writers: tuple[fx.Node, ...],
    slots: fx.Node | None,
    *,
    steps: tuple[ViewStep, ...] = (),
    write_empty: bool,
) -> Writeback:
    """Writeback to a view (`steps`) of what node `base` holds, of which `new` is the new version."""
    _, views = view_chain(base)
    scatters = _scatters(new[0], views) if len(new) == 1 and not (steps and len(new[0].users) > 1) else None
    if scatters is None:  # the base is as far as it can be followed
        here = CacheView(base, (), tensor(base)).then(*steps)
        return Writeback(writers, here, slots, (), new, write_empty)
    cache = CacheView.of(base).then(*steps)
    if not scatters:
        return Writeback(writers, cache, slots, (), new, write_empty)
    new_view = () if steps else new
    return Writeback((*writers, *scatters), cache, slots, new_view, (scatters[-1],), write_empty)


def _scatters(new: fx.Node, views: list[fx.Node]) -> list[fx.Node] | None:
    """The nodes that put the new version of a view back into what it is a view of, out to the root."""
    scatters: list[fx.Node] = []
    for view in reversed(views):
        if scatters and len(new.users) > 1:
            return None
        undoing = [user for user in new.users if _undoes(user, new, view)]
        if len(undoing) != 1:
            return None
        new = undoing[0]
        scatters.append(new)
    return scatters


def _undoes(node: fx.Node, new: fx.Node, view: fx.Node) -> bool:
    step = view_step(view)
    assert step is not None
    base, make = step
    if make.op in _SCATTER_OF_VIEW:
        is_scatter = is_call(node, _SCATTER_OF_VIEW[make.op]) and node.args[1] is new
        return is_scatter and node.args[2:] == make.args and _hold_same_tensor(input_of(node), base)
    return is_call(node, *SAME_ORDER) and is_view(node) and tensor(node).shape == tensor(base).shape


def _hold_same_tensor(a: fx.Node, b: fx.Node) -> bool:
    return a is b or (view_chain(a)[0] is view_chain(b)[0] and have_same_layout(tensor(a), tensor(b)))
