"""Proved Lipschitz constants: best-first bisection over enclosures of the slopes.

    euclidean ≥ max_o sup |∇f_o|₂,   per_axis_i ≥ max_o sup |∂_i f_o|,   magnitude ≥ max_o sup |f_o|
A box is settled when its bounds exceed what was seen at some midpoint by at most the relative gap; the others are
halved, the worst first. Whatever the budget, the bounds hold: they are maxima over boxes that cover the domain.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from partita.arithmetic.interval import Floats, Interval, Mask
from partita.arithmetic.progress import Progress
from partita.errors import BudgetSpentError, DomainError, NonFiniteValueError
from partita.functions.graph import Graph
from partita.functions.regions import Region

__all__ = ["LipschitzBounds", "lipschitz_bounds"]

BATCH = 2048
MAX_BOXES, MAX_STEPS = 200_000, 10_000_000  # fewer boxes for networks, each of whose boxes takes thousands of steps
ROUGH_RESOLUTION = 1e-3
VALUE_RESOLUTION = 1e-6
_SMALL_AXIS = 0.1
_ASPECT = 0.1


@dataclass(frozen=True, eq=False)
class LipschitzBounds:
    """Proved bounds on the slopes of f on a box, and the largest slope found.

    `euclidean` and `per_axis` hold outside the rough boxes `rough_lo ≤ x ≤ rough_hi`, (k, m), where f may jump or be
    infinitely steep; `magnitude` bounds |f| everywhere. `observed` ≤ `euclidean` is a slope that f does have.
    """

    euclidean: float
    per_axis: Floats
    observed: float
    magnitude: float
    boxes: int
    rough_lo: Floats
    rough_hi: Floats

    @property
    def is_lipschitz(self) -> bool:
        """Whether no rough box remains, so that `euclidean` is a Lipschitz constant on the whole domain."""
        return len(self.rough_lo) == 0


@dataclass(frozen=True, eq=False)
class _Boxes:
    """Boxes (k, m), with bounds (k, 1 + m + 1) on |∇f|₂, each |∂_i f| and |f|, maximal over the outputs."""

    lo: Floats
    hi: Floats
    bounds: Floats

    def __getitem__(self, index: Mask) -> "_Boxes":
        return _Boxes(self.lo[index], self.hi[index], self.bounds[index])

    def __len__(self) -> int:
        return len(self.lo)

    @property
    def is_unbounded(self) -> Mask:
        """Where f itself has no finite enclosure."""
        return np.isinf(self.bounds[:, -1])

    @property
    def is_rough(self) -> Mask:
        """Where f is bounded and its slopes are not."""
        return np.isinf(self.bounds[:, 0]) & ~self.is_unbounded

    def join(self, other: "_Boxes") -> "_Boxes":
        pairs = ((self.lo, other.lo), (self.hi, other.hi), (self.bounds, other.bounds))
        return _Boxes(*(np.concatenate(pair) for pair in pairs))


def lipschitz_bounds(
    graph: Graph,
    lo: Floats,
    hi: Floats,
    *,
    relative_gap: float = 0.01,
    max_boxes: int | None = None,
    rough_resolution: float = ROUGH_RESOLUTION,
    region: Region | None = None,
    progress: Progress | None = None,
) -> LipschitzBounds:
    """Bounds on the slopes and values of f over lo ≤ x ≤ hi, within `relative_gap` of what f attains or the budget.

    Slope inclusion (`partita.arithmetic.dual`) on each box of a cover gives |f(x) - f(y)| ≤ L |x - y|₂ along segments.
    Boxes with unbounded slopes are halved until they measure `rough_resolution` of the sides along the axes concerned,
    or have used half of the budget; what remains is returned as rough. On a kink of min or max between several axes
    `euclidean` is the norm of the hull of the slopes, √2 for max(x, y); `per_axis` is sharp there.
    With a region only the boxes that may meet it count: the bounds hold along segments inside it.
    If `progress` stops the search, the bounds reached are returned, provided that they are finite everywhere.
    Raises `NonFiniteValueError` where f is undefined or unbounded, naming the place; `DomainError` unless lo < hi.

    >>> from partita.functions import parse
    >>> bounds = lipschitz_bounds(parse("sin(3*x)", ["x"]), [0.0], [1.0])
    >>> bounds.is_lipschitz, round(bounds.euclidean, 1)
    (True, 3.0)
    """
    lo, hi = _domain(graph, lo, hi)
    max_boxes = _budget(graph) if max_boxes is None else max_boxes
    search = _Search(graph, lo, hi, relative_gap, rough_resolution, region)
    try:
        while search.boxes_used < max_boxes and search.refine(max_boxes):
            if progress is not None:
                progress("slopes", search.boxes_used, max_boxes)
    except BudgetSpentError:
        if not search.is_bounded:  # more time might have shown that f has finite slopes there
            raise
    return search.result()


def _domain(graph: Graph, lo: Floats, hi: Floats) -> tuple[Floats, Floats]:
    lo, hi = np.asarray(lo, np.float64), np.asarray(hi, np.float64)
    expected = (graph.num_inputs,)
    if lo.shape != expected or hi.shape != expected or not np.all(np.isfinite(hi) & np.isfinite(lo) & (lo < hi)):
        raise DomainError(f"lipschitz_bounds: found lo = {lo}, hi = {hi}, expected finite lo < hi of shape {expected}")
    return lo, hi


class _Search:
    """The state of one bisection: open boxes, rough boxes that stay, and the maxima over all boxes already settled."""

    def __init__(
        self, graph: Graph, lo: Floats, hi: Floats, gap: float, resolution: float, region: Region | None
    ) -> None:
        self.graph, self.sides, self.gap, self.resolution, self.region = graph, hi - lo, gap, resolution, region
        columns = graph.num_inputs + 2
        self.settled, self.observed = np.zeros(columns), np.zeros(columns)
        self.boxes_used = self.boxes_rough = 0
        empty = _Boxes(np.empty((0, len(lo))), np.empty((0, len(lo))), np.empty((0, columns)))
        self.open = self.rough = empty
        self._admit(lo[None], hi[None])

    def refine(self, budget: int) -> bool:
        """Halves the most pressing open boxes; False when none is left."""
        if 2 * self.boxes_rough > budget:
            self._keep_rough(self.open.is_rough)
        if len(self.open) == 0:
            return False
        size = min(_batch(self.graph), 1 + (budget - self.boxes_used) // 2)
        chosen = np.zeros(len(self.open), bool)
        chosen[np.argsort(-self._urgency(), kind="stable")[:size]] = True
        boxes, self.open = self.open[chosen], self.open[~chosen]
        self.boxes_rough += 2 * int(boxes.is_rough.sum())
        rows, axis = np.arange(len(boxes)), self._axis(boxes)
        middle = _middle(boxes)[rows, axis]
        left_hi, right_lo = boxes.hi.copy(), boxes.lo.copy()
        left_hi[rows, axis] = right_lo[rows, axis] = middle
        self._admit(np.concatenate([boxes.lo, right_lo]), np.concatenate([left_hi, boxes.hi]))
        return True

    @property
    def is_bounded(self) -> bool:
        """Whether values and slopes have finite bounds on every box."""
        return not len(self.rough) and bool(np.isfinite(self.open.bounds).all())

    def result(self) -> LipschitzBounds:
        """The bounds over all boxes, settled or not."""
        if (lost := self.open.is_unbounded).any():
            self._refuse(self.open[lost], "within the budget of boxes")
        self._keep_rough(self.open.is_rough)
        self._settle(np.ones(len(self.open), bool))
        self._refuse_undefined(np.concatenate([self.rough.lo, self.rough.hi]))
        return LipschitzBounds(
            euclidean=float(self.settled[0]),
            per_axis=self.settled[1:-1],
            observed=float(self.observed[0]),
            magnitude=float(self.settled[-1]),
            boxes=self.boxes_used,
            rough_lo=self.rough.lo,
            rough_hi=self.rough.hi,
        )

    def _admit(self, lo: Floats, hi: Floats) -> None:
        """Measures new boxes, sorts out those that need no halving, and refuses where f has no value."""
        if self.region is not None:
            kept = ~self.region.outside(lo, hi)
            lo, hi = lo[kept], hi[kept]
            if not len(lo):
                return
        bounds, seen = _measure(self.graph, lo, hi, self.region)
        boxes = _Boxes(lo, hi, bounds)
        self.boxes_used += len(boxes)
        self.observed = np.maximum(self.observed, seen)
        if (lost := boxes.is_unbounded).any():
            self._refuse_undefined(_middle(boxes[lost]))
            if (small := lost & (self._width(boxes).max(axis=1) <= VALUE_RESOLUTION)).any():
                self._refuse(boxes[small], f"at {VALUE_RESOLUTION:g} of the sides")
        self.open = self.open.join(boxes)
        steep = np.where(np.isinf(self.open.bounds[:, 1:-1]), self._width(self.open), 0.0).max(axis=1)
        self._keep_rough(self.open.is_rough & (steep <= self.resolution))
        self._settle(np.all(self.open.bounds <= self._goal(), axis=1))

    def _goal(self) -> Floats:
        """Bounds at which a box is settled; an axis along which f hardly moves is held to the scale of |∇f|."""
        floor = np.full(len(self.observed), _SMALL_AXIS * self.observed[0])
        floor[-1] = 0.0
        goal: Floats = self.observed + self.gap * np.maximum(self.observed, floor) + np.finfo(np.float64).tiny * 1e6
        return goal

    def _urgency(self) -> Floats:
        """Unbounded boxes lie in (2, 3], the smallest first, to decide soon; rough ones in (1, 2], the largest first;
        the others in (0, 1), by the factor to gain."""
        width = self._width(self.open).max(axis=1)
        with np.errstate(over="ignore"):  # where little was seen yet, as beside a narrow spike
            gain = 1.0 - 1.0 / np.maximum((self.open.bounds / self._goal()).max(axis=1), 1.0)
        urgency: Floats = np.where(self.open.is_unbounded, 3.0 - width, np.where(self.open.is_rough, 1.0 + width, gain))
        return urgency

    def _axis(self, boxes: _Boxes) -> NDArray[np.intp]:
        """The widest axis relative to the domain, weighted by its share in the variation of f; a steep one if any is.

        The weight stays above `_ASPECT`, so no axis is neglected for ever.
        """
        steep = np.isinf(boxes.bounds[:, 1:-1])
        reach = np.where(steep, 0.0, (boxes.hi - boxes.lo) * np.where(steep, 0.0, boxes.bounds[:, 1:-1]))
        share = reach / np.maximum(reach.max(axis=1, keepdims=True), np.finfo(np.float64).tiny)
        weight = np.where(steep.any(axis=1, keepdims=True), steep, _ASPECT + share)
        axis: NDArray[np.intp] = (self._width(boxes) * weight).argmax(axis=1)
        return axis

    def _width(self, boxes: _Boxes) -> Floats:
        return (boxes.hi - boxes.lo) / self.sides

    def _keep_rough(self, mask: Mask) -> None:
        """Takes boxes out of the search as rough; only their bound on |f| counts."""
        if mask.any():
            self.settled[-1] = max(self.settled[-1], self.open.bounds[mask, -1].max())
            self.rough, self.open = self.rough.join(self.open[mask]), self.open[~mask]

    def _settle(self, mask: Mask) -> None:
        """Takes boxes out of the search; their bounds count."""
        if mask.any():
            self.settled = np.maximum(self.settled, self.open.bounds[mask].max(axis=0))
            self.open = self.open[~mask]

    def _refuse_undefined(self, points: Floats) -> None:
        """Raises at a point where f is NaN or infinite."""
        points = points if self.region is None else points[self.region.contains(points)]
        bad = ~np.isfinite(self.graph.evaluate(points).reshape(len(points), len(self.graph.outputs))).all(axis=1)
        if bad.any():
            point, value = points[bad][0], self.graph.evaluate(points[bad][:1])[0]
            raise NonFiniteValueError(
                f"f is {value} at x = {point}; expected finite values",
                "Use a smaller domain, or a region where f is defined (pa.Region, --region).",
            )

    def _refuse(self, boxes: _Boxes, when: str) -> None:
        """Raises for a box over which f has no finite bound."""
        lo, hi = boxes.lo[0], boxes.hi[0]
        raise NonFiniteValueError(
            f"f has no finite bound on the box from {lo} to {hi} ({when}); expected finite values",
            "Keep the domain away from poles, or write f so that they cancel.",
        )


def _budget(graph: Graph) -> int:
    """How many boxes to look at: fewer where each takes many steps.

    In 16 dimensions and more, halving gains little: every axis halved once is 2^m boxes. Each box carries m slopes, so that with
    60 variables 10,000 boxes take a minute.
    """
    boxes = max(2 * BATCH, min(MAX_BOXES, MAX_STEPS // graph.num_steps))
    many = graph.num_inputs // 8
    return boxes if many < 2 else max(32, min(2 * BATCH, boxes // many**2))


def _batch(graph: Graph) -> int:
    """How many boxes to halve at once: fewer where each carries many slopes."""
    return max(16, BATCH // max(1, graph.num_inputs * len(graph.outputs) // 8))


def _middle(boxes: _Boxes) -> Floats:
    return 0.5 * boxes.lo + 0.5 * boxes.hi


def _measure(graph: Graph, lo: Floats, hi: Floats, region: Region | None = None) -> tuple[Floats, Floats]:
    """Upper bounds over each box, (boxes, m + 2), and the largest lower bounds at their midpoints, (m + 2,).

    Slopes inside a rough box do not count: the bounds hold outside of them.
    """
    middle = 0.5 * lo + 0.5 * hi
    value, slopes = graph.enclose_gradient(np.concatenate([lo, middle]), np.concatenate([hi, middle]))
    squares = Interval.point(0.0)
    for axis in range(graph.num_inputs):
        squares = squares + slopes[..., axis].square()
    norm = squares.sqrt()
    highest = np.concatenate([norm.hi[..., None], slopes.magnitude, value.magnitude[..., None]], axis=-1).max(axis=1)
    lowest = np.concatenate([norm.lo[..., None], slopes.mignitude, value.mignitude[..., None]], axis=-1).max(axis=1)
    bounds, seen = highest[: len(lo)], lowest[len(lo) :]
    seen[np.isinf(bounds[:, 0]), :-1] = 0.0
    if region is not None:
        seen[~region.contains(middle)] = 0.0
    return bounds, seen.max(axis=0)
