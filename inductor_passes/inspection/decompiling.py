"""What Dynamo made of the user's functions, decompiled by depyf.

Only depyf's decompiler is used: its `prepare_debug` lets the program run decompiled code in place of its own, and
writes files from inside the compiler, where an error ends the user's run. Here nothing of the program is replaced.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import torch._dynamo.convert_frame


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
    transformed: list[tuple[CodeType, CodeType]] = []

    def note(code: CodeType, new_code: CodeType) -> None:
        transformed.append((code, new_code))

    handle = torch._dynamo.convert_frame.register_bytecode_hook(note)
    try:
        yield
    finally:
        handle.remove()
        try:
            _write(folder, transformed, problems, len(codes or ()))
        except Exception as error:
            problems.append(f"depyf's files were not written: {error!r}")


def _write(folder: Path, transformed: list[tuple[CodeType, CodeType]], problems: list[str], ncodes: int) -> None:
    if not transformed:
        return
    depyf: Any = importlib.import_module("depyf")
    folder.mkdir(parents=True, exist_ok=True)
    compiled = [name for _, new in transformed for name in new.co_names if name.startswith("__compiled_fn")]
    # What depyf calls `__compiled_fn_1*.py` is a file beside its folder.
    files = [(f"{name}*.py", f"../code_{number}.py") for number, name in enumerate(compiled)]
    functions: dict[CodeType, list[CodeType]] = {}
    for code, new in transformed:
        functions.setdefault(code, []).append(new)
    for number, (code, versions) in enumerate(functions.items()):
        name = "".join(letter if letter.isalnum() else "_" for letter in code.co_name)
        for which, version in enumerate(versions):
            with _noting(problems, f"depyf could not decompile what Dynamo made of {code.co_name}"):
                (folder / f"transformed_code_for_{name}_{number}_{which}.py").write_text(depyf.decompile(version))
        with _noting(problems, f"depyf could not show {code.co_name} with its guards"):
            text = _full_code(code)
            for there, here in files if len(files) == ncodes else ():
                text = text.replace(there, here)
            (folder / f"full_code_for_{name}_{number}.py").write_text(text)


def _full_code(code: CodeType) -> str:
    explain: Any = importlib.import_module("depyf.explain.utils")
    return str(explain.DynamoOptimizationResult(code, None, _globals_of(code)).to_src())


@contextlib.contextmanager
def _noting(problems: list[str], what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        problems.append(f"{what}: {type(error).__name__}: {error}")


def _globals_of(code: CodeType) -> dict[str, Any]:
    for owner in gc.get_referrers(code):
        if isinstance(owner, FunctionType) and owner.__code__ is code:
            return owner.__globals__
    raise LookupError(f"no function has the code of {code.co_name} any more")
