"""What is inspected if the user names nothing: a Mamba2 layer in the shape of Granite-4.0-h-micro, continued once.

Its weights and caches are random; slots that are not the sequence's hold NaN, so that a result that took anything from
them would show it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mamba_ops.layer import Mamba2Layer
from mamba_ops.metadata import build_chunk_metadata

HIDDEN_SIZE, NHEADS, HEADDIM, DSTATE, NGROUPS, CONV_WIDTH, CHUNK_SIZE = 2048, 64, 64, 128, 1, 4, 256
CACHED_TOKENS, NEW_TOKENS = 4224, 32
NUM_SLOTS, SLOT = 6, 4


def make_layer(device: torch.device, *, snapshot: bool = True) -> Mamba2Layer:
    """A layer with random weights in BF16, the same at each call.

    Args:
        device: where it computes.
        snapshot: whether it spells the state as stock code does, a gathered and masked copy, or reads it in place.
    """
    torch.manual_seed(0)
    return Mamba2Layer(
        HIDDEN_SIZE,
        NHEADS,
        HEADDIM,
        DSTATE,
        ngroups=NGROUPS,
        conv_width=CONV_WIDTH,
        chunk_size=CHUNK_SIZE,
        snapshot=snapshot,
        device=device,
        dtype=torch.bfloat16,
    )


@torch.inference_mode()
def continue_sequence() -> dict[str, Tensor]:
    """Compile the layer and continue one sequence of 4,224 tokens by 32.

    Returns:
        The output (32, 2048) and both caches.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    layer = make_layer(device)
    state = layer.allocate_state(NUM_SLOTS)
    for cache in state:
        cache.fill_(torch.nan)
        cache[SLOT] = torch.randn(cache.shape[1:], device=device)
    hidden_states = torch.randn(NEW_TOKENS, HIDDEN_SIZE, device=device, dtype=torch.bfloat16)
    metadata = build_chunk_metadata([0, NEW_TOKENS], CHUNK_SIZE, context_lens=[CACHED_TOKENS], device=device)
    slots, has_initial_state = torch.tensor([SLOT], device=device), torch.tensor([True], device=device)
    compiled = torch.compile(layer, fullgraph=True)
    output = compiled(hidden_states, metadata, *state, slots, has_initial_state, slots)
    return {"output": output, "conv_state": state.conv_state, "state_cache": state.state_cache}
