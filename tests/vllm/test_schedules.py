"""An engine that has to arrange many requests answers the same with and without the plugin."""

from __future__ import annotations

from typing import Any

import pytest

from tests.vllm.answers import assert_equal_schedules, assert_same_answers, declined
from tests.vllm.conftest import Run
from tests.vllm.schedules import at_once, random_schedule, shared_prefixes


@pytest.mark.fault(14)
def test_random_schedules(run: Run) -> None:
    schedules = [random_schedule(seed) for seed in range(200)]
    ours = run("granite", schedules, plugin=True)
    assert_same_answers(ours, run("granite", schedules, plugin=False))
    assert any(answer.get("aborted") for schedule in ours["schedules"] for answer in schedule.values())


def test_preempted_and_resumed(run: Run) -> None:
    schedules = [at_once((120, 121, 122, 123), max_tokens=150)]
    few = {"num_gpu_blocks_override": 14, "max_model_len": 512}
    ours = run("granite", schedules, plugin=True, **few)
    assert ours["preemptions"] > 0
    assert_same_answers(ours, run("granite", schedules, plugin=False, **few))


@pytest.mark.parametrize(
    ("family", "schedules", "batched"),
    [
        ("granite", [shared_prefixes(), shared_prefixes(apart=1)], 512),
        # With blocks of 640 tokens. In the second schedule several sequences of a step have checkpoints.
        ("granite_256", [shared_prefixes((1300, 2050)), shared_prefixes((1300, 2050), (50, 300), apart=0)], 8192),
    ],
)
def test_prefix_caching_with_checkpoints(run: Run, family: str, schedules: list[Any], batched: int) -> None:
    """vLLM 0.32 for CPUs fails in this configuration, so the answers are compared with those without the cache."""
    long = {"max_model_len": 4096}
    caching = {"enable_prefix_caching": True, "max_num_batched_tokens": batched, "reset": False}
    ours = run(family, schedules, plugin=True, **long, **caching)
    assert ours["counters"]["layer_checkpoints"] > 0
    assert declined(ours) == {}
    assert all(any(answer["cached"] for answer in schedule.values()) for schedule in ours["schedules"])
    assert_equal_schedules(ours, run(family, schedules, plugin=False, **long))
