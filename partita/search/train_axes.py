"""One axis of a tensor train: f evaluated within limits, fibers through landmarks, and the keys that fit them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.polynomial.chebyshev import chebvander

from partita.errors import NonFiniteValueError, ShapeError
from partita.geometry.domains import Array, Box
from partita.proofs.proof import Progress

__all__ = [
    "FRESH",
    "Ask",
    "Asked",
    "Spent",
    "TrainAxis",
    "TrainLimits",
    "chebyshev_nodes",
    "choose_axis",
    "fibers_of",
    "landmarks",
    "last_word",
    "place",
]

Ask = Callable[[Array], Array]

_POINTS_AT_ONCE = 1 << 17
FRESH = 8192  # points of the last word, half of them uniform; the search for worse ones takes at most as many
_CLIMBERS, _CLIMBED = 8, 17  # points that look for large and small values of f, and steps on an axis
# ghosts and sharpness tried for each number of keys
_FRAMES = ((1, 1.0), (1, 0.25), (2, 1.0), (2, 0.25), (3, 0.7), (3, 0.35), (4, 0.7), (4, 0.5), (5, 0.5), (6, 0.35))
_CUTOFFS = 10.0 ** -np.arange(3, 13)
_GROWTH = 16.0  # largest |V| over largest |f| along an axis: rounding of the head is proportional to it
_UNRESOLVED = 33  # points on an axis that no affordable number of them resolves


@dataclass(frozen=True)
class TrainLimits:
    """What a fit may spend: the largest rank, evaluations of f, seconds, and Chebyshev points per axis.

    Whether a fit runs out of seconds depends on the machine; everything else is the same for the same seed.
    """

    rank: int = 64
    evaluations: int = 4_000_000
    seconds: float = 120.0
    points: int = 129


class Spent(Exception):
    """A limit was reached; its name is the status."""


class Asked:
    """f on a box, its values checked and counted, refused beyond the limits; those for the final error check are set aside."""

    def __init__(self, ask: Ask, box: Box, outputs: int, limits: TrainLimits, progress: Progress | None) -> None:
        self.ask, self.box, self.outputs, self.limits, self.progress = ask, box, outputs, limits, progress
        self.count, self.scale, self.deadline = 0, 0.0, time.monotonic() + limits.seconds

    def __call__(self, points: Array) -> Array:
        """`(n, m)` to `(n, out)`."""
        if self.count + len(points) + last_word(self.box) > self.limits.evaluations:
            raise Spent("evaluations")
        if time.monotonic() > self.deadline:
            raise Spent("seconds")
        return self.anyway(points)

    def anyway(self, points: Array) -> Array:
        """The same without regard to the limits."""
        parts = [self.ask(points[i : i + _POINTS_AT_ONCE]) for i in range(0, len(points), _POINTS_AT_ONCE)]
        answers = np.concatenate([np.asarray(p, dtype=np.float64).reshape(len(p), -1) for p in parts])
        if answers.shape != (len(points), self.outputs):
            raise ShapeError(f"f returned {answers.shape} for {len(points)} points; expected {self.outputs} output(s).")
        bad = np.flatnonzero(~np.isfinite(answers).all(axis=1))
        if bad.size:
            raise NonFiniteValueError(
                f"f is NaN or infinite at {bad.size:,} of {len(points):,} points, the first at "
                f"{points[bad[0]].tolist()}; expected finite values on the whole box."
            )
        self.count += len(points)
        self.scale = max(self.scale, float(np.abs(answers).max()))
        if self.progress is not None:
            self.progress("evaluations", self.count, self.limits.evaluations)
        return answers


@dataclass(frozen=True, eq=False)
class TrainAxis:
    """N Chebyshev points on [−1, 1], the recipe of P centers, and the frame fit from samples to values in two steps.

    `V = Y(X f)/s`: X, `(k, N)`, and Y, `(P, k)`, are well conditioned. Their product is not, as small s are divided by.
    """

    nodes: Array
    count: int
    ghosts: int
    sharpness: float
    project: Array
    singular: Array
    expand: Array

    def values(self, samples: Array) -> Array:
        """`(…, N, b)` to `(…, P, b)`."""
        return self.expand @ ((self.project @ samples) / self.singular[:, None])


def chebyshev_nodes(n: int) -> Array:
    """The n extrema of `T_{n−1}`, ends included."""
    return -np.cos(np.pi * np.arange(n) / (n - 1)) if n > 1 else np.zeros(1)


def _basis(x: Array, n: int) -> Array:
    """`T_0 … T_{n−1}` at points of [−1, 1], `(points, n)`."""
    return np.asarray(chebvander(x, n - 1), dtype=np.float64)


def place(box: Box, axis: int, x: Array) -> Array:
    """Points of [−1, 1] carried to an axis of the box, inside its closed interval."""
    lo, hi = box.lo.ravel()[axis], box.hi.ravel()[axis]
    out: Array = np.clip(lo + (hi - lo) * (x + 1) / 2, lo, hi)
    return out


def _axis_weights(x: Array, count: int, ghosts: int, sharpness: float) -> Array:
    """Softmax weights `(n, P)` of uniform centers on [−1, 1], ghosts beyond its ends."""
    steps = (x[:, None] + 1) * ((count - 2 * ghosts) / 2) - (np.arange(count) - ghosts + 0.5)
    scores = -0.5 * sharpness * steps**2
    numerators = np.exp(scores - scores.max(axis=1, keepdims=True))
    out: Array = numerators / numerators.sum(axis=1, keepdims=True)
    return out


@lru_cache(maxsize=1024)
def _frame(count: int, ghosts: int, sharpness: float) -> tuple[Array, Array, Array, Array]:
    """`A = U S Vᵀ`, the weights of an axis at 3P Chebyshev points, which come first."""
    x = chebyshev_nodes(3 * count)
    return (x, *np.linalg.svd(_axis_weights(x, count, ghosts, sharpness), full_matrices=False))


def choose_axis(coefficients: Array, tolerance: float) -> TrainAxis:
    """The shortest axis whose frame fit `V = A⁺f`, truncated as early as it may be, meets the tolerance on these fibers.

    If none does, the one that comes closest. Values beyond `_GROWTH` times the fibers are not taken.

    Args:
        coefficients: Chebyshev coefficients of fibers, `(N, fibers)`.
    """
    n = len(coefficients)
    nodes, check = chebyshev_nodes(n), np.linspace(-1, 1, 4 * n + 1)
    exact, to_coefficients = _basis(check, n) @ coefficients, np.asarray(np.linalg.inv(_basis(nodes, n)), np.float64)
    largest = _GROWTH * max(float(np.abs(exact).max()), tolerance)
    best, least = TrainAxis(nodes, 1, 0, 1.0, to_coefficients[:1], np.ones(1), np.ones((1, 1))), math.inf
    counts = range(max(3, n // 3), 3 * n // 2 + 8) if n > 1 else ()
    for count in (c for c in counts if c < 24 or c % (c // 12) == 0):
        for ghosts, sharpness in (f for f in _FRAMES[:: 1 if count < 48 else 4] if count > 2 * f[0]):
            x, u, s, vt = _frame(count, ghosts, sharpness)
            basis, weights = _basis(x, n), _axis_weights(check, count, ghosts, sharpness)
            inner = u.T @ (basis @ coefficients)
            for kept in sorted({int((s > cutoff * s[0]).sum()) for cutoff in _CUTOFFS}):
                values = vt[:kept].T @ (inner[:kept] / s[:kept, None])
                error = float(np.abs(weights @ values - exact).max())
                if error < least and np.abs(values).max() <= largest:
                    project, least = u[:, :kept].T @ basis @ to_coefficients, error
                    best = TrainAxis(nodes, count, ghosts, sharpness, project, s[:kept], vt[:kept].T)
                if least <= tolerance:
                    return best
    return best


def fibers_of(asked: Asked, axis: int, *, bases: Array, tolerance: float) -> tuple[Array, bool]:
    """Chebyshev coefficients `(N, fibers)` of f along one axis through the bases, cut where their tails pass the tolerance.

    If as many points as allowed do not get there, the first `_UNRESOLVED`, and False: the fit will fail, at a fair price.
    """
    n = min(17, asked.limits.points)
    while True:
        points = np.repeat(bases, n, axis=0)
        points[:, axis] = np.tile(place(asked.box, axis, chebyshev_nodes(n)), len(bases))
        values = asked(points).reshape(len(bases), n, -1).swapaxes(0, 1).reshape(n, -1)
        coefficients = np.asarray(np.linalg.solve(_basis(chebyshev_nodes(n), n), values), np.float64)
        tails = np.abs(coefficients)[::-1].cumsum(axis=0)[::-1].max(axis=1)
        kept = int((tails[1:] > max(tolerance, 2e-15 * np.abs(values).max())).sum()) + 1
        if kept < n - 2:
            return coefficients[: kept + 2 if kept > 1 else 1], True
        if n == asked.limits.points:
            return coefficients[:_UNRESOLVED], False
        n = min(2 * n - 1, asked.limits.points)


def last_word(box: Box) -> int:
    """The most evaluations that `held_out_error` takes."""
    return 2 * FRESH + 2 * _CLIMBERS * _CLIMBED * box.dimension


def landmarks(ask: Ask, box: Box, rng: np.random.Generator) -> Array:
    """The middle, and points where an output of f is large or small: random ones, climbed along every axis twice."""
    rows, points, x = np.arange(_CLIMBERS), box.sample(_CLIMBERS, rng), chebyshev_nodes(_CLIMBED)
    for axis in [*rng.permutation(box.dimension), *rng.permutation(box.dimension)]:
        lines = np.repeat(points[:, None], _CLIMBED, axis=1)
        lines[:, :, axis] = place(box, axis, x)
        answers = np.reshape(ask(lines.reshape(-1, box.dimension)), (_CLIMBERS, _CLIMBED, -1))
        heights = (
            answers[rows, :, rows // 2 % answers.shape[2]] * (1.0 - 2.0 * (rows % 2))[:, None]
        )  # by turns up and down
        points = lines[rows, heights.argmax(axis=1)]
    return np.concatenate([(box.lo + box.hi).reshape(1, -1) / 2, points])
