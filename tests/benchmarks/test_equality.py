"""What the comparison of two engines asks for, and what it makes of the answers."""

from __future__ import annotations

import copy
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import triton

from benchmarks.engine.cache_blocks import blocks_for, groups
from benchmarks.engine.comparison import control_rows, failures, rows, same_answer
from benchmarks.engine.held_choices import in_order, without_combo_kernels
from benchmarks.engine.scenarios import Limits, continuations, scenarios
from benchmarks.models import granite, nemotron_h
from benchmarks.results import Results, Row

GRANITE = Limits(vocabulary=100352, longest=16384, budget=2048, block=528, blocks=427, groups=10)
NEMOTRON_H = Limits(vocabulary=131072, longest=16384, budget=2048, block=1040, blocks=128, groups=3)
CPU = Limits(vocabulary=512, longest=512, budget=128, block=512, blocks=40, groups=3)
CONFIGS = {
    "granite": {"layer_types": granite(40)[1]["layer_types"]},
    "nemotron_h": {"hybrid_override_pattern": nemotron_h(20)[1]["hybrid_override_pattern"]},
}


@pytest.mark.parametrize("limits", [GRANITE, NEMOTRON_H, CPU])
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


@pytest.mark.parametrize("limits", [GRANITE, NEMOTRON_H])
def test_kinds_are_what_they_say(limits: Limits) -> None:
    made = scenarios(limits, 500)
    prefix = made["short"][0][0].prompt[:-1]
    assert len(prefix) % limits.block == 0
    assert all(arrival.prompt[: len(prefix)] == prefix for wave in made["short"] for arrival in wave)
    assert {len(wave) for wave in made["short"]} == {1, 2, 17, 32}
    assert all(len(arrival.prompt) >= limits.budget - 1 for wave in made["chunked"] for arrival in wave)
    assert all(any(arrival.step > 0 for arrival in wave) for wave in made["mixed"])
    assert [len(wave[0].prompt) - len(prefix) for wave in continuations(limits, 3)] == [32, 32, 32]


@pytest.mark.parametrize("limits", [GRANITE, NEMOTRON_H])
def test_a_full_cache_has_no_room_for_the_answers(limits: Limits) -> None:
    """Prompts just fit, and their answers do not, so that vLLM preempts; and none is answered before all are read."""
    usable = limits.blocks - 1

    def held(tokens: int) -> int:
        return -(-tokens // limits.block) + limits.groups - 1

    for wave in scenarios(limits, 0)["preempted"]:
        prompts = list(itertools.accumulate(held(len(arrival.prompt)) for arrival in wave))
        admitted = wave[: sum(total <= usable for total in prompts)]
        assert sum(held(len(arrival.prompt) + arrival.max_tokens) for arrival in admitted) > usable
        steps_half_full = 2 * sum(len(arrival.prompt) for arrival in admitted) // limits.budget
        for arrival in admitted:
            assert held(len(arrival.prompt) + steps_half_full) == held(len(arrival.prompt))
            assert arrival.max_tokens > steps_half_full


@pytest.mark.parametrize(("family", "limits"), [("granite", GRANITE), ("nemotron_h", NEMOTRON_H)])
def test_blocks_follow_from_the_layers(family: str, limits: Limits, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[family]))
    assert groups(CONFIGS[family]) == limits.groups
    assert blocks_for(str(tmp_path), 4 / 3) == limits.blocks


def test_versions_of_transformers_spell_layers_in_their_own_way() -> None:
    kinds = ["linear_attention", "mlp", "linear_attention", "full_attention", "mlp"]
    assert groups({"layers_block_type": kinds}) == groups({"hybrid_override_pattern": "M-M*-"}) == 3
    assert groups({"num_hidden_layers": 4}) == 2


@pytest.mark.parametrize(("chunk_size", "least"), [(256, 2), (128, 4), (100, 4), (64, 8)])
def test_sums_are_held_to_one_order(chunk_size: int, least: int) -> None:
    """With `least` heads and more, each of the 128 threads of a program has four tokens of a chunk."""
    choices = [triton.Config({"BLOCK_SIZE_H": heads}) for heads in (2, 4, 8, 16, 32, 64)]
    kept = [config.kwargs["BLOCK_SIZE_H"] for config in choices if in_order(config, chunk_size)]
    assert kept == [heads for heads in (2, 4, 8, 16, 32, 64) if heads >= least]


def test_combo_kernels_are_off_beside_what_an_engine_is_asked_for() -> None:
    held = {"combo_kernels": False, "benchmark_combo_kernel": False}
    engine = {"dtype": "bfloat16", "compilation_config": {"cudagraph_capture_sizes": [1, 4]}}
    expected = {"cudagraph_capture_sizes": [1, 4], "inductor_compile_config": held}
    assert without_combo_kernels(engine) == {"dtype": "bfloat16", "compilation_config": expected}
    assert engine["compilation_config"] == {"cudagraph_capture_sizes": [1, 4]}
    assert without_combo_kernels({}) == {"compilation_config": {"inductor_compile_config": held}}
    assert without_combo_kernels({"compilation_config": 0})["compilation_config"]["mode"] == 0


def test_combo_kernels_that_were_asked_for_stay() -> None:
    asked = {"compilation_config": {"inductor_compile_config": {"combo_kernels": True, "epilogue_fusion": False}}}
    found = without_combo_kernels(asked)["compilation_config"]["inductor_compile_config"]
    assert found == {"combo_kernels": True, "benchmark_combo_kernel": False, "epilogue_fusion": False}


def side(**changes: Any) -> dict[str, Any]:
    worker = {"num_cudagraph_captured": 51, "num_graphs_seen": 1}
    whole = {
        "gpu": True,
        "dropped": [0],
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
    expected = {"layers": (0, 40), "responses": (0, 3), "preemptions": (3, 3), "graphs": (0, 4), "compiles": (0, 3)}
    expected |= {"launches": (0, 36)}
    assert found(side(), side()) == expected
    assert failures(rows(side(), side(), "nemotron_h", 0)) == []
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
    expected = {"layers": (2, 40), "responses": (2, 3), "preemptions": (3, 3), "graphs": (4, 4), "compiles": (1, 3)}
    expected |= {"launches": (36, 36)}
    assert found(ours, side()) == expected
    wrong = ["layers: 2", "responses: 2", "graphs: 4", "compiles: 1", "launches: 36"]
    assert failures(rows(ours, side(), "", 0)) == wrong
    assert found(ours, side(), 0.01)["responses"] == (1, 3)


def test_a_note_says_how_far_answers_are_apart_until_tokens_differ() -> None:
    answers = [[[1, 2, 3], [-1.0, -2.0, -3.0]], [[1, 2, 3], [-1.0, -2.0, -3.0]], [[5], [-1.0]]]
    others = [[[1, 2, 3], [-1.25, -2.0, -3.0]], [[1, 9, 3], [-1.0, -7.0, -8.0]], [[5], [-1.0]]]
    (row,) = control_rows(side(answers={"short": answers}), side(answers={"short": others}), "", 0)
    assert (row.case, row.ours, row.n) == ("responses/control", 2, 3)
    assert "short 3 (2 differ, 1 in tokens, log-probabilities before those by up to 0.25)" in row.note


def test_a_control_has_a_case_of_its_own() -> None:
    stock = side()
    for name in ("compared", "served"):
        del stock[name]
    assert [row.case for row in control_rows(stock, stock, "granite", 0)] == ["responses/control/granite"]
    assert control_rows({}, {}, "granite", 0) == []


@pytest.mark.parametrize("idle", [0, 1])
def test_an_engine_that_never_preempted_fails(idle: int) -> None:
    sides = [side(), side()]
    sides[idle]["preemptions"] = {"short": 0, "preempted": 0}
    assert failures(rows(*sides, "granite", 0)) == ["no preemptions/granite"]


def test_notes_say_where_the_tuner_was_held() -> None:
    notes = {row.case: row.note for row in rows(side(dropped=[1]), side(dropped=[1]), "", 0)}
    assert {case for case, note in notes.items() if "held to 4 tokens" in note} == {"layers", "responses"}


def test_what_is_not_known_yet_has_no_row() -> None:
    assert found({}, {}) == {}
    assert set(found({name: side()[name] for name in ("gpu", "dropped", "graphs", "compared")}, {})) == {"layers"}


def test_answers_of_other_lengths_differ() -> None:
    assert not same_answer([[1], [-1.0]], [[1, 2], [-1.0, -1.0]], 1.0)


def test_rows_of_other_cases_stay_in_the_file(tmp_path: Path) -> None:
    row = Row("layers", "mismatches", "1", None, 0.0, None, None, None, 1000, "a note")
    assert Results.read("equality_vllm", tmp_path).rows == []
    Results("equality_vllm", [row]).write(tmp_path)
    assert Results.read("equality_vllm", tmp_path).rows == [row]
