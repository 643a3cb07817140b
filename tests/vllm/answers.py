"""What two engines answered, compared."""

from __future__ import annotations

from typing import Any

import pytest

# FP32 on both sides: what differs is the order of sums, chunk by chunk here and token by token in vLLM's CPU scan.
LOGPROB_TOLERANCE = 2e-3
Result = dict[str, Any]


def assert_same_answers(ours: Result, theirs: Result, tolerance: float = LOGPROB_TOLERANCE) -> None:
    """Equal tokens and log-probabilities, ours from prefills of which the plugin ran every one."""
    assert set(theirs["layers"]) == {"MambaMixer2"}
    assert set(ours["layers"]) == {"SnapshotFreeMixer2"}
    assert declined(ours) == {}
    assert ours["counters"]["layer_prefills"] > 0
    assert_equal_schedules(ours, theirs, tolerance)


def assert_equal_schedules(ours: Result, theirs: Result, tolerance: float = LOGPROB_TOLERANCE) -> None:
    for schedule, expected in zip(ours["schedules"], theirs["schedules"], strict=True):
        assert schedule.keys() == expected.keys()
        for name, answer in schedule.items():
            assert answer.get("tokens") == expected[name].get("tokens"), name
            assert answer.get("logprobs", []) == pytest.approx(expected[name].get("logprobs", []), rel=0, abs=tolerance)


def declined(result: Result) -> dict[str, int]:
    """Prefills that the plugin left to vLLM, by reason."""
    return {name: n for name, n in result["counters"].items() if name.startswith("declined")}
