"""The table of matches and declines, for a terminal and for a file."""

from __future__ import annotations

import io

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from inductor_passes.inspection.drawing import short
from inductor_passes.inspection.findings import Finding, Place, findings, headline
from inductor_passes.inspection.folder import Inspected

WIDTH = 120
_STYLES = {"gone": "bold green", "rewritten": "green", "kept": "bold yellow"}


def as_text(inspected: Inspected) -> str:
    """Everything without colours, as it goes into a file."""
    console = Console(file=io.StringIO(), width=WIDTH, color_system=None, legacy_windows=False)
    console.print(renderable(inspected))
    file = console.file
    assert isinstance(file, io.StringIO)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines()) + "\n"


def renderable(inspected: Inspected) -> RenderableType:
    """The headline, the table, and what else there is to say."""
    parts: list[RenderableType] = [Text(f"{headline(inspected)}: {inspected.title}", style="bold")]
    found = findings(inspected)
    if found:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for heading, folds in (("graph", False), ("snapshot", False), ("why, and where from", True)):
            table.add_column(heading, overflow="fold" if folds else "ellipsis", no_wrap=not folds)
        for finding in found:
            table.add_row(str(finding.graph), Text(finding.verdict, style=_STYLES[finding.verdict]), _reason(finding))
        parts.append(table)
    if not inspected.recording.changes:
        parts.append(Text(inspected.no_graph))
    if inspected.comparison:
        parts.append(Text(f"{inspected.comparison}."))
    parts += [Text(f"Not shown: {problem}", style="yellow") for problem in inspected.recording.problems]
    return Group(*parts)


def _reason(finding: Finding) -> RenderableType:
    sentence = f"{finding.condition}: {finding.sentence}" if finding.condition else finding.sentence
    lines = Table(box=None, show_header=False, pad_edge=False, padding=(0, 1, 0, 0))
    lines.add_column(no_wrap=True)
    lines.add_column(overflow="fold")
    for place in finding.places:
        lines.add_row(Text(place.part, style="dim"), _where(place))
    return Group(Text(sentence), lines, Text(""))


def _where(place: Place) -> Text:
    text = Text(", ".join(name if short(op) in name else f"{name} ({short(op)})" for name, op, _ in place.nodes))
    if place.source:
        text.append(f"\n  {place.source}", style="cyan")
    if place.code:
        text.append(f"  {place.code}", style="dim")
    return text
