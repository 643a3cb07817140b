"""States kept in the middle of sequences, by state passing and by the scan in one pass, on a CPU."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from benchmarks.inputs import Shape
from benchmarks.one_pass import make_one_pass
from mamba_ops import ops
from tests.mamba_ops.batches import Cache, assert_same
from tests.mamba_ops.checkpoints import KeptScan, KeptStates, kept_scans, kept_states


@pytest.mark.fault(7)
@pytest.mark.fault(8)
@pytest.mark.fault(9)
@pytest.mark.fault(10)
@pytest.mark.fault(13)
@pytest.mark.fault(16)
@settings(max_examples=200)
@given(kept_states())
def test_state_passing_keeps_what_goes_on(case: KeptStates) -> None:
    case.check()


@pytest.mark.fault(7)
@pytest.mark.fault(8)
@pytest.mark.fault(9)
@pytest.mark.fault(10)
@pytest.mark.fault(13)
@settings(max_examples=100)
@given(kept_scans())
def test_one_pass_keeps_the_state_of_the_recurrence(case: KeptScan) -> None:
    case.check()


def keep_in_both_ways(
    tokens: tuple[Tensor, Tensor, Tensor],
    steps: tuple[Tensor, Tensor],
    states: Tensor,
    sequences: tuple[Tensor, Tensor, Tensor, Tensor],
    caches: tuple[Tensor, Tensor],
    out: Tensor,
    kept: tuple[Tensor, ...],
) -> Tensor:
    cu_chunk_seqlens, last, slots, has = sequences
    ops.one_pass_scan(*tokens, *steps, cu_chunk_seqlens, caches[0], slots, has, out, 32, None, last, *kept)
    return ops.state_passing_indexed(states, steps[1], last, caches[1], slots, has, slots, False, *kept)


@pytest.mark.fault(12)
def test_compiled_equals_eager_and_compiles_once() -> None:
    """The caches are arguments, views with padding; new lengths and checkpoints need no new code."""
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(keep_in_both_ways, fullgraph=True, dynamic=True, backend=counter)
    shape = Shape(4, 16, 24, 2, 64)
    for lengths, checkpoints in (
        ([32, 1, 7, 3, 20, 5], [30, 1, 0, 2, 20, 4]),  # as in no other size, at first
        ([5, 6], [0, 6]),
        ([9, 30, 2], [0, 0, 0]),
        ([20] * 8, [1, 20, 0, 7, 0, 9, 19, 3]),
    ):
        contexts = list(range(45, 45 + len(lengths)))
        given = {"contexts": contexts, "checkpoints": checkpoints, "device": "cpu"}
        batch = make_one_pass(shape, lengths, torch.bfloat16, torch.float16, **given)
        cu, last, slots = batch.cu_chunk_seqlens, batch.last_chunk_indices, batch.slots
        steps = ops.chunk_cumsum(batch.dt, batch.A, cu, shape.chunk_size, batch.dt_bias, True)[::-1]
        states = torch.randn(cu.shape[0] - 1, shape.nheads, shape.headdim, shape.dstate)
        num_slots, stride = batch.state_cache.shape[0], batch.state_cache.stride(0)
        before = Cache(batch.state_cache.as_strided((num_slots, stride), (stride, 1)), batch.state_cache)
        results = []
        for function in (keep_in_both_ways, compiled):
            first, second = before.clone(), before.clone()
            sequences, out = (cu, last, slots, batch.has_initial_state), batch.poisoned()
            caches = first.view, second.view
            entering = function(batch.views(batch.conv_in), steps, states, sequences, caches, out, batch.kept)
            results.append((entering, out, first.pages, second.pages))
        assert_same(results[1], results[0])
        _, until, kept_slots = batch.kept
        assert not torch.stack([cache[kept_slots[until > 0].long()] for cache in caches]).isnan().any()
    assert counter.frame_count == 1
