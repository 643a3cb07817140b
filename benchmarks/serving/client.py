"""Requests to a server: token ids in, token ids out, so that no tokenizer is needed."""

from __future__ import annotations

import http.client
import json
import threading
import time
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families

PATH = "/inference/v1/generate"


class Wait(NamedTuple):
    """Seconds until the first token and until the last."""

    first: float
    last: float


class Client:
    """Speaks to the server of one port, from any number of threads, each over a connection of its own."""

    def __init__(self, port: int, timeout: float = 600) -> None:
        self._port, self._timeout = port, timeout
        self._local = threading.local()

    def send(self, body: bytes) -> Wait:
        """Send a request made by `encode` and wait for the whole answer.

        Raises:
            RuntimeError: the server answered with an error.
        """
        start = time.perf_counter()
        response = self._respond("POST", PATH, body)
        head = response.readline()  # of a stream: the first token; otherwise all
        first = time.perf_counter() - start
        rest = response.read()
        last = time.perf_counter() - start
        if response.status != 200 or b"error" in head[:20]:
            raise RuntimeError(f"the server answered {response.status}: {(head + rest)[:1000]!r}")
        return Wait(first, last)

    def healthy(self) -> bool:
        """Whether the server is up."""
        try:
            response = self._respond("GET", "/health")
            response.read()
        except (http.client.HTTPException, OSError):
            return False
        return response.status == 200

    def metrics(self) -> dict[str, float]:
        """What the server counts, by the name of the sample, summed over labels."""
        response = self._respond("GET", "/metrics")
        return parse_metrics(response.read().decode())

    def _respond(self, method: str, path: str, body: bytes | None = None) -> http.client.HTTPResponse:
        connection = getattr(self._local, "connection", None)
        headers = {"Content-Type": "application/json"} if body else {}
        for retry in (connection is not None, False):
            if connection is None:
                connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=self._timeout)
            self._local.connection = connection
            try:
                connection.request(method, path, body, headers)
                return connection.getresponse()
            except (http.client.HTTPException, OSError):
                connection.close()
                connection = self._local.connection = None
                if not retry:  # a kept connection may have been closed by the server; a new one has no excuse
                    raise
        raise AssertionError


def encode(tokens: list[int], max_tokens: int, stream: bool = False) -> bytes:
    """A request for so many tokens after a prompt, made before the clock starts."""
    sampling = {"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True, "detokenize": False}
    return json.dumps({"token_ids": tokens, "sampling_params": sampling, "stream": stream}).encode()


def parse_metrics(text: str) -> dict[str, float]:
    """Samples in the Prometheus text format by name, summed over their labels."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found
