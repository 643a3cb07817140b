"""Probes that import PyTorch or vLLM, in a process of their own: one that dies or hangs is a line of the report.

    python -m inductor_passes.doctor.isolated NAME ...

writes each finding of each probe to its standard output, one JSON object a line. What else is printed goes to stderr.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator

from inductor_passes.doctor.finding import Finding, Status

# Name, then module and function, which yields findings.
PROBES = {
    "device": ("inductor_passes.doctor.device", "find_device"),
    "self test": ("inductor_passes.doctor.self_test", "run_self_test"),
    "contract": ("inductor_passes.doctor.plugin", "check_contract"),
}


def in_a_process_of_their_own(section: str, *names: str, seconds: float) -> Iterator[Finding]:
    """What these probes find, run one after the other, and what became of them if they did not end well."""
    command = [sys.executable, "-m", __name__, *names]
    try:
        done = subprocess.run(command, capture_output=True, timeout=seconds)
        output, errors, ended = done.stdout, done.stderr, f"exit status {done.returncode}" if done.returncode else ""
    except subprocess.TimeoutExpired as expired:
        output, errors, ended = expired.stdout or b"", expired.stderr or b"", f"no end within {seconds:.0f} s"
    except OSError as error:
        output, errors, ended = b"", b"", repr(error)
    lines = output.decode(errors="replace").splitlines(keepends=True)
    yield from (Finding.from_dict(json.loads(line)) for line in lines if line.endswith("\n"))  # none that was cut short
    if ended:
        last = errors.decode(errors="replace").strip().splitlines()[-1:]
        yield Finding(section, " and ".join(names), "did not finish", Status.PROBLEM, ": ".join([ended, *last]))


def main(names: list[str]) -> None:
    """Run probes and write what they find."""
    # Libraries print; what reads our findings must see nothing else.
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)
        for name in names:
            for finding in _findings(name):
                print(json.dumps(finding.as_dict()), file=out, flush=True)


def _findings(name: str) -> Iterator[Finding]:
    module, function = PROBES[name]
    try:
        yield from getattr(importlib.import_module(module), function)()
    except Exception as error:
        yield Finding(name.capitalize(), name, "failed", Status.PROBLEM, f"{type(error).__name__}: {error}"[:500])


if __name__ == "__main__":
    main(sys.argv[1:])
