"""`inspect()` around what a program compiles: it shows, and it never breaks the program."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest
import torch

import inductor_passes
from inductor_passes import Condition, SnapshotElimination
from inductor_passes.observing import observed_by, suspended
from tests.inductor_passes.harness import assert_equal, run_graph
from tests.inductor_passes.inspection.program import returns_its_snapshot
from tests.inductor_passes.programs import make_inputs, snapshot, update_with

PROGRAM = update_with(snapshot)


def undecompilable(x):
    """Returns comprehensions around a graph break, of which depyf 0.20 can make nothing."""

    def broken():
        nonlocal x
        x = x.sin()
        torch._dynamo.graph_break()
        return x.cos()

    return [broken() for _ in range(2)], {k: x + k for k in range(2)}


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_what_is_compiled_inside_is_shown(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    inputs = make_inputs()
    expected_inputs = inputs.clone()
    expected = PROGRAM(*expected_inputs.args())
    with inductor_passes.inspect(tmp_path / "out", title="my program") as elimination:
        output = torch.compile(PROGRAM, fullgraph=True)(*inputs.args())
    assert_equal((output, inputs.args()), (expected, expected_inputs.args()))
    assert elimination.report().eliminated == 1
    assert not warnings_in(caplog)
    names = {str(file.relative_to(tmp_path / "out")) for file in (tmp_path / "out").rglob("*.*")}
    assert {"report.html", "table.txt", "graph_0_before.py", "graph_0_after.py", "with_pass/code_0.py"} <= names
    assert {
        "with_pass/depyf/full_code_for_program_0.py",
        "with_pass/depyf/transformed_code_for_program_0_0.py",
    } <= names
    page = (tmp_path / "out" / "report.html").read_text()
    assert "my program" in page
    for name in ("cache", "slots", "has", "last_chunk_indices"):  # the user's names of the inputs
        assert f'<text class="label" y="-4">{name}</text>' in page


def test_caches_of_pytorch_do_not_hide_the_graph(tmp_path: Path) -> None:
    for number in range(2):
        torch._dynamo.reset()
        with inductor_passes.inspect(tmp_path / str(number)) as elimination:
            torch.compile(PROGRAM, fullgraph=True)(*make_inputs().args())
        assert len(elimination.report().graphs) == 1
        assert (tmp_path / str(number) / "with_pass" / "code_0.py").exists()


def test_a_pass_that_the_program_switches_on_itself_is_shown(tmp_path: Path) -> None:
    own = SnapshotElimination()
    with inductor_passes.inspect(tmp_path) as elimination:
        run_graph(PROGRAM, make_inputs(), own)
    assert not elimination.report().graphs
    assert own.report().eliminated == 1
    assert "The snapshot is gone" in (tmp_path / "report.html").read_text()


def test_an_earlier_inspection_goes_and_other_files_stay(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "graph_7_before.py").write_text("of an earlier inspection")
    with inductor_passes.inspect(tmp_path):
        run_graph(PROGRAM, make_inputs(), SnapshotElimination())
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert {file.name for file in tmp_path.glob("graph_*")} == {"graph_0_before.py", "graph_0_after.py"}


def test_an_error_of_the_program_comes_through_and_what_was_seen_is_written(tmp_path: Path) -> None:
    def fails():
        with inductor_passes.inspect(tmp_path):
            run_graph(PROGRAM, make_inputs(), SnapshotElimination())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert "The snapshot is gone" in (tmp_path / "table.txt").read_text()


def test_nothing_compiled(tmp_path: Path) -> None:
    with inductor_passes.inspect(tmp_path):
        pass
    for file in ("report.html", "table.txt"):
        assert "torch.compiler.reset()" in (tmp_path / file).read_text()


def test_a_folder_that_cannot_be_made_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "out").write_text("a file where the folder should be")
    inputs = make_inputs()
    expected = PROGRAM(*inputs.clone().args())
    with inductor_passes.inspect(tmp_path / "out") as elimination:
        output = torch.compile(PROGRAM, fullgraph=True)(*inputs.args())
    assert_equal(output, expected)
    assert elimination.report().eliminated == 1
    messages = warnings_in(caplog)
    assert any("report.html was not written" in message for message in messages)
    assert any("depyf's files were not written" in message for message in messages)
    assert (tmp_path / "out").read_text() == "a file where the folder should be"


def test_what_depyf_cannot_decompile_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    x = torch.randn(3)
    with inductor_passes.inspect(tmp_path):
        assert_equal(torch.compile(undecompilable, backend="eager")(x.clone()), undecompilable(x.clone()))
    torch._dynamo.utils.counters["graph_break"].clear()
    assert any("depyf could not decompile what Dynamo made of undecompilable" in text for text in warnings_in(caplog))
    assert "depyf could not decompile what Dynamo made of undecompilable" in (tmp_path / "report.html").read_text()
    assert list((tmp_path / "with_pass" / "depyf").glob("transformed_code_for_*"))  # what it could decompile


@pytest.mark.parametrize(
    ("missing", "lost", "message"),
    [
        ("depyf", "with_pass/depyf/transformed_code_for_program_0_0.py", "depyf's files were not written"),
        ("grandalf.graphs", "", "graph 0 was not drawn"),
        ("jinja2", "report.html", "report.html was not written"),
        ("rich", "table.txt", "table.txt was not written"),
    ],
)
def test_without_the_extra_the_rest_is_written(
    missing: str,
    lost: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for name in [name for name in sys.modules if name.startswith("inductor_passes.inspection.")]:
        if name.rpartition(".")[2] in ("page", "table"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)  # how Python marks a module that cannot be imported
    with inductor_passes.inspect(tmp_path):
        run_graph(PROGRAM, make_inputs(), SnapshotElimination())
    assert any(message in text for text in warnings_in(caplog))
    files = {"report.html", "table.txt", "graph_0_before.py", "with_pass/depyf/transformed_code_for_program_0_0.py"}
    assert all((tmp_path / file).exists() for file in files - {lost})
    assert not lost or not (tmp_path / lost).exists()


def test_an_observer_that_fails_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    def fails(_):
        raise LookupError("no such thing")

    elimination = SnapshotElimination()
    with observed_by(fails):
        run_graph(PROGRAM, make_inputs(), elimination)
    assert elimination.report().eliminated == 1
    assert any("could not be looked at" in text for text in warnings_in(caplog))


def test_suspended_the_pass_does_nothing() -> None:
    elimination = SnapshotElimination()
    with suspended():
        run_graph(PROGRAM, make_inputs(), elimination)
    assert not elimination.report().graphs
    run_graph(PROGRAM, make_inputs(), elimination)
    assert elimination.report().eliminated == 1


def test_a_graph_that_the_pass_leaves_alone(tmp_path: Path) -> None:
    with inductor_passes.inspect(tmp_path):
        run_graph(returns_its_snapshot, make_inputs(), SnapshotElimination(masked_gather=False))
    page = (tmp_path / "report.html").read_text()
    assert "The snapshot stays" in page
    assert Condition.SNAPSHOT_RETURNED.value in page
    assert "both graphs are the same" in page
    assert (tmp_path / "graph_0_before.py").read_text() == (tmp_path / "graph_0_after.py").read_text()
