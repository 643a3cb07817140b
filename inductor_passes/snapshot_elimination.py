"""The pass: state passing that starts from a snapshot of cache rows reads the cache itself.

    before                                                  after
        rows = index(cache, [slots])
        snapshot = where(has, rows, 0)
        entering, new_cache = state_passing_update(         entering, new_cache = state_passing_indexed(
            states, ..., snapshot, cache, slots)                states, ..., cache, slots, has, slots)

It runs on the functional graph at the end of Inductor's post-grad passes, before any op is made to work in place.
"""

from __future__ import annotations

import logging

from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.pattern_matcher import stable_topological_sort

from inductor_passes.declined import Declined
from inductor_passes.fingerprint import source_fingerprint
from inductor_passes.observing import is_suspended, watch
from inductor_passes.older_form import find_writeback
from inductor_passes.report import Condition, Decline, GraphReport, NodeName, Report, Rewrite
from inductor_passes.rewrite import copy_initial_states, eliminate, gather_in_one_launch
from inductor_passes.safety import check_values, may_overwrite_initial_states, prove
from inductor_passes.snapshots import Snapshot, read_snapshot
from inductor_passes.state_passing_nodes import StatePassing, read_state_passing

logger = logging.getLogger("inductor_passes")


class SnapshotElimination(CustomGraphPass):
    """Removes the dense copy of cached states that a scan starts from, where that is provably the same.

    Args:
        masked_gather: where the snapshot must stay, whether it is read in one launch instead of gather and mask.
    """

    def __init__(self, *, masked_gather: bool = True) -> None:
        self.masked_gather = masked_gather
        self._graphs: list[GraphReport] = []

    def __call__(self, graph: fx.Graph) -> None:
        """Rewrite one graph in place and report."""
        if is_suspended():
            return
        show = watch(graph)
        rewrites: list[Rewrite] = []
        declines: list[Decline] = []
        for node in list(graph.nodes):
            self._treat(graph, node, rewrites, declines)
        if rewrites:
            stable_topological_sort(graph)
            graph.lint()
        report = GraphReport(tuple(rewrites), tuple(declines))
        self._graphs.append(report)
        show(report)
        logger.info("%s", report)

    def uuid(self) -> tuple[str, bool]:
        """What identifies the pass to compile caches: its sources, those of the ops that it puts in, its options."""
        return source_fingerprint(), self.masked_gather

    def report(self) -> Report:
        """What happened in each graph so far."""
        return Report(tuple(self._graphs))

    def _treat(
        self,
        graph: fx.Graph,
        node: fx.Node,
        rewrites: list[Rewrite],
        declines: list[Decline],
    ) -> None:
        """Rewrite a node if it is state passing. A graph that the pass fails on still compiles, as if without it."""
        try:
            site = read_state_passing(node)
            if site is not None and site.initial_states is not None:
                self._rewrite(graph, site, site.initial_states, rewrites, declines)
        except Declined as declined:
            declines.append(Decline(declined.condition, NodeName.of(node)))
        except Exception:
            logger.warning("%s is left as it is, the pass failed on it; please report this", node, exc_info=True)
            declines.append(Decline(Condition.PASS_FAILED, NodeName.of(node)))

    def _rewrite(
        self,
        graph: fx.Graph,
        site: StatePassing,
        initial_states: fx.Node,
        rewrites: list[Rewrite],
        declines: list[Decline],
    ) -> None:
        snapshot: Snapshot | None = None
        try:
            snapshot = read_snapshot(initial_states, site.nseqs)
            check_values(snapshot)
            elimination = prove(site, snapshot, site.writeback or find_writeback(site))
        except Declined as declined:
            blamed = tuple(NodeName.of(node) for node in declined.nodes)
            declines.append(Decline(declined.condition, NodeName.of(site.node), blamed))
            if snapshot is not None and self.masked_gather and declined.condition.allows_masked_gather:
                rewrite = gather_in_one_launch(graph, site, snapshot)
                rewrites += [rewrite] if rewrite is not None else []
            if may_overwrite_initial_states(site):
                rewrites.append(copy_initial_states(graph, site))
        else:
            rewrites.append(eliminate(graph, elimination))
