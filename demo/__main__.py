"""Run the demo: `python -m demo`. The exit status is 1 if a copy of the state is left or a bit differs."""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path
from typing import NoReturn

import torch
from tqdm import tqdm

from demo.continuation import Continuation
from demo.measure import ROUNDS, Comparison, largest_difference, run_compiled, run_eager, time_interleaved
from demo.report import make_console, make_table, show_changes
from inductor_passes.inspection.folder import DEPYF, WITH_PASS, WITHOUT_PASS, Inspected, write
from inductor_passes.inspection.granite_layer import make_layer

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
    console.print(f"\nThe graphs drawn, all code, and what depyf decompiled: {FOLDER}/*/report.html")
    rounding = largest_difference(in_eager.run.result.output, in_graph.run.result.output)
    console.print(f"Largest difference between the eager and the compiled output: {rounding:g}")
    for item in comparisons:
        for problem in (*item.reference.recording.problems, *item.run.recording.problems):
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
    stock = run_compiled(case, device, folder / WITHOUT_PASS / DEPYF, with_pass=False)
    done()
    passed = run_compiled(case, device, folder / WITH_PASS / DEPYF, with_pass=True)
    done()
    bar.set_description(f"{name} cache: timing")
    time_interleaved(case, [eager, in_place, stock, passed], done)
    comparison = Comparison(name, stock, passed)
    outcome = "No bit differs" if comparison.holds else "The runs are not the same, or a copy of the state is left"
    title = f"the demo's layer with a cache in {name}"
    write(folder, Inspected(title, passed.recording, stock.recording.codes, outcome))
    return [Comparison(name, eager, in_place), comparison]


if __name__ == "__main__":
    sys.exit(main())
