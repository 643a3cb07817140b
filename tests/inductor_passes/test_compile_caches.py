"""Compile caches: a warm start gives what a cold one gave, and no graph is served to a run with another pass."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run_probe(cache_folder, sources=ROOT):
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(cache_folder), "PYTHONPATH": str(sources)}
    run = subprocess.run(
        [sys.executable, "-m", "tests.inductor_passes.cache_probe"],
        capture_output=True,
        text=True,
        check=False,
        cwd=sources,
        env=environment,
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.fault(19)
def test_compile_caches(tmp_path):
    indexed, update = "mamba_ops::state_passing_indexed_cpu", "mamba_ops::state_passing_update_cpu"
    gather = "mamba_ops::masked_gather_cpu"
    ops = {"with": [gather, indexed, update], "without": [update], "whole only": [indexed, update]}

    cold = run_probe(tmp_path / "cache")
    assert not any(probe["hit"] for probe in cold.values())
    assert {name: probe["ops"] for name, probe in cold.items()} == ops
    assert cold["with"]["bytes"] == cold["without"]["bytes"] == cold["whole only"]["bytes"]

    warm = run_probe(tmp_path / "cache")
    assert all(probe["hit"] and probe["new_code"] == 0 for probe in warm.values())
    assert {name: probe["ops"] for name, probe in warm.items()} == ops
    assert {name: probe["bytes"] for name, probe in warm.items()} == {name: p["bytes"] for name, p in cold.items()}

    # Another version of the pass takes no graph that this one made; a run without it is not concerned.
    for package in ("inductor_passes", "mamba_ops", "tests"):
        shutil.copytree(ROOT / package, tmp_path / "sources" / package)
    with (tmp_path / "sources" / "inductor_passes" / "masks.py").open("a") as file:
        file.write("# changed\n")
    changed = run_probe(tmp_path / "cache", tmp_path / "sources")
    assert {name: probe["hit"] for name, probe in changed.items()} == {
        "with": False,
        "without": True,
        "whole only": False,
    }
