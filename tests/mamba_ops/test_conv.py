"""The causal convolution against `F.conv1d` in FP64, one sequence at a time, and its rules about slots."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._inductor.utils import run_and_get_code

from mamba_ops.conv import causal_conv, causal_conv_unchecked

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SENTINEL = 7.0
Conv = Callable[..., Tensor]


@dataclass
class Case:
    """Inputs of one call. Slots that no sequence may read hold NaN; the padding between slots holds a sentinel."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    cu_seqlens: Tensor
    conv_state: Tensor
    pages: Tensor
    read_slots: Tensor
    has: Tensor | None
    write_slots: Tensor

    def run(self, conv: Conv = causal_conv) -> Tensor:
        slots = self.read_slots, self.has, self.write_slots
        return conv(self.x, self.weight, self.bias, self.cu_seqlens, self.conv_state, *slots)

    def expected(self) -> tuple[Tensor, Tensor]:
        """Result in FP64 and the pages of the cache afterwards, by a loop over the sequences."""
        history = self.weight.shape[1] - 1
        out = torch.full(self.x.shape, torch.nan, dtype=torch.float64)
        pages = self.pages.clone()
        after = view_of_pages(pages, self.conv_state.shape[1:])
        cu = self.cu_seqlens.tolist()
        for b, (start, end) in enumerate(pairwise(cu)):
            if start == end:
                continue
            old = torch.zeros_like(self.conv_state[0])
            if self.has is None or self.has[b]:
                old = self.conv_state[int(self.read_slots[b])]
            inputs = torch.cat([old.double(), self.x[start:end].double().T], dim=1)
            bias = None if self.bias is None else self.bias.double()
            taps = self.weight.double()[:, None]
            out[start:end] = F.silu(F.conv1d(inputs[None], taps, bias, groups=taps.shape[0]))[0].T
            after[int(self.write_slots[b])] = inputs[:, -history:].to(after.dtype)
        return out, pages


def view_of_pages(pages: Tensor, shape: torch.Size) -> Tensor:
    return pages[:, : shape.numel()].unflatten(1, shape)


def make_case(
    lengths: list[int],
    *,
    conv_dim: int = 24,
    width: int = 4,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
    index_dtype: torch.dtype = torch.int32,
    mask: list[bool] | None = None,
    bias: bool = True,
    slot_padding: int = 5,
    same_slots: bool = False,
    negative: bool = False,
    padding_tokens: int = 0,
) -> Case:
    nseqs, num_slots, history = len(lengths), 2 * len(lengths) + 1, width - 1
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(index_dtype)
    # x is a slice of a wider projection, the slots are columns of a block table: neither is dense.
    x = torch.randn(sum(lengths) + padding_tokens, conv_dim + 9)[:, 3 : 3 + conv_dim].to(dtype)
    x[sum(lengths) :] = torch.nan
    table = torch.randint(-99, 99, (nseqs, 3), dtype=index_dtype)
    table[:, 0] = torch.randperm(num_slots)[:nseqs]
    table[:, 1] = table[:, 0] if same_slots else torch.randperm(num_slots)[:nseqs]
    if negative:
        table[:, :2] -= num_slots
    read_slots, write_slots = table[:, 0], table[:, 1]
    pages = torch.full((num_slots, conv_dim * history + slot_padding), SENTINEL).to(cache_dtype or dtype)
    conv_state = view_of_pages(pages, torch.Size((conv_dim, history)))
    conv_state.fill_(torch.nan)
    has = None if mask is None else torch.tensor(mask)
    for b, length in enumerate(lengths):
        if length and (has is None or has[b]):
            conv_state[int(read_slots[b])] = torch.randn(conv_dim, history).to(pages.dtype)
    weight, taken = torch.randn(conv_dim, width).to(dtype), torch.randn(conv_dim).to(dtype) if bias else None
    return Case(x, weight, taken, cu_seqlens, conv_state, pages, read_slots, has, write_slots)


def check(case: Case, conv: Conv = causal_conv) -> None:
    expected, pages = case.expected()
    ntokens = int(case.cu_seqlens[-1])
    out = case.run(conv)
    assert out.dtype == case.x.dtype
    # FP32 arithmetic over `width` taps of values below about 5, then one rounding to the dtype of x.
    rounding = torch.finfo(case.x.dtype).eps / 2
    torch.testing.assert_close(out[:ntokens].double(), expected[:ntokens], rtol=rounding + 1e-6, atol=1e-5)
    # Where all sequences are empty, slot 0 is written with what it held: a NaN stays one, perhaps with other bits.
    torch.testing.assert_close(case.pages, pages, rtol=0, atol=0, equal_nan=True)
    live = case.cu_seqlens.diff() > 0
    untouched = torch.ones(len(pages), dtype=torch.bool)
    untouched[case.write_slots[live].long() if live.any() else 0] = False
    assert torch.equal(case.pages[untouched].view(torch.uint8), pages[untouched].view(torch.uint8))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    torch.manual_seed(draw(st.integers(0, 2**31)))
    lengths = draw(st.lists(st.integers(0, 9), min_size=1, max_size=6))
    mask = draw(st.none() | st.lists(st.booleans(), min_size=len(lengths), max_size=len(lengths)))
    return make_case(
        lengths,
        conv_dim=draw(st.integers(1, 40)),
        width=draw(st.integers(2, 6)),
        dtype=draw(st.sampled_from(DTYPES)),
        cache_dtype=draw(st.sampled_from(DTYPES)),
        index_dtype=draw(st.sampled_from((torch.int32, torch.int64))),
        mask=mask,
        bias=draw(st.booleans()),
        slot_padding=draw(st.sampled_from((0, 1, 64))),
        same_slots=draw(st.booleans()),
        negative=draw(st.booleans()),
        padding_tokens=draw(st.sampled_from((0, 3))),
    )


@settings(max_examples=150, deadline=None)
@given(cases(), st.sampled_from((causal_conv, causal_conv_unchecked)))
def test_equals_conv1d_of_each_sequence(case: Case, conv: Conv) -> None:
    check(case, conv)


@pytest.mark.fault(7)
@pytest.mark.parametrize("width", [2, 4])
def test_stale_slots_do_not_leak_into_fresh_sequences(width: int) -> None:
    check(make_case([1, 2, 7], width=width, mask=[False] * 3, same_slots=True))


@pytest.mark.fault(8)
@pytest.mark.parametrize("lengths", [[0, 0, 5, 0], [5, 0, 0], [0, 2], [0, 0]])
def test_padding_rows_that_name_a_live_slot_change_nothing(lengths: list[int]) -> None:
    case = make_case(lengths, same_slots=True)
    live = [b for b, length in enumerate(lengths) if length]
    for b, length in enumerate(lengths):
        if not length:
            case.read_slots[b] = case.write_slots[b] = case.write_slots[live[0]] if live else 0
    check(case)


def test_slots_of_padding_rows_may_be_anything() -> None:
    case = make_case([0, 3, 0], mask=[True, True, True], padding_tokens=2)
    for b in (0, 2):
        case.read_slots[b] = case.write_slots[b] = 10**6
    check(case)


@pytest.mark.parametrize("compiled", [False, True])
def test_every_read_comes_before_every_write(compiled: bool) -> None:
    case = make_case([1, 2, 1], mask=[True, True, True])
    case.read_slots.copy_(torch.tensor([0, 1, 2]))
    case.write_slots.copy_(torch.tensor([1, 2, 0]))
    case.conv_state[:3] = torch.randn(case.conv_state[:3].shape)
    check(case, torch.compile(causal_conv, fullgraph=True) if compiled else causal_conv)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=4), st.sampled_from(DTYPES), st.data())
def test_pieces_equal_one_piece(lengths: list[int], dtype: torch.dtype, data: st.DataObject) -> None:
    whole = make_case(lengths, dtype=dtype, same_slots=True)
    cuts = [data.draw(st.integers(0, length)) for length in lengths]
    before = whole.conv_state.clone()
    expected, state = whole.run(), whole.conv_state.clone()

    whole.conv_state.copy_(before)
    starts = whole.cu_seqlens[:-1].tolist()
    got = torch.full_like(expected, torch.nan)
    for begin, end in ([0] * len(cuts), cuts), (cuts, lengths):
        rows = [row for s, lo, hi in zip(starts, begin, end, strict=True) for row in range(s + lo, s + hi)]
        counts = [hi - lo for lo, hi in zip(begin, end, strict=True)]
        cu = torch.tensor([0, *counts]).cumsum(0)
        got[rows] = causal_conv(
            whole.x[rows], whole.weight, whole.bias, cu, whole.conv_state, whole.read_slots, None, whole.write_slots
        )
    # The same terms in the same order; PyTorch rounds differently in the vectorised part of a tensor and in its tail.
    torch.testing.assert_close(got, expected, rtol=2 * torch.finfo(dtype).eps, atol=2e-6)
    torch.testing.assert_close(whole.conv_state, state, rtol=0, atol=0, equal_nan=True)


@pytest.mark.fault(9)
@pytest.mark.fault(10)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("nseqs", [1, 4])
@pytest.mark.parametrize("conv", [causal_conv, causal_conv_unchecked])
def test_compiled_equals_conv1d_with_padded_slots_and_strided_indices(
    conv: Conv, dtype: torch.dtype, nseqs: int
) -> None:
    mask = [True, False, True, True][-nseqs:]
    case = make_case([5, 1, 0, 9][-nseqs:], dtype=dtype, mask=mask, slot_padding=64, negative=True)
    check(case, torch.compile(conv, fullgraph=True))


def test_compiled_code_is_few_kernels_and_no_copy_of_the_cache() -> None:
    case = make_case([5, 1, 0, 9], mask=[True, False, True, True])
    num_slots = case.conv_state.shape[0]
    _, (code,) = run_and_get_code(lambda: case.run(torch.compile(causal_conv, fullgraph=True)))
    called = re.findall(r"torch\.ops\.(\w+\.\w+)\.\w+\(", code)
    assert sorted(set(called)) == ["aten.searchsorted", "mamba_ops.checked_slots"]
    assert code.count("async_compile.cpp_pybinding(") <= 3, "mask of live sequences; tokens; convolution and write-back"
    assert f"empty_strided_cpu(({num_slots}, " not in code, "a buffer of the size of the cache"


def test_bad_slots_are_an_error_before_anything_is_written() -> None:
    for compiled in False, True:
        conv = torch.compile(causal_conv, fullgraph=True) if compiled else causal_conv
        for name, value in ("read_slots", 9), ("read_slots", -10), ("write_slots", 9), ("write_slots", None):
            case = make_case([2, 1, 0, 3])
            slots = getattr(case, name)
            slots[3] = slots[0] if value is None else value
            before = case.pages.clone()
            with pytest.raises(ValueError, match=name):
                case.run(conv)
            assert torch.equal(case.pages.view(torch.uint8), before.view(torch.uint8))
