"""The search for few cells: leaves are grown, most of them are dropped, and samples and proofs show where there are too few."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from partita.arithmetic.precision import Precision
from partita.arithmetic.progress import report
from partita.errors import (
    BudgetSpentError,
    DomainError,
    NonFiniteValueError,
    SizeError,
    ToleranceError,
    UnsupportedError,
)
from partita.functions.target import Target
from partita.geometry.domains import Array, Box, PointCloud
from partita.heads.scattered_head import ScatteredHead
from partita.proofs.bisection import DEGREE, BoxProof, box_terms, prove_boxes
from partita.proofs.certificate import total
from partita.proofs.proof import Progress
from partita.search.layouts import Layout, Pieces
from partita.search.leaves import Frame, LeafTree, Limits, Questions, Sampler, find_frame
from partita.search.power_cells import PowerCells, fit_cells

__all__ = ["Adaptation", "AdaptiveDraft", "Budget", "adaptive_cells", "worst_of_each"]

_SCANNED = 1 << 14  # points at random, to find out where f does something
_PROBED = 128  # leaves after which the directions that matter are known
_FIT = 0.9  # of the tolerance: what a leaf may err
_ALARM = 0.97  # of the tolerance: errors above are learned from
_REHEARSALS, _PROOFS = 2, 24
_CHECKS = {True: 4, False: 12}  # of expressions, which are proved afterwards, and of black boxes
_FRESH = 8  # points per leaf of a check
_MANY = 2048  # leaves beyond which coarse cells are rehearsed once only, and hopeless ones are not stored
_POLISHED = 256  # keys up to which fewer are tried for after a success: another round costs as much as the first
_PER_CELL = 4  # places where a cell is mended after one proof
_NEAR_CELLS = 64  # a guess, for what sums will round


@dataclass(frozen=True)
class Budget:
    """What may be spent: keys, evaluations of f, boxes of one proof, and rounds of trying for fewer keys after a success."""

    keys: int
    evaluations: int
    boxes: int
    polish: int


@dataclass(frozen=True, eq=False)
class AdaptiveDraft:
    """A head on scattered centers as it is stored, and what is known about it.

    Attributes:
        centers `(N, m)`, powers `(N,)` or None if equal, values `(N, out)`, slopes `(N, out, m)` or None, rate R: rounded to dtype.
        axes: directions along which the boxes of the proof are cut, `(m, m)`, None for those of z.
        proof: None for a black box. error_bound: of the stored head as it is run; infinite without a proof.
        error_seen: the largest error in the last check. leaves, evaluations, active: of the search; `active` directions matter.
    """

    centers: Array
    powers: Array | None
    values: Array
    slopes: Array | None
    rate: float
    tolerance: float
    dtype: torch.dtype
    error_seen: float
    axes: Array | None = None
    proof: BoxProof | None = None
    error_bound: float = math.inf
    leaves: int = 1
    evaluations: int = 0
    active: int = 0

    @property
    def keys(self) -> int:
        return len(self.centers)

    @property
    def parameters(self) -> int:
        """Stored scalars."""
        parts = (self.centers, self.powers, self.values, self.slopes)
        return sum(p.size for p in parts if p is not None) + 1

    @property
    def power_table(self) -> Array:
        """The powers, also where they are equal, `(N,)`."""
        return np.zeros(self.keys) if self.powers is None else self.powers

    @property
    def holds(self) -> bool:
        """Whether the tolerance is met: proved, or as far as the last check could see."""
        return (self.error_seen if self.proof is None else self.error_bound) <= self.tolerance

    @property
    def rank(self) -> tuple[bool, float]:
        """Drafts that hold come first, the smaller the better; among the others those with the smaller error."""
        error = self.error_seen if self.proof is None else self.error_bound
        return not self.holds, float(self.parameters) if self.holds else error

    def head(self, target: Target) -> ScatteredHead:
        def stored(array: Array | None) -> torch.Tensor | None:
            return None if array is None else torch.tensor(array).to(self.dtype)

        return ScatteredHead(
            torch.tensor(self.centers).to(self.dtype),
            self.rate,
            torch.tensor(self.values).to(self.dtype),
            powers=stored(self.powers),
            value_slopes=stored(self.slopes),
            input_shapes=target.input_shapes,
            output_shape=target.output_shape,
        )


class Adaptation:
    """Grows leaves, keeps few of them as cells, and uses samples and proofs to find out where there are too few."""

    def __init__(
        self,
        target: Target,
        tolerance: float,
        dtype: torch.dtype,
        budget: Budget,
        progress: Progress | None,
        sloped: NDArray[np.bool_] | None = None,
    ) -> None:
        self.target, self.tolerance, self.dtype, self.budget, self.progress = target, tolerance, dtype, budget, progress
        self.sloped = (
            None if sloped is None or sloped.all() else sloped
        )  # axes along which pieces may have slopes, if not all
        self.box, self.ask = _usable_box(target), Questions(target, progress)
        self.scan = target.domain.sample(_SCANNED, np.random.default_rng(0))
        self.scanned = self.ask(self.scan)
        self.goal = self._goal()

    def is_easy(self, *, affine: bool) -> bool:
        """Whether pieces fit on no more leaves than the budget has keys."""
        return not self._tree(affine).failed

    def run(self, *, affine: bool) -> AdaptiveDraft:
        """The best head found; once the time is used up, the first that meets the tolerance is enough."""
        found: list[AdaptiveDraft] = []
        try:
            self._search(affine, found)
        except BudgetSpentError:
            if not any(draft.holds for draft in found):
                raise
        return min(found, key=lambda r: r.rank)

    def _search(self, affine: bool, found: list[AdaptiveDraft]) -> None:
        for _ in range(1 + self.box.dimension):
            layout = Layout(self._tree(affine), self.tolerance)
            if layout.tree.overflows:
                found.append(self._given_up(layout))
                break
            layout.pieces()
            self._rehearse(layout)
            for _ in range(1 + self.budget.polish):
                layout.coarsen()
                draft, lost = self._proved(layout, min((d.keys for d in found if d.holds), default=None))
                found.append(draft)
                if lost or not draft.holds or layout.on_a_line or draft.keys > _POLISHED:
                    break
            if not lost:  # else a direction that seemed not to matter does: start again with what was learned
                break

    def _given_up(self, layout: Layout) -> AdaptiveDraft:
        """The leaves as they are, where there are not enough: what they reach says how far it is. SizeError if they are many."""
        leaves = layout.tree.leaves
        if len(leaves) > _MANY:
            raise SizeError(
                f"{len(leaves):,} leaves still err by {float(leaves.errors.max()):.3g}, and the {self.budget.keys:,} allowed are "
                "not enough",
                "Use a larger tolerance.",
            )
        return self._prove(self._stored(layout, layout.fitted(), math.inf), layout.tree.sampler.frame)

    def _goal(self) -> float:
        """What the tolerance leaves to the proof when sums have rounded."""
        precision, largest = Precision.of(self.dtype), float(np.abs(self.scanned).max())
        rounding = (2 * _NEAR_CELLS + self.box.dimension + 16) * precision.unit * (1.1 * largest + self.tolerance)
        if not 0 < 2 * rounding < self.tolerance < math.inf:
            raise ToleranceError(
                f"tolerance {self.tolerance:g} is not above what {precision.name} can promise for {self.target.label}: sums of "
                f"values up to {largest:.3g} round by about {rounding:.2g}",
                f"Use a tolerance above {2 * rounding:.2g}.",
            )
        return self.tolerance - max(rounding, 1e-5 * self.tolerance)

    def _tree(self, affine: bool) -> LeafTree:
        """Leaves along the directions that matter, as gradients at the leaves of a small tree tell; as a grid if that has fewer."""
        frame = Frame.plain(self.box)
        tree = self._rooted(frame, affine)
        tree.grow(_PROBED)
        if self.box.dimension > 1 and len(tree.leaves) > 1 and self.sloped is None:  # else directions are not alike
            frame = find_frame(tree.sampler, self._probes(tree))
            tree = tree if frame.active == self.box.dimension else self._rooted(frame, affine)
        tree.grow()
        self._tell("leaves", len(tree.leaves), self.budget.keys)
        if frame.active == 1 or len(tree.leaves) == 1:
            return tree
        grid = self._rooted(frame, affine, slabs=True)
        grid.grow(None if tree.failed else len(tree.leaves))
        return min(tree, grid, key=lambda t: (t.failed, len(t.leaves)))

    def _rooted(self, frame: Frame, affine: bool, *, slabs: bool = False) -> LeafTree:
        limits = Limits(_FIT * self.tolerance, self.budget.keys, self.budget.evaluations)
        slopes = affine if self.sloped is None or not affine else self.sloped
        tree = LeafTree(Sampler(self.ask, self.box, frame), limits, affine=slopes, slabs=slabs)
        tree.add_hints(frame.enter(self.scan), self.scanned)
        return tree

    def _probes(self, tree: LeafTree) -> Array:
        """Points where gradients are compared: some of the leaves' samples and of the scan, and what proofs have found."""
        samples = tree.leaves.points
        rows = np.arange(len(samples))
        return np.concatenate([samples[rows, rows % samples.shape[1]], tree.hints[:_PROBED], tree.hints[_SCANNED:]])

    def _checked(self, layout: Layout) -> tuple[Pieces, float]:
        """Pieces that hold at fresh points, as far as a few rounds can tell, and the worst error of the last."""
        pieces = layout.pieces()
        for _ in range(_CHECKS[self.target.graph is not None]):
            points, answers = self._fresh(layout, pieces)
            errors = pieces.errors(points, answers)
            bad = errors > _ALARM * self.tolerance
            self._tell("check", int((~bad).sum()), len(bad))
            if not bad.any() or layout.tree.failed:
                break
            layout.learn(points[bad], answers[bad])
            pieces = layout.pieces()
        return pieces, float(errors.max())

    def _rehearse(self, layout: Layout) -> None:
        """Learn where coarse cells would err before any are mended: so that the next coarsening knows."""
        for _ in range(0 if layout.on_a_line else 1 if len(layout.tree.leaves) > _MANY else _REHEARSALS):
            layout.coarsen()
            pieces = layout.fitted()
            points, answers = self._fresh(layout, pieces)
            bad = pieces.errors(points, answers) > _ALARM * self.tolerance
            if not bad.any():
                return
            layout.learn(points[bad], answers[bad])

    def _fresh(self, layout: Layout, pieces: Pieces) -> tuple[Array, Array]:
        leaves, sampler = layout.tree.leaves, layout.tree.sampler
        active = sampler.frame.active
        inside = sampler.rng.random((len(leaves), _FRESH, active)) * (leaves.hi - leaves.lo)[:, None]
        parts = [sampler.ask_active((leaves.lo[:, None] + inside).reshape(-1, active))]
        parts.append(sampler.ask(pieces.borders(parts[0][0], 1)))
        parts.append(sampler.ask(pieces.borders(parts[1][0], 2)))
        parts.append((sampler.frame.enter(self.scan), self.scanned))
        return np.concatenate([p for p, _ in parts]), np.concatenate([a for _, a in parts])

    def _proved(self, layout: Layout, most: int | None = None) -> tuple[AdaptiveDraft, bool]:
        """The best of several rounds of proof and repair, and whether the frame is too small for what a proof has found.

        Repairs add cells: with `most` of them no smaller head can come of it.
        """
        pieces, seen = self._checked(layout)
        best = self._stored(layout, pieces, seen)
        if self.target.graph is None:
            return best, False
        tree = layout.tree
        draft = best = self._prove(best, tree.sampler.frame)
        for _ in range(_PROOFS):
            if draft.holds or tree.failed or (draft.proof is not None and draft.proof.bound <= self.goal):
                break  # met, hopeless, or missed by what running rounds, which other cells do not change
            if most is not None and draft.keys >= most:
                return best, False
            if not self._learn(layout, draft):
                return best, True
            draft = self._prove(self._stored(layout, layout.pieces(), seen), tree.sampler.frame)
            best = min(best, draft, key=lambda r: r.rank)
        return best if best.holds else self._prove(best, tree.sampler.frame, patient=True), False

    def _learn(self, layout: Layout, draft: AdaptiveDraft) -> bool:
        """Ask f where the proof failed; where samples show no fault, mend all the same. False if f varies in new directions."""
        if draft.proof is None:
            return True
        tree, frame, (z, least) = layout.tree, layout.tree.sampler.frame, draft.proof.missed
        owner = PowerCells(draft.centers, draft.power_table, draft.rate).rank(z, 1, progress=self.progress).labels[:, 0]
        chosen = worst_of_each(owner, least)[: _lessons(draft)]
        points, answers = tree.sampler.ask(frame.enter(z[chosen]))
        self.scan, self.scanned = np.concatenate([self.scan, z[chosen]]), np.concatenate([self.scanned, answers])
        if frame.active < self.box.dimension:
            probes = np.concatenate([self._probes(tree), points])
            if find_frame(tree.sampler, probes).active > frame.active:
                return False
        tree.add_hints(points, answers)
        tree.grow()
        layout.learn(points, answers)
        if (least[chosen] <= self.goal).all():
            layout.mend(points)
        return True

    def _prove(self, draft: AdaptiveDraft, frame: Frame, *, patient: bool = False) -> AdaptiveDraft:
        if self.target.graph is None:
            return draft
        head, axes = draft.head(self.target), frame.axes if frame.active < self.box.dimension else None
        proof = prove_boxes(
            head,
            self.target.graph,
            self.box,
            region=self.target.region,
            target=self.goal,
            degree=DEGREE,
            max_boxes=self.budget.boxes if patient else min(self.budget.boxes, 100_000 + 500 * draft.keys),
            give_up=None if patient else _lessons(draft),
            unit_roundoff=Precision.of(draft.dtype).unit,
            axes=axes,
            progress=self.progress,
        )
        bound = total(box_terms(head, proof, self.box)) if math.isfinite(proof.bound) else math.inf
        return replace(draft, proof=proof, axes=axes, error_bound=bound)

    def _stored(self, layout: Layout, pieces: Pieces, seen: float) -> AdaptiveDraft:
        """The pieces rounded to the dtype, values fitted anew to the cells as stored."""
        frame, tree = layout.tree.sampler.frame, layout.tree
        centers, powers = self._round(frame.leave(pieces.cells.centers)), self._round(pieces.cells.powers)
        rate = float(self._round(np.array(pieces.cells.rate)))
        if not (np.isfinite(centers).all() and np.isfinite(powers).all() and Precision.of(self.dtype).is_normal(rate)):
            raise DomainError(
                f"the centers or the inverse temperature {rate:.3g} are out of range for {Precision.of(self.dtype).name}",
                "Rescale the variables.",
            )
        cells, (points, answers) = PowerCells(frame.enter(centers), powers, rate), layout.samples()
        ranking = cells.rank(points, progress=self.progress)
        fits = fit_cells(cells, ranking, points, answers, affine=tree.affine, progress=self.progress)
        return AdaptiveDraft(
            centers=centers,
            powers=powers if np.ptp(powers) else None,
            values=self._round(fits.values),
            slopes=self._round(fits.slopes @ frame.axes.T) if np.any(tree.affine) else None,
            rate=rate,
            tolerance=self.tolerance,
            dtype=self.dtype,
            error_seen=seen,
            leaves=len(tree.leaves),
            evaluations=self.ask.count,
            active=frame.active,
        )

    def _round(self, array: Array) -> Array:
        return torch.tensor(array).to(self.dtype).double().numpy()

    def _tell(self, what: str, done: int, of: int) -> None:
        report(self.progress, what, done, of)


def _lessons(draft: AdaptiveDraft) -> int:
    """How many places are mended after one proof."""
    return max(256, draft.keys // 2)


def worst_of_each(owner: NDArray[np.int64], least: Array) -> NDArray[np.int64]:
    """The worst places of every cell, the worst of all first, so that one bad cell does not hide the others."""
    order = np.lexsort((-least, owner))
    starts = np.flatnonzero(np.append(True, np.diff(owner[order]) > 0))
    rank = np.arange(len(order)) - np.repeat(starts, np.diff(np.append(starts, len(order))))
    kept = order[rank < _PER_CELL]
    out: NDArray[np.int64] = kept[np.argsort(-least[kept], kind="stable")]
    return out


def _usable_box(target: Target) -> Box:
    """The box around the domain, if its squared sides are ordinary numbers."""
    box = target.box
    if isinstance(target.domain, PointCloud):
        raise UnsupportedError(
            f"adaptive centers need a box or a region, found {target.domain!r}. For a point cloud use method='hard'."
        )
    if box.sides.min() < 1e-100 or box.sides.max() > 1e100:
        raise DomainError(
            f"the sides of the box are {box.sides.min():.3g} to {box.sides.max():.3g} long; expected 1e-100 to 1e100. "
            "Rescale the variables."
        )
    return box


_TRY_CONSTANTS_UP_TO = 256  # keys


@np.errstate(all="ignore")  # numbers out of range end in a refusal
def adaptive_cells(
    target: Target,
    *,
    tolerance: float,
    dtype: torch.dtype = torch.float64,
    affine: bool | None = None,
    max_keys: int = 20_000,
    max_evaluations: int = 5_000_000,
    max_boxes: int = 500_000,
    polish: int = 1,
    sloped: NDArray[np.bool_] | None = None,
    progress: Progress | None = None,
) -> AdaptiveDraft:
    """Few cells whose affine (or constant) values are within the tolerance, found by sampling, and proved where f is a graph.

    When a budget is spent, or f jumps, the best head found is returned with the bound it reached: see `draft.holds`.

    Args:
        affine: None for whichever stores fewer numbers.
        max_keys: leaves, from which the keys are chosen; max_evaluations: of f; max_boxes: of one proof.
        polish: rounds of trying for fewer keys after a success.
        sloped: the axes along which affine values may have slopes, `(m,)`; None for all.
        progress: called with (what, done, of).

    Raises:
        UnsupportedError: the domain is a point cloud. ToleranceError: the tolerance is below the rounding errors of the dtype.
        NonFiniteValueError: f is NaN or infinite, or has no finite bound. SizeError: thousands of leaves are not nearly enough.

    >>> from partita.functions.target import make_target
    >>> draft = adaptive_cells(make_target("abs(x + 0.7*y)", Box([-1, -1], [1, 1])), tolerance=0.01)
    >>> draft.keys, draft.holds
    (2, True)
    """
    budget = Budget(max_keys, max_evaluations, max_boxes, polish)
    search = Adaptation(target, tolerance, dtype, budget, progress, sloped)
    found = search.run(affine=affine is not False)
    _require_finite(target, found)
    return found if affine is not None or not found.holds else _or_constants(search, found)


def _require_finite(target: Target, found: AdaptiveDraft) -> None:
    if found.proof is not None and math.isinf(found.error_bound):
        raise NonFiniteValueError(
            f"{target.label} has no finite bound near {np.round(found.proof.worst[0], 6).tolist()}; expected finite values on the "
            "whole domain. Shrink the domain, or write f so that poles cancel."
        )


def _or_constants(search: Adaptation, found: AdaptiveDraft) -> AdaptiveDraft:
    """Constant values where those need fewer numbers, `m + 1 + out` per key instead of `m + 1 + out·(1 + m)`."""
    m, out = found.centers.shape[1], found.values.shape[1]
    room = found.keys * (m + 1 + out * (m + 1)) // (m + 1 + out)
    if room > _TRY_CONSTANTS_UP_TO:
        return found
    search.budget = replace(search.budget, keys=8 * room)
    try:
        if not search.is_easy(affine=False):
            return found
        return min(found, search.run(affine=False), key=lambda r: r.rank)
    except BudgetSpentError:
        return found
