"""A state cache inside a graph: a tensor of which each version is a node, and the view of it that an op is given.

Two descriptions of the same memory must be recognised as the same: the gather sees the view as nodes (`slice`,
`select`, `as_strided`, ...), while `auto_functionalized_v2` keeps the base and says how to make the view again. So
views are compared by where their slots lie, not by how they were made.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, fx
from torch._higher_order_ops.auto_functionalize import (
    AliasViewInfo,
    AsStridedViewInfo,
    NotView,
    SliceViewInfo,
    read_view_information_from_args,
)

from inductor_passes.nodes import ViewStep, aten, same, tensor, view_chain, view_step


@dataclasses.dataclass(frozen=True)
class CacheView:
    """The cache as an op sees it.

    Attributes:
        root: the node that holds this version of the whole tensor.
        steps: the views that lead from the root to (num_slots, nheads, headdim, dstate).
        value: fake tensor of that view.
    """

    root: fx.Node
    steps: tuple[ViewStep, ...]
    value: Tensor

    @classmethod
    def of(cls, node: fx.Node) -> CacheView:
        """The cache that a node holds, traced back to the tensor that it is a view of."""
        root, views = view_chain(node)
        steps = [view_step(view) for view in views]
        return cls(root, tuple(step for _, step in filter(None, steps)), tensor(node))

    @classmethod
    def from_functionalized(cls, call: fx.Node, argument: str) -> CacheView:
        """The mutated `argument` of an `auto_functionalized_v2` call."""
        op: Any = call.args[0]
        kwargs = dict(call.kwargs)
        bases: Any = kwargs.pop("_all_bases")
        arg_type = next(arg.type for arg in op._schema.arguments if arg.name == argument)
        info = read_view_information_from_args([argument], [arg_type], kwargs, bases)[argument]
        root = bases[info.base_index]
        return cls(root, (), tensor(root)).then(*_steps_of(info))

    def then(self, *steps: ViewStep) -> CacheView:
        """A view of this view."""
        value = self.value
        for step in steps:
            args: Any = fx.map_arg(step.args, lambda node: node.meta["val"])
            value = ViewStep(step.op, args)(value)
        return CacheView(self.root, self.steps + steps, value)


def _steps_of(info: Any) -> list[ViewStep]:
    if isinstance(info, NotView | AliasViewInfo):
        return []
    if isinstance(info, SliceViewInfo):
        return [ViewStep(aten.slice.Tensor, (info.dim, info.start, info.end))]
    assert isinstance(info, AsStridedViewInfo), f"unknown view {info}"
    return [ViewStep(aten.as_strided.default, (info.size, info.stride, info.storage_offset))]


def has_dense_rows(value: Tensor) -> bool:
    """Whether each row (all dimensions but the first) is one dense block."""
    expected: int | torch.SymInt = 1
    for size, stride in zip(reversed(value.shape[1:]), reversed(value.stride()[1:]), strict=True):
        if not (same(size, 1) or same(stride, expected)):
            return False
        expected = expected * size
    return True


def row_size(value: Tensor) -> int | torch.SymInt:
    """Number of elements of a row."""
    size: int | torch.SymInt = value.shape[1:].numel()
    return size


def are_same_slots(a: Tensor, b: Tensor) -> bool:
    """Whether two views of one tensor are the same dense slots, whatever shape each gives to a row."""
    return (
        a.dtype == b.dtype
        and same(a.shape[0], b.shape[0])
        and same(row_size(a), row_size(b))
        and same(a.storage_offset(), b.storage_offset())
        and (same(a.shape[0], 1) or same(a.stride(0), b.stride(0)))
        and has_dense_rows(a)
        and has_dense_rows(b)
    )


def first_slot(rows: Tensor, cache: Tensor, nseqs: int | torch.SymInt) -> int | None:
    """First slot of `cache` that `rows`, a view of the same tensor, consists of; None if they are no run of slots."""
    sizes = (rows.numel(), rows.storage_offset(), cache.storage_offset(), cache.stride(0), cache.shape[0], nseqs)
    if not all(isinstance(size, int) for size in sizes) or rows.dtype != cache.dtype:
        return None
    if rows.numel() != nseqs * row_size(cache) or not has_dense_rows(cache):
        return None
    is_run = rows.is_contiguous() if nseqs == 1 else has_dense_rows(rows) and rows.stride(0) == cache.stride(0)
    if not is_run or (nseqs > 1 and rows.shape[0] != nseqs):
        return None
    distance = int(rows.storage_offset() - cache.storage_offset())
    if distance == 0:
        return 0
    first, rest = divmod(distance, int(cache.stride(0))) if cache.stride(0) else (-1, 0)
    return first if rest == 0 and 0 <= first <= cache.shape[0] - nseqs else None
