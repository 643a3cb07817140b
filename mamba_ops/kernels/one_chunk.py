"""Sequences whose new tokens all lie in one chunk, in one pass over the state: the common continuation.

The staged kernels write what a chunk adds to the state, the state that enters it and the matrix C B^T to memory and
read them again. Here a program keeps a head's state in registers: it reads the slot once, writes it once, and computes
the outputs from the value that it read. Every product and every rounding is that of the staged kernels, in their order,
so the results are the same bits.

Source: Dao and Gu, "Transformers are SSMs" (2024), section 6, with a single chunk.
"""

import triton
import triton.language as tl

from mamba_ops.kernels.math import fast_exp

BLOCK_TOKENS = 64
BLOCK_HEADDIM = 64
NUM_WARPS = 4
# See `chunk_scan`: its loop must not be pipelined.
NUM_STAGES = 1


@triton.jit(
    do_not_specialize=["stride_slots", "stride_has_initial", "num_slots"],
    do_not_specialize_on_alignment=["cu_seqlens_ptr", "slots_ptr", "has_initial_ptr"],
)
def one_chunk_kernel(
    # Pointers
    x_ptr,  # (ntokens, nheads, headdim)
    B_ptr,  # (ntokens, ngroups, dstate)
    C_ptr,  # (ntokens, ngroups, dstate)
    dt_ptr,  # (nseqs, nheads, chunk_size) FP32
    dA_cumsum_ptr,  # (nseqs, nheads, chunk_size) FP32
    cu_seqlens_ptr,  # (nseqs + 1,)
    D_ptr,  # (nheads,) or (nheads, headdim)
    state_ptr,  # (num_slots, nheads, headdim, dstate): read and written
    slots_ptr,  # (nseqs,)
    has_initial_ptr,  # (nseqs,) bool
    out_ptr,  # (ntokens, nheads, headdim): written
    # Sizes and strides, in elements; the first four vary from call to call
    num_slots,
    stride_state,
    stride_slots,
    stride_has_initial,
    stride_x_token,
    stride_x_head,
    stride_B_token,
    stride_B_group,
    stride_C_token,
    stride_C_group,
    stride_D_head,
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
    ONE_BLOCK: tl.constexpr,  # no sequence has more than BLOCK_TOKENS tokens
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_HEADDIM: tl.constexpr,
    BLOCK_DSTATE: tl.constexpr,
):
    pid_p = tl.program_id(0)
    pid_h = tl.program_id(1).to(tl.int64)
    pid_b = tl.program_id(2).to(tl.int64)
    start = tl.load(cu_seqlens_ptr + pid_b).to(tl.int64)
    length = (tl.load(cu_seqlens_ptr + pid_b + 1).to(tl.int64) - start).to(tl.int32)
    slot = tl.load(slots_ptr + pid_b * stride_slots).to(tl.int64)
    slot = tl.where(slot < 0, slot + num_slots, slot)
    has_initial = tl.load(has_initial_ptr + pid_b * stride_has_initial) != 0
    if length <= 0:  # a padded sequence
        return

    pid_g = pid_h // heads_per_group
    offs_t = tl.arange(0, BLOCK_TOKENS)
    offs_p = pid_p * BLOCK_HEADDIM + tl.arange(0, BLOCK_HEADDIM)
    offs_n = tl.arange(0, BLOCK_DSTATE)
    is_p = offs_p < headdim
    is_n = offs_n < dstate

    # A masked load, never a product with the mask: a stale slot may hold NaN.
    state_ptrs = state_ptr + slot * stride_state + pid_h * headdim * dstate + offs_p[:, None] * dstate + offs_n[None, :]
    is_state = is_p[:, None] & is_n[None, :]
    state = tl.load(state_ptrs, mask=is_state & has_initial, other=0.0)

    x_base = x_ptr + start * stride_x_token + pid_h * stride_x_head
    B_base = B_ptr + start * stride_B_token + pid_g * stride_B_group
    C_base = C_ptr + start * stride_C_token + pid_g * stride_C_group
    out_base = out_ptr + start * stride_out_token + pid_h * stride_out_head
    row = (pid_b * nheads + pid_h) * chunk_size
    dA_end = tl.load(dA_cumsum_ptr + row + chunk_size - 1)

    # The state behind the last token.
    added = tl.zeros((BLOCK_HEADDIM, BLOCK_DSTATE), dtype=tl.float32)
    for t in range(0, BLOCK_TOKENS if ONE_BLOCK else length, BLOCK_TOKENS):
        offs = t + offs_t
        is_token = offs < length
        x = tl.load(x_base + offs_p[:, None] + offs[None, :] * stride_x_token, mask=is_p[:, None] & is_token, other=0.0)
        B_ptrs = B_base + offs[:, None] * stride_B_token + offs_n[None, :]
        B = tl.load(B_ptrs, mask=is_token[:, None] & is_n[None, :], other=0.0).to(tl.float32)
        dA = tl.load(dA_cumsum_ptr + row + offs, mask=is_token, other=0.0)
        dt = tl.load(dt_ptr + row + offs, mask=is_token, other=0.0)
        B *= (fast_exp(tl.minimum(dA_end - dA, 0.0)) * dt)[:, None]
        added += tl.dot(x, B.to(x_ptr.dtype.element_ty))
    final = fast_exp(dA_end) * state.to(tl.float32) + added
    tl.store(state_ptrs, final.to(state_ptr.dtype.element_ty), mask=is_state)

    # The outputs.
    entering = tl.trans(state.to(C_ptr.dtype.element_ty))
    if HAS_D:
        if D_HAS_HEADDIM:
            D = tl.load(D_ptr + pid_h * stride_D_head + offs_p, mask=is_p, other=0.0).to(tl.float32)
        else:
            D = tl.load(D_ptr + pid_h * stride_D_head).to(tl.float32)
    for m in range(0, BLOCK_TOKENS if ONE_BLOCK else length, BLOCK_TOKENS):
        offs_m = m + offs_t
        is_row = offs_m < length
        C_ptrs = C_base + offs_m[:, None] * stride_C_token + offs_n[None, :]
        C = tl.load(C_ptrs, mask=is_row[:, None] & is_n[None, :], other=0.0)
        dA_m = tl.load(dA_cumsum_ptr + row + offs_m, mask=is_row, other=0.0)
        acc = tl.zeros((BLOCK_TOKENS, BLOCK_HEADDIM), dtype=tl.float32)
        acc += tl.dot(C, entering)
        acc *= fast_exp(dA_m)[:, None]
        for k in range(0, BLOCK_TOKENS if ONE_BLOCK else m + BLOCK_TOKENS, BLOCK_TOKENS):
            offs_k = k + offs_t
            is_token = offs_k < length
            B_ptrs = B_base + offs_k[None, :] * stride_B_token + offs_n[:, None]
            B_k = tl.load(B_ptrs, mask=is_token[None, :] & is_n[:, None], other=0.0)
            dA_k = tl.load(dA_cumsum_ptr + row + offs_k, mask=is_token, other=0.0)
            dt_k = tl.load(dt_ptr + row + offs_k, mask=is_token, other=0.0)
            cb = tl.dot(C, B_k)
            cb *= fast_exp(tl.minimum(dA_m[:, None] - dA_k[None, :], 0.0))
            cb *= dt_k
            cb = tl.where(offs_m[:, None] >= offs_k[None, :], cb, 0.0)
            x_ptrs = x_base + offs_k[:, None] * stride_x_token + offs_p[None, :]
            x_k = tl.load(x_ptrs, mask=is_token[:, None] & is_p[None, :], other=0.0)
            acc += tl.dot(cb.to(x_ptr.dtype.element_ty), x_k)
        is_out = is_row[:, None] & is_p[None, :]
        if HAS_D:
            x_ptrs = x_base + offs_m[:, None] * stride_x_token + offs_p[None, :]
            acc += tl.load(x_ptrs, mask=is_out, other=0.0).to(tl.float32) * D
        tl.store(out_base + offs_m[:, None] * stride_out_token + offs_p[None, :], acc, mask=is_out)
