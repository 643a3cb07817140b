"""The whole Mamba2 prefill over a ragged batch: one function that strings the ops together."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from mamba_ops.metadata import ChunkMetadata
from mamba_ops.ops import (
    bmm_chunk,
    chunk_cumsum,
    chunk_scan,
    chunk_state,
    masked_gather,
    state_passing,
    state_passing_indexed,
    state_passing_update,
)
from mamba_ops.ops.checked_offsets import checked_offsets
from mamba_ops.ssd_checks import check_inputs, check_states
from mamba_ops.value_checks import checks_enabled


class SSDOutput(NamedTuple):
    """What `ssd_chunk_scan` computed.

    Attributes:
        out: (ntokens, nheads, headdim).
        final_states: (nseqs, nheads, headdim, dstate), or None if they went to a state cache.
        intermediate_states: (nchunks, nheads, headdim, dstate), row c the state after chunk c, or None if not wanted.
    """

    out: Tensor
    final_states: Tensor | None
    intermediate_states: Tensor | None


def ssd_chunk_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    metadata: ChunkMetadata,
    *,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    initial_states: Tensor | None = None,
    state_cache: Tensor | None = None,
    read_slots: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    write_slots: Tensor | None = None,
    state_dtype: torch.dtype | None = None,
    return_intermediate_states: bool = False,
    out: Tensor | None = None,
) -> SSDOutput:
    """Run the SSD of Mamba2 over every sequence of a ragged batch, each from its own initial state.

    Where states come from and go to:

    - no `state_cache`: from `initial_states` or zeros, and the final states are returned;
    - `state_cache` and `write_slots`: from `initial_states` or zeros, and final states go to the cache in place;
    - `read_slots` as well: from the cache too, `state_cache[read_slots]` where `has_initial_state`, else zeros, with no
      copy in between. Equal to the second form with `masked_gather(...)` as initial states, bit for bit.

    The arithmetic of the recurrence is FP32; a state is rounded once, when it is stored.

    Args:
        x: (ntokens, nheads, headdim), FP16, BF16 or FP32. Last dimension dense, as in B, C, z and out; other strides
            are free, the token stride below 2**22.
        dt: (ntokens, nheads), step sizes, not negative once bias, softplus and limits have been applied.
        A: (nheads,) FP32, decay rates, negative.
        B, C: (ntokens, ngroups, dstate), dtype of x; ngroups divides nheads.
        metadata: from `build_chunk_metadata`, on the device of x. Tokens past its last chunk are padding.
        D: (nheads,) or (nheads, headdim), the skip connection. z: like x, any of the three dtypes; the output is
            multiplied by SiLU(z). dt_bias: (nheads,), added to dt before softplus.
        dt_softplus: whether dt goes through softplus. dt_limit: range to which it is clamped last.
        initial_states: (nseqs, nheads, headdim, dstate), any of the three dtypes, rows dense.
        state_cache: (num_slots, nheads, headdim, dstate), any of the three dtypes, each slot dense, `stride(0)` free.
        read_slots, write_slots: (nseqs,) int32 or int64, any stride; a negative slot counts from the end. An empty
            sequence reads and writes nothing and its slots may hold anything. No slot is written twice, and none that
            one sequence reads is written by another.
        has_initial_state: (nseqs,) bool, any stride; None means that all have one. Where it is False the slot is not
            read, whatever it holds.
        state_dtype: dtype of the returned states, by default that of `initial_states`, or of x. With a cache it is the
            dtype of the cache.
        return_intermediate_states: whether to return the state after every chunk, in the state dtype.
        out: (ntokens, nheads, headdim) to write to, memory of its own, any of the three dtypes; made if None.

    Raises:
        TypeError, ValueError: the argument that is wrong, before anything is written. Values of offsets and slots are
            checked on a CPU, and on a GPU if MAMBA_OPS_CHECKS is 1 (see `mamba_ops.value_checks`).

    Source: Dao and Gu, "Transformers are SSMs" (2024), section 6 and listing 1.
    """
    if out is None:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
    check_inputs(x, dt, A, B, C, metadata, D, z, dt_bias, dt_limit, out)
    check_states(x, B, metadata, initial_states, state_cache, read_slots, has_initial_state, write_slots, state_dtype)
    cu_chunk_seqlens, last_chunk_indices = metadata.cu_chunk_seqlens, metadata.last_chunk_indices
    if checks_enabled(x.device):
        num_slots = 0 if state_cache is None else state_cache.shape[0]
        _, cu_chunk_seqlens = checked_offsets(
            metadata.cu_seqlens,
            cu_chunk_seqlens,
            last_chunk_indices,
            metadata.seq_idx,
            x.shape[0],
            metadata.chunk_size,
            num_slots,
            read_slots,
            has_initial_state,
            write_slots,
        )

    # A test by isinf would break the graph where torch.compile traces the limits as symbols.
    dt_min, dt_max = (None if limit in (math.inf, -math.inf) else limit for limit in dt_limit)
    dA_cumsum, dt_out = chunk_cumsum(dt, A, cu_chunk_seqlens, metadata.chunk_size, dt_bias, dt_softplus, dt_min, dt_max)
    states = chunk_state(B, x, dt_out, dA_cumsum, cu_chunk_seqlens)
    final_states = None
    if state_cache is None:
        if state_dtype is None:
            state_dtype = x.dtype if initial_states is None else initial_states.dtype
        entering, final_states = state_passing(states, dA_cumsum, last_chunk_indices, initial_states, state_dtype)
    elif read_slots is None:
        entering = state_passing_update(states, dA_cumsum, last_chunk_indices, initial_states, state_cache, write_slots)
    else:
        entering = state_passing_indexed(
            states, dA_cumsum, last_chunk_indices, state_cache, read_slots, has_initial_state, write_slots
        )
    del states  # the largest buffer, and its last use: the products may take its memory
    cb = bmm_chunk(C, B, cu_chunk_seqlens, metadata.chunk_size)
    chunk_scan(cb, x, dt_out, dA_cumsum, C, entering, cu_chunk_seqlens, out, D, z)

    intermediate_states = None
    if return_intermediate_states:
        intermediate_states = _states_after_chunks(entering, metadata, final_states, state_cache, write_slots)
    return SSDOutput(out, final_states, intermediate_states)


def _states_after_chunks(
    entering: Tensor,
    metadata: ChunkMetadata,
    final_states: Tensor | None,
    state_cache: Tensor | None,
    write_slots: Tensor | None,
) -> Tensor:
    """The state after a chunk enters the next one; after the last chunk of a sequence it is the final state."""
    chunk = torch.arange(entering.shape[0], device=entering.device)
    is_last = metadata.last_chunk_indices[metadata.seq_idx] == chunk
    if write_slots is None:
        assert final_states is not None
        final = final_states[metadata.seq_idx]
    else:
        final = masked_gather(state_cache, write_slots[metadata.seq_idx], is_last)
    return torch.where(is_last[:, None, None, None], final, entering.roll(-1, 0))
