"""A Triton kernel that is launched by address: a tuple of numbers goes to Triton's launcher in C, nothing else runs.

Triton's own way asks each argument for its type, its address and its alignment in every launch, and looks the compiled
kernel up by the answers. Here all of that is settled once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mamba_ops.ops.launch import Launch

Grid = tuple[int, int, int]


class DirectKernel:
    """A Triton kernel compiled for one launch's arguments, of which the first ones may then vary.

    Args:
        launch: its arguments stand for all later ones: the same types, the same divisibility by 16, the same ones.
        varying: how many of the kernel's parameters are given in each call, tensors as addresses.

    Raises:
        Exception: whatever Triton raises when it cannot compile.
    """

    def __init__(self, launch: Launch, varying: int) -> None:
        names: list[str] = launch.kernel.arg_names
        given = dict(zip(names, launch.arguments, strict=False)) | launch.constants
        compiled = launch.kernel.warmup(*launch.arguments, grid=launch.grid, **launch.constants)
        self._fixed = tuple(given[name] for name in names[varying:])
        self._compiled = compiled  # which unloads the kernel when it goes
        self._launch = _in_c(compiled, (0,) * varying + self._fixed) or _in_python(compiled)

    def __call__(self, grid: Grid, stream: int, *varying: int | None) -> None:
        """Launch it."""
        self._launch(*grid, stream, varying + self._fixed)


def _in_python(compiled: Any) -> Callable[..., None]:
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata

    def launch(x: int, y: int, z: int, stream: int, arguments: tuple[Any, ...]) -> None:
        run(x, y, z, stream, function, metadata, None, None, None, *arguments)

    return launch


def _in_c(compiled: Any, arguments: tuple[Any, ...]) -> Callable[..., None] | None:
    """The launcher behind Triton's `run`; None if this Triton has another one, or the kernel needs scratch memory."""
    run = compiled.run  # loads the kernel
    try:
        if run.global_scratch_size or run.profile_scratch_size:
            return None
        in_c, annotations, signature = run.launch, run.arg_annotations, run.kernel_signature
        options = (compiled.function, run.launch_cooperative_grid, run.launch_pdl, compiled.packed_metadata)
    except AttributeError:
        return None

    def launch(x: int, y: int, z: int, stream: int, arguments: tuple[Any, ...]) -> None:
        in_c(x, y, z, stream, *options, None, None, None, None, None, annotations, signature, arguments)

    try:
        launch(0, 0, 0, 0, arguments)  # reads all arguments and launches nothing
    except Exception:
        return None
    return launch
