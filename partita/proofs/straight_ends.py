"""Heads of one variable with affine values, on intervals much wider than their centers: errors far away, and rounding.

Far from all centers the last key holds all the weight, so that the head is its line, up to what the other keys still hold. Rounding
is counted interval by interval: scores are large far away, but there is nothing left for them to mix up.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from partita.arithmetic.interval import Interval
from partita.arithmetic.precision import Precision
from partita.arithmetic.rounding import add_up, up
from partita.functions.graph import Graph, GraphBuilder
from partita.geometry.domains import Array
from partita.heads.grid_head import GridHead
from partita.heads.head import numbers
from partita.proofs.running import EXP_UNITS, SCORE_UNITS

__all__ = ["Line", "line_of"]

_STEPS = 4  # intervals per gap between centers
_AROUND = 4  # gaps beyond the last center that are looked at so closely
_INFLATE = 1 + 1e-9  # covers the float64 rounding of short sums of nonnegative numbers, and of exp
_QUIET = np.errstate(over="ignore", under="ignore", invalid="ignore")


def line_of(head: GridHead) -> Line | None:
    """The head as a mixture of lines, if it has one input and one output, slopes, and windows of all its keys."""
    if head.dimension != 1 or head.num_outputs != 1 or head.value_slopes is None or head.origin is None:
        return None
    if head.widths != head.counts or head.num_keys < 2:
        return None
    centers, values, slopes = (numbers(t).ravel() for t in (head.axes[0], head.values, head.value_slopes))
    rate, origin = float(head.inverse_temperature[0]), float(head.origin[0])
    return Line(centers, values, slopes, rate, origin, Precision.of(head.dtype))


@dataclass(frozen=True, eq=False)
class Line:
    """`Σ_j softmax_j(−R(x − c_j)²/2)(A_j + J_j(x − o))`: centers c, values A, slopes J, `(P,)` each, R, o, and the arithmetic."""

    centers: Array
    values: Array
    slopes: Array
    rate: float
    origin: float
    precision: Precision

    def core(self, lo: float, hi: float, allowed: float) -> tuple[float, float]:
        """The part of [lo, hi] beyond which all keys but the last one together add at most `allowed`."""
        gap, span = float(np.diff(self.centers).max()), float(self.centers[-1] - self.centers[0])
        ends = []
        for key, side, end in ((0, -1.0, lo), (len(self.centers) - 1, 1.0, hi)):
            reach = gap
            at = self.centers[key] + side * reach
            while side * (end - at) > 0 and self._others(key, np.array([[at, at]]))[0] > allowed and reach < 1e3 * span:
                reach *= 1.25
                at = self.centers[key] + side * reach
            ends.append(float(at if side * (end - at) > 0 else end))
        return ends[0], ends[1]

    def far_error(self, graph: Graph, start: float, end: float) -> float:
        """A bound of |f − net| in exact arithmetic from start to end, on one side of all centers; f and the last line by slopes.

        On intervals that double: `d(x) = f − V_e` lies in `d(m) + d'(I)(x − m)`, where no digits cancel.
        """
        if start == end:
            return 0.0
        key = len(self.centers) - 1 if end > start else 0
        pairs = _doubling(start, end, abs(float(self.centers[key]) - start))
        difference = _less_line(graph, float(self.values[key]), float(self.slopes[key]), self.origin)
        lo, hi = pairs[:, :1], pairs[:, 1:]
        middle = np.clip(lo / 2 + hi / 2, lo, hi)
        _, slope = difference.enclose_gradient(lo, hi)
        at = difference.enclose(middle, middle)
        radius = up(np.maximum(hi - middle, middle - lo))
        spread = Interval(-radius, radius) * slope[:, :, 0]
        found = float((at + spread).magnitude.max())
        worst = float(self._others(key, pairs).max())
        return add_up(found, worst) if math.isfinite(found) and math.isfinite(worst) else math.inf

    @_QUIET
    def _others(self, key: int, pairs: Array) -> Array:
        """`sup Σ_j w_j|V_j − V_key|` on intervals `(n, 2)` beyond all centers on the side of a key, by `w_j ≤ e^{s_j − s_key}`."""
        trail = self._leads(key, pairs).max(axis=1)  # (n, P)
        return np.asarray((np.exp(trail) * self._apart(key, pairs)).sum(axis=1) * _INFLATE + 1e-300)

    def _leads(self, key: int, pairs: Array) -> Array:
        """`s_j − s_key` at both ends, rounded up, `(n, 2, P)`."""
        step = self.centers - self.centers[key]
        offset = (self.centers + self.centers[key]) / 2
        lead = self.rate * step * (pairs[:, :, None] - offset)
        off = 8 * 2.0**-53 * self.rate * np.abs(step) * (np.abs(pairs)[:, :, None] + np.abs(offset))
        return np.asarray(lead + off)

    def _apart(self, key: int, pairs: Array) -> Array:
        """`sup |V_j − V_key|` on the intervals, `(n, P)`."""
        away = pairs[:, :, None] - self.origin
        found = np.abs(self.values - self.values[key] + (self.slopes - self.slopes[key]) * away)
        size = (
            np.abs(self.values)
            + np.abs(self.values[key])
            + (np.abs(self.slopes) + abs(self.slopes[key])) * np.abs(away)
        )
        return np.asarray((found + 8 * 2.0**-53 * size).max(axis=1))

    @_QUIET
    def running(self, lo: float, hi: float) -> tuple[float, float, float]:
        """What scores that are rounded add on [lo, hi], the size that sums round relative to, and the largest δ.

        On an interval with the best key e, `|Σ_j (w̃_j − w_j)(V_j − V_e)| ≤ (e^{2δ} − 1) Σ_j w_j|V_j − V_e|`.
        """
        pairs = self._intervals(lo, hi)
        best = np.abs(pairs.mean(axis=1)[:, None] - self.centers).argmin(axis=1)
        far = np.abs(pairs[:, :, None] - self.centers).max(axis=(1, 2))
        delta = self.precision.unit * (SCORE_UNITS * self.rate / 2 * far * far + EXP_UNITS) * _INFLATE
        delta = delta + self.precision.tiniest * (2 + far)
        moved, tall = np.empty(len(pairs)), np.empty(len(pairs))
        size = np.abs(self.values) + np.abs(self.slopes) * np.abs(pairs[:, :, None] - self.origin).max(axis=1)  # (n, P)
        for key in np.unique(best):
            rows = best == key
            weight = np.minimum(
                self._leads(int(key), pairs[rows]).max(axis=1), 0.0
            )  # ln of the most that a key may hold
            twice = 2 * delta[rows, None]
            grown = np.where(twice < 1, np.expm1(twice) * np.exp(weight), np.exp(np.minimum(twice + weight, 700.0)))
            moved[rows] = (grown * self._apart(int(key), pairs[rows])).sum(axis=1)
            others = np.minimum(np.exp(np.minimum(twice + weight, 0.0)), 1.0)
            others[:, key] = 1.0
            tall[rows] = (others * size[rows]).sum(axis=1)
        found = [float(x.max()) * _INFLATE for x in (moved, tall, delta)]
        return found[0], found[1], found[2]

    def _intervals(self, lo: float, hi: float) -> Array:
        """Intervals that cover [lo, hi]: parts of a gap around the centers, then longer and longer ones, `(n, 2)`."""
        gap = float(np.diff(self.centers).max())
        first, last = float(self.centers[0]) - _AROUND * gap, float(self.centers[-1]) + _AROUND * gap
        count = math.ceil((last - first) / gap * _STEPS)
        edges = np.linspace(first, last, count + 1)
        middle = np.unique(np.clip(np.concatenate([[lo, hi], edges]), lo, hi))
        parts = [np.stack([middle[:-1], middle[1:]], axis=1)] if len(middle) > 1 else []
        parts = [p[(p[:, 1] > first) & (p[:, 0] < last)] for p in parts]
        if hi > last:
            parts.append(_doubling(max(lo, last), hi, _AROUND * gap))
        if lo < first:
            parts.append(_doubling(min(hi, first), lo, _AROUND * gap))
        return np.concatenate(parts)


def _doubling(start: float, end: float, first: float) -> Array:
    """Intervals from start to end, each twice as long as the one before, lower end first, `(n, 2)`."""
    edges, step, sign = [start], max(first, 1e-3 * abs(end - start), 1e-300), 1.0 if end > start else -1.0
    while sign * (end - edges[-1]) > step:
        edges.append(edges[-1] + sign * step)
        step *= 2
    all_edges = np.array([*edges, end] if edges[-1] != end else edges)
    return np.sort(np.stack([all_edges[:-1], all_edges[1:]], axis=1), axis=1)


def _less_line(graph: Graph, value: float, slope: float, origin: float) -> Graph:
    """`f(x) − (value + slope·(x − origin))`."""
    builder, places = GraphBuilder(1), list[int]()
    for node in graph.nodes:
        places.append(builder.add(node.operation, *(places[k] for k in node.arguments), parameters=node.parameters))
    numbers = [builder.add("const", parameters=(x,)) for x in (value, slope, origin)]
    away = builder.add("sub", builder.add("input", parameters=(0,)), numbers[2])
    line = builder.add("add", numbers[0], builder.add("mul", numbers[1], away))
    return builder.finish([builder.add("sub", places[graph.outputs[0]], line)], graph.output_shape)
