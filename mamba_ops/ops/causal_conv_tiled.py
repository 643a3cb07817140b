"""The causal convolution as one op: one launch a layer, with the tiles of a step worked out by the caller."""

import torch
import triton
from torch import Tensor
from torch.library import custom_op, triton_op, wrap_triton

from mamba_ops import conv_checks
from mamba_ops.conv import causal_conv_unchecked
from mamba_ops.kernels import causal_conv_tiled as kernel
from mamba_ops.ops.dispatch import runs_kernels
from mamba_ops.ops.opaque import read_before_write
from mamba_ops.value_checks import check_sequences_in_place


@triton_op("mamba_ops::causal_conv_tiled", mutates_args={"conv_state"})
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
) -> Tensor:
    """SiLU(bias + depthwise causal convolution), each sequence continued from its slot; the slots are updated in place.

    Args:
        x: (ntokens, conv_dim), last dimension dense. Rows of the result that belong to no sequence are not defined.
        weight: (conv_dim, width) dense, 2 <= width <= 9; `weight[:, -1]` meets the token itself.
        bias: (conv_dim,) or None.
        cu_seqlens: (nseqs + 1,) int32, token offsets.
        conv_state: (num_slots, conv_dim, at least width - 1), dtype of x; the first width - 1 entries of a slot hold
            the last inputs of a sequence, oldest first. Updated in place.
        slots: (nseqs,) int32 or int64, any stride, no slot twice.
        has_initial_state: (nseqs,) bool; a sequence without one starts from zeros and its slot is not read.
        tile_sequence, tile_offset: (ntiles,) int32: every sequence is cut into tiles of 8 tokens, and these are the
            sequence of each tile and its number in the sequence; a negative sequence is padding. Unused on a CPU.

    Returns:
        (ntokens, conv_dim), dtype of x.

    Raises:
        ValueError, TypeError: an argument that does not fit; nothing has been written. On a GPU the values in
            `cu_seqlens`, `slots` and the tiles are not looked at.
    """
    conv_checks.causal_conv_tiled(
        x,
        weight,
        bias,
        cu_seqlens,
        conv_state,
        slots,
        has_initial_state,
        tile_sequence,
        tile_offset,
        max_width=kernel.BLOCK_TOKENS + 1,
    )
    width = weight.shape[1]
    if not runs_kernels(x):
        return _causal_conv_tiled_cpu(x, weight, bias, cu_seqlens, conv_state, slots, has_initial_state)
    ntokens, conv_dim = x.shape
    out = torch.empty((ntokens, conv_dim), dtype=x.dtype, device=x.device)
    wrap_triton(kernel.causal_conv_tiled_kernel)[tile_sequence.shape[0], triton.cdiv(conv_dim, kernel.BLOCK_CHANNELS)](
        x,
        weight,
        bias,
        cu_seqlens,
        conv_state,
        slots,
        has_initial_state,
        tile_sequence,
        tile_offset,
        out,
        conv_state.shape[0],
        x.stride(0),
        conv_state.stride(0),
        slots.stride(0),
        has_initial_state.stride(0),
        stride_state_channel=conv_state.stride(1),
        stride_state_token=conv_state.stride(2),
        conv_dim=conv_dim,
        WIDTH=width,
        HAS_BIAS=bias is not None,
        BLOCK_TOKENS=kernel.BLOCK_TOKENS,
        BLOCK_CHANNELS=kernel.BLOCK_CHANNELS,
        num_warps=kernel.NUM_WARPS,
    )
    return out


@custom_op("mamba_ops::causal_conv_tiled_cpu", mutates_args={"conv_state"}, device_types="cpu")
def _causal_conv_tiled_cpu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cu_seqlens: Tensor,
    conv_state: Tensor,
    slots: Tensor,
    has_initial_state: Tensor,
) -> Tensor:
    check_sequences_in_place(cu_seqlens, x.shape[0], None, slots, conv_state.shape[0])
    history = conv_state[:, :, : weight.shape[1] - 1]
    return causal_conv_unchecked(x, weight, bias, cu_seqlens, history, slots, has_initial_state, slots)


@_causal_conv_tiled_cpu.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cu_seqlens: Tensor,
    conv_state: Tensor,
    slots: Tensor,
    has_initial_state: Tensor,
) -> Tensor:
    return x.new_empty(x.shape)


read_before_write(["causal_conv_tiled_cpu"])
