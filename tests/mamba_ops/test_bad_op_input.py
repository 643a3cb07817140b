"""Each op refuses bad arguments by itself, for those who call it without `ssd_chunk_scan`."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from mamba_ops import ops
from mamba_ops.ops.causal_conv_tiled import causal_conv_tiled
from mamba_ops.ops.conv_cumsum import conv_cumsum
from tests.mamba_ops.batches import SMALL, assert_same, make_batch, make_cache

FIXES_THE_DEVICE = {
    "chunk_cumsum": "dt",
    "chunk_state": "x",
    "bmm_chunk": "C",
    "state_passing": "states",
    "state_passing_update": "states",
    "state_passing_indexed": "states",
    "chunk_scan": "x",
    "masked_gather": "state_cache",
    "one_pass_scan": "x",
    "state_passing_indexed, checkpoints": "states",
    "one_pass_scan, checkpoints": "x",
    "conv_checkpoint": "x",
    "causal_conv_tiled": "x",
    "conv_cumsum": "x",
}
KEEP = ("state_passing_indexed, checkpoints", "one_pass_scan, checkpoints", "conv_checkpoint")
WRITTEN = ("state_cache", "conv_state", "out")


def op_calls() -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    """A good call of every op."""
    batch = make_batch([40, 30])
    x, dt, A, B, C = (batch.inputs[name] for name in ("x", "dt", "A", "B", "C"))
    cu, last = batch.metadata.cu_chunk_seqlens, batch.metadata.last_chunk_indices
    steps = torch.zeros(3, 4, 32)
    states = torch.zeros(3, *SMALL.row)
    slots = torch.tensor([1, 2])
    cache = make_cache(4).view
    one_chunk_each = torch.zeros(2, 4, 64)
    sequences = {"cu_seqlens": batch.metadata.cu_seqlens, "slots": slots, "has_initial_state": slots > 1}
    convolution = {
        "x": torch.randn(70, 24),
        "weight": torch.randn(24, 4),
        "bias": torch.randn(24),
        **sequences,
        "conv_state": torch.randn(4, 24, 3),
        "tile_sequence": slots.int(),
        "tile_offset": slots.int(),
    }
    common = {"states": states, "dA_cumsum": steps, "last_chunk_indices": last}
    passing = {
        **common,
        "state_cache": cache,
        "read_slots": slots,
        "has_initial_state": slots > 1,
        "write_slots": slots,
    }
    one_pass = {
        "x": x,
        "B": B,
        "C": C,
        "dt_out": one_chunk_each,
        "dA_cumsum": one_chunk_each,
        "cu_chunk_seqlens": batch.metadata.cu_seqlens,
        "slots": slots,
        "has_initial_state": slots > 1,
        "state_cache": cache,
        "out": torch.zeros(70, 4, 16),
        "max_tokens": 40,
        "D": torch.zeros(4),
        "last_chunk_indices": slots.int() - 1,
    }
    kept = {"checkpoint_offsets": torch.tensor([32, 30]).int(), "checkpoint_slots": torch.tensor([0, 3])}
    return {
        "chunk_cumsum": (ops.chunk_cumsum, {"dt": dt, "A": A, "cu_chunk_seqlens": cu, "chunk_size": 32}),
        "chunk_state": (ops.chunk_state, {"B": B, "x": x, "dt_out": steps, "dA_cumsum": steps, "cu_chunk_seqlens": cu}),
        "bmm_chunk": (ops.bmm_chunk, {"C": C, "B": B, "cu_chunk_seqlens": cu, "chunk_size": 32}),
        "state_passing": (
            ops.state_passing,
            {**common, "initial_states": torch.zeros(2, *SMALL.row), "state_dtype": torch.float32},
        ),
        "state_passing_update": (
            ops.state_passing_update,
            {**common, "initial_states": torch.zeros(2, *SMALL.row), "state_cache": cache, "write_slots": slots},
        ),
        "state_passing_indexed": (ops.state_passing_indexed, passing),
        "state_passing_indexed, checkpoints": (
            ops.state_passing_indexed,
            {**passing, "checkpoint_chunks": torch.tensor([0, 2]), **kept},
        ),
        "chunk_scan": (
            ops.chunk_scan,
            {
                "cb": torch.zeros(3, 2, 32, 32),
                "x": x,
                "dt_out": steps,
                "dA_cumsum": steps,
                "C": C,
                "entering": states,
                "cu_chunk_seqlens": cu,
                "out": torch.zeros(70, 4, 16),
                "D": torch.zeros(4),
                "z": x,
            },
        ),
        "masked_gather": (ops.masked_gather, {"state_cache": cache, "slots": slots, "has_initial_state": slots > 1}),
        "one_pass_scan": (ops.one_pass_scan, one_pass),
        "one_pass_scan, checkpoints": (
            ops.one_pass_scan,
            {**one_pass, "checkpoint_chunks": torch.tensor([0, 1]), **kept},
        ),
        "conv_checkpoint": (
            ops.conv_checkpoint,
            {"x": convolution["x"], **sequences, "conv_state": convolution["conv_state"], **kept, "width": 4},
        ),
        "causal_conv_tiled": (causal_conv_tiled, convolution),
        "conv_cumsum": (
            conv_cumsum,
            {
                **convolution,
                "dt": dt,
                "A": A,
                "chunk_size": 64,
                "dt_bias": torch.zeros(4),
                "cu_chunk_seqlens": batch.metadata.cu_seqlens,
            },
        ),
    }


@pytest.mark.parametrize("op", op_calls())
def test_each_op_names_the_tensor_that_is_wrong(op: str) -> None:
    run, good = op_calls()[op]
    run(**good)
    tensors = {name: value for name, value in good.items() if isinstance(value, torch.Tensor)}
    before = copies_of_written(good)
    for name, tensor in tensors.items():
        bad = [(TypeError, tensor.to(torch.complex64)), (ValueError, tensor[None])]
        if name != FIXES_THE_DEVICE[op]:
            bad.append((ValueError, tensor.to("meta")))
        if op == "masked_gather" and name == "state_cache":  # any dtype and any number of dimensions will do
            bad = [(ValueError, torch.zeros(4, 4, 16, 32)[..., ::2])]
        for error, value in bad:
            with pytest.raises(error, match=f"^{name}: "):
                run(**{**good, name: value})
    assert_same(copies_of_written(good), before)


def copies_of_written(arguments: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: arguments[name].clone() for name in WRITTEN if name in arguments}


@pytest.mark.parametrize("op", ["one_pass_scan", "causal_conv_tiled", "conv_cumsum", "conv_checkpoint"])
def test_offsets_that_do_not_fit_the_tokens(op: str) -> None:
    """Offsets of sequences, which are those of chunks where each sequence is one."""
    run, good = op_calls()[op]
    before = copies_of_written(good)
    chunks = {"one_pass_scan": {"last_chunk_indices": None}, "conv_cumsum": {"cu_chunk_seqlens": None}}.get(op, {})
    name = "cu_chunk_seqlens" if op == "one_pass_scan" else "cu_seqlens"
    cases = [([1, 40, 70], "starts at 1"), ([0, 40, 39], "decreases to 39"), ([0, 36, 71], "ends at 71; there are 70")]
    if op == "one_pass_scan":
        cases += [([0, 41, 70], "41 tokens in sequence 0; allowed: up to 40")]
    if op == "conv_cumsum":
        cases += [([0, 5, 70], "65 tokens in sequence 1; allowed: up to 64")]
    for values, message in cases:
        with pytest.raises(ValueError, match=f"^{name}: {message}"):
            run(**{**good, **chunks, name: torch.tensor(values, dtype=torch.int32)})
    assert_same(copies_of_written(good), before)


@pytest.mark.parametrize(
    ("op", "name", "value", "message"),
    [
        ("one_pass_scan", "max_tokens", 0, "0; allowed: 1 to 64"),
        ("one_pass_scan", "max_tokens", 65, "65; allowed: 1 to 64"),
        ("one_pass_scan", "B", torch.zeros(70, 2, 257), "dstate 257; allowed: up to 256"),
        ("one_pass_scan", "B", torch.zeros(70, 3, 16), "3 groups for 4 heads"),
        ("one_pass_scan", "C", torch.zeros(70, 2, 32)[..., ::2], "stride 2 in the last dimension"),
        ("one_pass_scan", "out", torch.zeros(1, 4, 16).expand(70, 4, 16), "elements of an output may not overlap"),
        ("one_pass_scan", "D", torch.zeros(4, 32)[:, ::2], "stride 2 in the last dimension"),
        ("one_pass_scan", "state_cache", torch.zeros(4, 4, 16, 32)[..., ::2], "each slot or row must be dense"),
        ("one_pass_scan", "state_cache", torch.zeros(1, 4, 16, 16).expand(4, -1, -1, -1), "slots of 1024 elements"),
        ("causal_conv_tiled", "weight", torch.zeros(24, 10), "width 10; allowed: 2 to 9"),
        ("causal_conv_tiled", "weight", torch.zeros(24, 1), "a width of at least 2"),
        ("causal_conv_tiled", "weight", torch.zeros(24, 8)[:, ::2], "it must be contiguous"),
        ("causal_conv_tiled", "bias", torch.zeros(48)[::2], "it must be contiguous"),
        ("causal_conv_tiled", "x", torch.zeros(70, 48)[:, ::2], "stride 2 in the last dimension"),
        ("causal_conv_tiled", "conv_state", torch.zeros(4, 24, 2), "a width of 4 needs 3"),
        ("causal_conv_tiled", "conv_state", torch.zeros(4, 24, 3).half(), "dtype torch.float16"),
        ("causal_conv_tiled", "conv_state", torch.zeros(1, 24, 3).expand(4, -1, -1), "may not overlap"),
        ("causal_conv_tiled", "tile_offset", torch.zeros(3, dtype=torch.int32), "expected .ntiles=2"),
        ("conv_checkpoint", "width", 1, "1; allowed: 2 to 9"),
        ("conv_checkpoint", "width", 10, "10; allowed: 2 to 9"),
        ("conv_checkpoint", "x", torch.zeros(70, 48)[:, ::2], "stride 2 in the last dimension"),
        ("conv_checkpoint", "cu_seqlens", torch.zeros(6, dtype=torch.int32)[::2], "it must be contiguous"),
        ("conv_checkpoint", "conv_state", torch.zeros(4, 24, 2), "a width of 4 needs 3"),
        ("conv_checkpoint", "conv_state", torch.zeros(4, 24, 3).half(), "dtype torch.float16"),
        ("conv_checkpoint", "conv_state", torch.zeros(1, 24, 3).expand(4, -1, -1), "may not overlap"),
        ("conv_cumsum", "weight", torch.zeros(24, 10), "width 10; allowed: 2 to 9"),
        ("conv_cumsum", "dt", torch.zeros(69, 4), "expected .ntokens=70"),
    ],
)
def test_sizes_and_strides_that_kernels_do_not_take(op: str, name: str, value: object, message: str) -> None:
    run, good = op_calls()[op]
    before = copies_of_written(good)
    with pytest.raises((ValueError, TypeError), match=f"^{name}: .*{message}"):
        run(**{**good, name: value})
    assert_same(copies_of_written(good), before)


@pytest.mark.parametrize("op", ["chunk_cumsum", "chunk_state", "bmm_chunk", "chunk_scan"])
def test_chunk_offsets_that_do_not_fit_the_tokens(op: str) -> None:
    run, good = op_calls()[op]
    for values, message in (([0, 32, 40, 80], "40 tokens in chunk 2"), ([0, 32, 64, 71], "there are 70 tokens")):
        with pytest.raises(ValueError, match=f"^cu_chunk_seqlens: .*{message}"):
            run(**{**good, "cu_chunk_seqlens": torch.tensor(values, dtype=torch.int32)})


@pytest.mark.fault(21)
def test_wide_states_have_a_tighter_bound_where_chunks_are_passed_through() -> None:
    run, good = op_calls()["one_pass_scan"]
    wide = {"B": torch.zeros(70, 2, 256), "C": torch.zeros(70, 2, 256), "state_cache": torch.zeros(4, 4, 16, 256)}
    with pytest.raises(ValueError, match=r"^max_tokens: 40; allowed: 1 to 32"):
        run(**{**good, **wide})
    run(**{**good, **wide, "last_chunk_indices": None})


@pytest.mark.parametrize("op", ["one_pass_scan", "conv_cumsum"])
def test_chunks_of_short_sequences_that_do_not_fit(op: str) -> None:
    run, good = op_calls()[op]
    before = copies_of_written(good)
    cases = [([1, 40, 70], "starts at 1"), ([0, 40, 39], "decreases to 39"), ([0, 36, 71], "there are 70 tokens")]
    cases += [([0, 41, 70], "a chunk holds at most max_tokens = 40")] if op == "one_pass_scan" else []
    cases += [([0, 5, 70], "a chunk holds at most chunk_size = 64")] if op == "conv_cumsum" else []
    for values, message in cases:
        with pytest.raises(ValueError, match=f"^cu_chunk_seqlens: .*{message}"):
            run(**{**good, "cu_chunk_seqlens": torch.tensor(values, dtype=torch.int32)})
    assert_same(copies_of_written(good), before)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([0, 2], "2 for sequence 1; there are 2 chunks"),
        ([1, 0], "decreases to 0 at sequence 1"),
        ([0, 0], "sequences have 1 chunks in all; there are 2 with tokens"),
    ],
)
def test_last_chunks_of_short_sequences_that_do_not_fit(values: list[int], message: str) -> None:
    run, good = op_calls()["one_pass_scan"]
    before = copies_of_written(good)
    with pytest.raises(ValueError, match=f"^last_chunk_indices: {message}"):
        run(**{**good, "last_chunk_indices": torch.tensor(values, dtype=torch.int32)})
    assert_same(copies_of_written(good), before)


@pytest.mark.parametrize("op", ["state_passing", "state_passing_update", "state_passing_indexed"])
def test_last_chunks_that_do_not_exist(op: str) -> None:
    run, good = op_calls()[op]
    before = good.get("state_cache", torch.zeros(1)).clone()
    with pytest.raises(ValueError, match=r"^last_chunk_indices: 3 for sequence 1; there are 3 chunks"):
        run(**{**good, "last_chunk_indices": torch.tensor([1, 3], dtype=torch.int32)})
    assert_same(good.get("state_cache", torch.zeros(1)), before)


@pytest.mark.parametrize(
    ("op", "name"),
    [
        ("state_passing_update", "write_slots"),
        ("state_passing_indexed", "write_slots"),
        ("state_passing_indexed", "read_slots"),
        ("masked_gather", "slots"),
        ("one_pass_scan", "slots"),
        ("causal_conv_tiled", "slots"),
        ("conv_cumsum", "slots"),
        ("conv_checkpoint", "slots"),
        *((op, "checkpoint_slots") for op in KEEP),
    ],
)
@pytest.mark.parametrize("slot", [4, -5, 2**31 - 1])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_slots_out_of_range(op: str, name: str, slot: int, dtype: torch.dtype) -> None:
    run, good = op_calls()[op]
    before = copies_of_written(good)
    with pytest.raises(ValueError, match=f"^{name}: slot {slot} of sequence 1; the cache has slots -4 to 3"):
        run(**{**good, name: torch.tensor([1, slot], dtype=dtype)})
    assert_same(copies_of_written(good), before)


@pytest.mark.parametrize(
    ("op", "name"),
    [
        ("state_passing_update", "write_slots"),
        ("state_passing_indexed", "write_slots"),
        ("one_pass_scan", "slots"),
        ("causal_conv_tiled", "slots"),
        ("conv_cumsum", "slots"),
        ("conv_checkpoint", "slots"),
        *((op, "checkpoint_slots") for op in KEEP),
    ],
)
def test_slots_written_twice(op: str, name: str) -> None:
    run, good = op_calls()[op]
    before = copies_of_written(good)
    with pytest.raises(ValueError, match=f"^{name}: slot 1 is written by more than one sequence"):
        run(**{**good, name: torch.tensor([1, -3])})
    assert_same(copies_of_written(good), before)


@pytest.mark.parametrize(
    ("op", "name", "value", "message"),
    [
        (op, *case)
        for case in (
            ("checkpoint_offsets", torch.tensor([32, 30]), "dtype torch.int64; allowed: torch.int32"),
            ("checkpoint_offsets", torch.zeros(4, dtype=torch.int32)[::2], "it must be contiguous"),
            ("checkpoint_chunks", torch.zeros(4, dtype=torch.int64)[::2], "it must be contiguous"),
            ("checkpoint_slots", torch.tensor([0, 3], dtype=torch.int16), "int16; allowed: torch.int32, torch.int64"),
            ("checkpoint_slots", torch.tensor([0]), r"shape \(1,\); expected \(nseqs=2\)"),
        )
        for op in (KEEP[:2] if case[0] == "checkpoint_chunks" else KEEP)
    ],
)
def test_marks_of_checkpoints_that_kernels_do_not_take(op: str, name: str, value: torch.Tensor, message: str) -> None:
    run, good = op_calls()[op]
    before = copies_of_written(good)
    with pytest.raises((ValueError, TypeError), match=f"^{name}: .*{message}"):
        run(**{**good, name: value})
    assert_same(copies_of_written(good), before)


@pytest.mark.parametrize("op", KEEP[:2])
@pytest.mark.parametrize("name", ["checkpoint_chunks", "checkpoint_offsets", "checkpoint_slots"])
def test_what_describes_checkpoints_is_given_together(op: str, name: str) -> None:
    run, good = op_calls()[op]
    before = copies_of_written(good)
    with pytest.raises(ValueError, match=f"^{name}: None; checkpoint_chunks, _offsets and _slots are given together"):
        run(**{**good, name: None})
    assert_same(copies_of_written(good), before)


def test_checkpoints_of_sequences_that_are_one_chunk_each() -> None:
    run, good = op_calls()["one_pass_scan, checkpoints"]
    before = copies_of_written(good)
    with pytest.raises(ValueError, match=r"^checkpoint_chunks: given without last_chunk_indices"):
        run(**{**good, "last_chunk_indices": None})
    assert_same(copies_of_written(good), before)


@pytest.mark.fault(13)
@pytest.mark.parametrize("op", KEEP)
@pytest.mark.parametrize(("slot", "sequence"), [(1, 0), (2, 0), (-3, 1), (-2, 1)])
def test_checkpoints_in_the_slot_of_a_sequence(op: str, slot: int, sequence: int) -> None:
    """Its own or another's: nothing orders what two programs write there."""
    run, good = op_calls()[op]
    before = copies_of_written(good)
    slots = good["checkpoint_slots"].clone()
    slots[sequence] = slot
    with pytest.raises(ValueError, match=f"^checkpoint_slots: slot {slot % 4} of sequence {sequence} belongs to a"):
        run(**{**good, "checkpoint_slots": slots})
    assert_same(copies_of_written(good), before)


@pytest.mark.fault(13)
def test_checkpoints_in_a_slot_that_is_only_read() -> None:
    run, good = op_calls()["state_passing_indexed, checkpoints"]
    before = copies_of_written(good)
    good["read_slots"], good["has_initial_state"] = torch.tensor([1, 3]), torch.tensor([False, True])
    with pytest.raises(ValueError, match=r"^checkpoint_slots: slot 3 of sequence 1 belongs to a sequence"):
        run(**good)
    assert_same(copies_of_written(good), before)
    run(**{**good, "has_initial_state": torch.tensor([True, False])})  # a slot that nobody reads is free


@pytest.mark.fault(13)
@pytest.mark.parametrize("op", KEEP[:2])
def test_checkpoints_behind_a_chunk_of_another_sequence(op: str) -> None:
    run, good = op_calls()[op]
    before = copies_of_written(good)
    last = good["last_chunk_indices"].tolist()
    for chunks, wrong, sequence in (
        ([last[0] + 1, last[1]], last[0] + 1, 0),
        ([-1, last[1]], -1, 0),
        ([0, last[0]], last[0], 1),
        ([0, last[1] + 1], last[1] + 1, 1),
    ):
        with pytest.raises(ValueError, match=f"^checkpoint_chunks: {wrong} for sequence {sequence}, which has no such"):
            run(**{**good, "checkpoint_chunks": torch.tensor(chunks)})
    assert_same(copies_of_written(good), before)


@pytest.mark.fault(13)
def test_checkpoints_behind_the_end_of_a_sequence() -> None:
    run, good = op_calls()["conv_checkpoint"]
    before = copies_of_written(good)
    for values, wrong, sequence in (([41, 30], 41, 0), ([0, 31], 31, 1), ([70, 70], 70, 0)):
        with pytest.raises(ValueError, match=f"^checkpoint_offsets: {wrong} for sequence {sequence}, which is shorter"):
            run(**{**good, "checkpoint_offsets": torch.tensor(values, dtype=torch.int32)})
    assert_same(copies_of_written(good), before)


@pytest.mark.fault(21)
@pytest.mark.parametrize("chunk_size", [50, 8, 512])
@pytest.mark.parametrize("op", ["chunk_cumsum", "bmm_chunk", "conv_cumsum"])
def test_a_chunk_size_that_kernels_do_not_take(op: str, chunk_size: int) -> None:
    run, good = op_calls()[op]
    with pytest.raises(ValueError, match=f"^chunk_size: {chunk_size}; it must be a power of two"):
        run(**{**good, "chunk_size": chunk_size})


@pytest.mark.fault(2)
def test_several_sequences_may_not_start_from_views_of_the_cache_that_they_write() -> None:
    """On a GPU nothing orders the read of one sequence before the write of another. One sequence reads first itself."""
    op, good = op_calls()["state_passing_update"]
    cache = good["state_cache"].nan_to_num()
    before = cache.clone()
    for rows in (cache[:2], cache[1:3]):
        with pytest.raises(ValueError, match=r"^initial_states: shares memory with state_cache"):
            op(**{**good, "initial_states": rows, "state_cache": cache})
    assert_same(cache, before)
    op(**{**good, "initial_states": cache[:2], "state_cache": cache[2:], "write_slots": torch.tensor([0, 1])})
    one = {"last_chunk_indices": torch.tensor([2], dtype=torch.int32), "write_slots": torch.tensor([0])}
    op(**{**good, **one, "initial_states": cache[1:2], "state_cache": cache})
