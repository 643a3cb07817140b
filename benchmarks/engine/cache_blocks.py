"""How many blocks a cache must have so that an engine's requests just fit, and some are preempted as they grow.

It has to be said before the engine starts, and a fixed number does not do: each request holds a block for every group
of layers that shares its blocks, ten in Granite-4.0-h-micro and three in Nemotron-H.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.engine.scenarios import AT_ONCE

_MAMBA = {"M", "mamba", "linear_attention"}
_ATTENTION = {"*", "attention", "full_attention"}


def blocks_for(model: str, share: float) -> int:
    """A block in each group for this share of as many requests as run at once."""
    return round(AT_ONCE * groups(json.loads(Path(model, "config.json").read_text())) * share)


def groups(config: dict[str, Any]) -> int:
    """Of layers that share their blocks: those of attention, and as often as many Mamba2 layers.

    Args:
        config: of the model, as transformers writes it; how that spells the layers differs by version.
    """
    spelled = ("layers_block_type", "layer_types", "hybrid_override_pattern")
    kinds: list[str] = next((list(config[name]) for name in spelled if config.get(name)), [])
    mamba, attention = (sum(kind in known for kind in kinds) for known in (_MAMBA, _ATTENTION))
    return 1 + -(-mamba // attention) if mamba and attention else 2  # Falcon-H1 has both in every layer
