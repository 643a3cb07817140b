"""What the user calls the inputs of a compiled graph, which calls them arg0_1, arg1_1 and so on.

Dynamo tells its shape environment where each tensor comes from, in the order of the graph's inputs.
"""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor, fx
from torch._guards import TracingContext

_PART = re.compile(r"(?:\._(?:modules|parameters|buffers))?\['(\w+)'\]")


def input_names(graph: fx.Graph) -> dict[fx.Node, str]:
    """The user's names of the inputs that are tensors; empty if they cannot be told for certain."""
    try:
        context: Any = TracingContext.try_get()
        tracked = [(_readable(fake.source.name), fake.fake) for fake in context.fake_mode.shape_env.tracked_fakes]
    except Exception:  # nobody traces, or PyTorch keeps them elsewhere
        return {}
    sources = [(name, fake) for name, fake in tracked if isinstance(fake, Tensor) and not name.endswith("._base")]
    inputs = [node for node in graph.nodes if node.op == "placeholder" and isinstance(node.meta.get("val"), Tensor)]
    fits = len(inputs) == len(sources) and all(
        (node.meta["val"].dtype, str(node.meta["val"].shape)) == (fake.dtype, str(fake.shape))
        for node, (_, fake) in zip(inputs, sources, strict=True)
    )
    return {node: name for node, (name, _) in zip(inputs, sources, strict=True)} if fits else {}


def _readable(source: Any) -> str:
    """`L['self']._buffers['state_cache']` as `self.state_cache`."""
    name = source() if callable(source) else str(source)
    return _PART.sub(r".\1", name.removeprefix("L").removeprefix("G")).lstrip(".") if name[:2] in ("L[", "G[") else name
