"""The convolution's states at checkpoints: copies, whose every bit a loop over the sequences knows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from torch._dynamo.testing import CompileCounterWithBackend

from mamba_ops import ops
from mamba_ops.ops.causal_conv_tiled import causal_conv_tiled
from tests.mamba_ops.checkpoints import KeptInputs, assert_reaches_far_slots, keep_inputs, kept_inputs
from tests.mamba_ops.tiled_convs import make_tiled_case


@pytest.mark.fault(7)
@pytest.mark.fault(8)
@pytest.mark.fault(9)
@pytest.mark.fault(10)
@pytest.mark.fault(13)
@settings(max_examples=200)
@given(kept_inputs())
def test_keeps_the_last_inputs_before_each_checkpoint(case: KeptInputs) -> None:
    case.check()


@pytest.mark.fault(13)
@settings(max_examples=50)
@given(kept_inputs())
def test_is_what_the_convolution_leaves_of_a_sequence_that_ends_there(case: KeptInputs) -> None:
    conv, history = case.conv, case.conv.weight.shape[1] - 1
    before = conv.conv_state.clone()
    ops.conv_checkpoint(**case.arguments)
    for b, offset in enumerate(case.checkpoint_offsets.tolist()):
        if offset > 0:
            start, ended = int(conv.cu_seqlens[b]), before.clone()
            shorter = {
                "x": conv.x[start : start + offset],
                "cu_seqlens": torch.tensor([0, offset], dtype=torch.int32),
                "conv_state": ended,
                "slots": conv.slots[b : b + 1],
                "has_initial_state": conv.has[b : b + 1],
            }
            causal_conv_tiled(**{**conv.arguments, **shorter})
            kept = conv.conv_state[int(case.checkpoint_slots[b]), :, :history]
            assert torch.equal(kept, ended[int(conv.slots[b]), :, :history])


@pytest.mark.parametrize("width", [2, 4, 9])
def test_no_sequences_and_no_checkpoints_write_nothing(width: int) -> None:
    for lengths, offsets in (([], []), ([0, 0], [0, 0]), ([3, 0, 9], [0, 0, -7])):
        keep_inputs(make_tiled_case(lengths, width=width), offsets).check()


@pytest.mark.fault(11)
def test_offsets_of_slots_need_64_bits() -> None:
    """4.3 GB of address space only: what is never touched is never committed."""
    assert_reaches_far_slots("cpu")


@pytest.mark.fault(12)
def test_compiled_equals_eager_and_compiles_once() -> None:
    """New lengths, slots and checkpoints need no new code, and the cache is written in place, padding untouched."""
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(ops.conv_checkpoint, fullgraph=True, dynamic=True, backend=counter)
    for lengths, offsets in (
        ([5, 1, 9, 17], [2, 0, 9, 3]),
        ([4, 6], [4, 1]),
        ([1, 0, 8], [1, 0, 8]),
        ([7] * 9, [1, 2, 3, 4, 5, 6, 7, 0, 0]),
    ):
        case = keep_inputs(make_tiled_case(lengths, spare_slots=10, slot_padding=64), offsets)
        expected = case.expected_pages()
        compiled(**case.arguments)
        assert torch.equal(case.conv.pages.view(torch.uint8), expected.view(torch.uint8))
    assert counter.frame_count == 1
