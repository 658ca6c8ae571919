"""Heads seen as mixtures: |f − net| ≤ Σ w_j |f − V_j| on small boxes, for scattered centers and for grids whose cells hold slopes.

Score differences are affine in z, so on a box `w_j ≤ 1/(1 + Σ_k exp(min(s_k − s_j)))`, and the worst mixture of the errors
|f − V_j| fills the worst cells first. Where scores hardly move, the net is an affine function and a remainder, which is the
better bound for soft heads. What rounding does to weights and values is part of every bound.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
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
STILL = 4.0  # scores that move by less on a box let the net be expanded there


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
        box = balls(ends)[0]
        pairs = list(product(range(head.keys), range(self.outputs)))
        self.largest = arb(max(up(self.tall(j, o, box)) for j, o in pairs))
        self.lost = 4 * head.keys * (SMALLEST[semantics] * self.largest + TINIEST[semantics])  # by weights and products
        self.exponent = arb(max(up(self.size_of_score(j, box)) for j in range(head.keys)))

    @cached_property
    def lattice(self) -> arb_mat:
        """Rows 1, t_0, t_1, … at the points of a lattice in the unit box."""
        points = list(product(range(self.degree + 1), repeat=self.m))
        return arb_mat([[1] * len(points), *([arb(k) / self.degree for k in row] for row in zip(*points))])

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
        if len(near) > MOST_NEAR and len(near) > len(labels) / 2 and max(moves) > STILL:
            return Measured(math.inf, axis, None, (near, mass))
        weights, worst = {j: self._weight(j, near[:RIVALS], scores, tilts, off) for j in near}, 0.0
        still = sum(moves) < STILL
        for output, (graph, support) in enumerate(self.components):
            lines = [self._expanded(output, near, scores, tilts, off, box, middle, radius)] if still else []
            errors, size, closer = self._errors(output, graph, support, ends, near, lines)
            left, mixed = arb(1), arb(0)
            for j in sorted(near, key=lambda j: -up(errors[j])):
                share = weights[j] if weights[j] < left else left
                mixed, left = mixed + share * errors[j], (left - share).upper()
                if not left > 0:
                    break
            mixed = mixed.upper() / (1 - mass) if mass < 0.5 else INF
            sums = 1.01 * (2 * len(near) + self.m + 16) * self.unit * (size + mixed)
            mixed = min([mixed, *closer], key=up)
            worst = max(worst, up(mixed + mass * (size + 5 * self.largest) + sums + self.lost))
        return Measured(worst, axis, tuple(float(x.mid()) for x in middle), (near, mass))

    def _weight(
        self, j: int, rivals: list[int], scores: dict[int, arb], tilts: dict[int, list[arb]], off: dict[int, arb]
    ) -> arb:
        """The largest weight of a cell on the box, with scores that are off by so much."""
        apart = (scores[k] - scores[j] - _apart(tilts[j], tilts[k]) - off[k] - off[j] for k in rivals if k != j)
        return (1 / sum((lead.lower().exp() for lead in apart), arb(1))).upper()

    def _expanded(
        self,
        output: int,
        near: list[int],
        scores: dict[int, arb],
        tilts: dict[int, list[arb]],
        off: dict[int, arb],
        box: list[arb],
        middle: list[arb],
        radius: list[arb],
    ) -> tuple[list[arb], arb]:
        """The mean of the near cells as an affine function, as `_errors` writes one, and how far it may be from it as it is run.

        With T the part of a score that moves and w the weights: no weight grows beyond `w_j exp|T_j − ΣwT|` on the box, and the
        second derivative of the mean is `2 Cov(T, slope) + E(T − ET)²(V − EV)`, whatever the weights are there.
        """
        shares = [(scores[j] - scores[near[0]]).exp() for j in near]
        whole = sum(shares, arb(0))
        shares = [s / whole for s in shares]

        def mean(numbers: Sequence[arb]) -> arb:
            return sum(map(mul, shares, numbers), arb(0))

        def away_from_mean(rows: Sequence[Sequence[arb]]) -> tuple[list[arb], list[arb]]:
            """The means of the columns, and how far each row may be from them in all."""
            means = [mean(column) for column in zip(*rows)]
            return means, [sum((abs(a - b).upper() for a, b in zip(row, means)), arb(0)) for row in rows]

        values = [self.value(j, output, middle) for j in near]
        level = mean(values)
        moved, turn = away_from_mean([tilts[j] for j in near])
        slopes = [list(map(mul, self.slope(j, output), radius)) for j in near]
        incline, bend = away_from_mean(slopes)
        away = [(abs(v - level) + b).upper() for v, b in zip(values, bend)]
        heavy = [(s * t.exp()).upper() for s, t in zip(shares, turn)]

        def most(numbers: Sequence[arb]) -> arb:
            return min(sum(map(mul, heavy, numbers), arb(0)).upper(), max(numbers, key=up), key=up)

        turned, spread_of_turn = most(turn), most([t * t for t in turn])
        skew = most([(t + turned) ** 2 * a for t, a in zip(turn, away)]) + spread_of_turn * most(away)
        rest = (spread_of_turn * most([b * b for b in bend])).sqrt() + skew / 2
        rest += (2 * max((off[j] for j in near), key=up)).expm1() * most(away)
        rest += max((self.value_error(j, output, box) for j in near), key=up)
        tilt = [
            g + mean([(v - level) * (tilts[j][i] - moved[i]) for j, v in zip(near, values)])
            for i, g in enumerate(incline)
        ]
        return [level - sum(tilt, arb(0)), *(2 * g for g in tilt)], rest

    def value_error(self, j: int, output: int, box: Sequence[arb]) -> arb:
        """How far V_j may be off as it is run."""
        rounded: arb = 1.01 * (self.m + 3) * self.unit * self.tall(j, output, box)
        return rounded + (self.m + 1) * TINIEST[self.semantics]

    def _errors(
        self,
        output: int,
        graph: Graph,
        support: tuple[int, ...],
        ends: Ends,
        near: list[int],
        lines: list[tuple[list[arb], arb]],
    ) -> tuple[dict[int, arb], arb, list[arb]]:
        """`sup |f − V_j|` on the box, V_j as rounded, `sup |f|`, and `sup |f − line|` for affine functions known up to a number.

        One polynomial per branch of f, or f between two numbers. An affine function is its value at the corner and its rise along
        every side.
        """
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
        values = (arb_mat([*rows, *(row for row, _ in lines)]) * self.lattice).entries()

        def apart(k: int) -> arb:
            own_values = values[k * places : (k + 1) * places]
            found: arb = max((norm(list(map(sub, table, own_values))) + rest for table, rest in tables), key=up)
            return found

        errors = {j: apart(k) + self.value_error(j, output, box) for k, j in enumerate(near)}
        return errors, size, [apart(len(near) + k) + rest for k, (_, rest) in enumerate(lines)]


def _apart(a: Sequence[arb], b: Sequence[arb]) -> arb:
    """How far the difference of two scores may be from its value at the middle of a box."""
    return sum(map(abs, map(sub, a, b)), arb(0))
