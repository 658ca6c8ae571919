"""Product grids at any temperature and with any values: on small boxes f and the head are both nearly polynomials.

On one axis `w_p(x) = G_p/Σ G`, `G_p = exp(−R(x − c_p)²/2)`; with `x = x₀ + r t` and a common factor dropped, G_p is the
exponential of a linear function of t, also for complex t. Interpolation at Chebyshev points turns f − net into a polynomial with a bounded rest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

from flint import arb, arb_mat

from partita_check.graph import Graph
from partita_check.polynomials import (
    RADII,
    Basis,
    ellipse,
    enclose,
    interval,
    left_out,
    norm,
    pieces_above,
    spread,
    transform,
    up,
)
from partita_check.reading import Head
from partita_check.search import Measured

__all__ = ["SoftGrid"]

DEGREES = {1: 16, 2: 12, 3: 9, 4: 7, 5: 5, 6: 4}
NEAR_A_KINK = 3  # degree on boxes that f crosses a kink in: they get small
MOST_BRANCHES, MOST_PIECES, ARCS = 8, 400, 8
FORGOTTEN = -55.0  # exponents: centers that trail by more on an interval are left out, and counted


class AxisPart:
    """The weights of one axis on one interval: as polynomials, on ellipses, and the mass of centers that were left out."""

    def __init__(self, grid: SoftGrid, axis: int, lo: float, hi: float, n: int) -> None:
        centers, rate = grid.axes[axis], grid.rates[axis]
        middle, radius = (arb(lo) + arb(hi)) / 2, (arb(hi) - arb(lo)) / 2
        x = interval(lo, hi)
        nearest = min(centers, key=lambda c: abs(float(c) - lo / 2 - hi / 2))
        trail = [-rate * (c - nearest) * ((c + nearest) / 2 - x) for c in centers]
        kept = [k for k, s in enumerate(trail) if not s.upper() < FORGOTTEN]
        self.first, self.end = kept[0], kept[-1] + 1
        self.forgotten = sum((s.upper().exp() for s in (*trail[: self.first], *trail[self.end :])), arb(0))
        near = centers[self.first : self.end]
        start, steps = (
            [-rate * (middle - c) * (middle - c) / 2 for c in near],
            [rate * (c - middle) * radius for c in near],
        )
        rows = []
        for t in Basis.of(n).nodes:
            row = [(a + b * t).exp() for a, b in zip(start, steps)]
            total = sum(row, arb(0))
            rows.append([g / total for g in row])
        self.weights = Basis.of(n).to_bernstein * arb_mat(rows)
        tall = grid.tallest[axis][self.first : self.end]
        self.rest = arb("inf")
        for rho in RADII:
            size = arb(0)
            for t in ellipse(rho, ARCS):
                row = [(a + b * t).exp() for a, b in zip(start, steps)]
                total = sum(row[1:], row[0]).abs_lower()
                mean = sum((g.abs_upper() * v for g, v in zip(row, tall)), arb(0)) / total if total > 0 else arb("inf")
                size = mean if not mean <= size else size
            found = left_out(size, rho, n)
            if not found < self.rest and self.rest.is_finite():
                break
            self.rest = found if found < self.rest else self.rest


class SoftGrid:
    """`measure` bounds |f − net| on a box; `slack` is what remainders may take; `exact`: bounds below the target matter too."""

    def __init__(
        self, head: Head, graph: Graph, sides: Sequence[float], *, target: float, slack: float, exact: bool = False
    ) -> None:
        self.head, self.target, self.slack = head, 0.0 if exact else target, arb(slack)
        self.axes = [[arb(c) for c in axis] for axis in head.axes]
        self.rates = [arb(r) for r in head.rates]
        self.counts = [len(a) for a in head.axes]
        self.parts: dict[tuple[int, float, float, int], AxisPart] = {}
        self.components = [graph.component(o) for o in range(len(graph.outputs))]
        self.most = 0 if exact else MOST_PIECES
        self.gaps = [(a[-1] - a[0]) / (len(a) - 1) if len(a) > 1 else side for a, side in zip(head.axes, sides)]

    @cached_property
    def centred(self) -> list[tuple[arb, list[arb]]]:
        """Per output: the middle of the values, and the values less it."""
        middles = [arb(min(v) / 2 + max(v) / 2) for v in self.head.values]
        return [(mid, [arb(x) - mid for x in v]) for mid, v in zip(middles, self.head.values)]

    @cached_property
    def tallest(self) -> list[list[arb]]:
        """Per axis and center the largest centred |V| over the cells and outputs there."""
        found = [[0.0] * count for count in self.counts]
        for v in self.head.values:
            mid = min(v) / 2 + max(v) / 2
            for cell, x in enumerate(v):
                size = abs(x - mid)
                for axis in range(len(self.counts) - 1, -1, -1):
                    cell, k = divmod(cell, self.counts[axis])
                    found[axis][k] = max(found[axis][k], size)
        return [[arb(x) * (1 + arb(2) ** -50) + arb(2) ** -1000 for x in row] for row in found]

    @cached_property
    def spread(self) -> arb:
        return max((arb(max(v)) - arb(min(v)) for v in self.head.values), key=up)

    def part(self, axis: int, lo: float, hi: float, n: int) -> AxisPart:
        key = (axis, lo, hi, n)
        if key not in self.parts:
            self.parts[key] = AxisPart(self, axis, lo, hi, n)
        return self.parts[key]

    def measure(self, lo: tuple[float, ...], hi: tuple[float, ...], _: object = None) -> Measured:
        worst = Measured(0.0, self._longest(lo, hi))
        for output, (graph, support) in enumerate(self.components):
            found = self._one(output, graph, support, lo, hi)
            worst = found if found.bound > worst.bound else worst
        return worst

    def _longest(self, lo: tuple[float, ...], hi: tuple[float, ...]) -> int:
        """The axis along which the box is longest, in gaps between centers."""
        return max(range(len(lo)), key=lambda i: (hi[i] - lo[i]) / self.gaps[i])

    def _one(
        self, output: int, graph: Graph, support: tuple[int, ...], lo: tuple[float, ...], hi: tuple[float, ...]
    ) -> Measured:
        m, (low, high) = len(lo), [tuple(ends[i] for i in support) for ends in (lo, hi)]
        branches = graph.branches([interval(a, b) for a, b in zip(low, high)], MOST_BRANCHES)
        if branches is None:
            return self._flat(output, graph, support, lo, hi)
        n = DEGREES.get(m, 3) if len(branches) == 1 else min(NEAR_A_KINK, DEGREES.get(m, 3))
        basis, parts = Basis.of(n), [self.part(i, a, b, n) for i, (a, b) in enumerate(zip(lo, hi))]
        by_axis, rest_net = self._rests(parts, basis)
        if not rest_net < self.slack:
            return Measured(math.inf, max(range(m), key=lambda i: up(by_axis[i])))
        net = self._net(output, parts)
        worst = Measured(0.0, self._longest(lo, hi))
        for choices in branches:
            table, rests = enclose(graph, low, high, n, choices, ARCS)
            if not sum(rests, arb(0)) < self.slack:
                flat = self._flat(output, graph, support, lo, hi)
                poor = max(range(len(support)), key=lambda i: up(rests[i]))
                return Measured(flat.bound, support[poor] if up(rests[poor]) < math.inf else flat.axis)
            difference = [a - b for a, b in zip(spread(table, support, n + 1, m), net)]
            bound, where = self._above(difference, sum(rests, rest_net), basis, lo, hi)
            if bound > worst.bound:
                worst = Measured(bound, worst.axis, where)
        return worst

    def _rests(self, parts: list[AxisPart], basis: Basis) -> tuple[list[arb], arb]:
        """What interpolating the head leaves, axis by axis, and in all, with the centers that were left out."""
        by_axis = [p.rest * math.prod([basis.lebesgue] * i, start=arb(1)) for i, p in enumerate(parts)]
        return by_axis, sum(by_axis, arb(0)) + sum((p.forgotten for p in parts), arb(0)) * self.spread

    def _above(
        self, b: list[arb], rest: arb, basis: Basis, lo: tuple[float, ...], hi: tuple[float, ...]
    ) -> tuple[float, tuple[float, ...] | None]:
        """A bound of |p| + rest on the box, and a corner of the worst part if the target is missed."""
        goal = arb(self.target) - rest
        worst, where = 0.0, None
        for size, part, path in pieces_above(b, basis, len(lo), goal.lower(), self.most):
            if up(size + rest) > worst:
                worst, where = up(size + rest), _corner(part, basis.n, path, lo, hi)
        return (worst, where) if where is not None else (self.target, None)

    def _net(self, output: int, parts: list[AxisPart]) -> list[arb]:
        """Bernstein coefficients of the head on the box; their sums over a partition of unity carry the middle."""
        middle, flat = self.centred[output]
        for axis, part in enumerate(parts):  # the cells of the windows only
            inner = math.prod(self.counts[axis + 1 :])
            block, a, b = self.counts[axis] * inner, part.first * inner, part.end * inner
            if part.end - part.first < self.counts[axis]:
                flat = [x for k in range(0, len(flat), block) for x in flat[k + a : k + b]]
        return [x + middle for x in transform(flat, [p.weights for p in parts])]

    def _flat(
        self, output: int, graph: Graph, support: tuple[int, ...], lo: tuple[float, ...], hi: tuple[float, ...]
    ) -> Measured:
        """f between two numbers, for boxes where it is not analytic (the end of a square root), and the head as above."""
        n, split = min(NEAR_A_KINK, DEGREES.get(len(lo), 3)), self._longest(lo, hi)
        basis, parts = Basis.of(n), [self.part(i, a, b, n) for i, (a, b) in enumerate(zip(lo, hi))]
        value, (_, rest) = graph.evaluate([interval(lo[i], hi[i]) for i in support])[0], self._rests(parts, basis)
        if not rest.is_finite() or not value.is_finite():
            return Measured(math.inf, split)
        return Measured(up(norm([x - value for x in self._net(output, parts)]) + rest), split)


def _corner(
    part: list[arb], n: int, path: list[int], lo: tuple[float, ...], hi: tuple[float, ...]
) -> tuple[float, ...]:
    """The corner of a part at which the polynomial is largest."""
    m = len(lo)
    ends = [[a, b] for a, b in zip(lo, hi)]
    for step, side in enumerate(path):
        middle = ends[step % m][0] / 2 + ends[step % m][1] / 2
        ends[step % m][1 - side] = middle
    best, where = -1.0, tuple(lo)
    for corner in range(2**m):
        sides = [(corner >> (m - 1 - i)) & 1 for i in range(m)]
        place = 0
        for side in sides:
            place = place * (n + 1) + side * n
        if abs(float(part[place].mid())) > best:
            best, where = abs(float(part[place].mid())), tuple(ends[i][s] for i, s in enumerate(sides))
    return where
