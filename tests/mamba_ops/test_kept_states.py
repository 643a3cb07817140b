"""Ops that keep states in the middle of sequences: what they keep, and what they refuse before they write anything."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mamba_ops import ops
from mamba_ops.ops.conv_checkpoint import conv_checkpoint
from tests.mamba_ops.kept_states import assert_inputs_are_kept, assert_one_pass_keeps_the_same, assert_states_are_kept

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.fault(13)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_convolutions_states_are_kept(dtype: torch.dtype, device: str) -> None:
    for seed in range(60):
        assert_inputs_are_kept(seed, dtype=dtype, device=device)


@pytest.mark.fault(13)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_states_between_chunks_are_kept(dtype: torch.dtype, device: str) -> None:
    for seed in range(60):
        assert_states_are_kept(seed, dtype=dtype, device=device)


@pytest.mark.fault(13)
@pytest.mark.parametrize("device", DEVICES)
def test_one_pass_keeps_the_same_states(device: str) -> None:
    for seed in range(60):
        assert_one_pass_keeps_the_same(seed, device=device, tolerance=1e-5)


def calls() -> dict[str, tuple[Any, dict[str, Any]]]:
    """Two sequences of three and two chunks, in slots 1 and 2, of which the first keeps a state in slot 4."""
    ints = {"dtype": torch.int32}
    cu, last = torch.tensor([0, 4, 8, 12, 16, 20], **ints), torch.tensor([2, 4], **ints)
    sequences = {"slots": torch.tensor([1, 2]), "has_initial_state": torch.tensor([True, False])}
    marks = {"checkpoint_offsets": torch.tensor([8, 0], **ints), "checkpoint_slots": torch.tensor([4, 1])}
    chunks = {"checkpoint_chunks": torch.tensor([1, 9])}
    cache, steps = torch.randn(6, 2, 4, 8), torch.zeros(5, 2, 16)
    x, B, C = torch.randn(20, 2, 4), torch.randn(20, 1, 8), torch.randn(20, 1, 8)
    slots = {"read_slots": sequences["slots"], "write_slots": sequences["slots"]}
    return {
        "conv_checkpoint": (
            conv_checkpoint,
            {
                "x": torch.randn(20, 5),
                "cu_seqlens": torch.tensor([0, 12, 20], **ints),
                "conv_state": torch.randn(6, 5, 3),
                **sequences,
                **marks,
                "width": 4,
            },
        ),
        "state_passing_indexed": (
            ops.state_passing_indexed,
            {
                "states": torch.randn(5, 2, 4, 8),
                "dA_cumsum": steps,
                "last_chunk_indices": last,
                "state_cache": cache,
                **slots,
                "has_initial_state": sequences["has_initial_state"],
                **chunks,
                **marks,
            },
        ),
        "one_pass_scan": (
            ops.one_pass_scan,
            {
                "x": x,
                "B": B,
                "C": C,
                "dt_out": steps,
                "dA_cumsum": steps,
                "cu_chunk_seqlens": cu,
                "state_cache": cache,
                **sequences,
                "out": torch.zeros_like(x),
                "max_tokens": 4,
                "last_chunk_indices": last,
                **chunks,
                **marks,
            },
        ),
    }


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("checkpoint_slots", [1, 1], "checkpoint_slots: slot 1 of sequence 0 belongs to a sequence"),
        ("checkpoint_slots", [-4, 1], "checkpoint_slots: slot 2 of sequence 0 belongs to a sequence"),
        ("checkpoint_slots", [6, 1], "checkpoint_slots: slot 6 of sequence 0; the cache has slots -6 to 5"),
        ("checkpoint_offsets", [8, 8], "checkpoint_(chunks|slots): "),
        ("checkpoint_offsets", [13, 0], "checkpoint_offsets: 13 for sequence 0, which is shorter"),
        ("checkpoint_chunks", [3, 9], "checkpoint_chunks: 3 for sequence 0, which has no such chunk"),
        (
            "checkpoint_chunks",
            None,
            "checkpoint_chunks: None; checkpoint_chunks, _offsets and _slots are given together",
        ),
    ],
)
@pytest.mark.parametrize("op", calls())
def test_checkpoints_that_do_not_fit_are_refused(op: str, name: str, value: list[int] | None, message: str) -> None:
    run, good = calls()[op]
    if name not in good or (name == "checkpoint_offsets" and value == [13, 0] and op != "conv_checkpoint"):
        pytest.skip("the op does not look at it")
    run(**good)
    bad = good | {name: value if value is None else torch.tensor(value, dtype=good[name].dtype)}
    before = {key: good[key].clone() for key in ("state_cache", "conv_state", "out") if key in good}
    with pytest.raises(ValueError, match=message):
        run(**bad)
    for key, tensor in before.items():
        assert torch.equal(good[key], tensor), key


def test_two_checkpoints_need_two_slots() -> None:
    run, good = calls()["conv_checkpoint"]
    both = {"checkpoint_offsets": torch.tensor([8, 8], dtype=torch.int32), "checkpoint_slots": torch.tensor([4, -2])}
    with pytest.raises(ValueError, match="checkpoint_slots: slot 4 is written by more than one sequence"):
        run(**good | both)


def test_a_sequence_that_is_known_to_be_one_chunk_keeps_no_state() -> None:
    run, good = calls()["one_pass_scan"]
    one_chunk = {"cu_chunk_seqlens": torch.tensor([0, 4, 8], dtype=torch.int32), "last_chunk_indices": None}
    steps = {name: good[name][:2] for name in ("dt_out", "dA_cumsum")}
    with pytest.raises(ValueError, match="checkpoint_chunks: given without last_chunk_indices"):
        run(**good | one_chunk | steps)
