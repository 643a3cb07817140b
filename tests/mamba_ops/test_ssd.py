"""`ssd_chunk_scan` against the FP64 recurrence, over the shapes of every model family and every mix of dtypes."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from mamba_ops import build_chunk_metadata, ssd_chunk_scan
from mamba_ops.cpu import padding
from mamba_ops.reference import ssd_reference
from tests.mamba_ops.batches import (
    DTYPES,
    FAMILIES,
    SMALL,
    Batch,
    Shape,
    assert_near,
    assert_same,
    make_batch,
    make_cache,
)


@pytest.mark.parametrize("shape", FAMILIES.values(), ids=FAMILIES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_families(shape: Shape, dtype: torch.dtype) -> None:
    batch = make_batch([shape.chunk_size + 45, 1, 0, 60], shape, dtype, strided=True)
    for state_dtype in DTYPES:
        initial = torch.randn(4, *shape.row).to(state_dtype)
        result = batch.run(initial_states=initial)
        out, final = batch.reference(initial)
        assert result.out.dtype == dtype
        assert result.final_states.dtype == state_dtype
        assert_near(result.out, out, dtype, state_dtype)
        assert_near(result.final_states, final, state_dtype)


@pytest.mark.parametrize("gate", [True, False])
@pytest.mark.parametrize("skip", [None, 1, 2])
@pytest.mark.parametrize("strided", [True, False])
@pytest.mark.parametrize("initial", [True, False])
def test_optional_arguments(gate: bool, skip: int | None, strided: bool, initial: bool) -> None:
    batch = make_batch([50, 0, 33], gate=gate, skip=skip, strided=strided)
    initial_states = torch.randn(3, *SMALL.row) if initial else None
    result = batch.run(initial_states=initial_states)
    out, final = batch.reference(initial_states)
    assert_near(result.out, out, torch.float32)
    assert_near(result.final_states, final, torch.float32)
    assert result.intermediate_states is None


@pytest.mark.parametrize("dt_limit", [(0.0, float("inf")), (0.02, 0.1), (float("-inf"), 0.05)])
@pytest.mark.parametrize("softplus", [True, False])
def test_step_size_limits(dt_limit: tuple[float, float], softplus: bool) -> None:
    batch = make_batch([70], gate=False)
    inputs = batch.inputs if softplus else {**batch.inputs, "dt": batch.inputs["dt"].abs() / 10}
    options = {"dt_limit": dt_limit, "dt_softplus": softplus}
    result = ssd_chunk_scan(**inputs, metadata=batch.metadata, **options)
    out, final = ssd_reference(**inputs, cu_seqlens=[0, 70], **options)
    assert_near(result.out, out, torch.float32)
    assert_near(result.final_states, final, torch.float32)


def test_state_dtype_is_that_of_the_initial_states_or_of_x_unless_given() -> None:
    batch = make_batch([20], dtype=torch.bfloat16)
    initial = torch.zeros(1, *SMALL.row, dtype=torch.float16)
    assert batch.run().final_states.dtype == torch.bfloat16
    assert batch.run(initial_states=initial).final_states.dtype == torch.float16
    result = batch.run(initial_states=initial, state_dtype=torch.float32, return_intermediate_states=True)
    assert result.final_states.dtype == result.intermediate_states.dtype == torch.float32


@pytest.mark.parametrize("nseqs", [0, 1, 3])
def test_a_batch_without_tokens_returns_its_initial_states(nseqs: int) -> None:
    batch = make_batch([0] * nseqs)
    initial = torch.randn(nseqs, *SMALL.row)
    result = batch.run(initial_states=initial, return_intermediate_states=True)
    assert result.out.shape == (0, SMALL.nheads, SMALL.headdim)
    assert_same(result.final_states, initial)
    assert_same(result.intermediate_states, torch.empty(0, *SMALL.row))


def test_the_output_is_made_or_written_and_tokens_beyond_the_last_chunk_are_left_alone() -> None:
    batch = make_batch([40, 30], strided=True)
    fewer = batch.metadata._replace(**build_chunk_metadata([0, 40], 32)._asdict())
    out = torch.full((70, 4, 20), -7.0, dtype=torch.bfloat16)
    result = ssd_chunk_scan(**batch.inputs, **batch.options, metadata=fewer, out=out[:, :, 2:18])
    assert result.out.data_ptr() == out[:, :, 2:18].data_ptr()
    assert_near(result.out[:40], batch.reference()[0][:40], torch.bfloat16)
    untouched = out.clone()
    untouched[:40, :, 2:18] = -7.0
    assert_same(untouched, torch.full_like(out, -7.0))
    made = ssd_chunk_scan(**batch.inputs, **batch.options, metadata=batch.metadata).out
    assert made.is_contiguous()
    assert_near(made, batch.reference()[0], torch.float32)


@pytest.mark.parametrize("group_bytes", [1, 1 << 18])
def test_chunks_taken_a_few_at_a_time(group_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As large batches are, to bound the memory of temporaries."""
    monkeypatch.setattr(padding, "GROUP_BYTES", group_bytes)
    batch = make_batch([300, 0, 64, 1], strided=True)
    out, final = batch.reference()
    result = batch.run()
    assert_near(result.out, out, torch.float32)
    assert_near(result.final_states, final, torch.float32)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_what_one_sequence_holds_reaches_no_other(poison: float) -> None:
    batch = make_batch([40, 33, 50, 1], strided=True)
    expected = batch.run(return_intermediate_states=True)
    for name in ("x", "dt", "B", "C"):
        for bad in (0, 2):
            start, end = batch.cu_seqlens[bad], batch.cu_seqlens[bad + 1]
            tokens = batch.inputs[name].clone()
            tokens[start:end] = poison
            got = replace(batch, inputs={**batch.inputs, name: tokens}).run(return_intermediate_states=True)
            others = torch.tensor([b for b in range(4) if b != bad])
            chunks = torch.isin(batch.metadata.seq_idx, others)
            assert_same(got.final_states[others], expected.final_states[others])
            assert_same(got.intermediate_states[chunks], expected.intermediate_states[chunks])
            assert_same(got.out[:start], expected.out[:start])
            assert_same(got.out[end:], expected.out[end:])


def test_padded_metadata_changes_nothing() -> None:
    batch = make_batch([40, 30])
    metadata = batch.metadata
    ends = {name: getattr(metadata, name)[-1:].expand(3) for name in metadata._fields[:3]}
    padded = metadata._replace(
        **{name: torch.cat([getattr(metadata, name), end]) for name, end in ends.items()},
        seq_idx=torch.cat([metadata.seq_idx, metadata.seq_idx.new_zeros(3)]),
    )
    expected = batch.run(return_intermediate_states=True)
    got = replace(batch, metadata=padded).run(return_intermediate_states=True)
    nchunks = metadata.seq_idx.shape[0]
    assert_same(got.out, expected.out)
    assert_same(got.final_states[:2], expected.final_states)
    assert_same(got.intermediate_states[:nchunks], expected.intermediate_states)


@pytest.mark.parametrize("tp", [2, 4, 8])
@pytest.mark.parametrize("ngroups", [1, 8])
@pytest.mark.fault(21)
def test_tensor_parallel_shards_give_their_part_of_the_whole(tp: int, ngroups: int) -> None:
    shape = Shape(nheads=8, headdim=80, dstate=96, ngroups=ngroups, chunk_size=64)
    batch = make_batch([100, 7], shape)
    whole = batch.run()
    for rank in range(tp):
        heads = slice(rank * 8 // tp, (rank + 1) * 8 // tp)
        groups = slice(rank * ngroups // tp, (rank + 1) * ngroups // tp) if ngroups >= tp else slice(None)
        shard = replace(
            batch,
            inputs={
                "x": batch.inputs["x"][:, heads],
                "dt": batch.inputs["dt"][:, heads],
                "A": batch.inputs["A"][heads],
                "B": batch.inputs["B"][:, groups],
                "C": batch.inputs["C"][:, groups],
            },
            options={
                name: value[:, heads] if name == "z" else value if name == "dt_softplus" else value[heads]
                for name, value in batch.options.items()
            },
        )
        result = shard.run()
        assert_near(result.out, whole.out[:, heads], torch.float32)
        assert_near(result.final_states, whole.final_states[:, heads], torch.float32)


@pytest.mark.fault(21)
@pytest.mark.parametrize("headdim", [1, 33, 80, 112])
@pytest.mark.parametrize("dstate", [1, 17, 96])
@pytest.mark.parametrize("chunk_size", [16, 64])
def test_sizes_that_no_block_divides(headdim: int, dstate: int, chunk_size: int) -> None:
    batch = make_batch([chunk_size + 3, 1, 29], Shape(3, headdim, dstate, 1, chunk_size))
    out, final = batch.reference()
    result = batch.run()
    assert_near(result.out, out, torch.float32)
    assert_near(result.final_states, final, torch.float32)


def states_after_chunks(batch: Batch, initial_states: torch.Tensor) -> torch.Tensor:
    """By the recurrence alone, one chunk at a time."""
    state = list(initial_states.double())
    after = []
    for owner, (start, end) in zip(
        batch.metadata.seq_idx.tolist(), pairwise(batch.metadata.cu_chunk_seqlens.tolist()), strict=True
    ):
        piece = {name: value if name == "A" else value[start:end] for name, value in batch.inputs.items()}
        steps = {name: batch.options[name] for name in ("dt_bias", "dt_softplus")}
        final = ssd_reference(**piece, **steps, cu_seqlens=[0, end - start], initial_states=state[owner][None])[1]
        state[owner] = final[0]
        after.append(final[0])
    return torch.stack(after)


@pytest.mark.fault(13)
@pytest.mark.parametrize("states", ["returned", "update", "indexed"])
@pytest.mark.parametrize(
    ("lengths", "chunk_size", "metadata"),
    [
        ([500, 700, 900], 128, {"split_at": [384, 384, 384]}),
        ([500, 700, 900], 128, {"split_at": [0, 100, 899], "context_lens": [0, 60, 128]}),
        ([5, 0, 64, 0, 1], 64, {}),
        ([100], 16, {"context_lens": [9], "split_at": [50]}),
    ],
)
def test_row_c_is_the_state_after_chunk_c(
    states: str, lengths: list[int], chunk_size: int, metadata: dict[str, list[int]]
) -> None:
    batch = make_batch(lengths, Shape(2, 8, 16, 1, chunk_size), **metadata)
    nseqs = len(lengths)
    cache = make_cache(2 * nseqs + 1, batch.shape, padding=3).view
    slots = torch.arange(nseqs).flip(0) * 2 + 1
    initial = cache[slots]
    expected = states_after_chunks(batch, initial)
    # An empty sequence may name any slot, also one that is not there.
    slots[torch.tensor(lengths) == 0] = 99
    where = {
        "returned": {"initial_states": initial},
        "update": {"initial_states": initial, "state_cache": cache, "write_slots": slots},
        "indexed": {"read_slots": slots, "state_cache": cache, "write_slots": slots},
    }
    result = batch.run(**where[states], return_intermediate_states=True)
    assert_near(result.intermediate_states, expected, torch.float32)
    for b, last in enumerate(batch.metadata.last_chunk_indices.tolist()):
        if lengths[b]:
            final = cache[slots[b]] if result.final_states is None else result.final_states[b]
            assert_same(result.intermediate_states[last], final)


@pytest.mark.fault(13)
def test_a_checkpoint_is_the_row_of_the_chunk_that_ends_there() -> None:
    batch = make_batch([500, 700, 900], Shape(2, 8, 16, 1, 128), split_at=[384, 200, 1])
    rows = batch.run(return_intermediate_states=True).intermediate_states
    ends = batch.metadata.cu_chunk_seqlens[1:].tolist()
    for b, split in enumerate([384, 200, 1]):
        start = batch.cu_seqlens[b]
        piece = {name: v if name == "A" else v[start : start + split] for name, v in batch.inputs.items()}
        steps = {name: batch.options[name] for name in ("dt_bias", "dt_softplus")}
        expected = ssd_reference(**piece, **steps, cu_seqlens=[0, split])[1][0]
        assert_near(rows[ends.index(start + split)], expected, torch.float32)
