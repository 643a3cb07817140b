"""What a call no longer does, worked out from the shapes in the graph."""

from __future__ import annotations

import dataclasses

from inductor_passes.inspection.recorded import Change, Node, Role
from inductor_passes.report import Rewrite


@dataclasses.dataclass(frozen=True)
class Saving:
    """Launches and bytes that a call no longer needs, with sizes that vary taken from the traced example.

    Attributes:
        launches: kernels that are no longer launched where Inductor fuses gather and mask into one.
        nbytes: bytes of state that are no longer copied then. Each of them was written, and read again.
        nbytes_a_sequence: the same for each sequence.
        varies: whether the number of sequences varies from call to call.
        launches_one_by_one, nbytes_one_by_one: the same where the ops run one by one.
    """

    launches: int = 0
    nbytes: int = 0
    nbytes_a_sequence: int = 0
    varies: bool = False
    launches_one_by_one: int = 0
    nbytes_one_by_one: int = 0

    def __add__(self, other: Saving) -> Saving:
        return Saving(
            self.launches + other.launches,
            self.nbytes + other.nbytes,
            self.nbytes_a_sequence + other.nbytes_a_sequence,
            self.varies or other.varies,
            self.launches_one_by_one + other.launches_one_by_one,
            self.nbytes_one_by_one + other.nbytes_one_by_one,
        )


def saving(change: Change) -> Saving:
    """What a call of this graph saves."""
    return sum((_saving(change, rewrite) for rewrite in change.report.rewrites), Saving())


def _saving(change: Change, rewrite: Rewrite) -> Saving:
    before, after = change.before.by_name(), change.after.by_name()
    removed = [before[node.name] for node in rewrite.removed if node.name in before and before[node.name].launches]
    added = [after[node.name] for node in rewrite.added if node.name in after and after[node.name].launches]
    copies = [node for node in removed if node.role is Role.SNAPSHOT]
    gathers = [node for node in added if "masked_gather" in node.op]
    # Around the state passing op: an older form's write of the final states, and small ops that Inductor fuses.
    others, new_others = _others(removed, copies), _others(added, gathers)
    writes = sum("index_put" in node.op for node in others)
    nbytes = (rewrite.snapshot_bytes if copies else 0) - _size(gathers, rewrite)
    return Saving(
        launches=(1 if copies else 0) - len(gathers) + writes,
        nbytes=nbytes,
        nbytes_a_sequence=nbytes // max((node.rows for node in copies), default=1),
        varies=any(node.varies for node in copies),
        launches_one_by_one=len(copies) - len(gathers) + len(others) - len(new_others),
        nbytes_one_by_one=_size(copies, rewrite) - _size(gathers, rewrite),
    )


def _others(nodes: list[Node], copies: list[Node]) -> list[Node]:
    return [node for node in nodes if node not in copies and node.role is not Role.STATE_PASSING]


def _size(nodes: list[Node], rewrite: Rewrite) -> int:
    return sum(node.nbytes if node.nbytes is not None else rewrite.snapshot_bytes for node in nodes)
