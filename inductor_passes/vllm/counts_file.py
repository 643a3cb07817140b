"""Counts of the processes of one server, in memory that outlives each of them.

vLLM counts in its API server and runs layers in other processes, which it kills when it stops, before they can say
anything. So each of those keeps its counts in a small file that it maps into memory, in a folder that the first process
makes and removes, and which its children find through an environment variable. To count is to store an integer.
"""

from __future__ import annotations

import atexit
import mmap
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

VARIABLE = "MAMBA_OPS_VLLM_COUNTS"
_ITEM = 8  # bytes of an int64


def open_folder(at_end: Callable[[], None]) -> None:
    """Make the folder for the counts of this process and its children; nothing if a parent has made one.

    Args:
        at_end: called when this process ends, before the folder is removed.

    Raises:
        OSError: there is no place for it.
    """
    if folder() is not None:
        return
    made = tempfile.mkdtemp(prefix="mamba_ops_counts_")
    os.environ[VARIABLE] = made
    process = os.getpid()

    def end() -> None:
        if os.getpid() != process:  # a fork's
            return
        try:
            at_end()
        finally:
            shutil.rmtree(made, ignore_errors=True)

    atexit.register(end)


def folder() -> Path | None:
    """The folder that this process or a parent has made, if it is still there."""
    path = os.environ.get(VARIABLE)
    return Path(path) if path and Path(path).is_dir() else None


def own_cells(size: int) -> memoryview | None:
    """So many int64 in the file of this process; None if there is no folder.

    Raises:
        OSError: the file cannot be made.
    """
    parent = folder()
    if parent is None:
        return None
    with (parent / str(os.getpid())).open("w+b") as file:
        file.truncate(size * _ITEM)
        return memoryview(mmap.mmap(file.fileno(), size * _ITEM)).cast("q")


def sums(size: int) -> list[int]:
    """The sum of each of so many int64 over the files of all processes."""
    parent = folder()
    texts = [] if parent is None else [path.read_bytes() for path in parent.iterdir()]
    rows = [memoryview(text).cast("q") for text in texts if len(text) == size * _ITEM]
    return [sum(row[index] for row in rows) for index in range(size)]
