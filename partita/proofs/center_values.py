"""Error bounds for values placed at the centers of a product grid (mathematics: grid-moments, lp-moments, score-rounding).

One list of numbers, `GridFacts`, is all they need: predicted before anything is allocated, or read off the stored tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray

from partita.arithmetic.interval import Interval
from partita.arithmetic.precision import PRECISIONS, Precision
from partita.arithmetic.progress import report
from partita.arithmetic.rounding import add_up, div_up, mul_up, pow_up, sqrt_up, up
from partita.errors import UnsupportedError
from partita.functions.graph import Graph
from partita.functions.moduli import Modulus
from partita.functions.regularity import AxisLipschitz, Jumps, Known, RoughBoxes
from partita.functions.target import Target
from partita.geometry.domains import Array, Box
from partita.geometry.grid import ProductGrid
from partita.geometry.moments import AxisGeometry, distance_bounds, dropped_mass
from partita.heads.grid_head import GridHead
from partita.heads.head import FoldedHead, Head
from partita.heads.table_blocks import blocks_of
from partita.proofs.certificate import Term
from partita.proofs.proof import Given, Progress, Proof, Proved
from partita.proofs.running import EXP_UNITS, SCORE_UNITS, added_terms, running_terms
from partita.workers import crew

__all__ = [
    "AVERAGED_UP_TO",
    "GridFacts",
    "MomentProof",
    "approximation_term",
    "deployment_terms",
    "domain_factor",
    "grid_terms",
    "input_rounding",
    "is_averaged",
    "lp_factor",
    "optimal_ratio",
    "score_error",
    "soft_terms",
    "value_blocks",
    "value_error",
    "value_size",
    "value_table",
]


_CELLS_AT_ONCE = 1 << 16
AVERAGED_UP_TO = 64.0  # p of the norms whose moments are averaged over the box


@dataclass(frozen=True)
class GridFacts:
    """A product-grid head in numbers.

    Attributes:
        axes: geometry per axis; rates: R_i; half_windows: q_i.
        volume: of the domain; outputs: scalar outputs; reach: `max |z|₂` over the domain.
        largest, spread: bounds of `max|V|` and of `max V − min V` per component.
        value_error: how far a stored value may be from f at its center.
        semantics: "float64" or "float32".
        centers, ends: the centers of every axis, and the ends of the domain, flat: for what is integrated cell by cell.
        values: `(cells, out)` as stored; None for a head that does not exist yet, which will hold f at the centers.
    """

    axes: tuple[AxisGeometry, ...]
    rates: tuple[float, ...]
    half_windows: tuple[int, ...]
    volume: float
    outputs: int
    reach: float
    largest: float
    spread: float
    value_error: float
    semantics: str
    centers: tuple[Array, ...] = field(default=(), compare=False)
    ends: tuple[Array, Array] | None = field(default=None, compare=False)
    values: torch.Tensor | None = field(default=None, compare=False)

    @classmethod
    def of(cls, head: GridHead, box: Box, value_error: float = 0.0, volume: float | None = None) -> GridFacts:
        """The stored head; below float64 its domain is widened by one rounding of its ends. The volume is the box's, or smaller."""
        largest, spread = value_size(head.values)
        planned = cls.planned(
            [a.double().numpy() for a in head.axes],
            box,
            rates=tuple(head.inverse_temperature.double().tolist()),
            half_windows=head.half_windows,
            precision=PRECISIONS[str(head.dtype)],
            outputs=head.values.shape[1],
            largest=largest,
            spread=spread,
            value_error=value_error,
        )
        planned = replace(planned, values=head.values.detach())
        return planned if volume is None else replace(planned, volume=volume)

    @classmethod
    @np.errstate(over="ignore")  # a reach beyond float64 is infinite
    def planned(
        cls,
        axes: Sequence[Array],
        box: Box,
        *,
        rates: tuple[float, ...],
        half_windows: tuple[int, ...],
        precision: Precision,
        outputs: int,
        largest: float,
        spread: float,
        value_error: float,
    ) -> GridFacts:
        """The same for a head that does not exist yet."""
        lo, hi = precision.widened(box.lo.ravel(), box.hi.ravel())
        return cls(
            axes=tuple(AxisGeometry.of(a, x, y) for a, x, y in zip(axes, lo, hi)),
            rates=rates,
            half_windows=half_windows,
            volume=box.volume,
            outputs=outputs,
            reach=float(up(math.sqrt((np.maximum(np.abs(lo), np.abs(hi)) ** 2).sum()), 8)),
            largest=largest,
            spread=spread,
            value_error=value_error,
            semantics=precision.name,
            centers=tuple(axes),
            ends=(box.lo.ravel(), box.hi.ravel()),
        )


class MomentProof(Proof):
    """Values of f at the centers, a modulus of f, and the moments of the softmax. *Theorem*: `grid-moments`, `lp-moments`."""

    name = "moments"
    rests_on = "regularity"
    mean_distance = 1.0

    def _prove(self, head: FoldedHead, target: Target, given: Given) -> Proved:
        if not isinstance(head, GridHead) or given.known is None:
            raise UnsupportedError("a proof by moments needs a grid head and a function whose modulus is known.")
        error = given.value_error
        if error is None:
            error = value_error(head, target, self.centers(head, target), given.known)
        facts = GridFacts.of(head, target.box, error)
        return Proved(grid_terms(facts, given.known, given.norm), {"method": self.name})

    def centers(self, head: Head, target: Target) -> Callable[[int, int], Array]:
        grid = head.partition(target.box)
        assert isinstance(grid, ProductGrid)
        return lambda start, stop: grid.centers_of(np.arange(start, stop))


def grid_terms(facts: GridFacts, known: Known, norm: float) -> list[Term]:
    """All terms of `‖f − net‖ ≤ …` in L_p, p = norm (math.inf for the supremum)."""
    approximation = approximation_term(facts, known, norm)
    terms = [approximation]
    if known.jumps is not None:
        terms += _jump_terms(facts, known.jumps, norm)
    return terms + deployment_terms(facts, known, norm, add_up(*(t.value for t in terms)))


def approximation_term(facts: GridFacts, known: Known, norm: float) -> Term:
    """What exact arithmetic leaves: the smallest of the bounds that the known moduli give."""
    candidates = []
    if known.modulus is not None:
        candidates.append(_isotropic(facts, known.modulus, norm))
    if known.per_axis is not None:
        candidates.append(_per_axis(facts, known.per_axis, norm))
    if not candidates:
        raise UnsupportedError(
            "no modulus of continuity is known for this function: declare lipschitz=… or give an expression."
        )
    return min(candidates, key=lambda term: term.value)


def is_averaged(norm: float) -> bool:
    """Whether L_p uses averaged p-th moments; beyond p = 64 the supremum times the domain factor is as good."""
    return norm <= AVERAGED_UP_TO


def _root_up(value: float, power: float) -> float:
    """`value^(1/power)`, rounded up; the pad covers the rounding of 1/power for every float."""
    return mul_up(pow_up(value, 1 / power), 1 + 1e-12)


def domain_factor(facts: GridFacts, norm: float) -> float:
    """`(volume · outputs)^{1/p}`: L_p integrates and sums over outputs, the supremum does neither."""
    return 1.0 if math.isinf(norm) else lp_factor(facts.volume, facts.outputs, norm)


def lp_factor(volume: float, outputs: int, norm: float) -> float:
    """`(volume · outputs)^{1/p}` for a finite p, rounded up."""
    return _root_up(mul_up(volume, float(outputs)), norm)


def _distances(facts: GridFacts, power: float, averaged: bool) -> list[float]:
    """The p-th root of the p-th moment, axis by axis."""
    return [distance_bounds(axis, rate, power)[averaged] for axis, rate in zip(facts.axes, facts.rates)]


def _isotropic(facts: GridFacts, modulus: Modulus, norm: float) -> Term:
    """`ω(√Σ sup E(x−v)²)`; in L_p `(vol·out)^{1/p} ω(√Σ_i M_s,i^{2/s})`, `s = max(αp, 2)`, M the averaged moments.

    Jensen for the concave ω; for L_p Minkowski's inequality in L_{s/2} splits |z−v|² into its axes. α is 1 unless ω is C·t^α.
    """
    averaged = is_averaged(norm)
    power = max(modulus.exponent * norm, 2.0) if averaged else 2.0
    distance = sqrt_up(add_up(*(mul_up(d, d) for d in _distances(facts, power, averaged))))
    theorem = "grid-moments" if math.isinf(norm) else "lp-moments"
    if modulus.expression:
        factor, formula = domain_factor(facts, norm), f"ω(√Σ_i E(x_i − v_i)²) · factor, ω(t) = {modulus.expression}"
        value, inputs = mul_up(modulus.above(distance), factor), {"distance": distance, "factor": factor}
        return Term("approximation", value, formula, theorem, inputs)
    value = mul_up(modulus.constant, pow_up(distance, modulus.exponent), domain_factor(facts, norm))
    inputs = {
        "constant": modulus.constant,
        "exponent": modulus.exponent,
        "distance": distance,
        "factor": domain_factor(facts, norm),
    }
    return Term("approximation", value, "constant · (√Σ_i E(x_i − v_i)²)^exponent · factor", theorem, inputs)


def _per_axis(facts: GridFacts, lipschitz: AxisLipschitz, norm: float) -> Term:
    """`Σ_i L_i sup E|x_i − v_i|` (axis operators average, so errors telescope); in L_p with p-th averaged moments."""
    averaged = is_averaged(norm)
    power = norm if averaged else 1.0
    distances = _distances(facts, power, averaged)
    factor = domain_factor(facts, norm)
    value = mul_up(add_up(*(mul_up(c, d) for c, d in zip(lipschitz.constants, distances))), factor)
    inputs = {f"L{i}": c for i, c in enumerate(lipschitz.constants)} | {
        f"distance{i}": d for i, d in enumerate(distances)
    }
    return Term(
        "approximation", value, "Σ_i L_i · E|x_i − v_i| · factor", "axis-telescoping", {**inputs, "factor": factor}
    )


def _window_reach(facts: GridFacts) -> list[float]:
    """The farthest that a center of the window lies from x, axis by axis (at the boundary the window is pushed inside)."""
    widths = [float(min(2 * q, axis.count)) for axis, q in zip(facts.axes, facts.half_windows)]
    spans = map(mul_up, widths, [axis.gap_max for axis in facts.axes])
    return list(map(add_up, spans, [axis.overhang for axis in facts.axes]))


def _jump_terms(facts: GridFacts, jumps: Jumps | RoughBoxes, norm: float) -> list[Term]:
    """Points whose relevant centers may lie across a jump: `(out · ∫ height^p)^{1/p}`, and the little mass beyond those centers.

    With ρ the covering radius of an axis, centers farther than `√(ρ² + 48/R)` hold at most `2e^{−24}/(1 − e^{−κ/2})` of its mass.
    """
    if math.isinf(norm):
        raise UnsupportedError(
            "a function that jumps cannot be approximated in the supremum norm by a continuous head (nor by any other). "
            "Use an L_p norm: norm=1 or norm=2."
        )
    rounded = PRECISIONS[facts.semantics].moved_by(
        facts.reach, len(facts.axes)
    )  # an input may be rounded across the jump
    reach, beyond = [], []
    for axis, rate, farthest in zip(facts.axes, facts.rates, _window_reach(facts)):
        kappa = rate * axis.gap_min**2
        relevant = 1.001 * math.sqrt(axis.covering_radius**2 + 48 / rate) if axis.count > 1 else farthest
        reach.append(add_up(min(relevant, farthest), rounded))
        beyond.append(2.1 * math.exp(-24) / -math.expm1(-kappa / 2) if relevant < farthest else 0.0)
    near = _rough_cells(facts, jumps, reach, norm) if isinstance(jumps, RoughBoxes) else math.inf
    if near < math.inf:
        height = jumps.height
        measure = pow_up(div_up(near, height), norm) if height else 0.0
    else:
        height, measure = jumps.near(reach, norm, facts.volume)
        near = mul_up(height, _root_up(mul_up(float(facts.outputs), measure), norm))
    far = mul_up(add_up(*beyond), jumps.height, domain_factor(facts, norm))
    inputs = {"height": height, "measure": measure, "reach": max(reach), "mass beyond": add_up(*beyond)}
    return [
        Term(
            "jumps",
            add_up(near, far),
            "(outputs · ∫ height^p near the jumps)^(1/p) + mass beyond · height",
            "lp-jumps",
            inputs,
        )
    ]


def _rough_cells(facts: GridFacts, jumps: RoughBoxes, reach: Sequence[float], norm: float) -> float:
    """`(Σ_j ∫ w_j Σ_outputs |f − V_j|^p)^{1/p}` over the cells j with a rough box within reach, on small boxes around each center.

    Infinite where there would be too many boxes. *Theorem*: `lp-jumps`.
    """
    if facts.ends is None or not len(jumps.lo):
        return math.inf
    m, (lo, hi) = len(facts.centers), facts.ends
    labels = _within_reach(facts, jumps, np.array(reach))
    if labels is None:
        return math.inf
    for parts in (p for p in _PARTS if p <= _FINEST.get(m, 1)):  # of a spacing
        steps = [_steps(axis, r, parts) for axis, r in zip(facts.axes, reach)]
        if len(labels[0]) * math.prod(2 * s for s in steps) <= _MOST_SMALL_BOXES:
            break
    else:
        return math.inf
    widths = [(axis.gap_max or float(b - a)) / parts for axis, a, b in zip(facts.axes, lo, hi)]
    at_once = max(1, _SMALL_BOXES_AT_ONCE // math.prod(2 * s for s in steps))
    total = 0.0
    for start in range(0, len(labels[0]), at_once):
        some = [label[start : start + at_once] for label in labels]
        tables = [_AxisParts.of(facts, i, *axis) for i, axis in enumerate(zip(some, widths, steps))]
        total += _integral_around(jumps.graph, facts, tables, some, norm)
    return _root_up(float(up(total * (1 + 1e-9))), norm)


_PARTS = (64, 32, 16, 8, 6, 4, 3, 2, 1)
_FINEST = {1: 64, 2: 8, 3: 4, 4: 3}  # parts of a spacing, by the number of variables
_MOST_SMALL_BOXES = 6_000_000
_SMALL_BOXES_AT_ONCE = 1 << 17
_FINER = 16  # steps of one part, for the integral of its weight


def _steps(axis: AxisGeometry, reach: float, parts: int) -> int:
    """How many parts of a spacing cover the reach to one side; one part is the whole axis where there is one center."""
    return 1 if axis.count == 1 else math.ceil(reach / axis.gap_max * parts * (1 + 1e-9))


@dataclass(frozen=True, eq=False)
class _AxisParts:
    """Short intervals around centers of an axis, cut to the domain, and the integral of the center's weight over each.

    Shapes: `(labels, parts)`.
    """

    lo: Array
    hi: Array
    mass: Array

    @classmethod
    @np.errstate(over="ignore", invalid="ignore")
    def of(cls, facts: GridFacts, axis: int, labels: NDArray[np.int64], width: float, steps: int) -> _AxisParts:
        """`w_j(x) ≤ 1/(1 + e^{R(g d − g²/2)})`, d the distance from v_j towards a neighbour at distance g: falling in d."""
        assert facts.ends is not None
        centers, rate = facts.centers[axis], facts.rates[axis]
        ends = float(facts.ends[0][axis]), float(facts.ends[1][axis])
        used, place = np.unique(labels, return_inverse=True)
        at = centers[used]
        edges = np.clip(at[:, None] + width * np.arange(-steps, steps + 1), ends[0], ends[1])
        if len(centers) == 1:
            edges = np.array([[ends[0], centers[0], ends[1]]])
        fine = edges[:, :-1, None] + (edges[:, 1:] - edges[:, :-1])[:, :, None] * np.linspace(0, 1, _FINER + 1)
        weight = np.ones((*edges[:, 1:].shape, _FINER))
        gaps = np.concatenate([[np.inf], np.diff(centers), [np.inf]])
        for side in (1, -1):
            g = gaps[used + (side > 0)][:, None, None]
            nearest = fine[:, :, :-1] if side > 0 else fine[:, :, 1:]
            d = side * (nearest - at[:, None, None])
            rounded = 1e-15 * (np.abs(centers).max() + max(map(abs, ends)))  # of d
            exponent = np.where(np.isfinite(g), rate * g * (d - g / 2 - rounded), -np.inf)
            weight = np.minimum(weight, 1 / (1 + np.exp(exponent * (1 - 1e-12 * np.sign(exponent)) - 1e-12)))
        mass = (weight * np.diff(fine, axis=2)).sum(axis=2) * (1 + 1e-10)
        return cls(edges[place, :-1], edges[place, 1:], mass[place])


def _within_reach(facts: GridFacts, jumps: RoughBoxes, reach: Array) -> list[NDArray[np.int64]] | None:
    """Places on every axis of the centers with a rough box within reach, `(n,)` each; None if there are too many to list."""
    slack = 1e-9 * (np.abs(jumps.lo) + np.abs(jumps.hi) + reach)
    first, last = [], []
    for i, centers in enumerate(facts.centers):
        low, high = jumps.lo[:, i] - reach[i] - slack[:, i], jumps.hi[:, i] + reach[i] + slack[:, i]
        first.append(np.searchsorted(centers, low, side="left"))
        last.append(np.searchsorted(centers, high, side="right"))
    shape = [int((b - a).max()) for a, b in zip(first, last)]
    if min(shape) <= 0:
        return [np.zeros(0, dtype=np.int64) for _ in shape]
    if len(jumps.lo) * math.prod(shape) > 4 * _MOST_SMALL_BOXES:
        return None
    inside, label = np.ones((len(jumps.lo), *shape), dtype=bool), np.zeros((len(jumps.lo), *shape), dtype=np.int64)
    for i, (a, b) in enumerate(zip(first, last)):
        place = (slice(None), *(None,) * i, slice(None), *(None,) * (len(shape) - 1 - i))
        at = a[:, None] + np.arange(shape[i])
        inside &= (at < b[:, None])[place]
        label = label * len(facts.centers[i]) + at[place]
    found = np.unique(label[inside])
    return [np.asarray(x) for x in np.unravel_index(found, [len(c) for c in facts.centers])]


def _integral_around(
    graph: Graph,
    facts: GridFacts,
    tables: Sequence[_AxisParts],
    labels: Sequence[NDArray[np.int64]],
    norm: float,
) -> float:
    """`Σ_j ∫ w_j Σ_outputs |f − V_j|^p` over these cells."""
    m, n = len(tables), len(labels[0])
    shape = (n, *(t.mass.shape[1] for t in tables))
    mass, ends = np.ones(shape), []
    for i, table in enumerate(tables):
        place = (slice(None), *(None,) * i, slice(None), *(None,) * (m - 1 - i))
        mass = mass * table.mass[place]
        ends.append([np.broadcast_to(end[place], shape).ravel() for end in (table.lo, table.hi)])
    kept = np.flatnonzero(mass.ravel() > 0)
    if not len(kept):
        return 0.0
    low, high = (np.stack([pair[k][kept] for pair in ends], axis=1) for k in (0, 1))
    f = graph.enclose(low, high)
    if facts.values is None:
        at = np.stack([facts.centers[i][label] for i, label in enumerate(labels)], axis=1)
        held = graph.enclose(at, at).mid
    else:
        cells = np.ravel_multi_index(tuple(labels), [len(c) for c in facts.centers])
        held = facts.values[torch.from_numpy(cells)].double().numpy()
    value = np.repeat(held, math.prod(shape[1:]), axis=0)[kept]
    off = np.maximum(up(f.hi - value), up(value - f.lo))
    return float((mass.ravel()[kept] * (off**norm).sum(axis=1)).sum())


def deployment_terms(facts: GridFacts, known: Known, norm: float, approximation: float) -> list[Term]:
    """What the window drops and the dtype rounds: covers every windowed evaluator and every order of summation."""
    u, factor = PRECISIONS[facts.semantics].unit, domain_factor(facts, norm)
    dropped = add_up(*(dropped_mass(a, r, q) for a, r, q in zip(facts.axes, facts.rates, facts.half_windows)))
    delta = score_error(facts)
    if facts.semantics != "float64" and not math.isinf(norm):
        delta = add_up(delta, _lattice_error(facts))
    widths = [min(2 * q, a.count) for a, q in zip(facts.axes, facts.half_windows)]
    terms = running_terms(
        approximation,
        mass_left_out=dropped,
        score_error=delta,
        operations=float(math.prod(widths) + sum(widths) + 6 * len(widths) + 8),
        unit_roundoff=u,
        largest=facts.largest,
        spread=facts.spread,
        value_error=facts.value_error,
        factor=factor,
    )
    if facts.semantics != "float64":
        terms.append(input_rounding(facts, replace(known, jumps=None), norm))  # jumps have a term of their own
    return terms


def soft_terms(
    facts: GridFacts,
    known: Known | None,
    norm: float,
    more_operations: float = 0.0,
    lost: Callable[[float, float], float] | None = None,
) -> list[Term]:
    """What running adds to the proved error of a head with any values, for every order of summation per axis.

    Affine values take `more_operations`, and underflow may take `lost(operations, largest)` of their slopes.
    """
    delta = _mean_score_error(facts)
    widths = [min(2 * q, a.count) for a, q in zip(facts.axes, facts.half_windows)]
    operations = float(2 * sum(widths) + 6 * len(widths) + 8) + more_operations  # every evaluator sums axis by axis
    terms = added_terms(
        mass_left_out=add_up(*map(dropped_mass, facts.axes, facts.rates, facts.half_windows)),
        score_error=delta,
        operations=operations,
        unit_roundoff=PRECISIONS[facts.semantics].unit,
        largest=facts.largest,
        spread=facts.spread,
        factor=domain_factor(facts, norm),
    )
    if lost is not None and (taken := lost(operations, facts.largest)):
        last = terms[-1]
        terms[-1] = replace(last, value=add_up(last.value, mul_up(taken, domain_factor(facts, norm))))
    if facts.semantics != "float64" and known is not None:
        terms.append(input_rounding(facts, known, norm))
    return terms


def _mean_score_error(facts: GridFacts) -> float:
    """`score_error` as the weights see it: far centers have the worst scores and next to no weight.

    Unnormalised weights are off by factors `1 + ε_j`, `|ε_j| ≤ e^{e_j} − 1 ≤ 1.006 e_j`, `e_j = Σ_i (8u R_i d_i²/2 + 16u)`; the
    output moves by at most `Σ w|ε| spread/(1 − Σ w|ε|)`, which is half of what is returned times the spread.
    """
    m, unit = len(facts.axes), PRECISIONS[facts.semantics].unit
    worst = score_error(facts)
    if worst > 0.01:
        return worst
    moments = [distance_bounds(axis, rate, 2.0, quick=True)[0] for axis, rate in zip(facts.axes, facts.rates)]
    scores = add_up(*map(mul_up, [r / 2 for r in facts.rates], moments, moments))
    return min(worst, mul_up(2.04, unit, add_up(mul_up(SCORE_UNITS, scores), EXP_UNITS * m)))


def score_error(facts: GridFacts) -> float:
    """δ: how far a window score may be off, exponential included: `Σ_i 8u·R_i r_i²/2 + 16u` with r_i the window's reach."""
    half, reach = [r / 2 for r in facts.rates], _window_reach(facts)
    scores = add_up(*map(mul_up, half, reach, reach))
    return mul_up(PRECISIONS[facts.semantics].unit, add_up(mul_up(SCORE_UNITS, scores), EXP_UNITS * len(facts.axes)))


def _lattice_error(facts: GridFacts) -> float:
    """L_p averages over all z, but the head sees z rounded: that moves score differences by `R_i u|z| 2r_i` at most."""
    precision, m = PRECISIONS[facts.semantics], len(facts.axes)
    if precision.is_half:
        moved = precision.moved_by(facts.reach, m)
        return add_up(*(mul_up(2.0, r, moved, d) for r, d in zip(facts.rates, _window_reach(facts))))
    u = precision.unit
    return add_up(*(mul_up(2.0, r, u, facts.reach, d) for r, d in zip(facts.rates, _window_reach(facts))))


def input_rounding(facts: GridFacts, known: Known, norm: float) -> Term:
    """Inputs given in float64 are rounded to the head's dtype first: f may move by its modulus at distance u|z|.

    Let x' be what x is rounded to. Values of f at centers in the domain need the moduli on the domain, as
    `|V_j − f(x)| ≤ ω(|v_j − x|) ≤ ω(|v_j − x'|) + ω(|x' − x|)` and f is not evaluated at x'. Other proofs compare the head with
    f at x', which may lie beyond the end of the domain: they need moduli that hold there (`known_where_rounded`). If f jumps, x and
    x' may lie on different sides. The term is infinite if nothing is known. *Theorem*: `score-rounding`.
    """
    precision, factor = PRECISIONS[facts.semantics], domain_factor(facts, norm)
    distance, moves = precision.moved_by(facts.reach, len(facts.axes)), []
    if known.modulus is not None:
        moves.append(known.modulus.above(distance))
    if known.per_axis is not None:
        moves.append(mul_up(add_up(*known.per_axis.constants), distance))
    value = mul_up(min(moves, default=math.inf), factor)
    if known.jumps is not None:
        height, measure = known.jumps.near([distance] * len(facts.axes), norm, facts.volume)
        value = add_up(value, mul_up(height, _root_up(mul_up(float(facts.outputs), measure), norm)))
    return Term("input rounding", value, "ω(u·max|z|)", "score-rounding", {"distance": distance}, source="input")


def optimal_ratio(bound: float, known: Known, radius: float) -> float | None:
    """`bound / ω(covering radius)`: nothing that sees f only at those centers can promise less than 1."""
    moved = 0.0 if known.modulus is None else known.modulus.at(radius)
    return div_up(bound, moved) if moved else None


def value_table(
    target: Target,
    centers: ProductGrid | Array,
    dtype: torch.dtype,
    *,
    rough: RoughBoxes | None = None,
    progress: Progress | None = None,
) -> tuple[torch.Tensor, float]:
    """All of `value_blocks` in one tensor, `(cells, out)`, and the largest of its errors."""
    count, start, worst = _count(centers), 0, 0.0
    out = torch.empty(count, target.num_outputs, dtype=dtype)
    for stored, error in value_blocks(target, centers, dtype, rough=rough, progress=progress):
        out[start : start + len(stored)] = stored
        start, worst = start + len(stored), max(worst, error)
    return out, worst


def value_blocks(
    target: Target,
    centers: ProductGrid | Array,
    dtype: torch.dtype,
    *,
    rough: RoughBoxes | None = None,
    progress: Progress | None = None,
) -> Iterator[tuple[torch.Tensor, float]]:
    """`V_j = f(v_j)` in `dtype`, `(cells, out)`, block after block, each with a bound of |V_j − f(v_j)|.

    A graph is evaluated in intervals, so its rounding is enclosed; for a black box only storing its values rounds. Workers may take
    blocks of a graph side by side; the calls of a black box are spread by themselves.

    Args:
        centers: a grid, or the flat centers, `(cells, m)`.
        rough: centers in these boxes may lie on a jump; any value between its two sides will do there, for the points that
            such a center concerns are those of the jump term.
    """
    count, name = _count(centers), Precision.of(dtype).name
    parts = [(start, min(start + _CELLS_AT_ONCE, count)) for start in range(0, count, _CELLS_AT_ONCE)]
    if target.graph is not None:
        shared = target.for_workers(), centers, name, rough
        found = crew().spread(_block_of_values, shared, parts, progress)
    else:
        found = (_block_of_values((target, centers, name, rough), part, None) for part in parts)
    for (_, stop), (raw, error) in zip(parts, found):
        yield torch.from_numpy(raw).view(dtype).reshape(-1, target.num_outputs), error
        report(progress, "values", stop, count)


def _block_of_values(
    shared: tuple[Target, ProductGrid | Array, str, RoughBoxes | None], part: tuple[int, int], _: Progress | None
) -> tuple[NDArray[np.uint8], float]:
    """The values of some cells as bytes, and how far they may be from f."""
    target, centers, name, rough = shared
    points = centers.centers_of(np.arange(*part)) if isinstance(centers, ProductGrid) else centers[slice(*part)]
    answers = target(points)  # raises where f is not finite
    dtype = getattr(torch, name)
    if target.graph is not None:
        enclosure = target.graph.enclose(points, points)
        stored = torch.from_numpy(enclosure.mid).to(dtype)
        distance = _stored_distance(enclosure, stored.double().numpy(), points, rough)
    else:
        stored = torch.from_numpy(answers).to(dtype)
        distance = np.zeros(1) if name == "float64" else up(np.abs(stored.double().numpy() - answers))
    return stored.contiguous().reshape(-1).view(torch.uint8).numpy(), float(distance.max())


def _count(centers: ProductGrid | Array) -> int:
    return centers.num_cells if isinstance(centers, ProductGrid) else len(centers)


def _stored_distance(enclosure: Interval, kept: Array, points: Array, rough: RoughBoxes | None) -> Array:
    """How far stored values may be from f, `(n, out)`: 0 where a center lies in a rough box."""
    distance = np.maximum(up(np.abs(enclosure.hi - kept)), up(np.abs(kept - enclosure.lo)))
    if rough is not None:
        wide = np.flatnonzero(distance.max(axis=1) > 1e-9 * np.abs(kept).max())
        distance[wide[rough.contain(points[wide])]] = 0.0
    return distance


def value_size(values: torch.Tensor) -> tuple[float, float]:
    """`max|V|` and the largest `max V − min V` of a component, rounded up."""
    ends = [torch.aminmax(block, dim=0) for (block,) in blocks_of(values)]
    least = torch.stack([e.min for e in ends]).amin(dim=0).double()
    most = torch.stack([e.max for e in ends]).amax(dim=0).double()
    spread = float((most - least).max())
    return float(torch.maximum(most, -least).max()), float(up(spread)) if spread else 0.0


def value_error(head: FoldedHead, target: Target, centers: Callable[[int, int], Array], known: Known) -> float:
    """`max |V_j − f(v_j)|` of a stored head, f enclosed at the centers; infinite for a black box, which cannot be checked."""
    if target.graph is None:
        return math.inf
    rough = known.jumps if isinstance(known.jumps, RoughBoxes) else None
    worst, step, table = 0.0, 1 << 16, head.get_buffer("values").detach()
    for start in range(0, head.num_keys, step):
        points = centers(start, min(start + step, head.num_keys))
        kept = table[start : start + len(points)].double().numpy()
        worst = max(worst, float(_stored_distance(target.graph.enclose(points, points), kept, points, rough).max()))
    return worst
