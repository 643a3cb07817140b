"""A pass for `torch.compile` that removes the snapshot of cached Mamba2 states from compiled graphs.

What is public is imported when it is first asked for: the doctor must be able to say what is wrong with a PyTorch that
the pass cannot even be imported beside.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from inductor_passes.inspection import inspect
    from inductor_passes.report import Condition, Decline, GraphReport, NodeName, Report, Rewrite
    from inductor_passes.snapshot_elimination import SnapshotElimination
    from inductor_passes.switching import eliminate_snapshots, inductor_options, install, uninstall

__all__ = [
    "Condition",
    "Decline",
    "GraphReport",
    "NodeName",
    "Report",
    "Rewrite",
    "SnapshotElimination",
    "eliminate_snapshots",
    "inductor_options",
    "inspect",
    "install",
    "uninstall",
]

_MODULES = {
    "inspection": ("inspect",),
    "report": ("Condition", "Decline", "GraphReport", "NodeName", "Report", "Rewrite"),
    "snapshot_elimination": ("SnapshotElimination",),
    "switching": ("eliminate_snapshots", "inductor_options", "install", "uninstall"),
}


def __getattr__(name: str) -> object:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
