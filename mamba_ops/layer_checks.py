"""What the stages of `Mamba2Layer` check themselves too, but only after the first of them has written."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from mamba_ops.checks import check_cache, check_chunk_size, check_tensor
from mamba_ops.conv_checks import check_sequences
from mamba_ops.metadata import ChunkMetadata

if TYPE_CHECKING:
    from mamba_ops.layer import Mamba2Layer


def check_call(
    layer: Mamba2Layer,
    hidden_states: Tensor,
    metadata: ChunkMetadata,
    conv_state: Tensor,
    state_cache: Tensor,
    read_slots: Tensor,
    has_initial_state: Tensor | None,
    write_slots: Tensor,
) -> None:
    """Check the arguments of a call, without reading values; see `mamba_ops.checks`."""
    weight = layer.in_proj.weight
    tokens = {"ntokens": None, "hidden_size": layer.hidden_size}
    check_tensor("hidden_states", hidden_states, tokens, (weight.dtype,), weight.device)
    check_chunk_size(metadata.chunk_size)
    check_sequences(
        metadata.cu_seqlens,
        conv_state,
        read_slots,
        has_initial_state,
        write_slots,
        layer.conv_dim,
        layer.conv_width,
        weight.device,
    )
    row = {"nheads": layer.nheads, "headdim": layer.headdim, "dstate": layer.dstate}
    check_cache("state_cache", state_cache, row, weight.device)
    if state_cache.shape[0] != conv_state.shape[0]:
        raise ValueError(f"state_cache: {state_cache.shape[0]} slots; conv_state has {conv_state.shape[0]}")
