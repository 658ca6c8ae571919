"""How far f reaches over a box: enclosures of ranges and slopes that are much tighter than those of one walk over the graph.

Over one box, three enclosures are intersected: that of the walk, the mean value form `f(c) + Σ_i F'_i (X_i − c_i)`, and that of the
faces on which f is smallest and largest where the sign of a slope is known: a coordinate in which f grows counts with its lower end
for the minimum and its upper end for the maximum. Then boxes are halved. All of it is rounded outward.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from partita.arithmetic.interval import Interval
from partita.arithmetic.rounding import down, up
from partita.errors import DomainError, ShapeError
from partita.functions.graph import Graph, GraphBuilder
from partita.functions.operations import Node
from partita.geometry.domains import Array

__all__ = ["enclose_each", "positive_nodes", "range_over"]

Mask = NDArray[np.bool_]

_CLOSE = 5e-3  # of the range seen: an end that exceeds it by less is not made tighter, unless
_CLOSE_TO_END = 0.02  # of the end itself: small numbers are divided by, and
_CLOSEST = 1e-6  # of the range seen, which is always enough
_PATIENCE, _NEAR = 8, 0.9  # times as many boxes, until the bound is so near to a positive end, and
_MOST_PATIENCE = 32  # times as many while the bound does not even show that the end is positive
_ROUNDS = 4  # of setting coordinates to an end and looking at the slopes of the others again
_AT_ONCE = 16  # boxes that are halved in one round
_ROWS = 1 << 15  # boxes that are enclosed at once
_PIECES = {1: (64, 256), 2: (8, 16), 3: (4, 6)}  # of each side, by the number of inputs: for many boxes, and for few
_MOST_SEARCHES = 16  # for lower bounds of factors whose values seen are positive
_SEARCHED_NODES = 2000  # nodes of the graph, times searches
_MULTIPLICATIVE = ("mul", "div", "pow", "sqrt", "log")
_LOOSE = 0.1  # of the largest slope: slopes that vary less over a box are known well


def range_over(graph: Graph, lo: ArrayLike, hi: ArrayLike, *, boxes: int = 512) -> Interval:
    """Enclosures of the range of every output of f over one box, `(outputs,)`.

    They hold f(x) for every x of the box at which f is defined. An end is infinite where no bound was found.

    Args:
        graph: f.
        lo: lower corner, `(m,)`.
        hi: upper corner, `(m,)`.
        boxes: about how many boxes to look at for each end of each output. More are looked at for ends near 0.

    Raises:
        ShapeError: corners of another length.
        DomainError: lo > hi, or a corner is not finite.

    >>> from partita.functions import parse
    >>> found = range_over(parse("x - x**2", ["x"]), [0.0], [1.0])
    >>> bool(-0.001 < found.lo[0] <= 0.0 and 0.25 <= found.hi[0] < 0.251)
    True
    """
    low, high = (np.asarray(end, np.float64).ravel() for end in (lo, hi))
    if low.shape != (graph.num_inputs,) or high.shape != (graph.num_inputs,):
        raise ShapeError(
            f"range_over: the corners have {low.size} and {high.size} numbers; expected {graph.num_inputs}."
        )
    if not (np.isfinite(low).all() and np.isfinite(high).all() and (low <= high).all()):
        raise DomainError(f"range_over: the corners are {low.tolist()} and {high.tolist()}; expected finite lo ≤ hi.")
    ends = []
    graph = _guarded(graph, low, high, boxes)
    for k in range(len(graph.outputs)):
        ends.append(_ends(_signed(graph, k, negative=False), low, high, boxes))
    least, most = np.array(ends).T
    return Interval(least, most)


def enclose_each(graph: Graph, lo: Array, hi: Array) -> tuple[Interval, Interval]:
    """Values `(n,)` and slopes `(n, m)` of a function with one output over many boxes, looked at piece by piece where slopes vary.

    For x and y in one of the boxes there is a g in its slopes with `f(x) − f(y) = g·(x − y)`, where they are finite: the segment
    from x to y is cut by the pieces, and its g is the mean of theirs. A slope that is infinite along one axis says nothing about
    the others.

    Args:
        graph: f, with one output. Boxes with more than three sides are not cut into pieces.
        lo: lower corners, `(n, m)`.
        hi: upper corners, `(n, m)`.

    >>> from partita.functions import parse
    >>> lo, hi = np.array([[-2.0], [0.1]]), np.array([[2.0], [0.2]])
    >>> values, slopes = enclose_each(parse("x*exp(-x)", ["x"]), lo, hi)
    >>> bool(values.hi[0] < math.exp(-1) + 1e-3), bool(slopes.lo[1, 0] > 0)
    (True, True)
    """
    n, m = lo.shape
    value, slope = np.empty((2, n)), np.empty((2, n, m))
    rows, few = np.arange(n), n * _PIECES[m][1] ** m <= _ROWS if m in _PIECES else False
    for sides in (1, _PIECES[m][few]) if m in _PIECES else (1,):
        step = max(1, _ROWS // sides**m)
        for start in range(0, len(rows), step):
            some = rows[start : start + step]
            left, right = _pieces(lo[some], hi[some], sides)
            values, slopes = _sharpened(graph, left, right)
            shape = (len(some), sides**m)
            value[0, some], value[1, some] = values.lo.reshape(shape).min(axis=1), values.hi.reshape(shape).max(axis=1)
            slope[0, some] = slopes.lo.reshape(*shape, m).min(axis=1)
            slope[1, some] = slopes.hi.reshape(*shape, m).max(axis=1)
        rows = np.flatnonzero(_is_loose(lo, hi, *slope))
    return Interval(*value), Interval(*slope)


def positive_nodes(graph: Graph, lo: ArrayLike, hi: ArrayLike, *, boxes: int = 512) -> frozenset[int]:
    """Nodes whose values are proved to be positive wherever f is defined on a box.

    Only factors, divisors and arguments of powers, roots and logarithms are looked at closely.

    Args:
        graph: f.
        lo: lower corner, `(m,)`.
        hi: upper corner, `(m,)`.
        boxes: about how many boxes to look at for a node.

    >>> from partita.functions import parse
    >>> graph = parse("x*(x - y)", ["x", "y"])
    >>> [graph.nodes[k].operation for k in sorted(positive_nodes(graph, [2, 0], [3, 1]))]
    ['input', 'sub', 'mul']
    """
    low, high = (np.asarray(end, np.float64).ravel() for end in (lo, hi))
    points = low + (high - low) * np.random.default_rng(0).random((64, len(low)))
    seen = Graph(graph.num_inputs, graph.nodes, tuple(range(len(graph.nodes))), (len(graph.nodes),)).evaluate(points)
    wanted = {k for node in graph.nodes if node.operation in _MULTIPLICATIVE for k in node.arguments}
    wanted = {k for k in wanted if (seen[:, k] > 0).all()}
    clamped: dict[int, tuple[float, float]] = {}
    while True:
        clear, places = _clamped(graph, clamped)
        least = clear.enclose(low[None], high[None]).lo[0, places]
        unknown = sorted(k for k in wanted if not least[k] > 0 and k not in clamped)
        if not unknown or len(clamped) >= min(_MOST_SEARCHES, _SEARCHED_NODES // len(graph.nodes)):
            return frozenset(np.flatnonzero(least > 0).tolist())
        inner = _signed(clear, places[unknown[0]], negative=False)
        clamped[unknown[0]] = _ends(inner, low, high, boxes)


def _clamped(graph: Graph, ranges: Mapping[int, tuple[float, float]]) -> tuple[Graph, list[int]]:
    """The graph with nodes clamped to known ranges, which changes no value; every node an output, and where each of f's is."""
    builder, places = GraphBuilder(graph.num_inputs), list[int]()
    for k, node in enumerate(graph.nodes):
        place = builder.add(node.operation, *(places[j] for j in node.arguments), parameters=node.parameters)
        if k in ranges and all(map(math.isfinite, ranges[k])):
            place = builder.add("clamp", place, parameters=ranges[k])
        places.append(place)
    every = range(max(places) + 1)
    return builder.finish(list(every), (len(every),)), places


@np.errstate(all="ignore")
def _is_loose(lo: Array, hi: Array, slope_lo: Array, slope_hi: Array) -> Mask:
    """Which boxes to cut into pieces: finite ones on which a slope is not known well."""
    steepest = np.maximum(np.abs(slope_lo), np.abs(slope_hi))
    vague = (lo < hi) & ~(slope_hi - slope_lo <= _LOOSE * steepest)
    bounded = np.isfinite(lo) & np.isfinite(hi)
    return np.asarray(vague.any(axis=1) & bounded.all(axis=1))


def _pieces(lo: Array, hi: Array, sides: int) -> tuple[Array, Array]:
    """Every box cut into `sides` equal parts along each axis, box by box: `(n · sides^m, m)`. Neighbours share their ends."""
    m = lo.shape[1]
    if sides == 1:
        return lo, hi
    at = np.linspace(0.0, 1.0, sides + 1)
    ends = np.clip(lo[..., None] + (hi - lo)[..., None] * at, lo[..., None], hi[..., None])  # (n, m, sides + 1)
    ends[..., 0], ends[..., -1] = lo, hi
    index = np.stack(np.meshgrid(*[np.arange(sides)] * m, indexing="ij"), axis=-1).reshape(-1, m)
    axes = np.arange(m)
    left, right = ends[:, axes, index], ends[:, axes, index + 1]  # (n, sides^m, m)
    return left.reshape(-1, m), right.reshape(-1, m)


@np.errstate(all="ignore")
def _sharpened(graph: Graph, lo: Array, hi: Array, *, faces: bool = True) -> tuple[Interval, Interval]:
    """Values `(n,)` and slopes `(n, m)` over boxes: what the walk, the mean value form and the extreme faces say together."""
    value, slope = graph.enclose_gradient(lo, hi)
    value, slope = value[:, 0], slope[:, 0]
    if not (lo < hi).any():
        return value, slope
    middle = np.clip(0.5 * lo + 0.5 * hi, lo, hi)
    at = graph.enclose(middle, middle)[:, 0]
    spread = _spread(slope, up(np.maximum(hi - middle, middle - lo)) * (lo < hi))
    least, most = np.fmax(value.lo, down(at.lo - spread)), np.fmin(value.hi, up(at.hi + spread))
    if faces:
        first, last = _faces(slope, lo, hi)
        least, most = np.fmax(least, graph.enclose(*first)[:, 0].lo), np.fmin(most, graph.enclose(*last)[:, 0].hi)
    fits = least <= most  # not where f has no value at all
    return Interval(np.where(fits, least, value.lo), np.where(fits, most, value.hi)), slope


def _spread(slope: Interval, radius: Array) -> Array:
    """`Σ_i sup|slope_i|·radius_i`, rounded up; a coordinate that does not move counts nothing, whatever its slope."""
    parts = np.where(radius == 0.0, 0.0, slope.magnitude * radius)
    m = radius.shape[1]
    total: Array = up(parts.sum(axis=1) * (1 + (m + 4) * 2.0**-52)) + 2.0**-1000
    return total


def _faces(slope: Interval, lo: Array, hi: Array) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """The faces of boxes on which f is smallest, and largest: coordinates whose slope has one sign are set to an end."""
    known = np.isfinite(slope.lo) & np.isfinite(slope.hi)
    rising = known & (slope.lo >= 0.0)
    falling = known & (slope.hi <= 0.0) & ~rising
    smallest = np.where(falling, hi, lo), np.where(rising, lo, hi)
    largest = np.where(rising, hi, lo), np.where(falling, lo, hi)
    return smallest, largest


class _Search:
    """Boxes that cover a box, each with a lower bound of f on it; those with the smallest bounds are halved."""

    def __init__(self, graph: Graph, lo: Array, hi: Array) -> None:
        self.graph = graph
        self.lo, self.hi, self.bound, self.slope = self._bounded(lo[None], hi[None])

    def lowest(self, boxes: int) -> float:
        """A lower bound of f over all of the box.

        It looks at about so many boxes, and at more while the values seen are positive and the bound is far below them: whoever
        divides by f needs to know how near it comes to 0.
        """
        looked = 1
        least, most = self._seen(self.lo, self.hi)
        while looked < boxes * self._patience(least):
            seen = max(most - least, 0.0)
            close = max(min(_CLOSE * seen, _CLOSE_TO_END * abs(least)), _CLOSEST * seen)
            wide = (self.lo < self.hi).any(axis=1)
            worst = np.flatnonzero(wide & (self.bound < least - close) if math.isfinite(least) else wide)
            if not len(worst):
                break
            count = max(_AT_ONCE, len(self.lo) // 8)
            worst = worst[np.argsort(self.bound[worst], kind="stable")][:count]
            lo, hi = self._halves(worst)
            looked += len(lo)
            first, last = self._seen(lo, hi)
            least, most = min(least, first), max(most, last)
            lo, hi, bound, slope = self._bounded(lo, hi)
            # a half has no smaller values than the whole
            bound = np.maximum(bound, np.concatenate([self.bound[worst]] * 2))
            kept = np.ones(len(self.lo), bool)
            kept[worst] = False
            self.lo, self.hi = np.concatenate([self.lo[kept], lo]), np.concatenate([self.hi[kept], hi])
            self.bound, self.slope = (
                np.concatenate([self.bound[kept], bound]),
                np.concatenate([self.slope[kept], slope]),
            )
        return float(self.bound.min())

    def _patience(self, least: float) -> int:
        bound = self.bound.min()
        if not bound < _NEAR * least or least <= 0.0:
            return 1
        return _PATIENCE if bound > 0.0 else _MOST_PATIENCE

    def _seen(self, lo: Array, hi: Array) -> tuple[float, float]:
        """The least and the largest value of f at some points of boxes, to steer the search; (inf, −inf) where it has none."""
        values = self.graph.evaluate(np.concatenate([0.5 * lo + 0.5 * hi, lo, hi])).ravel()
        values = values[np.isfinite(values)]
        return float(values.min(initial=math.inf)), float(values.max(initial=-math.inf))

    def _bounded(self, lo: Array, hi: Array) -> tuple[Array, Array, Array, Array]:
        """Boxes cut down to faces on which f is smallest, a lower bound on each, and how steep f is along its sides."""
        lo, hi = lo.copy(), hi.copy()
        bound, steep = np.full(len(lo), -math.inf), np.empty(lo.shape)
        rows = np.arange(len(lo))
        for _ in range(_ROUNDS):
            value, slope = _sharpened(self.graph, lo[rows], hi[rows], faces=False)
            bound[rows], steep[rows] = np.maximum(bound[rows], value.lo), slope.magnitude
            (first, last), _ = _faces(slope, lo[rows], hi[rows])
            changed = (first != lo[rows]).any(axis=1) | (last != hi[rows]).any(axis=1)
            lo[rows], hi[rows] = first, last
            rows = rows[changed]
            if not len(rows):
                break
        return lo, hi, bound, steep

    @np.errstate(all="ignore")
    def _halves(self, rows: NDArray[np.intp]) -> tuple[Array, Array]:
        """Boxes halved along the side that f varies most on; the longest one where its slope is not bounded."""
        lo, hi, slope = self.lo[rows], self.hi[rows], self.slope[rows]
        side = hi - lo
        varies = np.where(side > 0, np.where(np.isfinite(slope), slope * side, math.inf), -1.0)
        unbounded = np.isinf(varies)
        scale = (self.hi - self.lo).max(axis=0)
        relative = np.where(unbounded, side / np.where(scale > 0, scale, 1.0), -1.0)
        axis = np.where(unbounded.any(axis=1), relative.argmax(axis=1), varies.argmax(axis=1))
        at = np.arange(len(rows))
        middle = np.clip(0.5 * lo[at, axis] + 0.5 * hi[at, axis], lo[at, axis], hi[at, axis])
        left_hi, right_lo = hi.copy(), lo.copy()
        left_hi[at, axis], right_lo[at, axis] = middle, middle
        return np.concatenate([lo, right_lo]), np.concatenate([left_hi, hi])


def _guarded(graph: Graph, lo: Array, hi: Array, boxes: int) -> Graph:
    """The same function on the box, with clamps to their ranges around nodes that must not come near 0.

    A clamp to the range of its argument changes no value, and keeps an enclosure that is too wide away from a pole.
    """
    guarded = _near_poles(graph.nodes)
    if not guarded:
        return graph
    builder, places = GraphBuilder(graph.num_inputs), list[int]()
    for k, node in enumerate(graph.nodes):
        place = builder.add(node.operation, *(places[j] for j in node.arguments), parameters=node.parameters)
        if k in guarded:
            inner = builder.finish([place], ())
            found = inner.enclose(lo[None], hi[None])[0, 0]
            if found.lo <= 0.0 <= found.hi:
                least, most = _ends(inner, lo, hi, boxes)
                if (least > 0.0 or most < 0.0) and math.isfinite(least) and math.isfinite(most):
                    place = builder.add("clamp", place, parameters=(least, most))
        places.append(place)
    return builder.finish([places[k] for k in graph.outputs], graph.output_shape)


def _near_poles(nodes: Sequence[Node]) -> set[int]:
    """Divisors, arguments of roots and logarithms, and the factors of these."""
    found = set[int]()
    for k in range(len(nodes) - 1, -1, -1):
        node = nodes[k]
        if node.operation in ("div", "log", "sqrt") or (node.operation == "pow" and node.parameters[0] < 0):
            found.add(node.arguments[-1])
        if k in found and node.operation in ("mul", "div", "neg", "pow"):
            found.update(node.arguments)
    return found


def _ends(graph: Graph, lo: Array, hi: Array, boxes: int) -> tuple[float, float]:
    """A lower and an upper bound of a function with one output."""
    opposite = _signed(graph, 0, negative=True)
    return _Search(graph, lo, hi).lowest(boxes), -_Search(opposite, lo, hi).lowest(boxes)


def _signed(graph: Graph, output: int, *, negative: bool) -> Graph:
    """One output as a function of its own, or its negative."""
    builder, places = GraphBuilder(graph.num_inputs), list[int]()
    for node in graph.nodes[: graph.outputs[output] + 1]:
        places.append(builder.add(node.operation, *(places[k] for k in node.arguments), parameters=node.parameters))
    found = places[graph.outputs[output]]
    return builder.finish([builder.add("neg", found) if negative else found], ())
