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
        is_one_for_all: whether every element says the same, about all sequences.
    """

    node: fx.Node
    keeps: bool
    is_one_for_all: bool = False

    def vector(self, mask: Tensor, nseqs: int | torch.SymInt) -> Tensor:
        """(nseqs,) booleans, true where a sequence has an initial state, from the tensor of `node`."""
        if same(mask.numel(), nseqs):
            mask = mask if mask.dim() == 1 else mask.reshape(nseqs)
        else:
            while mask.dim() > (0 if self.is_one_for_all else 1):
                mask = mask.select(-1, 0)
            mask = mask.expand(nseqs)
        return mask if self.keeps else torch.logical_not(mask)


def broadcast_mask(mask: fx.Node, keeps: bool, masked: fx.Node, nseqs: int | torch.SymInt) -> SequenceMask:
    """What `mask` says about each sequence when it is broadcast to the rows that `masked` returns."""
    require(tensor(mask).dtype == torch.bool, Condition.MASK_NOT_PER_SEQUENCE, mask)
    # Elementwise inversions and expansions commute with the broadcast.
    while _is_negation(mask) or is_call(mask, aten.expand.default, aten.clone.default):
        keeps ^= _is_negation(mask)
        mask = input_of(mask)
    broadcast = tensor(mask).expand(tensor(masked).shape)
    is_one_a_sequence = _is_constant(broadcast[0]) and same(broadcast.shape[0], nseqs)
    is_one_for_all = _is_constant(broadcast)
    require(is_one_a_sequence or is_one_for_all, Condition.MASK_NOT_PER_SEQUENCE, mask)
    return dataclasses.replace(_without_shape(mask, keeps, nseqs), is_one_for_all=is_one_for_all)


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


def _is_constant(mask: Tensor) -> bool:
    """Whether a tensor is one element, seen everywhere."""
    return all(same(size, 1) or same(stride, 0) for size, stride in zip(mask.shape, mask.stride(), strict=True))
