"""Checks that must look at values: offsets that grow, slots that exist, slots that are written once.

On a CPU the ops always make them, before they write anything. On a GPU looking at a value means waiting for the
device, so there they are off, unless the environment variable MAMBA_OPS_CHECKS is 1: then `ssd_chunk_scan` makes them,
eager or compiled. The variable is read at each eager call, and once when a graph is compiled. Ops that are called
directly on a GPU make none, and neither does a CUDA graph, captured or replayed.
"""

import os

import torch
from torch import Tensor


def checks_enabled(device: torch.device) -> bool:
    """Whether tensors on this device have their values checked."""
    return device.type == "cpu" or os.environ.get("MAMBA_OPS_CHECKS") == "1"


def resolve_slots(slots: Tensor, num_slots: int) -> Tensor:
    """The slots as int64, counted from the front; a negative slot counts from the end, as in torch indexing."""
    slots = slots.long()
    return torch.where(slots < 0, slots + num_slots, slots)


def check_chunk_offsets(cu_chunk_seqlens: Tensor, ntokens: int, most: int, bound: str = "chunk_size") -> None:
    """Raise ValueError unless the chunks tile the front of the tokens, with the empty ones (padding) last.

    Args:
        most: tokens that a chunk may have. bound: what messages call that number.
    """
    offsets = cu_chunk_seqlens.cpu()
    lengths = offsets.diff()
    if offsets[0] != 0:
        raise ValueError(f"cu_chunk_seqlens: starts at {int(offsets[0])}; it must start at 0")
    _refuse_first("cu_chunk_seqlens: decreases to {} at chunk {}", lengths < 0, offsets[1:])
    _refuse_first(
        f"cu_chunk_seqlens: {{}} tokens in chunk {{}}; a chunk holds at most {bound} = {most}",
        lengths > most,
        lengths,
    )
    _refuse_first(
        "cu_chunk_seqlens: {} tokens in chunk {}, after an empty chunk; empty chunks come last",
        (lengths[1:] > 0) & (lengths[:-1] == 0),
        lengths[1:],
        1,
    )
    if offsets[-1] > ntokens:
        raise ValueError(f"cu_chunk_seqlens: ends at {int(offsets[-1])}; there are {ntokens} tokens")


def check_last_chunks(last_chunk_indices: Tensor, nchunks: int) -> None:
    """Raise ValueError unless the indices never decrease and stay in [-1, nchunks)."""
    last = last_chunk_indices.cpu()
    _refuse_first(
        f"last_chunk_indices: {{}} for sequence {{}}; there are {nchunks} chunks, and -1 stands for none",
        (last < -1) | (last >= nchunks),
        last,
    )
    _refuse_first("last_chunk_indices: decreases to {} at sequence {}", last.diff() < 0, last[1:], 1)


def check_ownership(cu_seqlens: Tensor, cu_chunk_seqlens: Tensor, last_chunk_indices: Tensor, seq_idx: Tensor) -> None:
    """Raise ValueError unless each sequence is exactly its chunks, and each chunk with tokens is of one sequence."""
    ends, chunk_ends = cu_seqlens.cpu(), cu_chunk_seqlens.cpu()
    last = last_chunk_indices.cpu().long()
    if ends[0] != 0:
        raise ValueError(f"cu_seqlens: starts at {int(ends[0])}; it must start at 0")
    _refuse_first(
        "cu_seqlens: {} at the end of sequence {}, whose last chunk ends elsewhere; the two must agree",
        ends[1:] != chunk_ends[last + 1],
        ends[1:],
    )
    nchunks = check_chunks_are_owned(chunk_ends, last)
    owners = torch.arange(len(last)).repeat_interleave(last.diff(prepend=last.new_full((1,), -1)))
    named = seq_idx.cpu()[:nchunks]
    _refuse_first("seq_idx: {} for chunk {}, which belongs to another sequence", named != owners, named)


def check_chunks_are_owned(cu_chunk_seqlens: Tensor, last_chunk_indices: Tensor) -> int:
    """Raise ValueError unless the sequences have as many chunks as there are with tokens, which is returned."""
    nchunks = int((cu_chunk_seqlens.diff() > 0).sum())
    owned = int(last_chunk_indices[-1]) + 1 if len(last_chunk_indices) else 0
    if owned != nchunks:
        raise ValueError(f"last_chunk_indices: sequences have {owned} chunks in all; there are {nchunks} with tokens")
    return nchunks


def check_batch(
    cu_seqlens: Tensor,
    cu_chunk_seqlens: Tensor,
    last_chunk_indices: Tensor,
    seq_idx: Tensor,
    ntokens: int,
    chunk_size: int,
    num_slots: int,
    read_slots: Tensor | None,
    has_initial_state: Tensor | None,
    write_slots: Tensor | None,
    crossed: bool,
) -> None:
    """Every check of one prefill at once; arguments as for `mamba_ops.ops.checked_offsets`."""
    check_chunk_offsets(cu_chunk_seqlens, ntokens, chunk_size)
    check_last_chunks(last_chunk_indices, cu_chunk_seqlens.shape[0] - 1)
    check_ownership(cu_seqlens, cu_chunk_seqlens, last_chunk_indices, seq_idx)
    if write_slots is None:
        return
    written = _with_tokens(last_chunk_indices)
    check_write_slots(write_slots, num_slots, written)
    if read_slots is not None:
        read = written if has_initial_state is None else written & has_initial_state
        check_slots("read_slots", read_slots, num_slots, read)
        if not crossed:
            check_uncrossed_slots(read_slots, read, write_slots, written, num_slots)


def check_slots(name: str, slots: Tensor, num_slots: int, used: Tensor) -> None:
    """Raise ValueError where a used slot is out of range. Slots that are not used may hold anything."""
    slots = slots.cpu()
    _refuse_first(
        f"{name}: slot {{}} of sequence {{}}; the cache has slots -{num_slots} to {num_slots - 1}",
        used.cpu() & ((slots < -num_slots) | (slots >= num_slots)),
        slots,
    )


def check_write_slots(write_slots: Tensor, num_slots: int, written: Tensor, name: str = "write_slots") -> None:
    """Raise ValueError where a slot that is written is out of range or is written twice."""
    check_slots(name, write_slots, num_slots, written)
    slot, times = resolve_slots(write_slots[written].cpu(), num_slots).unique(return_counts=True)
    _refuse_first(f"{name}: slot {{}} is written by more than one sequence; slots must be distinct", times > 1, slot)


def check_short_sequences(
    cu_chunk_seqlens: Tensor,
    last_chunk_indices: Tensor | None,
    ntokens: int,
    most: int,
    slots: Tensor,
    num_slots: int,
) -> None:
    """Every check of `mamba_ops.ops.one_pass_scan`; `most` tokens may be in a chunk."""
    if last_chunk_indices is None:
        check_sequences_in_place(cu_chunk_seqlens, ntokens, most, slots, num_slots, "cu_chunk_seqlens")
        return
    check_chunk_offsets(cu_chunk_seqlens, ntokens, most, "max_tokens")
    check_last_chunks(last_chunk_indices, cu_chunk_seqlens.shape[0] - 1)
    check_chunks_are_owned(cu_chunk_seqlens, last_chunk_indices)
    written = _with_tokens(last_chunk_indices)
    check_write_slots(slots, num_slots, written, "slots")


def check_sequences_in_place(
    cu_seqlens: Tensor, ntokens: int, most: int | None, slots: Tensor, num_slots: int, name: str = "cu_seqlens"
) -> None:
    """Raise ValueError unless the sequences lie one after the other in the tokens, each with a slot of its own.

    Args:
        most: tokens that a sequence may have; None for any number.
        name: what messages call the offsets.
    """
    offsets = cu_seqlens.cpu()
    lengths = offsets.diff()
    if offsets[0] != 0:
        raise ValueError(f"{name}: starts at {int(offsets[0])}; it must start at 0")
    _refuse_first(f"{name}: decreases to {{}} at the end of sequence {{}}", lengths < 0, offsets[1:])
    if most is not None:
        _refuse_first(f"{name}: {{}} tokens in sequence {{}}; allowed: up to {most}", lengths > most, lengths)
    if offsets[-1] > ntokens:
        raise ValueError(f"{name}: ends at {int(offsets[-1])}; there are {ntokens} tokens")
    check_write_slots(slots, num_slots, lengths > 0, "slots")


def check_indexed_slots(read_slots: Tensor, read: Tensor, write_slots: Tensor, written: Tensor, num_slots: int) -> None:
    """Raise ValueError where a slot in use is out of range or is written twice."""
    check_slots("read_slots", read_slots, num_slots, read)
    check_write_slots(write_slots, num_slots, written)


def check_checkpoints(chunks: Tensor, keeps: Tensor, last_chunk_indices: Tensor) -> None:
    """Raise ValueError where a sequence keeps the state behind a chunk that is not one of its own."""
    last = last_chunk_indices.cpu().long()
    first = torch.cat((last.new_full((1,), -1), last))[:-1] + 1
    chunks = chunks.cpu().long()
    _refuse_first(
        "checkpoint_chunks: {} for sequence {}, which has no such chunk",
        keeps.cpu() & ((chunks < first) | (chunks > last)),
        chunks,
    )


def check_checkpoint_offsets(offsets: Tensor, cu_seqlens: Tensor) -> None:
    """Raise ValueError where a checkpoint lies behind the end of its sequence."""
    offsets, lengths = offsets.cpu(), cu_seqlens.cpu().diff()
    _refuse_first("checkpoint_offsets: {} for sequence {}, which is shorter", offsets > lengths, offsets)


def check_kept_slots(slots: Tensor, keeps: Tensor, used: Tensor, num_slots: int) -> None:
    """Raise ValueError where a slot of a checkpoint is out of range, is written twice, or is among the `used` ones."""
    check_write_slots(slots, num_slots, keeps, "checkpoint_slots")
    slots = resolve_slots(slots.cpu(), num_slots)
    _refuse_first(
        "checkpoint_slots: slot {} of sequence {} belongs to a sequence; checkpoints have slots of their own",
        keeps.cpu() & torch.isin(slots, resolve_slots(used.cpu(), num_slots)),
        slots,
    )


def check_uncrossed_slots(
    read_slots: Tensor, read: Tensor, write_slots: Tensor, written: Tensor, num_slots: int
) -> None:
    """Raise ValueError where one sequence reads a slot that another one writes: nothing orders the two."""
    source = resolve_slots(read_slots.cpu(), num_slots)
    target = resolve_slots(write_slots.cpu(), num_slots)
    crossed = (source[:, None] == target) & read.cpu()[:, None] & written.cpu()
    crossed.fill_diagonal_(False)
    _refuse_first(
        "read_slots: slot {} of sequence {} is written by another sequence; take the states by masked_gather and pass "
        "them as initial_states",
        crossed.any(1),
        source,
    )


def _with_tokens(last_chunk_indices: Tensor) -> Tensor:
    """Which sequences have a chunk."""
    return torch.diff(last_chunk_indices, prepend=last_chunk_indices.new_full((1,), -1)) > 0


def _refuse_first(message: str, bad: Tensor, values: Tensor, offset: int = 0) -> None:
    """Raise ValueError for the first bad entry; `message` takes its value and its position, counted from `offset`."""
    if bad.any():
        where = int(bad.nonzero()[0])
        raise ValueError(message.format(int(values[where]), where + offset))
