"""Finding our ops again after `torch.compile` has opened them.

On a CPU an op calls an opaque twin, which stays in the graph under its name, inside `auto_functionalized` if it mutates
an argument. On a GPU only the launch of its Triton kernel is left, as a `triton_kernel_wrapper_functional` node, so
the kernel and its constants tell which op it was.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table
from torch._ops import OpOverload

from inductor_passes.nodes import is_call

_FUNCTIONALIZED = (torch.ops.higher_order.auto_functionalized_v2, torch.ops.higher_order.auto_functionalized)
_LAUNCH = torch.ops.higher_order.triton_kernel_wrapper_functional


def op_name(node: fx.Node) -> str:
    """What a node calls, in words: the op inside `auto_functionalized`, the kernel of a launch."""
    if is_call(node, *_FUNCTIONALIZED):
        return str(node.args[0])
    if is_call(node, _LAUNCH):
        kernel: Any = kernel_side_table.get_kernel(node.kwargs["kernel_idx"])  # type: ignore[arg-type]
        return str(getattr(getattr(kernel, "fn", kernel), "__name__", kernel))
    return str(node.target) if isinstance(node.target, str | OpOverload) else getattr(node.target, "__name__", "?")


def kernel_arguments(node: object, kernel: Any) -> dict[str, Any] | None:
    """Arguments by name of a functional launch of `kernel`, constants included; None if `node` is none."""
    if not is_call(node, _LAUNCH):
        return None
    assert isinstance(node, fx.Node)
    kwargs: Any = node.kwargs
    launched: Any = kernel_side_table.get_kernel(kwargs["kernel_idx"])
    # A launch with a number of warps is kept as an autotuner with that one choice.
    if launched is not kernel and getattr(launched, "fn", None) is not kernel:
        return None
    constants = kernel_side_table.get_constant_args(kwargs["constant_args_idx"])
    return {**constants, **kwargs["kwargs"]}


def op_arguments(node: fx.Node, op: OpOverload) -> dict[str, Any]:
    """Arguments by name of a call of `op`, defaults included."""
    given = dict(zip((arg.name for arg in op._schema.arguments), node.args, strict=False)) | dict(node.kwargs)
    return {arg.name: given.get(arg.name, arg.default_value) for arg in op._schema.arguments}
