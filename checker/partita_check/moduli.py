"""Moduli of continuity: composed over the graph of f where it has no Lipschitz constant, or declared as an expression in t.

A modulus here is a function t ↦ ω(t) of balls. All are nondecreasing and concave with ω(0) = 0: sums, positive multiples,
minima and compositions of such functions are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from flint import arb, arb_series

from partita_check.clock import clock
from partita_check.graph import Graph, need, parse
from partita_check.limits import LogProduct, Power, ball, power_of, squares_of
from partita_check.polynomials import INF, up

__all__ = ["Composed", "Expression"]

LIPSCHITZ = ("neg", "abs", "relu", "clamp", "min", "max", "add", "sub", "sum")
SMOOTH = ("exp", "log", "sin", "cos", "tan", "atan", "tanh", "asinh", "atanh", "sigmoid", "erf", "pow")
NAN = arb("nan")


class Composed:
    """`|f(x) − f(y)| ≤ at(|x − y|₂)` on a box, from the ranges of all nodes over it; infinite where a node is not covered."""

    axes: list[arb] | None = None

    def __init__(self, graph: Graph, box: Sequence[arb]) -> None:
        self.graph, self.values = graph, graph.all_values(box)

    def at(self, distance: arb) -> arb:
        if not distance > 0:
            return arb(0)
        found = list[tuple[arb, bool]]()  # with whether it is linear in t
        for k in range(len(self.graph.nodes)):
            clock.tick()
            found.append(self._node(k, found, distance.upper()))
        tallest = max((found[k][0] for k in self.graph.outputs), key=up)
        return tallest if tallest.is_finite() else INF

    def _node(self, k: int, found: list[tuple[arb, bool]], t: arb) -> tuple[arb, bool]:
        name, args, _ = self.graph.nodes[k]
        parts, limit = [found[j] for j in args], self.graph.limits.get(k)
        if name == "input":
            return t, True
        if all(p[0] == 0 for p in parts):
            return arb(0), True
        if isinstance(limit, Power):
            return self._power(limit, found)
        if isinstance(limit, LogProduct) and not self.values[limit.argument] > 0:
            return self._log_product(limit, found), False
        linear = all(p[1] for p in parts)
        if name in LIPSCHITZ:
            moved = [p[0] for p in parts]
            return max(moved, key=up) if name in ("min", "max") and linear else sum(moved, arb(0)), linear
        values = [self.values[j] for j in args]
        if name == "mul":
            return values[0].abs_upper() * parts[1][0] + values[1].abs_upper() * parts[0][0], linear
        if name == "div" and values[1].abs_lower() > 0:
            least = values[1].abs_lower()
            return (parts[0][0] + values[0].abs_upper() / least * parts[1][0]) / least, linear
        if name == "sqrt":
            return self._root(args[0], found)
        if name == "acosh":  # concave, and cosh y ≥ 1 + y²/2
            return (2 * parts[0][0]).sqrt(), False
        if name == "floor" and values[0].is_finite() and values[0].lower().floor() == values[0].upper().floor():
            return arb(0), True
        if name == "where" and (values[0] >= 0 or values[0] < 0):
            return parts[1 if values[0] >= 0 else 2]
        if name in SMOOTH:
            return self._steepest(k) * parts[0][0], linear
        return NAN, False

    def _steepest(self, k: int) -> arb:
        """sup |φ'| over the range of its argument."""
        name, args, params = self.graph.nodes[k]
        single = Graph(1, (("input", (), (0,)), (name, (0,), params)), (1,), ())
        slope = single.evaluate([arb_series([self.values[args[0]], 1], 2)])[0]
        return slope[1].abs_upper() if isinstance(slope, arb_series) else NAN

    def _root(self, inner: int, found: list[tuple[arb, bool]]) -> tuple[arb, bool]:
        """√u: √ω, ω/(2√min u), or for sums of squares the length of the vector of linear moduli."""
        omega, linear = found[inner]
        ways = [(omega.sqrt(), False)]
        if self.values[inner] > 0:
            ways.append((omega / (2 * self.values[inner].lower().sqrt()), linear))
        squares = squares_of(self.graph.nodes, inner)
        if squares is not None:
            parts = [(c, *found[k]) for c, k in squares]
            if all(straight for _, _, straight in parts):
                ways.append((self._length(squares, [p for _, p, _ in parts], found), True))
            else:
                ways.append((sum((c.sqrt() * p for c, p, _ in parts), arb(0)), False))
        return min(ways, key=lambda way: up(way[0]))

    def _length(self, squares: list[tuple[arb, int]], moved: list[arb], found: list[tuple[arb, bool]]) -> arb:
        """√Σ c_i ω_i²; `max √c_i ω_i` if the u_i are different inputs."""
        names = [self.graph.nodes[k] for _, k in squares]
        sizes = [c.sqrt() * p for (c, _), p in zip(squares, moved)]
        if all(n[0] == "input" for n in names) and len({n[2] for n in names}) == len(names):
            return max(sizes, key=up)
        return sum((s * s for s in sizes), arb(0)).sqrt()

    def _power(self, limit: Power, found: list[tuple[arb, bool]]) -> tuple[arb, bool]:
        """v^e: ω^e for e ≤ 1, or sup e v^{e−1} ω."""
        (omega, linear), v, e = found[limit.base], self.values[limit.base], self.values[limit.exponent]
        if not e > 0:
            return NAN, False
        if e >= 1:
            return e * power_of(v.upper(), e - 1).abs_upper() * omega if e > 1 else omega, linear
        ways = [(omega**e if omega > 0 else omega, False)] if e <= 1 else []
        if v > 0:
            ways.append((e * v.lower() ** (e - 1) * omega, linear))
        return min(ways, key=lambda way: up(way[0])) if ways else (NAN, False)

    def _log_product(self, limit: LogProduct, found: list[tuple[arb, bool]]) -> arb:
        """With q = |w|^s, s ≤ 1: `q(log c + (r/s) log q)` moves by `(|log c| + (r/s)(1 + log⁺ max q))·ω_q + (r/s)·η(ω_q)`.

        `|1 + log|u|| ≤ 1 + log⁺ max + (log(1/|u|) − 2)⁺`, and the last part integrates to at most η(t) over a length t,
        `η(t) = t(log(2/t) − 1)` up to t = 2/e² and 2/e² beyond.
        """
        w, ratio = self.values[limit.base], ball(limit.inner / limit.power)
        omega, top = found[limit.base][0], w.abs_upper()
        if limit.power > 1:  # sup |φ'| with φ' = s y^{s−1} log(c y^r) + r y^{s−1}
            less = LogProduct(0, 0, limit.power - 1, limit.inner, limit.scale, ())
            steep = ball(limit.power) * less.bound(top) + ball(limit.inner) * power_of(arb(top), ball(limit.power - 1))
            own = steep.abs_upper() * omega
        else:
            q = power_of(omega, ball(limit.power)) if limit.power < 1 else omega
            most = power_of(arb(top), ball(limit.power)).abs_upper()
            grown = most.log() if most > 1 else arb(0)
            turn = 2 * arb(-2).exp()
            eta = q * ((2 / q).log() - 1) if 0 < q < turn else turn if q >= turn else NAN
            own = (abs(limit.scale.log()) + ratio * (1 + grown)) * q + ratio * eta
        size = limit.bound(top)
        for k, power in limit.others:
            other, moved = self.values[k], found[k][0]
            if abs(power) != 1 or (power < 0 and not other.abs_lower() > 0):
                return NAN
            if power < 0:
                least = other.abs_lower()
                own, size = own / least + size * moved / (least * least), size / least
            else:
                own, size = own * other.abs_upper() + size * moved, size * other.abs_upper()
        return own


@dataclass(frozen=True)
class Expression:
    """A declared modulus, an expression in t that is built from nondecreasing concave functions."""

    text: str
    graph: Graph
    axes: list[arb] | None = None

    @classmethod
    def read(cls, text: Any) -> Expression | None:
        """The modulus; None if it is not recognised as one: it may be one all the same."""
        need(isinstance(text, str), "known: a modulus is a text or a constant with an exponent")
        graph = parse(text, ["t"])
        need(graph.shape == (), "known: a modulus has one value")
        start = graph.evaluate([arb(0)])[0]
        zero = start.is_finite() and start.contains(0) and start.abs_upper() < 1e-9
        return cls(text, graph) if zero and _concave(graph, graph.outputs[0]) is not None else None

    def at(self, distance: arb) -> arb:
        found: arb = self.graph.evaluate([distance.upper()])[0] if distance > 0 else arb(0)
        return found


def _concave(graph: Graph, k: int) -> arb | None:
    """The largest value of a node on t ≥ 0 if it is nonnegative, nondecreasing and concave there (∞ if it grows); else None."""
    name, args, _ = graph.nodes[k]
    limit = graph.limits.get(k)
    if name == "input":
        return INF
    if name == "const":
        value = arb(graph.nodes[k][2][0])
        return value if value >= 0 else None
    if isinstance(limit, Power):
        e = graph.nodes[limit.exponent]
        inner = _concave(graph, limit.base)
        exact = e[0] == "const" and 0 < e[2][0] <= 1
        return None if inner is None or not exact else power_of(inner, arb(e[2][0])) if inner.is_finite() else INF
    if name == "neg":  # −q log q, for 0 ≤ q ≤ 1/e
        product = graph.limits.get(args[0])
        plain = isinstance(product, LogProduct) and product.power == product.inner == 1 and not product.others
        inner = (
            _concave(graph, product.base) if plain and isinstance(product, LogProduct) and product.scale == 1 else None
        )
        return arb(-1).exp() if inner is not None and inner <= arb(-1).exp() else None
    found = [_concave(graph, j) for j in args]
    if any(f is None for f in found) or name not in _SHAPES:
        return None
    return _SHAPES[name](graph, args, [f for f in found if f is not None])


def _times(graph: Graph, args: Sequence[int], tops: list[arb]) -> arb | None:
    constants = [graph.nodes[j][0] == "const" for j in args]
    if any(is_constant and top == 0 for is_constant, top in zip(constants, tops)):
        return arb(0)
    return tops[0] * tops[1] if any(constants) and all(f > 0 for f in tops) else None


def _over(graph: Graph, args: Sequence[int], tops: list[arb]) -> arb | None:
    """Over a constant, or u/(a + u) with a > 0."""
    name, parts, _ = graph.nodes[args[1]]
    if name == "const":
        return tops[0] / tops[1] if tops[1] > 0 else None
    others = [graph.nodes[j] for j in parts if j != args[0]] if name == "add" and args[0] in parts else []
    return arb(1) if len(others) == 1 and others[0][0] == "const" and arb(others[0][2][0]) > 0 else None


def _log(graph: Graph, args: Sequence[int], tops: list[arb]) -> arb | None:
    """log u with u ≥ 1, which it is everywhere if it is at t = 0."""
    least = graph.all_values([arb(0)])[args[0]]
    return None if not least >= 1 else tops[0].log() if tops[0].is_finite() else tops[0]


_SHAPES: dict[str, Callable[[Graph, Sequence[int], list[arb]], arb | None]] = {
    "add": lambda g, a, x: sum(x, arb(0)),
    "sum": lambda g, a, x: sum(x, arb(0)),
    "min": lambda g, a, x: min(x, key=up),
    "mul": _times,
    "div": _over,
    "log": _log,
    "sqrt": lambda g, a, x: x[0].sqrt() if x[0].is_finite() else x[0],
    "abs": lambda g, a, x: x[0],
    "relu": lambda g, a, x: x[0],
    "tanh": lambda g, a, x: arb(1),
    "atan": lambda g, a, x: arb(2),
    "erf": lambda g, a, x: arb(1),
}
