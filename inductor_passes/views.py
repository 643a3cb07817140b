"""Views in a functional graph: which nodes are views, of what, and whether two of them are the same elements."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterator
from typing import Any

from torch import Tensor, fx

from inductor_passes.nodes import aten, input_of, is_call, same, tensor, without_copies

# Ops whose result shares memory with their first argument; of `reshape` see `view_step`.
_VIEWS = frozenset(
    {
        aten.view.default,
        aten.view.dtype,
        aten.reshape.default,
        aten.unsqueeze.default,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.alias.default,
        aten.detach.default,
        aten.slice.Tensor,
        aten.select.int,
        aten.as_strided.default,
        aten.permute.default,
        aten.transpose.int,
        aten.expand.default,
    }
)


@dataclasses.dataclass(frozen=True)
class ViewStep:
    """One view op, ready to be applied to a tensor; its arguments may hold nodes."""

    op: Any
    args: tuple[Any, ...]

    def __call__(self, base: Tensor) -> Tensor:
        """The view of `base`; the arguments must be values."""
        view: Tensor = self.op(base, *self.args)
        return view


def view_step(node: fx.Node) -> tuple[fx.Node, ViewStep] | None:
    """The tensor that a node is a view of, and how to make the view; None if it is no view."""
    if is_call(node, operator.getitem):
        return _part_of(input_of(node), node.args[1])
    if not is_call(node, *_VIEWS):
        return None
    base = input_of(node)
    if is_call(node, aten.reshape.default):
        copies = tensor(node).untyped_storage()._cdata != tensor(base).untyped_storage()._cdata
        return None if copies else (base, ViewStep(aten.view.default, node.args[1:]))
    return base, ViewStep(node.target, node.args[1:])


def _part_of(node: fx.Node, index: Any) -> tuple[fx.Node, ViewStep] | None:
    """One of the views that an op returns together."""
    if is_call(node, aten.unbind.int):
        base, dim = (*node.args, 0)[:2]
        return base, ViewStep(aten.select.int, (dim, index))  # type: ignore[return-value]
    if is_call(node, aten.split.Tensor, aten.split_with_sizes.default):
        base, _, dim = (*node.args, 0)[:3]
        lengths = [value.shape[dim] for value in node.meta["val"]]
        start = sum(lengths[:index])
        return base, ViewStep(aten.slice.Tensor, (dim, start, start + lengths[index]))  # type: ignore[return-value]
    return None


def is_view(node: fx.Node) -> bool:
    """Whether a node is a view of another one."""
    return view_step(node) is not None


def view_chain(node: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
    """The tensor that `node` is a view of, and the views that lead from it to `node`."""
    views: list[fx.Node] = []
    while (step := view_step(node)) is not None:
        views.insert(0, node)
        node, _ = step
    return node, views


def have_same_layout(a: Tensor, b: Tensor) -> bool:
    """Whether two views of one tensor are the same elements in the same order. Strides of single elements do not count.

    Dimensions of size one are ignored too, so a number taken from a tensor equals the slice of length one.
    """
    dims_a = [(size, stride) for size, stride in zip(a.shape, a.stride(), strict=True) if not same(size, 1)]
    dims_b = [(size, stride) for size, stride in zip(b.shape, b.stride(), strict=True) if not same(size, 1)]
    return (
        a.dtype == b.dtype
        and len(dims_a) == len(dims_b)
        and same(a.storage_offset(), b.storage_offset())
        and all(same(n, m) and same(s, t) for (n, s), (m, t) in zip(dims_a, dims_b, strict=True))
    )


def hold_same_numbers(a: fx.Node, b: fx.Node) -> bool:
    """Whether two nodes of integers hold the same numbers in the same order, exact casts and copies aside."""
    a, b = without_copies(a), without_copies(b)
    if a is b:
        return True
    return view_chain(a)[0] is view_chain(b)[0] and have_same_layout(tensor(a), tensor(b))


def readers(node: fx.Node) -> Iterator[fx.Node]:
    """Every node that uses a tensor or a view of it, views themselves left out."""
    for user in node.users:
        is_several_views = is_call(user, aten.unbind.int, aten.split.Tensor, aten.split_with_sizes.default)
        if is_several_views or is_view(user):
            yield from readers(user)
        else:
            yield user
