"""A Triton driver for machines without a GPU: it names a target to compile for and launches nothing.

With it Triton compiles kernels for a GPU that is not there, and Inductor's mutation analysis, which compiles a
kernel to Triton IR first, gives the answer that it would give on that GPU.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase

SM90 = GPUTarget("cuda", 90, 32)


class CompileOnlyDriver(DriverBase):
    """Driver that answers what the compiler asks and refuses everything else."""

    def __init__(self, target: GPUTarget = SM90) -> None:
        self.target = target

    @classmethod
    def is_active(cls) -> bool:
        return False

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        # Triton keeps compiled kernels by device: another target must look like another device.
        return zlib.crc32(repr(self.target).encode())

    def get_current_stream(self, _device: int) -> int:
        return 0

    def get_active_torch_device(self) -> Any:
        raise RuntimeError("no device: this driver only compiles")

    def get_benchmarker(self) -> Any:
        raise RuntimeError("no device: this driver only compiles")


@contextlib.contextmanager
def compile_only(target: GPUTarget = SM90) -> Iterator[None]:
    """Let Triton compile for `target` while this context is open."""
    previous = triton.runtime.driver._active
    triton.runtime.driver.set_active(CompileOnlyDriver(target))
    try:
        yield
    finally:
        triton.runtime.driver._active = previous
