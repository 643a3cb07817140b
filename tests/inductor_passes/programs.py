"""Small programs around state passing, and their inputs: what the tests of the pass compile."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from mamba_ops.ops import masked_gather, state_passing, state_passing_update

NHEADS, HEADDIM, DSTATE, CHUNK_SIZE = 3, 4, 16, 16
ROW = (NHEADS, HEADDIM, DSTATE)
NUM_SLOTS = 9

Program = Callable[..., object]
Spelling = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclasses.dataclass
class Inputs:
    """Arguments of a program, in its order. The slots of sequences without an initial state hold NaN."""

    states: Tensor
    dA_cumsum: Tensor  # noqa: N815 - the paper's name
    last_chunk_indices: Tensor
    cache: Tensor
    slots: Tensor
    has: Tensor

    def clone(self) -> Inputs:
        """The same values; strides and the storage around the cache are kept."""
        copies = {field.name: _clone_with_storage(getattr(self, field.name)) for field in dataclasses.fields(self)}
        return Inputs(**copies)

    def args(self) -> tuple[Tensor, ...]:
        """Positional arguments."""
        return tuple(getattr(self, field.name) for field in dataclasses.fields(self))


def _clone_with_storage(tensor: Tensor) -> Tensor:
    whole = tensor.new_empty(0).set_(tensor.untyped_storage())
    return whole.clone().as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def make_inputs(
    chunks: tuple[int, ...] = (2, 0, 1),
    has: tuple[bool, ...] | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    slot_dtype: torch.dtype = torch.int32,
    slot_padding: int = 0,
    device: str = "cpu",
) -> Inputs:
    """Random inputs for sequences of `chunks` chunks; a padded cache has NaN between its slots."""
    nseqs, nchunks = len(chunks), max(sum(chunks), 1)
    has = has if has is not None else tuple(b % 2 == 0 for b in range(nseqs))
    row_size = NHEADS * HEADDIM * DSTATE
    storage = torch.full((3 + NUM_SLOTS * (row_size + slot_padding),), float("nan"), dtype=dtype)
    strides = (row_size + slot_padding, HEADDIM * DSTATE, DSTATE, 1)
    cache = storage.as_strided((NUM_SLOTS, *ROW), strides, 3 if slot_padding else 0)
    cache.copy_(torch.randn(NUM_SLOTS, *ROW))
    slots = torch.randperm(NUM_SLOTS)[:nseqs].to(slot_dtype)
    cache[slots[~torch.tensor(has)].long()] = float("nan")
    return Inputs(
        torch.randn(nchunks, *ROW, device=device),
        -torch.rand(nchunks, NHEADS, CHUNK_SIZE, device=device).cumsum(-1),
        (torch.tensor(chunks).cumsum(0) - 1).to(torch.int32).to(device),
        cache.to(device),
        slots.to(device),
        torch.tensor(has, device=device),
    )


def snapshot(cache: Tensor, slots: Tensor, has: Tensor) -> Tensor:
    """The snapshot as vLLM and most models spell it."""
    return torch.where(has[:, None, None, None], cache[slots], 0)


def update_with(spelling: Spelling) -> Program:
    """State passing from a snapshot, with the final states written in place."""

    def program(
        states: Tensor, dA_cumsum: Tensor, last_chunk_indices: Tensor, cache: Tensor, slots: Tensor, has: Tensor
    ) -> Tensor:
        initial = spelling(cache, slots, has)
        return state_passing_update(states, dA_cumsum, last_chunk_indices, initial, cache, slots)

    return program


def older_form_with(write: Callable[[Tensor, Tensor, Tensor], object], spelling: Spelling = snapshot) -> Program:
    """State passing from a snapshot that returns the final states, which `write(cache, slots, final)` stores."""

    def program(
        states: Tensor, dA_cumsum: Tensor, last_chunk_indices: Tensor, cache: Tensor, slots: Tensor, has: Tensor
    ) -> Tensor:
        initial = spelling(cache, slots, has)
        entering, final = state_passing(states, dA_cumsum, last_chunk_indices, initial, cache.dtype)
        write(cache, slots, final)
        return entering

    return program


def _zeroed(cache: Tensor, slots: Tensor, has: Tensor) -> Tensor:
    rows = cache[slots]
    rows[~has] = 0
    return rows


def _masked_in_place(cache: Tensor, slots: Tensor, has: Tensor) -> Tensor:
    return cache[slots].masked_fill_(~has.view(-1, 1, 1, 1), 0.0)


def _where_against_rows(cache: Tensor, slots: Tensor, has: Tensor) -> Tensor:
    rows = cache[slots]
    return torch.where(has.view(-1, 1, 1, 1), rows, torch.zeros_like(rows))


# Every way to write `where(has, cache[slots], 0)` that means exactly that.
SPELLINGS: dict[str, Spelling] = {
    "where, mask by None": snapshot,
    "where, mask viewed": lambda c, s, h: torch.where(h.view(-1, 1, 1, 1), c[s], 0.0),
    "where, mask unsqueezed": lambda c, s, h: torch.where(h.unsqueeze(1).unsqueeze(-1).unsqueeze(-1), c[s], 0),
    "where, mask expanded": lambda c, s, h: torch.where(h[:, None, None, None].expand(-1, *ROW), c[s], 0),
    "where, mask expanded, then viewed": lambda c, s, h: torch.where(
        h[:, None].expand(-1, NHEADS * HEADDIM * DSTATE).view(-1, *ROW), c[s], 0
    ),
    "where, mask inverted": lambda c, s, h: torch.where(~h[:, None, None, None], 0, c[s]),
    "where, mask inverted after expanding": lambda c, s, h: torch.where(
        torch.logical_not(h[:, None, None, None].expand(-1, *ROW)), 0, c[s]
    ),
    "where, mask inverted twice": lambda c, s, h: torch.where(~(~h)[:, None, None, None], c[s], 0),
    "where, mask computed": lambda c, s, h: torch.where((h.int() * 5 > 0)[:, None, None, None], c[s], 0),
    "where, mask computed in the rows' shape": lambda c, s, h: torch.where(h.int()[:, None, None, None] > 0, c[s], 0),
    "where, zeros of the rows' shape": _where_against_rows,
    "where, zero as a tensor": lambda c, s, h: torch.where(
        h[:, None, None, None], c[s], torch.zeros((), dtype=c.dtype)
    ),
    "where on flat rows": lambda c, s, h: torch.where(h[:, None], c.flatten(1)[s], 0).view(-1, *ROW),
    "masked_fill": lambda c, s, h: c[s].masked_fill(~h[:, None, None, None], 0),
    "masked_fill_": _masked_in_place,
    "rows[~has] = 0": _zeroed,
    "index_select": lambda c, s, h: torch.where(h[:, None, None, None], c.index_select(0, s), 0),
    "index_select with int64": lambda c, s, h: torch.where(h[:, None, None, None], c.index_select(0, s.long()), 0),
    "index with int64": lambda c, s, h: torch.where(h[:, None, None, None], c[s.long()], 0),
    "index with a column": lambda c, s, h: torch.where(h[:, None, None, None], c[s[:, None]].squeeze(1), 0),
    "embedding": lambda c, s, h: torch.where(h[:, None], torch.nn.functional.embedding(s, c.flatten(1)), 0).unflatten(
        1, ROW
    ),
    "cast before the mask": lambda c, s, h: torch.where(h[:, None, None, None], c[s].float(), 0.0),
    "cast after the mask": lambda c, s, h: snapshot(c, s, h).float(),
    "cast there and back": lambda c, s, h: snapshot(c, s, h).double().to(c.dtype),
    "contiguous": lambda c, s, h: snapshot(c, s, h).contiguous(),
    "clone": lambda c, s, h: snapshot(c, s, h).clone(),
    "masked_gather": lambda c, s, h: masked_gather(c, s, h),
    "masked_gather, then where": lambda c, s, h: torch.where(h[:, None, None, None], masked_gather(c, s, None), 0),
}
# Without a mask: every sequence has an initial state.
UNMASKED_SPELLINGS: dict[str, Spelling] = {
    "index": lambda c, s, h: c[s],
    "index with int64": lambda c, s, h: c[s.long()],
    "index_select, cast": lambda c, s, h: c.index_select(0, s).float(),
    "masked_gather": lambda c, s, h: masked_gather(c, s, None),
}
