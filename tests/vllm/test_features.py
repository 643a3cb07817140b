"""What else an engine may be asked for, with the plugin on: adapters, drafts, several processes, two dtypes.

Sleep mode is not here: vLLM refuses it on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.vllm.answers import assert_equal_schedules, assert_same_answers, declined
from tests.vllm.conftest import Run
from tests.vllm.schedules import add, at_once, prompt


def test_adapters(run: Run, model: Callable[..., str]) -> None:
    """LoRA of the layer's projections, in one batch with a request that has none."""
    adapter = model("granite", "make_lora.py")
    with_it = [add(0, "b", prompt(0, 160), 6, adapter), add(2, "c", prompt(1, 60), 6, adapter)]
    schedules = [[add(0, "a", prompt(0, 160)), *with_it]]
    lora = {"enable_lora": True, "max_lora_rank": 8}
    ours = run("granite", schedules, plugin=True, **lora)
    assert ours["schedules"][0]["a"]["tokens"] != ours["schedules"][0]["b"]["tokens"]
    assert_same_answers(ours, run("granite", schedules, plugin=False, **lora))


def test_speculative_decoding(run: Run) -> None:
    """Drafts change what decodes read, not the prefill: every call of a layer leaves what vLLM's own would.

    Only first tokens are compared. Later ones vLLM 0.32 for CPUs decodes from states that are not the sequence's,
    without the plugin too: they differ from those without drafts, and from run to run.
    """
    schedules = [[add(0, "a", prompt(0, 60) * 3, 1), add(1, "b", prompt(1, 200), 1)], at_once((90, 20), 12)]
    drafts = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}}
    checked = {"MAMBA_OPS_VLLM_VERIFY": "1000", "MAMBA_OPS_VLLM_VERIFY_TOLERANCE": "1e-3"}
    ours = run("granite", schedules, plugin=True, own_process="drafts", environment=checked, **drafts)
    theirs = run("granite", schedules, plugin=False)
    assert declined(ours) == {}
    assert ours["counters"]["verified"] > 0
    assert "mismatches" not in ours["counters"]
    for schedule, expected in zip(ours["schedules"], theirs["schedules"], strict=True):
        assert {name: answer["tokens"][0] for name, answer in schedule.items()} == {
            name: answer["tokens"][0] for name, answer in expected.items()
        }


def test_tensor_parallel(run: Run) -> None:
    schedules = [at_once((5, 64, 200), max_tokens=4)]
    unbound = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    two = {"tensor_parallel_size": 2, "own_process": "two ranks", "environment": unbound}
    ours = run("granite", schedules, plugin=True, **two)
    assert ours["log"].count("the snapshot of cached states is gone") == 2
    assert_equal_schedules(ours, run("granite", schedules, plugin=False, **two))


@pytest.mark.fault(6)
def test_two_dtypes_in_one_buffer(run: Run) -> None:
    """A slot holds a BF16 convolution state and an FP32 SSM state in one page."""
    schedules = [at_once((5, 200, 300), max_tokens=1)]
    mixed = {"dtype": "bfloat16", "mamba_ssm_cache_dtype": "float32"}
    checked = {"MAMBA_OPS_VLLM_VERIFY": "1000", "MAMBA_OPS_VLLM_VERIFY_TOLERANCE": "0.02"}
    counters = run("granite", schedules, plugin=True, environment=checked, **mixed)["counters"]
    assert counters["verified"] > 0
    assert "mismatches" not in counters
    assert not any(name.startswith("declined") for name in counters)
