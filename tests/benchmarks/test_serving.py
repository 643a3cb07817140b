"""The serving benchmark's prompts and client; the client speaks to a small HTTP server of the standard library."""

from __future__ import annotations

import http.server
import json
import threading
import time
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from benchmarks.serve import turns
from benchmarks.serving.client import Client, encode, parse_metrics
from benchmarks.serving.workloads import Prompts, Sizes

SIZES = Sizes(cached=50, new=4, vocabulary=100, longest=40, mixed=9)


def all_prompts(block: int) -> list[list[int]]:
    prompts = Prompts(SIZES, block)
    return [prompts.continuation(), *prompts.burst(), *prompts.mixed(), *prompts.short()]


def test_every_server_gets_the_same_prompts_in_a_block() -> None:
    assert all_prompts(1) == all_prompts(1)


def test_tails_are_new_in_every_block_and_the_prefix_is_shared() -> None:
    first, second = (Prompts(SIZES, block).burst() for block in (1, 2))
    prefix = first[0][:50]
    assert all(prompt[:50] == prefix for prompt in first + second)
    tails = {tuple(prompt[50:]) for prompt in first + second}
    assert len(tails) == 64
    assert {len(tail) for tail in tails} == {4}


def test_prompts_are_within_the_model() -> None:
    for prompt in all_prompts(0):
        assert 1 <= len(prompt) <= 54
        assert all(1 <= token < 100 for token in prompt)


def test_a_third_of_the_mixed_ones_continue() -> None:
    prompts = Prompts(SIZES, 1)
    prefix = prompts.continuation()[:50]
    assert sum(prompt[:50] == prefix for prompt in prompts.mixed()) == 3


def test_request_asks_for_all_tokens() -> None:
    body = json.loads(encode([1, 2], 7, stream=True))
    assert body["token_ids"] == [1, 2]
    assert body["stream"] is True
    assert body["sampling_params"]["max_tokens"] == 7
    assert body["sampling_params"]["ignore_eos"] is True


def test_metrics_are_summed_over_labels() -> None:
    registry = CollectorRegistry()
    counter = Counter("a", "a", ["engine"], registry=registry)
    counter.labels("0").inc(2)
    counter.labels("1").inc(3)
    histogram = Histogram("vllm:request_prefill_time_seconds", "b", registry=registry)
    histogram.observe(0.25)
    histogram.observe(0.5)
    found = parse_metrics(generate_latest(registry).decode())
    assert found["a_total"] == 5
    assert found["vllm:request_prefill_time_seconds_sum"] == 0.75
    assert found["vllm:request_prefill_time_seconds_count"] == 2


def test_order_of_servers() -> None:
    stock, plugin = False, True
    assert list(turns(6, False)) == [[stock], [plugin], [plugin], [stock], [stock], [plugin]]
    assert list(turns(4, True)) == [[stock, plugin], [plugin, stock]]


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None: ...

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_POST(self) -> None:
        tokens = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["token_ids"]
        self.send_response(400 if tokens == [0] else 200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for part in (b'data: {"a": 1}\n\n', b"data: [DONE]\n\n"):
            self.wfile.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
            self.wfile.flush()
            time.sleep(0.1)
        self.wfile.write(b"0\r\n\r\n")
        if tokens == [1]:
            self.close_connection = True


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield Client(server.server_address[1])
        server.shutdown()


def test_first_token_of_a_stream_is_before_the_last(client: Client) -> None:
    wait = client.send(encode([5], 2, stream=True))
    assert 0 < wait.first < wait.last - 0.05


def test_connection_that_the_server_closed_is_opened_again(client: Client) -> None:
    for _ in range(3):
        client.send(encode([1], 2, stream=True))


def test_errors_are_raised(client: Client) -> None:
    with pytest.raises(RuntimeError, match="answered 400"):
        client.send(encode([0], 2))


def test_health(client: Client) -> None:
    assert client.healthy()
    assert not Client(1).healthy()
