"""Make the environment in which the project runs: `python3 tools/bootstrap.py [extra ...]`.

It installs the PyTorch that fits the machine first, and then the project, forbidding pip to exchange that PyTorch for
another one. A second run with the same pyproject.toml does nothing.

Environment variables:
    MAMBA_OPS_VENV: the folder of the environment, `.venv` unless set.
    MAMBA_OPS_TORCH: arguments of `pip install` that install PyTorch, instead of the choice made here.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from environment import ROOT, Environment, check_compiler, check_python, fingerprint, run

TORCH = "2.13.0"
# PyTorch for a GPU brings its own Triton. Beside the CPU build the tests run the kernels in Triton's interpreter, and
# that of 3.9 turns the `&` of a mask and a boolean scalar into an integer, which it then refuses as a mask.
TRITON = "triton==3.8.*"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def main(extras: Sequence[str]) -> None:
    """Make the environment, or complete it, so that it holds the project with these extras."""
    check_python()
    environment = Environment(ROOT / os.environ.get("MAMBA_OPS_VENV", ".venv"))
    chosen = os.environ.get("MAMBA_OPS_TORCH", "")
    identity = chosen or ("GPU" if has_nvidia_gpu() else "CPU")
    key = fingerprint(identity)
    present = environment.installed(key)
    wanted = present | {"project", *extras}
    if wanted == present:
        return
    check_compiler()
    environment.make(identity)
    if environment.version_of("torch") is None:
        install_torch(environment, chosen)
    constraints = environment.folder / "constraints.txt"
    constraints.write_text(f"torch=={environment.version_of('torch')}\n{TRITON if identity == 'CPU' else ''}\n")
    named = ",".join(sorted(wanted - {"project"}))
    project = f"{ROOT}[{named}]" if named else str(ROOT)
    environment.pip_install(f"the project ({named or 'no extras'})", "-c", str(constraints), "-e", project)
    environment.stamp(key, wanted)


def install_torch(environment: Environment, chosen: str) -> None:
    """Install PyTorch: as chosen by the user, else with CUDA if there is an NVIDIA GPU, else the CPU build."""
    if chosen:
        environment.pip_install("PyTorch as MAMBA_OPS_TORCH says", *shlex.split(chosen))
    elif has_nvidia_gpu():
        environment.pip_install("PyTorch for the GPU found here", f"torch>={TORCH}")
    else:
        install_cpu_torch(environment)


def install_cpu_torch(environment: Environment) -> None:
    """Install the CPU build of PyTorch."""
    if has_cpu_index():
        environment.pip_install("PyTorch, CPU build", f"torch=={TORCH}", "--index-url", CPU_INDEX)
    else:
        environment.pip_install(f"PyTorch ({CPU_INDEX} is out of reach, so from pip's own index)", f"torch=={TORCH}")


def has_nvidia_gpu() -> bool:
    """Whether an NVIDIA GPU and its driver are here."""
    if not Path("/proc/driver/nvidia/version").exists() and shutil.which("nvidia-smi") is None:
        return False
    try:
        return "GPU" in subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.TimeoutExpired):
        return False


def has_cpu_index() -> bool:
    """Whether the index of PyTorch's CPU builds answers. Asked here, as pip itself would try for minutes."""
    try:
        with urllib.request.urlopen(f"{CPU_INDEX}/torch/", timeout=5) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False


if __name__ == "__main__":
    run(main, sys.argv[1:])
