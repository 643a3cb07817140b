"""Stage 3 as ops: state passing with the states returned, written to cache slots, or read from them as well."""

import torch
import triton
from torch import Tensor
from torch.library import custom_op, triton_op

from mamba_ops import cpu, op_checks
from mamba_ops.kernels import state_passing as kernel
from mamba_ops.ops.dispatch import runs_kernels
from mamba_ops.ops.launch import Launch


@triton_op("mamba_ops::state_passing", mutates_args=())
def state_passing(
    states: Tensor,
    dA_cumsum: Tensor,
    last_chunk_indices: Tensor,
    initial_states: Tensor | None,
    state_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Carry the states from chunk to chunk; nothing is written in place.

    The recurrence is FP32, with one rounding to `state_dtype` at each store.

    Args:
        states: (nchunks, nheads, headdim, dstate) FP32, from `chunk_state`.
        dA_cumsum: (nchunks, nheads, chunk_size) FP32, from `chunk_cumsum`.
        last_chunk_indices: (nseqs,) int32, last chunk of each sequence; that of the one before if it has none.
        initial_states: (nseqs, nheads, headdim, dstate), any float dtype, rows dense; None means zeros.
        state_dtype: FP16, BF16 or FP32.

    Returns:
        (entering, final_states): the state that enters each chunk, (nchunks, nheads, headdim, dstate), and the state
        that each sequence ends with, (nseqs, nheads, headdim, dstate), both `state_dtype`. A sequence without chunks
        ends with its initial state.

    Source: Dao and Gu, "Transformers are SSMs" (2024), section 6, step 3.
    """
    op_checks.state_passing(states, dA_cumsum, last_chunk_indices, initial_states, state_dtype)
    if not runs_kernels(states):
        entering, final_states = _state_passing_cpu(states, dA_cumsum, last_chunk_indices, initial_states, state_dtype)
        return entering, final_states
    entering = torch.empty(states.shape, dtype=state_dtype, device=states.device)
    shape = (last_chunk_indices.shape[0], *states.shape[1:])
    final_states = torch.empty(shape, dtype=state_dtype, device=states.device)
    state_passing_launch(
        states, dA_cumsum, last_chunk_indices, entering, initial_states, None, None, final_states, None, True
    ).run()
    return entering, final_states


@triton_op("mamba_ops::state_passing_update", mutates_args={"state_cache"})
def state_passing_update(
    states: Tensor,
    dA_cumsum: Tensor,
    last_chunk_indices: Tensor,
    initial_states: Tensor | None,
    state_cache: Tensor,
    write_slots: Tensor,
) -> Tensor:
    """Carry the states from chunk to chunk; final states go straight to their cache slots.

    Args:
        states, dA_cumsum, last_chunk_indices, initial_states: as for `state_passing`.
        state_cache: (num_slots, nheads, headdim, dstate) FP16, BF16 or FP32; each slot dense, `stride(0)` arbitrary.
            Slot `write_slots[b]` receives the final state of sequence b, unless b has no chunks. With several sequences
            `initial_states` may not share its memory.
        write_slots: (nseqs,) int32 or int64, any stride, no slot twice; a negative slot counts from the end.

    Returns:
        entering, (nchunks, nheads, headdim, dstate), dtype of the cache.

    Source: Dao and Gu, "Transformers are SSMs" (2024), section 6, step 3.
    """
    op_checks.state_passing_update(states, dA_cumsum, last_chunk_indices, initial_states, state_cache, write_slots)
    if not runs_kernels(states):
        return _state_passing_update_cpu(
            states, dA_cumsum, last_chunk_indices, initial_states, state_cache, write_slots
        )
    entering = torch.empty(states.shape, dtype=state_cache.dtype, device=states.device)
    state_passing_launch(
        states, dA_cumsum, last_chunk_indices, entering, initial_states, None, None, state_cache, write_slots, False
    ).run()
    return entering


@triton_op("mamba_ops::state_passing_indexed", mutates_args={"state_cache"})
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
    """Carry the states from chunk to chunk, from cache slots to cache slots: no copy of the state is made.

    Bitwise the same as `state_passing_update` on `masked_gather(state_cache, read_slots, has_initial_state)`, provided
    that no sequence reads a slot that another one writes.

    Args:
        states, dA_cumsum, last_chunk_indices: as for `state_passing`.
        state_cache: as for `state_passing_update`. Read at `read_slots` and written at `write_slots`.
        read_slots: (nseqs,) int32 or int64, any stride; may equal `write_slots`.
        has_initial_state: (nseqs,) bool, any stride; a sequence without one starts from zeros and its slot is not
            read. None means that all have one.
        write_slots: (nseqs,) int32 or int64, any stride, no slot twice.
        write_empty: whether a sequence without chunks writes its initial state too, as `state_cache[write_slots] =
            final_states` would. Slots may then repeat, as they may there; which writer wins is not defined on a GPU.
        checkpoint_chunks: (nseqs,) int32 or int64 dense. The state behind this chunk of the sequence, which may be its
            last, is kept: rounded to the dtype of the cache, it goes to a slot of its own as well.
        checkpoint_offsets: (nseqs,) int32 dense, tokens of the sequence up to there; zero or less means that the
            sequence keeps nothing, and then the other two are not looked at. No more is made of the number.
        checkpoint_slots: (nseqs,) int32 or int64, any stride, no slot twice, and none that is read or written by a
            sequence. Given together, or none of the three.

    Returns:
        entering, (nchunks, nheads, headdim, dstate), dtype of the cache.

    Source: Dao and Gu, "Transformers are SSMs" (2024), section 6, step 3.
    """
    op_checks.state_passing_indexed(
        states,
        dA_cumsum,
        last_chunk_indices,
        state_cache,
        read_slots,
        has_initial_state,
        write_slots,
        checkpoint_chunks,
        checkpoint_offsets,
        checkpoint_slots,
    )
    if not runs_kernels(states):
        return _state_passing_indexed_cpu(
            states,
            dA_cumsum,
            last_chunk_indices,
            state_cache,
            read_slots,
            has_initial_state,
            write_slots,
            write_empty,
            checkpoint_chunks,
            checkpoint_offsets,
            checkpoint_slots,
        )
    entering = torch.empty(states.shape, dtype=state_cache.dtype, device=states.device)
    state_passing_launch(
        states,
        dA_cumsum,
        last_chunk_indices,
        entering,
        state_cache,
        read_slots,
        has_initial_state,
        state_cache,
        write_slots,
        write_empty,
        checkpoint_chunks,
        checkpoint_offsets,
        checkpoint_slots,
    ).run()
    return entering


def state_passing_launch(
    states: Tensor,
    dA_cumsum: Tensor,
    last_chunk_indices: Tensor,
    entering: Tensor,
    initial: Tensor | None,
    read_slots: Tensor | None,
    has_initial_state: Tensor | None,
    final: Tensor,
    write_slots: Tensor | None,
    write_empty: bool,
    checkpoint_chunks: Tensor | None = None,
    checkpoint_offsets: Tensor | None = None,
    checkpoint_slots: Tensor | None = None,
) -> Launch:
    """The launch behind all three ops; `initial` and `final` are rows, or a cache with the slots to read or write.

    Checkpoints are only for a `final` that is a cache.
    """
    _, nheads, headdim, dstate = states.shape
    dim = headdim * dstate
    arguments = (
        states,
        dA_cumsum,
        last_chunk_indices,
        entering,
        initial,
        read_slots,
        has_initial_state,
        final,
        write_slots,
        checkpoint_chunks,
        checkpoint_offsets,
        checkpoint_slots,
        final.shape[0],
        0 if initial is None else initial.stride(0),
        final.stride(0),
        0 if read_slots is None else read_slots.stride(0),
        0 if has_initial_state is None else has_initial_state.stride(0),
        0 if write_slots is None else write_slots.stride(0),
        0 if checkpoint_slots is None else checkpoint_slots.stride(0),
    )
    constants = {
        "dim": dim,
        "nheads": nheads,
        "chunk_size": dA_cumsum.shape[2],
        "HAS_INITIAL": initial is not None,
        "READ_FROM_SLOTS": read_slots is not None,
        "HAS_MASK": has_initial_state is not None,
        "WRITE_TO_SLOTS": write_slots is not None,
        "WRITE_EMPTY": write_empty,
        "HAS_CHECKPOINTS": checkpoint_slots is not None,
        "BLOCK_SIZE": kernel.BLOCK_SIZE,
        "num_warps": kernel.NUM_WARPS,
    }
    grid = (triton.cdiv(dim, kernel.BLOCK_SIZE), nheads, last_chunk_indices.shape[0])
    return Launch(kernel.state_passing_kernel, grid, arguments, constants)


@custom_op("mamba_ops::state_passing_cpu", mutates_args=(), device_types="cpu")
def _state_passing_cpu(
    states: Tensor,
    dA_cumsum: Tensor,
    last_chunk_indices: Tensor,
    initial_states: Tensor | None,
    state_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    return cpu.state_passing(states, dA_cumsum, last_chunk_indices, initial_states, state_dtype)


@_state_passing_cpu.register_fake
def _(
    states: Tensor,
    dA_cumsum: Tensor,
    last_chunk_indices: Tensor,
    initial_states: Tensor | None,
    state_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    final_shape = (last_chunk_indices.shape[0], *states.shape[1:])
    return states.new_empty(states.shape, dtype=state_dtype), states.new_empty(final_shape, dtype=state_dtype)


@custom_op("mamba_ops::state_passing_update_cpu", mutates_args={"state_cache"}, device_types="cpu")
def _state_passing_update_cpu(
    states: Tensor,
    dA_cumsum: Tensor,
    last_chunk_indices: Tensor,
    initial_states: Tensor | None,
    state_cache: Tensor,
    write_slots: Tensor,
) -> Tensor:
    return cpu.state_passing_update(states, dA_cumsum, last_chunk_indices, initial_states, state_cache, write_slots)


@_state_passing_update_cpu.register_fake
def _(
    states: Tensor,
    dA_cumsum: Tensor,
    last_chunk_indices: Tensor,
    initial_states: Tensor | None,
    state_cache: Tensor,
    write_slots: Tensor,
) -> Tensor:
    return states.new_empty(states.shape, dtype=state_cache.dtype)


@custom_op("mamba_ops::state_passing_indexed_cpu", mutates_args={"state_cache"}, device_types="cpu")
def _state_passing_indexed_cpu(
    states: Tensor,
    dA_cumsum: Tensor,
    last_chunk_indices: Tensor,
    state_cache: Tensor,
    read_slots: Tensor,
    has_initial_state: Tensor | None,
    write_slots: Tensor,
    write_empty: bool,
    checkpoint_chunks: Tensor | None,
    checkpoint_offsets: Tensor | None,
    checkpoint_slots: Tensor | None,
) -> Tensor:
    return cpu.state_passing_indexed(
        states,
        dA_cumsum,
        last_chunk_indices,
        state_cache,
        read_slots,
        has_initial_state,
        write_slots,
        write_empty,
        checkpoint_chunks,
        checkpoint_offsets,
        checkpoint_slots,
    )


@_state_passing_indexed_cpu.register_fake
def _(
    states: Tensor,
    dA_cumsum: Tensor,
    last_chunk_indices: Tensor,
    state_cache: Tensor,
    read_slots: Tensor,
    has_initial_state: Tensor | None,
    write_slots: Tensor,
    write_empty: bool,
    checkpoint_chunks: Tensor | None,
    checkpoint_offsets: Tensor | None,
    checkpoint_slots: Tensor | None,
) -> Tensor:
    return states.new_empty(states.shape, dtype=state_cache.dtype)
