"""A compiled Mamba2 layer that continues two sequences from their cache slots, with the pass.

Run it with `python examples/compiled_layer.py`. It compiles the same layer without and with the pass, checks that the
output and the caches are equal bit for bit, and prints what the pass reports.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from inductor_passes import SnapshotElimination, inductor_options
from mamba_ops import build_chunk_metadata
from mamba_ops.layer import Mamba2Layer

CHUNK_SIZE = 64
PROMPTS = [150, 70]  # tokens of each sequence that are in the cache
NEW = [20, 5]  # tokens of each sequence to continue with
SLOTS = [5, 2]  # where each sequence keeps its state


def offsets(lengths: list[int]) -> list[int]:
    """Where each sequence starts in the batch, and where the last one ends."""
    return torch.tensor([0, *lengths]).cumsum(0).tolist()


def main() -> None:
    """Continue both sequences twice, without and with the pass."""
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    # snapshot=True spells the state as existing models do: gathered and masked first, then scanned.
    layer = Mamba2Layer(
        256, nheads=8, headdim=32, dstate=64, chunk_size=CHUNK_SIZE, snapshot=True, device=device, dtype=torch.bfloat16
    )
    state = layer.allocate_state(num_slots=8)
    slots = torch.tensor(SLOTS, device=device)

    prompts = torch.randn(sum(PROMPTS), 256, device=device, dtype=torch.bfloat16)
    metadata = build_chunk_metadata(offsets(PROMPTS), CHUNK_SIZE, device=device)
    layer(prompts, metadata, *state, slots, torch.zeros(2, dtype=torch.bool, device=device), slots)

    tokens = torch.randn(sum(NEW), 256, device=device, dtype=torch.bfloat16)
    metadata = build_chunk_metadata(offsets(NEW), CHUNK_SIZE, context_lens=PROMPTS, device=device)
    has_initial_state = torch.ones(2, dtype=torch.bool, device=device)

    def continue_with(model: Callable[..., Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        conv_state, state_cache = (cache.clone() for cache in state)
        out = model(tokens, metadata, conv_state, state_cache, slots, has_initial_state, slots)
        return out, conv_state, state_cache

    stock = torch.compile(layer, fullgraph=True)
    elimination = SnapshotElimination()
    passed = torch.compile(layer, fullgraph=True, options=inductor_options(elimination))

    torch.testing.assert_close(continue_with(passed), continue_with(stock), rtol=0, atol=0)
    report = elimination.report()
    print(report)
    if report.graphs:  # none: the finished code came from the compile cache, and was not compiled again
        assert report.eliminated == 1
    print("The output and the caches are equal bit for bit.")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
