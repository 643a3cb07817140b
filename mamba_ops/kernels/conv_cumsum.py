"""The convolution and, beside it in the same launch, the running sums of the chunks.

Neither needs the other, and together they are what has to be known before the one-pass continuation.
"""

import triton
import triton.language as tl

from mamba_ops.kernels.causal_conv_tiled import convolve_tile
from mamba_ops.kernels.chunk_cumsum import sum_chunk

NUM_WARPS = 2
BLOCKS_OF_HEADS = 2  # a program's, one after the other


@triton.jit(
    do_not_specialize=["ntiles", "num_slots", "stride_slots", "stride_has"],
    do_not_specialize_on_alignment=[
        "cu_seqlens_ptr",
        "slots_ptr",
        "has_ptr",
        "tile_sequence_ptr",
        "tile_offset_ptr",
        "cu_chunk_seqlens_ptr",
    ],
)
def conv_cumsum_kernel(
    # Pointers; see `causal_conv_tiled_kernel` and `chunk_cumsum_kernel`
    x_ptr,
    weight_ptr,
    bias_ptr,
    cu_seqlens_ptr,
    state_ptr,  # read and written
    slots_ptr,
    has_ptr,
    tile_sequence_ptr,
    tile_offset_ptr,
    out_ptr,  # written
    dt_ptr,
    A_ptr,
    dt_bias_ptr,
    cu_chunk_seqlens_ptr,
    dt_out_ptr,  # written
    dA_cumsum_ptr,  # written
    # Sizes and strides, in elements; the first five vary from call to call
    ntiles,
    num_slots,
    stride_state_slot,
    stride_slots,
    stride_has,
    stride_x_token,
    stride_dt_token,
    stride_dt_head,
    stride_A,
    stride_dt_bias,
    stride_state_channel: tl.constexpr,
    stride_state_token: tl.constexpr,
    conv_dim: tl.constexpr,
    nheads: tl.constexpr,
    chunk_size: tl.constexpr,
    # What is compiled in
    WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_DT_BIAS: tl.constexpr,
    DT_SOFTPLUS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCKS_OF_HEADS: tl.constexpr,
):
    pid = tl.program_id(0)
    if pid < ntiles:
        if tl.program_id(1) * BLOCK_CHANNELS < conv_dim:
            convolve_tile(
                pid,
                tl.program_id(1),
                x_ptr,
                weight_ptr,
                bias_ptr,
                cu_seqlens_ptr,
                state_ptr,
                slots_ptr,
                has_ptr,
                tile_sequence_ptr,
                tile_offset_ptr,
                out_ptr,
                num_slots,
                stride_x_token,
                stride_state_slot,
                stride_slots,
                stride_has,
                stride_state_channel,
                stride_state_token,
                conv_dim,
                WIDTH,
                HAS_BIAS,
                BLOCK_TOKENS,
                BLOCK_CHANNELS,
            )
    elif tl.program_id(1) * BLOCK_HEADS * BLOCKS_OF_HEADS < nheads:
        for block in tl.static_range(BLOCKS_OF_HEADS):
            sum_chunk(
                (pid - ntiles).to(tl.int64),
                tl.program_id(1) * BLOCKS_OF_HEADS + block,
                dt_ptr,
                A_ptr,
                dt_bias_ptr,
                cu_chunk_seqlens_ptr,
                dt_out_ptr,
                dA_cumsum_ptr,
                stride_dt_token,
                stride_dt_head,
                stride_A,
                stride_dt_bias,
                nheads,
                chunk_size,
                HAS_DT_BIAS,
                DT_SOFTPLUS,
                False,
                0.0,
                False,
                0.0,
                BLOCK_HEADS,
            )
