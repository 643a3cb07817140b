"""The older form: final states that state passing returns and a later node writes to the cache.

Written by:

cache[slots] = final             index_put (also from index_copy)
cache[2:4].copy_(final)          slice_scatter, or select_scatter for one slot
cache.copy_(final)               copy_, for a cache with one row a sequence
"""

from __future__ import annotations

from torch import fx

from inductor_passes.cache_view import row_size
from inductor_passes.declined import Declined, require
from inductor_passes.nodes import (
    CASTS,
    SAME_ORDER,
    ViewStep,
    aten,
    input_of,
    is_call,
    is_exact,
    is_tensor,
    same,
    tensor,
)
from inductor_passes.report import Condition
from inductor_passes.state_passing_nodes import StatePassing
from inductor_passes.writeback import Writeback, writeback_over


def find_writeback(site: StatePassing) -> Writeback:
    """The node that writes the final states, all of them and nothing else, or `Declined`."""
    require(len(site.final_states) == 1, Condition.NOT_WRITTEN_BACK, *site.final_states)
    final = site.final_states[0]
    while True:
        users = list(final.users)
        require(len(users) < 2, Condition.FINAL_STATES_USED_ELSEWHERE, *users)
        require(len(users) == 1, Condition.NOT_WRITTEN_BACK)
        user = users[0]
        if is_call(user, *CASTS):
            require(is_exact(site.state_dtype, tensor(user).dtype), Condition.INEXACT_CAST, user)
        elif not (is_call(user, *SAME_ORDER) or (is_call(user, aten.select.int) and same(site.nseqs, 1))):
            break
        final = user
    return _writeback_by(user, final, site)


def _writeback_by(node: fx.Node, final: fx.Node, site: StatePassing) -> Writeback:
    if is_call(node, aten.index_put.default):
        return _by_index(node, final, site)
    if is_call(node, aten.slice_scatter.default, aten.select_scatter.default) and node.args[1] is final:
        _, _, dim, *where = node.args
        require(bool(dim == 0), Condition.NOT_WRITTEN_BACK, node)
        steps: tuple[ViewStep, ...]
        if is_call(node, aten.select_scatter.default):
            steps = (ViewStep(aten.select.int, (0, *where)), ViewStep(aten.unsqueeze.default, (0,)))
        else:
            steps = (ViewStep(aten.slice.Tensor, (0, *where)),)
        return writeback_over(input_of(node), (node,), (node,), None, steps=steps, write_empty=True)
    if is_call(node, aten.copy_.default) and node.args[1] is final:
        return writeback_over(input_of(node), (final,), (node,), None, write_empty=True)
    raise Declined(Condition.NOT_WRITTEN_BACK, node)


def _by_index(node: fx.Node, final: fx.Node, site: StatePassing) -> Writeback:
    base, indices, value, *accumulate = node.args
    assert isinstance(base, fx.Node)
    assert isinstance(indices, list | tuple)
    slots, *others = indices
    is_row_write = (
        value is final and isinstance(slots, fx.Node) and is_tensor(slots) and all(other is None for other in others)
    )
    require(is_row_write, Condition.NOT_WRITTEN_BACK, node)
    assert isinstance(slots, fx.Node)
    nrows, nelements = tensor(slots).numel(), tensor(final).numel()
    writes_all = same(nrows, site.nseqs) and same(nelements, site.nseqs * row_size(tensor(base)))
    require(writes_all, Condition.NOT_WRITTEN_BACK, node)
    require(not any(accumulate), Condition.WRITEBACK_ACCUMULATES, node)
    return writeback_over(base, (node,), (node,), slots, write_empty=True)
