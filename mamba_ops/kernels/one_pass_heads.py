"""The one-pass continuation of many sequences at once: a program goes through several heads of one of them.

With a head for each program, a burst has several times as many programs as a GPU holds, and each of them begins by
waiting for its state. Here a program asks for the next head's state while it computes with this one's, and what all
heads of a group have in common, B, C and their product, is read and computed once. The arithmetic is that of
`mamba_ops.kernels.one_pass`, and so are the bits.
"""

import math

import triton
import triton.language as tl

from mamba_ops.kernels.one_pass import advance

NUM_WARPS = 4
RESIDENT = 2  # programs on a multiprocessor: they use all of the registers that a thread may have
STAGES = 3  # heads whose loads are under way at once
# This form is faster where the other one has more programs than this for each multiprocessor, which holds three of
# those at once.
WORTH_IT = 3.3


def least_sequences(nheads: int, multiprocessors: int) -> int:
    """From how many sequences on this form is faster, for layers of so many heads."""
    return math.ceil(WORTH_IT * multiprocessors / nheads)


def heads_of_a_program(nseqs: int, nheads: int, heads_per_group: int, multiprocessors: int) -> int:
    """How many heads each program takes: what is done soonest, if it begins for as long as it takes over one.

    On an H200, for 64 heads of one group and 8 to 64 sequences, this was the fastest number each time.

    Args:
        nseqs: of the step. nheads: of the layer. heads_per_group: of which each program has a part; more than one.
        multiprocessors: of the GPU.
    """

    def duration(heads: int) -> tuple[int, int]:
        rounds = math.ceil(nseqs * (nheads // heads) / (RESIDENT * multiprocessors))
        return rounds * (heads + 1), -heads

    return min((heads for heads in range(2, heads_per_group + 1) if heads_per_group % heads == 0), key=duration)


@triton.jit(
    do_not_specialize=["num_slots", "stride_slots", "stride_has_initial", "heads"],
    do_not_specialize_on_alignment=["cu_chunk_seqlens_ptr", "slots_ptr", "has_initial_ptr"],
)
def one_pass_heads_kernel(
    # Pointers, as of `one_pass_kernel`; chunk i is sequence i
    x_ptr,
    B_ptr,
    C_ptr,
    dt_ptr,
    dA_cumsum_ptr,
    cu_chunk_seqlens_ptr,
    D_ptr,
    state_ptr,  # read and written
    slots_ptr,
    has_initial_ptr,
    out_ptr,  # written
    # Sizes and strides, in elements; the first five vary from call to call
    num_slots,
    stride_state,
    stride_slots,
    stride_has_initial,
    heads,  # of a program; divides heads_per_group
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
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_HEADDIM: tl.constexpr,
    BLOCK_DSTATE: tl.constexpr,
    STAGES: tl.constexpr,
):
    pid_p = tl.program_id(0)
    first = tl.program_id(1).to(tl.int64) * heads
    pid_b = tl.program_id(2).to(tl.int64)
    slot = tl.load(slots_ptr + pid_b * stride_slots).to(tl.int64)
    slot = tl.where(slot < 0, slot + num_slots, slot)
    has_initial = tl.load(has_initial_ptr + pid_b * stride_has_initial) != 0
    start = tl.load(cu_chunk_seqlens_ptr + pid_b).to(tl.int64)
    length = (tl.load(cu_chunk_seqlens_ptr + pid_b + 1).to(tl.int64) - start).to(tl.int32)
    if length <= 0:  # a padded sequence
        return

    offs_t = tl.arange(0, BLOCK_TOKENS)
    offs_n = tl.arange(0, BLOCK_DSTATE)
    offs_p = pid_p * BLOCK_HEADDIM + tl.arange(0, BLOCK_HEADDIM)
    is_token = offs_t < length
    is_p = offs_p < headdim
    is_n = offs_n < dstate
    is_out = is_token[:, None] & is_p[None, :]
    is_state = is_p[:, None] & is_n[None, :]

    pid_g = first // heads_per_group
    C_ptrs = C_ptr + start * stride_C_token + pid_g * stride_C_group
    C_ptrs = C_ptrs + offs_t[:, None] * stride_C_token + offs_n[None, :]
    C = tl.load(C_ptrs, mask=is_token[:, None] & is_n[None, :], other=0.0)
    B_ptrs = B_ptr + start * stride_B_token + pid_g * stride_B_group
    B_ptrs = B_ptrs + offs_t[:, None] * stride_B_token + offs_n[None, :]
    B = tl.load(B_ptrs, mask=is_token[:, None] & is_n[None, :], other=0.0)
    cb = tl.dot(C, tl.trans(B))

    state_ptrs = state_ptr + slot * stride_state + first * headdim * dstate + offs_p[:, None] * dstate + offs_n[None, :]
    x_ptrs = x_ptr + start * stride_x_token + first * stride_x_head + offs_t[:, None] * stride_x_token + offs_p[None, :]
    out_ptrs = out_ptr + start * stride_out_token + first * stride_out_head
    out_ptrs = out_ptrs + offs_t[:, None] * stride_out_token + offs_p[None, :]
    row = (pid_b * nheads + first) * chunk_size
    for head in tl.range(0, heads, num_stages=STAGES):
        # A masked load of the state, never a product with the mask: a stale slot may hold NaN.
        state = tl.load(state_ptrs, mask=is_state & has_initial, other=0.0)
        x = tl.load(x_ptrs, mask=is_out, other=0.0)
        dA_end = tl.load(dA_cumsum_ptr + row + chunk_size - 1)
        dA = tl.load(dA_cumsum_ptr + row + offs_t, mask=is_token, other=0.0)
        dt = tl.load(dt_ptr + row + offs_t, mask=is_token, other=0.0)
        acc, final = advance(
            B,
            C,
            cb,
            x,
            dt,
            dA,
            dA_end,
            state.to(C_ptr.dtype.element_ty),
            state.to(tl.float32),
            first + head,
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
        tl.store(out_ptrs, acc, mask=is_out)
        tl.store(state_ptrs, final.to(state_ptr.dtype.element_ty), mask=is_state)
        state_ptrs += headdim * dstate
        x_ptrs += stride_x_head
        out_ptrs += stride_out_head
        row += chunk_size
