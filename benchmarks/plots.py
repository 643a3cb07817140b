"""Bars of ratios to stock with their intervals, from the rows of a result."""

from __future__ import annotations

import pathlib

from benchmarks.results import Row

# Better above stock or below it; a bar on the good side of 1 is green.
_HIGHER_IS_BETTER = {"throughput"}
_GOOD, _BAD = "#2a9d6f", "#c2543d"


def plot_ratios(rows: list[Row], path: pathlib.Path, title: str) -> pathlib.Path:
    """Draw each row that has a ratio; the file's ending chooses the format. Opaque, so legible on any page.

    Raises:
        ValueError: no row has a ratio.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.fonttype"] = "none"  # text stays text
    from matplotlib import pyplot as plt

    rows = [row for row in rows if row.ratio is not None]
    if not rows:
        raise ValueError("no row has a ratio to draw")
    figure, axes = plt.subplots(figsize=(8, 1 + 0.42 * len(rows)), layout="constrained", facecolor="white")
    for place, row in enumerate(rows):
        assert row.ratio is not None
        good = (row.ratio >= 1) == (row.metric in _HIGHER_IS_BETTER)
        axes.barh(place, row.ratio, color=_GOOD if good else _BAD, height=0.6)
        if row.low is not None and row.high is not None:
            axes.plot([row.low, row.high], [place, place], color="black", linewidth=1.6, marker="|", markersize=9)
        end = max(row.ratio, row.high or 0.0)
        axes.annotate(f"{row.ratio:.2f}", (end, place), (6, 0), textcoords="offset points", va="center", color="black")
    axes.axvline(1.0, color="black", linewidth=1, linestyle="--")
    arrows = ("higher is better" if row.metric in _HIGHER_IS_BETTER else "lower is better" for row in rows)
    labels = [f"{row.case}  {row.metric}\n{arrow}" for row, arrow in zip(rows, arrows, strict=True)]
    axes.set_yticks(range(len(rows)), labels, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.15 * max([1.0, *(max(row.ratio or 0.0, row.high or 0.0) for row in rows)]))
    axes.set_xlabel("ratio to stock; the line is the 95 % interval")
    axes.set_title(title, fontsize=10)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(path)
    plt.close(figure)
    return path
