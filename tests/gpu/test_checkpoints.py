"""States kept in the middle of sequences on a GPU: what the same batches show on a CPU, and PyTorch's own checks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.one_pass import WIDTH, make_one_pass
from mamba_ops import ops
from tests.gpu.batches import SMALL
from tests.mamba_ops.batches import SMALL as SMALL_LAYER
from tests.mamba_ops.checkpoints import (
    KeptInputs,
    KeptStates,
    assert_reaches_far_slots,
    kept_inputs,
    kept_scans,
    kept_states,
)

pytestmark = pytest.mark.gpu


# Sizes and dtypes are compiled in: more examples would mostly be more compiles.
@pytest.mark.fault(7)
@pytest.mark.fault(8)
@pytest.mark.fault(9)
@pytest.mark.fault(10)
@pytest.mark.fault(13)
@settings(max_examples=30)
@given(kept_inputs(device="cuda:0"))
def test_keeps_the_last_inputs_before_each_checkpoint(case: KeptInputs) -> None:
    case.check()


@pytest.mark.fault(11)
def test_offsets_of_slots_need_64_bits() -> None:
    assert_reaches_far_slots("cuda:0")


@pytest.mark.fault(7)
@pytest.mark.fault(8)
@pytest.mark.fault(9)
@pytest.mark.fault(10)
@pytest.mark.fault(13)
@settings(max_examples=40)
@given(kept_states(device="cuda:0"))
def test_state_passing_keeps_what_goes_on(case: KeptStates) -> None:
    case.check()


@pytest.mark.fault(7)
@pytest.mark.fault(8)
@pytest.mark.fault(9)
@pytest.mark.fault(10)
@pytest.mark.fault(13)
@pytest.mark.parametrize(
    ("dtype", "state_dtype"),
    [(torch.bfloat16, torch.bfloat16), (torch.float16, torch.float32), (torch.float32, torch.float16)],
    ids=str,
)
@settings(max_examples=20)
@given(data=st.data())
def test_one_pass_keeps_the_state_of_the_recurrence(
    dtype: torch.dtype, state_dtype: torch.dtype, data: st.DataObject
) -> None:
    case = data.draw(kept_scans((SMALL_LAYER,), (dtype,), (state_dtype,), "cuda:0"))
    # FP32 is multiplied as TF32, which cuts both factors: more than a rounding of FP16.
    case.check(torch.bfloat16 if dtype == torch.float32 else torch.float16)


def test_opcheck() -> None:
    """PyTorch's own checks of an op: schema, mutation, fake tensors and compilation."""
    batch = make_one_pass(SMALL, [40, 7], contexts=[100, 0], checkpoints=[20, 2])
    for cache in (batch.conv_state, batch.state_cache):
        cache.nan_to_num_()
    x, B, C = batch.views(batch.conv_in)
    cu, last, has = batch.cu_chunk_seqlens, batch.last_chunk_indices, batch.has_initial_state
    slots, state_cache = batch.slots, batch.state_cache
    dA_cumsum, dt_out = ops.chunk_cumsum(batch.dt, batch.A, cu, SMALL.chunk_size, batch.dt_bias, True)
    states = ops.chunk_state(B, x, dt_out, dA_cumsum, cu)
    sequences = (cu, state_cache, slots, has, torch.zeros_like(batch.poisoned()), 64, batch.D, last)
    inputs = (batch.conv_in, batch.cu_seqlens, batch.conv_state, slots, has, *batch.kept[1:], WIDTH)
    passing = (states, dA_cumsum, last, state_cache, slots, has, slots, False, *batch.kept)
    for op, arguments in (
        (ops.conv_checkpoint, inputs),
        (ops.state_passing_indexed, passing),
        (ops.one_pass_scan, (x, B, C, dt_out, dA_cumsum, *sequences, *batch.kept)),
    ):
        torch.library.opcheck(op, arguments, test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_static"))
