"""Recognises piecewise affine functions exactly: `f = max_i g_i − max_j h_j` with affine g_i, h_j.

Every node of an expression is such a difference, in rational arithmetic: a sum of maxima is the maximum over the sums of their
pieces, and `max(g₁ − h₁, g₂ − h₂) = max(g₁ + h₂, g₂ + h₁) − (h₁ + h₂)`. Pieces that are the largest nowhere on the box are
dropped, each with an exact proof. A piece is a row `(value at the middle of the box, change over half a side per axis)`, so
that the box is the cube |t| ≤ 1 and the supremum of `b + a·t` is `b + |a|₁`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import reduce
from typing import Any

import numpy as np

from partita.arithmetic.progress import Progress, report
from partita.errors import ShapeError, SizeError, UnsupportedError
from partita.functions.graph import Graph
from partita.functions.operations import Node
from partita.geometry.domains import Array, Box
from partita.geometry.envelopes import Rows, leading

__all__ = ["MAX_PIECES", "READ", "PiecewiseAffine", "recognise"]

MAX_PIECES = 4096
_MAX_BITS = 4096  # of a numerator or denominator
_MAX_ENTRIES = 500_000  # nodes × (inputs + 1)


@dataclass(frozen=True, eq=False)
class PiecewiseAffine:
    """`f_o(x) = max_i g_i − max_j h_j` per output o, with the pieces that matter on `|x − middle| ≤ radii`.

    Attributes:
        convex, concave: one array per output, `(pieces, 1 + m)`: value at the middle, change over half a side per axis.
    """

    middle: tuple[Fraction, ...]
    radii: tuple[Fraction, ...]
    convex: tuple[Rows, ...]
    concave: tuple[Rows, ...]

    def evaluate(self, x: Sequence[Fraction | float]) -> tuple[Fraction, ...]:
        """The outputs at one point, exactly."""
        if len(x) != len(self.middle):
            raise ShapeError(f"pieces: found a point of {len(x)} coordinates, expected {len(self.middle)}.")
        t = np.array([1, *((Fraction(v) - c) / r for v, c, r in zip(x, self.middle, self.radii))], dtype=object)
        return tuple(max(g @ t) - max(h @ t) for g, h in zip(self.convex, self.concave))

    @property
    def factors(self) -> tuple[Rows, ...]:
        """The maxima of more than one piece, output by output, the convex one first."""
        return tuple(rows for pair in zip(self.convex, self.concave) for rows in pair if len(rows) > 1)

    @property
    def most(self) -> int:
        """N, the number of pieces in the largest of them; 1 where f is affine."""
        return max(map(len, self.factors), default=1)

    def steepest(self) -> Rows:
        """`max |∂_i f_o|` times half a side, `(outputs, m)`: every slope of f is that of some g_i − h_j."""
        ends = ((g.max(axis=0), g.min(axis=0), h.max(axis=0), h.min(axis=0)) for g, h in zip(self.convex, self.concave))
        return np.array([np.maximum(a - d, c - b)[1:] for a, b, c, d in ends], dtype=object)


def recognise(
    graph: Graph, box: Box, *, margins: Array | None = None, progress: Progress | None = None
) -> PiecewiseAffine:
    """The pieces of every output on the box, each side moved out by its margin `(m,)`.

    *Theorem*: `max-affine-values`.

    Raises:
        UnsupportedError: an operation that is not piecewise affine with rational constants; it is named.
        SizeError: more than `MAX_PIECES` pieces, or numbers of thousands of digits.

    >>> from partita.functions.expressions import parse
    >>> found = recognise(parse("abs(x) - 2*max(x, y)", ["x", "y"]), Box([-1, -1], [1, 1]))
    >>> [len(found.convex[0]), len(found.concave[0])], found.evaluate([-0.5, 0.25])
    ([2, 2], (Fraction(0, 1),))
    """
    if graph.num_inputs != box.dimension:
        raise ShapeError(
            f"the graph has {graph.num_inputs} inputs, the box has {box.dimension} coordinates; expected the same number."
        )
    needed = _needed(graph)
    if len(needed) * (box.dimension + 1) > _MAX_ENTRIES:
        raise SizeError(
            f"{len(needed):,} operations on {box.dimension:,} inputs are too many to search for pieces",
            "Use another method.",
        )
    sides = list(zip(map(Fraction, box.lo.ravel().tolist()), map(Fraction, box.hi.ravel().tolist())))
    middle = tuple((lo + hi) / 2 for lo, hi in sides)
    outward = [Fraction(0)] * len(sides) if margins is None else list(map(Fraction, margins.tolist()))
    radii = tuple((hi - lo) / 2 + moved for (lo, hi), moved in zip(sides, outward))
    found: dict[int, _Difference] = {}
    for count, position in enumerate(needed):
        report(progress, "pieces", count, len(needed))
        node = graph.nodes[position]
        found[position] = _value(node, [found[k] for k in node.arguments], middle, radii)
        _require_short(found[position])
    outputs = [found[k] for k in graph.outputs]
    return PiecewiseAffine(middle, radii, tuple(f.convex for f in outputs), tuple(f.concave for f in outputs))


@dataclass(frozen=True, eq=False)
class _Difference:
    """`max convex − max concave`; a side of one piece is folded into the other."""

    convex: Rows
    concave: Rows

    @classmethod
    def of(cls, convex: Rows, concave: Rows) -> _Difference:
        """In normal form: no piece is idle or listed twice, and what both sides share is taken off where it is all of one."""
        g, h = (rows[leading(rows)] for rows in (convex, concave))
        if len(g) == len(h) > 1 and len(set(map(tuple, _sorted(g) - _sorted(h)))) == 1:
            g, h = (_sorted(g) - _sorted(h))[:1], h[:1] * 0
        if len(h) == 1:
            return cls(g - h, h * 0)
        return cls(g * 0, h - g) if len(g) == 1 else cls(g, h)

    @property
    def constant(self) -> Fraction | None:
        """The value, if there is only one piece and it does not move."""
        value, *moves = self.convex[0] - self.concave[0]
        return None if len(self.convex) > 1 or len(self.concave) > 1 or any(moves) else value

    def __neg__(self) -> _Difference:
        return _Difference(self.concave, self.convex)

    def __add__(self, other: _Difference) -> _Difference:
        return _Difference.of(_sums(self.convex, other.convex), _sums(self.concave, other.concave))

    def scaled(self, factor: Fraction) -> _Difference:
        """`|factor|` times the pieces; a negative one swaps the sides."""
        g, h = (self.convex, self.concave) if factor >= 0 else (self.concave, self.convex)
        return _Difference(g * abs(factor), h * abs(factor)) if factor else _Difference(g[:1] * 0, h[:1] * 0)

    def maximum(self, other: _Difference) -> _Difference:
        """`max(g₁ + h₂, g₂ + h₁) − (h₁ + h₂)`."""
        crossed = _sums(self.convex, other.concave), _sums(other.convex, self.concave)
        return _Difference.of(np.concatenate(crossed), _sums(self.concave, other.concave))

    def absolute(self) -> _Difference:
        """`max(2g, 2h) − (g + h)`."""
        return _Difference.of(np.concatenate([2 * self.convex, 2 * self.concave]), _sums(self.convex, self.concave))


_RULES: Mapping[str, Callable[..., _Difference]] = {
    "add": lambda f, g: f + g,
    "sub": lambda f, g: f + (-g),
    "neg": lambda f: -f,
    "sum": lambda *terms: reduce(lambda f, g: f + g, terms),
    "max": lambda f, g: f if f is g else f.maximum(g),
    "min": lambda f, g: f if f is g else -((-f).maximum(-g)),
    "abs": lambda f: f.absolute(),
    "relu": lambda f: f.maximum(f.scaled(Fraction(0))),
}
READ = frozenset({*_RULES, "input", "const", "clamp", "mul", "div", "pow"})  # operations of piecewise affine functions


def _value(
    node: Node, arguments: list[_Difference], middle: Sequence[Fraction], radii: Sequence[Fraction]
) -> _Difference:
    """One node of those that `_needed` lets through."""
    if node.operation in _RULES:
        return _RULES[node.operation](*arguments)
    if node.operation == "input":
        axis = int(node.parameters[0])
        return _affine(middle[axis], *(radii[i] if i == axis else 0 for i in range(len(middle))))
    numbers = [_affine(value, *[0] * len(middle)) for value in node.parameters]
    if node.operation == "const":
        return numbers[0]
    if node.operation == "clamp":
        return -(-arguments[0].maximum(numbers[0])).maximum(-numbers[1])
    return _multiple(node, arguments)


def _multiple(node: Node, arguments: list[_Difference]) -> _Difference:
    """mul, div and pow: constants with each other and with one function; an UnsupportedError for a division by 0."""
    f, last = arguments[0], arguments[-1]
    if node.operation == "mul":
        return last.scaled(f.constant) if f.constant is not None else f.scaled(_required(last))
    exponent = -1 if node.operation == "div" else int(node.parameters[0])
    if exponent == 1:
        return f
    base = _required(last) if exponent else Fraction(1)
    if base == 0 and exponent < 0:
        raise UnsupportedError(
            "not piecewise affine: it divides by a constant that is 0", "The function must be defined on the box."
        )
    return f.scaled(1 / base) if node.operation == "div" else _affine(base**exponent, *f.convex[0, 1:] * 0)


def _required(f: _Difference) -> Fraction:
    if f.constant is None:
        raise UnsupportedError(
            "not piecewise affine: a product of two factors, neither recognised as constant",
            "Multiply only by numbers.",
        )
    return f.constant


def _affine(*row: Any) -> _Difference:
    piece = np.array([[Fraction(v) for v in row]], dtype=object)
    return _Difference(piece, piece * 0)


def _needed(graph: Graph) -> list[int]:
    """The nodes that the outputs need, in order; an UnsupportedError for the first that is no piecewise affine operation."""
    wanted, varying = set(graph.outputs), [False] * len(graph.nodes)
    for position in reversed(range(len(graph.nodes))):
        if position in wanted:
            wanted.update(graph.nodes[position].arguments)
    for position in sorted(wanted):
        node = graph.nodes[position]
        moving = [varying[k] for k in node.arguments]
        varying[position] = node.operation == "input" or any(moving)
        bent = (
            (node.operation == "mul" and all(moving))
            or (node.operation == "div" and moving[1])
            or (node.operation == "pow" and moving[0] and node.parameters[0] not in (0, 1))
        )
        if node.operation not in READ or bent:
            raise UnsupportedError(
                f"not piecewise affine: {node.operation} of {'variables' if varying[position] else 'a constant'}",
                "Use sums, multiples by rational constants, max, min, abs, relu and clamp, or another method.",
            )
    return sorted(wanted)


def _require_short(f: _Difference) -> None:
    """A SizeError for numbers so long that exact arithmetic would take too long."""
    bits = (max(v.numerator.bit_length(), v.denominator.bit_length()) for r in (f.convex, f.concave) for v in r.flat)
    if max(bits) > _MAX_BITS:
        raise SizeError("its constants need thousands of digits in exact arithmetic", "Round the constants.")


def _sums(first: Rows, second: Rows) -> Rows:
    """All sums of a piece of each: the pieces of the sum of two maxima."""
    if len(first) * len(second) > MAX_PIECES:
        raise SizeError(f"{len(first)} × {len(second)} pieces are more than {MAX_PIECES:,}", "Use another method.")
    return (first[:, None] + second[None]).reshape(-1, first.shape[1])


def _sorted(rows: Rows) -> Rows:
    return np.array(sorted(map(tuple, rows)), dtype=object)
