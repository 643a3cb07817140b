"""The kernels, statement by statement on the CPU, against the plain PyTorch branch and the FP64 recurrence."""

from __future__ import annotations

import math
from dataclasses import dataclass

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor
from torch.testing import assert_close

from mamba_ops import ChunkMetadata, build_chunk_metadata, cpu, ops, ssd_chunk_scan
from mamba_ops.kernels import state_passing as state_passing_kernel
from mamba_ops.ops.dispatch import runs_kernels
from mamba_ops.reference import ssd_reference
from tests.mamba_ops.checkpoints import KeptStates, kept_states

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
NAN = math.nan
# Rounding of one stored value or one factor of a product, in units of the largest value around.
EPS = {BF16: 2.0**-8, FP16: 2.0**-11, FP32: 2.0**-20}
few = settings(max_examples=25, deadline=None)


def test_ops_launch_the_kernels_here() -> None:
    assert runs_kernels(torch.empty(1))


@dataclass(repr=False)  # a failing case would print whole tensors
class Case:
    """One ragged batch with its cache; token strides, slot padding and the slots' stride are part of the case."""

    x: Tensor
    dt: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor | None
    z: Tensor | None
    dt_bias: Tensor
    metadata: ChunkMetadata
    pool: Tensor
    state_cache: Tensor
    slots: Tensor
    has_initial_state: Tensor

    def cache_in(self, pool: Tensor) -> Tensor:
        return pool.as_strided(self.state_cache.shape, self.state_cache.stride(), self.state_cache.storage_offset())


@st.composite
def cases(draw: st.DrawFn) -> Case:
    ngroups = draw(st.sampled_from([1, 2]))
    nheads = ngroups * draw(st.sampled_from([1, 2, 3]))
    headdim = draw(st.sampled_from([16, 20, 32]))
    dstate = draw(st.sampled_from([16, 24, 32]))
    chunk_size = draw(st.sampled_from([16, 32]))
    lengths = draw(st.lists(st.sampled_from([0, 1, 5, 15, 16, 17, 33, 50]), min_size=1, max_size=4))
    # The interpreter multiplies BF16 matrices as if they held integers, so only states are BF16 here.
    dtype, state_dtype = draw(st.sampled_from([FP16, FP32])), draw(st.sampled_from([BF16, FP16, FP32]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def randn(*size: int) -> Tensor:
        return torch.randn(size, generator=generator)

    ntokens, nseqs, offset = sum(lengths), len(lengths), draw(st.sampled_from([0, 3]))
    wide = randn(ntokens, nheads * headdim + 2 * ngroups * dstate + offset).to(dtype)
    x, B, C, _ = wide.split([nheads * headdim, ngroups * dstate, ngroups * dstate, offset], dim=1)
    num_slots, padding, row = nseqs + 2, draw(st.sampled_from([0, 5, 64])), nheads * headdim * dstate
    pool = torch.full((offset + num_slots * (row + padding),), NAN, dtype=state_dtype)
    state_cache = pool.as_strided(
        (num_slots, nheads, headdim, dstate), (row + padding, headdim * dstate, dstate, 1), offset
    )
    slots = torch.randperm(num_slots, generator=generator)[:nseqs] - draw(st.sampled_from([0, num_slots]))
    table = torch.full(
        (nseqs, draw(st.sampled_from([1, 4]))), 10**6, dtype=draw(st.sampled_from([torch.int32, torch.int64]))
    )
    table[:, 0] = slots
    has = torch.tensor(draw(st.lists(st.booleans(), min_size=nseqs, max_size=nseqs)))
    for slot in slots[has].tolist():
        state_cache[slot] = randn(nheads, headdim, dstate).to(state_dtype)
    return Case(
        x=x.unflatten(1, (nheads, headdim)),
        dt=randn(ntokens, nheads).to(dtype),
        A=-torch.rand(nheads, generator=generator) - 0.1,
        B=B.unflatten(1, (ngroups, dstate)),
        C=C.unflatten(1, (ngroups, dstate)),
        D=draw(st.sampled_from([None, randn(nheads), randn(nheads, headdim)])),
        z=draw(st.sampled_from([None, randn(ntokens, nheads, headdim).to(dtype)])),
        dt_bias=randn(nheads),
        metadata=build_chunk_metadata(
            [0, *torch.tensor(lengths).cumsum(0).tolist()],
            chunk_size,
            context_lens=draw(st.sampled_from([None, [7] * nseqs])),
        ),
        pool=pool,
        state_cache=state_cache,
        slots=table[:, 0],
        has_initial_state=has,
    )


def close(actual: Tensor, expected: Tensor, dtype: torch.dtype, terms: int) -> None:
    """Equal within the rounding of `terms` summands of this dtype, measured against the largest value."""
    scale = max(1.0, expected.float().abs().nan_to_num().max().item() if expected.numel() else 1.0)
    assert_close(
        actual.float(), expected.float(), rtol=0, atol=scale * EPS[dtype] * math.sqrt(terms) * 4, equal_nan=True
    )


def run(case: Case, indexed: bool) -> tuple[Tensor, Tensor]:
    """Output and whole pool after one prefill, by the indexed path or by the snapshot."""
    pool = case.pool.clone()
    cache = case.cache_in(pool)
    if indexed:
        states = {"read_slots": case.slots, "has_initial_state": case.has_initial_state}
    else:
        states = {"initial_states": ops.masked_gather(cache, case.slots, case.has_initial_state)}
    out = ssd_chunk_scan(
        case.x,
        case.dt,
        case.A,
        case.B,
        case.C,
        case.metadata,
        D=case.D,
        z=case.z,
        dt_bias=case.dt_bias,
        dt_softplus=True,
        state_cache=cache,
        write_slots=case.slots,
        out=torch.full(case.x.shape, NAN, dtype=case.x.dtype),
        **states,
    ).out
    return out, pool


@few
@given(cases())
def test_kernels_agree_with_the_fp64_recurrence(case: Case) -> None:
    out, pool = run(case, indexed=True)
    initial = cpu.masked_gather(case.state_cache, case.slots, case.has_initial_state)
    expected, final = ssd_reference(
        case.x,
        case.dt,
        case.A,
        case.B,
        case.C,
        case.metadata.cu_seqlens,
        D=case.D,
        z=case.z,
        dt_bias=case.dt_bias,
        dt_softplus=True,
        initial_states=initial,
    )
    coarser = max((case.x.dtype, case.state_cache.dtype), key=lambda dtype: EPS[dtype])
    close(out, expected, coarser, case.metadata.chunk_size)
    lengths = case.metadata.cu_seqlens.diff()
    written = case.slots[lengths > 0].long()
    close(case.cache_in(pool)[written], final[lengths > 0], coarser, case.metadata.chunk_size)


@few
@given(cases())
def test_snapshot_and_indexed_paths_give_the_same_bits(case: Case) -> None:
    for snapshot, indexed in zip(run(case, indexed=False), run(case, indexed=True), strict=True):
        assert_close(indexed, snapshot, rtol=0, atol=0, equal_nan=True)


@pytest.mark.fault(7)
@pytest.mark.fault(8)
@pytest.mark.fault(10)
@few
@given(cases())
def test_no_byte_outside_the_written_slots_changes(case: Case) -> None:
    _, pool = run(case, indexed=True)
    untouched = torch.ones_like(case.pool, dtype=torch.bool)
    case.cache_in(untouched)[case.slots[case.metadata.cu_seqlens.diff() > 0].long()] = False
    assert_close(pool[untouched], case.pool[untouched], rtol=0, atol=0, equal_nan=True)
    assert not case.cache_in(pool)[case.slots[case.metadata.cu_seqlens.diff() > 0].long()].isnan().any()


@pytest.mark.fault(8)
@few
@given(cases(), st.integers(1, 3))
def test_padded_sequences_and_chunks_are_empty(case: Case, padding: int) -> None:
    """Metadata padded to a fixed size, whose padded rows name a live slot, changes neither outputs nor pool."""
    expected = run(case, indexed=True)
    cu_seqlens, cu_chunks, last, seq_idx, chunk_size = case.metadata
    nothing = torch.zeros(padding, dtype=torch.int32)
    case.metadata = ChunkMetadata(
        torch.cat([cu_seqlens, cu_seqlens[-1:].expand(padding)]),
        torch.cat([cu_chunks, cu_chunks[-1:].expand(padding + 1)]),
        torch.cat([last, last[-1:].expand(padding)]),
        torch.cat([seq_idx, nothing, nothing[:1]]),
        chunk_size,
    )
    case.slots = torch.cat([case.slots, case.slots[:1].expand(padding)])
    case.has_initial_state = torch.cat([case.has_initial_state, torch.ones(padding, dtype=torch.bool)])
    for actual, wanted in zip(run(case, indexed=True), expected, strict=True):
        assert_close(actual, wanted, rtol=0, atol=0, equal_nan=True)


@few
@given(cases())
def test_each_stage_agrees_with_the_cpu_branch(case: Case) -> None:
    """Stage by stage, each fed with what the CPU branch made of the one before."""
    cu, last, chunk_size = case.metadata.cu_chunk_seqlens, case.metadata.last_chunk_indices, case.metadata.chunk_size
    steps = (case.dt, case.A, cu, chunk_size, case.dt_bias, True, 0.001, 0.9)
    dA_cumsum, dt_out = cpu.chunk_cumsum(*steps)
    for actual, expected in zip(ops.chunk_cumsum(*steps), (dA_cumsum, dt_out), strict=True):
        close(actual, expected, FP32, chunk_size)
    states = cpu.chunk_state(case.B, case.x, dt_out, dA_cumsum, cu)
    close(ops.chunk_state(case.B, case.x, dt_out, dA_cumsum, cu), states, case.x.dtype, chunk_size)
    cb = cpu.bmm_chunk(case.C, case.B, cu, chunk_size)
    m, k = torch.arange(chunk_size)[:, None], torch.arange(chunk_size)
    defined = ((k <= m) & (m < cu.diff()[:, None, None]))[:, None].expand_as(cb)
    close(ops.bmm_chunk(case.C, case.B, cu, chunk_size)[defined], cb[defined], FP32, case.B.shape[2])
    initial = cpu.masked_gather(case.state_cache, case.slots, case.has_initial_state)
    passed = cpu.state_passing(states, dA_cumsum, last, initial, case.state_cache.dtype)
    for actual, expected in zip(
        ops.state_passing(states, dA_cumsum, last, initial, case.state_cache.dtype), passed, strict=True
    ):
        close(actual, expected, case.state_cache.dtype, 4)


@few
@given(cases(), st.booleans())
def test_masked_gather_is_where_of_the_gather(case: Case, masked: bool) -> None:
    mask = case.has_initial_state if masked else None
    expected = case.state_cache[case.slots.long()]
    if masked:
        expected = torch.where(mask[:, None, None, None], expected, 0)
    assert_close(ops.masked_gather(case.state_cache, case.slots, mask), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.fault(7)
@pytest.mark.fault(8)
@pytest.mark.fault(9)
@pytest.mark.fault(10)
@pytest.mark.fault(13)
@settings(max_examples=50)
@given(kept_states(), st.sampled_from([64, 512]))
def test_state_passing_keeps_the_states_on_the_way(case: KeptStates, block: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state_passing_kernel, "BLOCK_SIZE", block)
        case.check()
