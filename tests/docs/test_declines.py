"""The page on declines has a section for each reason, and each example is declined for that very reason."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from inductor_passes import Condition, SnapshotElimination
from inductor_passes.vllm.decline import Decline
from tests.docs.pages import FOLDER, blocks, run
from tests.inductor_passes.harness import run_graph

PAGE = FOLDER / "declines.md"
PASS, PLUGIN = PAGE.read_text().split("\n## In vLLM\n")
INTRODUCTION, *SECTIONS = re.split(r"^### ", PASS, flags=re.MULTILINE)
EXAMPLES = {text.split("`")[1]: text for text in SECTIONS}
# These need a GPU, or a fault of the pass or of PyTorch.
NOT_RUN = {Condition.OTHER_DEVICE, Condition.WRITES_UNKNOWN, Condition.PASS_FAILED}


class Inputs:
    """Fresh copies of what the page defines."""

    def __init__(self, names: dict[str, Any]) -> None:
        self.tensors: list[Tensor] = [names[name].clone() for name in ("cache", "slots", "has")]

    def args(self) -> list[Tensor]:
        return self.tensors


@pytest.fixture
def names() -> dict[str, Any]:
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    for code, _ in blocks(INTRODUCTION):
        run(code, PAGE, names)
    return names


def compile_model(names: dict[str, Any]) -> SnapshotElimination:
    elimination = SnapshotElimination()
    program: Callable[..., Any] = names["model"]
    run_graph(program, Inputs(names), elimination)  # type: ignore[arg-type]
    return elimination


def test_the_page_has_a_section_for_each_condition() -> None:
    assert set(EXAMPLES) == {condition.name for condition in Condition}
    assert len(SECTIONS) == len(Condition)


def test_the_page_has_a_section_for_each_reason_of_the_plugin() -> None:
    assert set(re.findall(r"^### `(\w+)`", PLUGIN, re.MULTILINE)) == {reason.name for reason in Decline}


def test_the_first_example_loses_its_snapshot(names: dict[str, Any]) -> None:
    report = compile_model(names).report()
    assert report.eliminated == 1
    assert not report.declines


@pytest.mark.parametrize("condition", [one for one in Condition if one not in NOT_RUN], ids=lambda one: one.name)
def test_example(condition: Condition, names: dict[str, Any]) -> None:
    section = EXAMPLES[condition.name]
    for code, _ in blocks(section):
        run(code, PAGE, names)
    report = compile_model(names).report()
    assert report.count() == {condition: 1}
    assert ("Read in one launch" in section) == condition.allows_masked_gather
    if "Read in one launch" in section:
        assert [rewrite.into for rewrite in report.rewrites] == ["masked_gather"]
