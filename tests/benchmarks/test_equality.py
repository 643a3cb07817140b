"""What the comparison of two engines asks for, and what it makes of the answers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engine.comparison import rows, same_answer
from benchmarks.engine.scenarios import Limits, continuations, scenarios
from benchmarks.results import Results, Row

GPU = Limits(vocabulary=100352, longest=16384, budget=2048, block=528, blocks=420)
CPU = Limits(vocabulary=512, longest=512, budget=128, block=512, blocks=40)


OTHER_BLOCKS = Limits(vocabulary=131072, longest=16384, budget=2048, block=544, blocks=420)


@pytest.mark.parametrize("limits", [GPU, OTHER_BLOCKS, CPU])
def test_requests_fit_the_engine_and_are_the_same_every_time(limits: Limits) -> None:
    made = scenarios(limits, 100)
    assert made == scenarios(limits, 100)
    assert set(made) == {"short", "chunked", "mixed", "preempted"}
    arrivals = [arrival for waves in made.values() for wave in waves for arrival in wave]
    assert len(arrivals) >= 100
    for arrival in arrivals:
        assert arrival.prompt
        assert len(arrival.prompt) + arrival.max_tokens <= limits.longest
        assert all(1 <= token < limits.vocabulary for token in arrival.prompt)


@pytest.mark.parametrize("limits", [GPU, OTHER_BLOCKS])
def test_kinds_are_what_they_say(limits: Limits) -> None:
    made = scenarios(limits, 500)
    prefix = made["short"][0][0].prompt[:-1]
    assert len(prefix) % limits.block == 0
    assert all(arrival.prompt[: len(prefix)] == prefix for wave in made["short"] for arrival in wave)
    assert {len(wave) for wave in made["short"]} == {1, 2, 17, 32}
    assert all(len(arrival.prompt) >= limits.budget - 1 for wave in made["chunked"] for arrival in wave)
    assert all(any(arrival.step > 0 for arrival in wave) for wave in made["mixed"])
    sizes = []
    for wave in made["preempted"]:
        needed = sum(-(-len(arrival.prompt) // limits.block) for arrival in wave)
        grown = sum(-(-(len(arrival.prompt) + arrival.max_tokens) // limits.block) for arrival in wave)
        assert grown == needed + len(wave)  # every sequence needs one block more than it was admitted with
        sizes.append(needed)
    assert min(sizes) < limits.blocks < max(sizes)
    assert [len(wave[0].prompt) - len(prefix) for wave in continuations(limits, 3)] == [32, 32, 32]


def side(**changes: Any) -> dict[str, Any]:
    worker = {"num_cudagraph_captured": 51, "num_graphs_seen": 1}
    whole = {
        "gpu": True,
        "graphs": {"cudagraph_mode": "FULL_AND_PIECEWISE", "capture_sizes": [1, 4], "workers": [worker]},
        "answers": {"short": [[[1, 2], [-0.5, -0.25]], [[3], [-1.0]]], "preempted": [[[4], [-2.0]]]},
        "preemptions": {"preempted": 3},
        "compiles": [],
        "monitored": [True],
        "captured_while_serving": False,
        "profile": [{"calls": 36, "launches": {}}],
        "compared": [{"verified": 40, "mismatches": 0}],
        "served": [{"declined": {}}],
    }
    return copy.deepcopy({**whole, **changes})


def found(ours: dict[str, Any], stock: dict[str, Any], tolerance: float = 0.0) -> dict[str, tuple[float | None, int]]:
    return {row.case: (row.ours, row.n) for row in rows(ours, stock, "", tolerance)}


def test_equal_engines() -> None:
    expected = {"layers": (0, 40), "responses": (0, 3), "graphs": (0, 4), "compiles": (0, 3), "launches": (0, 36)}
    assert found(side(), side()) == expected
    assert [row.case for row in rows(side(), side(), "nemotron_h", 0)] == [f"{case}/nemotron_h" for case in expected]


def test_each_difference_is_counted() -> None:
    answers = {"short": [[[1, 9], [-0.5, -0.25]], [[3], [-1.001]]], "preempted": [[[4], [-2.0]]]}
    graphs = {"cudagraph_mode": "PIECEWISE", "capture_sizes": [1, 4], "workers": [{"num_cudagraph_captured": 50}]}
    ours = side(
        answers=answers,
        graphs=graphs,
        compiles=["a kernel"],
        captured_while_serving=True,
        profile=[{"calls": 36, "launches": {"aten::where": 36}}],
        compared=[{"verified": 40, "mismatches": 2}],
    )
    expected = {"layers": (2, 40), "responses": (2, 3), "graphs": (4, 4), "compiles": (1, 3), "launches": (36, 36)}
    assert found(ours, side()) == expected
    assert found(ours, side(), 0.01)["responses"] == (1, 3)


def test_what_is_not_known_yet_has_no_row() -> None:
    assert found({}, {}) == {}
    assert set(found({name: side()[name] for name in ("gpu", "graphs", "compared")}, {})) == {"layers"}


def test_answers_of_other_lengths_differ() -> None:
    assert not same_answer([[1], [-1.0]], [[1, 2], [-1.0, -1.0]], 1.0)


def test_rows_of_other_cases_stay_in_the_file(tmp_path: Path) -> None:
    row = Row("layers", "mismatches", "1", None, 0.0, None, None, None, 1000, "a note")
    assert Results.read("equality_vllm", tmp_path).rows == []
    Results("equality_vllm", [row]).write(tmp_path)
    assert Results.read("equality_vllm", tmp_path).rows == [row]
