"""Stage 5 as an op: the outputs."""

import triton
from torch import Tensor
from torch.library import custom_op, triton_op

from mamba_ops import cpu, op_checks
from mamba_ops.kernels import chunk_scan as kernel
from mamba_ops.ops.dispatch import runs_kernels
from mamba_ops.ops.launch import Launch


@triton_op("mamba_ops::chunk_scan", mutates_args={"out"})
def chunk_scan(
    cb: Tensor,
    x: Tensor,
    dt_out: Tensor,
    dA_cumsum: Tensor,
    C: Tensor,
    entering: Tensor,
    cu_chunk_seqlens: Tensor,
    out: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
) -> None:
    """Write the output of every token into `out`.

    Args:
        cb: (nchunks, ngroups, chunk_size, chunk_size) FP32, from `bmm_chunk`.
        x: (ntokens, nheads, headdim), last dimension dense.
        dt_out, dA_cumsum: (nchunks, nheads, chunk_size) FP32, from `chunk_cumsum`.
        C: (ntokens, ngroups, dstate), last dimension dense, dtype of x.
        entering: (nchunks, nheads, headdim, dstate), the state that enters each chunk, any float dtype, dense.
        cu_chunk_seqlens: (nchunks + 1,) int32, token offsets of the chunks. Tokens beyond its last are not written.
        out: (ntokens, nheads, headdim), last dimension dense. Written.
        D: (nheads,) or (nheads, headdim), the skip connection.
        z: (ntokens, nheads, headdim), last dimension dense; the output is multiplied by `z * sigmoid(z)`.

    Source: Dao and Gu, "Transformers are SSMs" (2024), section 6, steps 1 and 4.
    """
    op_checks.chunk_scan(cb, x, dt_out, dA_cumsum, C, entering, cu_chunk_seqlens, out, D, z)
    if not runs_kernels(x):
        _chunk_scan_cpu(cb, x, dt_out, dA_cumsum, C, entering, cu_chunk_seqlens, out, D, z)
        return
    chunk_scan_launch(cb, x, dt_out, dA_cumsum, C, entering, cu_chunk_seqlens, out, D, z).run()


def chunk_scan_launch(
    cb: Tensor,
    x: Tensor,
    dt_out: Tensor,
    dA_cumsum: Tensor,
    C: Tensor,
    entering: Tensor,
    cu_chunk_seqlens: Tensor,
    out: Tensor,
    D: Tensor | None,
    z: Tensor | None,
) -> Launch:
    """The launch behind `chunk_scan`, with the same arguments."""
    _, nheads, headdim = x.shape
    _, ngroups, dstate = C.shape
    nchunks, _, chunk_size = dt_out.shape
    block_m = min(kernel.BLOCK_M, chunk_size)
    block_headdim = min(kernel.BLOCK_HEADDIM, max(16, triton.next_power_of_2(headdim)))
    tiles = triton.cdiv(chunk_size, block_m) * triton.cdiv(headdim, block_headdim)
    arguments = (
        cb,
        x,
        dt_out,
        dA_cumsum,
        C,
        entering,
        cu_chunk_seqlens,
        D,
        z,
        out,
        x.stride(0),
        x.stride(1),
        C.stride(0),
        C.stride(1),
        0 if D is None else D.stride(0),
        0 if z is None else z.stride(0),
        0 if z is None else z.stride(1),
        out.stride(0),
        out.stride(1),
    )
    constants = {
        "nheads": nheads,
        "heads_per_group": nheads // ngroups,
        "headdim": headdim,
        "dstate": dstate,
        "chunk_size": chunk_size,
        "HAS_D": D is not None,
        "D_HAS_HEADDIM": D is not None and D.dim() == 2,
        "HAS_Z": z is not None,
        "BLOCK_M": block_m,
        "BLOCK_HEADDIM": block_headdim,
        "BLOCK_K": min(kernel.BLOCK_K, chunk_size),
        "BLOCK_DSTATE": min(kernel.MAX_BLOCK_DSTATE, max(16, triton.next_power_of_2(dstate))),
        "num_warps": kernel.NUM_WARPS,
        "num_stages": kernel.NUM_STAGES,
    }
    return Launch(kernel.chunk_scan_kernel, (tiles, nchunks, nheads), arguments, constants)


@custom_op("mamba_ops::chunk_scan_cpu", mutates_args={"out"}, device_types="cpu")
def _chunk_scan_cpu(
    cb: Tensor,
    x: Tensor,
    dt_out: Tensor,
    dA_cumsum: Tensor,
    C: Tensor,
    entering: Tensor,
    cu_chunk_seqlens: Tensor,
    out: Tensor,
    D: Tensor | None,
    z: Tensor | None,
) -> None:
    cpu.chunk_scan(cb, x, dt_out, dA_cumsum, C, entering, cu_chunk_seqlens, out, D, z)


@_chunk_scan_cpu.register_fake
def _(
    cb: Tensor,
    x: Tensor,
    dt_out: Tensor,
    dA_cumsum: Tensor,
    C: Tensor,
    entering: Tensor,
    cu_chunk_seqlens: Tensor,
    out: Tensor,
    D: Tensor | None,
    z: Tensor | None,
) -> None:
    return
