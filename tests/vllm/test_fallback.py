"""A layer whose region cannot be built runs vLLM's own code: the answers are the same and the log says why."""

from __future__ import annotations

from pathlib import Path

import pytest

from inductor_passes.vllm.contract import LAYER_ATTRIBUTES
from tests.vllm.answers import assert_equal_schedules, declined
from tests.vllm.conftest import Run
from tests.vllm.schedules import add, at_once, prompt

SCHEDULES = [[add(0, "a", prompt(0, 200)), add(1, "b", prompt(1, 70))], at_once((5, 64))]
STOCK = "mamba_ops: vLLM's own code runs layer"


def warnings(log: str) -> list[str]:
    return [line for line in log.splitlines() if STOCK in line]


def test_a_layer_that_lacks_an_attribute_runs_vllms_code(run: Run) -> None:
    """A model with a layer for each attribute of the contract: each lacks another one when it is first asked."""
    model = f"mamba2-{len(LAYER_ATTRIBUTES) + 1}"
    ours = run(model, SCHEDULES, plugin=True, own_process="contract", disturb="take_attributes")
    theirs = run(model, SCHEDULES, plugin=False)
    said = warnings(ours["log"])
    assert len(said) == len(LAYER_ATTRIBUTES)
    for name in LAYER_ATTRIBUTES:
        assert sum(f"lacks MambaMixer2().{name}" in line for line in said) == 1, name
    assert set(declined(ours)) == {"declined NOT_BUILT"}
    # One layer has them all.
    assert ours["counters"]["declined NOT_BUILT"] >= len(LAYER_ATTRIBUTES) * ours["counters"]["layer_prefills"] > 0
    assert_equal_schedules(ours, theirs)


def test_a_region_that_cannot_be_compiled(run: Run, tmp_path: Path) -> None:
    """With its snapshot it needs a C++ compiler, and there is none. Nor can vLLM compute log-probabilities then."""
    broken = {"MAMBA_OPS_VLLM_ELIMINATE": "0", "CXX": "/bin/false", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    ours = run("granite", SCHEDULES, plugin=True, own_process="no compiler", environment=broken, logprobs=None)
    (said,) = warnings(ours["log"])
    assert len(said.split("those like it: ")[1]) > 10  # a reason
    assert set(ours["counters"]) == {"declined NOT_BUILT"}
    assert_equal_schedules(ours, run("granite", SCHEDULES, plugin=False, logprobs=None))


@pytest.mark.parametrize(
    ("engine", "reason"),
    [({"dtype": "bfloat16", "mamba_cache_dtype": "float32"}, "the convolution's cache is torch.float32")],
)
def test_a_layer_that_the_region_cannot_be(run: Run, engine: dict[str, str], reason: str) -> None:
    ours = run("granite", SCHEDULES, plugin=True, **engine)
    assert sum(reason in line for line in warnings(ours["log"])) == 1  # for all layers that are alike
    assert set(declined(ours)) == {"declined NOT_BUILT"}
    assert ours["schedules"] == run("granite", SCHEDULES, plugin=False, **engine)["schedules"]


@pytest.mark.parametrize(
    ("disturb", "reason", "sentence"),
    [
        ("other_caches", "CACHE", "a cache has another layout than expected"),
        ("sparse_activations", "ALIGNMENT", "the activations are not aligned or not dense"),
    ],
)
def test_prefills_that_the_region_does_not_take(run: Run, disturb: str, reason: str, sentence: str) -> None:
    ours = run("granite", SCHEDULES, plugin=True, own_process=disturb, disturb=disturb)
    assert set(declined(ours)) == {f"declined {reason}"}
    assert "layer_prefills" not in ours["counters"]
    assert ours["log"].count(f"runs a prefill: {sentence}") == 1
    assert ours["schedules"] == run("granite", SCHEDULES, plugin=False)["schedules"]
