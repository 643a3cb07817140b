"""Random programs around state passing give the same bits with the pass and without it, whatever it did to them."""

from __future__ import annotations

import dataclasses

import torch
from hypothesis import Phase, event, given, settings
from hypothesis import strategies as st

from inductor_passes import SnapshotElimination
from mamba_ops.ops import state_passing, state_passing_update
from tests.inductor_passes.harness import assert_equal, run_graph
from tests.inductor_passes.programs import SPELLINGS, UNMASKED_SPELLINGS, make_inputs

NEAR_MISSES = {
    "product": lambda c, s, h: c[s] * h[:, None, None, None],
    "filled with one": lambda c, s, h: torch.where(h[:, None, None, None], c[s], 1),
    "filled with minus zero": lambda c, s, h: torch.where(h[:, None, None, None], c[s], -0.0),
    "of a copy": lambda c, s, h: torch.where(h[:, None, None, None], c.clone()[s], 0),
    "of a changed copy": lambda c, s, h: torch.where(h[:, None, None, None], (c * 2)[s], 0),
    "mask of other rows": lambda c, s, h: torch.where(h.flip(0)[:, None, None, None], c[s], 0),
    "reversed twice": lambda c, s, h: torch.where(h[:, None, None, None], c[s.flip(0)], 0).flip(0),
    "wrong rows": lambda c, s, h: torch.where(h[:, None, None, None], c[s].flip(0), 0),
    "one row for all": lambda c, s, h: torch.where(h[:, None, None, None], c[s[:1]], 0).expand(s.shape[0], -1, -1, -1),
    "elements reversed": lambda c, s, h: torch.where(h[:, None, None, None], c[s].flip(-1), 0),
}
SPELLED = {
    **SPELLINGS,
    **{f"unmasked {name}": spelling for name, spelling in UNMASKED_SPELLINGS.items()},
    **NEAR_MISSES,
}
VIEWS = {
    "whole": lambda cache: cache,
    "window": lambda cache: cache[1:],
    "every other": lambda cache: cache[::2],
    "reshaped": lambda cache: cache.view(3, 3, *cache.shape[1:]).flatten(0, 1),
}
CASTS = [None, torch.float32, torch.float16, torch.bfloat16]


def _scale(cache, extras, results):
    cache.mul_(2)


def _write_a_slot(cache, extras, results):
    cache[extras["other"]] = extras["states"][0].to(cache.dtype)


def _write_the_read_slots(cache, extras, results):
    cache[extras["slots"]] = extras["states"][0].to(cache.dtype)


def _read_a_slot(cache, extras, results):
    results.append(cache[extras["other"]] + 1)


def _read_all(cache, extras, results):
    results.append(cache.float().sum(0))


def _change_another_tensor(cache, extras, results):
    extras["states"].add_(1)


def _change_the_mask(cache, extras, results):
    extras["has"].logical_not_()


def _change_the_slots(cache, extras, results):
    extras["slots"].copy_(extras["slots"].flip(0))


INTERFERENCES = [
    _scale,
    _write_a_slot,
    _write_the_read_slots,
    _read_a_slot,
    _read_all,
    _change_another_tensor,
    _change_the_mask,
    _change_the_slots,
]
SLOTS = {
    "same": lambda slots: slots,
    "int64": lambda slots: slots.long(),
    "copied": lambda slots: slots.clone().view(-1),
    "reversed": lambda slots: slots.flip(0),
    "next": lambda slots: (slots + 1) % 4,
}


@dataclasses.dataclass(frozen=True)
class Scan:
    """One snapshot and scan, and what happens around them."""

    spelling: str
    read: str
    write: str
    form: str
    cast: torch.dtype | None
    before: tuple
    between: tuple
    after_scan: tuple
    returned: bool

    def run(self, cache, extras, dA, last, results):
        for interfere in self.before:
            interfere(cache, extras, results)
        slots, states = extras["slots"], extras["states"]
        initial = SPELLED[self.spelling](cache, SLOTS[self.read](slots), extras["has"])
        if self.cast is not None:
            initial = initial.to(self.cast)
        if self.returned:
            results.append(initial)
        for interfere in self.between:
            interfere(cache, extras, results)
        write = SLOTS[self.write](slots)
        if self.form == "update":
            results.append(state_passing_update(states, dA, last, initial, cache, write))
            return
        dtype = torch.float32 if self.form == "older, fp32" else cache.dtype
        entering, final = state_passing(states, dA, last, initial, dtype)
        results.append(entering)
        for interfere in self.after_scan:
            interfere(cache, extras, results)
        if self.form == "older, accumulated":
            cache.index_put_((write,), final.to(cache.dtype), accumulate=True)
        else:
            cache[write] = final.to(cache.dtype)


interferences = st.lists(st.sampled_from(INTERFERENCES), max_size=1).map(tuple)
none_mostly = st.one_of(st.just(()), st.just(()), interferences)
scans = st.builds(
    Scan,
    spelling=st.sampled_from(list(SPELLED)),
    read=st.sampled_from(["same", "same", *SLOTS]),
    write=st.sampled_from(["same", "same", *SLOTS]),
    form=st.sampled_from(["update", "update", "older", "older", "older, fp32", "older, accumulated"]),
    cast=st.sampled_from([None, None, *CASTS]),
    before=interferences,
    between=none_mostly,
    after_scan=none_mostly,
    returned=st.sampled_from([False, False, False, True]),
)


# No explanation of a failure: it would take minutes.
@settings(max_examples=60, deadline=None, phases=set(Phase) - {Phase.explain})
@given(
    scans=st.lists(scans, min_size=1, max_size=2),
    view=st.sampled_from(list(VIEWS)),
    chunks=st.lists(st.integers(1, 2), min_size=1, max_size=3).map(tuple),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    seed=st.integers(0, 1000),
)
def test_same_bits_with_and_without_the_pass(scans, view, chunks, dtype, seed):
    torch.manual_seed(seed)
    inputs = make_inputs(chunks, dtype=dtype)
    inputs.slots.copy_(torch.randperm(4)[: len(chunks)])
    inputs.cache.copy_(torch.randn(inputs.cache.shape))
    inputs.cache[inputs.slots[0]] = float("nan")

    def program(states, dA, last, cache, slots, has):
        results = []
        extras = {"slots": slots, "states": states, "has": has, "other": 3}
        window = VIEWS[view](cache)
        for scan in scans:
            scan.run(window, extras, dA, last, results)
        return results

    elimination = SnapshotElimination()
    runs = []
    for passes in ((), (elimination,)):
        run_inputs = inputs.clone()
        runs.append((run_graph(program, run_inputs, *passes), run_inputs.args()))
    report = elimination.report()
    for rewrite in report.rewrites:
        event(rewrite.into)
    for decline in report.declines:
        event(decline.condition.name)
    assert_equal(runs[1], runs[0])
