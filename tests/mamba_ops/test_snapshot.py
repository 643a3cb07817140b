"""Reading states in place equals taking a snapshot first, bit for bit, and touches no byte that it does not own."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings

from mamba_ops import SSDOutput
from tests.mamba_ops.batches import (
    DTYPES,
    Shape,
    Slots,
    assert_same,
    make_batch,
    make_cache,
    run_indexed,
    run_with_snapshot,
)
from tests.mamba_ops.prefills import Prefill, prefills


@given(prefills())
@settings(max_examples=150)
def test_in_place_equals_snapshot(prefill: Prefill) -> None:
    # The snapshot of stock code reads the slots of padding as well, so it must be given some that exist.
    empty = torch.tensor(prefill.batch.lengths) == 0
    safe = prefill.slots.read.masked_fill(empty, 0)
    Prefill(
        prefill.batch, prefill.cache, Slots(safe, prefill.slots.write, prefill.slots.has, prefill.slots.written)
    ).check()
    ours, other = prefill.cache.clone(), prefill.cache.clone()
    assert_same(
        run_indexed(prefill.batch, ours.view, prefill.slots),
        run_indexed(prefill.batch, other.view, Slots(safe, prefill.slots.write, prefill.slots.has)),
    )
    assert_same(ours.pages, other.pages)


@pytest.mark.fault(2)
@pytest.mark.parametrize(
    ("lengths", "read", "write"),
    [
        ([100, 300], [3, 1], [3, 1]),
        ([300], [2], [2]),
        ([300], [2], [0]),
        ([100, 300], [2, 2], [3, 1]),
        ([64, 1, 0, 129], [4, 2, 2, 0], [4, 2, 2, 0]),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_output_uses_the_state_from_before_the_call(
    lengths: list[int], read: list[int], write: list[int], dtype: torch.dtype
) -> None:
    batch = make_batch(lengths, Shape(4, 16, 32, 1, 64), dtype)
    written = [slot for slot, length in zip(write, lengths, strict=True) if length]
    Prefill(
        batch, make_cache(5, batch.shape, dtype), Slots(torch.tensor(read), torch.tensor(write), written=written)
    ).check()


@pytest.mark.fault(16)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cache_dtype", DTYPES)
@pytest.mark.parametrize("run", [run_indexed, run_with_snapshot])
def test_a_state_is_rounded_once_when_it_is_stored(
    dtype: torch.dtype, cache_dtype: torch.dtype, run: Callable[..., SSDOutput]
) -> None:
    """Many chunks from one slot: the FP32 cache shows the recurrence itself, any other cache its rounding."""
    batch = make_batch([16 * 20, 5], Shape(2, 8, 16, 1, 16), dtype)
    slots = Slots(torch.tensor([2, 0]), torch.tensor([2, 0]))
    cache = make_cache(3, batch.shape, cache_dtype).view
    exact = cache.to(torch.float32, copy=True)
    result = run(batch, cache, slots)
    expected = run(batch, exact, slots)
    assert_same(result.intermediate_states, expected.intermediate_states.to(cache_dtype))
    assert_same(cache, exact.to(cache_dtype))
    returned = batch.run(state_dtype=cache_dtype, return_intermediate_states=True)
    in_fp32 = batch.run(state_dtype=torch.float32, return_intermediate_states=True)
    assert_same(returned.final_states, in_fp32.final_states.to(cache_dtype))
    assert_same(returned.intermediate_states, in_fp32.intermediate_states.to(cache_dtype))
