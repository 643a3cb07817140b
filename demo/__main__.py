"""Run the demo: `python -m demo`. The exit status is 1 if a copy of the state is left or a bit differs."""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path
from typing import NoReturn

import torch
from tqdm import tqdm

from demo.continuation import Continuation, make_layer
from demo.measure import ROUNDS, Comparison, largest_difference, run_compiled, run_eager, time_interleaved
from demo.report import make_console, make_table, show_changes

FOLDER = Path("build") / "demo"
CACHE_DTYPES = {"BF16": torch.bfloat16, "FP16": torch.float16, "FP32": torch.float32}
STEPS = 5 + ROUNDS


def main() -> int:
    """Measure with each dtype of cache, and print what came of it."""
    start = time.monotonic()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shutil.rmtree(FOLDER, ignore_errors=True)
    comparisons: list[Comparison] = []
    with torch.inference_mode(), tqdm(total=STEPS * len(CACHE_DTYPES), unit="step", disable=None) as bar:
        for name, dtype in CACHE_DTYPES.items():
            comparisons += compare(name, dtype, device, bar)

    console = make_console()
    console.print(make_table(comparisons))
    in_eager, in_graph = comparisons[:2]
    console.print(f"\n[bold]What the pass changed in the compiled graph ({in_graph.cache} cache)[/]")
    show_changes(console, in_graph.reference.graph, in_graph.run.graph)
    console.print("\n[bold]What the pass reports[/]")
    console.print(in_graph.run.report, markup=False)
    console.print(f"\nAll graphs, decompiled by depyf: {FOLDER}/*/before and {FOLDER}/*/after")
    rounding = largest_difference(in_eager.run.result.output, in_graph.run.result.output)
    console.print(f"Largest difference between the eager and the compiled output: {rounding:g}")
    for item in comparisons:
        for problem in (*item.reference.problems, *item.run.problems):
            console.print(problem, style="bold red", markup=False)
    holds = all(comparison.holds for comparison in comparisons)
    verdict = "[bold green]no copy is left, no bit differs" if holds else "[bold red]not the same: see the red rows"
    console.print(f"{verdict}[/] ({device.type}, PyTorch {torch.__version__}, {time.monotonic() - start:.0f} s)")
    return 0 if holds else 1


def compare(name: str, state_dtype: torch.dtype, device: torch.device, bar: tqdm[NoReturn]) -> list[Comparison]:
    """Continue one sequence with a cache of this dtype in four ways, and compare them in pairs."""
    folder = FOLDER / name.lower()
    torch._dynamo.reset()

    def done() -> None:
        bar.update()

    bar.set_description(f"{name} cache: prefill")
    case = Continuation.prefill(make_layer(device), state_dtype)
    done()
    bar.set_description(f"{name} cache: eager")
    eager = run_eager(case, device, snapshot=True)
    done()
    in_place = run_eager(case, device, snapshot=False)
    done()
    bar.set_description(f"{name} cache: compiling")
    stock = run_compiled(case, device, folder / "before", with_pass=False)
    done()
    passed = run_compiled(case, device, folder / "after", with_pass=True)
    done()
    bar.set_description(f"{name} cache: timing")
    time_interleaved(case, [eager, in_place, stock, passed], done)
    return [Comparison(name, eager, in_place), Comparison(name, stock, passed)]


if __name__ == "__main__":
    sys.exit(main())
