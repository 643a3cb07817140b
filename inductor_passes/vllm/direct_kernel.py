"""A Triton kernel that is launched by address: a tuple of numbers goes to Triton's launcher in C, nothing else runs.

Triton's own way asks each argument for its type, its address and its alignment in every launch, and looks the compiled
kernel up by the answers. Here all of that is settled once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

from inductor_passes.vllm.once import say_once
from mamba_ops.ops.launch import Launch

Grid = tuple[int, int, int]


class DirectKernel:
    """A Triton kernel compiled for one launch's arguments, of which the first ones may then vary.

    Args:
        launch: its arguments stand for all later ones: the same types, the same divisibility by 16, the same ones.
        last_varying: the kernel's parameters up to this one are given in each call, tensors as addresses.

    Raises:
        Exception: whatever Triton raises when it cannot compile.
    """

    def __init__(self, launch: Launch, last_varying: str) -> None:
        names: list[str] = launch.kernel.arg_names
        varying = names.index(last_varying) + 1
        self._fixed = _values(launch, names[varying:])
        self._compiled = compiled(launch)  # which unloads the kernel when it goes
        self._launch = _launcher(self._compiled, (0,) * varying + self._fixed)

    def __call__(self, grid: Grid, stream: int, *varying: int | None) -> None:
        """Launch it."""
        self._launch(*grid, stream, varying + self._fixed)


class NamedKernel:
    """The same for a kernel of others: what varies is named and may stand anywhere among its parameters.

    Args:
        launch: with all arguments by name, but for constants that heuristics of the kernel work out.
        varying: names of what is given in each call, in this order.

    Raises:
        Exception: the kernel has other parameters, or Triton cannot compile it.
    """

    def __init__(self, launch: Launch, varying: Sequence[str]) -> None:
        names: list[str] = launch.kernel.arg_names
        unknown = [name for name in varying if name not in names]
        if unknown:
            raise ValueError(f"the kernel has no parameter {unknown[0]}")
        self._compiled = compiled(launch)
        rest = [name for name in names if name not in varying]
        self._fixed = _values(launch, rest)
        given = [*varying, *rest]
        self._in_order = itemgetter(*(given.index(name) for name in names))
        zeros = self._in_order((0,) * len(varying) + self._fixed)
        self._launch = _launcher(self._compiled, zeros)

    def __call__(self, grid: Grid, stream: int, *varying: int | None) -> None:
        """Launch it."""
        self._launch(*grid, stream, self._in_order(varying + self._fixed))


def compiled(launch: Launch) -> Any:
    """The kernel of a launch, compiled for its arguments unless it is already; nothing is loaded."""
    return launch.kernel.warmup(*launch.arguments, grid=launch.grid, **launch.constants)


def _values(launch: Launch, names: Sequence[str]) -> tuple[Any, ...]:
    """What a launch gives for parameters. The launcher reads no constants: one that a heuristic works out is None."""
    given = dict(zip(launch.kernel.arg_names, launch.arguments, strict=False)) | launch.constants
    function = launch.kernel
    while not hasattr(function, "params"):  # heuristics stand around it
        function = function.fn
    constants = {parameter.name for parameter in function.params if parameter.is_constexpr}
    return tuple(given.get(name) if name in constants else given[name] for name in names)


def _launcher(compiled: Any, arguments: tuple[Any, ...]) -> Callable[..., None]:
    """Triton's launcher in C, or if it cannot be called the Python in front of it."""
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata  # the first loads the kernel
    try:
        return _in_c(compiled, arguments)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        say_once(logging.WARNING, f"kernels are launched through Python code of Triton's, which takes longer: {reason}")

    def launch(x: int, y: int, z: int, stream: int, arguments: tuple[Any, ...]) -> None:
        run(x, y, z, stream, function, metadata, None, None, None, *arguments)

    return launch


def _in_c(compiled: Any, arguments: tuple[Any, ...]) -> Callable[..., None]:
    run = compiled.run
    if run.global_scratch_size or run.profile_scratch_size:
        raise RuntimeError("a kernel needs scratch memory")
    in_c, annotations, signature = run.launch, run.arg_annotations, run.kernel_signature
    options = (compiled.function, run.launch_cooperative_grid, run.launch_pdl, compiled.packed_metadata)

    def launch(x: int, y: int, z: int, stream: int, arguments: tuple[Any, ...]) -> None:
        in_c(x, y, z, stream, *options, None, None, None, None, None, annotations, signature, arguments)

    launch(0, 0, 0, 0, arguments)  # reads all arguments and launches nothing
    return launch
