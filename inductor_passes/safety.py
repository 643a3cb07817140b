"""The proof that a snapshot may go.

The graph is functional, so every version of the cache is its own node. Reading the rows inside state passing gives the
same values as the snapshot if the rows come from the very version that state passing writes over, no cast on the way
loses a value, and no sequence reads a slot that another one writes.
"""

from __future__ import annotations

import dataclasses

from torch import fx

from inductor_passes.cache_view import are_same_slots, first_slot, has_dense_rows
from inductor_passes.declined import Declined, require
from inductor_passes.nodes import (
    ancestors,
    aten,
    hold_same_numbers,
    is_call,
    is_exact,
    is_tensor,
    readers,
    same,
    tensor,
    view_chain,
    without_copies,
)
from inductor_passes.report import Condition
from inductor_passes.snapshots import Snapshot
from inductor_passes.state_passing_nodes import StatePassing
from inductor_passes.writeback import Writeback


@dataclasses.dataclass(frozen=True)
class Elimination:
    """A proved rewrite.

    Attributes:
        read_slots, write_slots: a node of slots, or the first of a run of them.
    """

    site: StatePassing
    snapshot: Snapshot
    writeback: Writeback
    read_slots: fx.Node | int
    write_slots: fx.Node | int


def check_values(snapshot: Snapshot) -> None:
    """Decline unless the snapshot's rows are what the cache holds."""
    is_dense = snapshot.slots is None or has_dense_rows(tensor(snapshot.source))
    require(is_dense, Condition.ROWS_NOT_DENSE, snapshot.source)
    dtype = tensor(snapshot.source).dtype
    for node in reversed(snapshot.chain):
        keeps = not is_tensor(node) or is_exact(dtype, tensor(node).dtype)  # a launch holds no tensor itself
        require(keeps, Condition.INEXACT_CAST, node)


def prove(site: StatePassing, snapshot: Snapshot, writeback: Writeback) -> Elimination:
    """Show that state passing may read the cache itself, or `Declined`."""
    _check_version(site, snapshot, writeback)
    cache = writeback.cache.value
    require(has_dense_rows(cache), Condition.ROWS_NOT_DENSE, *writeback.nodes)
    require(site.state_dtype == cache.dtype, Condition.STATE_DTYPE, *writeback.nodes)
    elimination = Elimination(
        site,
        snapshot,
        writeback,
        _read_slots(site, snapshot, writeback),
        0 if writeback.slots is None else writeback.slots,
    )
    _check_arguments(elimination)
    _check_users(site, snapshot)
    _check_crossing(elimination)
    if site.writeback is None:
        _check_order(elimination)
    return elimination


def _check_version(site: StatePassing, snapshot: Snapshot, writeback: Writeback) -> None:
    (read, read_views), (written, written_views) = view_chain(snapshot.source), view_chain(writeback.cache.root)
    recast = [view for view in (*read_views, *written_views) if is_call(view, aten.view.dtype)]
    require(not recast, Condition.VIEWED_AS_OTHER_DTYPE, *recast)
    if read is written:
        return
    before_written = ancestors(written)
    if read in before_written:
        is_later = site.node in before_written
        raise Declined(Condition.CACHE_WRITTEN_AFTER_SCAN if is_later else Condition.CACHE_CHANGED, read, written)
    is_read = snapshot.slots is not None or snapshot.mask is not None
    raise Declined(Condition.OTHER_CACHE if is_read else Condition.NOT_A_SNAPSHOT, read, written)


def _read_slots(site: StatePassing, snapshot: Snapshot, writeback: Writeback) -> fx.Node | int:
    source, cache = tensor(snapshot.source), writeback.cache.value
    if snapshot.slots is not None:
        require(are_same_slots(source, cache), Condition.OTHER_CACHE, snapshot.source)
        return without_copies(snapshot.slots)
    first = first_slot(source, cache, site.nseqs)
    if first is None:
        raise Declined(Condition.OTHER_CACHE, snapshot.source)
    return first


def _check_arguments(elimination: Elimination) -> None:
    """The op takes tensors of one device, and none may change under it as it writes the cache."""
    site, mask, cache = elimination.site, elimination.snapshot.mask, elimination.writeback.cache
    slots = [slots for slots in (elimination.read_slots, elimination.write_slots) if isinstance(slots, fx.Node)]
    new = [*slots, mask.node] if mask is not None else slots
    root = view_chain(cache.root)[0]
    for node in (site.states, site.dA_cumsum, site.last_chunk_indices, *new):
        require(tensor(node).device == cache.value.device, Condition.OTHER_DEVICE, node)
        require(view_chain(node)[0] is not root, Condition.ARGUMENT_OF_CACHE, node)


def _check_users(site: StatePassing, snapshot: Snapshot) -> None:
    require(bool(snapshot.chain), Condition.NOT_A_SNAPSHOT, snapshot.source)
    is_snapshot = True  # from the initial states back to the mask; what lies before is bare rows
    for node, user in zip(snapshot.chain, (site.node, *snapshot.chain), strict=False):
        others = [other for other in node.users if other is not user]
        is_returned = any(other.op == "output" for other in others)
        used = Condition.SNAPSHOT_RETURNED if is_returned else Condition.SNAPSHOT_USED_ELSEWHERE
        require(not others, used if is_snapshot else Condition.ROWS_USED_ELSEWHERE, node, *others)
        is_snapshot &= node is not snapshot.masked


def _check_crossing(elimination: Elimination) -> None:
    read, write = elimination.read_slots, elimination.write_slots
    if same(elimination.site.nseqs, 1):  # the only sequence reads before it writes
        return
    if isinstance(read, fx.Node) and isinstance(write, fx.Node):
        is_own_slot = hold_same_numbers(read, write)
    else:
        is_own_slot = read == write
    slots = [slots for slots in (read, write) if isinstance(slots, fx.Node)]
    require(is_own_slot, Condition.CROSSED_SLOTS, *slots)


def _check_order(elimination: Elimination) -> None:
    """In the older form the write moves up to the scan: nothing may need the old cache in between."""
    site, writeback = elimination.site, elimination.writeback
    slots = elimination.write_slots
    if isinstance(slots, fx.Node):
        require(site.node not in ancestors(slots), Condition.WRITE_SLOTS_TOO_LATE, slots)
    before = ancestors(site.node)
    root = view_chain(writeback.cache.root)[0]
    for reader in readers(root):
        is_copy_back = is_call(reader, aten.copy_.default) and reader.args[0] is root
        require(reader in before or reader in writeback.nodes or is_copy_back, Condition.CACHE_READ_LATER, reader)
