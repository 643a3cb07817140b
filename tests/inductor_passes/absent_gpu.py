"""Compile for a GPU that is not there: fake CUDA tensors, all of Inductor up to its generated code, no launch.

Needs a CUDA build of PyTorch; a CPU build cannot even trace indexing of a CUDA tensor. PyTorch asks a device interface
what the GPU can do, and Triton a driver what to compile for: both are registered here for one H200.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._dynamo import device_interface
from torch._dynamo.device_interface import CudaInterface
from torch._inductor.graph import GraphLowering
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.compile_only_driver import compile_only

PROPERTIES = types.SimpleNamespace(
    name="NVIDIA H200",
    major=9,
    minor=0,
    multi_processor_count=132,
    warp_size=32,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    shared_memory_per_block=48 << 10,
    shared_memory_per_block_optin=227 << 10,
    total_memory=139 << 30,
)


class AbsentGPU(CudaInterface):
    """Answers for an H200 and runs nothing."""

    class Worker(CudaInterface.Worker):
        @staticmethod
        def get_device_properties(device: Any = None) -> Any:
            return PROPERTIES

        @staticmethod
        def current_device() -> int:
            return 0

        @staticmethod
        def set_device(device: int) -> None:
            pass

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def device_count() -> int:
        return 1

    @staticmethod
    def current_device() -> int:
        return 0

    @staticmethod
    def set_device(device: Any) -> None:
        pass

    @staticmethod
    def exchange_device(device: int) -> int:
        return 0

    maybe_exchange_device = exchange_device

    @staticmethod
    def synchronize(device: Any = None) -> None:
        pass

    @staticmethod
    def get_raw_stream(device_idx: int) -> int:
        return 0

    @staticmethod
    def get_device_properties(device: Any = None) -> Any:
        return PROPERTIES

    @staticmethod
    def get_compute_capability(device: Any = None) -> int:
        return 90

    @staticmethod
    def is_bf16_supported(including_emulation: bool = False) -> bool:
        return True

    @staticmethod
    def is_triton_capable(device: Any = None) -> bool:
        return True

    @staticmethod
    def raise_if_triton_unavailable(device: Any = None) -> None:
        pass


@contextlib.contextmanager
def absent_gpu() -> Iterator[None]:
    """Inside, tensors made on "cuda" are fake, and what is compiled for them is generated but not run."""
    device_interface.get_interface_for_device("cpu")  # PyTorch registers its own first
    previous = dict(device_interface.device_interfaces)
    for name in ("cuda", "cuda:0"):
        device_interface.register_interface_for_device(name, AbsentGPU)
    try:
        # PyTorch folds constants by computing them on the device.
        with (
            torch._inductor.config.patch(joint_graph_constant_folding=False, compile_threads=1),
            compile_only(),
            FakeTensorMode(),
        ):
            yield
    finally:
        device_interface.device_interfaces.update(previous)


def stop_at_code(compiled: Callable[..., Any], *args: Any) -> tuple[None, list[str]]:
    """Let PyTorch generate code; loading that code fails, for want of a GPU.

    The code is empty if PyTorch has to write a kernel of its own: for that it asks the GPU itself.
    """
    codes: list[str] = []
    previous = GraphLowering.save_output_code
    GraphLowering.save_output_code = staticmethod(codes.append)  # PyTorch keeps it for tests
    try:
        compiled(*args)
    except RuntimeError as error:
        if not codes and "NVIDIA driver" not in str(error):
            raise
    finally:
        GraphLowering.save_output_code = previous
    return None, codes or [""]
