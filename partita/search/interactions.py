"""Black boxes as sums of functions of one and two variables: which variables interact, and the terms of such a sum.

The high-dimensional model representation anchored at c, the middle of the box, up to pairs:
`f(x) ≈ f(c) + Σ_i [f_i(x_i) − f(c)] + Σ_{i,j} [f_ij(x_i, x_j) − f_i(x_i) − f_j(x_j) + f(c)]`, where f_i and f_ij are f with all
other variables at c. It is exact if f is a sum of functions of at most two variables. Whether i and j interact shows in
mixed differences, `f(x) − f(x; y_i) − f(x; y_j) + f(x; y_i, y_j)`, which vanish for every x and y if they do not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from partita.functions.target import Target
from partita.geometry.domains import Array, Box

__all__ = ["SumOfTerms", "represented"]

_SPLITS = 8  # random halves of the variables, for a first look
_BASES = 4  # points at which every pair is tried
_TESTS = 8  # points at which the sum is compared with f
_NEGLIGIBLE = 0.05  # of the tolerance: a mixed difference that counts as none
_NOISE = 32 * 2.0**-52  # of the largest value of f: a mixed difference of four values may be so large by rounding alone
_MOST_PAIRS = 24


@dataclass(frozen=True, eq=False)
class SumOfTerms:
    """f as a constant and terms of one or two variables.

    Attributes:
        anchor: c, `(m,)`. constant: f(c), `(out,)`.
        variables: of each term, one index or two.
        residual: the largest difference to f at a few random points.
    """

    function: Target
    anchor: Array
    constant: Array
    variables: tuple[tuple[int, ...], ...]
    residual: float = 0.0

    def term(self, k: int) -> Callable[[Array], Array]:
        """The k-th term, `(n, 1 or 2)` to `(n, out)`.

        A pair holds the terms of its single variables too, unless an earlier pair holds them.
        """
        own = self.variables[k]
        earlier = {i for term in self.variables[:k] for i in term}
        held = [i in earlier for i in own]

        def at(points: Array) -> Array:
            found = self._restricted(own, points)
            for column, is_held in enumerate(held):
                if is_held:
                    found = found - self._restricted(own[column : column + 1], points[:, column : column + 1])
            return found + (sum(held) - 1) * self.constant

        return at

    def __call__(self, points: Array) -> Array:
        """The sum, `(n, m)` to `(n, out)`."""
        total = np.tile(self.constant, (len(points), 1))
        for k, own in enumerate(self.variables):
            total = total + self.term(k)(points[:, list(own)])
        return total

    def _restricted(self, own: tuple[int, ...], points: Array) -> Array:
        """f with all variables but these at the anchor."""
        moved = np.tile(self.anchor, (len(points), 1))
        moved[:, list(own)] = points
        return self.function(moved)


def represented(target: Target, box: Box, tolerance: float, *, seed: int = 0) -> SumOfTerms | str:
    """f as a sum of terms of one or two variables, or why it is none within the tolerance. f is evaluated at random points.

    Args:
        target: f, a black box.
        box: where. tolerance: what the sum may be off by.
        seed: random seed of the points.
    """
    rng, m = np.random.default_rng([seed, 11]), box.dimension
    points = box.sample(_TESTS, rng)
    values = target(points)
    noise = _NOISE * float(np.abs(values).max())
    if noise > tolerance:
        return f"the tolerance is below what values of f are rounded by, about {noise:.2g}"
    limit = max(_NEGLIGIBLE * tolerance, noise)
    pairs = _interacting(target, box, limit, rng) if _splits_interact(target, box, limit, rng) else []
    if isinstance(pairs, str):
        return pairs
    inside = {i for pair in pairs for i in pair}
    anchor = (box.lo.ravel() + box.hi.ravel()) / 2
    terms = (*pairs, *((i,) for i in range(m) if i not in inside))
    found = SumOfTerms(target, anchor, target(anchor[None])[0], tuple(terms))
    residual = float(np.abs(found(points) - values).max())
    if not residual <= tolerance:
        return (
            f"three or more variables interact: a sum of functions of pairs is off by {residual:.3g} at random points"
        )
    return SumOfTerms(target, anchor, found.constant, found.variables, residual)


def _splits_interact(target: Target, box: Box, limit: float, rng: np.random.Generator) -> bool:
    """Whether f differs from a sum over some random halves of the variables: `f(x) − f(x_S, y) − f(y_S, x) + f(y)`."""
    x, y = box.sample(_SPLITS, rng), box.sample(_SPLITS, rng)
    half = rng.random(x.shape) < 0.5
    values = target(np.concatenate([x, np.where(half, y, x), np.where(half, x, y), y]))
    a, b, c, d = values.reshape(4, _SPLITS, -1)
    return not float(np.abs(a - b - c + d).max()) <= limit


def _interacting(target: Target, box: Box, limit: float, rng: np.random.Generator) -> list[tuple[int, int]] | str:
    """The pairs with a mixed difference above the limit, or why there are too many."""
    m = box.dimension
    every = list(combinations(range(m), 2))
    largest = np.zeros(len(every))
    for _ in range(_BASES):
        x, y = box.sample(2, rng)
        points = np.tile(x, (1 + m + len(every), 1))
        points[1 + np.arange(m), np.arange(m)] = y
        for row, pair in enumerate(every, 1 + m):
            points[row, list(pair)] = y[list(pair)]
        values = target(points)
        single, both = values[1 : 1 + m], values[1 + m :]
        mixed = both - single[[i for i, _ in every]] - single[[j for _, j in every]] + values[0]
        largest = np.maximum(largest, np.abs(mixed).max(axis=1))
    found = [pair for pair, size in zip(every, largest) if not size <= limit]
    if len(found) > _MOST_PAIRS:
        return f"{len(found)} pairs of variables interact; up to {_MOST_PAIRS} are represented"
    return found
