"""Proofs for grid heads with affine values: the function of every cell is compared with f, on the cell and a little beyond."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from partita.arithmetic.precision import PRECISIONS, Precision
from partita.arithmetic.progress import report
from partita.arithmetic.rounding import add_up, div_down, exp_up, expm1_up, mul_up
from partita.errors import BudgetSpentError, UnsupportedError
from partita.functions.curvature import ANSWER, Curvature
from partita.functions.graph import Graph
from partita.functions.moduli import Modulus
from partita.functions.regions import Region
from partita.functions.regularity import Known, known_where_rounded
from partita.functions.target import Target
from partita.geometry.domains import Array, Box
from partita.geometry.grid import ProductGrid
from partita.geometry.moments import distance_bounds, dropped_mass
from partita.heads.grid_head import GridHead
from partita.heads.head import FoldedHead, Head
from partita.heads.table_blocks import blocks_of, largest_size
from partita.proofs.center_values import GridFacts, domain_factor, input_rounding, score_error
from partita.proofs.certificate import Term
from partita.proofs.polynomials import bound_ranges
from partita.proofs.proof import Given, Progress, Proof, Proved
from partita.proofs.running import summed
from partita.proofs.shards import ROUND, SHARDED, SHARDS, shard_details
from partita.workers import crew

__all__ = [
    "OVERLAP",
    "CellProof",
    "CurvatureProof",
    "is_hard",
    "largest_value",
    "lost_slopes",
    "overlaps_for",
]

CellError = Callable[[float, float], float]  # (spacings to each side, goal) to max_j sup |f − V_j|
_Mean = tuple[float, str, str, dict[str, float]]  # a bound of Σ_j w_j|V_j − f|, its formula, theorem and inputs

OVERLAP = 0.0135  # of a cell: beyond it a neighbour holds less than 1e-12, at κ = 4096
_WIDEST = 1.1  # overlap: cells are looked at up to 1.6 gaps from their centers
_MASSES = (1e-12, 1e-6, 1e-3)  # that may lie beyond the overlap of softer heads
_DEGREE = 3
_CELLS_AT_ONCE = 2048
_TINY = 1e-300  # more than underflow takes from a difference here


class CellProof(Proof):
    """Affine cells against an expression, cell by cell, by Taylor models. *Theorem*: `affine-values`.

    `given.details` may have `overlap`, s: how far beyond its cell, in gaps, the function of every cell is compared with f.
    """

    name = "cells"
    mean_distance = 1.0

    def handles(self, head: Head) -> bool:
        return isinstance(head, GridHead) and head.value_slopes is not None and is_hard(head)

    def _prove(self, head: FoldedHead, target: Target, given: Given) -> Proved:
        grid_head = _with_slopes(head)
        if not is_hard(grid_head):
            raise UnsupportedError("a proof cell by cell needs windows of two centers per axis; this head is softer.")
        if target.graph is None:
            raise UnsupportedError("a proof cell by cell needs an expression.")
        box = target.box
        error = _GraphCells(_Cells.of(grid_head, target.graph, box, target.region), grid_head, given.progress)
        precision = PRECISIONS[str(head.dtype)]
        if precision.rounds_inputs and given.known is not None:
            given = replace(given, known=known_where_rounded(target, precision, given.known, given.norm))
        overlap = float(given.details.get("overlap", OVERLAP))
        if not 0 < overlap <= _WIDEST:
            raise UnsupportedError(f"the overlap of the cells is {overlap}; expected a number > 0, up to {_WIDEST}.")
        terms = _affine_terms(grid_head, _cell_by_cell(error, overlap), box, given, target.volume)
        details = {"method": self.name, "degree": _DEGREE, "boxes": head.num_keys}
        details |= {"overlap": overlap} if overlap != OVERLAP else {}
        found = terms[0].inputs
        rest = mul_up(found["beyond"], found["far"])
        details |= shard_details([add_up(cells, rest) for cells in error.shards], found["factor"])
        return Proved(terms, details, settled=terms[0].value <= (given.tolerance if given.aim is None else given.aim))


class CurvatureProof(Proof):
    """Tangents against a function whose second derivatives are declared. *Theorem*: `declared-curvature`.

    `given.details` has `curvature`, M or one number per axis; `differences`, d/h: how far from a center f was evaluated for its
    slope; `scale`, at least max |f| and what its tangents reach; and, if the cells hold no slopes along some axes, `across`, the
    largest slopes that were found there, one per axis and 0 for the others.

    Inputs: f is not evaluated beyond the domain. If x is rounded to x', `|V_j(x') − f(x)| ≤ |V_j(x') − V_j(x)| + |V_j(x) − f(x)|`.
    The first part is at most the stored slope times |x' − x|. The second is what f leaves its tangent by at x. Storing moves x away
    from a center by at most `u max|z_i|`, and the last centers away from the end of the domain. That adds as much times M times
    the distance from the center, and times the slopes that the cells do not hold.
    """

    name = "curvature"
    rests_on = "curvature"
    mean_distance = 1.0

    def _prove(self, head: FoldedHead, target: Target, given: Given) -> Proved:
        grid_head, box = _with_slopes(head), target.box
        curvature = Curvature(given.details["curvature"])
        curvature.per_axis(box.dimension)
        step, scale = float(given.details["differences"]), float(given.details["scale"])
        grid = ProductGrid(box, tuple(a.double().numpy() for a in grid_head.axes))
        spacings = (box.sides / np.array(grid.counts)).tolist()  # `differences` and single cells are measured in these
        gaps = [h if h > g.gap_max * (1 + 1e-10) else g.gap_max for g, h in zip(grid.geometry, spacings)]
        across = [float(x) for x in given.details.get("across", [0.0] * len(gaps))]
        if len(across) != len(gaps) or not min(across) >= 0:
            raise UnsupportedError(f"across is {across}; expected {len(gaps)} numbers ≥ 0, one per axis.")
        facts, precision = GridFacts.of(grid_head, box), Precision.of(head.dtype)
        moved = precision.moved(box.lo.ravel(), box.hi.ravel())
        beyond = max((g.overhang - d) / gap for g, d, gap in zip(grid.geometry, moved, gaps))
        error = partial(_leaves_tangent, curvature, gaps, step, scale, across, beyond)
        means = partial(_mean_tangent, curvature, gaps, step, scale, across)
        sharp = is_hard(grid_head) and overlaps_for(grid_head) == [OVERLAP]
        approximation = _cell_by_cell(error) if sharp else means
        terms = _affine_terms(grid_head, approximation, box, Given(given.tolerance, given.norm))
        factor = domain_factor(facts, given.norm)
        stored = mul_up(4.0, precision.value_unit, scale, 1.0 + len(gaps), factor)
        lost = mul_up(precision.value_tiniest, add_up(1.0, *box.sides.tolist()), factor)
        if lost > 1e-3 * stored:  # values or slopes may be subnormal numbers
            stored = add_up(stored, lost)
        formula, inputs = "4u · (1 + m) · scale of the tangents · factor", {"u": precision.value_unit, "scale": scale}
        terms.append(Term("stored values", stored, formula, "declared-curvature", inputs, source="storage"))
        if precision.rounds_inputs:
            slopes = head.get_buffer("value_slopes").double().numpy()
            steepest = float(np.sqrt((slopes**2).sum(axis=2)).max()) * (1 + 1e-12)
            mean = [] if sharp else [terms[0].inputs[f"distance{i}"] / g for i, g in enumerate(gaps)]
            # in spacings; mostly half of one
            away = max(mean or (0.5 + OVERLAP, beyond)) + float((moved / gaps).max()) / 2
            turned = curvature.turning_up(max(1.0, away * (1 + 1e-9)) + step, gaps)
            known = Known(Modulus(add_up(steepest, *across, turned)))
            terms.append(input_rounding(facts, known, given.norm))
        return Proved(terms, {"method": self.name, "boxes": grid.num_cells})


def _with_slopes(head: FoldedHead) -> GridHead:
    if not isinstance(head, GridHead) or head.value_slopes is None:
        raise UnsupportedError("a proof cell by cell needs a grid head with affine values.")
    return head


def is_hard(head: GridHead) -> bool:
    """Whether a query reads at most two centers per axis."""
    return all(min(2 * q, count) <= 2 for q, count in zip(head.half_windows, head.counts))


def _leaves_tangent(
    curvature: Curvature,
    gaps: list[float],
    step: float,
    scale: float,
    across: list[float],
    beyond: float,
    widths: float,
    _: float,
) -> float:
    """`½ Σ M_i(w h_i)² + Σ(½M_i d_i + noise/d_i) w h_i`: how far f may be from its tangent w spacings away, d_i = step · h_i.

    A slope that the cells do not hold adds itself times `w h_i`. Domains reach up to `beyond` spacings beyond the last centers.
    """
    widths = max(widths, beyond * (1 + 1e-9))
    wide = [mul_up(widths * (1 + 1e-9), g) for g in gaps]
    bent = curvature.form_up(0.5, wide, wide)
    tilted = curvature.form_up(0.5 * (1 + 1e-9), [step] * len(gaps), gaps, wide)
    noise = mul_up(ANSWER, scale, add_up(1.0, len(gaps) * widths / step * (1 + 1e-9)))
    return add_up(bent, tilted, noise, *map(mul_up, across, wide))


def _mean_tangent(
    curvature: Curvature,
    gaps: list[float],
    step: float,
    scale: float,
    across: list[float],
    facts: GridFacts,
    _: float,
) -> _Mean:
    """`_leaves_tangent` in the mean under the softmax, which may be soft: moments take the place of distances."""
    firsts, seconds = (
        [distance_bounds(axis, rate, power)[0] for axis, rate in zip(facts.axes, facts.rates)] for power in (1.0, 2.0)
    )
    square, noise = add_up(*(mul_up(d, d) for d in seconds)), mul_up(ANSWER, scale)
    bent = curvature.form_up(0.5 * (1 + 1e-9), seconds, seconds)
    tilted = curvature.form_up(0.5 * (1 + 1e-9), [step] * len(gaps), gaps, firsts)
    noises = [mul_up(noise / (step * g) * (1 + 1e-9), d) for g, d in zip(gaps, firsts)]
    off = add_up(bent, tilted, noise, *noises, *map(mul_up, across, firsts))
    inputs = {"square": square} | {f"distance{i}": d for i, d in enumerate(firsts)}
    return off, "(½ Σ_i M_i E(x_i − v_i)² + slopes' errors · E|x_i − v_i|) · factor", "declared-curvature", inputs


def overlaps_for(head: GridHead) -> list[float]:
    """Overlaps to try for a head that may be softer than those of the affine methods."""
    gaps = ((float(a[-1]) - float(a[0])) / max(len(a) - 1, 1) for a in head.axes)
    rates = head.inverse_temperature.double().tolist()
    kappa = min((r * g * g for r, g in zip(rates, gaps) if g), default=math.inf)
    found = [min(math.sqrt(0.25 - 2 * math.log(mass / 2) / kappa) - 0.5, _WIDEST) for mass in _MASSES]
    return [OVERLAP] if found[0] <= OVERLAP * 1.05 else list(dict.fromkeys(found))


def _cell_by_cell(cell_error: CellError, overlap: float = OVERLAP) -> Callable[[GridFacts, float], _Mean]:
    """The mean error of a hard head from its cells.

    `cell_error(w, goal)` is `max_j sup |f − V_j|` over w spacings to each side of center j; above the goal it may be rough.

    `|net − f| ≤ Σ_j w_j(z)|V_j(z) − f(z)|`: cells whose widened box holds z have at most the largest error over those boxes, all
    others in the window, two centers wide, at most `mass · (the largest error two cells away)`. *Theorem*: `affine-values`.
    """

    formula = "(max_j sup |f − V_j| on its cell + mass beyond · two cells away) · factor"

    def mean(facts: GridFacts, goal: float) -> _Mean:
        outward = max((a.overhang / a.gap_max for a in facts.axes if a.count > 1), default=0.0)
        far = cell_error(max(1.6, (1 + outward) * (1 + 1e-9)), math.inf)
        split = [(r, a.gap_min) for r, a in zip(facts.rates, facts.axes) if a.count > 1]
        beyond = add_up(*(_beyond_overlap(r, g, overlap) for r, g in split))
        if overlap != OVERLAP:  # what lies beyond takes its part of the goal
            goal = max(goal - mul_up(beyond, far), 0.0)
        near = cell_error(0.5 + overlap, goal)
        return (
            add_up(near, mul_up(beyond, far)),
            formula,
            "affine-values",
            {"cells": near, "beyond": beyond, "far": far},
        )

    return mean


def _affine_terms(
    head: GridHead,
    mean_error: Callable[[GridFacts, float], _Mean],
    box: Box,
    given: Given,
    volume: float | None = None,
) -> list[Term]:
    """All terms from the stored tensors; `mean_error(facts, goal)` bounds `Σ_j w_j|V_j − f|` for the exact head."""
    facts, precision = GridFacts.of(head, box, volume=volume), Precision.of(head.dtype)
    factor, u = domain_factor(facts, given.norm), precision.unit
    aim = given.tolerance if given.aim is None else given.aim
    goal = div_down(aim, factor)
    approximation, formula, theorem, inputs = mean_error(facts, goal)
    largest = largest_value(head, box)
    left_out = add_up(*(dropped_mass(a, r, q) for a, r, q in zip(facts.axes, facts.rates, facts.half_windows)))
    widths = [max(2, min(2 * q, count)) for q, count in zip(head.half_windows, head.counts)]
    operations = float(2 * sum(widths) + 8 * len(widths) + 10)
    delta = score_error(facts)
    terms = [
        Term(
            "approximation",
            mul_up(approximation, factor),
            formula,
            theorem,
            {**inputs, "factor": factor},
        ),
        Term(
            "window",
            mul_up(left_out, 2.0, largest, factor),
            "mass left out · 2 max|V|",
            "window-tail",
            {"mass": left_out},
            source="rounding",
        ),
        Term(
            "score rounding",
            mul_up(expm1_up(mul_up(2.0, delta)), approximation, factor),
            "(e^{2δ} − 1) · approximation",
            "score-rounding",
            {"delta": delta},
            source="rounding",
        ),
        Term(
            "summation",
            add_up(summed(operations, u, largest, factor), mul_up(lost_slopes(head, box, operations, largest), factor)),
            "γ_K · max(|A| + |J||z − o|)",
            "score-rounding",
            {"operations": operations, "u": u, "largest": largest},
            source="rounding",
        ),
    ]
    if precision.rounds_inputs and given.known is not None:
        terms.append(input_rounding(facts, given.known, given.norm))
    return terms


def lost_slopes(head: GridHead, box: Box, operations: float, largest: float) -> float:
    """What underflow takes from averaged slopes, times how far they reach; 0 where `1.01·K·u` covers it."""
    precision = Precision.of(head.dtype)
    lost = mul_up(operations, precision.tiniest, add_up(*box.sides.tolist()))
    return lost if lost > 1e-3 * operations * precision.unit * largest else 0.0


def _beyond_overlap(rate: float, gap: float, overlap: float) -> float:
    """The mass, on one axis, of centers whose widened cell does not hold x: `e^{−κ(s + s²)/2}` for either neighbour."""
    exponent = -0.5 * rate * gap * gap * (1 - 1e-6) * (overlap + overlap**2)
    return mul_up(2.0, exp_up(exponent))


def largest_value(head: GridHead, box: Box) -> float:
    """`max_j sup_z |A_j| + Σ_i |J_ji||z_i − o_i|` over the box, rounded up."""
    slopes = head.value_slopes
    if slopes is None:
        return largest_size(head.values)
    box = box.widened(Precision.of(head.dtype)) if Precision.of(head.dtype).is_half else box
    reach = box.sides / 2 * (1 + 1e-6) + 1e-6 * np.abs(box.lo.ravel() + box.hi.ravel())
    blocks = blocks_of(head.values, slopes)
    sizes = [(v.double().abs().numpy() + s.double().abs().numpy() @ reach).max() for v, s in blocks]
    return float(np.max(sizes)) * (1 + 1e-12)


@dataclass(frozen=True, eq=False)
class _Cells:
    """The cells of a head against f, by Taylor models: what all parts of the proof have in common."""

    axes: tuple[Array, ...]
    origin: Array
    graph: Graph
    box: Box
    region: Region | None
    lo: Array
    hi: Array
    shift: Array

    @classmethod
    def of(cls, head: GridHead, graph: Graph, box: Box, region: Region | None) -> _Cells:
        lo, hi = Precision.of(head.dtype).widened(box.lo.ravel(), box.hi.ravel())
        return cls(
            axes=tuple(a.double().numpy() for a in head.axes),
            origin=head.get_buffer("origin").double().numpy(),
            graph=graph,
            box=box,
            region=region,
            lo=lo,
            hi=hi,
            shift=Precision.of(head.dtype).moved(box.lo.ravel(), box.hi.ravel()),
        )

    def worst(
        self,
        cells: np.ndarray,
        values: Array,
        slopes: Array,
        widths: float,
        goal: float,
        least: float,
        progress: Progress | None,
    ) -> tuple[float, float]:
        """The largest bound of `sup |f − V_j|` over the box of `widths` gaps to each side of center j, cut to the domain, and a
        value that is attained. Cells that are proved to lie outside of the region, inputs moved by roundings included, do not
        count."""
        grid = ProductGrid(self.box, self.axes)
        gaps = np.array([g.gap_max if g.count > 1 else s for g, s in zip(grid.geometry, self.box.sides)])
        centers = grid.centers_of(cells)
        left, right = _cell_boxes(centers, widths * gaps, self.axes, self.lo, self.hi)
        if self.region is not None:
            kept = ~self.region.outside(left - self.shift, right + self.shift)
            values, slopes, left, right = values[kept], slopes[kept], left[kept], right[kept]
            if not len(values):
                return 0.0, least
        middle = (left + right) / 2
        radius = np.maximum(right - middle, middle - left) * (1 + 1e-15) + 1e-16 * np.abs(middle)
        model = self.graph.taylor(middle, radius, _DEGREE)
        difference = _minus_affine(model.coefficients, model.exponents, values, slopes, middle - self.origin, radius)
        rounding = 1e-15 * (
            np.abs(values).T + np.einsum("jom,jm->oj", np.abs(slopes), np.abs(middle - self.origin) + radius)
        )
        remainder = model.remainder + rounding * (self.origin.size + 2) + _TINY
        if not np.isfinite(remainder).all():
            return math.inf, least
        flat = np.moveaxis(difference, 0, 1).reshape(len(model.exponents), -1)
        exponents = tuple(map(tuple, model.exponents.tolist()))
        found = bound_ranges(flat, remainder.reshape(-1), exponents, goal=goal, least=least, progress=progress)
        return found.largest, found.least


def _worst_cells(
    shared: tuple[_Cells, float, float], task: tuple[int, Array, Array, float], progress: Progress | None
) -> tuple[float, float]:
    cells, widths, goal = shared
    first, values, slopes, least = task
    return cells.worst(first + np.arange(len(values)), values, slopes, widths, goal, least, progress)


class _GraphCells:
    """`max_j sup |f − V_j|` over the boxes of so many gaps to each side of the centers, cell by cell.

    `shards`: of the last call, the largest of each part of the cells, if they are many.
    """

    def __init__(self, cells: _Cells, head: GridHead, progress: Progress | None) -> None:
        self.cells, self.count, self.progress = cells, head.num_keys, progress
        self.values, self.slopes = head.values.detach(), head.get_buffer("value_slopes")
        self.shards: tuple[float, ...] = ()

    def __call__(self, widths: float, goal: float) -> float:
        """Infinite if progress stops it before all cells were looked at."""
        shared, least, first = (self.cells, widths, goal), 0.0, 0
        worst = np.zeros(-(-self.count // _CELLS_AT_ONCE))
        while first < len(worst):
            # later batches of one round do not know what earlier ones attained, so that workers may take them side by side
            batches = range(first, min(first + (ROUND if first >= ROUND else 1), len(worst)))
            cut = [slice(k * _CELLS_AT_ONCE, (k + 1) * _CELLS_AT_ONCE) for k in batches]
            tasks = [
                (part.start, *(t[part].double().numpy() for t in (self.values, self.slopes)), least) for part in cut
            ]
            try:
                for k, (bound, attained) in zip(batches, crew().spread(_worst_cells, shared, tasks, self.progress)):
                    worst[k], least, first = bound, max(least, attained), k + 1
                    if math.isinf(bound):
                        return math.inf
                report(self.progress, "proof", min(cut[-1].stop, self.count), self.count)
            except BudgetSpentError:
                if first < len(worst):
                    return math.inf
        shards = np.zeros(SHARDS)
        np.maximum.at(shards, np.arange(len(worst)) * SHARDS // len(worst), worst)
        self.shards = tuple(shards.tolist()) if self.count >= SHARDED else ()
        return float(worst.max())


def _cell_boxes(centers: Array, reach: Array, axes: tuple[Array, ...], lo: Array, hi: Array) -> tuple[Array, Array]:
    """The boxes that reach so far to each side of the centers, cut to [lo, hi], `(cells, m)` each.

    The first and the last cell of an axis reach to the end, which may be farther where centers and inputs are rounded coarsely.
    """
    first, last = (np.array([a[k] for a in axes]) for k in (0, -1))
    left = np.where(centers == first, lo, np.maximum(centers - reach, lo))
    return left, np.where(centers == last, hi, np.minimum(centers + reach, hi))


def _minus_affine(
    coefficients: Array, exponents: np.ndarray, values: Array, slopes: Array, at: Array, radius: Array
) -> Array:
    """`f − V_j` on every cell: constants and linear coefficients change, `(out, N, cells)`."""
    difference = coefficients.copy()
    difference[:, 0] -= (values + np.einsum("jom,jm->jo", slopes, at)).T
    listed = exponents.tolist()
    for i in range(radius.shape[1]):
        n = listed.index([int(k == i) for k in range(radius.shape[1])])
        difference[:, n] -= (slopes[:, :, i] * radius[:, i, None]).T
    return difference
