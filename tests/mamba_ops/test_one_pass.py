"""Prefills of few tokens in one pass on a CPU: against the FP64 recurrence, and under `torch.compile`."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.functional import silu

from mamba_ops import build_chunk_metadata
from mamba_ops.ops import one_pass_scan
from mamba_ops.ops.conv_cumsum import conv_cumsum
from mamba_ops.reference import ssd_reference
from tests.mamba_ops.batches import DTYPES, Cache, Shape, assert_near, assert_same, make_batch, make_cache, offsets

WIDTH = 4


class Layer:
    """Weights, caches and inputs for sequences of at most a chunk each; their chunks end where `contexts` says."""

    def __init__(
        self,
        shape: Shape,
        lengths: list[int],
        dtype: torch.dtype,
        state_dtype: torch.dtype,
        contexts: list[int] | None = None,
    ) -> None:
        self.shape, self.lengths = shape, lengths
        self.conv_dim = shape.nheads * shape.headdim + 2 * shape.ngroups * shape.dstate
        batch = make_batch(lengths, shape, dtype, gate=False)
        self.batch = batch
        self.projected = torch.randn(sum(lengths), self.conv_dim + shape.nheads + 3).to(dtype)[:, 3:]
        self.weight, self.bias = torch.randn(self.conv_dim, WIDTH).to(dtype), torch.randn(self.conv_dim).to(dtype)
        num_slots = len(lengths) + 2
        table = torch.full((len(lengths), 13), 10**6, dtype=torch.int32)
        table[:, 1] = torch.randperm(num_slots)[: len(lengths)]
        self.slots = table[:, 1]
        self.has = torch.rand(len(lengths)) < 0.7
        self.live = torch.tensor(lengths) > 0
        continued = self.slots[self.has & self.live].tolist()
        self.cache = make_cache(num_slots, shape, state_dtype, padding=8, offset=3, live=continued)
        self.slots[~self.live] = self.slots[:1]  # padding names a slot that is live, unless it is all there is
        self.conv_state = torch.full((num_slots, WIDTH - 1, self.conv_dim), torch.nan, dtype=dtype)
        self.conv_state[continued] = torch.randn(len(continued), WIDTH - 1, self.conv_dim).to(dtype)
        self.tiles = torch.zeros(1, dtype=torch.int32)  # a CPU needs none
        self.chunks: tuple[Tensor, Tensor] | None = None
        if contexts is not None:
            metadata = build_chunk_metadata(offsets(lengths), shape.chunk_size, contexts)
            self.chunks = (metadata.cu_chunk_seqlens, metadata.last_chunk_indices)

    def run(self, function: Callable[..., None], cache: Cache, conv_state: Tensor, max_tokens: int) -> Tensor:
        conv_in, dt = self.projected.split([self.conv_dim, self.shape.nheads], dim=1)
        out = torch.full((sum(self.lengths), *self.shape.row[:2]), torch.nan, dtype=self.projected.dtype)
        options = self.batch.options
        function(
            conv_in,
            dt,
            (self.weight, self.bias, self.batch.inputs["A"], options["D"], options["dt_bias"]),
            torch.tensor(offsets(self.lengths), dtype=torch.int32),
            (self.slots, self.has, self.tiles),
            (conv_state.transpose(1, 2), cache.view),
            out,
            self.shape,
            max_tokens,
            self.chunks,
        )
        return out

    def views(self, convolved: Tensor) -> dict[str, Tensor]:
        return views(convolved, self.shape)


def views(convolved: Tensor, shape: Shape) -> dict[str, Tensor]:
    inner, groups = shape.nheads * shape.headdim, shape.ngroups * shape.dstate
    x, B, C = convolved.split([inner, groups, groups], dim=1)
    B, C = (part.unflatten(1, (shape.ngroups, shape.dstate)) for part in (B, C))
    return {"x": x.unflatten(1, (shape.nheads, shape.headdim)), "B": B, "C": C}


def one_pass(
    conv_in: Tensor,
    dt: Tensor,
    weights: tuple[Tensor, ...],
    cu_seqlens: Tensor,
    sequences: tuple[Tensor, Tensor, Tensor],
    caches: tuple[Tensor, Tensor],
    out: Tensor,
    shape: Shape,
    max_tokens: int,
    chunks: tuple[Tensor, Tensor] | None = None,
) -> None:
    weight, bias, A, D, dt_bias = weights
    (slots, has, tiles), (conv_state, state_cache) = sequences, caches
    convolution = (conv_in, weight, bias, cu_seqlens, conv_state, slots, has, tiles, tiles)
    cu_chunk_seqlens, last = chunks or (None, None)
    convolved, dA_cumsum, dt_out = conv_cumsum(*convolution, dt, A, shape.chunk_size, dt_bias, True, cu_chunk_seqlens)
    x, B, C = views(convolved, shape).values()
    cu = cu_seqlens if cu_chunk_seqlens is None else cu_chunk_seqlens
    one_pass_scan(x, B, C, dt_out, dA_cumsum, cu, state_cache, slots, has, out, max_tokens, D, last)


def convolution_in_fp64(layer: Layer) -> tuple[Tensor, Tensor]:
    """What the convolution gives, and the states that it leaves, sequence by sequence."""
    rows, states = [], layer.conv_state.clone()
    cu_seqlens = offsets(layer.lengths)
    for sequence, length in enumerate(layer.lengths):
        slot = int(layer.slots[sequence])
        new = layer.projected[cu_seqlens[sequence] : cu_seqlens[sequence] + length, : layer.conv_dim]
        old = layer.conv_state[slot] if layer.has[sequence] else torch.zeros_like(layer.conv_state[slot])
        both = torch.cat([old, new])
        if length:
            taps = both.double().unfold(0, WIDTH, 1)  # (length, conv_dim, width)
            rows.append(silu((taps * layer.weight.double()).sum(-1) + layer.bias.double()))
            states[slot] = both[-(WIDTH - 1) :]
    return torch.cat(rows) if rows else torch.empty(0, layer.conv_dim, dtype=torch.float64), states


@st.composite
def layers(draw: st.DrawFn) -> tuple[Layer, int]:
    torch.manual_seed(draw(st.integers(0, 2**32)))
    ngroups = draw(st.sampled_from([1, 2]))
    nheads = ngroups * draw(st.sampled_from([1, 2]))
    headdim, dstate = draw(st.sampled_from([1, 8, 20])), draw(st.sampled_from([1, 16, 24]))
    chunk_size = draw(st.sampled_from([16, 32, 64]))
    max_tokens = draw(st.integers(1, chunk_size))
    lengths = draw(st.lists(st.one_of(st.just(0), st.integers(0, max_tokens)), max_size=6))
    shape = Shape(nheads, headdim, dstate, ngroups, chunk_size)
    contexts = st.one_of(st.none(), st.just([draw(st.integers(0, 2 * chunk_size)) for _ in lengths]))
    dtypes = (draw(st.sampled_from(DTYPES)), draw(st.sampled_from(DTYPES)))
    return Layer(shape, lengths, *dtypes, draw(contexts)), max_tokens


@pytest.mark.fault(7)
@pytest.mark.fault(8)
@pytest.mark.fault(9)
@pytest.mark.fault(10)
@pytest.mark.fault(16)
@given(layers())
@settings(max_examples=100)
def test_equals_the_fp64_recurrence_and_touches_nothing_else(drawn: tuple[Layer, int]) -> None:
    layer, max_tokens = drawn
    cache, conv_state = layer.cache.clone(), layer.conv_state.clone()
    out = layer.run(one_pass, cache, conv_state, max_tokens)
    convolved, states = convolution_in_fp64(layer)
    assert_same(conv_state, states)

    written = layer.slots[layer.live].tolist()
    cache.check_only_written(layer.cache, written)
    initial = torch.zeros(len(layer.lengths), *layer.shape.row, dtype=torch.float64)
    read = layer.has & layer.live
    initial[read] = layer.cache.view[layer.slots[read].long()].double()
    dtype, options = layer.projected.dtype, layer.batch.options
    # The op rounds what is convolved before it goes on.
    expected, final = ssd_reference(
        **layer.views(convolved.to(dtype)),
        dt=layer.projected[:, layer.conv_dim :],
        A=layer.batch.inputs["A"],
        cu_seqlens=offsets(layer.lengths),
        D=options["D"],
        dt_bias=options["dt_bias"],
        dt_softplus=True,
        initial_states=initial,
    )
    coarse = max(DTYPES, key=lambda d: torch.finfo(d).eps if d in (dtype, cache.view.dtype) else 0.0)
    assert_near(out, expected, dtype, coarse)
    assert_near(cache.view[written], final[layer.live], dtype, coarse)


def test_compiled_equals_eager_and_compiles_once() -> None:
    """The caches are arguments, one of them a view with padding; new lengths need no new code."""
    shape = Shape(4, 16, 24, 2, 32)
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(one_pass, fullgraph=True, dynamic=True, backend=counter)
    for lengths in ([32, 1, 7, 3, 20, 5], [5, 6], [9, 30, 2], [20] * 8):  # as in no other size, at first
        contexts = list(range(25, 25 + len(lengths)))
        layer = Layer(shape, lengths, torch.bfloat16, torch.float16, contexts)
        results = []
        for function in (one_pass, compiled):
            cache, conv_state = layer.cache.clone(), layer.conv_state.clone()
            results.append((layer.run(function, cache, conv_state, 32), cache.pages, conv_state))
        assert_same(results[1], results[0])
    assert counter.frame_count == 1


def test_a_bound_that_varies_is_taken_under_compile() -> None:
    layer = Layer(Shape(4, 16, 24, 2, 64), [16, 1, 7], torch.float32, torch.float32)
    compiled = torch.compile(one_pass, fullgraph=True)
    expected = layer.run(one_pass, layer.cache.clone(), layer.conv_state.clone(), 64)
    for max_tokens in (16, 17, 33, 64):
        out = layer.run(compiled, layer.cache.clone(), layer.conv_state.clone(), max_tokens)
        assert_same(out, expected)
