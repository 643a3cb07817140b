"""The static checks of the causal convolution; see `mamba_ops.checks` for what a static check is."""

import torch
from torch import Tensor

from mamba_ops import op_checks
from mamba_ops.checks import (
    FLOATS,
    INT32,
    SLOT_DTYPES,
    check_dense,
    check_tensor,
    check_tokens,
    check_written_once,
)
from mamba_ops.op_checks import BOOL, check_checkpoint_marks, check_reads


def check_weights(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Check what is convolved, and with what."""
    check_tensor("x", x, {"ntokens": None, "conv_dim": None}, FLOATS, x.device)
    conv_dim = x.shape[1]
    check_tensor("weight", weight, {"conv_dim": conv_dim, "width": None}, FLOATS, x.device)
    if weight.shape[1] < 2:
        raise ValueError(f"weight: shape {tuple(weight.shape)}; a convolution has a width of at least 2")
    if bias is not None:
        check_tensor("bias", bias, {"conv_dim": conv_dim}, FLOATS, x.device)


def check_sequences(
    cu_seqlens: Tensor,
    conv_state: Tensor,
    read_slots: Tensor,
    has_initial_state: Tensor | None,
    write_slots: Tensor,
    conv_dim: int,
    width: int,
    device: torch.device,
) -> None:
    """Check the sequences, and the cache from which they are continued."""
    check_tensor("cu_seqlens", cu_seqlens, {"nseqs + 1": None}, SLOT_DTYPES, device)
    nseqs = cu_seqlens.shape[0] - 1
    if nseqs < 1:
        raise ValueError(f"cu_seqlens: shape {tuple(cu_seqlens.shape)}; expected at least two offsets")
    dims = {"num_slots": None, "conv_dim": conv_dim, "width - 1": width - 1}
    check_tensor("conv_state", conv_state, dims, FLOATS, device)
    check_written_once("conv_state", conv_state)
    check_reads(read_slots, has_initial_state, nseqs, device)
    check_tensor("write_slots", write_slots, {"nseqs": nseqs}, SLOT_DTYPES, device)


def causal_conv_tiled(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cu_seqlens: Tensor,
    conv_state: Tensor,
    slots: Tensor,
    has_initial_state: Tensor,
    tile_sequence: Tensor,
    tile_offset: Tensor,
    max_width: int,
) -> None:
    """Check the arguments of `mamba_ops.ops.causal_conv_tiled`; a width of at most `max_width` is covered by a tile."""
    check_weights(x, weight, bias)
    check_tokens("x", x, {"ntokens": None, "conv_dim": None}, FLOATS, x.device)
    width = weight.shape[1]
    if width > max_width:
        raise ValueError(f"weight: width {width}; allowed: 2 to {max_width}")
    check_dense("weight", weight)
    if bias is not None:
        check_dense("bias", bias)
    _check_tiled_sequences(x, cu_seqlens, conv_state, slots, has_initial_state, width)
    check_tensor("tile_sequence", tile_sequence, {"ntiles": None}, INT32, x.device)
    check_tensor("tile_offset", tile_offset, {"ntiles": tile_sequence.shape[0]}, INT32, x.device)
    check_dense("tile_sequence", tile_sequence)
    check_dense("tile_offset", tile_offset)


def conv_checkpoint(
    x: Tensor,
    cu_seqlens: Tensor,
    conv_state: Tensor,
    slots: Tensor,
    has_initial_state: Tensor,
    checkpoint_offsets: Tensor,
    checkpoint_slots: Tensor,
    width: int,
    max_width: int,
) -> None:
    """Check the arguments of `mamba_ops.ops.conv_checkpoint`."""
    check_tokens("x", x, {"ntokens": None, "conv_dim": None}, FLOATS, x.device)
    if not 2 <= width <= max_width:
        raise ValueError(f"width: {width}; allowed: 2 to {max_width}")
    _check_tiled_sequences(x, cu_seqlens, conv_state, slots, has_initial_state, width)
    check_checkpoint_marks(checkpoint_offsets, checkpoint_slots, slots.shape[0], x.device)


def conv_cumsum(
    x: Tensor, cu_chunk_seqlens: Tensor, dt: Tensor, A: Tensor, chunk_size: int, dt_bias: Tensor | None
) -> None:
    """Check what `mamba_ops.ops.conv_cumsum` takes besides what the convolution does."""
    check_tensor("dt", dt, {"ntokens": x.shape[0], "nheads": None}, FLOATS, x.device)
    op_checks.chunk_cumsum(dt, A, cu_chunk_seqlens, chunk_size, dt_bias, None, None)


def _check_tiled_sequences(
    x: Tensor, cu_seqlens: Tensor, conv_state: Tensor, slots: Tensor, has_initial_state: Tensor, width: int
) -> None:
    check_tensor("cu_seqlens", cu_seqlens, {"nseqs + 1": None}, INT32, x.device)
    check_dense("cu_seqlens", cu_seqlens)
    nseqs = cu_seqlens.shape[0] - 1
    if nseqs < 0:
        raise ValueError("cu_seqlens: shape (0,); it holds at least the offset 0")
    dims = {"num_slots": None, "conv_dim": x.shape[1], "history": None}
    check_tensor("conv_state", conv_state, dims, (x.dtype,), x.device)
    if conv_state.shape[2] < width - 1:
        raise ValueError(f"conv_state: {conv_state.shape[2]} entries a channel; a width of {width} needs {width - 1}")
    check_written_once("conv_state", conv_state)
    check_tensor("slots", slots, {"nseqs": nseqs}, SLOT_DTYPES, x.device)
    check_tensor("has_initial_state", has_initial_state, {"nseqs": nseqs}, BOOL, x.device)
