"""Rows of a soak from what both engines have done so far."""

from __future__ import annotations

from collections import Counter

from benchmarks.engine.comparison import held, same_answer
from benchmarks.engine.pair import Side
from benchmarks.results import Row

WARM_UP = 2  # parts of the run after which memory should stand still


def rows(ours: Side, stock: Side, tolerance: float) -> list[Row]:
    """A row for each case, as soon as both engines have answered something.

    Args:
        ours: what `benchmarks/engine/soak_side.py` wrote with the plugin. stock: likewise without.
        tolerance: largest difference of log-probabilities that counts as equal.
    """
    if "answers" not in ours or "answers" not in stock:
        return []
    pairs = list(zip(ours["answers"], stock["answers"], strict=False))
    different = [number for number, (a, b) in enumerate(pairs) if not same_answer(a, b, tolerance)]
    note = f"tokens and log-probabilities; sleeps {ours['sleeps']}, stock {stock['sleeps']}{held(ours, stock)}"
    note += f"; first to differ: {different[:5]}" if different else ""
    made = [Row("responses", "mismatches", "1", None, float(len(different)), None, None, None, len(pairs), note)]
    n = len(ours["answers"])
    made.append(_both("preemptions", "count", "1", stock["preemptions"], ours["preemptions"], n))
    aborted = [sum(side["aborted"].values()) for side in (stock, ours)]
    when = ", ".join(f"{kind} {count}" for kind, count in sorted(ours["aborted"].items()))
    made.append(_both("aborts", "count", "1", *aborted, n, when))
    compiled = [Counter(side["compiles"]) for side in (stock, ours)]
    both = compiled[0] & compiled[1]
    alone = [reports - both for reports in compiled]
    made.append(_both("compiles", "count", "1", *(each.total() for each in alone), n, _compiled(ours, alone[1], both)))
    kind = "allocated" if "allocated" in ours["memory"][0] else "resident"
    note = f"{kind}, largest after a tenth of the run less that after tenth {WARM_UP}"
    grown = [_growth([each[kind] for each in side["memory"]]) for side in (stock, ours)]
    made.append(_both("memory", "grown", "B", *grown, len(ours["memory"]), note))
    return made


def _growth(series: list[int]) -> int:
    return max(series[WARM_UP - 1 :], default=0) - series[WARM_UP - 1] if len(series) >= WARM_UP else 0


def _compiled(ours: Side, alone: Counter[str], both: Counter[str]) -> str:
    monitor = "reports of vLLM's JIT monitor" if all(ours["monitored"]) else "vLLM's JIT monitor is not active here"
    taken = sum(worker["layer_prefills"] + worker["layer_checkpoints"] for worker in ours["served"])
    declined: Counter[str] = sum((Counter(worker["declined"]) for worker in ours["served"]), Counter())
    first = f"{monitor} that the other engine has not, layer prefills taken {taken}, declined {dict(declined)}"
    return "; ".join([first, *alone.elements(), f"both engines: {', '.join(both.elements()) or 'none'}"])


def _both(case: str, metric: str, unit: str, stock: int, ours: int, n: int, note: str = "") -> Row:
    return Row(case, metric, unit, float(stock), float(ours), None, None, None, n, note)
