"""What is proved about a head made of affine pieces: its keys, its stored numbers against the exact ones, and its bound."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from partita.arithmetic.precision import DOUBLE, Precision
from partita.arithmetic.progress import Progress
from partita.arithmetic.rounding import add_up, div_up, exp_up, mul_up, sub_down, up
from partita.errors import DomainError, ShapeError, SizeError, UnsupportedError
from partita.functions.graph import Graph
from partita.functions.piecewise import PiecewiseAffine, recognise
from partita.functions.target import Target
from partita.geometry.domains import Array, Box
from partita.geometry.envelopes import Rows, within
from partita.geometry.moments import soft_maximum_gap
from partita.heads.head import FoldedHead
from partita.heads.scattered_head import ScatteredHead
from partita.proofs.certificate import Term
from partita.proofs.proof import Given, Proof, Proved

__all__ = [
    "MAX_KEYS",
    "PieceFacts",
    "PiecesProof",
    "QueryKeys",
    "exact",
    "halfway",
    "key_labels",
    "key_rows",
    "piece_facts",
    "pieces_on",
    "pieces_terms",
    "query_axes",
    "query_slope",
    "slope_scale",
]

MAX_KEYS = 20_000
_CUT = 45.0  # tuples that everywhere trail by ln(tuples) + 45 get no key
_STEEPEST_TILT = 4.0
_PIECES_OF_A_SIDE = 256
_INFLATE = 1 + 1e-10  # covers the float64 rounding of sums of nonnegative numbers


@dataclass(frozen=True)
class QueryKeys:
    """Two keys for every coordinate of z_Q on which a piece depends, in the place of values that depend on z_Q.

    In coordinates |t| ≤ 1 of the box, the keys ±i of every piece add `±tilt·t_i` to its score, and hold the piece at
    `t_i = ±reach`, all other coordinates of z_Q being 0. Their weights do not depend on the piece, and read
    `m_i(t) = reach·sinh(tilt·t_i)/Σ_l cosh(tilt·t_l)`, which is nearly t_i. *Theorem*: `query-keys`.
    """

    axes: tuple[int, ...]
    tilt: float
    reach: float

    @classmethod
    def within(cls, axes: tuple[int, ...], allowed: float) -> QueryKeys:
        """The sharpest tilt whose error is at most `allowed`: then the values are smallest."""
        low, high = 1e-7, _STEEPEST_TILT
        for _ in range(40):
            middle = math.sqrt(low * high)
            low, high = (middle, high) if cls._best(axes, middle).error() <= allowed else (low, middle)
        return cls._best(axes, low)

    @classmethod
    def _best(cls, axes: tuple[int, ...], tilt: float) -> QueryKeys:
        """The reach with the least error at this tilt."""
        n = len(axes)
        low, high = n / tilt, n / tilt * math.cosh(tilt)
        for _ in range(30):
            first, last = low + (high - low) / 3, high - (high - low) / 3
            if cls(axes, tilt, first).error() <= cls(axes, tilt, last).error():
                high = last
            else:
                low = first
        return cls(axes, tilt, (low + high) / 2)

    def error(self) -> float:
        """A bound of `sup |m_i(t) − t_i|`, t in the cube.

        `m_i/t_i = reach·tilt·sinhc(tilt·t_i)/(cosh(tilt·t_i) + C)` with `sinhc(x) = sinh(x)/x`, which grows with |x|, and
        `C = Σ_{l≠i} cosh(tilt·t_l)` between n − 1 and (n − 1)cosh(tilt): bounded on short pieces of [0, 1].
        """
        n, ends = len(self.axes), np.linspace(0.0, 1.0, _PIECES_OF_A_SIDE + 1) * self.tilt
        with np.errstate(invalid="ignore"):
            sinhc = np.where(ends > 0, np.sinh(ends) / ends, 1.0)
        cosh, gain = np.cosh(ends), self.reach * self.tilt
        above = gain * sinhc[1:] / (cosh[:-1] + (n - 1)) * (1 + 1e-14) - 1
        below = 1 - gain * sinhc[:-1] / (cosh[1:] + (n - 1) * cosh[-1]) * (1 - 1e-14)
        farthest = np.arange(1, len(ends)) / _PIECES_OF_A_SIDE
        return float((np.maximum(np.maximum(above, below), 0.0) * farthest).max() * (1 + 1e-12) + 1e-15)

    @property
    def corners(self) -> list[tuple[int, int]]:
        """Axis and sign of every key of a piece."""
        return [(axis, sign) for axis in self.axes for sign in (1, -1)]


@dataclass(frozen=True)
class PieceFacts:
    """A head made of pieces in numbers.

    Attributes:
        cells: the most pieces in one maximum; tuples: ln of the number of all tuples; keys: K; dimension: m.
        rate: R, as the pieces see it. semantics: the dtype.
        score_error: how far stored scores are from R times the pieces, up to a common affine function.
        score_size: max |score| as the head computes it; value_size: max |V_j| + |J_j||z − c_j|; largest: sup |f|.
        value_error: how far stored values are from the pieces. moved: how far f moves when z is stored.
        misread: `sup |m_i − t_i|` of query keys; reach: theirs; query_slope: `max_o Σ_i |∂_i f_o|` over the axes that they read,
            times half a side. All are 0 where there are none.
    """

    cells: int
    tuples: float
    keys: int
    dimension: int
    rate: float
    semantics: str
    score_error: float
    score_size: float
    value_error: float
    value_size: float
    largest: float
    moved: float
    misread: float = 0.0
    reach: float = 0.0
    query_slope: float = 0.0

    def terms(self) -> list[Term]:
        """`|f − net| ≤ W((N−1)/e)/R + 2δ/R`, plus values stored and summed, tuples left out, inputs stored.

        *Theorem*: `max-affine-values`, where δ and the counts of roundings are derived for any order of summation.
        """
        u, m = Precision.of(self.semantics).unit, self.dimension
        chosen = self.cells > 1 or self.reach > 0  # there is a choice between keys
        delta = mul_up(1.01, u, add_up(mul_up(float(m + 6), self.score_size), 17.0)) if chosen else 0.0
        between = 2.0 if self.cells > 1 else 0.0  # scores of one piece may all be off alike
        soft = [
            div_up(x, self.rate) for x in (soft_maximum_gap(self.cells), between * delta, between * self.score_error)
        ]
        evaluated = mul_up(1.01, float(m + 3), u, self.value_size)
        read = mul_up(self.query_slope, add_up(self.reach, 1.0)) if self.reach else 0.0
        seen = add_up(self.largest, *soft, *soft, self.value_error, evaluated)
        seen = add_up(seen, read) if read else seen
        operations = float(2 * self.keys + 8)
        key = "max-affine-values"
        terms = [
            Term("temperature", soft[0], "W((N − 1)/e)/R", key, {"cells": float(self.cells), "rate": self.rate}),
            Term("score rounding", soft[1], "2δ/R", key, {"delta": delta, "size": self.score_size}, "rounding"),
            Term("stored scores", soft[2], "2δ/R", key, {"delta": self.score_error}, "storage"),
            Term("stored values", self.value_error, "sup |V_j(z) − piece_j(z)|", key, source="storage"),
            Term(
                "value rounding", evaluated, "γ·max(|V_j| + |J_j||z − c_j|)", key, {"size": self.value_size}, "rounding"
            ),
            Term(
                "summation",
                mul_up(1.01, operations, u, seen),
                "γ_K·E|V_j|",
                key,
                {"operations": operations},
                "rounding",
            ),
        ]
        if self.reach:
            off = mul_up(self.query_slope, self.reach, add_up(delta, self.score_error))
            inputs = {"slope": self.query_slope, "misread": self.misread, "reach": self.reach}
            missed = mul_up(self.query_slope, self.misread)
            terms += [
                Term("query keys", missed, "slopes in z_Q · sup |m(z_Q) − z_Q|", "query-keys", inputs),
                Term("query rounding", off, "slopes in z_Q · reach · δ", "query-keys", {"delta": delta}, "rounding"),
            ]
        if chosen:
            left_out = self._left_out(add_up(delta, self.score_error), add_up(*soft), read)
            terms.append(Term("window", left_out, "mass left out · how far its pieces trail", key, source="rounding"))
        if self.moved:
            terms.append(Term("input rounding", self.moved, "Σ_i L_i u max|z_i|", key, source="input"))
        return terms

    def _left_out(self, delta: float, approximation: float, read: float) -> float:
        """What keys and cells that were left out, or whose exponential vanished, would have added, and what rescaling does.

        A tuple that trails by t holds at most `e^{−t}` and is off by at most t/R: together `3T e^{−45}/R`, δ aside. The value of
        a query key is off by `read` at most.
        """
        searched = mul_up(64.0 * (self.dimension + 8), DOUBLE.unit, self.score_size)
        mass = mul_up(3.0, exp_up(add_up(4 * delta, 4 * searched, -_CUT)))
        if mass > 1e-3:
            return math.inf
        vanished = mul_up(float(self.keys), Precision.of(self.semantics).smallest, 2.1 * self.score_size)
        trailing = div_up(add_up(mul_up(mass, add_up(self.tuples, _CUT)), vanished), self.rate)
        if read:
            share = add_up(mass, mul_up(float(self.keys), Precision.of(self.semantics).smallest))
            trailing, approximation = add_up(trailing, mul_up(share, read)), add_up(approximation, read)
        return div_up(add_up(trailing, mul_up(mass, approximation)), sub_down(1.0, mass))


class PiecesProof(Proof):
    """One key per affine piece of an expression: only the choice between them is approximate. *Theorem*: `max-affine-values`."""

    name = "pieces"
    mean_distance = 2.0  # both maxima trail f by what the terms bound

    def mean_distance_in(self, details: Mapping[str, Any]) -> float:
        """Infinite for keys that read z_Q: their values are far from f, and only their sum is near it."""
        return math.inf if "reach" in details else self.mean_distance

    def _prove(self, head: FoldedHead, target: Target, given: Given) -> Proved:
        if not isinstance(head, ScatteredHead) or target.graph is None:
            raise UnsupportedError("a proof by pieces needs a scattered head and an expression.")
        facts, box = given.earlier, target.box
        read = {name: float(given.details[name]) for name in ("tilt", "reach") if name in given.details}
        terms = facts.terms() if facts else pieces_terms(head, target.graph, box, **read, progress=given.progress)
        return Proved(terms, {"method": self.name, **read})


def pieces_terms(
    head: ScatteredHead,
    graph: Graph,
    box: Box,
    *,
    tilt: float = 0.0,
    reach: float = 0.0,
    progress: Progress | None = None,
) -> list[Term]:
    """The terms of the bound again, from the stored tensors and the graph alone. *Theorem*: `max-affine-values`.

    `tilt` and `reach` are those of its query keys, if there are any. The stored numbers are compared with what they say.

    Raises ShapeError for a head that does not have one key per tuple of pieces; `recognise`'s errors for another graph.
    """
    rate = float(head.inverse_temperature)
    if not 0 < rate < math.inf:
        raise DomainError(f"the head's inverse temperature is {rate}; expected a finite number > 0.")
    pieces = pieces_on(box, graph, head.dtype, progress=progress)
    axes = query_axes(pieces, math.prod(head.input_shapes[0])) if reach else ()
    if reach and not (axes and 0 < tilt <= _STEEPEST_TILT and 0 < reach < math.inf):
        raise DomainError(f"query keys with tilt {tilt} and reach {reach} on axes {axes}; expected positive numbers.")
    queries = QueryKeys(axes, tilt, reach) if reach else None
    labels = key_labels(pieces, Fraction(rate) * slope_scale(pieces, queries), progress=progress)
    keys = len(labels) * (len(queries.corners) if queries else 1)
    if (head.num_keys, head.values.shape[1]) != (keys, len(graph.outputs)):
        raise ShapeError(
            f"the head has {head.num_keys:,} keys and {head.values.shape[1]} outputs; the pieces of the graph at this "
            f"temperature make {keys:,} and {len(graph.outputs)}."
        )
    return piece_facts(head, box, pieces, labels, queries).terms()


def query_axes(pieces: PiecewiseAffine, first: int) -> tuple[int, ...]:
    """The coordinates from `first` on, those of z_Q, on which some piece depends."""
    moving = (pieces.steepest() != 0).any(axis=0)
    return tuple(i for i in range(first, len(moving)) if moving[i])


def pieces_on(box: Box, graph: Graph, dtype: torch.dtype, *, progress: Progress | None = None) -> PiecewiseAffine:
    """The pieces of f on the box and as far outside as storing an input can move it (`recognise`, with its errors)."""
    return recognise(graph, box, margins=_margins(box, dtype), progress=progress)


def _margins(box: Box, dtype: torch.dtype) -> Array | None:
    """How far a stored input may lie outside the box, `(m,)`; None if it is stored as it is."""
    precision = Precision.of(dtype)
    return precision.moved(box.lo.ravel(), box.hi.ravel()) if precision.rounds_inputs else None


def slope_scale(pieces: PiecewiseAffine, queries: QueryKeys | None = None) -> Fraction:
    """s ≈ r/A, r half the diagonal, A the reach of the score slopes: centers are then about as far out as the corners.

    `(|z − c|² + |p|)/s` is least there, and so is the rounding of scores; a power of two changes no digits. Where f is one piece,
    only query keys have slopes.
    """
    if not pieces.factors and queries is None:
        return Fraction(1)
    if pieces.factors:
        halves = sum((rows.max(axis=0) - rows.min(axis=0))[1:] for rows in pieces.factors) / 2
    else:
        halves = np.array([Fraction(queries is not None and i in queries.axes) for i in range(len(pieces.radii))])
    radii = np.array(pieces.radii, dtype=object)
    ratio = (radii * radii).sum() / ((halves / radii) ** 2).sum()
    return Fraction(2) ** round((math.log2(ratio.numerator) - math.log2(ratio.denominator)) / 2)


def key_labels(pieces: PiecewiseAffine, rate: Fraction, *, progress: Progress | None = None) -> NDArray[np.int64]:
    """The tuples of pieces that get a key, `(keys, factors)`: all but those that everywhere trail by ln(tuples) + 45.

    Deficits of the factors add up, so a tuple may be left out as soon as the first of its pieces trail.
    """
    margin = Fraction(up(_tuples(pieces) + _CUT)) / rate
    rows, labels = np.zeros((1, 1 + len(pieces.middle)), dtype=object), np.zeros((1, 0), dtype=np.int64)
    for factor in pieces.factors:
        if len(rows) * len(factor) > MAX_KEYS:
            raise SizeError(f"these pieces need more than {MAX_KEYS:,} keys; a grid needs fewer.")
        rows = (rows[:, None] + factor[None]).reshape(-1, rows.shape[1])
        labels = np.column_stack([np.repeat(labels, len(factor), axis=0), np.tile(np.arange(len(factor)), len(labels))])
        kept = within(rows, margin, progress=progress)
        rows, labels = rows[kept], labels[kept]
    return labels


def _tuples(pieces: PiecewiseAffine) -> float:
    """ln of the number of all tuples, rounded up."""
    return float(up(sum(math.log(len(rows)) for rows in pieces.factors), 64)) if pieces.factors else 0.0


def key_rows(
    pieces: PiecewiseAffine, labels: NDArray[np.int64], queries: QueryKeys | None = None, sharp: Fraction = Fraction(1)
) -> tuple[Rows, Rows]:
    """Per key the sum of its pieces, `(keys, 1 + m)`, and its values, `(keys, out, 1 + m)`.

    With query keys, a tuple has one key per corner, and `tilt/sharp` is added to its scores, which R = sharp multiplies.
    """
    chosen, taken = [], iter(labels.T)
    for rows in (rows for pair in zip(pieces.convex, pieces.concave) for rows in pair):
        label = next(taken) if len(rows) > 1 else np.zeros(len(labels), dtype=np.int64)
        chosen.append(rows[label])
    scores, values = sum(chosen[1:], chosen[0]), np.stack([g - h for g, h in zip(chosen[::2], chosen[1::2])], axis=1)
    if queries is None:
        return scores, values
    corners, step, reach = queries.corners, Fraction(queries.tilt) / sharp, Fraction(queries.reach)
    scores, values = np.repeat(scores, len(corners), axis=0), np.repeat(values, len(corners), axis=0)
    for k, (axis, sign) in enumerate(corners):
        scores[k :: len(corners), 1 + axis] += sign * step
        values[k :: len(corners), :, 0] += sign * reach * values[k :: len(corners), :, 1 + axis]
    values[:, :, [1 + axis for axis in queries.axes]] = Fraction(0)
    return scores, values


def halfway(rows: Rows) -> Rows:
    """The middle between the smallest and the largest, column by column."""
    out: Rows = (rows.max(axis=0) + rows.min(axis=0)) / 2
    return out


def exact(tensor: torch.Tensor) -> Rows:
    """The stored numbers as Fractions."""
    return np.asarray(np.frompyfunc(Fraction, 1, 1)(tensor.detach().double().cpu().numpy()), dtype=object)


def _above(number: Fraction) -> float:
    return float(up(float(number))) if number else 0.0


@np.errstate(over="ignore")
def piece_facts(
    head: ScatteredHead,
    box: Box,
    pieces: PiecewiseAffine,
    labels: NDArray[np.int64],
    queries: QueryKeys | None = None,
) -> PieceFacts:
    """Stored against exact: both are affine, so suprema over the box are `|value at the middle| + Σ |change over half a side|`."""
    precision = Precision.of(head.dtype)
    floor = precision.smallest / precision.unit  # what may be flushed to 0, counted as if it were rounded
    sharp = Fraction(float(head.inverse_temperature)) * slope_scale(pieces, queries)
    scores, values = key_rows(pieces, labels, queries, sharp)
    middle, radii = (np.array(x, dtype=object) for x in (pieces.middle, pieces.radii))
    away, slopes = exact(head.centers) - middle, exact(_slopes(head))
    wrong = abs(exact(head.values) - (slopes * away[:, None]).sum(axis=2) - values[:, :, 0])
    wrong = wrong + abs(slopes * radii - values[:, :, 1:]).sum(axis=2)
    reach = (abs(away) + radii).astype(np.float64) * _INFLATE
    tall = head.values.double().abs().numpy() + (np.abs(slopes.astype(np.float64)) * reach[:, None]).sum(axis=2)
    steepest, margins = pieces.steepest(), _margins(box, head.dtype)
    tops = [
        abs(max(g[:, 0]) - max(h[:, 0])) + rise for g, h, rise in zip(pieces.convex, pieces.concave, steepest.sum(1))
    ]
    moved = 0 if margins is None else (steepest / radii * exact(torch.from_numpy(margins))).sum(axis=1).max()
    chosen = bool(pieces.factors) or queries is not None
    error, size = _scores(head, pieces, scores, reach, floor, sharp) if chosen else (0.0, 0.0)
    return PieceFacts(
        cells=pieces.most,
        tuples=_tuples(pieces),
        keys=len(scores),
        dimension=len(middle),
        rate=float(sharp),
        semantics=precision.name,
        score_error=error,
        score_size=size,
        value_error=_above(wrong.max()),
        value_size=float(tall.max() * _INFLATE + floor),
        largest=add_up(_above(max(tops)), floor),
        moved=_above(Fraction(moved)),
        misread=0.0 if queries is None else queries.error(),
        reach=0.0 if queries is None else queries.reach,
        query_slope=0.0 if queries is None else query_slope(pieces, queries.axes),
    )


def query_slope(pieces: PiecewiseAffine, axes: tuple[int, ...]) -> float:
    """`max_o Σ_i |∂_i f_o|` over these axes, in units of half a side, rounded up."""
    return _above(pieces.steepest()[:, list(axes)].sum(axis=1).max())


def _scores(
    head: ScatteredHead, pieces: PiecewiseAffine, scores: Rows, reach: Array, floor: float, sharp: Fraction
) -> tuple[float, float]:
    """How far stored scores are from R times the sums of pieces, up to one affine function for all, and how large they get."""
    rate, away = Fraction(float(head.inverse_temperature)), exact(head.centers) - np.array(pieces.middle, dtype=object)
    powers = exact(torch.zeros(len(away)) if head.powers is None else head.powers)
    at_middle = rate * (powers - (away * away).sum(axis=1)) / 2 - sharp * scores[:, 0]
    change = rate * away * np.array(pieces.radii, dtype=object) - sharp * scores[:, 1:]
    off = np.column_stack([at_middle, change])
    largest = float(((reach**2).sum(axis=1) + np.abs(powers.astype(np.float64))).max() * _INFLATE + floor)
    return _above(abs(off - halfway(off)).sum(axis=1).max()), mul_up(float(rate), 0.5, largest)


def _slopes(head: ScatteredHead) -> torch.Tensor:
    return torch.zeros(*head.values.shape, head.dimension) if head.value_slopes is None else head.value_slopes
