"""Slots as schedulers hand them out: stale, padded, strided, on pages of any size, far apart."""

import pytest
import torch

from mamba_ops import ops
from tests.mamba_ops.batches import (
    DTYPES,
    SMALL,
    Shape,
    Slots,
    assert_same,
    make_batch,
    make_cache,
    run_indexed,
    run_with_snapshot,
)
from tests.mamba_ops.prefills import INDEX_DTYPES, Prefill, column


@pytest.mark.fault(7)
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf"), 1e4])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("read", [[5, 0], [0, 5], [-1, 0]])
def test_stale_states_do_not_reach_a_fresh_request(poison: float, dtype: torch.dtype, read: list[int]) -> None:
    batch = make_batch([100, 30], dtype=dtype)
    cache = make_cache(6, dtype=dtype)
    cache.view[[0, 5]] = poison
    slots = Slots(torch.tensor(read), torch.tensor(read), torch.tensor([False, False]), [0, 5])
    zeros = batch.run(state_dtype=dtype, return_intermediate_states=True)
    for run in (run_indexed, run_with_snapshot):
        after = cache.clone()
        result = run(batch, after.view, slots)
        assert_same(result.out, zeros.out)
        assert_same(result.intermediate_states, zeros.intermediate_states)
        assert_same(after.view[read], zeros.final_states)
        after.check_only_written(cache, [0, 5])


@pytest.mark.fault(7)
def test_a_fresh_request_beside_a_continued_one() -> None:
    batch = make_batch([40, 40, 40])
    cache = make_cache(6, live=[2])
    Prefill(
        batch,
        cache,
        Slots(torch.tensor([5, 2, 0]), torch.tensor([5, 2, 0]), torch.tensor([False, True, False]), [5, 2, 0]),
    ).check()


@pytest.mark.fault(8)
@pytest.mark.parametrize("index", [0, 1, -1, 5, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("lengths", [[0, 0, 70, 33], [70, 33, 0, 0], [70, 0, 33, 0, 0], [0, 0, 0]])
@pytest.mark.parametrize("has", [True, False])
def test_padding_changes_no_byte_whatever_slot_it_names(index: int, lengths: list[int], has: bool) -> None:
    batch = make_batch(lengths)
    real = iter([4, 2])
    slots = torch.tensor([next(real) if length else index for length in lengths], dtype=torch.int32)
    written = [slot for slot, length in zip(slots.tolist(), lengths, strict=True) if length]
    cache = make_cache(6)
    mask = torch.full((len(lengths),), has)
    for states in ({"read_slots": slots, "has_initial_state": mask}, {}):
        after = cache.clone()
        result = batch.run(state_cache=after.view, write_slots=slots, **states)
        after.check_only_written(cache, written)
        assert not result.out.isnan().any()


@pytest.mark.fault(9)
@pytest.mark.parametrize("dtype", INDEX_DTYPES)
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("where", [0, 2])
def test_the_stride_of_the_index_tensors_is_honoured(dtype: torch.dtype, rows: int, where: int) -> None:
    batch = make_batch([40, 70, 3][:rows])
    values = [3, 5, 0][:rows]
    has = [True, False, True][:rows]
    Prefill(
        batch,
        make_cache(6),
        Slots(
            column(values, dtype, 4, where), column(values, dtype, 4, where), column(has, torch.bool, 4, where), values
        ),
    ).check()


@pytest.mark.fault(10)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("padding", "offset"), [(4096, 0), (4096, 17), (0, 5), (1, 1)])
def test_pages_larger_than_a_slot(dtype: torch.dtype, padding: int, offset: int) -> None:
    batch = make_batch([100, 30], dtype=dtype)
    cache = make_cache(5, dtype=dtype, padding=padding, offset=offset, live=[1, 3])
    address = cache.view.data_ptr()
    slots = torch.tensor([3, 1])
    Prefill(batch, cache, Slots(slots, slots, written=[3, 1])).check()
    run_indexed(batch, cache.view, Slots(slots, slots))
    assert cache.view.data_ptr() == address
    assert not cache.pages[offset:].view(5, -1)[3, : SMALL.nheads * SMALL.headdim * SMALL.dstate].isnan().any()


@pytest.mark.fault(11)
@pytest.mark.parametrize("dtype", INDEX_DTYPES)
@pytest.mark.parametrize("slot", [4, -1])
def test_offsets_of_slots_need_64_bits(dtype: torch.dtype, slot: int) -> None:
    """The memory between the slots is never touched, so it is never committed: 4.3 GB of address space only."""
    shape = Shape(2, 8, 16, 1, 64)
    distance = 2**29 + 64
    pages = torch.empty(4 * distance + 256, dtype=torch.bfloat16)
    far = pages.as_strided((5, *shape.row), (distance, 128, 16, 1))
    near = make_cache(5, shape, torch.bfloat16).view
    batch = make_batch([100], shape, torch.bfloat16)
    slots = Slots(torch.tensor([slot], dtype=dtype), torch.tensor([slot], dtype=dtype))
    expected = run_with_snapshot(batch, near, slots)
    for run in (run_indexed, run_with_snapshot):
        fresh = make_cache(5, shape, torch.bfloat16).view
        far[4] = fresh[4]
        start = fresh.clone()
        assert_same(run(batch, far, slots), run(batch, start, slots))
        assert_same(far[4], start[4])
    assert expected.out.isfinite().all()


@pytest.mark.fault(8)
def test_padding_rows_may_share_a_slot_where_the_op_stands_for_index_put() -> None:
    """`cache[slots] = final` takes padded batches whose empty rows all name one slot; so does the op in its place."""
    states, dA_cumsum = torch.randn(3, 2, 16, 16), -torch.rand(3, 2, 16)
    last = torch.tensor([1, 2, 2, 2], dtype=torch.int32)
    slots, has = torch.tensor([3, 1, 0, 0]), torch.tensor([True, False, True, False])
    cache = torch.randn(5, 2, 16, 16)
    expected = cache.clone()
    initial = ops.masked_gather(cache, slots, has)
    entering, expected[slots] = ops.state_passing(states, dA_cumsum, last, initial, cache.dtype)
    actual = ops.state_passing_indexed(states, dA_cumsum, last, cache, slots, has, slots, write_empty=True)
    torch.testing.assert_close(actual, entering, rtol=0, atol=0)
    torch.testing.assert_close(cache, expected, rtol=0, atol=0)
