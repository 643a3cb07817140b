"""Why vLLM's own code runs a prefill, and how often each happened."""

from __future__ import annotations

import atexit
import enum
import logging
from collections import Counter

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


class Counters:
    """What the layers of this process did.

    Attributes:
        layer_prefills: prefills that a layer ran through the compiled region.
        layer_checkpoints: prefills with checkpoints, which keep a snapshot, likewise.
        declined: prefills that a layer left to vLLM's code, by reason.
        snapshots_removed: compiled regions that have lost their snapshot, of `regions`.
        verified, mismatches: layer calls compared with vLLM's code, and those that differed; see option `verify`.
    """

    def __init__(self) -> None:
        self.layer_prefills = 0
        self.layer_checkpoints = 0
        self.declined: Counter[Decline] = Counter()
        self.regions = 0
        self.snapshots_removed = 0
        self.verified = 0
        self.mismatches = 0

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
        compared = (
            f"; compared with vLLM's code: {self.verified}, different: {self.mismatches}" if self.verified else ""
        )
        return (
            f"{self.layer_prefills} layer prefills without a snapshot, {self.layer_checkpoints} with checkpoints, "
            f"declined: {declined}; regions compiled: {self.regions}, snapshots removed from them: "
            f"{self.snapshots_removed}{compared}"
        )


counters = Counters()


@atexit.register
def _log_at_exit() -> None:
    if counters.regions or counters.declined:
        logger.info("mamba_ops: %s", counters)
