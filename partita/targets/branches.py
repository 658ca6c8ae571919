"""Branches that meet: `where(c, a, b)` without a jump, told apart from those that may jump."""

from __future__ import annotations

from fractions import Fraction

from partita.targets.graph import GraphBuilder

__all__ = ["branch"]

Form = dict[int, Fraction]  # position of a node to its factor; −1 stands for the constant 1
_MOST_TERMS = 64


def branch(builder: GraphBuilder, condition: int, yes: int, no: int) -> int:
    """`yes` where the condition is ≥ 0, else `no`; as max(yes, no) or min(yes, no) if `yes − no` is a multiple of the condition.

    A graph says nothing of whether the branches of `where` meet, so every bound must allow for a jump. Many that people write do
    meet: where(x > 0, x, 0.1*x). With `yes − no = k·condition`, k ≥ 0, the larger branch is the one that counts, with k ≤ 0 the
    smaller; k is found in exact rational arithmetic, as a factor between affine functions of other nodes.

    >>> b = GraphBuilder(1)
    >>> x = b.add("input", parameters=(0,))
    >>> b.finish([branch(b, x, b.add("mul", b.add("const", parameters=(3.0,)), x), x)], ()).infix()
    'max(3*x0, x0)'
    """
    first, second, decides = (_form(builder, node) for node in (yes, no, condition))
    slope = None
    if first is not None and second is not None and decides is not None:
        slope = _ratio(_combined(first, second, Fraction(-1)), decides)
    if slope is None:
        return builder.add("where", condition, yes, no)
    return builder.add("max" if slope >= 0 else "min", yes, no)


def _ratio(difference: Form, condition: Form) -> Fraction | None:
    """k with difference = k · condition, or None."""
    if not condition or set(difference) - set(condition):
        return None
    place, factor = next(iter(condition.items()))
    k = difference.get(place, Fraction(0)) / factor
    return k if all(difference.get(n, Fraction(0)) == k * f for n, f in condition.items()) else None


def _form(builder: GraphBuilder, node: int, depth: int = 0) -> Form | None:
    """A node as an affine function of nodes that are not affine; None where that would be long."""
    found = builder.nodes[node]
    x = found.arguments
    if found.operation == "const":
        value = Fraction(float(found.parameters[0]))
        return {-1: value} if value else {}
    if depth < _MOST_TERMS and found.operation in ("add", "sub", "neg", "sum"):
        total: Form = {}
        for place, argument in enumerate(x):
            part = _form(builder, argument, depth + 1)
            if part is None:
                return None
            minus = found.operation == "neg" or (found.operation == "sub" and place == 1)
            total = _combined(total, part, Fraction(-1 if minus else 1))
        return total if len(total) <= _MOST_TERMS else None
    if found.operation in ("mul", "div") and depth < _MOST_TERMS:
        for k, other in ((0, 1), (1, 0)) if found.operation == "mul" else ((1, 0),):
            constant = builder.nodes[x[k]]
            if constant.operation == "const" and constant.parameters[0] != 0:
                factor = Fraction(float(constant.parameters[0]))
                part = _form(builder, x[other], depth + 1)
                return None if part is None else _combined({}, part, factor if found.operation == "mul" else 1 / factor)
    return {node: Fraction(1)}


def _combined(a: Form, b: Form, factor: Fraction) -> Form:
    """a + factor · b, without zeros."""
    out = dict(a)
    for node, value in b.items():
        out[node] = out.get(node, Fraction(0)) + factor * value
    return {node: value for node, value in out.items() if value}
