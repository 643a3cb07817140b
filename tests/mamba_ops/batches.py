"""Inputs for the SSD: ragged batches of any shape, with every view that callers pass, and caches with padded slots."""

from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch
from torch import Tensor

from mamba_ops import ChunkMetadata, SSDOutput, build_chunk_metadata, ssd_chunk_scan
from mamba_ops.ops import masked_gather
from mamba_ops.reference import ssd_reference

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class Shape:
    """Sizes of a layer; `nheads` is scaled down from the real ones, which changes no code path."""

    nheads: int
    headdim: int
    dstate: int
    ngroups: int = 1
    chunk_size: int = 64

    @property
    def row(self) -> tuple[int, int, int]:
        return self.nheads, self.headdim, self.dstate


SMALL = Shape(nheads=4, headdim=16, dstate=16, ngroups=2, chunk_size=32)
FAMILIES = {
    "granite-4": Shape(4, 64, 128, 1, 256),
    "nemotron-h": Shape(8, 64, 128, 8, 128),
    "nemotron-h-chunk256": Shape(8, 64, 128, 8, 256),
    "bamba": Shape(4, 64, 128, 1, 256),
    "falcon-h1": Shape(4, 64, 256, 1, 256),
    "falcon-h1-headdim128": Shape(4, 128, 256, 1, 128),
    "zamba2": Shape(4, 64, 64, 2, 256),
    "codestral": Shape(8, 64, 128, 8, 256),
    "odd": Shape(6, 80, 96, 2, 128),
    "shard": Shape(2, 80, 96, 1, 64),
    "one-head": Shape(1, 64, 128, 1, 128),
}


@dataclass
class Batch:
    """The arguments of one prefill. `inputs` and `options` go to `ssd_chunk_scan` and to the reference alike."""

    shape: Shape
    lengths: list[int]
    inputs: dict[str, Tensor]
    options: dict[str, Tensor | bool]
    metadata: ChunkMetadata

    @property
    def cu_seqlens(self) -> list[int]:
        return offsets(self.lengths)

    def run(self, **states: object) -> SSDOutput:
        """The batch through `ssd_chunk_scan`, into an output that starts as NaN."""
        out = torch.full_like(self.inputs["x"], torch.nan, memory_format=torch.contiguous_format)
        return ssd_chunk_scan(**self.inputs, **self.options, metadata=self.metadata, out=out, **states)

    def reference(self, initial_states: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return ssd_reference(**self.inputs, **self.options, cu_seqlens=self.cu_seqlens, initial_states=initial_states)

    def tokens(self, start: int, end: int, **metadata: object) -> "Batch":
        """Tokens `start` to `end` of a batch of one sequence, as a batch of its own."""
        return replace(
            self,
            lengths=[end - start],
            inputs={name: value if name == "A" else value[start:end] for name, value in self.inputs.items()},
            options={name: value[start:end] if name == "z" else value for name, value in self.options.items()},
            metadata=build_chunk_metadata([0, end - start], self.shape.chunk_size, **metadata),
        )


def offsets(lengths: list[int]) -> list[int]:
    return [0, *accumulate(lengths)]


def make_batch(
    lengths: list[int],
    shape: Shape = SMALL,
    dtype: torch.dtype = torch.float32,
    *,
    gate: bool = True,
    skip: int | None = 1,
    strided: bool = False,
    **metadata: object,
) -> Batch:
    """A batch of random inputs.

    Args:
        gate: whether there is a z. skip: dimensions of D, or None for no D.
        strided: whether x, B, C, dt and z are slices of wider tensors, as when one projection makes them all.
        metadata: arguments of `build_chunk_metadata`.
    """
    ntokens = sum(lengths)
    nheads, headdim, ngroups, dstate = shape.nheads, shape.headdim, shape.ngroups, shape.dstate
    widths = [nheads * headdim, nheads * headdim, ngroups * dstate, ngroups * dstate, nheads]
    if strided:
        fused = torch.randn(ntokens, sum(widths) + 3).to(dtype)
        parts = list(fused[:, 3:].split(widths, dim=1))
    else:
        parts = [torch.randn(ntokens, width).to(dtype) for width in widths]
    z, x, B, C, dt = parts
    options: dict[str, Tensor | bool] = {"dt_bias": torch.randn(nheads) - 3.0, "dt_softplus": True}
    if gate:
        options["z"] = z.unflatten(1, (nheads, headdim))
    if skip is not None:
        options["D"] = torch.randn(nheads, headdim) if skip == 2 else torch.randn(nheads)
    return Batch(
        shape,
        lengths,
        {
            "x": x.unflatten(1, (nheads, headdim)),
            "dt": dt,
            "A": -(0.05 + torch.rand(nheads)),
            "B": B.unflatten(1, (ngroups, dstate)),
            "C": C.unflatten(1, (ngroups, dstate)) / dstate**0.5,
        },
        options,
        build_chunk_metadata(offsets(lengths), shape.chunk_size, **metadata),
    )


@dataclass
class Cache:
    """A state cache that is a view of `pages`: slots at a distance, behind an offset, with padding between them."""

    pages: Tensor
    view: Tensor

    def clone(self) -> "Cache":
        pages = self.pages.clone()
        return Cache(pages, pages.as_strided(self.view.shape, self.view.stride(), self.view.storage_offset()))

    def check_only_written(self, before: "Cache", slots: list[int]) -> None:
        """Assert that no byte of the pages differs from `before` except in these slots."""
        expected = before.clone()
        expected.view[slots] = self.view[slots]
        torch.testing.assert_close(self.pages.view(torch.uint8), expected.pages.view(torch.uint8), rtol=0, atol=0)


def make_cache(
    num_slots: int,
    shape: Shape = SMALL,
    dtype: torch.dtype = torch.float32,
    *,
    padding: int = 0,
    offset: int = 0,
    live: list[int] | None = None,
) -> Cache:
    """A cache whose slots hold random states, or NaN if they are not among the `live` ones; the padding holds 7."""
    row = torch.Size(shape.row).numel()
    pages = torch.full((offset + num_slots * (row + padding),), 7.0, dtype=dtype)
    strides = (row + padding, shape.headdim * shape.dstate, shape.dstate, 1)
    view = pages.as_strided((num_slots, *shape.row), strides, offset)
    view.fill_(torch.nan)
    slots = list(range(num_slots)) if live is None else live
    view[slots] = torch.randn(len(slots), *shape.row).to(dtype)
    return Cache(pages, view)


@dataclass
class Slots:
    """Where each sequence of a batch reads and writes."""

    read: Tensor
    write: Tensor
    has: Tensor | None = None
    written: list[int] = field(default_factory=list)


def run_with_snapshot(batch: Batch, cache: Tensor, slots: Slots) -> SSDOutput:
    """What stock code does: a copy of the entering states first, then the scan, which overwrites the slots."""
    snapshot = masked_gather(cache, slots.read, slots.has)
    return batch.run(
        state_cache=cache, initial_states=snapshot, write_slots=slots.write, return_intermediate_states=True
    )


def run_indexed(batch: Batch, cache: Tensor, slots: Slots) -> SSDOutput:
    """The same in place."""
    return batch.run(
        state_cache=cache,
        read_slots=slots.read,
        has_initial_state=slots.has,
        write_slots=slots.write,
        return_intermediate_states=True,
    )


def assert_near(actual: Tensor, expected: Tensor, *rounded_to: torch.dtype) -> None:
    """Compare with an FP64 result after roundings to the given dtypes, besides FP32 arithmetic.

    Exponents of decays are sums of a hundred and more, so their roundings alone make results 1e-5 wrong.
    """
    eps = max([2e-5, *(torch.finfo(dtype).eps for dtype in rounded_to)])
    scale = float(expected.square().mean().sqrt()) if expected.numel() else 0.0
    torch.testing.assert_close(actual.double(), expected.double(), rtol=eps, atol=8 * eps * scale)


def assert_same(actual: object, expected: object) -> None:
    """Equal bit for bit."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
