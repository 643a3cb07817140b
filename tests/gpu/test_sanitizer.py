"""A small set under NVIDIA's compute-sanitizer: no access outside an allocation, no race in shared memory."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

pytestmark = pytest.mark.gpu

SMALL_SET = """
import torch
from benchmarks.one_pass import *
from tests.gpu.batches import *
for seed, dtype in enumerate(DTYPES):
    inputs = random_inputs(SMALL, seed, lengths=[0, 130, 1, 33], dtype=dtype, state_dtype=DTYPES[seed - 1])
    for path in (continue_in_place, continue_from_snapshot):
        path(inputs, copy_of(inputs.state_cache)[1], poisoned(inputs))
    snapshot_of(inputs)
    short = make_one_pass(SMALL, [33, 2], dtype, DTYPES[seed - 1], contexts=[100, 0], checkpoints=[9, 2])
    until, slots = short.kept[1:]
    sequences = short.cu_seqlens, short.conv_state, short.slots, short.has_initial_state
    ops.conv_checkpoint(short.conv_in, *sequences, until, slots, WIDTH)
    staged(short, short.poisoned())
    one_pass(short, short.poisoned(), 64)
torch.cuda.synchronize()
print("done")
"""


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_clean(tool: str) -> None:
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not installed")
    # Each tensor gets an allocation of its own, so that memcheck sees where it ends.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    command = [
        sanitizer,
        "--tool",
        tool,
        "--error-exitcode",
        "9",
        "--report-api-errors",
        "no",
        sys.executable,
        "-c",
        SMALL_SET,
    ]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if "not supported" in result.stdout:
        pytest.skip("compute-sanitizer does not support this machine")
    assert result.returncode == 0, result.stdout[:4000] + result.stderr[-2000:]
    assert "done" in result.stdout
