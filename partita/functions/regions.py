"""Regions: compact domains that are cut out of boxes by inequalities between expressions, and unions of them.

A region lies between two sets that intervals decide: boxes that are proved to lie outside are left out of every proof, and a point
belongs to the region if an interval proves that it obeys the inequalities up to their slack, which is a few roundings.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy as np
import scipy
from numpy.typing import ArrayLike, NDArray

from partita.arithmetic.arguments import real_array
from partita.arithmetic.rounding import up
from partita.errors import DomainError, ExpressionError, FormatError, ShapeError
from partita.functions.expressions import parse
from partita.functions.graph import Graph, GraphBuilder
from partita.geometry.domains import Array, Box, BoxLike, PointCloud

__all__ = ["Ball", "Constraint", "Domain", "DomainLike", "Piece", "Polytope", "Region", "Simplex", "halved"]

Mask = NDArray[np.bool_]

_COVERED = 4096  # boxes that a region is looked at through: for its volume, its samples and its edge
_HALVINGS = 1 << 15  # boxes looked at before a region counts as too thin
_TIGHT = 2.0**-10  # of a side: how closely the bounding box follows the region
_ROUNDINGS = 8.0  # times the widest enclosure of a constraint at a point: its slack
_STEPS, _BISECTIONS = 6, 26  # of the projection onto a region
_MOST_ROWS = 4096
_EXTREME = 32  # powers of two: rows and sides of polytopes beyond are scaled
_RELATION = re.compile(r"(<=|>=|≤|≥|==|!=|<|>|=)")


@dataclass(frozen=True, eq=False)
class Constraint:
    """The inequality `g(z) ≤ 0`, which counts as obeyed up to `slack`."""

    graph: Graph
    slack: float

    @classmethod
    def on(cls, graph: Graph, box: Box) -> Constraint:
        """With a slack that covers what evaluating g at points of the box rounds."""
        points = np.concatenate([box.sample(256, np.random.default_rng(0)), box.corners(64)])
        found = graph.enclose(points, points)
        wide = (found.hi - found.lo)[np.isfinite(found.lo) & np.isfinite(found.hi)]
        return cls(graph, _ROUNDINGS * float(wide.max(initial=0.0)) + 1e-300)


@dataclass(frozen=True, eq=False)
class Piece:
    """The points of a box that obey every constraint; a region is a union of pieces."""

    box: Box
    constraints: tuple[Constraint, ...]

    def outside(self, lo: Array, hi: Array) -> Mask:
        """Which of the boxes `[lo, hi]`, `(n, m)`, are proved to hold no point of the piece."""
        left, right = np.maximum(lo, self.box.lo.ravel()), np.minimum(hi, self.box.hi.ravel())
        out: Mask = np.asarray((left > right).any(axis=1))
        for c in self.constraints:
            rest = np.flatnonzero(~out)
            out[rest] = c.graph.enclose(left[rest], right[rest]).lo[:, 0] > c.slack
        return out

    def within(self, lo: Array, hi: Array, slack: float) -> Mask:
        """Which of the boxes are proved to lie in the piece; `slack` times its own is how far a constraint may be exceeded."""
        out: Mask = np.asarray(np.all((lo >= self.box.lo.ravel()) & (hi <= self.box.hi.ravel()), axis=1))
        for c in self.constraints:
            rest = np.flatnonzero(out)
            out[rest] = c.graph.enclose(lo[rest], hi[rest]).hi[:, 0] <= slack * c.slack
        return out

    def projected(self, points: Array) -> Array:
        """Points moved towards the piece, by Newton's steps for the constraints that they violate."""
        z = np.array(points)
        for step_number, c in enumerate(itertools.chain(*[self.constraints] * (2 * _STEPS))):
            out = np.flatnonzero(~(c.graph.evaluate(z) <= -4 * c.slack))
            if len(out):
                value, slope = c.graph.enclose_gradient(z[out], z[out])
                g, d = (value.lo + value.hi)[:, 0] / 2, (slope.lo + slope.hi)[:, 0] / 2
                with np.errstate(all="ignore"):
                    step = ((g + 8 * c.slack) / (d**2).sum(axis=1))[:, None] * d
                z[out] -= np.where(np.isfinite(step).all(axis=1, keepdims=True), step, 0.0)
            if step_number >= _STEPS * len(self.constraints):  # freely at first, then by turns with the box
                z = self.box.clamp(z)
        return self.box.clamp(z)


@dataclass(frozen=True, eq=False, init=False, repr=False)
class Region:
    """The points of a box that obey inequalities: any compact set that expressions describe.

    `R = {z in box : a(z) ≤ b(z), …}`. An inequality counts as obeyed up to a slack of a few roundings, which is stored: what
    `contains` accepts, the claim covers. f need not be defined outside of the region. `A | B` is the union of two regions, or of a
    region and a box. *Theorem*: `regions`.

    Args:
        box: a box around the region, or what `Box.of` reads as one: `"[-1,1]^2"`. The region is cut out of it.
        where: the inequalities as text, `"x0**2 + x1**2 <= 1"`, with `<=` and `>=`, chains `0 <= x0 <= x1`, `and` and `or`. A list
            of texts means all of them. The variables are x0, x1, … (also x, y, z up to three dimensions). Leave it out for
            the box itself.

    Attributes:
        pieces: boxes with their constraints; the region is their union.

    Raises:
        DomainError: the region is empty, or so thin that no point of it is found.
        ExpressionError: an inequality cannot be read.

    >>> import partita as pa
    >>> ring = pa.Region(pa.Box([-2, -2], [2, 2]), "1 <= x**2 + y**2 <= 2")
    >>> ring.contains(np.array([[1.0, 0.0], [0.0, 0.0]])).tolist()
    [True, False]
    >>> c = pa.compile("1/(x**2 + y**2)", ring, tolerance=0.2)
    >>> c.certificate.kind, c.error_bound <= 0.2
    ('proved', True)
    """

    pieces: tuple[Piece, ...]

    def __init__(self, box: BoxLike, where: str | Sequence[str] = ()) -> None:
        box = Box.of(box)
        texts = [where] if isinstance(where, str) else list(where)
        parts = [[()]] if not texts else [_alternatives(text, box) for text in texts]
        self._set([Piece(box, tuple(itertools.chain(*choice))) for choice in itertools.product(*parts)])

    def _set(self, pieces: Sequence[Piece], *, tighten: bool = True) -> None:
        """Check that there is a region, and cut the boxes of the pieces down to it."""
        if tighten:
            cut = [_tightened(p) for p in pieces]
            pieces = [p for p in cut if p is not None]
        if not pieces:
            raise DomainError("Region: no point of the box obeys the inequalities: the region is empty.")
        object.__setattr__(self, "pieces", tuple(pieces))
        if not len(self._anchors):
            raise DomainError(
                f"Region: no point that certainly obeys the inequalities was found in {_HALVINGS:,} boxes: {self} is empty, "
                "or too thin. Widen it, or use a PointCloud."
            )

    @classmethod
    def of_pieces(cls, pieces: Sequence[Piece]) -> Region:
        """The union of pieces of one shape, as they are.

        Args:
            pieces: boxes with their constraints.

        >>> Region.of_pieces(Ball([0.0, 0.0], 1.0).pieces) == Ball([0.0, 0.0], 1.0)
        True
        """
        region = object.__new__(Region)
        region._set(pieces, tighten=False)
        return region

    def __or__(self, other: object) -> Region:
        if isinstance(other, Box):
            other = Region(other)
        if not isinstance(other, Region):
            raise DomainError(
                f"Region: the union with {other!r} is not defined; expected a Region or a Box",
                "Put small boxes around the points." if isinstance(other, PointCloud) else "",
            )
        if other.shape != self.shape:
            raise ShapeError(f"Region: points of shape {self.shape} and {other.shape}; expected the same for a union.")
        return Region.of_pieces([*self.pieces, *other.pieces])

    __ror__ = __or__

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one point: `(m,)` or `(tokens, dim)`.

        >>> Ball([0.0, 0.0], 1.0).shape
        (2,)
        """
        return self.pieces[0].box.shape

    @property
    def dimension(self) -> int:
        """m, the number of real coordinates.

        >>> Ball([0.0, 0.0], 1.0).dimension
        2
        """
        return self.pieces[0].box.dimension

    @cached_property
    def _hull(self) -> Box:
        lo, hi = np.stack([p.box.lo for p in self.pieces]), np.stack([p.box.hi for p in self.pieces])
        return Box(lo.min(axis=0), hi.max(axis=0))

    def bounding_box(self) -> Box:
        """A box around the region, close to the smallest.

        >>> Ball([0.0, 0.0], 1.0).bounding_box()
        Box([-1.0, -1.0], [1.0, 1.0])
        """
        return self._hull

    def outside(self, lo: Array, hi: Array) -> Mask:
        """Which boxes are proved to hold no point of the region, `(n,)`.

        Args:
            lo: lower corners, flat, `(n, m)`.
            hi: upper corners, flat, `(n, m)`.

        >>> Ball([0.0], 1.0).outside(np.array([[0.0], [2.0]]), np.array([[0.5], [3.0]])).tolist()
        [False, True]
        """
        out = np.ones(len(lo), bool)
        for piece in self.pieces:
            rest = np.flatnonzero(out)
            out[rest] = piece.outside(lo[rest], hi[rest])
        return out

    def inside(self, lo: Array, hi: Array) -> Mask:
        """Which boxes are proved to lie in one piece of the region, `(n,)`.

        Args:
            lo: lower corners, flat, `(n, m)`.
            hi: upper corners, flat, `(n, m)`.

        >>> Ball([0.0], 1.0).inside(np.array([[0.0], [0.5]]), np.array([[0.5], [1.5]])).tolist()
        [True, False]
        """
        return self._within(lo, hi, 1.0)

    def _within(self, lo: Array, hi: Array, slack: float) -> Mask:
        found = np.zeros(len(lo), bool)
        for piece in self.pieces:
            rest = np.flatnonzero(~found)
            found[rest] = piece.within(lo[rest], hi[rest], slack)
        return found

    def contains(self, points: Array) -> Mask:
        """Which points lie in the region, `(n,)`: those that intervals prove to obey the constraints up to their slack.

        Args:
            points: flat points, `(n, m)`.

        Raises:
            ShapeError: points have another shape.

        >>> Ball([0.0, 0.0], 1.0).contains(np.array([[0.6, 0.8], [0.6, 0.8001]])).tolist()
        [True, False]
        """
        if np.ndim(points) != 2 or np.shape(points)[1] != self.dimension:
            raise ShapeError(f"points have shape {np.shape(points)}; expected (n, {self.dimension}).")
        return self._within(points, points, 1.0)

    def contains_firmly(self, points: Array) -> Mask:
        """Which points obey the constraints by more than roundings, so that f has a value there in floating point as well, `(n,)`.

        Args:
            points: flat points, `(n, m)`.

        >>> Ball([0.0, 0.0], 1.0).contains_firmly(np.array([[0.0, 0.999], [0.0, 1.0]])).tolist()
        [True, False]
        """
        return self._within(points, points, -4.0)

    @cached_property
    def _cover(self) -> tuple[Array, Array, Mask]:
        """Boxes `(n, m)` that cover the region and do not overlap, and which of them lie inside: finest along the edge."""
        lo, hi = self._hull.lo.ravel()[None], self._hull.hi.ravel()[None]
        within = self.inside(lo, hi)
        while len(lo) < _COVERED and not within.all():
            rest = np.flatnonzero(~within)[: _COVERED - len(lo) + 1]
            left, right = halved(lo[rest], hi[rest], self._hull.sides)
            kept = ~self.outside(left, right)
            if kept.sum() == len(rest) and (right - left).max() <= 1e-12 * self._hull.sides.max():
                break
            left, right = left[kept], right[kept]
            lo = np.concatenate([np.delete(lo, rest, axis=0), left])
            hi = np.concatenate([np.delete(hi, rest, axis=0), right])
            within = np.concatenate([np.delete(within, rest), self.inside(left, right)])
        return lo, hi, within

    @cached_property
    def volume(self) -> float:
        """An upper bound of the region's volume: that of boxes which cover it."""
        lo, hi, _ = self._cover
        return min(float(up(hi - lo).prod(axis=1).sum()) * (1 + 1e-12), self._hull.volume)

    @cached_property
    def inner_volume(self) -> float:
        """A lower bound of the region's volume, up to rounding: that of boxes which lie in it."""
        lo, hi, within = self._cover
        return float((hi - lo)[within].prod(axis=1).sum()) * (1 - 1e-12)

    @cached_property
    def _anchors(self) -> Array:
        """Some points of the region, one or more in as many boxes of the cover as have one; empty if none is found."""
        rng, (lo, hi, _) = np.random.default_rng(0), self._cover
        looked, found = len(lo), np.zeros((0, self.dimension))
        while looked < _HALVINGS and len(lo):
            points = (lo[:, None] + (hi - lo)[:, None] * rng.random((len(lo), 4, self.dimension))).reshape(
                -1, self.dimension
            )
            points = np.concatenate([points, (lo + hi) / 2])
            found = points[self.contains_firmly(points)]
            if len(found):
                break
            lo, hi = halved(lo, hi, self._hull.sides)
            kept = ~self.outside(lo, hi)
            lo, hi, looked = lo[kept], hi[kept], looked + len(kept)
        return found

    @cached_property
    def _tree(self) -> scipy.spatial.KDTree:
        return scipy.spatial.KDTree(self._anchors / self._hull.sides)

    def sample(self, count: int, rng: np.random.Generator) -> Array:
        """Uniform random points of the region, `(count, m)`.

        Args:
            count: number of points.
            rng: numpy random generator.

        >>> disc = Ball([0.0, 0.0], 1.0)
        >>> bool(disc.contains(disc.sample(100, np.random.default_rng(0))).all())
        True
        """
        lo, hi, _ = self._cover
        share = ((hi - lo) / self._hull.sides).prod(axis=1)
        chance, found, missing = share / share.sum(), [np.zeros((0, self.dimension))], count
        for _ in range(24):
            if not missing:
                break
            row = rng.choice(len(lo), size=2 * missing + 16, p=chance)
            points = lo[row] + (hi - lo)[row] * rng.random((len(row), self.dimension))
            found.append(points[self.contains_firmly(points)][:missing])
            missing -= len(found[-1])
        if missing:  # thin: points that are known, jittered as far as they stay inside
            near = self._anchors[rng.integers(len(self._anchors), size=missing)]
            moved = near + 1e-3 * self._hull.sides * rng.standard_normal(near.shape)
            found.append(np.where(self.contains(moved)[:, None], moved, near))
        return np.concatenate(found)

    def clamp(self, points: Array) -> Array:
        """For each given point a point of the region near it, `(n, m)`: itself, unless it is outside or at the edge.

        Args:
            points: flat points, `(n, m)`.

        >>> Ball([0.0, 0.0], 1.0).clamp(np.array([[0.5, 0.0], [3.0, 0.0]])).round(6).tolist()
        [[0.5, 0.0], [1.0, 0.0]]
        """
        kept = np.array(points, dtype=float)
        out = np.flatnonzero(~self.contains_firmly(kept))
        if len(out):
            kept[out] = self._nearby(kept[out])
        return kept

    def _nearby(self, points: Array) -> Array:
        """A point of the region near each of these: projected onto a piece, or met on the way to a point that is inside."""
        sides = self._hull.sides
        best, distance = np.zeros_like(points), np.full(len(points), np.inf)
        for piece in self.pieces:
            z = piece.projected(points)
            inner = self._anchors[self._tree.query(z / sides)[1]]
            out = np.flatnonzero(~self.contains_firmly(z))
            far, near = z[out], inner[out]
            for _ in range(_BISECTIONS if len(out) else 0):
                middle = 0.5 * far + 0.5 * near
                good = self.contains_firmly(middle)[:, None]
                near, far = np.where(good, middle, near), np.where(good, far, middle)
            z[out] = near
            length = (((z - points) / sides) ** 2).sum(axis=1)
            closer = length < distance
            best[closer], distance[closer] = z[closer], length[closer]
        return best

    def corners(self, limit: int = 1024) -> Array:
        """Points along the edge of the region, thin parts included, `(at most limit, m)`.

        Args:
            limit: the largest number of points to return.

        >>> disc = Ball([0.0, 0.0], 1.0)
        >>> bool((np.hypot(*disc.corners(64).T) > 0.9).all())
        True
        """
        lo, hi, within = self._cover
        far, edge = self._hull.corners(min(limit, 64)), np.flatnonzero(~within)
        rows = edge[:: max(1, -(-len(edge) // max(1, limit - 2 * len(far) - 2 * self.dimension)))]
        tips = np.concatenate(
            [self._anchors[self._anchors.argmin(axis=0)], self._anchors[self._anchors.argmax(axis=0)]]
        )
        middle = (self._hull.lo + self._hull.hi).ravel() / 2
        outward = far + (far - middle)  # beyond the corners of the box, so that clamping slides along the edge
        found = np.concatenate([self.clamp(far), self.clamp(outward), tips, self.clamp((lo + hi)[rows] / 2)])
        return found[:limit]

    @cached_property
    def is_convex(self) -> bool:
        """Whether the region is proved to be convex: one piece, whose constraints are built of convex parts."""
        return len(self.pieces) == 1 and all(
            _curvature(c.graph) in ("affine", "convex") for c in self.pieces[0].constraints
        )

    @cached_property
    def description(self) -> dict[str, Any]:
        """Plain data, as certificates and files contain it: boxes, and constraints `g ≤ slack` as text and as graphs."""
        return {
            "type": "region",
            "shape": list(self.shape),
            "pieces": [
                {
                    "lo": p.box.lo.ravel().tolist(),
                    "hi": p.box.hi.ravel().tolist(),
                    "constraints": [
                        {"text": f"{c.graph.infix()} <= 0", "graph": c.graph.to_json(), "slack": c.slack}
                        for c in p.constraints
                    ],
                }
                for p in self.pieces
            ],
        }

    @staticmethod
    def from_description(data: Mapping[str, Any]) -> Region:
        """The region that `description` describes, its numbers in hexadecimal as files write them.

        Args:
            data: plain data, as a file contains it.

        Raises:
            FormatError: the text of a constraint is not that of its graph, or a constraint does not fit the box.
        """
        shape, pieces = tuple(data["shape"]), []
        for part in data["pieces"]:
            box = Box(*(np.array([float.fromhex(x) for x in part[end]]).reshape(shape) for end in ("lo", "hi")))
            constraints = []
            for row in part["constraints"]:
                graph, slack = Graph.from_json(row["graph"]), float.fromhex(row["slack"])
                fits = graph.num_inputs == box.dimension and graph.output_shape == () and 0 <= slack < math.inf
                if not fits or row["text"] != f"{graph.infix()} <= 0":
                    raise FormatError(
                        f"region: the constraint {str(row['text'])[:80]!r} is not that of its graph, has another number of "
                        "variables than the box, or a slack that is not a finite number ≥ 0."
                    )
                constraints.append(Constraint(graph, slack))
            pieces.append(Piece(box, tuple(constraints)))
        if not pieces:
            raise FormatError("region: it has no pieces; expected at least one.")
        return Region.of_pieces(pieces)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Region) and self.description == other.description

    def __hash__(self) -> int:
        return hash(str(self.description))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self})"

    def __str__(self) -> str:
        parts = []
        for p in self.pieces[:4]:
            shown = [f"{_short(c.graph)} <= 0" for c in p.constraints[:4]] + ["…"] * (len(p.constraints) > 4)
            parts.append(" and ".join([f"{p.box}", *shown]) if shown else f"{p.box}")
        return " or ".join(parts) + (f" or … ({len(self.pieces):,} pieces)" if len(self.pieces) > 4 else "")


Domain = Box | PointCloud | Region
DomainLike = Domain | BoxLike | tuple[Domain | str, Domain | str]


class Ball(Region):
    """The closed ball `|z − center|₂ ≤ radius`.

    Args:
        center: `(m,)`, or `(tokens, dim)` for sequences.
        radius: > 0.

    Raises:
        DomainError: a number is not finite, or the radius is not positive.

    >>> import partita as pa
    >>> c = pa.compile("sqrt(1.5 - x**2 - y**2)", pa.Ball([0, 0], 1), tolerance=0.1)  # undefined at (1, 1)
    >>> c.certificate.kind, c.error_bound <= 0.1
    ('proved', True)
    """

    def __init__(self, center: ArrayLike, radius: float) -> None:
        middle = real_array("Ball: center", center)
        if middle.ndim not in (1, 2) or not middle.size or not np.isfinite(middle).all():
            raise DomainError(f"Ball: center is {middle.tolist()}; expected finite numbers, (m,) or (tokens, dim).")
        if not (isinstance(radius, (int, float, np.number)) and 0 < radius < math.inf):
            raise DomainError(f"Ball: radius is {radius!r}; expected a finite number > 0.")
        reach = up(np.full(middle.shape, float(radius)))
        box = Box(*(np.where(np.abs(middle) + reach == reach, s * float(radius), middle + s * reach) for s in (-1, 1)))
        builder = GraphBuilder(middle.size)
        squares = []
        for i, c in enumerate(middle.ravel().tolist()):
            z = builder.add("input", parameters=(i,))
            away = builder.add("sub", z, builder.add("const", parameters=(c,))) if c else z
            squares.append(builder.add("pow", away, parameters=(2,)))
        total = squares[0]
        for square in squares[1:]:
            total = builder.add("add", total, square)
        bound = _at_least(Fraction(float(radius)) ** 2)
        g = builder.finish([builder.add("sub", total, builder.add("const", parameters=(bound,)))], ())
        self._set([Piece(box, (Constraint.on(g, box),))], tighten=False)


class Polytope(Region):
    """The bounded set `{z : A z ≤ b}`.

    Args:
        A: `(rows, m)`.
        b: `(rows,)`.

    Raises:
        DomainError: a number is not finite, the shapes do not fit, or the set is empty, unbounded or has no interior.

    >>> import partita as pa
    >>> triangle = pa.Polytope([[-1, 0], [0, -1], [1, 1]], [0, 0, 1])
    >>> triangle.contains(np.array([[0.5, 0.5], [0.6, 0.5]])).tolist()
    [True, False]
    """

    def __init__(self, A: ArrayLike, b: ArrayLike) -> None:
        rows, bounds = real_array("Polytope: A", A), real_array("Polytope: b", b)
        if rows.ndim != 2 or bounds.shape != rows.shape[:1] or not rows.size or len(rows) > _MOST_ROWS:
            raise DomainError(
                f"Polytope: A has shape {rows.shape}, b has shape {bounds.shape}; expected (rows, m) and (rows,), at most "
                f"{_MOST_ROWS:,} rows."
            )
        if not (np.isfinite(rows).all() and np.isfinite(bounds).all()):
            raise DomainError("Polytope: A or b contains NaN or infinity; expected finite numbers.")
        rows, bounds = _scaled(rows, bounds)
        box = _polytope_box(rows, bounds)
        kept = [(a, c) for a, c in zip(rows.tolist(), bounds.tolist()) if any(a)]
        graphs = [_affine(a, -c) for a, c in kept]
        self._set([Piece(box, tuple(Constraint.on(g, box) for g in graphs))], tighten=False)


class Simplex(Region):
    """The convex hull of m + 1 points of R^m that do not lie in a plane.

    Args:
        vertices: `(m + 1, m)`.

    Raises:
        DomainError: the shape does not fit, a number is not finite, or the vertices lie in a plane.

    >>> import partita as pa
    >>> c = pa.compile("x*y", pa.Simplex([[0, 0], [1, 0], [0, 1]]), tolerance=1e-3)
    >>> c.error_bound <= 1e-3
    True
    """

    def __init__(self, vertices: ArrayLike) -> None:
        corners = real_array("Simplex: vertices", vertices)
        if corners.ndim != 2 or corners.shape[0] != corners.shape[1] + 1:
            raise DomainError(f"Simplex: vertices have shape {corners.shape}; expected (m + 1, m).")
        if not np.isfinite(corners).all():
            raise DomainError("Simplex: a vertex contains NaN or infinity; expected finite numbers.")
        m = corners.shape[1]
        scale = float(np.ptp(corners, axis=0).max()) or 1.0
        if not 1e-150 < scale < 1e150:
            raise DomainError(
                f"Simplex: its sides are up to {scale:g} long; expected 1e-150 to 1e150. Rescale the variables."
            )
        system = np.concatenate([(corners - corners[0]) / scale, np.ones((m + 1, 1))], axis=1)
        if np.linalg.cond(system) > 1e12:
            raise DomainError(
                f"Simplex: the vertices {corners.tolist()} lie in a plane, or nearly so; expected a simplex with volume."
            )
        slopes = -np.linalg.inv(system)[:m].T / scale  # of minus the barycentric coordinates
        box = Box(corners.min(axis=0), corners.max(axis=0))
        graphs = []
        for a in slopes.tolist():
            exact = [sum((Fraction(s) * Fraction(x) for s, x in zip(a, v)), Fraction(0)) for v in corners.tolist()]
            graphs.append(_affine(a, -_at_least(max(exact))))
        self._set([Piece(box, tuple(Constraint.on(g, box) for g in graphs))], tighten=False)


def _short(graph: Graph) -> str:
    text = graph.infix()
    return text if len(text) <= 120 else f"{text[:117]}…"


def _at_least(exact: Fraction) -> float:
    """The smallest float that is not below."""
    try:
        near = float(exact)
    except OverflowError:
        raise DomainError("Region: a constraint overflows float64; rescale the variables.") from None
    return near if Fraction(near) >= exact else math.nextafter(near, math.inf)


def _affine(slopes: Sequence[float], constant: float) -> Graph:
    """`Σ slopes_i z_i + constant`."""
    builder = GraphBuilder(len(slopes))
    total: int | None = None
    for i, a in enumerate(slopes):
        if a == 0:
            continue
        z = builder.add("input", parameters=(i,))
        term = (
            z
            if a == 1
            else builder.add("neg", z)
            if a == -1
            else builder.add("mul", builder.add("const", parameters=(a,)), z)
        )
        total = term if total is None else builder.add("add", total, term)
    assert total is not None
    if constant:
        operation, size = ("sub", -constant) if constant < 0 else ("add", constant)
        total = builder.add(operation, total, builder.add("const", parameters=(size,)))
    return builder.finish([total], ())


def _scaled(rows: Array, bounds: Array) -> tuple[Array, Array]:
    """The same inequalities. Rows with a very large or small largest entry are multiplied by a power of two that takes it near 1.

    Raises:
        DomainError: other numbers of the row over- or underflow then.
    """
    exponent = np.frexp(np.abs(rows).max(axis=1))[1]
    exponent = np.where(np.abs(exponent) > _EXTREME, exponent, 0)
    with np.errstate(over="ignore", under="ignore"):
        scaled, ends = np.ldexp(rows, -exponent[:, None]), np.ldexp(bounds, -exponent)
        back = np.array_equal(np.ldexp(scaled, exponent[:, None]), rows) and np.array_equal(
            np.ldexp(ends, exponent), bounds
        )
    if not back:
        raise DomainError("Polytope: the numbers of a row are too far apart for float64. Rescale the variables.")
    return scaled, ends


def _polytope_box(rows: Array, bounds: Array) -> Box:
    """The box around `A z ≤ b` by linear programs, widened by more than they are off."""
    m = rows.shape[1]
    unit = int(
        np.frexp(np.abs(bounds).max())[1]
    )  # of the variables in the linear programs, whose tolerances are absolute
    unit = unit if abs(unit) > _EXTREME else 0
    bounds = np.ldexp(bounds, -unit)
    ends = np.zeros((2, m))
    for i, sign in itertools.product(range(m), (1, -1)):
        cost = np.zeros(m)
        cost[i] = sign
        found = scipy.optimize.linprog(cost, A_ub=rows, b_ub=bounds, bounds=(None, None), method="highs")
        if found.status == 2:
            raise DomainError("Polytope: no point obeys A z ≤ b: the set is empty.")
        if found.status == 3:
            raise DomainError(f"Polytope: x{i} has no bound: the set is unbounded. Add rows that bound it.")
        if found.status != 0:
            raise DomainError(f"Polytope: the linear program for x{i} failed: {found.message}")
        ends[(1 - sign) // 2, i] = np.ldexp(found.x[i], unit)
    size = np.maximum(np.abs(ends).max(axis=0), ends[1] - ends[0])
    if ((ends[1] - ends[0]) <= 1e-9 * size).any():
        raise DomainError(
            f"Polytope: it reaches from {ends[0].tolist()} to {ends[1].tolist()}; expected a set with an interior."
        )
    return Box(ends[0] - 1e-12 * size, ends[1] + 1e-12 * size)


def _alternatives(text: str, box: Box) -> list[tuple[Constraint, ...]]:
    """The constraints of one text: a list of alternatives (`or`), each of which is a list of constraints (`and`)."""
    if not isinstance(text, str):
        raise ExpressionError(f"region: found a {type(text).__name__}, expected text such as 'x0**2 + x1**2 <= 1'.")
    names = [f"x{i}" for i in range(box.dimension)]
    aliases = {letter: f"x{i}" for i, letter in enumerate("xyz"[: box.dimension])} if box.dimension <= 3 else {}
    return [
        tuple(c for part in re.split(r"\band\b|&&", choice) for c in _chain(part, names, aliases, box))
        for choice in re.split(r"\bor\b|\|\|", text)
    ]


def _chain(text: str, names: list[str], aliases: dict[str, str], box: Box) -> list[Constraint]:
    """`a <= b <= c` as the constraints `a − b ≤ 0` and `b − c ≤ 0`."""
    parts = _RELATION.split(text)
    wrong = next((sign for sign in parts[1::2] if sign not in ("<=", ">=", "≤", "≥")), None)
    if wrong is not None or len(parts) < 3:
        problem = f"found {wrong!r} in" if wrong else "found no inequality in"
        hint = "; domains are closed, so write <= for <" if wrong in ("<", ">") else ""
        raise ExpressionError(f"region: {problem} {text.strip()!r}, expected a <= b or a >= b{hint}.")
    sides = [parse(side.strip(), names, aliases) for side in parts[::2]]
    if any(side.output_shape != () for side in sides):
        raise ExpressionError(f"region: {text.strip()!r} compares vectors; expected one number on each side.")
    found = []
    for k, sign in enumerate(parts[1::2]):
        low, high = (sides[k], sides[k + 1]) if sign in ("<=", "≤") else (sides[k + 1], sides[k])
        if (low.nodes, low.outputs) == (high.nodes, high.outputs) and _is_finite(low, box):
            continue  # a ≤ a holds wherever a is defined
        found.append(Constraint.on(_difference(low, high), box))
    return found


def _is_finite(graph: Graph, box: Box) -> bool:
    """Whether one enclosure shows that it is defined on the whole box."""
    return bool(np.isfinite(graph.enclose(box.lo.reshape(1, -1), box.hi.reshape(1, -1)).magnitude).all())


def _difference(low: Graph, high: Graph) -> Graph:
    """`low − high`, without a zero."""
    builder = GraphBuilder(low.num_inputs)
    ends = []
    for graph in (low, high):
        places: list[int] = []
        for node in graph.nodes:
            places.append(builder.add(node.operation, *(places[k] for k in node.arguments), parameters=node.parameters))
        ends.append(places[graph.outputs[0]])
    if builder.nodes[ends[1]].operation == "const" and builder.nodes[ends[1]].parameters[0] == 0:
        return builder.finish([ends[0]], ())
    if builder.nodes[ends[0]].operation == "const" and builder.nodes[ends[0]].parameters[0] == 0:
        return builder.finish([builder.add("neg", ends[1])], ())
    return builder.finish([builder.add("sub", *ends)], ())


def halved(lo: Array, hi: Array, sides: Array) -> tuple[Array, Array]:
    """Both halves of each box `(n, m)` along its longest side, relative to `sides`; the halves share the midpoint."""
    rows, axis, middle = np.arange(len(lo)), ((hi - lo) / sides).argmax(axis=1), 0.5 * lo + 0.5 * hi
    left, right = hi.copy(), lo.copy()
    left[rows, axis] = right[rows, axis] = middle[rows, axis]
    return np.concatenate([lo, right]), np.concatenate([left, hi])


def _tightened(piece: Piece) -> Piece | None:
    """The piece in a box close around it, None if it is empty: from each side, slabs that hold nothing are cut off."""
    lo, hi = piece.box.lo.ravel().copy(), piece.box.hi.ravel().copy()
    for axis, sign in itertools.product(range(len(lo)), (1, -1)):
        end = _extent(piece, lo, hi, axis, sign)
        if end is None:
            return None
        (lo if sign > 0 else hi)[axis] = end
    shape = piece.box.shape
    with np.errstate(all="ignore"):
        thin = (hi - lo) <= 8 * np.spacing(np.maximum(np.abs(lo), np.abs(hi)))
    if thin.any():
        raise DomainError(
            f"Region: it reaches from {lo.tolist()} to {hi.tolist()}; expected a set with an interior. Use a PointCloud for a "
            "thin set."
        )
    return Piece(Box(lo.reshape(shape), hi.reshape(shape)), piece.constraints)


def _extent(piece: Piece, lo: Array, hi: Array, axis: int, sign: int) -> float | None:
    """How far the piece reaches along an axis, towards its lower end for sign 1; None if it is empty."""
    sides, looked = hi - lo, 0
    left, right = lo[None].copy(), hi[None].copy()
    while True:
        kept = ~piece.outside(left, right)
        left, right = left[kept], right[kept]
        if not len(left):
            return None
        face = left[:, axis] if sign > 0 else -right[:, axis]
        first = np.flatnonzero(face <= face.min() + 1e-15 * sides[axis])
        narrow = (right - left)[first, axis] <= _TIGHT * sides[axis]
        if looked > _COVERED or narrow.any():
            return float(sign * face.min())
        looked += len(first)
        halves = halved(left[first], right[first], sides)
        rest = np.delete(np.arange(len(left)), first)
        left, right = np.concatenate([left[rest], halves[0]]), np.concatenate([right[rest], halves[1]])


def _curvature(graph: Graph) -> str:
    """ "const", "affine" or "convex" if g is built of parts that show it, otherwise "unknown"; constants count as affine."""
    kinds: list[str] = []
    for node in graph.nodes:
        kinds.append(_node_curvature(graph, node.operation, node.arguments, node.parameters, kinds))
    kind = kinds[graph.outputs[0]]
    return "affine" if kind == "const" else kind


_FLIPPED = {"const": "const", "affine": "affine", "convex": "concave", "concave": "convex"}


def _node_curvature(
    graph: Graph, operation: str, arguments: Sequence[int], parameters: Sequence[Any], kinds: list[str]
) -> str:
    inner = [kinds[k] for k in arguments]
    if operation in ("input", "const"):
        return "affine" if operation == "input" else "const"
    if all(kind == "const" for kind in inner):
        return "const"
    if operation == "neg":
        return _FLIPPED.get(inner[0], "unknown")
    if operation in ("add", "sub", "sum"):
        parts = [inner[0], _FLIPPED.get(inner[1], "unknown")] if operation == "sub" else inner
        shapes = {kind for kind in parts if kind not in ("const", "affine")}
        return "affine" if not shapes else shapes.pop() if len(shapes) == 1 else "unknown"
    if operation in ("mul", "div") and "const" in inner:
        number = inner.index("const")
        node = graph.nodes[arguments[number]]
        if node.operation != "const" or (operation == "div" and number == 0):
            return "affine" if inner[1 - number] == "affine" and operation == "mul" else "unknown"
        other = inner[1 - number]
        return other if node.parameters[0] >= 0 else _FLIPPED.get(other, "unknown")
    if operation == "pow" and inner[0] == "affine" and int(parameters[0]) in (2, 4, 6, 8):
        return "convex"
    if operation == "abs" and inner[0] == "affine":
        return "convex"
    if operation in ("exp", "relu") and inner[0] in ("affine", "convex"):
        return "convex"
    if operation == "max" and set(inner) <= {"const", "affine", "convex"}:
        return "convex"
    return "concave" if operation == "min" and set(inner) <= {"const", "affine", "concave"} else "unknown"
