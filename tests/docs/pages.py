"""The pages of the documentation and the Python code on them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent.parent / "docs"
# A block of `python` is run, one of `py` is only shown. What it prints may follow it, in a block of its own.
BLOCK = re.compile(
    r"^```python[^\n]*\n(.*?)^```$(?:\n+^```text title=\"prints\"\n(.*?)^```$)?", re.MULTILINE | re.DOTALL
)


def blocks(text: str) -> Iterator[tuple[str, str]]:
    """Each block of code and what it says that it prints."""
    for found in BLOCK.finditer(text):
        yield found[1], found[2] or ""


PAGES = [path for path in sorted(FOLDER.rglob("*.md")) if any(blocks(path.read_text()))]


def run(code: str, page: Path, names: dict[str, object]) -> None:
    """Run a block among the names that the blocks before it have left."""
    exec(compile(code, f"{page.name}: a block", "exec"), names)
