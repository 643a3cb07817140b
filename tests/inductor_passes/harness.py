"""Compiling a program with the pass, and what can then be read: graphs before and after, generated code, the report."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.utils._pytree as pytree
from functorch.compile import make_boxed_func
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.utils import run_and_get_code

from inductor_passes import Report, SnapshotElimination
from inductor_passes.opened_ops import op_name
from tests.inductor_passes.programs import Inputs, Program


class KeepGraph(CustomGraphPass):
    """Keeps the ops of the graph that it is given."""

    def __init__(self) -> None:
        self.ops: list[str] = []

    def __call__(self, graph: fx.Graph) -> None:
        self.ops = [op_name(node) for node in graph.nodes if node.op == "call_function"]

    def uuid(self) -> None:
        """Nothing identifies it, so that no cache may answer instead."""


@dataclasses.dataclass
class Compiled:
    """A program compiled with the pass and run once."""

    output: Any
    before: list[str]
    after: list[str]
    code: str
    report: Report

    def has(self, op: str) -> bool:
        """Whether the graph after the pass has an op with this in its name."""
        return any(op in name for name in self.after)


def compile_with_pass(
    program: Program,
    inputs: Inputs | list[Tensor],
    *,
    dynamic: bool = False,
    mode: str | None = None,
    run: Callable[..., tuple[Any, list[str]]] = run_and_get_code,
) -> Compiled:
    """Compile by Inductor with the pass, and run on these inputs, which are changed as the program says."""
    before, elimination, after = KeepGraph(), SnapshotElimination(), KeepGraph()
    options = dict(torch._inductor.list_mode_options(mode)) if mode else {}
    options["post_grad_custom_post_pass"] = [before, elimination, after]
    args = inputs.args() if isinstance(inputs, Inputs) else inputs
    output, codes = run(torch.compile(program, fullgraph=True, dynamic=dynamic, options=options), *args)
    assert len(codes) == 1
    return Compiled(output, before.ops, after.ops, codes[0], elimination.report())


def run_graph(program: Program, inputs: Inputs, *passes: Callable[[fx.Graph], None]) -> Any:
    """Run a program's functional graph, after these passes, node by node: no code is generated."""

    def compiler(module: fx.GraphModule, _: Any) -> Any:
        for graph_pass in passes:
            graph_pass(module.graph)
        module.recompile()
        return make_boxed_func(module.forward)

    backend = aot_autograd(fw_compiler=compiler, inference_compiler=compiler, decompositions=select_decomp_table())
    torch._dynamo.reset()
    with torch.no_grad():
        return torch.compile(program, backend=backend, fullgraph=True)(*inputs.args())


def assert_same_as_eager(program: Program, inputs: Inputs, run: Callable[[Program, Inputs], Any]) -> Any:
    """Assert that `run` gives the outputs and leaves the inputs, cache and its surroundings, as eager mode does."""
    expected_inputs, actual_inputs = inputs.clone(), inputs.clone()
    expected = program(*expected_inputs.args())
    actual = run(program, actual_inputs)
    output = actual.output if isinstance(actual, Compiled) else actual
    assert_equal(output, expected)
    for changed, wanted in zip(actual_inputs.args(), expected_inputs.args(), strict=True):
        assert_equal(_whole(changed), _whole(wanted))
    return actual


def assert_equal(actual: Any, expected: Any) -> None:
    """Assert equality of every bit pattern that is no NaN, and NaN where NaN is due."""
    for one, other in zip(pytree.tree_leaves(actual), pytree.tree_leaves(expected), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
        if isinstance(one, Tensor) and one.is_floating_point():
            assert torch.equal(torch.signbit(one[one == 0]), torch.signbit(other[other == 0])), "zeros differ in sign"


def _whole(tensor: Tensor) -> Tensor:
    return tensor.new_empty(0).set_(tensor.untyped_storage())
