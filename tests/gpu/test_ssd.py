"""The ops on a GPU: right against FP64, the same bits by either path, nothing else touched, replayable."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys

import pytest
import torch
from torch.testing import assert_close

from benchmarks.inputs import FAMILIES, Shape
from mamba_ops import build_chunk_metadata, ops
from mamba_ops.reference import ssd_reference
from tests.gpu.batches import (
    DTYPES,
    SMALL,
    continue_from_snapshot,
    continue_in_place,
    copy_of,
    poisoned,
    random_inputs,
    snapshot_of,
)

pytestmark = pytest.mark.gpu

ODD = Shape(nheads=6, headdim=80, dstate=96, ngroups=2, chunk_size=64)
SHARDS = [shape.shard(8) for shape in FAMILIES.values()]
# One rounding of a product's factors; FP32 products run as TF32, which cuts, on a GPU, as in other implementations.
EPS = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-10}


@pytest.mark.fault(2)
@pytest.mark.fault(14)
@pytest.mark.fault(16)
@pytest.mark.fault(21)
@pytest.mark.parametrize("shape", [SMALL, ODD, *SHARDS], ids=str)
@pytest.mark.parametrize(("dtype", "state_dtype"), list(itertools.product(DTYPES, DTYPES)), ids=str)
def test_against_the_fp64_recurrence(shape: Shape, dtype: torch.dtype, state_dtype: torch.dtype) -> None:
    inputs = random_inputs(shape, seed=torch.seed() % 2**31, dtype=dtype, state_dtype=state_dtype)
    expected, final = ssd_reference(
        inputs.x,
        inputs.dt,
        inputs.A,
        inputs.B,
        inputs.C,
        inputs.metadata.cu_seqlens,
        D=inputs.D,
        dt_bias=inputs.dt_bias,
        dt_softplus=True,
        initial_states=snapshot_of(inputs),
    )
    _, cache = copy_of(inputs.state_cache)
    out = poisoned(inputs)
    continue_in_place(inputs, cache, out)
    for actual, wanted in ((out, expected), (cache[inputs.slots], final)):
        error = (actual.double() - wanted).norm() / wanted.norm()
        assert error < 2 * max(EPS[dtype], EPS[state_dtype]), f"relative error {error:.2e}"


@pytest.mark.fault(7)
@pytest.mark.fault(10)
@pytest.mark.parametrize("state_dtype", DTYPES, ids=str)
def test_both_paths_give_the_same_bits_and_touch_nothing_else(state_dtype: torch.dtype) -> None:
    for seed in range(40):
        inputs = random_inputs(SMALL, seed=seed, state_dtype=state_dtype)
        results = []
        for path in (continue_from_snapshot, continue_in_place):
            pool, cache = copy_of(inputs.state_cache)
            out = poisoned(inputs)
            path(inputs, cache, out)
            assert not out.isnan().any()
            results.append((out, pool))
        for snapshot, indexed in zip(*results, strict=True):
            assert_close(indexed, snapshot, rtol=0, atol=0, equal_nan=True)
        before, written = copy_of(inputs.state_cache)
        written[inputs.slots] = cache[inputs.slots]
        assert_close(results[1][1], before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.fault(11)
def test_slots_beyond_32_bit_offsets() -> None:
    stride = 2**29 + 64
    pool = torch.empty(4 * stride + 8 * 64 * 128, dtype=torch.bfloat16, device="cuda")
    cache = pool.as_strided((5, 8, 64, 128), (stride, 64 * 128, 128, 1))
    inputs = random_inputs(SMALL, seed=3, lengths=[300])
    inputs.slots, inputs.has_initial_state = (torch.tensor([value], device="cuda") for value in (4, True))
    cache[4].normal_()
    near = cache[4:].clone()
    outs = []
    for slot, states in ((4, cache), (0, near)):
        inputs.slots = torch.tensor([slot], dtype=torch.int32, device="cuda")
        outs.append(poisoned(inputs))
        continue_in_place(inputs, states, outs[-1])
    assert_close(outs[0], outs[1], rtol=0, atol=0)
    assert_close(cache[4], near[0], rtol=0, atol=0)


@pytest.mark.fault(8)
@pytest.mark.fault(9)
def test_a_captured_graph_follows_other_slots_masks_and_lengths() -> None:
    """Captured once with static metadata; replayed with whatever fits, padding included, it equals an eager run."""
    lengths = [64, 32, 100, 60]
    inputs = random_inputs(SMALL, seed=5, lengths=lengths, num_slots=9)
    table = torch.zeros(len(lengths), 4, dtype=torch.int32, device="cuda")
    table[:, 0] = inputs.slots
    inputs.slots = table[:, 0]
    out = poisoned(inputs)
    _, cache = copy_of(inputs.state_cache)
    continue_in_place(inputs, cache, out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        continue_in_place(inputs, cache, out)
    static = inputs.metadata
    for seed, other in enumerate([[1, 255, 0, 0], [128, 128, 0, 0], [10, 20, 30, 40], [0, 7, 0, 2]]):
        metadata = build_chunk_metadata([0, *torch.tensor(other).cumsum(0).tolist()], SMALL.chunk_size, device="cuda")
        chunks = metadata.cu_chunk_seqlens
        static.cu_chunk_seqlens.fill_(int(chunks[-1]))
        static.cu_chunk_seqlens[: len(chunks)] = chunks
        static.last_chunk_indices.copy_(metadata.last_chunk_indices)
        generator = torch.Generator("cuda").manual_seed(seed)
        table[:, 0] = torch.randperm(9, generator=generator, device="cuda")[: len(other)]
        inputs.has_initial_state.copy_(torch.rand(len(other), generator=generator, device="cuda") < 0.5)
        cache[inputs.slots] = torch.randn(cache[inputs.slots].shape, device="cuda").bfloat16()
        _, eager_cache = copy_of(cache)
        expected = poisoned(inputs)
        out.fill_(float("nan"))
        continue_in_place(inputs, eager_cache, expected)
        graph.replay()
        assert_close(out, expected, rtol=0, atol=0, equal_nan=True)
        assert_close(cache, eager_cache, rtol=0, atol=0, equal_nan=True)
        assert not out[: sum(other)].isnan().any()
        assert out[sum(other) :].isnan().all()


FIRST_CALL = """
import torch
from tests.gpu.batches import *
inputs = random_inputs(SMALL, seed=1)
_, first = copy_of(inputs.state_cache)
out = poisoned(inputs)
continue_in_place(inputs, first, out)
torch.cuda.synchronize()
_, second = copy_of(inputs.state_cache)
again = poisoned(inputs)
continue_from_snapshot(inputs, second, again)
torch.testing.assert_close(out, again, rtol=0, atol=0)
torch.testing.assert_close(first, second, rtol=0, atol=0, equal_nan=True)
"""


@pytest.mark.fault(1)
def test_the_first_call_of_a_process_equals_the_snapshot(tmp_path: object) -> None:
    """With an empty Triton cache anything that tuned itself would run trials, and they would advance the cache."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", FIRST_CALL], check=True, env=environment)


@pytest.mark.fault(5)
def test_memory_grows_with_the_batch_not_with_the_cache() -> None:
    peaks = []
    for num_slots in (8, 512):
        inputs = random_inputs(SMALL, seed=2, lengths=[40, 3], num_slots=num_slots)
        out = poisoned(inputs)
        continue_in_place(inputs, inputs.state_cache, out)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        continue_in_place(inputs, inputs.state_cache, out)
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[0] == peaks[1]


def test_opcheck() -> None:
    """PyTorch's own checks of an op: schema, mutation, fake tensors and compilation."""
    inputs = random_inputs(SMALL, seed=4)
    cu, last = inputs.metadata.cu_chunk_seqlens, inputs.metadata.last_chunk_indices
    steps = (inputs.dt, inputs.A, cu, SMALL.chunk_size, inputs.dt_bias, True, 0.0, None)
    dA_cumsum, dt_out = ops.chunk_cumsum(*steps)
    states = ops.chunk_state(inputs.B, inputs.x, dt_out, dA_cumsum, cu)
    snapshot = snapshot_of(inputs)
    cache = inputs.state_cache.nan_to_num()
    entering, _ = ops.state_passing(states, dA_cumsum, last, snapshot, torch.bfloat16)
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_static")
    for op, arguments in (
        (ops.chunk_cumsum, steps),
        (ops.chunk_state, (inputs.B, inputs.x, dt_out, dA_cumsum, cu)),
        (ops.state_passing, (states, dA_cumsum, last, snapshot, torch.bfloat16)),
        (ops.state_passing_update, (states, dA_cumsum, last, snapshot, cache, inputs.slots)),
        (
            ops.state_passing_indexed,
            (states, dA_cumsum, last, cache, inputs.slots, inputs.has_initial_state, inputs.slots),
        ),
        (ops.masked_gather, (cache, inputs.slots, inputs.has_initial_state)),
    ):
        torch.library.opcheck(op, arguments, test_utils=tests)
    cb = torch.zeros_like(ops.bmm_chunk(inputs.C, inputs.B, cu, SMALL.chunk_size))
    out = torch.zeros_like(inputs.x)
    arguments = (cb, inputs.x, dt_out, dA_cumsum, inputs.C, entering, cu, out, inputs.D)
    torch.library.opcheck(ops.chunk_scan, arguments, test_utils=tests)
