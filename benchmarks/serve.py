"""A real server, stock and with the plugin: time to first token, throughput, engine step, start and memory.

    python -m benchmarks.serve MODEL [--rounds 2] [--spread 40] [--bursts 10] [--mixed 48] -- --max-model-len 16384 ...

What follows `--` goes to the server. Servers are started one after the other, stock, plugin, plugin, stock, ... ;
requests are token ids over HTTP, so no tokenizer is needed. Needs an installed plugin (an entry point that vLLM sees).
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from benchmarks.results import Results, compare

Samples = dict[tuple[str, str], list[float]]
UNITS = {"ttft_p50": "ms", "ttft_p95": "ms", "throughput": "requests/s", "wall": "ms", "bytes": "B"}


@dataclass
class Workloads:
    """Prompts, the same for every server but for their tails, which no server has seen.

    Attributes:
        cached: tokens that every continuation shares. new: tokens of each that are new.
        vocabulary: token ids below this. spread, bursts, mixed: how many requests, bursts of 32, requests.
    """

    cached: int
    new: int
    vocabulary: int
    spread: int
    bursts: int
    mixed: int
    rng: random.Random = field(default_factory=lambda: random.Random(0))

    def __post_init__(self) -> None:
        self.prefix = self.tokens(self.cached)

    def tokens(self, length: int) -> list[int]:
        return [self.rng.randrange(1, self.vocabulary) for _ in range(length)]

    def continuation(self) -> list[int]:
        return self.prefix + self.tokens(self.new)


def main() -> None:
    options = parse()
    work = Workloads(options.cached, options.new, options.vocabulary, options.spread, options.bursts, options.mixed)
    samples: dict[bool, Samples] = {False: {}, True: {}}
    order = [False, True, True, False] * options.rounds
    for plugin in order[: options.servers or None]:
        with server(options, plugin) as (port, seconds):
            samples[plugin].setdefault(("startup", "wall"), []).append(seconds * 1e3)
            measure(port, work, samples[plugin])
        last = {" ".join(figure): round(values[-1], 2) for figure, values in samples[plugin].items()}
        print(f"plugin {plugin}: {last}", flush=True)
    results = Results("serve")
    for (case, metric), ours in samples[True].items():
        if samples[False].get((case, metric)):
            results.rows.append(compare(case, metric, UNITS[metric], samples[False][case, metric], ours))
    results.show()
    print(results.write())


@contextlib.contextmanager
def server(options: argparse.Namespace, plugin: bool) -> Iterator[tuple[int, float]]:
    """A running server: its port, and how many seconds it took to start."""
    port = options.port
    command = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        options.model,
        "--port",
        str(port),
    ]
    command += ["--skip-tokenizer-init", "--enable-scale-out", *options.serve]
    environment = {**os.environ, "MAMBA_OPS_VLLM": str(int(plugin))}
    with tempfile.NamedTemporaryFile("w+", suffix=".log", delete=False) as log:
        start = time.perf_counter()
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            while not healthy(port):
                if process.poll() is not None or time.perf_counter() - start > options.start_timeout:
                    log.seek(0)
                    raise RuntimeError(f"the server did not start:\n{log.read()[-6000:]}")
                time.sleep(0.25)
            yield port, time.perf_counter() - start
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
            log.seek(0)
            print("\n".join(line.rstrip() for line in log if "mamba_ops" in line or "JIT" in line), flush=True)


def healthy(port: int) -> bool:
    try:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False


_connections = threading.local()


def request(port: int, tokens: list[int], max_tokens: int) -> float:
    """Send one prompt and wait for all of its answer; seconds."""
    body = {
        "token_ids": tokens,
        "sampling_params": {"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True, "detokenize": False},
        "stream": False,
    }
    if getattr(_connections, "port", None) != port:
        _connections.port, _connections.http = port, http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    start = time.perf_counter()
    text = json.dumps(body)
    try:
        _connections.http.request("POST", "/inference/v1/generate", text, {"Content-Type": "application/json"})
        response = _connections.http.getresponse()
    except (http.client.HTTPException, OSError):  # the server closed an idle connection
        _connections.http.close()
        start = time.perf_counter()
        _connections.http.request("POST", "/inference/v1/generate", text, {"Content-Type": "application/json"})
        response = _connections.http.getresponse()
    answer = response.read()
    if response.status != 200:
        raise RuntimeError(f"{response.status}: {answer[:1000]!r}")
    return time.perf_counter() - start


def measure(port: int, work: Workloads, samples: Samples) -> None:
    """All workloads once."""

    def add(case: str, metric: str, value: float) -> None:
        samples.setdefault((case, metric), []).append(value)

    with ThreadPoolExecutor(32) as pool:
        for _ in range(3):
            request(port, work.continuation(), 1)
        list(pool.map(lambda tokens: request(port, tokens, 1), [work.continuation() for _ in range(32)]))

        waits = []
        for _ in range(work.spread):
            waits.append(request(port, work.continuation(), 1))
            time.sleep(0.03)
        add_percentiles("spread", waits, add)
        add("step/1x32", "wall", sorted(waits)[len(waits) // 2] * 1e3)

        waits, start = [], time.perf_counter()
        for _ in range(work.bursts):
            prompts = [work.continuation() for _ in range(32)]
            waits += pool.map(lambda tokens: request(port, tokens, 1), prompts)
        add("burst32", "throughput", 32 * work.bursts / (time.perf_counter() - start))
        add_percentiles("burst32", waits, add)

        lengths = [work.rng.choice((32, 64, 200, 800, 3000)) for _ in range(work.mixed)]
        prompts = [work.continuation() if i % 3 == 0 else work.tokens(n) for i, n in enumerate(lengths)]
        start = time.perf_counter()
        list(pool.map(lambda tokens: request(port, tokens, 64), prompts))
        add("mixed", "throughput", work.mixed / (time.perf_counter() - start))
    used = gpu_bytes()
    if used:
        add("memory", "bytes", used)


def add_percentiles(case: str, waits: list[float], add: Any) -> None:
    ordered = sorted(waits)
    add(case, "ttft_p50", 1e3 * ordered[len(ordered) // 2])
    add(case, "ttft_p95", 1e3 * ordered[int(len(ordered) * 0.95)])


def gpu_bytes() -> float:
    """Memory in use on the first GPU; 0 without one."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    try:
        return float(subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]) * 2**20
    except (OSError, subprocess.CalledProcessError):
        return 0.0


def parse() -> argparse.Namespace:
    arguments = sys.argv[1:]
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=1, help="of four servers each")
    parser.add_argument("--servers", type=int, default=0, help="stop after so many servers")
    parser.add_argument("--port", type=int, default=8123)
    parser.add_argument("--start-timeout", type=float, default=600)
    parser.add_argument("--cached", type=int, default=4224)
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--vocabulary", type=int, default=100000)
    parser.add_argument("--spread", type=int, default=60)
    parser.add_argument("--bursts", type=int, default=10)
    parser.add_argument("--mixed", type=int, default=64)
    options = parser.parse_args(arguments[:cut])
    options.serve = arguments[cut + 1 :]
    return options


if __name__ == "__main__":
    main()
