"""Bad input: the error names the argument and says what came, and nothing has been written by then."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from mamba_ops import build_chunk_metadata, ssd_chunk_scan
from tests.mamba_ops.batches import SMALL, Shape, assert_same, make_batch, make_cache

Arguments = dict[str, Any]


def arguments() -> Arguments:
    """A good call in the indexed form, all optional arguments there."""
    batch = make_batch([40, 30, 0])
    return {
        **batch.inputs,
        **batch.options,
        "metadata": batch.metadata,
        "state_cache": make_cache(6, padding=4).view,
        "read_slots": torch.tensor([3, 5, 0]),
        "write_slots": torch.tensor([3, 5, 0]),
        "has_initial_state": torch.tensor([True, True, False]),
        "out": torch.full((70, SMALL.nheads, SMALL.headdim), -3.0),
    }


def metadata(**fields: list[int]) -> Callable[[Arguments], Any]:
    """The good metadata with these entries."""
    return lambda good: good["metadata"]._replace(
        **{name: torch.tensor(values, dtype=torch.int32) for name, values in fields.items()}
    )


STATIC = [
    ("x", lambda good: good["x"].double(), TypeError, r"dtype torch\.float64; allowed: torch\.float16"),
    ("x", lambda good: good["x"].flatten(1), ValueError, r"shape \(70, 64\); expected \(ntokens, nheads, headdim\)"),
    ("x", lambda good: good["x"].mT.contiguous().mT, ValueError, "stride 4 in the last dimension"),
    ("dt", lambda good: good["dt"][:-1], ValueError, r"shape \(69, 4\); expected \(ntokens=70, nheads=4\)"),
    ("dt", lambda good: [[1.0]], TypeError, "got list; expected a Tensor"),
    ("dt", lambda good: good["dt"].long(), TypeError, r"dtype torch\.int64"),
    ("dt", lambda good: good["dt"].to("meta"), ValueError, "on meta; the other tensors are on cpu"),
    ("A", lambda good: good["A"].bfloat16(), TypeError, r"dtype torch\.bfloat16; allowed: torch\.float32"),
    ("A", lambda good: good["A"][:3], ValueError, r"shape \(3,\); expected \(nheads=4\)"),
    ("B", lambda good: good["B"].bfloat16(), TypeError, r"dtype torch\.bfloat16; allowed: torch\.float32"),
    ("B", lambda good: torch.zeros(70, 3, 16), ValueError, "3 groups for 4 heads; ngroups must divide nheads"),
    ("B", lambda good: good["B"].mT.contiguous().mT, ValueError, "stride 2 in the last dimension"),
    ("C", lambda good: good["C"][..., :-1], ValueError, r"shape \(70, 2, 15\); expected .*dstate=16"),
    ("C", lambda good: good["C"].to("meta"), ValueError, "on meta"),
    ("D", lambda good: torch.zeros(5), ValueError, r"shape \(5,\); expected \(nheads=4\)"),
    ("D", lambda good: torch.zeros(4, 15), ValueError, r"shape \(4, 15\); expected \(nheads=4, headdim=16\)"),
    ("D", lambda good: torch.zeros(16, 4).mT, ValueError, "stride 4 in the last dimension"),
    ("z", lambda good: good["z"][:, :2], ValueError, r"shape \(70, 2, 16\)"),
    ("z", lambda good: good["z"].mT.contiguous().mT, ValueError, "stride 4 in the last dimension"),
    ("dt_bias", lambda good: torch.zeros(3), ValueError, r"shape \(3,\)"),
    ("dt_limit", lambda good: (1.0, 0.5), ValueError, "must not exceed"),
    ("dt_limit", lambda good: (float("nan"), 0.5), ValueError, "must not exceed"),
    ("out", lambda good: good["out"][:-1], ValueError, r"shape \(69, 4, 16\)"),
    ("out", lambda good: good["out"].int(), TypeError, r"dtype torch\.int32"),
    ("out", lambda good: torch.zeros(70, 1, 16).expand(70, 4, 16), ValueError, "may not overlap"),
    ("out", lambda good: torch.zeros(200).as_strided((70, 4, 16), (1, 16, 1)), ValueError, "may not overlap"),
    ("out", lambda good: good["out"].to("meta"), ValueError, "on meta"),
    ("state_cache", lambda good: good["state_cache"].double(), TypeError, r"dtype torch\.float64"),
    ("state_cache", lambda good: good["state_cache"].to("meta"), ValueError, "on meta"),
    ("state_cache", lambda good: good["state_cache"][:, :3], ValueError, r"expected \(num_slots, nheads=4"),
    ("state_cache", lambda good: torch.zeros(6, 4, 16, 20)[..., :16], ValueError, "each slot or row must be dense"),
    ("state_cache", lambda good: torch.zeros(6, 16, 4, 16).transpose(1, 2), ValueError, "must be dense"),
    ("state_cache", lambda good: torch.zeros(1, 4, 16, 16).expand(6, 4, 16, 16), ValueError, "would overlap"),
    ("state_cache", lambda good: None, ValueError, "missing; write_slots was given"),
    ("read_slots", lambda good: good["read_slots"].float(), TypeError, r"dtype torch\.float32; allowed: torch\.int32"),
    ("read_slots", lambda good: good["read_slots"][:2], ValueError, r"shape \(2,\); expected \(nseqs=3\)"),
    ("write_slots", lambda good: good["write_slots"].short(), TypeError, r"dtype torch\.int16"),
    ("write_slots", lambda good: good["write_slots"][:, None], ValueError, r"shape \(3, 1\)"),
    ("write_slots", lambda good: None, ValueError, "missing; state_cache was given"),
    ("has_initial_state", lambda good: good["read_slots"], TypeError, r"dtype torch\.int64; allowed: torch\.bool"),
    ("has_initial_state", lambda good: torch.tensor([True]), ValueError, r"shape \(1,\)"),
    ("initial_states", lambda good: torch.zeros(3, 4, 16, 16), ValueError, "given beside read_slots"),
    ("state_dtype", lambda good: torch.float64, TypeError, r"torch\.float64; allowed"),
    ("state_dtype", lambda good: torch.bfloat16, TypeError, "with a state_cache it is that of the cache"),
    (
        "metadata",
        lambda good: good["metadata"]._replace(last_chunk_indices=torch.tensor([1, 2, 2])),
        TypeError,
        r"\.last_chunk_indices: dtype torch\.int64",
    ),
    (
        "metadata",
        lambda good: good["metadata"]._replace(cu_chunk_seqlens=torch.zeros(9, dtype=torch.int32)),
        ValueError,
        r"\.cu_chunk_seqlens: shape \(9,\)",
    ),
    (
        "metadata",
        lambda good: good["metadata"]._replace(seq_idx=good["metadata"].seq_idx.to("meta")),
        ValueError,
        r"\.seq_idx: on meta",
    ),
]  # fmt: skip

VALUES = [
    ("read_slots", lambda good: torch.tensor([3, 6, 0]), "slot 6 of sequence 1"),
    ("read_slots", lambda good: torch.tensor([-7, 5, 0]), "slot -7 of sequence 0"),
    ("read_slots", lambda good: torch.tensor([5, 5, 0]), "slot 5 of sequence 0 is written by another sequence"),
    ("read_slots", lambda good: torch.tensor([-1, 5, 0]), "slot 5 of sequence 0 is written by another sequence"),
    ("write_slots", lambda good: torch.tensor([3, 6, 0]), "slot 6 of sequence 1"),
    ("write_slots", lambda good: torch.tensor([3, -7, 0]), "slot -7 of sequence 1"),
    ("write_slots", lambda good: torch.tensor([5, 5, 0]), "slot 5 is written by more than one sequence"),
    ("write_slots", lambda good: torch.tensor([5, -1, 0]), "slot 5 is written by more than one sequence"),
    ("cu_chunk_seqlens", metadata(cu_chunk_seqlens=[1, 32, 40, 70]), "starts at 1"),
    ("cu_chunk_seqlens", metadata(cu_chunk_seqlens=[0, 32, 31, 62]), "decreases to 31 at chunk 1"),
    ("cu_chunk_seqlens", metadata(cu_chunk_seqlens=[0, 32, 65, 70]), "33 tokens in chunk 1"),
    ("cu_chunk_seqlens", metadata(cu_chunk_seqlens=[0, 0, 32, 64]), "32 tokens in chunk 1, after an empty chunk"),
    ("cu_chunk_seqlens", metadata(cu_chunk_seqlens=[0, 32, 60, 71]), "ends at 71; there are 70 tokens"),
    ("last_chunk_indices", metadata(last_chunk_indices=[1, 0, 2]), "decreases to 0 at sequence 1"),
    ("last_chunk_indices", metadata(last_chunk_indices=[1, 3, 3]), "3 for sequence 1; there are 3 chunks"),
    ("last_chunk_indices", metadata(last_chunk_indices=[-2, 1, 2]), "-2 for sequence 0"),
]


def poisoned_call(name: str, change: Callable[[Arguments], Any]) -> tuple[Arguments, torch.Tensor, torch.Tensor]:
    call = arguments()
    written = call["out"], call["state_cache"]
    call["metadata" if "chunk" in name else name] = change(call)
    return call, *written


@pytest.mark.parametrize(("name", "change", "error", "message"), STATIC)
def test_static_errors(name: str, change: Callable[[Arguments], Any], error: type[Exception], message: str) -> None:
    call, out, cache = poisoned_call(name, change)
    before = cache.clone()
    if name == "state_dtype" and call[name] == torch.float64:
        for state in ("state_cache", "read_slots", "write_slots", "has_initial_state"):
            del call[state]
    with pytest.raises(error, match=f"^{name}.*{message}"):
        ssd_chunk_scan(**call)
    assert_same(cache, before)
    assert_same(out, torch.full_like(out, -3.0))


@pytest.mark.parametrize(("name", "change", "message"), VALUES)
def test_value_errors(name: str, change: Callable[[Arguments], Any], message: str) -> None:
    call, out, cache = poisoned_call(name, change)
    before = cache.clone()
    with pytest.raises(ValueError, match=f"^{name}: {message}"):
        ssd_chunk_scan(**call)
    assert_same(cache, before)
    assert_same(out, torch.full_like(out, -3.0))


@pytest.mark.parametrize("missing", ["state_cache", "read_slots"])
def test_states_that_name_something_that_is_not_there(missing: str) -> None:
    call = {**arguments(), missing: None}
    if missing == "state_cache":
        call["write_slots"] = None
    with pytest.raises(ValueError, match="state_cache: missing" if missing == "state_cache" else "has_initial_state"):
        ssd_chunk_scan(**call)


@pytest.mark.fault(21)
@pytest.mark.parametrize("chunk_size", [50, 8, 512])
def test_a_chunk_size_that_kernels_do_not_take(chunk_size: int) -> None:
    call = arguments()
    call["metadata"] = call["metadata"]._replace(chunk_size=chunk_size)
    with pytest.raises(ValueError, match=f"^chunk_size: {chunk_size}; it must be a power of two, one of 16, 32, 64"):
        ssd_chunk_scan(**call)


@pytest.mark.parametrize("name", ["x", "dt", "B", "C", "z", "out"])
def test_token_strides_beyond_what_kernels_reach(name: str) -> None:
    call = arguments()
    shape = call[name].shape
    dense = torch.empty(shape).stride()
    # Memory that nobody touches is never committed.
    call[name] = torch.empty_strided(shape, (1 << 22, *dense[1:]))
    with pytest.raises(ValueError, match=f"^{name}: token stride 4194304; it must be less than 4194304"):
        ssd_chunk_scan(**call)


def test_mixed_devices_are_an_error_that_names_both() -> None:
    for name in ("dt", "A", "B", "C", "D", "z", "dt_bias", "state_cache", "read_slots", "write_slots"):
        call = arguments()
        call[name] = call[name].to("meta")
        with pytest.raises(ValueError, match=f"^{name}: on meta; the other tensors are on cpu"):
            ssd_chunk_scan(**call)


def test_slots_that_are_not_used_may_hold_anything() -> None:
    """The other side of the checks: what an empty sequence or a fresh one names is not looked at."""
    batch = make_batch([40, 0, 30])
    cache = make_cache(4).view
    ssd_chunk_scan(
        **batch.inputs,
        metadata=batch.metadata,
        state_cache=cache,
        read_slots=torch.tensor([99, 99, 1]),
        has_initial_state=torch.tensor([False, True, True]),
        write_slots=torch.tensor([0, 0, 1]),
    )


def test_good_shapes_at_the_limits_are_taken() -> None:
    shape = Shape(1, 1, 1, 1, 256)
    batch = make_batch([1], shape)
    ssd_chunk_scan(**batch.inputs, metadata=build_chunk_metadata([0, 1], 256))
    # The stride of a dimension of one element says nothing.
    x = torch.zeros(1).as_strided((1, 1, 1), (1 << 30, 5, 7))
    ssd_chunk_scan(**{**batch.inputs, "x": x}, metadata=batch.metadata)
