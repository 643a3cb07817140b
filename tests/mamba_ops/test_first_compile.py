"""What has read a cache stays as it was, however late Inductor evaluates it, also in what a process compiles first."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PREAMBLE = """
import torch
from mamba_ops.ops import conv_checkpoint, state_passing_indexed, state_passing_update
from inductor_passes import eliminate_snapshots

def snapshot_used_again(states, dA, last, cache, slots, has):
    rows = torch.where(has[:, None, None, None], cache[slots], 0)
    return state_passing_update(states, dA, last, rows, cache, slots), rows[0]

def snapshot_used_twice(states, dA, last, cache, slots, has):
    rows = torch.where(has[:, None, None, None], cache[slots], 0)
    first = state_passing_update(states, dA, last, rows, cache, slots)
    return first, state_passing_update(states, dA, last, rows, cache, slots)

def rows_feed_the_scan(states, dA, last, cache, slots, has):
    added = cache[slots][:1] * states
    rows = torch.where(has[:, None, None, None], cache[slots], 0)
    return state_passing_update(added, dA, last, rows, cache, slots), added[0]

def inputs_feed_the_checkpoint(states, dA, last, cache, slots, has):
    conv_state, kept_slots = cache.flatten(1, 2), torch.tensor([0, 2])
    inputs = conv_state[kept_slots].mT.flatten(0, 1) * 2
    cu_seqlens, offsets = torch.tensor([0, 16, 32], dtype=torch.int32), torch.tensor([3, 1], dtype=torch.int32)
    conv_checkpoint(inputs, cu_seqlens, conv_state, slots, has, offsets, kept_slots, 4)
    return inputs[0]

def a_reader_is_used_later(states, dA, last, cache, slots, has):
    rows = cache[1:4:2] * 0.5
    return state_passing_update(states * rows[0, 0], dA, last, None, cache, slots), rows[0]

def an_input_is_used_later(states, dA, last, cache, slots, has):
    added = cache[1:4].mT * 0.5
    return state_passing_update(added.contiguous(), dA, last, None, cache, slots), added[0]

def a_cache_of_the_graph(states, dA, last, cache, slots, has):
    own = cache * 2
    rows = own[1:4:2] * 0.5
    return state_passing_update(states, dA, last, rows, own, slots), rows[0], own

torch.manual_seed(0)
states, dA, cache = torch.randn(3, 2, 16, 16), -torch.rand(3, 2, 16), torch.randn(5, 2, 16, 16)
last, slots, has = torch.tensor([1, 2], dtype=torch.int32), torch.tensor([3, 1]), torch.tensor([True, True])

def run(program):
    own = cache.clone()
    return program(states, dA, last, own, slots, has), own

def check(program, with_pass):
    expected = run(program)
    with eliminate_snapshots() if with_pass else torch.no_grad():
        actual = run(torch.compile(program, fullgraph=True))
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
"""


@pytest.mark.fault(2)
@pytest.mark.parametrize("with_pass", [False, True])
@pytest.mark.parametrize(
    "program",
    [
        "snapshot_used_again",
        "snapshot_used_twice",
        "rows_feed_the_scan",
        "inputs_feed_the_checkpoint",
        "a_reader_is_used_later",
        "an_input_is_used_later",
        "a_cache_of_the_graph",
    ],
)
def test_old_rows_are_not_read_from_the_new_cache(program: str, with_pass: bool) -> None:
    environment = {**os.environ, "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
    subprocess.run([sys.executable, "-c", f"{PREAMBLE}\ncheck({program}, {with_pass})"], check=True, env=environment)
