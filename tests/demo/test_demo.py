"""The demo must be able to fail: it sees a copy that is left, a bit that differs, and a slot that was touched."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from demo.continuation import STATE_SHAPE, Result
from demo.graphs import changed_lines, first_run
from demo.measure import Comparison, CopyCounter, Run, largest_difference
from inductor_passes.inspection.granite_layer import NUM_SLOTS, SLOT


def make_run(copies: tuple[str, ...] = ()) -> Run:
    generator = torch.Generator().manual_seed(0)
    caches = [torch.full((NUM_SLOTS, 3), torch.nan) for _ in range(2)]
    for cache in caches:
        cache[SLOT] = torch.randn(3, generator=generator)
    return Run("run", copies, 8 * len(copies), Result(torch.randn(4, generator=generator), *caches), torch.neg)


def compare(change: Callable[[Result], object], copies: tuple[str, ...] = ()) -> Comparison:
    run = make_run(copies)
    change(run.result)
    return Comparison("FP32", make_run(("index", "where")), run)


def test_equal_results_without_a_copy_hold() -> None:
    comparison = compare(lambda result: None)
    assert comparison.holds
    assert (comparison.output_difference, comparison.cache_difference) == (0, 0)


@pytest.mark.parametrize(
    "change",
    [
        lambda result: result.output[0].add_(1),
        lambda result: result.output[0].fill_(torch.nan),
        lambda result: result.conv_state[SLOT].neg_(),
        lambda result: result.state_cache[SLOT].add_(1),
        lambda result: result.state_cache[SLOT - 1].fill_(0),
    ],
    ids=["output", "NaN", "conv state", "state", "another slot"],
)
def test_anything_that_differs_does_not_hold(change: Callable[[Result], object]) -> None:
    assert not compare(change).holds


def test_a_copy_that_is_left_does_not_hold() -> None:
    assert not compare(lambda result: None, copies=("where",)).holds


def test_nothing_to_compare_with_does_not_hold() -> None:
    assert not Comparison("FP32", make_run(), make_run()).holds


def test_difference_ignores_only_nan_in_both() -> None:
    a, b = torch.tensor([1.0, torch.nan]), torch.tensor([1.5, torch.nan])
    assert largest_difference(a, b) == 0.5
    assert largest_difference(a, b.nan_to_num()) != largest_difference(a, b.nan_to_num())  # NaN


def snapshot(cache: Tensor, slots: Tensor, has: Tensor) -> Tensor:
    return torch.where(has[:, None, None, None], cache[slots], 0)


def test_a_snapshot_is_counted_in_eager_and_compiled_code() -> None:
    inputs = torch.randn(3, *STATE_SHAPE), torch.tensor([2]), torch.tensor([True])
    size = 4 * torch.Size(STATE_SHAPE).numel()
    with CopyCounter() as counter:
        snapshot(*inputs)
    assert (len(counter.names), counter.copied_bytes) == (2, 2 * size)
    graph = first_run(torch.compile(snapshot, fullgraph=True), inputs, STATE_SHAPE)
    assert (len(graph.snapshot_nodes), graph.copied_bytes) == (2, size)  # Inductor fuses both into one


def test_changed_lines_leave_out_what_only_has_another_name() -> None:
    before = 'a: "f32[2]" = torch.ops.aten.neg.default(x);  x = None\ns = torch.ops.mamba_ops.state_passing_update(a)'
    after = "# a comment\na = torch.ops.aten.neg.default(x)\ns = torch.ops.mamba_ops.state_passing_indexed(a)"
    assert changed_lines(before, after) == [
        "-s = mamba_ops.state_passing_update(a)",
        "+s = mamba_ops.state_passing_indexed(a)",
    ]
