"""Expressions that have a limit where their parts have none, recognised by their structure: what they mean there.

    v^e            written exp(e·log v), e a constant: 0 at v = 0 for e > 0, a pole for e < 0
    w^s·log(c·w^r) s, r > 0, also with |w|, roots, and further factors: 0 at w = 0, the limit
    φ(u)/u         φ = sin, tan, tanh, atan, asinh, atanh or erf, also with multiples of u: φ'(0) at u = 0, the limit
    a/b            b ≥ 0: where b reaches 0 it has no bound on one side only, so that it can be clipped
    √(Σ c_i u_i²)  has a value at 0, and slopes at most those of the vector u: no limit is needed, but its slopes are bounded
Values elsewhere are those of the operations themselves. Nothing is simplified: x·(1 + log x) is not recognised.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np
import torch

from partita.arithmetic import Dual
from partita.arithmetic.interval import Interval
from partita.arithmetic.rounding import down, up
from partita.arithmetic.singular import LogProduct, quotient, real_power, root_slopes
from partita.functions.operations import Node

__all__ = [
    "Factor",
    "Limit",
    "LogLimit",
    "Pole",
    "Power",
    "Quotient",
    "Root",
    "atom",
    "constant",
    "factors",
    "limits",
    "multiple",
]

_MOST_FACTORS = 32
_LARGEST = 1 << 256  # numerator or denominator of a constant
_RATIONAL: Mapping[str, Callable[..., Fraction]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "neg": operator.neg,
    "abs": abs,
    "sum": lambda *x: sum(x, Fraction(0)),
    "pow": lambda x, n: x ** int(n),
    "const": Fraction,
}


@dataclass(frozen=True)
class Power:
    """`exp(e·log v)`: the nodes of v and of the constant e."""

    base: int
    exponent: int

    @property
    def reads(self) -> tuple[int, ...]:
        return self.base, self.exponent

    def at(self, rule: str, value: Any, values: Mapping[int, Any]) -> Any:
        """The value of the node; numpy and torch have 0^e already, as exp(−inf)."""
        if rule != "enclose":
            return value
        v, e = values[self.base], values[self.exponent].enclosure
        inside = v.enclosure
        one_sign = np.broadcast_to((e.lo > 0.0) | (e.hi < 0.0), inside.shape)
        touched = (inside.lo <= 0.0) & ~v.is_entire & one_sign
        if not touched.any():
            return value
        found, slope = real_power(inside, e)
        return value.or_else(touched, v.through(found, slope, inside.lo < 0.0))


@dataclass(frozen=True)
class LogLimit:
    """`rest · w^s · log v`, v = c|w|^r: the nodes of w, of v and of the other factors, each with its power 1 or −1."""

    base: int
    argument: int
    rest: tuple[tuple[int, int], ...]
    sign: float
    product: LogProduct

    @property
    def reads(self) -> tuple[int, ...]:
        return self.base, self.argument, *(k for k, _ in self.rest)

    def at(self, rule: str, value: Any, values: Mapping[int, Any]) -> Any:
        """The value of the node, 0 where v is."""
        v = values[self.argument]
        if rule == "numpy":
            return np.where(v == 0.0, 0.0, value)
        if rule == "torch":
            return torch.where(v == 0.0, torch.zeros_like(value), value)
        w, inside = values[self.base], v.enclosure
        touched = (inside.lo <= 0.0) & (inside.hi >= 0.0) & ~v.is_entire & ~w.is_entire
        if not touched.any():
            return value
        found, slope = self.product.over(w.enclosure)
        partly = w.enclosure.lo < 0.0 if self.product.half_line else np.zeros(found.shape, dtype=bool)
        out = w.through(found, slope, partly)
        out = -out if self.sign < 0 else out
        for k, power in self.rest:
            out = out * values[k] if power > 0 else out / values[k]
        return value.or_else(touched, out)


@dataclass(frozen=True)
class Root:
    """`√(b + Σ c_i u_i²)`: the nodes of the u_i with their factors c_i ≥ 0, and b ≥ 0."""

    argument: int
    squares: tuple[tuple[float, int], ...]

    @property
    def reads(self) -> tuple[int, ...]:
        return self.argument, *(k for _, k in self.squares)

    def at(self, rule: str, value: Any, values: Mapping[int, Any]) -> Any:
        """The value of the node, with bounded slopes."""
        if not isinstance(value, Dual):
            return value
        inside = values[self.argument].enclosure
        touched = (inside.lo <= 0.0) & ~values[self.argument].is_entire
        if not touched.any():
            return value
        slopes = root_slopes([(c, values[k].gradient) for c, k in self.squares])
        slopes = Interval(
            np.broadcast_to(slopes.lo, value.gradient.shape), np.broadcast_to(slopes.hi, value.gradient.shape)
        )
        return value.or_else(touched, Dual(value.value, slopes))


@dataclass(frozen=True)
class Quotient:
    """`φ(a·w)/(b·w)`, φ(0) = 0: the nodes of w and of a·w, with `ratio = a/b` and `factor = a`."""

    base: int
    argument: int
    function: str
    ratio: Fraction
    factor: Fraction

    @property
    def reads(self) -> tuple[int, ...]:
        return self.base, self.argument

    def at(self, rule: str, value: Any, values: Mapping[int, Any]) -> Any:
        """The value of the node, (a/b)·φ'(0) where w is 0."""
        w, at_zero = values[self.base], float(self.ratio) * _AT_ZERO[self.function]
        if rule == "numpy":
            return np.where(w == 0.0, at_zero, value)
        if rule == "torch":
            return torch.where(w == 0.0, torch.full_like(value, at_zero), value)
        inside = w.enclosure
        touched = (inside.lo <= 0.0) & (inside.hi >= 0.0) & ~w.is_entire
        if not touched.any():
            return value
        found, slope = quotient(self.function, values[self.argument].enclosure.hull(Interval.point(0.0)))
        ratio, steep = (_enclosed(x) for x in (self.ratio, self.ratio * self.factor))
        return value.or_else(touched, w.through(ratio * found, steep * slope, np.zeros(found.shape, dtype=bool)))


_AT_ZERO = {**dict.fromkeys(("sin", "tan", "tanh", "atan", "asinh", "atanh"), 1.0), "erf": 2 / math.sqrt(math.pi)}


def _enclosed(x: Fraction) -> Interval:
    return Interval(np.asarray(down(float(x))), np.asarray(up(float(x))))


@dataclass(frozen=True)
class Pole:
    """`a/b` with b ≥ 0, as it is |·|, a root, a power or an even power: where b reaches 0 the quotient has one sign, that of a."""

    top: int
    bottom: int

    @property
    def reads(self) -> tuple[int, ...]:
        return self.top, self.bottom

    def at(self, rule: str, value: Any, values: Mapping[int, Any]) -> Any:
        """The value of the node; numpy and torch have a/0 = ±inf already."""
        if rule != "enclose":
            return value
        a, b = values[self.top].enclosure, values[self.bottom].enclosure
        touched = (b.lo <= 0.0) & (b.hi > 0.0) & ((a.lo > 0.0) | (a.hi < 0.0)) & ~values[self.bottom].is_entire
        if not touched.any():
            return value
        ends = a / Interval(np.where(touched, b.hi, 1.0), np.where(touched, b.hi, 1.0))
        found = Interval(np.where(a.lo > 0.0, ends.lo, -np.inf), np.where(a.lo > 0.0, np.inf, ends.hi))
        unknown = Interval(np.full(found.shape, -np.inf), np.full(found.shape, np.inf))
        return value.or_else(touched, values[self.bottom].through(found, unknown, np.ones(found.shape, dtype=bool)))


Limit = Power | LogLimit | Root | Quotient | Pole


@dataclass(frozen=True)
class Factor:
    """`w^power`, or `|w|^power` unless it is odd; `half_line` where it is defined for w ≥ 0 only."""

    node: int
    power: Fraction
    odd: bool
    half_line: bool = False


def limits(nodes: Sequence[Node]) -> dict[int, Limit]:
    """The nodes that are recognised, by their positions.

    >>> from partita.functions import parse
    >>> nodes = parse("x*log(abs(x)) + y^0.3", ["x", "y"]).nodes
    >>> [type(found).__name__ for found in limits(nodes).values()]
    ['LogLimit', 'Power']
    """
    found: dict[int, Limit] = {}
    fixed: list[bool] = []
    for position, node in enumerate(nodes):
        fixed.append(node.operation != "input" and all(fixed[k] for k in node.arguments))
        limit = _limit(nodes, node, fixed)
        if limit is not None:
            found[position] = limit
    return found


def _limit(nodes: Sequence[Node], node: Node, fixed: Sequence[bool]) -> Limit | None:
    if node.operation == "exp" and not fixed[-1]:
        return _power(nodes, node.arguments[0], fixed)
    if node.operation == "mul" and not fixed[-1]:
        return _log_limit(nodes, node)
    if node.operation == "div" and (found := _quotient(nodes, *node.arguments)) is not None:
        return found
    if node.operation == "div" and _is_nonnegative(nodes, node.arguments[1]):
        return Pole(*node.arguments)
    return _root(nodes, node.arguments[0]) if node.operation == "sqrt" and not fixed[-1] else None


def _quotient(nodes: Sequence[Node], top: int, bottom: int) -> Quotient | None:
    factor, top = multiple(nodes, top)
    function = nodes[top].operation
    if function not in _AT_ZERO:
        return None
    argument = nodes[top].arguments[0]
    (a, w), (b, below) = multiple(nodes, argument), multiple(nodes, bottom)
    return Quotient(w, argument, function, factor * a / b, a) if w == below else None


def multiple(nodes: Sequence[Node], k: int) -> tuple[Fraction, int]:
    """A node as a multiple of another, by a factor that is not 0; at most 32 operations are looked at."""
    factor = Fraction(1)
    for _ in range(_MOST_FACTORS):
        node = nodes[k]
        if node.operation == "neg":
            factor, k = -factor, node.arguments[0]
        elif node.operation in ("mul", "div") and (right := constant(nodes, node.arguments[1])):
            factor, k = factor * right if node.operation == "mul" else factor / right, node.arguments[0]
        elif node.operation == "mul" and (left := constant(nodes, node.arguments[0])):
            factor, k = factor * left, node.arguments[1]
        else:
            break
    return factor, k


def _is_nonnegative(nodes: Sequence[Node], k: int) -> bool:
    node = nodes[k]
    while node.operation == "pow" and node.parameters[0] % 2:  # an odd power has the sign of its base
        node = nodes[node.arguments[0]]
    return node.operation in ("abs", "sqrt", "exp", "pow")


def constant(nodes: Sequence[Node], k: int) -> Fraction | None:
    """The number that a node stands for, exactly: literals, and sums, products, quotients and powers of them; else None.

    >>> from partita.functions import parse
    >>> nodes = parse("x^(-1/3 + 0.5^2)", ["x"]).nodes
    >>> [constant(nodes, k) for k, node in enumerate(nodes) if node.operation in ("add", "input")]
    [Fraction(-1, 12), None]
    """
    known, waiting = dict[int, Fraction](), [k]
    while waiting:
        node = nodes[waiting[-1]]
        missing = [j for j in node.arguments if j not in known]
        if node.operation not in _RATIONAL:
            return None
        if missing:
            waiting += missing
            continue
        parts, n = [known[j] for j in node.arguments], node.parameters[0] if node.parameters else 0
        exact = math.isfinite(n) and all(max(abs(x.numerator), x.denominator) < _LARGEST for x in parts)
        if not exact or (node.operation == "pow" and abs(n) > _MOST_FACTORS):
            return None
        try:
            known[waiting.pop()] = _RATIONAL[node.operation](*parts, *node.parameters)
        except ZeroDivisionError:
            return None
    return known[k]


def _power(nodes: Sequence[Node], inner: int, fixed: Sequence[bool]) -> Power | None:
    """`e·log v` or `log v·e`, e constant."""
    if nodes[inner].operation != "mul":
        return None
    for e, other in (nodes[inner].arguments, nodes[inner].arguments[::-1]):
        if fixed[e] and nodes[other].operation == "log":
            return Power(nodes[other].arguments[0], e)
    return None


def atom(nodes: Sequence[Node], k: int) -> Factor:
    """A node as a power of another: `|u|`, `u^k`, `√u`, `u^a`, nested; itself to the power 1 if it is none of these."""
    node = nodes[k]
    if node.operation == "abs":
        inner = atom(nodes, node.arguments[0])
        return replace(inner, odd=False)
    if node.operation == "pow" and node.parameters[0] > 0:
        inner = atom(nodes, node.arguments[0])
        times = int(node.parameters[0])
        return replace(inner, power=inner.power * times, odd=inner.odd and times % 2 == 1)
    if node.operation == "sqrt":
        inner = atom(nodes, node.arguments[0])
        return replace(inner, power=inner.power / 2, odd=False, half_line=inner.half_line or inner.odd)
    if node.operation == "exp" and nodes[node.arguments[0]].operation == "mul":
        for e, other in (nodes[node.arguments[0]].arguments, nodes[node.arguments[0]].arguments[::-1]):
            exponent = constant(nodes, e) if nodes[other].operation == "log" else None
            if exponent is not None and exponent > 0:
                inner = atom(nodes, nodes[other].arguments[0])
                half_line = inner.half_line or inner.odd
                return replace(inner, power=inner.power * exponent, odd=False, half_line=half_line)
    return Factor(k, Fraction(1), True)


def factors(nodes: Sequence[Node], k: int, whole: int | None = None) -> tuple[float, list[tuple[int, int]]]:
    """The sign and the factors of a product, each a node with its power 1 or −1; divisors and `whole` are not taken apart."""
    sign, found, waiting = 1.0, list[tuple[int, int]](), [k]
    while waiting:
        k = waiting.pop()
        node = nodes[k]
        if k == whole:
            found.append((k, 1))
        elif node.operation == "neg":
            sign = -sign
            waiting.append(node.arguments[0])
        elif node.operation == "mul" and len(found) + len(waiting) < _MOST_FACTORS:
            waiting += node.arguments[::-1]
        elif node.operation == "div":
            found.append((node.arguments[1], -1))
            waiting.append(node.arguments[0])
        else:
            found.append((k, 1))
    return sign, found


def _log_limit(nodes: Sequence[Node], node: Node) -> LogLimit | None:
    for log, other in (node.arguments[::-1], node.arguments):
        if nodes[log].operation == "log":
            found = _vanishing(nodes, nodes[log].arguments[0], other)
            if found is not None:
                return found
    return None


def _vanishing(nodes: Sequence[Node], argument: int, other: int) -> LogLimit | None:
    """`other · log(argument)` if the argument is `c|w|^r` and `other` has a factor `w^s`."""
    sign, parts = factors(nodes, argument)
    scale, inner = Interval.point(0.0), None
    for k, power in parts:
        if nodes[k].operation == "const" and nodes[k].parameters[0] > 0:
            scale = scale + power * Interval.point(float(nodes[k].parameters[0])).log()
        elif inner is None and power > 0:
            inner = atom(nodes, k)
        else:
            return None
    if inner is None or sign < 0:
        return None
    inner, size = _without_constants(nodes, inner)
    scale = scale + size
    half_line = inner.half_line or inner.odd
    sign, parts = factors(nodes, other, whole=inner.node)
    rest, total, odd = list[tuple[int, int]](), Fraction(0), False
    for k, power in parts:
        part = atom(nodes, k)
        if part.node != inner.node:
            rest.append((k, power))
        elif power < 0:
            return None
        else:
            total, odd, half_line = total + part.power, odd != part.odd, half_line or part.half_line
    if not total > 0 or any(Fraction(float(power)) != power for power in (total, inner.power)):
        return None  # intervals take powers that are floats
    product = LogProduct(float(total), odd, float(inner.power), scale, half_line)
    return LogLimit(inner.node, argument, tuple(rest), sign, product)


def _without_constants(nodes: Sequence[Node], factor: Factor) -> tuple[Factor, Interval]:
    """`|c·w|^r` as `|w|^r`, and an enclosure of r·log|c|; c > 0 where the sign of c·w matters."""
    c, node = multiple(nodes, factor.node)
    if c < 0 and factor.odd:
        return factor, Interval.point(0.0)
    return replace(factor, node=node), float(factor.power) * _enclosed(abs(c)).log()


def _root(nodes: Sequence[Node], argument: int) -> Root | None:
    """A sum of squares with factors ≥ 0, and constants ≥ 0."""
    squares, waiting = list[tuple[float, int]](), [(1.0, argument)]
    while waiting:
        factor, k = waiting.pop()
        node, x = nodes[k], nodes[k].arguments
        if len(squares) + len(waiting) > _MOST_FACTORS:
            return None
        if node.operation in ("add", "sum"):
            waiting += [(factor, j) for j in reversed(x)]
        elif (node.operation == "pow" and node.parameters[0] == 2) or (node.operation == "mul" and x[0] == x[1]):
            squares.append((factor, x[0]))
        elif node.operation == "const" and node.parameters[0] >= 0:
            continue
        elif node.operation == "mul" and any(nodes[j].operation == "const" for j in x):
            constant, other = (x[0], x[1]) if nodes[x[0]].operation == "const" else (x[1], x[0])
            if factor != 1.0 or not 0.0 <= nodes[constant].parameters[0] < math.inf:
                return None
            waiting.append((float(nodes[constant].parameters[0]), other))
        else:
            return None
    return Root(argument, tuple(squares)) if squares else None
