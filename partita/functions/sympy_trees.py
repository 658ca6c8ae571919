"""Sympy trees as graphs, built node by node: nothing is printed, parsed, evaluated or rounded.

Every number of a tree keeps its exact value. One that float64 does not hold becomes a sum or a quotient of float64 numbers that
is exact in real arithmetic: 2⁵³ + 1, 1/3; π is 4 atan 1 and e is exp 1.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import reduce
from typing import Any

from partita.errors import ExpressionError
from partita.functions.branches import Truth
from partita.functions.graph import Graph, GraphBuilder
from partita.functions.operations import MAX_EXPONENT

__all__ = ["from_sympy", "is_sympy"]

MAX_BITS = 1000  # of a numerator or denominator, before both are divided by a power of 2
_SAME_NAME = {
    **{name: name for name in ("exp", "log", "sin", "cos", "tan", "atan", "tanh", "erf")},
    **{name: name for name in ("asinh", "acosh", "atanh", "floor")},
    "Abs": "abs",
}


def is_sympy(function: Any) -> bool:
    """Whether this is a sympy expression, a matrix of them, or a list of them; sympy itself is never imported here."""
    sympy = sys.modules.get("sympy")
    if sympy is None:
        return False
    parts = function if isinstance(function, (list, tuple)) and function else [function]
    return all(isinstance(p, (sympy.Expr, sympy.MatrixBase)) for p in parts)


def from_sympy(tree: Any, variables: Sequence[str], aliases: Mapping[str, str] | None = None) -> Graph:
    """The graph of a sympy expression; of a column matrix or a list as a vector, of another matrix as (tokens, dim).

    Symbols are the variables or their aliases, by name. Numbers are exact: integers and rationals of any length up to 1.8e308,
    floats of any precision, π, e and the golden ratio.

    Raises:
        ExpressionError: a symbol or function is unknown, or a number is too large or too long.

    >>> import sympy
    >>> x = sympy.Symbol("x")
    >>> from_sympy((2**53 + 1) * x + sympy.Rational(1, 3), ["x"]).infix(["x"])
    'sum(1/3, (9007199254740992 + 1)*x)'
    """
    sympy = sys.modules["sympy"]
    names = {name: i for i, name in enumerate(variables)}
    names |= {alias: names[name] for alias, name in (aliases or {}).items() if name in names}
    reader = _Reader(sympy, GraphBuilder(len(variables)), names)
    shape: tuple[int, ...] = ()
    if isinstance(tree, sympy.MatrixBase):
        shape, parts = (tree.shape[0],) if tree.shape[1] == 1 else tuple(tree.shape), list(tree)
    elif isinstance(tree, (list, tuple)):
        shape, parts = (len(tree),), list(tree)
    else:
        parts = [tree]
    return reader.builder.finish([reader.node(p) for p in parts], shape)


class _Reader:
    """One reading of one tree."""

    def __init__(self, sympy: Any, builder: GraphBuilder, names: Mapping[str, int]) -> None:
        self.sympy, self.builder, self.names = sympy, builder, names
        self.add = builder.add
        self.seen: dict[Any, int] = {}

    def node(self, tree: Any) -> int:
        if tree not in self.seen:
            self.seen[tree] = self._read(tree)
        return self.seen[tree]

    def _read(self, tree: Any) -> int:
        s = self.sympy
        if tree.is_Symbol:
            if str(tree) not in self.names:
                known = ", ".join(list(self.names)[:12])
                raise ExpressionError(f"sympy: found the symbol {tree}, expected the variables of this domain: {known}")
            return self.add("input", parameters=(self.names[str(tree)],))
        if tree.is_Rational or tree.is_Float:
            exact = s.Rational(tree)
            return self._rational(Fraction(int(exact.p), int(exact.q)))
        if tree.is_NumberSymbol:
            return self._named_number(tree)
        if tree.is_Add:
            return self.add("sum", *map(self.node, tree.args))
        if tree.is_Mul:
            return self._product(tree)
        if tree.is_Pow:
            return self._power(self.node(tree.base), tree.exp)
        if isinstance(tree, (s.Min, s.Max)):
            operation = "min" if isinstance(tree, s.Min) else "max"
            return reduce(lambda a, b: self.add(operation, a, b), map(self.node, tree.args))
        if isinstance(tree, s.Piecewise):
            return self._piecewise(tree.args)
        return self._function(tree)

    def _function(self, tree: Any) -> int:
        s, name = self.sympy, type(tree).__name__
        if name in _SAME_NAME and isinstance(tree, getattr(s, name)):
            if name == "log" and len(tree.args) != 1:
                raise ExpressionError(f"sympy: found {tree}, expected the natural logarithm")
            return self.add(_SAME_NAME[name], *map(self.node, tree.args))
        if name in ("sinh", "cosh", "coth", "sech", "csch"):
            return self.node(tree.rewrite(s.exp))
        if name in ("sec", "csc", "cot"):
            return self.node(tree.rewrite(s.cos if name == "sec" else s.sin if name == "csc" else s.tan))
        if name == "Heaviside":
            return self._step(
                tree.args[0], above=1, below=0, at=tree.args[1] if len(tree.args) > 1 else s.Rational(1, 2)
            )
        if name == "sign":
            return self._step(tree.args[0], above=1, below=-1, at=s.Integer(0))
        if name == "ceiling":
            return self.add("neg", self.add("floor", self.add("neg", self.node(tree.args[0]))))
        raise ExpressionError(
            f"sympy: found {name} in {str(tree)[:80]}, expected sums, products, powers, exp, log, sin, cos, tan, atan, tanh, "
            "sinh, cosh, asinh, acosh, atanh, erf, Abs, Min, Max, floor, ceiling, sign, Heaviside and Piecewise"
        )

    def _constant(self, value: float) -> int:
        return self.add("const", parameters=(float(value),))

    def _rational(self, value: Fraction) -> int:
        """Exactly this number: a float64, a sum of them, or a quotient of sums."""
        is_binary = value.denominator.bit_count() == 1
        if is_binary and value.denominator.bit_length() <= MAX_BITS:
            return self._sum_of_floats(value)
        excess = max(0, max(value.numerator.bit_length(), value.denominator.bit_length()) - MAX_BITS)
        top, bottom = (Fraction(whole, 1 << excess) for whole in (value.numerator, value.denominator))
        return self.add("div", self._sum_of_floats(top), self._sum_of_floats(bottom))

    def _sum_of_floats(self, value: Fraction) -> int:
        """A multiple of a power of 2 as its nearest float64, plus the nearest to the rest, until nothing is left."""
        terms: list[int] = []
        rest = value
        while rest or not terms:
            try:
                nearest = float(rest)
            except OverflowError:
                nearest = 0.0
            if rest and not nearest:
                digits = max(len(f"{abs(n):x}") for n in value.as_integer_ratio())
                raise ExpressionError(
                    f"sympy: found a number that is too large, too small or too long ({digits:,} hexadecimal digits), expected "
                    "one below 1.8e308 that is a sum of float64 numbers, or a quotient of two such sums: round it first"
                )
            terms.append(self._constant(nearest))
            rest -= Fraction(nearest)
        return reduce(lambda a, b: self.add("add", a, b), terms)

    def _named_number(self, tree: Any) -> int:
        """π = 4 atan 1, e = exp 1, and what sympy writes with roots."""
        if tree is self.sympy.pi:
            return self.add("mul", self._constant(4.0), self.add("atan", self._constant(1.0)))
        if tree is self.sympy.E:
            return self.add("exp", self._constant(1.0))
        with_roots = tree.rewrite(self.sympy.sqrt)
        if with_roots == tree:
            raise ExpressionError(
                f"sympy: found the constant {tree}, expected numbers, pi, E or GoldenRatio; put a sympy.Float in its place"
            )
        return self.node(with_roots)

    def _product(self, tree: Any) -> int:
        """Factors of negative powers go below one line."""
        top, bottom = tree.as_numer_denom()
        if bottom != 1 and bottom.has(self.sympy.Symbol) and top * bottom**-1 == tree:
            return self.add("div", self.node(top), self.node(bottom))
        return reduce(lambda a, b: self.add("mul", a, b), map(self.node, tree.args))

    def _power(self, base: int, exponent: Any) -> int:
        if exponent.is_Integer and abs(int(exponent)) <= MAX_EXPONENT:
            return self.add("pow", base, parameters=(int(exponent),))
        if exponent.is_Rational and exponent.q == 2 and abs(int(exponent.p)) <= MAX_EXPONENT:
            root = self.add("sqrt", base)
            return root if exponent.p == 1 else self.add("pow", root, parameters=(int(exponent.p),))
        return self.add("exp", self.add("mul", self.node(exponent), self.add("log", base)))

    def _step(self, argument: Any, *, above: float, below: float, at: Any) -> int:
        x = self.node(argument)
        not_positive = self.add("where", self.add("neg", x), self.node(at), self._constant(above))
        return self.add("where", x, not_positive, self._constant(below))

    def _piecewise(self, pieces: Sequence[Any]) -> int:
        """The first piece whose condition holds; the last must be for everything else."""
        *first, last = pieces
        if last.cond is not self.sympy.true:
            raise ExpressionError(
                "sympy: found a Piecewise without a last piece for everything else, expected (…, True)"
            )
        result = self.node(last.expr)
        for piece in reversed(first):
            result = self._condition(piece.cond).choose(self.builder, self.node(piece.expr), result)
        return result

    def _condition(self, condition: Any) -> Truth:
        s = self.sympy
        if isinstance(condition, (s.And, s.Or)):
            word = "and" if isinstance(condition, s.And) else "or"
            return reduce(lambda a, b: a.joined(word, b, self.add), map(self._condition, condition.args))
        if isinstance(condition, s.Not):
            return self._condition(condition.args[0]).opposite
        symbols = {s.Ge: ">=", s.Le: "<=", s.Gt: ">", s.Lt: "<"}
        if type(condition) not in symbols:
            raise ExpressionError(f"sympy: found the condition {condition}, expected <, <=, >, >=, And, Or and Not")
        a, b = self.node(condition.lhs), self.node(condition.rhs)
        return Truth.compared(symbols[type(condition)], a, b, self.add, self._literal)

    def _literal(self, node: int) -> float | None:
        found = self.builder.nodes[node]
        return found.parameters[0] if found.operation == "const" else None
