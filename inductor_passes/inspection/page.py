"""The page: one file that needs nothing else, for a wide screen and for a phone, in light and in dark."""

from __future__ import annotations

import dataclasses
import platform
from pathlib import Path

import jinja2
import torch

from inductor_passes.inspection.describing import shown
from inductor_passes.inspection.drawing import Drawing, draw
from inductor_passes.inspection.findings import Finding, findings, headline
from inductor_passes.inspection.folder import TABLE, WITH_PASS, Inspected
from inductor_passes.inspection.recorded import Change, Role
from inductor_passes.inspection.savings import Saving, saving
from inductor_passes.inspection.statements import Row, side_by_side, statements

LEGEND = {
    Role.SNAPSHOT: "the snapshot",
    Role.STATE_PASSING: "state passing",
    Role.ADDED: "put in by the pass",
    Role.BLAMED: "keeps the snapshot",
    Role.INPUT: "input",
}


@dataclasses.dataclass(frozen=True)
class Section:
    """One graph on the page.

    Attributes:
        drawings: before and after; None if the layout failed, and why_not says how.
        hunks: where the two texts differ.
        operations: how many there were and are.
    """

    number: int
    title: str
    drawings: tuple[Drawing, Drawing] | None
    why_not: str
    findings: list[Finding]
    hunks: list[list[Row]]
    operations: tuple[int, int]
    saving: Saving

    @property
    def roles(self) -> set[Role]:
        """Those that its drawings have."""
        return {box.role for drawing in self.drawings or () for box in drawing.boxes}


def render(inspected: Inspected, folder: Path) -> str:
    """The page as HTML.

    Args:
        inspected: what it shows.
        folder: where it will lie; the files there are linked.
    """
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("inductor_passes.inspection"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {
        "size": size,
        "source": lambda source: shown(source) if source else "",
        "css": lambda role: role.name.lower().replace("_", "-"),
    }
    sections = [_section(inspected, number, change) for number, change in enumerate(inspected.recording.changes)]
    return environment.get_template("report.html").render(
        inspected=inspected,
        headline=headline(inspected),
        kept=sum(len(change.report.declines) for change in inspected.recording.changes),
        legend=LEGEND,
        sections=sections,
        saving=sum((section.saving for section in sections), Saving()),
        files=[*inspected.files, TABLE, *(str(file.relative_to(folder)) for file in _decompiled(folder))],
        versions=f"PyTorch {torch.__version__}, Python {platform.python_version()}",
    )


def size(nbytes: int) -> str:
    """A number of bytes in the largest unit that leaves something in front of the point."""
    value, units = float(nbytes), iter(("B", "KiB", "MiB", "GiB", "TiB"))
    unit = next(units)
    while abs(value) >= 1024 and unit != "TiB":
        value, unit = value / 1024, next(units)
    return f"{value:.4g} {unit}"


def _section(inspected: Inspected, number: int, change: Change) -> Section:
    drawings, why_not = None, ""
    try:
        drawings = draw(change)
    except Exception as error:  # the rest of the page is worth having without
        why_not = f"{type(error).__name__}: {error}"
        inspected.recording.problems.append(f"graph {number} was not drawn: {why_not}")
    counts = [sum(node.op != "placeholder" for node in graph.nodes) for graph in (change.before, change.after)]
    return Section(
        number,
        change.title or f"Graph {number}",
        drawings,
        why_not,
        [finding for finding in findings(inspected) if finding.graph == number],
        side_by_side(statements(change.before.text), statements(change.after.text)),
        (counts[0], counts[1]),
        saving(change),
    )


def _decompiled(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"{WITH_PASS}/depyf/*.py"))
