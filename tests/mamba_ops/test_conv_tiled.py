"""The convolution as one op: against `F.conv1d`, its rules about slots, and what it refuses, compiled or not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch.library import opcheck

from mamba_ops.ops.causal_conv_tiled import causal_conv_tiled
from tests.mamba_ops.tiled_convs import DTYPES, assert_equals_conv1d, bits, make_tiled_case, tiled_cases


@settings(max_examples=150, deadline=None)
@given(tiled_cases())
def test_equals_conv1d_of_each_sequence(case: Any) -> None:
    assert_equals_conv1d(case)


@pytest.mark.fault(7)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [2, 4, 9])
def test_stale_slots_do_not_leak_into_fresh_sequences(dtype: torch.dtype, width: int) -> None:
    assert_equals_conv1d(make_tiled_case([1, 2, 8, 9], dtype=dtype, width=width, mask=[False] * 4))


@pytest.mark.fault(8)
@pytest.mark.parametrize("lengths", [[0, 0, 5, 0], [9, 0, 0], [0, 2]])
def test_padding_rows_that_name_a_live_slot_change_nothing(lengths: list[int]) -> None:
    case = make_tiled_case(lengths)
    live = next(b for b, length in enumerate(lengths) if length)
    case.slots.copy_(torch.full_like(case.slots, int(case.slots[live])))
    assert_equals_conv1d(case)


@pytest.mark.fault(14)
@pytest.mark.parametrize("cut", [1, 2, 3, 7, 8, 9, 16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_two_calls_equal_one(cut: int, dtype: torch.dtype) -> None:
    """Bit for bit in the cache, and in the result up to how PyTorch rounds in the tail of a tensor."""
    case = make_tiled_case([17], dtype=dtype, padding_tokens=0)
    before = case.pages.clone()
    whole = causal_conv_tiled(**case.arguments)
    after = case.pages.clone()
    case.pages.copy_(before)
    pieces = []
    for rows in (slice(0, cut), slice(cut, 17)):
        x = case.x[rows]
        offsets = torch.tensor([0, x.shape[0]], dtype=torch.int32)
        pieces.append(causal_conv_tiled(**{**case.arguments, "x": x, "cu_seqlens": offsets}))
    torch.testing.assert_close(torch.cat(pieces), whole, rtol=2 * torch.finfo(dtype).eps, atol=2e-6)
    assert torch.equal(bits(case.pages), bits(after))


def test_the_op_declares_what_it_writes() -> None:
    case = make_tiled_case([5, 9], padding_tokens=0)
    case.conv_state.nan_to_num_(nan=1.0)  # what is compared there is compared with ==
    opcheck(causal_conv_tiled, tuple(case.arguments.values()))


@pytest.mark.parametrize("compiled", [False, True])
def test_compiled_and_eager_refuse_the_same(compiled: bool) -> None:
    """Each argument in turn of another dtype, shape or device; nothing has been written when the error comes."""
    run = torch.compile(causal_conv_tiled, fullgraph=True) if compiled else causal_conv_tiled
    case = make_tiled_case([5, 9])
    before = case.pages.clone()
    for name, tensor in case.arguments.items():
        assert tensor is not None
        bad: list[tuple[type[Exception], Any]] = [(TypeError, tensor.to(torch.complex64)), (ValueError, tensor[None])]
        if name != "x":
            bad.append((ValueError, tensor.to("meta")))
        for error, value in bad if not compiled else bad[:1]:
            # Dynamo wraps what an op raises while it is traced.
            with pytest.raises(Exception if compiled else error, match=f"{name}: "):
                run(**{**case.arguments, name: value})
    assert torch.equal(bits(case.pages), bits(before))


@pytest.mark.fault(20)
def test_a_cache_on_another_device_is_a_clear_error() -> None:
    case = make_tiled_case([5, 9])
    with pytest.raises(ValueError, match="conv_state: on meta; the other tensors are on cpu"):
        causal_conv_tiled(**{**case.arguments, "conv_state": case.conv_state.to("meta")})
