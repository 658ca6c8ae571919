"""What more heads cannot do: proved lower bounds on the error of sums of heads that read little, and on the size of any network."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from partita.arithmetic.arguments import require_count, require_number
from partita.arithmetic.rounding import down, sqrt_down, up
from partita.errors import DomainError, NothingKnownError, UnsupportedError
from partita.functions.graph import Graph
from partita.functions.target import Target, make_target
from partita.geometry.domains import Array, Box, BoxLike

__all__ = ["AdditiveGap", "additive_gap", "least_numbers", "product_gap"]

_MOST_READS = 15  # a difference of k coordinates has 2^k points
_MOST_POINTS = 1 << 18  # at which f is evaluated in one step of the search
_STARTS, _SWEEPS, _ACROSS, _NEAR = 3, 8, 9, 6  # of the search that changes one entry at a time


@dataclass(frozen=True, eq=False)
class AdditiveGap:
    """Points at which a function is not a sum of functions of few coordinates, and what this costs every such sum.

    Attributes:
        lower_bound: proved: every sum of functions that read at most `reads` coordinates each is at least this far from f at one
            of the 2^(reads + 1) points that take each block of coordinates from `one` or from `other`.
        reads: the number of coordinates that each term of a sum may read.
        blocks: `reads + 1` disjoint sets of coordinates. Coordinates in which `one` and `other` agree are in none.
        one: a point, flat, `(m,)`.
        other: a point, flat, `(m,)`.
        output: the output of f that is meant, flat.
    """

    lower_bound: float
    reads: int
    blocks: tuple[tuple[int, ...], ...]
    one: Array
    other: Array
    output: int


def additive_gap(function: Any, domain: BoxLike, *, reads: int, samples: int = 2000, seed: int = 0) -> AdditiveGap:
    """A proved lower bound on the error of every sum of functions that read at most `reads` coordinates each.

    Take points x and y and `reads + 1` disjoint blocks of coordinates, and
    `Δf = Σ_T (−1)^{reads+1−|T|} f(y on the blocks of T, x elsewhere)` over all sets T of blocks. A function g that reads
    at most `reads` coordinates does not read some block, so `Δg = 0`, and so it is for a sum of such functions, whatever
    their number and size. So `|f − Σ g| ≥ |Δf|/2^{reads+1}` at one of the points. Points and blocks are searched, and the
    difference is enclosed in intervals. A bound of 0 proves nothing.

    *Theorem*: `mixed-difference`.

    Args:
        function: an expression, a Graph, or a torch function that can be traced.
        domain: a box.
        reads: how many coordinates each term of the sum may read, 0 ≤ reads < m and at most 15.
        samples: random points and blocks that the search starts from.
        seed: random seed.

    Raises:
        NothingKnownError: f is a black box.
        UnsupportedError: reads is not less than the number of coordinates, or too large.

    >>> gap = additive_gap("x0*x1*x2", Box([-1, -1, -1], [1, 1, 1]), reads=2)
    >>> round(gap.lower_bound, 9), sorted(gap.blocks)
    (1.0, [(0,), (1,), (2,)])
    """
    box = Box.of(domain)
    if not isinstance(box, Box):
        raise UnsupportedError(f"the domain is {domain!r}; expected a box.")
    m = box.dimension
    if not 0 <= reads < m or reads > _MOST_READS:
        raise UnsupportedError(
            f"reads is {reads}; expected at least 0, at most {_MOST_READS} and less than the {m} coordinates of the domain: a "
            "function that reads all of them can be f itself."
        )
    target = make_target(function, box)
    if target.graph is None:
        raise NothingKnownError(
            "additive_gap needs f as an expression, which is enclosed at the points that are found."
        )
    rng = np.random.default_rng(seed)
    ends = box.lo.ravel(), box.hi.ravel()
    starts = max(8, min(require_count("samples", samples), _MOST_POINTS >> (reads + 1)) // _STARTS)
    size, best = 0.0, None
    for _ in range(_STARTS):
        found, corners = _improved(target, _guesses(ends, reads + 1, starts, rng), ends, rng)
        if best is None or found > size:
            size, best = found, corners
    assert best is not None
    moved = best.one[0] != best.other[0]
    blocks = tuple(tuple(np.flatnonzero(moved & (best.labels[0] == k)).tolist()) for k in range(reads + 1))
    return AdditiveGap(_proved(target.graph, best), reads, blocks, best.one[0], best.other[0], best.output)


@dataclass(frozen=True, eq=False)
class _Corners:
    """A batch of pairs of points x and y `(batch, m)`, and the block of every coordinate, 0, …, blocks − 1."""

    labels: NDArray[np.int64]
    one: Array
    other: Array
    blocks: int
    output: int = 0

    def points(self) -> tuple[Array, Array]:
        """The points of every difference `(2^blocks, batch, m)`, and the signs of their terms `(2^blocks,)`."""
        inside = (np.arange(1 << self.blocks)[:, None] >> np.arange(self.blocks)) & 1 == 1
        signs = np.where((self.blocks - inside.sum(axis=1)) % 2 == 0, 1.0, -1.0)
        return np.where(inside[:, self.labels], self.other, self.one), signs


def _improved(
    target: Target, guesses: _Corners, ends: tuple[Array, Array], rng: np.random.Generator
) -> tuple[float, _Corners]:
    """The best of the guesses, changed one coordinate at a time while that helps."""
    size, best = _largest(target, guesses)
    for _ in range(_SWEEPS):
        before = size
        for entry in range(len(ends[0])):
            found, changed = _largest(target, _entry_changed(best, entry, ends, rng))
            if found > size:
                size, best = found, changed
        if size <= before * (1 + 1e-9):
            break
    return size, best


def _guesses(ends: tuple[Array, Array], blocks: int, count: int, rng: np.random.Generator) -> _Corners:
    """Random blocks of equal sizes, and random points, some of them opposite corners, at ends of the box, or in its middle."""
    lo, hi = ends
    m = len(lo)
    labels = np.argsort(rng.random((count, m)), axis=1) % blocks
    places = rng.random((2, count, m))
    places[:, : count // 2] = rng.integers(0, 3, (2, count // 2, m)) / 2
    places[0, : count // 4] = rng.integers(0, 2, (count // 4, m))
    stays = rng.random((count // 4, m)) < rng.choice([0.0, 0.5], (count // 4, 1))
    places[1, : count // 4] = np.where(stays, places[0, : count // 4], 1 - places[0, : count // 4])
    one, other = np.clip(lo + places * (hi - lo), lo, hi)
    return _Corners(labels, one, other, blocks)


def _entry_changed(best: _Corners, entry: int, ends: tuple[Array, Array], rng: np.random.Generator) -> _Corners:
    """The same points with one coordinate changed: its value in x or in y, or the block that it belongs to."""
    lo, hi = ends[0][entry], ends[1][entry]
    now = best.one[0, entry], best.other[0, entry]
    steps = (hi - lo) * rng.uniform(-1, 1, _NEAR) * 0.5 ** np.arange(2, 2 + _NEAR)
    values = np.concatenate([np.linspace(lo, hi, _ACROSS), now, *(x + steps for x in now)]).clip(lo, hi)
    count = len(values)
    rows = 2 * count + best.blocks
    labels, one, other = best.labels.repeat(rows, 0), best.one.repeat(rows, 0), best.other.repeat(rows, 0)
    one[:count, entry], other[count : 2 * count, entry] = values, values
    labels[2 * count :, entry] = np.arange(best.blocks)
    return _Corners(labels, one, other, best.blocks)


def _largest(target: Target, corners: _Corners) -> tuple[float, _Corners]:
    """The largest `|Δf|` of a batch in floating point, and where it is."""
    points, signs = corners.points()
    values = target(points.reshape(-1, points.shape[-1])).reshape(*points.shape[:2], -1)
    sizes = np.nan_to_num(np.abs(np.einsum("sbo,s->bo", values, signs)), nan=-1.0, posinf=-1.0)
    row, output = np.unravel_index(int(sizes.argmax()), sizes.shape)
    at = slice(row, row + 1)
    found = _Corners(corners.labels[at], corners.one[at], corners.other[at], corners.blocks, int(output))
    return float(sizes[row, output]), found


def _proved(graph: Graph, corners: _Corners) -> float:
    """`|Δf|/2^blocks`, rounded down, from enclosures of f at the points."""
    points, signs = corners.points()
    values = graph.enclose(points[:, 0], points[:, 0])[:, corners.output]
    if not (np.isfinite(values.lo).all() and np.isfinite(values.hi).all()):
        raise DomainError("f is not defined and bounded at the points that were found", "Choose a smaller box.")
    least = down(math.fsum(np.where(signs > 0, values.lo, -values.hi)))
    most = up(math.fsum(np.where(signs > 0, values.hi, -values.lo)))
    nearest = max(least, -most)  # the end of the enclosure that is nearer to 0, if 0 is outside
    return math.ldexp(nearest, -corners.blocks) if nearest > 0 else 0.0


def least_numbers(
    dimension: int, tolerance: float, *, lipschitz: float = 1.0, side: float = 1.0, bits: int = 64
) -> int:
    """How many numbers any family of networks needs that comes within ε of every Lipschitz function of a cube.

    The cube has sides of the given length, and `|f(x) − f(y)| ≤ L|x − y|_∞`. With `n = ⌈L·side/(2ε)⌉ − 1` cells along each axis
    there are `2^{n^d}` such functions that are more than 2ε apart, so that no network serves two of them. Networks of one
    architecture with P numbers of b bits are at most `2^{Pb}`, so that `P ≥ n^d/b`. It does not matter how many heads or layers
    the numbers belong to.

    *Theorem*: `unstructured-numbers`.

    Args:
        dimension: d ≥ 1.
        tolerance: ε > 0.
        lipschitz: L > 0.
        side: the length of the cube's sides.
        bits: b, the bits of one number.

    >>> least_numbers(2, 0.01), least_numbers(10, 0.05), least_numbers(10, 0.6)
    (38, 54481007, 0)
    """
    d, b = require_count("dimension", dimension), require_count("bits", bits)
    length = Fraction(require_number("lipschitz", lipschitz)) * Fraction(require_number("side", side))
    cells = math.ceil(length / (2 * Fraction(require_number("tolerance", tolerance)))) - 1
    return int(-(-(cells**d) // b))


def product_gap(dimension: int, heads: int, *, reads: int = 1) -> float:
    """A lower bound on the relative error of sums of heads that read few directions each, against a product of all inputs.

    Let X be a standard normal vector in R^d and `f = x_0⋯x_{d−1}`, so that `E f(X)² = 1`. For any functions g_h of k variables
    and any k × d matrices A_h, H of them, and every m,
    `E|f(X) − Σ_h g_h(A_h X)|² ≥ 1 − H·C(k + m − 1, m)/C(d, m)`. The best m is taken, and the square root is returned, rounded
    down. With k = 1, fewer than `C(d, ⌊d/2⌋)` heads leave an error. 2^{d−1} heads are enough for none, and d − 1 products of two
    are, in ⌈log₂ d⌉ layers.

    *Theorem*: `product-of-inputs`.

    Args:
        dimension: d ≥ 1.
        heads: H ≥ 0.
        reads: k ≥ 1, the directions that one head reads; a coordinate is a direction too.

    >>> round(product_gap(10, 200), 4), product_gap(10, 252), product_gap(10, 41, reads=2) > 0
    (0.4543, 0.0, True)
    """
    d, k = require_count("dimension", dimension), require_count("reads", reads)
    if heads < 0:
        raise UnsupportedError(f"heads is {heads}; expected an integer ≥ 0.")
    left = max(1 - Fraction(heads * math.comb(k + m - 1, m), math.comb(d, m)) for m in range(d + 1))
    return sqrt_down(down(float(left))) if left > 0 else 0.0
