"""The convolution and the running sums as one op, so that they are one launch."""

import torch
import triton
from torch import Tensor
from torch.library import custom_op, triton_op

from mamba_ops import conv_checks, cpu
from mamba_ops.conv import causal_conv_unchecked
from mamba_ops.kernels import causal_conv_tiled as conv_kernel
from mamba_ops.kernels import chunk_cumsum
from mamba_ops.kernels import conv_cumsum as kernel
from mamba_ops.ops.dispatch import runs_kernels
from mamba_ops.ops.launch import Launch
from mamba_ops.ops.opaque import read_before_write
from mamba_ops.value_checks import check_sequences_in_place


@triton_op("mamba_ops::conv_cumsum", mutates_args={"conv_state"})
def conv_cumsum(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cu_seqlens: Tensor,
    conv_state: Tensor,
    slots: Tensor,
    has_initial_state: Tensor,
    tile_sequence: Tensor,
    tile_offset: Tensor,
    dt: Tensor,
    A: Tensor,
    chunk_size: int,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    cu_chunk_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`causal_conv_tiled` and `chunk_cumsum`; the same bits in one launch.

    Args:
        x, weight, bias, cu_seqlens, conv_state, slots, has_initial_state, tile_sequence, tile_offset: as of
            `causal_conv_tiled`. An empty sequence is padding.
        dt, A, chunk_size, dt_bias, dt_softplus: as of `chunk_cumsum`.
        cu_chunk_seqlens: (nchunks + 1,) int32, as of `chunk_cumsum`. None: each sequence is one chunk.

    Returns:
        (convolved, dA_cumsum, dt_out): (ntokens, conv_dim), dtype of x; (nchunks, nheads, chunk_size) FP32 twice.
        The rows of an empty chunk in the last two are not defined.

    Raises:
        ValueError, TypeError: an argument that does not fit; nothing has been written. On a GPU the values in
            `cu_seqlens`, `slots` and the tiles are not looked at.
    """
    convolution = (x, weight, bias, cu_seqlens, conv_state, slots, has_initial_state, tile_sequence, tile_offset)
    conv_checks.causal_conv_tiled(*convolution, max_width=conv_kernel.BLOCK_TOKENS + 1)
    chunks = cu_seqlens if cu_chunk_seqlens is None else cu_chunk_seqlens
    conv_checks.conv_cumsum(x, chunks, dt, A, chunk_size, dt_bias)
    if not runs_kernels(x):
        convolved, dA_cumsum, dt_out = _conv_cumsum_cpu(
            x,
            weight,
            bias,
            cu_seqlens,
            conv_state,
            slots,
            has_initial_state,
            dt,
            A,
            chunk_size,
            dt_bias,
            dt_softplus,
            cu_chunk_seqlens,
        )
        return convolved, dA_cumsum, dt_out
    nchunks, nheads = chunks.shape[0] - 1, dt.shape[1]
    convolved = torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)
    dt_out = torch.empty((nchunks, nheads, chunk_size), dtype=torch.float32, device=x.device)
    dA_cumsum = torch.empty((nchunks, nheads, chunk_size), dtype=torch.float32, device=x.device)
    conv_cumsum_launch(
        x,
        weight,
        bias,
        cu_seqlens,
        conv_state,
        slots,
        has_initial_state,
        tile_sequence,
        tile_offset,
        convolved,
        dt,
        A,
        dt_bias,
        chunks,
        dt_out,
        dA_cumsum,
        dt_softplus,
    ).run()
    return convolved, dA_cumsum, dt_out


def conv_cumsum_launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cu_seqlens: Tensor,
    conv_state: Tensor,
    slots: Tensor,
    has_initial_state: Tensor,
    tile_sequence: Tensor,
    tile_offset: Tensor,
    convolved: Tensor,
    dt: Tensor,
    A: Tensor,
    dt_bias: Tensor | None,
    cu_chunk_seqlens: Tensor,
    dt_out: Tensor,
    dA_cumsum: Tensor,
    dt_softplus: bool,
) -> Launch:
    """The launch behind `conv_cumsum`, with its arguments and its results, which are written."""
    conv_dim, width = weight.shape
    nchunks, nheads, chunk_size = dt_out.shape
    ntiles = tile_sequence.shape[0]
    arguments = (
        x,
        weight,
        bias,
        cu_seqlens,
        conv_state,
        slots,
        has_initial_state,
        tile_sequence,
        tile_offset,
        convolved,
        dt,
        A,
        dt_bias,
        cu_chunk_seqlens,
        dt_out,
        dA_cumsum,
        ntiles,
        conv_state.shape[0],
        conv_state.stride(0),
        slots.stride(0),
        has_initial_state.stride(0),
        x.stride(0),
        dt.stride(0),
        dt.stride(1),
        A.stride(0),
        0 if dt_bias is None else dt_bias.stride(0),
    )
    block_heads = chunk_cumsum.block_heads(chunk_size, kernel.NUM_WARPS)
    constants = {
        "stride_state_channel": conv_state.stride(1),
        "stride_state_token": conv_state.stride(2),
        "conv_dim": conv_dim,
        "nheads": nheads,
        "chunk_size": chunk_size,
        "WIDTH": width,
        "HAS_BIAS": bias is not None,
        "HAS_DT_BIAS": dt_bias is not None,
        "DT_SOFTPLUS": dt_softplus,
        "BLOCK_TOKENS": conv_kernel.BLOCK_TOKENS,
        "BLOCK_CHANNELS": conv_kernel.BLOCK_CHANNELS,
        "BLOCK_HEADS": block_heads,
        "BLOCKS_OF_HEADS": kernel.BLOCKS_OF_HEADS,
        "num_warps": kernel.NUM_WARPS,
    }
    heads = block_heads * kernel.BLOCKS_OF_HEADS
    blocks = max(triton.cdiv(conv_dim, conv_kernel.BLOCK_CHANNELS), triton.cdiv(nheads, heads))
    return Launch(kernel.conv_cumsum_kernel, (ntiles + nchunks, blocks), arguments, constants)


@custom_op("mamba_ops::conv_cumsum_cpu", mutates_args={"conv_state"}, device_types="cpu")
def _conv_cumsum_cpu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cu_seqlens: Tensor,
    conv_state: Tensor,
    slots: Tensor,
    has_initial_state: Tensor,
    dt: Tensor,
    A: Tensor,
    chunk_size: int,
    dt_bias: Tensor | None,
    dt_softplus: bool,
    cu_chunk_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    most = chunk_size if cu_chunk_seqlens is None else None
    check_sequences_in_place(cu_seqlens, x.shape[0], most, slots, conv_state.shape[0])
    if cu_chunk_seqlens is None:
        present = (cu_seqlens.diff() > 0).nonzero().squeeze(1)
        chunks = torch.cat((cu_seqlens[:1], cu_seqlens[1:][present]))
        dA_cumsum, dt_out = (
            step.new_zeros((slots.shape[0], *step.shape[1:])).index_copy_(0, present, step)
            for step in cpu.chunk_cumsum(dt, A, chunks, chunk_size, dt_bias, dt_softplus)
        )
    else:
        dA_cumsum, dt_out = cpu.chunk_cumsum(dt, A, cu_chunk_seqlens, chunk_size, dt_bias, dt_softplus)
    history = conv_state[:, :, : weight.shape[1] - 1]
    convolved = causal_conv_unchecked(x, weight, bias, cu_seqlens, history, slots, has_initial_state, slots)
    return convolved, dA_cumsum, dt_out


@_conv_cumsum_cpu.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cu_seqlens: Tensor,
    conv_state: Tensor,
    slots: Tensor,
    has_initial_state: Tensor,
    dt: Tensor,
    A: Tensor,
    chunk_size: int,
    dt_bias: Tensor | None,
    dt_softplus: bool,
    cu_chunk_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    nchunks = (cu_seqlens if cu_chunk_seqlens is None else cu_chunk_seqlens).shape[0] - 1
    shape = (nchunks, dt.shape[1], chunk_size)
    return (
        x.new_empty(x.shape),
        dt.new_empty(shape, dtype=torch.float32),
        dt.new_empty(shape, dtype=torch.float32),
    )


read_before_write(["conv_cumsum_cpu"])
