"""Bars of ratios to stock with their intervals, from the rows of a result."""

from __future__ import annotations

import pathlib

from benchmarks.results import Row

_HIGHER_IS_BETTER = {"throughput"}
_GOOD, _BAD, _UNDECIDED = "#2a9d6f", "#c2543d", "#9aa3ab"


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
        axes.barh(place, row.ratio, color=_colour(row, row.ratio), height=0.6)
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


def _colour(row: Row, ratio: float) -> str:
    if row.low is not None and row.high is not None and row.low <= 1 <= row.high:
        return _UNDECIDED
    return _GOOD if (ratio >= 1) == (row.metric in _HIGHER_IS_BETTER) else _BAD
