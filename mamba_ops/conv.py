"""The causal convolution before the SSD, over a ragged batch, continued from cached inputs.

It is plain PyTorch, one expression a token and channel, so that Inductor fuses it: each tap is an indexed load and a
`where`, with no loop over tokens or sequences and no tensor whose shape depends on data. The state is a copy of
inputs, and the taps are summed in the same order wherever a sequence was cut.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from mamba_ops.conv_checks import check_sequences, check_weights
from mamba_ops.ops.checked_slots import checked_slots
from mamba_ops.value_checks import checks_enabled


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cu_seqlens: Tensor,
    conv_state: Tensor,
    read_slots: Tensor,
    has_initial_state: Tensor | None,
    write_slots: Tensor,
) -> Tensor:
    """SiLU(bias + depthwise causal convolution), each sequence continued from its slot; the slots are updated in place.

    Args:
        x: (ntokens, conv_dim), any strides. Tokens past `cu_seqlens[-1]` are padding: their rows of the result are
            not defined and they reach no slot.
        weight: (conv_dim, width), width >= 2; `weight[:, -1]` meets the token itself.
        bias: (conv_dim,) or None.
        cu_seqlens: (nseqs + 1,) int32 or int64, token offsets; an empty sequence is padding and its slots are ignored.
        conv_state: (num_slots, conv_dim, width - 1), any strides and float dtype; a slot holds the last inputs of a
            sequence, oldest first. Updated in place.
        read_slots, write_slots: (nseqs,) int32 or int64, any stride; a negative slot counts from the end. The slots
            written by sequences that are not empty are distinct.
        has_initial_state: (nseqs,) bool, or None for all of them. Where it is False the sequence starts from zeros,
            and the slot is not used, whatever it holds.

    Returns:
        (ntokens, conv_dim), dtype of x. The arithmetic is FP32.

    Raises:
        ValueError, TypeError: an argument of the wrong shape or dtype; on a CPU or with MAMBA_OPS_CHECKS=1 also offsets
            that do not fit the tokens, a slot out of range, a repeated write slot. Nothing has been written then.
    """
    check_weights(x, weight, bias)
    check_sequences(
        cu_seqlens, conv_state, read_slots, has_initial_state, write_slots, weight.shape[0], weight.shape[1], x.device
    )
    if checks_enabled(conv_state.device):
        read_slots, write_slots = checked_slots(
            cu_seqlens, read_slots, has_initial_state, write_slots, x.shape[0], conv_state.shape[0]
        )
    return causal_conv_unchecked(x, weight, bias, cu_seqlens, conv_state, read_slots, has_initial_state, write_slots)


def causal_conv_unchecked(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cu_seqlens: Tensor,
    conv_state: Tensor,
    read_slots: Tensor,
    has_initial_state: Tensor | None,
    write_slots: Tensor,
) -> Tensor:
    """`causal_conv` for a caller that has checked the arguments."""
    ntokens, width = x.shape[0], weight.shape[1]
    if ntokens == 0:
        return x.new_empty(x.shape)
    start, live = cu_seqlens[:-1], cu_seqlens[1:] > cu_seqlens[:-1]
    any_live = cu_seqlens[-1] > cu_seqlens[0]
    has = live if has_initial_state is None else live & has_initial_state

    # The one read of the cache. All else follows from it, the stores too, so that no compiler can move a read behind
    # a store and then copy the cache to keep what was read.
    slots, age = torch.where(has, read_slots, 0)[:, None], torch.arange(width - 1, device=x.device)
    history = conv_state[slots, :, age]  # (nseqs, width - 1, conv_dim)
    history = torch.where((has | ~any_live)[:, None, None], history, 0)

    token = torch.arange(ntokens, device=x.device)
    sequence = torch.searchsorted(cu_seqlens[1:], token, right=True).clamp(max=start.shape[0] - 1)
    position = token - start[sequence]
    total = x.new_zeros((), dtype=torch.float32) if bias is None else bias.float()
    for tap in range(width):
        lag = width - 1 - tap
        value = x
        if lag:
            earlier = F.pad(x, (0, 0, lag, 0))[:ntokens]
            cached = history[sequence, (position + tap).clamp(max=width - 2)]
            value = torch.where((position >= lag)[:, None], earlier, cached)
        total = torch.addcmul(total, value.float(), weight[:, tap].float())

    # An empty sequence stands in for the first that is not, see _store.
    row = torch.where(live, torch.arange(live.shape[0], device=x.device), sequence[0])
    target = torch.where(any_live, write_slots[row], 0)
    _store(x, start[row], (cu_seqlens[1:] - start)[row], history[row], conv_state, target)
    return F.silu(total).to(x.dtype)


def _store(x: Tensor, start: Tensor, length: Tensor, history: Tensor, conv_state: Tensor, slots: Tensor) -> None:
    """Write the last `width - 1` inputs of each sequence to its slot.

    Shapes may not depend on how many sequences are empty, so an empty one writes too: what the first one writes that
    is not empty, to the same slot. Where duplicates agree the order of the stores does not matter. If all sequences
    are empty, each of them writes back what slot 0 held (of a NaN, perhaps with other bits).
    """
    size = history.shape[1]
    index = torch.arange(size, device=x.device)
    position = length[:, None] - size + index  # negative where the input is older than this call
    new = x[(start[:, None] + position).clamp(min=0)].to(conv_state.dtype)
    old = history.gather(1, (length[:, None] + index).clamp(max=size - 1)[:, :, None].expand(history.shape))
    last = torch.where((position >= 0)[:, :, None], new, old)
    conv_state.index_put_((slots,), last.transpose(1, 2))
