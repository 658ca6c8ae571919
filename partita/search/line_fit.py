"""A few lines mixed by a softmax, for functions of one variable that are straight at the ends of a wide interval.

`net(x) = Σ_j w_j(x)(A_j + J_j(x − o))` on evenly spaced centers at a soft temperature. The first and the last line are those that f
follows at its ends, so that the head is right however far they reach; those between are fitted. Errors here are sampled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from partita.arithmetic.progress import Progress, report
from partita.geometry.domains import Array

__all__ = ["LineFit", "fit_lines"]

_MOST = 24  # keys
_OUTER = 1 / 32  # of the interval: where f must be straight at least
_STRAIGHT = 0.05  # of the tolerance: f may leave its line by that much
_SHARPNESS = (0.5, 0.8, 1.2, 1.7, 2.4)  # κ = R h²
_SPANS = (0.45, 0.6, 0.7, 0.78, 0.86, 0.94, 1.05)  # of the bent part: how far the centers reach
_POINTS = 257  # of the bent part and as much around it; the fit uses every second one
_SCANNED, _ZOOMS = 1025, 4  # points at which f is compared with its lines, and how often
_ROUNDS = 12  # of least squares, each with more weight where the error was large
_REFINED = 3  # of the layouts, those with the least errors
_CUTOFF = 1e-10  # of singular values
_LARGEST = 1e3  # times the values of f around the bent part: lines that reach farther round too much


@dataclass(frozen=True, eq=False)
class LineFit:
    """Centers `(P,)`, R, and the lines `values_j + slopes_j (x − origin)`; `error_estimate` is the largest error sampled."""

    centers: Array
    rate: float
    values: Array
    slopes: Array
    origin: float
    error_estimate: float

    @property
    def kappa(self) -> float:
        """The sharpness R h², h the distance of neighbouring centers."""
        step = float(self.centers[1] - self.centers[0])
        return self.rate * step * step  # not step², which can overflow


def fit_lines(
    ask: Callable[[Array], Array], lo: float, hi: float, tolerance: float, *, progress: Progress | None = None
) -> LineFit | str:
    """The fewest lines whose sampled error is within the tolerance, or why there are none.

    Args:
        ask: f, `(n,)` to `(n,)`.
        lo: lower end of the interval.
        hi: upper end.
        tolerance: the largest error.
    """
    with np.errstate(all="ignore"):  # where f overflows it is not straight
        bent = _bent(ask, lo, hi, _STRAIGHT * tolerance)
    if bent is None:
        return "f is not straight at both ends of the interval"
    left, right, start, stop = bent
    middle, half = (start + stop) / 2, (stop - start) / 2
    origin = 0.0 if start < 0 < stop else middle
    around = np.clip(middle + 2 * half * np.linspace(-1, 1, _POINTS), lo, hi)
    far = np.concatenate([[lo, hi], np.clip(middle + half * 2.0 ** np.arange(1, 12), lo, hi)])
    far = np.concatenate([far, np.clip(middle - half * 2.0 ** np.arange(1, 12), lo, hi)])
    x = np.unique(np.concatenate([around, far]))
    sampled = _Sampled(x, ask(x), left, right, origin)
    limit = _LARGEST * float(np.abs(ask(around)).max())
    for count in range(2, _MOST + 1):
        report(progress, "lines", count, _MOST)
        layouts = [(middle + span * half * np.linspace(-1, 1, count), kappa) for span in _SPANS for kappa in _SHARPNESS]
        tried = sorted(((sampled.error(*layout, rounds=1), layout) for layout in layouts), key=lambda pair: pair[0])
        for first, (centers, kappa) in tried[:_REFINED]:
            if first > 8 * tolerance:
                break
            found = sampled.fit(centers, kappa, rounds=_ROUNDS)
            if found.error_estimate <= tolerance and np.abs(found.values).max() <= limit:
                return found
    return f"{_MOST} lines are not enough"


def _bent(
    ask: Callable[[Array], Array], lo: float, hi: float, allowed: float
) -> tuple[tuple[float, float], tuple[float, float], float, float] | None:
    """The lines `(value at 0, slope)` that f follows at its ends, and between which points it leaves them.

    None if it leaves one near its end. Lines are those through f at an end and at a point near it.
    """
    lines = []
    for end, other in ((lo, hi), (hi, lo)):
        inner = end + (other - end) * _OUTER
        near = ask(np.array([end, inner]))
        slope = float((near[1] - near[0]) / (inner - end))
        lines.append((float(near[0] - slope * end), slope))
    if not np.isfinite(lines).all():
        return None
    start, stop = lo, hi
    for _ in range(_ZOOMS):  # each time around what was found, so that nothing narrow between two points is missed
        x = np.linspace(start, stop, _SCANNED)
        f, step = ask(x), (stop - start) / (_SCANNED - 1)
        left, right = (~(np.abs(f - (value + slope * x)) <= allowed) for value, slope in lines)
        first = int(np.argmax(left)) if left.any() else _SCANNED - 1
        last = _SCANNED - 1 - int(np.argmax(right[::-1])) if right.any() else 0
        found = x[max(min(first, last) - 1, 0)], x[min(max(first, last) + 1, _SCANNED - 1)]
        start, stop = max(float(found[0]) - step, lo), min(float(found[1]) + step, hi)
    if min(start - lo, hi - stop) < _OUTER * (hi - lo):
        return None
    return lines[0], lines[1], start, stop


@dataclass(frozen=True, eq=False)
class _Sampled:
    """f at points, and the lines of its ends."""

    x: Array
    f: Array
    left: tuple[float, float]
    right: tuple[float, float]
    origin: float

    def error(self, centers: Array, kappa: float, *, rounds: int) -> float:
        return self.fit(centers, kappa, rounds=rounds).error_estimate

    def fit(self, centers: Array, kappa: float, *, rounds: int) -> LineFit:
        """Least squares with weights that grow where the error is large, which comes close to the least maximum."""
        step, count, away = float(centers[1] - centers[0]), len(centers), self.x - self.origin
        rate = kappa / step / step  # the square of a step can overflow
        scores = -kappa / 2 * ((self.x[:, None] - centers) / step) ** 2
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        values, slopes = np.zeros(count), np.zeros(count)
        for j, (value, slope) in ((0, self.left), (count - 1, self.right)):
            values[j], slopes[j] = value + slope * self.origin, slope
        left = self.f - weights @ values - (weights @ slopes) * away
        inner = weights[:, 1:-1]
        # far away the products overflow what a solver can balance, and no inner line has any weight there
        columns = np.concatenate([inner, inner * np.where(inner > 0, away[:, None], 0.0)], axis=1)
        best, share = (float(np.abs(left).max()), values, slopes), np.ones(len(self.x))
        for _ in range(rounds if count > 2 else 0):
            found = np.linalg.lstsq(columns * share[:, None], left * share, rcond=_CUTOFF)[0]
            off = np.abs(left - columns @ found)
            worst = float(off.max())
            if worst < best[0]:
                parts = [
                    np.concatenate([ends[:1], part, ends[-1:]])
                    for ends, part in zip((values, slopes), np.split(found, 2))
                ]
                best = worst, parts[0], parts[1]
            share = share * np.sqrt(off / max(worst, 1e-300) + 0.05)
            share /= share.mean()
        return LineFit(centers, rate, best[1], best[2], self.origin, best[0])
