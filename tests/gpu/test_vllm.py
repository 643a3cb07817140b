"""A sample of the bitwise comparison with vLLM's own SSD; `benchmarks/equality.py` makes the whole one."""

from __future__ import annotations

import random

import pytest

from benchmarks import paths
from benchmarks.engine.held_choices import hold_sums, in_order
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


@pytest.mark.parametrize("family", FAMILIES)
def test_every_choice_that_comparisons_hold_vllm_to_has_our_bits(family: str) -> None:
    shape = FAMILIES[family].shard(1)
    tuner = paths.stock_kernels()["chunk_cumsum"]
    all_choices = tuner.configs
    try:
        hold_sums(None, shape.chunk_size)
        held = tuner.configs
        equal_paths(random_inputs(shape, 0))
        assert tuner.best_config in held
    finally:
        tuner.configs = all_choices
        tuner.cache.clear()
    assert held == [config for config in all_choices if in_order(config, shape.chunk_size)]
    blocks = paths.our_blocks(shape.headdim, shape.dstate, shape.chunk_size)
    for config in held:
        with paths.stock_blocks({**blocks, "chunk_cumsum": config}):
            seed = random.randrange(2**31)
            assert equal_paths(random_inputs(shape, seed)), f"seed {seed}, {config}"
