"""Engines of vLLM for CPUs, run in the environment that has them, with and without the plugin."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.processes import HERE, ROOT, EngineProcess, clean_environment

VARIABLE = "MAMBA_OPS_VLLM_ENGINE_PYTHON"

Call = Callable[..., str]
Run = Callable[..., dict[str, Any]]

SMALL = {
    "dtype": "float32",
    "max_model_len": 1024,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 128,
    "enable_prefix_caching": False,
    "enforce_eager": True,
}


@pytest.fixture(scope="session")
def engine_python() -> str:
    python = os.environ.get(VARIABLE)
    if not python:
        pytest.skip(f"{VARIABLE} is not set (make test sets it)")
    return python


@pytest.fixture(scope="session")
def caches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Caches for all processes of the session, of both workers: the region itself never comes from one."""
    folder = tmp_path_factory.getbasetemp()
    folder = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "caches"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def call(engine_python: str, caches: Path) -> Call:
    """Runs a script there and returns what it printed."""

    def run(*arguments: str, environment: dict[str, str] | None = None) -> str:
        done = subprocess.run(
            [engine_python, *arguments],
            env=clean_environment(caches, **(environment or {})),
            cwd=ROOT,
            text=True,
            capture_output=True,
            timeout=1200,
        )
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-6000:]
        return done.stdout + done.stderr

    return run


@pytest.fixture(scope="session")
def model(call: Call, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """The folder of a family's model, or of an adapter for it."""
    folder = tmp_path_factory.mktemp("models")

    def made(family: str, script: str = "make_model.py") -> str:
        target = folder / f"{family}-{script}"
        if not target.exists():
            call(str(HERE / script), family, str(target))
        return str(target)

    return made


@pytest.fixture(scope="session")
def run(
    engine_python: str, caches: Path, model: Callable[..., str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Run]:
    """Results of `engine.py`, from two processes that live as long as the session: with the plugin and without it."""
    processes: dict[bool, EngineProcess] = {}
    results: dict[str, dict[str, Any]] = {}

    def start(plugin: bool, **environment: str) -> EngineProcess:
        folder = tmp_path_factory.mktemp("engine")
        return EngineProcess(
            engine_python, folder, clean_environment(caches, **{"MAMBA_OPS_VLLM": str(int(plugin)), **environment})
        )

    def result(
        family: str,
        schedules: list[Any],
        *,
        plugin: bool,
        environment: dict[str, str] | None = None,
        own_process: str = "",
        logprobs: int | None = 1,
        zero: tuple[int, ...] = (),
        disturb: str = "",
        reset: bool = True,
        sleep: bool = False,
        **engine: Any,
    ) -> dict[str, Any]:
        """Run schedules in an engine, or return what the same ones gave before.

        Args:
            plugin: whether it is on. environment: variables for the time of the job.
            own_process: a name for a process that runs this job only and has `environment` from its start.
            logprobs: of how many other tokens there are log-probabilities, or None for none at all.
            zero: the schedules during which cached states are zeroed after every step.
            disturb: what makes layers different from what the plugin expects; a function of `engine.py`.
            reset: whether a schedule starts with an empty prefix cache.
            sleep: whether the engine sleeps and wakes before a schedule.
            engine: arguments of LLM.
        """
        job = {
            "model": model(family),
            "engine": {**SMALL, **engine},
            "environment": environment or {},
            "schedules": schedules,
            "logprobs": logprobs,
            "zero": zero,
            "disturb": disturb,
            "reset_prefix_cache": reset,
            "sleep": sleep,
        }
        key = json.dumps([plugin, own_process, job])
        if key not in results:
            if own_process:
                process = start(plugin, **(environment or {}))
                found = process.run(job)
                results[key] = {**found, "log": process.close()}
            else:
                if plugin not in processes:
                    processes[plugin] = start(plugin)
                results[key] = processes[plugin].run(job)
        return results[key]

    yield result
    for process in processes.values():
        process.close()
