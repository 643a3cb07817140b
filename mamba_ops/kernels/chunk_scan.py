"""Stage 5: the outputs: what the entering state contributes, plus the causal products inside the chunk.

The entering state of chunk c is row c of what state passing stored, for the first chunk of a sequence as for any
other, so this stage knows nothing of sequences, initial states or caches.

Source: Dao and Gu, "Transformers are SSMs" (2024), section 6, steps 1 and 4 (diagonal blocks; left factors, C terms).
"""

import triton
import triton.language as tl

from mamba_ops.kernels.math import fast_exp

BLOCK_M = 64
BLOCK_HEADDIM = 64
BLOCK_K = 64
MAX_BLOCK_DSTATE = 128
NUM_WARPS = 4
# Triton 3.6 to 3.8 let a pipelined wgmma whose first operand sits in registers run on while the next iteration
# overwrites them (seen on sm_90 as NaN rows), so this loop is not pipelined.
NUM_STAGES = 1


@triton.jit(do_not_specialize_on_alignment=["cu_chunk_seqlens_ptr"])
def chunk_scan_kernel(
    # Pointers
    cb_ptr,  # (nchunks, ngroups, chunk_size, chunk_size) FP32
    x_ptr,  # (ntokens, nheads, headdim)
    dt_ptr,  # (nchunks, nheads, chunk_size) FP32
    dA_cumsum_ptr,  # (nchunks, nheads, chunk_size) FP32
    C_ptr,  # (ntokens, ngroups, dstate)
    entering_ptr,  # (nchunks, nheads, headdim, dstate)
    cu_chunk_seqlens_ptr,  # (nchunks + 1,)
    D_ptr,  # (nheads,) or (nheads, headdim)
    z_ptr,  # (ntokens, nheads, headdim)
    out_ptr,  # (ntokens, nheads, headdim): written
    # Sizes and strides, in elements
    stride_x_token,
    stride_x_head,
    stride_C_token,
    stride_C_group,
    stride_D_head,
    stride_z_token,
    stride_z_head,
    stride_out_token,
    stride_out_head,
    nheads: tl.constexpr,
    heads_per_group: tl.constexpr,
    headdim: tl.constexpr,
    dstate: tl.constexpr,
    chunk_size: tl.constexpr,
    # What is compiled in
    HAS_D: tl.constexpr,
    D_HAS_HEADDIM: tl.constexpr,
    HAS_Z: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_HEADDIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_DSTATE: tl.constexpr,
):
    pid_m = tl.program_id(0) // tl.cdiv(headdim, BLOCK_HEADDIM)
    pid_p = tl.program_id(0) % tl.cdiv(headdim, BLOCK_HEADDIM)
    pid_c = tl.program_id(1).to(tl.int64)
    pid_h = tl.program_id(2).to(tl.int64)
    start = tl.load(cu_chunk_seqlens_ptr + pid_c).to(tl.int64)
    length = (tl.load(cu_chunk_seqlens_ptr + pid_c + 1).to(tl.int64) - start).to(tl.int32)
    if pid_m * BLOCK_M >= length:  # past the end of the chunk, or a padded chunk
        return

    pid_g = pid_h // heads_per_group
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_p = pid_p * BLOCK_HEADDIM + tl.arange(0, BLOCK_HEADDIM)
    is_row = offs_m < length
    is_p = offs_p < headdim
    row = (pid_c * nheads + pid_h) * chunk_size
    dA_m = tl.load(dA_cumsum_ptr + row + offs_m, mask=offs_m < chunk_size, other=0.0)

    # The entering state, decayed to each token.
    offs_n = tl.arange(0, BLOCK_DSTATE)
    C_ptrs = C_ptr + start * stride_C_token + pid_g * stride_C_group
    C_ptrs = C_ptrs + offs_m[:, None] * stride_C_token + offs_n[None, :]
    entering_ptrs = entering_ptr + (pid_c * nheads + pid_h) * headdim * dstate
    entering_ptrs = entering_ptrs + offs_p[None, :] * dstate + offs_n[:, None]
    acc = tl.zeros((BLOCK_M, BLOCK_HEADDIM), dtype=tl.float32)
    for n in tl.static_range(0, dstate, BLOCK_DSTATE):
        C = tl.load(C_ptrs + n, mask=is_row[:, None] & (offs_n[None, :] < dstate - n), other=0.0)
        state = tl.load(entering_ptrs + n, mask=(offs_n[:, None] < dstate - n) & is_p[None, :], other=0.0)
        acc += tl.dot(C, state.to(C_ptr.dtype.element_ty))
    acc *= fast_exp(dA_m)[:, None]

    # The tokens of the chunk itself.
    offs_k = tl.arange(0, BLOCK_K)
    cb_ptrs = cb_ptr + (pid_c * (nheads // heads_per_group) + pid_g) * chunk_size * chunk_size
    cb_ptrs = cb_ptrs + offs_m[:, None] * chunk_size + offs_k[None, :]
    x_base = x_ptr + start * stride_x_token + pid_h * stride_x_head
    x_ptrs = x_base + offs_k[:, None] * stride_x_token + offs_p[None, :]
    dt_ptrs = dt_ptr + row + offs_k
    dA_ptrs = dA_cumsum_ptr + row + offs_k
    for k in range(0, min((pid_m + 1) * BLOCK_M, length), BLOCK_K):
        in_chunk = offs_k < chunk_size - k
        cb = tl.load(cb_ptrs, mask=(offs_m[:, None] < chunk_size) & in_chunk[None, :], other=0.0)
        dA_k = tl.load(dA_ptrs, mask=in_chunk, other=0.0)
        dt_k = tl.load(dt_ptrs, mask=in_chunk, other=0.0)
        cb *= fast_exp(tl.minimum(dA_m[:, None] - dA_k[None, :], 0.0))
        cb *= dt_k
        # Also drops what the product stage left unwritten: k > m.
        cb = tl.where(offs_m[:, None] >= k + offs_k[None, :], cb, 0.0)
        x = tl.load(x_ptrs, mask=(offs_k[:, None] < length - k) & is_p[None, :], other=0.0)
        acc += tl.dot(cb.to(x_ptr.dtype.element_ty), x)
        cb_ptrs += BLOCK_K
        x_ptrs += BLOCK_K * stride_x_token
        dt_ptrs += BLOCK_K
        dA_ptrs += BLOCK_K

    is_out = is_row[:, None] & is_p[None, :]
    if HAS_D:
        if D_HAS_HEADDIM:
            D = tl.load(D_ptr + pid_h * stride_D_head + offs_p, mask=is_p, other=0.0).to(tl.float32)
        else:
            D = tl.load(D_ptr + pid_h * stride_D_head).to(tl.float32)
        x_ptrs = x_base + offs_m[:, None] * stride_x_token + offs_p[None, :]
        acc += tl.load(x_ptrs, mask=is_out, other=0.0).to(tl.float32) * D
    if HAS_Z:
        z_ptrs = z_ptr + start * stride_z_token + pid_h * stride_z_head
        z = tl.load(z_ptrs + offs_m[:, None] * stride_z_token + offs_p[None, :], mask=is_out, other=0.0).to(tl.float32)
        acc *= z * tl.sigmoid(z)
    out_ptrs = out_ptr + start * stride_out_token + pid_h * stride_out_head
    tl.store(out_ptrs + offs_m[:, None] * stride_out_token + offs_p[None, :], acc, mask=is_out)
