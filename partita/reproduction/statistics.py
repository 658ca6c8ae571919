"""Statistics for the verdicts: slopes with intervals, and rank correlations, sign tests and tests of decline with p-values."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import scipy  # scipy.stats loads when it is first used: half a second that only verdicts need
from numpy.typing import ArrayLike

from partita.errors import ShapeError

__all__ = [
    "Rank",
    "Slope",
    "against_decline",
    "group_means",
    "log_slope",
    "more_often",
    "rank_correlation",
    "slope",
]


@dataclass(frozen=True)
class Slope:
    """A least-squares slope with its 95 % confidence interval (Student's t; no interval from two points)."""

    value: float
    low: float
    high: float

    def within(self, low: float, high: float) -> bool:
        """Whether the whole interval lies between low and high."""
        return low <= self.low and self.high <= high

    def __str__(self) -> str:
        return f"{self.value:.2f} (95 % CI {self.low:.2f} … {self.high:.2f})"


def slope(x: ArrayLike, y: ArrayLike) -> Slope:
    """Of y on x.

    >>> slope([1, 2, 3, 4], [2.0, 4.1, 5.9, 8.0]).within(1.7, 2.3)
    True
    """
    a, b = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    if a.shape != b.shape or len(np.unique(a)) < 2:
        raise ShapeError(
            f"x has shape {a.shape}, y has shape {b.shape}; expected as many y as x, and at least two different x."
        )
    fit = scipy.stats.linregress(a, b)
    if len(a) < 3:
        return Slope(float(fit.slope), -np.inf, np.inf)
    half = float(scipy.stats.t.ppf(0.975, len(a) - 2)) * float(fit.stderr)
    return Slope(float(fit.slope), float(fit.slope) - half, float(fit.slope) + half)


def log_slope(x: ArrayLike, y: ArrayLike) -> Slope:
    """Of ln y on ln x: the exponent of a power law."""
    return slope(np.log(np.asarray(x, dtype=float)), np.log(np.asarray(y, dtype=float)))


@dataclass(frozen=True)
class Rank:
    """Spearman's rank correlation and the one-sided p-values of its being negative or positive by chance."""

    rho: float
    p_falls: float
    p_rises: float

    def __str__(self) -> str:
        return f"ρ = {self.rho:+.2f} (p = {min(self.p_falls, self.p_rises):.1g})"


def rank_correlation(x: ArrayLike, y: ArrayLike) -> Rank:
    """Whether y falls or rises with x.

    >>> rank_correlation(range(8), [9, 8, 7.5, 7, 5, 4, 4.5, 1]).p_falls < 0.01
    True
    """
    a, b = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    if len(np.unique(a)) < 2 or len(np.unique(b)) < 2:
        return Rank(0.0, 1.0, 1.0)  # nothing moves, so nothing falls
    rho = float(scipy.stats.spearmanr(a, b).statistic)
    if len(a) < 3:
        return Rank(rho, 1.0, 1.0)
    edge = 1 - 1e-15
    t = np.clip(rho, -edge, edge) * np.sqrt((len(a) - 2) / (1 - np.clip(rho, -edge, edge) ** 2))
    return Rank(rho, float(scipy.stats.t.cdf(t, len(a) - 2)), float(scipy.stats.t.sf(t, len(a) - 2)))


def more_often(first_wins: int, of: int) -> float:
    """The one-sided p-value of at least `first_wins` wins in `of` fair games.

    >>> more_often(8, 8) < 0.01, more_often(4, 8) > 0.5
    (True, True)
    """
    return float(scipy.stats.binomtest(first_wins, of, 0.5, alternative="greater").pvalue) if of else 1.0


def group_means(x: ArrayLike, y: ArrayLike) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The distinct x, and the mean and standard deviation of y at each: a line with error bars."""
    a, b = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    levels = np.unique(a)
    groups = [b[a == level] for level in levels]
    spread = [g.std(ddof=1) if len(g) > 1 else 0.0 for g in groups]
    return levels, np.array([g.mean() for g in groups]), np.array(spread)


def against_decline(seeds: ArrayLike, levels: ArrayLike, y: ArrayLike) -> float:
    """The p-value of "y never rises with the level", each seed having its own mean; small means that it does rise somewhere.

    Means over seeds, each seed's own mean removed, are compared with the nearest means that never rise (isotonic
    regression). The statistic is their squared distance over the variance that seeds and levels leave unexplained. Its
    distribution is simulated for means that are all equal, the least favourable decline, with normal scatter.

    Args:
        seeds, levels, y: `(n,)` each; every seed occurs once at every level.

    >>> seeds, levels = np.repeat(range(4), 6), np.tile(range(6), 4)
    >>> scatter = 0.1 * np.random.default_rng(0).standard_normal(24)
    >>> against_decline(seeds, levels, seeds - levels + scatter) > 0.5
    True
    >>> against_decline(seeds, levels, seeds - abs(levels - 2) + scatter) < 0.01
    True
    """
    s, x, values = (np.asarray(a, dtype=float) for a in (seeds, levels, y))
    ordered = values[np.lexsort((x, s))]
    rows, columns = len(np.unique(s)), len(np.unique(x))
    if rows * columns != len(values) or rows < 2 or columns < 2:
        raise ShapeError(
            f"{len(values)} values for {rows} seeds and {columns} levels; expected every seed once at every level, and at "
            "least two of each."
        )
    null = _decline_null(rows, columns)
    statistic = float(_distance_from_decline(ordered.reshape(1, rows, columns))[0])
    return float((1 + (null >= statistic).sum()) / (1 + len(null)))


def _distance_from_decline(tables: np.ndarray) -> np.ndarray:
    """Of each `(seeds, levels)` table: squared distance of its means from the nearest decline, over the residual variance."""
    centred = tables - tables.mean(axis=2, keepdims=True)
    means = centred.mean(axis=1)
    free = (tables.shape[1] - 1) * (tables.shape[2] - 1)
    residual = ((centred - means[:, None]) ** 2).sum(axis=(1, 2)) / free
    # isotonic regression as min over i ≤ k of max over j ≥ k of the mean of i … j
    levels = means.shape[1]
    sums = np.concatenate([np.zeros((len(means), 1)), np.cumsum(means, axis=1)], axis=1)
    i, j = np.meshgrid(np.arange(levels), np.arange(levels), indexing="ij")
    average = np.where(j >= i, (sums[:, j + 1] - sums[:, i]) / np.maximum(j - i + 1, 1), -np.inf)
    from_j = np.maximum.accumulate(average[:, :, ::-1], axis=2)[:, :, ::-1]
    fitted = np.minimum.accumulate(np.where(j >= i, from_j, np.inf), axis=1)[:, np.arange(levels), np.arange(levels)]
    out: np.ndarray = ((means - fitted) ** 2).sum(axis=1) / np.maximum(residual, 1e-300)
    return out


@lru_cache(maxsize=16)
def _decline_null(rows: int, columns: int, draws: int = 2000) -> np.ndarray:
    rng = np.random.default_rng(0)
    return np.concatenate(
        [_distance_from_decline(rng.standard_normal((draws // 10, rows, columns))) for _ in range(10)]
    )
