"""Polynomials in Bernstein form on boxes, through values at Chebyshev points, with what interpolation leaves out."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cache

from flint import acb, arb, arb_mat, ctx

from partita_check.graph import Choices, Graph

__all__ = ["Basis", "down", "enclose", "interval", "left_out", "norm", "pieces_above", "spread", "transform", "up"]

RADII = (2, 4, 8, 16, 48)  # ρ: sums of the semiaxes of the Bernstein ellipses tried


def up(x: arb) -> float:
    """A float that is at least every number of the ball; infinity for what is not finite."""
    return math.nextafter(float(x.upper()), math.inf) if x.is_finite() else math.inf


def down(x: arb) -> float:
    """A float that is at most every number of the ball."""
    return math.nextafter(float(x.lower()), -math.inf) if x.is_finite() else -math.inf


def interval(lo: float, hi: float) -> arb:
    return arb(lo).union(arb(hi))


class Basis:
    """Degree n on one axis: the roots t of T_{n+1}, and matrices from values there to Bernstein coefficients, and to halves.

    `lebesgue` bounds the norm of interpolation at these points, `1 + (2/π) ln(n + 1)`.
    """

    def __init__(self, n: int) -> None:
        before, ctx.prec = ctx.prec, 256
        self.n, size = n, n + 1
        self.nodes = [(arb.pi() * (2 * k + 1) / (2 * size)).cos() for k in range(size)]
        rows = [
            [math.comb(n, j) * _power((1 + t) / 2, j) * _power((1 - t) / 2, n - j) for j in range(size)]
            for t in self.nodes
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


def _power(x: arb, k: int) -> arb:
    return math.prod([x] * k, start=arb(1))


@cache
def ellipse(radius: int, arcs: int) -> tuple[acb, ...]:
    """Rectangles that cover the upper half of the ellipse |t + √(t² − 1)| = ρ; one rectangle with its inside if arcs is 0.

    Functions that are real on the real line have the same modulus below, and analytic ones their maximum on the curve.
    """
    wide, tall = (arb(radius) + arb(1) / radius) / 2, (arb(radius) - arb(1) / radius) / 2
    if arcs == 0:
        return (acb(wide * arb(0, 1), tall * arb(0, 1)),)
    step = arb.pi() / (2 * arcs)
    angles = [arb(0, 1) * step + step * (2 * k + 1) for k in range(arcs)]
    return tuple(acb(wide * a.cos(), tall * a.sin()) for a in angles)


def left_out(size: arb, radius: int, n: int) -> arb:
    """What interpolation of degree n leaves of an analytic function with |g| ≤ size on the ellipse: `4·size·ρ^{−n}/(ρ − 1)`.

    `g = Σ a_k T_k`, `|a_k| ≤ 2·size·ρ^{−k}`, and on the nodes T_k, k > n, agrees with ±T_j, j ≤ n, or with 0: each costs
    at most 2|a_k|.
    """
    return 4 * size / (arb(radius) ** n * (radius - 1))


def transform(flat: Sequence[arb], matrices: Sequence[arb_mat]) -> list[arb]:
    """One matrix per axis applied to a tensor in row-major order."""
    for matrix in matrices:
        rows = matrix.ncols()
        flat = (matrix * arb_mat(rows, len(flat) // rows, flat)).transpose().entries()
    return list(flat)


def norm(coefficients: Sequence[arb]) -> arb:
    """`max |b|`: at least the supremum of the polynomial; infinite if anything is not finite."""
    largest = arb(0)
    for b in coefficients:
        size = b.abs_upper()
        if size > largest:
            largest = size
        elif not size.is_finite():
            return arb("inf")
    return largest


def pieces_above(
    b: list[arb], basis: Basis, m: int, target: arb, most: int
) -> Iterator[tuple[arb, list[arb], list[int]]]:
    """Halve the box until `|p| ≤ target` on every part; yields (norm, coefficients, path) of parts that do not meet it.

    Every part that is yielded may be taken as it is: the norms bound |p| there. Stops halving after `most` parts.
    """
    waiting, parts = [(norm(b), b, list[int]())], 0
    while waiting:
        size, b, path = waiting.pop()
        if size <= target:
            continue
        parts += 1
        if parts > most or len(path) > 40 * m or max(abs(b[k]).lower() for k in _corners(basis.n, m)) > target:
            yield size, b, path
            continue
        axis = len(path) % m
        for side, half in enumerate(basis.halves):
            child = _halved(b, half, basis.n + 1, axis)
            waiting.append((norm(child), child, [*path, side]))


def _halved(b: list[arb], half: arb_mat, size: int, axis: int) -> list[arb]:
    after = len(b) // size ** (axis + 1)
    block = size * after
    return [x for k in range(0, len(b), block) for x in (half * arb_mat(size, after, b[k : k + block])).entries()]


@cache
def _corners(n: int, m: int) -> tuple[int, ...]:
    places = [0]
    for _ in range(m):
        places = [place * (n + 1) + end for place in places for end in (0, n)]
    return tuple(places)


def enclose(
    graph: Graph, lo: Sequence[float], hi: Sequence[float], n: int, choices: Choices, arcs: int
) -> tuple[list[arb], list[arb]]:
    """A real f on a box as a Bernstein polynomial: its coefficients, and what every axis adds to the remainder.

    Interpolating one axis after the other, `|f − p| ≤ Σ_i Λ^i·(what axis i leaves)`, with one coordinate on its ellipse and the
    others real. Not finite where no ellipse is proved to be free of singularities.
    """
    m, basis = len(lo), Basis.of(n)
    middle = [(arb(a) + arb(b)) / 2 for a, b in zip(lo, hi)]
    radius = [(arb(b) - arb(a)) / 2 for a, b in zip(lo, hi)]
    box = [interval(a, b) for a, b in zip(lo, hi)]
    center, rests = graph.evaluate(middle, choices)[0], []
    for i in range(m):
        best = arb("inf")
        for rho in RADII:
            size = arb(0)
            for t in ellipse(rho, arcs):
                value = graph.evaluate([*box[:i], middle[i] + radius[i] * t, *box[i + 1 :]], choices)[0]
                size = _largest(size, value - center)
            found = left_out(size, rho, n)
            if not found < best and best.is_finite():
                break
            best = found if found < best else best
        rests.append(best * _power(basis.lebesgue, i))
    columns = [[middle[i] + radius[i] * t for t in basis.nodes] for i in range(m)]
    table = [graph.evaluate(point, choices)[0] for point in _product(columns)]
    return transform(table, [basis.to_bernstein] * m), rests


@cache
def _places(support: tuple[int, ...], size: int, m: int) -> tuple[int, ...]:
    places = [0]
    for i in range(m):
        step = size ** (len(support) - 1 - support.index(i)) if i in support else 0
        places = [place + k * step for place in places for k in range(size)]
    return tuple(places)


def spread(table: Sequence[arb], support: tuple[int, ...], size: int, m: int) -> list[arb]:
    """Coefficients of a polynomial in some of the m coordinates as one in all of them."""
    return [table[k] for k in _places(support, size, m)]


def _largest(size: arb, value: arb | acb) -> arb:
    found = value.abs_upper()
    return size if found <= size or not size.is_finite() else found


def _product(columns: Sequence[Sequence[arb]]) -> Iterator[list[arb]]:
    if not columns:
        yield []
        return
    for x in columns[0]:
        for rest in _product(columns[1:]):
            yield [x, *rest]
