"""The code on the pages runs, and prints what the pages say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from mamba_ops import ops
from tests.docs.pages import FOLDER, PAGES, blocks, run


def without_layout(text: str) -> str:
    """Text without line breaks and source lines, which depend on who runs it and where."""
    return " ".join(re.sub(r" at \S+:\d+", "", text).split())


@pytest.mark.parametrize("page", [path for path in PAGES if path.name != "declines.md"], ids=lambda path: path.stem)
def test_the_code_of_a_page_runs(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {}
    torch.manual_seed(0)
    for code, prints in blocks(page.read_text()):
        run(code, page, names)
        said = capsys.readouterr().out
        for line in prints.splitlines():
            assert without_layout(line.strip("… ")) in without_layout(said)


def test_pages_show_no_prompt_of_a_shell_in_python() -> None:
    for page in FOLDER.rglob("*.md"):
        assert not re.search(r"^```python\n\$ ", page.read_text(), re.MULTILINE), page


def test_the_page_of_examples_includes_each_of_them() -> None:
    """By the very line that the site replaces: a formatter that takes it for code spoils it."""
    shown = re.findall(r'^ +--8<-- "examples/(.+)"$', (FOLDER / "examples.md").read_text(), re.MULTILINE)
    programs = {path.name for path in (FOLDER.parent / "examples").glob("*.py")}
    assert set(shown) == programs - {"tiny_model.py"}


def test_the_page_of_ops_has_each_of_them() -> None:
    """By its module: asked for the package alone, the site leaves out each op that has the name of its module."""
    shown = re.findall(r"^::: mamba_ops\.ops\.\w+\.(\w+)$", (FOLDER / "api" / "ops.md").read_text(), re.MULTILINE)
    assert set(shown) == {*ops.__all__, "causal_conv_tiled", "conv_cumsum"}
