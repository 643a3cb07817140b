"""From samples to a ratio that holds although the host's speed drifts.

Stock and ours are measured in blocks that lie side by side in time, so a ratio is taken within each pair of blocks and
the geometric mean over the pairs: what slows both blocks of a pair cancels. The interval is a hierarchical bootstrap:
pairs are drawn, then within each block bursts (requests of one burst wait for one another, so they are drawn together).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from benchmarks.results import Row

Array = npt.NDArray[np.float64]
# One block: what was measured, burst by burst; one value a burst where there is but one.
Block = list[list[float]]

DRAWS = 2000


def _percentile_95(values: Array, axis: int | None = None) -> Array:
    return np.asarray(np.percentile(values, 95, axis=axis))


_STATISTIC: dict[str, Callable[..., Array]] = {"ttft_p95": _percentile_95}


def paired_row(case: str, metric: str, unit: str, stock: list[Block], ours: list[Block], note: str = "") -> Row:
    """The row of one figure.

    Args:
        case: and metric, unit: of the row. p95 of `ttft_p95`, medians of all others.
        stock: a block for each block of `ours`, in the order in which they were measured. What has no partner is left
            out.
        ours: likewise.
        note: of the row.
    """
    pairs = list(zip(stock, ours, strict=False))
    if not pairs:
        raise ValueError(f"{case} {metric}: there is no pair of blocks")
    statistic = _STATISTIC.get(metric, np.median)
    sides = [[np.asarray(block, dtype=np.float64) for block in side] for side in zip(*pairs, strict=True)]
    whole = [np.array([statistic(block) for block in side]) for side in sides]
    ratio = float(np.exp(np.mean(np.log(whole[1] / whole[0]))))
    n = min(sum(block.size for block in side) for side in sides)
    low = high = None
    if n >= 3:
        low, high = (float(bound) for bound in np.percentile(_drawn_ratios(sides, statistic), [2.5, 97.5]))
    middle = [float(np.exp(np.mean(np.log(side)))) for side in whole]
    return Row(case, metric, unit, middle[0], middle[1], ratio, low, high, n, note)


def _drawn_ratios(sides: list[list[Array]], statistic: Callable[..., Array]) -> Array:
    rng = np.random.default_rng(0)
    npairs = len(sides[0])
    logarithms = np.zeros(DRAWS)
    for _ in range(npairs):  # places to be filled, each with a pair drawn anew
        chosen = rng.integers(npairs, size=DRAWS)
        pairs = zip(*sides, strict=True)
        of_pairs = [_drawn(ours, statistic, rng) - _drawn(stock, statistic, rng) for stock, ours in pairs]
        logarithms += np.stack(of_pairs)[chosen, np.arange(DRAWS)]
    return np.asarray(np.exp(logarithms / npairs))


def _drawn(block: Array, statistic: Callable[..., Array], rng: np.random.Generator) -> Array:
    """Logarithms of the statistic over bursts drawn from the block, or over values drawn from its only burst."""
    bursts = block.shape[0]
    if bursts > 1:
        values = block[rng.integers(bursts, size=(DRAWS, bursts))].reshape(DRAWS, -1)
    else:
        values = block[0][rng.integers(block.shape[1], size=(DRAWS, block.shape[1]))]
    return np.asarray(np.log(statistic(values, axis=1)))
