"""The convolution's states in the middle of some sequences, for a cache of prefixes: the last inputs up to there.

They are inputs of this call, and where the checkpoint lies so near to the sequence's start that there are too few,
what the sequence's slot held or zeros. So this runs before the convolution, which overwrites that slot.
"""

import triton
import triton.language as tl

BLOCK_CHANNELS = 256
NUM_WARPS = 4


@triton.jit(
    do_not_specialize=["num_slots", "stride_slots", "stride_has", "stride_checkpoint_slots"],
    do_not_specialize_on_alignment=[
        "cu_seqlens_ptr",
        "slots_ptr",
        "has_ptr",
        "checkpoint_offsets_ptr",
        "checkpoint_slots_ptr",
    ],
)
def conv_checkpoint_kernel(
    # Pointers
    x_ptr,  # (ntokens, conv_dim)
    cu_seqlens_ptr,  # (nseqs + 1,)
    state_ptr,  # (num_slots, conv_dim, >= width - 1): read and written
    slots_ptr,  # (nseqs,)
    has_ptr,  # (nseqs,) bool
    checkpoint_offsets_ptr,  # (nseqs,)
    checkpoint_slots_ptr,  # (nseqs,)
    # Sizes and strides, in elements; the first five vary from call to call
    num_slots,
    stride_state_slot,
    stride_slots,
    stride_has,
    stride_checkpoint_slots,
    stride_x_token,
    stride_state_channel: tl.constexpr,
    stride_state_token: tl.constexpr,
    conv_dim: tl.constexpr,
    # What is compiled in
    WIDTH: tl.constexpr,
    BLOCK_HISTORY: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
):
    sequence = tl.program_id(0).to(tl.int64)
    offset = tl.load(checkpoint_offsets_ptr + sequence).to(tl.int64)
    if offset <= 0:  # no checkpoint
        return
    start = tl.load(cu_seqlens_ptr + sequence).to(tl.int64)
    slot = tl.load(slots_ptr + sequence * stride_slots).to(tl.int64)
    slot = tl.where(slot < 0, slot + num_slots, slot)
    target = tl.load(checkpoint_slots_ptr + sequence * stride_checkpoint_slots).to(tl.int64)
    target = tl.where(target < 0, target + num_slots, target)
    has = tl.load(has_ptr + sequence * stride_has).to(tl.int1)

    channel = tl.program_id(1) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
    is_channel = channel < conv_dim
    entry = tl.arange(0, BLOCK_HISTORY)
    is_entry = entry < WIDTH - 1
    source = offset - (WIDTH - 1) + entry
    is_new = (is_entry & (source >= 0))[:, None] & is_channel[None, :]
    is_cached = (has & is_entry & (source < 0))[:, None] & is_channel[None, :]
    x_ptrs = x_ptr + (start + source)[:, None] * stride_x_token + channel[None, :]
    new = tl.load(x_ptrs, mask=is_new, other=0.0)
    channels = state_ptr + channel * stride_state_channel
    cached_ptrs = channels[None, :] + (slot * stride_state_slot + (offset + entry) * stride_state_token)[:, None]
    cached = tl.load(cached_ptrs, mask=is_cached, other=0.0)
    target_ptrs = channels[None, :] + (target * stride_state_slot + entry * stride_state_token)[:, None]
    tl.store(target_ptrs, tl.where(is_new, new, cached), mask=is_entry[:, None] & is_channel[None, :])
