"""Proving the error of a head on scattered centers, whatever its centers, powers and values: best-first bisection into boxes.

On a box f is a Taylor polynomial with a remainder, every `V_j` is affine, and so is every difference of two scores. That bounds the
error of each cell and the weight of each cell, and the worst mixture of them bounds the head's error. *Theorem*: `box-bisection`.

That is all there is to know of hard heads. Soft heads may be much closer to f than their cells are; on small boxes such a head is
nearly affine itself, with a remainder that the weights bound. *Theorem*: `softmax-expansion`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from partita.arithmetic.precision import Precision
from partita.arithmetic.progress import Progress, report
from partita.arithmetic.rounding import add_up, exp_up, mul_up
from partita.errors import BudgetSpentError, FormatError, UnsupportedError
from partita.functions.graph import Graph
from partita.functions.regions import Region
from partita.functions.target import Target
from partita.geometry.domains import Array, Box
from partita.heads.head import FoldedHead, Head
from partita.heads.scattered_head import LISTED_WHOLE, ScatteredHead, exponent_cut
from partita.proofs.box_lists import OUTWARD, BoxList, CellTable, Expansion, Labels, Mask, Place, U, View
from partita.proofs.center_values import lp_factor
from partita.proofs.certificate import Term
from partita.proofs.proof import Given, Proof, Proved
from partita.proofs.running import summed
from partita.proofs.shards import ROUND, SHARDED, SHARDS, shard_details
from partita.workers import crew

__all__ = ["DEGREE", "BisectionProof", "BoxProof", "box_terms", "prove_boxes"]

DEGREE = 2  # of the Taylor models

_RIVALS = 8  # cells of a box that the others are compared with
_PAIRS_AT_ONCE = 1 << 16  # (box, cell) pairs measured together
_BOXES_AT_ONCE = 2048
_MOST_PAIRS = 4_000_000  # measured for a head that is expanded: where all keys matter everywhere, boxes are costly
_FORGOTTEN = 1e-6  # share of the target that all cells left out of a box may claim together
_NEARLY = 1.1  # once the target is missed, bounds this close to it, or to the least possible, will do
_FARTHEST = 800.0  # exponents that trail by more are zero when run
_NORMAL = 700.0  # exponentials of less than minus that may lose digits or vanish; rounded scores may bring them back
_TINY = 1e-300  # more than underflow takes from one bound
_SURE = 40.0  # how far cells that are left out must trail, rounding included, to be negligible


@dataclass(frozen=True, eq=False)
class BoxProof:
    """`sup |f − net| ≤ bound` on the box; `seen`, the largest error at midpoints of boxes, is an estimate from below.

    Attributes:
        bound: the largest bound of a leaf; worst: (lo, hi) of that leaf.
        boxes, depth: how many were measured, how often the smallest was halved.
        missed: points z where the target is missed, `(k, m)`, the middles of those leaves, and what no finer boxes could prove
            less than there, `(k,)`.
        magnitude: a bound of |f|, and of `Σ w_j |V_j|` where heads were expanded; near_cells: the most cells listed at a leaf;
            forgotten: what the others may hold.
        mean_bound: a bound of the L_p error, `(outputs · Σ vol·bound^p)^{1/p}` over the leaves, for the p asked for.
        unit_roundoff: of the arithmetic that the bound holds for, 0 for the exact head.
        expanded: whether heads were expanded on boxes.
        complete: whether no box was left to halve, rather than that time or boxes ran out.
        shards: of a long proof, the bounds of the parts of the domain, whose maximum is the bound.
    """

    bound: float
    seen: float
    seen_at: tuple[float, ...]
    boxes: int
    depth: int
    worst: tuple[Array, Array]
    missed: tuple[Array, Array]
    magnitude: float
    near_cells: int
    forgotten: float
    mean_bound: float
    unit_roundoff: float
    expanded: bool
    complete: bool
    shards: tuple[float, ...] = ()


class BisectionProof(Proof):
    """Any scattered head against an expression, by bisection into boxes. *Theorem*: `box-bisection`.

    `given.details` may have `axes`, the directions along which boxes are cut, `degree`, `boxes`, how many were needed before, and
    `expand`, whether heads are expanded on small boxes. *Theorem*: `softmax-expansion`.
    """

    name = "boxes"
    mean_distance = 1.0
    moves_inputs = True

    def mean_distance_in(self, details: Mapping[str, Any]) -> float:
        return math.inf if details.get("expand") else self.mean_distance

    def handles(self, head: Head) -> bool:
        return isinstance(head, ScatteredHead)

    def _prove(self, head: FoldedHead, target: Target, given: Given) -> Proved:
        if not isinstance(head, ScatteredHead) or target.graph is None:
            raise UnsupportedError("a proof by bisection needs a scattered head and an expression.")
        box, aim = target.box, given.tolerance if given.aim is None else given.aim
        factor = 1.0 if math.isinf(given.norm) else lp_factor(target.volume, target.num_outputs, given.norm)
        aim = aim / factor
        axes, expand = self._axes(head, given), bool(given.details.get("expand"))
        limit: dict[str, Any] = {"max_pairs": _MOST_PAIRS} if expand else {}
        if "boxes" in given.details:
            before = int(given.details["boxes"])
            # where time ended it, as many: more would forget more cells on the way, and the sums would be bounded by more
            limit = {"max_boxes": 4 * before + 1000 if given.details.get("complete", True) else before}
        proof = given.earlier or prove_boxes(
            head,
            target.graph,
            box,
            region=target.region,
            target=aim,
            degree=int(given.details.get("degree", DEGREE)),
            unit_roundoff=Precision.of(head.dtype).unit,
            axes=axes,
            expand=expand,
            progress=given.progress,
            **limit,
        )
        details = {
            "method": self.name,
            "degree": DEGREE,
            "boxes": proof.boxes,
            "depth": proof.depth,
            "axes": [] if axes is None else axes.ravel().tolist(),
            **({"expand": True, "complete": proof.complete} if expand else {}),
            **shard_details(proof.shards, factor),
        }
        return Proved(box_terms(head, proof, box, factor), details, settled=proof.bound <= aim)

    def _axes(self, head: ScatteredHead, given: Given) -> Array | None:
        m, stated = head.dimension, np.array(given.details.get("axes", []), dtype=float)
        if not stated.size:
            return None
        axes = stated.reshape(m, m) if stated.size == m * m else None
        if axes is None or np.abs(axes @ axes.T - np.eye(m)).max() > 1e-12:
            raise FormatError("the axes of the boxes in the certificate are not orthogonal.")
        return axes


def prove_boxes(
    head: ScatteredHead,
    graph: Graph,
    box: Box,
    *,
    target: float,
    region: Region | None = None,
    norm: float = math.inf,
    degree: int = 2,
    max_boxes: int = 200_000,
    max_pairs: float = math.inf,
    give_up: int | None = None,
    unit_roundoff: float = 0.0,
    axes: Array | None = None,
    expand: bool = False,
    progress: Progress | None = None,
) -> BoxProof:
    """Bound |f − net| over the box for the stored tensors, halving boxes until all bounds meet the target or the budget is spent.

    With a unit roundoff the bound holds for scores, weights, values and (below float64) inputs rounded by it; what sums round is
    left to `box_terms`. Whatever the budget, the bound holds: it is a maximum over boxes that cover the domain.

    Args:
        region: the domain, a part of the box: boxes that are proved to lie outside of it do not count. *Theorem*: `regions`.
        max_boxes, max_pairs: how many boxes to measure, and how many pairs of a box and a cell.
        give_up: halve no boxes that cannot meet the target however small they get, and stop after so many: to learn where quickly.
        axes: orthogonal `(m, m)`: halve boxes turned like this, for functions that vary along oblique directions.
        expand: whether to expand the head on small boxes too, for soft heads that are closer to f than their cells are.
    """
    view = View.plain(graph, box) if axes is None else View.turned(graph, box, axes)
    cells = CellTable.of(head, box, unit_roundoff)
    how: dict[str, Any] = {
        "target": target,
        "norm": norm,
        "degree": degree,
        "patient": give_up is None,
        "expand": expand,
        "progress": progress,
    }
    search = _Search(cells, view, box, region, **how)
    try:
        while search.boxes < max_boxes and search.pairs < max_pairs and search.refine(max_boxes):
            if give_up is not None and search.hopeless >= give_up:
                break
            report(progress, "proof", search.boxes, max_boxes)
    except BudgetSpentError:
        pass  # the boxes that are open have bounds
    return search.result()


def box_terms(head: ScatteredHead, proof: BoxProof, box: Box, factor: float = 1.0) -> list[Term]:
    """The proved bound as terms, with what leaving cells out and summing in the head's dtype adds; times `lp_factor` in L_p.

    *Theorem*: `box-bisection`, `window-tail` and `score-rounding`. Scores, values and inputs were rounded inside the proof.
    """
    u = Precision.of(head.dtype).unit
    if proof.unit_roundoff < u:
        raise UnsupportedError(
            f"this proof assumes arithmetic with roundoff {proof.unit_roundoff:.3g}, but the head runs with {u:.3g}. "
            "Prove the bound for that roundoff."
        )
    cells = CellTable.of(head, box, u)
    largest, far = cells.largest(box), float((cells.farthest(box) ** 2).sum(axis=1).max())
    spread = float(np.ptp(cells.powers))
    cut = exponent_cut(head.num_keys) * (1 - 1e-6) - (head.dimension + 8) * 2 * U * cells.rate * (far + spread)
    mass = min(mul_up(float(head.num_keys), exp_up(-cut)), 1.0) if head.num_keys > 1 else 0.0
    if head.num_keys <= LISTED_WHOLE and cut < _SURE:  # no search that rounding could mislead: all cells are summed
        mass = 0.0
    operations = float(2 * proof.near_cells + head.dimension + 16)
    rounded = summed(operations, u, add_up(proof.magnitude, proof.bound))
    rest = mul_up(2.0, proof.forgotten, largest)
    how = "|f − net|, a mixture of |f − V_j| or expanded" if proof.expanded else "Σ w_j |f − V_j|"
    return [
        Term(
            "approximation",
            mul_up(proof.bound, factor),
            f"max over boxes of {how}, as rounded" + (" · factor" if factor != 1.0 else ""),
            "box-bisection",
            {"boxes": float(proof.boxes), "seen": proof.seen},
        ),
        Term(
            "window",
            mul_up(mass, 2.0, largest, factor),
            "mass left out · spread of the values",
            "window-tail",
            {"mass": mass},
            source="rounding",
        ),
        Term(
            "summation",
            mul_up(add_up(rounded, rest), factor),
            "γ_K · (max|f| + error), and what cells that are not near hold",
            "score-rounding",
            {"operations": operations, "u": u, "forgotten": proof.forgotten},
            source="rounding",
        ),
    ]


class _Search:
    """One bisection: the boxes still open, and those that are settled."""

    def __init__(
        self,
        cells: CellTable,
        view: View,
        box: Box,
        region: Region | None,
        *,
        target: float,
        norm: float,
        degree: int,
        patient: bool,
        expand: bool,
        progress: Progress | None,
    ) -> None:
        self.cells, self.view, self.box = cells, view, box
        self.domain = box if region is None else region
        self.target, self.norm, self.patient, self.expand, self.progress = target, norm, patient, expand, progress
        self.boxes, self.pairs, self.hopeless, self.least, self.seen = 0, 0, 0, 0.0, 0.0
        self.seen_at, self.sharded = (box.lo + box.hi).ravel() / 2, False
        floor = _FORGOTTEN * target / max(len(cells.centers) * (2 * cells.largest(box) + target), _TINY)
        self.measure = _Measure.of(cells, view, box, region, degree=degree, expand=expand, floor=floor)
        self.open = self._measured([BoxList.whole(view, len(cells.centers))])
        self.settled = self.open.take(np.arange(0))

    def refine(self, budget: int) -> bool:
        """Halve the boxes that matter most; False if none is left to halve."""
        done = self._is_settled(self.open)
        if done.any():
            self.hopeless += int((self.open.least[done] > self.target).sum())
            self.settled, self.open = self.settled.join(self.open.take(done)), self.open.take(~done)
        if not len(self.open) or (math.isfinite(self.norm) and self._mean() <= self.target):
            return False
        self._shard()
        batches = ROUND // 2 if self.boxes >= ROUND * _BOXES_AT_ONCE else 1  # a long proof: some batches side by side
        order = np.argsort(-self._share(self.open), kind="stable")
        room = min(batches * _BOXES_AT_ONCE, 1 + (budget - self.boxes) // 2)
        fitting = int(np.searchsorted(np.cumsum(self.open.counts[order]), batches * _PAIRS_AT_ONCE))
        chosen, rest = np.split(order, [max(1, min(room, fitting))])
        parts = [self.open.take(part).halves() for part in np.array_split(chosen, min(batches, len(chosen)))]
        waiting = self.open.take(np.sort(rest))
        self.open = waiting.join(self._measured(parts))
        return True

    def _measured(self, parts: list[BoxList]) -> BoxList:
        """The bounds of all boxes, part by part."""
        self.boxes += sum(map(len, parts))
        self.pairs += sum(len(part.cells) for part in parts)
        found: list[BoxList] = []
        for columns, least, seen, seen_at in crew().spread(_measured, self.measure, parts, self.progress):
            found.append(BoxList(**columns))
            self.least = max(self.least, least)
            if seen > self.seen:
                self.seen, self.seen_at = seen, seen_at
        return found[0].join(*found[1:])

    def _shard(self) -> None:
        """Give every box a shard, once there are enough of them; halves keep it."""
        count = len(self.open) + len(self.settled)
        if not self.sharded and count >= SHARDS:
            labels, self.sharded = np.arange(count) * SHARDS // count, True
            self.open = replace(self.open, shard=labels[: len(self.open)])
            self.settled = replace(self.settled, shard=labels[len(self.open) :])

    def result(self) -> BoxProof:
        leaves = self.settled.join(self.open)
        worst = int(leaves.bound.argmax())
        missed = leaves.take(leaves.bound > self.target)
        return BoxProof(
            bound=float(leaves.bound[worst]),
            seen=self.seen,
            seen_at=tuple(self.seen_at.tolist()),
            boxes=self.boxes,
            depth=int(leaves.depth.max()),
            worst=(leaves.lo[worst], leaves.hi[worst]),
            missed=(self.domain.clamp(self.view.leave(missed.middle)[0]), missed.least),
            magnitude=float(leaves.size.max()),
            near_cells=int(leaves.counts.max()),
            forgotten=float(leaves.mass.max()),
            mean_bound=self._mean() if math.isfinite(self.norm) else math.nan,
            unit_roundoff=self.cells.unit,
            expanded=self.expand,
            complete=bool(self._is_settled(self.open).all()),
            shards=self._shards(leaves),
        )

    def _shards(self, leaves: BoxList) -> tuple[float, ...]:
        """The bounds of the shards of a long proof of a supremum."""
        if self.boxes < SHARDED or not self.sharded or math.isfinite(self.norm):
            return ()
        bounds = np.zeros(SHARDS)
        np.maximum.at(bounds, leaves.shard, leaves.bound)
        return tuple(bounds.tolist()) if np.isfinite(bounds).all() else ()

    def _is_settled(self, boxes: BoxList) -> Mask:
        """Where the bound meets the target, or comes close to what cannot be helped, or the box has no midpoint of its own."""
        rows, middle = np.arange(len(boxes)), boxes.middle
        stuck = ((middle == boxes.lo) | (middle == boxes.hi))[rows, boxes.axis]
        if math.isfinite(self.norm):
            return np.asarray(stuck | (boxes.bound * self._whole() <= 0.5 * self.target))
        enough = _NEARLY * self.target if self.patient and self.least > self.target else self.target
        close = boxes.bound <= (_NEARLY * self.least if self.patient else 2 * boxes.least)
        return np.asarray(stuck | (boxes.bound <= enough) | ((boxes.least > self.target) & close))

    def _share(self, boxes: BoxList) -> Array:
        """How pressing a box is: its bound, or its part of the integral."""
        if not math.isfinite(self.norm):
            return boxes.bound
        volume = ((boxes.hi - boxes.lo) / self.box.sides).prod(axis=1)
        out: Array = volume * (boxes.bound / self.target) ** self.norm
        return out

    def _whole(self) -> float:
        """The L_p norm of the constant 1 in every output."""
        return float((self.box.volume * self.cells.values.shape[1]) ** (1 / self.norm) * OUTWARD)

    def _mean(self) -> float:
        """The L_p bound of all leaves, open or settled."""
        shares = float(self._share(self.open).sum() + self._share(self.settled).sum())
        return float(self.target * (shares * OUTWARD) ** (1 / self.norm) * self._whole() * OUTWARD)


@dataclass(frozen=True, eq=False)
class _Measure:
    """What it takes to bound |f − net| on boxes: the same for all boxes of a proof.

    `floor`: cells that hold less weight are left out of a box. `largest`: a bound of every |V_j|. `turned`: the constraints of the
    region in the coordinates of a turned view, one list per piece.
    """

    cells: CellTable
    view: View
    box: Box
    region: Region | None
    turned: list[list[tuple[Graph, float]]]
    degree: int
    expand: bool
    floor: float
    largest: float

    @classmethod
    def of(
        cls, cells: CellTable, view: View, box: Box, region: Region | None, *, degree: int, expand: bool, floor: float
    ) -> _Measure:
        pieces = () if region is None or view.is_plain else region.pieces
        turned = [[(view.entered(c.graph), c.slack) for c in p.constraints] for p in pieces]
        return cls(cells, view, box, region, turned, degree, expand, floor, cells.largest(box))

    @np.errstate(all="ignore")
    def of_boxes(self, boxes: BoxList) -> tuple[BoxList, float, float, Array]:
        """Bounds of the boxes, the cells that still matter there, and the axis to halve next; then what was seen at their middles:
        the largest `least`, the largest |f − net|, and where."""
        place = Place.of(boxes, self.view, self.cells.shift)
        if not self.view.is_plain:
            near: Mask = np.all(np.abs(place.z - self.box.clamp(place.z)) <= place.hull, axis=1)
            boxes, place = boxes.take(near), place.take(near)
        if self.region is not None:
            near = ~self._outside(self.region, boxes, place)
            boxes, place = boxes.take(near), place.take(near)
        if not len(boxes):
            return boxes, 0.0, 0.0, np.zeros(self.box.dimension)
        f = Expansion.of(self.view.graph, boxes, place.radius, self.degree)
        score, weight = self._weights(boxes, place)
        small = weight <= self.floor
        mass = boxes.mass + np.bincount(boxes.owner[small], weight[small], minlength=len(boxes)) * OUTWARD
        boxes, score, weight = boxes.keep(~small, mass), score[~small], weight[~small]
        at_middle, tilt, error = self._errors(boxes, f, place)
        mixed, blamed = _worst_mixture(boxes, weight, error)
        size = f.magnitude
        if self.expand:
            closer = self._expanded(boxes, f, place, score, at_middle)
            size, mixed = size + mixed, np.fmin(mixed, closer)
        bound = (mixed + np.where(mass > 0, mass * (self.largest + size), 0.0)) * OUTWARD
        axis = _steepest(tilt[blamed] + f.curved.max(axis=1), self._apart(boxes, weight) * place.radius, place.radius)
        bound = np.where(np.isnan(bound), np.inf, bound)
        if self.expand:  # what holds on a box holds on its halves: more boxes never loosen a bound
            halved = boxes.depth > 0
            bound = np.where(halved, np.fmin(bound, boxes.bound), bound)
            size = np.where(halved, np.fmin(size, boxes.size), size)
        least, seen, seen_at = self._look(boxes, place.z, score, at_middle)
        measured = replace(boxes, bound=bound, size=size, least=least, axis=axis)
        return measured, float(least.max()), seen, seen_at

    def _outside(self, region: Region, boxes: BoxList, place: Place) -> Mask:
        """Which boxes are proved to hold no point of the region: as they are, or, where they are turned, the boxes around them, and
        the boxes themselves by Taylor models of the constraints, in which slopes cancel."""
        if self.view.is_plain:
            return region.outside(boxes.lo, boxes.hi)
        out = np.ones(len(boxes), bool)
        for piece, constraints in zip(region.pieces, self.turned):
            away = piece.outside(place.z - place.hull, place.z + place.hull)
            for graph, slack in constraints:
                model = graph.taylor(boxes.middle, place.radius, 1)
                sizes = np.abs(model.coefficients[0])
                swing = (sizes[1:].sum(axis=0) + model.remainder[0] + 8 * len(sizes) * U * sizes.sum(axis=0)) * OUTWARD
                away |= model.coefficients[0, 0] - swing > slack
            out &= away
        return out

    def _weights(self, boxes: BoxList, place: Place) -> tuple[Array, Array]:
        """Scores at the middle, and bounds of the softmax weights on the box, for each (box, cell) pair.

        `w_j ≤ 1/(1 + Σ_k exp(min_B(s_k − s_j)))` over some rivals k; an affine function has its minimum at
        `middle − Σ_i r_i |slope_i|`. Scores may be off by `slack`: what running them rounds, and what we round here.
        """
        c, owner, cells = self.cells, boxes.owner, boxes.cells
        offset = place.z[owner] - c.centers[cells]
        squared, far = (offset**2).sum(axis=1), ((np.abs(offset) + place.hull[owner]) ** 2).sum(axis=1)
        score = 0.5 * c.rate * (c.powers[cells] - squared)
        units = (offset.shape[1] + 6) * (c.unit + 2 * U)
        slack = 0.5 * c.rate * units * (far + np.abs(c.powers[cells])) + _FARTHEST * c.unit
        total, order = np.zeros(len(cells)), np.lexsort((-score, owner))
        low, high, radius, moved = score - slack, score + slack, place.radius[owner], place.moved[owner]
        for rank in range(min(_RIVALS, int(boxes.counts.max()))):
            rival = order[np.minimum(boxes.starts + rank, len(order) - 1)][owner]
            step = c.centers[cells[rival]] - c.centers[cells]
            falls = (radius * np.abs(step @ self.view.axes)).sum(axis=1) + (moved * np.abs(step)).sum(axis=1)
            lead = low[rival] - high - c.rate * falls
            counted = (rank < boxes.counts)[owner] & (rival != np.arange(len(cells)))
            total += np.where(counted, np.exp(lead - 1e-12 * np.abs(lead)), 0.0)
        return score, np.minimum(1 / (1 + total) * OUTWARD, 1.0)

    def _errors(self, boxes: BoxList, f: Expansion, place: Place) -> tuple[Array, Array, Array]:
        """For each (box, cell) pair `V_j` at the middle, the part of each axis in `f − V_j`, `(P, m)`, and its bound, `(P,)`."""
        c, owner, cells = self.cells, boxes.owner, boxes.cells
        offset, slopes = place.z[owner] - c.centers[cells], c.slopes[cells]
        at_middle = c.values[cells] + np.einsum("pom,pm->po", slopes, offset)
        steep = np.abs(slopes)
        reach = np.abs(c.values[cells]) + np.einsum("pom,pm->po", steep, np.abs(offset) + place.hull[owner])
        rounded = (offset.shape[1] + 4) * (c.unit + 2 * U) * reach + np.einsum("pom,pm->po", steep, place.moved[owner])
        linear = (slopes @ self.view.axes) * place.radius[owner][:, None, :]
        tilt = np.abs(f.linear[owner] - linear)
        model = np.abs(f.constant[owner] - at_middle) + tilt.sum(axis=2) + f.higher[owner]
        plain = np.maximum(f.hi[owner] - at_middle, at_middle - f.lo[owner]) + np.abs(linear).sum(axis=2)
        lost = 4 * U * (np.abs(f.constant[owner]) + np.abs(linear).sum(axis=2))
        error = (np.fmin(model, plain) + rounded + lost) * OUTWARD + _TINY
        return at_middle, tilt.max(axis=1), np.where(np.isnan(error), np.inf, error).max(axis=1)

    def _expanded(self, boxes: BoxList, f: Expansion, place: Place, score: Array, at_middle: Array) -> Array:
        """Bounds of |f − net| on the boxes, `(n,)`, net an affine function and a remainder. *Theorem*: `softmax-expansion`.

        The head that is expanded has the scores and values computed here, exactly affine in z. It differs from the one that is run
        by scores that are off by `shift` and values that are off by `lost`.
        """
        c, owner, cells, starts = self.cells, boxes.owner, boxes.cells, boxes.starts
        offset = place.z[owner] - c.centers[cells]
        reach, slopes = np.abs(offset) + place.hull[owner], c.slopes[cells]
        linear = (slopes @ self.view.axes) * place.radius[owner][:, None, :]  # (P, out, m)
        best = np.lexsort((-score, owner))[starts]
        lead = score - score[best][owner]
        weights = np.exp(lead)
        total = np.add.reduceat(weights, starts)[owner]
        weights /= total
        step = c.centers[cells] - c.centers[cells[best]][owner]
        moves = c.rate * (step @ self.view.axes) * place.radius[owner]  # of the scores, (P, m), along each axis

        def mean(numbers: Array) -> Array:
            """`Σ w_j x_j` at the middle, per box."""
            return np.asarray(np.add.reduceat(weights.reshape(-1, *[1] * (numbers.ndim - 1)) * numbers, starts))

        def most(numbers: Array) -> Array:
            """The most that `Σ w_j x_j` may be on the box, x_j ≥ 0: no weight grows by more than `exp(turn)`."""
            part = heavy.reshape(-1, *[1] * (numbers.ndim - 1)) * numbers
            return np.fmin(np.add.reduceat(part, starts), np.maximum.reduceat(numbers, starts)) * OUTWARD

        middle, level, incline = mean(moves), mean(at_middle), mean(linear)
        tilt = incline + mean((at_middle - level[owner])[:, :, None] * (moves - middle[owner])[:, None, :])
        # how far scores, values and slopes are from these means on the box, for each cell
        turn = np.abs(moves - middle[owner]).sum(axis=1)
        units = (4 * boxes.counts + 64) * U * (1 + np.maximum.reduceat(turn, starts))  # what we round here
        heavy = np.exp(np.maximum(lead + turn, -_NORMAL)) / total * (1 + units)[owner]
        bend = np.abs(linear - incline[owner]).sum(axis=2)
        away = np.abs(at_middle - level[owner]) + bend
        turned = most(turn)
        skew = most((turn + turned[owner])[:, None] ** 2 * away) + most(turn**2)[:, None] * most(away)
        steepest = np.maximum(np.maximum.reduceat(bend, starts), _TINY)
        rest = np.sqrt(most(turn**2)[:, None] * most((bend / steepest[owner]) ** 2)) * steepest + 0.5 * skew
        # rounded scores and values
        size = (reach**2).sum(axis=1) + np.abs(c.powers[cells])
        shift = c.rate * (offset.shape[1] + 6) * (c.unit + 2 * U) * size + 2 * _FARTHEST * c.unit
        shift = shift + c.rate * (np.abs(step) * place.moved[owner]).sum(axis=1)
        shift = shift + 16 * U * (
            1 + c.rate * ((np.abs(step) @ np.abs(self.view.axes)) * place.radius[owner]).sum(axis=1)
        )
        rest = rest + np.expm1(2 * np.maximum.reduceat(shift, starts))[:, None] * most(away)
        steep = np.abs(slopes)
        tall = np.abs(c.values[cells]) + np.einsum("pom,pm->po", steep, reach)
        lost = (offset.shape[1] + 4) * (c.unit + 2 * U) * tall + np.einsum("pom,pm->po", steep, place.moved[owner])
        size = np.maximum.reduceat(np.abs(at_middle) + np.abs(linear).sum(axis=2), starts) + np.abs(tilt).sum(axis=2)
        ours = units[:, None] * (size + np.abs(f.constant))
        line = np.abs(f.constant - level) + np.abs(f.linear - tilt).sum(axis=2) + f.higher
        found = (line + rest + np.maximum.reduceat(lost, starts) + ours) * OUTWARD + _TINY
        found = np.where(np.isnan(found) | (boxes.mass > 0.5)[:, None], np.inf, found)
        return np.asarray(found.max(axis=1))

    def _look(self, boxes: BoxList, z: Array, score: Array, at_middle: Array) -> tuple[Array, float, Array]:
        """`Σ w_j |f − V_j|` at the middles, or |f − net| where heads are expanded, up to rounding, 0 outside the domain; then the
        largest |f − net| that was seen, and where."""
        weight = np.exp(score - np.maximum.reduceat(score, boxes.starts)[boxes.owner])
        weight /= np.add.reduceat(weight, boxes.starts)[boxes.owner]
        error = at_middle - self.view.graph.evaluate(boxes.middle).reshape(len(z), -1)[boxes.owner]
        net = np.abs(np.add.reduceat(weight[:, None] * error, boxes.starts)).max(axis=1)
        least = net if self.expand else np.add.reduceat(weight * np.abs(error).max(axis=1), boxes.starts)
        inside = (self.box if self.region is None else self.region).contains(z) & np.isfinite(least)
        net, least = np.where(inside, net, 0.0), np.where(inside, least, 0.0)
        return least, float(net.max()), z[int(net.argmax())]

    def _apart(self, boxes: BoxList, weight: Array) -> Array:
        """How far the centers that share a box lie apart along the view's axes, `(n, m)`; 0 where one cell has it alone."""
        heavy, centers = (weight > 1e-2)[:, None], self.cells.centers[boxes.cells] @ self.view.axes
        high = np.maximum.reduceat(np.where(heavy, centers, -np.inf), boxes.starts)
        out: Array = np.maximum(high - np.minimum.reduceat(np.where(heavy, centers, np.inf), boxes.starts), 0.0)
        return out


def _measured(
    measure: _Measure, boxes: BoxList, _: Progress | None
) -> tuple[dict[str, np.ndarray], float, float, Array]:
    """One task: plain arrays come back, which a checkpoint can keep."""
    found, least, seen, seen_at = measure.of_boxes(boxes)
    return {f.name: getattr(found, f.name) for f in fields(found)}, least, seen, seen_at


def _worst_mixture(boxes: BoxList, weight: Array, error: Array) -> tuple[Array, Labels]:
    """`max Σ w_j E_j` subject to `0 ≤ w_j ≤ weight_j`, `Σ w_j ≤ 1`, and the pair that claims most of it, for each box.

    A fractional knapsack: fill it with the largest errors first.
    """
    order, starts = np.lexsort((-error, boxes.owner)), boxes.starts
    left, filled = np.ones(len(boxes)), np.zeros(len(boxes))
    blamed, most = order[starts], np.full(len(boxes), -1.0)
    for rank in range(int(boxes.counts.max())):
        here = np.flatnonzero((rank < boxes.counts) & (left > 0))
        if not len(here):
            break
        pair = order[starts[here] + rank]
        share = np.minimum(weight[pair], left[here])
        claim = np.where(share > 0, share * error[pair], 0.0)
        filled[here] += claim
        left[here] -= share
        more = claim > most[here]
        blamed[here[more]], most[here[more]] = pair[more], claim[more]
    return filled + boxes.counts * 2 * U * error[order[starts]], blamed


def _steepest(tilt: Array, apart: Array, width: Array) -> Labels:
    """The axis along which f − V_j varies most, or along which the cells change, `(n,)`; the widest where nothing is known."""
    share = tilt / tilt.sum(axis=1, keepdims=True) + apart / np.maximum(apart.sum(axis=1, keepdims=True), 1e-300)
    share = np.where(np.isfinite(share).all(axis=1, keepdims=True), share, 0.0)
    wide = width / width.max(axis=1, keepdims=True)
    out: Labels = (share + 1e-3 * wide).argmax(axis=1)
    return out
