"""Moduli of continuity: powers C·t^α, and any expression in t that is proved to be nondecreasing and concave."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy as np

from partita.arithmetic.rounding import mul_up, pow_up
from partita.errors import DomainError, ExpressionError
from partita.functions.expressions import parse
from partita.functions.graph import Graph
from partita.functions.limits import LogLimit, Power, constant, multiple
from partita.functions.operations import Node
from partita.geometry.domains import Array

__all__ = ["Modulus"]

_ZERO = 1e-12  # of ω(1): what enclosing ω(0) = 0 may leave
_NEAR, _SMALL = 2.0**-1000, 0.01  # an ω without a value at 0 is at most this part of ω(1) so near to 0
# of nonnegative numbers these are nonnegative
_KEEP_THE_SIGN = (
    "add",
    "sum",
    "mul",
    "div",
    "min",
    "max",
    "pow",
    "sqrt",
    "abs",
    "relu",
    "tanh",
    "atan",
    "asinh",
    "erf",
)


@dataclass(frozen=True)
class Modulus:
    """A modulus of continuity: `|f(x) − f(y)|_∞ ≤ constant · |x − y|₂^exponent` on the domain, or `≤ ω(|x − y|₂)`.

    Exponent 1 is a Lipschitz constant; exponents below 1 are Hölder moduli. `Modulus.of` takes any other ω.

    Args:
        constant: finite, ≥ 0.
        exponent: in (0, 1].
        expression: ω as an expression in t; use `Modulus.of`. Then the constant is NaN and the exponent is 1.

    Raises:
        DomainError: a number is out of range, or the expression is not proved to be a modulus.

    >>> import partita as pa
    >>> print(pa.Modulus(2.0, exponent=0.5))
    |f(x) − f(y)|_∞ ≤ 2·|x − y|₂^0.5
    """

    constant: float = 1.0
    exponent: float = 1.0
    expression: str = ""

    def __post_init__(self) -> None:
        if not (self.constant >= 0 and math.isfinite(self.constant)):
            raise DomainError(f"Modulus: constant is {self.constant}; expected a finite number ≥ 0.")
        if not 0 < self.exponent <= 1:
            raise DomainError(f"Modulus: exponent is {self.exponent}; expected a number in (0, 1].")
        if self.expression:
            object.__setattr__(self, "constant", math.nan)  # so that no formula for powers can use it unnoticed
            _require_modulus(self.expression, self._graph)

    @classmethod
    def of(cls, expression: str) -> Modulus:
        """The modulus `|f(x) − f(y)|_∞ ≤ ω(|x − y|₂)` with ω an expression in t.

        ω must be nondecreasing and concave for t ≥ 0 with ω(0) = 0, which is proved from its parts: sums, positive multiples and
        `min` of such functions, and nondecreasing concave functions of them, each on the range that interval arithmetic finds;
        `u/(a + u)`, `u*(a - b*log(u))`, `a/(b - log(u))` and `t*log(1 + a/t)`. An ω without a value at t = 0, such as
        `-1/log(min(t, 1)/8)`, counts as 0 there; it must be proved to be ≥ 0, and close to 0 for tiny t.

        Args:
            expression: in t, for example `"0.5*sqrt(t) + t"` or `"min(t, 1)*(1 - log(min(t, 1)))"`.

        Raises:
            DomainError: that is not proved.
            ExpressionError: the text is not an expression in t.

        >>> import partita as pa
        >>> pa.Modulus.of("0.5*sqrt(t) + t").at(0.25)
        0.5
        """
        if not isinstance(expression, str) or not expression.strip():
            raise ExpressionError(
                f"Modulus.of: found {expression!r}; expected an expression in t such as '0.5*sqrt(t) + t'."
            )
        return cls(expression=expression)

    @cached_property
    def _graph(self) -> Graph:
        return parse(self.expression, ["t"])

    @property
    def is_lipschitz(self) -> bool:
        """Whether it is a Lipschitz constant."""
        return not self.expression and self.exponent == 1

    def above(self, distance: float) -> float:
        """A float ≥ ω(distance).

        Args:
            distance: ≥ 0.
        """
        if not self.expression:
            return mul_up(self.constant, pow_up(distance, self.exponent))
        return float(self._graph.enclose([[distance]], [[distance]]).hi[0, 0]) if distance > 0 else 0.0

    def at(self, distance: Any) -> Any:
        """ω(distance) in floats, elementwise.

        Args:
            distance: a number or an array, ≥ 0.
        """
        if not self.expression:
            return self.constant * distance**self.exponent
        at = np.asarray(distance, dtype=float)
        values: Array = np.where(
            at > 0, self._graph.evaluate(np.where(at > 0, at, 1.0).reshape(-1, 1)).reshape(at.shape), 0.0
        )
        return float(values) if np.ndim(distance) == 0 else values

    def reach(self, value: float) -> float:
        """The largest distance with ω(distance) ≤ value, up to rounding; infinite where ω stays below.

        Args:
            value: ≥ 0.
        """
        if not self.expression:
            return float((value / self.constant) ** (1 / self.exponent)) if self.constant else math.inf
        steps = np.arange(-1074.0, 1024.0)
        values = self.at(2.0**steps)
        below = values <= value
        crossed = np.flatnonzero(below[:-1] & ~below[1:] & np.isfinite(values[1:]))  # floats may spoil ω at either end
        if not len(crossed):
            return math.inf if below[len(steps) // 2] else 0.0
        low, high = float(steps[crossed[0]]), float(steps[crossed[0] + 1])
        while high - low > 1e-13 * max(1.0, abs(low)):
            middle = (low + high) / 2
            low, high = (middle, high) if self.at(2.0**middle) <= value else (low, middle)
        return float(2.0**low)

    def order(self, distance: float) -> float:
        """α where ω behaves like t^α: its exponent, or the slope of log ω at a distance.

        Args:
            distance: > 0.
        """
        if not self.expression:
            return self.exponent
        nearer, farther = self.at(distance / 2), self.at(distance)
        return math.log2(farther / nearer) if 0 < nearer < farther else 1.0

    def to_json(self) -> dict[str, Any]:
        """Plain data: constant and exponent, or the expression as text."""
        return (
            {"expression": self.expression}
            if self.expression
            else {"constant": self.constant, "exponent": self.exponent}
        )

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Modulus:
        """The modulus that `to_json` wrote, checked again.

        Args:
            data: plain data.
        """
        return cls.of(data["expression"]) if set(data) == {"expression"} else cls(**data)

    def __str__(self) -> str:
        if self.expression:
            return f"|f(x) − f(y)|_∞ ≤ ω(|x − y|₂), ω(t) = {self.expression}"
        power = "" if self.exponent == 1 else f"^{self.exponent:g}"
        return f"|f(x) − f(y)|_∞ ≤ {self.constant:.6g}·|x − y|₂{power}"


def _require_modulus(text: str, graph: Graph) -> None:
    """A DomainError unless ω is proved to be nondecreasing and concave on [0, ∞) with ω(0) = 0."""
    if graph.output_shape != ():
        raise DomainError(f"Modulus: {text} has several values; expected one expression in t.")
    shape = _shapes(graph)[graph.outputs[0]]
    start, near, one = (graph.enclose([[t]], [[t]]) for t in (0.0, _NEAR, 1.0))
    size = float(one.hi[0, 0])
    zero = float(start.magnitude[0, 0]) <= _ZERO * max(abs(size), 1e-300) and start.lo[0, 0] <= 0 <= start.hi[0, 0]
    tends = bool(start.is_entire[0, 0]) and shape.lo >= 0 and near.hi[0, 0] <= _SMALL * size
    if not math.isfinite(size) or not (zero or tends):
        raise DomainError(
            f"Modulus: ω(t) = {text} is not proved to be 0 at t = 0: it lies between {start.lo[0, 0]:.6g} and "
            f"{start.hi[0, 0]:.6g}; expected ω(0) = 0."
        )
    wrong = "nondecreasing" if shape.rise not in (0, 1) else "concave" if shape.curve not in (0, -1) else ""
    if wrong:
        raise DomainError(
            f"Modulus: ω(t) = {text} is not proved to be {wrong} for t ≥ 0",
            "Write it as a sum, a positive multiple or a minimum of nondecreasing concave functions such as t, sqrt(t), t^0.3, "
            "tanh(t), log(1 + t), 1 - exp(-t), t/(1 + t), and u*(1 - log(u)) or -1/log(u/8) with u = min(t, 1).",
        )


@dataclass(frozen=True)
class _Shape:
    """How a node depends on t ≥ 0: `rise` 1, −1 or 0 (nondecreasing, nonincreasing, both), `curve` 1 convex, −1 concave, 0 affine.

    None says that it is not known; lo and hi are its range.
    """

    rise: int | None
    curve: int | None
    lo: float
    hi: float

    def turned(self, factor: float) -> _Shape:
        """The shape times a number; ranges are not needed afterwards."""
        sign = (factor > 0) - (factor < 0)
        return _Shape(_times(self.rise, sign), _times(self.curve, sign), self.lo, self.hi)


def _times(a: int | None, b: int | None) -> int | None:
    return 0 if a == 0 or b == 0 else None if a is None or b is None else a * b


def _plus(a: int | None, b: int | None) -> int | None:
    """Of a sum: what both are, or the other where one is 0."""
    return b if a == 0 else a if b == 0 or a == b else None


def _shapes(graph: Graph) -> list[_Shape]:
    """The shapes of all nodes, from the range of each on [0, ∞)."""
    nodes, count = graph.nodes, len(graph.nodes)
    every = Graph(1, nodes, tuple(range(count)), (count,)).enclose([[0.0]], [[np.inf]])
    found: list[_Shape] = []
    for k, node in enumerate(nodes):
        rise, curve = _shape_of(graph, k, node, [found[j] for j in node.arguments], found)
        lo, hi = float(every.lo[0, k]), float(every.hi[0, k])
        if node.operation == "log" and _is_at_least_one(nodes[node.arguments[0]], nodes, found):
            lo = max(lo, 0.0)  # rounding outward took it below
        if node.operation in _KEEP_THE_SIGN and all(found[j].lo >= 0 for j in node.arguments):
            lo = max(lo, 0.0)  # for t > 0 all are finite, and 0·∞ is not met
        if rise is None and curve is not None:  # on [0, ∞) a concave function with a lower bound cannot fall
            rise = 1 if curve <= 0 and lo > -math.inf else -1 if curve >= 0 and hi < math.inf else None
        found.append(_Shape(rise, curve, lo, hi))
    return found


def _shape_of(
    graph: Graph, k: int, node: Node, x: Sequence[_Shape], found: Sequence[_Shape]
) -> tuple[int | None, int | None]:
    limit = graph.limits.get(k)
    if isinstance(limit, Power):
        e = found[limit.exponent]
        falls = -1 if e.hi < 0 else 1 if e.lo > 0 else None
        bends = 1 if e.hi < 0 or e.lo >= 1 else -1 if e.lo > 0 and e.hi <= 1 else None
        return _through(found[limit.base], falls, bends) if found[limit.base].lo >= 0 else (None, None)
    if isinstance(limit, LogLimit):
        return _entropy(limit, found)
    if node.operation == "input":
        return 1, 0
    if not node.arguments or all(s.rise == 0 for s in x):
        return 0, 0
    if node.operation in ("add", "sub", "sum"):
        rise, curve = 0, 0  # type: tuple[int | None, int | None]
        for s in (x[0], x[1].turned(-1.0)) if node.operation == "sub" else x:
            rise, curve = _plus(rise, s.rise), _plus(curve, s.curve)
        return rise, curve
    if node.operation in ("mul", "div"):
        scaled = _scaled(node, x)
        return _paired(graph, node, found) if None in scaled else scaled
    if node.operation in ("min", "max"):
        bend = -1 if node.operation == "min" else 1
        rise = _plus(x[0].rise, x[1].rise)
        return rise, bend if all(s.curve in (0, bend) for s in x) else None
    if node.operation == "clamp" and x[0].lo >= node.parameters[0]:
        return x[0].rise, -1 if x[0].curve in (0, -1) else None
    return _through(x[0], *_outer(node, x[0].lo, x[0].hi))


def _scaled(node: Node, x: Sequence[_Shape]) -> tuple[int | None, int | None]:
    """A product with a constant, or a quotient with a constant on either side."""
    first, second = x
    if node.operation == "mul" and first.rise == 0:
        first, second = second, first
    if second.rise == 0 and second.lo == second.hi == 0 and node.operation == "mul":
        return 0, 0
    if second.rise == 0 and (second.lo > 0 or second.hi < 0):
        turned = first.turned(second.lo)
        return turned.rise, turned.curve
    if node.operation == "div" and first.rise == 0 and second.lo > 0 and (first.lo >= 0 or first.hi <= 0):
        sign = 1.0 if first.lo >= 0 else -1.0
        rise, curve = _through(second, -1, 1)
        turned = _Shape(rise, curve, 0.0, 0.0).turned(sign)
        return turned.rise, turned.curve
    return None, None


def _is_at_least_one(node: Node, nodes: Sequence[Node], found: Sequence[_Shape]) -> bool:
    """c + u with c ≥ 1 and u ≥ 0."""
    parts = node.arguments if node.operation == "add" else ()
    return any(nodes[i].operation == "const" and nodes[i].parameters[0] >= 1 for i in parts) and all(
        found[i].lo >= 0 for i in parts
    )


def _paired(graph: Graph, node: Node, found: Sequence[_Shape]) -> tuple[int | None, int | None]:
    """Products and quotients of two functions of one u ≥ 0, by their own derivatives in u; a, b, c > 0.

    c·u/(a + u)        rises and is concave
    u(a − b·log u)     is concave, and rises where log u ≤ a/b − 1
    c/(a − b·log u)    rises, and is concave where log u ≤ a/b − 2
    t·φ(c/t)           is concave where φ is; then it rises if φ(0) ≥ 0
    """
    nodes, (i, j) = graph.nodes, node.arguments
    if node.operation == "div":
        (above, top), (below, bottom) = multiple(nodes, i), multiple(nodes, j)
        parts = nodes[bottom].arguments if nodes[bottom].operation == "add" else ()
        for fixed, other in (parts, parts[::-1]) if parts else ():
            factor, same = multiple(nodes, other)
            if same == top and found[fixed].rise == 0 and found[fixed].lo > 0:
                signs = found[top].lo >= 0 and factor > 0 and above * below > 0
                return _through(found[top], 1, -1) if signs else (None, None)
        affine = _affine_in_log(nodes, j)
        if affine is not None and found[i].rise == 0 and found[i].lo * found[i].hi > 0:
            u, falls = found[affine.node], found[i].lo * affine.factor < 0
            return _through(u, 1, -1) if falls and u.lo >= 0 and affine.reaches(u.hi, -2) else (None, None)
        return None, None
    for k, other in ((i, j), (j, i)):
        affine = _affine_in_log(nodes, other)
        if affine is not None and affine.node == k and affine.factor < 0 and found[k].lo >= 0:
            return _through(found[k], 1 if affine.reaches(found[k].hi, -1) else None, -1)
        if nodes[k].operation == "input" and _reads_reciprocal(graph, other):
            inner = _shapes(_in_reciprocal(graph, other))[other]
            return (1, -1) if inner.curve in (0, -1) and inner.lo >= 0 else (None, None)
    return None, None


@dataclass(frozen=True)
class _AffineInLog:
    """`constant + factor · log(scale · u)`, with the node of u."""

    node: int
    factor: Fraction
    constant: Fraction = Fraction(0)
    scale: Fraction = Fraction(1)

    def reaches(self, most: float, beyond: int) -> bool:
        """Whether `log(scale · u) ≤ −constant/factor + beyond` for all u up to `most`."""
        if not math.isfinite(most):
            return False
        top, bound = self.scale * Fraction(most), -self.constant / self.factor + beyond
        return (top <= 1 and bound >= 0) or (
            top > 0 and math.log(float(top)) <= float(bound) - 1e-12 * max(1.0, abs(float(bound)))
        )


def _affine_in_log(nodes: Sequence[Node], k: int) -> _AffineInLog | None:
    """The node as `constant + factor · log(scale · u)`, if it is that."""
    outer, k = multiple(nodes, k)
    node = nodes[k]
    if node.operation == "log":
        scale, u = multiple(nodes, node.arguments[0])
        return _AffineInLog(u, outer, scale=scale) if scale > 0 else None
    if node.operation in ("add", "sub"):
        (i, j), sign = node.arguments, 1 if node.operation == "add" else -1
        for c, inside, signs in (
            (constant(nodes, i), _affine_in_log(nodes, j), (1, sign)),
            (constant(nodes, j), _affine_in_log(nodes, i), (sign, 1)),
        ):
            if c is not None and inside is not None:
                total = outer * (signs[0] * c + signs[1] * inside.constant)
                return replace(inside, factor=outer * signs[1] * inside.factor, constant=total)
    return None


def _is_reciprocal(graph: Graph, k: int) -> bool:
    node = graph.nodes[k]
    if node.operation == "pow":
        return node.parameters[0] == -1 and graph.nodes[node.arguments[0]].operation == "input"
    divided = [graph.nodes[j] for j in node.arguments] if node.operation == "div" else []
    return (
        bool(divided)
        and divided[1].operation == "input"
        and divided[0].operation == "const"
        and divided[0].parameters[0] > 0
    )


def _reads_reciprocal(graph: Graph, k: int) -> bool:
    """Whether a node depends on t through c/t alone."""
    if _is_reciprocal(graph, k):
        return True
    node = graph.nodes[k]
    return node.operation != "input" and all(_reads_reciprocal(graph, j) for j in node.arguments)


def _in_reciprocal(graph: Graph, k: int) -> Graph:
    """The graph up to a node with c/t as its input."""
    read = Node("input", (), (0,))
    return Graph(
        1, tuple(read if _is_reciprocal(graph, j) else n for j, n in enumerate(graph.nodes[: k + 1])), (k,), ()
    )


def _through(inner: _Shape, rise: int | None, curve: int | None) -> tuple[int | None, int | None]:
    """φ(u) from the shapes of φ on the range of u and of u."""
    carried = None if rise is None else _times(rise, inner.curve)  # how φ bends if it is affine
    bend = carried if curve == 0 else curve if inner.curve == 0 or (curve is not None and carried == curve) else None
    return _times(inner.rise, rise), bend


def _outer(node: Node, lo: float, hi: float) -> tuple[int | None, int | None]:
    """Rise and curve of the operation on [lo, hi]."""
    away = 1 if lo >= 0 else -1 if hi <= 0 else None  # of even functions: rising to the right of 0
    if node.operation in ("sqrt", "log"):
        return (1, -1) if lo >= 0 else (None, None)
    if node.operation == "exp":
        return 1, 1
    if node.operation == "neg":
        return -1, 0
    if node.operation in ("atan", "asinh", "tanh", "erf", "sigmoid"):
        return 1, None if away is None else -away
    if node.operation == "abs":
        return away, 1 if away is None else 0
    if node.operation == "relu":
        return 1, 1 if away is None else 0
    if node.operation == "pow":
        k = int(node.parameters[0])
        if k < 0:
            return (-1, 1) if lo > 0 else (None, None)
        return (away, 1) if k % 2 == 0 else (1, 0 if k == 1 else away)
    return None, None


def _entropy(limit: LogLimit, found: Sequence[_Shape]) -> tuple[int | None, int | None]:
    """`c·w·log(a·w^r)`, w ≥ 0: convex in w, and falling up to `w = (e^r a)^{−1/r}`."""
    inner, product = found[limit.base], limit.product
    if product.power != 1.0 or inner.lo < 0 or any(found[k].rise != 0 for k, _ in limit.rest):
        return None, None
    sign = limit.sign
    for k, _ in limit.rest:
        sign *= 1.0 if found[k].lo > 0 else -1.0 if found[k].hi < 0 else 0.0
    turn = (-product.scale / product.log_power - 1.0).exp()
    rise = -1 if inner.hi <= float(turn.lo) else 1 if inner.lo >= float(turn.hi) else None
    shape = _Shape(*_through(inner, rise, 1), 0.0, 0.0).turned(sign)
    return (shape.rise, shape.curve) if sign else (None, None)
