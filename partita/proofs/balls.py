"""Evaluates a graph at a point in ball arithmetic, to as many digits as requested, even if terms cancel. Needs python-flint."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from importlib.util import find_spec
from typing import Any

from partita.functions.graph import Graph
from partita.functions.limits import LogLimit, Power

__all__ = ["balls_at_hand", "value_in_balls"]


def balls_at_hand() -> bool:
    """Whether python-flint is installed."""
    return find_spec("flint") is not None


def value_in_balls(graph: Graph, point: Sequence[float], *, bits: int = 200) -> list[tuple[float, float]]:
    """Enclosures (lo, hi) of the outputs of f at a point, rounded outward to floats; (-inf, inf) where f has no value there."""
    import flint

    before = flint.ctx.prec
    flint.ctx.prec = bits
    try:
        values: list[Any] = []
        for position, node in enumerate(graph.nodes):
            if node.operation == "input":
                values.append(flint.arb(float(point[int(node.parameters[0])])))
            elif node.operation == "const":
                values.append(flint.arb(float(node.parameters[0])))
            else:
                values.append(_RULES[node.operation](flint.arb, [values[k] for k in node.arguments], node.parameters))
            limit = graph.limits.get(position)
            if isinstance(limit, LogLimit) and values[limit.argument] == 0:
                values[-1] = flint.arb(0)
            if isinstance(limit, Power) and values[limit.base] == 0 and values[limit.exponent] > 0:
                values[-1] = flint.arb(0)
        return [_ends(values[k], flint.arb) for k in graph.outputs]
    finally:
        flint.ctx.prec = before


def _ends(x: Any, arb: Any) -> tuple[float, float]:
    """The nearest floats outside a ball; comparisons decide, as conversion rounds to nearest."""
    if not x.is_finite():
        return -math.inf, math.inf
    lo, hi = float(x.lower()), float(x.upper())
    while not arb(lo) <= x:
        lo = math.nextafter(lo, -math.inf)
    while not arb(hi) >= x:
        hi = math.nextafter(hi, math.inf)
    return lo, hi


def _undecided(arb: Any) -> Any:
    return arb(0, "inf")


def _where(arb: Any, x: Any, a: Any, b: Any) -> Any:
    """a where x ≥ 0, b where x < 0; nothing where the ball holds both."""
    return a if x >= 0 else b if x < 0 else _undecided(arb)


def _power(arb: Any, x: Any, k: int) -> Any:
    """By squaring: arb's own power of a ball around 0 is NaN."""
    if k < 0:
        return 1 / _power(arb, x, -k)
    result, square = arb(1), x
    while k:
        result = result * square if k & 1 else result
        square, k = square * square, k >> 1
    return result


_RULES: Mapping[str, Callable[[Any, list[Any], Sequence[float]], Any]] = {
    "add": lambda arb, x, p: x[0] + x[1],
    "sub": lambda arb, x, p: x[0] - x[1],
    "mul": lambda arb, x, p: x[0] * x[1],
    "div": lambda arb, x, p: x[0] / x[1],
    "neg": lambda arb, x, p: -x[0],
    "sum": lambda arb, x, p: reduce(lambda a, b: a + b, x),
    "pow": lambda arb, x, p: _power(arb, x[0], int(p[0])),
    "exp": lambda arb, x, p: x[0].exp(),
    "log": lambda arb, x, p: x[0].log(),
    "sqrt": lambda arb, x, p: x[0].sqrt(),
    "sin": lambda arb, x, p: x[0].sin(),
    "cos": lambda arb, x, p: x[0].cos(),
    "tan": lambda arb, x, p: x[0].tan(),
    "atan": lambda arb, x, p: x[0].atan(),
    "tanh": lambda arb, x, p: x[0].tanh(),
    "sigmoid": lambda arb, x, p: 1 / (1 + (-x[0]).exp()),
    "erf": lambda arb, x, p: x[0].erf(),
    "asinh": lambda arb, x, p: x[0].asinh(),
    "acosh": lambda arb, x, p: x[0].acosh(),
    "atanh": lambda arb, x, p: x[0].atanh(),
    "floor": lambda arb, x, p: x[0].floor() if x[0].floor().is_exact() else _undecided(arb),
    "abs": lambda arb, x, p: abs(x[0]),
    "min": lambda arb, x, p: x[0].min(x[1]),
    "max": lambda arb, x, p: x[0].max(x[1]),
    "relu": lambda arb, x, p: x[0].max(arb(0)),
    "clamp": lambda arb, x, p: x[0].max(arb(float(p[0]))).min(arb(float(p[1]))),
    "where": lambda arb, x, p: _where(arb, *x),
}
