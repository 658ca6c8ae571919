"""From data to a fitted smoother: scale the features, place the keys, let leave-one-out choose the rest."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from sklearn.cluster import KMeans

from partita.errors import ShapeError, UnsupportedError
from partita.geometry.domains import Array
from partita.learn.folding import Scaling
from partita.learn.parallel import ALONE, Jobs
from partita.learn.ridge import Fit
from partita.learn.search import Request, best_fit, relevance
from partita.learn.smoothing import Keys, Smoother

__all__ = ["Options", "fit_model", "moments"]

_FEATURES = 1000  # of a ridge fit: up to so many points all of them are keys, beyond there are so many features
_ALL_WEIGHED = 600  # points: up to here relevance is judged with all of them as keys, beyond on a sample with fewer
_ROWS_WEIGHED, _KEYS_WEIGHED = 2500, 256
_LLOYD = 10  # rounds of k-means


@dataclass(frozen=True, eq=False)
class Options:
    """What the estimators were asked for, checked."""

    centers: Any
    values: str
    solver: str
    rate: float | None
    penalty: float | None
    scaling: str
    jobs: Jobs = ALONE

    def __post_init__(self) -> None:
        _one_of("values", self.values, ("auto", "constant", "affine"))
        _one_of("solver", self.solver, ("ridge", "smoother"))
        _one_of("scaling", self.scaling, ("auto", "standard", "none"))
        for name, number in (("inverse_temperature", self.rate), ("ridge", self.penalty)):
            if number is not None and not 0 < number < math.inf:
                raise UnsupportedError(
                    f"{name} is {number!r}; expected a positive number, or None for an automatic choice."
                )
        counts = isinstance(self.centers, (int, np.integer)) and self.centers >= 1
        if np.ndim(self.centers) == 0 and not (counts or _is_auto(self.centers)):
            raise UnsupportedError(
                f"centers is {self.centers!r}; expected 'auto', a positive integer or an array (N, m)."
            )
        if self.solver == "smoother" and (self.values == "affine" or not _is_auto(self.centers)):
            raise UnsupportedError(
                "solver='smoother' uses the data as centers and values; expected centers='auto' and values='auto' or 'constant'."
            )

    def requests(self) -> list[Request]:
        """The kinds of fit to compare, simplest first."""
        if self.solver == "smoother":
            return [Request(self.rate, smoother=True)]
        kinds = {"auto": (False, True), "constant": (False,), "affine": (True,)}[self.values]
        return [Request(self.rate, self.penalty, affine) for affine in kinds]


def _one_of(name: str, given: str, known: tuple[str, ...]) -> None:
    if given not in known:
        raise UnsupportedError(f"{name} is {given!r}; expected one of {', '.join(map(repr, known))}.")


def _is_auto(centers: Any) -> bool:
    return isinstance(centers, str) and centers == "auto"


def fit_model(
    points: Array, targets: Array, weights: Array, options: Options, *, rng: np.random.RandomState
) -> tuple[Scaling, Fit]:
    """The scaling and the fit of least leave-one-out error among those that the options leave open.

    Args:
        points: `(n, m)`, raw.
        targets: `(n, out)`, of comparable sizes.
        weights: `(n,)`, positive.
    """
    scaling, near = _scaling(points, targets, weights, options, rng)
    scaled = scaling(points)
    best: Fit | None = None
    for request in options.requests() if len(points) > 1 else []:
        centers = _place(scaled, weights, scaling, options, request, rng)
        if near is not None and request == Request() and centers is scaled and len(near.smoother.values) == len(points):
            fit = near  # relevance was judged with these very keys
        else:
            guess = near if _is_auto(options.centers) else None
            bar = math.inf if best is None else best.error
            fit = best_fit(
                centers,
                scaled,
                targets,
                request=request,
                weights=weights,
                near=guess,
                to_beat=bar,
                jobs=options.jobs,
            )
        if best is None or fit.error < best.error:
            best = near = fit
    return scaling, best if best is not None else _single(scaled, targets, options)


def _single(scaled: Array, targets: Array, options: Options) -> Fit:
    """One sample: its value everywhere, and nothing to leave out."""
    keys = Keys(scaled, options.rate or 1.0)
    return Fit(Smoother(keys, targets), options.penalty or 0.0, 0.0, 1.0, np.full_like(targets, np.nan), math.nan)


def moments(points: Array, weights: Array) -> tuple[Array, Array]:
    """Weighted means and standard deviations of the columns; a deviation that is only rounding is 0."""
    mean = np.average(points, axis=0, weights=weights)
    deviation = np.sqrt(np.average((points - mean) ** 2, axis=0, weights=weights))
    return mean, np.where(deviation > 1e-14 * np.abs(points).max(axis=0), deviation, 0.0)


def _scaling(
    points: Array, targets: Array, weights: Array, options: Options, rng: np.random.RandomState
) -> tuple[Scaling, Fit | None]:
    """Standardised features, then scales by relevance; and the fit that judged them, if one did."""
    mean, deviation = moments(points, weights)
    if options.scaling == "none":
        return Scaling(mean, np.ones(points.shape[1])), None
    standard = Scaling(mean, 1.0 / np.where(deviation > 0, deviation, 1.0))
    if options.scaling == "standard" or len(points) < 3:
        return standard, None
    some, keys = np.arange(len(points)), slice(None)
    if len(points) > _ALL_WEIGHED:
        some, keys = rng.permutation(len(points))[:_ROWS_WEIGHED], slice(_KEYS_WEIGHED)
    rows = standard(points[some]), targets[some]
    scale, fit = relevance(*rows, weights=weights[some], keys=keys, jobs=options.jobs)
    return Scaling(mean, standard.scale * scale), fit


def _place(
    scaled: Array, weights: Array, scaling: Scaling, options: Options, request: Request, rng: np.random.RandomState
) -> Array:
    """Centers in scaled features, `(N, m)`: those given, all points while they are few, else the means of k-means."""
    n, m = scaled.shape
    if not isinstance(options.centers, (str, int, np.integer)):
        given = np.asarray(options.centers, dtype=np.float64)
        if given.ndim != 2 or given.shape[1] != m or not len(given) or not np.isfinite(given).all():
            raise ShapeError(f"centers have shape {given.shape}; expected finite numbers (N, {m}), N ≥ 1.")
        return scaling(given)
    if _is_auto(options.centers):
        count = n if n <= _FEATURES or request.smoother else max(1, _FEATURES // (1 + m * request.affine))
    else:
        count = int(options.centers)
    if count >= n:
        return scaled
    distinct = np.unique(scaled, axis=0)
    if len(distinct) <= count:
        return distinct
    clusters = KMeans(count, n_init=1, init="random", max_iter=_LLOYD, random_state=rng)
    return np.unique(clusters.fit(scaled, sample_weight=weights).cluster_centers_, axis=0)
