"""The exact partial derivatives of a graph, as graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from partita.functions.graph import Graph, GraphBuilder
from partita.functions.operations import Node

__all__ = ["derivative"]


def derivative(graph: Graph, axis: int) -> Graph:
    """`∂f/∂x_axis`, with the outputs of f; `where` decides on kinks.

    At a kink of abs, relu, min, max or clamp, and on a jump of `where` or `floor`, the value is that of one side.

    >>> from partita.functions import parse
    >>> derivative(parse("x0^3*sin(x1)", ["x0", "x1"]), 0).infix()
    '3*x0^2*sin(x1)'
    """
    work = _Work(graph, axis)
    return work.builder.finish([work.slope(k) for k in graph.outputs], graph.output_shape)


class _Work:
    """One differentiation: the nodes of f in a new builder, and the slope of each where it is not 0."""

    def __init__(self, graph: Graph, axis: int) -> None:
        self.builder, self.axis = GraphBuilder(graph.num_inputs), axis
        self.add = self.builder.add
        self.values: list[int] = []
        self.slopes: list[int | None] = []  # None is 0
        for node in graph.nodes:
            arguments = [self.values[k] for k in node.arguments]
            self.values.append(self.add(node.operation, *arguments, parameters=node.parameters))
            self.slopes.append(self._slope_of(node, arguments, self.values[-1]))

    def slope(self, k: int) -> int:
        found = self.slopes[k]
        return self.constant(0.0) if found is None else found

    def constant(self, value: float) -> int:
        return self.add("const", parameters=(value,))

    def times(self, *factors: int | None) -> int | None:
        """The product, None if a factor is 0; factors 1 are left out."""
        product: int | None = None
        for factor in factors:
            if factor is None:
                return None
            if self.builder.nodes[factor] != Node("const", (), (1.0,)):
                product = factor if product is None else self.add("mul", product, factor)
        return self.constant(1.0) if product is None else product

    def plus(self, a: int | None, b: int | None, operation: str = "add") -> int | None:
        if b is None:
            return a
        if a is None:
            return b if operation == "add" else self.add("neg", b)
        return self.add(operation, a, b)

    def either(self, condition: int, a: int | None, b: int | None) -> int | None:
        if a is None and b is None:
            return None
        zero = self.constant(0.0)
        return self.add("where", condition, zero if a is None else a, zero if b is None else b)

    def _slope_of(self, node: Node, x: list[int], value: int) -> int | None:
        d = [self.slopes[k] for k in node.arguments]
        if node.operation == "input":
            return self.constant(1.0) if node.parameters[0] == self.axis else None
        if all(s is None for s in d) and not (node.operation == "where" and self.slopes[node.arguments[0]] is not None):
            return None
        if node.operation in _OUTER:
            return self.times(_OUTER[node.operation](self, x[0], value), d[0])
        return _JOINT[node.operation](self, node, x, d)

    def power(self, x: int, exponent: int) -> int | None:
        """`k x^{k−1}`."""
        if exponent == 0:
            return None
        inner = x if exponent == 2 else self.add("pow", x, parameters=(exponent - 1,))
        return self.constant(1.0) if exponent == 1 else self.add("mul", self.constant(float(exponent)), inner)

    def bell(self, x: int) -> int:
        """`(2/√π) e^{−x²}`, with π as 4 atan 1: constants of a graph are exact."""
        pi = self.add("mul", self.constant(4.0), self.add("atan", self.constant(1.0)))
        height = self.add("div", self.constant(2.0), self.add("sqrt", pi))
        return self.add("mul", height, self.add("exp", self.add("neg", self.add("pow", x, parameters=(2,)))))

    def one_minus(self, x: int) -> int:
        return self.add("sub", self.constant(1.0), x)

    def over_root(self, x: int) -> int:
        return self.add("div", self.constant(1.0), self.add("sqrt", x))

    def square(self, x: int) -> int:
        return self.add("pow", x, parameters=(2,))


# the slope of each function of one argument, from the argument and the value
_OUTER: Mapping[str, Callable[[_Work, int, int], int | None]] = {
    "exp": lambda w, x, y: y,
    "log": lambda w, x, y: w.add("div", w.constant(1.0), x),
    "sqrt": lambda w, x, y: w.add("div", w.constant(0.5), y),
    "sin": lambda w, x, y: w.add("cos", x),
    "cos": lambda w, x, y: w.add("neg", w.add("sin", x)),
    "tan": lambda w, x, y: w.add("add", w.constant(1.0), w.square(y)),
    "atan": lambda w, x, y: w.add("div", w.constant(1.0), w.add("add", w.constant(1.0), w.square(x))),
    "tanh": lambda w, x, y: w.one_minus(w.square(y)),
    "sigmoid": lambda w, x, y: w.add("mul", y, w.one_minus(y)),
    "erf": lambda w, x, y: w.bell(x),
    "asinh": lambda w, x, y: w.over_root(w.add("add", w.constant(1.0), w.square(x))),
    "acosh": lambda w, x, y: w.over_root(w.add("sub", w.square(x), w.constant(1.0))),
    "atanh": lambda w, x, y: w.add("div", w.constant(1.0), w.one_minus(w.square(x))),
    "floor": lambda w, x, y: None,
    "abs": lambda w, x, y: w.add("where", x, w.constant(1.0), w.constant(-1.0)),
    "relu": lambda w, x, y: w.add("where", x, w.constant(1.0), w.constant(0.0)),
    "neg": lambda w, x, y: w.constant(-1.0),
}


def _quotient(w: _Work, node: Node, x: list[int], d: list[int | None]) -> int | None:
    top = w.plus(w.times(d[0], x[1]), w.times(x[0], d[1]), "sub") if d[1] is not None else d[0]
    bottom = x[1] if d[1] is None else w.square(x[1])
    return None if top is None else w.add("div", top, bottom)


def _sum(w: _Work, node: Node, x: list[int], d: list[int | None]) -> int | None:
    moving = [s for s in d if s is not None]
    return moving[0] if len(moving) == 1 else w.add("sum", *moving)


def _clamped(w: _Work, node: Node, x: list[int], d: list[int | None]) -> int | None:
    low, high = (w.constant(float(p)) for p in node.parameters)
    below_top = w.either(w.add("sub", high, x[0]), d[0], None)
    return w.either(w.add("sub", x[0], low), below_top, None)


def _extreme(w: _Work, node: Node, x: list[int], d: list[int | None]) -> int | None:
    first, second = (x[0], x[1]) if node.operation == "max" else (x[1], x[0])
    return w.either(w.add("sub", first, second), d[0], d[1])


_JOINT: Mapping[str, Callable[[_Work, Node, list[int], list[int | None]], int | None]] = {
    "add": lambda w, node, x, d: w.plus(d[0], d[1]),
    "sub": lambda w, node, x, d: w.plus(d[0], d[1], "sub"),
    "mul": lambda w, node, x, d: w.plus(w.times(d[0], x[1]), w.times(x[0], d[1])),
    "div": _quotient,
    "pow": lambda w, node, x, d: w.times(w.power(x[0], int(node.parameters[0])), d[0]),
    "sum": _sum,
    "min": _extreme,
    "max": _extreme,
    "clamp": _clamped,
    "where": lambda w, node, x, d: w.either(x[0], d[1], d[2]),
}
