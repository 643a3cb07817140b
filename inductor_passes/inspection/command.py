"""`python -m inductor_passes inspect`: run a program without and with the pass, compare, and show what the pass did."""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import torch

from inductor_passes.inspection.comparison import Comparison, compare
from inductor_passes.inspection.folder import PAGE, TABLE, WITH_PASS, WITHOUT_PASS, Inspected, clear, write
from inductor_passes.inspection.running import BAD_TARGET, Run
from inductor_passes.inspection.target import GRANITE_LAYER, TargetError, check

SUMMARY = "run a program without and with the pass, and show what the pass did to its graphs"
_EPILOG = """\
The folder gets report.html, table.txt, the graphs, the generated code and depyf's decompiled bytecode.
Exit status: 0 if both runs leave the same, 1 if they do not or the program fails, 2 if there is nothing to run.
"""


def main(arguments: Sequence[str]) -> int:
    """Run the command; return the exit status."""
    parser = _parser()
    own, rest = _split(list(arguments))
    options = parser.parse_args(own)
    if options.vllm and (options.target or rest):
        parser.error("--vllm MODEL and TARGET exclude each other")
    target, folder = options.target or GRANITE_LAYER, Path(options.out)
    try:
        check(target)
        folder.mkdir(parents=True, exist_ok=True)
        clear(folder)
    except TargetError as error:
        parser.error(str(error))
    except OSError as error:
        parser.error(f"--out {folder}: {error.strerror}")
    if options.vllm:
        return _inspect_vllm(options.vllm, folder, parser)
    return _inspect_target(target, rest, folder)


def _inspect_target(target: str, arguments: list[str], folder: Path) -> int:
    title = "the Granite-4.0-h-micro layer" if target == GRANITE_LAYER else target
    runs: dict[str, Run] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for mode in (WITHOUT_PASS, WITH_PASS):
            print(f"Running {title} {mode.replace('_', ' the ')} ...", file=sys.stderr, flush=True)
            result = Path(scratch) / mode
            command = [sys.executable, "-m", "inductor_passes.inspection.running", mode, str(folder), str(result)]
            status = subprocess.run([*command, target, *arguments]).returncode
            if status == BAD_TARGET and not result.exists():
                return BAD_TARGET
            if result.exists():
                runs[mode] = torch.load(result, weights_only=False)
            if status != 0:
                print(f"error: {title} failed {mode.replace('_', ' the ')}: exit status {status}", file=sys.stderr)
                if mode == WITHOUT_PASS or mode not in runs:
                    return 1
                break
    without, with_pass = runs[WITHOUT_PASS], runs[WITH_PASS]
    comparison: Comparison | str = compare(without.outcome, with_pass.outcome)
    if status != 0:
        comparison = "The program failed with the pass and not without it"
    problems = with_pass.recording.problems
    problems += [problem for problem in without.recording.problems if problem not in problems]  # most are in both
    inspected = Inspected(
        title,
        with_pass.recording,
        without.recording.codes,
        comparison,
        (without.outcome.kernels, with_pass.outcome.kernels),
    )
    show(folder, inspected)
    return 0 if isinstance(comparison, Comparison) and not comparison.differences else 1


def show(folder: Path, inspected: Inspected) -> None:
    """Write the folder, and the table to the terminal."""
    write(folder, inspected)
    try:
        from rich.console import Console

        from inductor_passes.inspection.table import WIDTH, renderable

        console = Console(highlight=False)
        if not console.is_terminal:
            console = Console(highlight=False, width=WIDTH)
        console.print(renderable(inspected))
    except ImportError as error:
        print(f"{error}: the table needs `pip install mamba-ops[inspect]`", file=sys.stderr)
        for change in inspected.recording.changes:
            print(change.report)
        print(f"{inspected.comparison}.", *inspected.recording.problems, sep="\n")
    page = folder / PAGE
    print(f"Report: {page}" if page.exists() else f"Folder: {folder}")


def _inspect_vllm(model: str, folder: Path, parser: argparse.ArgumentParser) -> int:
    if importlib.util.find_spec("vllm") is None:
        parser.error("--vllm: vLLM is not installed for this Python")
    command = [sys.executable, "-m", "inductor_passes.vllm.inspecting", model, str(folder)]
    status = subprocess.run(command).returncode
    if status != 0 and not (folder / TABLE).exists():
        print(f"error: vLLM's engine failed on {model}; what it said is above", file=sys.stderr)
    return status


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """What is ours, and what comes after `--`, which is the program's."""
    where = arguments.index("--") if "--" in arguments else len(arguments)
    return arguments[:where], arguments[where + 1 :]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}\n{self.format_usage()}")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m inductor_passes inspect",
        description=f"{SUMMARY[0].upper()}{SUMMARY[1:]}.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s [--out DIR] [--vllm MODEL | TARGET [-- ARGUMENT ...]]",
    )
    parser.add_argument(
        "target",
        nargs="?",
        metavar="TARGET",
        help="FILE.py, or MODULE:FUNCTION for a function without arguments; by default a Mamba2 layer in the shape of "
        "Granite-4.0-h-micro. What follows -- is in the file's sys.argv",
    )
    parser.add_argument("--out", metavar="DIR", default="inspection", help="the folder; default: %(default)s")
    parser.add_argument(
        "--vllm", metavar="MODEL", help="start vLLM's offline engine with the plugin and random weights instead"
    )
    return parser
