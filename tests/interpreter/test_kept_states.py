"""Kernels that keep states in the middle of sequences, statement by statement on the CPU."""

from __future__ import annotations

import pytest
import torch

from tests.mamba_ops.kept_states import assert_inputs_are_kept, assert_one_pass_keeps_the_same, assert_states_are_kept


# The interpreter multiplies BF16 numbers as if they were integers.
@pytest.mark.fault(13)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_states_are_kept(dtype: torch.dtype) -> None:
    for seed in range(12):
        assert_inputs_are_kept(seed, dtype=dtype)
        assert_states_are_kept(seed, dtype=dtype)


@pytest.mark.fault(13)
def test_one_pass_keeps_the_same_states() -> None:
    for seed in range(12):
        assert_one_pass_keeps_the_same(seed, tolerance=1e-5)
