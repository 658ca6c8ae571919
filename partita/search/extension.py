"""A polynomial that continues f from a region to the box around it, where f may be undefined: so that a grid can be fitted to it.

The polynomial is fitted to samples of f inside the region. Its distance from f there is sampled: an estimate, not a bound.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from partita.arithmetic.progress import Progress, report
from partita.errors import BudgetSpentError
from partita.functions.stand_ins import chebyshev_exponents, chebyshev_products
from partita.functions.target import Target
from partita.geometry.domains import Array, Box

__all__ = ["Extension", "extended"]

_MOST_TERMS, _MOST_AXES = 1200, 6
_SAMPLES_PER_TERM, _TESTS = 4, 1024
_FEW_SAMPLES_PER_TERM, _FEW_TESTS = 2, 64  # of a black box
_DEGREES = (2, 4, 6, 8, 11, 15, 20, 26, 34, 44, 60, 80)
_CUT = 1e-13  # singular values below are dropped: they belong to what the region does not determine
_LARGEST = 1e6  # times max |f|: coefficients beyond mean that f is not continued, but blown up


@dataclass(frozen=True, eq=False)
class Extension:
    """`Σ_α coefficients[α] Π_i T_{α_i}(t_i)`, t the point in the box scaled to [−1, 1]^m; `error` is the largest |f − it| seen."""

    box: Box
    exponents: Array
    coefficients: Array
    error: float

    def __call__(self, points: Array) -> Array:
        parts = np.array_split(points, len(points) // 4096 + 1)
        return np.concatenate([_basis(self.box, part, self.exponents) @ self.coefficients for part in parts])


def extended(target: Target, tolerance: float, progress: Progress | None = None) -> Extension | None:
    """The polynomial of the lowest degree tried whose sampled error on the domain is within the tolerance, or None.

    The best so far, if the evaluations of a black box are spent on the way. Points at which f failed are left out.
    """
    box, rng = target.box, np.random.default_rng(17)
    cheap = target.graph is not None or target.interpolated
    test = np.concatenate([target.domain.sample(_TESTS if cheap else _FEW_TESTS, rng), target.domain.corners(256)])
    truth, points = target(test), test[:0]
    test, truth = test[there := ~target.failed(test)], truth[there]
    size, best = float(np.abs(truth).max()) or 1.0, None
    for degree in _DEGREES:
        if box.dimension > _MOST_AXES or math.comb(box.dimension + degree, degree) > _MOST_TERMS:
            return None
        exponents = chebyshev_exponents(box.dimension, degree)
        edge = target.domain.corners(min(len(exponents), 1024))
        wanted = (_SAMPLES_PER_TERM if cheap else _FEW_SAMPLES_PER_TERM) * len(exponents) + 64
        if cheap:
            points = np.concatenate([target.domain.sample(wanted, rng), edge])
        else:  # every answer is used again
            points = np.concatenate([points, target.domain.sample(max(wanted - len(points), 1), rng)])
        report(progress, "extension", degree, _DEGREES[-1])
        try:
            values = target(points)
        except BudgetSpentError:
            if best is None:
                raise
            return best
        there = ~target.failed(points)
        found, *_ = np.linalg.lstsq(_basis(box, points[there], exponents), values[there], rcond=_CUT)
        error = float(np.abs(_basis(box, test, exponents) @ found - truth).max())
        if np.abs(found).max() <= _LARGEST * size and (best is None or error < best.error):
            best = Extension(box, exponents, np.asarray(found, np.float64), error)
            if error <= tolerance:
                return best
    return None


def _basis(box: Box, points: Array, exponents: Array) -> Array:
    """Products of Chebyshev polynomials, `(n, terms)`."""
    return chebyshev_products((points - (box.lo + box.hi).ravel() / 2) / (box.sides / 2), exponents)
