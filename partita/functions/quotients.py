"""Recognises functions that a softmax over two keys represents: quotients of two exponentials, products and squares.

Every node of an expression is a quotient `Σ_k p_k(z) e^{l_k(z)} / Σ_k d_k e^{l_k(z)}` with polynomials p_k, affine l_k and
constants d_k of one sign, in rational arithmetic. So `tanh(u) = (e^{2u} − 1)/(e^{2u} + 1)`, and it does not matter how that is
written. The quotient is kept in a normal form: the first exponential below the line is `e⁰`, with the coefficient 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import reduce
from typing import TypeVar

import numpy as np

from partita.arithmetic.rounding import down, log_down, log_up, up
from partita.errors import SizeError, UnsupportedError
from partita.functions.graph import Graph
from partita.functions.operations import Node
from partita.geometry.domains import Array, Box
from partita.geometry.envelopes import Rows

__all__ = ["QUOTIENT_OPERATIONS", "Logistic", "Quadratic", "two_key_form"]

QUOTIENT_OPERATIONS = frozenset(
    ("input", "const", "add", "sub", "mul", "div", "neg", "pow", "sum", "exp", "tanh", "sigmoid")
)
_MOST_NODES = 4096
_MOST_TERMS = 4096  # of a polynomial
_MOST_EXPONENTIALS = 8
_MOST_BITS = 4096  # of a numerator or denominator
_DEGREE = 2

Affine = tuple[tuple[int, Fraction], ...]  # (0, constant), (1 + i, slope along axis i), without zeros, in order
Polynomial = dict[tuple[int, ...], Fraction]  # axes of a monomial, in order, to its coefficient
Key = TypeVar("Key")
_ZERO: Affine = ()


@dataclass(frozen=True, eq=False)
class Logistic:
    """`f_o = A_o + B_o tanh(φ)` with affine A, B and φ, in coordinates |t| ≤ 1 of the box: `z = middle + radii ∘ t`.

    Attributes:
        turn: φ, `(1 + m,)`: its value at the middle, its change over half a side per axis.
        unsure: how far the constant of φ may be from the true one, which may be a logarithm.
        level, swing: A and B, `(out, 1 + m)`.
    """

    middle: tuple[Fraction, ...]
    radii: tuple[Fraction, ...]
    turn: Rows
    unsure: Fraction
    level: Rows
    swing: Rows


@dataclass(frozen=True, eq=False)
class Quadratic:
    """`f_o = A_o + tᵀ Q_o t` in coordinates |t| ≤ 1 of the box: `z = middle + radii ∘ t`.

    Attributes:
        level: A, `(out, 1 + m)`. squares: Q, `(out, m, m)`, symmetric; all zeros where f is affine.
    """

    middle: tuple[Fraction, ...]
    radii: tuple[Fraction, ...]
    level: Rows
    squares: Rows


def two_key_form(graph: Graph, box: Box, *, margins: Array | None = None) -> Logistic | Quadratic:
    """What every output is on the box, each side moved out by its margin `(m,)`. *Theorem*: `two-keys`, `two-key-products`.

    Raises:
        UnsupportedError: f has another form, or an irrational constant. SizeError: too large for exact arithmetic.

    >>> from partita.functions.expressions import parse
    >>> found = two_key_form(parse("x/(1 + exp(-x))", ["x"]), Box([-4], [4]))
    >>> [row.tolist() for row in (found.turn, *found.level, *found.swing)]
    [[Fraction(0, 1), Fraction(2, 1)], [Fraction(0, 1), Fraction(2, 1)], [Fraction(0, 1), Fraction(2, 1)]]
    """
    sides = list(zip(map(Fraction, box.lo.ravel().tolist()), map(Fraction, box.hi.ravel().tolist())))
    outward = [Fraction(0)] * len(sides) if margins is None else list(map(Fraction, margins.tolist()))
    middle = tuple((lo + hi) / 2 for lo, hi in sides)
    radii = tuple((hi - lo) / 2 + moved for (lo, hi), moved in zip(sides, outward))
    found: dict[int, _Quotient] = {}
    for position in _needed(graph):
        node = graph.nodes[position]
        found[position] = _value(node, [found[k] for k in node.arguments], middle, radii)
        found[position].require_short()
    outputs = [found[k] for k in graph.outputs]
    below = {tuple(f.below.items()) for f in outputs if len(f.below) > 1}
    if not below:
        return _quadratic(outputs, middle, radii)
    if len(below) > 1 or len(next(iter(below))) > 2:
        raise UnsupportedError("more than two exponentials", _HINT)
    return _logistic(outputs, dict(next(iter(below))), middle, radii)


_HINT = "Two keys are for one tanh, sigmoid or SiLU of an affine function, or one product of two."


def _quadratic(outputs: Sequence[_Quotient], middle: tuple[Fraction, ...], radii: tuple[Fraction, ...]) -> Quadratic:
    m = len(middle)
    level, squares = np.full((len(outputs), 1 + m), Fraction(0)), np.full((len(outputs), m, m), Fraction(0))
    for o, f in enumerate(outputs):
        if any(exponent != _ZERO for exponent in f.above):
            raise UnsupportedError("an exponential that is not divided by two of them", _HINT)
        for axes, c in f.above.get(_ZERO, {}).items():
            if len(axes) == 2:
                squares[o, axes[0], axes[1]] += c / 2
                squares[o, axes[1], axes[0]] += c / 2
            else:
                level[o, 1 + axes[0] if axes else 0] = c
    return Quadratic(middle, radii, level, squares)


def _logistic(
    outputs: Sequence[_Quotient],
    below: Mapping[Affine, Fraction],
    middle: tuple[Fraction, ...],
    radii: tuple[Fraction, ...],
) -> Logistic:
    """`(p₀ + p₁e^l)/(1 + d e^l)` is p₀ and p₁/d, mixed by the softmax of 0 and `l + ln d`."""
    m, (exponent, weight) = len(middle), next((e, d) for e, d in below.items() if e != _ZERO)
    if not any(axis for axis, _ in exponent):
        raise UnsupportedError("an exponential of a constant, which is irrational", _HINT)
    ends = []
    for f in outputs:
        same = f if len(f.below) > 1 else _Quotient(_times(f.above, _constants(below)), dict(below))
        if not set(same.above) <= {_ZERO, exponent}:
            raise UnsupportedError("an exponential that is not divided by two of them", _HINT)
        ends.append([_row(same.above.get(_ZERO, {}), m), _row(same.above.get(exponent, {}), m) / weight])
    values, turn = np.array(ends, dtype=object), np.full(1 + m, Fraction(0))
    for axis, c in exponent:
        turn[axis] = c / 2
    offset, unsure = _half_logarithm(weight)
    turn[0] += offset
    return Logistic(middle, radii, turn, unsure, (values[:, 0] + values[:, 1]) / 2, (values[:, 1] - values[:, 0]) / 2)


def _half_logarithm(d: Fraction) -> tuple[Fraction, Fraction]:
    """`ln(d)/2`, and how far that may be off."""
    if d == 1:
        return Fraction(0), Fraction(0)
    if not 2.0**-1000 < d < 2.0**1000:
        raise SizeError("its exponentials have coefficients out of the range of float64", "Rescale the variables.")
    low, high = Fraction(log_down(float(down(float(d))))), Fraction(log_up(float(up(float(d)))))
    return (low + high) / 4, (high - low) / 4


def _row(polynomial: Polynomial, m: int) -> Rows:
    row = np.full(1 + m, Fraction(0))
    for axes, c in polynomial.items():
        if len(axes) > 1:
            raise UnsupportedError("values that are not affine: a product beside an exponential", _HINT)
        row[1 + axes[0] if axes else 0] = c
    return row


@dataclass(frozen=True, eq=False)
class _Quotient:
    """`Σ_k above_k(t) e^k / Σ_k below_k e^k` over affine exponents k, in normal form."""

    above: dict[Affine, Polynomial]
    below: dict[Affine, Fraction]

    @classmethod
    def of(cls, above: dict[Affine, Polynomial], below: Mapping[Affine, Fraction]) -> _Quotient:
        first = reduce(lambda a, b: b if _is_before(b, a) else a, below)
        scale = below[first]
        return cls(
            {_sum((k, 1), (first, -1)): _scaled(p, 1 / scale) for k, p in above.items()},
            dict(sorted((_sum((k, 1), (first, -1)), d / scale) for k, d in below.items())),
        )

    @classmethod
    def polynomial(cls, terms: Polynomial) -> _Quotient:
        return cls({_ZERO: terms} if terms else {}, {_ZERO: Fraction(1)})

    @property
    def is_polynomial(self) -> bool:
        return len(self.below) == 1 and not set(self.above) - {_ZERO}

    @property
    def affine(self) -> Affine:
        """The function, if it is affine."""
        terms = self.above.get(_ZERO, {})
        if not self.is_polynomial or any(len(axes) > 1 for axes in terms):
            raise UnsupportedError("a function of something that is not affine", _HINT)
        return tuple(sorted((1 + axes[0] if axes else 0, c) for axes, c in terms.items()))

    def __add__(self, other: _Quotient) -> _Quotient:
        if self.below == other.below:
            return _Quotient(_plus(self.above, other.above), self.below)
        first, second = _times(self.above, _constants(other.below)), _times(other.above, _constants(self.below))
        return _Quotient.of(_plus(first, second), _product(self.below, other.below))

    def __mul__(self, other: _Quotient) -> _Quotient:
        return _Quotient.of(_times(self.above, other.above), _product(self.below, other.below))

    def scaled(self, factor: Fraction) -> _Quotient:
        above = {k: _scaled(p, factor) for k, p in self.above.items()} if factor else {}
        return _Quotient(above, self.below)

    def inverse(self) -> _Quotient:
        """One over it, if it has a value everywhere: constants of one sign."""
        constants = {k: p.get((), Fraction(0)) for k, p in self.above.items()}
        if any(set(p) != {()} for p in self.above.values()):
            raise UnsupportedError("a division by something other than exponentials", _HINT)
        if not constants or len({c > 0 for c in constants.values()}) > 1:
            raise UnsupportedError("a division by something that may be 0", _HINT)
        return _Quotient.of(_constants(self.below), constants)

    def require_short(self) -> None:
        numbers = [c for p in self.above.values() for c in p.values()] + list(self.below.values())
        numbers += [c for k in (*self.above, *self.below) for _, c in k]
        large = len(self.above) > _MOST_EXPONENTIALS or any(len(p) > _MOST_TERMS for p in self.above.values())
        if large or any(max(c.numerator.bit_length(), c.denominator.bit_length()) > _MOST_BITS for c in numbers):
            raise SizeError("too many terms, or constants with thousands of digits, for exact arithmetic")


def _value(node: Node, arguments: list[_Quotient], middle: Sequence[Fraction], radii: Sequence[Fraction]) -> _Quotient:
    name = node.operation
    if name == "input":
        axis = int(node.parameters[0])
        return _Quotient.polynomial({k: c for k, c in (((), middle[axis]), ((axis,), radii[axis])) if c})
    if name == "const":
        number = Fraction(node.parameters[0])
        return _Quotient.polynomial({(): number} if number else {})
    first, last = arguments[0], arguments[-1]
    if name in ("add", "sum"):
        return reduce(lambda f, g: f + g, arguments)
    if name == "sub":
        return first + last.scaled(Fraction(-1))
    if name == "neg":
        return first.scaled(Fraction(-1))
    if name == "mul":
        return first * last
    if name == "div":
        return first * last.inverse()
    if name == "pow":
        return _power(first, int(node.parameters[0]))
    exponent = first.affine
    if name == "exp":
        return _Quotient({exponent: {(): Fraction(1)}}, {_ZERO: Fraction(1)})
    # tanh(u) = (e^{2u} − 1)/(e^{2u} + 1), sigmoid(u) = e^u/(e^u + 1)
    exponent = _sum((exponent, 2 if name == "tanh" else 1))
    above = _plus({exponent: {(): Fraction(1)}}, {_ZERO: {(): Fraction(-1)}} if name == "tanh" else {})
    return _Quotient.of(above, _gathered([(exponent, Fraction(1)), (_ZERO, Fraction(1))]))


def _power(f: _Quotient, exponent: int) -> _Quotient:
    one = _Quotient.polynomial({(): Fraction(1)})
    if abs(exponent) > _MOST_EXPONENTIALS and not set(f.above.get(_ZERO, {})) <= {()}:
        raise UnsupportedError(f"the power {exponent}", _HINT)
    found = reduce(lambda a, b: a * b, [f] * abs(exponent), one)
    return found if exponent >= 0 else found.inverse()


def _sum(*parts: tuple[Affine, int]) -> Affine:
    """A sum of multiples of affine functions."""
    total: dict[int, Fraction] = {}
    for affine, times in parts:
        for axis, c in affine:
            total[axis] = total.get(axis, Fraction(0)) + times * c
    return tuple((axis, c) for axis, c in sorted(total.items()) if c)


def _is_before(a: Affine, b: Affine) -> bool:
    """An order that adding the same to both does not change."""
    difference = _sum((a, 1), (b, -1))
    return bool(difference) and difference[0][1] < 0


def _plus(a: Mapping[Affine, Polynomial], b: Mapping[Affine, Polynomial]) -> dict[Affine, Polynomial]:
    found: dict[Affine, Polynomial] = {}
    for k in (*a, *(k for k in b if k not in a)):
        terms = _gathered([*a.get(k, {}).items(), *b.get(k, {}).items()])
        if terms:
            found[k] = terms
    return found


def _times(a: Mapping[Affine, Polynomial], b: Mapping[Affine, Polynomial]) -> dict[Affine, Polynomial]:
    found: dict[Affine, Polynomial] = {}
    for j, p in a.items():
        for k, q in b.items():
            if len(p) * len(q) > _MOST_TERMS:
                raise SizeError("a product of too many terms for exact arithmetic")
            terms = [(tuple(sorted(x + y)), c * d) for x, c in p.items() for y, d in q.items()]
            if any(len(axes) > _DEGREE for axes, _ in terms):
                raise UnsupportedError("a product of more than two factors that vary", _HINT)
            found = _plus(found, {_sum((j, 1), (k, 1)): _gathered(terms)})
    return found


def _product(a: Mapping[Affine, Fraction], b: Mapping[Affine, Fraction]) -> dict[Affine, Fraction]:
    if len(a) * len(b) > _MOST_EXPONENTIALS:
        raise UnsupportedError("more than two exponentials", _HINT)
    return _gathered((_sum((j, 1), (k, 1)), c * d) for j, c in a.items() for k, d in b.items())


def _constants(below: Mapping[Affine, Fraction]) -> dict[Affine, Polynomial]:
    return {k: {(): d} for k, d in below.items()}


def _scaled(p: Polynomial, factor: Fraction) -> Polynomial:
    return {axes: c * factor for axes, c in p.items()}


def _gathered(terms: Iterable[tuple[Key, Fraction]]) -> dict[Key, Fraction]:
    """Sums of what has the same key, without zeros."""
    found: dict[Key, Fraction] = {}
    for key, c in terms:
        found[key] = found.get(key, Fraction(0)) + c
    return {key: c for key, c in found.items() if c}


def _needed(graph: Graph) -> list[int]:
    """The nodes that the outputs need, in order; an error for the first that has no rule here."""
    wanted = set(graph.outputs)
    for position in reversed(range(len(graph.nodes))):
        if position in wanted:
            wanted.update(graph.nodes[position].arguments)
    if len(wanted) > _MOST_NODES:
        raise SizeError(f"{len(wanted):,} operations are too many for exact arithmetic; at most {_MOST_NODES:,}.")
    for position in sorted(wanted):
        if graph.nodes[position].operation not in QUOTIENT_OPERATIONS:
            raise UnsupportedError(f"the operation {graph.nodes[position].operation}", _HINT)
    return sorted(wanted)
