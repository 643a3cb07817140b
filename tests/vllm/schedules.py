"""Schedules of requests for `engine.py`."""

from __future__ import annotations

import random
from typing import Any

VOCABULARY = 512
Event = list[Any]


def prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(1, VOCABULARY), k=length)


def add(step: int, name: str, tokens: list[int], max_tokens: int = 6, *adapter: str) -> Event:
    return [step, "add", name, tokens, max_tokens, *adapter]


def at_once(lengths: tuple[int, ...], max_tokens: int = 6) -> list[Event]:
    return [add(0, f"r{i}", prompt(i, length), max_tokens) for i, length in enumerate(lengths)]


def around_edges(chunk: int, budget: int) -> list[Event]:
    """Lengths around chunks and around what one step takes, one request after the other and mixed with decodes."""
    edges = (chunk, 2 * chunk, budget, 2 * budget)
    lengths = [1, 2, 3, 4, *(edge + d for edge in edges for d in (-1, 0, 1, 2))]
    return [add(3 * i, f"r{i}", prompt(i, length), 5) for i, length in enumerate(lengths)]


def shared_prefixes(
    cuts: tuple[int, ...] = (255, 256, 257, 300, 384, 385, 500), tails: tuple[int, ...] = (1, 20, 130), apart: int = 4
) -> list[Event]:
    """Prompts that begin alike for so many tokens, and go on for so many of their own; `apart`: steps between two."""
    base = prompt(1000, max(500, *cuts))
    prompts = [base[:cut] + prompt(cut, tail) for cut in cuts for tail in tails]
    return [add(apart * i, f"r{i}", tokens, 4) for i, tokens in enumerate(prompts)]


def aborted_in_mid_prefill() -> list[Event]:
    """Two long prompts are given up after a part of them; their slots go to others, while one goes on decoding."""
    long = [add(0, "decodes", prompt(1, 10), 30), add(1, "gone", prompt(2, 500)), add(1, "gone too", prompt(3, 500))]
    aborts: list[Event] = [[3, "abort", "gone"], [4, "abort", "gone too"]]
    return [*long, *aborts, *(add(4 + i, f"next{i}", prompt(4 + i, 70 * i + 1)) for i in range(4))]


def random_schedule(seed: int) -> list[Event]:
    """A few requests at random times, some of which are aborted, some of which begin like another."""
    rng = random.Random(seed)
    events: list[Event] = []
    for number in range(rng.randint(1, 5)):
        tokens = prompt(rng.randrange(4), rng.choice((0, 0, 40, 128, 200))) + prompt(seed + number, rng.randint(1, 260))
        step = rng.randint(0, 6)
        events.append(add(step, f"r{number}", tokens, rng.randint(1, 6)))
        if rng.random() < 0.2:
            events.append([step + rng.randint(1, 4), "abort", f"r{number}"])
    return events
