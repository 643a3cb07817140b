"""Sequences of few new tokens in one pass over the state: the common continuation.

The staged kernels write what a chunk adds to the state, the state that enters it and the matrix C B^T to memory and
read them again. Here a program keeps a head's state in registers: it reads the slot once, writes it once, and computes
the outputs from the value that it holds. Every product and every rounding is that of the staged kernels, in their
order, so the results are the same bits.

Few tokens are mostly one chunk, and the kernel is compiled for that. Chunks end at multiples of the chunk size from the
start of the whole sequence, though, so now and then new tokens lie on both sides of an edge. The other form of the
kernel goes from chunk to chunk, and rounds the state between them only where the staged kernels do: for the outputs.
It can keep the state behind one chunk of each sequence on the way, a checkpoint.

Source: Dao and Gu, "Transformers are SSMs" (2024), section 6.
"""

import triton
import triton.language as tl

from mamba_ops.kernels.math import fast_exp

MAX_TOKENS = 64  # of a chunk; all of them are held at once
BLOCK_HEADDIM = 64
NUM_WARPS = 4
WIDE = 512  # bytes of a token's row of B
MAX_REGISTERS = 168  # of a thread, where the compiler is told: three programs are then on a multiprocessor at once


def most_tokens(row_bytes: int, one_chunk: bool) -> int:
    """Tokens that a chunk may have so that everything fits into the shared memory of every GPU."""
    return MAX_TOKENS if one_chunk or row_bytes <= WIDE else 32


def block_headdim(row_bytes: int, one_chunk: bool) -> int:
    """The most of a head's dimensions that a program may hold, for the same reason."""
    return BLOCK_HEADDIM if one_chunk or row_bytes <= WIDE else 16


@triton.jit
def advance(
    B,  # (BLOCK_TOKENS, BLOCK_DSTATE)
    C,  # the same
    cb,  # (BLOCK_TOKENS, BLOCK_TOKENS) FP32: C B^T
    x,  # (BLOCK_TOKENS, BLOCK_HEADDIM)
    dt,  # (BLOCK_TOKENS,)
    dA,  # (BLOCK_TOKENS,): sums of A * dt up to each token
    dA_end,  # the last of them
    entering,  # (BLOCK_HEADDIM, BLOCK_DSTATE): the state as the outputs see it, dtype of C
    state,  # the same, FP32
    pid_h,
    offs_p,
    D_ptr,
    stride_D_head,
    headdim: tl.constexpr,
    HAS_D: tl.constexpr,
    D_HAS_HEADDIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_HEADDIM: tl.constexpr,
    BLOCK_DSTATE: tl.constexpr,
):
    """The outputs of one chunk of one head, (BLOCK_TOKENS, BLOCK_HEADDIM), and the state behind it; both FP32."""
    # The entering state decayed to each token, then the tokens of the chunk itself.
    offs_t = tl.arange(0, BLOCK_TOKENS)
    acc = tl.dot(C, tl.trans(entering))
    acc *= fast_exp(dA)[:, None]
    cb *= fast_exp(tl.minimum(dA[:, None] - dA[None, :], 0.0))
    cb *= dt[None, :]
    cb = tl.where(offs_t[:, None] >= offs_t[None, :], cb, 0.0)
    acc += tl.dot(cb.to(x.dtype), x)
    if HAS_D:
        if D_HAS_HEADDIM:
            D = tl.load(D_ptr + pid_h * stride_D_head + offs_p, mask=offs_p < headdim, other=0.0).to(tl.float32)
        else:
            D = tl.load(D_ptr + pid_h * stride_D_head).to(tl.float32)
        acc += x.to(tl.float32) * D

    # The sum is spelled as what it is, one rounding: as `a * b + c` it would become the start of the matrix product,
    # which is another order.
    scaled = B.to(tl.float32) * (fast_exp(tl.minimum(dA_end - dA, 0.0)) * dt)[:, None]
    added = tl.dot(tl.trans(x), scaled.to(x.dtype))
    decay = tl.zeros((BLOCK_HEADDIM, BLOCK_DSTATE), dtype=tl.float32) + fast_exp(dA_end)
    return acc, tl.fma(decay, state, added)


@triton.jit
def _scan_chunk(
    chunk,
    start,
    length,
    entering,  # (BLOCK_HEADDIM, BLOCK_DSTATE): the state as the outputs see it, dtype of C
    state,  # the same, FP32
    pid_h,
    offs_p,
    # As of `one_pass_kernel`
    x_ptr,
    B_ptr,
    C_ptr,
    dt_ptr,
    dA_cumsum_ptr,
    D_ptr,
    out_ptr,
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
    HAS_D: tl.constexpr,
    D_HAS_HEADDIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_HEADDIM: tl.constexpr,
    BLOCK_DSTATE: tl.constexpr,
):
    """Write the outputs of one chunk and return the state behind its last token, FP32."""
    pid_g = pid_h // heads_per_group
    offs_t = tl.arange(0, BLOCK_TOKENS)
    offs_n = tl.arange(0, BLOCK_DSTATE)
    is_token = offs_t < length
    is_p = offs_p < headdim
    is_n = offs_n < dstate

    row = (chunk * nheads + pid_h) * chunk_size
    dA_end = tl.load(dA_cumsum_ptr + row + chunk_size - 1)
    dA = tl.load(dA_cumsum_ptr + row + offs_t, mask=is_token, other=0.0)
    dt = tl.load(dt_ptr + row + offs_t, mask=is_token, other=0.0)
    C_ptrs = C_ptr + start * stride_C_token + pid_g * stride_C_group
    C_ptrs = C_ptrs + offs_t[:, None] * stride_C_token + offs_n[None, :]
    C = tl.load(C_ptrs, mask=is_token[:, None] & is_n[None, :], other=0.0)
    B_ptrs = B_ptr + start * stride_B_token + pid_g * stride_B_group
    B_ptrs = B_ptrs + offs_t[:, None] * stride_B_token + offs_n[None, :]
    B = tl.load(B_ptrs, mask=is_token[:, None] & is_n[None, :], other=0.0)
    is_out = is_token[:, None] & is_p[None, :]
    x_ptrs = x_ptr + start * stride_x_token + pid_h * stride_x_head
    x = tl.load(x_ptrs + offs_t[:, None] * stride_x_token + offs_p[None, :], mask=is_out, other=0.0)

    cb = tl.dot(C, tl.trans(B))
    acc, final = advance(
        B,
        C,
        cb,
        x,
        dt,
        dA,
        dA_end,
        entering,
        state,
        pid_h,
        offs_p,
        D_ptr,
        stride_D_head,
        headdim,
        HAS_D,
        D_HAS_HEADDIM,
        BLOCK_TOKENS,
        BLOCK_HEADDIM,
        BLOCK_DSTATE,
    )
    out_ptrs = out_ptr + start * stride_out_token + pid_h * stride_out_head
    tl.store(out_ptrs + offs_t[:, None] * stride_out_token + offs_p[None, :], acc, mask=is_out)
    return final


@triton.jit(
    do_not_specialize=["num_slots", "stride_slots", "stride_has_initial", "stride_checkpoint_slots"],
    do_not_specialize_on_alignment=[
        "cu_chunk_seqlens_ptr",
        "last_chunk_indices_ptr",
        "slots_ptr",
        "has_initial_ptr",
        "checkpoint_chunks_ptr",
        "checkpoint_offsets_ptr",
        "checkpoint_slots_ptr",
    ],
)
def one_pass_kernel(
    # Pointers
    x_ptr,  # (ntokens, nheads, headdim)
    B_ptr,  # (ntokens, ngroups, dstate)
    C_ptr,  # (ntokens, ngroups, dstate)
    dt_ptr,  # (nchunks, nheads, chunk_size) FP32
    dA_cumsum_ptr,  # (nchunks, nheads, chunk_size) FP32
    cu_chunk_seqlens_ptr,  # (nchunks + 1,)
    last_chunk_indices_ptr,  # (nseqs,), or None: chunk i is sequence i
    D_ptr,  # (nheads,) or (nheads, headdim)
    state_ptr,  # (num_slots, nheads, headdim, dstate): read and written
    slots_ptr,  # (nseqs,)
    has_initial_ptr,  # (nseqs,) bool
    out_ptr,  # (ntokens, nheads, headdim): written
    checkpoint_chunks_ptr,  # (nseqs,), like the next two only with HAS_CHECKPOINTS
    checkpoint_offsets_ptr,  # (nseqs,): a sequence has a checkpoint where this is positive
    checkpoint_slots_ptr,  # (nseqs,)
    # Sizes and strides, in elements; the first five vary from call to call
    num_slots,
    stride_state,
    stride_slots,
    stride_has_initial,
    stride_checkpoint_slots,
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
    ONE_CHUNK: tl.constexpr,
    HAS_CHECKPOINTS: tl.constexpr,
    HAS_D: tl.constexpr,
    D_HAS_HEADDIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_HEADDIM: tl.constexpr,
    BLOCK_DSTATE: tl.constexpr,
):
    pid_p = tl.program_id(0)
    pid_h = tl.program_id(1).to(tl.int64)
    pid_b = tl.program_id(2).to(tl.int64)
    slot = tl.load(slots_ptr + pid_b * stride_slots).to(tl.int64)
    slot = tl.where(slot < 0, slot + num_slots, slot)
    has_initial = tl.load(has_initial_ptr + pid_b * stride_has_initial) != 0
    if ONE_CHUNK:
        start = tl.load(cu_chunk_seqlens_ptr + pid_b).to(tl.int64)
        length = (tl.load(cu_chunk_seqlens_ptr + pid_b + 1).to(tl.int64) - start).to(tl.int32)
        if length <= 0:  # a padded sequence
            return
    else:
        first_chunk = tl.load(last_chunk_indices_ptr + pid_b - 1, mask=pid_b > 0, other=-1) + 1
        end_chunk = tl.load(last_chunk_indices_ptr + pid_b) + 1
        if first_chunk >= end_chunk:  # a padded sequence
            return
        if HAS_CHECKPOINTS:
            offset = tl.load(checkpoint_offsets_ptr + pid_b)
            kept_chunk = tl.load(checkpoint_chunks_ptr + pid_b).to(tl.int64)
            kept_chunk = tl.where(offset > 0, kept_chunk, -1)
            kept_slot = tl.load(checkpoint_slots_ptr + pid_b * stride_checkpoint_slots).to(tl.int64)
            kept_slot = tl.where(kept_slot < 0, kept_slot + num_slots, kept_slot)

    # Everything is asked for before anything is stored: behind a store a load would have to wait.
    # A masked load of the state, never a product with the mask: a stale slot may hold NaN.
    offs_p = pid_p * BLOCK_HEADDIM + tl.arange(0, BLOCK_HEADDIM)
    offs_n = tl.arange(0, BLOCK_DSTATE)
    state_ptrs = state_ptr + slot * stride_state + pid_h * headdim * dstate + offs_p[:, None] * dstate + offs_n[None, :]
    is_state = (offs_p < headdim)[:, None] & (offs_n < dstate)[None, :]
    state = tl.load(state_ptrs, mask=is_state & has_initial, other=0.0)
    if ONE_CHUNK:
        final = _scan_chunk(
            pid_b,
            start,
            length,
            state.to(C_ptr.dtype.element_ty),
            state.to(tl.float32),
            pid_h,
            offs_p,
            x_ptr,
            B_ptr,
            C_ptr,
            dt_ptr,
            dA_cumsum_ptr,
            D_ptr,
            out_ptr,
            stride_x_token,
            stride_x_head,
            stride_B_token,
            stride_B_group,
            stride_C_token,
            stride_C_group,
            stride_D_head,
            stride_out_token,
            stride_out_head,
            nheads,
            heads_per_group,
            headdim,
            dstate,
            chunk_size,
            HAS_D,
            D_HAS_HEADDIM,
            BLOCK_TOKENS,
            BLOCK_HEADDIM,
            BLOCK_DSTATE,
        )
    else:
        final = state.to(tl.float32)
        for step in range(end_chunk - first_chunk):
            chunk = first_chunk.to(tl.int64) + step
            start = tl.load(cu_chunk_seqlens_ptr + chunk).to(tl.int64)
            length = (tl.load(cu_chunk_seqlens_ptr + chunk + 1).to(tl.int64) - start).to(tl.int32)
            final = _scan_chunk(
                chunk,
                start,
                length,
                final.to(state_ptr.dtype.element_ty).to(C_ptr.dtype.element_ty),
                final,
                pid_h,
                offs_p,
                x_ptr,
                B_ptr,
                C_ptr,
                dt_ptr,
                dA_cumsum_ptr,
                D_ptr,
                out_ptr,
                stride_x_token,
                stride_x_head,
                stride_B_token,
                stride_B_group,
                stride_C_token,
                stride_C_group,
                stride_D_head,
                stride_out_token,
                stride_out_head,
                nheads,
                heads_per_group,
                headdim,
                dstate,
                chunk_size,
                HAS_D,
                D_HAS_HEADDIM,
                BLOCK_TOKENS,
                BLOCK_HEADDIM,
                BLOCK_DSTATE,
            )
            if HAS_CHECKPOINTS:
                if chunk == kept_chunk:
                    kept_ptrs = state_ptrs + (kept_slot - slot) * stride_state
                    tl.store(kept_ptrs, final.to(state_ptr.dtype.element_ty), mask=is_state)
    tl.store(state_ptrs, final.to(state_ptr.dtype.element_ty), mask=is_state)
