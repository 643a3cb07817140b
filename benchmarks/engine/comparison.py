"""Rows from what two engines did, or from what is known of them so far."""

from __future__ import annotations

from typing import Any

from benchmarks.results import Row

Side = dict[str, Any]


def rows(ours: Side, stock: Side, name: str, tolerance: float) -> list[Row]:
    """A row for each case of which enough is known.

    Args:
        ours: what `benchmarks/engine/side.py` wrote with the plugin. stock: likewise without.
        name: of the model, behind each case; empty for none.
        tolerance: largest difference of log-probabilities that counts as equal.
    """
    made = [
        _layers(ours),
        _responses(ours, stock, tolerance),
        _preemptions(ours, stock),
        _graphs(ours, stock),
        _compiles(ours),
        _launches(ours, stock),
    ]
    return [_named(row, name) for row in made if row is not None]


def control_rows(ours: Side, stock: Side, name: str, tolerance: float) -> list[Row]:
    """The row of a control, as soon as enough is known: the responses of two engines without the plugin."""
    row = _responses(ours, stock, tolerance)
    return [_named(row, f"control/{name}" if name else "control")] if row is not None else []


def _layers(ours: Side) -> Row | None:
    if "compared" not in ours:
        return None
    compared = sum(count["verified"] for count in ours["compared"])
    different = sum(count["mismatches"] for count in ours["compared"])
    note = f"layer calls, outputs and cache slots, against vLLM's code on the spot{held(ours)}"
    return _row("layers", different, compared, note)


def _responses(ours: Side, stock: Side, tolerance: float) -> Row | None:
    kinds = [kind for kind in ours.get("answers", {}) if kind in stock.get("answers", {})]
    if not kinds:
        return None
    different = compared = 0
    notes = []
    for kind in kinds:
        pairs = list(zip(ours["answers"][kind], stock["answers"][kind], strict=True))
        differing = [(a, b) for a, b in pairs if not same_answer(a, b, tolerance)]
        compared += len(pairs)
        different += len(differing)
        notes.append(f"{kind} {len(pairs)}" + (f" ({_how_they_differ(differing)})" if differing else ""))
    note = f"tokens and log-probabilities: {', '.join(notes)}{held(ours, stock)}"
    return _row("responses", different, compared, note)


def _how_they_differ(pairs: list[tuple[Any, Any]]) -> str:
    """How many answers differ, how many of them in tokens, and how far apart log-probabilities are.

    Those from the first other token on are of other texts, and say nothing.
    """
    other_tokens, largest = 0, 0.0
    for (tokens, logprobs), (stock_tokens, stock_logprobs) in pairs:
        other_tokens += tokens != stock_tokens
        for token, expected, a, b in zip(tokens, stock_tokens, logprobs, stock_logprobs, strict=False):
            if token != expected:
                break
            largest = max(largest, abs(a - b))
    return f"{len(pairs)} differ, {other_tokens} in tokens, log-probabilities before those by up to {largest:.2g}"


def _preemptions(ours: Side, stock: Side) -> Row | None:
    if "preemptions" not in ours or "preemptions" not in stock:
        return None
    counts = [sum(side["preemptions"].values()) for side in (ours, stock)]
    note = ", ".join(f"{kind} {count}" for kind, count in ours["preemptions"].items() if count)
    served = sum(len(answers) for answers in ours["answers"].values())
    return Row("preemptions", "count", "1", float(counts[1]), float(counts[0]), None, None, None, served, note)


def _graphs(ours: Side, stock: Side) -> Row | None:
    if "graphs" not in ours or "graphs" not in stock:
        return None
    flat = [_flat(side["graphs"]) for side in (ours, stock)]
    names = sorted(flat[0].keys() | flat[1].keys())
    different = [f"{name}: {flat[0].get(name)}, stock {flat[1].get(name)}" for name in names if _differs(name, *flat)]
    captured = [worker["num_cudagraph_captured"] for worker in stock["graphs"]["workers"]]
    note = f"{stock['graphs']['cudagraph_mode']}, stock captures {captured}"
    late = ours.get("captured_while_serving")
    if late:
        different.append("graphs were captured while serving")
    return _row("graphs", len(different), len(names), "; ".join([note, *different]))


def _compiles(ours: Side) -> Row | None:
    if "answers" not in ours:
        return None
    served = sum(len(answers) for answers in ours["answers"].values())
    declined = [count["declined"] for count in ours.get("served", [])]
    note = "reports of vLLM's JIT monitor" if all(ours["monitored"]) else "vLLM's JIT monitor is not active here"
    return _row(
        "compiles", len(ours["compiles"]), served, "; ".join([f"{note}, declined {declined}", *ours["compiles"]])
    )


def _launches(ours: Side, stock: Side) -> Row | None:
    if "profile" not in ours or not ours["gpu"]:  # on a CPU the ops are plain PyTorch, gathers among them
        return None
    calls = sum(worker["calls"] for worker in ours["profile"])
    row = _row(
        "launches", _launched(ours), calls, "copies of states in the layers of a step that continues one sequence"
    )
    if "profile" in stock:
        row.stock = float(_launched(stock))
    row.note += "".join(f"; {worker['launches']}" for worker in ours["profile"] if worker["launches"])
    return row


def failures(made: list[Row]) -> list[str]:
    """What rows show to be wrong, in words; an engine without preemptions has not tried them."""
    wrong = [f"{row.case}: {row.ours:g}" for row in made if row.metric == "mismatches" and row.ours]
    preemptions = [row for row in made if row.case.startswith("preemptions")]
    return wrong + [f"no {row.case}" for row in preemptions if not (row.ours and row.stock)]


def held(*sides: Side) -> str:
    """What a note says where vLLM's tuner was kept from some of its choices."""
    return "; vLLM's sums held to 4 tokens a thread" if any(any(side["dropped"]) for side in sides) else ""


def same_answer(a: Any, b: Any, tolerance: float) -> bool:
    """Equal tokens, and log-probabilities that differ by no more than the tolerance."""
    (tokens, logprobs), (other_tokens, other_logprobs) = a, b
    close = (abs(x - y) <= tolerance for x, y in zip(logprobs, other_logprobs, strict=False))
    return bool(tokens == other_tokens and len(logprobs) == len(other_logprobs) and all(close))


def _launched(side: Side) -> int:
    return sum(sum(worker["launches"].values()) for worker in side["profile"])


def _flat(graphs: dict[str, Any]) -> dict[str, Any]:
    rest = {name: value for name, value in graphs.items() if name != "workers"}
    for rank, worker in enumerate(graphs["workers"]):
        rest |= {f"worker {rank} {name}": value for name, value in worker.items()}
    return rest


def _differs(name: str, ours: dict[str, Any], stock: dict[str, Any]) -> bool:
    return bool(ours.get(name) != stock.get(name))


def _named(row: Row, name: str) -> Row:
    if name:
        row.case = f"{row.case}/{name}"
    return row


def _row(case: str, mismatches: int, n: int, note: str) -> Row:
    return Row(case, "mismatches", "1", None, float(mismatches), None, None, None, n, note)
