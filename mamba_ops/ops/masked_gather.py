"""The snapshot as one op, for the places that must keep it."""

import torch
import triton
from torch import Tensor
from torch.library import custom_op, triton_op, wrap_triton

from mamba_ops import cpu, op_checks
from mamba_ops.kernels import masked_gather as kernel
from mamba_ops.ops.dispatch import runs_kernels


@triton_op("mamba_ops::masked_gather", mutates_args=())
def masked_gather(state_cache: Tensor, slots: Tensor, has_initial_state: Tensor | None) -> Tensor:
    """`where(has_initial_state, state_cache[slots], 0)` in one launch.

    Args:
        state_cache: (num_slots, ...), any dtype; each slot dense, `stride(0)` arbitrary.
        slots: (nseqs,) int32 or int64, any stride; a negative slot counts from the end.
        has_initial_state: (nseqs,) bool, any stride; None means all of them. A slot that is masked out is not read.

    Returns:
        (nseqs, ...) dense, dtype of the cache.
    """
    op_checks.masked_gather(state_cache, slots, has_initial_state)
    if not runs_kernels(state_cache):
        return _masked_gather_cpu(state_cache, slots, has_initial_state)
    nseqs = slots.shape[0]
    row_size = state_cache.shape[1:].numel()
    rows = torch.empty((nseqs, *state_cache.shape[1:]), dtype=state_cache.dtype, device=state_cache.device)
    wrap_triton(kernel.masked_gather_kernel)[triton.cdiv(row_size, kernel.BLOCK_SIZE), nseqs](
        state_cache,
        slots,
        has_initial_state,
        rows,
        state_cache.shape[0],
        state_cache.stride(0),
        slots.stride(0),
        0 if has_initial_state is None else has_initial_state.stride(0),
        row_size=row_size,
        HAS_MASK=has_initial_state is not None,
        BLOCK_SIZE=kernel.BLOCK_SIZE,
        num_warps=kernel.NUM_WARPS,
    )
    return rows


@custom_op("mamba_ops::masked_gather_cpu", mutates_args=(), device_types="cpu")
def _masked_gather_cpu(state_cache: Tensor, slots: Tensor, has_initial_state: Tensor | None) -> Tensor:
    return cpu.masked_gather(state_cache, slots, has_initial_state)


@_masked_gather_cpu.register_fake
def _(state_cache: Tensor, slots: Tensor, has_initial_state: Tensor | None) -> Tensor:
    return state_cache.new_empty((slots.shape[0], *state_cache.shape[1:]))
