"""A prefill over a state cache, with the check that in place equals snapshot, and any such prefill for hypothesis."""

from dataclasses import dataclass

import torch
from hypothesis import strategies as st

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
    run_indexed,
    run_with_snapshot,
)

INDEX_DTYPES = (torch.int32, torch.int64)


@dataclass
class Prefill:
    batch: Batch
    cache: Cache
    slots: Slots

    def check(self) -> None:
        """Both ways agree in every bit, own nothing else in the cache, and are near the recurrence."""
        ours, stock = self.cache.clone(), self.cache.clone()
        result = run_indexed(self.batch, ours.view, self.slots)
        assert_same(result, run_with_snapshot(self.batch, stock.view, self.slots))
        assert_same(ours.pages, stock.pages)
        ours.check_only_written(self.cache, self.slots.written)

        initial = torch.zeros(len(self.batch.lengths), *self.batch.shape.row, dtype=self.cache.view.dtype)
        live = torch.tensor(self.batch.lengths) > 0
        read = live if self.slots.has is None else live & self.slots.has
        initial[read] = self.cache.view[self.slots.read[read].long()]
        out, final = self.batch.reference(initial)
        assert_near(result.out, out, result.out.dtype, self.cache.view.dtype)
        assert_near(ours.view[self.slots.written], final[live], self.cache.view.dtype)


def column(values: list[int] | list[bool], dtype: torch.dtype, width: int, where: int) -> torch.Tensor:
    """The values as one column of a table whose other entries would be wrong."""
    table = torch.full((len(values), width), -(2**20) if dtype != torch.bool else 0, dtype=dtype)
    table[:, where] = torch.tensor(values, dtype=dtype)
    return table[:, where]


@st.composite
def prefills(draw: st.DrawFn) -> Prefill:
    """Any ragged batch over any cache, with slots as a scheduler hands them out."""
    torch.manual_seed(draw(st.integers(0, 2**32)))
    ngroups = draw(st.sampled_from([1, 2]))
    shape = Shape(
        nheads=ngroups * draw(st.integers(1, 2)),
        headdim=draw(st.sampled_from([1, 8, 20])),
        dstate=draw(st.sampled_from([1, 16, 24])),
        ngroups=ngroups,
        chunk_size=draw(st.sampled_from([16, 32])),
    )
    lengths = draw(st.lists(st.one_of(st.sampled_from([0, 1, 15, 16, 17, 32, 33]), st.integers(0, 100)), max_size=5))
    nseqs = len(lengths)
    batch = make_batch(
        lengths,
        shape,
        draw(st.sampled_from(DTYPES)),
        gate=draw(st.booleans()),
        skip=draw(st.sampled_from([None, 1, 2])),
        strided=draw(st.booleans()),
        context_lens=[draw(st.integers(0, 40)) for _ in lengths],
    )
    # Distinct slots for writing; a sequence reads its own, or one that nobody writes, perhaps shared with others.
    num_slots = 2 * nseqs + draw(st.integers(1, 3))
    order = draw(st.permutations(range(num_slots)))
    write, spare = list(order[:nseqs]), order[nseqs:]
    read = [draw(st.sampled_from([slot, *spare])) for slot in write]
    has = [draw(st.booleans()) for _ in lengths] if draw(st.booleans()) else None
    used = [b for b, length in enumerate(lengths) if length]
    cache = make_cache(
        num_slots,
        shape,
        draw(st.sampled_from(DTYPES)),
        padding=draw(st.sampled_from([0, 1, 64])),
        offset=draw(st.sampled_from([0, 3])),
        live=sorted({read[b] for b in used if has is None or has[b]}),
    )
    written = [write[b] for b in used]
    for b, length in enumerate(lengths):
        if length == 0:  # padding names any slot: a live one, one that another sequence writes, none at all
            write[b], read[b] = (draw(st.sampled_from([0, -1, num_slots, *order])) for _ in range(2))
        elif draw(st.booleans()):
            write[b], read[b] = write[b] - num_slots, read[b] - num_slots
    dtype, width = draw(st.sampled_from(INDEX_DTYPES)), draw(st.integers(1, 3))
    where = draw(st.integers(0, width - 1))
    return Prefill(
        batch,
        cache,
        Slots(
            column(read, dtype, width, where),
            column(write, draw(st.sampled_from(INDEX_DTYPES)), width, where),
            None if has is None else column(has, torch.bool, width, where),
            written,
        ),
    )
