"""What is looked at in the processes that hold the layers. vLLM's engine carries these functions there."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

_RANGE = "mamba_layer"
# A kernel that no op launches belongs to the op around it: vLLM's, which is all of a layer but its projections.
_RANGES = {_RANGE, "vllm::mamba_mixer2"}
# Ops that copy rows out of a cache or mask them, as the snapshot is spelled.
_SNAPSHOT_OPS = {"aten::index", "aten::index_select", "aten::gather", "aten::take", "aten::where", "aten::masked_fill"}
_SNAPSHOT_KERNEL = re.compile(r"gather|where|(^|_)index(_|$)|index_elementwise|masked_fill")
_OUR_KERNEL = re.compile(r"^_?(state_passing|chunk_|bmm_|causal_conv)")

_profiles: list[Any] = []
_reports: list[str] = []


def graph_figures(_: Any) -> dict[str, Any]:
    """What this process has captured. How many graphs were compiled depends on what a cache on disk already had."""
    from vllm.compilation.counter import compilation_counter

    return {"num_cudagraph_captured": compilation_counter.num_cudagraph_captured}


def offer_whole_steps(worker: Any, offered: bool) -> bool:
    """Let the worker replay whole steps with a prefill, or not; whether it has captured any."""
    offer = getattr(worker.model_runner.cudagraph_manager, "offer", None)
    return offer is not None and bool(offer(offered))


def listen_to_jit_monitor(_: Any) -> bool:
    """Keep what vLLM's JIT monitor reports from here on; whether it is active."""
    logging.getLogger("vllm.utils.jit_monitor").addHandler(_Reports(logging.WARNING))
    try:
        from vllm.utils.jit_monitor import is_active
    except ImportError:
        return False
    return bool(is_active())


def jit_reports(_: Any) -> list[str]:
    """The reports so far."""
    return list(_reports)


def layer_names(model: Any) -> list[str]:
    """The classes of the Mamba2 layers."""
    return [type(layer).__name__ for layer in layers(model)]


def start_profile(model: Any) -> None:
    """Profile from here on, with a range around each call of a Mamba2 layer."""
    for layer in layers(model):
        layer.conv_ssm_forward = _in_range(layer.conv_ssm_forward)
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    _profiles.append(profile(activities=activities))
    _profiles[-1].start()


def stop_profile(model: Any) -> dict[str, Any]:
    """How many layer calls there were, and by name the ops and kernels in them that gather or mask states."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    profiled = _profiles.pop()
    profiled.stop()
    restore(model)
    found: dict[str, int] = {}
    calls = 0
    for event in profiled.events():
        calls += event.name == _RANGE and event.device_type == torch.autograd.DeviceType.CPU
        if not inside_layer(event):
            continue
        kernels = [kernel.name for kernel in event.kernels if _is_snapshot_kernel(kernel.name)]
        for name in [event.name] if event.name in _SNAPSHOT_OPS else kernels:
            found[name] = found.get(name, 0) + 1
    return {"calls": calls, "launches": found}


def restore(model: Any) -> None:
    """Let the layers run as they are, without what was put around them here."""
    for layer in layers(model):
        layer.__dict__.pop("conv_ssm_forward", None)


def compare_layers(model: Any, calls: int, tolerance: float) -> None:
    """From here on run each layer's prefill both ways, and count differences in the plugin's counters."""
    from inductor_passes.vllm.decline import counters
    from inductor_passes.vllm.layer import SnapshotFreeMixer2
    from inductor_passes.vllm.verify import verified

    counters.verified = counters.mismatches = 0
    for layer in layers(model):
        layer._options = layer._options.__class__(verify=calls, verify_tolerance=tolerance)
        stock = super(SnapshotFreeMixer2, layer).conv_ssm_forward
        layer.conv_ssm_forward = verified(layer, stock, layer.conv_ssm_forward)


def plugin_counters(_: Any) -> dict[str, Any]:
    """The plugin's counters in this process."""
    from inductor_passes.vllm.decline import COUNTED, counters

    declined = {reason.name: count for reason, count in counters.declined.items()}
    return {**{name: getattr(counters, name) for name in COUNTED}, "declined": declined}


def memory(_: Any) -> dict[str, int]:
    """Bytes that this process holds in main memory, and on its GPU if it has one."""
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    if not torch.cuda.is_available():
        return {"resident": resident}
    torch.cuda.synchronize()
    return {
        "resident": resident,
        "allocated": torch.cuda.memory_allocated(),
        "reserved": torch.cuda.memory_reserved(),
    }


def zero_states(model: Any) -> None:
    """Forget what the Mamba2 layers have cached, as a wrong layer would."""
    for layer in layers(model):
        layer.kv_cache[1].zero_()


class _Reports(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        _reports.append(record.getMessage())


def layers(model: Any) -> list[Any]:
    """The Mamba2 layers."""
    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

    return [module for module in model.modules() if isinstance(module, MambaMixer2)]


def _in_range(forward: Any) -> Any:
    def in_range(**tensors: Any) -> None:
        with record_function(_RANGE):
            forward(**tensors)

    return in_range


def inside_layer(event: Any) -> bool:
    """Whether an event of the profiler lies in a call of a Mamba2 layer."""
    while event is not None:
        if event.name in _RANGES:
            return True
        event = event.cpu_parent
    return False


def _is_snapshot_kernel(name: str) -> bool:
    return bool(_SNAPSHOT_KERNEL.search(name)) and not _OUR_KERNEL.search(name)
