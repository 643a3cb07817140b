"""Step 0 of the SSD on the CPU: the step sizes of every token and the log decay summed inside each chunk."""

import torch
from torch import Tensor
from torch.nn.functional import softplus

from mamba_ops.cpu.padding import gather_padded, padded_index
from mamba_ops.value_checks import check_chunk_offsets


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
    """The op `mamba_ops::chunk_cumsum`; shapes are described there."""
    check_chunk_offsets(cu_chunk_seqlens, dt.shape[0], chunk_size)
    index, valid = padded_index(cu_chunk_seqlens)
    step = gather_padded(dt, index, valid)
    if dt_bias is not None:
        step += dt_bias.float()
    if dt_softplus:
        step = softplus(step)
    if dt_min is not None or dt_max is not None:
        step = step.clamp(dt_min, dt_max)
    step.masked_fill_(~valid[..., None], 0.0)

    nchunks, width, nheads = step.shape
    dt_out = dt.new_zeros((nchunks, nheads, chunk_size), dtype=torch.float32)
    dt_out[:, :, :width] = step.transpose(1, 2)
    return (dt_out * A.float()[:, None]).cumsum(-1), dt_out
