"""A function on a box as a fit sees it: in relative terms, on lines, on product grids, and at points kept aside for testing."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from partita.errors import PartitaError, ShapeError
from partita.geometry.domains import Array, Box
from partita.search.axis_fit import chebyshev_degree, chebyshev_points
from partita.search.tensor_fit import evaluate_points, evaluate_tensor

__all__ = ["Ask", "Sampled", "SamplesSpent", "Tests"]

Ask = Callable[[Array], Array]  # flat points (n, m) to values (n, out)

_FINEST = 513  # points on a line; twice as many in one dimension
_LINES = 24
_SCATTERED = 4096
_PRODUCT = 1 << 16
_LANDMARKS = 4096
_ZOOMS = 3
_STARTS = 8
_BISECTIONS = 40


class SamplesSpent(PartitaError):
    """One more batch would exceed the number of points at which f may be evaluated."""


@dataclass(eq=False)
class Sampled:
    """`(f − offset)/scale` on a box, offset and scale such that its values are of order 1, and how often f was evaluated.

    Attributes:
        size: the largest |f|/scale among the first points: rounding inside f is about this times 1e-16.
        asked, most: points evaluated so far, and allowed.
    """

    ask: Ask
    box: Box
    outputs: int
    most: int
    asked: int = 0
    offset: Array | float = 0.0
    scale: float = 1.0
    size: float = 1.0

    def find_scale(self) -> None:
        """Offset, scale and size by what a few hundred points show."""
        values = self.at(np.concatenate([self.box.sample(256, np.random.default_rng(1)), self.box.corners(256)]))
        self.offset = values.max(axis=0) / 2 + values.min(axis=0) / 2
        self.scale = float(np.abs(values - self.offset).max()) or 1.0
        self.size = float(np.abs(values).max()) / self.scale

    @property
    def left(self) -> int:
        return self.most - self.asked

    def at(self, points: Array) -> Array:
        """Relative values `(n, out)` at flat points `(n, m)` of the box."""
        if len(points) > self.left:
            raise SamplesSpent(
                f"f was evaluated at {self.asked:,} points; {len(points):,} more exceed the {self.most:,} that are allowed."
            )
        self.asked += len(points)
        values = np.asarray(self.ask(points), dtype=np.float64)
        if values.shape != (len(points), self.outputs):
            raise ShapeError(
                f"f returned shape {values.shape} for {len(points)} points; expected {(len(points), self.outputs)}."
            )
        return (values - self.offset) / self.scale

    def place(self, unit: Array, axis: int) -> Array:
        """Points of [−1, 1] carried to the axis, inside its closed interval."""
        lo, hi = self.box.lo.ravel()[axis], self.box.hi.ravel()[axis]
        out: Array = np.clip(
            np.where(unit < 0, lo + (hi - lo) * (1 + unit) / 2, hi - (hi - lo) * (1 - unit) / 2), lo, hi
        )
        return out

    def unit(self, point: Array) -> Array:
        """A point of the box carried to [−1, 1]^m."""
        return np.clip(2 * (point - self.box.lo.ravel()) / self.box.sides - 1, -1, 1)

    def on(self, axes: Sequence[Array]) -> Array:
        """Relative values on a product of points, `(n_1, …, n_m, out)`."""
        shape = tuple(len(a) for a in axes)
        if math.prod(shape) > self.left:
            raise SamplesSpent(
                f"f was evaluated at {self.asked:,} points; a grid {shape} exceeds the {self.most:,} that are allowed."
            )
        return self.at(_product(axes)).reshape(*shape, self.outputs)

    def first_lines(self) -> Array:
        """Points of [−1, 1]^m to draw lines through: the middle, and others that take all places on each axis."""
        m = self.box.dimension
        count = 1 if m == 1 else max(4, min(_LINES, self.left // (256 * m)))
        rng, places = np.random.default_rng(2), chebyshev_points(max(count - 1, 1))
        others = np.stack([rng.permutation(places) for _ in range(m)], axis=1)
        return np.concatenate([np.zeros((1, m)), others])[:count]

    def along(self, axis: int, lines: Array, level: float) -> tuple[Array, bool]:
        """f on lines parallel to an axis through `lines`, `(L, m)` in [−1, 1]^m, and whether that resolves it.

        The number of points on a line doubles until Chebyshev coefficients are below the level from a third of the degrees on.
        """
        count, finest = 17, _FINEST if self.box.dimension > 1 else 2 * _FINEST - 1
        through = np.stack([self.place(lines[:, i], i) for i in range(self.box.dimension)], axis=1)
        while True:
            points = np.repeat(through[None], count, axis=0)
            points[:, :, axis] = self.place(chebyshev_points(count), axis)[:, None]
            values = self.at(points.reshape(-1, self.box.dimension)).reshape(count, -1)
            if 3.5 * chebyshev_degree(values, level) + 12 <= count or count >= finest:
                return values, 2 * chebyshev_degree(values, 3 * level) <= count
            count = 2 * count - 1


@dataclass(frozen=True, eq=False)
class Tests:
    """Points kept out of the fit: a product of random abscissae with both ends, random points, corners, landmarks, jumps."""

    f: Sampled
    axes: tuple[Array, ...]
    on_axes: Array
    points: Array
    at_points: Array

    @classmethod
    def of(cls, f: Sampled, nodes: Sequence[int], seed: int) -> Tests:
        """On each axis half as many abscissae again as the fit uses; fewer in many dimensions or if few samples are left."""
        rng = np.random.default_rng(seed)
        room = max(_PRODUCT, min(2 * math.prod(nodes), 4 * _PRODUCT))
        most = max(3, int(min(room, f.left // 4) ** (1 / len(nodes))))
        axes = []
        for i, count in enumerate(min(3 * n // 2 + 8, most) - 2 for n in nodes):
            angles = (np.arange(count) + rng.random(count)) / count
            axes.append(f.place(np.concatenate([[-1.0], -np.cos(np.pi * angles), [1.0]]), i))
        on_axes = f.on(axes)
        scattered = f.box.sample(min(_SCATTERED, f.left // 4), rng)
        points = np.concatenate([scattered, f.box.corners(64), landmarks(f.box, min(_LANDMARKS, f.left // 4))])
        steep, at_steep = steep_places(f, axes, on_axes)
        return cls(f, tuple(axes), on_axes, np.concatenate([points, steep]), np.concatenate([f.at(points), at_steep]))

    def worst(self, centers: Sequence[Array], rates: Sequence[float], values: Array) -> tuple[float, Array]:
        """The largest relative error of the head with relative values `(P_1, …, P_m, out)`, and where."""
        on_axes = np.abs(evaluate_tensor(self.axes, centers, rates, values) - self.on_axes).max(axis=-1)
        at_points = np.abs(evaluate_points(self.points, centers, rates, values) - self.at_points).max(axis=-1)
        if on_axes.max() >= at_points.max():
            index = np.unravel_index(int(on_axes.argmax()), on_axes.shape)
            return float(on_axes.max()), np.array([a[k] for a, k in zip(self.axes, index)])
        return float(at_points.max()), self.points[int(at_points.argmax())]

    def zoom(self, centers: Sequence[Array], rates: Sequence[float], values: Array) -> tuple[float, Array]:
        """The same, looked for in ever smaller boxes about the worst points: what a kink or a steep place hides between samples."""
        rng, box = np.random.default_rng(4), self.f.box
        errors = np.abs(evaluate_points(self.points, centers, rates, values) - self.at_points).max(axis=-1)
        error, where = self.worst(centers, rates, values)
        starts = np.concatenate([where[None], self.points[np.argsort(errors)[1 - _STARTS :]]])
        each = min(64, self.f.left // (4 * _ZOOMS * _STARTS))
        for k in range(_ZOOMS if each else 0):
            offsets = (rng.random((len(starts), each, box.dimension)) - 0.5) * box.sides * (0.1 / 8**k)
            points = box.clamp((starts[:, None, :] + offsets).reshape(-1, box.dimension))
            errors = np.abs(evaluate_points(points, centers, rates, values) - self.f.at(points)).max(axis=-1)
            starts = points[np.argsort(errors)[::-1][:_STARTS]]
            if errors.max() > error:
                error, where = float(errors.max()), starts[0]
        return error, where


def landmarks(box: Box, most: int) -> Array:
    """Likely places of kinks: all combinations of ends, quarters, middle and 0, if not too many."""
    shares = (0.0, 0.25, 0.5, 0.75, 1.0) if box.dimension <= 4 else (0.0, 0.5, 1.0)
    places = []
    for lo, hi in zip(box.lo.ravel(), box.hi.ravel()):
        own = [min(max(lo + (hi - lo) * s, lo), hi) for s in shares]
        places.append(np.array([*own, 0.0] if lo < 0 < hi and 0.0 not in own else own))
    return _product(places) if math.prod(len(p) for p in places) <= most else np.zeros((0, box.dimension))


def steep_places(f: Sampled, axes: Sequence[Array], values: Array) -> tuple[Array, Array]:
    """Points that close in on a jump, if f has one: bisections between the neighbours on a product grid that differ most."""
    pairs: list[tuple[float, Array, Array]] = []
    for i in range(len(axes)):
        gaps = np.abs(np.diff(values, axis=i)).max(axis=-1)
        for k in np.argsort(gaps, axis=None)[-_STARTS:]:
            index = np.array(np.unravel_index(k, gaps.shape))
            low, high = (
                np.array([a[j] for a, j in zip(axes, index + step * (np.arange(len(axes)) == i))]) for step in (0, 1)
            )
            pairs.append((float(gaps.ravel()[k]), low, high))
    pairs = sorted(pairs, key=lambda pair: -pair[0])[:_STARTS]
    low, high = (np.array([p[k] for p in pairs]) for k in (1, 2))
    if (2 + _BISECTIONS) * len(low) > f.left // 4:
        return np.zeros((0, len(axes))), np.zeros((0, f.outputs))
    at_low, at_high = f.at(low), f.at(high)
    points, answers = [low, high], [at_low, at_high]
    for _ in range(_BISECTIONS):
        middle = low / 2 + high / 2
        at_middle = f.at(middle)
        left = (np.abs(at_middle - at_low).max(axis=1) > np.abs(at_high - at_middle).max(axis=1))[:, None]
        low, high = np.where(left, low, middle), np.where(left, middle, high)
        at_low, at_high = np.where(left, at_low, at_middle), np.where(left, at_middle, at_high)
        points.append(middle)
        answers.append(at_middle)
    return np.concatenate(points), np.concatenate(answers)


def _product(axes: Sequence[Array]) -> Array:
    """All combinations, row-major, `(Πn_i, m)`."""
    return np.stack([g.ravel() for g in np.meshgrid(*axes, indexing="ij")], axis=1)
