"""How a ragged batch is cut into chunks, computed on the host before a step."""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from mamba_ops.checks import check_chunk_size


class ChunkMetadata(NamedTuple):
    """Sequences and chunks of a ragged batch.

    A chunk lies in one sequence and holds at most `chunk_size` tokens. Sequence b owns the chunks from
    `last_chunk_indices[b - 1] + 1` (0 for b = 0) to `last_chunk_indices[b]`, none if it is empty. To pad the metadata
    to a fixed size, repeat the last entry of `cu_seqlens`, `cu_chunk_seqlens` and `last_chunk_indices`, and add zeros
    to `seq_idx`.

    Attributes:
        cu_seqlens: (nseqs + 1,) int32, token offsets of the sequences.
        cu_chunk_seqlens: (nchunks + 1,) int32, token offsets of the chunks.
        last_chunk_indices: (nseqs,) int32, the last chunk of each sequence.
        seq_idx: (nchunks,) int32, the sequence of each chunk.
        chunk_size: tokens, a power of two from 16 to 256.
    """

    cu_seqlens: Tensor
    cu_chunk_seqlens: Tensor
    last_chunk_indices: Tensor
    seq_idx: Tensor
    chunk_size: int


def build_chunk_metadata(
    cu_seqlens: Sequence[int] | Tensor,
    chunk_size: int,
    context_lens: Sequence[int] | Tensor | None = None,
    split_at: Sequence[int] | Tensor | None = None,
    device: torch.device | str | None = None,
) -> ChunkMetadata:
    """Cut the sequences of a batch into chunks.

    Reads its arguments on the host: a tensor on a GPU costs a synchronisation, a list does not.

    Args:
        cu_seqlens: nseqs + 1 token offsets, from 0, never decreasing. A sequence may be empty.
        chunk_size: the most tokens of a chunk, a power of two from 16 to 256.
        context_lens: for each sequence, its tokens of earlier calls. The first chunk then only fills up the chunk that
            they began, so that chunks end at the same positions of a sequence however its prefill was split.
        split_at: for each sequence, a number of tokens after which a chunk must end, so that the state there can be
            kept; 0 asks for nothing.
        device: of the result; that of `cu_seqlens` if it is a tensor, else the CPU, if None.

    Returns:
        The metadata, int32 tensors on `device`.

    Raises:
        ValueError, TypeError: naming the argument.
    """
    check_chunk_size(chunk_size)
    if device is None:
        device = cu_seqlens.device if isinstance(cu_seqlens, Tensor) else "cpu"
    offsets = _integers("cu_seqlens", cu_seqlens)
    if not offsets or offsets[0] != 0:
        raise ValueError(f"cu_seqlens: starts with {offsets[:1]}; it must start with 0")
    lengths = [end - start for start, end in pairwise(offsets)]
    for sequence, length in enumerate(lengths):
        if length < 0:
            raise ValueError(f"cu_seqlens: decreases to {offsets[sequence + 1]} after sequence {sequence}")
    if offsets[-1] >= 1 << 31:
        raise ValueError(f"cu_seqlens: ends at {offsets[-1]}; token offsets must fit in int32")
    contexts = _for_each_sequence("context_lens", context_lens, len(lengths))
    splits = _for_each_sequence("split_at", split_at, len(lengths))
    for sequence, (split, length) in enumerate(zip(splits, lengths, strict=True)):
        if split > length:
            raise ValueError(f"split_at: {split} for sequence {sequence}, which has {length} tokens")

    chunk_lengths: list[int] = []
    seq_idx: list[int] = []
    last_chunk_indices: list[int] = []
    for sequence, (length, context, split) in enumerate(zip(lengths, contexts, splits, strict=True)):
        chunks = _chunk_lengths(context, split, chunk_size) + _chunk_lengths(
            context + split, length - split, chunk_size
        )
        chunk_lengths += chunks
        seq_idx += [sequence] * len(chunks)
        last_chunk_indices.append(len(chunk_lengths) - 1)

    def upload(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    return ChunkMetadata(
        upload(offsets),
        upload([0, *accumulate(chunk_lengths)]),
        upload(last_chunk_indices),
        upload(seq_idx),
        chunk_size,
    )


def _chunk_lengths(context: int, length: int, chunk_size: int) -> list[int]:
    """Lengths of the chunks of `length` tokens that follow `context` others, cut at multiples of `chunk_size`."""
    end = context + length
    cuts = [context, *range(context - context % chunk_size + chunk_size, end, chunk_size), end]
    return [after - before for before, after in pairwise(cuts)] if length else []


def _integers(name: str, values: Sequence[int] | Tensor) -> list[int]:
    if isinstance(values, Tensor):
        if values.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{name}: dtype {values.dtype}; allowed: torch.int32, torch.int64")
        if values.dim() != 1:
            raise ValueError(f"{name}: shape {tuple(values.shape)}; it must have one dimension")
        values = values.tolist()
    integers = list(values)
    for value in integers:
        if not isinstance(value, int):
            raise TypeError(f"{name}: holds {value!r}; it must hold integers")
    return integers


def _for_each_sequence(name: str, values: Sequence[int] | Tensor | None, nseqs: int) -> list[int]:
    if values is None:
        return [0] * nseqs
    integers = _integers(name, values)
    if len(integers) != nseqs:
        raise ValueError(f"{name}: {len(integers)} entries; there are {nseqs} sequences")
    if any(value < 0 for value in integers):
        raise ValueError(f"{name}: {min(integers)}; entries must not be negative")
    return integers
