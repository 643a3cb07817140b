"""What identifies the pass to compile caches."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

import torch

import mamba_ops.kernels
import mamba_ops.ops


@functools.cache
def source_fingerprint() -> str:
    """Hash of this package, of the ops and kernels that it puts into graphs, and of PyTorch's version.

    PyTorch's caches look at a graph before the pass has run, so they cannot know what the pass would put there.
    """
    packages = [Path(__file__).parent, *map(Path, (*mamba_ops.kernels.__path__, *mamba_ops.ops.__path__))]
    digest = hashlib.sha256(torch.__version__.encode())
    for package in packages:
        for file in sorted(package.glob("*.py")):
            digest.update(f"{package.name}/{file.name}\0".encode() + file.read_bytes())
    return digest.hexdigest()
