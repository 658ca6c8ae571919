"""The search for the smallest fitted grid: sizes are predicted from lines, fitted to a tensor of samples, tested elsewhere."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from partita.geometry.domains import Array
from partita.geometry.grid import ProductGrid
from partita.search.axis_fit import AxisChoice, AxisSearch, chebyshev_points
from partita.search.grid_sizes import Sizes
from partita.search.sampled_function import Sampled, Tests
from partita.search.tensor_fit import BoundedFit, Frame, softmax_matrix, spread_of
from partita.workers import crew

__all__ = ["Goal", "GridSearch", "Trial"]

_AIM = 0.9  # of the tolerance; the rest is for proving
_ROUNDS = 30
_VISITS = 6
_TRIES = 80
_CHANCES = 4
_MOST_KEYS = (204, 128, 48, 24, 16, 12)  # on an axis, by dimension
_MODEST_KEYS = (48, 24, 10, 6, 4, 3)  # the one size tried where f is not resolved
_LARGE = 1 << 18  # samples above which fewer variants are tried
_DENSITIES = (3.0, 2.5, 2.0, 1.5, 1.2)  # samples for each key of an axis, fewer where f may not be asked so often
_CALM = 20.0  # times half the range of f: values that spread no farther are left as they are


@dataclass(frozen=True)
class Goal:
    """What is wanted, in the relative units of a Sampled: error, spread of the values, and the dtype of everything stored.

    `most_value` is the largest |V| allowed, in the units of f.
    """

    target: float
    most_spread: float
    storage: type[np.floating]
    below_rounding: bool
    most_value: float = math.inf

    @classmethod
    def of(
        cls,
        f: Sampled,
        tolerance: float,
        storage: type[np.floating],
        max_spread: float,
        max_value: float = math.inf,
    ) -> Goal:
        """Nine tenths of the tolerance; values whose own rounding stays below a tenth of it, whatever the caller allows."""
        limits = np.finfo(storage)
        target, eps = max(_AIM * tolerance / f.scale, 1e-300), float(limits.eps)
        max_value *= 1 - 2 * eps  # storing rounds values
        room = float((max_value - np.abs(f.offset)).min())  # around the middle of f
        max_spread = min(max_spread, 2 * room)
        most = min(max_spread / f.scale, max(0.2 * target / eps, 4.0), float(limits.max) / (4 * f.scale), 1e15)
        low = target < 100 * eps * f.size or tolerance < float(limits.tiny) / eps
        return cls(target, max(most, 1e-300), storage, low, max_value)


@dataclass(frozen=True, eq=False)
class Trial:
    """A grid with values `(ΠP_i, out)` in the units of f; relative: the largest error seen, the spread; where in [−1, 1]^m."""

    choices: tuple[AxisChoice, ...]
    rates: tuple[float, ...]
    values: Array
    error: float
    where: Array
    spread: float

    @property
    def num_cells(self) -> int:
        return math.prod(c.count for c in self.choices)


@dataclass(eq=False)
class GridSearch:
    """Looks for the smallest grid that meets a goal. `best` is the best trial so far, `tries` how many there were."""

    f: Sampled
    goal: Goal
    watch: Callable[[str], None] = lambda _: None
    best: Trial | None = None
    tries: int = 0
    _degrees: tuple[int, ...] = ()
    _nodes: tuple[int, ...] = ()
    _density: float = 0.0
    _axes: list[Array] = field(default_factory=list)
    _samples: Array = field(default_factory=lambda: np.zeros(0))
    _tests: Tests | None = None

    def run(self) -> bool:
        """Whether the goal was met. Where a grid fails by what the lines had missed, one more is drawn through that place."""
        lines = self.f.first_lines()
        for _ in range(_VISITS):
            axes, resolved = self.draw(lines)
            missed = self._grow(axes) if resolved else None
            if missed is None:
                break
            lines = np.concatenate([lines, missed[None]])
        if self.best is None:
            modest = _MODEST_KEYS[min(len(axes), len(_MODEST_KEYS)) - 1]
            self.attempt([a.choices(min(modest, a.most_keys))[0] for a in axes])
        return self.met

    @property
    def met(self) -> bool:
        """Whether the best trial meets the goal."""
        return self._met(self.best)

    @property
    def spread_too_far(self) -> bool:
        """Whether the best trial fails by the size of its values alone."""
        return self.best is not None and self.best.error <= self.goal.target and not self.met

    def _met(self, trial: Trial | None) -> bool:
        return trial is not None and self._excess(trial) <= self.goal.target

    def _excess(self, trial: Trial) -> float:
        """The error, or more where the values spread too far or are too large."""
        large = float(np.abs(trial.values).max()) / self.goal.most_value
        return max(trial.error, self.goal.target * max(trial.spread / self.goal.most_spread, large))

    def draw(self, lines: Array) -> tuple[list[AxisSearch], bool]:
        """One search for each axis, axes on which f behaves alike sharing one; and whether f is resolved on all lines."""
        level = max(self.goal.target / 10, 1e-15 * self.f.size)
        along = [self.f.along(i, lines, level) for i in range(self.f.box.dimension)]
        axes: list[AxisSearch] = []
        for values, _ in along:
            twin = next((a for a in axes if a.joined(values)), None)
            axes.append(twin or self._axis(values))
        self._degrees = tuple(a.degree for a in axes)
        return axes, all(fine for _, fine in along)

    def _axis(self, lines: Array) -> AxisSearch:
        most = _MOST_KEYS[min(self.f.box.dimension, len(_MOST_KEYS)) - 1]
        return AxisSearch(lines, self.goal.target, self.goal.most_spread, most, watch=self.watch)

    def _grow(self, axes: list[AxisSearch]) -> Array | None:
        """Try sizes until one meets the goal or none is left: None; or until the lines prove to have missed a place: that."""
        sizes = Sizes(axes, self.goal.target)
        while self.tries < _TRIES and (vector := sizes.cheapest()) is not None:
            trial = self._try_all(axes, vector)
            if self._met(trial):
                self._calm(axes, self._shrink(axes, vector, sizes))
                return None
            sizes.learn(vector, self._excess(trial))
            if trial.error > 2 * sizes.foretold(vector) and self._missed(trial):
                return trial.where
        return None

    def _shrink(self, axes: list[AxisSearch], vector: tuple[int, ...], sizes: Sizes) -> tuple[int, ...]:
        """Fewer keys than those that meet the goal, if some chances with the likeliest sizes show that they do too."""
        chances = _CHANCES if self._samples.size <= _LARGE else 1
        while chances and (smaller := sizes.likeliest_below(vector)) is not None:
            if self._met(self._try_all(axes, smaller)):
                vector = smaller
            else:
                sizes.reject(smaller)
                chances -= 1
        return vector

    def _missed(self, trial: Trial) -> bool:
        """Whether f on a line through the worst place asks more of some axis than all lines before."""
        for i, choice in enumerate(trial.choices):
            values, _ = self.f.along(i, trial.where[None], self.goal.target / 10)
            if self._axis(values).error_of(choice) > 1.5 * choice.error:
                return True
        return False

    def _try_all(self, axes: list[AxisSearch], vector: tuple[int, ...]) -> Trial:
        """Balanced choices for these sizes, the best of each axis; if that nearly does, the second best, axis by axis."""
        first, balanced = [a.choices(p)[0] for a, p in zip(axes, vector)], self.balanced(axes, vector)
        best = self.attempt(balanced)
        others = [first] if balanced != first else []
        for i, (axis, p) in enumerate(zip(axes, vector) if self._samples.size <= _LARGE else ()):
            others += [[*first[:i], c, *first[i + 1 :]] for c in axis.choices(p)[1:] if c.error < 1.5 * axis.error(p)]
        for choices in others:
            if self._met(best) or (self._excess(best) > 1.4 * self.goal.target and choices is not first):
                break
            best = min(best, self.attempt(choices), key=self._excess)
        return best

    def settle(self) -> None:
        """One grid of a modest size without any search: for a budget that was spent before the first one was tried."""
        self.watch = lambda _: None
        m = self.f.box.dimension
        self._degrees = (0,) * m
        self.attempt([AxisChoice(_MODEST_KEYS[min(m, len(_MODEST_KEYS)) - 1] // 2 + 1, 1, 1.0)] * m)

    def balanced(self, axes: list[AxisSearch], vector: Sequence[int]) -> list[AxisChoice]:
        """Choices of small error whose values together stay small: on a product grid the spreads of the axes multiply."""
        chosen = [a.choices(p)[0] for a, p in zip(axes, vector)]
        for _ in range(2 if len(axes) > 1 else 0):
            for i, (axis, p) in enumerate(zip(axes, vector)):
                others = math.prod(max(c.spread / 2, 1.0) for c in (*chosen[:i], *chosen[i + 1 :]))
                price = self.goal.target * others / self.goal.most_spread
                chosen[i] = min(axis.seen(p), key=lambda c: c.error + price * c.spread)
        return chosen

    def _calm(self, axes: list[AxisSearch], vector: tuple[int, ...]) -> None:
        """Among grids of the same size, one whose values are much smaller."""
        if self.best is None or self.best.spread <= _CALM:
            return
        active = max(1, sum(p > 1 for p in vector))
        for share in (0.3, 0.6):
            limit = share * self.goal.target / active
            good = [[c for c in a.seen(p) if c.error <= limit] or a.choices(p)[:1] for a, p in zip(axes, vector)]
            self.attempt([min(some, key=lambda c: c.spread) for some in good])

    def squeeze(self, choices: Sequence[AxisChoice], rates: Sequence[float] | None = None) -> None:
        """One grid with nearly the least largest error that its values can have: targets shrink until one is missed."""
        best = self.attempt(choices, rates)
        while best.spread > self.goal.most_spread and self.goal.target < 1:
            self.goal = replace(self.goal, target=10 * self.goal.target)  # a larger target keeps the values smaller
            best = self.attempt(choices, rates)
        for share in (0.8, 0.65, 0.5):
            self.goal = replace(self.goal, target=max(share * best.error, 1e-300))
            trial = self.attempt(choices, rates)
            if trial.error >= best.error or trial.spread > max(best.spread, self.goal.most_spread):
                break
            best = trial
        self.best = best

    def attempt(self, choices: Sequence[AxisChoice], rates: Sequence[float] | None = None) -> Trial:
        """Fit and test one grid; kept if it is the best so far."""
        self.tries += 1
        reached = "" if self.best is None else f", best error {self.best.error * self.f.scale:.2g}"
        self.watch(f"fitting {' × '.join(str(c.count) for c in choices)} keys{reached}")
        tests = self._sample(choices)
        grid, rates = self._place(choices, rates)
        frame = Frame.of([softmax_matrix(x, c, r) for x, c, r in zip(self._axes, grid.axes, rates)])
        wanted, reach = 0.98 * self.goal.target, self.goal.most_spread / 2
        ends = tuple((end * self.goal.most_value - self.f.offset) / self.f.scale for end in (-1, 1))
        for _ in range(3):
            fit = self._fit(frame, wanted, reach, ends)
            values = (fit.values * self.f.scale + self.f.offset).astype(self.goal.storage).astype(np.float64)
            relative = (values - self.f.offset) / self.f.scale
            seen, where = tests.worst(grid.axes, rates, relative)
            if fit.within and seen <= self.goal.target:
                seen, where = tests.zoom(grid.axes, rates, relative)
            if not fit.within or seen <= self.goal.target:
                break
            wanted *= 0.98 * self.goal.target / seen
        flat, error = values.reshape(-1, self.f.outputs), max(seen, fit.error)
        trial = Trial(tuple(choices), tuple(rates), flat, error, self.f.unit(where), spread_of(relative))
        if self._better(trial):
            self.best = trial
        return trial

    def _fit(self, frame: Frame, wanted: float, reach: float, ends: tuple[Array | float, ...]) -> BoundedFit:
        def compute() -> tuple[Array, float, bool]:
            fit = frame.fit(self._samples, wanted, reach=reach, ends=ends, rounds=_ROUNDS, watch=self.watch)
            return fit.values, fit.error, fit.within

        return BoundedFit(*crew().recall("fit", (frame, self._samples, wanted, reach, ends, _ROUNDS), compute))

    def _better(self, trial: Trial) -> bool:
        if self.best is None:
            return True
        met, met_before = self._met(trial), self._met(self.best)
        if met and met_before:
            return (trial.num_cells, trial.spread) < (self.best.num_cells, 0.7 * self.best.spread)
        return met or (not met_before and self._excess(trial) < self._excess(self.best))

    def _place(
        self, choices: Sequence[AxisChoice], rates: Sequence[float] | None
    ) -> tuple[ProductGrid, Sequence[float]]:
        """The grid and the rates κ/h², rounded to the dtype they will be stored in; rates that are given are kept."""
        counts, ghosts = np.array([c.count for c in choices]), np.array([c.ghosts for c in choices])
        grid = ProductGrid.uniform(self.f.box, counts, ghosts=ghosts, dtype=self.goal.storage)
        spacing = (self.f.box.sides / (counts - 2 * ghosts)).tolist()
        return grid, rates or [float(self.goal.storage(c.sharpness / h / h)) for c, h in zip(choices, spacing)]

    def _sample(self, choices: Sequence[AxisChoice]) -> Tests:
        """f on a product of Chebyshev points, enough of them for f and for these choices, and tests; both are kept for the next."""
        needs = [(c.count, d) for c, d in zip(choices, self._degrees)]
        if self._tests is None or any(n < 0.88 * self._density * p + 2 for n, (p, _) in zip(self._nodes, needs)):
            for self._density in _DENSITIES[0 if len(needs) < 4 else 1 :]:
                self._nodes = tuple(_enough(p, d, self._density, len(needs)) for p, d in needs)
                if math.prod(self._nodes) <= self.f.left // (2 if len(needs) < 5 else 8):
                    break
            self._axes = [self.f.place(chebyshev_points(n), i) for i, n in enumerate(self._nodes)]
            self._samples = self.f.on(self._axes)
            self._tests = Tests.of(self.f, self._nodes, seed=3)
        return self._tests


def _enough(count: int, degree: int, density: float, dimension: int) -> int:
    """Sample points on an axis: `density` for each key, and enough to resolve f unless they must be few."""
    if count == 1:
        return 5 if dimension < 4 else 3
    spare = 3 if dimension < 4 else 1
    return max(math.ceil(density * count), degree if density >= 2 else 0) + spare + 1
