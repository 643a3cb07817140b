"""The causal convolution over a ragged batch in one launch: outputs and new states, from slots to the same slots.

One program computes a tile of tokens of one sequence for a block of channels. Only the first tile of a sequence looks
at the slot, so that program may also overwrite it: a tile is at least as long as the history.

Products are taken in the dtype of the inputs and summed in FP32, tap by tap from the oldest, as vLLM's kernel does, so
that a layer may change between the two from call to call.
"""

import triton
import triton.language as tl

BLOCK_TOKENS = 8
BLOCK_CHANNELS = 128
NUM_WARPS = 4


@triton.jit
def convolve_tile(
    tile,
    pid_channels,
    # As of `causal_conv_tiled_kernel`
    x_ptr,
    weight_ptr,
    bias_ptr,
    cu_seqlens_ptr,
    state_ptr,
    slots_ptr,
    has_ptr,
    tile_sequence_ptr,
    tile_offset_ptr,
    out_ptr,
    num_slots,
    stride_x_token,
    stride_state_slot,
    stride_slots,
    stride_has,
    stride_state_channel: tl.constexpr,
    stride_state_token: tl.constexpr,
    conv_dim: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_HISTORY: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
):
    """One tile of tokens of one sequence for a block of channels, and the new state if it is the first tile."""
    sequence = tl.load(tile_sequence_ptr + tile).to(tl.int64)
    if sequence < 0:  # a tile of padding
        return
    first = tl.load(tile_offset_ptr + tile).to(tl.int64) * BLOCK_TOKENS
    start = tl.load(cu_seqlens_ptr + sequence).to(tl.int64)
    length = tl.load(cu_seqlens_ptr + sequence + 1).to(tl.int64) - start
    slot = tl.load(slots_ptr + sequence * stride_slots).to(tl.int64)
    slot = tl.where(slot < 0, slot + num_slots, slot)
    has = tl.load(has_ptr + sequence * stride_has).to(tl.int1)

    channel = pid_channels * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
    is_channel = channel < conv_dim
    state_ptrs = state_ptr + slot * stride_state_slot + channel * stride_state_channel
    x_ptrs = x_ptr + start * stride_x_token + channel
    position = first + tl.arange(0, BLOCK_TOKENS)
    is_token = position < length

    acc = tl.zeros((BLOCK_TOKENS, BLOCK_CHANNELS), dtype=tl.float32)
    if HAS_BIAS:
        acc += tl.load(bias_ptr + channel, mask=is_channel, other=0.0).to(tl.float32)[None, :]
    for tap in tl.static_range(WIDTH):
        source = position - (WIDTH - 1 - tap)
        is_new = (is_token & (source >= 0))[:, None] & is_channel[None, :]
        is_cached = (has & is_token & (source < 0))[:, None] & is_channel[None, :]
        new = tl.load(x_ptrs[None, :] + source[:, None] * stride_x_token, mask=is_new, other=0.0)
        cached_ptrs = state_ptrs[None, :] + (source[:, None] + (WIDTH - 1)) * stride_state_token
        cached = tl.load(cached_ptrs, mask=is_cached, other=0.0)
        weight = tl.load(weight_ptr + channel * WIDTH + tap, mask=is_channel, other=0.0)
        value = tl.where(is_new, new, cached.to(new.dtype))
        if x_ptr.dtype.element_ty == tl.float32 or weight_ptr.dtype.element_ty == tl.float32:
            # Spelled as one rounding: left to itself the compiler fuses some of these, and others in another kernel.
            taps = tl.zeros((BLOCK_TOKENS, BLOCK_CHANNELS), dtype=tl.float32) + weight.to(tl.float32)[None, :]
            acc = tl.fma(value.to(tl.float32), taps, acc)
        else:
            acc += value * weight[None, :]
    acc = acc / (1 + tl.exp(-acc))
    out_ptrs = out_ptr + (start + position)[:, None] * conv_dim + channel[None, :]
    tl.store(out_ptrs, acc, mask=is_token[:, None] & is_channel[None, :])

    if first == 0:  # names of their own: Triton wants one shape for a name
        kept = tl.arange(0, BLOCK_HISTORY)
        kept_source = length - (WIDTH - 1) + kept
        is_kept = kept < WIDTH - 1
        kept_new = (is_kept & (kept_source >= 0))[:, None] & is_channel[None, :]
        kept_cached = (has & is_kept & (kept_source < 0))[:, None] & is_channel[None, :]
        last_new = tl.load(x_ptrs[None, :] + kept_source[:, None] * stride_x_token, mask=kept_new, other=0.0)
        last_ptrs = state_ptrs[None, :] + (length + kept)[:, None] * stride_state_token
        last_cached = tl.load(last_ptrs, mask=kept_cached, other=0.0)
        tl.debug_barrier()  # every thread of this program has read what the slot held
        last = tl.where(kept_new, last_new.to(last_cached.dtype), last_cached)
        target_ptrs = state_ptrs[None, :] + kept[:, None] * stride_state_token
        tl.store(target_ptrs, last, mask=is_kept[:, None] & is_channel[None, :])


@triton.jit(
    do_not_specialize_on_alignment=["cu_seqlens_ptr", "slots_ptr", "has_ptr", "tile_sequence_ptr", "tile_offset_ptr"]
)
def causal_conv_tiled_kernel(
    # Pointers
    x_ptr,  # (ntokens, conv_dim)
    weight_ptr,  # (conv_dim, width)
    bias_ptr,  # (conv_dim,)
    cu_seqlens_ptr,  # (nseqs + 1,)
    state_ptr,  # (num_slots, conv_dim, >= width - 1): read and written
    slots_ptr,  # (nseqs,)
    has_ptr,  # (nseqs,) bool
    tile_sequence_ptr,  # (ntiles,)
    tile_offset_ptr,  # (ntiles,)
    out_ptr,  # (ntokens, conv_dim) dense: written
    # Sizes and strides, in elements
    num_slots,
    stride_x_token,
    stride_state_slot,
    stride_slots,
    stride_has,
    stride_state_channel: tl.constexpr,
    stride_state_token: tl.constexpr,
    conv_dim: tl.constexpr,
    # What is compiled in
    WIDTH: tl.constexpr,
    BLOCK_HISTORY: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
):
    convolve_tile(
        tl.program_id(0),
        tl.program_id(1),
        x_ptr,
        weight_ptr,
        bias_ptr,
        cu_seqlens_ptr,
        state_ptr,
        slots_ptr,
        has_ptr,
        tile_sequence_ptr,
        tile_offset_ptr,
        out_ptr,
        num_slots,
        stride_x_token,
        stride_state_slot,
        stride_slots,
        stride_has,
        stride_state_channel,
        stride_state_token,
        conv_dim,
        WIDTH,
        BLOCK_HISTORY,
        HAS_BIAS,
        BLOCK_TOKENS,
        BLOCK_CHANNELS,
    )
