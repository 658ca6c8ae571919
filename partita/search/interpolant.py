"""A stand-in for a slow function: polynomials through few of its values, on boxes that are halved where one is not enough.

On a box the polynomial is `Σ_k c_k Π_i h_{k_i}(x_i)` over a downward closed set of multi-indices k, with one point
`(x_{k_1}, …, x_{k_m})` for each: x_0, x_1, … are Leja points, each as far as possible from those before it, and
`h_k(x) = Π_{j<k} (x − x_j)/(x_k − x_j)`. Then |h_k| ≤ 1, so `c_k`, what f differs by at a new point, says how much the term
matters. The set grows where the terms are large, so that constants, sums of functions of one variable, and smooth functions are
found with few points, in any dimension. Points are never dropped: every answer is used.

Nothing here is proved. Errors are sampled at points that the polynomial does not pass through.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from partita.errors import BudgetSpentError
from partita.geometry.domains import Array, Box

__all__ = ["Interpolant", "interpolate"]

Ask = Callable[[Array], Array]  # flat points (n, m) to values (n, out)
Levels = tuple[int, ...]  # on an axis, level l has the points up to number 2l

_FIRST = 0.17  # the first Leja point: off the middle, where many functions vanish
_MOST_LEVELS = 40
_AT_ONCE = 1 << 22
_CHECKS, _FEW_CHECKS = 12, 8  # random points at which the whole box (and 4 for each axis), and a part of it, is checked
_CHECKED_PART = 0.4  # of the number of its terms: points at which a polynomial is checked before it is trusted
_PAIRS = 8  # axes up to which all pairs of them are looked at from the start
_FALL = 0.4  # what twice as many points must leave of the error on up to two axes, or the box is halved
_SMOOTH = 256  # points from which on that is asked of the whole box; a part of it may stop earlier
_SHARE = 0.4  # terms of at least this part of the largest are refined together
_PATIENCE, _HOPELESS = (
    1000,
    0.9,
)  # evaluations, and what twice as many must leave of the error: noise and jumps leave more
_NARROWEST = 2.0**-24  # of a side of the domain


@lru_cache(maxsize=1)
def _leja() -> tuple[Array, Array]:
    """The points x_0, …, x_K in [−1, 1], and `Π_{j<k} (x_k − x_j)`."""
    grid = np.concatenate([-np.cos(np.linspace(0, np.pi, 20_001)), [_FIRST]])
    points, product, scales = [_FIRST], np.abs(grid - _FIRST), [1.0]
    for _ in range(2 * _MOST_LEVELS):
        k = int(product.argmax())
        points.append(float(grid[k]))
        scales.append(float(np.prod(grid[k] - np.array(points[:-1]))))
        product *= np.abs(grid - grid[k])
    return np.array(points), np.array(scales)


def _newton(unit: Array, count: int) -> Array:
    """`h_0, …, h_{count−1}` at numbers `(n,)` in [−1, 1], `(n, count)`."""
    points, scales = _leja()
    table = np.ones((len(unit), count))
    for k in range(1, count):
        table[:, k] = table[:, k - 1] * (unit - points[k - 1])
    return table / scales[:count]


@dataclass(eq=False)
class _Leaf:
    """One polynomial on a box: indices `(K, m)`, coefficients `(K, out)`, and the terms that may still be refined.

    Attributes:
        done: levels whose neighbours were added. open: the others, with the size of their terms.
        known: points inside with f there, which the polynomial does not pass through: for checking.
        error: the largest difference at those, or of the open terms together.
    """

    box: Box
    outputs: int
    known: tuple[Array, Array]
    indices: NDArray[np.int64] = field(init=False)
    coefficients: Array = field(init=False)
    done: set[Levels] = field(default_factory=set)
    open: dict[Levels, float] = field(default_factory=dict)
    asked: list[tuple[Array, Array]] = field(default_factory=list)
    error: float = math.inf
    parts: tuple[_Leaf, ...] = ()
    axis: int = 0
    _split: _Split | None = None

    def __post_init__(self) -> None:
        self.indices = np.zeros((0, self.box.dimension), np.int64)
        self.coefficients = np.zeros((0, self.outputs))

    @property
    def left_over(self) -> float:
        """What the open terms together add at a typical point: the terms after them are smaller, and signs differ."""
        return math.hypot(*self.open.values())

    def first_levels(self) -> list[Levels]:
        """The constant and one level along every axis; if there are few, a second one, and every pair of axes."""
        m = self.box.dimension
        unit = np.eye(m, dtype=int)
        rows = [0 * unit[0], *unit]
        if m <= _PAIRS:
            rows += [*(2 * unit), *(unit[i] + unit[j] for i, j in itertools.combinations(range(m), 2))]
        return [tuple(row.tolist()) for row in rows]

    def add(self, levels: Sequence[Levels], ask: Ask) -> None:
        """Evaluate f at the points of these levels, and add their terms."""
        blocks = [
            np.array(list(itertools.product(*((0,) if n == 0 else (2 * n - 1, 2 * n) for n in of)))) for of in levels
        ]
        new, owner = np.concatenate(blocks), np.repeat(np.arange(len(blocks)), [len(b) for b in blocks])
        points = self._place(_leja()[0][new])
        answers = np.asarray(ask(points), dtype=np.float64)
        self.asked.append((points, answers))
        sizes, degree = np.zeros(len(levels)), new.sum(axis=1)
        for d in np.unique(degree):  # a term depends on those of lower degree only
            some = degree == d
            rest = answers[some] - self._polynomial(_leja()[0][new[some]])
            self.indices = np.concatenate([self.indices, new[some]])
            self.coefficients = np.concatenate([self.coefficients, rest])
            np.maximum.at(sizes, owner[some], np.abs(rest).max(axis=1))
        self.open |= {of: float(size) for of, size in zip(levels, sizes)}

    def grow(self, ask: Ask, *, every: bool) -> bool:
        """Refine the largest terms, or every open one; False if none is left."""
        largest = max(self.open.values(), default=0.0)
        chosen = [of for of, size in self.open.items() if every or size >= _SHARE * largest]
        self.done |= set(chosen)
        for of in chosen:
            del self.open[of]
        new = dict.fromkeys(n for of in chosen for n in self._neighbours(of))
        if new:
            self.add(list(new), ask)
        return bool(self.open)

    def _neighbours(self, levels: Levels) -> list[Levels]:
        """One level more along an axis, if all levels below that were refined."""
        found = []
        for i in range(len(levels)):
            up = (*levels[:i], levels[i] + 1, *levels[i + 1 :])
            below = ((*up[:j], up[j] - 1, *up[j + 1 :]) for j in range(len(up)) if up[j])
            if (
                up[i] <= _MOST_LEVELS
                and up not in self.open
                and up not in self.done
                and all(b in self.done for b in below)
            ):
                found.append(up)
        return found

    def be_constant(self) -> None:
        """The constant that is closest to the values kept for checking: where nothing else was evaluated."""
        values = self.known[1]
        self.indices = np.zeros((1, self.box.dimension), np.int64)
        self.coefficients = (values.max(axis=0) / 2 + values.min(axis=0) / 2)[None]
        self.check()

    def know(self, points: Array, answers: Array) -> None:
        """Keep values of f for checking."""
        before, values = self.known
        self.known = np.concatenate([before, points]), np.concatenate([values, answers])

    def check_more(self, ask: Ask, rng: np.random.Generator) -> float:
        """The same after more points were added to those kept for checking, if the polynomial has many terms."""
        wanted = int(_CHECKED_PART * len(self.indices)) - len(self.known[0])
        if wanted > 0:
            points = self.box.sample(wanted, rng)
            self.know(points, ask(points))
        return self.check()

    def check(self) -> float:
        """The largest error at the points kept for checking."""
        points, answers = self.known
        self.error = float(np.abs(self(points) - answers).max()) if len(points) else 0.0
        return self.error

    def halve(self) -> None:
        """Two boxes, cut across the axis whose terms are the largest."""
        weight = np.zeros(self.box.dimension)
        for of, size in self.open.items():
            weight += size * np.array(of) / max(sum(of), 1)
        self.axis = int(weight.argmax())
        lo, hi = self.box.lo.ravel().copy(), self.box.hi.ravel().copy()
        middle = lo[self.axis] / 2 + hi[self.axis] / 2
        left, right = hi.copy(), lo.copy()
        left[self.axis] = right[self.axis] = middle
        points, answers = (np.concatenate(x) for x in zip(self.known, *self.asked))
        below = points[:, self.axis] <= middle
        self.parts = (
            _Leaf(Box(lo, left), self.outputs, (points[below], answers[below]), error=self.error),
            _Leaf(Box(right, hi), self.outputs, (points[~below], answers[~below]), error=self.error),
        )
        self.asked = []

    def __call__(self, points: Array) -> Array:
        """Values `(n, out)` at points `(n, m)` of the box."""
        if not self.parts:
            lo, hi = self.box.lo.ravel(), self.box.hi.ravel()
            return self._polynomial(np.clip((2 * points - lo - hi) / (hi - lo), -1, 1))
        below = points[:, self.axis] <= self.parts[0].box.hi.ravel()[self.axis]
        out = np.empty((len(points), self.outputs))
        for some, part in ((below, self.parts[0]), (~below, self.parts[1])):
            if some.any():
                out[some] = part(points[some])
        return out

    def _place(self, unit: Array) -> Array:
        lo, hi = self.box.lo.ravel(), self.box.hi.ravel()
        return np.clip(np.where(unit < 0, lo + (hi - lo) * (1 + unit) / 2, hi - (hi - lo) * (1 - unit) / 2), lo, hi)

    def _polynomial(self, unit: Array) -> Array:
        """The terms as products of a part in the first half of the variables and one in the rest: one matrix product."""
        if not len(self.indices):
            return np.zeros((len(unit), self.outputs))
        if self._split is None or self._split.count != len(self.indices):
            self._split = _Split.of(self.indices, self.coefficients)
        return self._split(unit)


@dataclass(frozen=True, eq=False)
class _Split:
    """Indices `(a, m₁)` and `(b, m − m₁)` of both halves of the variables, and the coefficients of their products, `(a, b·out)`."""

    count: int
    first: NDArray[np.int64]
    second: NDArray[np.int64]
    table: Array

    @classmethod
    def of(cls, indices: NDArray[np.int64], coefficients: Array) -> _Split:
        half = (indices.shape[1] + 1) // 2
        (first, i), (second, j) = (
            np.unique(part, axis=0, return_inverse=True) for part in (indices[:, :half], indices[:, half:])
        )
        table = np.zeros((len(first), len(second), coefficients.shape[1]))
        table[i.ravel(), j.ravel()] = coefficients
        return cls(len(indices), first, second, table.reshape(len(first), -1))

    def __call__(self, unit: Array) -> Array:
        rows = max(1, _AT_ONCE // (self.table.shape[1] + len(self.first)))
        half, b = self.first.shape[1], len(self.second)
        parts = []
        for start in range(0, len(unit), rows):
            some = unit[start : start + rows]
            left = (_terms(some[:, :half], self.first) @ self.table).reshape(len(some), b, -1)
            parts.append(np.einsum("nb,nbo->no", _terms(some[:, half:], self.second), left))
        return np.concatenate(parts)


def _terms(unit: Array, indices: NDArray[np.int64]) -> Array:
    """`Π_i h_{k_i}(x_i)` for points `(n, m)` and indices `(a, m)`, `(n, a)`."""
    terms = np.ones((len(unit), len(indices)))
    for i, column in enumerate(indices.T):
        if column.any():
            terms *= _newton(unit[:, i], int(column.max()) + 1)[:, column]
    return terms


@dataclass(frozen=True, eq=False)
class Interpolant:
    """A function that costs nothing to evaluate, in place of f.

    Attributes:
        error: the largest difference from f that was seen or is expected. resolved: whether it is within the tolerance.
        stopped: whether the work was ended by a limit of time or evaluations that the caller set.
        boxes: the number of polynomials.
    """

    error: float
    resolved: bool
    stopped: bool
    boxes: int
    _root: _Leaf

    def __call__(self, points: Array) -> Array:
        return self._root(points)


def interpolate(
    ask: Ask,
    box: Box,
    *,
    outputs: int,
    tolerance: float,
    most: int,
    known: tuple[Array, Array] | None = None,
    rough: float = 1.5,
    watch: Callable[[float], None] = lambda error: None,
) -> Interpolant:
    """An interpolant that is within the tolerance of f wherever it was looked at, or the best that so many points allow.

    Args:
        ask: f, flat points `(n, m)` of the box to values `(n, out)`.
        tolerance: how far it may be from f.
        most: the largest number of points to evaluate f at.
        known: points `(n, m)` of the box with the values of f, `(n, out)`, for checking.
        rough: times the tolerance, how far it may be from f once the box had to be cut: then every digit has its price.
        watch: called often, with the largest error that remains; what it raises ends the work.

    >>> f = interpolate(lambda z: np.sin(z).sum(axis=1, keepdims=True), Box([-1] * 3, [1] * 3), outputs=1, tolerance=1e-6, most=999)
    >>> f.resolved, f.boxes
    (True, 1)
    """
    rng, asked = np.random.default_rng(23), 0

    def counted(points: Array) -> Array:
        nonlocal asked
        if asked + len(points) > most:
            raise _Enough
        asked += len(points)
        return ask(points)

    none = np.zeros((0, box.dimension)), np.zeros((0, outputs))
    root = _Leaf(box, outputs, known or none)
    waiting, leaves, stopped = [root], [root], False
    look, before = _PATIENCE, math.inf
    while waiting:
        if asked >= look:
            worst = max(leaf.error for leaf in leaves)
            if worst > _HOPELESS * before:
                break
            look, before = 2 * look, worst
        leaf = max(waiting, key=lambda x: x.error)
        whole = leaf is root
        try:
            fine = _fit(leaf, counted, tolerance if whole else rough * tolerance, rng, watch, whole=whole)
        except _Enough:
            break
        except BudgetSpentError:
            stopped = True
            if not len(root.indices):
                if not len(root.known[0]):
                    raise
                root.be_constant()
            break
        waiting.remove(leaf)
        if not fine and (leaf.box.sides > _NARROWEST * box.sides).all():
            leaf.halve()
            waiting += leaf.parts
            leaves.remove(leaf)
            leaves += leaf.parts
    error = max(leaf.error for leaf in leaves)
    return Interpolant(error, error <= rough * tolerance, stopped, len(leaves), root)


class _Enough(Exception):
    """f was evaluated as often as was allowed."""


def _landmarks(box: Box) -> Array:
    """The middle, and 0 if it lies inside: where many functions have a kink."""
    middle = (box.lo / 2 + box.hi / 2).reshape(1, -1)
    zero = np.zeros_like(middle)
    return np.concatenate([middle, zero]) if box.contains(zero)[0] and middle.any() else middle


def _fit(
    leaf: _Leaf, ask: Ask, tolerance: float, rng: np.random.Generator, watch: Callable[[float], None], *, whole: bool
) -> bool:
    """Grow one polynomial until it is within the tolerance at all checks; False if halving the box looks better."""
    m, levels = leaf.box.dimension, leaf.first_levels()
    leaf.add(levels[:1], ask)
    leaf.add(levels[1:], ask)
    points = leaf.box.sample(_CHECKS + 4 * m if whole else _FEW_CHECKS, rng)
    points = np.concatenate([points, _landmarks(leaf.box)]) if whole else points
    leaf.know(points, ask(points))
    last = max(sum(of) for of in levels)
    leaf.done |= {of for of in leaf.open if sum(of) < last}
    leaf.open = {of: size for of, size in leaf.open.items() if sum(of) == last}
    first, every = len(leaf.indices), False
    best, at = math.inf, max(first, _SMOOTH if whole else 4 * (m + 1))
    while True:
        watch(max(leaf.left_over, leaf.check()))
        if leaf.left_over <= tolerance:
            if leaf.check() <= tolerance and leaf.check_more(ask, rng) <= tolerance:
                return True
            every = True  # something that the terms do not show
        if len(leaf.indices) >= at:
            error = max(leaf.left_over, leaf.check())
            if error > _FALL ** min(1.0, 2 / m) * best:
                return False
            best, at = error, 2 * len(leaf.indices)
        if not leaf.grow(ask, every=every):
            return leaf.check() <= tolerance
        every = False
