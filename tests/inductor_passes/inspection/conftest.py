"""Inspections that several tests look at, each made once, and a browser."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from filelock import FileLock

from inductor_passes.inspection import command

ROOT = Path(__file__).resolve().parents[3]
# In a container: run by root, /dev/shm is small, and there is no GPU to draw with.
ARGUMENTS = ["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"]
PROGRAM = Path(__file__).with_name("program.py")


def in_a_shell(*arguments: str) -> tuple[int, str]:
    """Exit status of `python -m inductor_passes inspect` with these arguments, and what it said."""
    line = [sys.executable, "-m", "inductor_passes", "inspect", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    return run.returncode, f"{run.stdout}\n{run.stderr}"


def in_this_process(*arguments: str) -> tuple[int, str]:
    """The same, without the time that another process needs to import PyTorch."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        status = command.main(arguments)
    return status, said.getvalue()


def _once(factory: pytest.TempPathFactory, name: str, inspect: Callable[..., tuple[int, str]], *target: str) -> Path:
    """The folder of one run for all tests and all processes of this session."""
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            status, text = inspect("--out", str(folder), *target)
            (folder / "said.txt").write_text(f"{status}\n{text}")
    return folder


@pytest.fixture(scope="session")
def granite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The inspection of the built-in layer."""
    return _once(tmp_path_factory, "granite", in_a_shell)


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The inspection of a user's file."""
    return _once(tmp_path_factory, "program", in_this_process, str(PROGRAM))


@pytest.fixture(scope="session")
def chromium() -> Iterator[object]:
    """A running headless Chromium of this machine."""
    executable = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if executable is None:
        pytest.skip("no Chromium here: `python tools/provide_browser.py` installs Debian's")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=ARGUMENTS)
        yield browser
        browser.close()
