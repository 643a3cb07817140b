"""How any part of the pass says that a state passing op must keep its snapshot."""

from __future__ import annotations

from torch import fx

from inductor_passes.report import Condition


class Declined(Exception):  # noqa: N818 - no error: an answer, with its reason
    """Raised where a condition is not met; caught once for each state passing op."""

    def __init__(self, condition: Condition, *nodes: fx.Node) -> None:
        super().__init__(condition.value)
        self.condition = condition
        self.nodes = nodes


def require(met: bool, condition: Condition, *nodes: fx.Node) -> None:
    """Decline unless the condition is met."""
    if not met:
        raise Declined(condition, *nodes)
