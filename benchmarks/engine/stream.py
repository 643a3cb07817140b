"""A random stream of requests, the same for the same seed: what comes when, and what is given up, counts in steps."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from typing import Any

from benchmarks.engine.scenarios import Limits

LONGEST_ANSWER = 24
# What is added to the engine's greedy default, by kind; `seed` and `min_tokens` come with the request.
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 0.8},
    "top_p": {"temperature": 1.0, "top_p": 0.9},
    "top_k": {"temperature": 0.7, "top_k": 20},
    "min_tokens": {"temperature": 1.0},
}


@dataclass(frozen=True)
class Request:
    """One request of a part of the stream.

    Attributes:
        step: of its part, in which it comes. prompt: token ids. priority: a lower one goes first.
        sampling: arguments of vLLM's SamplingParams.
        abort: when it is given up: "waiting" before any step, "prefill" with a part of its prompt computed, "decode"
            after `abort_after` tokens; empty for never.
    """

    step: int
    prompt: list[int]
    priority: int
    sampling: dict[str, Any]
    abort: str = ""
    abort_after: int = 0


def stream(limits: Limits, count: int, parts: int, seed: int) -> list[list[Request]]:
    """So many requests in parts, of which each begins when the one before is done.

    Args:
        limits: of the engine. count: of requests. parts: into which they are split evenly.
        seed: of lengths, prefixes, arrivals, priorities, sampling and aborts.
    """
    maker = _Maker(limits, seed)
    bounds = [count * part // parts for part in range(parts + 1)]
    return [maker.part(end - start) for start, end in itertools.pairwise(bounds)]


class _Maker:
    def __init__(self, limits: Limits, seed: int) -> None:
        self._limits = limits
        self._rng = random.Random(seed)
        longest = limits.longest // 2
        self._prefixes = [self._tokens(self._rng.randint(longest // 4, longest)) for _ in range(6)]

    def part(self, count: int) -> list[Request]:
        made, step = [], 0
        for _ in range(count):
            made.append(self._request(step))
            step += self._rng.choice((0, 0, 0, 0, 0, 1, 2))
        return made

    def _request(self, step: int) -> Request:
        rng = self._rng
        abort = rng.choices(("", "waiting", "prefill", "decode"), (85, 2, 6, 7))[0]
        answer = rng.randint(4, LONGEST_ANSWER)
        prompt = self._prompt(answer, over_several_steps=abort == "prefill")
        return Request(step, prompt, rng.randint(0, 2), self._sampling(answer), abort, rng.randint(1, answer - 1))

    def _prompt(self, answer: int, *, over_several_steps: bool) -> list[int]:
        limits, rng = self._limits, self._rng
        most = limits.longest - answer
        if over_several_steps:
            return self._tokens(min(most, rng.randint(limits.budget + 1, 2 * limits.budget)))
        kind = rng.choices(("short", "prefix", "medium", "long", "edge"), (15, 30, 10, 8, 37))[0]
        if kind == "prefix":  # cut anywhere, so that prompts share blocks and parts of blocks
            prefix = rng.choice(self._prefixes)
            return (prefix[: rng.choice((len(prefix), rng.randint(1, len(prefix))))] + self._own())[:most]
        if kind == "edge":  # the answer grows over the end of a block, for which another has to be found
            blocks = rng.randint(1, max(1, min(3, most // limits.block)))
            return self._tokens(min(most, max(1, blocks * limits.block - rng.randint(0, answer - 1))))
        lengths = {"short": (1, 64), "medium": (65, limits.budget // 2), "long": (limits.budget, 2 * limits.budget)}
        low, high = lengths[kind]
        return self._tokens(min(most, rng.randint(min(low, high), high)))

    def _own(self) -> list[int]:
        return self._tokens(self._rng.choice((1, 5, 31, 32, 33, 64, 129, 255)))

    def _sampling(self, answer: int) -> dict[str, Any]:
        rng = self._rng
        kind = rng.choice(list(SAMPLING))
        made = {"temperature": 0.0, **SAMPLING[kind], "max_tokens": answer, "logprobs": rng.choice((0, 1, 5))}
        if kind != "greedy":
            made["seed"] = rng.randrange(2**31)
        if kind == "min_tokens":  # and so many tokens that end an answer that some do
            stops = range(0, self._limits.vocabulary, max(8, self._limits.vocabulary // 100))
            made |= {"min_tokens": rng.randint(1, answer), "stop_token_ids": list(stops)}
        return made

    def _tokens(self, count: int) -> list[int]:
        return self._rng.choices(range(1, self._limits.vocabulary), k=count)
