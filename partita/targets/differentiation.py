"""The derivative of an expression, as another graph."""

from __future__ import annotations

import math
from collections.abc import Callable

from partita.errors import NotContinuousError
from partita.targets.graph import Graph, GraphBuilder
from partita.targets.operations import Node

__all__ = ["differentiate"]


class _Derivative:
    """Copies the nodes of a graph into a builder and derives each as it goes; None stands for a derivative that is 0."""

    def __init__(self, graph: Graph, variable: int) -> None:
        self.builder, self.variable = GraphBuilder(graph.num_inputs), variable
        self.copies: list[int] = []
        self.slopes: list[int | None] = []
        for node in graph.nodes:
            self.copies.append(
                self.builder.add(node.operation, *(self.copies[k] for k in node.arguments), parameters=node.parameters)
            )
            self.slopes.append(self._slope(node))

    def constant(self, value: float) -> int:
        return self.builder.add("const", parameters=(value,))

    def times(self, first: int, second: int | None) -> int | None:
        return None if second is None else self.builder.add("mul", first, second)

    def plus(self, *terms: int | None) -> int | None:
        found = [t for t in terms if t is not None]
        if not found:
            return None
        total = found[0]
        for term in found[1:]:
            total = self.builder.add("add", total, term)
        return total

    def negative(self, term: int | None) -> int | None:
        return None if term is None else self.builder.add("neg", term)

    def where(self, condition: int, first: int | None, second: int | None) -> int | None:
        if first is None and second is None:
            return None
        branches = (self.constant(0.0) if b is None else b for b in (first, second))
        return self.builder.add("where", condition, *branches)

    def _slope(self, node: Node) -> int | None:
        if node.operation == "input":
            return self.constant(1.0) if node.parameters[0] == self.variable else None
        if node.operation == "const":
            return None
        arguments = [self.copies[k] for k in node.arguments]
        slopes = [self.slopes[k] for k in node.arguments]
        if all(s is None for s in slopes):
            return None
        return _RULES[node.operation](self, node, arguments, slopes)


def differentiate(graph: Graph, variable: int) -> Graph:
    """∂f/∂x_variable of a scalar graph. Where f has a kink (abs, max, …) the slope of one side is taken: it then jumps there.

    `where` is derived branch by branch: right if its branches meet, as those of a C¹ function do.

    >>> from partita.targets import parse
    >>> differentiate(parse("sin(3*x) + x^2", ["x"]), 0).evaluate([[0.0]]).tolist()
    [3.0]
    """
    if len(graph.outputs) != 1:
        raise NotContinuousError(f"differentiate: found {len(graph.outputs)} outputs, expected one.")
    found = _Derivative(graph, variable)
    slope = found.slopes[graph.outputs[0]]
    return found.builder.finish([found.constant(0.0) if slope is None else slope], ())


Slopes = list[int | None]
Rule = Callable[[_Derivative, Node, list[int], Slopes], int | None]


def _product(d: _Derivative, node: Node, a: list[int], s: Slopes) -> int | None:
    return d.plus(d.times(a[1], s[0]), d.times(a[0], s[1]))


def _quotient(d: _Derivative, node: Node, a: list[int], s: Slopes) -> int | None:
    top = None if s[0] is None else d.builder.add("div", s[0], a[1])
    if s[1] is None:
        return top
    square = d.builder.add("mul", a[1], a[1])
    lower = d.builder.add("div", d.builder.add("mul", a[0], s[1]), square)
    return d.builder.add("neg", lower) if top is None else d.builder.add("sub", top, lower)


def _power(d: _Derivative, node: Node, a: list[int], s: Slopes) -> int | None:
    k = int(node.parameters[0])
    if k == 0:
        return None
    if k == 1:
        return s[0]
    lower = a[0] if k == 2 else d.builder.add("pow", a[0], parameters=(k - 1,))
    return d.times(d.builder.add("mul", d.constant(float(k)), lower), s[0])


def _outer(slope: Callable[[_Derivative, int], int]) -> Rule:
    """f(u)′ = f′(u) u′ from f′ as nodes."""
    return lambda d, node, a, s: d.times(slope(d, a[0]), s[0])


def _square(d: _Derivative, x: int) -> int:
    return d.builder.add("mul", x, x)


def _one_minus(d: _Derivative, x: int) -> int:
    return d.builder.add("sub", d.constant(1.0), x)


def _sigmoid_slope(d: _Derivative, x: int) -> int:
    value = d.builder.add("sigmoid", x)
    return d.builder.add("mul", value, _one_minus(d, value))


def _erf_slope(d: _Derivative, x: int) -> int:
    gauss = d.builder.add("exp", d.builder.add("neg", _square(d, x)))
    return d.builder.add("mul", d.constant(2 / math.sqrt(math.pi)), gauss)


def _reciprocal(d: _Derivative, x: int) -> int:
    return d.builder.add("div", d.constant(1.0), x)


def _sqrt_slope(d: _Derivative, x: int) -> int:
    return d.builder.add("div", d.constant(0.5), d.builder.add("sqrt", x))


def _chosen(sign: float) -> Rule:
    """max (sign 1) or min (−1): the slope of the larger or smaller argument."""

    def rule(d: _Derivative, node: Node, a: list[int], s: Slopes) -> int | None:
        ahead = d.builder.add("sub", *(a if sign > 0 else a[::-1]))
        return d.where(ahead, s[0], s[1])

    return rule


def _clamped(d: _Derivative, node: Node, a: list[int], s: Slopes) -> int | None:
    low, high = node.parameters
    below = d.builder.add("sub", a[0], d.constant(float(low)))
    above = d.builder.add("sub", d.constant(float(high)), a[0])
    return d.where(d.builder.add("min", below, above), s[0], None)


_RULES: dict[str, Rule] = {
    "add": lambda d, node, a, s: d.plus(*s),
    "sum": lambda d, node, a, s: d.plus(*s),
    "sub": lambda d, node, a, s: d.plus(s[0], d.negative(s[1])),
    "neg": lambda d, node, a, s: d.negative(s[0]),
    "mul": _product,
    "div": _quotient,
    "pow": _power,
    "exp": _outer(lambda d, x: d.builder.add("exp", x)),
    "log": _outer(_reciprocal),
    "sqrt": _outer(_sqrt_slope),
    "sin": _outer(lambda d, x: d.builder.add("cos", x)),
    "cos": _outer(lambda d, x: d.builder.add("neg", d.builder.add("sin", x))),
    "tan": _outer(lambda d, x: d.builder.add("add", d.constant(1.0), _square(d, d.builder.add("tan", x)))),
    "atan": _outer(lambda d, x: _reciprocal(d, d.builder.add("add", d.constant(1.0), _square(d, x)))),
    "tanh": _outer(lambda d, x: _one_minus(d, _square(d, d.builder.add("tanh", x)))),
    "sigmoid": _outer(_sigmoid_slope),
    "erf": _outer(_erf_slope),
    "abs": lambda d, node, a, s: d.where(a[0], s[0], d.negative(s[0])),
    "relu": lambda d, node, a, s: d.where(a[0], s[0], None),
    "max": _chosen(1.0),
    "min": _chosen(-1.0),
    "clamp": _clamped,
    "where": lambda d, node, a, s: d.where(a[0], s[1], s[2]),
}
