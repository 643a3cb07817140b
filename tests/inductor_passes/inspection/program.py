"""A program as a user might have it: three spellings of the snapshot that go, and one that must stay. Not a test."""

import torch

from mamba_ops.ops import state_passing_update
from tests.inductor_passes.programs import make_inputs


def spelled_by_where(cache, slots, has):
    return torch.where(has[:, None, None, None], cache[slots], 0)


def spelled_by_masked_fill(cache, slots, has):
    rows = cache.index_select(0, slots)
    return rows.masked_fill(~has.view(-1, 1, 1, 1), 0)


def spelled_in_place(cache, slots, has):
    rows = cache[slots.long()]
    rows[~has] = 0
    return rows


def scans(states, dA_cumsum, last, caches, slots, has):
    spellings = (spelled_by_where, spelled_by_masked_fill, spelled_in_place)
    initial = [spelling(cache, slots, has) for spelling, cache in zip(spellings, caches, strict=True)]
    return [state_passing_update(states, dA_cumsum, last, *pair, slots) for pair in zip(initial, caches, strict=True)]


def returns_its_snapshot(states, dA_cumsum, last, cache, slots, has):
    initial = torch.where(has[:, None, None, None], cache[slots], 0)
    return state_passing_update(states, dA_cumsum, last, initial, cache, slots), initial


def main():
    inputs = make_inputs((2, 1))
    caches = [torch.randn_like(inputs.cache) for _ in range(3)]
    states, dA_cumsum, last, cache, slots, has = inputs.args()
    gone = torch.compile(scans, fullgraph=True)(states, dA_cumsum, last, caches, slots, has)
    kept = torch.compile(returns_its_snapshot, fullgraph=True)(states, dA_cumsum, last, cache, slots, has)
    return gone, kept, caches, cache


if __name__ == "__main__":
    results = main()
