"""Stage 2: what each chunk, taken alone, adds to the state by its end.

Source: Dao and Gu, "Transformers are SSMs" (2024), section 6, step 2 (right factors, the B terms).
"""

import triton
import triton.language as tl

from mamba_ops.kernels.math import fast_exp

BLOCK_HEADDIM = 64
BLOCK_DSTATE = 128
BLOCK_TOKENS = 32
NUM_WARPS = 4
NUM_STAGES = 3


@triton.jit(do_not_specialize_on_alignment=["cu_chunk_seqlens_ptr"])
def chunk_state_kernel(
    # Pointers
    x_ptr,  # (ntokens, nheads, headdim)
    B_ptr,  # (ntokens, ngroups, dstate)
    dt_ptr,  # (nchunks, nheads, chunk_size) FP32
    dA_cumsum_ptr,  # (nchunks, nheads, chunk_size) FP32
    cu_chunk_seqlens_ptr,  # (nchunks + 1,)
    states_ptr,  # (nchunks, nheads, headdim, dstate) FP32: written
    # Sizes and strides, in elements
    stride_x_token,
    stride_x_head,
    stride_B_token,
    stride_B_group,
    nheads: tl.constexpr,
    heads_per_group: tl.constexpr,
    headdim: tl.constexpr,
    dstate: tl.constexpr,
    chunk_size: tl.constexpr,
    # What is compiled in
    BLOCK_HEADDIM: tl.constexpr,
    BLOCK_DSTATE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
):
    pid_p = tl.program_id(0) // tl.cdiv(dstate, BLOCK_DSTATE)
    pid_n = tl.program_id(0) % tl.cdiv(dstate, BLOCK_DSTATE)
    pid_c = tl.program_id(1).to(tl.int64)
    pid_h = tl.program_id(2).to(tl.int64)
    start = tl.load(cu_chunk_seqlens_ptr + pid_c).to(tl.int64)
    length = (tl.load(cu_chunk_seqlens_ptr + pid_c + 1).to(tl.int64) - start).to(tl.int32)
    if length <= 0:  # a padded chunk
        return

    offs_p = pid_p * BLOCK_HEADDIM + tl.arange(0, BLOCK_HEADDIM)
    offs_n = pid_n * BLOCK_DSTATE + tl.arange(0, BLOCK_DSTATE)
    offs_t = tl.arange(0, BLOCK_TOKENS)
    x_base = x_ptr + start * stride_x_token + pid_h * stride_x_head
    x_ptrs = x_base + offs_p[:, None] + offs_t[None, :] * stride_x_token
    B_base = B_ptr + start * stride_B_token + (pid_h // heads_per_group) * stride_B_group
    B_ptrs = B_base + offs_n[None, :] + offs_t[:, None] * stride_B_token
    row = (pid_c * nheads + pid_h) * chunk_size
    dt_ptrs = dt_ptr + row + offs_t
    dA_ptrs = dA_cumsum_ptr + row + offs_t
    dA_end = tl.load(dA_cumsum_ptr + row + chunk_size - 1)

    acc = tl.zeros((BLOCK_HEADDIM, BLOCK_DSTATE), dtype=tl.float32)
    for t in range(0, length, BLOCK_TOKENS):
        is_token = offs_t < length - t
        x = tl.load(x_ptrs, mask=(offs_p[:, None] < headdim) & is_token[None, :], other=0.0)
        B = tl.load(B_ptrs, mask=is_token[:, None] & (offs_n[None, :] < dstate), other=0.0).to(tl.float32)
        dA = tl.load(dA_ptrs, mask=is_token, other=0.0)
        dt = tl.load(dt_ptrs, mask=is_token, other=0.0)
        B *= (fast_exp(tl.minimum(dA_end - dA, 0.0)) * dt)[:, None]
        acc += tl.dot(x, B.to(x_ptr.dtype.element_ty))
        x_ptrs += BLOCK_TOKENS * stride_x_token
        B_ptrs += BLOCK_TOKENS * stride_B_token
        dt_ptrs += BLOCK_TOKENS
        dA_ptrs += BLOCK_TOKENS

    states_ptrs = states_ptr + (pid_c * nheads + pid_h) * headdim * dstate + offs_p[:, None] * dstate + offs_n[None, :]
    tl.store(states_ptrs, acc, mask=(offs_p[:, None] < headdim) & (offs_n[None, :] < dstate))
