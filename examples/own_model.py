"""The pass in a model of your own that spells the snapshot itself.

Run it with `python examples/own_model.py`. All that the model needs is a scan made of this project's ops: the pass
finds the gather and the mask in the compiled graph, whatever the layers around them look like.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from inductor_passes import eliminate_snapshots
from mamba_ops import build_chunk_metadata, ssd_chunk_scan
from mamba_ops.metadata import ChunkMetadata

NHEADS, HEADDIM, DSTATE, CHUNK_SIZE = 4, 32, 32, 64


class OwnMixer(nn.Module):
    """A mixer with a state cache in a buffer; its author wrote it before the pass existed."""

    state_cache: Tensor

    def __init__(self, hidden_size: int, num_slots: int) -> None:
        super().__init__()
        self.project = nn.Linear(hidden_size, NHEADS * HEADDIM + 2 * DSTATE + NHEADS, bias=False)
        self.out = nn.Linear(NHEADS * HEADDIM, hidden_size, bias=False)
        self.A = nn.Parameter(-torch.rand(NHEADS))
        self.register_buffer("state_cache", torch.zeros(num_slots, NHEADS, HEADDIM, DSTATE))

    def forward(self, hidden: Tensor, metadata: ChunkMetadata, slots: Tensor, has_initial_state: Tensor) -> Tensor:
        """Continue each sequence from its slot: hidden is (ntokens, hidden_size)."""
        x, B, C, dt = self.project(hidden).split([NHEADS * HEADDIM, DSTATE, DSTATE, NHEADS], dim=-1)
        # The snapshot: two dense copies of the states, one for the gather and one for the mask.
        initial_states = self.state_cache[slots]
        initial_states = initial_states.masked_fill(~has_initial_state[:, None, None, None], 0)
        result = ssd_chunk_scan(
            x.unflatten(-1, (NHEADS, HEADDIM)),
            dt,
            self.A,
            B.unsqueeze(1),
            C.unsqueeze(1),
            metadata,
            dt_softplus=True,
            initial_states=initial_states,
            state_cache=self.state_cache,
            write_slots=slots,
        )
        out: Tensor = self.out(result.out.flatten(-2))
        return out


def main() -> None:
    """Compile the model without and with the pass, and compare what both leave."""
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = OwnMixer(hidden_size=64, num_slots=6).to(device).requires_grad_(False)
    model.state_cache.normal_()
    before = model.state_cache.clone()
    inputs = (
        torch.randn(24, 64, device=device),
        build_chunk_metadata([0, 16, 24], CHUNK_SIZE, context_lens=[100, 0], device=device),
        torch.tensor([4, 1], device=device),
        torch.tensor([True, False], device=device),  # the second sequence is fresh: what its slot holds is not used
    )

    stock_out = torch.compile(model, fullgraph=True)(*inputs)
    stock_cache = model.state_cache.clone()

    model.state_cache.copy_(before)
    torch.compiler.reset()  # or torch.compile would not compile the same model again
    with eliminate_snapshots() as elimination:
        out = torch.compile(model, fullgraph=True)(*inputs)

    torch.testing.assert_close(out, stock_out, rtol=0, atol=0)
    torch.testing.assert_close(model.state_cache, stock_cache, rtol=0, atol=0)
    report = elimination.report()
    print(report)
    if report.graphs:  # none: the finished code came from the compile cache, and was not compiled again
        assert report.eliminated == 1
    print("The output and the caches are equal bit for bit.")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
