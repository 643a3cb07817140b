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
    INDEX_DTYPES,
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
    passed: list[fx.Node] = []
    while True:
        users = list(final.users)
        require(len(users) < 2, Condition.FINAL_STATES_USED_ELSEWHERE, *users)
        require(len(users) == 1, Condition.NOT_WRITTEN_BACK)
        user = users[0]
        if not _passes_on(user, final, site):
            return _writeback_by(user, final, site, tuple(passed))
        passed.append(user)
        final = user


def _passes_on(node: fx.Node, final: fx.Node, site: StatePassing) -> bool:
    """Whether a node holds the final states again, before they are written."""
    is_copied = is_call(node, aten.copy.default) and node.args[1] is final  # into a tensor that is overwritten whole
    if is_copied or is_call(node, *CASTS):
        require(is_exact(site.state_dtype, tensor(node).dtype), Condition.INEXACT_CAST, node)
        return same(tensor(node).numel(), tensor(final).numel())
    return is_call(node, *SAME_ORDER) or (is_call(node, aten.select.int) and same(site.nseqs, 1))


def _writeback_by(node: fx.Node, final: fx.Node, site: StatePassing, passed: tuple[fx.Node, ...]) -> Writeback:
    writers = (*passed, node)
    if is_call(node, aten.index_put.default):
        base, slots = _indexed(node, final, site)
        return writeback_over(base, (node,), writers, slots, write_empty=True)
    if is_call(node, aten.slice_scatter.default, aten.select_scatter.default) and node.args[1] is final:
        dim, *where = node.args[2:] or (0,)
        require(bool(dim == 0), Condition.NOT_WRITTEN_BACK, node)
        steps: tuple[ViewStep, ...] = (ViewStep(aten.slice.Tensor, (0, *where)),)
        if is_call(node, aten.select_scatter.default):
            steps = (ViewStep(aten.select.int, (0, *where)), ViewStep(aten.unsqueeze.default, (0,)))
        return writeback_over(input_of(node), (node,), writers, None, steps=steps, write_empty=True)
    if is_call(node, aten.copy_.default) and node.args[1] is final:
        return writeback_over(input_of(node), (final,), writers, None, write_empty=True)
    raise Declined(Condition.NOT_WRITTEN_BACK, node)


def _indexed(node: fx.Node, final: fx.Node, site: StatePassing) -> tuple[fx.Node, fx.Node]:
    """Cache and slots of an `index_put` that writes a row for each sequence."""
    base, indices, value, *accumulate = node.args
    assert isinstance(base, fx.Node)
    assert isinstance(indices, list | tuple)
    slots, *others = indices
    is_row_write = value is final and is_tensor(slots) and all(other is None for other in others)
    require(is_row_write, Condition.NOT_WRITTEN_BACK, node)
    assert isinstance(slots, fx.Node)
    require(tensor(slots).dtype in INDEX_DTYPES, Condition.NOT_WRITTEN_BACK, node)
    nrows, nelements = tensor(slots).numel(), tensor(final).numel()
    writes_all = same(nrows, site.nseqs) and same(nelements, site.nseqs * row_size(tensor(base)))
    require(writes_all, Condition.NOT_WRITTEN_BACK, node)
    require(not any(accumulate), Condition.WRITEBACK_ACCUMULATES, node)
    return base, slots
