"""Processes of the Python that has vLLM: scripts, and `engine.py`, which runs one job after the other."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

from benchmarks.engine.held_choices import ENVIRONMENT

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
SECONDS_FOR_A_JOB = 900


class EngineError(Exception):
    """A job failed in the engine, or the process died; the message has what it printed."""


def clean_environment(caches: Path, **changes: str) -> dict[str, str]:
    """This process's environment without the plugin's options, with compile caches of its own; the plugin is on.

    What Inductor would choose by time is held, so that answers of two processes can be compared bit by bit on a GPU.
    """
    kept = {name: text for name, text in os.environ.items() if not name.startswith("MAMBA_OPS_VLLM")}
    own = {
        "OMP_NUM_THREADS": "1",
        "MAMBA_OPS_VLLM": "1",
        "VLLM_CACHE_ROOT": str(caches),
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
    }
    return {**kept, **ENVIRONMENT, **own, **changes}


class EngineProcess:
    """One process of `engine.py`.

    Args:
        python: an interpreter that has vLLM.
        folder: an empty one, for jobs, results and what the process prints.
        environment: of the process.
    """

    def __init__(self, python: str, folder: Path, environment: dict[str, str]) -> None:
        self._folder = folder
        self._log = folder / "log.txt"
        self._jobs = 0
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [python, str(HERE / "engine.py")],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
            )

    def run(self, job: dict[str, Any]) -> dict[str, Any]:
        """The result of a job, and as `log` all that the process has printed up to its end."""
        self._jobs += 1
        job_file, result_file = (self._folder / f"{kind}{self._jobs}.json" for kind in ("job", "result"))
        job_file.write_text(json.dumps(job))
        assert self._process.stdin is not None
        self._process.stdin.write(f"{job_file}\t{result_file}\n")
        self._process.stdin.flush()
        end = time.monotonic() + SECONDS_FOR_A_JOB
        while not result_file.exists():
            if self._process.poll() is not None or time.monotonic() > end:
                self._process.kill()
                raise EngineError(f"no result; the process printed\n{self._log.read_text()[-6000:]}")
            time.sleep(0.02)
        found: dict[str, Any] = json.loads(result_file.read_text())
        if "error" in found:
            raise EngineError(f"{found['error']}\nThe process printed\n{self._log.read_text()[-4000:]}")
        return {**found, "log": self._log.read_text()}

    def close(self) -> str:
        """End the process; all that it has printed."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
        return self._log.read_text()
