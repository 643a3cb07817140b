"""The static checks of the causal convolution; see `mamba_ops.checks` for what a static check is."""

import torch
from torch import Tensor

from mamba_ops.checks import FLOATS, SLOT_DTYPES, check_tensor, check_written_once
from mamba_ops.op_checks import check_reads


def check_weights(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Check what is convolved, and with what."""
    check_tensor("x", x, {"ntokens": None, "conv_dim": None}, FLOATS, x.device)
    conv_dim = x.shape[1]
    check_tensor("weight", weight, {"conv_dim": conv_dim, "width": None}, FLOATS, x.device)
    if weight.shape[1] < 2:
        raise ValueError(f"weight: shape {tuple(weight.shape)}; a convolution has a width of at least 2")
    if bias is not None:
        check_tensor("bias", bias, {"conv_dim": conv_dim}, FLOATS, x.device)


def check_sequences(
    cu_seqlens: Tensor,
    conv_state: Tensor,
    read_slots: Tensor,
    has_initial_state: Tensor | None,
    write_slots: Tensor,
    conv_dim: int,
    width: int,
    device: torch.device,
) -> None:
    """Check the sequences, and the cache from which they are continued."""
    check_tensor("cu_seqlens", cu_seqlens, {"nseqs + 1": None}, SLOT_DTYPES, device)
    nseqs = cu_seqlens.shape[0] - 1
    if nseqs < 1:
        raise ValueError(f"cu_seqlens: shape {tuple(cu_seqlens.shape)}; expected at least two offsets")
    dims = {"num_slots": None, "conv_dim": conv_dim, "width - 1": width - 1}
    check_tensor("conv_state", conv_state, dims, FLOATS, device)
    check_written_once("conv_state", conv_state)
    check_reads(read_slots, has_initial_state, nseqs, device)
    check_tensor("write_slots", write_slots, {"nseqs": nseqs}, SLOT_DTYPES, device)
