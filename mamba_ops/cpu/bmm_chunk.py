"""The products C_m . B_k inside every chunk on the CPU: the attention-like half of the chunk's own output."""

from torch import Tensor

from mamba_ops.cpu.padding import gather_padded, padded_index
from mamba_ops.value_checks import check_chunk_offsets


def bmm_chunk(C: Tensor, B: Tensor, cu_chunk_seqlens: Tensor, chunk_size: int) -> Tensor:
    """The op `mamba_ops::bmm_chunk`; shapes are described there."""
    check_chunk_offsets(cu_chunk_seqlens, C.shape[0], chunk_size)
    index, valid = padded_index(cu_chunk_seqlens)
    nchunks, width = index.shape
    C_rows = gather_padded(C, index, valid).transpose(1, 2)
    B_rows = gather_padded(B, index, valid).permute(0, 2, 3, 1)
    cb = C_rows.new_zeros((nchunks, C.shape[1], chunk_size, chunk_size))
    cb[:, :, :width, :width] = C_rows @ B_rows
    return cb
