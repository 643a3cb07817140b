"""Ragged tokens as padded chunks, the one layout in which every stage works on the CPU.

A batch of chunks becomes a dense (nchunks, width, ...) tensor whose rows past a chunk's length are zero. `width` is
the longest chunk that is there, not `chunk_size`: a step of 32 new tokens costs 32 rows a chunk.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

# Temporaries of a group of chunks stay near this many bytes, whatever the batch.
GROUP_BYTES = 1 << 26


def padded_index(cu_chunk_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """Where each padded row comes from.

    Args:
        cu_chunk_seqlens: (nchunks + 1,) token offsets of the chunks.

    Returns:
        `index` (nchunks, width) int64, the token of each row, and `valid` (nchunks, width) bool, False past a
        chunk's length, where `index` is 0.
    """
    length = cu_chunk_seqlens.diff()
    width = int(length.max()) if length.numel() else 0
    position = torch.arange(width)
    valid = position < length[:, None]
    return torch.where(valid, cu_chunk_seqlens[:-1, None].long() + position, 0), valid


def gather_padded(tokens: Tensor, index: Tensor, valid: Tensor) -> Tensor:
    """(ntokens, ...) of any float dtype -> (nchunks, width, ...) FP32, zero where `valid` is False.

    Rows are zeroed by a select and not by a product, because the token that stands in for them may hold NaN.
    """
    rows = tokens[index].float()
    return rows.masked_fill_(~valid.view(valid.shape + (1,) * (rows.ndim - 2)), 0.0)


def chunk_groups(nchunks: int, bytes_per_chunk: int) -> Iterator[slice]:
    """Consecutive runs of chunks whose temporaries fit in `GROUP_BYTES`; one chunk at least."""
    step = max(1, GROUP_BYTES // max(1, bytes_per_chunk))
    for start in range(0, nchunks, step):
        yield slice(start, min(start + step, nchunks))
