"""Random continuations on a GPU, and what every path must give for them."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

from benchmarks.equality import whole_pool
from benchmarks.inputs import Inputs, Shape, make_inputs
from benchmarks.paths import ours
from mamba_ops import ops, ssd_chunk_scan

SMALL = Shape(nheads=8, headdim=64, dstate=128, ngroups=2, chunk_size=128)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def random_inputs(shape: Shape, seed: int, lengths: list[int] | None = None, **options: Any) -> Inputs:
    """A batch of up to five sequences around chunk edges, some of them fresh, with padding between slots."""
    rng = random.Random(seed)
    if lengths is None:
        chunk = shape.chunk_size
        around = [1, 2, 17, chunk - 1, chunk, chunk + 1, 3 * chunk, 3 * chunk + 5]
        lengths = [rng.choice(around) for _ in range(rng.randint(1, 5))]
    return make_inputs(
        shape,
        lengths,
        context_lens=[rng.choice([0, rng.randrange(1000)]) for _ in lengths],
        has_initial_state=[rng.random() < 0.7 for _ in lengths],
        slot_padding=rng.choice([0, 8, 4096]),
        seed=seed,
        **options,
    )


def continue_in_place(inputs: Inputs, cache: Tensor, out: Tensor) -> None:
    ours(inputs, out, cache)


def continue_from_snapshot(inputs: Inputs, cache: Tensor, out: Tensor) -> None:
    """The same by the spelling of stock code: gather, `torch.where`, final states in place."""
    snapshot = torch.where(inputs.has_initial_state[:, None, None, None], cache[inputs.slots], 0)
    ssd_chunk_scan(
        **inputs.arguments(),
        dt_softplus=True,
        initial_states=snapshot,
        state_cache=cache,
        write_slots=inputs.slots,
        out=out,
    )


def copy_of(cache: Tensor) -> tuple[Tensor, Tensor]:
    """A copy of the cache with its padding: the pool, and the cache in it."""
    pool = whole_pool(cache).clone()
    return pool, pool.as_strided(cache.shape, cache.stride())


def poisoned(inputs: Inputs) -> Tensor:
    return torch.full_like(inputs.x, float("nan"), memory_format=torch.contiguous_format)


def snapshot_of(inputs: Inputs) -> Tensor:
    return ops.masked_gather(inputs.state_cache, inputs.slots, inputs.has_initial_state)
