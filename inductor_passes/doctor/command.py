"""The command `doctor`: all probes, and the report as text or JSON."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Iterator, Sequence

from inductor_passes.doctor.finding import Finding, Status, as_text
from inductor_passes.doctor.isolated import in_a_process_of_their_own
from inductor_passes.doctor.plugin import SECTION, find_entry_point, find_options, has_vllm
from inductor_passes.doctor.versions import find_versions

SUMMARY = "check this environment, and show what a bug report should contain"


def examine() -> list[Finding]:
    """Run every probe. It takes some ten seconds, and more where vLLM is to be imported."""
    probes: list[tuple[str, Callable[[], Iterable[Finding]]]] = [
        ("Versions", find_versions),
        ("Device", lambda: in_a_process_of_their_own("Device", "device", seconds=120)),
        ("Self-test", lambda: in_a_process_of_their_own("Self-test", "self test", seconds=300)),
        (SECTION, find_entry_point),
        (SECTION, _contract),
        ("Options", find_options),
    ]
    return [finding for section, probe in probes for finding in _guarded(section, probe)]


def main(arguments: Sequence[str]) -> int:
    """Print the report; the exit status is 0 if all is well, 1 if there is a problem, 2 if the arguments are wrong."""
    parser = argparse.ArgumentParser("python -m inductor_passes doctor", description=__doc__)
    parser.add_argument("--json", action="store_true", help="for a program to read")
    as_json = parser.parse_args(arguments).json
    findings = examine()
    is_well = all(finding.status is not Status.PROBLEM for finding in findings)
    if as_json:
        print(json.dumps({"well": is_well, "findings": [finding.as_dict() for finding in findings]}, indent=1))
    else:
        print(as_text(findings))
    return 0 if is_well else 1


def _contract() -> Iterator[Finding]:
    if has_vllm():
        yield from in_a_process_of_their_own(SECTION, "contract", seconds=180)


def _guarded(section: str, probe: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    try:
        yield from probe()
    except Exception as error:  # the report must come out whatever a probe meets
        yield Finding(section, "probe", "failed", Status.PROBLEM, f"{type(error).__name__}: {error}")
