"""A sample of the bitwise comparison with vLLM's own SSD; `benchmarks/equality.py` makes the whole one."""

from __future__ import annotations

import random

import pytest

from benchmarks import paths
from benchmarks.equality import equal_paths
from benchmarks.inputs import FAMILIES
from tests.gpu.batches import random_inputs

pytestmark = pytest.mark.gpu
pytest.importorskip("vllm")


@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_and_caches_have_the_same_bits(family: str) -> None:
    shape = FAMILIES[family].shard(random.choice([1, 2, 4, 8]))
    with paths.stock_blocks(paths.our_blocks(shape.headdim, shape.dstate, shape.chunk_size)):
        for _ in range(5):
            seed = random.randrange(2**31)
            assert equal_paths(random_inputs(shape, seed)), f"seed {seed}, {shape}"
