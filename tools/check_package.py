"""Build wheel and sdist and try them: `make package`.

The wheel is installed into an environment of its own, which has nothing else but what this one lends it: PyTorch and
Triton are too large to be installed twice. There it is imported, type-checked from outside, and examined by its doctor.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

from environment import ROOT, SetupError, Step, run

FOLDER = ROOT / "build" / "package"
ENVIRONMENT = FOLDER / "environment"
PACKAGES = ("mamba_ops", "inductor_passes")
# Those that need no other PyTorch; `make test` installs vLLM's engine. The empty one is the package alone.
LIGHT_EXTRAS = ("", "inspect", "bench", "test", "docs")


def main(_: object) -> None:
    """Everything, until something is wrong."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    command("building", sys.executable, "-m", "build", "--outdir", str(FOLDER), str(ROOT))
    (wheel,), (sdist,) = FOLDER.glob("*.whl"), FOLDER.glob("*.tar.gz")
    command("checking the description", sys.executable, "-m", "twine", "check", "--strict", str(wheel), str(sdist))
    check_content(wheel, sdist)

    python = str(ENVIRONMENT / "bin" / "python")
    command("making an environment", sys.executable, "-m", "venv", "--without-pip", str(ENVIRONMENT))
    install = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet")
    command("installing the wheel", *install, "--no-deps", "--no-index", str(wheel))
    (site,) = ENVIRONMENT.glob("lib/python*/site-packages")
    lent = [path for path in sys.path if Path(path).name == "site-packages"]  # not the sources, however installed
    (site / "lent.pth").write_text("\n".join(lent) + "\n")
    for extra in LIGHT_EXTRAS:  # no conflict, and nothing that does not exist
        what = f"what its extra {extra} needs" if extra else "what it needs"
        command(what, *install, "--dry-run", f"{wheel}[{extra}]" if extra else str(wheel))
    command("importing it", python, "-I", str(ROOT / "tests/package/installed.py"))
    command("its doctor", python, "-I", "-m", "inductor_passes", "doctor")
    consumer = str(shutil.copy(ROOT / "tests/package/consumer.py", FOLDER))
    # The linters' settings, which are strict, so that what they have found out about PyTorch is used again.
    mypy = (sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"))
    cache = ("--cache-dir", str(ROOT / ".mypy_cache"))
    command("mypy of a program that uses it", *mypy, *cache, "--python-executable", python, consumer)
    print(f"{wheel.relative_to(ROOT)}\n{sdist.relative_to(ROOT)}")


def command(what: str, *arguments: str) -> None:
    """Run a program away from the sources; its output is shown if it fails.

    Raises:
        SetupError: it failed.
    """
    with Step(what):
        done = subprocess.run(arguments, cwd=FOLDER, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode != 0:
            raise SetupError(f"{what} failed:\n{done.stdout}")


def check_content(wheel: Path, sdist: Path) -> None:
    """Check that the wheel has each file of both packages and nothing else, and the sdist what tests need too.

    Raises:
        SetupError: a file is missing or too many.
    """
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    sources = set(tracked.stdout.split("\0")) - {""}
    expected = {name for name in sources if name.split("/")[0] in PACKAGES}
    in_wheel = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    with tarfile.open(sdist) as archive:
        in_sdist = {member.name.split("/", 1)[1] for member in archive if member.isfile()}
    needed = {name for name in sources if not name.startswith((".ci/", ".github/")) and name != ".gitignore"}
    wrong = (expected ^ in_wheel) | (needed - in_sdist)
    if wrong:
        raise SetupError(f"missing in the wheel or the sdist, or too many in the wheel: {', '.join(sorted(wrong))}")


if __name__ == "__main__":
    run(main, sys.argv[1:])
