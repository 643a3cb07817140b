"""What the stages of `Mamba2Layer` check themselves too, but only after the first of them has written."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mamba_ops.checks import FLOATS, check_cache, check_tensor
from mamba_ops.conv_checks import check_sequences
from mamba_ops.metadata import ChunkMetadata
from mamba_ops.ssd_checks import check_metadata

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
    _check_weights(layer, weight.dtype, weight.device)
    tokens = {"ntokens": None, "hidden_size": layer.hidden_size}
    check_tensor("hidden_states", hidden_states, tokens, (weight.dtype,), weight.device)
    check_metadata(metadata, weight.device)
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


def _check_weights(layer: Mamba2Layer, dtype: torch.dtype, device: torch.device) -> None:
    """Weights can be replaced or cast one by one after the layer was made."""
    if dtype not in FLOATS:
        raise TypeError(f"in_proj.weight: dtype {dtype}; allowed: {', '.join(map(str, FLOATS))}")
    heads, hidden = {"nheads": layer.nheads}, {"hidden_size": layer.hidden_size}
    for name in ("A_log", "D", "dt_bias"):
        check_tensor(name, getattr(layer, name), heads, FLOATS, device)
    own = (dtype,)
    check_tensor(
        "conv_weight", layer.conv_weight, {"conv_dim": layer.conv_dim, "conv_width": layer.conv_width}, own, device
    )
    check_tensor("out_proj.weight", layer.out_proj.weight, {**hidden, "d_inner": layer.d_inner}, own, device)
    if layer.norm_weight is not None:
        check_tensor("norm_weight", layer.norm_weight, {"d_inner": layer.d_inner}, own, device)
