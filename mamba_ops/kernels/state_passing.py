"""Stage 3, the inter-chunk recurrence: one kernel for every way the entering state comes in and the final one goes out.

Reading the entering state straight from its cache slot, instead of from a dense copy made beforehand, is what this
project exists for. Both ways share this kernel, so that they cannot differ in a single bit. Each program reads its
piece of the entering state before it writes the same piece of the final one, so a slot may be both. On the way it can
keep the state behind one chunk of each sequence, a checkpoint, in a slot of its own.

Nothing here may be autotuned: a trial launch would advance the cache.

Source: Dao and Gu, "Transformers are SSMs" (2024), section 6, step 3 (inter-chunk recurrence).
"""

import triton
import triton.language as tl

from mamba_ops.kernels.math import fast_exp

BLOCK_SIZE = 512
NUM_WARPS = 2


@triton.jit(
    do_not_specialize=[
        "stride_read_slots",
        "stride_has_initial",
        "stride_write_slots",
        "stride_checkpoint_slots",
        "num_slots",
    ],
    do_not_specialize_on_alignment=[
        "last_chunk_indices_ptr",
        "read_slots_ptr",
        "has_initial_ptr",
        "write_slots_ptr",
        "checkpoint_chunks_ptr",
        "checkpoint_offsets_ptr",
        "checkpoint_slots_ptr",
    ],
)
def state_passing_kernel(
    # Pointers
    states_ptr,  # (nchunks, nheads, dim) FP32: what each chunk adds to the state
    dA_cumsum_ptr,  # (nchunks, nheads, chunk_size) FP32
    last_chunk_indices_ptr,  # (nseqs,)
    entering_ptr,  # (nchunks, nheads, dim): written, row c is the state that enters chunk c
    initial_ptr,  # (nseqs, nheads, dim), or the cache (num_slots, nheads, dim)
    read_slots_ptr,  # (nseqs,)
    has_initial_ptr,  # (nseqs,) bool
    final_ptr,  # (nseqs, nheads, dim), or the cache (num_slots, nheads, dim): written
    write_slots_ptr,  # (nseqs,)
    checkpoint_chunks_ptr,  # (nseqs,), like the next two only with HAS_CHECKPOINTS, and for a cache
    checkpoint_offsets_ptr,  # (nseqs,): a sequence has a checkpoint where this is positive
    checkpoint_slots_ptr,  # (nseqs,)
    # Sizes and strides, in elements; a sequence's state is dense
    num_slots,
    stride_initial,
    stride_final,
    stride_read_slots,
    stride_has_initial,
    stride_write_slots,
    stride_checkpoint_slots,
    dim: tl.constexpr,
    nheads: tl.constexpr,
    chunk_size: tl.constexpr,
    # What is compiled in
    HAS_INITIAL: tl.constexpr,
    READ_FROM_SLOTS: tl.constexpr,
    HAS_MASK: tl.constexpr,
    WRITE_TO_SLOTS: tl.constexpr,
    WRITE_EMPTY: tl.constexpr,
    HAS_CHECKPOINTS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    pid_h = tl.program_id(1)
    pid_b = tl.program_id(2).to(tl.int64)
    first_chunk = tl.load(last_chunk_indices_ptr + pid_b - 1, mask=pid_b > 0, other=-1) + 1
    end_chunk = tl.load(last_chunk_indices_ptr + pid_b) + 1
    # All that addresses depend on is asked for at once. A negative slot counts from the end, as in torch indexing.
    # (Not in a function of its own: PyTorch would take its arguments for mutated, as the result addresses a store.)
    read_row = pid_b
    if READ_FROM_SLOTS:
        slot = tl.load(read_slots_ptr + pid_b * stride_read_slots).to(tl.int64)
        read_row = tl.where(slot < 0, slot + num_slots, slot)
    write_row = pid_b
    if WRITE_TO_SLOTS:
        slot = tl.load(write_slots_ptr + pid_b * stride_write_slots).to(tl.int64)
        write_row = tl.where(slot < 0, slot + num_slots, slot)
    if HAS_MASK:
        has_initial = tl.load(has_initial_ptr + pid_b * stride_has_initial) != 0
    if HAS_CHECKPOINTS:
        offset = tl.load(checkpoint_offsets_ptr + pid_b)
        kept_chunk = tl.load(checkpoint_chunks_ptr + pid_b)
        kept_chunk = tl.where(offset > 0, kept_chunk, -1)
        slot = tl.load(checkpoint_slots_ptr + pid_b * stride_checkpoint_slots).to(tl.int64)
        kept_row = tl.where(slot < 0, slot + num_slots, slot)
    if not WRITE_EMPTY:
        if first_chunk >= end_chunk:  # a padded sequence
            return

    offs = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    in_row = offs < dim
    offs_row = pid_h * dim + offs

    # What the first chunk adds is under way before the entering state, whose slot must be looked up, is waited for;
    # in the loop, likewise, each chunk's successor is.
    row_of_chunk = first_chunk.to(tl.int64) * (nheads * dim)
    states_ptrs = states_ptr + row_of_chunk + offs_row
    entering_ptrs = entering_ptr + row_of_chunk + offs_row
    dA_end_ptr = dA_cumsum_ptr + (first_chunk.to(tl.int64) * nheads + pid_h) * chunk_size + chunk_size - 1
    has_chunk = first_chunk < end_chunk
    added = tl.load(states_ptrs, mask=in_row & has_chunk, other=0.0)
    dA_end = tl.load(dA_end_ptr, mask=has_chunk, other=0.0)

    state = tl.zeros((BLOCK_SIZE,), dtype=tl.float32)
    if HAS_INITIAL:
        # A masked load, never a product with the mask: a stale slot may hold NaN.
        is_read = in_row
        if HAS_MASK:
            is_read = in_row & has_initial
        state = tl.load(initial_ptr + read_row * stride_initial + offs_row, mask=is_read, other=0.0).to(tl.float32)

    for chunk in range(first_chunk, end_chunk):
        states_ptrs += nheads * dim
        dA_end_ptr += nheads * chunk_size
        next_added = tl.load(states_ptrs, mask=in_row & (chunk + 1 < end_chunk), other=0.0)
        next_dA_end = tl.load(dA_end_ptr, mask=chunk + 1 < end_chunk, other=0.0)
        tl.store(entering_ptrs, state.to(entering_ptr.dtype.element_ty), mask=in_row)
        entering_ptrs += nheads * dim
        state = fast_exp(dA_end) * state + added
        if HAS_CHECKPOINTS:
            kept = state.to(final_ptr.dtype.element_ty)
            is_kept = in_row & (chunk == kept_chunk)
            tl.store(final_ptr + kept_row * stride_final + offs_row, kept, mask=is_kept)
        added, dA_end = next_added, next_dA_end

    tl.store(final_ptr + write_row * stride_final + offs_row, state.to(final_ptr.dtype.element_ty), mask=in_row)
