"""Oracles in ball and rational arithmetic: expression graphs and claims at single points. Nothing of the library computes here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction

import numpy as np
import torch
from flint import arb, ctx, fmpq

BITS = (128, 1200, 9000)
UNDEFINED = arb("nan")
BALLS: dict[str, Callable[..., arb]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "neg": lambda a: -a,
    "pow": lambda a, k: _power(a, k) if k >= 0 else 1 / _power(a, -k),
    "sum": lambda *terms: sum(terms[1:], terms[0]),
    "exp": lambda a: a.exp(),
    "log": lambda a: a.log(),
    "sqrt": lambda a: a.sqrt(),
    "sin": lambda a: a.sin(),
    "cos": lambda a: a.cos(),
    "tan": lambda a: a.tan(),
    "atan": lambda a: a.atan(),
    "tanh": lambda a: a.tanh(),
    "sigmoid": lambda a: 1 / (1 + (-a).exp()),
    "erf": lambda a: a.erf(),
    "asinh": lambda a: a.asinh(),
    "acosh": lambda a: a.acosh(),
    "atanh": lambda a: a.atanh(),
    "floor": lambda a: a.floor() if a.floor().is_exact() else UNDEFINED,
    "abs": abs,
    "min": lambda a, b: a.min(b),
    "max": lambda a, b: a.max(b),
    "relu": lambda a: a.max(arb(0)),
    "clamp": lambda a, least, most: a.max(arb(least)).min(arb(most)),
    "where": lambda c, a, b: a if c >= 0 else b if c < 0 else UNDEFINED,
}


def _power(a: arb, k: int) -> arb:
    """aᵏ by repeated multiplication: `arb ** k` is NaN for balls around 0."""
    out = arb(1)
    for digit in bin(k)[2:]:
        out = out * out * a if digit == "1" else out * out
    return out


@contextmanager
def bits(count: int) -> Iterator[None]:
    """So many bits inside, as before after it."""
    before, ctx.prec = ctx.prec, count
    try:
        yield
    finally:
        ctx.prec = before


def exact(number: float | Fraction) -> arb:
    """A float or a fraction as a ball, as narrow as the bits allow."""
    if isinstance(number, Fraction):
        return arb(fmpq(number.numerator, number.denominator))
    return arb(number)


def values(graph, point: Sequence[float | Fraction]) -> list[arb]:
    """The outputs of a graph at a point; NaN where they are undefined or not settled by these bits."""
    results: list[arb] = []
    for node in graph.nodes:
        if node.operation == "input":
            results.append(exact(point[int(node.parameters[0])]))
        elif node.operation == "const":
            results.append(arb(node.parameters[0]))
        else:
            results.append(BALLS[node.operation](*(results[k] for k in node.arguments), *node.parameters))
    return [results[k] for k in graph.outputs]


EXACT: dict[str, Callable[..., Fraction]] = {
    **{name: BALLS[name] for name in ("add", "sub", "mul", "div", "neg", "sum", "abs")},
    "pow": lambda a, k: a**k,
    "min": min,
    "max": max,
}


def exact_value(graph, point: Sequence[float | Fraction] = ()) -> Fraction:
    """The first output at a point in rational arithmetic, for graphs of sums, products, quotients, powers and extrema."""
    results: list[Fraction] = []
    for node in graph.nodes:
        if node.operation in ("input", "const"):
            results.append(Fraction(point[node.parameters[0]] if node.operation == "input" else node.parameters[0]))
        else:
            results.append(EXACT[node.operation](*(results[k] for k in node.arguments), *node.parameters))
    return results[graph.outputs[0]]


def settle(question: Callable[[], bool | None]) -> bool | None:
    """The first answer that is not None, with ever more bits; None where no number of bits tried gives one."""
    for count in BITS:
        with bits(count):
            answer = question()
        if answer is not None:
            return answer
    return None


def holds(lo: float, hi: float, value: arb) -> bool | None:
    """Whether lo ≤ value ≤ hi: True, False, or None where the ball is too wide to say (or the value undefined)."""
    if not value.is_finite():
        return None
    low = lo == -np.inf or arb(lo) <= value
    high = hi == np.inf or value <= arb(hi)
    if low and high:
        return True
    return False if value < arb(lo) or value > arb(hi) else None


def errors(compiled, points: np.ndarray) -> list[arb]:
    """`|f − head|` at points of an expression's domain: what the head returns in its dtype against f in balls of 300 bits."""
    with torch.no_grad():
        got = compiled.head.evaluate(torch.from_numpy(points).to(compiled.head.dtype)).double().numpy()
    with bits(300):
        return [
            max((abs(arb(g) - f) for g, f in zip(row, values(compiled.target.graph, z), strict=True)), key=arb.mid)
            for row, z in zip(got.tolist(), points.tolist(), strict=True)
        ]


def is_refuted(compiled, points: np.ndarray) -> bool:
    """Whether an error at one of the points certainly exceeds the bound; undefined values prove nothing."""
    return any(error > arb(compiled.error_bound) for error in errors(compiled, points))
