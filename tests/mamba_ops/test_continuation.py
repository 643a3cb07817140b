"""A sequence prefilled in pieces ends where one prefilled at once does, wherever it was cut."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mamba_ops import ssd_chunk_scan
from tests.mamba_ops.batches import (
    DTYPES,
    Batch,
    Cache,
    Shape,
    Slots,
    assert_near,
    assert_same,
    make_batch,
    make_cache,
    run_indexed,
    run_with_snapshot,
)


def in_pieces(batch: Batch, cuts: list[int], cache: Cache, aligned: bool) -> Tensor:
    """Prefill a batch of one sequence piece by piece through slot 1; each piece also equals its snapshot."""
    outs = []
    for start, end in pairwise(cuts):
        piece = batch.tokens(start, end, context_lens=[start if aligned else 0])
        slots = Slots(torch.tensor([1]), torch.tensor([1]), torch.tensor([start > 0]), [1])
        before, stock = cache.clone(), cache.clone()
        result = run_indexed(piece, cache.view, slots)
        assert_same(result, run_with_snapshot(piece, stock.view, slots))
        assert_same(cache.pages, stock.pages)
        cache.check_only_written(before, [1])
        outs.append(result.out)
    return torch.cat(outs)


@pytest.mark.fault(14)
@pytest.mark.parametrize("chunk_size", [64, 128, 256])
@pytest.mark.parametrize("split", [1, 63, 64, 65, 255, 256, 257, 499])
@pytest.mark.parametrize("aligned", [True, False])
def test_every_split_around_the_chunk_edges(chunk_size: int, split: int, aligned: bool) -> None:
    shape = Shape(2, 16, 16, 1, chunk_size)
    batch = make_batch([500], shape)
    cache = make_cache(3, shape, padding=9, live=[])
    out = in_pieces(batch, [0, split, 500], cache, aligned)
    expected, final = batch.reference()
    assert_near(out, expected, torch.float32)
    assert_near(cache.view[1], final[0], torch.float32)
    whole = batch.run()
    assert_near(out, whole.out, torch.float32)
    assert_near(cache.view[1], whole.final_states[0], torch.float32)


@pytest.mark.fault(14)
@given(
    cuts=st.lists(st.integers(0, 150), max_size=6).map(lambda inner: [0, *sorted(inner), 150]),
    aligned=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    cache_dtype=st.sampled_from(DTYPES),
    chunk_size=st.sampled_from([16, 64]),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=60)
def test_any_splits(
    cuts: list[int], aligned: bool, dtype: torch.dtype, cache_dtype: torch.dtype, chunk_size: int, seed: int
) -> None:
    torch.manual_seed(seed)
    batch = make_batch([150], Shape(2, 8, 16, 1, chunk_size), dtype)
    cache = make_cache(2, batch.shape, cache_dtype, live=[0])
    # The first piece that is not empty starts from zeros; those before it must leave the slot alone.
    out = in_pieces(batch, cuts, cache, aligned)
    expected, final = batch.reference()
    # A piece may begin with the rounded state of the one before, so roundings add up with the number of pieces.
    pieces = sum(end > start for start, end in pairwise(cuts))
    assert_near(out / pieces, expected / pieces, dtype, cache_dtype)
    assert_near(cache.view[1] / pieces, final[0] / pieces, cache_dtype)


@pytest.mark.fault(14)
@pytest.mark.parametrize("nseqs", [1, 2, 5])
def test_sequences_continue_together_at_their_own_offsets(nseqs: int) -> None:
    shape = Shape(2, 16, 16, 1, 64)
    torch.manual_seed(nseqs)
    cached = [1, 64, 65, 200, 127][:nseqs]
    new = [70, 1, 64, 63, 2][:nseqs]
    singles = [make_batch([before + after], shape) for before, after in zip(cached, new, strict=True)]
    for single in singles[1:]:
        single.inputs["A"] = singles[0].inputs["A"]
        single.options.update({name: singles[0].options[name] for name in ("D", "dt_bias")})
    cache = make_cache(nseqs + 2, shape, live=[])
    slots = torch.randperm(nseqs + 2)[:nseqs]

    outs = []
    for starts, ends in (([0] * nseqs, cached), (cached, [single.lengths[0] for single in singles])):
        pieces = [single.tokens(start, end) for single, start, end in zip(singles, starts, ends, strict=True)]
        together = make_batch([piece.lengths[0] for piece in pieces], shape, context_lens=starts)
        together.inputs = {
            name: value if name == "A" else torch.cat([piece.inputs[name] for piece in pieces])
            for name, value in singles[0].inputs.items()
        }
        together.options = {**singles[0].options, "z": torch.cat([piece.options["z"] for piece in pieces])}
        result = run_indexed(together, cache.view, Slots(slots, slots, torch.tensor(starts) > 0))
        outs.append(result.out.split(together.lengths))
    for b, single in enumerate(singles):
        expected, final = single.reference()
        assert_near(torch.cat([outs[0][b], outs[1][b]]), expected, torch.float32)
        assert_near(cache.view[slots[b]], final[0], torch.float32)


def test_a_state_that_was_moved_between_slots_continues_the_same() -> None:
    """Forking a cached prefix: several sequences read one slot and write their own."""
    shape = Shape(2, 16, 16, 1, 32)
    batch = make_batch([100], shape)
    cache = make_cache(4, shape, live=[])
    in_pieces(batch, [0, 60], cache, aligned=True)
    kept = cache.view[1].clone()
    tail = batch.tokens(60, 100)
    double = {name: value if name == "A" else torch.cat([value, value]) for name, value in tail.inputs.items()}
    options = {**tail.options, "z": torch.cat([tail.options["z"]] * 2)}
    result = ssd_chunk_scan(
        **double,
        **options,
        metadata=make_batch([40, 40], shape).metadata,
        state_cache=cache.view,
        read_slots=torch.tensor([1, 1]),
        write_slots=torch.tensor([3, 0]),
    )
    expected, final = batch.reference()
    assert_same(cache.view[1], kept)
    for b, slot in enumerate([3, 0]):
        assert_near(result.out[40 * b : 40 * (b + 1)], expected[60:], torch.float32)
        assert_near(cache.view[slot], final[0], torch.float32)
