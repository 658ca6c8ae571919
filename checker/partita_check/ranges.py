"""Ranges and slopes of a function over a box: balls, monotonicity, mean values, and bisection.

A variable along which the slope has one sign moves to its ends, where the ball is thin; so most ranges are found without
bisection and are exact up to the last digits. Ends of boxes are floats, and ends of ranges are rounded outward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from flint import arb, arb_series

from partita_check.clock import clock
from partita_check.graph import Graph
from partita_check.polynomials import Ends, balls
from partita_check.search import Measured, search

__all__ = ["above", "below", "gradient", "largest_slope", "span"]

FINEST = 2.0**-48  # of an end of a range: closer to a value that is attained it need not be


def above(x: arb) -> float:
    """The least float that is at least every number of the ball; infinity for what is not finite."""
    if not x.is_finite():
        return math.inf
    found = float(x.upper())
    return found if arb(found) >= x else math.nextafter(found, math.inf)


def below(x: arb) -> float:
    """The largest float that is at most every number of the ball."""
    return -above(-x)


def gradient(graph: Graph, box: Sequence[arb], axes: Sequence[int]) -> tuple[arb, dict[int, arb]]:
    """The value of the first output over a box, and its slopes along some axes."""
    values, out, slopes = graph.all_values(box), graph.outputs[0], dict[int, arb]()
    for i in axes:
        point = [arb_series([b, 1], 2) if k == i else b for k, b in enumerate(box)]
        found = graph.moved(values, i, point, None)[out]
        slopes[i] = found[1] if isinstance(found, arb_series) else arb(0)
    return values[out], slopes


def span(graph: Graph, ends: Ends, pieces: int, close: float) -> tuple[float, float]:
    """Bounds of the first output over a box, from at most so many pieces of it for each; infinite where none is found.

    A bound is close enough if it exceeds a value that is attained by no more than `close` of the range that is attained.
    """
    corners = [[arb(pair[side]) for pair in ends] for side in (0, 1)]
    seen = [float(v.mid()) for v in (graph.evaluate(c)[0] for c in corners) if v.is_finite()]
    return -_most(graph, ends, -1, pieces, close, seen), _most(graph, ends, 1, pieces, close, seen)


def _most(graph: Graph, ends: Ends, sign: int, pieces: int, close: float, seen: list[float]) -> float:
    """A bound of `sup sign·f` over a box; values that are attained are added to `seen`."""
    attained, count = -math.inf, 0

    def measure(part: Ends, _: object) -> Measured:
        nonlocal attained, count
        count += 1
        bound, value, axis = _piece(graph, part, ends, sign)
        if math.isfinite(value):
            attained = max(attained, value)
            seen.append(sign * value)
            seen[:] = min(seen), max(seen)
        return Measured(bound, axis)

    def goal() -> float:
        enough = close * (max(seen, default=0.0) - min(seen, default=0.0))
        return math.inf if count >= pieces else attained + max(FINEST * abs(attained), enough)

    return search(measure, ends, goal, clock.deadline)[0]


def _piece(graph: Graph, part: Ends, whole: Ends, sign: int) -> tuple[float, float, int]:
    """A bound of sign·f over a part of a box, a value that is attained, and the axis to halve next."""
    pinned = dict[int, float]()
    while True:
        box = balls(tuple((pinned.get(i, a), pinned.get(i, b)) for i, (a, b) in enumerate(part)))[0]
        free = [i for i, (a, b) in enumerate(part) if i not in pinned and a < b]
        value, slopes = gradient(graph, box, free)
        turned = {i: part[i][1] if sign * s >= 0 else part[i][0] for i, s in slopes.items() if s >= 0 or s <= 0}
        if not turned:
            break
        pinned |= turned
    middle = [(arb(a) + arb(b)) / 2 if i in slopes else x for i, ((a, b), x) in enumerate(zip(part, box))]
    at = graph.all_values(middle)[graph.outputs[0]] if slopes else value
    steps = {i: abs(s) * (arb(part[i][1]) - arb(part[i][0])) / 2 for i, s in slopes.items()}
    bounds = [above(sign * value), above(sign * at + sum(steps.values(), arb(0)))]
    wide = {i: above(x) for i, x in steps.items()}
    if not all(map(math.isfinite, wide.values())) or not wide:
        sides = ((b - a) / (d - c) if d > c else 0.0 for (a, b), (c, d) in zip(part, whole))
        wide = {i: side for i, side in enumerate(sides) if i in slopes or not slopes}
    return min(bounds), below(sign * at) if at.is_finite() else -math.inf, max(wide, key=lambda i: wide[i])


def largest_slope(graph: Graph, ends: Ends, axis: int, pieces: int, close: float) -> arb:
    """A bound of `sup |∂_i f|` over a box, from at most so many pieces of it; infinite where none is found.

    It is close enough if it exceeds a slope that is attained by no more than a factor of `1 + close`.
    """
    attained, count = 0.0, 0

    def measure(part: Ends, _: object) -> Measured:
        nonlocal attained, count
        count += 1
        box, middle, _ = balls(part)
        slope, thin = (gradient(graph, at, [axis])[1][axis] for at in (box, middle))
        attained = max(attained, below(abs(thin))) if thin.is_finite() else attained
        sides = [(b - a) / (d - c) if d > c else 0.0 for (a, b), (c, d) in zip(part, ends)]
        return Measured(above(abs(slope)), max(range(len(part)), key=lambda i: sides[i]))

    def goal() -> float:
        return math.inf if count >= pieces else attained * (1 + close)

    return arb(search(measure, ends, goal, clock.deadline)[0])
