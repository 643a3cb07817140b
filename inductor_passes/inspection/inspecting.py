"""`inspect` around whatever the user compiles: the pass is on, and a folder shows what it did."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator
from os import PathLike
from pathlib import Path

from inductor_passes.inspection.decompiling import decompiled_to
from inductor_passes.inspection.folder import DEPYF, WITH_PASS, Inspected, clear, write
from inductor_passes.inspection.recorded import Recording
from inductor_passes.inspection.recording import recorded, without_caches
from inductor_passes.snapshot_elimination import SnapshotElimination
from inductor_passes.switching import eliminate_snapshots

logger = logging.getLogger("inductor_passes")


@contextlib.contextmanager
def inspect(
    folder: str | PathLike[str] = "inspection", *, title: str | None = None, masked_gather: bool = True
) -> Iterator[SnapshotElimination]:
    """Run the pass on every graph that is compiled in this block, and write down what it did.

    The folder gets `report.html`, `table.txt`, each graph before and after the pass, the code that Inductor generated
    and depyf's decompiled bytecode. It is written when the block ends, however it ends. What cannot be looked at or
    written is a warning in the log of `inductor_passes`; the block runs all the same. Compile caches are off inside.

    `torch.compile` compiles when the function is first called, and not again for what it has compiled before: make that
    first call inside the block. A pass that the block switches on by itself is shown too.

    Args:
        folder: made if it is not there; what an earlier inspection left in it is replaced.
        title: what the page says was inspected; by default the program's name.
        masked_gather: see `SnapshotElimination`.

    Yields:
        The pass; its `report()` tells what happened.
    """
    target, recording = Path(folder), Recording()
    with contextlib.suppress(OSError):  # the same error comes again when something is written
        clear(target)
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(decompiled_to(target / WITH_PASS / DEPYF, recording.problems, recording.codes))
            stack.enter_context(recorded(recording))
            stack.enter_context(without_caches())
            yield stack.enter_context(eliminate_snapshots(masked_gather=masked_gather))
    finally:
        write(target, Inspected(title or Path(sys.argv[0]).name or "this program", recording))
        for problem in recording.problems:
            logger.warning("inspection of %s: %s", target, problem)
