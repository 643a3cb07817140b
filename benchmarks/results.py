"""Result files: where and how something was measured, and one row a figure."""

from __future__ import annotations

import datetime as dt
import importlib.metadata
import json
import pathlib
import random
import statistics
import sys
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

FOLDER = pathlib.Path(__file__).parent / "results"


@dataclass
class Row:
    """One figure for stock and ours; `low` and `high` bound the ratio (95 %)."""

    case: str
    metric: str
    unit: str
    stock: float | None
    ours: float | None
    ratio: float | None
    low: float | None
    high: float | None
    n: int
    note: str = ""


def compare(case: str, metric: str, unit: str, stock: list[float], ours: list[float], note: str = "") -> Row:
    """Medians, and their ratio with a bootstrap interval."""
    generator = random.Random(0)
    ratios = sorted(
        statistics.median(generator.choices(ours, k=len(ours)))
        / statistics.median(generator.choices(stock, k=len(stock)))
        for _ in range(2000)
    )
    s, o = statistics.median(stock), statistics.median(ours)
    return Row(case, metric, unit, s, o, o / s, ratios[50], ratios[1949], len(ours), note)


@dataclass
class Results:
    """The rows of one run, shown and written in one form."""

    name: str
    rows: list[Row] = field(default_factory=list)

    @classmethod
    def read(cls, name: str, folder: pathlib.Path = FOLDER) -> Results:
        """What was written before; nothing if there is no such file."""
        path = folder / f"{name}.json"
        rows = json.loads(path.read_text())["rows"] if path.exists() else []
        return cls(name, [Row(**row) for row in rows])

    def write(self, folder: pathlib.Path = FOLDER) -> pathlib.Path:
        """Write `<name>.json` and return its path."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.name}.json"
        content = {"env": environment(), "rows": [asdict(row) for row in self.rows]}
        part = path.with_suffix(".part")  # so that a program that is stopped leaves the rows of before
        part.write_text(json.dumps(content, indent=1) + "\n")
        part.replace(path)
        return path

    def show(self) -> None:
        """Print the rows as a table."""
        table = Table(title=self.name)
        for column in ("case", "metric", "unit", "stock", "ours", "ratio", "95 %", "n", "note"):
            table.add_column(column)
        for row in self.rows:
            interval = "" if row.low is None else f"{row.low:.3f} .. {row.high:.3f}"
            table.add_row(
                row.case,
                row.metric,
                row.unit,
                *("" if value is None else f"{value:.4g}" for value in (row.stock, row.ours, row.ratio)),
                interval,
                str(row.n),
                row.note,
            )
        Console(width=160).print(table)


def environment() -> dict[str, Any]:
    """Versions, GPU, date and command."""
    versions = {}
    for package in ("torch", "triton", "vllm"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "absent"
    return {
        **versions,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "date": dt.date.today().isoformat(),
        "command": " ".join(["python", "-m", *sys.orig_argv[2:]] if "-m" in sys.orig_argv else sys.orig_argv),
    }
