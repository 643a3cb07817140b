"""GPU times from CUDA graphs: host time stays out, and two versions are measured turn by turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

Work = Callable[[], object]

L2_BYTES = 64 * 2**20


class Graph:
    """Pieces of work recorded one after the other, replayed at once.

    With pieces that touch more memory in all than the L2 holds, each piece finds it cold; with one piece recorded
    many times it finds it warm.
    """

    def __init__(self, pieces: Sequence[Work], repeats: int = 1) -> None:
        self._launches = len(pieces) * repeats
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for piece in pieces:
                piece()
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            for _ in range(repeats):
                for piece in pieces:
                    piece()
        self._start = torch.cuda.Event(enable_timing=True)
        self._end = torch.cuda.Event(enable_timing=True)

    def microseconds(self) -> float:
        """Time of one piece in one replay."""
        self._start.record()
        self._graph.replay()
        self._end.record()
        self._end.synchronize()
        return float(self._start.elapsed_time(self._end)) * 1e3 / self._launches


def interleave(stock: Graph, ours: Graph, rounds: int = 15) -> tuple[list[float], list[float]]:
    """Times in the order stock, ours, ours, stock, as many rounds as asked, after one that does not count."""
    times: tuple[list[float], list[float]] = ([], [])
    for round_number in range(rounds + 1):
        for which, graph in ((0, stock), (1, ours), (1, ours), (0, stock)):
            elapsed = graph.microseconds()
            if round_number:
                times[which].append(elapsed)
    return times


def memory(work: Work) -> tuple[int, int]:
    """Bytes that `work` holds at its peak beyond what was there before, and bytes that it allocates in all."""
    work()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, allocated = torch.cuda.memory_allocated(), _allocated()
    work()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before, _allocated() - allocated


def _allocated() -> int:
    return int(torch.cuda.memory_stats()["allocated_bytes.all.allocated"])
