"""Ratios and intervals of the serving benchmark, on samples whose true ratio is known."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest

from benchmarks.plots import plot_ratios
from benchmarks.results import Row
from benchmarks.serving.ratios import Block, paired_row


def block(rng: np.random.Generator, scale: float, bursts: int = 30, size: int = 1) -> Block:
    return (scale * rng.lognormal(0, 0.2, (bursts, size))).tolist()


def interval(row: Row) -> tuple[float, float]:
    assert row.low is not None
    assert row.high is not None
    return row.low, row.high


def test_a_host_that_slows_down_between_pairs_changes_nothing() -> None:
    rng = np.random.default_rng()
    stock = [block(rng, 10) for _ in range(2)]
    ours = [block(rng, 5) for _ in range(2)]
    slower = [[[2 * value for value in burst] for burst in side[1]] for side in (stock, ours)]
    steady = paired_row("step", "wall", "ms", stock, ours)
    drifting = paired_row("step", "wall", "ms", [stock[0], slower[0]], [ours[0], slower[1]])
    assert drifting.ratio == pytest.approx(steady.ratio)
    assert interval(drifting) == pytest.approx(interval(steady))
    low, high = interval(steady)
    assert low <= steady.ratio <= high
    assert 0.3 < low < high < 0.8


@pytest.mark.parametrize("metric", ["ttft_p50", "ttft_p95", "throughput"])
def test_most_intervals_hold_the_true_ratio(metric: str) -> None:
    rng = np.random.default_rng(1)
    held = 0
    for _ in range(40):
        stock, ours = ([block(rng, scale, bursts=20, size=4) for _ in range(3)] for scale in (1.0, 0.7))
        low, high = interval(paired_row("a", metric, "ms", stock, ours))
        held += low <= 0.7 <= high
    assert held >= 32


def test_requests_that_wait_for_one_another_count_as_one() -> None:
    rng = np.random.default_rng(2)
    delays = [rng.lognormal(0, 0.5, (10, 1)) for _ in range(2)]
    together = [np.repeat(side, 32, axis=1).tolist() for side in delays]
    apart = [side.reshape(320, 1).tolist() for side in (np.repeat(side, 32, axis=1) for side in delays)]
    widths = []
    for stock, ours in (together, apart):
        low, high = interval(paired_row("burst32", "ttft_p50", "ms", [stock], [ours]))
        widths.append(high / low)
    assert widths[0] > 1.5 * widths[1]


def test_what_has_no_partner_is_left_out() -> None:
    row = paired_row("a", "wall", "ms", [[[2.0], [2.0], [2.0]], [[9.0]]], [[[1.0], [1.0], [1.0]]])
    assert (row.stock, row.ours, row.ratio, row.n) == pytest.approx((2.0, 1.0, 0.5, 3))
    with pytest.raises(ValueError, match="a wall: there is no pair"):
        paired_row("a", "wall", "ms", [], [[[1.0]]])


def test_no_interval_from_one_or_two_values() -> None:
    row = paired_row("startup", "wall", "ms", [[[60.0]], [[66.0]]], [[[30.0]], [[33.0]]])
    assert row.ratio == pytest.approx(0.5)
    assert (row.low, row.high, row.n) == (None, None, 2)


@pytest.mark.parametrize("ending", ["svg", "png"])
def test_the_plot_shows_every_ratio(tmp_path: Path, ending: str) -> None:
    rows = [
        Row("burst32", "throughput", "requests/s", 10, 18, 1.8, 1.7, 1.9, 20),
        Row("spread", "ttft_p50", "ms", 60, 30, 0.5, 0.4, 0.6, 20),
        Row("startup", "wall", "ms", 60, 72, 1.2, None, None, 1),
        Row("graphs", "mismatches", "1", None, 0, None, None, None, 1),
    ]
    path = plot_ratios(rows, tmp_path / f"plot.{ending}", "a model")
    assert path.stat().st_size > 1000
    if ending == "svg":
        text = " ".join(ET.parse(path).getroot().itertext())
        for shown in ("burst32", "spread", "startup", "1.80", "0.50", "1.20", "a model"):
            assert shown in text
        assert "graphs" not in text


def test_nothing_to_draw(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no row has a ratio"):
        plot_ratios([Row("graphs", "mismatches", "1", None, 0, None, None, None, 1)], tmp_path / "plot.svg", "")
