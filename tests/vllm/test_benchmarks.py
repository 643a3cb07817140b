"""The benchmarks that run vLLM do so on a CPU too, and write what they say they write."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

MAIN_MEMORY = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


def rows(path: Path) -> dict[tuple[str, str], dict[str, float | None]]:
    return {(row["case"], row["metric"]): row for row in json.loads(path.read_text())["rows"]}


def test_equality(call: Callable[..., str], model: Callable[[str], str], tmp_path: Path) -> None:
    arguments = ("--name", "granite", "--responses", "40", "--calls", "30", "--out", str(tmp_path))
    call("-m", "benchmarks.equality_vllm", model("granite"), *arguments, environment=MAIN_MEMORY)
    found = rows(tmp_path / "equality_vllm.json")
    for case, least in (("layers", 30), ("responses", 40), ("graphs", 4), ("compiles", 40)):
        row = found[f"{case}/granite", "mismatches"]
        assert row["ours"] == 0
        assert row["n"] is not None
        assert row["n"] >= least
    preemptions = found["preemptions/granite", "count"]
    assert preemptions["ours"] == preemptions["stock"] > 0  # type: ignore[operator]


def test_control(call: Callable[..., str], model: Callable[[str], str], tmp_path: Path) -> None:
    """Two engines without the plugin, which also differ in nothing here: on a CPU no choice goes by time."""
    arguments = ("--control", "--name", "granite", "--responses", "8", "--out", str(tmp_path))
    said = call("-m", "benchmarks.equality_vllm", model("granite"), *arguments, environment=MAIN_MEMORY)
    (row,) = rows(tmp_path / "equality_vllm.json").values()
    assert row["case"] == "responses/control/granite"
    assert row["ours"] == 0
    assert row["n"] >= 8  # type: ignore[operator]
    assert "mamba_ops:" not in said


def test_soak(call: Callable[..., str], model: Callable[[str], str], tmp_path: Path) -> None:
    arguments = ("--requests", "40", "--out", str(tmp_path))
    call("-m", "benchmarks.soak", model("granite"), *arguments, environment=MAIN_MEMORY)
    found = {row["case"]: row for row in json.loads((tmp_path / "soak.json").read_text())["rows"]}
    assert set(found) == {"responses", "preemptions", "aborts", "compiles", "memory"}
    assert (found["responses"]["ours"], found["responses"]["n"]) == (0, 40)
    assert found["compiles"]["ours"] == 0
    for case in ("preemptions", "aborts"):
        assert found[case]["ours"] == found[case]["stock"] > 0


def test_soak_notices_lost_states(call: Callable[..., str], model: Callable[[str], str], tmp_path: Path) -> None:
    arguments = ("--requests", "20", "--damage", "5", "--out", str(tmp_path))
    with pytest.raises(AssertionError, match="responses: "):
        call("-m", "benchmarks.soak", model("granite"), *arguments, environment=MAIN_MEMORY)
    assert rows(tmp_path / "soak.json")["responses", "mismatches"]["ours"] != 0


def test_serve(call: Callable[..., str], model: Callable[[str], str], tmp_path: Path) -> None:
    small = "--cached 128 --vocabulary 512 --longest 300 --spread 4 --bursts 1 --waves 1 --mixed 4 --mixed-out 4"
    server = "--dtype float32 --max-model-len 512 --no-enable-prefix-caching --enforce-eager"
    folders = ("--out", str(tmp_path), "--logs", str(tmp_path))
    arguments = (*small.split(), *folders, "--servers", "2", "--warm", "--", *server.split())
    log = call("-m", "benchmarks.serve", model("granite"), *arguments, environment=MAIN_MEMORY)
    found = rows(tmp_path / "serve.json")
    expected = {("startup", "wall"), ("step/1x32", "wall"), ("burst32", "throughput"), ("mixed", "throughput")}
    expected |= {(case, metric) for case in ("spread", "burst32", "mixed") for metric in ("ttft_p50", "ttft_p95")}
    assert set(found) == expected  # `memory` needs a GPU
    for row in found.values():
        assert row["ratio"] is not None
        assert row["ratio"] > 0
    assert (tmp_path / "serve.svg").exists()
    assert log.count("layer prefills without a snapshot") == 1
