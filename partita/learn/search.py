"""Choosing by leave-one-out: the inverse temperature, the scale of every feature, constant or affine values."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from scipy.spatial import KDTree

from partita.geometry.domains import Array
from partita.learn.parallel import ALONE, Jobs
from partita.learn.ridge import Fit, Ridge, Trial
from partita.learn.smoothing import AT_ONCE, Keys, Smoother, row_blocks, squared_distances

__all__ = ["Request", "best_fit", "clearly_better", "rate_range", "relevance", "spacing"]

_RATES = 12  # on the first grid
_FIRST_STEP, _LAST_STEP = 0.7, 0.17  # of ln R around the best rate seen: factors 2 and 1.2
_PENALTY_STEP = 1.0  # of ln λ
_ALONG = 1.4  # steps of ln λ for one of ln R
_RATE_FALLS, _SHARE_FALLS = 0.4, 0.9  # of R and λ with the number of keys, as powers: where the descent starts
_ROUNDS = 6  # of relevance
_WORTH = 0.99  # of the error before: a round that saves less is the last
_ENOUGH = 2.0  # standard errors
_TREE = 16  # features: with more of them all distances are cheaper than a tree
_SAMPLED = 512  # points whose distances set the range of rates
_ROWS_SEARCHED = 2500  # rates are compared on so many points, the best one is fitted to all
_SURVEYED = 128  # keys: up to here every rate gets its best penalty; beyond, a survey with so many keys is the start of a descent
_SURVEYED_ROWS = 4  # times as many rows as keys
_LEAST_SHARE, _LARGEST_SHARE = 1e-9, 1e3  # of λ, in units of the trace of the Gram matrix
_FALLS = 0.998  # a step that leaves more than this of the error is the last
_FAR_OFF = 1.5  # times the best error: no other λ is tried at this R
_HOPELESS = 1.15  # times the error to beat
_SHARED = 1 << 18  # rows times keys, from which on rates are worth trying at the same time


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
    if centers.shape[1] <= _TREE:
        return float(np.sqrt((KDTree(centers).query(centers, k=2)[0][:, 1] ** 2).mean()))
    blocks = (squared_distances(centers[part], centers) for part in row_blocks(len(centers), len(centers)))
    return math.sqrt(float(np.concatenate([np.partition(block, 1, axis=1)[:, 1] for block in blocks]).mean()))


def best_fit(
    centers: Array,
    points: Array,
    targets: Array,
    *,
    request: Request,
    weights: Array | None = None,
    near: Fit | None = None,
    to_beat: float = math.inf,
    jobs: Jobs = ALONE,
) -> Fit:
    """The fit that was requested, R and λ of least leave-one-out error.

    Few keys: a grid of rates, each with the best of a grid of penalties, by one eigendecomposition. Many keys: that with a sample
    of keys and rows, then steps downhill in R and λ from there with all keys, by Cholesky factors.

    Args:
        centers: `(N, m)`.
        points: `(n, m)`, n ≥ 2.
        targets: `(n, out)`.
        weights: `(n,)` or None for ones.
        near: a fit to start from, which saves the grid; its keys may be others.
        to_beat: an error; the search ends early where it stays far above.
        jobs: how many rates, and how many blocks of rows, are worked on at the same time.
    """
    every = np.ones(len(points)) if weights is None else weights
    some = slice(None, None, math.ceil(len(points) / _ROWS_SEARCHED))
    if request.smoother:
        return _best_smoother(centers, targets, every, some, request, jobs)
    whole = _Problems(centers, points, targets, every, request, jobs)
    rows = points[some], targets[some], every[some]
    searched = whole if some.step == 1 else _Problems(centers, *rows, request, jobs)
    rates = (request.rate, request.rate) if request.rate is not None else rate_range(centers)
    if min(len(centers) * (1 + points.shape[1] * request.affine), len(searched.points)) <= _SURVEYED:
        start = None if near is None else near.smoother.keys.rate
        rate, trial = _best_rate(searched.best, *rates, start=start, jobs=searched.sharing)
        if searched is whole:
            return trial.finish()
        share = trial.finish().share
    else:
        rate, share = _descent(searched, *rates, near or searched.surveyed(), to_beat)
    return whole.at(rate, share).finish()


class _Problems:
    """Ridge problems for every R; the last two are kept, and the distances while they are few."""

    def __init__(
        self, centers: Array, points: Array, targets: Array, weights: Array, request: Request, jobs: Jobs
    ) -> None:
        self.centers, self.points, self.targets, self.weights, self.request = centers, points, targets, weights, request
        self.jobs = jobs
        small = len(points) * len(centers) <= AT_ONCE
        self._squared = squared_distances(points, centers) if small else None
        self._kept: dict[float, Ridge] = {}

    @property
    def sharing(self) -> Jobs:
        """Who tries rates: with few rows and keys that takes less time than handing them out."""
        return self.jobs if len(self.points) * len(self.centers) >= _SHARED else ALONE

    def __getstate__(self) -> dict[str, object]:
        """What other processes need: they make the problems, and the distances, themselves."""
        return {**vars(self), "_kept": {}, "_squared": None, "jobs": ALONE}

    def _of(self, rate: float) -> Ridge:
        if rate not in self._kept:
            keys = Keys(self.centers, rate, self.request.affine)
            given = {"weights": self.weights, "squared": self._squared, "jobs": self.jobs}
            problem = Ridge.of(keys, self.points, self.targets, **given)  # type: ignore[arg-type]
            self._kept = dict([*self._kept.items(), (rate, problem)][-2:])
        return self._kept[rate]

    def best(self, rate: float) -> Trial:
        """With the penalty that was requested, or the best of a grid."""
        problem = self._of(rate)
        return problem.best() if self.request.penalty is None else problem.at(self.request.penalty)

    def at(self, rate: float, share: float) -> Trial:
        """With the penalty that was requested, or this share of the mean diagonal entry of ΦΦᵀ."""
        problem = self._of(rate)
        return problem.at(share * problem.unit if self.request.penalty is None else self.request.penalty)

    def error(self, rate: float, share: float) -> float:
        """That of `at`, perhaps over fewer points."""
        problem = self._of(rate)
        return problem.error(share * problem.unit if self.request.penalty is None else self.request.penalty)

    def surveyed(self) -> Fit:
        """The best fit to a sample."""
        keys = slice(None, None, math.ceil(len(self.centers) / _SURVEYED))
        count = _SURVEYED * (1 if self.request.affine else _SURVEYED_ROWS)
        rows = slice(None, None, math.ceil(len(self.points) / count))
        sample = (self.centers[keys], self.points[rows], self.targets[rows])
        return best_fit(*sample, request=self.request, weights=self.weights[rows], jobs=self.jobs)


def _descent(problems: _Problems, low: float, high: float, near: Fit, to_beat: float) -> tuple[float, float]:
    """R and the share of λ where steps in ln R and then in ln λ lead to."""
    best: list[tuple[float, float, float]] = []  # error, ln R, ln share

    def error(log_rate: float, log_share: float) -> float:
        found = problems.error(math.exp(log_rate), math.exp(log_share))
        best[:] = [min([*best, (found, log_rate, log_share)])]
        return found

    n, fewer = len(problems.points), math.log(len(near.smoother.keys.centers) / len(problems.centers))
    shares = math.log(_LEAST_SHARE * n), math.log(_LARGEST_SHARE * n)
    rates = math.log(low), math.log(high)
    free = problems.request.penalty is None
    rate = min(max(math.log(near.smoother.keys.rate) + _RATE_FALLS * fewer, rates[0]), rates[1])
    share = min(max(math.log(near.share) + _SHARE_FALLS * fewer, shares[0]), shares[1]) if free else 0.0
    taken = {rate: share}  # the better share at every rate seen

    def along_rates(log_rate: float) -> float:
        """Good shares grow with R: try that of the nearest rate, and one that is moved along."""
        nearest = min(taken, key=lambda seen: abs(seen - log_rate))
        moved = min(max(taken[nearest] + _ALONG * (log_rate - nearest), shares[0]), shares[1])
        found = {taken[nearest]: error(log_rate, taken[nearest])}
        if free and found[taken[nearest]] < _FAR_OFF * best[0][0]:
            found[moved] = error(log_rate, moved)
        taken[log_rate] = min(found, key=lambda v: found[v])
        return found[taken[log_rate]]

    if error(rate, share) < _HOPELESS * to_beat:
        if high > low:
            _downhill(along_rates, rate, best[0][0], rates, _FIRST_STEP)
        here, rate, share = best[0]
        if free:
            _downhill(lambda v: error(rate, v), share, here, shares, _PENALTY_STEP)
    return math.exp(best[0][1]), math.exp(best[0][2])


def _downhill(
    error: Callable[[float], float], start: float, here: float, ends: tuple[float, float], step: float
) -> None:
    """Steps to the lower side until both sides are higher, then the vertex of the parabola through the last three."""
    seen = {0: here}

    def place(k: int) -> float:
        return min(max(start + k * step, ends[0]), ends[1])

    def at(k: int) -> float:
        if k not in seen:
            seen[k] = error(place(k))
        return seen[k]

    k = 0
    while at(lowest := min((k - 1, k + 1), key=at)) < at(k) * _FALLS:
        k = lowest
    (a, fa), (b, fb), (c, fc) = ((place(i), at(i)) for i in (k - 1, k, k + 1))
    bend = (b - a) * (fb - fc) - (b - c) * (fb - fa)
    if a < b < c and bend < 0:
        vertex = b - 0.5 * ((b - a) ** 2 * (fb - fc) - (b - c) ** 2 * (fb - fa)) / bend
        gain = 0.5 * (vertex - b) * ((fc - fb) / (c - b) * (b - a) + (fb - fa) / (b - a) * (c - b)) / (a - c)
        if gain > (1 - _FALLS) * fb:
            error(vertex)


def _best_smoother(centers: Array, targets: Array, weights: Array, some: slice, request: Request, jobs: Jobs) -> Fit:
    bias = None if (weights == weights[0]).all() else np.log(weights)

    def trial(rate: float, rows: slice = some) -> Trial:
        return _try_smoother(Keys(centers, rate, bias=bias), targets, weights, rows)

    if request.rate is not None:
        return trial(request.rate, slice(None)).finish()
    sharing = jobs if len(centers) ** 2 >= _SHARED else ALONE
    rate, best = _best_rate(trial, *rate_range(centers), start=None, jobs=sharing)
    return best.finish() if some.step == 1 else trial(rate, slice(None)).finish()


def _try_smoother(keys: Keys, targets: Array, weights: Array, rows: slice) -> Trial:
    """Nadaraya's and Watson's values, `V_j = y_j` at keys that are the data; nothing is solved for."""
    left_out = keys.smoother_loo(targets, rows)
    error = float(np.average(((targets[rows] - left_out) ** 2).mean(axis=1), weights=weights[rows]))
    return Trial(error, lambda: Fit(Smoother(keys, targets), 0.0, 0.0, keys.trace(rows), left_out, error))


def rate_range(centers: Array) -> tuple[float, float]:
    """From keys that see everything, `0.3/median|c − c'|²`, to keys that see their neighbour, `8/nearest²`."""
    chosen = centers[:: max(1, len(centers) // _SAMPLED)]
    squared = squared_distances(chosen, centers)
    middle = float(np.median(squared)) or float(squared.mean())
    if middle == 0:
        return 1.0, 1.0  # one place: every rate is the same
    nearest = float(np.partition(squared, 1, axis=1)[:, 1].mean())
    return 0.3 / middle, 8.0 / max(nearest, 1e-6 * middle)


def _best_rate(
    trial: Callable[[float], Trial], low: float, high: float, *, start: float | None, jobs: Jobs
) -> tuple[float, Trial]:
    """The R of least error: a log grid, or `start`, then steps to either side that shrink to a factor 1.2."""
    errors: dict[float, float] = {}
    best: list[tuple[float, float, Trial | None]] = []  # error, rate, trial; one, the best: trials are large

    def note(log_rate: float, found: float, tried: Trial | None) -> None:
        errors[log_rate] = found
        if not best or found < best[0][0]:
            best[:] = [(found, math.exp(log_rate), tried)]

    def least(log_rates: Sequence[float]) -> float:
        """The one of least error, the first of several."""
        new = [v for v in dict.fromkeys(log_rates) if v not in errors]
        if jobs.width > 1 and len(new) > 1:
            for v, found in zip(new, jobs.map(partial(_error_of, trial), [math.exp(v) for v in new])):
                note(v, found, None)
        for v in log_rates:
            if v not in errors:
                tried = trial(math.exp(v))
                note(v, tried.error, tried)
        return min(log_rates, key=lambda v: errors[v])

    ends = math.log(low), math.log(high)
    grid = np.linspace(*ends, _RATES if high > low else 1) if start is None else np.clip([math.log(start)], *ends)
    place = least(grid.tolist())
    step = _FIRST_STEP if high > low else 0.0
    while step > _LAST_STEP:
        aside = least((max(place - step, ends[0]), min(place + step, ends[1])))
        if errors[aside] < errors[place] * (1 - 1e-6):
            place = aside
        else:
            step /= 2
    _, rate, tried = best[0]
    return rate, tried or trial(rate)


def _error_of(trial: Callable[[float], Trial], rate: float) -> float:
    return trial(rate).error


def clearly_better(
    new: Fit, old: Fit, targets: Array, *, weights: Array | None = None, errors: float = _ENOUGH
) -> bool:
    """Whether the mean squared leave-one-out error falls by more than so many standard errors of the paired difference."""
    gain = ((old.left_out - targets) ** 2 - (new.left_out - targets) ** 2).sum(axis=1)
    shares = np.full(len(gain), 1 / len(gain)) if weights is None else weights / weights.sum()
    mean = float(shares @ gain)
    return mean > errors * math.sqrt(float(shares**2 @ (gain - mean) ** 2))


def relevance(
    points: Array,
    targets: Array,
    *,
    weights: Array | None = None,
    keys: slice | Array = slice(None),
    jobs: Jobs = ALONE,
) -> tuple[Array, Fit]:
    """Scales `(m,)` by which the features matter, and the fit that they lead to.

    A round moves the scale of feature k halfway (in logarithms) to the root mean square of `∂net/∂x_k`: what the fitted head
    does not move with is shrunk, and the next head looks elsewhere. Rounds go on while the leave-one-out error falls by 1 %, and
    the earliest within 1 % or two standard errors of the best is taken: a scaled fit has seen the targets through its scales, so
    that its leave-one-out error flatters it.

    Args:
        points: `(n, m)`, standardised.
        targets: `(n, out)`.
        weights: `(n,)` or None for ones.
        keys: which of the points are keys.
        jobs: how much is worked on at the same time.
    """
    scale, ask = np.ones(points.shape[1]), partial(best_fit, request=Request(), weights=weights, jobs=jobs)
    path = [(scale, ask(points[keys], points, targets))]
    for _ in range(_ROUNDS if len(scale) > 1 else 0):
        fit = path[-1][1]
        size = fit.smoother.gradient_size(points * scale, weights) * scale
        if not size.max() > 0:
            break
        scale = np.sqrt(scale * size)
        scale /= math.sqrt(float((scale**2).mean()))
        scaled = points * scale
        start = _carried_over(fit, scaled[keys])
        path.append((scale, ask(scaled[keys], scaled, targets, near=start)))
        if path[-1][1].error > _WORTH * fit.error:
            break
    best = min((fit for _, fit in path), key=lambda fit: fit.error)
    return next(
        taken
        for taken in path
        if best.error > _WORTH * taken[1].error or not clearly_better(best, taken[1], targets, weights=weights)
    )


def _carried_over(fit: Fit, scaled: Array) -> Fit:
    """The fit with the rate that keeps R times the mean squared distance as it was."""
    keys = fit.smoother.keys
    rate = keys.rate * float(keys.centers.var(axis=0).sum() / max(scaled.var(axis=0).sum(), 1e-300))
    return replace(fit, smoother=replace(fit.smoother, keys=replace(keys, rate=rate)))
