"""Rows of a soak: what counts as a difference of the two engines."""

from __future__ import annotations

from typing import Any

from benchmarks.engine.soak_comparison import rows
from benchmarks.soak import failures


def side(*compiles: str) -> dict[str, Any]:
    return {
        "answers": [[[1, 2], [-0.5, -0.25]]],
        "sleeps": 3,
        "dropped": [0],
        "preemptions": 2,
        "aborted": {"waiting": 1},
        "compiles": list(compiles),
        "monitored": [True],
        "served": [{"layer_prefills": 4, "layer_checkpoints": 1, "declined": {}}],
        "memory": [{"allocated": 5}] * 3,
    }


def test_what_both_engines_compile_is_no_difference() -> None:
    made = rows(side("sampler", "sampler"), side("sampler", "sampler", "ssd"), 0)
    (row,) = (row for row in made if row.case == "compiles")
    assert (row.stock, row.ours) == (1, 0)
    assert "both engines: sampler, sampler" in row.note
    assert failures(made) == []


def test_what_only_ours_compiles_is_named() -> None:
    made = rows(side("sampler", "conv", "sampler"), side("sampler"), 0)
    (row,) = (row for row in made if row.case == "compiles")
    assert (row.stock, row.ours) == (0, 2)
    assert "conv" in row.note
    assert failures(made) == ["compiles: 2"]
