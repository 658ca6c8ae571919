"""Which sizes of a fitted grid to try: those that lines along the axes predict to be good enough, the cheapest first."""

from __future__ import annotations

import math

import numpy as np

from partita.geometry.domains import Array
from partita.search.axis_fit import AxisSearch

__all__ = ["Sizes"]

_SLACK = 1.8  # least squares on lines may miss the target by so much and a grid still meet it
_MOST_VECTORS = 1 << 22  # of sizes that are compared
_MOST_STEPS = (24, 12, 8, 6, 5, 4)  # sizes at hand on each axis, by dimension


class Sizes:
    """Numbers of keys on the axes in order of their product, among those with `ratio·Σ_i error_i(P_i) ≤ target`.

    The errors are what least squares leaves on lines along axis i. A grid's largest error can be less than their sum, since
    its values are fitted to that, or more, if they must stay small: the ratio starts low and is learned from failures.
    """

    def __init__(self, axes: list[AxisSearch], target: float) -> None:
        self.axes, self.target = axes, target
        self.ratio = 0.55 if len(axes) == 1 else 0.45 if len(axes) <= 4 else 0.8
        fewest = [axis.fewest(_SLACK * target) for axis in axes]
        self.counts = [[count] for count in fewest if count is not None]
        self.possible = len(self.counts) == len(axes)
        self._failed: list[tuple[int, ...]] = []

    def foretold(self, vector: tuple[int, ...]) -> float:
        """Σ_i error_i(P_i)."""
        return sum(a.error(p) for a, p in zip(self.axes, vector))

    def reject(self, vector: tuple[int, ...]) -> None:
        """These sizes failed, and so will smaller ones."""
        self._failed.append(vector)

    def learn(self, vector: tuple[int, ...], reached: float) -> None:
        """These sizes failed with that error: others will with one in proportion."""
        self.reject(vector)
        measured = 0.9 * reached / max(self.foretold(vector), 1e-300)
        self.ratio = max(1.03 * self.ratio, min(measured, 2 * self.ratio))

    def cheapest(self) -> tuple[int, ...] | None:
        """The fewest keys that should do; None when larger sizes no longer help."""
        while self.possible and math.prod(len(c) for c in self.counts) <= _MOST_VECTORS:
            errors, cost = self._table()
            cost = np.where(self.ratio * errors <= self.target, cost, np.inf)
            if np.isfinite(cost).any():
                return self._vector(int(np.lexsort((errors.ravel(), cost.ravel()))[0]), cost.shape)
            self.possible = self._extend()
        return None

    def likeliest_below(self, vector: tuple[int, ...]) -> tuple[int, ...] | None:
        """The sizes of least foretold error among those with fewer keys, unless that is hopeless."""
        errors, cost = self._table()
        errors = np.where(cost < math.prod(vector), errors, np.inf)
        index = int(errors.argmin())
        return self._vector(index, errors.shape) if 0.4 * errors.ravel()[index] <= self.target else None

    def _vector(self, index: int, shape: tuple[int, ...]) -> tuple[int, ...]:
        places = iter(np.unravel_index(index, shape) if shape else ())
        return tuple(c[int(next(places))] if len(c) > 1 else c[0] for c in self.counts)

    def _extend(self) -> bool:
        """One more size on each axis that still matters, larger and better than the last; on all if none seems to matter."""
        share = self.target / (8 * len(self.axes) * self.ratio)
        matter = [a.error(c[-1]) >= share for a, c in zip(self.axes, self.counts)]
        most, grown = _MOST_STEPS[min(len(self.axes), len(_MOST_STEPS)) - 1], False
        for axis, counts, matters in zip(self.axes, self.counts, matter):
            if (matters or not any(matter)) and len(counts) < most:
                better = (p for p in axis.next_sizes(counts[-1]) if axis.error(p) < 0.9 * axis.error(counts[-1]))
                step = next(better, None)
                counts += [] if step is None else [step]
                grown |= step is not None
        return grown

    def _table(self) -> tuple[Array, Array]:
        """Foretold errors and numbers of keys of all sizes at hand, infinite where sizes at least as large have failed.

        Of the axes with several sizes; arrays of numpy have at most 64.
        """
        errors, cost = np.zeros(()), np.ones(())
        for axis, counts in zip(self.axes, self.counts):
            errors = np.add.outer(errors, [axis.error(p) for p in counts])
            cost = np.multiply.outer(cost, np.array(counts, dtype=float))
            if len(counts) == 1:
                errors, cost = errors.reshape(errors.shape[:-1]), cost.reshape(cost.shape[:-1])
        for vector in self._failed:
            corner = tuple(slice(0, c.index(p) + 1) for c, p in zip(self.counts, vector) if len(c) > 1)
            errors[corner] = cost[corner] = np.inf
        return errors, cost
