"""Putting new ops into a functional graph: the nodes that `torch.compile` itself would make of them.

A function is traced with the fake tensors of its arguments, mutations and all, in the mode in which AOTAutograd traces
a model. So an op comes out as it would had the user called it there: opened into its Triton launch on a GPU, wrapped
in `auto_functionalized_v2` around its twin on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch._functorch.config
import torch.utils._pytree as pytree
from torch import fx
from torch._guards import detect_fake_mode
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.functional_tensor import FunctionalTensorMode, dispatch_functionalize
from torch.fx.experimental.proxy_tensor import make_fx


def trace(function: Callable[..., Any], arguments: tuple[Any, ...], *, opaque: bool) -> tuple[fx.Graph, list[fx.Node]]:
    """Functional graph of `function(*arguments)`.

    Args:
        function: may mutate its arguments; returns tensors.
        arguments: nested lists, tuples and dictionaries, with a node of the outer graph for each tensor and size.
        opaque: keep ops whole that would otherwise be opened.

    Returns:
        The graph, and the nodes of the outer graph that its placeholders stand for.
    """
    leaves, spec = pytree.tree_flatten(arguments)
    inputs = list(dict.fromkeys(leaf for leaf in leaves if isinstance(leaf, fx.Node)))

    def of_inputs(*values: Any) -> Any:
        value_of = dict(zip(inputs, values, strict=True))
        filled = [value_of[leaf] if isinstance(leaf, fx.Node) else leaf for leaf in leaves]
        return function(*pytree.tree_unflatten(filled, spec))

    values = [node.meta["val"] for node in inputs]
    fake_mode = detect_fake_mode(values)
    assert fake_mode is not None
    with fake_mode, torch.no_grad(), torch._functorch.config.patch(decompose_custom_triton_ops=not opaque):
        functional = dispatch_functionalize(of_inputs, FunctionalTensorMode())
        module = make_fx(functional, select_decomp_table())(*values)
    module.graph.eliminate_dead_code()
    return module.graph, inputs


def insert(graph: fx.Graph, traced: tuple[fx.Graph, list[fx.Node]], before: fx.Node) -> tuple[Any, list[fx.Node]]:
    """Copy a traced graph in front of a node.

    Returns:
        The nodes that hold what the traced function returned, and all new nodes.
    """
    inner, inputs = traced
    copies: dict[fx.Node, fx.Node] = {}
    remaining = iter(inputs)
    new: list[fx.Node] = []
    returned: Any = None
    with graph.inserting_before(before):
        for node in inner.nodes:
            if node.op == "placeholder":
                copies[node] = next(remaining)
            elif node.op == "output":
                returned = fx.map_arg(node.args[0], lambda result: copies[result])
            else:
                assert node.op == "call_function", f"{node.format_node()} needs a module of its own"
                copies[node] = graph.node_copy(node, lambda argument: copies[argument])
                if "stack_trace" in before.meta:
                    copies[node].meta["stack_trace"] = before.meta["stack_trace"]
                new.append(copies[node])
    return returned, new


def erase_unused(graph: fx.Graph, *nodes: fx.Node) -> list[fx.Node]:
    """Remove these nodes, and what only they needed, where nothing uses them any more."""
    erased: list[fx.Node] = []
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if node in erased or node.users or node.op != "call_function" or node.is_impure():
            continue
        pending.extend(node.all_input_nodes)
        graph.erase_node(node)
        erased.append(node)
    return erased
