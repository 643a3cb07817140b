"""The Mamba2 recurrence, one token after the other, in FP64: what every op of this project is held to.

It is slow and short on purpose. Compare it with Dao and Gu, "Transformers are SSMs: Generalized Models and Efficient
Algorithms Through Structured State Space Duality" (2024): the recurrence is equation (2), with the A of section 5.1, a
scalar times the identity. As in Mamba (Gu and Dao, 2023) a token's step size dt makes A_t = exp(dt A) and B_t = dt B.
The skip connection D and the gate z belong to the block around it (section 7).
"""

import math
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus


def ssd_reference(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    cu_seqlens: Tensor | list[int],
    *,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    initial_states: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Run every sequence of a ragged batch from its initial state.

    Args:
        x: (ntokens, nheads, headdim). dt: (ntokens, nheads). A: (nheads,), negative.
        B, C: (ntokens, ngroups, dstate); head h uses group h // (nheads // ngroups).
        cu_seqlens: nseqs + 1 token offsets.
        D: (nheads,) or (nheads, headdim). z: like x. dt_bias: (nheads,).
        initial_states: (nseqs, nheads, headdim, dstate), or None for zeros.

    Returns:
        (y, final_states), FP64: (ntokens, nheads, headdim), and (nseqs, nheads, headdim, dstate), the state after the
        last token of each sequence, which is its initial state if it is empty.
    """
    heads_per_group = x.shape[1] // B.shape[1]
    x, dt, A = x.double(), dt.double(), A.double()
    B = B.double().repeat_interleave(heads_per_group, dim=1)  # (ntokens, nheads, dstate)
    C = C.double().repeat_interleave(heads_per_group, dim=1)
    if dt_bias is not None:
        dt = dt + dt_bias.double()
    if dt_softplus:
        dt = softplus(dt)
    dt = dt.clamp(*dt_limit)

    offsets = [int(offset) for offset in cu_seqlens]
    final_states = x.new_zeros(len(offsets) - 1, x.shape[1], x.shape[2], B.shape[2])
    if initial_states is not None:
        final_states.copy_(initial_states)
    y = torch.zeros_like(x)
    for h, (start, end) in zip(final_states, pairwise(offsets), strict=True):
        for t in range(start, end):
            # h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t^T,  y_t = h_t C_t
            h.mul_(torch.exp(dt[t] * A)[:, None, None])
            h.add_((dt[t, :, None] * x[t])[:, :, None] * B[t, :, None, :])
            y[t] = torch.einsum("hpn,hn->hp", h, C[t])

    if D is not None:
        y = y + x * (D if D.dim() == 2 else D[:, None]).double()
    if z is not None:
        y = y * silu(z.double())
    return y, final_states
