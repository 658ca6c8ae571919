"""Heads seen as mixtures: |f − net| ≤ Σ w_j |f − V_j| on small boxes, for scattered centers and for grids whose cells hold slopes.

Score differences are affine in z, so on a box `w_j ≤ 1/(1 + Σ_k exp(min(s_k − s_j)))`, and the worst mixture of the errors
|f − V_j| fills the worst cells first. What rounding does to weights and values is part of every bound.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from operator import mul, sub

from flint import arb, arb_mat

from partita_check.bounds import SMALLEST, TINIEST, UNIT, lost_in_score
from partita_check.clock import clock
from partita_check.graph import Graph
from partita_check.polynomials import INF, Ends, balls, enclose, norm, spread, up
from partita_check.reading import Head
from partita_check.search import Measured

__all__ = ["Cells"]

DEGREES = {1: 4, 2: 3, 3: 2}
MOST_BRANCHES, RIVALS, MOST_NEAR = 8, 8, 64


class Cells:
    """`measure` bounds the error on a box for the head as it is run in this arithmetic.

    `score_error` is δ of a grid, None for scattered centers, whose scores are bounded box by box.
    """

    def __init__(self, head: Head, graph: Graph | None, ends: Ends, semantics: str, score_error: arb | None) -> None:
        self.head, self.m, self.outputs, self.ends = head, len(ends), len(head.values), ends
        self.semantics, self.unit, self.score_error = semantics, UNIT[semantics], score_error
        self.centers = [[arb(x) for x in c] for c in (product(*head.axes) if head.axes else head.centers)]
        self.rates = [arb(r) for r in head.rates]
        self.components = [graph.component(o) for o in range(self.outputs)] if graph is not None else []
        self.cut, self.degree = math.log(head.keys) + 60, DEGREES.get(self.m, 1)
        lattice, box = list(product(range(self.degree + 1), repeat=self.m)), balls(ends)[0]
        self.lattice = arb_mat([[1] * len(lattice), *([arb(k) / self.degree for k in row] for row in zip(*lattice))])
        pairs = list(product(range(head.keys), range(self.outputs)))
        self.largest = arb(max(up(self.tall(j, o, box)) for j, o in pairs))
        self.lost = 4 * head.keys * (SMALLEST[semantics] * self.largest + TINIEST[semantics])  # by weights and products
        self.exponent = arb(max(up(self.size_of_score(j, box)) for j in range(head.keys)))

    def slope(self, j: int, output: int) -> list[arb]:
        """J_j of one output."""
        if self.head.slopes is None:
            return [arb(0)] * self.m
        start = (j * self.outputs + output) * self.m
        return [arb(x) for x in self.head.slopes[start : start + self.m]]

    def steps(self, j: int, at: Sequence[arb]) -> list[arb]:
        """What slopes are multiplied with."""
        if self.head.origin is None:
            return [x - c for x, c in zip(at, self.centers[j])]
        return [x - c for x, c in zip(at, self.head.origin)]

    def value(self, j: int, output: int, at: Sequence[arb]) -> arb:
        clock.tick()
        products = (a * b for a, b in zip(self.slope(j, output), self.steps(j, at)))
        return sum(products, arb(self.head.values[output][j]))

    def tall(self, j: int, output: int, box: Sequence[arb]) -> arb:
        """|V_j| + |J_j||z − c_j|: what rounding the value is proportional to."""
        clock.tick()
        products = (a.abs_upper() * b.abs_upper() for a, b in zip(self.slope(j, output), self.steps(j, box)))
        return sum(products, abs(arb(self.head.values[output][j])))

    def power(self, j: int) -> arb:
        return self.rates[0] * self.head.powers[j] / 2 if self.head.powers is not None else arb(0)

    def score(self, j: int, at: Sequence[arb]) -> arb:
        clock.tick()
        return (
            self.power(j) - sum((r * (x - c) * (x - c) for r, x, c in zip(self.rates, at, self.centers[j])), arb(0)) / 2
        )

    def tilts(self, j: int, radius: Sequence[arb]) -> list[arb]:
        """How far a score moves along every axis of a box, but for what all scores share."""
        return [r * c * h for r, c, h in zip(self.rates, self.centers[j], radius)]

    def size_of_score(self, j: int, box: Sequence[arb]) -> arb:
        """`R|z − c|²/2 + R|p|/2`, which rounding errors of scores are proportional to."""
        far = [(x - c).abs_upper() for x, c in zip(box, self.centers[j])]
        return sum((r * d * d / 2 for r, d in zip(self.rates, far)), abs(self.power(j)))

    def delta(self, exponent: arb) -> arb:
        """How far a rounded score may be off: (m + 2)u for the squared distance, 4u for power, R and maximum, 16u for exp."""
        rounded: arb = 1.01 * self.unit * ((self.m + 6) * exponent + 17)
        return rounded + lost_in_score(self.rates[0], self.m, self.semantics)

    def off(self, j: int, box: Sequence[arb]) -> arb:
        return self.score_error if self.score_error is not None else self.delta(self.size_of_score(j, box))

    def measure(self, ends: Ends, state: tuple[list[int], arb] | None) -> Measured:
        labels, mass = state if state is not None else (list(range(self.head.keys)), arb(0))
        box, middle, radius = balls(ends)
        scores = {j: self.score(j, middle) for j in labels}
        tilts = {j: self.tilts(j, radius) for j in labels}
        off = {j: self.off(j, box) for j in labels}
        order = sorted(labels, key=lambda j: -float(scores[j].mid()))
        best, near = order[0], list[int]()
        for j in order:  # cells that trail everywhere on the box, as their scores are run, are left to `mass`
            ahead = (scores[j] - scores[best] + _apart(tilts[j], tilts[best]) + off[j] + off[best]).upper()
            mass = mass + ahead.exp() if ahead < -self.cut else mass
            near += [] if ahead < -self.cut else [j]
        moves = [max(abs(float((tilts[j][i] - tilts[best][i]).mid())) for j in near) for i in range(self.m)]
        sides = [(b - a) / (d - c) for (a, b), (c, d) in zip(ends, self.ends)]
        axis = max(range(self.m), key=moves.__getitem__ if max(moves) > 0.2 else sides.__getitem__)
        if len(near) > MOST_NEAR and len(near) > len(labels) / 2:
            return Measured(math.inf, axis, None, (near, mass))
        weights, worst = {j: self._weight(j, near[:RIVALS], scores, tilts, off) for j in near}, 0.0
        for output, (graph, support) in enumerate(self.components):
            errors, size = self._errors(output, graph, support, ends, near)
            left, mixed = arb(1), arb(0)
            for j in sorted(near, key=lambda j: -up(errors[j])):
                share = weights[j] if weights[j] < left else left
                mixed, left = mixed + share * errors[j], (left - share).upper()
                if not left > 0:
                    break
            mixed = mixed.upper() / (1 - mass) if mass < 0.5 else INF
            sums = 1.01 * (2 * len(near) + self.m + 16) * self.unit * (size + mixed)
            worst = max(worst, up(mixed + mass * (size + 5 * self.largest) + sums + self.lost))
        return Measured(worst, axis, tuple(float(x.mid()) for x in middle), (near, mass))

    def _weight(
        self, j: int, rivals: list[int], scores: dict[int, arb], tilts: dict[int, list[arb]], off: dict[int, arb]
    ) -> arb:
        """The largest weight of a cell on the box, with scores that are off by so much."""
        apart = (scores[k] - scores[j] - _apart(tilts[j], tilts[k]) - off[k] - off[j] for k in rivals if k != j)
        return (1 / sum((lead.lower().exp() for lead in apart), arb(1))).upper()

    def _errors(
        self, output: int, graph: Graph, support: tuple[int, ...], ends: Ends, near: list[int]
    ) -> tuple[dict[int, arb], arb]:
        """`sup |f − V_j|` on the box, V_j as rounded, and `sup |f|`: one polynomial per branch of f, or f between two numbers."""
        own, n, box = tuple(ends[i] for i in support), self.degree, balls(ends)[0]
        flat = graph.evaluate(balls(own)[0])[0]
        places = self.lattice.ncols()
        tables = [([flat.mid()] * places, flat.rad())]
        for k, choices in enumerate(graph.branches(balls(own)[0], MOST_BRANCHES) or []):
            table, rests = enclose(graph, own, n, choices, 1, 1)
            if flat.is_finite() and not sum(rests, arb(0)) < flat.rad():
                tables = [([flat.mid()] * places, flat.rad())]
                break
            tables = (tables if k else []) + [(spread(table, support, n + 1, self.m), sum(rests, arb(0)))]
        size, corner = max((norm(table) + rest for table, rest in tables), key=up), [arb(a) for a, _ in ends]
        sides = [arb(b) - arb(a) for a, b in ends]
        rows = [[self.value(j, output, corner), *map(mul, self.slope(j, output), sides)] for j in near]
        values, errors = (arb_mat(rows) * self.lattice).entries(), dict[int, arb]()
        for k, j in enumerate(near):
            own_values = values[k * places : (k + 1) * places]
            found = max((norm(list(map(sub, table, own_values))) + rest for table, rest in tables), key=up)
            errors[j] = found + 1.01 * (self.m + 3) * self.unit * self.tall(j, output, box)
            errors[j] += (self.m + 1) * TINIEST[self.semantics]
        return errors, size


def _apart(a: Sequence[arb], b: Sequence[arb]) -> arb:
    """How far the difference of two scores may be from its value at the middle of a box."""
    return sum(map(abs, map(sub, a, b)), arb(0))
