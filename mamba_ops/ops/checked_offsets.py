"""The checks on values of a whole prefill as one op, for a GPU, where a compiled graph cannot look at values itself."""

import torch
from torch import Tensor
from torch.library import custom_op

from mamba_ops.value_checks import check_batch


@custom_op("mamba_ops::checked_offsets", mutates_args=())
def checked_offsets(
    cu_chunk_seqlens: Tensor,
    last_chunk_indices: Tensor,
    ntokens: int,
    chunk_size: int,
    num_slots: int = 0,
    read_slots: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    write_slots: Tensor | None = None,
) -> Tensor:
    """A copy of `cu_chunk_seqlens`, once the batch and its slots have passed the checks.

    Every stage depends on the offsets, so whatever uses the result comes after the checks in a compiled graph too,
    while the slots stay the tensors that they were. It waits for the device; while a CUDA graph is captured, which
    forbids that, it checks nothing.

    Args:
        cu_chunk_seqlens: (nchunks + 1,) int32. last_chunk_indices: (nseqs,) int32.
        ntokens, chunk_size: what the offsets must fit. num_slots: slots of the cache.
        read_slots, has_initial_state, write_slots: (nseqs,), as for `state_passing_indexed`.

    Raises:
        ValueError: the argument whose values are wrong.
    """
    if not (cu_chunk_seqlens.is_cuda and torch.cuda.is_current_stream_capturing()):
        check_batch(
            cu_chunk_seqlens,
            last_chunk_indices,
            ntokens,
            chunk_size,
            num_slots,
            read_slots,
            has_initial_state,
            write_slots,
        )
    return cu_chunk_seqlens.clone()


@checked_offsets.register_fake
def _(
    cu_chunk_seqlens: Tensor,
    last_chunk_indices: Tensor,
    ntokens: int,
    chunk_size: int,
    num_slots: int = 0,
    read_slots: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    write_slots: Tensor | None = None,
) -> Tensor:
    return torch.empty_like(cu_chunk_seqlens)
