"""From a live FX graph to plain data: each node in words, and its role around the snapshot."""

from __future__ import annotations

import contextlib
import linecache
import operator
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import optimization_hint

from inductor_passes.inspection.input_names import input_names
from inductor_passes.inspection.recorded import Graph, Node, Role
from inductor_passes.nodes import aten, is_call, scalar, source_line
from inductor_passes.opened_ops import op_name
from inductor_passes.snapshots import read_snapshot
from inductor_passes.state_passing_nodes import read_state_passing
from inductor_passes.views import is_view

# Inductor allocates the empty ones, and makes the new version of a tensor whose view was written in its place.
_WITHOUT_KERNEL = (
    operator.getitem,
    aten.empty.memory_format,
    aten.empty_strided.default,
    aten.select_scatter.default,
    aten.slice_scatter.default,
    aten.as_strided_scatter.default,
)


def describe(graph: fx.Graph, inputs: Sequence[str] = ()) -> Graph:
    """Everything that is worth keeping of a graph; `inputs` says what its inputs are called, if Dynamo cannot."""
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    given = dict(zip(placeholders, inputs, strict=True)) if len(placeholders) == len(inputs) else {}
    roles, names = _roles(graph), given or input_names(graph)
    nodes = tuple(
        _describe(node, roles.get(node, Role.OTHER), names.get(node)) for node in graph.nodes if node.op != "output"
    )
    return Graph(nodes, _text(graph))


def shown(source: str) -> str:
    """A `file:line` as short as it can be said: from the current folder, or from where the module is imported."""
    file, _, line = source.rpartition(":")
    for folder in (".", *sorted(sys.path, key=len, reverse=True)):
        with contextlib.suppress(ValueError, OSError):
            return f"{Path(file).relative_to(Path(folder).absolute())}:{line}"
    return source


def _describe(node: fx.Node, role: Role, input_name: str | None) -> Node:
    value = node.meta.get("val")
    source = source_line(node)
    rows = value.shape[0] if isinstance(value, Tensor) and value.dim() > 0 else 1
    return Node(
        node.name,
        input_name or (node.name if node.op == "placeholder" else op_name(node)),
        _in_words(value),
        optimization_hint(value.numel()) * value.element_size() if isinstance(value, Tensor) else None,
        optimization_hint(rows),
        not isinstance(rows, int),
        node.op == "call_function" and not _runs_no_kernel(node),
        source,
        _code_at(source) if source else "",
        tuple(needed.name for needed in node.all_input_nodes),
        Role.INPUT if node.op == "placeholder" else role,
    )


def _roles(graph: fx.Graph) -> dict[fx.Node, Role]:
    """State passing ops, and the snapshots that they start from as far as they can be followed."""
    roles: dict[fx.Node, Role] = {}
    for node in graph.nodes:
        if node.op != "call_function" or "state_passing" not in op_name(node):
            continue
        roles[node] = Role.STATE_PASSING
        try:
            site = read_state_passing(node)
        except Exception:  # the pass has said what it makes of it
            continue
        if site is None or site.initial_states is None:
            continue
        try:
            chain = read_snapshot(site.initial_states, site.nseqs).chain
        except Exception:
            chain = (site.initial_states,) if site.initial_states.op == "call_function" else ()
        roles.update(dict.fromkeys(chain, Role.SNAPSHOT))
    return roles


def _runs_no_kernel(node: fx.Node) -> bool:
    value = node.meta.get("val")
    is_constant = isinstance(value, Tensor) and value.dim() == 0 and scalar(node) is not None
    return is_call(node, *_WITHOUT_KERNEL) or is_constant or is_view(node)


def _in_words(value: Any) -> str:
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.").replace("float", "f").replace("int", "i")
        return f"{dtype}[{', '.join(map(str, value.shape))}]"
    if isinstance(value, tuple | list | dict):
        return f"{len(value)} results"
    return "" if value is None else type(value).__name__


def _code_at(source: str) -> str:
    file, _, line = source.rpartition(":")
    return linecache.getline(file, int(line)).strip() if line.isdigit() else ""


def _text(graph: fx.Graph) -> str:
    try:
        return str(graph.python_code("self", verbose=True).src).strip() + "\n"
    except Exception:  # some node cannot be written as Python
        return str(graph)
