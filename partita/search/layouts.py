"""From leaves to few cells: a subset of the leaves that can replace the others, or the longest intervals on a line."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from partita.arithmetic.progress import Progress, report
from partita.geometry.domains import Array
from partita.search.leaves import NARROWEST, LeafTree
from partita.search.power_cells import Affine, FitMemory, Fits, PowerCells, Ranking, coarsen, fit_cells, minimax_fits

__all__ = ["Layout", "Pieces"]

_HOLD = 0.95  # of the tolerance: what cells must hold at the samples
_HARD = 1e4  # sharpness while cells are being chosen
_MIXING = 0.03  # of the tolerance, that a finite temperature may add between two cells
_LEAST_SHARPNESS = 16.0
_REPAIRS = 40
_PATIENCE = 6  # repairs that may go by without an improvement
_HALVINGS = 6  # of the level, to make intervals equally good
_ENDS = 8  # candidate ends of an interval tried together


@dataclass(frozen=True, eq=False)
class Pieces:
    """Cells with their affine functions, in the coordinates of a frame, and the errors at the samples they were fitted to."""

    cells: PowerCells
    fits: Fits
    residuals: Array = field(default_factory=lambda: np.zeros(0))

    def errors(self, points: Array, answers: Array, ranking: Ranking | None = None) -> Array:
        """`Σ_j w_j |f − V_j|_∞` at points `(n, m)` with answers `(n, out)`: what a proof has to bound, `(n,)`."""
        ranking = self.cells.rank(points) if ranking is None else ranking
        weight = np.exp(-0.5 * self.cells.rate * ranking.gaps)
        weight /= weight.sum(axis=1, keepdims=True)
        offset = points[:, None, :] - self.cells.centers[ranking.labels]
        slopes = self.fits.slopes[ranking.labels]
        piece = self.fits.values[ranking.labels] + np.einsum("nkom,nkm->nko", slopes, offset)
        out: Array = (weight * np.abs(answers[:, None, :] - piece).max(axis=2)).sum(axis=1)
        return out

    def borders(self, points: Array, rank: int) -> Array:
        """The points moved to where their best cell ties with the one of this rank: errors are largest there, `(n, m)`."""
        ranking = self.cells.rank(points, rank + 1)
        if ranking.labels.shape[1] <= rank:
            return points
        step = self.cells.centers[ranking.labels[:, rank]] - self.cells.centers[ranking.labels[:, 0]]
        out: Array = points + step * (ranking.gaps[:, rank] / np.maximum(2 * (step**2).sum(axis=1), 1e-300))[:, None]
        return out


class Layout:
    """Cells for the samples known so far; `mend` makes them denser where the head errs."""

    def __init__(self, tree: LeafTree, tolerance: float) -> None:
        self.tree, self.tolerance, self.level = tree, tolerance, tree.limits.level
        self.progress = tree.sampler.questions.progress
        self.extra, self.told = np.zeros((0, tree.hints.shape[1])), np.zeros((0, tree.told.shape[1]))
        self.on_a_line = tree.sampler.frame.active == 1
        self.edges = np.zeros(0)
        self.hard_fits, self.soft_fits = FitMemory(), FitMemory()
        if self.on_a_line:
            self._cut(1)

    def samples(self) -> tuple[Array, Array]:
        """All samples that the pieces are fitted to, `(n, m)` and `(n, out)`."""
        leaves = self.tree.leaves
        points = np.concatenate([leaves.points.reshape(-1, self.extra.shape[1]), self.extra])
        return points, np.concatenate([leaves.answers.reshape(-1, self.told.shape[1]), self.told])

    def learn(self, points: Array, answers: Array) -> None:
        """More samples."""
        self.extra, self.told = np.concatenate([self.extra, points]), np.concatenate([self.told, answers])

    def coarsen(self) -> None:
        """Drop the leaves that their neighbours can replace."""
        if not self.on_a_line:
            points, answers = self.samples()
            used = coarsen(
                self._leaf_cells(), points, answers, self.level, affine=self.tree.affine, progress=self.progress
            )
            self.tree.leaves = replace(self.tree.leaves, used=used)

    def fitted(self) -> Pieces:
        """The cells fitted to all samples."""
        points, answers = self.samples()
        cells = self._interval_cells() if self.on_a_line else self._leaf_cells().take(self.tree.leaves.used)
        ranking = cells.rank(points, progress=self.progress)
        common: dict[str, Any] = {"affine": self.tree.affine, "progress": self.progress}
        fits = fit_cells(cells, ranking, points, answers, known=self.hard_fits, **common)
        cells = replace(cells, rate=_rate(cells, fits, ranking, self.tolerance))
        fits = fit_cells(cells, ranking, points, answers, known=self.soft_fits, **common)
        return Pieces(cells, fits, Pieces(cells, fits).errors(points, answers, ranking))

    def pieces(self) -> Pieces:
        """The cells fitted to all samples, and mended until they hold there."""
        worst = [np.inf] * _PATIENCE
        for _ in range(_REPAIRS):
            found = self.fitted()
            bad = found.residuals > _HOLD * self.tolerance
            worst.append(float(found.residuals.max()))
            if not bad.any() or self.tree.failed or worst[-1] > 0.98 * worst[-1 - _PATIENCE]:
                break
            self.mend(self.samples()[0][bad])
        return found

    def mend(self, points: Array) -> None:
        """Give these points their leaf back, or halve it where it is in use; more intervals on a line."""
        if self.on_a_line:
            self._cut(len(self.edges) + len(self.edges) // 50)
            return
        owners = np.isin(
            np.arange(len(self.tree.leaves)), self._leaf_cells().rank(points, 1, progress=self.progress).labels
        )
        spared = owners & ~self.tree.leaves.used
        if spared.any():
            self.tree.leaves = replace(self.tree.leaves, used=self.tree.leaves.used | spared)
        else:
            self.tree.split(owners)
            self.tree.grow()

    def _leaf_cells(self) -> PowerCells:
        leaves = self.tree.leaves
        return PowerCells(leaves.centers, leaves.powers, _HARD / float((leaves.hi - leaves.lo).min()) ** 2)

    def _interval_cells(self) -> PowerCells:
        """Intervals of the first coordinate: their middles, and half their lengths squared as powers."""
        centers = np.zeros((len(self.edges) - 1, self.extra.shape[1]))
        centers[:, 0] = 0.5 * (self.edges[1:] + self.edges[:-1])
        half = 0.5 * np.diff(self.edges)
        return PowerCells(centers, half**2, _HARD / float((2 * half).min()) ** 2)

    def _cut(self, least: int) -> None:
        """Few intervals such that one piece on each errs by ≤ level, but at least so many, and equally good ones."""
        points, answers = self.samples()
        order = np.argsort(points[:, 0], kind="stable")
        points, answers = points[order], answers[order]
        number = least, self.tree.limits.leaves
        ends = _equal_runs(points, answers, self.level, number, affine=self.tree.affine, progress=self.progress)
        inner = np.array(ends[:-1], np.int64)
        reach = float(self.tree.sampler.frame.reach(self.tree.sampler.box)[0])
        edges = [-reach]
        for edge in (0.5 * (points[inner, 0] + points[inner - 1, 0])).tolist():
            if min(edge - edges[-1], reach - edge) > NARROWEST * reach:  # else f jumps here, and shorter will not help
                edges.append(edge)
        self.edges = np.array([*edges, reach])


def _rate(cells: PowerCells, fits: Fits, ranking: Ranking, tolerance: float) -> float:
    """An inverse temperature at which mixing adds little anywhere.

    Beyond the border of cells j, k the loser's error grows by some g per length, its weight falls like `e^{−R|c_k − c_j|x}`, and
    their product stays below `g/(e R |c_k − c_j|)`. Here g is the bend of the pieces plus their step there per width of a cell.
    """
    if len(cells) == 1:
        return 1.0
    j, k = np.unique(ranking.labels[:, :2], axis=0).T
    step = cells.centers[k] - cells.centers[j]
    length = np.sqrt((step**2).sum(axis=1))
    border = step * (0.5 + 0.5 * (cells.powers[j] - cells.powers[k]) / length**2)[:, None]
    there = [
        fits.values[i] + np.einsum("pom,pm->po", fits.slopes[i], offset)
        for i, offset in ((j, border), (k, border - step))
    ]
    bend = np.abs(np.einsum("pom,pm->po", fits.slopes[k] - fits.slopes[j], step)).max(axis=1) / length
    growth = bend + np.abs(there[0] - there[1]).max(axis=1) / (
        2 * np.sqrt(np.minimum(cells.powers[j], cells.powers[k]))
    )
    return float(np.maximum(growth / (_MIXING * np.e * tolerance * length), _LEAST_SHARPNESS / length**2).max())


def _equal_runs(
    points: Array,
    answers: Array,
    level: float,
    number: tuple[int, int],
    *,
    affine: Affine,
    progress: Progress | None = None,
) -> list[int]:
    """Ends of runs with errors ≤ level: as few as can be within the number allowed, and equally good ones."""
    least, limit = number
    ends = _longest_runs(points, answers, level, affine=affine, most=limit, progress=progress)
    while ends is None:
        level *= 2
        ends = _longest_runs(points, answers, level, affine=affine, most=limit, progress=progress)
    low, high, most = 0.0, level, max(least, len(ends))
    for _ in range(_HALVINGS):
        middle = 0.5 * (low + high)
        trial = _longest_runs(points, answers, middle, affine=affine, most=most, progress=progress)
        if trial is None:
            low = middle
        else:
            ends, high = trial, middle
    return ends


def _longest_runs(
    points: Array,
    answers: Array,
    level: float,
    *,
    affine: Affine,
    most: int | None = None,
    progress: Progress | None = None,
) -> list[int] | None:
    """Ends of runs of samples, sorted by their first coordinate, each as long as one piece allows; None if more than `most`."""
    places = np.append(np.flatnonzero(np.diff(points[:, 0]) > 0) + 1, len(points))  # where a run may end
    ends: list[int] = []
    start, length = 0, 64
    while start < len(places):
        if most is not None and len(ends) == most:
            return None
        first = int(places[start - 1]) if start else 0
        low, high = start, len(places)  # a run to places[low] is short enough, one to places[high] too long
        steps = np.unique(np.minimum(start + length * 2 ** np.arange(-3, _ENDS - 3.0), len(places) - 1).astype(int))
        while len(steps := steps[(steps > low) & (steps < high)]):
            report(progress, "intervals", start, len(places))
            fits = _runs(points, answers, first, places[steps], affine)
            good = fits <= level
            worst = int(np.argmin(good)) if not good.all() else len(steps)
            low, high = (int(steps[worst - 1]) if worst else low), (int(steps[worst]) if worst < len(steps) else high)
            steps = np.unique(np.linspace(low, high, _ENDS + 2).astype(int))
        length = max(low - start + 1, 8)
        ends.append(int(places[low]))
        start = low + 1
    return ends


def _runs(points: Array, answers: Array, first: int, ends: NDArray[Any], affine: Affine) -> Array:
    """The error of one piece on the samples from `first` to each of the ends, `(k,)`."""
    counts = ends - first
    rows = np.concatenate([np.arange(first, end) for end in ends])
    centers = np.tile(points[first], (len(ends), 1))
    starts = np.cumsum(counts) - counts
    return minimax_fits(starts, points[rows], answers[rows], centers, rounds=4, affine=affine).errors
