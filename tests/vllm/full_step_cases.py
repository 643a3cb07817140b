"""Steps that are one graph, against the same prefills run op by op. In the interpreter, and on a GPU in a graph."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from inductor_passes.vllm.compiled_region import CompiledRegion, present
from inductor_passes.vllm.full_tables import FullTables, PaddedSizes
from inductor_passes.vllm.region import prefill
from inductor_passes.vllm.region_inputs import LayerShape, LayerTensors
from tests.vllm.test_region import NUM_SLOTS, make_layer, make_step, sizes_of


class Step(NamedTuple):
    """Of requests: their new tokens, the tokens before, and how many of them decode."""

    lengths: list[int]
    contexts: list[int]
    num_decodes: int


def random_step(rng: random.Random, most_tokens: int, chunk_size: int) -> Step:
    """Decodes, then prefills that begin anywhere in a chunk."""
    num_decodes = min(most_tokens, rng.choice((0, 0, 1, 3)))
    left = rng.randint(num_decodes, most_tokens) - num_decodes
    lengths = []
    while left > 0:
        lengths.append(rng.randint(1, min(left, rng.choice((1, 5, most_tokens)))))
        left -= lengths[-1]
    contexts = [rng.choice((0, 1, chunk_size - 1, chunk_size, chunk_size + 5, 3 * chunk_size)) for _ in lengths]
    return Step([1] * num_decodes + lengths, [7] * num_decodes + contexts, num_decodes)


class Captured:
    """One layer of a step of padded size, as a graph holds it: everything at its address, whatever comes.

    Args:
        region: launched by address. tables: of the steps. ntokens, num_reqs: padded.
        capture: makes of a function one that may be called again and again.
    """

    def __init__(
        self,
        region: CompiledRegion,
        tables: FullTables,
        ntokens: int,
        num_reqs: int,
        capture: Callable[[Callable[[], None]], Callable[[], None]],
    ) -> None:
        self._shape: LayerShape = region.shape
        self._tables, self._sizes = tables, tables.sizes(ntokens, num_reqs)
        self._layer, self._other = make_layer(self._shape), make_layer(self._shape)
        make = {"dtype": self._shape.dtype, "device": self._shape.device}
        self._projected = torch.zeros(ntokens, self._shape.projected, **make)
        self._out = torch.zeros(ntokens, self._shape.nheads, self._shape.headdim, **make)
        self._slots = torch.zeros(self._sizes.nseqs, dtype=torch.int32, device=self._shape.device)
        step = tables.step(self._sizes, self._slots)
        sizes = sizes_of(self._projected, self._layer, step)
        self._run = capture(lambda: region(sizes, self._projected, self._out, present(self._layer), step))

    @property
    def sizes(self) -> PaddedSizes:
        """Padded."""
        return self._sizes

    def assert_equals_uncompiled(self, step: Step, *, steps: int = 0) -> None:
        """Bit for bit, or to so many steps between two neighbouring numbers; nothing but the prefills is written."""
        lengths, contexts, num_decodes = step
        shape, ntokens = self._shape, sum(lengths)
        slots = torch.randperm(NUM_SLOTS)[: len(lengths)].to(torch.int32)
        self._reset(slots, step)
        self._tables.fill(lengths, contexts, num_decodes)
        self._run()
        expected = torch.full_like(self._out, torch.nan)
        if lengths[num_decodes:]:
            alone = make_step(lengths[num_decodes:], contexts[num_decodes:], shape)
            alone = alone._replace(slots=slots[num_decodes:].to(shape.device))
            rows = slice(num_decodes, ntokens)
            prefill(self._projected[rows], expected[rows], self._other, alone, shape)
        tolerance = steps * torch.finfo(shape.dtype).eps
        for got, want in (
            (self._out, expected),
            (self._layer.conv_state, self._other.conv_state),
            (self._layer.ssm_state, self._other.ssm_state),
        ):
            torch.testing.assert_close(got, want, rtol=tolerance, atol=16 * tolerance, equal_nan=True)
        assert not self._out[num_decodes:ntokens].isnan().any()

    def _reset(self, slots: Tensor, step: Step) -> None:
        """New inputs, of which all that no prefill may read is NaN."""
        ntokens = sum(step.lengths)
        fresh: LayerTensors = make_layer(self._shape)
        has = torch.tensor(step.contexts) > 0
        is_decode = torch.arange(len(step.lengths)) < step.num_decodes
        unread = [slot for slot in range(NUM_SLOTS) if slot not in slots[has & ~is_decode].tolist()]
        for cache in (fresh.conv_state, fresh.ssm_state):
            cache[unread] = torch.nan
        for layer in (self._layer, self._other):
            for mine, new in zip(present(layer), present(fresh), strict=True):
                mine.copy_(new)
        self._projected.copy_(torch.randn(self._projected.shape))
        self._projected[: step.num_decodes] = torch.nan
        self._projected[ntokens:] = torch.nan
        self._out.fill_(torch.nan)
        self._slots.fill_(NUM_SLOTS + 1000)  # no slot at all
        self._slots[: len(step.lengths)] = slots.to(self._shape.device)
