"""Bounds that need only how fast f moves: how far from z the softmax looks, times that speed.

With `V_j = f(v_j)`, `|net(z) − f(z)| ≤ Σ w_j |f(v_j) − f(z)|`. If |f(x) − f(y)| ≤ C|x − y|^α this is at most
`C (E|z − v|²)^{α/2}`; if it is at most `Σ L_i |x_i − y_i|`, `Σ L_i E|z_i − v_i|`. On a product grid the axes have softmaxes of their own.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from itertools import pairwise

from flint import arb, arb_series

from partita_check.graph import Graph
from partita_check.polynomials import interval, up
from partita_check.search import Measured, search

__all__ = ["Gaps", "lambert", "reach", "steepest"]

LINEAR = 1200  # parts of half a gap


class Gaps:
    """The sorted centers of an axis over [lo, hi]: the extreme gaps between them, and how far the ends lie beyond."""

    def __init__(self, centers: Sequence[float], lo: float, hi: float) -> None:
        gaps = [arb(b) - arb(a) for a, b in pairwise(centers)]
        self.count, self.lo, self.hi = len(centers), lo, hi
        self.least = arb(min(map(_low, gaps))) if gaps else arb(0)
        self.most = arb(max(map(up, gaps))) if gaps else arb(0)
        self.overhang = max(arb(0), arb(centers[0]) - lo, hi - arb(centers[-1]), key=up)
        self.inside = centers[0] >= lo and centers[-1] <= hi  # then [lo, hi] is made of whole gaps and overhangs
        self.radius = max(self.most / 2, self.overhang, key=up)

    def beyond_window(self, rate: arb, q: int) -> arb:
        """The mass of centers that are at least q gaps behind the two around x: `2 Σ_{i ≥ q} e^{−R g² i²/2}`."""
        if 2 * q >= self.count:
            return arb(0)
        kappa = rate * self.least * self.least
        ratio = (-kappa * (2 * q + 1) / 2).exp()
        return 2 * (-kappa * q * q / 2).exp() / (1 - ratio) if ratio < 1 else arb("inf")


def _low(x: arb) -> float:
    return -up(-x)


def lambert(cells: int) -> arb:
    """`W((N − 1)/e)`: how far, at most, a soft maximum of N scores trails the maximum."""
    return ((cells - 1) / arb(1).exp()).lambertw()


def reach(gaps: Gaps, rate: arb, power: arb, average: bool) -> arb:
    """An upper bound of `E|x − c|^p`: its supremum over x in [lo, hi], or its average; infinite where the argument does not apply.

    Between two centers, x at `a` from their middle, all others lie at least i gaps behind one of the two; beyond the last center
    all lie i gaps behind it. A lattice that goes on for ever is compared: centers that are missing from it are farther than
    one gap, so if its moment is at most one gap to the p, leaving them out can only lower the mean.
    """
    if gaps.count == 1:
        return _power(gaps.radius, power)  # the average is less
    width, unit = gaps.least.union(gaps.most), _power(gaps.least, power)
    zones = [(width / 2, True)] + ([(gaps.overhang, False)] if gaps.overhang > 0 else [])
    best, found = max(up(_moment(width, rate, power, arb(0), True) / unit), up(_power(gaps.overhang, power) / unit)), []
    for length, between in zones:

        def measure(
            lo: tuple[float, ...], hi: tuple[float, ...], _: object, length: arb = length, between: bool = between
        ) -> Measured:
            return Measured(up(_moment(width, rate, power, interval(lo[0], hi[0]) * length, between) / unit), 0)

        if average and gaps.inside:
            parts = [measure((k / LINEAR,), ((k + 1) / LINEAR,), None).bound for k in range(LINEAR)]
            found.append(sum(map(arb, parts), arb(0)) / LINEAR)
            top = max(parts)
        else:
            top = search(
                measure,
                [0.0],
                [1.0],
                target=best * (1 + 1e-7),
                norm=math.inf,
                outputs=1,
                deadline=time.monotonic() + 10,
            ).bound
            found.append(arb(top))
        if not top <= 1:
            return arb("inf")
    return max(found, key=up) * unit


def _moment(width: arb, rate: arb, power: arb, a: arb, between: bool) -> arb:
    """A bound of E|x − c|^p on an infinite lattice, x at distance a from the middle of two centers, or a beyond the last one.

    Of the mass that two neighbours share the farther has `1/(1 + e^{R a g})`; the others are compared with that mass.
    """
    near = [width / 2 - a, width / 2 + a] if between else [a]
    share = (rate * a * width).exp() if between else arb(0)
    found = _power(near[0], power)
    if between:
        found += (_power(near[1], power) - found) / (1 + share)
    mass_of_pair = 1 + 1 / share if between else arb(1)
    for behind in range(len(near)):
        for i in range(1, 10_000):
            distance = i * width + near[behind]
            ahead = (2 * a + i * width) * (1 + i) * width if behind else i * width * (2 * near[0] + i * width)
            term = _power(distance, power) * (-rate * ahead / 2).exp() / mass_of_pair
            found += term
            small = term.abs_upper() < 1e-25 * found.abs_upper()
            if small and (1 + 1 / arb(i)) ** power * (-rate * width * width * (i + 0.5)).exp() < 0.5:
                found += arb(0, 1) * term.abs_upper()  # the rest falls faster than by halves
                break
        else:
            return arb("inf")
    return found


def _power(x: arb, power: arb) -> arb:
    """x^p for x ≥ 0, also where the ball touches 0 or sticks out below by a rounding."""
    return x**power if x > 0 else arb(0).union(x.abs_upper() ** power)


def steepest(
    graph: Graph, lo: Sequence[float], hi: Sequence[float], axis: int | None, enough: float, seconds: float
) -> float:
    """A bound of `sup |∂_i f|` over the box, of `sup |∇f|₂` if no axis is named: `enough`, or nearly attained, if time allows."""
    m, attained = len(lo), 0.0
    axes = range(m) if axis is None else [axis]

    def slope(box: list[arb]) -> arb:
        squares = [arb(0)] * len(graph.outputs)
        for i in axes:
            given = [arb_series([b, 1], 2) if k == i else b for k, b in enumerate(box)]
            slopes = [v[1] if isinstance(v, arb_series) else v * 0 for v in graph.evaluate(given)]
            squares = [s + g.abs_upper() * g.abs_upper() for s, g in zip(squares, slopes)]
        return max(squares, key=up).sqrt()

    def measure(low: tuple[float, ...], high: tuple[float, ...], _: object) -> Measured:
        nonlocal attained
        at = slope([(arb(a) + arb(b)) / 2 for a, b in zip(low, high)])
        attained = max(attained, float(at.mid()) if at.is_finite() else 0.0)
        box, middle = [interval(a, b) for a, b in zip(low, high)], [arb(a) / 2 + arb(b) / 2 for a, b in zip(low, high)]
        thin = [up(slope([*box[:i], middle[i], *box[i + 1 :]])) for i in range(m)] if m > 1 else [0.0]
        longest = [-(b - a) / (d - c) for a, b, c, d in zip(low, high, lo, hi)]
        return Measured(up(slope(box)), min(range(m), key=lambda i: (thin[i], longest[i])))

    def goal() -> float:
        return max(enough, attained * (1 + 1e-8))

    return search(measure, lo, hi, target=goal, norm=math.inf, outputs=1, deadline=time.monotonic() + seconds).bound
