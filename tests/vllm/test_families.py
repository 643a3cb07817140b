"""Models of five families answer the same with and without the plugin, and the plugin is what answered."""

from __future__ import annotations

from typing import Any

import pytest

from tests.vllm.answers import assert_same_answers
from tests.vllm.conftest import Run
from tests.vllm.make_model import FAMILIES
from tests.vllm.schedules import aborted_in_mid_prefill, around_edges, at_once, shared_prefixes

SEVERAL = at_once((1, 5, 63, 64, 65, 200, 300))
# The first two are the same requests; in the second the cached states are zeroed after every step.
SCHEDULES = [SEVERAL, SEVERAL, around_edges(64, 128), aborted_in_mid_prefill(), shared_prefixes((129, 256))]
ZEROED = 1


def answers(run: Run, family: str, plugin: bool) -> dict[str, Any]:
    return run(family, SCHEDULES, plugin=plugin, zero=(ZEROED,))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_cached_state_decides_tokens(run: Run, family: str) -> None:
    """Were it not so, equal tokens would say little."""
    whole, zeroed = answers(run, family, plugin=False)["schedules"][:2]
    continued = [name for name in whole if name not in ("r0", "r1")]  # of one token and of five: little to keep
    assert all(whole[name]["tokens"] != zeroed[name]["tokens"] for name in continued)


@pytest.mark.fault(14)
@pytest.mark.parametrize("family", FAMILIES)
def test_families_answer_the_same(run: Run, family: str) -> None:
    """Over chunked and mixed prefills, lengths around edges, aborts in mid-prefill, prompts that begin alike."""
    ours = answers(run, family, plugin=True)
    assert_same_answers(ours, answers(run, family, plugin=False))
    assert "the snapshot of cached states is gone" in ours["log"]
    assert ours["schedules"][3]["gone"].get("aborted")
