"""Looking at the plugin's region: `inspect --vllm MODEL`, and beside vLLM's own dump."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

Call = Callable[..., str]


def assert_shows_the_region(folder: Path) -> None:
    before, after = ((folder / f"graph_0_{when}.py").read_text() for when in ("before", "after"))
    assert "state_passing_update" in before
    assert "state_passing_indexed" in after
    assert "state_passing_indexed" in (folder / "with_pass" / "code_0.py").read_text()
    table = (folder / "table.txt").read_text()
    assert "The snapshot is gone" in table
    assert "inductor_passes/vllm/region.py:" in table  # the line that spells the snapshot
    page = (folder / "report.html").read_text()
    assert "The snapshot is gone" in page
    # 8 heads x 32 x 16, in the type that vLLM chooses for this model's cache on this machine.
    (dtype,) = re.findall(r'index: "(\w+)\[\w+, 8, 32, 16\]" = torch\.ops\.aten\.index\.Tensor', before)
    sizes = {"f32": 16, "bf16": 8}
    assert f"{sizes[dtype]} KiB <small>a sequence</small>" in page


@pytest.mark.fault(22)
def test_inspecting_a_model(call: Call, model: Callable[[str], str], tmp_path: Path) -> None:
    folder, dump = tmp_path / "inspection", tmp_path / "dump"
    output = call(
        "-m",
        "inductor_passes",
        "inspect",
        "--out",
        str(folder),
        "--vllm",
        model("granite"),
        environment={"VLLM_DEBUG_DUMP_PATH": str(dump)},
    )
    # Two layers, and a prompt in two steps.
    assert "4 of 4 prefills of a layer equal vLLM's own code" in output
    assert_shows_the_region(folder)
    (region,) = (dump / "rank_0_dp_0" / "mamba_ops").glob("prefill_*")
    assert_shows_the_region(region)
