"""A graph's statements, and two lists of them side by side."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterator

CONTEXT = 3


@dataclasses.dataclass(frozen=True)
class Row:
    """A line of a side-by-side diff.

    Attributes:
        left, right: the statements; empty where the other side has one more.
        left_number, right_number: counted from 1; None beside an empty side.
        changed: whether the two differ.
    """

    left_number: int | None
    left: str
    right_number: int | None
    right: str
    changed: bool


def statements(text: str) -> list[str]:
    """Statements without comments, annotations, and the `x = None` that frees what is not used again."""
    found = []
    for line in text.splitlines():
        statement = line.split(";  ")[0].strip().replace("torch.ops.", "")
        statement = re.sub(r'^(\w+): "[^"]*" = ', r"\1 = ", statement)
        if statement and not statement.startswith("#"):
            found.append(statement)
    return found


def side_by_side(before: list[str], after: list[str]) -> list[list[Row]]:
    """The places where two lists differ, each with a few lines around it."""
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    return [
        [row for code in group for row in _rows(code, before, after)] for group in matcher.get_grouped_opcodes(CONTEXT)
    ]


def _rows(code: tuple[str, int, int, int, int], before: list[str], after: list[str]) -> Iterator[Row]:
    tag, left_start, left_end, right_start, right_end = code
    left, right = range(left_start, left_end), range(right_start, right_end)
    if tag == "equal":
        pairs: list[tuple[int | None, int | None]] = list(zip(left, right, strict=True))
    else:
        pairs = _matched(left, right, before, after)
    for old, new in pairs:
        yield Row(
            None if old is None else old + 1,
            "" if old is None else before[old],
            None if new is None else new + 1,
            "" if new is None else after[new],
            tag != "equal",
        )


def _matched(left: range, right: range, before: list[str], after: list[str]) -> list[tuple[int | None, int | None]]:
    """Statements that call the same thing stand beside each other, all others alone."""
    called_left, called_right = [_called(before[i]) for i in left], [_called(after[i]) for i in right]
    pairs: list[tuple[int | None, int | None]] = []
    for tag, i, i_end, j, j_end in difflib.SequenceMatcher(None, called_left, called_right, False).get_opcodes():
        if tag == "equal":
            pairs += zip(left[i:i_end], right[j:j_end], strict=True)
        else:
            pairs += [(old, None) for old in left[i:i_end]]
            pairs += [(None, new) for new in right[j:j_end]]
    return pairs


def _called(statement: str) -> str:
    """What a statement calls or takes, without the numbers that tell nodes apart."""
    return re.sub(r"_?\d+", "", statement.partition(" = ")[2].partition("(")[0])
