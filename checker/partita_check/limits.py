"""Limits at 0: what `v^e`, written exp(e·log v), `w^s·log(c·w^r)` and `sin(w)/w` are there, and how far they can be from it.

Derived here from the graph alone, in balls. A value is the limit where the operations themselves have none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from flint import acb, arb, arb_series, fmpq

__all__ = [
    "Limit",
    "LogProduct",
    "Power",
    "ball",
    "find_limits",
    "power_of",
    "powers_of",
    "rational",
    "scaled_power",
    "squares_of",
]

MOST = 40  # factors that are looked at
LARGEST = 1 << 256  # numerators and denominators of constants
NAN = arb("nan")
Nodes = Sequence[tuple[str, tuple[int, ...], tuple[Any, ...]]]


@dataclass(frozen=True)
class Power:
    """exp(e·log v): the nodes of v and e, which is a constant."""

    base: int
    exponent: int

    def value(self, plain: Any, values: Sequence[Any]) -> Any:
        v, e = real_part(values[self.base]), real_part(values[self.exponent])
        if v is None or e is None or v > 0 or not v.is_finite() or not e > 0:
            return plain
        return wrapped(NAN if v < 0 else power_of(v, e), values[self.base])


@dataclass(frozen=True)
class LogProduct:
    """`Π others · w^s · log(c·|w|^r)`; `others` are nodes with integer or fractional powers."""

    base: int
    argument: int
    power: Fraction
    inner: Fraction
    scale: arb
    others: tuple[tuple[int, Fraction], ...]

    def value(self, plain: Any, values: Sequence[Any]) -> Any:
        """Within ±B of 0: with q = |w|^s, `|w^s log(c|w|^r)| ≤ q|log c| + (r/s)|q log q|`, and |q log q| rises up to q = 1/e."""
        v, w = real_part(values[self.argument]), real_part(values[self.base])
        if v is None or w is None or v > 0 or not (w.is_finite() and v.is_finite()):
            return plain
        if v < 0:  # no logarithm
            return NAN
        found = self.bound(w.abs_upper())
        for k, power in self.others:
            other = real_part(values[k])
            if other is None or not other.is_finite() or (power < 0 and not other.abs_lower() > 0):
                return NAN
            size = other.abs_upper() if power > 0 else other.abs_lower()
            found *= power_of(arb(size), ball(power)) if power > 0 else 1 / power_of(arb(size), ball(-power))
        return wrapped(arb(0, 1) * found.abs_upper(), values[self.base])

    def bound(self, most: arb) -> arb:
        """sup |w^s log(c|w|^r)| over |w| ≤ most."""
        q = power_of(arb(most), ball(self.power)).abs_upper()
        least = arb(-1).exp()
        curve = -q * q.log() if 0 < q < least else least.union(abs(q * q.log()) if q > 0 else least).abs_upper()
        curve = arb(0) if q == 0 else curve
        return q * abs(self.scale.log()) + ball(self.inner / self.power) * curve


@dataclass(frozen=True)
class Quotient:
    """`φ(a·w)/(b·w)` with φ(0) = 0: `(a/b)∫₀¹ φ'(s·a·w) ds`, whose slope in w is `(a²/b)∫₀¹ s·φ''(s·a·w) ds`."""

    base: int
    argument: int
    function: str
    ratio: Fraction
    factor: Fraction

    def value(self, plain: Any, values: Sequence[Any]) -> Any:
        w, v = values[self.base], values[self.argument]
        inside = v[0] if isinstance(v, arb_series) else v
        if not inside.is_finite() or not inside.contains(0):
            return plain
        first, second = SLOPES[self.function](inside.union(arb(0)) if isinstance(inside, arb) else rectangle(inside))
        if not isinstance(w, arb_series):
            return ball(self.ratio) * first
        return arb_series([ball(self.ratio) * first, ball(self.ratio * self.factor) * second / 2 * w[1]], 2)


def rectangle(v: acb) -> acb:
    """The rectangle that holds v and 0: convex, so that it holds all s·v."""
    return acb(v.real.union(arb(0)), v.imag.union(arb(0)))


def real(x: Any) -> arb:
    return x.real if isinstance(x, acb) else x


def _root(x: Any) -> Any:
    """1/√x off the branch cut."""
    return 1 / x.sqrt() if real(x) > 0 else NAN


SLOPES: dict[str, Callable[[Any], tuple[Any, Any]]] = {  # φ' and φ''
    "sin": lambda v: (v.cos(), -v.sin()),
    "tan": lambda v: (1 + v.tan() ** 2, 2 * v.tan() * (1 + v.tan() ** 2)),
    "tanh": lambda v: (1 - v.tanh() ** 2, -2 * v.tanh() * (1 - v.tanh() ** 2)),
    "atan": lambda v: (1 / (1 + v**2), -2 * v / (1 + v**2) ** 2),
    "asinh": lambda v: (_root(1 + v**2), -v * _root(1 + v**2) ** 3),
    "atanh": lambda v: (1 / (1 - v**2), 2 * v / (1 - v**2) ** 2) if abs(real(v)) < 1 else (NAN, NAN),
    "erf": lambda v: (2 * (-(v**2)).exp() / arb.pi().sqrt(), -4 * v * (-(v**2)).exp() / arb.pi().sqrt()),
}


def real_part(x: Any) -> arb | None:
    """The value of a real ball or series; None for complex ones, which need an analytic function."""
    found = x[0] if isinstance(x, arb_series) else x
    return found if isinstance(found, arb) else None


def wrapped(value: arb, like: Any) -> Any:
    return arb_series([value, NAN], 2) if isinstance(like, arb_series) else value


def ball(x: Fraction) -> arb:
    return arb(fmpq(x.numerator, x.denominator))


def power_of(v: arb, e: arb) -> arb:
    """v^e of the part of a ball in [0, ∞), e > 0; 0 below."""
    if v > 0:
        return v**e
    top = v.upper()
    return arb(0).union(top**e) if top > 0 else arb(0)


Limit = Power | LogProduct | Quotient


def find_limits(nodes: Nodes) -> Mapping[int, Limit]:
    """The nodes with such a limit, by position."""
    fixed, found = list[bool](), dict[int, Limit]()
    for position, (name, args, _) in enumerate(nodes):
        fixed.append(name != "input" and all(fixed[k] for k in args))
        if fixed[-1]:
            continue
        if name == "exp" and nodes[args[0]][0] == "mul":
            first, second = nodes[args[0]][1]
            for e, other in ((first, second), (second, first)):
                if fixed[e] and nodes[other][0] == "log" and position not in found:
                    found[position] = Power(nodes[other][1][0], e)
        if name == "div" and (quotient := _quotient(nodes, *args)) is not None:
            found[position] = quotient
        if name == "mul":
            for log, other in ((args[1], args[0]), (args[0], args[1])):
                if nodes[log][0] == "log" and position not in found:
                    product = _log_product(nodes, nodes[log][1][0], other)
                    found |= {} if product is None else {position: product}
    return found


def _quotient(nodes: Nodes, top: int, bottom: int) -> Quotient | None:
    factor, top = _multiple(nodes, top)
    if nodes[top][0] not in SLOPES:
        return None
    argument = nodes[top][1][0]
    (a, w), (b, below) = _multiple(nodes, argument), _multiple(nodes, bottom)
    return Quotient(w, argument, nodes[top][0], factor * a / b, a) if w == below else None


def _multiple(nodes: Nodes, k: int) -> tuple[Fraction, int]:
    """(c, u) of the node c·u, c a literal that is not 0."""
    factor = Fraction(1)
    for _ in range(MOST):
        name, args, _ = nodes[k]
        if name == "neg":
            factor, k = -factor, args[0]
        elif name in ("mul", "div") and (right := rational(nodes, args[1])):
            factor, k = factor * right if name == "mul" else factor / right, args[0]
        elif name == "mul" and (left := rational(nodes, args[0])):
            factor, k = factor * left, args[1]
        else:
            break
    return factor, k


def _log_product(nodes: Nodes, argument: int, other: int) -> LogProduct | None:
    inside, outside = scaled_power(nodes, argument), powers_of(nodes, other)
    if inside is None or outside is None:
        return None
    scale, base, inner = inside
    power = outside.pop(base, Fraction(0))
    return LogProduct(base, argument, power, inner, scale, tuple(outside.items())) if power > 0 else None


def scaled_power(nodes: Nodes, start: int) -> tuple[arb, int, Fraction] | None:
    """(c, w, r) if the node is ±c·|w|^r, c > 0 and r > 0."""
    parts, scale = powers_of(nodes, start), arb(1)
    if parts is None:
        return None
    for k in [k for k in parts if nodes[k][0] == "const"]:
        scale *= abs(arb(nodes[k][2][0])) ** ball(parts.pop(k))
    ((base, power),) = parts.items() if len(parts) == 1 else ((-1, Fraction(0)),)
    return (scale, base, power) if power > 0 and scale > 0 else None


def powers_of(nodes: Nodes, start: int, poles: bool = False) -> dict[int, Fraction] | None:
    """A product as powers of nodes, signs aside; None where it is long. With poles, negative powers are taken apart too."""
    found, waiting = dict[int, Fraction](), [(start, Fraction(1))]
    while waiting:
        k, power = waiting.pop()
        name, args, params = nodes[k]
        if len(found) + len(waiting) > MOST:
            return None
        if name in ("neg", "abs"):
            waiting.append((args[0], power))
        elif name == "sqrt":
            waiting.append((args[0], power / 2))
        elif name == "pow" and (params[0] > 0 or (poles and params[0] < 0)):
            waiting.append((args[0], power * params[0]))
        elif name == "mul":
            waiting += [(j, power) for j in args]
        elif name == "div":
            waiting += [(args[0], power), (args[1], -power)]
        elif name == "exp" and (inner := _fixed_power(nodes, args[0], poles)) is not None:
            waiting.append((inner[0], power * inner[1]))
        else:
            found[k] = found.get(k, Fraction(0)) + power
    return {k: power for k, power in found.items() if power}


def _fixed_power(nodes: Nodes, inner: int, poles: bool = False) -> tuple[int, Fraction] | None:
    """(v, e) of e·log v with a rational e > 0, or e ≠ 0 with poles."""
    name, args, _ = nodes[inner]
    for e, other in ((args[0], args[1]), (args[1], args[0])) if name == "mul" else ():
        power = rational(nodes, e) if nodes[other][0] == "log" else None
        if power is not None and (power > 0 or (poles and power)):
            return nodes[other][1][0], power
    return None


def rational(nodes: Nodes, k: int, known: dict[int, Fraction | None] | None = None, depth: int = 0) -> Fraction | None:
    """The value of a node that is made of literals by + − · / and integer powers, as a fraction; None for other nodes."""
    if k in (known := {} if known is None else known):
        return known[k]
    (name, args, params), found = nodes[k], list[Fraction]()
    for j in args if name in ("neg", "abs", "add", "sub", "sum", "mul", "div", "pow") and depth < MOST else ():
        value = rational(nodes, j, known, depth + 1)
        if value is None or abs(value.numerator) > LARGEST or value.denominator > LARGEST:
            break
        found.append(value)
    known[k] = None
    if name == "const" and arb(params[0]).is_finite():
        known[k] = Fraction(params[0])
    elif found and len(found) == len(args):
        known[k] = _combined(name, found[0], found[1:], params)
    return known[k]


def _combined(name: str, first: Fraction, rest: Sequence[Fraction], params: Sequence[Any]) -> Fraction | None:
    if name == "pow":
        return None if abs(params[0]) > MOST or (params[0] <= 0 and not first) else first ** int(params[0])
    if name == "div":
        return first / rest[0] if rest[0] else None
    for x in rest:
        first = first * x if name == "mul" else first - x if name == "sub" else first + x
    return -first if name == "neg" else abs(first) if name == "abs" else first


def squares_of(nodes: Nodes, start: int) -> list[tuple[arb, int]] | None:
    """(c_i, u_i) if the node is `b + Σ c_i u_i²` with b, c_i ≥ 0."""
    found, waiting = list[tuple[arb, int]](), [(arb(1), start)]
    while waiting:
        factor, k = waiting.pop()
        name, args, params = nodes[k]
        if len(found) + len(waiting) > MOST:
            return None
        if name in ("add", "sum"):
            waiting += [(factor, j) for j in args]
        elif (name == "pow" and params[0] == 2) or (name == "mul" and args[0] == args[1]):
            found.append((factor, args[0]))
        elif name == "mul" and any(nodes[j][0] == "const" and nodes[j][2][0] >= 0 for j in args):
            first = nodes[args[0]][0] == "const"
            waiting.append((factor * nodes[args[0 if first else 1]][2][0], args[1 if first else 0]))
        elif not (name == "const" and params[0] >= 0):
            return None
    return found
