"""What a compiled function does with the state cache: its final graph, as text and in numbers."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch._functorch.config
import torch._inductor.config
from torch import Tensor
from torch._inductor.graph import GraphLowering
from torch._inductor.ir import ComputedBuffer
from torch._inductor.utils import run_and_get_graph_lowering

from inductor_passes.inspection.statements import statements

# What reads rows out of a cache and masks them, in any spelling, before and after fusion by the pass.
SNAPSHOT_OPS = re.compile(r"(aten\.(index|index_select|where|masked_fill|gather)|mamba_ops\.masked_gather\w*)\b")


@dataclass(frozen=True)
class Graph:
    """What a first run returned, and the graph that Inductor generated code for."""

    output: Tensor
    text: str
    snapshot_nodes: tuple[str, ...]
    copied_bytes: int


def first_run(function: Callable[..., Any], inputs: tuple[Any, ...], state_shape: tuple[int, ...]) -> Graph:
    """Run a compiled function for the first time.

    Args:
        function: from `torch.compile(..., fullgraph=True)`, not run before.
        inputs: its arguments.
        state_shape: shape of one sequence's state; a snapshot has it after the dimension of the sequences.

    Raises:
        RuntimeError: the function was compiled to more or less than one graph.
    """
    # From a cache would come the finished code, without its graph.
    no_cache = torch._inductor.config.patch(fx_graph_cache=False)
    with no_cache, torch._functorch.config.patch(enable_autograd_cache=False):
        output, lowerings = run_and_get_graph_lowering(function, *inputs)
    if len(lowerings) != 1:
        raise RuntimeError(f"expected one graph, got {len(lowerings)}")
    lowering = lowerings[0]
    graph = lowering.orig_gm.graph
    nodes = [node for node in graph.nodes if is_snapshot(node, state_shape)]
    text = lowering.orig_gm.print_readable(print_output=False)
    return Graph(output, text, tuple(node.name for node in nodes), _materialized(lowering, nodes))


def is_snapshot(node: torch.fx.Node, state_shape: tuple[int, ...]) -> bool:
    """Whether a node makes a copy of cached states."""
    value = node.meta.get("val")
    return (
        node.op == "call_function"
        and SNAPSHOT_OPS.match(str(node.target)) is not None
        and isinstance(value, Tensor)
        and tuple(value.shape[1:]) == state_shape
    )


def _materialized(lowering: GraphLowering, nodes: list[torch.fx.Node]) -> int:
    """Bytes of the buffers that hold the results of these nodes; what Inductor fused away has no buffer."""
    total = 0
    for buffer in lowering.buffers:
        if buffer.get_name() in lowering.removed_buffers or not buffer.has_tensor_output():
            continue
        # An operator of its own says which node it is; generated code also names those whose values it computed inline.
        origins = buffer.origins if isinstance(buffer, ComputedBuffer) else {buffer.get_origin_node()}
        size = tuple(map(int, buffer.get_size()))
        if any(node in origins and tuple(node.meta["val"].shape) == size for node in nodes):
            total += prod(size) * buffer.get_dtype().itemsize
    return total


def changed_lines(before: str, after: str) -> list[str]:
    """The statements that two graphs do not share, as a diff without context."""
    difference = difflib.unified_diff(_statements(before), _statements(after), lineterm="", n=0)
    return [line for line in difference if not line.startswith(("---", "+++", "@@"))]


def _statements(text: str) -> list[str]:
    """A graph's statements; what state passing returns has one name, so that its users do not count as changed."""
    return [re.sub(r"\bstate_passing_(update|indexed)\w*(?=,|\)| = )", "entering", line) for line in statements(text)]
