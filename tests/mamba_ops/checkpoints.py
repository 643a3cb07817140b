"""Batches that keep checkpoints, with plain loops over the sequences as oracles. For CPU, interpreter and GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from mamba_ops import ops
from tests.mamba_ops.batches import (
    DTYPES,
    Batch,
    Cache,
    Shape,
    Slots,
    assert_near,
    assert_same,
    make_batch,
    make_cache,
    offsets,
)
from tests.mamba_ops.prefills import INDEX_DTYPES, column
from tests.mamba_ops.tiled_convs import TiledCase, make_tiled_case, tiled_cases

NO_SLOT = 10**6


@dataclass(repr=False)  # a failing case would print whole tensors
class KeptInputs:
    """One call of `conv_checkpoint`: the sequences of a convolution, and after how many tokens of each is kept."""

    conv: TiledCase
    checkpoint_offsets: Tensor
    checkpoint_slots: Tensor

    @property
    def arguments(self) -> dict[str, Any]:
        sequences = ("x", "cu_seqlens", "conv_state", "slots", "has_initial_state")
        return {
            **{name: self.conv.arguments[name] for name in sequences},
            "checkpoint_offsets": self.checkpoint_offsets,
            "checkpoint_slots": self.checkpoint_slots,
            "width": self.conv.weight.shape[1],
        }

    def expected_pages(self) -> Tensor:
        """The cache with its padding afterwards: the last inputs before each checkpoint, as they were."""
        case, history = self.conv, self.conv.weight.shape[1] - 1
        pages = case.pages.clone()
        after = pages.as_strided(case.conv_state.shape, case.conv_state.stride(), case.conv_state.storage_offset())
        for b, offset in enumerate(self.checkpoint_offsets.tolist()):
            if offset <= 0:
                continue
            start = int(case.cu_seqlens[b])
            old = case.conv_state[int(case.slots[b]), :, :history]
            old = old if case.has[b] else torch.zeros_like(old)
            inputs = torch.cat([old, case.x[start : start + offset].T], dim=1)
            after[int(self.checkpoint_slots[b]), :, :history] = inputs[:, -history:]
        return pages

    def check(self) -> None:
        """Every byte of the cache, padding included."""
        expected = self.expected_pages()
        ops.conv_checkpoint(**self.arguments)
        assert torch.equal(self.conv.pages.view(torch.uint8), expected.view(torch.uint8))


def keep_inputs(
    conv: TiledCase, until: list[int], index_dtype: torch.dtype = torch.int32, negative: bool = False
) -> KeptInputs:
    """Checkpoints after so many tokens of the sequences; who keeps nothing names a free slot or none, padding none."""
    num_slots, lengths = conv.conv_state.shape[0], conv.cu_seqlens.diff().tolist()
    taken = {slot % num_slots for slot, length in zip(conv.slots.tolist(), lengths, strict=True) if length}
    free = [slot for slot in torch.randperm(num_slots).tolist() if slot not in taken]
    named = [offset > 0 or bool(torch.rand(()) < 0.5) for offset in until]
    slots = [free.pop() - num_slots * negative if is_named else NO_SLOT for is_named in named]
    for b, length in enumerate(lengths):
        if not length:
            conv.slots[b] = NO_SLOT
    with conv.x.device:
        return KeptInputs(conv, torch.tensor(until, dtype=torch.int32), column(slots, index_dtype, 3, 1))


@st.composite
def kept_inputs(draw: st.DrawFn, dtypes: tuple[torch.dtype, ...] = DTYPES, device: str = "cpu") -> KeptInputs:
    conv = draw(tiled_cases(dtypes, spare_slots=6, device=device))
    conv.x[::5], conv.x[1::5] = -0.0, torch.inf  # a copy keeps them
    most = conv.weight.shape[1]  # from there on nothing of a slot is needed
    until = [
        draw(st.one_of(st.integers(-1, min(length, most)), st.integers(0, length)))
        for length in conv.cu_seqlens.diff().tolist()
    ]
    return keep_inputs(conv, until, draw(st.sampled_from(INDEX_DTYPES)), draw(st.booleans()))


def assert_reaches_far_slots(device: str) -> None:
    """Read in the last of slots 2^29 elements apart, and kept there; the memory between them is not touched."""
    distance, conv_dim = 2**29 + 64, 24
    pool = torch.empty(4 * distance + 3 * conv_dim, dtype=torch.bfloat16, device=device)
    far = pool.as_strided((5, conv_dim, 3), (distance, 1, conv_dim))
    for read, keep in ((4, 0), (0, 4), (-1, 1), (1, -1)):
        conv = make_tiled_case([5], conv_dim=conv_dim, dtype=torch.bfloat16, device=device)
        far[read] = row = conv.conv_state[int(conv.slots[0])]
        with torch.device(device):
            slots = {"slots": torch.tensor([read]), "checkpoint_slots": torch.tensor([keep])}
        ops.conv_checkpoint(**{**keep_inputs(conv, [2]).arguments, "conv_state": far, **slots})
        assert torch.equal(far[keep], torch.cat([row[:, 2:], conv.x[:2].T], dim=1))
        assert torch.equal(far[read], row)


@dataclass(repr=False)
class KeptStates:
    """One call of `state_passing_indexed` that keeps the states behind some chunks."""

    states: Tensor
    decays: Tensor
    last_chunk_indices: Tensor
    cache: Cache
    slots: Slots
    write_empty: bool
    checkpoint_chunks: Tensor
    checkpoint_offsets: Tensor
    checkpoint_slots: Tensor

    def run(self, cache: Tensor, *, keeps: bool) -> Tensor:
        slots = self.slots
        chunks = (self.states, self.decays, self.last_chunk_indices)
        kept = (self.checkpoint_chunks, self.checkpoint_offsets, self.checkpoint_slots) if keeps else ()
        return ops.state_passing_indexed(*chunks, cache, slots.read, slots.has, slots.write, self.write_empty, *kept)

    def check(self) -> None:
        """What is kept is near the recurrence and has the bits that go on; all else is as if nothing were kept."""
        ours, plain = self.cache.clone(), self.cache.clone()
        entering = self.run(ours.view, keeps=True)
        plain_entering = self.run(plain.view, keeps=False)
        ends = [-1, *self.last_chunk_indices.tolist()]
        owned = entering[: ends[-1] + 1]  # the rows of chunks that no sequence owns are not defined
        assert_same(owned, plain_entering[: ends[-1] + 1])
        dtype, kept_slots = self.cache.view.dtype, []
        for b, (before, last) in enumerate(pairwise(ends)):
            state = torch.zeros_like(self.cache.view[0], dtype=torch.float64)
            if last > before and (self.slots.has is None or self.slots.has[b]):
                state += self.cache.view[int(self.slots.read[b])].double()
            for c in range(before + 1, last + 1):
                assert_near(entering[c], state, dtype)
                state = self.decays[c, :, -1].double().exp()[:, None, None] * state + self.states[c].double()
                if self.checkpoint_offsets[b] > 0 and self.checkpoint_chunks[b] == c:
                    kept_slots.append(int(self.checkpoint_slots[b]))
                    kept = ours.view[kept_slots[-1]]
                    assert_near(kept, state, dtype)
                    assert_same(kept, entering[c + 1] if c < last else ours.view[int(self.slots.write[b])])
        assert len(kept_slots) == int((self.checkpoint_offsets > 0).sum())
        ours.check_only_written(plain, kept_slots)


@st.composite
def kept_states(draw: st.DrawFn, device: str = "cpu") -> KeptStates:
    torch.manual_seed(draw(st.integers(0, 2**32)))
    shape = Shape(
        nheads=draw(st.integers(1, 3)),
        headdim=draw(st.sampled_from([1, 8, 20])),
        dstate=draw(st.sampled_from([1, 16, 40])),
        chunk_size=16,
    )
    counts = draw(st.lists(st.integers(0, 4), max_size=5))
    nseqs, ends = len(counts), offsets(counts)
    nchunks = ends[-1] + draw(st.integers(0, 2))  # the last ones are padding
    write_empty = draw(st.booleans())
    has = [draw(st.booleans()) for _ in counts] if draw(st.booleans()) else None
    num_slots = 3 * nseqs + draw(st.integers(1, 3))
    order = draw(st.permutations(range(num_slots)))
    write, keep, spare = list(order[:nseqs]), list(order[nseqs : 2 * nseqs]), order[2 * nseqs :]
    read = [draw(st.sampled_from([slot, *spare])) for slot in write]
    used = [b for b, count in enumerate(counts) if count or write_empty]
    live = {read[b] for b in used if has is None or has[b]}
    chunks, until = [], []
    for b, count in enumerate(counts):
        # Who keeps nothing may name a chunk and a slot all the same, or what does not exist.
        until.append(draw(st.integers(1, 99)) if count and draw(st.booleans()) else draw(st.integers(-1, 0)))
        is_named = until[b] > 0 or (count > 0 and draw(st.booleans()))
        chunks.append(draw(st.integers(ends[b], ends[b + 1] - 1)) if is_named else NO_SLOT)
        keep[b] = keep[b] - num_slots * draw(st.integers(0, 1)) if is_named else NO_SLOT
        if b not in used:
            read[b] = write[b] = draw(st.sampled_from([NO_SLOT, *order]))
    with torch.device(device):
        cache = make_cache(
            num_slots,
            shape,
            draw(st.sampled_from(DTYPES)),
            padding=draw(st.sampled_from([0, 1, 64])),
            offset=draw(st.sampled_from([0, 3])),
            live=sorted(live),
        )
        return KeptStates(
            torch.randn(nchunks, *shape.row),
            -torch.rand(nchunks, shape.nheads, shape.chunk_size),
            torch.tensor(ends[1:], dtype=torch.int32) - 1,
            cache,
            Slots(
                column(read, draw(st.sampled_from(INDEX_DTYPES)), 3, 1),
                column(write, draw(st.sampled_from(INDEX_DTYPES)), 2, 0),
                None if has is None else column(has, torch.bool, 2, 1),
            ),
            write_empty,
            torch.tensor(chunks, dtype=draw(st.sampled_from(INDEX_DTYPES))),
            torch.tensor(until, dtype=torch.int32),
            column(keep, draw(st.sampled_from(INDEX_DTYPES)), 4, 3),
        )


@dataclass(repr=False)
class KeptScan:
    """One call of `one_pass_scan` whose chunks end at the checkpoints too."""

    batch: Batch
    cache: Cache
    slots: Tensor
    has: Tensor
    max_tokens: int
    checkpoint_chunks: Tensor
    checkpoint_offsets: Tensor
    checkpoint_slots: Tensor

    def run(self, cache: Tensor, *, keeps: bool) -> Tensor:
        inputs, metadata = self.batch.inputs, self.batch.metadata
        cu, dt_bias = metadata.cu_chunk_seqlens, self.batch.options["dt_bias"]
        dA_cumsum, dt_out = ops.chunk_cumsum(inputs["dt"], inputs["A"], cu, metadata.chunk_size, dt_bias, True)
        x, B, C = (inputs[name] for name in ("x", "B", "C"))
        out = torch.full_like(x, torch.nan, memory_format=torch.contiguous_format)
        sequences = (cu, cache, self.slots, self.has, out, self.max_tokens, self.batch.options.get("D"))
        kept = (self.checkpoint_chunks, self.checkpoint_offsets, self.checkpoint_slots) if keeps else ()
        ops.one_pass_scan(x, B, C, dt_out, dA_cumsum, *sequences, metadata.last_chunk_indices, *kept)
        return out

    def check(self, *rounded_to: torch.dtype) -> None:
        """What is kept is near the recurrence that ends there; all else is as if nothing were kept.

        Args:
            rounded_to: what factors of products are rounded to, besides the dtypes of inputs and states.
        """
        ours, plain = self.cache.clone(), self.cache.clone()
        out = self.run(ours.view, keeps=True)
        assert_same(out, self.run(plain.view, keeps=False))
        live = torch.tensor(self.batch.lengths, device=out.device) > 0
        read, keeps = live & self.has, self.checkpoint_offsets > 0
        initial = torch.zeros(len(live), *self.batch.shape.row, dtype=torch.float64, device=out.device)
        initial[read] = self.cache.view[self.slots[read].long()].double()
        expected, final = self.batch.reference(initial)
        dtypes = (out.dtype, self.cache.view.dtype, *rounded_to)
        assert_near(out, expected, *dtypes)
        assert_near(ours.view[self.slots[live].long()], final[live], *dtypes)
        kept_slots = self.checkpoint_slots[keeps].tolist()
        assert_near(ours.view[kept_slots], self._until_checkpoints().reference(initial)[1][keeps], *dtypes)
        ours.check_only_written(plain, kept_slots)

    def _until_checkpoints(self) -> Batch:
        lengths = self.checkpoint_offsets.tolist()
        starts = self.batch.cu_seqlens[:-1]
        rows = [row for start, length in zip(starts, lengths, strict=True) for row in range(start, start + length)]
        inputs = {name: value if name == "A" else value[rows] for name, value in self.batch.inputs.items()}
        return replace(self.batch, lengths=lengths, inputs=inputs)


@st.composite
def kept_scans(
    draw: st.DrawFn,
    shapes: tuple[Shape, ...] = (Shape(1, 1, 1, 1, 16), Shape(4, 20, 24, 2, 16), Shape(2, 16, 40, 1, 64)),
    dtypes: tuple[torch.dtype, ...] = DTYPES,
    state_dtypes: tuple[torch.dtype, ...] = DTYPES,
    device: str = "cpu",
) -> KeptScan:
    torch.manual_seed(draw(st.integers(0, 2**32)))
    shape = draw(st.sampled_from(shapes))
    lengths = draw(st.lists(st.one_of(st.sampled_from([0, 1, 15, 16, 17]), st.integers(0, 80)), max_size=5))
    nseqs, starts = len(lengths), offsets(lengths)
    until = [draw(st.one_of(st.just(0), st.integers(0, length))) for length in lengths]
    num_slots = 2 * nseqs + draw(st.integers(1, 3))
    order = draw(st.permutations(range(num_slots)))
    slots, keep = list(order[:nseqs]), list(order[nseqs : 2 * nseqs])
    has = [draw(st.booleans()) for _ in lengths]
    live = [slot for slot, length, read in zip(slots, lengths, has, strict=True) if length and read]
    for b, length in enumerate(lengths):
        keep[b] = keep[b] - num_slots * draw(st.integers(0, 1)) if until[b] or draw(st.booleans()) else NO_SLOT
        if not length:
            slots[b] = draw(st.sampled_from([NO_SLOT, *order]))
    with torch.device(device):
        batch = make_batch(
            lengths,
            shape,
            draw(st.sampled_from(dtypes)),
            gate=False,
            skip=draw(st.sampled_from([None, 1, 2])),
            strided=draw(st.booleans()),
            context_lens=[draw(st.integers(0, 2 * shape.chunk_size)) for _ in lengths],
            split_at=until,
            device=device,
        )
        ends = batch.metadata.cu_chunk_seqlens
        most = min(64, shape.chunk_size)
        chunks = [
            ends.tolist().index(start + kept) - 1 if kept else draw(st.sampled_from([NO_SLOT, last]))
            for start, kept, last in zip(starts, until, batch.metadata.last_chunk_indices.tolist(), strict=False)
        ]
        return KeptScan(
            batch,
            make_cache(
                num_slots,
                shape,
                draw(st.sampled_from(state_dtypes)),
                padding=draw(st.sampled_from([0, 1, 64])),
                offset=draw(st.sampled_from([0, 3])),
                live=sorted(live),
            ),
            column(slots, draw(st.sampled_from(INDEX_DTYPES)), 3, 1),
            column(has, torch.bool, 2, 1),
            draw(st.sampled_from([most, max([1, *ends.diff().tolist()])])),
            torch.tensor(chunks, dtype=draw(st.sampled_from(INDEX_DTYPES))),
            torch.tensor(until, dtype=torch.int32),
            column(keep, draw(st.sampled_from(INDEX_DTYPES)), 4, 3),
        )
