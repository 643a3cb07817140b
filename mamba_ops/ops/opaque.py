"""What Inductor must know about the opaque CPU ops before it lowers the first of them.

Inductor learns that an op without a lowering reads real buffers when it first meets it. A pointwise result that the op
reads may by then have been left unevaluated; if it is used again after the op has written the cache, it is evaluated
again, from the new cache.
"""

from collections.abc import Iterable

import torch
from torch._inductor.lowering import add_needs_realized_inputs


def read_real_buffers(names: Iterable[str]) -> None:
    """Have Inductor evaluate all inputs of the ops `mamba_ops::<name>` before it calls them."""
    for name in names:
        add_needs_realized_inputs(getattr(torch.ops.mamba_ops, name).default)
