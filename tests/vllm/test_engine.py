"""vLLM's engine answers the same with and without the plugin, and the plugin is what answered."""

from __future__ import annotations

from typing import Any

import pytest

from tests.vllm.conftest import Run
from tests.vllm.schedules import add, around_edges, at_once, prompt, random_schedule, shared_prefixes

FAMILIES = ["granite", "falcon_h1", "nemotron_h", "zamba2", "mamba2"]
# FP32 on both sides: what differs is the order of sums, chunk by chunk here and token by token in vLLM's CPU scan.
LOGPROB_TOLERANCE = 2e-3


def assert_same_answers(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert "SnapshotFreeMixer2" in ours["layers"]
    assert ours["counters"]["declined"] == {}
    assert set(theirs["layers"]) == {"MambaMixer2"}
    for schedule, expected in zip(ours["schedules"], theirs["schedules"], strict=True):
        assert schedule.keys() == expected.keys()
        for name, answer in schedule.items():
            assert answer.get("tokens") == expected[name].get("tokens"), name
            assert answer.get("logprobs", []) == pytest.approx(
                expected[name].get("logprobs", []), abs=LOGPROB_TOLERANCE
            )


@pytest.mark.parametrize("family", FAMILIES)
def test_families_answer_the_same_over_chunked_and_mixed_prefills(run: Run, family: str) -> None:
    schedules = [at_once((1, 5, 63, 64, 65, 200, 300)), around_edges(64, 128)]
    ours = run(family, schedules, plugin=True)
    assert ours["counters"]["layer_prefills"] > 0
    assert ours["counters"]["snapshots_removed"] == 1
    assert_same_answers(ours, run(family, schedules, plugin=False))


def test_the_cached_state_decides_tokens(run: Run) -> None:
    schedules = [at_once((200, 300))]
    whole, zeroed = (run("granite", schedules, plugin=True, zero=zero)["schedules"][0] for zero in (False, True))
    assert all(whole[name]["tokens"] != zeroed[name]["tokens"] for name in whole)


@pytest.mark.fault(14)
def test_random_schedules(run: Run) -> None:
    schedules = [random_schedule(seed) for seed in range(200)]
    ours = run("granite", schedules, plugin=True)
    assert_same_answers(ours, run("granite", schedules, plugin=False))
    assert any(answer.get("aborted") for schedule in ours["schedules"] for answer in schedule.values())


def test_preempted_and_resumed(run: Run) -> None:
    schedules = [at_once((120, 121, 122, 123), max_tokens=150)]
    few = {"num_gpu_blocks_override": 14, "max_model_len": 512}
    ours = run("granite", schedules, plugin=True, **few)
    assert ours["preemptions"] > 0
    assert_same_answers(ours, run("granite", schedules, plugin=False, **few))


def test_prefix_caching_with_checkpoints(run: Run) -> None:
    """vLLM 0.32 for CPUs fails in this configuration, so the answers are compared with those without the cache."""
    caching = {"enable_prefix_caching": True, "max_num_batched_tokens": 512}
    ours = run("granite", [shared_prefixes()], plugin=True, reset=False, **caching)
    assert ours["counters"]["layer_checkpoints"] > 0
    assert any(answer["cached"] for answer in ours["schedules"][0].values())
    assert_same_answers(ours, run("granite", [shared_prefixes()], plugin=False))


@pytest.mark.fault(4)
def test_one_token_continuation_in_a_compiled_model(run: Run) -> None:
    schedules = [[add(0, "a", prompt(0, 129)), add(1, "b", prompt(1, 257)), add(2, "c", prompt(2, 1))]]
    ours = run("granite", schedules, plugin=True, enforce_eager=False)
    assert_same_answers(ours, run("granite", schedules, plugin=False))


@pytest.mark.fault(6)
def test_two_dtypes_in_one_buffer(run: Run) -> None:
    """A slot holds a BF16 convolution state and an FP32 SSM state in one page."""
    schedules = [at_once((5, 200, 300), max_tokens=1)]
    mixed = {"dtype": "bfloat16", "mamba_ssm_cache_dtype": "float32"}
    checked = {"MAMBA_OPS_VLLM_VERIFY": "1000", "MAMBA_OPS_VLLM_VERIFY_TOLERANCE": "0.02"}
    ours = run("granite", schedules, plugin=True, environment=checked, **mixed)
    assert ours["counters"]["declined"] == {}
    assert ours["counters"]["verified"] > 0
    assert ours["counters"]["mismatches"] == 0


@pytest.mark.fault(15)
def test_every_layer_call_equals_vllms(run: Run) -> None:
    """Outputs, and what both caches hold afterwards; one compile whatever the number of sequences and tokens."""
    schedules = [at_once(lengths, max_tokens=2) for lengths in ((40,), (33, 1), (200, 20, 7), (3,) * 8)]
    checked = {"MAMBA_OPS_VLLM_VERIFY": "100000", "MAMBA_OPS_VLLM_VERIFY_TOLERANCE": "1e-3"}
    counters = run("granite", schedules, plugin=True, environment=checked)["counters"]
    assert counters["verified"] >= 10
    assert counters["mismatches"] == 0
    assert counters["regions"] == 1


@pytest.mark.fault(12)
def test_compiled_in_the_profile_run(run: Run) -> None:
    ours = run("granite", [around_edges(64, 128)], plugin=True, enforce_eager=False)
    log = ours["log"]
    assert log.count("Mamba2 prefill of") == 1
    assert log.index("Mamba2 prefill of") < log.index("init engine (")
    assert ours["counters"]["regions"] == 1


@pytest.mark.fault(19)
def test_warm_start_equals_cold_start(run: Run) -> None:
    schedules = [at_once((5, 200, 300))]
    cold, warm, kept = (
        run("granite", schedules, plugin=True, environment={"MAMBA_OPS_VLLM_ELIMINATE": eliminate})
        for eliminate in ("1", "1", "0")
    )
    assert cold["schedules"] == warm["schedules"] == kept["schedules"]
    removed = [result["counters"]["snapshots_removed"] for result in (cold, warm, kept)]
    assert removed == [1, 1, 0]


@pytest.mark.fault(22)
@pytest.mark.parametrize("writable", [True, False])
def test_dump(run: Run, tmp_path: Any, writable: bool) -> None:
    folder = tmp_path / "dump"
    if not writable:
        folder.write_text("a file where the folder should be")
    schedules = [at_once((5, 200))]
    plain, dumped = (
        run("granite", schedules, plugin=True, environment=variables)
        for variables in ({}, {"MAMBA_OPS_VLLM_DUMP": str(folder)})
    )
    assert plain["schedules"] == dumped["schedules"]
    assert dumped["counters"]["declined"] == {}
    if writable:
        (written,) = folder.glob("prefill_*")
        before, after = ((written / f"graph_0_{when}.py").read_text() for when in ("before", "after"))
        assert "aten.index.Tensor" in before
        assert "aten.index.Tensor" not in after
        assert "state_passing_indexed" in after
    else:
        assert "nothing written" in dumped["log"]


def test_turned_off_and_misspelt(run: Run, call: Any) -> None:
    off = run("granite", [at_once((5,))], plugin=False)
    assert set(off["layers"]) == {"MambaMixer2"}
    script = (
        "from inductor_passes.vllm import register\ntry:\n  register()\nexcept ValueError as e:\n  print('ERROR', e)"
    )
    assert "known: enabled, eliminate" in call("-c", script, environment={"MAMBA_OPS_VLLM_ELIMINATES": "1"})


def test_tensor_parallel(run: Run) -> None:
    schedules = [at_once((5, 64, 200), max_tokens=4)]
    ours, theirs = (
        run(
            "granite",
            schedules,
            plugin=plugin,
            tensor_parallel_size=2,
            environment={"VLLM_CPU_OMP_THREADS_BIND": "nobind"},
        )
        for plugin in (True, False)
    )
    for name, answer in ours["schedules"][0].items():
        assert answer["tokens"] == theirs["schedules"][0][name]["tokens"]
