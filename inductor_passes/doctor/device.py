"""The GPU, its driver, and whether the kernels run on it."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator

import torch

from inductor_passes.doctor.finding import Finding, Status

SECTION = "Device"
CAPABILITY = (8, 0)


def find_device() -> Iterator[Finding]:
    """A finding for each GPU, or one that says that there is none."""
    builds = {"CUDA": torch.version.cuda, "ROCm": torch.version.hip}
    build = next((f"{name} {version}" for name, version in builds.items() if version), "CPU")
    yield Finding(SECTION, "PyTorch's build", build)
    driver = _driver()
    if not torch.cuda.is_available():
        reason = "the ops run in plain PyTorch, for tests and examples"
        if driver:
            reason = f"this PyTorch does not see the GPU of driver {driver}; {reason}"
        yield Finding(SECTION, "GPU", "none", Status.NOTE, reason)
        return
    if driver:
        yield Finding(SECTION, "driver", driver)
    for index in range(torch.cuda.device_count()):
        yield _gpu(index)


def _gpu(index: int) -> Finding:
    name, capability = torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)
    value = f"{name}, capability {capability[0]}.{capability[1]}"
    if torch.version.hip:
        return Finding(
            SECTION, f"GPU {index}", value, Status.NOTE, "the kernels compile for gfx942, but never ran there"
        )
    if capability < CAPABILITY:
        reason = f"capability {CAPABILITY[0]}.{CAPABILITY[1]} or newer is needed"
        return Finding(SECTION, f"GPU {index}", value, Status.PROBLEM, reason)
    return Finding(SECTION, f"GPU {index}", value)


def _driver() -> str:
    """Version of the NVIDIA driver, empty without one."""
    if shutil.which("nvidia-smi") is None:
        return ""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        lines = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return ""
    return lines[0] if lines else ""
