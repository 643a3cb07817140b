"""Counters of several processes, seen by the one that started them. Needs no vLLM."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest

from inductor_passes.vllm.counts_file import VARIABLE
from inductor_passes.vllm.decline import Counters, Decline, of_all_processes
from inductor_passes.vllm.metrics import Collector

FIRST_PROCESS = """
import logging, multiprocessing, os, sys
from inductor_passes.vllm.counts_file import open_folder
from inductor_passes.vllm.decline import log_at_end
from tests.vllm.test_counters import count_and_be_killed
logging.basicConfig(level=logging.INFO)
if __name__ == "__main__":
    open_folder(log_at_end)
    open_folder(log_at_end)
    print("FOLDER", os.environ["MAMBA_OPS_VLLM_COUNTS"])
    for method in ("spawn", "fork"):
        child = multiprocessing.get_context(method).Process(target=count_and_be_killed, args=(3,))
        child.start()
        child.join()
"""


def count_and_be_killed(times: int) -> None:
    counters = Counters()
    counters.share()
    for _ in range(times):
        counters.layer_prefills += 1
        counters.declined[Decline.CACHE] += 1
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))


def run_and_kill(times: int) -> None:
    child = multiprocessing.get_context("spawn").Process(target=count_and_be_killed, args=(times,))
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL


@pytest.mark.usefixtures("folder")
def test_counts_outlive_killed_processes_and_add_up() -> None:
    run_and_kill(3)
    run_and_kill(4)
    total = of_all_processes()
    assert total.layer_prefills == 7
    assert dict(total.declined) == {Decline.CACHE: 7}
    assert "7 layer prefills without a snapshot" in str(total)
    assert "declined: CACHE 7" in str(total)


@pytest.mark.usefixtures("folder")
def test_prometheus_reads_them() -> None:
    registry = CollectorRegistry()
    registry.register(Collector())
    run_and_kill(2)
    page = generate_latest(registry).decode()
    assert "mamba_ops_layer_prefills_total 2.0" in page
    assert 'mamba_ops_declined_total{reason="cache"} 2.0' in page
    assert 'mamba_ops_declined_total{reason="not_built"} 0.0' in page


def test_a_process_without_a_folder_counts_for_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "gone"))
    counters = Counters()
    counters.share()
    counters.layer_checkpoints += 1
    assert counters.layer_checkpoints == 1
    assert not any(of_all_processes().cells)


def test_the_first_process_says_the_sum_once_and_cleans_up(tmp_path: Path) -> None:
    script = tmp_path / "first.py"
    script.write_text(FIRST_PROCESS)
    root = Path(__file__).parent.parent.parent
    environment = {**os.environ, "PYTHONPATH": str(root), "TMPDIR": str(tmp_path)}
    environment.pop(VARIABLE, None)
    done = subprocess.run([sys.executable, str(script)], env=environment, text=True, capture_output=True, check=True)
    assert done.stderr.count("6 layer prefills without a snapshot") == 1
    made = Path(done.stdout.split("FOLDER ")[1].strip())
    assert made.parent == tmp_path
    assert not made.exists()
