"""The kernels of the tiled convolution and of its checkpoints, statement by statement on the CPU."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from mamba_ops.kernels import conv_checkpoint as checkpoint_kernel
from tests.mamba_ops.checkpoints import KeptInputs, kept_inputs
from tests.mamba_ops.tiled_convs import assert_equals_conv1d, make_tiled_case, tiled_cases


# The interpreter multiplies BF16 numbers as if they were integers.
@settings(max_examples=25, deadline=None)
@given(tiled_cases((torch.float32, torch.float16)))
def test_equals_conv1d_of_each_sequence(case: Any) -> None:
    assert_equals_conv1d(case)


@pytest.mark.fault(7)
@pytest.mark.parametrize("width", [2, 4, 9])
def test_stale_slots_do_not_leak_into_fresh_sequences(width: int) -> None:
    assert_equals_conv1d(make_tiled_case([1, 2, 8, 9], width=width, mask=[False] * 4))


def test_more_channels_than_one_program_takes() -> None:
    assert_equals_conv1d(make_tiled_case([3, 11], conv_dim=300, dtype=torch.float16))


@pytest.mark.fault(7)
@pytest.mark.fault(8)
@pytest.mark.fault(9)
@pytest.mark.fault(10)
@pytest.mark.fault(13)
@settings(max_examples=50)
@given(kept_inputs(), st.sampled_from([16, 256]))
def test_checkpoints_keep_the_last_inputs(case: KeptInputs, channels: int) -> None:
    """With one block of channels and with several, the last of them not full."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint_kernel, "BLOCK_CHANNELS", channels)
        case.check()
