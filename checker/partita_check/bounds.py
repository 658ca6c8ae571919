"""One-dimensional bounds: moments of a softmax, slopes of f, and rounding errors of a running head (derived in docs/checker.md).

u is the unit roundoff; arithmetic is IEEE 754 and exp errs by at most 8 units in the last place (16u): what the certificate
says about the platform, and all that is assumed here. A product that underflows loses at most the least positive number; an
exponential below the smallest normal number is counted as lost.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from itertools import pairwise

from flint import arb, arb_series

from partita_check.clock import clock
from partita_check.graph import Graph
from partita_check.polynomials import INF, Ends, balls, up
from partita_check.reading import Head
from partita_check.search import Measured, search

__all__ = [
    "LARGEST",
    "SMALLEST",
    "STORED",
    "TINIEST",
    "UNIT",
    "Gaps",
    "lambert",
    "length",
    "lost_in_score",
    "mixing",
    "score_error",
    "steepest",
    "sums",
    "window_mass",
]

SINGLE = ("float32", "bfloat16", "float16")  # heads of a half type compute in float32
UNIT = {"real": arb(0), "float64": arb(2) ** -53, **dict.fromkeys(SINGLE, arb(2) ** -24)}
SMALLEST = {"real": arb(0), "float64": arb(2) ** -1022, **dict.fromkeys(SINGLE, arb(2) ** -126)}  # normal
TINIEST = {"real": arb(0), "float64": arb(2) ** -1074, **dict.fromkeys(SINGLE, arb(2) ** -149)}  # positive
LARGEST = {"real": math.inf, "float64": 1.7e308, **dict.fromkeys(SINGLE, 3e38)}  # a little less, for rounded sums
# of inputs as they are rounded and values as they are stored; a float64 number becomes a float32 one before one of a half type
STORED = {name: (UNIT[name], TINIEST[name], LARGEST[name]) for name in UNIT}
STORED["bfloat16"] = (arb(2) ** -8 + arb(2) ** -23, arb(2) ** -133, 3e38)
STORED["float16"] = (arb(2) ** -11 + arb(2) ** -23, arb(2) ** -24, 65000.0)
PARTS = 1200  # of half a gap, for averages
SOFT = 3.0  # κ, up to which all centers are summed: many share the mass
SOFT_PARTS = 800  # of a gap, for averages at κ = 1 and above; fewer where the mass is spread over many gaps


def lambert(cells: int) -> arb:
    """`W((N − 1)/e)`: how far, at most, a soft maximum of N scores trails the maximum."""
    return ((cells - 1) / arb(1).exp()).lambertw()


def length(steps: Sequence[arb]) -> arb:
    return sum((s * s for s in steps), arb(0)).sqrt()


def _power(x: arb, power: arb) -> arb:
    """x^p for x ≥ 0, also where the ball touches 0 or sticks out below by a rounding."""
    return x**power if x > 0 else arb(0).union(x.abs_upper() ** power)


class Gaps:
    """The sorted centers of an axis over [lo, hi], with R and q: extreme gaps, how far the ends lie beyond, the covering radius.

    A window has `width` centers, none farther than `window` from x.
    """

    def __init__(self, centers: Sequence[float], ends: tuple[float, float], rate: float, q: int) -> None:
        self.count, self.rate, self.q, self.centers, self.ends = len(centers), arb(rate), q, centers, ends
        gaps = self.count > 1
        steps = [f(b - a for a, b in pairwise(centers)) for f in (min, max)] if gaps else [0.0, 0.0]
        outward = zip(steps, (-math.inf, math.inf))  # a difference of floats is rounded to the nearest
        self.least, self.most = (arb(math.nextafter(x, way)) if gaps else arb(0) for x, way in outward)
        self.overhang = max(arb(0), arb(centers[0]) - ends[0], ends[1] - arb(centers[-1]), key=up)
        self.radius, self.width = max(self.most / 2, self.overhang, key=up), min(2 * q, self.count)
        self.window = self.width * self.most + self.overhang if gaps else self.radius
        self.inside = ends[0] <= centers[0] and centers[-1] <= ends[1]  # then [lo, hi] is whole gaps and overhangs

    def beyond_window(self) -> arb:
        """The mass of centers that are at least q gaps behind the two around x: `2 Σ_{i ≥ q} e^{−R g² i²/2}`."""
        kappa = self.rate * self.least * self.least
        ratio = (-kappa * (2 * self.q + 1) / 2).exp()
        if self.width == self.count:
            return arb(0)
        return 2 * (-kappa * self.q * self.q / 2).exp() / (1 - ratio) if ratio < 1 else INF

    def reach(self, power: arb, average: bool) -> arb:
        """An upper bound of `E|x − c|^p`, its supremum over x in [lo, hi] or its average; infinite where the argument fails.

        Between two centers, x at `a` from their middle, all others lie at least i gaps behind one of the two; beyond the last
        center all lie i gaps behind it. A lattice that goes on for ever is compared: centers that are missing from it are farther
        than one gap, so if its moment is at most one gap to the p, leaving them out can only lower the mean.
        """
        if self.count == 1:
            return _power(self.radius, power)  # the average is less
        if self.rate * self.least * self.least < SOFT:
            return self._soft_reach(power, average)
        gap, unit, found = self.least.union(self.most), _power(self.least, power), []
        finest = 1e-7 if self.rate * self.least * self.least > 32 else 3e-6  # soft heads have flat tops
        best = max(up(self._moment(gap, power, arb(0), True) / unit), up(_power(self.overhang, power) / unit))
        for extent, between in [(gap / 2, True), (self.overhang, False)][: 2 if self.overhang > 0 else 1]:

            def measure(ends: Ends, _: object, extent: arb = extent, between: bool = between) -> Measured:
                return Measured(up(self._moment(gap, power, balls(ends)[0][0] * extent, between) / unit), 0)

            parts = [measure(((k / PARTS, (k + 1) / PARTS),), None).bound for k in range(PARTS)] if average else []
            until = time.monotonic() + min(10.0, clock.left() / 4)
            top = max(parts) if parts else search(measure, [((0.0, 1.0),)], lambda: best * (1 + finest), until)[0]
            found.append(sum(map(arb, parts), arb(0)) / PARTS if average and self.inside else arb(top))
            if not top <= 1:
                return INF
        return max(found, key=up) * unit

    def _soft_reach(self, power: arb, average: bool) -> arb:
        """The same for a soft axis: `Σ_k d_k^p g_k / Σ_k g_k` over all centers, x a ball around x₀.

        With a common factor dropped, `g_k = exp(R(c_k − x₀)(x − x₀ − (c_k − x₀)/2))`.
        """
        (low, high), unit = self.ends, _power(self.most, power)

        def measure(ends: Ends, _: object) -> Measured:
            clock.tick()
            x, middle = balls(ends)[0][0], balls(ends)[1][0]
            steps = [arb(c) - middle for c in self.centers]
            weights = [(self.rate * d * (x - middle - d / 2)).exp() for d in steps]
            top = sum((w * _power(abs(x - c), power) for w, c in zip(weights, self.centers)), arb(0))
            total = sum(weights, arb(0))
            return Measured(up(top.upper() / total.lower() / unit) if total > 0 else math.inf, 0)

        if not average:
            places = [low + (high - low) * k / 64 for k in range(65)] + [low, high]
            seen = max(measure(((x, x),), None).bound for x in places)
            until = time.monotonic() + min(10.0, clock.left() / 4)
            goal = seen * (1 + 1e-4)
            return arb(search(measure, [((low, high),)], lambda: goal, until)[0]) * unit
        share = min(1.0, math.sqrt(up(self.rate * self.least * self.least)))
        count = math.ceil(SOFT_PARTS * max(share, 1 / 32)) * self.count
        edges = [low + (high - low) * k / count for k in range(count)] + [high]
        parts = (measure(((a, b),), None).bound * (arb(b) - arb(a)) for a, b in pairwise(edges))
        return sum(parts, arb(0)) / (arb(high) - arb(low)) * unit

    def sharp_reach(self, power: int) -> arb:
        """A bound of `E|x − c|^p` for sharp grids: centers farther than r, one being within ρ, have e^{−R(r² − ρ²)/2} at most."""
        far = (self.radius * self.radius + 54 / self.rate).sqrt()
        return far**power + self.width * arb(-27).exp() * self.window**power if self.count > 1 else self.radius**power

    def _moment(self, gap: arb, power: arb, a: arb, between: bool) -> arb:
        """A bound of E|x − c|^p on an infinite lattice, x at distance a from the middle of two centers, or a beyond the last.

        Of the mass that two neighbours share the farther has `1/(1 + e^{R a g})`; the others are compared with that mass.
        """
        near = [gap / 2 - a, gap / 2 + a] if between else [a]
        share, found = (self.rate * a * gap).exp(), _power(near[0], power)
        clock.tick()
        found += (_power(near[1], power) - found) / (1 + share) if between else 0
        for behind in range(len(near)):
            for i in range(1, 10_000):
                ahead = (2 * a + i * gap) * (1 + i) * gap if behind else i * gap * (2 * near[0] + i * gap)
                mass = (-self.rate * ahead / 2).exp() / (1 + 1 / share if between else 1)
                term = _power(i * gap + near[behind], power) * mass
                found += term
                ratio = (1 + 1 / arb(i)) ** power * (-self.rate * gap * gap * (i + 0.5)).exp()
                if term.abs_upper() < 1e-25 * found.abs_upper() and ratio < 0.5:
                    found += arb(0, 1) * term.abs_upper()  # the rest falls faster than by halves
                    break
            else:
                return INF
        return found


def steepest(
    graph: Graph,
    ends: Ends,
    axis: int | None,
    goal: Callable[[float], float],
    seconds: float,
    outside: Callable[[Ends], bool] = lambda part: False,
) -> arb:
    """A bound of `sup |∂_i f|` over a box, of `sup |∇f|₂` if no axis is named, but for boxes that are `outside`.

    `goal` says from a slope that is attained which bound will do; it is met if time allows.
    """
    attained, axes = 0.0, range(len(ends)) if axis is None else [axis]

    def slope(box: list[arb]) -> arb:
        squares = [arb(0)] * len(graph.outputs)
        for i in axes:
            given = [arb_series([b, 1], 2) if k == i else b for k, b in enumerate(box)]
            slopes = [v[1] if isinstance(v, arb_series) else v * 0 for v in graph.evaluate(given)]
            squares = [s + g.abs_upper() * g.abs_upper() for s, g in zip(squares, slopes)]
        return max(squares, key=up).sqrt()

    def measure(part: Ends, _: object) -> Measured:
        nonlocal attained
        if outside(part):
            return Measured(0.0, 0)
        box, middle, _ = balls(part)
        attained = max(attained, -up(-slope(middle).lower()))
        thin = [up(slope([*box[:i], middle[i], *box[i + 1 :]])) if len(box) > 1 else 0.0 for i in range(len(box))]
        sides = [(a - b) / (d - c) for (a, b), (c, d) in zip(part, ends)]
        return Measured(up(slope(box)), min(range(len(box)), key=lambda i: (thin[i], sides[i])))

    return arb(search(measure, [ends], lambda: goal(attained), time.monotonic() + seconds)[0])


def window_mass(gaps: Sequence[Gaps]) -> arb:
    return sum((g.beyond_window() for g in gaps), arb(0))


def score_error(gaps: Sequence[Gaps], semantics: str) -> arb:
    """δ: how far the logarithm of an unnormalised weight of a grid may be off.

    x − c, its square and the product with R/2 leave a relative error of 4u in a score, an exponential in base 2 one of 2u
    (log₂e and the product with it), subtracting the smallest another u of the difference (its own error is common to all
    weights), exp 16u: `1.01u(7s + 16)` per axis, s the largest in the window.
    """
    scores = [g.rate * g.window * g.window / 2 for g in gaps]
    if not all(s < LARGEST[semantics] for s in scores):
        return INF
    rounded = (1.01 * UNIT[semantics] * (7 * s + 16) + _underflow(g, semantics) for g, s in zip(gaps, scores))
    return sum(rounded, arb(0))


def _underflow(g: Gaps, semantics: str) -> arb:
    """What the two products of a score `((R/2)(x − c))(x − c)` lose; R/2 is exact, and differences do not underflow."""
    return TINIEST[semantics] * (2 + g.window)


def lost_in_score(rate: arb, m: int, semantics: str) -> arb:
    """The same for `(R/2)(p − Σ_i (z_i − c_i)²)` of a scattered cell."""
    return TINIEST[semantics] * (2 + m * rate)


def mixing(gaps: Sequence[Gaps], semantics: str) -> arb:
    """The share of the spread of the values by which rounded scores may move the output of a grid, whatever the values are.

    Weights change by factors 1 + ε_j, so the output by at most `η/(1 − η)` of the spread, `η = Σ w_j|ε_j|`. The mean score
    `Σ w s` of an axis is at most `min s + W((P − 1)/e)` (a soft minimum), and `min s ≤ R ρ²/2`. For large errors δ/2 of all.
    """
    worst, eta = score_error(gaps, semantics), arb(0)
    if not worst < 0.01:
        return worst / 2
    for g in gaps:
        eta += 1.01 * UNIT[semantics] * (7 * (g.rate * g.radius * g.radius / 2 + lambert(g.count)) + 16)
        eta += _underflow(g, semantics)
    return min(1.01 * eta / (1 - 1.01 * eta), worst / 2, key=up)


def sums(head: Head, ends: Ends, gaps: Sequence[Gaps], semantics: str, largest: arb) -> arb:
    """`γ_K max|V|`: every axis sums its exponentials, divides, multiplies and sums, in any order; slopes one sum more.

    A term passes through at most `2·width + 4` roundings per axis. Exponentials may be lost, products may underflow, and what is
    lost of a mean slope is multiplied by z − o.
    """
    m, tilt = len(gaps), arb(0)
    if head.slopes is not None and head.origin is not None:
        tilt = sum((abs(arb(end) - arb(o)) for pair, o in zip(ends, head.origin) for end in pair), arb(0))
    count = sum(2 * g.width + 4 for g in gaps) + 4 + (m + 4 if head.slopes is not None else 0)
    terms = 4 * (head.keys + sum(map(len, head.axes)) + m)
    lost = terms * (SMALLEST[semantics] * (m + 1) * largest + TINIEST[semantics] * (1 + tilt))
    rounded: arb = 1.01 * count * UNIT[semantics] * largest
    return rounded + lost
