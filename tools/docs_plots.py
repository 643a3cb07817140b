"""Plots of the documentation, as SVG that takes its text colour from the page."""

from __future__ import annotations

import io
import re
from typing import Any

import matplotlib as mpl
from docs_tables import METRICS, figure, rows
from matplotlib.figure import Figure

STOCK, OURS = "#9e9e9e", "#009688"
TEXT = "#010203"  # stands for the colour of the page's text
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "docs",  # the same file for the same figures
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.edgecolor": TEXT,
    "axes.labelcolor": TEXT,
    "text.color": TEXT,
    "xtick.color": TEXT,
    "ytick.color": TEXT,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def times(name: str, prefix: str, ending: str = "") -> str:
    """Pairs of bars, vLLM's time and ours, for the cases that begin with `prefix`."""
    found = [row for row in rows(name, prefix) if row["metric"] == "gpu_time" and not row["case"].endswith("/warm")]
    found = [row for row in found if row["case"].endswith(ending)]
    found.sort(key=lambda row: row["stock"])
    with mpl.rc_context(STYLE):
        plot = Figure(figsize=(4.4, 0.5 * len(found) + 0.9))
        axes = plot.subplots()
        for position, row in enumerate(found):
            for offset, side, color in ((0.19, "stock", STOCK), (-0.19, "ours", OURS)):
                axes.barh(position + offset, row[side], 0.36, color=color)
                axes.text(row[side], position + offset, f" {figure(row[side], row['unit'])}", va="center", fontsize=9)
        axes.set_yticks(range(len(found)), [_label(row["case"], prefix, ending) for row in found])
        axes.set_xlabel("GPU time, µs, cold L2")
        axes.margins(x=0.22)
        handles = [mpl.patches.Patch(color=STOCK, label="vLLM"), mpl.patches.Patch(color=OURS, label="here")]
        axes.legend(handles=handles, loc="lower right", frameon=False, labelcolor=TEXT)
        return _svg(plot, f"GPU time of {prefix}{ending}, vLLM and here")


def ratios(name: str) -> str:
    """What the plugin changes, as a ratio to vLLM with its interval; nothing if it has not been measured."""
    found = [row for row in rows(name) if row["ratio"] is not None]
    if not found:
        return ""
    with mpl.rc_context(STYLE):
        plot = Figure(figsize=(4.4, 0.5 * len(found) + 0.7))
        axes = plot.subplots()
        for position, row in enumerate(reversed(found)):
            axes.barh(position, row["ratio"], 0.4, color=OURS if _is_better(row) else STOCK)
            if row["low"] is not None:
                axes.plot([row["low"], row["high"]], [position, position], color=TEXT, linewidth=1)
            label = f"{row['case']}, {METRICS.get(row['metric'], row['metric'])}: {row['ratio']:.2f}"
            axes.text(0, position + 0.28, label, fontsize=9)
        axes.set_yticks([])
        axes.axvline(1, color=STOCK, linewidth=1, zorder=0)
        axes.set_xlabel("ratio to vLLM; the line is vLLM, green is better")
        return _svg(plot, f"Ratios of {name}")


def _is_better(row: dict[str, Any]) -> bool:
    if abs(row["ratio"] - 1) < 0.005:
        return False
    return bool(row["ratio"] > 1) if row["metric"] == "throughput" else bool(row["ratio"] < 1)


def _label(case: str, prefix: str, ending: str) -> str:
    return case.removeprefix(prefix).removesuffix(ending).strip("/").replace("x", " x ")


def _svg(plot: Figure, title: str) -> str:
    file = io.StringIO()
    plot.savefig(file, format="svg", transparent=True, bbox_inches="tight", metadata={"Date": None})
    svg = file.getvalue()
    svg = svg[svg.index("<svg") :].replace(TEXT, "currentColor")
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r"\n\s*", " ", svg).replace("<svg ", f'<svg role="img" aria-label="{title}" ', 1)
    return f'<figure class="plot">{svg}</figure>'
