"""Stage 4: the products C_m . B_k of every pair of tokens inside a chunk, one matrix a group.

Only the pairs that the causal scan reads are computed: k <= m < length of the chunk, rounded up to whole blocks.

Source: Dao and Gu, "Transformers are SSMs" (2024), section 6, step 1 (the attention-like matrix L o C B^T).
"""

import triton
import triton.language as tl

BLOCK_M = 64
BLOCK_K = 64
BLOCK_DSTATE = 32
NUM_WARPS = 4
NUM_STAGES = 3


@triton.jit(do_not_specialize_on_alignment=["cu_chunk_seqlens_ptr"])
def bmm_chunk_kernel(
    # Pointers
    C_ptr,  # (ntokens, ngroups, dstate)
    B_ptr,  # (ntokens, ngroups, dstate)
    cu_chunk_seqlens_ptr,  # (nchunks + 1,)
    cb_ptr,  # (nchunks, ngroups, chunk_size, chunk_size) FP32: written where k <= m < length
    # Sizes and strides, in elements
    stride_C_token,
    stride_C_group,
    stride_B_token,
    stride_B_group,
    ngroups: tl.constexpr,
    dstate: tl.constexpr,
    chunk_size: tl.constexpr,
    # What is compiled in
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_DSTATE: tl.constexpr,
):
    pid_m = tl.program_id(0) // tl.cdiv(chunk_size, BLOCK_K)
    pid_k = tl.program_id(0) % tl.cdiv(chunk_size, BLOCK_K)
    pid_c = tl.program_id(1).to(tl.int64)
    pid_g = tl.program_id(2).to(tl.int64)
    start = tl.load(cu_chunk_seqlens_ptr + pid_c).to(tl.int64)
    length = (tl.load(cu_chunk_seqlens_ptr + pid_c + 1).to(tl.int64) - start).to(tl.int32)
    if (pid_m * BLOCK_M >= length) | (pid_k * BLOCK_K >= (pid_m + 1) * BLOCK_M):
        return

    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_k = pid_k * BLOCK_K + tl.arange(0, BLOCK_K)
    offs_n = tl.arange(0, BLOCK_DSTATE)
    C_base = C_ptr + start * stride_C_token + pid_g * stride_C_group
    C_ptrs = C_base + offs_m[:, None] * stride_C_token + offs_n[None, :]
    B_base = B_ptr + start * stride_B_token + pid_g * stride_B_group
    B_ptrs = B_base + offs_k[None, :] * stride_B_token + offs_n[:, None]

    acc = tl.zeros((BLOCK_M, BLOCK_K), dtype=tl.float32)
    for n in range(0, dstate, BLOCK_DSTATE):
        C = tl.load(C_ptrs, mask=(offs_m[:, None] < length) & (offs_n[None, :] < dstate - n), other=0.0)
        B = tl.load(B_ptrs, mask=(offs_k[None, :] < length) & (offs_n[:, None] < dstate - n), other=0.0)
        acc += tl.dot(C, B)
        C_ptrs += BLOCK_DSTATE
        B_ptrs += BLOCK_DSTATE

    cb_base = cb_ptr + (pid_c * ngroups + pid_g) * chunk_size * chunk_size
    cb_ptrs = cb_base + offs_m[:, None] * chunk_size + offs_k[None, :]
    tl.store(cb_ptrs, acc, mask=(offs_m[:, None] < chunk_size) & (offs_k[None, :] < chunk_size))
