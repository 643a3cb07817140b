"""An engine that has to arrange many requests answers the same with and without the plugin."""

from __future__ import annotations

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


def test_prefix_caching_with_checkpoints(run: Run) -> None:
    """vLLM 0.32 for CPUs fails in this configuration, so the answers are compared with those without the cache."""
    caching = {"enable_prefix_caching": True, "max_num_batched_tokens": 512}
    ours = run("granite", [shared_prefixes()], plugin=True, reset=False, **caching)
    assert ours["counters"]["layer_checkpoints"] > 0
    assert declined(ours) == {}
    assert any(answer["cached"] for answer in ours["schedules"][0].values())
    assert_equal_schedules(ours, run("granite", [shared_prefixes()], plugin=False))
