"""What a fresh process compiles first is right: Inductor learns some facts about an op only when it first meets it."""

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
    conv_state = cache.flatten(1, 2)
    inputs = conv_state[slots].mT.flatten(0, 1) * 2
    cu_seqlens, offsets = torch.tensor([0, 16, 32], dtype=torch.int32), torch.tensor([3, 1], dtype=torch.int32)
    conv_checkpoint(inputs, cu_seqlens, conv_state, slots, has, offsets, torch.tensor([0, 2]), 4)
    return inputs, conv_state[0].clone()

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
    "program", ["snapshot_used_again", "snapshot_used_twice", "rows_feed_the_scan", "inputs_feed_the_checkpoint"]
)
def test_old_rows_are_not_read_from_the_new_cache(program: str, with_pass: bool) -> None:
    environment = {**os.environ, "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
    subprocess.run([sys.executable, "-c", f"{PREAMBLE}\ncheck({program}, {with_pass})"], check=True, env=environment)
