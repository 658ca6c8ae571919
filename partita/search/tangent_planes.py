"""Few affine functions whose maximum is close to a convex function: chords on a line, tangents in several dimensions.

Everything here is sampled. What the finished head claims is proved elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from partita.arithmetic.progress import Progress, report
from partita.functions.target import Target
from partita.geometry.domains import Array, Box

__all__ = ["Planes", "Samples", "bending", "fewest_planes"]

_ON_A_LINE = 1 << 14
_SPREAD = 1 << 13  # sampled points in several dimensions
_MIDPOINTS = 2048
_STEP = 1e-6  # of a side, for differences
_EQUALISED = 10  # halvings of the level
_ROUNDS = 12  # of moving tangents to the middle of their cells
_SPARE = 32  # tangents beyond the most, some of which may be dropped again


@dataclass(frozen=True, eq=False)
class Planes:
    """`max_j a_j·z + b_j`, `(N, m)` and `(N,)`, and the largest distance from f at the samples."""

    slopes: Array
    offsets: Array
    error: float

    def __len__(self) -> int:
        return len(self.offsets)


@dataclass(frozen=True, eq=False)
class Samples:
    """Points of the box, `(n, m)`, and `sign · f` there, `(n,)`, which should be convex."""

    target: Target
    sign: int
    points: Array
    values: Array

    @classmethod
    def of(cls, target: Target, sign: int) -> Samples:
        box = target.box
        if box.dimension == 1:
            points = np.linspace(float(box.lo.ravel()[0]), float(box.hi.ravel()[0]), _ON_A_LINE + 1)[:, None]
        else:
            points = np.concatenate([box.sample(_SPREAD, np.random.default_rng(17)), _faces(box), box.corners(256)])
        return cls(target, sign, points, sign * target(points)[:, 0])

    def join(self, points: Array) -> Samples:
        """With more points, sorted on a line."""
        points = np.concatenate([self.points, points])
        values = np.append(self.values, self.sign * self.target(points[len(self.values) :])[:, 0])
        if points.shape[1] == 1:
            points, first = np.unique(points, axis=0, return_index=True)
            values = values[first]
        return Samples(self.target, self.sign, points, values)

    def tangents(self, points: Array) -> tuple[Array, Array]:
        """Slopes and offsets of the tangents at points, by differences inside the box."""
        box, steps = self.target.box, []
        values = self.sign * self.target(points)[:, 0]
        for i, h in enumerate(_STEP * box.sides):
            shift = h * np.eye(box.dimension)[i]
            left, right = box.clamp(points - shift), box.clamp(points + shift)
            rise = self.sign * (self.target(right) - self.target(left))[:, 0]
            steps.append(rise / (right - left)[:, i])
        slopes = np.stack(steps, axis=1)
        return slopes, values - (slopes * points).sum(axis=1)


def bending(target: Target) -> int:
    """1 if f lies below its chords wherever it was looked, −1 if above, 0 if neither; 1 for both."""
    box, rng = target.box, np.random.default_rng(19)
    first, last = box.sample(_MIDPOINTS, rng), box.sample(_MIDPOINTS, rng)
    last = first + (last - first) * 10.0 ** -rng.integers(0, 3, size=(_MIDPOINTS, 1))
    values = [target(p)[:, 0] for p in (first, box.clamp((first + last) / 2), last)]
    bend = values[0] + values[2] - 2 * values[1]
    noise = 1e-12 * max(float(np.abs(v).max()) for v in values)
    return 1 if bend.min() >= -noise else -1 if bend.max() <= noise else 0


def fewest_planes(samples: Samples, level: float, most: int, progress: Progress | None = None) -> Planes | None:
    """Few planes whose maximum is within `level` of sign · f at the samples; None if more than `most` are needed."""
    if samples.points.shape[1] == 1:
        return _chords(samples, level, most, progress)
    return _cutting_planes(samples, level, most, progress)


def _chords(samples: Samples, level: float, most: int, progress: Progress | None) -> Planes | None:
    """Chords of the longest intervals, all lowered by the same e: neighbours meet at the ends, e below f, and rise e above it.

    The level is lowered as far as the number of intervals allows.
    """
    x, y = samples.points[:, 0], samples.values
    ends = _intervals(x, y, level, most, progress)
    if ends is None:
        return None
    low, high = 0.0, level
    for _ in range(_EQUALISED):
        middle = (low + high) / 2
        trial = _intervals(x, y, middle, len(ends) - 1, progress)
        ends, low, high = (ends, middle, high) if trial is None else (trial, low, middle)
    a, b = ends[:-1], ends[1:]
    slopes = (y[b] - y[a]) / (x[b] - x[a])
    offsets = y[a] - slopes * x[a]
    gap = max(_gap(x, y, i, j) for i, j in zip(a, b))
    return Planes(slopes[:, None], offsets - gap / 2, gap / 2)


def _intervals(x: Array, y: Array, level: float, most: int, progress: Progress | None) -> np.ndarray | None:
    """Ends of the longest intervals on which the chord is at most 2·level above f; None if there are more than `most`."""
    ends, last, length = [0], len(x) - 1, 64
    while ends[-1] < last:
        report(progress, "intervals", ends[-1], last)
        if len(ends) > most:
            return None
        start = ends[-1]
        low, high = start + 1, min(start + length, last)
        while high < last and _gap(x, y, start, high) <= 2 * level:
            low, high = high, min(start + 2 * (high - start), last)
        if _gap(x, y, start, high) <= 2 * level:
            low = high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if _gap(x, y, start, middle) <= 2 * level else (low, middle)
        length = max(2 * (low - start), 8)
        ends.append(low)
    return np.array(ends)


def _gap(x: Array, y: Array, i: int, j: int) -> float:
    """How far the chord from i to j rises above f."""
    part, slope = slice(i, j + 1), (y[j] - y[i]) / (x[j] - x[i])
    return float((y[i] + slope * (x[part] - x[i]) - y[part]).max())


def _cutting_planes(samples: Samples, level: float, most: int, progress: Progress | None) -> Planes | None:
    """Tangents at the point that is farthest above all others, until none is 2·level above; then fewer, moved to their cells."""
    points, f = samples.points, samples.values
    chosen = [int(np.argmin(((points - points.mean(axis=0)) ** 2).sum(axis=1)))]
    slopes, offsets = samples.tangents(points[chosen])
    top = points @ slopes[0] + offsets[0]
    while float((f - top).max()) > 2 * level:
        report(progress, "tangents", len(chosen))
        if len(chosen) >= most + min(most, _SPARE):
            return None
        chosen.append(int((f - top).argmax()))
        a, b = samples.tangents(points[chosen[-1:]])
        slopes, offsets = np.concatenate([slopes, a]), np.append(offsets, b)
        top = np.maximum(top, points @ a[0] + b[0])
    best, at = (slopes, offsets), points[chosen]
    for done in range(_ROUNDS * len(best[1])):
        report(progress, "tangents", done, _ROUNDS * len(best[1]))
        slopes, offsets, at = _settled(samples, at, level)
        gap = float((f - (points @ slopes.T + offsets).max(axis=1)).max())
        if gap > 2 * level:
            break
        best = slopes, offsets
        owner = (points @ slopes.T + offsets).argmax(axis=1)
        at = np.delete(at, int(np.bincount(owner, minlength=len(at)).argmin()), axis=0)
        if not len(at):
            break
    slopes, offsets = best
    gap = float((f - (points @ slopes.T + offsets).max(axis=1)).max())
    return Planes(slopes, offsets + gap / 2, gap / 2) if len(offsets) <= most else None


def _settled(samples: Samples, at: Array, level: float) -> tuple[Array, Array, Array]:
    """Tangents whose points were moved towards the middle of their cells, as long as that lowers the gap."""
    points, f = samples.points, samples.values
    slopes, offsets = samples.tangents(at)
    least, best = np.inf, (slopes, offsets, at)
    for _ in range(_ROUNDS):
        heights = points @ slopes.T + offsets
        owner, gap = heights.argmax(axis=1), float((f - heights.max(axis=1)).max())
        if gap >= 0.999 * least:
            break
        least, best = gap, (slopes, offsets, at)
        if gap <= 2 * level:
            break
        low, high = np.full(at.shape, np.inf), np.full(at.shape, -np.inf)
        np.minimum.at(low, owner, points)
        np.maximum.at(high, owner, points)
        at = np.where(np.isfinite(low), (low + high) / 2, at)
        slopes, offsets = samples.tangents(at)
    return best


def _faces(box: Box) -> Array:
    """Points on the faces of the box, where convex functions are largest."""
    rng, m = np.random.default_rng(23), box.dimension
    points = box.sample(256 * m, rng)
    axis, high = rng.integers(m, size=len(points)), rng.random(len(points)) < 0.5
    rows = np.arange(len(points))
    points[rows, axis] = np.where(high, box.hi.ravel()[axis], box.lo.ravel()[axis])
    return points
