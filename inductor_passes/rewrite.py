"""The two replacements: state passing that reads the cache itself, and the snapshot read in one launch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import optimization_hint

from inductor_passes.cache_view import has_dense_rows
from inductor_passes.emit import erase_unused, insert, trace
from inductor_passes.nodes import is_tensor, same, tensor, without_copies
from inductor_passes.report import NodeName, Rewrite
from inductor_passes.safety import Elimination
from inductor_passes.snapshots import Snapshot
from inductor_passes.state_passing_nodes import StatePassing
from mamba_ops.ops import masked_gather, state_passing_indexed


def eliminate(graph: fx.Graph, elimination: Elimination) -> Rewrite:
    """Replace snapshot, state passing and writeback by `state_passing_indexed`.

    before                                              after
        rows = index(cache, [slots])                        entering, new_cache = state_passing_indexed(
        snapshot = where(has, rows, 0)                          ..., cache, slots, has, slots)
        entering, new_cache = state_passing_update(
            ..., snapshot, cache, slots)
    """
    site, snapshot, writeback = elimination.site, elimination.snapshot, elimination.writeback
    cache, mask = writeback.cache, snapshot.mask
    needs_view = bool(writeback.new_view)

    def indexed(root: Tensor, steps: Any, tensors: Any, read: Any, write: Any, has: Tensor | None) -> tuple[Any, ...]:
        states, _, last_chunk_indices = tensors
        nseqs = last_chunk_indices.shape[0]
        view = _view(root, steps)
        if not _have_same_shape(view.shape[1:], states.shape[1:]):  # each slot as one flat row, say
            view = view.view(view.shape[0], *states.shape[1:])
        entering = state_passing_indexed(
            *tensors,
            view,
            _slots(read, nseqs, root.device),
            None if has is None or mask is None else mask.vector(has, nseqs),
            _slots(write, nseqs, root.device),
            writeback.write_empty,
        )
        return entering, root, _view(root, steps) if needs_view else root

    arguments = (
        cache.root,
        [(step.op, step.args) for step in cache.steps],
        (site.states, site.dA_cumsum, site.last_chunk_indices),
        elimination.read_slots,
        elimination.write_slots,
        None if mask is None else mask.node,
    )
    # Reinplacing does not let a Triton launch mutate a view of a graph input, it clones it; for an op it knows better.
    is_view_on_gpu = bool(cache.steps) and cache.value.device.type != "cpu"
    traced = trace(indexed, arguments, opaque=is_view_on_gpu)
    (entering, new_root, new_view), added = insert(graph, traced, site.node)
    places = ((site.entering, entering), (writeback.new_root, new_root), (writeback.new_view, new_view))
    _take_places(graph, [(old, new) for old_nodes, new in places for old in old_nodes], added)
    unused = (*writeback.new_view, *writeback.new_root, *writeback.nodes, *site.entering, *site.final_states, site.node)
    return _finish(graph, site, "state_passing_indexed", unused, added)


def gather_in_one_launch(graph: fx.Graph, site: StatePassing, snapshot: Snapshot) -> Rewrite | None:
    """Replace the gather and the mask by `masked_gather`; None if there is nothing to gain.

    before                                              after
        rows = index(cache, [slots])                        snapshot = masked_gather(cache, slots, has)
        snapshot = where(has, rows, 0)
    """
    mask, masked, slots = snapshot.mask, snapshot.masked, snapshot.slots
    if mask is None or masked is None or slots is None or not has_dense_rows(tensor(snapshot.source)):
        return None
    rows_chain = snapshot.chain[snapshot.chain.index(masked) + 1 :]
    if masked is snapshot.gather or any(len(node.users) > 1 for node in rows_chain):
        return None
    if len({tensor(node).device for node in (snapshot.source, slots, mask.node)}) > 1:
        return None
    dtypes = [tensor(node).dtype for node in (*reversed(rows_chain), masked) if is_tensor(node)]
    shape = tensor(masked).shape

    def gather(cache: Tensor, read: Tensor, has: Tensor) -> Tensor:
        nseqs = read.numel()
        rows: Tensor = masked_gather(cache, _slots(read, nseqs, cache.device), mask.vector(has, nseqs))
        for dtype in dtypes:  # zero stays zero
            rows = rows.to(dtype)
        return rows if _have_same_shape(rows.shape, shape) else rows.reshape(shape)

    traced = trace(gather, (snapshot.source, without_copies(slots), mask.node), opaque=False)
    new, added = insert(graph, traced, masked)
    _take_places(graph, [(masked, new)], added)
    return _finish(graph, site, "masked_gather", (masked,), added)


def copy_initial_states(graph: fx.Graph, site: StatePassing) -> Rewrite:
    """Let state passing start from a copy of slots that it may overwrite.

    before                                              after
        initial = slice(cache)                              initial = clone(slice(cache))
        entering, new_cache = state_passing_update(         entering, new_cache = state_passing_update(
            ..., initial, cache, slots)                         ..., initial, cache, slots)
    """
    initial = site.initial_states
    assert initial is not None
    traced = trace(lambda states: states.clone(), (initial,), opaque=False)
    copy, added = insert(graph, traced, site.node)
    arguments: Any = site.node.kwargs["kwargs"]
    site.node.update_kwarg("kwargs", {**arguments, "initial_ptr": copy})
    return _finish(graph, site, "state_passing_update on a copy of its initial states", (), added)


def _finish(graph: fx.Graph, site: StatePassing, into: str, old: Iterable[fx.Node], added: list[fx.Node]) -> Rewrite:
    assert site.initial_states is not None
    snapshot = tensor(site.initial_states)
    name = NodeName.of(site.node)
    removed = erase_unused(graph, *old)
    return Rewrite(
        name,
        into,
        tuple(NodeName.of(node) for node in reversed(removed) if node not in added),
        tuple(NodeName.of(node) for node in added if node not in removed),
        optimization_hint(snapshot.numel()) * snapshot.element_size(),
    )


def _take_places(graph: fx.Graph, places: list[tuple[fx.Node, fx.Node]], added: list[fx.Node]) -> None:
    """Let new nodes be used in the place of old ones, all of them or, if one does not fit, none."""
    for old, new in places:
        was, now = tensor(old), tensor(new)
        if (was.dtype, was.device) != (now.dtype, now.device) or not _have_same_shape(was.shape, now.shape):
            erase_unused(graph, *reversed(added))
            raise AssertionError(f"{new} ({now.dtype}, {now.shape}) does not fit in the place of {old} ({was.dtype})")
    for old, new in places:
        old.replace_all_uses_with(new)
        new.meta["val"] = old.meta["val"]  # views of it share its fake storage


def _have_same_shape(a: torch.Size, b: torch.Size) -> bool:
    return len(a) == len(b) and all(same(n, m) for n, m in zip(a, b, strict=True))


def _view(tensor: Tensor, steps: Any) -> Tensor:
    for op, args in steps:
        tensor = op(tensor, *args)
    return tensor


def _slots(slots: Any, nseqs: Any, device: torch.device) -> Tensor:
    if isinstance(slots, Tensor):
        return slots if slots.dim() == 1 else slots.reshape(nseqs)
    return torch.arange(slots, slots + nseqs, dtype=torch.int64, device=device)
