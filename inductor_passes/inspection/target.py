"""What the user names to be run: a Python file, or a function of a module."""

from __future__ import annotations

import importlib.util
import inspect
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

GRANITE_LAYER = "inductor_passes.inspection.granite_layer:continue_sequence"


class TargetError(Exception):
    """What the user has named cannot be run; the message is all there is to say."""


def check(target: str) -> None:
    """Raise a `TargetError` if there is no such file or module; whether it has the function shows when it runs."""
    if Path(target).is_file():
        return
    if ":" not in target:
        raise TargetError(f"{target}: no such file; a target is FILE.py or MODULE:FUNCTION")
    module = target.partition(":")[0]
    try:
        found = importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # a package on the way is missing, or it is no name
        found = False
    except Exception:  # a package on the way fails when it is imported: that shows when the target runs
        return
    if not found:
        raise TargetError(f"{target}: there is no module {module!r}")


def run(target: str, arguments: Sequence[str]) -> Any:
    """Run a target as it would run by itself.

    Args:
        target: `FILE.py`, or `MODULE:FUNCTION` for a function that needs no arguments.
        arguments: what a file finds in `sys.argv`.

    Returns:
        What the function returned, or the file's global variables at its end.

    Raises:
        TargetError: there is no such file, module or function.
        Exception: whatever the target raises.
    """
    check(target)
    file = Path(target)
    if not file.is_file():
        return _function(target)()
    sys.argv = [target, *arguments]
    sys.path.insert(0, str(file.resolve().parent))
    variables = runpy.run_path(str(file), run_name="__main__")
    return {name: value for name, value in variables.items() if not name.startswith("__")}


def _function(target: str) -> Any:
    module, _, name = target.partition(":")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        raise TargetError(f"{target}: {module} has no function {name!r}")
    needed = [
        parameter.name
        for parameter in inspect.signature(found).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if needed:
        raise TargetError(f"{target}: the function is called without arguments, but needs {', '.join(needed)}")
    return found
