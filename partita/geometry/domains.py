"""Domains: where a function is to be approximated.

A domain lives in R^m; its points may be shaped, `(tokens, dim)` for a sequence, and are flattened token-major:
`z.reshape(batch, m)`. Everything here is float64 and frozen.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import scipy
from numpy.typing import ArrayLike, NDArray

from partita.arithmetic.arguments import is_number, real_array
from partita.arithmetic.precision import Precision
from partita.arithmetic.rounding import mul_up, up
from partita.errors import DomainError, ShapeError

__all__ = ["Box", "BoxLike", "PointCloud", "column_ranges", "product"]

Array = NDArray[np.float64]
_TYPED = "'[-1,1]^2', '[0,1] x [-2,3]', '[0, pi]', or a pair (lo, hi) for each axis: [(0, 3), (273, 323)]"
_SIDE = re.compile(r"\[([^\[\],]*),([^\[\],]*)\](?:(?:\^|\*\*)(\d{1,4}))?")
_NUMBER = re.compile(r"(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,4})?|pi\b|π|e\b|[-+*/()]")
_CONSTANTS = {"pi": Fraction(math.pi), "π": Fraction(math.pi), "e": Fraction(math.e)}
_MOST_AXES, _LONGEST, _DEEPEST = 4096, 10_000, 50
_MANY_AXES, _SHORT = 8, 200
_AT_ONCE = 1024  # numbers of a row that column_ranges compares at once


def frozen_array(values: ArrayLike, name: str = "the array") -> Array:
    """A copy of the values that cannot be written to; a ShapeError if they are no real numbers."""
    array = np.array(real_array(name, values))
    array.flags.writeable = False
    return array


def column_ranges(points: Array) -> tuple[Array, Array]:
    """The least and the largest entry of each column of `(n, m)`, NaN in both if a column has one; (inf, −inf) without rows.

    Rows are taken many at a time: numpy is slow where the last axis is short.
    """
    count, m = points.shape
    together = max(1, min(count, _AT_ONCE // max(m, 1)))
    whole = count - count % together
    parts = [points[:whole].reshape(-1, together * m)] if whole else []
    least, largest = np.full(m, math.inf), np.full(m, -math.inf)
    for found, pick in ((least, np.minimum), (largest, np.maximum)):
        for part in parts:
            row = pick.reduce(part, axis=0).reshape(together, m)
            for i in range(m):
                found[i] = pick(found[i], pick.reduce(row[:, i]))
        if whole < count:
            pick(found, pick.reduce(points[whole:], axis=0), out=found)
    return least, largest


def _require_rows(points: Array, dimension: int) -> None:
    if np.ndim(points) != 2 or np.shape(points)[1] != dimension:
        raise ShapeError(f"points have shape {np.shape(points)}; expected (n, {dimension}).")


@dataclass(frozen=True, eq=False)
class Box:
    """The box `{z : lo ≤ z ≤ hi}` in R^m, where m is the number of entries of `lo`.

    Args:
        lo: lower corner, `(m,)` for vectors or `(tokens, dim)` for sequences.
        hi: upper corner, of the same shape.

    Attributes:
        shape: of one point, `(m,)` or `(tokens, dim)`.
        dimension: m, the number of real coordinates.
        sides: the lengths `hi − lo`, flat, `(m,)`.
        volume: the product of the sides, rounded up.
        description: the box as plain data, in the form that certificates and files store.

    Raises:
        DomainError: a side is empty or not finite, or the shapes differ.

    >>> import partita as pa
    >>> pa.Box([-1, -1], [1, 1]).dimension
    2
    >>> pa.Box.sequence(-1, 1, tokens=3, dim=2).shape
    (3, 2)
    """

    lo: Array
    hi: Array
    shape: tuple[int, ...] = field(init=False)
    dimension: int = field(init=False)  # m, the number of real coordinates
    sides: Array = field(init=False)  # flat, (m,)
    volume: float = field(init=False)  # the product of the sides, rounded up
    description: dict[str, Any] = field(init=False)  # plain data, as certificates and files contain it

    if TYPE_CHECKING:

        def __init__(self, lo: ArrayLike, hi: ArrayLike) -> None: ...

    def __post_init__(self) -> None:
        object.__setattr__(self, "lo", frozen_array(self.lo, "Box: lo"))
        object.__setattr__(self, "hi", frozen_array(self.hi, "Box: hi"))
        if self.lo.ndim == self.hi.ndim == 0:
            raise DomainError(f"Box: lo and hi are numbers; for one variable write Box([{self.lo:g}], [{self.hi:g}]).")
        if self.lo.shape != self.hi.shape or self.lo.ndim not in (1, 2) or self.lo.size == 0:
            raise DomainError(
                f"Box: lo has shape {self.lo.shape}, hi has shape {self.hi.shape}; expected equal shapes, "
                "(m,) for vectors or (tokens, dim) for sequences."
            )
        if not (np.isfinite(self.lo).all() and np.isfinite(self.hi).all()):
            raise DomainError(f"Box: lo is {self.lo.tolist()}, hi is {self.hi.tolist()}; expected finite corners.")
        bad = np.flatnonzero(self.lo.ravel() >= self.hi.ravel())
        if bad.size:
            i = int(bad[0])
            raise DomainError(
                f"Box: axis {i} has lo = {self.lo.ravel()[i]:g} ≥ hi = {self.hi.ravel()[i]:g}; expected lo < "
                "hi. Swap the corners, or drop the axis if the function does not use it."
            )
        with np.errstate(over="ignore"):
            sides = (self.hi - self.lo).ravel()
        if not np.isfinite(sides).all():
            raise DomainError("Box: a side overflows float64; rescale the variable.")
        if (sides <= 4 * np.spacing(np.maximum(np.abs(self.lo), np.abs(self.hi))).ravel()).any():
            raise DomainError("Box: a side is only a few floating-point numbers wide; shift or rescale the variable.")
        sides.flags.writeable = False
        lo, hi = self.lo.ravel().tolist(), self.hi.ravel().tolist()
        for name, value in (
            ("shape", self.lo.shape),
            ("dimension", self.lo.size),
            ("sides", sides),
            ("volume", mul_up(*up(sides).tolist())),
            ("description", {"type": "box", "shape": list(self.lo.shape), "lo": lo, "hi": hi}),
        ):
            object.__setattr__(self, name, value)

    @classmethod
    def of(cls, domain: BoxLike) -> Box:
        """The box that is meant by text, by pairs of numbers, or by a box. Text is parsed, never evaluated.

        Text is a product of closed intervals: `"[-1,1]^2"`, `"[-1,1] x [0,2]"` (also `×`), or a list of pairs as in Python. Ends
        may use `pi`, `e`, `+ - * /` and parentheses: `"[-pi/2, 2*pi]"`. `pi` and `e` are the nearest float64 numbers. From there
        an end is computed exactly, and rounded once to float64.

        Args:
            domain: text; a pair `(lo, hi)` of numbers for one axis; a list of such pairs, one for each axis; or a `Box`. An end may
                be a number or text.

        Raises:
            DomainError: it cannot be read, or it is no box.

        >>> Box.of("[-1,1]^2 x [0, pi]")
        Box([-1.0, -1.0, 0.0], [1.0, 1.0, 3.141592653589793])
        >>> Box.of([(0, 3), (273, 323)]) == Box.of("[0,3] x [273,323]")
        True
        >>> Box.of((0, 1))
        Box([0.0], [1.0])
        """
        if isinstance(domain, Box):
            return domain
        if isinstance(domain, str):
            return _box_of_text(domain)
        pairs = domain.tolist() if isinstance(domain, np.ndarray) else domain
        if isinstance(pairs, (list, tuple)) and pairs:
            if len(pairs) == 2 and all(map(_is_end, pairs)):
                pairs = [pairs]
            if all(isinstance(p, (list, tuple)) and len(p) == 2 and all(map(_is_end, p)) for p in pairs):
                return _box_of_sides([(_end(a), _end(b)) for a, b in pairs], repr(domain))
        raise DomainError(f"the domain is {_shown(domain)}; expected a pa.Box, or {_TYPED}.")

    @classmethod
    def sequence(cls, lo: float, hi: float, *, tokens: int, dim: int) -> Box:
        """The box `[lo, hi]^(tokens × dim)` of sequences of shape `(tokens, dim)`.

        Args:
            lo: lower end of every coordinate.
            hi: upper end of every coordinate.
            tokens: tokens per sequence, at least 1.
            dim: coordinates per token, at least 1.

        Raises:
            DomainError: tokens or dim is below 1, or lo ≥ hi.

        >>> Box.sequence(0, 1, tokens=2, dim=3).dimension
        6
        """
        if tokens < 1 or dim < 1:
            raise DomainError(f"Box.sequence: tokens is {tokens}, dim is {dim}; expected at least 1 each.")
        return cls(np.full((tokens, dim), float(lo)), np.full((tokens, dim), float(hi)))

    def widened(self, precision: Precision) -> Box:
        """The box that contains every input after rounding to this precision.

        Args:
            precision: the `Precision` that inputs are rounded to. float64 leaves the box unchanged.

        >>> bool(Box([0.1], [0.2]).widened(Precision.of("float32")).lo[0] < 0.1)
        True
        """
        return Box(*precision.widened(self.lo, self.hi)) if precision.rounds_inputs else self

    def contains(self, points: Array) -> NDArray[np.bool_]:
        """Which points lie in the closed box, `(n,)`.

        Args:
            points: flat points, `(n, m)`.

        Raises:
            ShapeError: points have another shape.

        >>> Box([0], [1]).contains(np.array([[0.5], [2.0]])).tolist()
        [True, False]
        """
        _require_rows(points, self.dimension)
        return np.asarray(np.all((points >= self.lo.ravel()) & (points <= self.hi.ravel()), axis=1))

    def clamp(self, points: Array) -> Array:
        """The nearest point of the box for each given point, `(n, m)`.

        Args:
            points: flat points, `(n, m)`.

        >>> Box([0], [1]).clamp(np.array([[0.5], [2.0]])).tolist()
        [[0.5], [1.0]]
        """
        return np.clip(points, self.lo.ravel(), self.hi.ravel())

    def sample(self, count: int, rng: np.random.Generator) -> Array:
        """Uniform random points of the box, `(count, m)`.

        Args:
            count: number of points.
            rng: numpy random generator.

        >>> Box([0, 0], [1, 1]).sample(5, np.random.default_rng(0)).shape
        (5, 2)
        """
        return self.clamp(self.lo.ravel() + self.sides * rng.random((count, self.dimension)))

    def corners(self, limit: int = 1024) -> Array:
        """All 2^m corners, or the first `limit` of them, `(corners, m)`.

        Args:
            limit: the largest number of corners to return.

        >>> Box([0, 0], [1, 2]).corners().tolist()
        [[0.0, 0.0], [1.0, 0.0], [0.0, 2.0], [1.0, 2.0]]
        """
        m, count = self.dimension, 1 << min(self.dimension, 30)
        bits = (np.arange(min(count, limit))[:, None] >> np.arange(min(m, 30))) & 1
        full = np.zeros((bits.shape[0], m), dtype=bool)
        full[:, : bits.shape[1]] = bits
        return np.where(full, self.hi.ravel(), self.lo.ravel())

    def bounding_box(self) -> Box:
        """The box itself. A `PointCloud` returns the smallest box around it.

        >>> Box([0], [1]).bounding_box()
        Box([0.0], [1.0])
        """
        return self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Box) and np.array_equal(self.lo, other.lo) and np.array_equal(self.hi, other.hi)

    def __hash__(self) -> int:
        return hash((self.lo.tobytes(), self.hi.tobytes()))

    def __repr__(self) -> str:
        short = f"Box.of({str(self)!r})"  # of many axes, where the text says the same
        if self.dimension > _MANY_AXES and len(short) < _SHORT and Box.of(str(self)) == self:
            return short
        return f"Box({self.lo.tolist()}, {self.hi.tolist()})"

    def __str__(self) -> str:
        pairs = [f"[{a:g},{b:g}]" for a, b in zip(self.lo.ravel(), self.hi.ravel())]
        text = f"{pairs[0]}^{len(pairs)}" if len(set(pairs)) == 1 and len(pairs) > 1 else "x".join(pairs)
        return text if self.lo.ndim == 1 else f"{text} as {self.shape[0]} tokens of {self.shape[1]}"


@dataclass(frozen=True, eq=False)
class PointCloud:
    """The union of closed balls of radius `fill_distance` around `points`: a small domain inside a large space.

    The caller declares `fill_distance`: every point of the true domain lies within that distance of a listed point.
    With 0 the domain is the listed points and nothing else (*Theorem*: `small-domain`).

    Args:
        points: the listed points, `(N, m)`, or `(N, tokens, dim)` for sequences.
        fill_distance: Euclidean radius of the balls, ≥ 0.

    Raises:
        DomainError: there are no points, a number is not finite, or fill_distance is negative.

    >>> import partita as pa
    >>> cloud = pa.PointCloud([[0.0, 0.0], [1.0, 1.0]], fill_distance=0.1)
    >>> cloud.contains(np.array([[0.05, 0.0], [0.5, 0.5]])).tolist()
    [True, False]
    """

    points: Array
    fill_distance: float = 0.0

    if TYPE_CHECKING:

        def __init__(self, points: ArrayLike, fill_distance: float = 0.0) -> None: ...

    def __post_init__(self) -> None:
        points = frozen_array(self.points, "PointCloud: points")
        object.__setattr__(self, "points", points)
        object.__setattr__(self, "fill_distance", float(self.fill_distance))
        if points.ndim not in (2, 3) or points.size == 0:
            raise DomainError(
                f"PointCloud: points have shape {points.shape}; expected (N, m) or (N, tokens, dim) with N ≥ 1."
            )
        if not np.isfinite(points).all():
            rows = np.flatnonzero(~np.isfinite(points.reshape(len(points), -1)).all(axis=1))
            raise DomainError(
                f"PointCloud: {rows.size} points are not finite, the first is number {rows[0]}; expected finite points."
            )
        if not (self.fill_distance >= 0 and np.isfinite(self.fill_distance)):
            raise DomainError(f"PointCloud: fill_distance is {self.fill_distance}; expected a finite number ≥ 0.")

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one point: `(m,)` or `(tokens, dim)`.

        >>> PointCloud([[0.0, 0.0], [1.0, 1.0]]).shape
        (2,)
        """
        return self.points.shape[1:]

    @property
    def dimension(self) -> int:
        """m, the number of real coordinates.

        >>> PointCloud([[0.0, 0.0], [1.0, 1.0]]).dimension
        2
        """
        return int(np.prod(self.shape))

    @property
    def flat(self) -> Array:
        """The listed points, flat, `(N, m)`.

        >>> PointCloud(np.zeros((5, 3, 2))).flat.shape
        (5, 6)
        """
        return self.points.reshape(len(self.points), -1)

    @cached_property
    def description(self) -> dict[str, Any]:
        """Plain data, as certificates contain it: the points themselves are known by their hash."""
        return {
            "type": "point_cloud",
            "shape": list(self.shape),
            "points": len(self.points),
            "fill_distance": self.fill_distance,
            "sha256": hashlib.sha256(np.ascontiguousarray(self.flat).tobytes()).hexdigest(),
        }

    @cached_property
    def _tree(self) -> scipy.spatial.KDTree:
        return scipy.spatial.KDTree(self.flat)

    def contains(self, points: Array) -> NDArray[np.bool_]:
        """Which points lie in the domain, `(n,)`.

        Args:
            points: flat points, `(n, m)`.

        Raises:
            ShapeError: points have another shape.

        >>> PointCloud([[0.0], [1.0]]).contains(np.array([[1.0], [0.5]])).tolist()
        [True, False]
        """
        _require_rows(points, self.dimension)
        distance, index = self._tree.query(points)
        if self.fill_distance == 0:  # tiny distances vanish when squared
            return np.asarray(np.all(points == self.flat[index], axis=1))
        return np.asarray(distance <= self.fill_distance * (1 + 1e-12))

    def neighbours_of(self, points: Array) -> Array:
        """For each listed point, the nearest other listed point, `(n, m)`. A single listed point is its own neighbour.

        Args:
            points: points of the list, flat, `(n, m)`.

        >>> PointCloud([[0.0], [1.0], [3.0]]).neighbours_of(np.array([[3.0]])).tolist()
        [[1.0]]
        """
        _, index = self._tree.query(points, k=min(2, len(self.points)))
        return self.flat[np.reshape(index, (len(points), -1))[:, -1]]

    def clamp(self, points: Array) -> Array:
        """For each given point, the nearest point of the nearest ball, `(n, m)`.

        Args:
            points: flat points, `(n, m)`.

        >>> PointCloud([[0.0], [1.0]]).clamp(np.array([[0.9]])).tolist()
        [[1.0]]
        """
        distance, index = self._tree.query(points)
        nearest = self.flat[index]
        with np.errstate(divide="ignore", invalid="ignore"):
            shrink = np.where(distance > self.fill_distance, self.fill_distance / distance, 1.0)
        moved = nearest + shrink[:, None] * (points - nearest)
        return np.asarray(np.where(self.contains(moved)[:, None], moved, nearest))

    def sample(self, count: int, rng: np.random.Generator) -> Array:
        """Random points of the domain, `(count, m)`: a listed point plus a uniform vector of its ball.

        Args:
            count: number of points.
            rng: numpy random generator.

        >>> PointCloud([[0.0], [1.0]]).sample(4, np.random.default_rng(0)).shape
        (4, 1)
        """
        base = self.flat[rng.integers(len(self.points), size=count)]
        step = rng.standard_normal(base.shape)
        step /= np.maximum(np.linalg.norm(step, axis=1, keepdims=True), np.finfo(float).tiny)
        points = base + self.fill_distance * (1 - 1e-9) * step * rng.random((count, 1)) ** (1 / self.dimension)
        return np.where(self.contains(points)[:, None], points, base)  # far from zero a sum may round out of the ball

    def corners(self, limit: int = 1024) -> Array:
        """The first listed points, `(at most limit, m)`: what a search for errors tries first, as it tries a box's corners.

        Args:
            limit: the largest number of points to return.

        >>> PointCloud([[0.0], [1.0]]).corners().tolist()
        [[0.0], [1.0]]
        """
        return np.array(self.flat[:limit])

    def bounding_box(self) -> Box:
        """The smallest box that contains the domain, widened slightly so that no side is empty.

        >>> PointCloud([[0.0], [1.0]], fill_distance=0.5).bounding_box().contains(np.array([[-0.5], [2.0]])).tolist()
        [True, False]
        """
        lo, hi = self.points.min(axis=0) - self.fill_distance, self.points.max(axis=0) + self.fill_distance
        pad = np.maximum(8 * np.spacing(np.maximum(np.abs(lo), np.abs(hi))), 1e-290)
        return Box(lo - pad, hi + pad)

    def __repr__(self) -> str:
        return f"PointCloud({len(self.points)} points of shape {self.shape}, fill_distance={self.fill_distance:g})"

    __str__ = __repr__


BoxLike: TypeAlias = Box | str | Sequence[Any] | NDArray[Any]


def _is_end(value: object) -> bool:
    return is_number(value) or (isinstance(value, str) and "[" not in value)


def _end(value: Any) -> float:
    return _Constant(value).value() if isinstance(value, str) else float(value)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:197]}…"


def _box_of_sides(sides: Sequence[tuple[float, float]], text: str, spans: Sequence[tuple[int, int]] = ()) -> Box:
    """The box; a swapped or empty side is reported with the text that was typed, and its place if that is known."""
    for i, (lo, hi) in enumerate(sides):
        if not lo < hi:
            corners = len(sides) == 2 and all(sides[0][k] < sides[1][k] for k in range(2))
            hint = f" For the corners {sides[0]} and {sides[1]} write pa.Box(lo, hi)." if corners else ""
            error = DomainError(
                f"the domain {_shown(text)} has lo = {lo:g} ≥ hi = {hi:g} on axis {i}; expected lo < hi in every pair.{hint}"
            )
            raise error.at(*spans[i]) if spans else error
    return Box([lo for lo, _ in sides], [hi for _, hi in sides])


def _box_of_text(text: str) -> Box:
    if len(text) > _LONGEST:
        raise DomainError(f"the domain is a text of {len(text):,} characters; expected at most {_LONGEST:,}.")
    typed, _, tokens = text.rstrip().partition(" as ")
    listed = re.fullmatch(r"\s*\[\s*([\[(].*[\])])\s*,?\s*\]\s*", typed, re.DOTALL)
    if listed:  # a list of pairs, as Python writes it
        typed = " x ".join(f"[{pair.strip('[]() ')}]" for pair in re.split(r"[\])]\s*,\s*[\[(]", listed[1]))
    sides: list[tuple[float, float]] = []
    spans: list[tuple[int, int]] = []  # where each side was typed; not known for a list of pairs
    begins = 0
    for k, part in enumerate(re.split(r"((?<=[\]\d])\s*[xX×*]\s*(?=\[))", typed)):
        start, side, begins = begins + len(part) - len(part.lstrip()), part.strip(), begins + len(part)
        if k % 2:
            continue  # the sign between two sides
        found = _SIDE.fullmatch(re.sub(r"\s*(\]|\^|\*\*)\s*", r"\1", side))
        if not found or len(sides) + int(found[3] or 1) > _MOST_AXES:
            hint = " Domains are closed: write [ and ]." if re.match(r"[(\]]", side) else ""
            error = DomainError(f"the domain {_shown(text)} cannot be read at {_shown(part)}; expected {_TYPED}.{hint}")
            raise error if listed else error.at(start, start + max(1, len(side)))
        ends = []
        for end in (1, 2):
            try:
                ends.append(_end(found[end]))
            except DomainError as wrong:
                place = start + found.start(end) + len(found[end]) - len(found[end].lstrip())
                raise wrong if listed else wrong.at(place, place + max(1, len(found[end].strip()))) from None
        sides += [(ends[0], ends[1])] * int(found[3] or 1)
        spans += [(start, start + len(side))] * int(found[3] or 1)
    if not sides:
        raise DomainError(f"the domain {_shown(text)} has no axes; expected {_TYPED}.")
    box = _box_of_sides(sides, text, () if listed else spans)
    shape = re.fullmatch(r"(\d{1,4}) tokens of (\d{1,4})", tokens.strip())
    if tokens and (shape is None or int(shape[1]) * int(shape[2]) != len(sides)):
        error = DomainError(
            f"the domain {_shown(text)} has {len(sides)} axes; expected '… as 3 tokens of 2' with as many coordinates."
        )
        raise error.at(text.index(" as ") + 1, len(text.rstrip()))
    rows = (int(shape[1]), int(shape[2])) if shape else box.shape
    return Box(box.lo.reshape(rows), box.hi.reshape(rows))


class _Constant:
    """One number of a domain: sums, products and quotients of numbers, pi and e, as an exact fraction."""

    def __init__(self, text: str) -> None:
        self.text, self.tokens, place = text.strip(), list[str](), 0
        while place < len(self.text):
            match = _NUMBER.match(self.text, place)
            if match is None:
                raise self._error()
            self.tokens.append(match.group())
            place = match.end() + len(self.text[match.end() :]) - len(self.text[match.end() :].lstrip())
        self.tokens.reverse()

    def value(self) -> float:
        """The nearest float64 number."""
        try:
            found = float(self._sum(0))
        except (ZeroDivisionError, OverflowError):
            raise self._error() from None
        if self.tokens:
            raise self._error()
        return found

    def _error(self) -> DomainError:
        return DomainError(
            f"the domain has the end {_shown(self.text)}; expected a finite number such as 0.5, 1e-3, 2/3, pi, -pi/2 or 2*pi."
        )

    def _take(self, *symbols: str) -> str:
        return self.tokens.pop() if self.tokens and self.tokens[-1] in symbols else ""

    def _sum(self, depth: int) -> Fraction:
        total = self._product(depth)
        while sign := self._take("+", "-"):
            term = self._product(depth)
            total = total + term if sign == "+" else total - term
        return total

    def _product(self, depth: int) -> Fraction:
        found = self._atom(depth)
        while symbol := self._take("*", "/"):
            other = self._atom(depth)
            found = found * other if symbol == "*" else found / other
        return found

    def _atom(self, depth: int) -> Fraction:
        if depth > _DEEPEST or not self.tokens:
            raise self._error()
        token = self.tokens.pop()
        if token in ("+", "-"):
            inner = self._atom(depth + 1)
            return -inner if token == "-" else inner
        if token == "(":
            inner = self._sum(depth + 1)
            if not self._take(")"):
                raise self._error()
            return inner
        if token in "*/)":
            raise self._error()
        if token in _CONSTANTS:
            return _CONSTANTS[token]
        return Fraction(token) if math.isfinite(float(token)) else Fraction(1, 0)


def product(first: Box, second: Box) -> Box:
    """The flat box `first × second` in R^(m₁+m₂): the domain of a function of two arguments."""
    return Box(
        np.concatenate([first.lo.ravel(), second.lo.ravel()]), np.concatenate([first.hi.ravel(), second.hi.ravel()])
    )
