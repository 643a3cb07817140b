"""Batches for the tiled convolution, with `F.conv1d` in FP64 as the oracle. For CPU, interpreter and GPU."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor

from mamba_ops.kernels.causal_conv_tiled import BLOCK_TOKENS
from mamba_ops.ops.causal_conv_tiled import causal_conv_tiled

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SENTINEL = 7.0


@dataclass(repr=False)  # a failing case would print whole tensors
class TiledCase:
    """One call. Slots that no sequence reads hold NaN; the padding between slots holds a sentinel."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    cu_seqlens: Tensor
    pages: Tensor
    conv_state: Tensor
    slots: Tensor
    has: Tensor
    tile_sequence: Tensor
    tile_offset: Tensor

    @property
    def arguments(self) -> dict[str, Tensor | None]:
        return {
            "x": self.x,
            "weight": self.weight,
            "bias": self.bias,
            "cu_seqlens": self.cu_seqlens,
            "conv_state": self.conv_state,
            "slots": self.slots,
            "has_initial_state": self.has,
            "tile_sequence": self.tile_sequence,
            "tile_offset": self.tile_offset,
        }


def make_tiled_case(
    lengths: list[int],
    *,
    conv_dim: int = 24,
    width: int = 4,
    dtype: torch.dtype = torch.float32,
    index_dtype: torch.dtype = torch.int32,
    mask: list[bool] | None = None,
    bias: bool = True,
    channels_last: bool = True,
    slot_padding: int = 5,
    spare_entries: int = 0,
    negative: bool = False,
    padding_tokens: int = 3,
    padding_tiles: int = 2,
    spare_slots: int = 3,
    device: str = "cpu",
) -> TiledCase:
    """Random inputs; x is a slice of a projection, slots and mask are columns of tables, caches are views of pages."""
    nseqs, num_slots, entries = len(lengths), len(lengths) + spare_slots, width - 1 + spare_entries
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    x = torch.randn(sum(lengths) + padding_tokens, conv_dim + 9)[:, 3 : 3 + conv_dim].to(dtype)
    x[sum(lengths) :] = torch.nan
    table = torch.randint(-99, 99, (nseqs, 3), dtype=index_dtype)
    table[:, 1] = torch.randperm(num_slots)[:nseqs] - num_slots * negative
    masks = torch.rand(nseqs, 2) > 0.5
    masks[:, 0] = torch.tensor(mask or [True] * nseqs)
    pages = torch.full((num_slots, conv_dim * entries + slot_padding), SENTINEL).to(dtype)
    pages, x, table, masks = (tensor.to(device) for tensor in (pages, x, table, masks))
    conv_state = state_of(pages, conv_dim, entries, channels_last)
    conv_state.fill_(torch.nan)
    for slot, length, has in zip(table[:, 1].tolist(), lengths, masks[:, 0].tolist(), strict=True):
        if length and has:
            conv_state[slot] = torch.randn(conv_dim, entries).to(pages)
    tiles = [(row, tile) for row, length in enumerate(lengths) for tile in range(-(-length // BLOCK_TOKENS))]
    tiles += [(-1, 0)] * padding_tiles
    tile_sequence, tile_offset = torch.tensor(tiles, dtype=torch.int32, device=device).reshape(-1, 2).T.contiguous()
    make = {"dtype": dtype, "device": device}
    return TiledCase(
        x,
        torch.randn(conv_dim, width).to(**make),
        torch.randn(conv_dim).to(**make) if bias else None,
        cu_seqlens.to(torch.int32).to(device),
        pages,
        conv_state,
        table[:, 1],
        masks[:, 0],
        tile_sequence,
        tile_offset,
    )


def state_of(pages: Tensor, conv_dim: int, entries: int, channels_last: bool) -> Tensor:
    inner = pages[:, : conv_dim * entries]
    return inner.unflatten(1, (entries, conv_dim)).mT if channels_last else inner.unflatten(1, (conv_dim, entries))


def assert_equals_conv1d(case: TiledCase) -> None:
    """Outputs within rounding, caches bit for bit; what belongs to no sequence with tokens is untouched."""
    history = case.weight.shape[1] - 1
    pages = case.pages.clone()
    after = pages.as_strided(case.conv_state.shape, case.conv_state.stride(), case.conv_state.storage_offset())
    expected, allowed = [], []
    taps = case.weight.double()[:, None]
    bias = torch.zeros_like(taps[:, 0, 0]) if case.bias is None else case.bias.double()
    eps = torch.finfo(case.x.dtype).eps
    for b, (start, end) in enumerate(pairwise(case.cu_seqlens.tolist())):
        if start == end:
            continue
        old = after[int(case.slots[b]), :, :history].clone()
        inputs = torch.cat([old if case.has[b] else torch.zeros_like(old), case.x[start:end].T], dim=1)
        after[int(case.slots[b]), :, :history] = inputs[:, -history:]
        inputs = inputs.double()
        out = F.silu(F.conv1d(inputs[None], taps, bias, groups=taps.shape[0]))[0].T
        terms = F.conv1d(inputs.abs()[None], taps.abs(), bias.abs(), groups=taps.shape[0])[0].T
        expected.append(out)
        # Each product may be rounded to the dtype of x, the result is; sums are FP32. The slope of SiLU is below 1.1.
        allowed.append(0.55 * eps * terms + 0.5 * eps * out.abs() + 1e-5)
    ntokens = int(case.cu_seqlens[-1])
    out = causal_conv_tiled(**case.arguments)
    assert (out.dtype, out.shape) == (case.x.dtype, case.x.shape)
    if expected:
        assert ((out[:ntokens].double() - torch.cat(expected)).abs() <= torch.cat(allowed)).all()
    assert torch.equal(bits(case.pages), bits(pages))


def bits(tensor: Tensor) -> Tensor:
    """With one NaN for all: a store may not keep which one it was."""
    return tensor.nan_to_num(nan=-12345.0)


@st.composite
def tiled_cases(
    draw: st.DrawFn, dtypes: tuple[torch.dtype, ...] = DTYPES, spare_slots: int = 3, device: str = "cpu"
) -> TiledCase:
    torch.manual_seed(draw(st.integers(0, 2**31)))
    lengths = draw(st.lists(st.integers(0, 2 * BLOCK_TOKENS + 2), min_size=1, max_size=5))
    return make_tiled_case(
        lengths,
        conv_dim=draw(st.integers(1, 40)),
        width=draw(st.integers(2, BLOCK_TOKENS + 1)),
        dtype=draw(st.sampled_from(dtypes)),
        index_dtype=draw(st.sampled_from((torch.int32, torch.int64))),
        mask=draw(st.lists(st.booleans(), min_size=len(lengths), max_size=len(lengths))),
        bias=draw(st.booleans()),
        channels_last=draw(st.booleans()),
        slot_padding=draw(st.sampled_from((0, 1, 64))),
        spare_entries=draw(st.integers(0, 3)),
        negative=draw(st.booleans()),
        padding_tokens=draw(st.integers(0, 3)),
        padding_tiles=draw(st.integers(0, 3)),
        spare_slots=spare_slots,
        device=device,
    )
