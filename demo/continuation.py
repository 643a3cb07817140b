"""What the demo measures on: one layer in the shape of Granite-4.0-h-micro, one sequence that is continued."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from inductor_passes.inspection.granite_layer import (
    CACHED_TOKENS,
    CHUNK_SIZE,
    DSTATE,
    HEADDIM,
    HIDDEN_SIZE,
    NEW_TOKENS,
    NHEADS,
    NUM_SLOTS,
    SLOT,
)
from mamba_ops.layer import LayerState, Mamba2Layer
from mamba_ops.metadata import ChunkMetadata, build_chunk_metadata

STATE_SHAPE = (NHEADS, HEADDIM, DSTATE)


class Result(NamedTuple):
    """What one continuation leaves: the layer's output, and both caches with all their slots."""

    output: Tensor
    conv_state: Tensor
    state_cache: Tensor


@dataclass(frozen=True)
class Continuation:
    """A sequence that stands at its 4,224th token in a cache slot, and its next 32 tokens.

    All other slots hold NaN: a result that took anything from them would show it.
    """

    state: LayerState
    hidden_states: Tensor
    metadata: ChunkMetadata
    slots: Tensor
    has_initial_state: Tensor

    @classmethod
    def prefill(cls, layer: Mamba2Layer, state_dtype: torch.dtype) -> Continuation:
        """Prefill 4,224 random tokens from scratch, uncompiled."""
        device, dtype = layer.conv_weight.device, layer.conv_weight.dtype
        state = layer.allocate_state(NUM_SLOTS, state_dtype)
        for cache in state:
            cache.fill_(torch.nan)
        hidden_states = torch.randn(CACHED_TOKENS + NEW_TOKENS, HIDDEN_SIZE, device=device, dtype=dtype)
        slots = torch.tensor([SLOT], device=device)
        metadata = build_chunk_metadata([0, CACHED_TOKENS], CHUNK_SIZE, device=device)
        layer(hidden_states[:CACHED_TOKENS], metadata, *state, slots, torch.tensor([False], device=device), slots)
        return cls(
            state,
            hidden_states[CACHED_TOKENS:],
            build_chunk_metadata([0, NEW_TOKENS], CHUNK_SIZE, context_lens=[CACHED_TOKENS], device=device),
            slots,
            torch.tensor([True], device=device),
        )

    def inputs(self) -> tuple[Tensor, ChunkMetadata, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Arguments of the layer that continues the sequence, with fresh copies of both caches."""
        conv_state, state_cache = (cache.clone() for cache in self.state)
        return (
            self.hidden_states,
            self.metadata,
            conv_state,
            state_cache,
            self.slots,
            self.has_initial_state,
            self.slots,
        )
