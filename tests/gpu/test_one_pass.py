"""Prefills of few tokens in one pass on a GPU: the bits of the staged ops, nothing else touched, replayable."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from benchmarks.equality import whole_pool
from benchmarks.inputs import FAMILIES, Shape
from benchmarks.one_pass import OnePass, make_one_pass, one_pass, staged, tiles_of
from mamba_ops import ops
from mamba_ops.ops.conv_cumsum import conv_cumsum
from tests.gpu.batches import DTYPES, SMALL

pytestmark = pytest.mark.gpu

GRANITE = FAMILIES["granite-4.0-h-micro"]
SHAPES = {
    "granite": GRANITE,
    "nemotron-h": FAMILIES["nemotron-h-8b"],
    "falcon-h1": FAMILIES["falcon-h1-7b"],
    "zamba2": FAMILIES["zamba2-7b"],
    "falcon-h1, shard of 8": FAMILIES["falcon-h1-7b"].shard(8),
    "odd": Shape(nheads=6, headdim=80, dstate=96, ngroups=2, chunk_size=64),
}


def random_lengths(nseqs: int, most: int) -> list[int]:
    """Lengths up to `most`, which is among them, mostly where a block of tokens begins or ends."""
    edges = [n for n in (1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64) if n <= most]
    lengths = [random.choice([*edges, random.randint(1, most)]) for _ in range(nseqs - 1)] + [most]
    random.shuffle(lengths)
    return lengths


def random_batch(shape: Shape, lengths: list[int], *dtypes: torch.dtype, **options: Any) -> OnePass:
    """Some of the sequences are fresh, and their slots hold NaN."""
    has = [random.random() < 0.7 for _ in lengths]
    return make_one_pass(shape, lengths, *dtypes, has_initial_state=has, seed=random.randrange(2**31), **options)


def with_own_caches(batch: OnePass) -> OnePass:
    """The batch over copies of the caches, padding included."""
    copies = {}
    for name in ("conv_state", "state_cache"):
        cache = getattr(batch, name)
        copies[name] = whole_pool(cache).clone().as_strided(cache.shape, cache.stride())
    return replace(batch, **copies)


def assert_same(actual: Tensor, expected: Tensor) -> None:
    assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def assert_equals_stages(batch: OnePass, max_tokens: int) -> None:
    """Outputs, what lies between the two launches, and every byte of both caches; only what is owned has changed."""
    ours, theirs = with_own_caches(batch), with_own_caches(batch)
    out, expected = batch.poisoned(), batch.poisoned()
    for got, want in zip(one_pass(ours, out, max_tokens), staged(theirs, expected), strict=True):
        assert_same(got, want)
    assert_same(out, expected)
    assert not out.isnan().any()
    slots = batch.slots.long()
    for got, want, before, owned in (
        (ours.conv_state, theirs.conv_state, batch.conv_state, slots),
        (ours.state_cache, theirs.state_cache, batch.state_cache, torch.cat([slots, kept_slots(batch)])),
    ):
        assert_same(whole_pool(got), whole_pool(want))
        assert not got[owned].isnan().any()
        got[owned] = before[owned]
        assert_same(whole_pool(got), whole_pool(before))


def kept_slots(batch: OnePass) -> Tensor:
    if not batch.kept:
        return batch.slots[:0].long()
    _, until, slots = batch.kept
    return slots[until > 0].long()


@pytest.mark.fault(7)
@pytest.mark.fault(9)
@pytest.mark.fault(10)
@pytest.mark.fault(21)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_same_bits_as_in_stages(shape: Shape) -> None:
    """Slots are a column of a table, what follows a slot is not a sequence's, and fresh sequences own NaN."""
    for max_tokens in (32, 64):
        for nseqs in (1, 3, 8, 32, 100):
            assert_equals_stages(random_batch(shape, random_lengths(nseqs, max_tokens)), max_tokens)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_same_bits_across_the_edges_of_chunks(shape: Shape) -> None:
    """New tokens on both sides of an edge, just before it and just behind it; some sequences have none."""
    for max_tokens in (16, 32, 64):
        for nseqs in (1, 3, 32):
            lengths = random_lengths(nseqs, max_tokens)
            contexts = [2 * shape.chunk_size - random.choice([0, 1, 2, 7, 16, length]) for length in lengths]
            assert_equals_stages(random_batch(shape, lengths, contexts=contexts), max_tokens)


@pytest.mark.fault(13)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_same_bits_with_checkpoints(shape: Shape) -> None:
    """At any token, at its sequence's last one, and none; a chunk ends there besides the edges of chunks."""
    for max_tokens in (16, 32, 64):
        for nseqs in (1, 3, 32):
            assert_equals_stages(batch_with_checkpoints(shape, random_lengths(nseqs, max_tokens)), max_tokens)


def batch_with_checkpoints(shape: Shape, lengths: list[int], *dtypes: torch.dtype) -> OnePass:
    contexts = [2 * shape.chunk_size - random.choice([0, 1, 2, 7, 16, length]) for length in lengths]
    checkpoints = [random.choice([0, 1, length, random.randint(1, length)]) for length in lengths]
    return random_batch(shape, lengths, *dtypes, contexts=contexts, checkpoints=checkpoints)


@pytest.mark.fault(16)
@pytest.mark.parametrize(("dtype", "state_dtype"), list(itertools.product(DTYPES, DTYPES)), ids=str)
def test_same_bits_in_every_dtype(dtype: torch.dtype, state_dtype: torch.dtype) -> None:
    """Each pair of dtypes with one form of D and one layout of the convolution's cache."""
    row = 3 * DTYPES.index(dtype) + DTYPES.index(state_dtype)
    form: dict[str, Any] = {"D_dims": row % 3, "channels_last": row % 2 == 0, "slot_padding": (0, 16, 4096)[row // 3]}
    for max_tokens, nseqs in itertools.product((64, 32, 16), (1, 6, 17)):
        lengths = random_lengths(nseqs, max_tokens)
        for contexts in (None, [SMALL.chunk_size - random.randint(0, length) for length in lengths]):
            batch = random_batch(SMALL, lengths, dtype, state_dtype, contexts=contexts, **form)
            assert_equals_stages(batch, max_tokens)
        assert_equals_stages(batch_with_checkpoints(SMALL, lengths, dtype, state_dtype), max_tokens)


@pytest.mark.parametrize("nseqs", range(1, 33))
def test_same_bits_for_any_number_of_sequences(nseqs: int) -> None:
    max_tokens = random.choice((32, 64))
    assert_equals_stages(random_batch(GRANITE, random_lengths(nseqs, max_tokens)), max_tokens)


def test_same_bits_for_every_length() -> None:
    lengths = list(range(1, 65))
    random.shuffle(lengths)
    assert_equals_stages(random_batch(GRANITE, lengths), 64)


def test_a_looser_bound_gives_the_same_bits() -> None:
    batch = random_batch(SMALL, [16, 1, 9, 15])
    expected = batch.poisoned()
    staged(with_own_caches(batch), expected)
    for max_tokens in (16, 17, 32, 33, 64):
        out = batch.poisoned()
        one_pass(with_own_caches(batch), out, max_tokens)
        assert_same(out, expected)


def padded(batch: OnePass, sequences: int, tiles: int, tokens: int) -> OnePass:
    """The batch with empty sequences that name a live slot, tiles of no sequence, and tokens past the last one."""
    cu_seqlens, slots, has = batch.cu_seqlens, batch.slots, batch.has_initial_state
    fill = torch.full((tokens, batch.shape.nheads), torch.nan, dtype=batch.dt.dtype, device="cuda")
    return replace(
        batch,
        cu_seqlens=torch.cat([cu_seqlens, cu_seqlens[-1:].expand(sequences)]),
        cu_chunk_seqlens=torch.cat([batch.cu_chunk_seqlens, cu_seqlens[-1:].expand(sequences)]),
        last_chunk_indices=torch.cat([batch.last_chunk_indices, batch.last_chunk_indices[-1:].expand(sequences)]),
        slots=torch.cat([slots, slots[:1].expand(sequences)]),
        has_initial_state=torch.cat([has, has.new_ones(sequences)]),
        tile_sequence=torch.cat([batch.tile_sequence, batch.tile_sequence.new_full((tiles,), -1)]),
        tile_offset=torch.cat([batch.tile_offset, batch.tile_offset.new_zeros(tiles)]),
        conv_in=torch.cat([batch.conv_in, fill[:, :1].expand(tokens, batch.conv_in.shape[1])]),
        dt=torch.cat([batch.dt, fill]),
        kept=tuple(torch.cat([marks, marks.new_zeros(sequences)]) for marks in batch.kept),
    )


@pytest.mark.fault(8)
@pytest.mark.parametrize("max_tokens", [16, 32, 64])
@pytest.mark.parametrize("one_chunk", [True, False])
def test_padding_changes_nothing(max_tokens: int, one_chunk: bool) -> None:
    """Outputs, both caches and their padding are as without it, and rows past the last token stay as they were."""
    lengths = random_lengths(5, max_tokens)
    batch = random_batch(SMALL, lengths) if one_chunk else batch_with_checkpoints(SMALL, lengths)
    ours, theirs = with_own_caches(batch), with_own_caches(batch)
    longer = padded(ours, sequences=3, tiles=4, tokens=9)
    out, expected = longer.poisoned(), batch.poisoned()
    one_pass(longer, out, max_tokens)
    one_pass(theirs, expected, max_tokens)
    assert_same(out[:-9], expected)
    assert out[-9:].isnan().all()
    assert_same(whole_pool(ours.conv_state), whole_pool(theirs.conv_state))
    assert_same(whole_pool(ours.state_cache), whole_pool(theirs.state_cache))


@pytest.mark.fault(11)
def test_slots_beyond_32_bit_offsets() -> None:
    """The last slot of two caches whose slots lie more than 2^29 elements apart, by its number and from the end."""
    stride = 2**29 + 64
    near = make_one_pass(SMALL, [40], seed=random.randrange(2**31))
    expected = near.poisoned()
    begin = with_own_caches(near)
    one_pass(begin, expected, 64)
    rows = {name: getattr(near, name)[near.slots[0]] for name in ("conv_state", "state_cache")}
    far = {}
    for name, row in rows.items():
        pool = torch.empty(4 * stride + row.numel(), dtype=row.dtype, device="cuda")
        far[name] = pool.as_strided((5, *row.shape), (stride, *row.stride()))
    for slot in (4, -1):
        for name, row in rows.items():
            far[name][4] = row
        out = near.poisoned()
        one_pass(replace(near, **far, slots=torch.tensor([slot], dtype=torch.int32, device="cuda")), out, 64)
        assert_same(out, expected)
        for name in rows:
            assert_same(far[name][4], getattr(begin, name)[near.slots[0]])


@pytest.mark.fault(11)
@pytest.mark.fault(13)
@pytest.mark.parametrize("run", [lambda batch, out: one_pass(batch, out, 64), staged], ids=["one pass", "staged"])
def test_checkpoints_in_slots_beyond_32_bit_offsets(run: Callable[[OnePass, Tensor], object]) -> None:
    """Kept in the last of slots 2^29 elements apart, by its number and from the end."""
    near = make_one_pass(SMALL, [40], contexts=[100], checkpoints=[20], seed=random.randrange(2**31))
    chunks, until, slots = near.kept
    begin = with_own_caches(near)
    run(begin, near.poisoned())
    stride, row = 2**29 + 64, near.state_cache[0]
    pool = torch.empty(4 * stride + row.numel(), dtype=row.dtype, device="cuda")
    far = pool.as_strided((5, *row.shape), (stride, *row.stride()))
    first = near.slots.new_zeros(1)
    for slot in (4, -1):
        far[0], far[4] = near.state_cache[near.slots[0]], torch.nan
        conv_state = near.conv_state.clone()
        conv_state[0] = near.conv_state[near.slots[0]]
        kept = (chunks, until, torch.tensor([slot], device="cuda"))
        run(replace(near, conv_state=conv_state, state_cache=far, slots=first, kept=kept), near.poisoned())
        assert_same(far[4], begin.state_cache[slots[0]])
        assert_same(far[0], begin.state_cache[near.slots[0]])


@pytest.mark.fault(8)
@pytest.mark.fault(9)
def test_a_captured_graph_follows_other_slots_masks_and_lengths() -> None:
    """Captured once; replayed with other sequences, some of them padding that names a live slot, it equals eager."""
    static = make_one_pass(SMALL, [64, 1, 30, 64, 20], seed=random.randrange(2**31))
    nseqs, ntiles = static.slots.shape[0], static.tile_sequence.shape[0]
    for cache in (static.conv_state, static.state_cache):
        cache.copy_(torch.randn_like(cache))
    out = static.poisoned()
    one_pass(with_own_caches(static), out, 64)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        one_pass(static, out, 64)
    for lengths in ([64, 32, 8, 1, 16], [3, 50], [1], [64, 64, 40]):
        tile_sequence, tile_offset = tiles_of(lengths, "cuda")
        assert len(tile_sequence) <= ntiles
        static.tile_sequence.fill_(-1)[: len(tile_sequence)] = tile_sequence
        static.tile_offset.fill_(0)[: len(tile_offset)] = tile_offset
        static.cu_seqlens.copy_(torch.tensor([0, *lengths, *[0] * (nseqs - len(lengths))]).cumsum(0))
        static.cu_chunk_seqlens.copy_(static.cu_seqlens)
        slots = torch.randperm(static.state_cache.shape[0])[: len(lengths)]
        static.slots.copy_(torch.cat([slots, slots[:1].expand(nseqs - len(lengths))]))
        static.has_initial_state.copy_(torch.rand(nseqs) < 0.5)
        eager, expected = with_own_caches(static), static.poisoned()
        one_pass(eager, expected, 64)
        out.fill_(torch.nan)
        graph.replay()
        assert_same(out, expected)
        assert_same(static.conv_state, eager.conv_state)
        assert_same(static.state_cache, eager.state_cache)
        assert not out[: sum(lengths)].isnan().any()
        assert out[sum(lengths) :].isnan().all()


def test_opcheck() -> None:
    """PyTorch's own checks of an op: schema, mutation, fake tensors and compilation."""
    batch = make_one_pass(SMALL, [40, 7])
    for cache in (batch.conv_state, batch.state_cache):
        cache.nan_to_num_()
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_static")
    steps = (batch.dt, batch.A, SMALL.chunk_size, batch.dt_bias, True)
    torch.library.opcheck(conv_cumsum, (*batch.convolution(), *steps), test_utils=tests)
    convolved, dA_cumsum, dt_out = conv_cumsum(*batch.convolution(), *steps)
    x, B, C = batch.views(convolved)
    sequences = (batch.cu_chunk_seqlens, batch.state_cache, batch.slots, batch.has_initial_state)
    arguments = (x, B, C, dt_out, dA_cumsum, *sequences, torch.zeros_like(x), 64, batch.D)
    torch.library.opcheck(ops.one_pass_scan, arguments, test_utils=tests)
