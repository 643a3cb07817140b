"""Stage 1: the step sizes of every token and the running sum of A * dt inside each chunk.

Source: Dao and Gu, "Transformers are SSMs" (2024), section 6; listing 1 (`segsum`).
"""

import triton
import triton.language as tl

NUM_WARPS = 8
TOKENS_PER_THREAD = 4  # a vector of FP32; fewer of them would be summed in another order


def block_heads(chunk_size: int, num_warps: int) -> int:
    """The fewest heads of a program for which every thread has `TOKENS_PER_THREAD` tokens of a chunk.

    The order of sums, and so their last bits, then depend neither on how many heads nor on how many warps there are.
    """
    return max(1, TOKENS_PER_THREAD * 32 * num_warps // chunk_size)


@triton.jit
def _softplus(x):
    """log(1 + exp(x)); beyond 20 the result rounds to x, and exp would only risk overflow."""
    return tl.where(x <= 20.0, tl.math.log(tl.math.exp(x) + 1), x)


@triton.jit
def sum_chunk(
    pid_c,
    pid_h,
    # As of `chunk_cumsum_kernel`
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
    nheads: tl.constexpr,
    chunk_size: tl.constexpr,
    HAS_DT_BIAS: tl.constexpr,
    DT_SOFTPLUS: tl.constexpr,
    HAS_DT_MIN: tl.constexpr,
    DT_MIN: tl.constexpr,
    HAS_DT_MAX: tl.constexpr,
    DT_MAX: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
):
    """One chunk of a block of heads."""
    start = tl.load(cu_chunk_seqlens_ptr + pid_c).to(tl.int64)
    length = tl.load(cu_chunk_seqlens_ptr + pid_c + 1).to(tl.int64) - start
    if length <= 0:  # a padded chunk
        return

    offs_h = pid_h * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    offs_t = tl.arange(0, chunk_size)
    is_head = offs_h < nheads
    is_token = is_head[:, None] & (offs_t[None, :] < length)

    dt_ptrs = dt_ptr + start * stride_dt_token + offs_h[:, None] * stride_dt_head + offs_t[None, :] * stride_dt_token
    dt = tl.load(dt_ptrs, mask=is_token, other=0.0).to(tl.float32)
    if HAS_DT_BIAS:
        dt += tl.load(dt_bias_ptr + offs_h * stride_dt_bias, mask=is_head, other=0.0).to(tl.float32)[:, None]
    if DT_SOFTPLUS:
        dt = _softplus(dt)
    if HAS_DT_MIN:
        dt = tl.maximum(dt, DT_MIN)
    if HAS_DT_MAX:
        dt = tl.minimum(dt, DT_MAX)
    dt = tl.where(is_token, dt, 0.0)
    offs_out = (pid_c * nheads + offs_h[:, None]) * chunk_size + offs_t[None, :]
    # Stored before the sums: Triton then sums in the layout of the store, a few tokens of one head a thread.
    tl.store(dt_out_ptr + offs_out, dt, mask=is_head[:, None])

    A = tl.load(A_ptr + offs_h * stride_A, mask=is_head, other=0.0).to(tl.float32)
    dA_cumsum = tl.cumsum(dt * A[:, None], axis=1)
    tl.store(dA_cumsum_ptr + offs_out, dA_cumsum, mask=is_head[:, None])


@triton.jit(do_not_specialize_on_alignment=["cu_chunk_seqlens_ptr"])
def chunk_cumsum_kernel(
    # Pointers
    dt_ptr,  # (ntokens, nheads)
    A_ptr,  # (nheads,)
    dt_bias_ptr,  # (nheads,)
    cu_chunk_seqlens_ptr,  # (nchunks + 1,)
    dt_out_ptr,  # (nchunks, nheads, chunk_size) FP32: written
    dA_cumsum_ptr,  # (nchunks, nheads, chunk_size) FP32: written
    # Sizes and strides, in elements
    stride_dt_token,
    stride_dt_head,
    stride_A,
    stride_dt_bias,
    nheads: tl.constexpr,
    chunk_size: tl.constexpr,
    # What is compiled in
    HAS_DT_BIAS: tl.constexpr,
    DT_SOFTPLUS: tl.constexpr,
    HAS_DT_MIN: tl.constexpr,
    DT_MIN: tl.constexpr,
    HAS_DT_MAX: tl.constexpr,
    DT_MAX: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
):
    sum_chunk(
        tl.program_id(0).to(tl.int64),
        tl.program_id(1),
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
        HAS_DT_MIN,
        DT_MIN,
        HAS_DT_MAX,
        DT_MAX,
        BLOCK_HEADS,
    )
