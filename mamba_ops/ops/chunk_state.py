"""Stage 2 as an op: what each chunk adds to the state."""

import torch
import triton
from torch import Tensor
from torch.library import custom_op, triton_op

from mamba_ops import cpu, op_checks
from mamba_ops.kernels import chunk_state as kernel
from mamba_ops.ops.dispatch import runs_kernels
from mamba_ops.ops.launch import Launch


@triton_op("mamba_ops::chunk_state", mutates_args=())
def chunk_state(B: Tensor, x: Tensor, dt_out: Tensor, dA_cumsum: Tensor, cu_chunk_seqlens: Tensor) -> Tensor:
    """State that each chunk, taken alone from a zero state, leaves at its end.

    Args:
        B: (ntokens, ngroups, dstate), last dimension dense.
        x: (ntokens, nheads, headdim), last dimension dense, dtype of B.
        dt_out, dA_cumsum: (nchunks, nheads, chunk_size) FP32, from `chunk_cumsum`.
        cu_chunk_seqlens: (nchunks + 1,) int32, token offsets of the chunks.

    Returns:
        (nchunks, nheads, headdim, dstate) FP32. The rows of a chunk without tokens are not defined.

    Source: Dao and Gu, "Transformers are SSMs" (2024), section 6, step 2.
    """
    op_checks.chunk_state(B, x, dt_out, dA_cumsum, cu_chunk_seqlens)
    if not runs_kernels(x):
        return _chunk_state_cpu(B, x, dt_out, dA_cumsum, cu_chunk_seqlens)
    shape = (dt_out.shape[0], *x.shape[1:], B.shape[2])
    states = torch.empty(shape, dtype=torch.float32, device=x.device)
    chunk_state_launch(B, x, dt_out, dA_cumsum, cu_chunk_seqlens, states).run()
    return states


def chunk_state_launch(
    B: Tensor, x: Tensor, dt_out: Tensor, dA_cumsum: Tensor, cu_chunk_seqlens: Tensor, states: Tensor
) -> Launch:
    """The launch behind `chunk_state`, with its arguments and its result."""
    nchunks, nheads, headdim, dstate = states.shape
    ngroups, chunk_size = B.shape[1], dt_out.shape[2]
    block_headdim = min(kernel.BLOCK_HEADDIM, max(16, triton.next_power_of_2(headdim)))
    block_dstate = min(kernel.BLOCK_DSTATE, max(16, triton.next_power_of_2(dstate)))
    tiles = triton.cdiv(headdim, block_headdim) * triton.cdiv(dstate, block_dstate)
    arguments = (
        x,
        B,
        dt_out,
        dA_cumsum,
        cu_chunk_seqlens,
        states,
        x.stride(0),
        x.stride(1),
        B.stride(0),
        B.stride(1),
    )
    constants = {
        "nheads": nheads,
        "heads_per_group": nheads // ngroups,
        "headdim": headdim,
        "dstate": dstate,
        "chunk_size": chunk_size,
        "BLOCK_HEADDIM": block_headdim,
        "BLOCK_DSTATE": block_dstate,
        "BLOCK_TOKENS": min(kernel.BLOCK_TOKENS, chunk_size),
        "num_warps": kernel.NUM_WARPS,
        "num_stages": kernel.NUM_STAGES,
    }
    return Launch(kernel.chunk_state_kernel, (tiles, nchunks, nheads), arguments, constants)


@custom_op("mamba_ops::chunk_state_cpu", mutates_args=(), device_types="cpu")
def _chunk_state_cpu(B: Tensor, x: Tensor, dt_out: Tensor, dA_cumsum: Tensor, cu_chunk_seqlens: Tensor) -> Tensor:
    return cpu.chunk_state(B, x, dt_out, dA_cumsum, cu_chunk_seqlens)


@_chunk_state_cpu.register_fake
def _(B: Tensor, x: Tensor, dt_out: Tensor, dA_cumsum: Tensor, cu_chunk_seqlens: Tensor) -> Tensor:
    shape = (dt_out.shape[0], x.shape[1], x.shape[2], B.shape[2])
    return x.new_empty(shape, dtype=torch.float32)
