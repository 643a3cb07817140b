"""Two processes with one engine each, with the plugin and without, and what they have written so far."""

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

Side = dict[str, Any]

SECONDS_TO_END = 20  # for a side that was told to, before it is killed


def run_pair(module: str, job: dict[str, Any], changed: Callable[[Side, Side], None], *, together: bool) -> None:
    """Run both sides to their ends; a SIGTERM stops both, and what was known stays written.

    Args:
        module: started as `python -m MODULE JOB.json RESULT.json`, with MAMBA_OPS_VLLM=1 and with 0.
        job: what both are to do.
        changed: called with ours and stock's results whenever one has written more.
        together: whether both run at once; otherwise ours comes first.

    Raises:
        SystemExit: a side has failed, and the other one is stopped; or this process was told to end.
    """
    signal.signal(signal.SIGTERM, _stopped)
    sides: dict[str, Side] = {"1": {}, "0": {}}
    with tempfile.TemporaryDirectory() as folder:
        job_file = Path(folder, "job.json")
        job_file.write_text(json.dumps(job))
        results = {plugin: Path(folder, f"result_{plugin}.json") for plugin in sides}
        for plugins in [list(sides)] if together else [[plugin] for plugin in sides]:
            running = {plugin: _start(module, plugin, job_file, results[plugin]) for plugin in plugins}
            try:
                while running:
                    time.sleep(0.5)
                    ended = [plugin for plugin, process in running.items() if process.poll() is not None]
                    for plugin in running:
                        found = json.loads(results[plugin].read_text()) if results[plugin].exists() else {}
                        if found != sides[plugin]:
                            sides[plugin] = found
                            changed(sides["1"], sides["0"])
                    for plugin in ended:
                        status = running.pop(plugin).returncode
                        if status:
                            raise SystemExit(f"the engine with MAMBA_OPS_VLLM={plugin} ended with {status}")
            finally:
                _stop(running.values())


def _start(module: str, plugin: str, job_file: Path, result_file: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", module, str(job_file), str(result_file)]
    # Inductor, too, chooses by time among kernels that sum in another order, in each process by itself.
    held = {"TORCHINDUCTOR_DETERMINISTIC": "1"}
    return subprocess.Popen(command, env={**os.environ, **held, "MAMBA_OPS_VLLM": plugin}, stdout=sys.stderr)


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
