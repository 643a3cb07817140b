"""Every example runs as a user would run it, and checks its own results (those with vLLM: in tests/vllm)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
# What an example says only when it has held what it promises.
SAYS = {
    "compiled_layer": ("removed:", "equal bit for bit"),
    "own_model": ("removed:", "equal bit for bit, in all spellings"),
    "language_model": ("removed:", "The tokens are equal", "they are others"),
    "fork_prefix": ("210432 bytes not copied", "equal bit for bit"),
    "read_report": ("SNAPSHOT_RETURNED", "read_report.py"),
    "new_pattern": ("OTHER_CACHE", "snapshots eliminated: 1", "equal bit for bit"),
}


@pytest.mark.parametrize("example", SAYS)
def test_example(example: str) -> None:
    compile_afresh = {"TORCHINDUCTOR_FX_GRAPH_CACHE": "0", "TORCHINDUCTOR_AUTOGRAD_CACHE": "0"}
    environment = {**os.environ, **compile_afresh, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, f"examples/{example}.py"]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    for words in SAYS[example]:
        assert words in run.stdout


def test_every_example_is_tested() -> None:
    examples = {path.stem for path in (ROOT / "examples").glob("*.py")}
    with_vllm = {"tiny_model", "vllm_offline", "vllm_server"}
    assert examples == with_vllm | SAYS.keys()
