"""The tables of a step's prefills, written on the host and copied to the device at once.

vLLM makes each table by itself: a dozen small tensors, with a launch or a copy for each. All of them follow from the
lengths of the sequences, which the host knows. What is in them is what vLLM's own builder would have put there.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mamba_ops.kernels.causal_conv_tiled import BLOCK_TOKENS

# Elements. Every table begins where a tensor of its own could: compiled kernels may rely on 16 bytes.
TABLE_ALIGNMENT = 32
NO_TILE = -1  # in place of a tile's sequence
_LEAST_TILES = 1024


class StepTables(NamedTuple):
    """What vLLM's metadata has of the sequences in prefill.

    Attributes:
        query_start_loc: (nseqs + 1,). has_initial_states: (nseqs,) bool.
        cu_chunk_seqlen: (nchunks + 1,). seq_idx: (nchunks,). last_chunk_indices: (nseqs,).
        checkpoint_chunks: (nseqs,) int64, or None without checkpoints.
        nums_dict: tiles of the convolution, as vLLM's kernel reads them. batch_ptr, token_chunk_offset_ptr: of them.
        max_tokens: of the longest sequence.
    """

    query_start_loc: Tensor
    has_initial_states: Tensor
    cu_chunk_seqlen: Tensor
    seq_idx: Tensor
    last_chunk_indices: Tensor
    checkpoint_chunks: Tensor | None
    nums_dict: dict[Any, Any]
    batch_ptr: Tensor
    token_chunk_offset_ptr: Tensor
    max_tokens: int


def step_tables(
    lengths: list[int],
    contexts: list[int],
    checkpoints: list[int] | None,
    chunk_size: int,
    device: torch.device,
    pinned: bool,
) -> StepTables:
    """The tables on `device`.

    Args:
        lengths: new tokens of each sequence. contexts: tokens before them.
        checkpoints: new tokens of each sequence after which its state is kept, or 0; None if none is kept.
        chunk_size: tokens.
        device: of the tables.
        pinned: whether the host's memory can be pinned, so that nobody waits for the copy.
    """
    nseqs = len(lengths)
    cu_chunk_seqlen, seq_idx, last_chunk_indices, checkpoint_chunks = chunk_table(
        lengths, contexts, checkpoints or [0] * nseqs, chunk_size
    )
    counts, tiles, offsets = tile_table(lengths)
    ntiles = len(tiles)
    room = 2 * max(_LEAST_TILES, ntiles)

    kept = 2 * nseqs if checkpoints else 0  # of twice the size
    sizes = (nseqs + 1, nseqs, nseqs, len(seq_idx), len(cu_chunk_seqlen), kept, room, room)
    starts = [0, *accumulate(-(-size // TABLE_ALIGNMENT) * TABLE_ALIGNMENT for size in sizes)]
    host = torch.empty(starts[-1], dtype=torch.int32, pin_memory=pinned)
    values = host.numpy()
    values[: nseqs + 1] = [0, *accumulate(lengths)]
    # One byte a sequence, in the space of four.
    values[starts[1] : starts[2]].view(np.bool_)[:nseqs] = [context > 0 for context in contexts]
    values[starts[2] : starts[2] + nseqs] = last_chunk_indices
    values[starts[3] : starts[3] + len(seq_idx)] = seq_idx
    values[starts[4] : starts[4] + len(cu_chunk_seqlen)] = cu_chunk_seqlen
    if checkpoints:
        values[starts[5] : starts[5] + kept].view(np.int64)[:] = checkpoint_chunks
    values[starts[6] :] = NO_TILE
    values[starts[6] : starts[6] + ntiles] = tiles
    values[starts[7] : starts[7] + ntiles] = offsets

    # The allocator of pinned memory hands it out again when the copy has run, and that of the device in its order.
    buffer = host.to(device, non_blocking=True)
    batch_ptr = buffer[starts[6] : starts[6] + room]
    token_chunk_offset_ptr = buffer[starts[7] : starts[7] + room]
    of_a_tile = {
        "nums": torch.tensor(counts, dtype=torch.int32),
        "tot": ntiles,
        "mlist": torch.from_numpy(tiles),
        "mlist_len": ntiles,
        "offsetlist": torch.from_numpy(offsets),
        "batch_ptr": batch_ptr,
        "token_chunk_offset_ptr": token_chunk_offset_ptr,
    }
    return StepTables(
        query_start_loc=buffer[: nseqs + 1],
        has_initial_states=buffer[starts[1] : starts[2]].view(torch.bool)[:nseqs],
        cu_chunk_seqlen=buffer[starts[4] : starts[4] + len(cu_chunk_seqlen)],
        seq_idx=buffer[starts[3] : starts[3] + len(seq_idx)],
        last_chunk_indices=buffer[starts[2] : starts[2] + nseqs],
        checkpoint_chunks=buffer[starts[5] : starts[5] + kept].view(torch.int64) if checkpoints else None,
        nums_dict={BLOCK_TOKENS: of_a_tile},
        batch_ptr=batch_ptr,
        token_chunk_offset_ptr=token_chunk_offset_ptr,
        max_tokens=max(lengths),
    )


def tile_table(lengths: list[int]) -> tuple[list[int], Any, Any]:
    """How many tiles of the convolution each sequence has; of each tile its sequence, and its place in that."""
    counts = [-(-length // BLOCK_TOKENS) for length in lengths]
    sequences = np.repeat(np.arange(len(lengths)), counts)
    offsets = np.arange(len(sequences), dtype=np.int32)
    if len(lengths) > 1:
        offsets -= np.repeat(np.array([0, *accumulate(counts[:-1])], dtype=np.int32), counts)
    return counts, sequences, offsets


def chunk_table(
    lengths: list[int], contexts: list[int], checkpoints: list[int], chunk_size: int
) -> tuple[list[int], list[int], list[int], list[int]]:
    """Where each chunk begins, with the end of the last one; its sequence; the last chunk of each sequence, and the
    chunk that ends at its checkpoint, or 0.

    A chunk ends with its sequence, at its checkpoint, and at multiples of `chunk_size` tokens of it, counted with its
    context. A sequence without tokens has a chunk of none if its context ends within one, as vLLM has it.
    """
    cu_chunk_seqlen: list[int] = []
    seq_idx: list[int] = []
    last_chunk_indices: list[int] = []
    checkpoint_chunks = [0] * len(lengths)
    position = 0
    for sequence, (length, context, kept) in enumerate(zip(lengths, contexts, checkpoints, strict=True)):
        first = position
        for part in (kept, length) if kept else (length,):
            checkpoint_chunks[sequence] = len(seq_idx) - 1 if position > first else 0
            end = first + part
            begun = (context + position - first) % chunk_size
            if begun:
                cu_chunk_seqlen.append(position)
                seq_idx.append(sequence)
                position = min(position + chunk_size - begun, end)
            starts = range(position, end, chunk_size)
            cu_chunk_seqlen += starts
            seq_idx += [sequence] * len(starts)
            position = end
        last_chunk_indices.append(len(seq_idx) - 1)
    cu_chunk_seqlen.append(position)
    return cu_chunk_seqlen, seq_idx, last_chunk_indices, checkpoint_chunks
