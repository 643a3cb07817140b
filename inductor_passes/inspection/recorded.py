"""What is kept of a compiled graph once the graph itself is gone: plain data, which other processes can be sent."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable

from inductor_passes.report import GraphReport


class Role(enum.Enum):
    """What a node has to do with the snapshot."""

    INPUT = "input"
    SNAPSHOT = "snapshot"
    STATE_PASSING = "state passing"
    ADDED = "put in by the pass"
    BLAMED = "keeps the snapshot"
    OTHER = "other"


@dataclasses.dataclass(frozen=True)
class Node:
    """A node of a graph.

    Attributes:
        name, op: of the node, see `NodeName`; the op of an input is what the user calls it.
        result: dtype and shape of what it computes, in words.
        nbytes: size of that, with sizes that vary taken from the traced example; None if it is no tensor.
        rows: how many entries its first dimension has, with sizes that vary taken from the traced example; or 1.
        varies: whether that number varies from call to call.
        launches: whether it runs a kernel if ops run one by one; a view or a constant does not.
        source: `file:line` of the user's program, where known, and code: what stands there.
        inputs: names of the nodes that it needs.
        role: what it has to do with the snapshot.
    """

    name: str
    op: str
    result: str
    nbytes: int | None
    rows: int
    varies: bool
    launches: bool
    source: str | None
    code: str
    inputs: tuple[str, ...]
    role: Role


@dataclasses.dataclass(frozen=True)
class Graph:
    """A graph: its nodes in order, and all of it as Python."""

    nodes: tuple[Node, ...]
    text: str

    def by_name(self) -> dict[str, Node]:
        """The nodes, each under its name."""
        return {node.name: node for node in self.nodes}


@dataclasses.dataclass
class Change:
    """A graph before and after the pass.

    Attributes:
        title: what was compiled, if somebody said.
        code: the number of the code that Inductor generated of it, in `Recording.codes`.
    """

    before: Graph
    after: Graph
    report: GraphReport
    title: str = ""
    code: int | None = None


@dataclasses.dataclass
class Recording:
    """What was compiled while somebody looked on.

    Attributes:
        changes: the graphs that the pass has seen.
        codes: all code that Inductor generated.
        problems: what could not be looked at, in words for the user.
    """

    changes: list[Change] = dataclasses.field(default_factory=list)
    codes: list[str] = dataclasses.field(default_factory=list)
    problems: list[str] = dataclasses.field(default_factory=list)


def merged(recordings: Iterable[Recording]) -> Recording:
    """Several recordings as one."""
    whole = Recording()
    for recording in recordings:
        offset = len(whole.codes)
        whole.changes += [
            dataclasses.replace(change, code=None if change.code is None else change.code + offset)
            for change in recording.changes
        ]
        whole.codes += recording.codes
        whole.problems += recording.problems
    return whole
