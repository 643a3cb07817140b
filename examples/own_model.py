"""The pass in a model of your own, which may spell the snapshot in its own way.

Run it with `python examples/own_model.py`. All that the model needs is a scan made of this project's ops: the pass
finds the gather and the mask in the compiled graph, whatever the layers around them look like.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from inductor_passes import eliminate_snapshots
from mamba_ops import ChunkMetadata, build_chunk_metadata, ssd_chunk_scan

NHEADS, HEADDIM, DSTATE, CHUNK_SIZE = 4, 32, 32, 64


# Three ways to write down the same thing: the cached state of each sequence, and zeros for those that have none yet.
def gather_and_fill(state_cache: Tensor, slots: Tensor, has_initial_state: Tensor) -> Tensor:
    """Rows by indexing, filled with zero where the mask is false."""
    return state_cache[slots].masked_fill(~has_initial_state[:, None, None, None], 0)


def select_and_where(state_cache: Tensor, slots: Tensor, has_initial_state: Tensor) -> Tensor:
    """Rows by `index_select`, against zeros of their shape."""
    rows = state_cache.index_select(0, slots)
    return torch.where(has_initial_state.view(-1, 1, 1, 1), rows, torch.zeros_like(rows))


def gather_and_assign(state_cache: Tensor, slots: Tensor, has_initial_state: Tensor) -> Tensor:
    """Rows of which some are set to zero in place; they are a copy, so the cache keeps its own."""
    rows = state_cache[slots]
    rows[~has_initial_state] = 0
    return rows


class OwnMixer(nn.Module):
    """A mixer with a state cache in a buffer; its author wrote it before the pass existed."""

    state_cache: Tensor

    def __init__(self, hidden_size: int, num_slots: int, spelling: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.spelling = spelling
        self.project = nn.Linear(hidden_size, NHEADS * HEADDIM + 2 * DSTATE + NHEADS, bias=False)
        self.out = nn.Linear(NHEADS * HEADDIM, hidden_size, bias=False)
        self.A = nn.Parameter(-torch.rand(NHEADS))
        self.register_buffer("state_cache", torch.randn(num_slots, NHEADS, HEADDIM, DSTATE))

    def forward(self, hidden: Tensor, metadata: ChunkMetadata, slots: Tensor, has_initial_state: Tensor) -> Tensor:
        """Continue each sequence from its slot: hidden is (ntokens, hidden_size)."""
        x, B, C, dt = self.project(hidden).split([NHEADS * HEADDIM, DSTATE, DSTATE, NHEADS], dim=-1)
        result = ssd_chunk_scan(
            x.unflatten(-1, (NHEADS, HEADDIM)),
            dt,
            self.A,
            B.unsqueeze(1),
            C.unsqueeze(1),
            metadata,
            dt_softplus=True,
            # The snapshot: two dense copies of the states, one for the gather and one for the mask.
            initial_states=self.spelling(self.state_cache, slots, has_initial_state),
            state_cache=self.state_cache,
            write_slots=slots,
        )
        out: Tensor = self.out(result.out.flatten(-2))
        return out


def main() -> None:
    """Compile the model without and with the pass, in each spelling, and compare what both leave."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    inputs = (
        torch.randn(24, 64, device=device),
        build_chunk_metadata([0, 16, 24], CHUNK_SIZE, context_lens=[100, 0], device=device),
        torch.tensor([4, 1], device=device),
        torch.tensor([True, False], device=device),  # the second sequence is fresh: what its slot holds is not used
    )
    for spelling in (gather_and_fill, select_and_where, gather_and_assign):
        model = OwnMixer(hidden_size=64, num_slots=6, spelling=spelling).to(device).requires_grad_(False)
        before = model.state_cache.clone()

        stock_out = torch.compile(model, fullgraph=True)(*inputs)
        stock_cache = model.state_cache.clone()

        model.state_cache.copy_(before)
        torch.compiler.reset()  # or torch.compile would not compile the same model again
        with eliminate_snapshots() as elimination:
            out = torch.compile(model, fullgraph=True)(*inputs)

        torch.testing.assert_close(out, stock_out, rtol=0, atol=0)
        torch.testing.assert_close(model.state_cache, stock_cache, rtol=0, atol=0)
        report = elimination.report()
        print(f"\n{spelling.__name__}: {report}")
        if report.graphs:  # none: the finished code came from the compile cache, and was not compiled again
            assert report.eliminated == 1
    print("\nThe output and the caches are equal bit for bit, in all spellings.")


if __name__ == "__main__":
    torch.manual_seed(0)
    with torch.inference_mode():
        main()
