"""What goes wrong while something is shown becomes a line for the reader, and the rest is shown all the same."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def noting(problems: list[str], what: str, *, first_line: bool = False) -> Iterator[None]:
    """Turn an error inside the block into a problem.

    Args:
        problems: takes a line for it.
        what: has failed, in words.
        first_line: whether the first line of the error's message is enough.
    """
    try:
        yield
    except Exception as error:
        message = str(error).partition("\n")[0] if first_line else str(error)
        problems.append(f"{what}: {type(error).__name__}: {message}")
