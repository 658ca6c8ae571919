"""A modulus of continuity of an expression that is steep somewhere, composed from the moduli of its operations."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from partita.arithmetic.interval import Interval
from partita.arithmetic.progress import Progress
from partita.arithmetic.rounding import add_up, div_up, mul_down, mul_up, pow_up, sqrt_up, sub_up
from partita.errors import ExpressionLimitError, NonFiniteValueError, UnsupportedError
from partita.functions.derivatives import lipschitz_bounds
from partita.functions.graph import Graph, GraphBuilder
from partita.functions.limits import LogLimit, Power, Root
from partita.functions.moduli import Modulus
from partita.functions.operations import Node
from partita.geometry.domains import Array

__all__ = ["composed_modulus"]

_PLACES = 1024  # boxes over which the range of a part is enclosed
_BOXES, _RESOLUTION = 4096, 0.02  # spent on the slopes of one part
_MOST_PARTS = 100  # that are looked at
_LOG_SCALE, _LOG_CUT = 0.7359, 0.3678  # a little above 2/e, and below 1/e
_LONGEST = 2000  # characters of a modulus


@dataclass(frozen=True)
class _Omega:
    """`slope·t + Σ factor·node(t)`, the nodes concave and nondecreasing functions of t with value 0 at 0."""

    slope: float
    terms: tuple[tuple[int, float], ...] = ()

    @property
    def is_zero(self) -> bool:
        return self.slope == 0.0 and not self.terms


class _NoModulus(Exception):
    """Why a part of f has no modulus of continuity that is recognised."""


def composed_modulus(graph: Graph, lo: Array, hi: Array, progress: Progress | None = None) -> Modulus:
    """ω with `|f(x) − f(y)|_∞ ≤ ω(|x − y|₂)` on the box lo ≤ x ≤ hi, concave and nondecreasing. *Theorem*: `composed-modulus`.

    Parts with bounded slopes get a Lipschitz constant; the others are composed: √t for a square root, t^a for a power, t·log(1/t)
    for u·log|u|, with the ranges of their arguments by interval arithmetic.

    Raises:
        UnsupportedError: f is not recognised as continuous; the message names the part.

    >>> from partita.functions import parse
    >>> modulus = composed_modulus(parse("sin(sqrt(abs(x)))", ["x"]), np.array([-1.0]), np.array([1.0]))
    >>> 0.5 <= modulus.above(0.25) <= 0.5 + 1e-12  # ω(t) = √t
    True
    """
    work = _Composition(graph, np.asarray(lo, dtype=float), np.asarray(hi, dtype=float), progress)
    try:
        total = _Omega(0.0)
        for k in dict.fromkeys(graph.outputs):
            total = work.larger(total, work.of(k))
        if not total.terms:
            return Modulus(total.slope)
        builder = work.builder
        text = builder.finish([work.node(total)], ()).infix(["t"])
        if len(text) > _LONGEST:
            raise _NoModulus("its modulus of continuity is too long an expression")
        return Modulus.of(text)
    except (_NoModulus, ExpressionLimitError) as reason:
        raise UnsupportedError(str(reason)) from None


class _Composition:
    """One composition: nodes of f to their moduli, which are nodes of an expression in t."""

    def __init__(self, graph: Graph, lo: Array, hi: Array, progress: Progress | None) -> None:
        self.graph, self.lo, self.hi, self.progress = graph, lo, hi, progress
        self.builder = GraphBuilder(1)
        self.t = self.builder.add("input", parameters=(0,))
        self.known: dict[int, _Omega] = {}
        self.ranges: dict[int, Interval] = {}
        self.moves: list[bool] = []
        for node in graph.nodes:
            self.moves.append(node.operation == "input" or any(self.moves[k] for k in node.arguments))

    def of(self, k: int) -> _Omega:
        """The modulus of a node."""
        if k not in self.known:
            if len(self.known) > _MOST_PARTS:
                raise _NoModulus("it has too many steep parts")
            self.known[k] = self._found(k)
        return self.known[k]

    def _found(self, k: int) -> _Omega:
        node, limit = self.graph.nodes[k], self.graph.limits.get(k)
        if not self.moves[k]:
            return _Omega(0.0)
        if node.operation == "input":
            return _Omega(1.0)
        if isinstance(limit, Root):
            return self._length(limit)
        steepest = self._lipschitz(k)
        if steepest is not None:
            return _Omega(steepest)
        if isinstance(limit, Power):
            return self._power(limit)
        if isinstance(limit, LogLimit):
            return self._log_product(limit)
        rule = _RULES.get(node.operation)
        if rule is None:
            raise _NoModulus(f"{_shown(self.graph, k)} may jump")
        return rule(self, node, k)

    def node(self, omega: _Omega) -> int:
        """The modulus as a node of the expression in t."""
        add, parts = self.builder.add, list[int]()
        for k, factor in omega.terms:
            parts.append(k if factor == 1.0 else add("mul", add("const", parameters=(factor,)), k))
        if omega.slope:
            slope = add("const", parameters=(omega.slope,))
            parts.append(self.t if omega.slope == 1.0 else add("mul", slope, self.t))
        total = parts[0]
        for part in parts[1:]:
            total = add("add", total, part)
        return total

    def plus(self, *parts: _Omega) -> _Omega:
        terms: dict[int, float] = {}
        for part in parts:
            for k, factor in part.terms:
                terms[k] = add_up(terms.get(k, 0.0), factor)
        return _Omega(add_up(*(p.slope for p in parts)), tuple(terms.items()))

    def larger(self, a: _Omega, b: _Omega) -> _Omega:
        """A modulus that is at least both: term by term."""
        terms = dict(a.terms)
        for k, factor in b.terms:
            terms[k] = max(terms.get(k, 0.0), factor)
        return _Omega(max(a.slope, b.slope), tuple(terms.items()))

    def times(self, factor: float, omega: _Omega) -> _Omega:
        if not math.isfinite(factor):
            raise _NoModulus("a part of it has no finite bound")
        if factor == 0.0:
            return _Omega(0.0)
        return _Omega(mul_up(factor, omega.slope), tuple((k, mul_up(factor, c)) for k, c in omega.terms))

    def raised(self, omega: _Omega, power: float) -> _Omega:
        """`ω^a ≤ Σ (each part)^a` for 0 < a ≤ 1."""
        add, terms = self.builder.add, dict[int, float]()
        for k, factor in ((self.t, omega.slope), *omega.terms):
            if factor:
                inner = add("mul", add("const", parameters=(power,)), add("log", k))
                root = add("sqrt", k) if power == 0.5 else add("exp", inner)
                terms[root] = add_up(terms.get(root, 0.0), pow_up(factor, power))
        return _Omega(0.0, tuple(terms.items()))

    def enclosed(self, k: int) -> Interval:
        """The range of a node over the box."""
        if k not in self.ranges:
            m = len(self.lo)
            parts = max(1, int(_PLACES ** (1 / m)))
            cuts = [np.linspace(a, b, parts + 1) for a, b in zip(self.lo, self.hi)]
            for cut, a, b in zip(cuts, self.lo, self.hi):
                cut[0], cut[-1] = a, b
            los, his = (
                np.stack([g.ravel() for g in np.meshgrid(*ends, indexing="ij")], axis=1)
                for ends in ([c[:-1] for c in cuts], [c[1:] for c in cuts])
            )
            found = self._only(k).enclose(los, his)
            self.ranges[k] = Interval(found.lo.min(), found.hi.max())
        return self.ranges[k]

    def size(self, k: int) -> float:
        return float(self.enclosed(k).magnitude)

    def _only(self, k: int) -> Graph:
        builder = GraphBuilder(self.graph.num_inputs)
        places: list[int] = []
        for node in self.graph.nodes[: k + 1]:
            places.append(builder.add(node.operation, *(places[j] for j in node.arguments), parameters=node.parameters))
        return builder.finish([places[k]], ())

    def _lipschitz(self, k: int) -> float | None:
        """A Lipschitz constant of a node, if interval arithmetic finds one at once."""
        try:
            found = lipschitz_bounds(
                self._only(k),
                self.lo,
                self.hi,
                max_boxes=_BOXES,
                rough_resolution=_RESOLUTION,
                progress=self.progress,
            )
        except NonFiniteValueError:
            return None
        return found.euclidean if found.is_lipschitz else None

    def _length(self, limit: Root) -> _Omega:
        """`||u(x)| − |u(y)|| ≤ |u(x) − u(y)|`: at most `√‖GᵀG‖_∞ |x − y|`, G the slopes of `√c_i u_i`."""
        only = [self._only(k).enclose_gradient(self.lo[None], self.hi[None])[1][0, 0] for _, k in limit.squares]
        if all(np.isfinite(g.magnitude).all() for g in only):
            row_sums = []
            for i in range(len(self.lo)):
                row = [Interval.point(0.0)] * len(self.lo)
                for (factor, _), g in zip(limit.squares, only):
                    row = [r + factor * (g[i].square() if i == j else g[i] * g[j]) for j, r in enumerate(row)]
                row_sums.append(add_up(*(float(r.magnitude) for r in row)))
            return _Omega(sqrt_up(max(row_sums)))
        return self.plus(*(self.times(sqrt_up(c), self.of(k)) for c, k in limit.squares))

    def _power(self, limit: Power) -> _Omega:
        """`|a^e − b^e| ≤ |a − b|^e` for 0 < e ≤ 1 and a, b ≥ 0."""
        e = self.enclosed(limit.exponent)
        inner = self.of(limit.base)
        if e.lo >= 1.0:
            top = max(self.size(limit.base), 1.0)
            return self.times(mul_up(float(e.hi), pow_up(top, max(float(e.hi), 1.0))), inner)
        if not (e.lo > 0.0 and e.hi <= 1.0):
            raise _NoModulus(f"{_shown(self.graph, limit.base)} to a power that is not positive has a pole")
        if e.lo == e.hi:
            return self.raised(inner, float(e.lo))
        # an exponent that is not a float: |a − b|^e ≤ |a − b|^lo · |a − b|^(e − lo)
        widest = max(1.0, 2.0 * self.size(limit.base))
        return self.times(pow_up(widest, sub_up(float(e.hi), float(e.lo))), self.raised(inner, float(e.lo)))

    def _log_product(self, limit: LogLimit) -> _Omega:
        """`rest·g(w)`, `g(w) = w^s log(c|w|^r)`: g is Lipschitz for s > 1, and q·(log c + (r/s) log|q|) with q = w^s otherwise."""
        product, inner = limit.product, self.of(limit.base)
        bounds = self.enclosed(limit.base)
        value, slope = product.over(Interval(np.array([bounds.lo]), np.array([bounds.hi])))
        if product.power > 1.0:
            omega = self.times(float(slope.magnitude[0]), inner)
        else:
            q = inner if product.power == 1.0 else self.raised(inner, product.power)  # a power below 1 is even
            size = pow_up(max(self.size(limit.base), 1e-300), product.power)
            ratio = div_up(product.log_power, product.power)
            linear = add_up(float(product.scale.magnitude), mul_up(ratio, 1.0 + max(0.0, math.log(size) * (1 + 1e-9))))
            omega = self.plus(self.times(linear, q), self.times(ratio, self._entropy(q)))
        size, found = float(value.magnitude[0]), omega
        for k, power in limit.rest:
            bounds = self.enclosed(k)
            other, magnitude = self.of(k), float(bounds.magnitude)
            if power < 0:
                least = float(bounds.mignitude)
                if least < 1e-150:
                    raise _NoModulus(f"{_shown(self.graph, k)} may be 0, and f is divided by it")
                other, magnitude = self.times(div_up(1.0, mul_down(least, least)), other), div_up(1.0, least)
            found = self.plus(self.times(magnitude, found), self.times(size, other))
            size = mul_up(size, magnitude)
        return found

    def _entropy(self, omega: _Omega) -> _Omega:
        """`η(ω)`, `η(t) = −t log(et/2)` up to t = 2/e² and 2/e² beyond: what `u·log|u|` moves by where its slope exceeds 1."""
        add = self.builder.add
        scale, cut = (add("const", parameters=(x,)) for x in (_LOG_SCALE, _LOG_CUT))
        share = add("min", add("div", self.node(omega), scale), cut)
        return _Omega(0.0, ((add("neg", add("mul", share, add("log", share))), _LOG_SCALE),))


def _shown(graph: Graph, k: int) -> str:
    try:
        text = Graph(graph.num_inputs, graph.nodes[: k + 1], (k,), ()).infix()
    except ExpressionLimitError:
        return "a part of it"
    return text if len(text) <= 60 else f"{text[:57]}…"


Rule = Callable[[_Composition, Node, int], _Omega]


def _sum(c: _Composition, node: Node, k: int) -> _Omega:
    return c.plus(*(c.of(j) for j in node.arguments))


def _product(c: _Composition, node: Node, k: int) -> _Omega:
    a, b = node.arguments
    return c.plus(c.times(c.size(a), c.of(b)), c.times(c.size(b), c.of(a)))


def _quotient(c: _Composition, node: Node, k: int) -> _Omega:
    """`u/v`: `(ω_u + |u/v| ω_v)/min |v|`."""
    a, b = node.arguments
    least = float(c.enclosed(b).mignitude)
    if least == 0.0:
        raise _NoModulus(f"{_shown(c.graph, b)} may be 0, and f is divided by it")
    top = c.plus(c.of(a), c.times(div_up(c.size(a), least), c.of(b)))
    return c.times(div_up(1.0, least), top)


def _extreme(c: _Composition, node: Node, k: int) -> _Omega:
    return c.larger(*(c.of(j) for j in node.arguments))


def _where(c: _Composition, node: Node, k: int) -> _Omega:
    decides = c.enclosed(node.arguments[0])
    if decides.lo >= 0.0 or decides.hi < 0.0:
        return c.of(node.arguments[1 if decides.lo >= 0.0 else 2])
    raise _NoModulus(f"{_shown(c.graph, k)} may jump")


def _root(c: _Composition, node: Node, k: int) -> _Omega:
    return c.raised(c.of(node.arguments[0]), 0.5)


def _acosh(c: _Composition, node: Node, k: int) -> _Omega:
    """`|acosh a − acosh b| ≤ acosh(1 + |a − b|) ≤ √(2|a − b|)`: acosh is concave, and cosh y ≥ 1 + y²/2."""
    return c.times(sqrt_up(2.0), c.raised(c.of(node.arguments[0]), 0.5))


def _floor(c: _Composition, node: Node, k: int) -> _Omega:
    if math.floor(c.enclosed(node.arguments[0]).lo) == math.floor(c.enclosed(node.arguments[0]).hi):
        return _Omega(0.0)
    raise _NoModulus(f"{_shown(c.graph, k)} may jump")


def _chain(c: _Composition, node: Node, k: int) -> _Omega:
    """φ(u): sup |φ'| over the range of u, times ω_u."""
    inner = c.enclosed(node.arguments[0])
    builder = GraphBuilder(1)
    argument = builder.add("input", parameters=(0,))
    outer = builder.finish([builder.add(node.operation, argument, parameters=node.parameters)], ())
    slope = math.inf
    if np.isfinite(inner.magnitude):
        slope = float(outer.enclose_gradient([[inner.lo]], [[inner.hi]])[1].magnitude[0, 0, 0])
    if not math.isfinite(slope):
        raise _NoModulus(f"{_shown(c.graph, k)} may have a pole")
    return c.times(slope, c.of(node.arguments[0]))


_RULES: Mapping[str, Rule] = {
    "add": _sum,
    "sub": _sum,
    "sum": _sum,
    "mul": _product,
    "div": _quotient,
    "min": _extreme,
    "max": _extreme,
    "where": _where,
    "sqrt": _root,
    "acosh": _acosh,
    "floor": _floor,
    **dict.fromkeys(
        ("neg", "pow", "exp", "log", "sin", "cos", "tan", "atan", "tanh", "sigmoid", "erf", "abs", "relu", "clamp"),
        _chain,
    ),
    **dict.fromkeys(("asinh", "atanh"), _chain),
}
