"""The demo's answer on the screen: one table, and the lines of the graph that changed."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from demo.graphs import changed_lines
from demo.measure import Comparison, Run
from inductor_passes.inspection.granite_layer import CACHED_TOKENS, NEW_TOKENS

SHOWN_LINES = 24


def make_console() -> Console:
    """A console, as wide as the table needs where no terminal says how wide it is."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(width=110, highlight=False)


def make_table(comparisons: list[Comparison]) -> Table:
    """A row for each run; differences stand in the row of the run that makes no copy."""
    title = f"One layer, one sequence: {CACHED_TOKENS:,} tokens in the cache, {NEW_TOKENS} new ones"
    table = Table(title=title, box=box.SIMPLE_HEAVY)
    table.add_column("cache")
    table.add_column("run", no_wrap=True)
    for heading in ("snapshot\nnodes", "state\ncopied", "max |Δ|\noutput", "max |Δ|\ncaches", "time\n(median)"):
        table.add_column(heading, justify="right")
    cache = ""
    for comparison in comparisons:
        if comparison.cache != cache:
            table.add_section()
        cells = _cells(comparison.reference, "", "")
        table.add_row("" if comparison.cache == cache else comparison.cache, *cells)
        cells = _cells(comparison.run, f"{comparison.output_difference:g}", f"{comparison.cache_difference:g}")
        table.add_row("", *cells, style=None if comparison.holds else "bold red")
        cache = comparison.cache
    return table


def show_changes(console: Console, before: str, after: str) -> None:
    """The statements that are in one graph only, each cut to a line."""
    lines = changed_lines(before, after)
    for line in lines[:SHOWN_LINES]:
        style = "red" if line.startswith("-") else "green"
        console.print(Text(line, style=style), no_wrap=True, overflow="ellipsis")
    if len(lines) > SHOWN_LINES:
        console.print(f"... and {len(lines) - SHOWN_LINES} more")


def _cells(run: Run, output_difference: str, cache_difference: str) -> tuple[str, ...]:
    copied = f"{run.copied_bytes / 2**20:g} MiB" if run.copied_bytes else "0"
    time = f"{1e3 * run.median:.2f} ms"
    return run.name, str(len(run.snapshot_nodes)), copied, output_difference, cache_difference, time
