"""The pass on compiled graphs for a GPU: no snapshot, no clone of the cache, the same bits, and CUDA graphs stay."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code
from torch.testing import assert_close

from benchmarks.inputs import Inputs
from inductor_passes import SnapshotElimination, inductor_options
from mamba_ops import ssd_chunk_scan
from tests.gpu.batches import SMALL, copy_of, random_inputs

pytestmark = pytest.mark.gpu


def continue_sequences(inputs: dict[str, Any], slots: Tensor, has: Tensor, cache: Tensor) -> Tensor:
    """As stock code spells it."""
    snapshot = torch.where(has[:, None, None, None], cache[slots], 0)
    return ssd_chunk_scan(**inputs, dt_softplus=True, initial_states=snapshot, state_cache=cache, write_slots=slots).out


class Layer(nn.Module):
    """The cache as a buffer."""

    def __init__(self, cache: Tensor) -> None:
        super().__init__()
        self.register_buffer("cache", cache)

    def forward(self, inputs: dict[str, Any], slots: Tensor, has: Tensor) -> Tensor:
        return continue_sequences(inputs, slots, has, self.cache)


def from_pool(inputs: dict[str, Any], slots: Tensor, has: Tensor, pool: Tensor) -> Tensor:
    """The cache is made in the graph: a view of a pool with padding behind every slot."""
    row = SMALL.nheads * SMALL.headdim * SMALL.dstate
    cache = pool[:, :row].unflatten(1, (SMALL.nheads, SMALL.headdim, SMALL.dstate))
    return continue_sequences(inputs, slots, has, cache)


def batch(seed: int, lengths: list[int]) -> Inputs:
    inputs = random_inputs(SMALL, seed, lengths=lengths, num_slots=7)
    inputs.state_cache.nan_to_num_(0.5)
    return inputs


def run(
    inputs: Inputs, form: str, wrap: Callable[[Callable[..., Tensor]], Callable[..., Tensor]]
) -> tuple[Tensor, Tensor]:
    """Output and pool of one continuation with the cache in one of its forms."""
    pool, cache = copy_of(inputs.state_cache)
    arguments = (inputs.arguments(), inputs.slots, inputs.has_initial_state)
    if form == "buffer":
        out = wrap(Layer(cache))(*arguments)
    else:
        out = wrap(from_pool if form == "pool" else continue_sequences)(*arguments, pool if form == "pool" else cache)
    return out, pool


@pytest.mark.fault(1)
@pytest.mark.fault(5)
@pytest.mark.fault(17)
@pytest.mark.parametrize("lengths", [[40], [40, 300, 1]], ids=["one sequence", "three sequences"])
@pytest.mark.parametrize("form", ["argument", "buffer", "pool"])
def test_the_snapshot_goes_and_no_bit_changes(form: str, lengths: list[int]) -> None:
    inputs = batch(1, lengths)
    expected = run(inputs, form, lambda program: program)
    elimination = SnapshotElimination()
    codes: list[str] = []

    def compiled(program: Callable[..., Tensor]) -> Callable[..., Tensor]:
        fast = torch.compile(program, fullgraph=True, options=inductor_options(elimination))

        def call(*arguments: Any) -> Tensor:
            out, found = run_and_get_code(fast, *arguments)
            codes.extend(found)
            return out

        return call

    for actual, wanted in zip(run(inputs, form, compiled), expected, strict=True):
        assert_close(actual, wanted, rtol=0, atol=0, equal_nan=True)
    assert [rewrite.into for graph in elimination.report().graphs for rewrite in graph.rewrites] == [
        "state_passing_indexed"
    ]
    body = codes[0][codes[0].index("def call(") :]
    # Inductor's own kernels would be the gather and the mask, or a copy of the cache.
    assert not re.search(r"triton_(poi|red|per)_|clone\(|\.copy_\(", body), body


@pytest.mark.fault(18)
@pytest.mark.parametrize("form", ["argument", "buffer"])
def test_reduce_overhead_keeps_its_graphs_and_advances_the_state_once_a_call(form: str) -> None:
    inputs = batch(2, [40, 9])
    _, cache = copy_of(inputs.state_cache)
    _, expected_cache = copy_of(inputs.state_cache)
    elimination = SnapshotElimination()
    options = inductor_options(elimination, mode="reduce-overhead")
    if form == "buffer":
        fast = torch.compile(Layer(cache), fullgraph=True, options=options)
    else:
        torch._dynamo.mark_static_address(cache)
        compiled = torch.compile(continue_sequences, fullgraph=True, options=options)

        def fast(*arguments: Any) -> Tensor:
            return compiled(*arguments, cache)

    counters["inductor"].pop("cudagraph_skips", None)
    arguments = inputs.arguments()
    generator = torch.Generator("cuda").manual_seed(0)
    for _ in range(6):  # the first calls warm up and record, the others replay
        torch.compiler.cudagraph_mark_step_begin()
        inputs.slots.copy_(torch.randperm(7, generator=generator, device="cuda")[:2])
        inputs.has_initial_state.copy_(torch.rand(2, generator=generator, device="cuda") < 0.7)
        out = fast(arguments, inputs.slots, inputs.has_initial_state).clone()
        expected = continue_sequences(arguments, inputs.slots, inputs.has_initial_state, expected_cache)
        assert_close(out, expected, rtol=0, atol=0)
        assert_close(cache, expected_cache, rtol=0, atol=0, equal_nan=True)
    assert counters["inductor"]["cudagraph_skips"] == 0
    assert sum(len(graph.rewrites) for graph in elimination.report().graphs) == 1


@pytest.mark.fault(15)
def test_batch_sizes_share_compiled_graphs() -> None:
    """A batch of one specialises; all larger ones share one dynamic graph."""
    elimination = SnapshotElimination()
    fast = torch.compile(continue_sequences, fullgraph=True, dynamic=True, options=inductor_options(elimination))
    for seed, nseqs in enumerate([1, 2, 3, 17, 5, 1, 8]):
        inputs = random_inputs(SMALL, seed, lengths=[30 + seed + n for n in range(nseqs)], num_slots=40)
        _, cache = copy_of(inputs.state_cache)
        _, expected_cache = copy_of(inputs.state_cache)
        arguments = (inputs.arguments(), inputs.slots, inputs.has_initial_state)
        assert_close(fast(*arguments, cache), continue_sequences(*arguments, expected_cache), rtol=0, atol=0)
        assert_close(cache, expected_cache, rtol=0, atol=0, equal_nan=True)
    graphs = elimination.report().graphs
    assert 1 <= len(graphs) <= 3
    assert all(len(graph.rewrites) == 1 for graph in graphs)
