"""The convolution's states in the middle of some sequences as an op: one launch before that of the convolution."""

import triton
from torch import Tensor
from torch.library import custom_op, triton_op

from mamba_ops import conv_checks, cpu
from mamba_ops.kernels import causal_conv_tiled as conv_kernel
from mamba_ops.kernels import conv_checkpoint as kernel
from mamba_ops.ops.dispatch import runs_kernels
from mamba_ops.ops.launch import Launch


@triton_op("mamba_ops::conv_checkpoint", mutates_args={"conv_state"})
def conv_checkpoint(
    x: Tensor,
    cu_seqlens: Tensor,
    conv_state: Tensor,
    slots: Tensor,
    has_initial_state: Tensor,
    checkpoint_offsets: Tensor,
    checkpoint_slots: Tensor,
    width: int,
) -> None:
    """Keep what the convolution would leave in a sequence's slot if the sequence ended at its checkpoint.

    To be called before the convolution, which overwrites the slots that this may read.

    Args:
        x: (ntokens, conv_dim), last dimension dense: what will be convolved.
        cu_seqlens, slots, has_initial_state: as of `causal_conv_tiled`. The slot of a sequence is read only if it has
            an initial state, and a checkpoint with fewer than width - 1 tokens before it.
        conv_state: (num_slots, conv_dim, at least width - 1), dtype of x. Updated in place at `checkpoint_slots`.
        checkpoint_offsets: (nseqs,) int32 dense, tokens of the sequence up to its checkpoint, at most all of them; zero
            or less means that the sequence has none, and then nothing is read or written for it.
        checkpoint_slots: (nseqs,) int32 or int64, any stride, no slot twice, and none that belongs to a sequence.
        width: of the convolution, 2 to 9.

    Raises:
        ValueError, TypeError: an argument that does not fit; nothing has been written. On a GPU the values in
            `cu_seqlens`, in offsets and in slots are not looked at.
    """
    arguments = (x, cu_seqlens, conv_state, slots, has_initial_state, checkpoint_offsets, checkpoint_slots, width)
    conv_checks.conv_checkpoint(*arguments, max_width=conv_kernel.BLOCK_TOKENS + 1)
    if not runs_kernels(x):
        _conv_checkpoint_cpu(
            x, cu_seqlens, conv_state, slots, has_initial_state, checkpoint_offsets, checkpoint_slots, width
        )
        return
    conv_checkpoint_launch(
        x, cu_seqlens, conv_state, slots, has_initial_state, checkpoint_offsets, checkpoint_slots, width
    ).run()


def conv_checkpoint_launch(
    x: Tensor,
    cu_seqlens: Tensor,
    conv_state: Tensor,
    slots: Tensor,
    has_initial_state: Tensor,
    checkpoint_offsets: Tensor,
    checkpoint_slots: Tensor,
    width: int,
) -> Launch:
    """The launch behind `conv_checkpoint`, with the same arguments."""
    conv_dim = x.shape[1]
    arguments = (
        x,
        cu_seqlens,
        conv_state,
        slots,
        has_initial_state,
        checkpoint_offsets,
        checkpoint_slots,
        conv_state.shape[0],
        conv_state.stride(0),
        slots.stride(0),
        has_initial_state.stride(0),
        checkpoint_slots.stride(0),
        x.stride(0),
    )
    constants = {
        "stride_state_channel": conv_state.stride(1),
        "stride_state_token": conv_state.stride(2),
        "conv_dim": conv_dim,
        "WIDTH": width,
        "BLOCK_HISTORY": triton.next_power_of_2(width - 1),
        "BLOCK_CHANNELS": kernel.BLOCK_CHANNELS,
        "num_warps": kernel.NUM_WARPS,
    }
    grid = (slots.shape[0], triton.cdiv(conv_dim, kernel.BLOCK_CHANNELS))
    return Launch(kernel.conv_checkpoint_kernel, grid, arguments, constants)


@custom_op("mamba_ops::conv_checkpoint_cpu", mutates_args={"conv_state"}, device_types="cpu")
def _conv_checkpoint_cpu(
    x: Tensor,
    cu_seqlens: Tensor,
    conv_state: Tensor,
    slots: Tensor,
    has_initial_state: Tensor,
    checkpoint_offsets: Tensor,
    checkpoint_slots: Tensor,
    width: int,
) -> None:
    cpu.conv_checkpoint(
        x, cu_seqlens, conv_state, slots, has_initial_state, checkpoint_offsets, checkpoint_slots, width
    )


@_conv_checkpoint_cpu.register_fake
def _(
    x: Tensor,
    cu_seqlens: Tensor,
    conv_state: Tensor,
    slots: Tensor,
    has_initial_state: Tensor,
    checkpoint_offsets: Tensor,
    checkpoint_slots: Tensor,
    width: int,
) -> None:
    return
