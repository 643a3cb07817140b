"""Facts about nodes of a functional FX graph that every part of the pass asks for.

In such a graph no tensor changes: an op that mutates its argument is a node that returns the new version. So two nodes
hold the same tensor if they are the same node, or the same strided view of the same node.
"""

from __future__ import annotations

import operator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx.experimental.symbolic_shapes import statically_known_true

import mamba_ops

aten = torch.ops.aten

_SCAN_FRAME = f'File "{Path(mamba_ops.__file__).with_name("ssd.py")}"'

# Same elements in the same row-major order: on dense rows all of these are the identity.
SAME_ORDER = frozenset(
    {
        aten.view.default,
        aten.reshape.default,
        aten._unsafe_view.default,
        aten.unsqueeze.default,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.alias.default,
        aten.detach.default,
        aten.clone.default,
    }
)
CASTS = frozenset({torch.ops.prims.convert_element_type.default, aten._to_copy.default})
NEGATIONS = frozenset({aten.logical_not.default, aten.bitwise_not.default})

# What an index may be made of: booleans and bytes would be masks.
INDEX_DTYPES = frozenset({torch.int32, torch.int64})

# The types that hold every value of the key.
_HOLDS_ALL_OF = {
    torch.float16: {torch.float16, torch.float32, torch.float64},
    torch.bfloat16: {torch.bfloat16, torch.float32, torch.float64},
    torch.float32: {torch.float32, torch.float64},
    torch.float64: {torch.float64},
    torch.int32: {torch.int32, torch.int64},
    torch.int64: {torch.int64},
}


def is_exact(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether each value of `source` is also a value of `target`."""
    return target in _HOLDS_ALL_OF.get(source, ())


def is_call(node: object, *targets: object) -> bool:
    """Whether `node` is a call of one of these functions."""
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in targets


def tensor(node: fx.Node) -> Tensor:
    """Fake tensor that a node computes: shape, strides, dtype and device."""
    value = node.meta["val"]
    assert isinstance(value, Tensor), f"{node} is no tensor"
    return value


def is_tensor(node: object) -> bool:
    """Whether `node` is a node that computes one tensor."""
    return isinstance(node, fx.Node) and isinstance(node.meta.get("val"), Tensor)


def input_of(node: fx.Node) -> fx.Node:
    """First argument of a node that maps one tensor to one tensor."""
    argument = node.args[0]
    assert isinstance(argument, fx.Node)
    return argument


def without_copies(node: fx.Node) -> fx.Node:
    """The node that holds the same elements in the same order before views, copies and exact casts."""
    while True:
        is_cast = is_call(node, *CASTS) and is_exact(tensor(input_of(node)).dtype, tensor(node).dtype)
        if not (is_cast or is_call(node, *SAME_ORDER)):
            return node
        node = input_of(node)


def same(a: int | torch.SymInt, b: int | torch.SymInt) -> bool:
    """Whether two sizes are equal for certain, without a new guard."""
    return bool(statically_known_true(a == b))


def scalar(node: object) -> float | None:
    """Value of a node that holds one number everywhere, or of a plain number; None if it is not known."""
    if isinstance(node, (bool, int, float)):
        return float(node)
    if not isinstance(node, fx.Node):
        return None
    node = without_copies(node)
    if is_call(node, aten.expand.default):
        return scalar(node.args[0])
    if is_call(node, *CASTS):  # from a constant, so the value is that of the cast constant
        value = scalar(node.args[0])
        return None if value is None else float(torch.tensor(value).to(tensor(node).dtype).item())
    if is_call(node, aten.lift_fresh_copy.default):  # a number that the user's program writes into a tensor
        constant = getattr(node.graph.owning_module, str(input_of(node).target), None)
        with unset_fake_temporarily():
            return float(constant.item()) if type(constant) is Tensor and constant.numel() == 1 else None
    if is_call(node, aten.full.default, aten.full_like.default):
        return scalar(node.args[1])
    if is_call(node, aten.scalar_tensor.default):
        return scalar(node.args[0])
    if is_call(node, aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default):
        return 0.0
    return None


def results(node: fx.Node, key: object) -> tuple[fx.Node, ...]:
    """The nodes that take result `key` of a node with several results."""
    return tuple(user for user in node.users if is_call(user, operator.getitem) and user.args[1] == key)


def ancestors(*nodes: fx.Node) -> set[fx.Node]:
    """All nodes that these depend on, themselves included."""
    seen: set[fx.Node] = set()
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if node not in seen:
            seen.add(node)
            pending.extend(node.all_input_nodes)
    return seen


def source_line(node: fx.Node) -> str | None:
    """Where in the user's program a node comes from, as `file:line`."""
    trace: Any = node.meta.get("stack_trace")
    frames = [line.strip() for line in trace.splitlines() if line.strip().startswith('File "')] if trace else []
    if not frames:
        return None
    # Inside the scan every model looks the same; its caller tells one layer from another.
    own = [frame for frame in frames if not frame.startswith(_SCAN_FRAME)] or frames
    file, line = own[-1].removeprefix('File "').split('", line ')
    return f"{file}:{line.split(',')[0]}"
