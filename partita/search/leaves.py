"""Boxes that are halved until an affine piece fits each of them, in coordinates on which the function really depends."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from partita.arithmetic.progress import Progress, report
from partita.functions.target import Target
from partita.geometry.domains import Array, Box
from partita.search.power_cells import Affine, minimax_fits

__all__ = ["NARROWEST", "Frame", "LeafTree", "Leaves", "Limits", "Questions", "Sampler", "find_frame"]

_POINTS_PER_AXIS = {1: 17, 2: 5, 3: 3, 4: 3}
_RANDOM_POINTS = 96  # per leaf where a grid would be too many
_NEGLIGIBLE = 1e-5  # of the largest variation of the gradient: f is affine along that direction
_STEP = 1e-6  # of a side, for differences
_PROJECTIONS = 40
_HINTS_AT_ONCE = 1 << 22
NARROWEST = 2.0**-36  # of the longest side


@dataclass(frozen=True, eq=False)
class Frame:
    """Coordinates `y = (z − origin)·axes`, axes `(m, m)` orthogonal; f is affine along all but the first `active` of them."""

    origin: Array
    axes: Array
    active: int

    @classmethod
    def plain(cls, box: Box) -> Frame:
        return cls((box.lo + box.hi).ravel() / 2, np.eye(box.dimension), box.dimension)

    def enter(self, points: Array) -> Array:
        return (points - self.origin) @ self.axes

    def leave(self, points: Array) -> Array:
        return self.origin + points @ self.axes.T

    def reach(self, box: Box) -> Array:
        """How far the box extends from the origin along every axis, `(m,)`."""
        return np.abs(self.axes).T @ (box.sides / 2)


class Questions:
    """f, and how often it was evaluated."""

    def __init__(self, target: Target, progress: Progress | None = None) -> None:
        self.target, self.progress, self.count = target, progress, 0

    def __call__(self, points: Array) -> Array:
        report(self.progress, "evaluations", self.count)
        self.count += len(points)
        return self.target(points)


class Sampler:
    """Evaluates f at points given in a frame."""

    def __init__(self, questions: Questions, box: Box, frame: Frame) -> None:
        self.questions, self.box, self.frame = questions, box, frame
        self.region = questions.target.region
        self.rng = np.random.default_rng(0)

    def ask(self, wanted: Array) -> tuple[Array, Array]:
        """The points of the domain nearest to these, `(n, m)`, and the values of f there, `(n, out)`."""
        z = (self.region or self.box).clamp(self.frame.leave(wanted))
        return self.frame.enter(z), self.questions(z)

    def outside(self, lo: Array, hi: Array) -> NDArray[np.bool_]:
        """Which boxes of the active coordinates hold no point of the domain, `(n,)`; only where all coordinates are active."""
        if self.region is None or self.frame.active < self.box.dimension:
            return np.zeros(len(lo), bool)
        middle, half = self.frame.leave((lo + hi) / 2), (hi - lo) / 2 @ np.abs(self.frame.axes).T
        return self.region.outside(middle - half, middle + half)

    def ask_active(self, active: Array) -> tuple[Array, Array]:
        """The same for active coordinates alone, `(n, a)`, at random along the other axes, as far as the domain allows."""
        frame, a = self.frame, active.shape[1]
        rest = self.rng.uniform(-1, 1, (len(active), len(frame.origin) - a)) * frame.reach(self.box)[a:]
        wanted = np.concatenate([active, rest], axis=1)
        if rest.shape[1]:
            for _ in range(_PROJECTIONS):  # by turns onto the domain and onto the active coordinates
                wanted = frame.enter(self.box.clamp(frame.leave(wanted)))
                wanted[:, :a] = active
        return self.ask(wanted)


def find_frame(sampler: Sampler, points: Array) -> Frame:
    """A frame whose active axes are the directions in which the gradient of f changes between these points, `(n, m)`."""
    box, m = sampler.box, sampler.box.dimension
    step = _STEP * box.sides
    inner = Box(box.lo.ravel() + step, box.hi.ravel() - step)
    z, ask = inner.clamp(sampler.frame.leave(points)), sampler.questions
    if sampler.region is not None:
        z = sampler.region.clamp(z)
        ends = [sampler.region.contains(z + s * e) for e in np.diag(step) for s in (1, -1)]
        z = z[np.all(ends, axis=0)]
        if len(z) < 2 * m:
            return Frame.plain(box)
    slopes = [(ask(z + e) - ask(z - e)) / (2 * e.max()) for e in np.diag(step)]
    gradients = np.stack(slopes, axis=2)  # (n, out, m)
    changes = (gradients - gradients.mean(axis=0)).reshape(-1, m)
    _, sizes, axes = np.linalg.svd(np.concatenate([changes, np.zeros((m, m))]), full_matrices=False)
    plain, active = Frame.plain(box), max(1, int((sizes > _NEGLIGIBLE * sizes[0]).sum()))
    return Frame(plain.origin, axes.T, active) if active < m and _is_affine(sampler, z, axes[active:]) else plain


def _is_affine(sampler: Sampler, z: Array, directions: Array) -> bool:
    """Whether f is affine along chords of the domain in these directions, `(k, m)`: gradients alone do not see jumps."""
    box, ask = sampler.box, sampler.questions
    along = sampler.rng.normal(size=(len(z), len(directions))) @ directions
    room = np.minimum(box.hi.ravel() - z, z - box.lo.ravel())
    with np.errstate(divide="ignore"):
        chord = along * (room / np.abs(along)).min(axis=1, keepdims=True)
    if sampler.region is not None:
        for _ in range(8):
            inside = sampler.region.contains(box.clamp(z - chord)) & sampler.region.contains(box.clamp(z + chord))
            chord = np.where(inside[:, None], chord, chord / 2)
        z, chord = z[inside], chord[inside]
        if not len(z):
            return False
    values = [ask(box.clamp(p)) for p in (z - chord, z, z + chord)]
    size = max(float(np.abs(v).max()) for v in values)
    return float(np.abs(values[0] - 2 * values[1] + values[2]).max()) <= _NEGLIGIBLE * size


@dataclass(frozen=True, eq=False)
class Leaves:
    """Boxes of the active coordinates, `(L, a)`; samples `(L, s, m)` and answers `(L, s, out)` there.

    `values` `(L, out)` and `slopes` `(L, out, m)` are those of the piece fitted on the ball around the box, `errors` the largest
    seen, and `used` says which are cells.
    """

    lo: Array
    hi: Array
    points: Array
    answers: Array
    values: Array
    slopes: Array
    errors: Array
    used: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.lo)

    def take(self, chosen: NDArray[Any]) -> Leaves:
        return Leaves(**{f.name: getattr(self, f.name)[chosen] for f in fields(self)})

    def join(self, other: Leaves) -> Leaves:
        return Leaves(**{f.name: np.concatenate([getattr(self, f.name), getattr(other, f.name)]) for f in fields(self)})

    @property
    def centers(self) -> Array:
        """Middles in the frame, `(L, m)`; 0 along the axes that do not matter."""
        middle = (self.lo + self.hi) / 2
        return np.pad(middle, ((0, 0), (0, self.points.shape[2] - middle.shape[1])))

    @property
    def powers(self) -> Array:
        """ρ², ρ the radius of the circumscribed ball. *Theorem*: `ball-cells`."""
        out: Array = (((self.hi - self.lo) / 2) ** 2).sum(axis=1)
        return out

    def residuals(self, leaf: NDArray[Any], points: Array, answers: Array) -> Array:
        """Errors of the pieces of these leaves at points, `(n,)`."""
        piece = np.einsum("nom,nm->no", self.slopes[leaf], points - self.centers[leaf]) + self.values[leaf]
        out: Array = np.abs(answers - piece).max(axis=1)
        return out


@dataclass(frozen=True)
class Limits:
    """The error allowed on a leaf, the most leaves, and the most evaluations of f."""

    level: float
    leaves: int
    asked: int


class LeafTree:
    """Leaves of a k-d tree of boxes, halved where an affine (or constant) piece does not fit."""

    def __init__(self, sampler: Sampler, limits: Limits, *, affine: Affine, slabs: bool = False) -> None:
        self.sampler, self.limits, self.affine, self.slabs = sampler, limits, affine, slabs
        self.hints = np.zeros((0, sampler.box.dimension))
        self.told = np.zeros((0, sampler.questions.target.num_outputs))
        self.home = np.zeros(0, np.int64)
        reach = sampler.frame.reach(sampler.box)[None, : sampler.frame.active]
        self.leaves = self._measure(-reach, reach)

    def add_hints(self, points: Array, answers: Array) -> None:
        """Points `(n, m)` with answers that the pieces must also obey: found by chance, or by a proof that failed there."""
        self.hints, self.told = np.concatenate([self.hints, points]), np.concatenate([self.told, answers])
        home = _nearest_box(self.leaves.lo, self.leaves.hi, points[:, : self.leaves.lo.shape[1]])
        self.home = np.append(self.home, home)
        self.leaves = self._heard(self.leaves, home, points, answers)

    def grow(self, most: int | None = None) -> None:
        """Halve leaves, the worst first, until every error seen is within the level or the budget (or `most` leaves) is spent."""
        most = self.limits.leaves if most is None else min(most, self.limits.leaves)
        while self.sampler.questions.count <= self.limits.asked:
            errors = self.leaves.errors
            order = np.argsort(-errors, kind="stable")
            failing = order[(errors > self.limits.level)[order] & self._divisible[order]]
            failing = failing[: max(most - len(self.leaves), 0)]
            if self.slabs:
                failing = failing[errors[failing] > 0.5 * errors.max()]
            if not len(failing) or (most == self.limits.leaves and self.overflows):
                return
            self.split(np.isin(np.arange(len(self.leaves)), failing))

    @property
    def failed(self) -> bool:
        """Whether pieces do not fit although leaves cannot be halved any more."""
        return bool(self.leaves.errors.max() > self.limits.level)

    @property
    def overflows(self) -> bool:
        """Whether the leaves that must still be halved exceed the budget, and the worst errs by more than twice the level."""
        errors = self.leaves.errors
        left = int(((errors > self.limits.level) & self._divisible).sum())
        return len(self.leaves) + left > self.limits.leaves and bool(errors.max() > 2 * self.limits.level)

    def split(self, chosen: NDArray[np.bool_]) -> None:
        """Halve these leaves, each along the axis that helps most; in a grid, the slabs that they lie in. The halves come last."""
        axis = self._best_axis(self.leaves.take(chosen))
        if not self.slabs:
            return self._halve(chosen, axis)
        lo = self.leaves.lo[chosen]
        for i in range(lo.shape[1]):
            slab = np.isin(self.leaves.lo[:, i], lo[axis == i, i])
            if slab.any() and len(self.leaves) <= self.limits.leaves:
                self._halve(slab, np.full(int(slab.sum()), i))
        return None

    @property
    def _divisible(self) -> NDArray[np.bool_]:
        """Leaves wide enough to be halved: narrower ones sit on a jump."""
        out: NDArray[np.bool_] = (self.leaves.hi - self.leaves.lo).max(
            axis=1
        ) > NARROWEST * self.sampler.box.sides.max()
        return out

    def _halve(self, chosen: NDArray[np.bool_], axis: NDArray[np.int64]) -> None:
        parents, rest = self.leaves.take(chosen), self.leaves.take(~chosen)
        rows, middle = np.arange(len(parents)), (parents.lo + parents.hi) / 2
        left_hi, right_lo = parents.hi.copy(), parents.lo.copy()
        left_hi[rows, axis] = right_lo[rows, axis] = middle[rows, axis]
        halves = self._measure(np.concatenate([parents.lo, right_lo]), np.concatenate([left_hi, parents.hi]))
        moved = np.flatnonzero(chosen[self.home])
        parent = (np.cumsum(chosen) - 1)[self.home[moved]]
        right = self.hints[moved, axis[parent]] > middle[parent, axis[parent]]
        child = parent + len(parents) * right
        self.home = (np.cumsum(~chosen) - 1)[self.home]
        self.home[moved] = len(rest) + child
        self.leaves = rest.join(self._heard(halves, child, self.hints[moved], self.told[moved]))
        self._leave_out(np.append(np.zeros(len(rest), bool), self.sampler.outside(halves.lo, halves.hi)))

    def _leave_out(self, outside: NDArray[np.bool_]) -> None:
        """Drop leaves that hold no point of the domain; hints that lie on their edge go to the nearest of the others."""
        if not outside.any() or outside.all():
            return
        homeless, self.leaves = outside[self.home], self.leaves.take(~outside)
        self.home = (np.cumsum(~outside) - 1)[self.home]
        points, answers = self.hints[homeless], self.told[homeless]
        self.home[homeless] = _nearest_box(self.leaves.lo, self.leaves.hi, points[:, : self.leaves.lo.shape[1]])
        self.leaves = self._heard(self.leaves, self.home[homeless], points, answers)

    def _heard(self, leaves: Leaves, home: NDArray[Any], points: Array, answers: Array) -> Leaves:
        """The leaves with their errors at hints counted."""
        errors = leaves.errors.copy()
        np.maximum.at(errors, home, leaves.residuals(home, points, answers))
        return replace(leaves, errors=errors)

    def _measure(self, lo: Array, hi: Array) -> Leaves:
        """The leaves with samples, answers and the error of the best piece on the ball."""
        cube, ball = _patterns(lo.shape[1])
        ball = ball[:0] if self.slabs else ball
        middle, half = (lo + hi) / 2, (hi - lo) / 2
        radius = np.sqrt((half**2).sum(axis=1))[:, None, None]
        wanted = np.concatenate([middle[:, None] + half[:, None] * cube, middle[:, None] + radius * ball], axis=1)
        count, each, a = wanted.shape
        points, answers = self.sampler.ask_active(wanted.reshape(-1, a))
        centers = np.pad(middle, ((0, 0), (0, points.shape[1] - a)))
        watch = self.sampler.questions.progress
        fits = minimax_fits(np.arange(count) * each, points, answers, centers, affine=self.affine, progress=watch)
        points, answers = points.reshape(count, each, -1), answers.reshape(count, each, -1)
        kept = slice(0, len(cube))
        return Leaves(
            lo, hi, points[:, kept], answers[:, kept], fits.values, fits.slopes, fits.errors, np.ones(count, bool)
        )

    def _best_axis(self, leaves: Leaves) -> NDArray[np.int64]:
        """Of the longest axes of each leaf the one whose halves fit best, `(L,)`: so no leaf is longer than twice its width."""
        sides = leaves.hi - leaves.lo
        longest = sides >= (0.0 if self.slabs else 0.99) * sides.max(axis=1, keepdims=True)
        first: NDArray[np.int64] = longest.argmax(axis=1)
        several = np.flatnonzero(longest.sum(axis=1) > 1)
        if not len(several):
            return first
        errors = np.where(longest[several], 0.0, np.inf)
        part, a = leaves.take(several), sides.shape[1]
        middle = (part.lo + part.hi) / 2
        for axis, sign in itertools.product(range(a), (-1, 1)):
            side = sign * (part.points[:, :, axis] - middle[:, None, axis]) >= -1e-9 * sides[several, None, axis]
            side[:, 0] |= ~side.any(axis=1)
            starts = np.cumsum(side.sum(axis=1)) - side.sum(axis=1)
            report(self.sampler.questions.progress, "leaves", len(self.leaves), self.limits.leaves)
            fits = minimax_fits(
                starts, part.points[side], part.answers[side], part.centers, rounds=1, affine=self.affine
            )
            errors[:, axis] += fits.errors
        first[several] = errors.argmin(axis=1)
        return first


def _patterns(a: int) -> tuple[Array, Array]:
    """Points of the cube [−1, 1]^a, its corners among them, and of the unit ball, `(s, a)` each."""
    if a in _POINTS_PER_AXIS:
        n = _POINTS_PER_AXIS[a]
        nodes = -np.cos(np.pi * np.arange(n) / (n - 1))
        cube = np.stack(np.meshgrid(*[nodes] * a, indexing="ij"), axis=-1).reshape(-1, a)
    else:
        cube = np.random.default_rng(0).uniform(-1, 1, (_RANDOM_POINTS, a))
        cube[::2] = np.sign(cube[::2])
    if a == 1:
        return cube, cube[:0]
    length = np.sqrt((cube**2).sum(axis=1, keepdims=True))
    return cube, cube * np.abs(cube).max(axis=1, keepdims=True) / np.maximum(length, 1e-300)


def _nearest_box(lo: Array, hi: Array, points: Array) -> NDArray[np.int64]:
    """The box that holds each point, or comes nearest, `(n,)`."""
    out = np.empty(len(points), np.int64)
    step = max(1, _HINTS_AT_ONCE // lo.size)
    for i in range(0, len(points), step):
        part = points[i : i + step, None, :]
        out[i : i + step] = np.maximum(lo - part, part - hi).max(axis=2).argmin(axis=1)
    return out
