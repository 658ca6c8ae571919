"""Balls over boxes; polynomials in Bernstein form through values at Chebyshev points, with a bound on the interpolation error."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import product
from typing import Any

from flint import acb, arb, arb_mat, ctx

from partita_check.clock import clock
from partita_check.graph import Choices, Graph

__all__ = ["INF", "Basis", "Ends", "balls", "enclose", "grown", "halves", "norm", "pieces_above", "spread", "up"]

RADII = (48, 24, 16, 12, 8, 6, 4, 3, 2)  # ρ: sums of the semiaxes of the Bernstein ellipses tried
INF = arb("inf")
Ends = tuple[tuple[float, float], ...]  # a box


def up(x: arb) -> float:
    """A float that is at least every number of the ball; infinity for what is not finite."""
    return math.nextafter(float(x.upper()), math.inf) if x.is_finite() else math.inf


def down(x: arb) -> float:
    """A float that is at most every number of the ball."""
    return -up(-x)


def balls(ends: Ends) -> tuple[list[arb], list[arb], list[arb]]:
    """A box as intervals, its middle and its radii, each in a ball."""
    lows, highs = [arb(a) for a, _ in ends], [arb(b) for _, b in ends]
    return (
        [a.union(b) for a, b in zip(lows, highs)],
        [(a + b) / 2 for a, b in zip(lows, highs)],
        [(b - a) / 2 for a, b in zip(lows, highs)],
    )


def grown(ends: Ends, by: Sequence[arb]) -> Ends:
    """A box with every side moved outward."""
    return tuple((down(arb(a) - s), up(arb(b) + s)) for (a, b), s in zip(ends, by))


def halves(ends: Ends, axis: int) -> list[Ends]:
    """A box cut in the middle of one side; the halves share the cut."""
    (lo, hi), before, after = ends[axis], ends[:axis], ends[axis + 1 :]
    middle = lo / 2 + hi / 2
    return [(*before, (lo, middle), *after), (*before, (middle, hi), *after)]


class Basis:
    """Degree n on one axis: the roots t of T_{n+1}, and matrices from values there to Bernstein coefficients, and to halves.

    `lebesgue` bounds the norm of interpolation at these points, `1 + (2/π) ln(n + 1)`.
    """

    def __init__(self, n: int) -> None:
        before, ctx.prec = ctx.prec, 256
        self.n, size = n, n + 1
        self.nodes = [(arb.pi() * (2 * k + 1) / (2 * size)).cos() for k in range(size)]
        halves = [((1 + t) / 2, (1 - t) / 2) for t in self.nodes]
        rows = [
            [math.comb(n, j) * math.prod([a] * j + [b] * (n - j), start=arb(1)) for j in range(size)] for a, b in halves
        ]
        self.to_bernstein = arb_mat(rows).inv()
        left = [[arb(math.comb(j, i)) / 2**j if i <= j else arb(0) for i in range(size)] for j in range(size)]
        self.halves = (arb_mat(left), arb_mat([row[::-1] for row in left[::-1]]))
        self.lebesgue = 1 + 2 * arb(size).log() / arb.pi()
        ctx.prec = before

    @staticmethod
    @cache
    def of(n: int) -> Basis:
        return Basis(n)


@cache
def tiles(radius: int, columns: int, rows: int) -> tuple[acb, ...]:
    """Rectangles that cover the upper half of the ellipse |t + √(t² − 1)| ≤ ρ, its inside too: a pole there must be met.

    Functions that are real on the real line have the same modulus below it.
    """
    wide, tall = (radius + 1 / radius) / 2, (radius - 1 / radius) / 2
    found = []
    for j, i in product(reversed(range(rows)), range(-columns, columns)):  # poles are met soonest at the top
        corner = (min(abs(i), abs(i + 1)) / columns, j / rows)
        if corner[0] ** 2 + corner[1] ** 2 < 1.0001:
            x, y = arb(i).union(i + 1) * wide / columns, arb(j).union(j + 1) * tall / rows
            found.append(acb(x, y) * (1 + arb(2) ** -40))
    return tuple(found)


def left_out(size: arb, radius: int, n: int) -> arb:
    """What interpolation of degree n leaves of an analytic function with |g| ≤ size on the ellipse: `4·size·ρ^{−n}/(ρ − 1)`.

    `g = Σ a_k T_k`, `|a_k| ≤ 2·size·ρ^{−k}`, and on the nodes T_k, k > n, agrees with ±T_j, j ≤ n, or with 0: each costs 2|a_k|.
    """
    return 4 * size / (arb(radius) ** n * (radius - 1))


def best_rest(size_on: Any, n: int, columns: int, rows: int, skip: int = 1) -> arb:
    """The least of what interpolation leaves, over the ellipses tried; `size_on(t)` bounds the function on a rectangle."""
    best = INF
    for rho in RADII[::skip]:
        sizes = list[arb]()
        for t in tiles(rho, columns, rows):
            sizes.append(size_on(t))
            if not sizes[-1].is_finite():
                break
        found = left_out(norm(sizes), rho, n)
        if not found < best and best.is_finite():
            break
        best = found if found < best else best
    return best


def transform(flat: Sequence[arb], matrices: Sequence[arb_mat]) -> list[arb]:
    """One matrix per axis applied to a tensor in row-major order."""
    for matrix in matrices:
        clock.tick()
        flat = (matrix * arb_mat(matrix.ncols(), len(flat) // matrix.ncols(), flat)).transpose().entries()
    return list(flat)


def norm(coefficients: Sequence[arb]) -> arb:
    """`max |b|`: at least the supremum of the polynomial; infinite if anything is not finite."""
    sizes = [b.abs_upper() for b in coefficients]
    return max(sizes, default=arb(0)) if sum(sizes, arb(0)).is_finite() else INF  # comparisons with NaN are false


def pieces_above(
    b: list[arb], basis: Basis, m: int, target: arb, most: int
) -> Iterator[tuple[arb, list[arb], list[int]]]:
    """Halve the box until `|p| ≤ target` on every part; yields (norm, coefficients, path) of parts that do not meet it.

    Every part that is yielded may be taken as it is: the norms bound |p| there. Stops halving after `most` parts.
    """
    waiting, parts = [(norm(b), b, list[int]())], 0
    corners = [sum(k * (basis.n + 1) ** i for i, k in enumerate(ends)) for ends in product((0, basis.n), repeat=m)]
    while waiting:
        size, b, path = waiting.pop()
        clock.tick()
        if size <= target:
            continue
        parts += 1
        if parts > most or len(path) > 40 * m or any(b[k].abs_lower() > target for k in corners):
            yield size, b, path
            continue
        for side, half in enumerate(basis.halves):
            child = transform(b, [half])  # the next axis is then the first
            waiting.append((norm(child), child, [*path, side]))


def enclose(graph: Graph, ends: Ends, n: int, choices: Choices, columns: int, rows: int) -> tuple[list[arb], list[arb]]:
    """A real f on a box as a Bernstein polynomial: its coefficients, and what every axis adds to the remainder.

    Interpolating one axis after the other, `|f − p| ≤ Σ_i Λ^i·(what axis i leaves)`, with one coordinate on its ellipse and the
    others real. Not finite where no ellipse is proved to be free of singularities. A polynomial of degree n or less leaves nothing.
    """
    (box, middle, radius), basis, rests = balls(ends), Basis.of(n), []
    out, around = graph.outputs[0], graph.all_values(box, choices)
    at_middle = graph.all_values(middle, choices)
    for i in range(len(ends)):
        if graph.degrees[i] <= n:
            rests.append(arb(0))
            continue

        def size_on(t: acb, i: int = i) -> arb:
            point = [*box[:i], middle[i] + radius[i] * t, *box[i + 1 :]]
            size: arb = (graph.moved(around, i, point, choices)[out] - at_middle[out]).abs_upper()
            return size

        rests.append(best_rest(size_on, n, columns, rows, 2) * math.prod([basis.lebesgue] * i, start=arb(1)))

    def values(point: list[arb], axis: int, before: list[Any]) -> Iterator[arb]:
        """f at the products of nodes of this axis and those behind it, row-major."""
        if axis == len(ends):
            yield before[out]
            return
        for t in basis.nodes:
            moved = [*point[:axis], middle[axis] + radius[axis] * t, *point[axis + 1 :]]
            yield from values(moved, axis + 1, graph.moved(before, axis, moved, choices))

    return transform(list(values(middle, 0, at_middle)), [basis.to_bernstein] * len(ends)), rests


@cache
def _places(support: tuple[int, ...], size: int, m: int) -> tuple[int, ...]:
    steps = [size ** (len(support) - 1 - support.index(i)) if i in support else 0 for i in range(m)]
    return tuple(sum(k * s for k, s in zip(place, steps)) for place in product(range(size), repeat=m))


def spread(table: Sequence[arb], support: tuple[int, ...], size: int, m: int) -> list[arb]:
    """Coefficients of a polynomial in some of the m coordinates as one in all of them."""
    return [table[k] for k in _places(support, size, m)]
