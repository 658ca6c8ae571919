"""Batches of polynomials on [−1, 1]^m with a remainder: their ranges, by halving the cube until the bound is tight."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import scipy

from partita.arithmetic.progress import Progress, report
from partita.errors import BudgetSpentError
from partita.geometry.domains import Array

__all__ = ["Ranges", "bound_ranges", "half_maps"]

_U = 2.0**-53
_TIGHT = 1.05  # bounds are refined until they are this close to a value attained,
_COARSE = 0.05  # or below this share of the goal, or until so many pieces were looked at
_TIGHT_PIECES = 1 << 14
_NEAR_REST = 1.1
Maps = tuple[
    tuple["scipy.sparse.csr_array", "scipy.sparse.csr_array"], ...
]  # the lower and the upper half of each axis


@dataclass(frozen=True, eq=False)
class Ranges:
    """`largest`: a bound of |p ± remainder| over all polynomials of the batch; `least`: some |p| reaches it, remainder taken off.

    `bounds`: one bound per polynomial, `(batch,)`. `settled`: whether `largest ≤ goal`. `pieces`: cubes looked at.
    """

    largest: float
    least: float
    bounds: Array
    settled: bool
    pieces: int


@lru_cache(maxsize=64)
def half_maps(exponents: tuple[tuple[int, ...], ...]) -> Maps:
    """Two sparse maps `(N, N)` per axis, on coefficients: p(t) to p with `t_i = ∓½ + ½τ_i`; columns sum to at most 1 in modulus.

    `t^k = Σ_j C(k, j) (∓½)^{k−j} (½)^j τ^j`: numbers with few bits, exact in floats for k ≤ 50.
    """
    position = {e: n for n, e in enumerate(exponents)}
    dimension = len(exponents[0])
    maps = []
    for axis in range(dimension):
        entries = [
            (position[(*e[:axis], j, *e[axis + 1 :])], n, math.comb(e[axis], j) * 0.5 ** e[axis], (-1) ** (e[axis] - j))
            for n, e in enumerate(exponents)
            for j in range(e[axis] + 1)
        ]
        rows, columns, sizes, signs = (np.array(part) for part in zip(*entries))
        shape = (len(exponents), len(exponents))
        lower, upper = (scipy.sparse.csr_array((s, (rows, columns)), shape=shape) for s in (sizes * signs, sizes))
        maps.append((lower, upper))
    return tuple(maps)


def bound_ranges(
    coefficients: Array,
    remainder: Array,
    exponents: tuple[tuple[int, ...], ...],
    *,
    goal: float,
    least: float = 0.0,
    max_pieces: int = 1 << 20,
    progress: Progress | None = None,
) -> Ranges:
    """Bounds of `|Σ_α c_α t^α| + remainder` over the cube, for every polynomial of a batch.

    `Σ|c_α| + remainder` bounds a polynomial. Where that exceeds the goal, or 1.05 times a value that is attained, the cube is
    halved along the axis that moves the polynomial most; the excess falls with the square of the width. Once a value beyond the
    goal is attained, or progress stops the search, there is nothing left to do, and the bounds stay as they are.

    Args: coefficients `(N, batch)`; remainder `(batch,)`; exponents graded, constants first; least: a value attained elsewhere.
    """
    bounds = np.zeros(coefficients.shape[1])
    maps, weights = half_maps(exponents), np.array(exponents, dtype=float)
    current, rest = coefficients, remainder
    owner: np.ndarray = np.arange(len(bounds))
    pieces, depth, dimension = 0, 0, weights.shape[1]
    while current.shape[1]:
        pieces += current.shape[1]
        size = np.abs(current)
        bound = (size.sum(axis=0) + rest) * (1 + 2 * len(size) * _U)
        bound = np.where(np.isnan(bound), np.inf, bound)  # a comparison with NaN is false, and would pass for proved
        least = max(least, float((size[0] - rest).max()))
        tighten = depth < 4 * dimension and pieces < _TIGHT_PIECES
        aim = min(goal, max(_TIGHT * least, _COARSE * goal)) if tighten else goal
        going = depth < 12 * dimension and pieces < max_pieces and least <= goal and not _is_over(progress, pieces)
        # a remainder above the goal cannot be helped: after a while it is enough to come near it
        within = aim if pieces < _TIGHT_PIECES else np.where(rest > goal, _NEAR_REST * rest, aim)
        refine = (bound > within) & going
        np.maximum.at(bounds, owner[~refine], bound[~refine])
        current, rest, owner = _halved(current[:, refine], rest[refine], owner[refine], maps, weights)
        depth += 1
    largest = float(bounds.max(initial=0.0))
    return Ranges(largest, least, bounds, largest <= goal, pieces)


def _is_over(progress: Progress | None, pieces: int) -> bool:
    try:
        report(progress, "pieces of the proof", pieces)
    except BudgetSpentError:
        return True
    return False


def _halved(
    current: Array, rest: Array, owner: np.ndarray, maps: Maps, weights: Array
) -> tuple[Array, Array, np.ndarray]:
    """Both halves of every cube, along the axis that matters most; rounding goes into the remainder."""
    size = np.abs(current)
    axis = (weights.T @ size).argmax(axis=0)
    rest = rest + 2 * len(size) * _U * size.sum(axis=0)
    parts, rests, owners = [], [], []
    for i in np.unique(axis):
        mine = axis == i
        for half in maps[i]:
            parts.append(half @ current[:, mine])
            rests.append(rest[mine])
            owners.append(owner[mine])
    if not parts:
        return current, rest, owner
    return np.concatenate(parts, axis=1), np.concatenate(rests), np.concatenate(owners)
