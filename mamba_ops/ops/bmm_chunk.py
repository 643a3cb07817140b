"""Stage 4 as an op: C . B of the pairs of tokens inside each chunk."""

import torch
import triton
from torch import Tensor
from torch.library import custom_op, triton_op

from mamba_ops import cpu, op_checks
from mamba_ops.kernels import bmm_chunk as kernel
from mamba_ops.ops.dispatch import runs_kernels
from mamba_ops.ops.launch import Launch


@triton_op("mamba_ops::bmm_chunk", mutates_args=())
def bmm_chunk(C: Tensor, B: Tensor, cu_chunk_seqlens: Tensor, chunk_size: int) -> Tensor:
    """Products `C[m] . B[k]` for the tokens m >= k of each chunk.

    Args:
        C, B: (ntokens, ngroups, dstate), last dimension dense, one dtype.
        cu_chunk_seqlens: (nchunks + 1,) int32, token offsets of the chunks.
        chunk_size: the most tokens a chunk may hold, a power of two.

    Returns:
        (nchunks, ngroups, chunk_size, chunk_size) FP32. Entry [c, g, m, k] is defined where k <= m < length of
        chunk c; the others may hold anything, NaN included.

    Source: Dao and Gu, "Transformers are SSMs" (2024), section 6, step 1.
    """
    op_checks.bmm_chunk(C, B, cu_chunk_seqlens, chunk_size)
    if not runs_kernels(C):
        return _bmm_chunk_cpu(C, B, cu_chunk_seqlens, chunk_size)
    shape = (cu_chunk_seqlens.shape[0] - 1, C.shape[1], chunk_size, chunk_size)
    cb = torch.empty(shape, dtype=torch.float32, device=C.device)
    bmm_chunk_launch(C, B, cu_chunk_seqlens, cb).run()
    return cb


def bmm_chunk_launch(C: Tensor, B: Tensor, cu_chunk_seqlens: Tensor, cb: Tensor) -> Launch:
    """The launch behind `bmm_chunk`, with its arguments and its result."""
    _, ngroups, dstate = C.shape
    nchunks, _, chunk_size, _ = cb.shape
    block_m, block_k = min(kernel.BLOCK_M, chunk_size), min(kernel.BLOCK_K, chunk_size)
    tiles = triton.cdiv(chunk_size, block_m) * triton.cdiv(chunk_size, block_k)
    arguments = (C, B, cu_chunk_seqlens, cb, C.stride(0), C.stride(1), B.stride(0), B.stride(1))
    constants = {
        "ngroups": ngroups,
        "dstate": dstate,
        "chunk_size": chunk_size,
        "BLOCK_M": block_m,
        "BLOCK_K": block_k,
        "BLOCK_DSTATE": min(kernel.BLOCK_DSTATE, max(16, triton.next_power_of_2(dstate))),
        "num_warps": kernel.NUM_WARPS,
        "num_stages": kernel.NUM_STAGES,
    }
    return Launch(kernel.bmm_chunk_kernel, (tiles, nchunks, ngroups), arguments, constants)


@custom_op("mamba_ops::bmm_chunk_cpu", mutates_args=(), device_types="cpu")
def _bmm_chunk_cpu(C: Tensor, B: Tensor, cu_chunk_seqlens: Tensor, chunk_size: int) -> Tensor:
    return cpu.bmm_chunk(C, B, cu_chunk_seqlens, chunk_size)


@_bmm_chunk_cpu.register_fake
def _(C: Tensor, B: Tensor, cu_chunk_seqlens: Tensor, chunk_size: int) -> Tensor:
    shape = (cu_chunk_seqlens.shape[0] - 1, C.shape[1], chunk_size, chunk_size)
    return C.new_empty(shape, dtype=torch.float32)
