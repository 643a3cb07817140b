"""The doctor's report comes out whatever it meets, and its exit status says what it found."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from inductor_passes.doctor import Finding, Status
from inductor_passes.doctor.isolated import in_a_process_of_their_own
from inductor_passes.doctor.plugin import find_options
from inductor_passes.doctor.versions import PACKAGES, PYTHON
from inductor_passes.vllm.options import Options

if sys.version_info >= (3, 11):
    import tomllib

ROOT = Path(__file__).resolve().parent.parent.parent


def run(*arguments: str, path: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command of the package; modules in `path` come before the installed ones."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MAMBA_OPS")}
    paths = os.pathsep.join(map(str, filter(None, (path, ROOT))))
    return subprocess.run(
        [sys.executable, "-m", "inductor_passes", *arguments],
        cwd=ROOT,
        env={**clean, "PYTHONPATH": paths, **environment},
        capture_output=True,
        text=True,
    )


def findings(done: subprocess.CompletedProcess[str]) -> dict[str, dict[str, Any]]:
    return {finding["name"]: finding for finding in json.loads(done.stdout)["findings"]}


def test_all_well() -> None:
    done = run("doctor", "--json", MAMBA_OPS_VLLM_DUMP="/somewhere")
    found = findings(done)
    wrong = [finding for finding in found.values() if finding["status"] == "problem"]
    assert done.returncode == (1 if wrong else 0), done.stderr
    assert all(finding["section"] == "vLLM plugin" for finding in wrong)  # vLLM may be here without this package
    assert json.loads(done.stdout)["well"] == (not wrong)
    for name in ("in place = snapshot", "compiled with the pass"):
        assert found[name]["status"] == "ok"
        assert "bit for bit" in found[name]["value"]
    assert found["dump"] | {"value": "/somewhere", "reason": "MAMBA_OPS_VLLM_DUMP"} == found["dump"]
    assert found["verify"]["reason"] == "default"
    assert found.keys() >= {"python", "torch", "triton", "depyf", "transformers"} | vars(Options()).keys()


@pytest.mark.parametrize(
    ("torch", "said"),
    [
        ("raise ImportError('libcudart is missing')", "libcudart is missing"),
        ("import os; os.abort()", "exit status -6"),
        ("import sys; print('hello', flush=True); sys.exit(3)", "exit status 3"),
    ],
)
def test_a_pytorch_that_cannot_be_imported_is_a_line_of_the_report(tmp_path: Path, torch: str, said: str) -> None:
    (tmp_path / "torch.py").write_text(torch)
    done = run("doctor", path=tmp_path)
    assert done.returncode == 1
    assert "Traceback" not in done.stdout + done.stderr
    assert re.search(rf"PROBLEM device .*{said}", done.stdout)
    assert re.search(rf"PROBLEM self test .*{said}", done.stdout)
    assert re.search("ok +enabled", done.stdout)
    assert done.stdout.rstrip().endswith("2 problems")


def test_a_vllm_that_lacks_everything_and_does_not_see_the_plugin(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('not here')")
    (tmp_path / "vllm.py").write_text("")
    found = findings(run("doctor", "--json", path=tmp_path))
    assert found["contract"]["status"] == "problem"
    assert "MambaMixer2" in found["contract"]["reason"]
    shut_out = findings(run("doctor", "--json", path=tmp_path, VLLM_PLUGINS="other"))["entry point"]
    assert shut_out["status"] == "problem"


def test_a_wrong_option_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('not here')")
    done = run("doctor", path=tmp_path, MAMBA_OPS_VLLM_DUMB="x")
    assert done.returncode == 1
    assert "MAMBA_OPS_VLLM_DUMB: unknown option; known: enabled" in done.stdout


@pytest.mark.parametrize(("value", "is_well"), [("0", True), ("1", True), ("true", False)])
def test_a_switch_that_would_not_act_is_a_problem(monkeypatch: pytest.MonkeyPatch, value: str, is_well: bool) -> None:
    monkeypatch.setenv("MAMBA_OPS_CHECKS", value)
    problems = [finding.reason for finding in find_options() if finding.status is Status.PROBLEM]
    assert problems == ([] if is_well else ["MAMBA_OPS_CHECKS: 'true'; allowed: 0 or 1"])


def test_a_variable_that_nothing_reads_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAMBA_OPS_ELIMINATE", "0")
    problems = [finding.reason for finding in find_options() if finding.status is Status.PROBLEM]
    assert problems == ["MAMBA_OPS_ELIMINATE: nothing reads it; options of the plugin begin with MAMBA_OPS_VLLM_"]


def test_a_probe_that_hangs_is_ended() -> None:
    (finding,) = in_a_process_of_their_own("Self-test", "self test", seconds=0.01)
    assert finding.status is Status.PROBLEM
    assert "no end within" in finding.reason


@pytest.mark.parametrize("arguments", [[], ["doctors"], ["doctor", "--xml"], ["doctor", "now"]])
def test_wrong_usage(arguments: list[str]) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert "usage:" in done.stderr


@pytest.mark.parametrize("arguments", [["--help"], ["doctor", "--help"]])
def test_help(arguments: list[str]) -> None:
    done = run(*arguments)
    assert done.returncode == 0
    assert "usage:" in done.stdout


def test_json_holds_all_of_a_finding() -> None:
    finding = Finding("Device", "GPU 0", "one", Status.NOTE, "why")
    assert Finding.from_dict(json.loads(json.dumps(finding.as_dict()))) == finding


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib came with Python 3.11")
def test_versions_are_those_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == f">={PYTHON[0]}.{PYTHON[1]}"
    extras = project["optional-dependencies"]
    required = [*project["dependencies"], *extras["inspect"], *extras["test"]]
    for name, ((major, minor), _, _) in PACKAGES.items():
        assert any(re.match(rf"{name}>={major}\.{minor}\b", requirement) for requirement in required), name
