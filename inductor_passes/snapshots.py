"""Recognising the snapshot: the rows of a state cache, gathered and masked before a scan starts from them.

    rows = cache[slots]                                   index, index_select, embedding; or a plain slice of slots
    snapshot = where(has[:, None, None, None], rows, 0)   where, masked_fill, rows[~has] = 0; or no mask at all

Between these, and after them, there may be views that keep the order of the elements, copies, and casts. The mask may
be inverted, unsqueezed, viewed and expanded in any order. Our own `masked_gather` is a snapshot too.
"""

from __future__ import annotations

import dataclasses
import math
import operator

import torch
from torch import fx

from inductor_passes.declined import Declined, require
from inductor_passes.masks import SequenceMask, broadcast_mask, index_mask
from inductor_passes.nodes import (
    CASTS,
    INDEX_DTYPES,
    SAME_ORDER,
    aten,
    input_of,
    is_call,
    is_tensor,
    same,
    scalar,
    tensor,
)
from inductor_passes.opened_ops import kernel_arguments, op_arguments
from inductor_passes.report import Condition
from mamba_ops.kernels.masked_gather import masked_gather_kernel


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """A snapshot and how it was made.

    Attributes:
        chain: the nodes from the initial states back to the one that reads the cache, each an input of the one before;
            empty if the initial states are a view of the cache.
        source: the cache, or the view of it, that is read.
        gather: the node of the chain that takes the rows; None if `source` is the rows themselves.
        slots: the slots that are read, if there is a gather.
        masked: the node of the chain that applies the mask.
        mask: one boolean a sequence; None if every sequence has an initial state.
    """

    chain: tuple[fx.Node, ...]
    source: fx.Node
    gather: fx.Node | None
    slots: fx.Node | None
    masked: fx.Node | None
    mask: SequenceMask | None


def read_snapshot(initial_states: fx.Node, nseqs: int | torch.SymInt) -> Snapshot:
    """The snapshot that state passing starts from, or `Declined` with what it starts from instead."""
    chain: list[fx.Node] = []
    masked: fx.Node | None = None
    mask: SequenceMask | None = None
    node = initial_states
    while (fill := _fill_of(node)) is not None or is_call(node, *SAME_ORDER, *CASTS):
        if fill is None:
            chain.append(node)
            node = input_of(node)
            continue
        require(masked is None, Condition.NOT_A_SNAPSHOT, node)
        value = scalar(fill.value)
        is_zero = value is not None and value == 0.0 and math.copysign(1.0, value) > 0.0
        require(is_zero, Condition.FILL_NOT_ZERO, node)
        mask = (index_mask if fill.is_indexed else broadcast_mask)(fill.mask, fill.keeps, node, nseqs)
        chain.append(node)
        masked, node = node, fill.rows

    gather = _gather_of(node)
    if gather is None:
        _refuse_product(node)
        return Snapshot(tuple(chain), node, None, None, masked, mask)
    chain += gather.nodes
    if gather.mask is not None:
        require(masked is None, Condition.NOT_A_SNAPSHOT, node)
        masked, mask = node, SequenceMask(gather.mask, keeps=True)
    require(same(tensor(gather.slots).numel(), nseqs), Condition.ROW_COUNT, gather.slots)
    return Snapshot(tuple(chain), gather.source, node, gather.slots, masked, mask)


@dataclasses.dataclass(frozen=True)
class _Fill:
    rows: fx.Node
    mask: fx.Node
    keeps: bool  # whether a true mask keeps the row
    value: object
    is_indexed: bool = False


def _fill_of(node: fx.Node) -> _Fill | None:
    """The parts of a node that replaces some rows by one value."""
    if is_call(node, aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf):
        mask, if_true, if_false = node.args
        assert isinstance(mask, fx.Node)
        if isinstance(if_false, fx.Node) and scalar(if_true) is not None:
            return _Fill(if_false, mask, False, if_true)
        assert isinstance(if_true, fx.Node)
        return _Fill(if_true, mask, True, if_false)
    if is_call(node, aten.masked_fill.Scalar, aten.masked_fill.Tensor):
        rows, mask, value = node.args
        assert isinstance(rows, fx.Node)
        assert isinstance(mask, fx.Node)
        return _Fill(rows, mask, False, value)
    if is_call(node, aten.index_put.default) and len(node.args) == 3:  # rows[~has] = 0
        rows, indices, value = node.args
        assert isinstance(rows, fx.Node)
        mask = indices[0] if isinstance(indices, list | tuple) and len(indices) == 1 else None
        if isinstance(mask, fx.Node) and tensor(mask).dtype == torch.bool:
            return _Fill(rows, mask, False, value, is_indexed=True)
    return None


@dataclasses.dataclass(frozen=True)
class _Gather:
    nodes: tuple[fx.Node, ...]
    source: fx.Node
    slots: fx.Node
    mask: fx.Node | None = None


def _gather_of(node: fx.Node) -> _Gather | None:
    """The parts of a node that takes rows of a tensor by their numbers."""
    gather: _Gather | None = None
    if is_call(node, aten.index.Tensor):
        source, indices = node.args
        assert isinstance(indices, list | tuple)
        first, *others = indices
        if is_tensor(first) and all(index is None for index in others):
            gather = _Gather((node,), source, first)  # type: ignore[arg-type]
    elif is_call(node, aten.index_select.default):
        source, dim, slots = node.args
        if dim in (0, -tensor(source).dim()):  # type: ignore[arg-type]
            gather = _Gather((node,), source, slots)  # type: ignore[arg-type]
    elif is_call(node, aten.embedding.default):
        gather = _Gather((node,), *node.args[:2])  # type: ignore[arg-type]
    elif is_call(node, torch.ops.mamba_ops.masked_gather_cpu.default):
        arguments = op_arguments(node, torch.ops.mamba_ops.masked_gather_cpu.default)
        gather = _Gather((node,), arguments["state_cache"], arguments["slots"], arguments["has_initial_state"])
    elif is_call(node, operator.getitem):
        launch = input_of(node)
        kernel = kernel_arguments(launch, masked_gather_kernel)
        if kernel is not None:
            gather = _Gather((node, launch), kernel["cache_ptr"], kernel["slots_ptr"], kernel["has_ptr"])
    return gather if gather is not None and tensor(gather.slots).dtype in INDEX_DTYPES else None


def _refuse_product(node: fx.Node) -> None:
    """Name the commonest near miss: rows times a mask."""
    if not is_call(node, aten.mul.Tensor):
        return
    for factor in node.all_input_nodes:
        while is_call(factor, *SAME_ORDER, *CASTS, aten.expand.default):
            factor = input_of(factor)
        if tensor(factor).dtype == torch.bool or _gather_of(factor) is not None:
            raise Declined(Condition.MASK_PRODUCT, node)
