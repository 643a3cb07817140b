"""The last step of the SSD on the CPU: every token's output, from its own chunk and from the state that entered it."""

from torch import Tensor
from torch.nn.functional import silu

from mamba_ops.cpu.padding import chunk_groups, gather_padded, padded_index
from mamba_ops.value_checks import check_chunk_offsets


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
    """The op `mamba_ops::chunk_scan`; shapes are described there.

    Works on a few chunks at a time: the decay matrix of 4,224 tokens, 64 heads and chunks of 256 would take 272 MiB.
    """
    nchunks, nheads, chunk_size = dA_cumsum.shape
    check_chunk_offsets(cu_chunk_seqlens, x.shape[0], chunk_size)
    index, valid = padded_index(cu_chunk_seqlens)
    width = index.shape[1]
    for group in chunk_groups(nchunks, nheads * width * width * 4):
        rows, real = index[group], valid[group]
        x_rows = gather_padded(x, rows, real)
        C_rows = gather_padded(C, rows, real)
        dA = dA_cumsum[group, :, :width]
        y = _inside_chunks(cb[group, :, :width, :width], x_rows, dt_out[group, :, :width], dA)
        y += _from_entering(C_rows, entering[group], dA)
        y = y.transpose(1, 2)
        if D is not None:
            y += x_rows * (D.float() if D.ndim == 2 else D.float()[:, None])
        if z is not None:
            y *= silu(gather_padded(z, rows, real))
        out[rows[real]] = y[real].to(out.dtype)


def _inside_chunks(cb: Tensor, x: Tensor, dt: Tensor, dA: Tensor) -> Tensor:
    """Sum over k <= m of cb[m, k] exp(dA[m] - dA[k]) dt[k] x[k] -> (nchunks, nheads, width, headdim)."""
    nchunks, nheads, width = dA.shape
    ngroups = cb.shape[1]
    scores = (dA[..., :, None] - dA[..., None, :]).exp_()
    scores.view(nchunks, ngroups, nheads // ngroups, width, width).mul_(cb[:, :, None])
    # The other triangle may hold anything: cb is undefined there, and the exponential of a growth may overflow.
    scores.tril_()
    return scores @ (x.transpose(1, 2) * dt[..., None])


def _from_entering(C: Tensor, entering: Tensor, dA: Tensor) -> Tensor:
    """exp(dA[m]) C[m] . entering -> (nchunks, nheads, width, headdim)."""
    nchunks, nheads, headdim, dstate = entering.shape
    ngroups = C.shape[2]
    rows = entering.float().view(nchunks, ngroups, nheads // ngroups * headdim, dstate)
    y = rows @ C.permute(0, 2, 3, 1)
    return y.view(nchunks, nheads, headdim, -1).transpose(2, 3) * dA.exp()[..., None]
