"""Truth values of comparisons, and branches `where(c, a, b)`: those that meet are written as max or min, which have no jump."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from partita.functions.graph import GraphBuilder

__all__ = ["Truth", "branch"]

Form = dict[int, Fraction]  # position of a node to its factor; −1 stands for the constant 1
_MOST_TERMS, _DEEPEST = 64, 64


@dataclass(frozen=True)
class Truth:
    """A condition: `node ≥ 0`, or `node < 0` if it is `negated`. Both are exact, so strict comparisons are."""

    node: int
    negated: bool = False

    @staticmethod
    def compared(symbol: str, a: int, b: int, add: Callable[..., int], literal: Callable[[int], float | None]) -> Truth:
        """`a symbol b` for < <= > >=: the sign of a difference; a literal 0 is left out of it."""
        if symbol in ("<=", ">"):  # a <= b is b - a ≥ 0, and a > b its opposite
            a, b = b, a
        difference = a if literal(b) == 0.0 else add("neg", b) if literal(a) == 0.0 else add("sub", a, b)
        return Truth(difference, negated=symbol in ("<", ">"))

    @property
    def opposite(self) -> Truth:
        return Truth(self.node, not self.negated)

    def joined(self, word: str, other: Truth, add: Callable[..., int]) -> Truth:
        """`self and other`, `self or other`: min and max of nodes that are ≥ 0; for two negated ones by De Morgan."""
        if self.negated and other.negated:
            return Truth(add("max" if word == "and" else "min", self.node, other.node), negated=True)
        nodes = [t._sign(add) if t.negated else t.node for t in (self, other)]
        return Truth(add("min" if word == "and" else "max", *nodes))

    def _sign(self, add: Callable[..., int]) -> int:
        """1 where a negated condition holds, -1 elsewhere."""
        return add("where", self.node, *(add("const", parameters=(s,)) for s in (-1.0, 1.0)))

    def choose(self, builder: GraphBuilder, yes: int, no: int) -> int:
        """`yes` where the condition holds, else `no`."""
        return branch(builder, self.node, no, yes) if self.negated else branch(builder, self.node, yes, no)


def branch(builder: GraphBuilder, condition: int, yes: int, no: int) -> int:
    """`yes` where the condition is ≥ 0, else `no`; as max(yes, no) or min(yes, no) if `yes − no` is a multiple of the condition.

    A graph does not say whether the branches of `where` meet, so every bound must allow for a jump. Many branches in practice do
    meet: where(x > 0, x, 0.1*x). With `yes − no = k·condition`, k ≥ 0, the larger branch is the one that counts, with k ≤ 0 the
    smaller; k is found in exact rational arithmetic, as a factor between affine functions of other nodes.

    >>> b = GraphBuilder(1)
    >>> x = b.add("input", parameters=(0,))
    >>> b.finish([branch(b, x, b.add("mul", b.add("const", parameters=(3.0,)), x), x)], ()).infix()
    'max(3*x0, x0)'
    """
    forms = _Forms(builder)
    first, second, decides = (forms.of(node) for node in (yes, no, condition))
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


class _Forms:
    """Nodes as affine functions of nodes that are not affine, each worked out once; None where that would be long."""

    def __init__(self, builder: GraphBuilder) -> None:
        self.nodes, self.known = builder.nodes, dict[int, Form | None]()

    def of(self, node: int, depth: int = 0) -> Form | None:
        if node not in self.known:
            self.known[node] = {node: Fraction(1)} if depth > _DEEPEST else self._found(node, depth)
        return self.known[node]

    def _found(self, node: int, depth: int) -> Form | None:
        found = self.nodes[node]
        x = found.arguments
        if found.operation == "const":
            value = Fraction(float(found.parameters[0]))
            return {-1: value} if value else {}
        if found.operation in ("add", "sub", "neg", "sum"):
            minus = [found.operation == "neg" or (found.operation == "sub" and k == 1) for k in range(len(x))]
            return self._sum([(k, Fraction(-1 if m else 1)) for k, m in zip(x, minus)], depth)
        if found.operation in ("mul", "div"):
            for k, other in ((0, 1), (1, 0)) if found.operation == "mul" else ((1, 0),):
                factor = self._constant(x[k], depth)
                if factor:
                    return self._sum([(x[other], factor if found.operation == "mul" else 1 / factor)], depth)
        return {node: Fraction(1)}

    def _constant(self, node: int, depth: int) -> Fraction | None:
        """The value of a node that is a constant other than 0, also one written as a sum or a quotient."""
        form = self.of(node, depth + 1)
        return form[-1] if form is not None and set(form) == {-1} else None

    def _sum(self, terms: list[tuple[int, Fraction]], depth: int) -> Form | None:
        total: Form = {}
        for node, factor in terms:
            part = self.of(node, depth + 1)
            if part is None:
                return None
            total = _combined(total, part, factor)
        return total if len(total) <= _MOST_TERMS else None


def _combined(a: Form, b: Form, factor: Fraction) -> Form:
    """a + factor · b, without zeros."""
    out = dict(a)
    for node, value in b.items():
        out[node] = out.get(node, Fraction(0)) + factor * value
    return {node: value for node, value in out.items() if value}
