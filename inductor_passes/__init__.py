"""A pass for `torch.compile` that removes the snapshot of cached Mamba2 states from compiled graphs."""

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
