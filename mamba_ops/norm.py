"""The gated RMS norm that follows the SSD, in plain PyTorch that Inductor fuses into one reduction kernel."""

import torch
import torch.nn.functional as F
from torch import Tensor


def gated_rms_norm(
    y: Tensor, z: Tensor, weight: Tensor, ngroups: int, eps: float, norm_before_gate: bool = False
) -> Tensor:
    """RMS norm of each group of channels, gated by SiLU(z), which comes before the norm unless `norm_before_gate`.

    Args:
        y: (ntokens, d_inner), what the SSD returned.
        z: (ntokens, d_inner), the gate, any strides.
        weight: (d_inner,).
        ngroups: number of groups, which divides d_inner; each is normalised by its own root mean square.
        eps: added to the mean square.
        norm_before_gate: normalise first and gate afterwards, as some Falcon-H1 models do.

    Returns:
        (ntokens, d_inner), dtype of y. The arithmetic is FP32, with one rounding at the end.
    """
    gate = F.silu(z.float())
    value = y.float() if norm_before_gate else y.float() * gate
    groups = value.unflatten(-1, (ngroups, -1))
    groups = groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + eps)
    normed: Tensor = groups.flatten(-2) * weight.float()
    return (normed * gate if norm_before_gate else normed).to(y.dtype)
