"""The tiled convolution on a GPU, against `F.conv1d` in FP64."""

from __future__ import annotations

import pytest
import torch

from tests.mamba_ops.tiled_convs import DTYPES, assert_equals_conv1d, make_tiled_case

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize("width", [2, 4, 9])
def test_equals_conv1d_of_each_sequence(dtype: torch.dtype, channels_last: bool, width: int) -> None:
    for lengths in ([1], [8], [9, 1, 300, 0, 17], [2] * 33):
        mask = [bool(b % 3) for b in range(len(lengths))]
        assert_equals_conv1d(
            make_tiled_case(
                lengths,
                conv_dim=300,
                width=width,
                dtype=dtype,
                channels_last=channels_last,
                mask=mask,
                spare_entries=2,
                device="cuda:0",
            )
        )
