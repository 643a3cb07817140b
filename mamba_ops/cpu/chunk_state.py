"""Step 1 of the SSD on the CPU: the state that each chunk would leave behind if it started from zero."""

from torch import Tensor

from mamba_ops.cpu.padding import chunk_groups, gather_padded, padded_index
from mamba_ops.value_checks import check_chunk_offsets


def chunk_state(B: Tensor, x: Tensor, dt_out: Tensor, dA_cumsum: Tensor, cu_chunk_seqlens: Tensor) -> Tensor:
    """The op `mamba_ops::chunk_state`; shapes are described there."""
    nchunks, nheads, chunk_size = dA_cumsum.shape
    headdim = x.shape[2]
    ngroups, dstate = B.shape[1:]
    check_chunk_offsets(cu_chunk_seqlens, x.shape[0], chunk_size)
    index, valid = padded_index(cu_chunk_seqlens)
    width = index.shape[1]
    # What is left at the chunk's end of each token's contribution.
    weight = (dA_cumsum[:, :, -1:] - dA_cumsum[:, :, :width]).exp() * dt_out[:, :, :width]

    states = dA_cumsum.new_empty((nchunks, nheads, headdim, dstate))
    for group in chunk_groups(nchunks, width * nheads * headdim * 4):
        x_group = gather_padded(x, index[group], valid[group])
        x_group *= weight[group].transpose(1, 2)[..., None]
        x_rows = x_group.view(-1, width, ngroups, nheads // ngroups * headdim).permute(0, 2, 3, 1)
        B_rows = gather_padded(B, index[group], valid[group]).transpose(1, 2)
        states[group] = (x_rows @ B_rows).view(-1, nheads, headdim, dstate)
    return states
