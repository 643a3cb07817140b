"""A real server: what it counts is on its metrics page, and in one line of its log when Ctrl-C stops it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.serving.ports import free_port
from tests.vllm.conftest import HERE
from tests.vllm.schedules import prompt

ARGUMENTS = ["--skip-tokenizer-init", "--enable-scale-out", "--dtype", "float32", "--max-model-len", "1024"]
ARGUMENTS += ["--no-enable-prefix-caching", "--enforce-eager", "--max-num-batched-tokens", "128"]

# `vllm serve`, which itself looks for a package `vllm` that a build for CPUs does not have.
SERVE = """
import sys
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
ServeSubcommand().subparser_init(parser.add_subparsers())
ServeSubcommand.cmd(parser.parse_args(["serve", *sys.argv[1:]]))
"""


class Server:
    def __init__(self, port: int, process: subprocess.Popen[bytes], log: Path) -> None:
        self.port, self.process, self.log = port, process, log

    def get(self, path: str, body: object = None) -> str:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", data, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as response:
            return str(response.read().decode())

    def generate(self, tokens: list[int]) -> None:
        sampling = {"temperature": 0, "max_tokens": 2, "ignore_eos": True, "detokenize": False}
        self.get("/inference/v1/generate", {"token_ids": tokens, "sampling_params": sampling})

    def counted(self, name: str) -> float | None:
        """The value of a metric, by its name and labels; None if it is not on the page."""
        found = re.search(rf"^{re.escape(name)} (\S+)$", self.get("/metrics"), re.MULTILINE)
        return float(found.group(1)) if found else None

    def interrupt(self) -> str:
        """Stop it as Ctrl-C in a terminal does, and return its log."""
        os.killpg(self.process.pid, signal.SIGINT)
        self.process.wait(120)
        return self.log.read_text()


@contextlib.contextmanager
def serving(python: str, model: str, folder: Path, *arguments: str) -> Iterator[Server]:
    port = free_port()
    command = [python, "-c", SERVE, "--model", model, "--port", str(port)]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MAMBA_OPS_VLLM")}
    environment = {"MAMBA_OPS_VLLM": "1", "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "TMPDIR": str(folder)}
    environment |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CACHE_ROOT": str(folder / "cache")}
    log = folder / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*command, *ARGUMENTS, *arguments],
            env={**clean, **environment},
            cwd=HERE.parent.parent,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
        try:
            server = Server(port, process, log)
            wait_until_up(server)
            yield server
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def wait_until_up(server: Server) -> None:
    for _ in range(1200):
        assert server.process.poll() is None, server.log.read_text()[-6000:]
        with contextlib.suppress(urllib.error.URLError, ConnectionError):
            server.get("/health")
            return
        time.sleep(0.25)
    pytest.fail(server.log.read_text()[-6000:])


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """Sockets lie in it, whose paths must be short."""
    with tempfile.TemporaryDirectory(prefix="s_") as folder:
        yield Path(folder)


def end_lines(log: str) -> list[str]:
    return [line for line in log.splitlines() if "layer prefills without a snapshot" in line]


def test_counters_in_metrics_and_at_the_end_of_the_log(
    engine_python: str, model: Callable[[str], str], short_folder: Path
) -> None:
    with serving(engine_python, model("granite"), short_folder) as server:
        assert server.counted("mamba_ops_layer_prefills_total") == 0
        server.generate(prompt(0, 60))
        assert server.counted("mamba_ops_snapshots_removed_total") == 1
        assert server.counted("mamba_ops_layer_prefills_total") == 2  # the model has two Mamba2 layers
        server.generate(prompt(1, 200))  # two steps
        assert server.counted("mamba_ops_layer_prefills_total") == 6
        assert server.counted('mamba_ops_declined_total{reason="not_built"}') == 0
        assert server.counted("vllm:request_prefill_time_seconds_count") is None  # has labels: the page is vLLM's own
        assert "vllm:request_prefill_time_seconds_count{" in server.get("/metrics")
        log = server.interrupt()
    (line,) = end_lines(log)
    assert "6 layer prefills without a snapshot" in line
    assert "snapshots removed from them: 1" in line
    assert not [path for path in short_folder.iterdir() if path.name.startswith("mamba_ops_counts_")]


def test_several_api_servers_have_the_counters_in_the_log(
    engine_python: str, model: Callable[[str], str], short_folder: Path
) -> None:
    arguments = ("--api-server-count", "2")
    with serving(engine_python, model("granite"), short_folder, *arguments) as server:
        server.generate(prompt(0, 60))
        assert server.counted("mamba_ops_layer_prefills_total") is None
        log = server.interrupt()
    (line,) = end_lines(log)
    assert "2 layer prefills without a snapshot" in line
