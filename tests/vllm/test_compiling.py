"""When and how often something is compiled, what compile caches and dumps change (nothing), and every layer call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.vllm.answers import assert_same_answers
from tests.vllm.conftest import Run
from tests.vllm.schedules import add, around_edges, at_once, prompt

# A prefill of one token, and continuations of one, beside decodes.
ONE_TOKEN = [add(0, "a", prompt(0, 129)), add(1, "b", prompt(1, 257)), add(2, "c", prompt(2, 1))]


def compiled_model(run: Run, plugin: bool) -> dict[str, Any]:
    own = {"own_process": "compiled"} if plugin else {}
    return run("granite", [ONE_TOKEN, around_edges(64, 128)], plugin=plugin, enforce_eager=False, **own)


@pytest.mark.fault(4)
def test_a_compiled_model_answers_the_same(run: Run) -> None:
    assert_same_answers(compiled_model(run, plugin=True), compiled_model(run, plugin=False))


@pytest.mark.fault(12)
def test_compiled_in_the_profile_run(run: Run) -> None:
    ours = compiled_model(run, plugin=True)
    log = ours["log"]
    assert log.count("Mamba2 prefill of") == 1
    assert log.index("Mamba2 prefill of") < log.index("init engine (")
    assert ours["counters"]["regions"] == 1


@pytest.mark.fault(15)
def test_every_layer_call_equals_vllms(run: Run) -> None:
    """Outputs, and what both caches hold afterwards; one compile whatever the number of sequences and tokens."""
    schedules = [at_once(lengths, max_tokens=2) for lengths in ((40,), (200,), (33, 1), (200, 20, 7), (3,) * 8)]
    checked = {"MAMBA_OPS_VLLM_VERIFY": "100000", "MAMBA_OPS_VLLM_VERIFY_TOLERANCE": "1e-3"}
    counters = run("granite", schedules, plugin=True, environment=checked)["counters"]
    assert counters["verified"] >= 10
    assert "mismatches" not in counters
    assert counters["regions"] == 1  # options of its own, so none from before


@pytest.mark.fault(19)
def test_warm_start_equals_cold_start(run: Run, tmp_path: Path) -> None:
    """Engines with the same compile caches: a model and a region compiled, then found there, then other options."""
    caches = {"VLLM_CACHE_ROOT": str(tmp_path / "vllm"), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    cold, warm, kept = (
        run(
            "granite",
            [at_once((5, 200, 300))],
            plugin=True,
            own_process=name,
            environment={**caches, "MAMBA_OPS_VLLM_ELIMINATE": eliminate},
            enforce_eager=False,
        )
        for name, eliminate in (("cold", "1"), ("warm", "1"), ("kept", "0"))
    )
    assert cold["schedules"] == warm["schedules"] == kept["schedules"]
    assert [result["counters"].get("snapshots_removed", 0) for result in (cold, warm, kept)] == [1, 1, 0]
    assert all(result["counters"]["regions"] == 1 for result in (cold, warm, kept))
    assert "declined: none" in cold["log"]  # what the plugin says when the process ends


@pytest.mark.fault(22)
@pytest.mark.parametrize("writable", [True, False])
def test_dump(run: Run, tmp_path: Path, writable: bool) -> None:
    folder = tmp_path / "dump"
    if not writable:
        folder.write_text("a file where the folder should be")
    schedules = [at_once((5, 200))]
    plain = run("granite", schedules, plugin=True)
    dumped = run("granite", schedules, plugin=True, environment={"MAMBA_OPS_VLLM_DUMP": str(folder)})
    assert plain["schedules"] == dumped["schedules"]
    assert dumped["counters"]["layer_prefills"] == plain["counters"]["layer_prefills"]
    if writable:
        (written,) = folder.glob("prefill_*")
        before, after = ((written / f"graph_0_{when}.py").read_text() for when in ("before", "after"))
        assert "aten.index.Tensor" in before
        assert "aten.index.Tensor" not in after
        assert "state_passing_indexed" in after
    else:
        assert f"nothing written to {folder}" in dumped["log"]
