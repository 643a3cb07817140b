"""What Dynamo made of the user's functions, decompiled by depyf.

Only depyf's decompiler is used: its `prepare_debug` lets the program run decompiled code in place of its own, and
writes files from inside the compiler, where an error ends the user's run. Here nothing of the program is replaced.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch._dynamo.convert_frame

from inductor_passes.inspection.noting import noting


@dataclasses.dataclass(frozen=True)
class _Transformed:
    """A function's code, what Dynamo runs in its place, and the function's global variables."""

    code: CodeType
    new_code: CodeType
    variables: dict[str, Any]


@contextlib.contextmanager
def decompiled_to(folder: Path, problems: list[str], codes: list[str] | None = None) -> Iterator[None]:
    """Write the functions that Dynamo transforms in this block, as Python.

    Files:
        transformed_code_for_NAME_N_M.py: the bytecode that runs in the place of a function, decompiled.
        full_code_for_NAME_N.py: that, its guards, and the function as it was.

    Args:
        folder: where they go.
        problems: takes what goes wrong; nothing is raised.
        codes: what Inductor generated in this block, one for each compiled function; they are `code_N.py` then.
    """
    transformed: list[_Transformed] = []

    def note(code: CodeType, new_code: CodeType) -> None:
        transformed.append(_Transformed(code, new_code, _globals_of(code)))

    handle = torch._dynamo.convert_frame.register_bytecode_hook(note)
    try:
        yield
    finally:
        handle.remove()
        try:
            _write(folder, transformed, problems, len(codes or ()))
        except Exception as error:
            problems.append(f"depyf's files were not written: {error!r}")


def _write(folder: Path, transformed: list[_Transformed], problems: list[str], ncodes: int) -> None:
    if not transformed:
        return
    depyf: Any = importlib.import_module("depyf")
    folder.mkdir(parents=True, exist_ok=True)
    compiled = [name for item in transformed for name in item.new_code.co_names if name.startswith("__compiled_fn")]
    # What depyf calls `__compiled_fn_1*.py` is a file beside its folder.
    files = [(f"{name}*.py", f"../code_{number}.py") for number, name in enumerate(compiled)]
    functions: dict[CodeType, list[_Transformed]] = {}
    for item in transformed:
        functions.setdefault(item.code, []).append(item)
    for number, (code, versions) in enumerate(functions.items()):
        name = "".join(letter if letter.isalnum() else "_" for letter in code.co_name)
        for which, version in enumerate(versions):
            with noting(problems, f"depyf could not decompile what Dynamo made of {code.co_name}"):
                text = depyf.decompile(version.new_code)
                (folder / f"transformed_code_for_{name}_{number}_{which}.py").write_text(text, encoding="utf-8")
        with noting(problems, f"depyf could not show {code.co_name} with its guards"):
            text = _full_code(code, versions[0].variables)
            for there, here in files if len(files) == ncodes else ():
                text = text.replace(there, here)
            (folder / f"full_code_for_{name}_{number}.py").write_text(text, encoding="utf-8")


def _full_code(code: CodeType, variables: dict[str, Any]) -> str:
    explain: Any = importlib.import_module("depyf.explain.utils")
    return str(explain.DynamoOptimizationResult(code, None, variables).to_src())


def _globals_of(code: CodeType) -> dict[str, Any]:
    """Global variables of the function that is being compiled: Dynamo, which calls this, holds its frame."""
    caller: FrameType | None = sys._getframe()
    while caller is not None:
        found: Any = caller.f_locals.get("frame")
        if getattr(found, "f_code", None) is code:
            variables: dict[str, Any] = found.f_globals
            return variables
        caller = caller.f_back
    return {}
