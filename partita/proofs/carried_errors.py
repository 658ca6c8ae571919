"""Errors carried through a network of heads: ranges of the exact values, and how far the deployed ones may be from them.

Channel by channel, for a batch of boxes at once. With stored coefficients w̃, exact ones w, and channels that are off by e,
`|ũ − u| ≤ δ = |w̃|e + |w̃ − w||c| + |b̃ − b| + 1.01·n·unit·(|w̃||c̃| + |b̃|)` for a read of n terms, and a head within ε of its
function g is off by `ε + Σ_i L_i δ_i`, L_i the largest slope of g along input i over the range of u widened by δ.
*Theorem*: `carried-errors`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from partita.arithmetic.interval import Interval
from partita.arithmetic.precision import Precision
from partita.arithmetic.rounding import down, up
from partita.errors import ShapeError, UnsupportedError
from partita.functions.graph import Graph, GraphBuilder
from partita.functions.ranges import enclose_each, range_over
from partita.geometry.domains import Array
from partita.heads.wiring import Affine, Group, Wiring

__all__ = [
    "MOST_BOXES",
    "Carried",
    "LocalError",
    "Ranges",
    "Reads",
    "Shares",
    "cut_boxes",
    "joint_ranges",
    "propagate",
    "require_bounded",
    "shown",
]

Mask = NDArray[np.bool_]
LocalError = Callable[[Array, Array], Array]  # corners (n, k) of boxes to bounds of |head − g| on each, (n,)
Ranges = Sequence[Sequence[Interval | None]]  # for every group of every layer: ranges of its reads, (rows,)

MOST_BOXES = 4096  # into which a domain is cut
_UNIT = 2.0**-53
_MOST_ROUNDINGS = 0.009  # n·unit, up to which (1 + unit)^n − 1 ≤ 1.01·n·unit
_MOST_NODES = 4000  # of a network that is written out as one function of its inputs
_LONGEST = 60  # characters of a formula in a message
_quiet = np.errstate(all="ignore")


@dataclass(frozen=True, eq=False)
class Reads:
    """What the uses of one head in one layer read; arrays are `(batch, uses, inputs of the head)`.

    Attributes:
        lo, hi: the ranges of the exact reads u.
        reach_lo, reach_hi: ranges that hold u and ũ.
        error: δ, a bound of |ũ − u|; 0 for inputs that are read as they are, see `moves`.
        stored: the part of δ that inexact coefficients add in this map.
        rounded: the part of δ that evaluating this map adds.
        moves: which reads may differ from the exact ones, `(uses, inputs)`. An input that is read as it is does not: the head's own
            claim covers that it is rounded.
        slopes: L, the largest slope of g over the reach along each input that moves; 0 along the others.
        head_error: ε of each use, `(batch, uses)`.
    """

    lo: Array
    hi: Array
    reach_lo: Array
    reach_hi: Array
    error: Array
    stored: Array
    rounded: Array
    moves: Mask
    slopes: Array
    head_error: Array


@dataclass(frozen=True, eq=False)
class Shares:
    """What each cause adds to the error of every output, `(batch, outputs)`; `heads` is `(batch, outputs, heads)`."""

    heads: Array
    coefficients: Array
    rounding: Array
    inputs: Array

    @property
    def total(self) -> Array:
        """Their sum, rounded up, `(batch, outputs)`."""
        return _sum(np.concatenate([self.heads, np.stack([self.coefficients, self.rounding, self.inputs], -1)], -1))


@dataclass(frozen=True, eq=False)
class Carried:
    """Ranges and errors of a network on a batch of boxes.

    Attributes:
        wiring: of the network.
        precision: that the network runs in.
        reads: for every group of every layer.
        values: the ranges of the exact channels, `(batch, channels)`.
        error: bounds of how far the deployed channels are from them, `(batch, channels)`.
        output: the ranges of the exact outputs, `(batch, outputs)`.
        output_error: bounds of the error of the outputs, `(batch, outputs)`.
        output_stored, output_rounded: the parts of it that the last affine map adds, `(batch, outputs)`.
    """

    wiring: Wiring
    precision: Precision
    reads: tuple[tuple[Reads, ...], ...]
    values: Interval
    error: Array
    output: Interval
    output_error: Array
    output_stored: Array
    output_rounded: Array

    def groups(self) -> Iterator[tuple[int, Group, Reads]]:
        """The first channel, the wiring and the reads of every group, in order."""
        channel = self.wiring.inputs
        for groups, reads in zip(self.wiring.layers, self.reads):
            for group, read in zip(groups, reads):
                yield channel, group, read
                channel += len(read.moves)

    @cached_property
    def bound(self) -> float:
        """A bound of the error of every output on every box, infinite if none is known."""
        heads = 1 + max((group.head for _, group, _ in self.groups()), default=-1)
        return float(self.shares(heads).total.max())

    @cached_property
    def gains(self) -> Array:
        """How far one unit of error at a channel moves an output at most, `(batch, outputs, channels)`.

        The recursion for errors is linear in what arises at each channel, and this is its transpose: the error of output o is at
        most `Σ_c gains[o, c]·(what arises at c)`, and what the last affine map adds.
        """
        batch, channels = self.error.shape
        last = _Map(self.wiring.output, self.precision)
        gains = np.zeros((batch, last.rows, channels))
        gains[:, :, last.columns] = last.size
        for first, group, reads in reversed(list(self.groups())):
            read = _Map(group.reads, self.precision)
            added = _weighted(self._onward(gains, first, reads), read.size.T)
            gains[:, :, read.columns] = _plus(gains[:, :, read.columns], added)
        return gains

    @staticmethod
    def _onward(gains: Array, first: int, reads: Reads) -> Array:
        """How far one unit of error in a read moves an output at most, `(batch, outputs, rows)`."""
        uses = gains[:, :, first : first + len(reads.moves), None]
        found = _times(uses, reads.slopes[:, None])
        return found.reshape(*found.shape[:2], -1)

    def shares(self, heads: int) -> Shares:
        """What each of the heads, the coefficients, the affine maps and the rounding of inputs add to the error of every output.

        Args:
            heads: the number of distinct heads.
        """
        m = self.wiring.inputs
        by_head = np.zeros((*self.output_error.shape, heads))
        stored, rounded = self.output_stored, self.output_rounded
        inputs = _sum(_times(self.gains[:, :, :m], self.error[:, None, :m]))
        for first, group, reads in self.groups():
            uses = len(reads.moves)
            found = _sum(_times(self.gains[:, :, first : first + uses], reads.head_error[:, None]))
            by_head[:, :, group.head] = _plus(by_head[:, :, group.head], found)
            onward = self._onward(self.gains, first, reads)
            rows = (len(self.error), 1, onward.shape[-1])
            stored = _plus(stored, _sum(_times(onward, reads.stored.reshape(rows))))
            rounded = _plus(rounded, _sum(_times(onward, reads.rounded.reshape(rows))))
        return Shares(by_head, stored, rounded, inputs)


def cut_boxes(lo: Array, hi: Array, cuts: Sequence[Sequence[float]]) -> tuple[Array, Array]:
    """The boxes into which points on each axis cut a box, `(boxes, m)` corners.

    A network's error on the whole box is the largest on any of these, and on small boxes ranges are narrow and slopes close to
    what they are at a point.

    Args:
        lo: lower corner, `(m,)`.
        hi: upper corner.
        cuts: for each axis points inside, increasing; none leaves the axis whole.
    """
    ends = [np.array([a, *axis, b]) for a, axis, b in zip(lo, cuts, hi, strict=True)]
    count = math.prod(len(e) - 1 for e in ends)
    lower, upper = np.empty((count, len(ends))), np.empty((count, len(ends)))
    left, number = count, np.arange(count)
    for axis, e in enumerate(ends):  # np.meshgrid has at most 64 axes
        left //= len(e) - 1
        place = number // left % (len(e) - 1)
        lower[:, axis], upper[:, axis] = e[place], e[place + 1]
    return lower, upper


def propagate(
    wiring: Wiring,
    graphs: Sequence[Graph],
    errors: Sequence[float],
    box_lo: Array,
    box_hi: Array,
    *,
    precision: Precision,
    ranges: Ranges | None = None,
    local: Sequence[LocalError | None] | None = None,
) -> Carried:
    """Ranges, reaches and errors of every channel and output of a network on a batch of boxes. *Theorem*: `carried-errors`.

    Nothing is refused here: where a range has a pole or a slope has no bound, ranges and errors are infinite. `require_bounded`
    says where that happened.

    Args:
        wiring: of the network. Its coefficients are those of the exact function; the network stores them rounded to its dtype.
        graphs: the function g of each head.
        errors: a bound of |head − g| for each head, on the box that it was compiled for.
        box_lo: lower corners of the boxes of inputs, `(batch, inputs)`.
        box_hi: upper corners; the same for points.
        precision: that the network runs in.
        ranges: known ranges of reads, from `joint_ranges` on a box that holds all of these.
        local: for each head None, or a function that bounds its error on boxes of its inputs; used where it is smaller.

    Raises:
        ShapeError: corners of another shape, or a group whose rows are not a multiple of its head's inputs.
    """
    lo, hi = np.broadcast_arrays(np.asarray(box_lo, np.float64), np.asarray(box_hi, np.float64))
    if lo.ndim != 2 or lo.shape[1] != wiring.inputs:
        raise ShapeError(f"propagate: the boxes have shape {lo.shape}; expected (batch, {wiring.inputs}).")
    values, error = Interval(lo, hi), precision.moved(lo, hi)
    carried = []
    for layer, groups in enumerate(wiring.layers):
        found = []
        for place, group in enumerate(groups):
            known = None if ranges is None else ranges[layer][place]
            one = None if local is None else local[group.head]
            read = _read(
                group, values, error, graphs[group.head], errors[group.head], wiring.inputs, precision, known, one
            )
            found.append(read)
        carried.append(tuple(reads for reads, _ in found))
        for reads, outcome in found:
            values = Interval(np.hstack([values.lo, outcome.lo]), np.hstack([values.hi, outcome.hi]))
            moved = _plus(reads.head_error, _sum(_times(reads.slopes, reads.error)))
            error = np.hstack([error, moved])
    last = _Map(wiring.output, precision)
    output = last.enclose(values)
    off, stored, rounded = last.errors(values, error)
    return Carried(wiring, precision, tuple(carried), values, error, output, off, stored, rounded)


def _read(
    group: Group,
    values: Interval,
    error: Array,
    graph: Graph,
    bound: float,
    inputs: int,
    precision: Precision,
    known: Interval | None,
    local: LocalError | None,
) -> tuple[Reads, Interval]:
    """The reads of a group, and the ranges of the exact channels that its uses make, `(batch, uses)`."""
    read, k, batch = _Map(group.reads, precision), graph.num_inputs, len(error)
    if read.rows % k:
        raise ShapeError(f"a group has {read.rows} rows for a head of {k} inputs; expected a multiple of {k}.")
    shape = (batch, read.rows // k, k)
    u = read.enclose(values)
    if known is not None:
        u = _met(u, known)
    moves = ~(read.alone & (read.first < inputs))
    off, stored, rounded = (np.where(moves, part, 0.0) for part in read.errors(values, error))
    reach = _widened(u, off)
    left, right = reach.lo.reshape(-1, k), reach.hi.reshape(-1, k)
    outcome, slope = enclose_each(graph, u.lo.reshape(-1, k), u.hi.reshape(-1, k))
    if moves.any() and (off > 0).any():
        _, slope = enclose_each(graph, left, right)
    slopes = np.where(moves.reshape(shape[1:]), slope.magnitude.reshape(shape), 0.0)
    own = np.full(len(left), float(bound))
    if local is not None:
        own = np.fmin(own, local(left, right))
    u_lo, u_hi, reach_lo, reach_hi = (end.reshape(shape) for end in (u.lo, u.hi, reach.lo, reach.hi))
    reads = Reads(
        lo=u_lo,
        hi=u_hi,
        reach_lo=reach_lo,
        reach_hi=reach_hi,
        error=off.reshape(shape),
        stored=stored.reshape(shape),
        rounded=rounded.reshape(shape),
        moves=moves.reshape(shape[1:]),
        slopes=slopes,
        head_error=own.reshape(shape[:2]),
    )
    return reads, Interval(outcome.lo.reshape(shape[:2]), outcome.hi.reshape(shape[:2]))


@_quiet
def _widened(u: Interval, off: Array) -> Interval:
    return Interval(np.where(off > 0, down(u.lo - off), u.lo), np.where(off > 0, up(u.hi + off), u.hi))


def _met(u: Interval, known: Interval) -> Interval:
    """What two enclosures of the same numbers have in common."""
    lo, hi = np.maximum(u.lo, known.lo), np.minimum(u.hi, known.hi)
    fits = lo <= hi
    return Interval(np.where(fits, lo, u.lo), np.where(fits, hi, u.hi))


class _Map:
    """An affine map as it is stored in the precision, and how far its numbers are from the exact ones."""

    def __init__(self, given: Affine, precision: Precision) -> None:
        self.precision = precision
        self.rows, width = given.weight.shape
        self.columns = slice(given.start, given.start + width)
        with np.errstate(all="ignore"):
            self.weight, self.bias = precision.rounded(given.weight), precision.rounded(given.bias)
            self.size, self.offset = np.abs(self.weight), np.abs(self.bias)
            off, bias_off = np.abs(self.weight - given.weight), np.abs(self.bias - given.bias)
        off, bias_off = np.where(off > 0, up(off), off), np.where(bias_off > 0, up(bias_off), bias_off)
        for (row, column), exact in given.exact.items():
            stored = self.bias[row] if column < 0 else self.weight[row, column]
            distance = _above(abs(exact - Fraction(float(stored)))) if math.isfinite(stored) else math.inf
            if column < 0:
                bias_off[row] = distance
            else:
                off[row, column] = distance
        self.off, self.bias_off = off, bias_off
        self.terms = np.count_nonzero(self.weight, axis=1) + (self.bias != 0)
        self.exactly = (off == 0).all(axis=1) & (bias_off == 0)
        only = np.argmax(self.size, axis=1)
        # ±1 times one channel: neither the range nor the number that is read is rounded
        one = (self.size[np.arange(self.rows), only] == 1.0) & (self.bias == 0) & self.exactly
        self.alone: Mask = (self.terms == 1) & one
        self.first = given.start + only
        self.sign = np.sign(self.weight[np.arange(self.rows), only])

    @_quiet
    def enclose(self, channels: Interval) -> Interval:
        """`W c + b` with the exact coefficients, over ranges of all channels: `(batch, channels)` to `(batch, rows)`."""
        lo, hi = channels.lo[:, self.columns], channels.hi[:, self.columns]
        bounded = np.isfinite(lo) & np.isfinite(hi)
        middle = np.where(bounded, 0.5 * lo + 0.5 * hi, 0.0)
        radius = np.where(bounded & (lo < hi), up(np.maximum(hi - middle, middle - lo)), 0.0)
        size = np.abs(middle) + radius
        padding = 4 * (self.terms + 8) * _UNIT * (size @ self.size.T + self.offset) + 2.0**-1000
        spread = radius @ self.size.T + (size @ self.off.T + self.bias_off) * (1 + 2.0**-20) + 2 * padding
        center = middle @ self.weight.T + self.bias
        unknown = (~bounded).astype(np.float64) @ ((self.weight != 0) | (self.off != 0)).T.astype(np.float64) > 0
        lost = unknown | ~np.isfinite(center) | ~np.isfinite(spread)
        least, most = np.where(lost, -math.inf, center - spread), np.where(lost, math.inf, center + spread)
        a, b = channels.lo[:, self.first], channels.hi[:, self.first]
        least = np.where(self.alone, np.where(self.sign > 0, a, -b), least)
        most = np.where(self.alone, np.where(self.sign > 0, b, -a), most)
        return Interval(least, most)

    @_quiet
    def errors(self, channels: Interval, error: Array) -> tuple[Array, Array, Array]:
        """δ of every row, and the parts of it that the stored numbers and the rounding of this map add, `(batch, rows)`.

        Products below the normal numbers lose up to `tiniest` each. Where a sum may overflow the error is infinite.
        """
        size, off = channels.magnitude[:, self.columns], error[:, self.columns]
        deployed = _plus(size, off)
        reached = _plus(_weighted(deployed, self.size), self.offset)
        stored = _plus(_weighted(size, self.off), self.bias_off)
        unit = self.precision.unit
        rounded = up(1.01 * self.terms * unit * reached, 4) + (self.terms + 4) * self.precision.tiniest
        rounded = np.where(self.terms * unit > _MOST_ROUNDINGS, math.inf, rounded)
        rounded = np.where(self.alone | (self.terms == 0), 0.0, rounded)
        largest = self.precision.largest / 16
        overflows = (reached > largest) | np.isnan(reached) | (self.size.max(axis=1, initial=0.0) > largest)
        overflows |= ~(np.isfinite(self.weight).all(axis=1) & np.isfinite(self.bias))
        rounded = np.where(overflows, math.inf, rounded)
        arrived = np.where(self.alone, error[:, self.first], _weighted(off, self.size))
        return _plus(arrived, _plus(stored, rounded)), stored, rounded


def _above(exact: Fraction) -> float:
    """A float ≥ a number ≥ 0."""
    try:
        return float(up(float(exact))) if exact else 0.0
    except OverflowError:
        return math.inf


@_quiet
def _times(a: Array, b: Array) -> Array:
    """a·b of numbers ≥ 0, rounded up; 0·∞ = 0, as each bounds a real number."""
    return np.where((a == 0) | (b == 0), 0.0, up(np.asarray(a * b), 2))


@_quiet
def _plus(a: Array, b: Array) -> Array:
    """a + b of numbers ≥ 0, rounded up."""
    total = np.asarray(a + b)
    return np.where((a == 0) | (b == 0), total, up(total))


@_quiet
def _sum(parts: Array) -> Array:
    """The sum of numbers ≥ 0 over the last axis, rounded up."""
    total = parts.sum(axis=-1)
    return np.where(total == 0, 0.0, up(total * (1 + 4 * (parts.shape[-1] + 4) * _UNIT), 2))


@_quiet
def _weighted(parts: Array, matrix: Array) -> Array:
    """`Σ_c matrix[r, c]·parts[…, c]` of numbers ≥ 0, rounded up; 0·∞ = 0, and a product that underflows is not 0."""
    n = matrix.shape[1]
    infinite = ~(parts < math.inf)
    finite = np.where(infinite, 0.0, parts)
    total = finite @ matrix.T
    counts = (parts != 0).astype(np.float64) @ (matrix != 0).T.astype(np.float64)
    total = np.where(counts == 0, 0.0, up(total * (1 + 4 * (n + 4) * _UNIT), 2 + n))
    if infinite.any():
        total = np.where(infinite.astype(np.float64) @ (matrix != 0).T.astype(np.float64) > 0, math.inf, total)
    return np.where(np.isnan(total), math.inf, total)


def shown(graph: Graph) -> str:
    """The function as text for messages, cut short where it is long."""
    if len(graph.nodes) > _LONGEST:
        return f"a function of {graph.num_inputs} variables"
    text = graph.infix()
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


def require_bounded(carried: Carried, graphs: Sequence[Graph]) -> None:
    """Check that every range and every error is finite.

    Args:
        carried: from `propagate`.
        graphs: the function of each head.

    Raises:
        UnsupportedError: a range with a pole, a slope without a bound, or a sum that may overflow. The message names the first head
            where it happens, and the range that it reads.
    """
    layer_of = [n for n, groups in enumerate(carried.wiring.layers) for _ in groups]
    for layer, (first, group, reads) in zip(layer_of, carried.groups()):
        values = carried.values[:, first : first + len(reads.moves)]
        unknown = ~(np.isfinite(values.lo) & np.isfinite(values.hi))
        steep = (np.isinf(reads.slopes) & (reads.error > 0)).any(axis=2)
        off = ~np.isfinite(carried.error[:, first : first + len(reads.moves)])
        for bad, problem in (
            (unknown, "no bound of its values was found there: the range may contain a pole"),
            (steep, "its slope has no bound there, so that errors in what it reads cannot be bounded"),
            (off, "sums may overflow, or what it reads has no bound"),
        ):
            if bad.any():
                box, use = (int(i[0]) for i in np.nonzero(bad))
                lo, hi = reads.reach_lo[box, use], reads.reach_hi[box, use]
                where = " × ".join(f"[{a:.6g}, {b:.6g}]" for a, b in zip(lo, hi))
                text = shown(graphs[group.head])
                raise UnsupportedError(
                    f"network: use {use} of the head for {text} in layer {layer + 1} reads {where}; {problem}",
                    "Use a smaller domain, or another way to write the function.",
                )
    if not np.isfinite(carried.output_error).all():
        raise UnsupportedError(
            f"network: sums of the output may overflow {carried.precision.name}, or the rounding of that many terms has no bound",
            "Rescale the function.",
        )


def joint_ranges(wiring: Wiring, graphs: Sequence[Graph], lo: Array, hi: Array, *, boxes: int = 512) -> Ranges:
    """Ranges of reads on a box, each looked at as one function of the inputs; None for groups where that gains nothing.

    The ranges that `propagate` finds treat the channels of a read as if they were independent. That is exact unless an input
    reaches a read in two ways. For those reads the network up to there is written out as a function of the inputs, and `range_over`
    encloses it; earlier reads are clamped to their ranges, which changes no value.

    Args:
        wiring: of the network.
        graphs: the function of each head.
        lo: lower corner of the box of inputs, `(inputs,)`.
        hi: upper corner.
        boxes: about how many boxes to look at for each end of a range.
    """
    nothing = [[None] * len(groups) for groups in wiring.layers]
    uses = sum(
        g.reads.rows // graphs[g.head].num_inputs * len(graphs[g.head].nodes) for gs in wiring.layers for g in gs
    )
    terms = sum(int(np.count_nonzero(g.reads.weight)) for gs in wiring.layers for g in gs)
    if 2 * terms + uses > _MOST_NODES or not any(
        row for layer in _entangled(wiring, graphs) for g in layer for row in g
    ):
        return nothing
    builder = GraphBuilder(wiring.inputs)
    channels = [builder.add("input", parameters=(i,)) for i in range(wiring.inputs)]
    found: list[list[Interval | None]] = []
    for groups, marks in zip(wiring.layers, _entangled(wiring, graphs)):
        here, made = list[Interval | None](), list[int]()
        for group, entangled in zip(groups, marks):
            rows, (least, most) = list[int](), (np.full(len(entangled), end) for end in (-math.inf, math.inf))
            for row, is_entangled in enumerate(entangled):
                place = _affine_node(builder, group.reads, row, channels)
                if is_entangled:
                    known = range_over(builder.finish([place], ()), lo, hi, boxes=boxes)
                    least[row], most[row] = known.lo[0], known.hi[0]
                    if np.isfinite(known.lo[0]) and np.isfinite(known.hi[0]):
                        place = builder.add("clamp", place, parameters=(float(known.lo[0]), float(known.hi[0])))
                rows.append(place)
            here.append(Interval(least, most) if any(entangled) else None)
            k = graphs[group.head].num_inputs
            made += [_inlined(builder, graphs[group.head], rows[i : i + k]) for i in range(0, len(rows), k)]
        channels += made
        found.append(here)
    return found


def _entangled(wiring: Wiring, graphs: Sequence[Graph]) -> list[list[list[bool]]]:
    """Which rows of each group read channels whose ranges, taken as independent, give more than the range of the row.

    Two channels that depend on one input are not independent, and neither are two such reads of one use. A function of one read
    whose range is exact has an exact range again.
    """
    inputs = [1 << i for i in range(wiring.inputs)]  # those that a channel depends on, as bits
    exact = [True] * wiring.inputs
    layers = []
    for groups in wiring.layers:
        marks, made = [], list[tuple[int, bool]]()
        for group in groups:
            k, rows, bits = graphs[group.head].num_inputs, list[bool](), list[int]()
            for weights in group.reads.weight:
                columns = [group.reads.start + int(c) for c in np.flatnonzero(weights)]
                union, shared = _union([inputs[c] for c in columns])
                bits.append(union)
                rows.append(shared or not all(exact[c] for c in columns))
            marks.append(rows)
            for i in range(0, len(rows), k):
                union, shared = _union(bits[i : i + k])
                made.append((union, not shared))
        layers.append(marks)
        inputs += [union for union, _ in made]
        exact += [is_exact for _, is_exact in made]
    return layers


def _union(parts: Sequence[int]) -> tuple[int, bool]:
    """The union of sets, written as bits, and whether two of them have an element in common."""
    union, shared = 0, False
    for bits in parts:
        shared |= bool(union & bits)
        union |= bits
    return union, shared


def _affine_node(builder: GraphBuilder, given: Affine, row: int, channels: Sequence[int]) -> int:
    """The node of one row with its exact coefficients."""
    terms = []
    for column in map(int, np.flatnonzero(given.weight[row])):
        weight = given.exact.get((row, column), Fraction(float(given.weight[row, column])))
        channel = channels[given.start + column]
        terms.append(channel if weight == 1 else builder.add("mul", _number(builder, weight), channel))
    bias = given.exact.get((row, -1), Fraction(float(given.bias[row])))
    if bias or not terms:
        terms.append(_number(builder, bias))
    return terms[0] if len(terms) == 1 else builder.add("sum", *terms)


def _number(builder: GraphBuilder, exact: Fraction) -> int:
    """The node of a rational number, exactly: a float, or a quotient of sums of floats."""
    if Fraction(float(exact)) == exact:
        return builder.add("const", parameters=(float(exact),))
    top, bottom = (_whole(builder, n) for n in (exact.numerator, exact.denominator))
    return builder.add("div", top, bottom)


def _whole(builder: GraphBuilder, number: int) -> int:
    """The node of an integer, exactly, as a sum of floats."""
    parts = list[int]()
    while number or not parts:
        nearest = float(number)
        parts.append(builder.add("const", parameters=(nearest,)))
        number -= int(nearest)
    return parts[0] if len(parts) == 1 else builder.add("sum", *parts)


def _inlined(builder: GraphBuilder, graph: Graph, arguments: Sequence[int]) -> int:
    """The node of a function with one output, applied to nodes."""
    places = list[int]()
    for node in graph.nodes:
        if node.operation == "input":
            places.append(arguments[int(node.parameters[0])])
        else:
            places.append(builder.add(node.operation, *(places[k] for k in node.arguments), parameters=node.parameters))
    return places[graph.outputs[0]]
