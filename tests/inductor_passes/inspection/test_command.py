"""`python -m inductor_passes inspect`: what lies in the folder, what is said, and the exit status."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import inductor_passes.__main__ as commands
from inductor_passes.inspection import command, target
from tests.inductor_passes.inspection.conftest import PROGRAM


def said(folder: Path) -> tuple[int, str]:
    status, _, text = (folder / "said.txt").read_text().partition("\n")
    return int(status), text


def line_of(text: str) -> str:
    """`file:line` of a line of the program."""
    lines = PROGRAM.read_text().splitlines()
    return f"{PROGRAM.name}:{lines.index(text) + 1}"


def test_built_in_layer(granite: Path) -> None:
    status, text = said(granite)
    assert status == 0, text
    assert "The snapshot is gone: the Granite-4.0-h-micro layer" in text
    assert "Equal bit for bit: 3 tensors that it left and 1 call of a compiled function." in text
    before, after = ((granite / f"graph_0_{when}.py").read_text() for when in ("before", "after"))
    assert "state_passing_update" in before
    assert "aten.where.self(unsqueeze_13, index_10" in before
    assert "state_passing_indexed" in after
    assert "aten.where.self(unsqueeze_13, index_10" not in after
    assert "state_passing_update" in (granite / "without_pass" / "code_0.py").read_text()
    assert "state_passing_indexed" in (granite / "with_pass" / "code_0.py").read_text()


def test_depyf_decompiles_both_runs(granite: Path) -> None:
    for run in ("without_pass", "with_pass"):
        (transformed,) = (granite / run / "depyf").glob("transformed_code_for_forward_*.py")
        assert "__compiled_fn_" in transformed.read_text()
        assert any(isinstance(node, ast.FunctionDef) for node in ast.parse(transformed.read_text()).body)
        (full,) = (granite / run / "depyf").glob("full_code_for_forward_*.py")
        assert "check_tensor(" in full.read_text()  # the guards
        assert "../code_0.py" in full.read_text()  # the generated code behind the compiled function


def test_figures_are_those_of_one_state_of_the_layer(granite: Path) -> None:
    page = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", (granite / "report.html").read_text()))
    assert "State no longer copied 1 MiB a call" in page  # 64 heads x 64 x 128 in BF16
    assert "Where the ops run one by one: 2 MiB" in page
    assert "Launches saved 1 a call" in page
    kernels = re.search(r"Kernels Inductor generated (\d+) → (\d+)", page)
    assert kernels is not None
    assert int(kernels[1]) == int(kernels[2]) + 1


def test_three_spellings_of_a_user(program: Path) -> None:
    status, text = said(program)
    assert status == 0, text
    assert "3 of 4 snapshots are gone" in text
    assert "9 tensors that it left and 2 calls of compiled functions" in text
    table = " ".join((program / "table.txt").read_text().split())  # long lines are folded
    assert table.count("State passing reads the cache itself.") == 3
    for line in (
        "    return torch.where(has[:, None, None, None], cache[slots], 0)",
        "    rows = cache.index_select(0, slots)",
        "    rows[~has] = 0",
    ):
        assert line_of(line) in table
        assert line.strip() in table


def test_a_declined_snapshot_has_its_condition_and_its_line(program: Path) -> None:
    table = (program / "table.txt").read_text()
    kept = table[table.index("SNAPSHOT_RETURNED: the snapshot is returned") :]
    assert "because of    where" in kept
    assert line_of("    initial = torch.where(has[:, None, None, None], cache[slots], 0)") in kept


def test_the_page_says_what_the_table_says(program: Path) -> None:
    page = (program / "report.html").read_text()
    assert "SNAPSHOT_RETURNED" in page
    assert page.count('class="finding gone"') == 3
    assert page.count("<svg") == 4  # two graphs, before and after
    assert line_of("    rows[~has] = 0") in page


def test_the_page_needs_no_other_file(granite: Path, program: Path) -> None:
    for folder in (granite, program):
        page = (folder / "report.html").read_text()
        assert not re.search(r"""(src|href)\s*=\s*["']?(https?:|//)|url\((?!#)|@import""", page)
        links = re.findall(r'<a href="([^"]+)"', page)
        assert links
        assert all((folder / link).is_file() for link in links)


def test_a_program_that_fails_without_the_pass(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "fails.py"
    file.write_text("raise RuntimeError('on purpose')\n")
    assert command.main(["--out", str(tmp_path / "out"), str(file)]) == 1
    error = capfd.readouterr().err
    assert "RuntimeError: on purpose" in error
    assert f"error: {file} failed without the pass: exit status 1" in error


def test_a_program_that_fails_with_the_pass(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "fails_in_the_second_run.py"
    file.write_text("import pathlib, sys\npathlib.Path(sys.argv[1]).mkdir()\n")
    assert command.main(["--out", str(tmp_path / "out"), str(file), "--", str(tmp_path / "mark")]) == 1
    said = capfd.readouterr()
    assert "FileExistsError" in said.err
    assert "The program failed with the pass and not without it." in said.out
    assert "Nothing was compiled while the pass was on" in (tmp_path / "out" / "report.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.py"], "nowhere.py: no such file; a target is FILE.py or MODULE:FUNCTION"),
        (["no_such_package.module:main"], "there is no module 'no_such_package.module'"),
        (["..:main"], "there is no module '..'"),
        (["--out", f"{PROGRAM}/below", str(PROGRAM)], "Not a directory"),
        (["--vllm", "model", str(PROGRAM)], "--vllm MODEL and TARGET exclude each other"),
        (["--colour"], "unrecognized arguments: --colour"),
    ],
)
def test_bad_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        command.main(arguments)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ("tests.inductor_passes.inspection.program:nothing", "has no function 'nothing'"),
        ("tests.inductor_passes.inspection.program:torch", "has no function 'torch'"),
        ("tests.inductor_passes.inspection.program:spelled_in_place", "but needs cache, slots, has"),
    ],
)
def test_no_such_function(named: str, message: str) -> None:
    with pytest.raises(target.TargetError, match=message):
        target.run(named, [])


def test_a_package_that_fails_on_import_is_left_to_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "package_that_fails_on_import"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('a fault of the package')")
    monkeypatch.syspath_prepend(tmp_path)
    target.check(f"{package.name}.part:function")
    with pytest.raises(RuntimeError, match="a fault of the package"):
        target.run(f"{package.name}.part:function", [])


def test_a_function_that_needs_no_arguments() -> None:
    assert target.run("platform:python_version", []).startswith("3.")


def test_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(["--help"]) == 0
    assert "inspect" in capsys.readouterr().out
    assert commands.main([]) == 2
    assert commands.main(["inspekt"]) == 2
    assert "error: unknown command 'inspekt'" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stop:
        commands.main(["inspect", "--help"])
    assert stop.value.code == 0
