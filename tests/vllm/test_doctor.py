"""The doctor in an environment that has vLLM."""

from __future__ import annotations

from collections.abc import Callable


def test_the_doctor_sees_the_plugin(call: Callable[..., str]) -> None:
    report = call("-m", "inductor_passes", "doctor")
    assert "vllm.general_plugins: mamba_ops = inductor_passes.vllm:register" in report
    assert "SnapshotFreeMixer2 registers as MambaMixer2" in report
    assert "state                   on" in report
    assert "1 (MAMBA_OPS_VLLM)" in report
    assert "all well" in report


def test_the_doctor_tells_that_the_plugin_is_shut_out(call: Callable[..., str]) -> None:
    script = "from inductor_passes.doctor.plugin import find_entry_point as f; print([x.value for x in f()])"
    assert "shut out by VLLM_PLUGINS=other" in call("-c", script, environment={"VLLM_PLUGINS": "other"})
