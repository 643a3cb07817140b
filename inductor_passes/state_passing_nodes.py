"""Recognising state passing in a graph, in each form that our ops take there."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import fx

from inductor_passes.cache_view import CacheView
from inductor_passes.declined import require
from inductor_passes.nodes import is_call, results, tensor
from inductor_passes.opened_ops import kernel_arguments, op_arguments
from inductor_passes.report import Condition
from inductor_passes.writeback import Writeback, writeback_over
from mamba_ops.kernels.state_passing import state_passing_kernel

_UPDATE_CPU = torch.ops.mamba_ops.state_passing_update_cpu.default
_FUNCTIONAL_CPU = torch.ops.mamba_ops.state_passing_cpu.default
_HIGHER_ORDER = torch.ops.higher_order


@dataclasses.dataclass(frozen=True)
class StatePassing:
    """One state passing op.

    Attributes:
        node: the node that computes.
        states, dA_cumsum, last_chunk_indices, initial_states: its arguments.
        state_dtype: dtype of what it returns.
        entering: nodes that hold the states that enter the chunks.
        final_states: nodes that hold the final states, if they are returned.
        writeback: how they go to the cache, if the op puts them there.
    """

    node: fx.Node
    states: fx.Node
    dA_cumsum: fx.Node  # noqa: N815 - the paper's name
    last_chunk_indices: fx.Node
    initial_states: fx.Node | None
    state_dtype: torch.dtype
    entering: tuple[fx.Node, ...]
    final_states: tuple[fx.Node, ...]
    writeback: Writeback | None

    @property
    def nseqs(self) -> int | torch.SymInt:
        """Number of sequences."""
        return tensor(self.last_chunk_indices).shape[0]


def read_state_passing(node: fx.Node) -> StatePassing | None:
    """What a node says if it is state passing that may start from a snapshot; None if it is none, or `Declined`."""
    if is_call(node, _HIGHER_ORDER.auto_functionalized_v2, _HIGHER_ORDER.auto_functionalized):
        return _update_cpu(node) if node.args[0] is _UPDATE_CPU else None
    if is_call(node, _FUNCTIONAL_CPU):
        return _functional_cpu(node)
    arguments = kernel_arguments(node, state_passing_kernel)
    if arguments is None or arguments["READ_FROM_SLOTS"]:
        return None
    is_known = all(user.args[1] in ("entering_ptr", "final_ptr") for user in node.users)
    require(is_known or not arguments["HAS_INITIAL"], Condition.WRITES_UNKNOWN, node)
    return _launch(node, arguments) if is_known else None


def _update_cpu(node: fx.Node) -> StatePassing:
    arguments: Any = node.kwargs
    new = results(node, 1)
    if is_call(node, _HIGHER_ORDER.auto_functionalized_v2):
        cache = CacheView.from_functionalized(node, "state_cache")
        writeback = Writeback((node,), cache, arguments["write_slots"], new_view=(), new_root=new, write_empty=False)
    else:
        writeback = writeback_over(arguments["state_cache"], new, (node,), arguments["write_slots"], write_empty=False)
    return StatePassing(
        node,
        arguments["states"],
        arguments["dA_cumsum"],
        arguments["last_chunk_indices"],
        arguments["initial_states"],
        writeback.cache.value.dtype,
        entering=results(node, 0),
        final_states=(),
        writeback=writeback,
    )


def _functional_cpu(node: fx.Node) -> StatePassing:
    arguments = op_arguments(node, _FUNCTIONAL_CPU)
    return StatePassing(node, **arguments, entering=results(node, 0), final_states=results(node, 1), writeback=None)


def _launch(node: fx.Node, arguments: dict[str, Any]) -> StatePassing:
    final = results(node, "final_ptr")
    writeback = None
    if arguments["WRITE_TO_SLOTS"]:
        slots, write_empty = arguments["write_slots_ptr"], arguments["WRITE_EMPTY"]
        writeback = writeback_over(arguments["final_ptr"], final, (node,), slots, write_empty=write_empty)
    return StatePassing(
        node,
        arguments["states_ptr"],
        arguments["dA_cumsum_ptr"],
        arguments["last_chunk_indices_ptr"],
        arguments["initial_ptr"] if arguments["HAS_INITIAL"] else None,
        tensor(arguments["entering_ptr"]).dtype,
        entering=results(node, "entering_ptr"),
        final_states=() if writeback else final,
        writeback=writeback,
    )
