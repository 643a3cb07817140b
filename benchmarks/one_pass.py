"""Prefills of few tokens a sequence, from the projection on: in one pass, and by the staged ops."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.inputs import Shape
from mamba_ops import build_chunk_metadata, ops
from mamba_ops.kernels.causal_conv_tiled import BLOCK_TOKENS
from mamba_ops.ops.causal_conv_tiled import causal_conv_tiled
from mamba_ops.ops.conv_cumsum import conv_cumsum

WIDTH = 4


@dataclass
class OnePass:
    """What a layer and a step bring; strides as a model gives them, one page of NaN for each slot that nobody owns.

    Attributes:
        one_chunk: whether each sequence is one chunk, for which the kernel has a form of its own.
        kept: chunks, offsets and slots of checkpoints, as ops take them, or nothing.
    """

    shape: Shape
    conv_in: Tensor
    dt: Tensor
    weight: Tensor
    bias: Tensor
    A: Tensor
    D: Tensor | None
    dt_bias: Tensor
    conv_state: Tensor
    state_cache: Tensor
    slots: Tensor
    has_initial_state: Tensor
    cu_seqlens: Tensor
    cu_chunk_seqlens: Tensor
    last_chunk_indices: Tensor
    tile_sequence: Tensor
    tile_offset: Tensor
    one_chunk: bool
    kept: tuple[Tensor, ...]

    def poisoned(self) -> Tensor:
        """An output full of NaN."""
        size = (self.dt.shape[0], self.shape.nheads, self.shape.headdim)
        return torch.full(size, torch.nan, dtype=self.dt.dtype, device=self.dt.device)

    def convolution(self) -> tuple[Tensor | None, ...]:
        """Arguments of the convolution."""
        sequences = (self.cu_seqlens, self.conv_state, self.slots, self.has_initial_state)
        return (self.conv_in, self.weight, self.bias, *sequences, self.tile_sequence, self.tile_offset)

    def views(self, convolved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x, B and C."""
        shape = self.shape
        inner, grouped = shape.nheads * shape.headdim, shape.ngroups * shape.dstate
        x, B, C = convolved.split([inner, grouped, grouped], dim=1)
        groups = (shape.ngroups, shape.dstate)
        return x.unflatten(1, (shape.nheads, shape.headdim)), B.unflatten(1, groups), C.unflatten(1, groups)


def one_pass(batch: OnePass, out: Tensor, max_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Two launches. Returns what the convolution makes, and the running sums and steps."""
    convolved, dA_cumsum, dt_out = conv_cumsum(
        *batch.convolution(),
        batch.dt,
        batch.A,
        batch.shape.chunk_size,
        batch.dt_bias,
        True,
        batch.cu_chunk_seqlens,
    )
    x, B, C = batch.views(convolved)
    sequences = (batch.cu_chunk_seqlens, batch.state_cache, batch.slots, batch.has_initial_state)
    last = None if batch.one_chunk else batch.last_chunk_indices
    ops.one_pass_scan(x, B, C, dt_out, dA_cumsum, *sequences, out, max_tokens, batch.D, last, *batch.kept)
    return convolved, dA_cumsum, dt_out


def staged(batch: OnePass, out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Six launches, and the same results."""
    cu, slots, chunk_size = batch.cu_chunk_seqlens, batch.slots, batch.shape.chunk_size
    convolved = causal_conv_tiled(*batch.convolution())
    x, B, C = batch.views(convolved)
    dA_cumsum, dt_out = ops.chunk_cumsum(batch.dt, batch.A, cu, chunk_size, batch.dt_bias, True)
    states = ops.chunk_state(B, x, dt_out, dA_cumsum, cu)
    last, cache, has = batch.last_chunk_indices, batch.state_cache, batch.has_initial_state
    entering = ops.state_passing_indexed(states, dA_cumsum, last, cache, slots, has, slots, False, *batch.kept)
    cb = ops.bmm_chunk(C, B, cu, chunk_size)
    ops.chunk_scan(cb, x, dt_out, dA_cumsum, C, entering, cu, out, batch.D)
    return convolved, dA_cumsum, dt_out


def make_one_pass(
    shape: Shape,
    lengths: list[int],
    dtype: torch.dtype = torch.bfloat16,
    state_dtype: torch.dtype = torch.bfloat16,
    *,
    has_initial_state: list[bool] | None = None,
    contexts: list[int] | None = None,
    checkpoints: list[int] | None = None,
    slot_padding: int = 16,
    channels_last: bool = True,
    D_dims: int = 1,
    seed: int = 0,
    device: str = "cuda",
) -> OnePass:
    """Random short sequences; the slots of the fresh ones hold NaN, the padding behind slots 7.

    Each is one chunk, unless `contexts` says how many tokens came before: chunks end at multiples of the chunk size.
    Then `checkpoints` may say after how many tokens of each a state is kept; 0 keeps none.
    """
    generator = torch.Generator(device).manual_seed(seed)
    nseqs, ntokens, nheads = len(lengths), sum(lengths), shape.nheads
    num_slots = nseqs + 3 + len(checkpoints or [])
    inner = nheads * shape.headdim
    conv_dim = inner + 2 * shape.ngroups * shape.dstate

    def randn(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*size, generator=generator, device=device).to(dtype)

    def cache(row: int, dtype: torch.dtype) -> Tensor:
        pool = torch.full((num_slots, row + slot_padding), 7.0, dtype=dtype, device=device)
        pool[:, :row] = torch.nan
        for slot in table[:, 1][has].tolist():
            pool[slot, :row] = randn(row, dtype=dtype)
        return pool[:, :row]

    has = torch.tensor(has_initial_state or [True] * nseqs, device=device)
    table = torch.zeros(nseqs, 4, dtype=torch.int32, device=device)
    order = torch.randperm(num_slots, generator=generator, device=device)
    table[:, 1] = order[:nseqs]
    conv_rows, state_rows = cache(conv_dim * (WIDTH - 1), dtype), cache(inner * shape.dstate, state_dtype)
    conv_state = (
        conv_rows.unflatten(1, (WIDTH - 1, conv_dim)).transpose(1, 2)
        if channels_last
        else conv_rows.unflatten(1, (conv_dim, WIDTH - 1))
    )
    _, conv_in, dt = randn(ntokens, inner + conv_dim + nheads, dtype=dtype).split([inner, conv_dim, nheads], dim=1)
    tile_sequence, tile_offset = tiles_of(lengths, device)
    cu_seqlens = [0, *itertools.accumulate(lengths)]
    metadata = build_chunk_metadata(cu_seqlens, shape.chunk_size, contexts, checkpoints, device)
    kept: tuple[Tensor, ...] = ()
    if checkpoints is not None:
        table[:, 2] = order[nseqs : 2 * nseqs]
        ends = metadata.cu_chunk_seqlens.tolist()
        chunks = [ends.index(start + n) - 1 if n else 0 for start, n in zip(cu_seqlens, checkpoints, strict=False)]
        until = torch.tensor(checkpoints, dtype=torch.int32, device=device)
        kept = (torch.tensor(chunks, device=device), until, table[:, 2])
    return OnePass(
        shape=shape,
        conv_in=conv_in,
        dt=dt,
        weight=randn(conv_dim, WIDTH, dtype=dtype),
        bias=randn(conv_dim, dtype=dtype),
        A=-torch.exp(randn(nheads)),
        D=(None, randn(nheads), randn(nheads, shape.headdim))[D_dims],
        dt_bias=randn(nheads) - 2.0,
        conv_state=conv_state,
        state_cache=state_rows.unflatten(1, (nheads, shape.headdim, shape.dstate)),
        slots=table[:, 1],
        has_initial_state=has,
        cu_seqlens=metadata.cu_seqlens,
        cu_chunk_seqlens=metadata.cu_chunk_seqlens,
        last_chunk_indices=metadata.last_chunk_indices,
        tile_sequence=tile_sequence,
        tile_offset=tile_offset,
        one_chunk=contexts is None,
        kept=kept,
    )


def tiles_of(lengths: list[int], device: str) -> tuple[Tensor, Tensor]:
    """Sequence and number of every tile; see `causal_conv_tiled`."""
    tiles = [(row, tile) for row, length in enumerate(lengths) for tile in range(-(-length // BLOCK_TOKENS))]
    sequence, offset = torch.tensor(tiles, dtype=torch.int32, device=device).reshape(-1, 2).T.contiguous()
    return sequence, offset
