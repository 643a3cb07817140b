"""`where(has, cache[slots], 0)` in one launch, for graphs that must keep the snapshot."""

import triton
import triton.language as tl

BLOCK_SIZE = 2048
NUM_WARPS = 4


@triton.jit(
    do_not_specialize=["stride_slots", "stride_has", "num_slots"],
    do_not_specialize_on_alignment=["slots_ptr", "has_ptr"],
)
def masked_gather_kernel(
    # Pointers
    cache_ptr,  # (num_slots, row)
    slots_ptr,  # (nseqs,)
    has_ptr,  # (nseqs,) bool
    rows_ptr,  # (nseqs, row): written
    # Sizes and strides, in elements
    num_slots,
    stride_cache,
    stride_slots,
    stride_has,
    row_size: tl.constexpr,
    # What is compiled in
    HAS_MASK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    pid_b = tl.program_id(1).to(tl.int64)
    offs = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    in_row = offs < row_size
    is_read = in_row
    if HAS_MASK:
        is_read = in_row & (tl.load(has_ptr + pid_b * stride_has) != 0)
    slot = tl.load(slots_ptr + pid_b * stride_slots).to(tl.int64)
    slot = tl.where(slot < 0, slot + num_slots, slot)  # counted from the end, as in torch indexing
    values = tl.load(cache_ptr + slot * stride_cache + offs, mask=is_read, other=0.0)
    tl.store(rows_ptr + pid_b * row_size + offs, values, mask=in_row)
