"""Recognising a mask that says one thing about each sequence, however it is inverted and brought to the rows' shape."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, fx

from inductor_passes.declined import require
from inductor_passes.nodes import NEGATIONS, SAME_ORDER, aten, input_of, is_call, same, tensor
from inductor_passes.report import Condition


@dataclasses.dataclass(frozen=True)
class SequenceMask:
    """One boolean a sequence.

    Attributes:
        node: a node of booleans.
        keeps: whether true means that the sequence has an initial state.
    """

    node: fx.Node
    keeps: bool

    def vector(self, mask: Tensor, nseqs: int | torch.SymInt) -> Tensor:
        """(nseqs,) booleans, true where a sequence has an initial state, from the tensor of `node`."""
        if same(mask.numel(), nseqs):
            mask = mask if mask.dim() == 1 else mask.reshape(nseqs)
        elif same(mask.numel(), 1):
            mask = mask.reshape(1).expand(nseqs)
        else:
            while mask.dim() > 1:
                mask = mask.select(-1, 0)
        return mask if self.keeps else torch.logical_not(mask)


def broadcast_mask(mask: fx.Node, keeps: bool, masked: fx.Node, nseqs: int | torch.SymInt) -> SequenceMask:
    """What `mask` says about each sequence when it is broadcast to the rows that `masked` returns."""
    require(tensor(mask).dtype == torch.bool, Condition.MASK_NOT_PER_SEQUENCE, mask)
    # Elementwise inversions and expansions commute with the broadcast.
    while _is_negation(mask) or is_call(mask, aten.expand.default, aten.clone.default):
        keeps ^= _is_negation(mask)
        mask = input_of(mask)
    require(_is_one_a_sequence(tensor(mask), tensor(masked), nseqs), Condition.MASK_NOT_PER_SEQUENCE, mask)
    return _without_shape(mask, keeps, nseqs)


def index_mask(mask: fx.Node, keeps: bool, masked: fx.Node, nseqs: int | torch.SymInt) -> SequenceMask:
    """What `mask` says about each sequence when it indexes the first dimension of the rows that `masked` returns."""
    is_vector = tensor(mask).dim() == 1 and same(tensor(masked).shape[0], nseqs)
    require(is_vector, Condition.MASK_NOT_PER_SEQUENCE, mask)
    return _without_shape(mask, keeps, nseqs)


def _without_shape(mask: fx.Node, keeps: bool, nseqs: int | torch.SymInt) -> SequenceMask:
    # With one element a sequence only their order matters, not the shape.
    while same(tensor(mask).numel(), nseqs) and (_is_negation(mask) or is_call(mask, *SAME_ORDER)):
        keeps ^= _is_negation(mask)
        mask = input_of(mask)
    return SequenceMask(mask, keeps)


def _is_negation(node: fx.Node) -> bool:
    return is_call(node, *NEGATIONS) and tensor(input_of(node)).dtype == torch.bool


def _is_one_a_sequence(mask: Tensor, rows: Tensor, nseqs: int | torch.SymInt) -> bool:
    broadcast = mask.expand(rows.shape)
    fixed = [same(size, 1) or same(stride, 0) for size, stride in zip(broadcast.shape, broadcast.stride(), strict=True)]
    return all(fixed) or (all(fixed[1:]) and same(broadcast.shape[0], nseqs))
