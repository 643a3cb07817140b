"""What the pass did and what it left alone: reading its report, as a person and in a program.

Run it with `python examples/read_report.py`. The model below has two layers. The snapshot of the first one goes. The
second returns its snapshot as well, so it must exist: the pass keeps it, reads it in one launch instead of two, and
says which condition was not met and which line of the model is to blame.
"""

from __future__ import annotations

import torch
from torch import Tensor

from inductor_passes import Condition, SnapshotElimination, inductor_options
from mamba_ops import build_chunk_metadata, ssd_chunk_scan

NHEADS, HEADDIM, DSTATE, CHUNK_SIZE, NTOKENS = 4, 32, 32, 64, 24
METADATA = build_chunk_metadata([0, 16, 24], CHUNK_SIZE, context_lens=[100, 0])


def scan(x: Tensor, initial_states: Tensor, state_cache: Tensor, slots: Tensor) -> Tensor:
    """A scan of which only the states matter here."""
    dt, A = torch.full((NTOKENS, NHEADS), 0.1), torch.full((NHEADS,), -1.0)
    B = C = torch.ones(NTOKENS, 1, DSTATE)
    states = {"initial_states": initial_states, "state_cache": state_cache, "write_slots": slots}
    return ssd_chunk_scan(x, dt, A, B, C, METADATA, **states).out  # type: ignore[arg-type]


def model(x: Tensor, first: Tensor, second: Tensor, slots: Tensor, has: Tensor) -> tuple[Tensor, Tensor]:
    """Two layers with a state cache each; the entering states of the second are returned too."""
    mask = has[:, None, None, None]
    x = scan(x, torch.where(mask, first[slots], 0), first, slots)
    entering = torch.where(mask, second[slots], 0)
    return scan(x, entering, second, slots), entering


def main() -> None:
    """Compile, and read what the pass has to say."""
    # A graph from a compile cache is not compiled again, so the pass would not see it and could not report.
    elimination = SnapshotElimination()
    options = inductor_options(elimination) | {"fx_graph_cache": False}
    caches = [torch.randn(6, NHEADS, HEADDIM, DSTATE) for _ in range(2)]
    inputs = (torch.randn(NTOKENS, NHEADS, HEADDIM), *caches, torch.tensor([4, 1]), torch.tensor([True, False]))
    torch.compile(model, fullgraph=True, options=options)(*inputs)
    report = elimination.report()

    print(report)  # for a person; the logger `inductor_passes` says the same at level INFO

    # For a program, such as a test of your model that fails when a change brings the snapshot back:
    assert report.eliminated == 1
    whole, partial = report.rewrites
    assert whole.into == "state_passing_indexed"
    assert partial.into == "masked_gather"
    print(f"\none dense copy of the states of a layer: {whole.snapshot_bytes} bytes")

    (decline,) = report.declines
    assert decline.condition is Condition.SNAPSHOT_RETURNED
    for node in decline.nodes:
        print(f"to blame: {node}")
    print(f"counted: {dict(report.count())}")


if __name__ == "__main__":
    torch.manual_seed(0)
    with torch.inference_mode():
        main()
