"""Choosing by leave-one-out: the inverse temperature, the scale of every feature, constant or affine values."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.spatial import KDTree

from partita.geometry.domains import Array
from partita.learn.ridge import Fit, Trial, try_ridge
from partita.learn.smoothing import Keys, Smoother, squared_distances

__all__ = ["Request", "best_fit", "clearly_better", "relevance", "spacing"]

_RATES = 12  # on the first grid
_FIRST_STEP, _LAST_STEP = 0.7, 0.17  # of ln R around the best rate seen: factors 2 and 1.2
_ROUNDS = 6  # of relevance
_WORTH = 0.99  # of the error before: a round that saves less is the last
_ENOUGH = 2.0  # standard errors
_SAMPLED = 512  # points whose distances set the range of rates
_ROWS_SEARCHED = 2500  # rates are compared on so many points, the best one is fitted to all


@dataclass(frozen=True)
class Request:
    """The settings of a fit: numbers that are fixed, and None for those that leave-one-out chooses.

    Attributes:
        rate: R.
        penalty: λ.
        affine: whether values have slopes.
        smoother: whether values are the targets at the data.
    """

    rate: float | None = None
    penalty: float | None = None
    affine: bool = False
    smoother: bool = False


def spacing(centers: Array) -> float:
    """Root mean square distance from a center to its nearest neighbour; infinite for one center."""
    if len(centers) < 2:
        return math.inf
    return float(np.sqrt((KDTree(centers).query(centers, k=2)[0][:, 1] ** 2).mean()))


def best_fit(centers: Array, points: Array, targets: Array, *, request: Request, start: float | None = None) -> Fit:
    """The fit that was requested, R of least leave-one-out error; `start` is a guess that saves the grid.

    Args:
        centers: `(N, m)`.
        points: `(n, m)`, n ≥ 2.
        targets: `(n, out)`.
    """
    some = slice(None, None, math.ceil(len(points) / _ROWS_SEARCHED))

    def trial(rate: float, rows: slice = some) -> Trial:
        keys = Keys(centers, rate, request.affine)
        if request.smoother:
            return _try_smoother(keys, targets, rows)
        return try_ridge(keys, points[rows], targets[rows], penalty=request.penalty)

    if request.rate is not None:
        return trial(request.rate, slice(None)).finish()
    rate, best = _best_rate(trial, *_rate_range(centers), start=start)
    return best.finish() if some.step == 1 else trial(rate, slice(None)).finish()


def _try_smoother(keys: Keys, targets: Array, rows: slice) -> Trial:
    """Nadaraya's and Watson's values, `V_j = y_j` at keys that are the data; nothing is solved for."""
    left_out = keys.smoother_loo(targets, rows)
    error = float(((targets[rows] - left_out) ** 2).mean())
    return Trial(error, lambda: Fit(Smoother(keys, targets), 0.0, keys.trace(rows), left_out, error))


def _rate_range(centers: Array) -> tuple[float, float]:
    """From keys that see everything, `0.3/median|c − c'|²`, to keys that see their neighbour, `8/nearest²`."""
    chosen = centers[:: max(1, len(centers) // _SAMPLED)]
    squared = squared_distances(chosen, centers)
    middle = float(np.median(squared)) or float(squared.mean())
    if middle == 0:
        return 1.0, 1.0  # one place: every rate is the same
    nearest = float(np.partition(squared, 1, axis=1)[:, 1].mean())
    return 0.3 / middle, 8.0 / max(nearest, 1e-6 * middle)


def _best_rate(trial: Callable[[float], Trial], low: float, high: float, *, start: float | None) -> tuple[float, Trial]:
    """The R of least error: a log grid, or `start`, then steps to either side that shrink to a factor 1.2."""
    errors: dict[float, float] = {}
    best: list[tuple[float, Trial]] = []  # one, the best: trials are large

    def error(log_rate: float) -> float:
        if log_rate not in errors:
            tried = trial(math.exp(log_rate))
            errors[log_rate] = tried.error
            if not best or tried.error < best[0][1].error:
                best[:] = [(math.exp(log_rate), tried)]
        return errors[log_rate]

    ends = math.log(low), math.log(high)
    grid = np.linspace(*ends, _RATES if high > low else 1) if start is None else np.clip([math.log(start)], *ends)
    place = float(min(grid, key=error))
    step = _FIRST_STEP if high > low else 0.0
    while step > _LAST_STEP:
        aside = min((max(place - step, ends[0]), min(place + step, ends[1])), key=error)
        if error(aside) < error(place) * (1 - 1e-6):
            place = aside
        else:
            step /= 2
    return best[0]


def clearly_better(new: Fit, old: Fit, targets: Array, *, errors: float = _ENOUGH) -> bool:
    """Whether the mean squared leave-one-out error falls by more than so many standard errors of the paired difference."""
    gain = ((old.left_out - targets) ** 2 - (new.left_out - targets) ** 2).sum(axis=1)
    return float(gain.mean()) > errors * float(gain.std()) / math.sqrt(len(gain))


def relevance(points: Array, targets: Array, *, keys: slice | Array = slice(None)) -> tuple[Array, Fit]:
    """Scales `(m,)` by which the features matter, and the fit that they lead to.

    A round moves the scale of feature k halfway (in logarithms) to the root mean square of `∂net/∂x_k`: what the fitted head
    does not move with is shrunk, and the next head looks elsewhere. Rounds go on while the leave-one-out error falls by 1 %, and
    the earliest within two standard errors of the best is taken: a scaled fit has seen the targets through its scales, so that
    its leave-one-out error flatters it.

    Args:
        keys: which of the points are keys.
    """
    scale = np.ones(points.shape[1])
    path = [(scale, best_fit(points[keys], points, targets, request=Request()))]
    for _ in range(_ROUNDS if len(scale) > 1 else 0):
        fit = path[-1][1]
        size = fit.smoother.gradient_size(points * scale) * scale
        if not size.max() > 0:
            break
        scale = np.sqrt(scale * size)
        scale /= math.sqrt(float((scale**2).mean()))
        scaled = points * scale
        start = _carried_over(fit.smoother.keys, scaled[keys])
        path.append((scale, best_fit(scaled[keys], scaled, targets, request=Request(), start=start)))
        if path[-1][1].error > _WORTH * fit.error:
            break
    best = min((fit for _, fit in path), key=lambda fit: fit.error)
    return next(taken for taken in path if not clearly_better(best, taken[1], targets))


def _carried_over(keys: Keys, scaled: Array) -> float:
    """The rate that keeps R times the mean squared distance as it was."""
    return keys.rate * float(keys.centers.var(axis=0).sum() / max(scaled.var(axis=0).sum(), 1e-300))
