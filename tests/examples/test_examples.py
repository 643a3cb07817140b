"""Every example runs as a user would run it; it checks its own results."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs_and_the_pass_eliminates_its_snapshot(example: Path, tmp_path: Path) -> None:
    environment = {"PYTHONPATH": str(ROOT), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}  # an empty one: so it compiles
    run = subprocess.run(
        [sys.executable, str(example)], cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert "now uses state_passing_indexed" in run.stdout
