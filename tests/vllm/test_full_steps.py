"""Steps with a prefill that are one graph: their tables, and a layer's launches replayed for any step that fits."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from inductor_passes.vllm.compiled_region import CompiledRegion
from inductor_passes.vllm.direct_region import direct_region_in_one_pass
from inductor_passes.vllm.full_tables import FullTables
from mamba_ops import build_chunk_metadata
from tests.vllm.answers import assert_same_answers
from tests.vllm.conftest import Call, Run
from tests.vllm.full_step_cases import Captured, Step, random_step
from tests.vllm.processes import HERE
from tests.vllm.schedules import at_once
from tests.vllm.test_region import shape_on

CHUNK = 64


@given(st.randoms(use_true_random=False), st.sampled_from((2, 8, 24, 64)), st.sampled_from((1, 4, 32, 100)))
def test_tables_are_those_of_the_ops_and_the_rest_is_empty(rng: random.Random, ntokens: int, max_reqs: int) -> None:
    tables = FullTables(ntokens, max_reqs, CHUNK, torch.device("cpu"), pinned=False)
    for _ in range(3):  # whatever was there before
        lengths, contexts, num_decodes = random_step(rng, ntokens, CHUNK)
        if len(lengths) > max_reqs:
            continue
        tables.fill(lengths, contexts, num_decodes)
        sizes = tables.sizes(ntokens, max_reqs)
        step = tables.step(sizes, torch.zeros(sizes.nseqs, dtype=torch.int32))
        prefills = lengths[num_decodes:]
        offsets = [sum(prefills[:i]) for i in range(len(prefills) + 1)]
        expected = build_chunk_metadata(offsets, CHUNK, contexts[num_decodes:])
        nchunks = expected.seq_idx.shape[0]

        starts, rows = step.cu_seqlens.tolist(), range(num_decodes, len(lengths))
        assert starts[num_decodes : len(lengths) + 1] == [num_decodes + offset for offset in offsets]
        assert all(starts[row] == starts[row + 1] for row in range(sizes.nseqs) if row not in rows)
        chunks = step.cu_chunk_seqlens.tolist()
        assert chunks[: nchunks + 1] == (expected.cu_chunk_seqlens + num_decodes).tolist()
        assert set(chunks[nchunks:]) == {num_decodes + offsets[-1]}
        assert step.seq_idx.tolist()[:nchunks] == (expected.seq_idx + num_decodes).tolist()
        last = [-1, *step.last_chunk_indices.tolist()]
        assert last[num_decodes + 1 : len(lengths) + 1] == expected.last_chunk_indices.tolist()
        assert all(after == before for row, (before, after) in enumerate(pairwise(last)) if row not in rows)
        assert step.has_initial_state.tolist()[num_decodes : len(lengths)] == [c > 0 for c in contexts[num_decodes:]]
        tiles = [(num_decodes + i, t) for i, n in enumerate(prefills) for t in range(-(-n // 8))]
        pairs = list(zip(step.tile_sequence.tolist(), step.tile_offset.tolist(), strict=True))
        assert pairs[: len(tiles)] == tiles
        assert {sequence for sequence, _ in pairs[len(tiles) :]} <= {-1}
        assert tables.is_decode(sizes.nseqs).tolist() == [int(row < num_decodes) for row in range(sizes.nseqs)]


def test_addresses_stay() -> None:
    tables = FullTables(16, 8, CHUNK, torch.device("cpu"), pinned=False)
    slots = torch.zeros(8, dtype=torch.int32)

    def addresses() -> list[int]:
        sizes = tables.sizes(16, 8)
        return [t.data_ptr() for t in tables.step(sizes, slots)]

    before = addresses()
    tables.fill([1, 5], [3, 0], 1)
    assert addresses() == before


@pytest.mark.parametrize("mode", ["FULL_AND_PIECEWISE", "FULL"])
def test_a_graph_of_ours_is_for_short_steps_with_more_than_one_token_of_a_request(
    call: Call, model: Callable[..., str], mode: str
) -> None:
    """All other steps run as ever; in mode FULL vLLM has no graph between the layers for them."""
    output = call(str(HERE / "choose_graphs.py"), model("granite"), mode)
    (line,) = (line for line in output.splitlines() if line.startswith("RESULT "))
    found = json.loads(line.removeprefix("RESULT "))
    assert found["missing"] == []
    assert [graph[:2] for graph in found["captured"] if graph[2]] == [
        [t, r] for t in (64, 32, 16, 8, 4, 2) for r in sorted({1, min(4, t), min(32, t)})[::-1]
    ]
    assert [graph[:2] for graph in found["captured"] if not graph[2]] == [[n, n] for n in (32, 16, 8, 4, 2, 1)]

    def without_ours(num_reqs: int, num_tokens: int, padded: int) -> list[Any]:
        between_layers = mode == "FULL_AND_PIECEWISE"
        return ["PIECEWISE", padded, None, False] if between_layers else ["NONE", num_tokens, num_reqs, False]

    vllms = {
        "decodes": ["FULL", 4, 4, False],
        "as many decodes as may be": ["FULL", 32, 32, False],
        "a short prefill": without_ours(1, 32, 32),
        "a few of both": without_ours(3, 20, 32),
        "prefills beside decodes": without_ours(5, 40, 64),
        "too long": without_ours(1, 65, 128),
        "longer than any graph": ["NONE", 200, 1, False],
        "a prompt of one token": without_ours(1, 1, 1),
        "two prompts of one token": without_ours(2, 2, 2),
        "prompts of one token beside decodes": without_ours(5, 5, 8),
        "a prompt of two tokens beside decodes": without_ours(5, 6, 8),
    }
    ours = {
        "a short prefill": ["FULL", 32, 1, True],
        "prefills beside decodes": ["FULL", 64, 32, True],
        "a few of both": ["FULL", 32, 4, True],
        "a prompt of two tokens beside decodes": ["FULL", 8, 8, True],
    }
    assert found["chosen"] == vllms | ours | {f"{name}, not offered": graph for name, graph in vllms.items()}


def test_where_they_cannot_be_captured_the_log_says_why_once(run: Run) -> None:
    """And the engine answers as ever."""
    schedules = [at_once((5, 70, 130))]
    ours = run("granite", schedules, plugin=True, own_process="whole", environment={"MAMBA_OPS_VLLM_FULL_STEPS": "1"})
    assert ours["log"].count("no whole step with a prefill is captured: there is no GPU") == 1
    assert set(ours["backends"]) == {"FastMamba2Backend"}
    assert_same_answers(ours, run("granite", schedules, plugin=False))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_one_graph_replayed_for_any_step(dtype: torch.dtype) -> None:
    """Lengths, slots, masks and mixes differ from replay to replay, and the graph was captured with an empty step."""

    def capture(run: Callable[[], None]) -> Callable[[], None]:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            run()
        return graph.replay

    region: CompiledRegion = direct_region_in_one_pass(shape_on("cuda:0", dtype), 64, one_chunk=False)
    tables = FullTables(64, 16, CHUNK, torch.device("cuda:0"), pinned=True)
    rng = random.Random()
    for ntokens, num_reqs in ((2, 2), (16, 4), (64, 1), (64, 16)):
        captured = Captured(region, tables, ntokens, num_reqs, capture)
        for _ in range(40):
            step = random_step(rng, ntokens, CHUNK)
            if len(step.lengths) <= captured.sizes.nseqs:
                captured.assert_equals_uncompiled(step)
        captured.assert_equals_uncompiled(Step([1] * captured.sizes.nseqs, [5] * captured.sizes.nseqs, 0))
        captured.assert_equals_uncompiled(Step([ntokens], [CHUNK - 1], 0))
        captured.assert_equals_uncompiled(Step([1] * min(2, num_reqs), [9] * min(2, num_reqs), min(2, num_reqs)))
