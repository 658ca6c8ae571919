"""Values that stand in for f where it has none: a polynomial through its answers, corrected by the answers nearby."""

from __future__ import annotations

import itertools
import math

import numpy as np
from scipy.spatial import cKDTree

from partita.geometry.domains import Array

__all__ = ["StandIns", "chebyshev_exponents", "chebyshev_products"]

_NEIGHBOURS = 32
_KEPT = 1 << 13  # answers
_FITTED = 768  # answers that the polynomial is fitted to, at most
_MOST_TERMS = 150
_MOST_DEGREES = 48
_FAR = 1e-5  # weight below which answers nearby are not interpolated
_CUT = 1e-9  # singular values below are dropped: they belong to what the answers do not determine


def chebyshev_exponents(dimension: int, degree: int) -> Array:
    """The exponents of all products of a total degree, `(terms, dimension)`."""
    return np.array([e for e in itertools.product(range(degree + 1), repeat=dimension) if sum(e) <= degree])


def chebyshev_products(t: Array, exponents: Array) -> Array:
    """Products of Chebyshev polynomials at points of [−1, 1]^m, `(n, terms)`."""
    angles = np.arccos(np.clip(t, -1, 1))
    out = np.ones((len(t), len(exponents)))
    for i in range(t.shape[1]):
        table = np.cos(angles[:, i, None] * np.arange(int(exponents[:, i].max()) + 1))
        out *= table[:, exponents[:, i].astype(int)]
    return out


class StandIns:
    """Answers of f at points of [−1, 1]^m, and values for other points.

    A polynomial continues f into parts of the domain where it has no values at all. To it the distance of the answers from it is
    added: among answers interpolated by r³ and an affine function, far from them that of the nearest one. The values are for fits,
    which need one on every node of a grid.
    """

    def __init__(self) -> None:
        self._points: list[Array] = []
        self._values: list[Array] = []
        self._latest: tuple[Array, Array] | None = None
        self._count = self._fitted_to = 0
        self._exponents: Array = np.zeros((1, 1))
        self._coefficients: Array = np.zeros((1, 1))

    def learn(self, points: Array, values: Array) -> None:
        """Keep answers: the first some thousand, and the latest.

        Args:
            points: `(n, m)`. values: `(n, out)`.
        """
        if not len(points):
            return
        self._latest = (points, values) if self._count >= _KEPT else None
        if self._latest is None:
            self._points.append(points)
            self._values.append(values)
            self._count += len(points)

    def at(self, wanted: Array) -> Array:
        """Values at points `(n, m)`, `(n, out)`, once there are answers."""
        latest = () if self._latest is None else (self._latest,)
        points = np.concatenate([*self._points, *(z for z, _ in latest)])
        values = np.concatenate([*self._values, *(v for _, v in latest)])
        if self._fitted_to < min(_FITTED, self._count // 2 + 1):
            self._fit(points, values, wanted)
        base = chebyshev_products(wanted, self._exponents) @ self._coefficients
        count = min(_NEIGHBOURS, len(points))
        distances, near = cKDTree(points).query(wanted, k=[*range(1, count + 1)])
        rows = np.unique(near)
        off = np.zeros_like(values)
        off[rows] = values[rows] - chebyshev_products(points[rows], self._exponents) @ self._coefficients
        for i, (z, d, k) in enumerate(zip(wanted, distances, near)):
            near_by = 1 / (1 + (3 * d[0] / max(d[-1] - d[0], 1e-12)) ** 4)  # 1 among answers, 0 far from them
            local = _interpolated(points[k], off[k], z) if near_by > _FAR else off[k[0]]
            base[i] += near_by * local + (1 - near_by) * off[k[0]]
        lowest, highest = values.min(axis=0), values.max(axis=0)
        out: Array = np.clip(base, 2 * lowest - highest, 2 * highest - lowest)
        return out

    def _fit(self, points: Array, values: Array, wanted: Array) -> None:
        """The polynomial of the degree that, without the eighth of the answers nearest to `wanted`, predicts them best."""
        chosen = np.random.default_rng(0).permutation(len(points))[: min(len(points), _FITTED)]
        points, values, self._fitted_to = points[chosen], values[chosen], len(chosen)
        order = np.argsort(cKDTree(wanted).query(points)[0])
        held, rest = order[: len(order) // 8], order[len(order) // 8 :]
        best = math.inf
        for degree in range(_MOST_DEGREES):
            exponents = chebyshev_exponents(points.shape[1], degree)
            if degree and len(exponents) > min(len(points) // 3, _MOST_TERMS):
                break
            basis = chebyshev_products(points, exponents)
            found, *_ = np.linalg.lstsq(basis[rest], values[rest], rcond=_CUT)
            error = float(np.abs(basis[held] @ found - values[held]).max(initial=0.0))
            if error < best or degree == 0:
                best, self._exponents = error, exponents
        found, *_ = np.linalg.lstsq(chebyshev_products(points, self._exponents), values, rcond=_CUT)
        self._coefficients = np.asarray(found, np.float64)


def _interpolated(points: Array, values: Array, z: Array) -> Array:
    """The value at z of the spline of r³ and an affine function through points `(k, m)` with values `(k, out)`."""
    offsets = points - z
    x = offsets / (float(np.abs(offsets).max()) or 1.0)
    distances = np.sqrt(((x[:, None] - x[None]) ** 2).sum(axis=2))
    plane = np.concatenate([np.ones((len(x), 1)), x], axis=1)
    system = np.block([[distances**3, plane], [plane.T, np.zeros((plane.shape[1], plane.shape[1]))]])
    known = np.concatenate([values, np.zeros((plane.shape[1], values.shape[1]))])
    weights, *_ = np.linalg.lstsq(system, known, rcond=1e-13)
    row = np.concatenate([np.sqrt((x**2).sum(axis=1)) ** 3, [1.0], np.zeros(x.shape[1])])
    out: Array = row @ weights
    return out
