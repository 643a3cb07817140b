"""Making a virtual environment with few words: shared by the scripts that `make` runs.

Standard library only, since it runs before anything is installed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MINIMUM_PYTHON = (3, 10)


class SetupError(Exception):
    """What the user has to put right; printed without a traceback."""


class Environment:
    """One virtual environment, with a stamp that says what was last installed in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = folder / "bin" / "python"
        self.log = folder / "install.log"
        self._stamp = folder / "installed.json"
        self._identity = folder / "made-for.txt"

    def installed(self, fingerprint: str) -> set[str]:
        """The parts installed under this fingerprint; empty when it is another one or the environment is broken."""
        try:
            stamp = json.loads(self._stamp.read_text())
        except (OSError, ValueError):
            return set()
        if stamp.get("fingerprint") != fingerprint or not self._runs():
            return set()
        return set(stamp["parts"])

    def stamp(self, fingerprint: str, parts: set[str]) -> None:
        """Record that these parts are installed."""
        self._stamp.write_text(json.dumps({"fingerprint": fingerprint, "parts": sorted(parts)}) + "\n")

    def make(self, identity: str) -> None:
        """Make the environment; make it anew if the one there does not run or was made for another identity."""
        identity = f"{sys.version} {identity}\n"
        made_for = self._identity.read_text() if self._identity.exists() else ""
        if made_for == identity and self._runs():
            self._stamp.unlink(missing_ok=True)  # until what comes next has succeeded
            return
        _check_venv_module()
        with Step(f"making {self.folder.name}"):
            subprocess.run([sys.executable, "-m", "venv", "--clear", str(self.folder)], check=True)
        self._identity.write_text(identity)

    def pip_install(self, what: str, *arguments: str) -> None:
        """Run `pip install` with these arguments; all it says goes to the log, its last lines to the screen on failure.

        Raises:
            SetupError: pip failed.
        """
        command = [str(self.python), "-m", "pip", "install", "--disable-pip-version-check", "--no-input", *arguments]
        with Step(f"installing {what}") as step, self.log.open("a") as log:
            log.write(f"\n$ {' '.join(command)}\n")
            pip = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            lines = []
            for line in pip.stdout or ():
                lines.append(line)
                log.write(line)
                step.show(line.strip())
            if pip.wait() != 0:
                raise SetupError(f"pip could not install {what}:\n{''.join(lines[-15:])}All it said: {self.log}")

    def output(self, *arguments: str) -> str:
        """What the environment's Python prints when it is run with these arguments.

        Raises:
            SetupError: it failed; all that it said goes to the log, its last lines to the screen.
        """
        done = subprocess.run([str(self.python), *arguments], cwd=self.folder, capture_output=True, text=True)
        with self.log.open("a") as log:
            log.write(done.stdout + done.stderr)
        if done.returncode != 0:
            raise SetupError(f"{self.python} failed:\n{done.stderr[-2000:]}All it said: {self.log}")
        return done.stdout

    def version_of(self, package: str) -> str | None:
        """The version of an installed package, or None."""
        code = f"import importlib.metadata as m; print(m.version({package!r}))"
        query = subprocess.run([str(self.python), "-c", code], capture_output=True, text=True)
        return query.stdout.strip() if query.returncode == 0 else None

    def _runs(self) -> bool:
        try:
            return subprocess.run([str(self.python), "-m", "pip", "--version"], capture_output=True).returncode == 0
        except OSError:
            return False


class Step:
    """One line on the screen: what is being done, on a terminal also what it is at, and how long it took."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._start = time.monotonic()
        self._live = sys.stdout.isatty()

    def __enter__(self) -> Step:
        self.show("")
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        ending = f"failed after {self._seconds()} s" if error else f"{self._seconds()} s"
        print(f"{self._erase()}{self._what}: {ending}", flush=True)

    def show(self, detail: str) -> None:
        """Replace the line by what is being done right now."""
        if self._live:
            width = shutil.get_terminal_size().columns - 1
            print(f"{self._erase()}{f'{self._what}: {self._seconds()} s {detail}'[:width]}", end="", flush=True)

    def _seconds(self) -> int:
        return round(time.monotonic() - self._start)

    def _erase(self) -> str:
        return "\r\033[K" if self._live else ""


def fingerprint(*texts: str) -> str:
    """What an installation depends on: this Python, these tools, pyproject.toml and the given texts."""
    digest = hashlib.sha256(sys.version.encode())
    for path in (*sorted((ROOT / "tools").glob("*.py")), ROOT / "pyproject.toml"):
        digest.update(path.read_bytes())
    for text in texts:
        digest.update(b"\0" + text.encode())
    return digest.hexdigest()


def check_python() -> None:
    """Refuse a Python that is too old.

    Raises:
        SetupError: this Python is older than the project supports.
    """
    if sys.version_info < MINIMUM_PYTHON:
        wanted = ".".join(map(str, MINIMUM_PYTHON))
        raise SetupError(f"Python {wanted} or newer is needed, this is {sys.version.split()[0]} ({sys.executable}).")


def check_compiler() -> None:
    """Refuse a machine on which `torch.compile` cannot build its CPU code.

    Raises:
        SetupError: there is no C++ compiler, or Python's headers are missing.
    """
    missing = []
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    if not any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "g++", "clang++")):
        missing.append(("a C++ compiler", "g++", "gcc-c++"))
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        missing.append((f"Python.h of {sys.executable}", f"python{version}-dev", f"python{version}-devel"))
    if missing:
        what = " and ".join(name for name, _, _ in missing)
        raise SetupError(
            f"torch.compile needs {what}. Install it with\n"
            f"    apt-get install {' '.join(debian for _, debian, _ in missing)}    (Debian, Ubuntu)\n"
            f"    dnf install {' '.join(fedora for _, _, fedora in missing)}    (Fedora, RHEL)"
        )


def run(main: object, arguments: Sequence[str]) -> None:
    """Run a script's main function; an error that the user can put right is printed without a traceback."""
    assert callable(main)
    try:
        main(arguments)
    except SetupError as error:
        print(f"\n{error}", file=sys.stderr)
        sys.exit(1)


def _check_venv_module() -> None:
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError:
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        raise SetupError(
            f"{sys.executable} cannot make virtual environments. On Debian and Ubuntu, install it with\n"
            f"    apt-get install python{version}-venv"
        ) from None
