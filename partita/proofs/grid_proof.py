"""Proving the error of a head on a product grid, whatever its values: f − net as a Taylor polynomial on every box.

On a box `c + r∘t` the graph gives f as a polynomial with a remainder, the softmax weights of every axis are polynomials with a
remainder (`weight-series`), and contracting them with the values gives the net's. In the difference the two cancel to what the head
really errs; only the remainders do not, and those fall like the (d+1)-st power of the width. *Theorem*: `taylor-proof`.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from partita.arithmetic.progress import Progress, report
from partita.errors import BudgetSpentError
from partita.functions.graph import Graph
from partita.functions.regions import Region
from partita.geometry.domains import Array
from partita.proofs.polynomials import bound_ranges
from partita.proofs.shards import ROUND, SHARDED, SHARDS
from partita.proofs.weight_series import WeightSeries, slope_series, weight_series
from partita.workers import crew

__all__ = ["GridProof", "SoftGrid", "prove_grid"]

Labels = NDArray[np.int64]

_U = 2.0**-53
_INFLATE = 1 + 1e-12
_TINY = 1e-300  # more than all that underflow takes from one sum here
_ENTRIES_AT_ONCE = 1 << 23  # floats of one intermediate of the contraction
_LEFT_AT_ONCE = 1 << 16
_MOST_BOXES = 1 << 17
_LONGEST_AXIS = 4096  # centers: beyond, boxes are too many
_REMAINDER_SHARE = 0.03  # of the goal, that remainders may take before a box is halved
_NARROWEST = 2.0**-9  # of a side, of boxes that are halved only because they reach beyond the region


@dataclass(frozen=True, eq=False)
class SoftGrid:
    """A head on a product grid in exact arithmetic: `axes` of centers, `rates` R_i, `values` `(P_1, …, P_m, out)`.

    For affine values `V_j + J_j(z − o)`: `slopes` J, `(P_1, …, P_m, out, m)`, and `origin` o, `(m,)`.
    """

    axes: tuple[Array, ...]
    rates: tuple[float, ...]
    values: Array
    slopes: Array | None = None
    origin: Array | None = None

    @property
    def outputs(self) -> int:
        return int(self.values.shape[-1])

    @cached_property
    def table(self) -> Array:
        """All that is averaged, `(P_1, …, P_m, columns)`: the values, then the slopes of every output along axis 0, 1, …"""
        if self.slopes is None:
            return self.values
        return np.concatenate([self.values, *np.moveaxis(self.slopes, -1, 0)], axis=-1)

    def hull(self, middle: Array, radius: Array) -> tuple[Array, Array]:
        """What the values lie between on boxes, `(boxes, out)`."""
        m, outputs = len(self.axes), self.outputs
        flat = self.table.reshape(-1, self.table.shape[-1])
        lo, hi = (np.tile(end[:outputs], (len(middle), 1)) for end in (flat.min(axis=0), flat.max(axis=0)))
        if self.slopes is None or self.origin is None:
            return lo, hi
        for i in range(m):
            rise = np.abs(flat[:, outputs * (i + 1) : outputs * (i + 2)]).max(axis=0)
            away = (np.abs(middle[:, i] - self.origin[i]) + radius[:, i])[:, None] * rise * _INFLATE
            lo, hi = lo - away, hi + away
        pad = 4 * _U * m * np.maximum(np.abs(lo), np.abs(hi))
        return lo - pad, hi + pad

    def steepness(self, axis: int) -> float:
        """About how much larger the slopes of the weights along an axis are than the weights: √R."""
        return max(math.sqrt(self.rates[axis]), 1e-300)


@dataclass(frozen=True)
class GridProof:
    """`sup |f − net| ≤ bound` on the box, for the exact head. `least` is attained, so the truth lies between.

    `settled`: whether the bound meets the goal; if not, it is the valid bound reached so far, coarse where boxes were left out.
    `shards`: of a long proof, the bounds of the parts of the box, whose maximum is the bound.
    """

    bound: float
    least: float
    settled: bool
    degree: int
    boxes: int
    pieces: int
    shards: tuple[float, ...] = ()


def prove_grid(
    grid: SoftGrid,
    graph: Graph,
    lo: Array,
    hi: Array,
    *,
    goal: float,
    region: Region | None = None,
    shift: Array | None = None,
    along: int | None = None,
    max_boxes: int = _MOST_BOXES,
    max_pieces: int = 1 << 20,
    progress: Progress | None = None,
) -> GridProof:
    """Bound `sup |f − net|` over the box [lo, hi], halving boxes until remainders are small against the goal.

    With `along`, bound `sup |f − ∂net/∂z_along|` instead. At most `max_pieces` parts of a batch of boxes are looked at for the
    range of their polynomials.

    With a region the bound is over the points that lie within `shift`, `(m,)`, of it: boxes that are proved to lie farther away
    are left out, and those that reach beyond it are halved where their bound is above the goal. *Theorem*: `regions`.
    """
    if max(len(a) for a in grid.axes) > _LONGEST_AXIS:
        return GridProof(math.inf, 0.0, False, 0, 0, 0)
    scale = 1.0 if along is None else grid.steepness(along)
    degree, counts = _opening(grid, lo, hi, goal / scale)
    difference = _Difference(grid, graph, degree, along)
    step = difference.boxes_at_once()
    middle, radius = _product_boxes(lo, hi, counts)
    allowed = max(_REMAINDER_SHARE * goal, 2 * difference.rounding_at(middle[:: max(1, len(middle) // 64)]))
    edge = _Edge(region, hi - lo, np.zeros(len(lo)) if shift is None else shift)
    measuring = _Measuring(difference, edge, goal, allowed, max_pieces)
    shard: Labels = np.arange(len(middle)) * SHARDS // len(middle)
    open_boxes = edge.near(_Boxes(middle, radius, np.full(len(middle), np.inf), shard))
    shards, least, looked, pieces, batches = np.zeros(SHARDS), 0.0, 0, 0, 0
    while len(open_boxes) and looked < max_boxes and least <= goal:
        # later batches of one round do not know what earlier ones attained, so that workers may take them side by side
        count = min(ROUND if batches >= ROUND else 1, -(-(max_boxes - looked) // step))
        now = [part for part in open_boxes.cut(step, count) if len(part)]
        waiting, taken = open_boxes.after(sum(map(len, now))), 0
        children: list[_Boxes] = []
        try:
            tasks = [(part.middle, part.radius, least) for part in now]
            for part, found in zip(now, crew().spread(_measured, measuring, tasks, progress)):
                reached, splittable, blame, attained, looked_at = found
                taken, looked, pieces = taken + 1, looked + len(part), pieces + looked_at
                least = max(least, attained)
                np.maximum.at(shards, part.shard[~splittable], reached[~splittable])
                children.append(edge.near(part.halves(splittable, blame, reached)))
            open_boxes = _Boxes.joined([*reversed(children), waiting])
            batches += len(now)
            report(progress, "proof", looked, looked + len(open_boxes))
        except BudgetSpentError:
            if taken < len(now):
                open_boxes = _Boxes.joined([*reversed(children), *now[taken:], waiting])
            break
    if len(open_boxes):
        np.maximum.at(shards, open_boxes.shard, _without_polynomials(difference, open_boxes))
    bound = float(shards.max())
    listed = tuple(shards.tolist()) if looked >= SHARDED and math.isfinite(bound) else ()
    return GridProof(bound, least, bound <= goal, degree, looked, pieces, listed)


@dataclass(frozen=True, eq=False)
class _Boxes:
    """Boxes `middle ± radius`, `(n, m)`, a bound `limit` on the box that each is half of, and the shard to which it belongs."""

    middle: Array
    radius: Array
    limit: Array
    shard: Labels

    def __len__(self) -> int:
        return len(self.middle)

    def take(self, chosen: slice | NDArray[np.bool_]) -> _Boxes:
        return _Boxes(self.middle[chosen], self.radius[chosen], self.limit[chosen], self.shard[chosen])

    def cut(self, size: int, count: int) -> list[_Boxes]:
        """The first boxes, in `count` parts of `size`."""
        return [self.take(slice(i * size, (i + 1) * size)) for i in range(count)]

    def after(self, count: int) -> _Boxes:
        return self.take(slice(count, None))

    @classmethod
    def joined(cls, parts: list[_Boxes]) -> _Boxes:
        columns = ([getattr(part, f.name) for part in parts] for f in fields(cls))
        return cls(*map(np.concatenate, columns))

    def halves(self, chosen: NDArray[np.bool_], blame: Array, reached: Array) -> _Boxes:
        """Both halves of the chosen boxes along the axis to blame for the remainder, widened by a rounding."""
        some, blame = self.take(chosen), blame[chosen]
        rows, axis = np.arange(len(some)), blame.argmax(axis=1) if len(blame) else np.zeros(0, int)
        half = some.radius.copy()
        half[rows, axis] /= 2
        left, right = some.middle.copy(), some.middle.copy()
        left[rows, axis] -= half[rows, axis]
        right[rows, axis] += half[rows, axis]
        half[rows, axis] = half[rows, axis] * (1 + 4 * _U) + 2 * _U * np.abs(some.middle[rows, axis])
        return _Boxes(
            np.concatenate([left, right]),
            np.concatenate([half, half]),
            np.tile(reached[chosen], 2),
            np.tile(some.shard, 2),
        )


@dataclass(frozen=True, eq=False)
class _Measuring:
    """What all batches of a proof have in common."""

    difference: _Difference
    edge: _Edge
    goal: float
    allowed: float
    max_pieces: int


def _measured(
    shared: _Measuring, task: tuple[Array, Array, float], progress: Progress | None
) -> tuple[Array, NDArray[np.bool_], Array, float, int]:
    """Bounds of the boxes, which of them to halve, which axis is to blame, what is attained, and how many pieces were looked at."""
    difference, edge, goal = shared.difference, shared.edge, shared.goal
    (now, size, least), pieces = task, 0
    astride = edge.astride(now, size)
    coefficients, remainder, blame = difference.on(now, size)
    coarse = ((remainder > shared.allowed) & (np.abs(coefficients).sum(axis=1) + remainder > goal)).any(axis=0)
    splittable = coarse & (size > 4 * _U * np.abs(now)).any(axis=1)
    reached = (np.abs(coefficients).sum(axis=1) + remainder).max(axis=0) * _INFLATE
    beyond = (np.abs(coefficients[:, 0]) - remainder > goal).any(axis=0)  # at the middle, or a fault of the head
    splittable |= astride & beyond & edge.is_wide(size)
    for kept in (~splittable & ~astride, ~splittable & astride):
        if not kept.any():
            continue
        flat = np.moveaxis(coefficients[:, :, kept], 0, 1).reshape(coefficients.shape[1], -1)
        rest = remainder[:, kept].reshape(-1)
        found = bound_ranges(
            flat,
            rest,
            difference.exponents,
            goal=goal,
            least=least,
            max_pieces=shared.max_pieces,
            progress=progress,
        )
        pieces += found.pieces
        reached[kept] = found.bounds.reshape(len(coefficients), -1).max(axis=0)
        if not (astride & kept).any():
            least = max(least, found.least)
        else:  # part of the box lies beyond the region, and what is attained there does not count
            splittable |= kept & (reached > goal) & edge.is_wide(size)
    with np.errstate(invalid="ignore"):
        attained = np.where(edge.holds(now), np.abs(coefficients[:, 0]) - remainder, 0.0)
    least = max(least, float(np.nan_to_num(attained, nan=0.0, neginf=0.0).max(initial=0.0)))
    if edge.region is not None:  # to leave the region, or a place where f is undefined, the widest side helps most
        aimless = astride & (~coarse | ~np.isfinite(remainder).all(axis=0))
        blame = np.where(aimless[:, None], size / edge.sides, blame)
    return reached, splittable, blame, least, pieces


@dataclass(frozen=True, eq=False)
class _Edge:
    """Which boxes matter to a region: all of them if there is none. Boxes are widened by `shift`, how far inputs are moved."""

    region: Region | None
    sides: Array
    shift: Array

    def near(self, boxes: _Boxes) -> _Boxes:
        """The boxes that are not proved to lie outside. Only a region needs their limits."""
        if self.region is None:
            return replace(boxes, limit=np.full(len(boxes), np.inf))
        reach = (boxes.radius + self.shift) * _INFLATE + 4 * _U * np.abs(boxes.middle)
        return boxes.take(~self.region.outside(boxes.middle - reach, boxes.middle + reach))

    def astride(self, middle: Array, radius: Array) -> NDArray[np.bool_]:
        """The boxes that are not proved to lie inside."""
        if self.region is None:
            return np.zeros(len(middle), bool)
        reach = radius * _INFLATE + 4 * _U * np.abs(middle)
        return ~self.region.inside(middle - reach, middle + reach)

    def is_wide(self, radius: Array) -> NDArray[np.bool_]:
        return np.asarray((radius > _NARROWEST * self.sides).any(axis=1))

    def holds(self, middle: Array) -> NDArray[np.bool_]:
        return np.ones(len(middle), bool) if self.region is None else self.region.contains(middle)


def _without_polynomials(difference: _Difference, boxes: _Boxes) -> Array:
    """Bounds on boxes that were left out, `(n,)`: f lies in its enclosure, the net between its values. Infinite for slopes."""
    if difference.along is not None:
        return boxes.limit
    parts = []
    for start in range(0, len(boxes), _LEFT_AT_ONCE):
        now = boxes.take(slice(start, start + _LEFT_AT_ONCE))
        f = difference.graph.enclose(now.middle - now.radius, now.middle + now.radius)
        least, most = difference.grid.hull(now.middle, now.radius)
        off = np.maximum(f.hi - least, most - f.lo)
        parts.append(np.minimum(np.nan_to_num(off, nan=np.inf).max(axis=1), now.limit))
    with np.errstate(over="ignore"):
        return np.concatenate(parts) * _INFLATE


def _opening(grid: SoftGrid, lo: Array, hi: Array, goal: float) -> tuple[int, tuple[int, ...]]:
    """Degree and boxes per axis to start with: the cheapest at which the weights' remainders fit into the goal."""
    m, best = len(grid.axes), (math.inf, 8, (1,) * len(grid.axes))
    least, most = grid.hull((lo + hi)[None] / 2, (hi - lo)[None] / 2)
    spread = max(float((most - least).max()), 1e-300)
    for degree in range(2, 13):
        counts = []
        for centers, rate, a, b in zip(grid.axes, grid.rates, lo, hi):
            counts.append(_pieces(centers, rate, a, b, degree, _REMAINDER_SHARE * goal / (4 * m * spread)))
        cost = math.prod(counts) * math.comb(m + degree, m) * (1 + degree / 4)
        best = min(best, (cost, degree, tuple(counts)))
    counts = [min(n, 1 << 12) for n in best[2]]
    while math.prod(counts) > _MOST_BOXES:  # hopeless from the start: a coarse bound is better than none
        longest = counts.index(max(counts))
        counts[longest] = (counts[longest] + 1) // 2
    return best[1], tuple(counts)


def _pieces(centers: Array, rate: float, lo: float, hi: float, degree: int, allowed: float) -> int:
    """How many equal intervals of an axis make the remainders of its weights sum to no more than `allowed`."""
    if len(centers) == 1:
        return 1
    cells = max(1, round((hi - lo) / float(np.diff(centers).mean())))
    ends = np.array([lo, (lo + hi) / 2])
    rounding = weight_series(centers, rate, ends, np.zeros(2), degree=degree).remainder.sum(axis=1).max()
    allowed = max(allowed, 3 * float(rounding))
    for per_cell in (0.5, 1, 2, 4, 8, 16, 32, 64):
        count = max(1, math.ceil(cells * per_cell))
        middle = np.array([(lo + hi) / 2, lo + (hi - lo) / (2 * count)])
        series = weight_series(centers, rate, middle, np.full(2, (hi - lo) / (2 * count)), degree=degree)
        if float(series.remainder.sum(axis=1).max()) <= allowed:
            break
    else:
        return 1 << 20  # never cheapest: rounding alone takes more
    return count


def _product_boxes(lo: Array, hi: Array, counts: tuple[int, ...]) -> tuple[Array, Array]:
    """Centers and radii of boxes that cover [lo, hi], each widened by a rounding."""
    middles, radii = [], []
    for a, b, n in zip(lo, hi, counts):
        edges = np.linspace(a, b, n + 1)
        edges[0], edges[-1] = a, b
        middles.append((edges[1:] + edges[:-1]) / 2)
        radii.append((edges[1:] - edges[:-1]) / 2 * (1 + 4 * _U) + 4 * _U * np.abs(middles[-1]))
    product = [np.stack([g.ravel() for g in np.meshgrid(*parts, indexing="ij")], axis=1) for parts in (middles, radii)]
    return product[0], product[1]


class _Difference:
    """f − net on boxes, or f − ∂net along an axis, as polynomials of one total degree with remainders."""

    def __init__(self, grid: SoftGrid, graph: Graph, degree: int, along: int | None = None) -> None:
        self.grid, self.graph, self.degree, self.along = grid, graph, degree, along
        table = grid.table.reshape(-1, grid.table.shape[-1])
        self.level = (table.max(axis=0) + table.min(axis=0)) / 2  # taken off the values: the weights sum to 1
        self.values = grid.table - self.level
        if grid.slopes is None:
            self.rounded = np.full(1, 2 * _U * (np.abs(table).max() + np.abs(self.level).max()))
        else:  # values and slopes have different units
            self.rounded = 2 * _U * (np.abs(table).max(axis=0) + np.abs(self.level))
        self.heights = [self._height(axis) for axis in range(len(grid.axes))]
        self.exponents = tuple(sorted(_exponents(len(grid.axes), degree), key=lambda e: (sum(e), [-k for k in e])))

    def _height(self, axis: int) -> Array:
        """`max |V|` over the other axes, `(P_axis, out)`."""
        others = tuple(i for i in range(len(self.grid.axes)) if i != axis)
        out: Array = np.abs(self.values).max(axis=others)
        return out

    def boxes_at_once(self) -> int:
        longest = max(len(a) for a in self.grid.axes)
        per_box = max(
            4 * (self.degree + 1) * longest,
            (self.degree + 1) * self.values.size // self.values.shape[0],
            math.comb(len(self.grid.axes) + self.degree, self.degree),
        )
        return int(max(16, min(2048, _ENTRIES_AT_ONCE // per_box)))

    def rounding_at(self, points: Array) -> float:
        """The remainder that is left on boxes of no width: halving cannot get below it."""
        remainder = self.on(points, np.zeros_like(points))[1]
        return float(remainder[np.isfinite(remainder)].max(initial=0.0))

    def on(self, middle: Array, radius: Array) -> tuple[Array, Array, Array]:
        """Coefficients `(out, N, boxes)`, remainders `(out, boxes)`, and which axis is to blame for them `(boxes, m)`."""
        series = [self._series(i, middle[:, i], radius[:, i]) for i in range(len(self.grid.axes))]
        net, net_remainder, shares = self._tilted(self._net(series), middle, radius)
        model = self.graph.taylor(middle, radius, self.degree)
        order = _positions(tuple(map(tuple, model.exponents.tolist())), self.exponents)
        f = model.coefficients[:, order]
        difference = f - net
        remainder = (model.remainder + net_remainder + 2 * _U * np.abs(difference).sum(axis=1)) * _INFLATE
        remainder = np.where(
            np.isnan(remainder), np.inf, remainder
        )  # ∞ · 0: nothing is known, which no maximum may drop
        difference = np.where(np.isfinite(remainder)[:, None], difference, 0.0)
        return difference, remainder, self._blame(f, model.remainder, shares)

    def _series(self, axis: int, middle: Array, radius: Array) -> WeightSeries:
        """The weights' polynomials; boxes that share an interval of the axis share the work."""
        pairs, index = np.unique(np.stack([middle, radius], axis=1), axis=0, return_inverse=True)
        found = weight_series(self.grid.axes[axis], self.grid.rates[axis], pairs[:, 0], pairs[:, 1], degree=self.degree)
        if axis == self.along:
            found = slope_series(found, self.grid.axes[axis], self.grid.rates[axis], pairs[:, 0])
        index = index.reshape(-1)
        return WeightSeries(found.coefficients[index], found.remainder[index])

    def _net(self, series: list[WeightSeries]) -> tuple[Array, Array, Array]:
        """The net's coefficients `(out, N, boxes)`, remainders `(out, boxes)` and each axis's part of them `(boxes, m)`.

        With `|w − q| ≤ ρ` on every axis the products of weights differ from those of polynomials axis by axis:
        `|Σ V(Πw − Πq)| ≤ Σ_i Σ_p ρ_{i,p} max|V_p| · Π(1 + Σρ)`. Slopes of weights sum to 0, and their sizes to `Σ‖q‖ + Σρ`
        at most, which the other axes' parts are multiplied by.
        """
        with np.errstate(invalid="ignore"):  # ∞ · 0 for a value of 0
            parts = np.stack([s.remainder @ h for s, h in zip(series, self.heights)])  # (m, boxes, out)
        parts = np.where(np.isnan(parts), np.inf, parts)
        growth, steep = np.ones(len(series[0].remainder)), np.ones(len(series[0].remainder))
        for i, s in enumerate(series):
            if i == self.along:
                steep = (np.abs(s.coefficients).sum(axis=(1, 2)) + s.remainder.sum(axis=1)) * _INFLATE
            else:
                growth *= 1 + s.remainder.sum(axis=1)
        for i in range(len(series)):
            if i != self.along:
                parts[i] *= steep[:, None]
        coefficients, dropped, size = self._contracted(series)
        steps = sum(len(a) for a in self.grid.axes) + 4 * len(self.grid.axes)
        remainder = parts.sum(axis=0) * growth[:, None] + dropped + 1.01 * steps * _U * size
        remainder += (self.rounded + _TINY)[None] * (steep * growth)[:, None]
        if self.along is None:
            coefficients[:, 0] += self.level
        return np.moveaxis(coefficients, (0, 1, 2), (2, 1, 0)), remainder.T * _INFLATE, parts.max(axis=2).T

    def _tilted(self, sums: tuple[Array, Array, Array], middle: Array, radius: Array) -> tuple[Array, Array, Array]:
        """`net = Σ w V + Σ_i (z_i − o_i) Σ w J_i` from the polynomials of the sums; nothing to do for constant values.

        `z_i − o_i = (c_i − o_i) + r_i t_i`: the second part raises the degree by 1, and what that lifts beyond the degree goes to
        the remainder.
        """
        (table, rest, shares), outputs, m = sums, self.grid.outputs, len(self.grid.axes)
        if self.grid.slopes is None or self.grid.origin is None:
            return sums
        out, remainder = table[:outputs].copy(), rest[:outputs].copy()
        place = {e: n for n, e in enumerate(self.exponents)}
        for i in range(m):
            slope, off = (x[outputs * (i + 1) : outputs * (i + 2)] for x in (table, rest))
            away, wide = middle[:, i] - self.grid.origin[i], radius[:, i]
            size = np.abs(slope).sum(axis=1)
            reach = (np.abs(away) + wide) * _INFLATE
            out += slope * away
            remainder += off * reach + 8 * _U * (m + 2) * size * reach + _TINY
            for n, e in enumerate(self.exponents):
                raised = place.get((*e[:i], e[i] + 1, *e[i + 1 :]))
                if raised is None:
                    remainder += np.abs(slope[:, n]) * wide
                else:
                    out[:, raised] += slope[:, n] * wide
        remainder += 8 * _U * (m + 2) * np.abs(table[:outputs]).sum(axis=1)
        return out, remainder * _INFLATE, shares

    def _contracted(self, series: list[WeightSeries]) -> tuple[Array, Array, Array]:
        """`Σ_j V_j Π_i q_{i,j_i}(t_i)` axis by axis: `(boxes, N, out)`, what lies beyond the total degree `(boxes, out)`, and
        `Σ_j |V_j| Π Σ_k |q_k|`, which rounding is measured by."""
        boxes, degree = len(series[0].remainder), self.degree
        sizes = [np.abs(s.coefficients).sum(axis=1) for s in series]
        kept = np.broadcast_to(self.values.reshape(1, 1, -1), (boxes, 1, self.values.size))
        size = _weighted(np.abs(self.values)[None], sizes)
        exponents: list[tuple[int, ...]] = [()]
        dropped = np.zeros((boxes, self.values.shape[-1]))
        for i, s in enumerate(series):
            count = len(self.grid.axes[i])
            if i == 0:
                stacked = s.coefficients.reshape(-1, count) @ self.values.reshape(count, -1)
                full = stacked.reshape(boxes, 1, degree + 1, -1)
            else:
                full = s.coefficients[:, None] @ kept.reshape(boxes, len(exponents), count, -1)
            totals = np.add.outer([sum(e) for e in exponents], np.arange(degree + 1))
            inside = totals <= degree
            if not inside.all():
                beyond = np.abs(full[:, ~inside]).sum(axis=1).reshape(boxes, *self.values.shape[i + 1 :])
                dropped += _weighted(beyond, sizes[i + 1 :])
            kept = full[:, inside]
            exponents = [(*e, k) for e in exponents for k in range(degree + 1) if sum(e) + k <= degree]
        order = _positions(tuple(exponents), self.exponents)
        return kept[:, order], dropped * _INFLATE, size * _INFLATE

    def _blame(self, f: Array, f_remainder: Array, shares: Array) -> Array:
        """Which axis to halve: the weights' own remainders, and for f's the axis that its highest coefficients follow."""
        powers = np.array(self.exponents, dtype=float)
        top = powers.sum(axis=1) >= max(1, self.degree - 1)
        moved = np.abs(f).max(axis=0)  # (N, boxes)
        follow = moved[top].T @ powers[top]
        plain = moved.T @ powers
        follow = np.where(follow.sum(axis=1, keepdims=True) > 0, follow, plain + 1e-300)
        follow = follow / follow.sum(axis=1, keepdims=True)
        finite = np.where(np.isfinite(f_remainder), f_remainder, 1e300).max(axis=0)
        out: Array = shares + follow * finite[:, None]
        return out


def _weighted(values: Array, sizes: list[Array]) -> Array:
    """`Σ_j values[box, j_1, …, out] Π_i sizes_i[box, j_i]`, `(boxes, out)`."""
    for weights in sizes:
        flat = values.reshape(*values.shape[:2], -1)
        values = np.matmul(weights[:, None, :], flat)[:, 0].reshape(len(weights), *values.shape[2:])
    return values


def _exponents(dimension: int, degree: int) -> list[tuple[int, ...]]:
    return [e for e in itertools.product(range(degree + 1), repeat=dimension) if sum(e) <= degree]


def _positions(available: tuple[tuple[int, ...], ...], wanted: tuple[tuple[int, ...], ...]) -> list[int]:
    place = {e: n for n, e in enumerate(available)}
    return [place[e] for e in wanted]
