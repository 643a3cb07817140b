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
NUM_WARPS = 2


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

    # A row of inputs for each token of the tile, behind those that the first token looks back at. A thread keeps some
    # channels of all of them, so it loads each input once for all taps, and no thread waits for another.
    rows = ()
    is_continued = has & (first == 0)
    for back in tl.static_range(WIDTH - 1):
        source = first - (WIDTH - 1) + back
        new = tl.load(x_ptrs + source * stride_x_token, mask=is_channel & (source >= 0), other=0.0)
        cached = tl.load(state_ptrs + back * stride_state_token, mask=is_channel & is_continued, other=0.0)
        rows = rows + (tl.where(source >= 0, new, cached.to(new.dtype)),)
    for token in tl.static_range(BLOCK_TOKENS):
        is_token = first + token < length
        row = tl.load(x_ptrs + (first + token) * stride_x_token, mask=is_channel & is_token, other=0.0)
        rows = rows + (row,)
    weights = ()
    for tap in tl.static_range(WIDTH):
        weight = tl.load(weight_ptr + channel * WIDTH + tap, mask=is_channel, other=0.0)
        weights = weights + (weight,)
    bias = tl.zeros((BLOCK_CHANNELS,), dtype=tl.float32)
    if HAS_BIAS:
        bias += tl.load(bias_ptr + channel, mask=is_channel, other=0.0).to(tl.float32)

    out_ptrs = out_ptr + (start + first) * conv_dim + channel
    for token in tl.static_range(BLOCK_TOKENS):
        acc = bias
        for tap in tl.static_range(WIDTH):
            if x_ptr.dtype.element_ty == tl.float32 or weight_ptr.dtype.element_ty == tl.float32:
                # Spelled as one rounding: left to itself the compiler fuses some of these, and others elsewhere.
                acc = tl.fma(rows[token + tap].to(tl.float32), weights[tap].to(tl.float32), acc)
            else:
                acc += rows[token + tap] * weights[tap]
        acc = acc / (1 + tl.exp(-acc))
        tl.store(out_ptrs + token * conv_dim, acc, mask=is_channel & (first + token < length))

    if first == 0:
        kept = ()
        for back in tl.static_range(WIDTH - 1):
            kept_source = length - (WIDTH - 1) + back
            is_new = kept_source >= 0
            last_new = tl.load(x_ptrs + kept_source * stride_x_token, mask=is_channel & is_new, other=0.0)
            is_cached = has & (kept_source < 0)
            last_ptrs = state_ptrs + (length + back) * stride_state_token
            last_cached = tl.load(last_ptrs, mask=is_channel & is_cached, other=0.0)
            kept = kept + (tl.where(is_new, last_new.to(last_cached.dtype), last_cached),)
        tl.debug_barrier()  # every thread of this program has read what the slot held
        for back in tl.static_range(WIDTH - 1):
            tl.store(state_ptrs + back * stride_state_token, kept[back], mask=is_channel)


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
        HAS_BIAS,
        BLOCK_TOKENS,
        BLOCK_CHANNELS,
    )
