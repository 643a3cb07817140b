"""The convolution's states at checkpoints on the CPU: an input, a cached one, or zero for each entry."""

import torch
from torch import Tensor

from mamba_ops.value_checks import (
    check_checkpoint_offsets,
    check_kept_slots,
    check_sequences_in_place,
    resolve_slots,
)


def conv_checkpoint(
    x: Tensor,
    cu_seqlens: Tensor,
    conv_state: Tensor,
    slots: Tensor,
    has_initial_state: Tensor,
    checkpoint_offsets: Tensor,
    checkpoint_slots: Tensor,
    width: int,
) -> None:
    """The op `mamba_ops::conv_checkpoint`; shapes are described there."""
    num_slots, history = conv_state.shape[0], width - 1
    check_sequences_in_place(cu_seqlens, x.shape[0], None, slots, num_slots)
    check_checkpoint_offsets(checkpoint_offsets, cu_seqlens)
    live, keeps = cu_seqlens.diff() > 0, checkpoint_offsets > 0
    check_kept_slots(checkpoint_slots, keeps, slots[live], num_slots)
    if not keeps.any():
        return

    start, source = cu_seqlens[:-1][keeps].long(), resolve_slots(slots[keeps], num_slots)
    position = checkpoint_offsets[keeps].long()[:, None] - history + torch.arange(history)
    new = x[(start[:, None] + position).clamp(min=0)]
    cached = conv_state[source[:, None], :, (position + history).clamp(max=history - 1)]
    cached = torch.where(has_initial_state[keeps][:, None, None], cached, 0)
    there = torch.where((position >= 0)[:, :, None], new, cached).transpose(1, 2)
    conv_state[resolve_slots(checkpoint_slots[keeps], num_slots), :, :history] = there
