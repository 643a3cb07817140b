"""The builder of metadata: the same values in every field as vLLM's own, and vLLM's own wherever it cannot be sure."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inductor_passes.vllm.step_tables import chunk_table
from mamba_ops import build_chunk_metadata
from tests.vllm.answers import assert_same_answers
from tests.vllm.conftest import Call, Run
from tests.vllm.processes import HERE
from tests.vllm.schedules import around_edges, at_once, random_schedule
from tests.vllm.test_loading import TAKING

SCHEDULES = [at_once((1, 5, 63, 64, 65, 200, 300)), around_edges(64, 128), random_schedule(3)]

SEQUENCES = st.lists(st.tuples(st.integers(1, 300), st.integers(0, 300)), min_size=1, max_size=6)

# Prints which backend a layer names while vLLM lacks something, and what the log said.
TAKEN_IN_TURN = (
    TAKING
    + """
from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionBackend as stock
from inductor_passes.vllm.metadata_backend import backend_for
for name, taken in cases(contract.METADATA_MODULE_ATTRIBUTES, contract.METADATA_SIGNATURES):
    said.clear()
    backend_for.cache_clear()
    with taken:
        backends = {backend_for(stock) for _ in range(3)}
    print(f"CASE {name} | {[backend.__name__ for backend in backends]} | {len(said)} {' '.join(said)}")
said.clear()
backend_for.cache_clear()
ours = backend_for(stock)
print("and with all of them:", ours.__name__, ours.get_name(), issubclass(ours, stock), said)
print("in the place of another:", backend_for(type("Other", (stock,), {})).__name__, said)
"""
)

# Makes builders for a model whose folder is the first argument; `block` says more about its caches.
BUILDERS = """
import sys
import torch
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionMetadataBuilder as Stock
from vllm.v1.kv_cache_interface import MambaSpec
from inductor_passes.vllm.metadata_builder import FastMamba2MetadataBuilder
config = EngineArgs(model=sys.argv[1], skip_tokenizer_init=True).create_engine_config()
def builders(block_size, number=1, **block):
    spec = MambaSpec(block_size=block_size, shapes=((3, 8), (2, 4, 4)), dtypes=(torch.float32, torch.float32),
        mamba_cache_mode=config.cache_config.mamba_cache_mode, **block)
    with set_current_vllm_config(config):
        return [FastMamba2MetadataBuilder(spec, [str(i)], config, torch.device("cpu")) for i in range(number)]
build = Stock.build
"""

# Builders where vLLM's own builds one field in another way, and where it does not. Prints what the log said.
ANOTHER_VLLM = (
    BUILDERS
    + """
import logging
said = []
class Listener(logging.Handler):
    def emit(self, record):
        said.append(record.getMessage())
logging.getLogger("vllm.mamba_ops").addHandler(Listener(logging.WARNING))  # vLLM has configured its loggers by now
print("this vLLM:", [builder._is_fast for builder in builders(128, 3)], said)
def other_build(self, common_prefix_len, common_attn_metadata, fast_build=False, **kwargs):
    metadata = build(self, common_prefix_len, common_attn_metadata, fast_build, **kwargs)
    if metadata.num_prefills > 1:
        metadata.last_chunk_indices_p += 1
    return metadata
Stock.build = other_build
print("another vLLM:", [builder._is_fast for builder in builders(256, 3)], len(said), *said)
"""
)

# The same where what is other is only seen in steps that keep a state on the way.
ANOTHER_VLLM_WITH_CHECKPOINTS = (
    BUILDERS
    + """
cache = config.cache_config
cache.mamba_cache_mode = "align"
cache.hash_block_size = cache.cache_hit_alignment_tokens = 16
def is_fast(block_size):
    return builders(block_size, num_prefill_checkpoint_blocks=1, prefill_checkpoint_alignment=1)[0]._is_fast
def other_build(self, common_prefix_len, common_attn_metadata, fast_build=False, **kwargs):
    metadata = build(self, common_prefix_len, common_attn_metadata, fast_build, **kwargs)
    if metadata.checkpoint_chunk_idx is not None:
        metadata.checkpoint_chunk_idx += 1
    return metadata
print("this vLLM:", is_fast(640))
Stock.build = other_build
print("another vLLM:", is_fast(800), is_fast(3200))
"""
)


@pytest.fixture(scope="session")
def compared(call: Call, model: Callable[..., str]) -> dict[str, Any]:
    return compare(call, model, "cpu")


def compare(call: Call, model: Callable[..., str], device: str) -> dict[str, Any]:
    output = call(str(HERE / "compare_metadata.py"), model("granite"), device)
    (line,) = (line for line in output.splitlines() if line.startswith("RESULT "))
    found: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
    return found


def assert_every_field_is_equal(compared: dict[str, Any]) -> None:
    assert len(compared) > 5
    for name, found in compared.items():
        assert found["wrong"] == {}, name
        assert found["persistent buffers agree"] in (None, True), name
        kinds = found["kinds"]
        assert min(kinds[kind] for kind in ("decodes", "prefills", "mixed", "continued")) > 20, name
        assert (kinds["built by vLLM"] > 20) == ("whole" in name), name
        ours = kinds["prefills"] - kinds["built by vLLM"]
        assert kinds["in one buffer"] == (0 if "drafts" in name else ours), name
    assert compared["with checkpoints"]["kinds"]["checkpoints"] > 20
    assert any(found["persistent buffers agree"] for found in compared.values())


def test_every_field_is_what_vllm_builds(compared: dict[str, Any]) -> None:
    assert_every_field_is_equal(compared)


@pytest.mark.gpu
def test_every_field_is_what_vllm_builds_on_a_gpu(call: Call, model: Callable[..., str]) -> None:
    """Nor does the host wait for the device: that is an error there."""
    assert_every_field_is_equal(compare(call, model, "cuda"))


@given(SEQUENCES, st.sampled_from((16, 64)))
def test_chunks_are_those_of_the_ops(sequences: list[tuple[int, int]], chunk_size: int) -> None:
    lengths, contexts = (list(column) for column in zip(*sequences, strict=True))
    offsets = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    expected = build_chunk_metadata(offsets, chunk_size, contexts)
    got = chunk_table(lengths, contexts, [0] * len(lengths), chunk_size)
    tables = (expected.cu_chunk_seqlens, expected.seq_idx, expected.last_chunk_indices)
    assert got == (*(table.tolist() for table in tables), [0] * len(lengths))


@given(SEQUENCES, st.data())
def test_a_chunk_ends_at_each_checkpoint(sequences: list[tuple[int, int]], data: st.DataObject) -> None:
    lengths, contexts = (list(column) for column in zip(*sequences, strict=True))
    checkpoints = [data.draw(st.integers(0, length - 1)) for length in lengths]
    starts, seq_idx, _, chunks = chunk_table(lengths, contexts, checkpoints, 64)
    for sequence, (checkpoint, chunk) in enumerate(zip(checkpoints, chunks, strict=True)):
        if checkpoint:
            assert starts[chunk + 1] == sum(lengths[:sequence]) + checkpoint
            assert seq_idx[chunk] == sequence


def test_an_engine_uses_it_and_answers_the_same(run: Run) -> None:
    ours = run("granite", SCHEDULES, plugin=True)
    assert set(ours["backends"]) == {"FastMamba2Backend"}
    assert_same_answers(ours, run("granite", SCHEDULES, plugin=False))


def test_it_can_be_turned_off(run: Run) -> None:
    ours = run("granite", SCHEDULES, plugin=True, environment={"MAMBA_OPS_VLLM_METADATA": "0"})
    assert set(ours["backends"]) == {"Mamba2AttentionBackend"}
    assert_same_answers(ours, run("granite", SCHEDULES, plugin=False))


def test_a_vllm_that_lacks_something_builds_its_own(call: Call) -> None:
    output = call("-c", TAKEN_IN_TURN)
    cases = [line[len("CASE ") :].split(" | ") for line in output.splitlines() if line.startswith("CASE ")]
    assert len(cases) > 12
    for name, backends, said in cases:
        assert backends == "['Mamba2AttentionBackend']", name
        assert said.startswith("1 mamba_ops: vLLM's own code builds the metadata of Mamba2 layers: this vLLM lacks "), (
            name
        )
        assert name in said
    assert "and with all of them: FastMamba2Backend MAMBA2_ATTN True []" in output
    assert "in the place of another: Other [" in output


def test_a_vllm_that_builds_something_else_builds_its_own(call: Call, model: Callable[..., str]) -> None:
    """Another version whose metadata has another value in one field, which nothing but a trial can show."""
    output = call("-c", ANOTHER_VLLM, model("granite"))
    assert "this vLLM: [True, True, True] []" in output
    assert "another vLLM: [False, False, False] 1 mamba_ops: vLLM's own code builds the metadata" in output
    assert "last_chunk_indices_p of batch" in output
    output = call("-c", ANOTHER_VLLM_WITH_CHECKPOINTS, model("granite"))
    assert "this vLLM: True" in output
    assert "another vLLM: False False" in output
