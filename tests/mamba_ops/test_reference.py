"""The reference itself, against the paper's other form of the same map: a causal matrix with decaying entries."""

import torch

from mamba_ops.reference import ssd_reference
from tests.mamba_ops.batches import Shape, make_batch


def test_recurrence_equals_the_dual_form() -> None:
    """Dao and Gu (2024), section 3: y = (L o C B^T) (dt x), with L[i, j] = exp(A (dt_{j+1} + ... + dt_i))."""
    batch = make_batch([37], Shape(nheads=6, headdim=8, dstate=5, ngroups=3), gate=False, skip=None)
    x, dt, A, B, C = (batch.inputs[name].double() for name in ("x", "dt", "A", "B", "C"))
    dt = torch.nn.functional.softplus(dt + batch.options["dt_bias"])
    y, final_states = batch.reference()
    for h in range(6):
        total = (A[h] * dt[:, h]).cumsum(0)
        L = (total[:, None] - total).exp().tril()
        scores = L * (C[:, h // 2] @ B[:, h // 2].T)
        weighted = dt[:, h, None] * x[:, h]
        torch.testing.assert_close(y[:, h], scores @ weighted)
        torch.testing.assert_close(final_states[0, h], (L[-1, :, None] * weighted).T @ B[:, h // 2])


def test_a_sequence_continues_from_its_state_and_an_empty_one_keeps_it() -> None:
    batch = make_batch([50])
    whole, final = batch.reference()
    first, middle = batch.tokens(0, 20).reference()
    kept = ssd_reference(
        **batch.tokens(20, 50).inputs,
        **batch.tokens(20, 50).options,
        cu_seqlens=[0, 0, 30],
        initial_states=torch.cat([middle + 1, middle]),
    )
    torch.testing.assert_close(torch.cat([first, kept[0]]), whole)
    torch.testing.assert_close(kept[1], torch.cat([middle + 1, final]))


def test_limits_apply_after_softplus_and_gate_after_the_skip_connection() -> None:
    x, one = torch.full((1, 1, 1), 3.0), torch.ones(1, 1, 1)
    y, state = ssd_reference(
        x, torch.full((1, 1), 50.0), torch.tensor([-1.0]), one, 2 * one, [0, 1],
        D=torch.tensor([5.0]), z=one, dt_softplus=True, dt_limit=(0.0, 0.25),
    )  # fmt: skip
    torch.testing.assert_close(state.item(), 0.25 * 3.0)
    torch.testing.assert_close(y.item(), (2 * 0.75 + 5 * 3) * torch.sigmoid(torch.ones((), dtype=torch.double)).item())
