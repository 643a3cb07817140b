"""Requests for an engine, the same for every engine that has the same cache."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

AT_ONCE = 32
BATCHES = (32, 1, 2, 17)


class Arrival(NamedTuple):
    """A request that comes in a step of its wave."""

    step: int
    prompt: list[int]
    max_tokens: int


# Requests that are answered before the next wave begins.
Wave = list[Arrival]


@dataclass(frozen=True)
class Limits:
    """What the engine can take.

    Attributes:
        vocabulary: token ids are below it. longest: tokens of a sequence, prompt and answer.
        budget: tokens of a step. block: tokens of a cache block. blocks: in the cache, of which vLLM keeps one empty.
        groups: of layers that share their blocks. One is attention's, with a block for every `block` tokens of a
            sequence; each other one holds Mamba2 states, with one block for a whole sequence.
    """

    vocabulary: int
    longest: int
    budget: int
    block: int
    blocks: int
    groups: int


def scenarios(limits: Limits, responses: int) -> dict[str, list[Wave]]:
    """About so many requests, by kind.

    `short`: continuations of a cached prefix in batches of 1, 2, 17 and 32; `chunked`: prompts longer than a step, one
    batch after the other; `mixed`: long and short ones that come while others decode; `preempted`: more than the cache
    holds once their answers have grown over the end of a block.
    """
    made = _Maker(limits)
    return {
        "short": list(_filled(made.short(), responses * 4 // 10)),
        "chunked": list(_filled(made.chunked(), responses * 2 // 10)),
        "mixed": list(_filled(made.mixed(), responses * 3 // 10)),
        "preempted": list(itertools.islice(made.preempted(), 3)),
    }


def continuations(limits: Limits, count: int) -> list[Wave]:
    """So many times one sequence that continues a prefix, with 32 new tokens and one out."""
    return list(itertools.islice(_Maker(limits).single(), count))


def _filled(waves: Iterator[Wave], count: int) -> Iterator[Wave]:
    done = 0
    while done < count:
        wave = next(waves)
        done += len(wave)
        yield wave


class _Maker:
    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._rng = random.Random(1)
        blocks = max(1, min(8, limits.longest // (2 * limits.block)))
        self.prefix = self._tokens(min(blocks * limits.block, limits.longest // 2))

    def short(self) -> Iterator[Wave]:
        yield [Arrival(0, self.prefix + self._tokens(1), 1)]  # so that the prefix is cached
        for number in range(10**9):
            size = BATCHES[number % len(BATCHES)]
            lengths = [32] * size if number % 8 < 4 else self._rng.choices((1, 5, 31, 33, 64, 129, 255), k=size)
            yield [Arrival(0, self._fitting(self.prefix + self._tokens(n), 4), (1, 4)[number % 2]) for n in lengths]

    def single(self) -> Iterator[Wave]:
        while True:
            yield [Arrival(0, self._fitting(self.prefix + self._tokens(32), 1), 1)]

    def chunked(self) -> Iterator[Wave]:
        budget = self._limits.budget
        lengths = (budget - 1, budget, budget + 1, 2 * budget, 2 * budget + 33, budget + budget // 2)
        while True:
            wave = []
            for length in self._rng.choices(lengths, k=self._rng.choice((1, 3, 8))):
                start = self.prefix if self._rng.random() < 0.5 else []
                wave.append(Arrival(0, self._fitting(start + self._tokens(length), 4), 4))
            yield wave

    def mixed(self) -> Iterator[Wave]:
        budget = self._limits.budget
        while True:
            wave = []
            for number in range(AT_ONCE):
                length = self._rng.choice((1, 17, 64, 200, budget // 2, budget + 100))
                start = self.prefix if self._rng.random() < 0.5 else []
                wave.append(Arrival(number // 2, self._fitting(start + self._tokens(length), 16), 16))
            yield wave

    def preempted(self) -> Iterator[Wave]:
        """Prompts that fill the cache just when all of them are computed; then all need another block."""
        limits = self._limits
        states, most = limits.groups - 1, max(1, limits.longest * 3 // 4 // limits.block)
        fits = min(most, max(1, (limits.blocks - 1) // AT_ONCE - states))
        for blocks in itertools.cycle((fits, min(most, 2 * fits))):
            running = min(AT_ONCE, max(1, (limits.blocks - 1) // (blocks + states)))
            # A request gets a token with each step. One that comes first must not be done, nor grow, before the last
            # one's prompt is computed. A part of a prompt ends with a block, so a step may be but half full.
            steps = 8 + 2 * running * blocks * limits.block // limits.budget
            growing = min(steps, limits.block // 2)
            lengths = [max(1, blocks * limits.block - growing - number % 4) for number in range(AT_ONCE)]
            answers = [min(growing + 24, limits.longest - length) for length in lengths]
            yield [Arrival(0, self._tokens(length), n) for length, n in zip(lengths, answers, strict=True)]

    def _fitting(self, tokens: list[int], answer: int) -> list[int]:
        return tokens[-(self._limits.longest - answer) :]

    def _tokens(self, count: int) -> list[int]:
        return self._rng.choices(range(1, self._limits.vocabulary), k=count)
