"""What is asked of a server, and what is measured while it answers."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from benchmarks.serving.client import Client, Wait, encode
from benchmarks.serving.ratios import Block

IN_FLIGHT = 32
# Lengths of prompts in a mixed wave; every third request continues the cached prefix instead.
MIXED_LENGTHS = (32, 64, 200, 800, 3000)
PREFILL = "vllm:request_prefill_time_seconds"
HITS = "vllm:prefix_cache_hits_total"

Samples = dict[tuple[str, str], Block]
UNITS = {"ttft_p50": "ms", "ttft_p95": "ms", "throughput": "requests/s", "wall": "ms", "bytes": "B"}
DECODE_UNIT = "tokens/s"


@dataclass(frozen=True)
class Sizes:
    """How much is asked in one block.

    Attributes:
        cached: tokens that every continuation shares. new: tokens of each that are new.
        vocabulary: token ids are below it. longest: no prompt is longer.
        spread: continuations one after the other. bursts: of 32 continuations at once.
        waves: of `mixed` long and short requests, 32 in flight, with `mixed_out` tokens out.
        decodes: waves of 32 short prompts with `decode_out` tokens out.
    """

    cached: int = 4224
    new: int = 32
    vocabulary: int = 100000
    longest: int = 8192
    spread: int = 60
    bursts: int = 10
    waves: int = 3
    mixed: int = 64
    mixed_out: int = 64
    decodes: int = 0
    decode_out: int = 256


class Prompts:
    """The prompts of a block: the same for every server, and after the shared prefix new to it.

    Args:
        sizes: of the workloads.
        block: its number on its server; 0 is the warm-up.
    """

    def __init__(self, sizes: Sizes, block: int) -> None:
        self._sizes = sizes
        self._prefix = self._tokens(random.Random(0), sizes.cached)
        self._rng = random.Random(block + 1)

    def continuation(self) -> list[int]:
        return self._prefix + self._tokens(self._rng, self._sizes.new)

    def burst(self) -> list[list[int]]:
        return [self.continuation() for _ in range(IN_FLIGHT)]

    def mixed(self) -> list[list[int]]:
        return [self._mixed(number) for number in range(self._sizes.mixed)]

    def short(self) -> list[list[int]]:
        return [self._tokens(self._rng, self._sizes.new) for _ in range(IN_FLIGHT)]

    def _mixed(self, number: int) -> list[int]:
        if number % 3 == 0:
            return self.continuation()
        return self._tokens(self._rng, min(self._rng.choice(MIXED_LENGTHS), self._sizes.longest))

    def _tokens(self, rng: random.Random, length: int) -> list[int]:
        return rng.choices(range(1, self._sizes.vocabulary), k=length)


def warm_up(client: Client, sizes: Sizes, pool: ThreadPoolExecutor) -> int:
    """A little of everything, so that the prefix is cached and memory has reached its peak.

    Returns:
        Tokens of a continuation that the server found in its prefix cache.
    """
    prompts = Prompts(sizes, 0)
    for _ in range(3):
        client.send(encode(prompts.continuation(), 1))
    for _ in range(2):
        _at_once(client, pool, (encode(tokens, 1) for tokens in prompts.burst()))
    _at_once(client, pool, (encode(tokens, sizes.mixed_out, stream=True) for tokens in prompts.mixed()))
    before = client.metrics().get(HITS, 0.0)
    client.send(encode(prompts.continuation(), 1))
    return int(_counted(client, PREFILL + "_count", 0.0)[HITS] - before)


def measure(
    client: Client, sizes: Sizes, block: int, pool: ThreadPoolExecutor, progress: Callable[[], object]
) -> Samples:
    """One block of all workloads, in the order of their cases; milliseconds, requests or tokens per second.

    Args:
        client: of the server. sizes: of the workloads. block: its number on this server, from 1.
        pool: of 32 threads or more. progress: called after each request, burst or wave.
    """
    prompts = Prompts(sizes, block)
    samples: Samples = {}
    for wait, step in _spread(client, prompts, sizes.spread, progress):
        for metric in ("ttft_p50", "ttft_p95"):
            samples.setdefault(("spread", metric), []).append([1e3 * wait])
        samples.setdefault(("step/1x32", "wall"), []).append([1e3 * step])
    waves: list[tuple[str, int, Callable[[], list[list[int]]], int]] = [
        ("burst32", sizes.bursts, prompts.burst, 1),
        ("mixed", sizes.waves, prompts.mixed, sizes.mixed_out),
        ("decode", sizes.decodes, prompts.short, sizes.decode_out),
    ]
    for case, count, make, max_tokens in waves:
        for _ in range(count):
            bodies = [encode(tokens, max_tokens, stream=case == "mixed") for tokens in make()]
            start = time.perf_counter()
            waits = _at_once(client, pool, bodies)
            done = len(waits) * (max_tokens if case == "decode" else 1)
            samples.setdefault((case, "throughput"), []).append([done / (time.perf_counter() - start)])
            if case != "decode":
                for metric in ("ttft_p50", "ttft_p95"):
                    samples.setdefault((case, metric), []).append([1e3 * wait.first for wait in waits])
            progress()
    return samples


def amount(sizes: Sizes) -> int:
    """How often `measure` reports progress."""
    return sizes.spread + sizes.bursts + sizes.waves + sizes.decodes


def _spread(
    client: Client, prompts: Prompts, count: int, progress: Callable[[], object]
) -> Iterable[tuple[float, float]]:
    """Seconds until the token as the client sees it, and of the engine's step: from scheduled to the first token."""
    before = client.metrics()
    for _ in range(count):
        wait = client.send(encode(prompts.continuation(), 1))
        after = _counted(client, PREFILL + "_count", before.get(PREFILL + "_count", 0.0))
        yield wait.first, after[PREFILL + "_sum"] - before.get(PREFILL + "_sum", 0.0)
        before = after
        time.sleep(0.02)
        progress()


def _counted(client: Client, name: str, before: float) -> dict[str, float]:
    """Metrics once one more request is counted, which may happen just after its answer."""
    for _ in range(1000):
        metrics = client.metrics()
        if metrics.get(name, 0.0) > before:
            return metrics
        time.sleep(0.005)
    raise RuntimeError(f"the server does not count {name}; are its statistics turned off?")


def _at_once(client: Client, pool: ThreadPoolExecutor, bodies: Iterable[bytes]) -> list[Wait]:
    return list(pool.map(client.send, bodies))
