"""The tables of a step that is one captured graph: always at the same addresses, padded to a number of tokens.

A graph launches the same programs whatever a step has in it, and each of them finds in these tables whether there is
something to do. Every request is a sequence here. That of a decode is empty, as are the sequences, chunks and tiles
that are padding, and for an empty one the kernels read and write nothing.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from inductor_passes.vllm.region_inputs import StepTensors
from inductor_passes.vllm.step_tables import NO_TILE, TABLE_ALIGNMENT, chunk_table, tile_table
from mamba_ops.kernels.causal_conv_tiled import BLOCK_TOKENS

_CHUNKS_OF_A_SEQUENCE = 2  # that is no longer than a chunk: it may begin in one and end in the next


class PaddedSizes(NamedTuple):
    """Of a graph for so many tokens and requests.

    Attributes:
        ntokens: padded. nseqs, nchunks, ntiles: likewise, enough for any step of that many tokens and requests.
    """

    ntokens: int
    nseqs: int
    nchunks: int
    ntiles: int


class FullTables:
    """Tables for steps of at most so many tokens.

    Args:
        max_tokens: of a step, and thus of a sequence; at most `chunk_size`.
        max_reqs: requests of a step.
        chunk_size: tokens.
        device: of the tables.
        pinned: whether the host's memory can be pinned, so that nobody waits for the copy.

    Attributes:
        most_reqs: requests of the largest step.
    """

    def __init__(self, max_tokens: int, max_reqs: int, chunk_size: int, device: torch.device, pinned: bool) -> None:
        self._chunk_size, self._pinned = chunk_size, pinned
        self.most_reqs = min(max_tokens, max_reqs)
        most = self.sizes(max_tokens, max_reqs)
        counts = {
            "cu_seqlens": most.nseqs + 1,
            "last_chunk_indices": most.nseqs,
            "has_initial_state": most.nseqs,  # a byte each
            "is_decode": most.nseqs,
            "cu_chunk_seqlens": most.nchunks + 1,
            "seq_idx": most.nchunks,
            "tile_sequence": most.ntiles,
            "tile_offset": most.ntiles,
        }
        starts = [0, *accumulate(-(-count // TABLE_ALIGNMENT) * TABLE_ALIGNMENT for count in counts.values())]
        self._at = {name: slice(start, start + counts[name]) for name, start in zip(counts, starts, strict=False)}
        self._buffer = torch.zeros(starts[-1], dtype=torch.int32, device=device)
        self.fill([], [], 0)

    def sizes(self, ntokens: int, num_reqs: int) -> PaddedSizes:
        """Enough for any step of so many tokens and requests."""
        nseqs = min(ntokens, num_reqs)
        nchunks = min(ntokens, _CHUNKS_OF_A_SEQUENCE * nseqs)
        return PaddedSizes(ntokens, nseqs, nchunks, min(ntokens, nseqs + ntokens // BLOCK_TOKENS))

    def fill(self, lengths: list[int], contexts: list[int], num_decodes: int) -> None:
        """Write a step's tables, in one copy that runs in the order of the current stream.

        Args:
            lengths: new tokens of each request; decodes, of one token each, come first. contexts: tokens before them.
            num_decodes: how many.
        """
        nseqs, none = len(lengths), [0] * num_decodes
        lengths, contexts = [*none, *lengths[num_decodes:]], [*none, *contexts[num_decodes:]]
        chunk_starts, seq_idx, last_chunks, _ = chunk_table(lengths, contexts, [0] * nseqs, self._chunk_size)
        _, tiles, offsets = tile_table(lengths)
        host = torch.zeros(self._buffer.shape[0], dtype=torch.int32, pin_memory=self._pinned)
        values = host.numpy()

        def put(name: str, entries: Any, padding: int) -> None:
            table = values[self._at[name]]
            table[: len(entries)] = entries
            table[len(entries) :] = padding

        ends = [num_decodes + end for end in accumulate(lengths, initial=0)]
        put("cu_seqlens", ends, ends[-1])
        put("last_chunk_indices", last_chunks, len(seq_idx) - 1)
        put("is_decode", [1] * num_decodes, 0)
        put("cu_chunk_seqlens", [num_decodes + start for start in chunk_starts], num_decodes + chunk_starts[-1])
        put("seq_idx", seq_idx, 0)
        put("tile_sequence", tiles, NO_TILE)
        put("tile_offset", offsets, 0)
        values[self._at["has_initial_state"]].view(np.bool_)[:nseqs] = [context > 0 for context in contexts]
        # The allocator of pinned memory hands it out again only when the copy has run.
        self._buffer.copy_(host, non_blocking=True)

    def is_decode(self, nseqs: int) -> Tensor:
        """(nseqs,) int32, 1 for a decode and 0 for everything else."""
        return self._buffer[self._at["is_decode"]][:nseqs]

    def step(self, sizes: PaddedSizes, slots: Tensor) -> StepTensors:
        """What a region takes of a step; `slots` are those of every request, (nseqs,) int32."""
        _, nseqs, nchunks, ntiles = sizes
        return StepTensors(
            self._table("cu_seqlens", nseqs + 1),
            self._table("cu_chunk_seqlens", nchunks + 1),
            self._table("last_chunk_indices", nseqs),
            self._table("seq_idx", nchunks),
            slots,
            self._table("has_initial_state", nseqs).view(torch.bool)[:nseqs],
            self._table("tile_sequence", ntiles),
            self._table("tile_offset", ntiles),
        )

    def _table(self, name: str, length: int) -> Tensor:
        return self._buffer[self._at[name]][:length]
