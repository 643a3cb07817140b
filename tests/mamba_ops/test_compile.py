"""Under `torch.compile(fullgraph=True)`: the same bits as eager, the same errors, and no compile for new lengths."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from mamba_ops import ChunkMetadata, SSDOutput, ssd_chunk_scan
from tests.mamba_ops.batches import (
    SMALL,
    Batch,
    Shape,
    Slots,
    assert_same,
    make_batch,
    make_cache,
    run_indexed,
)

States = dict[str, Any]


def scan(
    inputs: dict[str, Tensor], options: dict[str, Tensor | bool], metadata: ChunkMetadata, states: States
) -> SSDOutput:
    return ssd_chunk_scan(**inputs, **options, metadata=metadata, **states)


def call(function: Callable[..., SSDOutput], batch: Batch, states: States) -> SSDOutput:
    return function(batch.inputs, batch.options, batch.metadata, states)


def states(form: str, cache: Tensor, nseqs: int) -> States:
    """The arguments of one of the three forms; the last sequence is padding and names no slot at all."""
    slots = torch.arange(nseqs, dtype=torch.int32) * 2
    slots[-1] = 77
    has = torch.arange(nseqs) % 2 == 0
    if form == "returned":
        return {"initial_states": cache[:nseqs].clone(), "state_dtype": torch.float32}
    if form == "update":
        return {"initial_states": cache[:nseqs].clone(), "state_cache": cache, "write_slots": slots}
    return {"state_cache": cache, "read_slots": slots, "has_initial_state": has, "write_slots": slots}


@pytest.mark.parametrize("form", ["returned", "update", "indexed"])
@pytest.mark.parametrize("intermediate", [True, False])
@pytest.mark.parametrize("given_out", [True, False])
def test_compiled_equals_eager(form: str, intermediate: bool, given_out: bool) -> None:
    batch = make_batch([70, 1, 40, 0], dtype=torch.bfloat16, strided=True)
    cache = make_cache(8, dtype=torch.bfloat16, padding=64, offset=3)
    compiled = torch.compile(scan, fullgraph=True)
    results, pages = [], []
    for function in (scan, compiled):
        own = cache.clone()
        arguments = {**states(form, own.view, 4), "return_intermediate_states": intermediate}
        if given_out:
            arguments["out"] = torch.full_like(batch.inputs["x"], torch.nan)
        results.append(call(function, batch, arguments))
        pages.append(own.pages)
        assert (results[-1].out is arguments.get("out")) == given_out
    assert_same(results[1], results[0])
    assert_same(pages[1], pages[0])


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("write_slots", torch.zeros(4), "write_slots: dtype torch.float32"),
        ("state_cache", torch.zeros(8, 4, 16, 20)[..., :16], "state_cache: strides"),
        ("read_slots", torch.zeros(3, dtype=torch.int32), "read_slots: shape"),
    ],
)
def test_static_errors_come_while_the_graph_is_traced(name: str, value: Tensor, message: str) -> None:
    batch = make_batch([70, 1, 40, 0])
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(scan, fullgraph=True, backend=counter)
    with pytest.raises(Exception, match=message):
        call(compiled, batch, {**states("indexed", make_cache(8).view, 4), name: value})
    assert counter.frame_count == 0


@pytest.mark.parametrize(
    ("slots", "message"),
    [([0, 9, 4, 0], "write_slots: slot 9 of sequence 1"), ([0, 4, 4, 0], "slot 4 is written by more than one")],
)
def test_value_errors_come_from_the_compiled_graph_before_it_writes(slots: list[int], message: str) -> None:
    batch = make_batch([70, 1, 40, 0])
    cache = make_cache(8)
    before = cache.clone()
    out = torch.full_like(batch.inputs["x"], -3.0)
    compiled = torch.compile(scan, fullgraph=True)
    good = {**states("indexed", cache.view, 4), "out": out}
    with pytest.raises(ValueError, match=message):
        call(compiled, batch, {**good, "write_slots": torch.tensor(slots, dtype=torch.int32)})
    assert_same(cache.pages, before.pages)
    assert_same(out, torch.full_like(out, -3.0))


@pytest.mark.fault(15)
@pytest.mark.parametrize("form", ["returned", "update", "indexed"])
def test_batch_sizes_and_lengths_do_not_recompile(form: str) -> None:
    """One graph for a single sequence, one for several; PyTorch makes a size of one a constant.

    So a batch of a single chunk would be a third. In the first call of each graph no two sizes agree by accident, which
    PyTorch would take for a rule.
    """
    shape = Shape(nheads=6, headdim=20, dstate=24, ngroups=1, chunk_size=32)
    compiled = torch.compile(scan, fullgraph=True, backend="aot_eager", dynamic=True)
    for step in range(40):
        nseqs = [1, 17, 2, 3, 9][step % 5]
        batch = make_batch([33 + (7 * step + 11 * b + 40) % 90 for b in range(nseqs)], shape)
        cache = make_cache(40, shape)
        eager = cache.clone()
        expected = call(scan, batch, open_slots(states(form, eager.view, nseqs), nseqs))
        with torch.compiler.set_stance("default" if step < 2 else "fail_on_recompile"):
            got = call(compiled, batch, open_slots(states(form, cache.view, nseqs), nseqs))
        assert_same(got, expected)
        assert_same(cache.pages, eager.pages)


def open_slots(arguments: States, nseqs: int) -> States:
    """The same without padding: the last sequence has a slot like the others."""
    for name in ("read_slots", "write_slots"):
        if name in arguments:
            arguments[name][-1] = 2 * nseqs - 2
    return arguments


def test_a_compiled_continuation_follows_the_cache() -> None:
    """The second call of one compiled function starts from what the first one left."""
    batch = make_batch([90])
    slots = torch.tensor([1])
    compiled = torch.compile(scan, fullgraph=True)
    cache, eager = make_cache(3), make_cache(3, live=[])
    eager.view.copy_(cache.view)
    for start, end in ((0, 45), (45, 90)):
        piece = batch.tokens(start, end)
        has = torch.tensor([start > 0])
        expected = run_indexed(piece, eager.view, Slots(slots, slots, has))
        got = call(
            compiled,
            piece,
            {"state_cache": cache.view, "read_slots": slots, "write_slots": slots, "has_initial_state": has},
        )
        assert_same(got.out, expected.out)
        assert_same(cache.view, eager.view)
    assert cache.view.shape[1:] == SMALL.row
