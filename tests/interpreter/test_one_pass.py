"""The one-pass continuation, statement by statement on the CPU, against the staged kernels in the same interpreter.

Both round in the same places, but NumPy sums products of matrices in an order that depends on their sizes, so here the
two agree to the rounding of a sum, and on a GPU bit for bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor
from torch.testing import assert_close

from mamba_ops import build_chunk_metadata, ops
from mamba_ops.kernels import causal_conv_tiled as conv_kernel
from mamba_ops.kernels import chunk_cumsum as cumsum_kernel
from mamba_ops.kernels import one_pass as kernel
from mamba_ops.ops import one_pass as one_pass_op
from mamba_ops.ops.causal_conv_tiled import causal_conv_tiled
from mamba_ops.ops.conv_cumsum import conv_cumsum
from tests.mamba_ops.checkpoints import KeptScan, kept_scans

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
NAN, SENTINEL = math.nan, 7.0
few = settings(max_examples=25, deadline=None)


@dataclass(repr=False)  # a failing case would print whole tensors
class Case:
    """Sequences of few tokens, from the projection on; some are empty, and name a live slot.

    Where `last_chunk_indices` is None each is one chunk; otherwise tokens may lie on both sides of a chunk's edge.
    """

    sizes: tuple[int, int, int, int, int]  # nheads, headdim, dstate, ngroups, chunk_size
    max_tokens: int
    lengths: list[int]
    conv_in: Tensor
    dt: Tensor
    weight: Tensor
    bias: Tensor | None
    A: Tensor
    D: Tensor | None
    dt_bias: Tensor | None
    softplus: bool
    conv_pool: Tensor
    conv_state: Tensor
    state_pool: Tensor
    state_cache: Tensor
    slots: Tensor
    has_initial_state: Tensor
    cu_seqlens: Tensor
    cu_chunk_seqlens: Tensor
    last_chunk_indices: Tensor | None
    tile_sequence: Tensor
    tile_offset: Tensor

    def with_own_caches(self) -> Case:
        pools = {"conv_pool": self.conv_pool.clone(), "state_pool": self.state_pool.clone()}
        views = {
            name: pools[pool].as_strided(cache.shape, cache.stride(), cache.storage_offset())
            for name, pool, cache in (
                ("conv_state", "conv_pool", self.conv_state),
                ("state_cache", "state_pool", self.state_cache),
            )
        }
        return replace(self, **pools, **views)

    def poisoned(self) -> Tensor:
        nheads, headdim = self.sizes[:2]
        return torch.full((self.dt.shape[0], nheads, headdim), NAN, dtype=self.dt.dtype)

    def convolution(self) -> tuple[Tensor | None, ...]:
        sequences = (self.cu_seqlens, self.conv_state, self.slots, self.has_initial_state)
        return (self.conv_in, self.weight, self.bias, *sequences, self.tile_sequence, self.tile_offset)

    def views(self, convolved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        nheads, headdim, dstate, ngroups, _ = self.sizes
        x, B, C = convolved.split([nheads * headdim, ngroups * dstate, ngroups * dstate], dim=1)
        return x.unflatten(1, (nheads, headdim)), *(part.unflatten(1, (ngroups, dstate)) for part in (B, C))

    def live(self) -> Tensor:
        return torch.tensor(self.lengths) > 0

    def live_chunks(self) -> Tensor:
        return self.cu_chunk_seqlens.diff() > 0

    def histories(self) -> Tensor:
        """What the convolution looks at of its cache."""
        return self.conv_state[:, :, : self.weight.shape[1] - 1]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    ngroups = draw(st.sampled_from([1, 2]))
    nheads = ngroups * draw(st.sampled_from([1, 2, 3]))
    headdim, dstate = draw(st.sampled_from([16, 20, 32])), draw(st.sampled_from([16, 24, 32]))
    chunk_size = draw(st.sampled_from([16, 32, 64]))
    max_tokens = draw(st.sampled_from([most for most in (1, 5, 16, 17, 33, 64) if most <= chunk_size]))
    lengths = draw(
        st.lists(st.sampled_from(sorted({0, 1, 3, 8, 9, 15, 16, 17, 33, max_tokens})), min_size=1, max_size=5)
    )
    lengths = [min(length, max_tokens) for length in lengths]
    # The interpreter multiplies BF16 matrices as if they held integers, so only states are BF16 here.
    dtype, state_dtype = draw(st.sampled_from([FP16, FP32])), draw(st.sampled_from([BF16, FP16, FP32]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def randn(*size: int, dtype: torch.dtype = FP32) -> Tensor:
        return torch.randn(size, generator=generator).to(dtype)

    nseqs, ntokens, offset = len(lengths), sum(lengths) + draw(st.sampled_from([0, 4])), draw(st.sampled_from([0, 3]))
    inner, width = nheads * headdim, draw(st.sampled_from([2, 3, 4, 5]))
    conv_dim, num_slots = inner + 2 * ngroups * dstate, nseqs + 2
    has = torch.tensor(draw(st.lists(st.booleans(), min_size=nseqs, max_size=nseqs)))
    order = torch.randperm(num_slots, generator=generator)
    slots = order[:nseqs].clone()

    def cache(row: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Slots of NaN, but for those that a sequence is continued from, with sentinels between them."""
        stride = row + draw(st.sampled_from([0, 5, 64]))
        pool = torch.full((offset + num_slots * stride,), SENTINEL, dtype=dtype)
        rows = pool.as_strided((num_slots, row), (stride, 1), offset)
        rows[:] = NAN
        rows[slots[has]] = randn(int(has.sum()), row, dtype=dtype)
        return pool, rows

    # A slot may have room for more tokens than the convolution looks at.
    room = width - 1 + draw(st.sampled_from([0, 2]))
    conv_pool, conv_rows = cache(conv_dim * room, dtype)
    layout = draw(st.booleans())
    conv_state = (
        conv_rows.unflatten(1, (room, conv_dim)).transpose(1, 2) if layout else conv_rows.unflatten(1, (-1, room))
    )
    state_pool, state_rows = cache(inner * dstate, state_dtype)
    for row, length in enumerate(lengths):
        if length == 0:  # padding names a slot that another sequence owns, and says that it is to be read
            slots[row], has[row] = order[draw(st.integers(0, num_slots - 1))], True
    table = torch.full(
        (nseqs, draw(st.sampled_from([1, 4]))), 10**6, dtype=draw(st.sampled_from([torch.int32, torch.int64]))
    )
    table[:, 0] = slots - draw(st.sampled_from([0, num_slots]))
    tiles = [
        (row, tile) for row, length in enumerate(lengths) for tile in range(-(-length // conv_kernel.BLOCK_TOKENS))
    ]
    tiles += [(-1, 0)] * draw(st.sampled_from([0, 2]))
    if not tiles:
        tiles = [(-1, 0)]
    sequence, tile = torch.tensor(tiles, dtype=torch.int32).T.contiguous()
    _, conv_in, dt = randn(ntokens, offset + conv_dim + nheads, dtype=dtype).split([offset, conv_dim, nheads], dim=1)
    conv_in[sum(lengths) :] = NAN
    dt[sum(lengths) :] = NAN
    softplus = draw(st.booleans())
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    cu_chunk_seqlens, last_chunk_indices = cu_seqlens, None
    if draw(st.booleans()):
        before_edge = st.sampled_from([0, 1, 2, 7, chunk_size // 2])
        contexts = [chunk_size - draw(before_edge) for _ in lengths]
        metadata = build_chunk_metadata(cu_seqlens.tolist(), chunk_size, contexts)
        cu_chunk_seqlens, last_chunk_indices = metadata.cu_chunk_seqlens, metadata.last_chunk_indices
    return Case(
        sizes=(nheads, headdim, dstate, ngroups, chunk_size),
        max_tokens=max_tokens,
        lengths=lengths,
        conv_in=conv_in,
        dt=dt if softplus else dt.abs(),
        weight=randn(conv_dim, width, dtype=dtype),
        bias=draw(st.sampled_from([None, randn(conv_dim, dtype=dtype)])),
        A=-torch.rand(nheads, generator=generator) - 0.1,
        D=draw(st.sampled_from([None, randn(nheads), randn(nheads, headdim)])),
        dt_bias=draw(st.sampled_from([None, randn(nheads)])) if softplus else None,
        softplus=softplus,
        conv_pool=conv_pool,
        conv_state=conv_state,
        state_pool=state_pool,
        state_cache=state_rows.unflatten(1, (nheads, headdim, dstate)),
        slots=table[:, 0],
        has_initial_state=has,
        cu_seqlens=cu_seqlens,
        cu_chunk_seqlens=cu_chunk_seqlens,
        last_chunk_indices=last_chunk_indices,
        tile_sequence=sequence,
        tile_offset=tile,
    )


def one_pass(case: Case, out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    chunk_size = case.sizes[4]
    chunks = None if case.last_chunk_indices is None else case.cu_chunk_seqlens
    results = conv_cumsum(*case.convolution(), case.dt, case.A, chunk_size, case.dt_bias, case.softplus, chunks)
    convolved, dA_cumsum, dt_out = results
    x, B, C = case.views(convolved)
    sequences = (case.cu_chunk_seqlens, case.state_cache, case.slots, case.has_initial_state)
    bound = (case.max_tokens, case.D, case.last_chunk_indices)
    ops.one_pass_scan(x, B, C, dt_out, dA_cumsum, *sequences, out, *bound)
    return results


def staged(case: Case, out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The staged ops, whose empty chunks come last: where each sequence is a chunk, only those that have tokens."""
    chunk_size, slots, has, last = case.sizes[4], case.slots, case.has_initial_state, case.last_chunk_indices
    cu = torch.cat([case.cu_chunk_seqlens[:1], case.cu_chunk_seqlens[1:][case.live_chunks()]])
    if last is None:
        slots, has = slots[case.live()], has[case.live()]
        last = torch.arange(len(slots), dtype=torch.int32)
    convolved = causal_conv_tiled(*case.convolution())
    x, B, C = case.views(convolved)
    dA_cumsum, dt_out = ops.chunk_cumsum(case.dt, case.A, cu, chunk_size, case.dt_bias, case.softplus)
    states = ops.chunk_state(B, x, dt_out, dA_cumsum, cu)
    entering = ops.state_passing_indexed(states, dA_cumsum, last, case.state_cache, slots, has, slots)
    ops.chunk_scan(ops.bmm_chunk(C, B, cu, chunk_size), x, dt_out, dA_cumsum, C, entering, cu, out, case.D)
    return convolved, dA_cumsum, dt_out


def assert_same(actual: Tensor, expected: Tensor) -> None:
    assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def assert_agrees_with_stages(case: Case) -> Case:
    ours, theirs = case.with_own_caches(), case.with_own_caches()
    out, expected = case.poisoned(), case.poisoned()
    convolved, *steps = one_pass(ours, out)
    convolved_in_stages, *steps_in_stages = staged(theirs, expected)
    ntokens = sum(case.lengths)
    assert_same(convolved[:ntokens], convolved_in_stages[:ntokens])
    for got, want in zip(steps, steps_in_stages, strict=True):
        assert_same(got[case.live_chunks()], want)
    assert_same(ours.conv_pool, theirs.conv_pool)
    for got, want in ((out, expected), (ours.state_pool, theirs.state_pool)):
        # FP32 sums in another order, and then perhaps another rounding: one step of the dtype, of the largest value.
        largest = want.float().nan_to_num().abs().max().item() if want.numel() else 0.0
        step = max(torch.finfo(got.dtype).eps, torch.finfo(case.dt.dtype).eps * 0.25, 2.0**-20)
        assert_close(got.float(), want.float(), rtol=0, atol=2 * step * max(1.0, largest), equal_nan=True)
    return ours


@few
@given(cases())
def test_one_pass_agrees_with_the_stages(case: Case) -> None:
    assert_agrees_with_stages(case)


@pytest.mark.fault(21)
@few
@given(cases(), st.sampled_from([16, 32]), st.sampled_from([16, 64]), st.sampled_from([1, 2, 8]))
def test_blocks_of_any_size(case: Case, headdim: int, channels: int, heads: int) -> None:
    """More channels, heads or dimensions of a head than a block has: every block and every tail."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "BLOCK_HEADDIM", headdim)
        patch.setattr(conv_kernel, "BLOCK_CHANNELS", channels)
        patch.setattr(cumsum_kernel, "block_heads", lambda *_: heads)
        assert_agrees_with_stages(case)


@pytest.mark.fault(21)
@few
@given(cases(), st.integers(1, 3))
def test_several_heads_in_a_program(case: Case, heads: int) -> None:
    nheads, _, _, ngroups, _ = case.sizes
    heads = math.gcd(heads, nheads // ngroups)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(one_pass_op, "heads_of_a_program", lambda *_: heads)
        assert_agrees_with_stages(case)


@pytest.mark.fault(7)
@pytest.mark.fault(8)
@pytest.mark.fault(9)
@pytest.mark.fault(10)
@few
@given(cases())
def test_no_byte_outside_the_written_slots_changes(case: Case) -> None:
    """Nor is anything read that is not a sequence's: what nobody owns is NaN, and no output is."""
    ours, out = case.with_own_caches(), case.poisoned()
    one_pass(ours, out)
    ntokens = sum(case.lengths)
    assert not out[:ntokens].isnan().any()
    assert out[ntokens:].isnan().all()
    for cache, pool, before in (
        (case.state_cache, ours.state_pool, case.state_pool),
        (case.histories(), ours.conv_pool, case.conv_pool),
    ):
        owned = torch.zeros_like(pool, dtype=torch.bool)
        owned.as_strided(cache.shape, cache.stride(), cache.storage_offset())[case.slots[case.live()].long()] = True
        assert_same(pool[~owned], before[~owned])
        assert not pool[owned].isnan().any()


@pytest.mark.fault(8)
@few
@given(cases(), st.integers(1, 3))
def test_padding_changes_nothing(case: Case, padding: int) -> None:
    """Empty sequences at the end that name a live slot, and tiles of no sequence."""
    longer, shorter = case.with_own_caches(), case.with_own_caches()
    longer.cu_seqlens = torch.cat([case.cu_seqlens, case.cu_seqlens[-1:].expand(padding)])
    longer.cu_chunk_seqlens = torch.cat([case.cu_chunk_seqlens, case.cu_chunk_seqlens[-1:].expand(padding)])
    if case.last_chunk_indices is not None:
        last = case.last_chunk_indices
        longer.last_chunk_indices = torch.cat([last, last[-1:].expand(padding)])
    longer.slots = torch.cat([case.slots, case.slots[:1].expand(padding)])
    longer.has_initial_state = torch.cat([case.has_initial_state, torch.ones(padding, dtype=torch.bool)])
    longer.tile_sequence = torch.cat([case.tile_sequence, case.tile_sequence.new_full((padding,), -1)])
    longer.tile_offset = torch.cat([case.tile_offset, case.tile_offset.new_zeros(padding)])
    out, expected = case.poisoned(), case.poisoned()
    one_pass(longer, out)
    one_pass(shorter, expected)
    assert_same(out, expected)
    assert_same(longer.conv_pool, shorter.conv_pool)
    assert_same(longer.state_pool, shorter.state_pool)


@pytest.mark.fault(7)
@pytest.mark.fault(8)
@pytest.mark.fault(9)
@pytest.mark.fault(10)
@pytest.mark.fault(13)
@few
@given(kept_scans(dtypes=(FP16, FP32)), st.sampled_from([16, 64]))
def test_keeps_the_states_on_the_way(case: KeptScan, headdim: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "BLOCK_HEADDIM", headdim)
        case.check()
