"""How far a head of few keys is from its function near given points, where that is less than its bound on the whole box."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import numpy as np

from partita.arithmetic.interval import Interval
from partita.arithmetic.precision import Precision
from partita.arithmetic.rounding import down, exp_up, mul_up, up
from partita.functions.graph import Graph
from partita.geometry.domains import Array
from partita.heads.head import FoldedHead, numbers
from partita.heads.scattered_head import ScatteredHead
from partita.proofs.certificate import Certificate, total

__all__ = ["local_error"]

_MOST_KEYS = 16


def local_error(head: FoldedHead, graph: Graph, certificate: Certificate) -> Callable[[Array, Array], Array] | None:
    """A function that bounds `|head − g|` on boxes inside the certificate's: corners `(n, k)` to bounds `(n,)`.

    Over one box at a time, `|head(z) − g(z)| ≤ e^{2δ} Σ_j w_j |V_j(z) − g(z)|` with `w_j ≤ min_k σ(s_j − s_k)`, where σ is the
    logistic function and δ what scores are off by; the certificate's other terms for rounding come on top. Scores and values are
    those of the stored tensors. Away from its kinks a head of affine pieces is much closer than its bound says.
    *Theorem*: `carried-errors`.

    Args:
        head: with one output.
        graph: g.
        certificate: the head's own claim about g.

    Returns:
        The function; None for a head that is not proved by its pieces or has more than 16 keys, where the bound is as good.
    """
    if not isinstance(head, ScatteredHead) or head.num_keys > _MOST_KEYS or head.output_shape != ():
        return None
    scores = [t for t in certificate.terms if t.name == "score rounding" and "delta" in t.inputs]
    if certificate.proof.get("method") != "pieces" or len(scores) != 1:
        return None
    factor = exp_up(mul_up(2.0, scores[0].inputs["delta"]))
    added = total(t for t in certificate.terms if t.source in ("rounding", "input") and t is not scores[0])
    leads, precision, lines = _leads(head), Precision.of(head.dtype), [_line(head, j) for j in range(head.num_keys)]

    def bound(lo: Array, hi: Array) -> Array:
        lo, hi = precision.widened(lo, hi)  # the head sees rounded inputs
        middle = np.clip(lo / 2 + hi / 2, lo, hi)
        radius = up(np.maximum(hi - middle, middle - lo))
        axes = range(lo.shape[1])
        box = [Interval(lo[:, i], hi[:, i]) for i in axes]
        at, slopes = graph.enclose(middle, middle)[:, 0], graph.enclose_gradient(lo, hi)[1][:, 0]
        found = np.zeros(len(lo))
        for others, (value, center, steep) in zip(leads, lines):
            weight = np.ones(len(lo))
            for lead_slopes, offset in others:
                lead = offset
                for slope, x in zip(lead_slopes, box):
                    lead = lead + slope * x
                # where nothing is known of the lead, its upper end is infinite and the weight 1
                weight = np.minimum(weight, Interval(lead.hi, lead.hi).sigmoid().hi)
            off, moved = (
                Interval.constant(value) - at,
                np.zeros(len(lo)),
            )  # V_j − g at the middle, and how it moves from there
            for i in axes:
                off = off + (Interval.point(middle[:, i]) - center[i]) * steep[i]
                turned = (Interval.constant(steep[i]) - slopes[:, i]).magnitude
                moved = up(moved + np.where(radius[:, i] == 0, 0.0, up(turned * radius[:, i])))
            size = up(off.magnitude + moved)
            found = up(found + np.where(size == 0, 0.0, up(weight * size, 2)))
        return np.asarray(up(up(found * factor) + added))

    return bound


def _line(head: ScatteredHead, key: int) -> tuple[float, list[float], list[float]]:
    """The value of a key at its center, the center, and the slopes."""
    centers, values = numbers(head.centers)[key].tolist(), numbers(head.values)[key].tolist()
    slopes = [0.0] * len(centers) if head.value_slopes is None else numbers(head.value_slopes)[key, 0].tolist()
    return values[0], centers, slopes


def _leads(head: ScatteredHead) -> list[list[tuple[list[Interval], Interval]]]:
    """For every key j and every other key k, slopes and offset of `s_j − s_k = R[(c_j − c_k)·z + (|c_k|² − |c_j|² + p_j − p_k)/2]`,
    computed exactly and then enclosed.
    """
    centers = [[Fraction(x) for x in row] for row in numbers(head.centers).tolist()]
    powers = [Fraction(0)] * len(centers)
    if head.powers is not None:
        powers = [Fraction(x) for x in numbers(head.powers).tolist()]
    rate = Fraction(float(head.inverse_temperature))
    heights = [(p - sum((x * x for x in c), Fraction(0))) / 2 for c, p in zip(centers, powers)]
    return [
        [
            (
                [_enclosed(rate * (a - b)) for a, b in zip(centers[j], centers[k])],
                _enclosed(rate * (heights[j] - heights[k])),
            )
            for k in range(len(centers))
            if k != j
        ]
        for j in range(len(centers))
    ]


def _enclosed(exact: Fraction) -> Interval:
    """An interval that holds a rational number."""
    try:
        nearest = np.array(float(exact))
    except OverflowError:
        return Interval(np.array(-np.inf), np.array(np.inf))
    return Interval.point(nearest) if Fraction(float(nearest)) == exact else Interval(down(nearest), up(nearest))
