"""Bytes in use on the GPUs, by all processes."""

from __future__ import annotations

import subprocess
import time

import torch


def gpu_bytes(gpus: int) -> float:
    """Memory in use on the first GPUs, by whatever can tell: NVML, nvidia-smi, or CUDA in this process.

    Differences of it are meant to be used: CUDA in this process takes some memory itself. 0 without a GPU.
    """
    for source in (_from_nvml, _from_nvidia_smi, _from_cuda):
        try:
            return source(gpus)
        except Exception:  # each has its own errors, down to a missing library
            continue
    return 0.0


def settled_gpu_bytes(gpus: int, seconds: float = 20) -> float:
    """The same once it stands still: a process that has ended gives its memory back a little later."""
    used = gpu_bytes(gpus)
    for _ in range(int(2 * seconds)):
        time.sleep(0.5)
        before, used = used, gpu_bytes(gpus)
        if used == before:
            break
    return used


def _from_nvml(gpus: int) -> float:
    import pynvml

    pynvml.nvmlInit()
    handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(gpus)]
    return float(sum(pynvml.nvmlDeviceGetMemoryInfo(handle).used for handle in handles))


def _from_nvidia_smi(gpus: int) -> float:
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    lines = subprocess.run(query, capture_output=True, text=True, check=True, timeout=60).stdout.split()
    return sum(float(line) for line in lines[:gpus]) * 2**20


def _from_cuda(gpus: int) -> float:
    used = 0
    for index in range(gpus):
        free, total = torch.cuda.mem_get_info(index)
        used += total - free
    return float(used)
