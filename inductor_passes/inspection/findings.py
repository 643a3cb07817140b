"""Matches and declines as a reader meets them: one finding for each, the same in the table and on the page."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from inductor_passes.inspection.describing import shown
from inductor_passes.inspection.folder import Inspected
from inductor_passes.inspection.recorded import Change, Graph
from inductor_passes.report import NodeName

ELIMINATED = "state_passing_indexed"
_OUTSIDE = {"output": "what the graph returns"}  # nodes that compute nothing


@dataclasses.dataclass(frozen=True)
class Place:
    """A line of the user's program, and the nodes that come from it.

    Attributes:
        part: what they are in their finding: the state passing op, removed, added, or what it is kept because of.
        nodes: name, op and result of each.
        source: `file:line`, and code: what stands there; empty if not known.
    """

    part: str
    nodes: tuple[tuple[str, str, str], ...]
    source: str
    code: str


@dataclasses.dataclass(frozen=True)
class Finding:
    """What happened to one snapshot.

    Attributes:
        graph: its number.
        verdict: one word, and sentence: what happened or which condition failed.
        condition: its name in `Condition`; empty for a match.
        places: the nodes that have to do with it, the state passing op first.
    """

    graph: int
    verdict: str
    sentence: str
    condition: str
    places: tuple[Place, ...]


def findings(inspected: Inspected) -> list[Finding]:
    """All matches and declines, graph by graph."""
    return [
        finding
        for number, change in enumerate(inspected.recording.changes)
        for finding in (*_matches(number, change), *_declines(number, change))
    ]


def headline(inspected: Inspected) -> str:
    """The outcome in a sentence."""
    changes = inspected.recording.changes
    if not changes:
        return "The pass has seen no graph"
    gone = sum(rewrite.into == ELIMINATED for change in changes for rewrite in change.report.rewrites)
    kept = sum(len(change.report.declines) for change in changes)
    if not gone + kept:
        return "No snapshot in these graphs"
    if not kept:
        return "The snapshot is gone" if gone == 1 else f"All {gone} snapshots are gone"
    if not gone:
        return "The snapshot stays" if kept == 1 else f"All {kept} snapshots stay"
    return f"{gone} of {gone + kept} snapshots {'is' if gone == 1 else 'are'} gone"


def _matches(number: int, change: Change) -> list[Finding]:
    found = []
    for rewrite in change.report.rewrites:
        removed = [node for node in rewrite.removed if node != rewrite.site]
        places = (
            *_places("state passing", [rewrite.site], change.before),
            *_places("removed", removed, change.before),
            *_places("added", rewrite.added, change.after),
        )
        if rewrite.into == ELIMINATED:
            found.append(Finding(number, "gone", "State passing reads the cache itself.", "", places))
        else:
            found.append(Finding(number, "rewritten", f"Now {rewrite.into}.", "", places))
    return found


def _declines(number: int, change: Change) -> list[Finding]:
    return [
        Finding(
            number,
            "kept",
            decline.condition.value,
            decline.condition.name,
            (
                *_places("state passing", [decline.site], change.before),
                *_places("because of", decline.nodes, change.before),
            ),
        )
        for decline in change.report.declines
    ]


def _places(part: str, nodes: Iterable[NodeName], graph: Graph) -> list[Place]:
    """The nodes, those of one line together; what only takes one of several results is left out."""
    known, lines = graph.by_name(), dict[str, list[NodeName]]()
    for node in nodes:
        if node.op != "getitem":
            lines.setdefault(node.source or "", []).append(node)
    places = []
    for source, group in lines.items():
        described = [known.get(node.name) for node in group]
        rows = [
            (node.name, there.op if there else _OUTSIDE.get(node.op, node.op), there.result if there else "")
            for node, there in zip(group, described, strict=True)
        ]
        code = next((there.code for there in described if there), "")
        places.append(Place(part, tuple(rows), shown(source) if source else "", code))
    return places
