"""One run of a target in a process of its own, so that neither run meets what the other has compiled or changed.

python -m inductor_passes.inspection.running {with_pass,without_pass} FOLDER RESULT TARGET [ARGUMENT ...]
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch._inductor import metrics

from inductor_passes.inspection.calls import calls_noted
from inductor_passes.inspection.comparison import Outcome, tensors_in
from inductor_passes.inspection.decompiling import decompiled_to
from inductor_passes.inspection.folder import DEPYF, WITH_PASS
from inductor_passes.inspection.recorded import Recording
from inductor_passes.inspection.recording import recorded, without_caches
from inductor_passes.inspection.target import TargetError, run
from inductor_passes.observing import suspended
from inductor_passes.switching import eliminate_snapshots

BAD_TARGET = 2


@dataclasses.dataclass
class Run:
    """What one run left for the process that started it."""

    recording: Recording
    outcome: Outcome


def main(arguments: Sequence[str]) -> int:
    """Run a target and write down a `Run`, unless there is no such target; return the exit status."""
    mode, folder, result, target, *rest = arguments
    this = Run(Recording(), Outcome())
    problems = this.recording.problems
    # A program that seeds nothing draws the same numbers in both runs.
    random.seed(0)
    torch.manual_seed(0)
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(decompiled_to(Path(folder) / mode / DEPYF, problems, this.recording.codes))
            stack.enter_context(recorded(this.recording))
            stack.enter_context(without_caches())
            stack.enter_context(calls_noted(this.outcome.calls, problems))
            stack.enter_context(eliminate_snapshots() if mode == WITH_PASS else suspended())
            _run(target, rest, this.outcome, problems)
    except TargetError as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_TARGET
    except BaseException:
        _save(this, result)
        raise
    _save(this, result)
    return 0


def _run(target: str, arguments: Sequence[str], outcome: Outcome, problems: list[str]) -> None:
    try:
        left = run(target, arguments)
    except SystemExit as stop:
        if stop.code not in (None, 0):
            raise
        return
    try:
        outcome.tensors = tensors_in(left, problems)
    except Exception as error:
        problems.append(f"what the program left could not be compared: {error!r}")


def _save(this: Run, result: str) -> None:
    this.outcome.kernels = metrics.generated_kernel_count
    torch.save(this, result)


if __name__ == "__main__":
    # Under its own name, so that the process which reads the result knows its classes.
    from inductor_passes.inspection.running import main as main_by_name

    sys.exit(main_by_name(sys.argv[1:]))
