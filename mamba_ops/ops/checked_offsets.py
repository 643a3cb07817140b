"""The checks on values of a whole prefill as one op, for compiled graphs, which cannot look at values themselves."""

import torch
from torch import Tensor
from torch.library import custom_op

from mamba_ops.value_checks import check_batch


@custom_op("mamba_ops::checked_offsets", mutates_args=())
def checked_offsets(
    cu_seqlens: Tensor,
    cu_chunk_seqlens: Tensor,
    last_chunk_indices: Tensor,
    seq_idx: Tensor,
    ntokens: int,
    chunk_size: int,
    num_slots: int = 0,
    read_slots: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    write_slots: Tensor | None = None,
    crossed: bool = False,
) -> tuple[Tensor, Tensor]:
    """Copies of `cu_seqlens` and `cu_chunk_seqlens`, once the batch and its slots have passed the checks.

    Every stage depends on the offsets, so whatever uses the results comes after the checks in a compiled graph too,
    while the slots stay the tensors that they were. It waits for the device; while a CUDA graph is captured, which
    forbids that, it checks nothing.

    Args:
        cu_seqlens: (nseqs + 1,) int32 or int64. cu_chunk_seqlens, last_chunk_indices, seq_idx: as in `ChunkMetadata`.
        ntokens, chunk_size: what the offsets must fit. num_slots: slots of the cache.
        read_slots, has_initial_state, write_slots: (nseqs,), as for `state_passing_indexed`.
        crossed: whether a sequence may read a slot that another one writes.

    Raises:
        ValueError: the argument whose values are wrong.
    """
    if not (cu_chunk_seqlens.is_cuda and torch.cuda.is_current_stream_capturing()):
        check_batch(
            cu_seqlens,
            cu_chunk_seqlens,
            last_chunk_indices,
            seq_idx,
            ntokens,
            chunk_size,
            num_slots,
            read_slots,
            has_initial_state,
            write_slots,
            crossed,
        )
    return cu_seqlens.clone(), cu_chunk_seqlens.clone()


@checked_offsets.register_fake
def _(
    cu_seqlens: Tensor,
    cu_chunk_seqlens: Tensor,
    last_chunk_indices: Tensor,
    seq_idx: Tensor,
    ntokens: int,
    chunk_size: int,
    num_slots: int = 0,
    read_slots: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    write_slots: Tensor | None = None,
    crossed: bool = False,
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(cu_seqlens), torch.empty_like(cu_chunk_seqlens)
