"""Cells of a power diagram with affine values fitted to samples, and which of them can be removed.

A cell is fitted to the samples it wins, and to those where it comes so close to winning that the softmax gives it some weight.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy
from numpy.typing import NDArray

from partita.arithmetic.progress import Progress, report
from partita.geometry.domains import Array

__all__ = ["Affine", "FitMemory", "Fits", "PowerCells", "Ranking", "coarsen", "fit_cells", "minimax_fits"]

Labels = NDArray[np.int64]
Affine = bool | NDArray[np.bool_]  # whether functions have slopes, or along which axes, `(m,)`

_SAY = 4.0  # lag of the exponent up to which a cell is fitted to a sample: weights above e^{−4} or so
_LISTED = 8  # cells known per sample
_DAMPING = 1e-10
_LOOKED_AT = 200  # samples per cell when prices are made
_RANKED_AT_ONCE = 1 << 15  # points between two reports


@dataclass(frozen=True, eq=False)
class PowerCells:
    """Centers `(N, m)`, powers `(N,)` and inverse temperature R: scores `−R(|z − c_j|² − p_j)/2`."""

    centers: Array
    powers: Array
    rate: float

    def __len__(self) -> int:
        return len(self.powers)

    def take(self, chosen: NDArray[Any]) -> PowerCells:
        return PowerCells(self.centers[chosen], self.powers[chosen], self.rate)

    def rank(self, points: Array, count: int = _LISTED, *, progress: Progress | None = None) -> Ranking:
        """The `count` best cells of each point."""
        count = min(count, len(self))
        lifted = np.column_stack([self.centers, np.sqrt(np.maximum(self.powers.max() - self.powers, 0.0))])
        tree, found = scipy.spatial.KDTree(lifted), [np.zeros((0, count), np.int64)]
        for start in range(0, len(points), _RANKED_AT_ONCE):
            report(progress, "cells", start, len(points))
            part = points[start : start + _RANKED_AT_ONCE]
            labels = tree.query(np.column_stack([part, np.zeros(len(part))]), k=count)[1]
            found.append(np.reshape(labels, (len(part), count)))
        labels = np.concatenate(found)
        distance = ((points[:, None, :] - self.centers[labels]) ** 2).sum(axis=2) - self.powers[labels]
        order = np.argsort(distance, axis=1, kind="stable")
        distance = np.take_along_axis(distance, order, axis=1)
        return Ranking(np.take_along_axis(labels, order, axis=1), distance - distance[:, :1])


@dataclass(frozen=True, eq=False)
class Ranking:
    """For every point its best cells in order, `(n, k)`, and how far their `|z − c|² − p` exceed the least."""

    labels: Labels
    gaps: Array


@dataclass(frozen=True, eq=False)
class Fits:
    """Affine functions `values + slopes·(z − center)`, `(G, out)` and `(G, out, m)`, and their largest residuals, `(G,)`."""

    values: Array
    slopes: Array
    errors: Array


def minimax_fits(
    starts: Labels,
    points: Array,
    answers: Array,
    centers: Array,
    *,
    rounds: int = 8,
    affine: Affine = True,
    progress: Progress | None = None,
) -> Fits:
    """The best affine (or constant) functions on groups of samples, nearly in the sup norm.

    Weighted least squares, shifted to the middle of the residuals; weights grow where residuals are large (Lawson's iteration).

    Args: group g owns the samples from `starts[g]` to the next start; points `(P, m)`, answers `(P, out)`, centers `(G, m)`.
    """
    group = np.repeat(np.arange(len(starts)), np.diff(np.append(starts, len(points))))
    sloped = np.broadcast_to(affine, points.shape[1:])
    local = (points - centers[group])[:, sloped]
    extent = np.maximum.reduceat(np.abs(local), starts) if sloped.any() else np.ones((len(starts), 0))
    extent = np.where(extent > 0, extent, 1.0)
    basis = np.column_stack([np.ones(len(local)), local / extent[group]])
    weight, least = np.ones(len(basis)), np.full(len(starts), np.inf)
    best = np.zeros((len(starts), basis.shape[1], answers.shape[1]))
    for done in range(rounds if sloped.any() else 1):
        report(progress, "fitting cells", done, rounds)
        found = _solve(starts, basis, weight, answers)
        residual = answers - np.einsum("pq,pqo->po", basis, found[group])
        middle = 0.5 * (np.maximum.reduceat(residual, starts) + np.minimum.reduceat(residual, starts))
        found[:, 0] += middle
        size = np.abs(residual - middle[group]).max(axis=1)
        error = np.maximum.reduceat(size, starts)
        better = error < least
        best = np.where(better[:, None, None], found, best)
        least = np.minimum(error, least)
        weight = weight * (size + 1e-9 * error[group] + 1e-300)
        weight /= np.maximum.reduceat(weight, starts)[group]
    slopes = np.zeros((len(starts), answers.shape[1], points.shape[1]))
    if sloped.any():
        slopes[:, :, sloped] = np.moveaxis(best[:, 1:] / extent[:, :, None], 1, 2)
    return Fits(best[:, 0], slopes, least)


def _solve(starts: Labels, basis: Array, weight: Array, answers: Array) -> Array:
    """Weighted least squares group by group, `(G, q, out)`."""
    q, weighted = basis.shape[1], basis * weight[:, None]
    right = np.add.reduceat((weighted[:, :, None] * answers[:, None, :]).reshape(len(basis), -1), starts)
    if q == 1:
        return (right / np.add.reduceat(weight, starts)[:, None])[:, None, :]
    normal = np.add.reduceat((weighted[:, :, None] * basis[:, None, :]).reshape(len(basis), -1), starts)
    normal = normal.reshape(-1, q, q)
    normal = normal + _DAMPING * np.trace(normal, axis1=1, axis2=2)[:, None, None] * np.eye(q)
    return np.linalg.solve(normal, right.reshape(len(normal), q, -1))


class FitMemory:
    """The fits of the last groups of samples: after a repair most cells have the samples they had, and the same fit."""

    def __init__(self) -> None:
        self.known: dict[bytes, tuple[Array, Array, float]] = {}

    def fits(
        self,
        starts: Labels,
        points: Array,
        answers: Array,
        centers: Array,
        *,
        affine: Affine,
        progress: Progress | None = None,
    ) -> Fits:
        """`minimax_fits`, made for the groups that were not there the last time."""
        ends = np.append(starts[1:], len(points))
        rows = np.column_stack([points, answers, np.repeat(centers, ends - starts, axis=0)])
        keys = [rows[a:b].tobytes() for a, b in zip(starts, ends)]
        new = np.array([k not in self.known for k in keys])
        if new.any():
            counts = (ends - starts)[new]
            part = np.repeat(new, ends - starts)
            made = minimax_fits(
                np.cumsum(counts) - counts,
                points[part],
                answers[part],
                centers[new],
                affine=affine,
                progress=progress,
            )
            found = zip(made.values, made.slopes, made.errors)
            self.known.update(zip((k for k, is_new in zip(keys, new) if is_new), found))
        self.known = {k: self.known[k] for k in keys}
        values, slopes, errors = map(np.array, zip(*self.known.values()))
        return Fits(values, slopes, errors)


def fit_cells(
    cells: PowerCells,
    ranking: Ranking,
    points: Array,
    answers: Array,
    *,
    affine: Affine = True,
    progress: Progress | None = None,
    known: FitMemory | None = None,
) -> Fits:
    """Fits of all cells. Cells without samples hold the value of the nearest one. Fits that are `known` are not made again."""
    sample, column = np.nonzero(0.5 * cells.rate * ranking.gaps <= _SAY)
    owner = ranking.labels[sample, column]
    lonely = np.flatnonzero(np.bincount(owner, minlength=len(cells)) == 0)
    if len(lonely):
        _, nearest = scipy.spatial.KDTree(points).query(cells.centers[lonely])
        owner, sample = np.append(owner, lonely), np.append(sample, nearest)
    order = np.argsort(owner, kind="stable")
    starts = np.searchsorted(owner[order], np.arange(len(cells)))
    sample = sample[order]
    memory = FitMemory() if known is None else known
    return memory.fits(starts, points[sample], answers[sample], cells.centers, affine=affine, progress=progress)


def coarsen(
    cells: PowerCells,
    points: Array,
    answers: Array,
    level: float,
    *,
    affine: Affine = True,
    progress: Progress | None = None,
) -> NDArray[np.bool_]:
    """Which cells to keep so that refitted neighbours can take over the samples of the others with errors ≤ level.

    Greedy: the removals that cost least come first, and those that do not concern the same neighbours together.
    """
    search = _Coarsening(cells, points, answers, level, affine, progress)
    while search.remove():
        report(progress, "cells", int(search.alive.sum()), len(cells))
    return search.alive


class _Coarsening:
    """The best cells of every sample among those alive, and for pairs (j, k) the error of k if it takes over from j."""

    def __init__(
        self,
        cells: PowerCells,
        points: Array,
        answers: Array,
        level: float,
        affine: Affine,
        progress: Progress | None,
    ) -> None:
        self.cells, self.points, self.answers, self.level, self.affine = cells, points, answers, level, affine
        self.progress = progress
        self.alive = np.zeros(len(cells), bool)
        self.alive[cells.rank(points, 1, progress=progress).labels] = True
        self.labels, self.lag = self._best(np.arange(len(points)))
        self.heirs = np.zeros((0, 2), np.int64)
        self.costs = np.zeros(0)
        self._price(self.alive.copy())

    def _best(self, samples: Labels) -> tuple[Labels, Array]:
        numbers = np.flatnonzero(self.alive)
        found = self.cells.take(numbers).rank(self.points[samples], progress=self.progress)
        return numbers[found.labels], 0.5 * self.cells.rate * found.gaps

    def remove(self) -> bool:
        """One round; False when nothing more can go."""
        n = len(self.cells)
        if self.alive.sum() <= 2:
            return False
        cost = np.zeros(n)
        np.maximum.at(cost, self.heirs[:, 0], self.costs)
        order = np.argsort(self.heirs[:, 0], kind="stable")
        bounds = np.searchsorted(self.heirs[order, 0], np.arange(n + 1))
        busy, gone = np.zeros(n, bool), np.zeros(n, bool)
        for j in np.argsort(np.where(self.alive, cost, np.inf), kind="stable"):
            if cost[j] > self.level or not self.alive[j]:
                break
            heirs = self.heirs[order[bounds[j] : bounds[j + 1]], 1]
            if not (busy[j] or busy[heirs].any()):
                gone[j] = busy[j] = True
                busy[heirs] = True
        if not gone.any():
            return False
        self._bury(gone)
        return True

    def _bury(self, gone: NDArray[np.bool_]) -> None:
        """Take cells out, look again where they were listed, and price again what that concerns."""
        self.alive &= ~gone
        changed = np.flatnonzero(gone[self.labels].any(axis=1))
        concerned = np.zeros(len(self.cells), bool)
        concerned[self.labels[changed, :4]] = True
        labels, lag = self._best(changed)
        width = labels.shape[1]
        self.labels, self.lag = self.labels[:, :width], self.lag[:, :width]
        self.labels[changed], self.lag[changed] = labels, lag
        concerned[labels[:, :4]] = True
        concerned[self.heirs[concerned[self.heirs[:, 1]], 0]] = True
        keep = self.alive[self.heirs[:, 0]] & ~concerned[self.heirs[:, 0]]
        self.heirs, self.costs = self.heirs[keep], self.costs[keep]
        self._price(concerned & self.alive)

    def _price(self, concerned: NDArray[np.bool_]) -> None:
        """Errors of the heirs of these cells: fits to their own samples and to those that they inherit."""
        n, lag = len(self.cells), self.lag
        if lag.shape[1] < 2:
            return
        sample, column = np.nonzero(
            (lag[:, 1:] - lag[:, 1:2] <= _SAY) & (lag[:, 1:] > _SAY) & concerned[self.labels[:, :1]]
        )
        key = self.labels[sample, 0] * n + self.labels[sample, column + 1]
        if not len(key):
            return
        key, sample = _thinned(key, sample)
        pairs, inverse = np.unique(key, return_inverse=True)
        member, place = np.nonzero(lag <= _SAY)
        owner, member = _thinned(self.labels[member, place], member)
        counts = np.bincount(owner, minlength=n)
        heir = pairs % n
        own = counts[heir]
        first = np.repeat((np.cumsum(counts) - counts)[heir] - (np.cumsum(own) - own), own)
        group = np.append(np.repeat(np.arange(len(pairs)), own), inverse)
        rows = np.append(member[first + np.arange(len(first))], sample)
        order = np.argsort(group, kind="stable")
        errors = self._errors(group[order], rows[order], heir)
        self.heirs = np.concatenate([self.heirs, np.column_stack([pairs // n, heir])])
        self.costs = np.append(self.costs, errors)

    def _errors(self, group: Labels, rows: Labels, heir: Labels) -> Array:
        """Residuals of the fits, first by least squares alone, then in the sup norm where that may decide."""
        starts = np.searchsorted(group, np.arange(len(heir)))
        centers = self.cells.centers[heir]
        errors = minimax_fits(
            starts,
            self.points[rows],
            self.answers[rows],
            centers,
            rounds=1,
            affine=self.affine,
            progress=self.progress,
        ).errors
        close = (errors > self.level) & (errors < 2 * self.level)
        if close.any() and np.any(self.affine):
            chosen = close[group]
            starts = np.searchsorted(group[chosen], np.flatnonzero(close))
            part = rows[chosen]
            errors[close] = minimax_fits(
                starts,
                self.points[part],
                self.answers[part],
                centers[close],
                affine=self.affine,
                progress=self.progress,
            ).errors
        return errors


def _thinned(group: Labels, rows: Labels) -> tuple[Labels, Labels]:
    """Sorted by group, with every k-th sample of the groups that have too many to look at all of them."""
    order = np.argsort(group, kind="stable")
    group, rows = group[order], rows[order]
    starts = np.flatnonzero(np.append(True, np.diff(group) > 0))
    counts = np.diff(np.append(starts, len(group)))
    rank = np.arange(len(group)) - np.repeat(starts, counts)
    kept = rank % np.repeat(-(-counts // _LOOKED_AT), counts) == 0
    return group[kept], rows[kept]
