"""Stage 1 as an op: step sizes and their running sums, chunk by chunk."""

import torch
import triton
from torch import Tensor
from torch.library import custom_op, triton_op, wrap_triton

from mamba_ops import cpu, op_checks
from mamba_ops.kernels import chunk_cumsum as kernel
from mamba_ops.ops.dispatch import runs_kernels


@triton_op("mamba_ops::chunk_cumsum", mutates_args=())
def chunk_cumsum(
    dt: Tensor,
    A: Tensor,
    cu_chunk_seqlens: Tensor,
    chunk_size: int,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_min: float | None = None,
    dt_max: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Step sizes and the running sum of `A * dt` inside each chunk.

    Args:
        dt: (ntokens, nheads), FP16, BF16 or FP32, any strides.
        A: (nheads,), the negative decay rate of each head.
        cu_chunk_seqlens: (nchunks + 1,) int32, token offsets of the chunks.
        chunk_size: the most tokens a chunk may hold, a power of two.
        dt_bias: (nheads,), added to `dt` first.
        dt_softplus: whether softplus follows.
        dt_min, dt_max: limits that apply last, finite; None means no limit.

    Returns:
        (dA_cumsum, dt_out), both (nchunks, nheads, chunk_size) FP32. Past the end of a chunk `dt_out` is 0 and
        `dA_cumsum` keeps its last value. The rows of a chunk without tokens are not defined.

    Source: Dao and Gu, "Transformers are SSMs" (2024), section 6.
    """
    op_checks.chunk_cumsum(dt, A, cu_chunk_seqlens, chunk_size, dt_bias, dt_min, dt_max)
    if not runs_kernels(dt):
        dA_cumsum, dt_out = _chunk_cumsum_cpu(dt, A, cu_chunk_seqlens, chunk_size, dt_bias, dt_softplus, dt_min, dt_max)
        return dA_cumsum, dt_out
    nheads = dt.shape[1]
    nchunks = cu_chunk_seqlens.shape[0] - 1
    dt_out = torch.empty((nchunks, nheads, chunk_size), dtype=torch.float32, device=dt.device)
    dA_cumsum = torch.empty((nchunks, nheads, chunk_size), dtype=torch.float32, device=dt.device)
    block_heads = kernel.block_heads(chunk_size, kernel.NUM_WARPS)
    wrap_triton(kernel.chunk_cumsum_kernel)[nchunks, triton.cdiv(nheads, block_heads)](
        dt,
        A,
        dt_bias,
        cu_chunk_seqlens,
        dt_out,
        dA_cumsum,
        dt.stride(0),
        dt.stride(1),
        A.stride(0),
        0 if dt_bias is None else dt_bias.stride(0),
        nheads=nheads,
        chunk_size=chunk_size,
        HAS_DT_BIAS=dt_bias is not None,
        DT_SOFTPLUS=dt_softplus,
        HAS_DT_MIN=dt_min is not None,
        DT_MIN=0.0 if dt_min is None else dt_min,
        HAS_DT_MAX=dt_max is not None,
        DT_MAX=0.0 if dt_max is None else dt_max,
        BLOCK_HEADS=block_heads,
        num_warps=kernel.NUM_WARPS,
    )
    return dA_cumsum, dt_out


@custom_op("mamba_ops::chunk_cumsum_cpu", mutates_args=(), device_types="cpu")
def _chunk_cumsum_cpu(
    dt: Tensor,
    A: Tensor,
    cu_chunk_seqlens: Tensor,
    chunk_size: int,
    dt_bias: Tensor | None,
    dt_softplus: bool,
    dt_min: float | None,
    dt_max: float | None,
) -> tuple[Tensor, Tensor]:
    return cpu.chunk_cumsum(dt, A, cu_chunk_seqlens, chunk_size, dt_bias, dt_softplus, dt_min, dt_max)


@_chunk_cumsum_cpu.register_fake
def _(
    dt: Tensor,
    A: Tensor,
    cu_chunk_seqlens: Tensor,
    chunk_size: int,
    dt_bias: Tensor | None,
    dt_softplus: bool,
    dt_min: float | None,
    dt_max: float | None,
) -> tuple[Tensor, Tensor]:
    shape = (cu_chunk_seqlens.shape[0] - 1, dt.shape[1], chunk_size)
    return dt.new_empty(shape, dtype=torch.float32), dt.new_empty(shape, dtype=torch.float32)
