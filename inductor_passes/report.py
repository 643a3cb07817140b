"""What the pass did and what it left alone, for a person to read and for a program to check."""

from __future__ import annotations

import dataclasses
import enum
import textwrap
from collections import Counter

from torch import fx

from inductor_passes.nodes import source_line
from inductor_passes.opened_ops import op_name


class Condition(enum.Enum):
    """What keeps a snapshot in the graph; the value says it in a sentence."""

    NOT_A_SNAPSHOT = "the initial states are not rows gathered from a state cache"
    MASK_PRODUCT = "rows times a mask is not a masked read: a stale slot may hold NaN, and NaN * 0 is NaN"
    FILL_NOT_ZERO = "sequences without an initial state start from something else than zero"
    MASK_NOT_PER_SEQUENCE = "the mask is not one boolean for each sequence"
    INEXACT_CAST = "a cast on the way does not keep every value"
    ROWS_NOT_DENSE = "the rows of a slot are not dense in memory"
    ROW_COUNT = "the number of rows read is not known to be the number of sequences"
    OTHER_CACHE = "the rows come from another tensor than the cache that is written"
    CACHE_CHANGED = "the cache changes between the read of the rows and the write of the final states"
    CACHE_WRITTEN_AFTER_SCAN = "other results of the scan, such as checkpoints, reach the cache before the final states"
    CACHE_READ_LATER = "the cache is read between state passing and the write of the final states"
    CROSSED_SLOTS = "several sequences, and one may read a slot that another one writes"
    OTHER_DEVICE = "the slots or the mask are on another device than the cache"
    VIEWED_AS_OTHER_DTYPE = "the cache is seen through another dtype inside the graph; make that view outside of it"
    ARGUMENT_OF_CACHE = "another argument of state passing is a view of the cache"
    SNAPSHOT_RETURNED = "the snapshot is returned"
    SNAPSHOT_USED_ELSEWHERE = "the snapshot has another user"
    ROWS_USED_ELSEWHERE = "the rows have another user before they are masked"
    FINAL_STATES_USED_ELSEWHERE = "the final states have another user than the cache"
    NOT_WRITTEN_BACK = "the final states are not written to a cache"
    WRITEBACK_ACCUMULATES = "the final states are added to the slots"
    STATE_DTYPE = "the states are computed in another dtype than that of the cache"
    WRITES_UNKNOWN = "which arguments of the launch are written is more than PyTorch could tell"
    PASS_FAILED = "the pass failed here; the log has the error"
    WRITE_SLOTS_TOO_LATE = "the write slots depend on the result of state passing"

    @property
    def allows_masked_gather(self) -> bool:
        """Whether the snapshot may still be read in one launch: it must exist, but nothing is wrong with it."""
        return self in _ALLOW_MASKED_GATHER


_ALLOW_MASKED_GATHER = frozenset(
    {
        Condition.CACHE_WRITTEN_AFTER_SCAN,
        Condition.CACHE_READ_LATER,
        Condition.CROSSED_SLOTS,
        Condition.SNAPSHOT_RETURNED,
        Condition.SNAPSHOT_USED_ELSEWHERE,
        Condition.FINAL_STATES_USED_ELSEWHERE,
        Condition.NOT_WRITTEN_BACK,
    }
)


@dataclasses.dataclass(frozen=True)
class NodeName:
    """A node of the graph, in words that outlive it.

    Attributes:
        name: name of the node in the graph.
        op: what it calls.
        source: `file:line` of the user's program, where known.
    """

    name: str
    op: str
    source: str | None = None

    @classmethod
    def of(cls, node: fx.Node) -> NodeName:
        """Name of a node, which may leave the graph afterwards."""
        return cls(node.name, op_name(node), source_line(node))

    @property
    def short(self) -> str:
        """Name and op."""
        return f"{self.name} ({self.op})"

    def __str__(self) -> str:
        return f"{self.short} at {self.source}" if self.source else self.short


@dataclasses.dataclass(frozen=True)
class Decline:
    """One state passing op that keeps its snapshot, wholly or in part.

    Attributes:
        condition: what is not met.
        site: the state passing op.
        nodes: the nodes that do not meet it.
    """

    condition: Condition
    site: NodeName
    nodes: tuple[NodeName, ...] = ()

    def __str__(self) -> str:
        where = f" ({', '.join(str(node) for node in self.nodes)})" if self.nodes else ""
        return f"kept: {self.site}\n  {self.condition.name}: {self.condition.value}{where}"


@dataclasses.dataclass(frozen=True)
class Rewrite:
    """One replacement in the graph.

    Attributes:
        site: the state passing op.
        into: what came instead: `state_passing_indexed`, `masked_gather`, or in words.
        removed, added: the nodes that went and came.
        snapshot_bytes: size of one dense copy of the states, with sizes that vary taken from the traced example. A
            whole rewrite saves two such copies as long as the ops run one by one, and one if the compiler fuses them.
    """

    site: NodeName
    into: str
    removed: tuple[NodeName, ...]
    added: tuple[NodeName, ...]
    snapshot_bytes: int

    def __str__(self) -> str:
        removed = ", ".join(node.short for node in self.removed)
        added = ", ".join(node.short for node in self.added)
        return f"rewritten: {self.site}, now {self.into}\n  removed: {removed}\n  added: {added}"


@dataclasses.dataclass(frozen=True)
class GraphReport:
    """What happened in one graph. A state passing op without initial states appears nowhere: it has no snapshot."""

    rewrites: tuple[Rewrite, ...] = ()
    declines: tuple[Decline, ...] = ()

    def __str__(self) -> str:
        return "\n".join(str(entry) for entry in (*self.rewrites, *self.declines)) or "no snapshot"


@dataclasses.dataclass(frozen=True)
class Report:
    """What happened in each graph that the pass has seen. A graph that comes from a compile cache is not seen again."""

    graphs: tuple[GraphReport, ...] = ()

    @property
    def rewrites(self) -> tuple[Rewrite, ...]:
        """All replacements."""
        return tuple(rewrite for graph in self.graphs for rewrite in graph.rewrites)

    @property
    def declines(self) -> tuple[Decline, ...]:
        """All that was left alone."""
        return tuple(decline for graph in self.graphs for decline in graph.declines)

    @property
    def eliminated(self) -> int:
        """How many snapshots are gone altogether."""
        return sum(rewrite.into == "state_passing_indexed" for rewrite in self.rewrites)

    def count(self) -> Counter[Condition]:
        """How often each condition was not met."""
        return Counter(decline.condition for decline in self.declines)

    def __str__(self) -> str:
        lines = [
            f"graphs seen: {len(self.graphs)}, snapshots eliminated: {self.eliminated}, kept: {len(self.declines)}",
            *(f"graph {number}\n{textwrap.indent(str(graph), '  ')}" for number, graph in enumerate(self.graphs)),
        ]
        return "\n".join(lines)
