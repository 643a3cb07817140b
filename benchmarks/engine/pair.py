"""Two processes with one engine each, with the plugin and without, and what they have written so far.

In a control neither has the plugin. vLLM looks for compiled code, and with it for what Inductor chose, below
`VLLM_CACHE_ROOT`, by a key of the model and the settings, which are the same on both sides; Inductor and Triton have
folders of their own for what vLLM does not compile (`TORCHINDUCTOR_CACHE_DIR`, `TRITON_CACHE_DIR`). So each side of a
control gets empty folders for all three: otherwise the second might load what the first chose, and so agree with it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks.engine.held_choices import ENVIRONMENT

Side = dict[str, Any]
Environment = dict[str, str]

PLUGIN = {"ours": "1", "stock": "0"}
CACHES = ("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
SECONDS_TO_END = 20  # for a side that was told to, before it is killed


def run_pair(
    module: str,
    job: dict[str, Any],
    changed: Callable[[Side, Side], None],
    *,
    together: bool,
    control: bool = False,
) -> None:
    """Run both sides to their ends; a SIGTERM stops both, and what was known stays written.

    Args:
        module: started as `python -m MODULE JOB.json RESULT.json`, with MAMBA_OPS_VLLM=1 and with 0.
        job: what both are to do.
        changed: called with ours and stock's results whenever one has written more.
        together: whether stock starts as soon as ours is up; otherwise when ours is done.
        control: whether both are stock, each with caches of its own.

    Raises:
        SystemExit: a side has failed, and the other one is stopped; or this process was told to end.
    """
    signal.signal(signal.SIGTERM, _stopped)
    sides: dict[str, Side] = {name: {} for name in PLUGIN}
    with tempfile.TemporaryDirectory() as folder:
        job_file = Path(folder, "job.json")
        job_file.write_text(json.dumps(job))
        results = {name: Path(folder, f"result_{name}.json") for name in sides}
        for names in [list(sides)] if together else [[name] for name in sides]:
            running: dict[str, subprocess.Popen[bytes]] = {}
            try:
                while names or running:
                    # The second one finds what the first has compiled: that may have been chosen by time.
                    if names and (control or not running or any(sides[name] for name in running)):
                        name = names.pop(0)
                        environment = _stock(Path(folder, name)) if control else {"MAMBA_OPS_VLLM": PLUGIN[name]}
                        running[name] = _start(module, environment, job_file, results[name])
                    time.sleep(0.5)
                    ended = [name for name, process in running.items() if process.poll() is not None]
                    for name in running:
                        found = json.loads(results[name].read_text()) if results[name].exists() else {}
                        if found != sides[name]:
                            sides[name] = found
                            changed(sides["ours"], sides["stock"])
                    for name in ended:
                        status = running.pop(name).returncode
                        if status:
                            raise SystemExit(f"the engine of side {name} ended with {status}")
            finally:
                _stop(running.values())


def _stock(folder: Path) -> Environment:
    """Of an engine without the plugin that finds nothing another one has compiled."""
    return {"MAMBA_OPS_VLLM": "0", **{name: str(folder / name.lower()) for name in CACHES}}


def _start(module: str, environment: Environment, job_file: Path, result_file: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", module, str(job_file), str(result_file)]
    return subprocess.Popen(command, env={**os.environ, **ENVIRONMENT, **environment}, stdout=sys.stderr)


def _stop(processes: Iterable[subprocess.Popen[bytes]]) -> None:
    running = list(processes)
    for process in running:
        process.terminate()
    for process in running:
        try:
            process.wait(SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _stopped(*_: Any) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once is enough, and the rest must not be cut off
    raise SystemExit("stopped; what is known is written")
