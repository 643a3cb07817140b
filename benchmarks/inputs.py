"""Model shapes and random inputs that the benchmarks and the equality run share."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mamba_ops import ChunkMetadata, build_chunk_metadata


@dataclass(frozen=True)
class Shape:
    """Sizes of one Mamba2 layer, or of one tensor-parallel shard of it."""

    nheads: int
    headdim: int
    dstate: int
    ngroups: int
    chunk_size: int

    def shard(self, tensor_parallel: int) -> Shape:
        """The part of one rank: heads are split, groups are split as far as they go round."""
        ngroups = max(1, self.ngroups // tensor_parallel)
        return replace(self, nheads=self.nheads // tensor_parallel, ngroups=ngroups)


FAMILIES = {
    "granite-4.0-h-micro": Shape(nheads=64, headdim=64, dstate=128, ngroups=1, chunk_size=256),
    "nemotron-h-8b": Shape(nheads=128, headdim=64, dstate=128, ngroups=8, chunk_size=128),
    "bamba-9b": Shape(nheads=128, headdim=64, dstate=128, ngroups=1, chunk_size=256),
    "falcon-h1-7b": Shape(nheads=24, headdim=128, dstate=256, ngroups=1, chunk_size=256),
    "zamba2-7b": Shape(nheads=112, headdim=64, dstate=64, ngroups=2, chunk_size=256),
    "codestral-mamba-7b": Shape(nheads=128, headdim=64, dstate=128, ngroups=8, chunk_size=256),
}


@dataclass
class Inputs:
    """One prefill: activations, weights, the cache with its slots, and the chunk metadata."""

    x: Tensor
    dt: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor
    dt_bias: Tensor
    metadata: ChunkMetadata
    state_cache: Tensor
    slots: Tensor
    has_initial_state: Tensor

    def arguments(self) -> dict[str, Any]:
        """What every path takes, by name."""
        return {name: getattr(self, name) for name in ("x", "dt", "A", "B", "C", "D", "dt_bias", "metadata")}


def make_inputs(
    shape: Shape,
    lengths: list[int],
    dtype: torch.dtype = torch.bfloat16,
    state_dtype: torch.dtype = torch.bfloat16,
    *,
    context_lens: list[int] | None = None,
    has_initial_state: list[bool] | None = None,
    slot_padding: int = 0,
    num_slots: int | None = None,
    seed: int = 0,
    device: str = "cuda",
) -> Inputs:
    """Random inputs with the strides that a model gives them; slots that no sequence addresses hold NaN."""
    generator = torch.Generator(device).manual_seed(seed)

    def randn(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=device)

    ntokens, nseqs = sum(lengths), len(lengths)
    inner, grouped = shape.nheads * shape.headdim, shape.ngroups * shape.dstate
    conv_out = randn(ntokens, inner + 2 * grouped).to(dtype)
    x, B, C = conv_out.split([inner, grouped, grouped], dim=-1)
    num_slots = num_slots or nseqs + 3
    row = inner * shape.dstate
    pool = torch.full((num_slots, row + slot_padding), float("nan"), dtype=state_dtype, device=device)
    state_cache = pool[:, :row].unflatten(1, (shape.nheads, shape.headdim, shape.dstate))
    slots = torch.randperm(num_slots, generator=generator, device=device)[:nseqs].to(torch.int32)
    has = torch.tensor(has_initial_state or [True] * nseqs, device=device)
    for slot in slots[has].tolist():
        state_cache[slot] = (0.3 * randn(shape.nheads, shape.headdim, shape.dstate)).to(state_dtype)
    return Inputs(
        x=x.unflatten(1, (shape.nheads, shape.headdim)),
        dt=randn(ntokens, shape.nheads).to(dtype),
        A=-torch.exp(randn(shape.nheads)),
        B=B.unflatten(1, (shape.ngroups, shape.dstate)),
        C=C.unflatten(1, (shape.ngroups, shape.dstate)),
        D=randn(shape.nheads),
        dt_bias=randn(shape.nheads) - 2.0,
        metadata=build_chunk_metadata(
            torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32),
            shape.chunk_size,
            context_lens=context_lens,
            device=torch.device(device),
        ),
        state_cache=state_cache,
        slots=slots,
        has_initial_state=has,
    )
