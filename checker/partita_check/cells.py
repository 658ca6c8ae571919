"""Heads seen as mixtures: |f − net| ≤ Σ w_j |f − V_j| on small boxes, for scattered centers and for grids whose cells hold slopes.

Score differences are affine in z, so on a box `w_j ≤ 1/(1 + Σ_k exp(min(s_k − s_j)))`, and the worst mixture of the errors
|f − V_j| fills the worst cells first. What rounding does to weights and values is part of every bound.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product

from flint import arb

from partita_check.graph import Graph
from partita_check.polynomials import enclose, interval, norm, spread, up
from partita_check.reading import Head
from partita_check.rounding import SMALLEST, UNIT
from partita_check.search import Measured

__all__ = ["Cells"]

DEGREES = {1: 4, 2: 3, 3: 2}
MOST_BRANCHES, RIVALS, MOST_NEAR = 8, 8, 64
Point = tuple[float, ...]
Near = tuple[list[int], arb]


class Cells:
    """`measure` bounds the error on a box for the head as it is run; `score_error` is δ of a grid, None for scattered centers."""

    def __init__(
        self, head: Head, graph: Graph, lo: Point, hi: Point, *, semantics: str, score_error: arb | None
    ) -> None:
        self.head, self.m, self.outputs = head, len(lo), len(head.values)
        self.unit, self.tiny, self.score_error = UNIT[semantics], SMALLEST[semantics], score_error
        listed = product(*head.axes) if head.axes else iter(head.centers)
        self.centers = [[arb(x) for x in c] for c in listed]
        self.rates = [arb(r) for r in head.rates]
        self.powers = [arb(p) * self.rates[0] / 2 for p in head.powers] if head.powers is not None else None
        self.components = [graph.component(o) for o in range(self.outputs)]
        self.cut = math.log(len(self.centers)) + 60
        self.degree = DEGREES.get(self.m, 1)
        self.corners = list(product(range(self.degree + 1), repeat=self.m))
        self.sides = [b - a for a, b in zip(lo, hi)]
        box = [interval(a, b) for a, b in zip(lo, hi)]
        self.largest = arb(
            max(up(self.value(j, o, box).abs_upper()) for j in range(len(self.centers)) for o in range(self.outputs))
        )
        self.exponent = arb(max(up(self._exponent(j, box)) for j in range(len(self.centers))))

    def value(self, j: int, output: int, at: Sequence[arb]) -> arb:
        """V_j(z) of one output."""
        found = arb(self.head.values[output][j])
        if self.head.slopes is not None:
            about = [arb(x) for x in self.head.origin] if self.head.origin is not None else self.centers[j]
            start = (j * self.outputs + output) * self.m
            found += sum((arb(self.head.slopes[start + i]) * (at[i] - about[i]) for i in range(self.m)), arb(0))
        return found

    def score(self, j: int, at: Sequence[arb]) -> arb:
        found = -sum((r * (x - c) * (x - c) for r, x, c in zip(self.rates, at, self.centers[j])), arb(0)) / 2
        return found + self.powers[j] if self.powers is not None else found

    def _exponent(self, j: int, box: Sequence[arb]) -> arb:
        """`R|z − c|²/2 + R|p|/2`, which rounding errors of scores are proportional to."""
        size = (
            sum(
                (r * (x - c).abs_upper() * (x - c).abs_upper() for r, x, c in zip(self.rates, box, self.centers[j])),
                arb(0),
            )
            / 2
        )
        return size + abs(self.powers[j]) if self.powers is not None else size

    def delta(self, exponent: arb) -> arb:
        """How far a rounded score may be off: (m + 2)u for the squared distance, 4u for power, R and maximum, 16u for exp."""
        if self.score_error is not None:
            return self.score_error
        return 1.01 * self.unit * ((self.m + 6) * exponent + 17) + 4 * self.rates[0] * self.tiny * self.m

    def measure(self, lo: Point, hi: Point, state: Near | None) -> Measured:
        labels, mass = state if state is not None else (list(range(len(self.centers))), arb(0))
        middle = [(arb(a) + arb(b)) / 2 for a, b in zip(lo, hi)]
        radius = [(arb(b) - arb(a)) / 2 for a, b in zip(lo, hi)]
        scores = {j: self.score(j, middle) for j in labels}
        order = sorted(labels, key=lambda j: -float(scores[j].mid()))
        best, near, ahead = order[0], [], {}
        for j in order:
            ahead[j] = scores[j] - scores[best] + self._swing(j, best, radius)
            if ahead[j].upper() < -self.cut:
                mass += ahead[j].upper().exp()
            else:
                near.append(j)
        axis = max(range(self.m), key=lambda i: (hi[i] - lo[i]) / self.sides[i])
        if len(near) > MOST_NEAR and len(near) > len(labels) / 2:
            return Measured(math.inf, self._axis(near, best, radius, axis), None, (near, mass))
        weights = {j: self._weight(j, near[:RIVALS], scores, radius) for j in near}
        box = [interval(a, b) for a, b in zip(lo, hi)]
        delta, far = self.delta(max((self._exponent(j, box) for j in near), key=up)), self.delta(self.exponent)
        worst, split = 0.0, axis
        for output, (graph, support) in enumerate(self.components):
            found = self._bound(output, graph, support, lo, hi, box, near, weights, mass * (2 * far).exp(), delta)
            if found > worst:
                worst = found
        if len(near) > 1:
            split = self._axis(near, best, radius, axis)
        suspect = tuple(float(x.mid()) for x in middle)
        return Measured(worst, split, suspect, (near, mass))

    def _swing(self, j: int, k: int, radius: Sequence[arb]) -> arb:
        """How far s_j − s_k may be from its value at the middle."""
        a, b = self.centers[j], self.centers[k]
        return sum((r * abs(x - y) * h for r, x, y, h in zip(self.rates, a, b, radius)), arb(0))

    def _axis(self, near: list[int], best: int, radius: Sequence[arb], otherwise: int) -> int:
        """The axis along which the scores of near cells part most."""
        moves = [
            max(float((r * abs(self.centers[j][i] - self.centers[best][i]) * h).mid()) for j in near)
            for i, (r, h) in enumerate(zip(self.rates, radius))
        ]
        widest = max(range(self.m), key=lambda i: moves[i])
        return widest if moves[widest] > 0.2 else otherwise

    def _weight(self, j: int, rivals: list[int], scores: dict[int, arb], radius: Sequence[arb]) -> arb:
        total = arb(1)
        for k in rivals:
            if k != j:
                total += (scores[k] - scores[j] - self._swing(j, k, radius)).lower().exp()
        return (1 / total).upper()

    def _bound(
        self,
        output: int,
        graph: Graph,
        support: tuple[int, ...],
        lo: Point,
        hi: Point,
        box: list[arb],
        near: list[int],
        weights: dict[int, arb],
        mass: arb,
        delta: arb,
    ) -> float:
        """The worst mixture of one output on the box, rounded as the head is run."""
        errors = {j: arb(0) for j in near}
        size = arb(0)
        for table, rest in self._tables(graph, support, lo, hi):
            size = max(size, norm(table) + rest, key=up)
            for j in near:
                found = norm([b - v for b, v in zip(table, self._corner_values(j, output, lo, hi))]) + rest
                errors[j] = max(errors[j], found, key=up)
        if not size.is_finite():
            return math.inf
        slack = 1.01 * (self.m + 3) * self.unit
        errors = {j: e + slack * self._tall(j, output, box) + self.m * self.tiny for j, e in errors.items()}
        left, mixed = arb(1), arb(0)
        for j in sorted(near, key=lambda j: -up(errors[j])):
            share = weights[j] if weights[j] < left else left
            mixed, left = mixed + share * errors[j], (left - share).upper()
            if not left > 0:
                break
        mixed = mixed.upper() * (2 * delta).exp() / (1 - mass) if mass < 0.5 else arb("inf")
        operations = 2 * len(near) + self.m + 16
        sums = 1.01 * operations * self.unit * (size + mixed) + 4 * len(self.centers) * self.tiny * (1 + self.largest)
        return up(mixed + mass * (size + 5 * self.largest) + sums)

    def _tall(self, j: int, output: int, box: list[arb]) -> arb:
        """|V_j| + |J_j||z − c_j|: what rounding the value is proportional to."""
        found = abs(arb(self.head.values[output][j]))
        if self.head.slopes is not None:
            about = [arb(x) for x in self.head.origin] if self.head.origin is not None else self.centers[j]
            start = (j * self.outputs + output) * self.m
            found += sum(
                (abs(arb(self.head.slopes[start + i])) * (box[i] - about[i]).abs_upper() for i in range(self.m)), arb(0)
            )
        return found

    def _corner_values(self, j: int, output: int, lo: Point, hi: Point) -> list[arb]:
        """Bernstein coefficients of the affine V_j: its values on a lattice."""
        n = self.degree
        start = self.value(j, output, [arb(a) for a in lo])
        steps = []
        for i in range(self.m):
            slope = (
                arb(self.head.slopes[(j * self.outputs + output) * self.m + i])
                if self.head.slopes is not None
                else arb(0)
            )
            steps.append(slope * (arb(hi[i]) - arb(lo[i])) / n)
        return [start + sum((k * s for k, s in zip(place, steps)), arb(0)) for place in self.corners]

    def _tables(self, graph: Graph, support: tuple[int, ...], lo: Point, hi: Point) -> list[tuple[list[arb], arb]]:
        """f on the box: Bernstein coefficients with a remainder, one set per branch; a constant where f is not analytic."""
        low, high = tuple(lo[i] for i in support), tuple(hi[i] for i in support)
        box, n, found = [interval(a, b) for a, b in zip(low, high)], self.degree, []
        flat = graph.evaluate(box)[0]
        constant = ([flat.mid()] * len(self.corners), flat.rad())
        for choices in graph.branches(box, MOST_BRANCHES) or []:
            table, rests = enclose(graph, low, high, n, choices, 0)
            rest = sum(rests, arb(0))
            if flat.is_finite() and not rest < flat.rad():
                return [constant]
            found.append((spread(table, support, n + 1, self.m), rest))
        return found or [constant]
