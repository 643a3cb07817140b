"""vLLM's engine on a GPU: what a CPU has not, namely captured graphs, the JIT monitor, sleep mode, a second device.

MAMBA_OPS_VLLM_ENGINE_PYTHON then names a Python with vLLM for GPUs. What is chosen by time there is held (see
`benchmarks/engine/held_choices.py`), and chunks are as long as Granite-4.0-h's, so answers are compared bit by bit.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from benchmarks.engine.held_choices import without_combo_kernels
from tests.vllm.answers import assert_equal_schedules, assert_same_answers, declined
from tests.vllm.conftest import Run
from tests.vllm.schedules import add, around_edges, at_once, prompt, random_schedule, shared_prefixes

pytestmark = pytest.mark.gpu

FAMILY, CHUNK = "granite_256", 256
BUDGET = 384  # tokens of a step: a prompt goes on in the middle of a chunk
# A cache of its own size, so that several of these engines fit on a GPU at once.
GPU = {
    "dtype": "bfloat16",
    "max_num_batched_tokens": BUDGET,
    "async_scheduling": False,  # with it, in which step a request is given up depends on time
    "gpu_memory_utilization": 0.05,
    "kv_cache_memory_bytes": 1 << 30,
    "enforce_eager": False,
}
# A prefill of one token and continuations of one, beside decodes: what a decode graph might be replayed for.
ONE_TOKEN = [add(0, "a", prompt(0, BUDGET + 1)), add(1, "b", prompt(1, 2 * BUDGET - 1)), add(2, "c", prompt(2, 1))]
# Steps of prompts of one token, alone, two at once and beside a decode, and the last token of one, alone.
FIRST_TOKENS = [
    add(0, "a", prompt(0, 20), 12),
    *(add(step, name, prompt(step, 1), 3) for step, name in ((2, "b"), (16, "c"), (20, "d"), (20, "e"))),
    add(26, "f", prompt(26, BUDGET + 1), 3),
]
SCHEDULES = [ONE_TOKEN, around_edges(CHUNK, BUDGET), *(random_schedule(seed) for seed in range(20))]
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def settings(**engine: Any) -> dict[str, Any]:
    return without_combo_kernels({**GPU, **engine})


def with_and_without(
    run: Run, schedules: list[Any], own_process: str = "", sleep: bool = False, **engine: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    both = [
        run(FAMILY, schedules, plugin=plugin, own_process=own_process, sleep=sleep, **settings(**engine))
        for plugin in (True, False)
    ]
    return both[0], both[1]


def assert_same_bits(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert_same_answers(ours, theirs, tolerance=0)


def compiled_while_serving(result: dict[str, Any]) -> list[str]:
    """What vLLM's JIT monitor has reported."""
    return [line for line in result["log"].splitlines() if " during inference:" in line]


@pytest.mark.fault(4)
@pytest.mark.parametrize("mode", ["FULL_AND_PIECEWISE", "PIECEWISE", "FULL_DECODE_ONLY", "NONE"])
def test_graphs_are_captured_as_without_the_plugin(run: Run, mode: str) -> None:
    ours, theirs = with_and_without(run, SCHEDULES, compilation_config={"cudagraph_mode": mode})
    assert_same_bits(ours, theirs)
    assert ours["captured"] == theirs["captured"]


@pytest.mark.fault(12)
def test_nothing_is_compiled_or_tuned_while_serving(run: Run) -> None:
    """The first prefix hit, other lengths and numbers of sequences, and so other alignments, right after the start."""
    caching = {"enable_prefix_caching": True, "max_num_batched_tokens": 512, "reset": False}
    ours = run(
        "granite",
        [shared_prefixes(), *SCHEDULES],
        plugin=True,
        own_process="cold",
        **settings(**caching),
    )
    assert declined(ours) == {}
    assert ours["counters"]["layer_checkpoints"] > 0
    assert set(ours["backends"]) == {"FastMamba2Backend"}
    assert "builds the metadata of Mamba2 layers" not in ours["log"]
    assert "Kernel JIT monitor activated" in ours["log"]
    assert compiled_while_serving(ours) == []
    assert ours["counters"]["layer_decodes"] > 0
    for said in ("Mamba2 prefill of", "decodes beside prefills are launched by address"):
        assert ours["log"].rindex(said) < ours["log"].index("init engine (")


@pytest.mark.fault(15)
def test_every_layer_call_has_the_same_bits(run: Run) -> None:
    checked = {"MAMBA_OPS_VLLM_VERIFY": "100000"}
    schedules = [at_once((length + n,) * n, max_tokens=2) for length in (70, CHUNK) for n in (1, 2, 3, 17)]
    sizes = {"max_num_seqs": 32, "max_num_batched_tokens": 512}
    ours = run(FAMILY, schedules, plugin=True, own_process="verify", environment=checked, **settings(**sizes))
    assert declined(ours) == {}
    assert ours["counters"]["verified"] >= 10
    assert re.findall(r"layer \S+ differs from .*", ours["log"]) == []
    assert "mismatches" not in ours["counters"]
    assert ours["counters"]["regions"] == 1
    assert ours["counters"]["layer_decodes"] > 0


def test_decodes_in_vllms_own_way(run: Run) -> None:
    """Some steps have decodes beside prefills, and with the option off none of them is launched by address."""
    off = {"MAMBA_OPS_VLLM_DECODE": "0"}
    ours = run(FAMILY, SCHEDULES, plugin=True, environment=off, **settings())
    by_default, theirs = with_and_without(run, SCHEDULES)
    assert "layer_decodes" not in ours["counters"]
    assert by_default["counters"]["layer_decodes"] > 0
    assert_same_bits(ours, theirs)
    assert_same_bits(by_default, theirs)


@pytest.mark.fault(6)
def test_two_dtypes_in_one_buffer(run: Run) -> None:
    ours, theirs = with_and_without(run, SCHEDULES, mamba_ssm_cache_dtype="float32")
    assert_same_bits(ours, theirs)
    assert ours["counters"]["layer_decodes"] > 0


@pytest.mark.parametrize("mode", ["FULL_AND_PIECEWISE", "FULL"])
def test_whole_steps_are_one_graph(run: Run, mode: str) -> None:
    """Short prefills after a cached prefix, at the start of a prompt, and beside decodes."""
    sizes = {"cudagraph_mode": mode, "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64]}
    engine = settings(compilation_config=sizes, enable_prefix_caching=True, reset=False)
    schedules = [shared_prefixes((500,) * 8), FIRST_TOKENS, *SCHEDULES]
    whole = {"MAMBA_OPS_VLLM_FULL_STEPS": "1"}
    ours = run(FAMILY, schedules, plugin=True, own_process=f"whole {mode}", environment=whole, **engine)
    theirs = run(FAMILY, schedules, plugin=False, **engine)
    assert re.search(r"graphs of whole steps with a prefill, of up to \d+ tokens", ours["log"])
    assert "setting cudagraph_mode" not in ours["log"]
    assert compiled_while_serving(ours) == []
    assert ours["counters"]["full_steps"] > 10
    assert ours["captured"] > theirs["captured"] or mode == "FULL"
    assert_same_bits(ours, theirs)


def test_speculative_decoding(run: Run) -> None:
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}
    schedules = [[add(0, "a", prompt(0, 100) * 3, 40), add(1, "b", prompt(1, 200), 40)]]
    ours, theirs = with_and_without(run, schedules, own_process="drafts", speculative_config=drafts)
    assert_same_bits(ours, theirs)
    assert "layer_decodes" not in ours["counters"]
    assert ours["log"].count("runs the decodes beside prefills: decoding is speculative") == 1


def test_sleep_and_wake(run: Run) -> None:
    """Weights and caches go and come back between schedules; the addresses that the plugin has bound must hold."""
    ours, theirs = with_and_without(run, SCHEDULES[:4], own_process="sleep", enable_sleep_mode=True, sleep=True)
    assert_same_bits(ours, theirs)


@needs_two
@pytest.mark.fault(20)
def test_two_ranks_on_two_devices(run: Run) -> None:
    """The second rank's tensors are not on device 0."""
    ours, theirs = with_and_without(run, SCHEDULES[:4], own_process="ranks", tensor_parallel_size=2)
    assert ours["log"].count("the snapshot of cached states is gone") == 2
    assert_equal_schedules(ours, theirs, tolerance=0)
