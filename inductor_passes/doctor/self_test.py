"""A little of the real thing: states in place against a snapshot, and a compiled graph that loses its snapshot."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch
import torch._functorch.config
import torch._inductor.config
from torch import Tensor

from inductor_passes import SnapshotElimination, inductor_options
from inductor_passes.doctor.finding import Finding, Status
from mamba_ops import build_chunk_metadata, ssd_chunk_scan

SECTION = "Self-test"
NHEADS, HEADDIM, DSTATE, CHUNK_SIZE, NUM_SLOTS = 4, 32, 32, 64, 6
LENGTHS, CONTEXTS, SLOTS = (100, 30, 1), (64, 0, 200), (4, 1, 3)
DTYPES = {"BF16": torch.bfloat16, "FP16": torch.float16, "FP32": torch.float32}


class Case:
    """Three sequences, of which the second is fresh; NaN is in its slot and in all that no sequence owns."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        generator = torch.Generator(device).manual_seed(0)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, device=device, generator=generator)

        ntokens = sum(LENGTHS)
        self.x = random(ntokens, NHEADS, HEADDIM).to(torch.bfloat16)
        self.dt = random(ntokens, NHEADS).to(torch.bfloat16)
        self.A = -random(NHEADS).exp()
        self.B, self.C = (random(ntokens, 1, DSTATE).to(torch.bfloat16) for _ in range(2))
        offsets = [0, *torch.tensor(LENGTHS).cumsum(0).tolist()]
        self.metadata = build_chunk_metadata(offsets, CHUNK_SIZE, context_lens=CONTEXTS, device=device)
        self.slots = torch.tensor(SLOTS, device=device)
        self.has_initial_state = torch.tensor(CONTEXTS, device=device) > 0
        self.cache = torch.full((NUM_SLOTS, NHEADS, HEADDIM, DSTATE), torch.nan, device=device, dtype=dtype)
        continued = self.slots[self.has_initial_state]
        self.cache[continued] = random(len(continued), NHEADS, HEADDIM, DSTATE).to(dtype)

    def run(self, function: Callable[[Case, Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """Output and cache that a function leaves."""
        cache = self.cache.clone()
        return function(self, cache), cache


def from_snapshot(case: Case, cache: Tensor) -> Tensor:
    """The scan as models spell it."""
    initial = torch.where(case.has_initial_state[:, None, None, None], cache[case.slots], 0)
    rest = {"dt_softplus": True, "initial_states": initial, "state_cache": cache, "write_slots": case.slots}
    return ssd_chunk_scan(case.x, case.dt, case.A, case.B, case.C, case.metadata, **rest).out  # type: ignore[arg-type]


def in_place(case: Case, cache: Tensor) -> Tensor:
    """The scan that reads the cache itself."""
    slots = {"read_slots": case.slots, "write_slots": case.slots, "has_initial_state": case.has_initial_state}
    rest = {"dt_softplus": True, "state_cache": cache, **slots}
    return ssd_chunk_scan(case.x, case.dt, case.A, case.B, case.C, case.metadata, **rest).out  # type: ignore[arg-type]


@torch.inference_mode()
def run_self_test() -> Iterator[Finding]:
    """A finding for each test."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    start = time.monotonic()
    different = []
    for name, dtype in DTYPES.items():
        case = Case(device, dtype)
        if not _are_equal(case.run(in_place), case.run(from_snapshot)):
            different.append(name)
    yield _finding("in place = snapshot", f"{device.type}, {', '.join(DTYPES)} caches", start, different)

    start = time.monotonic()
    case, elimination = Case(device, torch.bfloat16), SnapshotElimination()
    # From a compile cache would come code that the pass has not seen now.
    no_cache = torch._inductor.config.patch(fx_graph_cache=False)
    with no_cache, torch._functorch.config.patch(enable_autograd_cache=False):
        stock = case.run(torch.compile(from_snapshot, fullgraph=True))
        torch.compiler.reset()
        passed = case.run(torch.compile(from_snapshot, fullgraph=True, options=inductor_options(elimination)))
    report = elimination.report()
    wrong = [] if report.eliminated == 1 else [f"the snapshot stayed: {report}"]
    wrong += [] if _are_equal(passed, stock) else ["the results with and without the pass"]
    yield _finding("compiled with the pass", f"{device.type}, snapshot gone, results equal", start, wrong)


def _are_equal(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> bool:
    try:
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    except AssertionError:
        return False
    return not bool(a[0].isnan().any())


def _finding(name: str, value: str, start: float, different: list[str]) -> Finding:
    if different:
        return Finding(SECTION, name, "different", Status.PROBLEM, ", ".join(different))
    return Finding(SECTION, name, f"{value}, bit for bit, {time.monotonic() - start:.1f} s")
