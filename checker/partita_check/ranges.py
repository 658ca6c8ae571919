"""Ranges and slopes of a function over a box: intervals, monotonicity, mean values, and bisection.

A variable along which the slope has one sign moves to its ends, so that most ranges are found without bisection and are exact up
to the last digits. Ends of boxes are floats, and ends of ranges are rounded outward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from flint import arb

from partita_check.clock import clock
from partita_check.graph import Graph
from partita_check.intervals import Interval, gradient, is_known, values_over
from partita_check.polynomials import Ends
from partita_check.search import Measured, search

__all__ = ["above", "below", "largest_slope", "span"]

FINEST = 2.0**-50  # of an end of a range: closer to a value that is attained it need not be


def above(x: arb) -> float:
    """The least float that is at least every number of the ball; infinity for what is not finite."""
    if not x.is_finite():
        return math.inf
    found = float(x.upper())
    return found if arb(found) >= x else math.nextafter(found, math.inf)


def below(x: arb) -> float:
    """The largest float that is at most every number of the ball."""
    return -above(-x)


def _box(ends: Ends) -> list[Interval]:
    return [(arb(a), arb(b)) for a, b in ends]


def _points(ends: Ends) -> list[list[Interval]]:
    """The middle of a box, and two of its corners."""
    places = [[a / 2 + b / 2 for a, b in ends], [a for a, _ in ends], [b for _, b in ends]]
    return [[(arb(x), arb(x)) for x in place] for place in places]


def _size(x: Interval) -> arb:
    return max(abs(x[0]), abs(x[1]))


def span(graph: Graph, ends: Ends, pieces: int, close: float) -> tuple[float, float]:
    """Bounds of the first output over a box, from at most so many pieces of it for each; infinite where none is found.

    A bound is close enough if it exceeds a value that is attained by no more than `close` of the range that is attained.
    """
    found = [values_over(graph, point)[graph.outputs[0]] for point in _points(ends)]
    seen = [float(value[0]) for value in found if is_known(value)]
    return -_most(graph, ends, -1, pieces, close, seen), _most(graph, ends, 1, pieces, close, seen)


def _most(graph: Graph, ends: Ends, sign: int, pieces: int, close: float, seen: list[float]) -> float:
    """A bound of `sup sign·f` over a box; values that are attained, up to rounding, are added to `seen`."""
    attained, count = -math.inf, 0

    def measure(part: Ends, pinned: dict[int, arb] | None) -> Measured:
        nonlocal attained, count
        count += 1
        pinned = dict(pinned or {})
        bound, value, axis = _piece(graph, part, ends, sign, pinned)
        if math.isfinite(value):
            attained = max(attained, value)
            seen.append(sign * value)
            seen[:] = min(seen), max(seen)
        return Measured(bound, axis, None, pinned)

    def goal() -> float:
        enough = close * (max(seen, default=0.0) - min(seen, default=0.0))
        return math.inf if count >= pieces else attained + max(FINEST * abs(attained), enough)

    return search(measure, [ends], goal, clock.deadline)[0]


def _piece(graph: Graph, part: Ends, whole: Ends, sign: int, pinned: dict[int, arb]) -> tuple[float, float, int]:
    """A bound of sign·f over a part of a box, a value that is attained, and the axis to halve next.

    `pinned`: coordinates at which f is largest, whatever the others are. They are those of a box that holds this part, which is
    as long as it along these axes, and more are added.
    """
    box, best = _box(part), math.inf
    free = [i for i, (a, b) in enumerate(part) if i not in pinned and a < b]
    for i, end in pinned.items():
        box[i] = (end, end)
    while True:
        value, slopes = gradient(graph, box, free)
        best = min(best, above(value[1]) if sign > 0 else -below(value[0]))
        turned = [i for i in free if slopes[i][0] >= 0 or slopes[i][1] <= 0]
        if not turned:
            break
        for i in turned:
            pinned[i] = box[i][1 if (slopes[i][0] >= 0) == (sign > 0) else 0]
            box[i] = (pinned[i], pinned[i])
            free.remove(i)
    if not free:
        return best, (below(value[0]) if sign > 0 else -above(value[1])), _longest(range(len(part)), part, whole)
    for i in free:
        middle = arb(part[i][0] / 2 + part[i][1] / 2)
        box[i] = (middle, middle)
    at = values_over(graph, box)[graph.outputs[0]]
    steps = {i: _size(slopes[i]) * max(arb(part[i][1]) - box[i][0], box[i][0] - arb(part[i][0])) for i in free}
    rise = sum(steps.values(), arb(0))
    best = min(best, above(at[1] + rise) if sign > 0 else -below(at[0] - rise))
    axis = max(free, key=lambda i: above(steps[i])) if rise.is_finite() else _longest(free, part, whole)
    return best, (below(at[0]) if sign > 0 else -above(at[1])), axis


def _longest(axes: Sequence[int], part: Ends, whole: Ends) -> int:
    def length(i: int) -> float:
        (a, b), (c, d) = part[i], whole[i]
        return (b - a) / (d - c) if d > c else 0.0

    return max(axes, key=length)


def largest_slope(graph: Graph, ends: Ends, axis: int, pieces: int, close: float) -> arb:
    """A bound of `sup |∂_i f|` over a box, from at most so many pieces of it; infinite where none is found.

    It is close enough if it exceeds a slope that is attained by no more than a factor of `1 + close`.
    """
    attained, count = 0.0, 0

    def over(box: list[Interval]) -> Interval:
        return gradient(graph, box, [axis])[1][axis]

    def measure(part: Ends, _: object) -> Measured:
        nonlocal attained, count
        count += 1
        points, box = _points(part), _box(part)
        for slope in map(over, points[: 3 if count == 1 else 1] if pieces > 1 else ()):
            attained = max(attained, below(min(abs(slope[0]), abs(slope[1])))) if is_known(slope) else attained
        bound, longest = above(_size(over(box))), _longest(range(len(part)), part, ends)
        if len(part) == 1 or pieces == 1 or bound <= goal():
            return Measured(bound, longest)
        # the axis without which the slope varies least
        thin = [above(_size(over([*box[:i], points[0][i], *box[i + 1 :]]))) for i in range(len(part))]
        return Measured(bound, min(range(len(part)), key=lambda i: (thin[i], i != longest)))

    def goal() -> float:
        return math.inf if count >= pieces else attained * (1 + close)

    return arb(search(measure, [ends], goal, clock.deadline)[0])
