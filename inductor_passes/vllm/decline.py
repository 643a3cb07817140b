"""Why vLLM's own code runs a prefill, and how often each happened."""

from __future__ import annotations

import atexit
import enum
import logging
import os
from array import array
from collections.abc import Iterator, MutableMapping
from typing import TYPE_CHECKING, Final

from inductor_passes.vllm.counts_file import own_cells, sums

if TYPE_CHECKING:  # it needs PyTorch, of which the doctor may have to say that it is broken
    from inductor_passes.report import GraphReport

logger = logging.getLogger("vllm.mamba_ops")


class Decline(enum.Enum):
    """A reason; the value says it in a sentence."""

    NOT_BUILT = "there is no compiled region for the layer"
    CHECKPOINTS = "a state in the middle of the prefill is kept, though prefix caching is off"
    METADATA = "the metadata of the step has another form than expected"
    DEVICE = "the metadata of the step is on another device"
    SHARED_SLOT = "two sequences share a slot"
    CACHE = "a cache has another layout than expected"
    ALIGNMENT = "the activations are not aligned or not dense"


# What is counted besides the reasons; the value says it in a sentence.
COUNTED: Final = {
    "layer_prefills": "prefills that a layer ran without a snapshot",
    "layer_checkpoints": "prefills that a layer ran with checkpoints, states that it kept on the way",
    "layer_decodes": "steps in which a layer launched the decodes beside its prefills by address",
    "full_steps": "steps with a prefill that were one captured graph",
    "regions": "regions compiled",
    "snapshots_removed": "compiled regions that have lost their snapshot",
    "verified": "layer calls compared with vLLM's code; see option `verify`",
    "mismatches": "compared layer calls that differed",
}
_PLACES: Final = {name: place for place, name in enumerate([*COUNTED, *Decline])}


class _Count:
    """An attribute of `Counters` that lives in its cells."""

    def __set_name__(self, _: type, name: str) -> None:
        self._place = _PLACES[name]

    def __get__(self, counters: Counters, _: type | None = None) -> int:
        return counters.cells[self._place]

    def __set__(self, counters: Counters, value: int) -> None:
        counters.cells[self._place] = value


class Declined(MutableMapping[Decline, int]):
    """How often each reason has occurred; iterates over those that have."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters

    def __getitem__(self, reason: Decline) -> int:
        return self._counters.cells[_PLACES[reason]]

    def __setitem__(self, reason: Decline, count: int) -> None:
        self._counters.cells[_PLACES[reason]] = count

    def __delitem__(self, reason: Decline) -> None:
        self[reason] = 0

    def __iter__(self) -> Iterator[Decline]:
        return (reason for reason in Decline if self[reason])

    def __len__(self) -> int:
        return sum(1 for _ in self)


class Counters:
    """What the layers of this process did; see `COUNTED`.

    Attributes:
        declined: prefills that a layer left to vLLM's code, by reason.
        cells: the counts, in the order of `COUNTED` and then of the reasons.
    """

    layer_prefills = _Count()
    layer_checkpoints = _Count()
    layer_decodes = _Count()
    full_steps = _Count()
    regions = _Count()
    snapshots_removed = _Count()
    verified = _Count()
    mismatches = _Count()

    def __init__(self, values: list[int] | None = None) -> None:
        self.cells = memoryview(array("q", values or [0] * len(_PLACES)))
        self.declined = Declined(self)
        self._shared_in = 0

    def share(self) -> None:
        """Count where the process that started this one can see it, from now on. Cheap if already so."""
        if self._shared_in == os.getpid():
            return
        self._shared_in = os.getpid()
        cells = None
        try:
            cells = own_cells(len(_PLACES))
        except OSError as error:
            logger.warning("mamba_ops: the counters of process %d are only in its log: %s", os.getpid(), error)
        if cells is None:
            atexit.register(_log, self)
        else:
            self.cells = cells

    def decline(self, reason: Decline) -> None:
        """Note that vLLM's code runs a prefill; the first time for a reason, say so.

        Why a region was not built has been said already.
        """
        if not self.declined[reason] and reason is not Decline.NOT_BUILT:
            logger.warning("mamba_ops: vLLM's own code runs a prefill: %s (said once, then counted)", reason.value)
        self.declined[reason] += 1

    def compiled(self, report: GraphReport) -> None:
        """Note that a region has been compiled."""
        self.regions += 1
        self.snapshots_removed += any(rewrite.into == "state_passing_indexed" for rewrite in report.rewrites)

    def __str__(self) -> str:
        declined = ", ".join(f"{reason.name} {count}" for reason, count in self.declined.items()) or "none"
        decodes = f", {self.layer_decodes} with decodes launched by address" if self.layer_decodes else ""
        decodes += f", {self.full_steps} whole steps as one graph" if self.full_steps else ""
        compared = (
            f"; compared with vLLM's code: {self.verified}, different: {self.mismatches}" if self.verified else ""
        )
        return (
            f"{self.layer_prefills} layer prefills without a snapshot, {self.layer_checkpoints} with checkpoints"
            f"{decodes}, declined: {declined}; regions compiled: {self.regions}, snapshots removed from them: "
            f"{self.snapshots_removed}{compared}"
        )


counters = Counters()


def of_all_processes() -> Counters:
    """The sums over the process that vLLM was started in and all that it has started."""
    return Counters(sums(len(_PLACES)))


def log_at_end() -> None:
    """One line for all processes, if any of them has counted something."""
    _log(of_all_processes())


def _log(counted: Counters) -> None:
    if any(counted.cells):
        logger.info("mamba_ops: %s", counted)
