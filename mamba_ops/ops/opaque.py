"""How Inductor must lower the opaque CPU ops that write a cache.

PyTorch puts such an op into its program before what has read the cache and is not evaluated yet. If that is used again
after the op, it is then read from the cache as the op has left it. Here it is evaluated first.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch._inductor.lowering import constrain_to_fx_strides, make_fallback
from torch._inductor.virtualized import V


def read_before_write(names: Iterable[str]) -> None:
    """Have Inductor evaluate all that reads what the ops `mamba_ops::<name>` write before it calls them."""
    for name in names:
        op = getattr(torch.ops.mamba_ops, name).default
        if op._schema.is_mutable:
            make_fallback(op, layout_constraint=_evaluate_readers, warn=False)


def _evaluate_readers(node: torch.fx.Node, *args: Any, **kwargs: Any) -> Any:
    assert isinstance(node.target, torch._ops.OpOverload)
    for position, argument in enumerate(node.target._schema.arguments):
        if argument.is_write:
            written = args[position] if position < len(args) else kwargs[argument.name]
            written.realize()
            V.graph.mark_buffer_mutated(written.get_name())
    return constrain_to_fx_strides(node, *args, **kwargs)
