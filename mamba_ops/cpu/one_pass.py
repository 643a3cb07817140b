"""The one-pass continuation on the CPU: the stages one after the other, on the sequences that have tokens."""

import torch
from torch import Tensor

from mamba_ops.cpu.bmm_chunk import bmm_chunk
from mamba_ops.cpu.chunk_scan import chunk_scan
from mamba_ops.cpu.chunk_state import chunk_state
from mamba_ops.cpu.state_passing import state_passing_indexed
from mamba_ops.value_checks import check_short_sequences


def one_pass_scan(
    x: Tensor,
    B: Tensor,
    C: Tensor,
    dt_out: Tensor,
    dA_cumsum: Tensor,
    cu_chunk_seqlens: Tensor,
    state_cache: Tensor,
    slots: Tensor,
    has_initial_state: Tensor,
    out: Tensor,
    max_tokens: int,
    D: Tensor | None,
    last_chunk_indices: Tensor | None,
    checkpoint_chunks: Tensor | None,
    checkpoint_offsets: Tensor | None,
    checkpoint_slots: Tensor | None,
) -> None:
    """The op `mamba_ops::one_pass_scan`; shapes are described there."""
    check_short_sequences(cu_chunk_seqlens, last_chunk_indices, x.shape[0], max_tokens, slots, state_cache.shape[0])
    if last_chunk_indices is None:
        present = (cu_chunk_seqlens.diff() > 0).nonzero().squeeze(1)
        cu_chunk_seqlens = torch.cat((cu_chunk_seqlens[:1], cu_chunk_seqlens[1:][present]))
        dt_out, dA_cumsum, slots = dt_out[present], dA_cumsum[present], slots[present]
        has_initial_state = has_initial_state[present]
        last_chunk_indices = torch.arange(present.numel(), dtype=torch.int32)
    states = chunk_state(B, x, dt_out, dA_cumsum, cu_chunk_seqlens)
    entering = state_passing_indexed(
        states,
        dA_cumsum,
        last_chunk_indices,
        state_cache,
        slots,
        has_initial_state,
        slots,
        False,
        checkpoint_chunks,
        checkpoint_offsets,
        checkpoint_slots,
    )
    cb = bmm_chunk(C, B, cu_chunk_seqlens, dt_out.shape[2])
    chunk_scan(cb, x, dt_out, dA_cumsum, C, entering, cu_chunk_seqlens, out, D, None)
