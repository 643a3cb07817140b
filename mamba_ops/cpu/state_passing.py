"""The recurrence between chunks on the CPU, once, and the three ways in which states come in and go out.

The indexed form must equal the form with a snapshot bit for bit, so all three run `_pass_states` and differ only in
where the first state is read and where the last one is stored. Everything is read before anything is written.
"""

import torch
from torch import Tensor

from mamba_ops.value_checks import (
    check_checkpoints,
    check_indexed_slots,
    check_kept_slots,
    check_last_chunks,
    check_slots,
    check_uncrossed_slots,
    check_write_slots,
    resolve_slots,
)


def _chunk_ranges(last_chunk_indices: Tensor) -> tuple[Tensor, Tensor]:
    """First chunk and number of chunks of each sequence, (nseqs,) int64 both."""
    end = last_chunk_indices.long() + 1
    first = torch.cat((end.new_zeros(1), end))[:-1]
    return first, end - first


def _pass_states(
    states: Tensor, dA_cumsum: Tensor, last_chunk_indices: Tensor, state: Tensor, state_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """state = exp(dA) * state + added, over the chunks of each sequence, all sequences at once.

    `state` (nseqs, nheads, headdim, dstate) FP32 is overwritten. Returns the state that enters each chunk, rounded
    to `state_dtype` (zeros for a chunk that no sequence owns), and the FP32 state after each sequence's last chunk.
    """
    first, count = _chunk_ranges(last_chunk_indices)
    decay = dA_cumsum[:, :, -1].exp()[:, :, None, None]
    entering = states.new_zeros(states.shape, dtype=state_dtype)
    for step in range(int(count.max()) if count.numel() else 0):
        live = (count > step).nonzero().squeeze(1)
        chunk = first[live] + step
        current = state[live]
        entering[chunk] = current.to(state_dtype)
        state[live] = current.mul_(decay[chunk]).add_(states[chunk])
    return entering, state


def _dense_initial(states: Tensor, nseqs: int, initial_states: Tensor | None) -> Tensor:
    """A fresh FP32 copy of the initial states, or zeros."""
    state = states.new_zeros((nseqs, *states.shape[1:]))
    return state if initial_states is None else state.copy_(initial_states)


def state_passing(
    states: Tensor,
    dA_cumsum: Tensor,
    last_chunk_indices: Tensor,
    initial_states: Tensor | None,
    state_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """The op `mamba_ops::state_passing`; shapes are described there."""
    check_last_chunks(last_chunk_indices, states.shape[0])
    state = _dense_initial(states, last_chunk_indices.shape[0], initial_states)
    entering, final = _pass_states(states, dA_cumsum, last_chunk_indices, state, state_dtype)
    return entering, final.to(state_dtype)


def state_passing_update(
    states: Tensor,
    dA_cumsum: Tensor,
    last_chunk_indices: Tensor,
    initial_states: Tensor | None,
    state_cache: Tensor,
    write_slots: Tensor,
) -> Tensor:
    """The op `mamba_ops::state_passing_update`; shapes are described there."""
    check_last_chunks(last_chunk_indices, states.shape[0])
    written = _chunk_ranges(last_chunk_indices)[1] > 0
    check_write_slots(write_slots, state_cache.shape[0], written)
    state = _dense_initial(states, last_chunk_indices.shape[0], initial_states)
    entering, final = _pass_states(states, dA_cumsum, last_chunk_indices, state, state_cache.dtype)
    _store(final, state_cache, write_slots, written)
    return entering


def state_passing_indexed(
    states: Tensor,
    dA_cumsum: Tensor,
    last_chunk_indices: Tensor,
    state_cache: Tensor,
    read_slots: Tensor,
    has_initial_state: Tensor | None,
    write_slots: Tensor,
    write_empty: bool = False,
    checkpoint_chunks: Tensor | None = None,
    checkpoint_offsets: Tensor | None = None,
    checkpoint_slots: Tensor | None = None,
) -> Tensor:
    """The op `mamba_ops::state_passing_indexed`; shapes are described there."""
    check_last_chunks(last_chunk_indices, states.shape[0])
    written = _chunk_ranges(last_chunk_indices)[1] > 0
    if write_empty:
        written = torch.ones_like(written)
    read = written if has_initial_state is None else written & has_initial_state
    num_slots = state_cache.shape[0]
    if write_empty:  # as `state_cache[write_slots] = final` does, which lets padding rows share a slot
        check_slots("read_slots", read_slots, num_slots, read)
        check_slots("write_slots", write_slots, num_slots, written)
    else:
        check_indexed_slots(read_slots, read, write_slots, written, num_slots)
        check_uncrossed_slots(read_slots, read, write_slots, written, num_slots)
    keeps = None
    if checkpoint_chunks is not None and checkpoint_offsets is not None and checkpoint_slots is not None:
        keeps = checkpoint_offsets > 0
        check_checkpoints(checkpoint_chunks, keeps, last_chunk_indices)
        used = torch.cat((read_slots[read].long(), write_slots[written].long()))
        check_kept_slots(checkpoint_slots, keeps, used, num_slots)

    state = states.new_zeros((last_chunk_indices.shape[0], *states.shape[1:]))
    state[read] = state_cache[resolve_slots(read_slots[read], num_slots)].float()
    entering, final = _pass_states(states, dA_cumsum, last_chunk_indices, state, state_cache.dtype)
    _store(final, state_cache, write_slots, written)
    if keeps is not None and checkpoint_chunks is not None and checkpoint_slots is not None:
        chunk = checkpoint_chunks[keeps].long()
        is_last = (chunk == last_chunk_indices[keeps])[:, None, None, None]
        behind = entering[(chunk + 1).clamp(max=max(0, states.shape[0] - 1))]  # enters the next chunk, rounded
        kept = torch.where(is_last, final[keeps].to(state_cache.dtype), behind)
        state_cache[resolve_slots(checkpoint_slots[keeps], num_slots)] = kept
    return entering


def _store(final: Tensor, state_cache: Tensor, write_slots: Tensor, written: Tensor) -> None:
    """state_cache[write_slots[b]] = final[b] where written[b]."""
    state_cache[resolve_slots(write_slots[written], state_cache.shape[0])] = final[written].to(state_cache.dtype)
