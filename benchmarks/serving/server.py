"""A vLLM server started and stopped for a measurement, with the plugin or without."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.serving.client import Client
from benchmarks.serving.ports import free_port

# What a line of the log must hold to be shown.
_TELLING = re.compile(r"mamba_ops: |during inference:|\bERROR \d")
# What the server itself says about its memory and its start.
_FIGURES = re.compile(
    r"Available KV cache memory: \S+ GiB|Model loading took [\d.]+ GiB|Graph capturing finished.*|init engine \(.*|"
    r"GPU KV cache size: [\d,]+ tokens"
)


@dataclass(frozen=True)
class Setup:
    """How servers are started.

    Attributes:
        model: folder of the model. arguments: of the server, as the user gave them.
        tensor_parallel: number of GPUs. timeout: seconds that a start may take.
        cold: whether each server starts with empty compile caches, so that all starts do the same work.
        logs: folder for the logs.
    """

    model: str
    arguments: list[str]
    tensor_parallel: int
    timeout: float
    cold: bool
    logs: Path


@dataclass
class Server:
    """A server that is up.

    Attributes:
        plugin: whether the plugin is on. seconds: how long it took to start.
        used: bytes of GPU memory that it holds, to be filled in.
        client: speaks to it.
    """

    plugin: bool
    client: Client
    log: Path
    seconds: float = 0.0
    used: float = 0.0
    lines_shown: int = field(default=0, repr=False)

    def telling_lines(self) -> list[str]:
        """Lines of the log about the plugin, compiles while serving and errors, that were not returned before."""
        lines = self.log.read_text(errors="replace").splitlines()
        new, self.lines_shown = lines[self.lines_shown :], len(lines)
        return [line[:400] for line in new if _TELLING.search(line)]

    def figures(self) -> list[str]:
        """What the server says about its memory and start."""
        return _FIGURES.findall(self.log.read_text(errors="replace"))


@contextlib.contextmanager
def serving(setup: Setup, plugin: bool) -> Iterator[Server]:
    """A server that is up, stopped with all its processes at the end.

    Raises:
        RuntimeError: it did not start; the message ends with the end of its log.
    """
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="serve_caches_") as caches, _log_file(setup.logs, plugin) as log:
        module = (
            "vllm.entrypoints.openai.api_server"  # `vllm serve` asks for a package that a CPU build names otherwise
        )
        command = [sys.executable, "-m", module, "--model", setup.model, "--port", str(port)]
        command += ["--skip-tokenizer-init", "--enable-scale-out", "--disable-uvicorn-access-log"]
        command += ["--tensor-parallel-size", str(setup.tensor_parallel), *setup.arguments]
        environment = {**os.environ, "MAMBA_OPS_VLLM": str(int(plugin)), "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "600"}
        if setup.cold:
            names = ("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
            environment |= {name: str(Path(caches, name.lower())) for name in names}
        server = Server(plugin, Client(port), Path(log.name))
        start = time.perf_counter()
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            while not server.client.healthy():
                if process.poll() is not None or time.perf_counter() - start > setup.timeout:
                    tail = server.log.read_text(errors="replace")[-8000:]
                    raise RuntimeError(f"the server did not start: {' '.join(command)}\n{tail}")
                time.sleep(0.1)
            server.seconds = time.perf_counter() - start
            yield server
        finally:
            _stop(process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Interrupt the server as Ctrl-C does; after a minute, and for what it leaves behind, kill the group."""
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(60)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _log_file(folder: Path, plugin: bool) -> tempfile._TemporaryFileWrapper[bytes]:
    folder.mkdir(parents=True, exist_ok=True)
    name = "plugin_" if plugin else "stock_"
    return tempfile.NamedTemporaryFile("wb", prefix=name, suffix=".log", dir=folder, delete=False)
