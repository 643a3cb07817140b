"""States kept in the middle of sequences, against sequences that end there. For CPU, interpreter and GPU."""

from __future__ import annotations

import random
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from mamba_ops import ops
from mamba_ops.ops.conv_checkpoint import conv_checkpoint
from tests.mamba_ops.tiled_convs import bits, make_tiled_case

NHEADS, HEADDIM, DSTATE, CHUNK = 2, 8, 16, 16
Marks = tuple[Tensor, Tensor, Tensor]


def assert_inputs_are_kept(seed: int, *, dtype: torch.dtype = torch.float32, device: str = "cpu") -> None:
    """The convolution's states bit for bit, and nothing else is written."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    width = rng.choice((2, 3, 4, 9))
    lengths = [rng.choice((0, 1, 2, 7, 8, 30)) for _ in range(rng.randint(1, 6))]
    case = make_tiled_case(
        lengths,
        width=width,
        conv_dim=rng.choice((1, 24, 300)),
        dtype=dtype,
        mask=[rng.random() < 0.6 for _ in lengths],
        channels_last=rng.random() < 0.5,
        spare_entries=rng.choice((0, 3)),
        negative=rng.random() < 0.3,
        device=device,
    )
    offsets = [rng.choice((-1, 0, 1, 2, length // 2, length)) if length > 1 else 0 for length in lengths]
    num_slots = case.conv_state.shape[0]
    free = sorted(set(range(num_slots)) - {int(slot) % num_slots for slot in case.slots})
    targets = []
    for b, offset in enumerate(offsets):
        offsets[b] = offset if free else 0
        targets.append(free.pop() if offsets[b] > 0 else int(case.slots[0]))

    pages = case.pages.clone()
    after = pages.as_strided(case.conv_state.shape, case.conv_state.stride(), case.conv_state.storage_offset())
    for b, start in enumerate(case.cu_seqlens.tolist()[:-1]):
        if offsets[b] > 0:
            old = case.conv_state[int(case.slots[b]), :, : width - 1]
            inputs = [old if case.has[b] else torch.zeros_like(old), case.x[start : start + offsets[b]].T]
            after[targets[b], :, : width - 1] = torch.cat(inputs, dim=1)[:, 1 - width :]
    marks = (torch.tensor(offsets, dtype=torch.int32, device=device), torch.tensor(targets, device=device))
    conv_checkpoint(case.x, case.cu_seqlens, case.conv_state, case.slots, case.has, *marks, width)
    assert torch.equal(bits(case.pages), bits(pages))


def assert_states_are_kept(seed: int, *, dtype: torch.dtype = torch.float32, device: str = "cpu") -> None:
    """Bit for bit what sequences leave that have no chunk behind their checkpoint; all else as without."""
    counts, cache, slots, has, marks = _sequences(seed, dtype, device)
    last, nchunks = torch.tensor(list(accumulate(counts)), device=device).int() - 1, sum(counts)
    states = torch.randn(nchunks, NHEADS, HEADDIM, DSTATE, device=device)
    dA = torch.randn(nchunks, NHEADS, CHUNK, device=device).abs().neg()
    expected = cache.clone()
    entering = ops.state_passing_indexed(states, dA, last, expected, slots, has, slots)

    chunks, offsets, targets = marks
    keeps = offsets > 0
    if keeps.any():
        firsts = [end + 1 - count for count, end in zip(counts, last.tolist(), strict=True)]
        kept = [range(first, int(chunk) + 1) for first, chunk, yes in zip(firsts, chunks, keeps, strict=True) if yes]
        shorter = torch.tensor(list(accumulate(map(len, kept))), device=device).int() - 1
        rows = torch.tensor([chunk for each in kept for chunk in each], device=device)
        other = cache.clone()
        ops.state_passing_indexed(states[rows], dA[rows], shorter, other, slots[keeps], has[keeps], targets[keeps])
        expected[targets[keeps]] = other[targets[keeps]]
    got = ops.state_passing_indexed(states, dA, last, cache, slots, has, slots, False, *marks)
    assert torch.equal(bits(cache), bits(expected))
    assert torch.equal(got, entering)


def assert_one_pass_keeps_the_same(seed: int, *, device: str = "cpu", tolerance: float = 0.0) -> None:
    """The same states as the stages keep, and the same outputs as without checkpoints."""
    counts, cache, slots, has, marks = _sequences(seed, torch.float32, device)
    rng = random.Random(seed)
    lengths = [rng.randint(1, CHUNK) for _ in range(sum(counts))]
    cu = torch.tensor([0, *accumulate(lengths)], device=device).int()
    last = torch.tensor(list(accumulate(counts)), device=device).int() - 1
    ntokens = sum(lengths)
    x, B, C = (torch.randn(ntokens, *row, device=device) for row in ((NHEADS, HEADDIM), (1, DSTATE), (1, DSTATE)))
    dt, A = torch.rand(ntokens, NHEADS, device=device), -torch.rand(NHEADS, device=device)
    dA_cumsum, dt_out = ops.chunk_cumsum(dt, A, cu, CHUNK)
    caches = [cache, cache.clone(), cache.clone()]
    outs = [torch.full_like(x, torch.nan) for _ in range(2)]
    for each, out, kept in zip(caches, outs, (marks, ()), strict=False):
        arguments = (x, B, C, dt_out, dA_cumsum, cu, each, slots, has, out, CHUNK, None, last)
        ops.one_pass_scan(*arguments, *kept)
    states = ops.chunk_state(B, x, dt_out, dA_cumsum, cu)
    ops.state_passing_indexed(states, dA_cumsum, last, caches[2], slots, has, slots, False, *marks)
    assert torch.equal(*outs)
    torch.testing.assert_close(caches[0], caches[2], rtol=tolerance, atol=tolerance, equal_nan=True)


def _sequences(seed: int, dtype: torch.dtype, device: str) -> tuple[list[int], Tensor, Tensor, Tensor, Marks]:
    """Chunks of each sequence, a cache whose other slots hold NaN, and checkpoints of some of them."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    counts = [rng.choice((1, 1, 2, 3, 5)) for _ in range(rng.randint(1, 5))]
    num_slots = 2 * len(counts) + 1
    order = torch.randperm(num_slots)
    table = torch.full((len(counts), 3), 10**6)
    table[:, 1] = order[: len(counts)]
    has = torch.rand(len(counts)) < 0.6
    cache = torch.full((num_slots, NHEADS, HEADDIM, DSTATE), torch.nan, dtype=dtype)
    cache[order[: len(counts)][has]] = torch.randn(int(has.sum()), NHEADS, HEADDIM, DSTATE).to(dtype)
    chunks = [rng.randrange(*ends) for ends in pairwise([0, *accumulate(counts)])]
    offsets = [rng.choice((1, 99, 0, -1)) for _ in chunks]
    kept = torch.full((len(counts), 2), 10**6)
    kept[:, 0] = order[len(counts) : 2 * len(counts)] - num_slots * (rng.random() < 0.3)
    marks = (torch.tensor(chunks), torch.tensor(offsets, dtype=torch.int32), kept[:, 0])
    chunks_, offsets_, targets = (mark.to(device) for mark in marks)
    return counts, cache.to(device), table.to(device)[:, 1], has.to(device), (chunks_, offsets_, targets)
