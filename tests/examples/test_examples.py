"""Every example runs as a user would run it; it checks its own results."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs_and_the_pass_eliminates_its_snapshot(example: Path) -> None:
    compile_afresh = {"TORCHINDUCTOR_FX_GRAPH_CACHE": "0", "TORCHINDUCTOR_AUTOGRAD_CACHE": "0"}
    environment = {**os.environ, **compile_afresh, "PYTHONPATH": str(ROOT)}
    run = subprocess.run([sys.executable, str(example)], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "removed:" in run.stdout
    assert "equal bit for bit" in run.stdout
