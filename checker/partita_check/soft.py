"""Product grids at any temperature and with any values: on small boxes f and the head are both nearly polynomials.

On one axis `w_p(x) = G_p/Σ G`, `G_p = exp(−R(x − c_p)²/2)`; with `x = x₀ + r t` and a common factor dropped, G_p is the
exponential of a linear function of t, also for complex t. Interpolation at Chebyshev points makes f − net a polynomial and a rest.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from functools import cached_property

from flint import acb, arb, arb_mat, arb_series

from partita_check.clock import clock
from partita_check.graph import Choices, Graph
from partita_check.polynomials import (
    INF,
    Basis,
    Ends,
    balls,
    best_rest,
    enclose,
    norm,
    pieces_above,
    spread,
    transform,
    up,
)
from partita_check.reading import Head
from partita_check.search import Measured

__all__ = ["SoftGrid"]

DEGREES = {1: 16, 2: 12, 3: 11, 4: 9, 5: 5, 6: 4}
FINE = {1: (3, 3), 2: (4, 4)}  # rectangles in an ellipse for the weights of an axis; more where boxes share them
NEAR_A_KINK = 3  # degree on boxes that f crosses a kink in: they get small
MOST_BRANCHES, MOST_PIECES, COLUMNS, ROWS = 8, 400, 3, 3
FORGOTTEN = -55.0  # exponents: centers that trail by more on an interval are left out, and counted


class AxisPart:
    """The weights of one axis on one interval: as polynomials, their rest, and the mass of centers that were left out."""

    def __init__(self, grid: SoftGrid, axis: int, ends: tuple[float, float], n: int) -> None:
        centers, rate, basis = grid.axes[axis], grid.rates[axis], Basis.of(n)
        (x,), (middle,), (radius,) = balls((ends,))
        self.first = min(bisect_left(grid.head.axes[axis], ends[0] / 2 + ends[1] / 2), len(centers) - 1)
        self.end, best = self.first + 1, centers[self.first]

        def trails(k: int) -> bool:
            """Also true of all centers beyond k, on the same side of the best one."""
            return bool((rate * (centers[k] - best) * (x - (centers[k] + best) / 2)).upper() < FORGOTTEN)

        while self.first > 0 and not trails(self.first - 1):
            self.first -= 1
        while self.end < len(centers) and not trails(self.end):
            self.end += 1
        self.forgotten = (len(centers) - (self.end - self.first)) * arb(FORGOTTEN).exp()
        near, tall = centers[self.first : self.end], grid.tallest[axis][self.first : self.end]
        tilt, origin = grid.steepest[axis][self.first : self.end], grid.origin[axis]
        # exponents less a common line: that of a center at the middle, or, far from all centers, of the nearest one
        inside = bool(centers[0] <= middle) and bool(middle <= centers[-1])
        at = middle if inside else best
        lines = [(rate * (c - at) * (middle - (c + at) / 2), rate * (c - at) * radius) for c in near]

        def row(t: arb) -> list[arb]:
            return [(a + b * t).exp() for a, b in lines]

        def complex_row(t: acb) -> list[acb]:
            clock.tick()
            return [(a + b * t).exp() for a, b in lines]

        def size_on(t: acb) -> arb:
            g, away = complex_row(t), (middle - origin + radius * t).abs_upper()
            total = sum(g[1:], g[0]).abs_lower()
            sizes = (v + away * slope for v, slope in zip(tall, tilt)) if grid.slopes else iter(tall)
            return sum((x.abs_upper() * v for x, v in zip(g, sizes)), arb(0)) / total if total > 0 else INF

        rows = [(g, sum(g, arb(0))) for g in map(row, basis.nodes)]
        table = arb_mat([[x / total for x in g] for g, total in rows])
        self.weights = self.tilted = basis.to_bernstein * table
        if grid.slopes:  # times z − o
            away = [middle - origin + radius * t for t in basis.nodes]
            self.tilted = basis.to_bernstein * arb_mat(
                [[table[i, j] * x for j in range(table.ncols())] for i, x in enumerate(away)]
            )
        self.rest = best_rest(size_on, n, *FINE.get(len(grid.counts), (8, 6)))


class SoftGrid:
    """`measure` bounds |f − net| on a box; `slack` is what remainders may take; `exact`: bounds below the target matter too.

    `reach`: how far z may be from the origin of affine values, per axis. Along its own axis a slope is multiplied with z − o
    before the product is interpolated, so that the head is one function of every coordinate, as it is for constant values.
    """

    def __init__(
        self, head: Head, graph: Graph, ends: Ends, target: float, slack: float, exact: bool, reach: list[arb]
    ) -> None:
        self.head, self.target, self.slack = head, 0.0 if exact else target, arb(slack)
        self.axes, self.rates = [[arb(c) for c in axis] for axis in head.axes], [arb(r) for r in head.rates]
        self.counts, self.most = [len(a) for a in head.axes], 0 if exact else MOST_PIECES
        self.parts: dict[tuple[int, tuple[float, float], int], AxisPart] = {}
        self.components = [graph.component(o) for o in range(len(graph.outputs))]
        self.gaps = [(a[-1] - a[0]) / (len(a) - 1) if len(a) > 1 else y - x for a, (x, y) in zip(head.axes, ends)]
        self.spread = max((arb(max(v)) - arb(min(v)) for v in head.values), key=up)
        self.middles = [min(v) / 2 + max(v) / 2 for v in head.values]  # weights sum to 1: the rest carries no middle
        self.centred = [[arb(x) - mid for x in v] for v, mid in zip(head.values, self.middles)]
        m, out = len(head.axes), len(head.values)
        self.slopes: list[list[list[arb]]] = []  # output, axis, cell
        self.origin, self.reach = [arb(0)] * m, reach
        if head.slopes is not None and head.origin is not None:
            self.origin, flat = [arb(x) for x in head.origin], head.slopes
            self.slopes = [[[arb(x) for x in flat[o * m + i :: out * m]] for i in range(m)] for o in range(out)]
            every = [x for rows in self.tables(-1) for x in rows]
            self.spread = 2 * max(every, key=up)

    def tables(self, own: int) -> list[list[arb]]:
        """Per output and cell, `|V|` and what the slopes along all axes but one may add, `(out, cells)`."""
        found = []
        for output, v in enumerate(self.centred):
            sizes = [abs(x) for x in v]
            for i, rows in enumerate(self.slopes[output] if self.slopes else []):
                clock.tick()
                sizes = [a + abs(x) * self.reach[i] for a, x in zip(sizes, rows)] if i != own else sizes
            found.append(sizes)
        return found

    @cached_property
    def tallest(self) -> list[list[arb]]:
        """Per axis and center the largest centred |V|, slopes along other axes included, over the cells and outputs there."""
        return [self._largest(axis, self.tables(axis)) for axis in range(len(self.counts))]

    @cached_property
    def steepest(self) -> list[list[arb]]:
        """Per axis and center the largest slope along that axis; zeros for constant values."""
        if not self.slopes:
            return [[arb(0)] * count for count in self.counts]
        return [self._largest(axis, [rows[axis] for rows in self.slopes]) for axis in range(len(self.counts))]

    def _largest(self, axis: int, tables: list[list[arb]]) -> list[arb]:
        inner, count, found = math.prod(self.counts[axis + 1 :]), self.counts[axis], [0.0] * self.counts[axis]
        for table in tables:
            for cell, x in enumerate(table):
                if cell % 1024 == 0:
                    clock.tick()
                k = cell // inner % count
                found[k] = max(found[k], up(abs(x)))
        return [arb(x) for x in found]

    def measure(self, ends: Ends, _: object) -> Measured:
        worst = Measured(0.0, self.longest(ends))
        for output, (graph, support) in enumerate(self.components):
            found = self._one(output, graph, support, ends)
            worst = found if found.bound > worst.bound else worst
        return worst

    def longest(self, ends: Ends) -> int:
        """The axis along which the box is longest, in gaps between centers."""
        return max(range(len(ends)), key=lambda i: (ends[i][1] - ends[i][0]) / self.gaps[i])

    def _one(self, output: int, graph: Graph, support: tuple[int, ...], ends: Ends) -> Measured:
        m, own = len(ends), tuple(ends[i] for i in support)
        branches, degree = graph.branches(balls(own)[0], MOST_BRANCHES), DEGREES.get(m, 3)
        n = degree if branches is not None and len(branches) == 1 else min(NEAR_A_KINK, degree)
        basis, parts = Basis.of(n), [self._part(i, interval, n) for i, interval in enumerate(ends)]
        by_axis = [p.rest * math.prod([basis.lebesgue] * i, start=arb(1)) for i, p in enumerate(parts)]
        rest_net = sum(by_axis, arb(0)) + sum((p.forgotten for p in parts), arb(0)) * self.spread
        if not rest_net < self.slack and branches is not None:
            return Measured(math.inf, max(range(m), key=lambda i: up(by_axis[i])))
        worst, net = Measured(0.0, self.longest(ends)), self._net(output, parts)
        ways: list[Choices | None] = [*branches] if branches else [None]  # None: too many branches
        for choices in ways:
            table, rests = enclose(graph, own, n, choices, COLUMNS, ROWS) if choices is not None else ([], [INF])
            if (
                m == len(own) == 1 and not sum(rests, arb(0)) < self.slack
            ):  # wide intervals on which f is almost straight
                line = _tangent(graph, own, n)
                table, rests = line if line[1][0] < self.slack else (table, rests)
            if not sum(rests, arb(0)) < self.slack:  # f between two numbers: where it is not analytic, or too wide
                value = graph.evaluate(balls(own)[0])[0]
                flat = norm([x - value for x in net]) + rest_net
                poor = max(range(len(rests)), key=lambda i: up(rests[i]))
                known = choices is not None and up(rests[poor]) < math.inf
                return Measured(up(flat), support[poor] if known else worst.axis)
            difference = [a - b for a, b in zip(spread(table, support, n + 1, m), net)]
            rest = sum(rests, rest_net)
            for size, part, path in pieces_above(difference, basis, m, (arb(self.target) - rest).lower(), self.most):
                if up(size + rest) > worst.bound:
                    worst = Measured(up(size + rest), worst.axis, _corner(part, n, path, ends))
        return worst if worst.bound else Measured(self.target, worst.axis)

    def _part(self, axis: int, interval: tuple[float, float], n: int) -> AxisPart:
        key = (axis, interval, n)
        if key not in self.parts:
            self.parts[key] = AxisPart(self, *key)
        return self.parts[key]

    def _net(self, output: int, parts: list[AxisPart]) -> list[arb]:
        """Bernstein coefficients of the head on the box."""
        plain = [p.weights for p in parts]
        net = transform(self._near(self.centred[output], parts), plain)
        for axis, slopes in enumerate(self.slopes[output] if self.slopes else []):
            weights = [*plain[:axis], parts[axis].tilted, *plain[axis + 1 :]]
            net = [a + b for a, b in zip(net, transform(self._near(slopes, parts), weights))]
        return [x + self.middles[output] for x in net]

    def _near(self, flat: list[arb], parts: list[AxisPart]) -> list[arb]:
        """The cells of the windows only."""
        for axis, part in enumerate(parts):
            inner = math.prod(self.counts[axis + 1 :])
            block, a, b = self.counts[axis] * inner, part.first * inner, part.end * inner
            if part.end - part.first < self.counts[axis]:
                flat = [x for k in range(0, len(flat), block) for x in flat[k + a : k + b]]
        return flat


def _tangent(graph: Graph, ends: Ends, n: int) -> tuple[list[arb], list[arb]]:
    """f of one variable as a line in Bernstein form, `f(m) + s(x − m)`, and a rest, from its slopes over the interval."""
    (box,), (middle,), (radius,) = balls(ends)
    found = graph.evaluate([arb_series([box, 1], 2)])[0]
    slope = found[1] if isinstance(found, arb_series) else arb(0)
    if not slope.is_finite():
        return [], [INF]
    value = graph.evaluate([middle])[0]
    return [value + slope.mid() * radius * (2 * arb(k) / n - 1) for k in range(n + 1)], [radius * slope.rad()]


def _corner(part: list[arb], n: int, path: list[int], ends: Ends) -> tuple[float, ...]:
    """The corner of a part at which the polynomial is largest; every halving put one axis behind the others."""
    m, pairs = len(ends), [list(pair) for pair in ends]
    for step, side in enumerate(path):
        pairs[step % m][1 - side] = sum(pairs[step % m]) / 2
    best, where = -1.0, tuple(a for a, _ in ends)
    for corner in range(2**m):
        sides = [(corner >> (m - 1 - i)) & 1 for i in range(m)]
        places = (s * n * (n + 1) ** ((len(path) - 1 - i) % m) for i, s in enumerate(sides))
        size = abs(float(part[sum(places)].mid()))
        if size > best:
            best, where = size, tuple(pairs[i][s] for i, s in enumerate(sides))
    return where
