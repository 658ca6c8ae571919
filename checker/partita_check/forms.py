"""Canonical forms: whether two ways to write a function agree, by exact identities alone.

A form is an affine function of atoms with rational coefficients. An atom is an input, a product of powers of forms, or another
operation with the forms of its arguments. Equal forms are equal functions wherever both are defined. The identities are:

- sums, differences, negatives, and products with rational constants are computed;
- a product is a multiset of factors, whatever its order and brackets; a quotient has factors below the line, and an integer
  power has one factor several times. Factors never cancel, so that poles stay. Rational contents are pulled out of factors:
  2x·3y is 6(x·y). Two equal square roots are what is under the root;
- a maximum, or a minimum, is a set of arguments, whatever its order and brackets.

So forms that differ may still be the same function, and nothing is concluded from that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from flint import fmpq

from partita_check.clock import clock
from partita_check.graph import Graph
from partita_check.wiring import Row, Wiring, fraction

__all__ = ["Atoms", "Form", "Unfit", "forms_of", "same_function", "wired_forms"]

ONE = -1  # stands for the constant in a form
MOST_BITS = 1 << 16  # of a coefficient
MOST_TERMS = 500_000  # of all forms that are held at a time
SUMS = ("add", "sum", "sub")
PARTIAL = ("log", "sqrt", "tan", "atanh", "acosh")  # not defined, or not finite, everywhere

Form = dict[int, fmpq]  # atom → coefficient other than 0
Factors = dict[int, tuple[int, int]]  # form → how often it stands above and below the line


class Unfit(Exception):
    """A form outgrew its limits, or divides by 0: nothing can be said."""


class Atoms:
    """Atoms and forms by number: equal ones have equal numbers.

    Attributes:
        conditions: (operation, form of its argument) for operations that need not be defined everywhere.
    """

    def __init__(self) -> None:
        self._atoms: dict[Any, int] = {}
        self._forms: dict[Any, int] = {}
        self._held: list[Form] = []
        self._factors: dict[int, Factors] = {}  # of atoms that are products
        self._roots: dict[int, Form] = {}  # arguments of forms that are square roots
        self._sets: dict[tuple[str, int], set[int]] = {}  # arguments of forms that are maxima or minima
        self.conditions: set[tuple[str, int]] = set()
        self._terms = 0

    def atom(self, *key: Any) -> Form:
        """The form that is this atom alone."""
        return {self._atoms.setdefault(key, len(self._atoms)): fmpq(1)}

    def number(self, form: Form) -> int:
        """The number of a form."""
        key = tuple(sorted(form.items(), key=lambda item: item[0]))
        if key not in self._forms:
            self._terms += len(form)
            if self._terms > MOST_TERMS:
                raise Unfit
            self._forms[key] = len(self._held)
            self._held.append(dict(form))
        return self._forms[key]

    def factors(self, form: Form) -> tuple[fmpq, Factors]:
        """A form that is not constant as a coefficient and factors."""
        lead = form[min(k for k in form if k != ONE)]
        if len(form) == 1:
            (atom,) = form
            if atom in self._factors:
                return lead, self._factors[atom]
        return lead, {self.number(scaled(form, 1 / lead)): (1, 0)}

    def product(self, coefficient: fmpq, factors: Factors) -> Form:
        """The form of a product of factors."""
        for k, powers in factors.items():
            if k in self._roots and max(powers) > 1:  # pairs of roots
                above, below = (divmod(n, 2) for n in powers)
                single = {**factors, k: (above[1], below[1])}
                rest = self.product(coefficient, {j: pair for j, pair in single.items() if any(pair)})
                for exponent in (above[0], -below[0]):
                    rest = self.times(rest, self.power(self._roots[k], exponent))
                return rest
        if not factors:
            return {ONE: coefficient}
        if list(factors.values()) == [(1, 0)]:
            return scaled(self._held[next(iter(factors))], coefficient)
        found = self.atom("product", tuple(sorted((k, *powers) for k, powers in factors.items())))
        self._factors[next(iter(found))] = factors
        return scaled(found, coefficient)

    def power(self, form: Form, exponent: int) -> Form:
        """`form^n`; negative exponents put its factors below the line."""
        if constant(form):
            return shortened({ONE: raised(form.get(ONE, fmpq(0)), exponent)})
        if exponent == 0:
            return {ONE: fmpq(1)}
        (coefficient, factors), n = self.factors(form), abs(exponent)
        found = {k: (a * n, b * n) if exponent > 0 else (b * n, a * n) for k, (a, b) in factors.items()}
        self.conditions |= {("recip", k) for k, (_, below) in found.items() if below}
        return self.product(raised(coefficient, exponent), found)

    def times(self, a: Form, b: Form) -> Form:
        for one, other in ((a, b), (b, a)):
            if constant(one):
                return scaled(other, one.get(ONE, fmpq(0)))
        (c, first), (d, second) = self.factors(a), self.factors(b)
        merged = dict(first)
        for k, (above, below) in second.items():
            x, y = merged.get(k, (0, 0))
            merged[k] = (x + above, y + below)
        return self.product(c * d, merged)

    def operation(self, name: str, args: Sequence[Form], params: tuple[Any, ...]) -> Form:
        """Any other operation: an atom."""
        numbers = [self.number(form) for form in args]
        if name in ("min", "max"):
            flat = set[int]()
            for number in numbers:
                flat |= self._sets.get((name, number), {number})
            if len(flat) == 1:
                return self._held[flat.pop()]
            found = self.atom(name, tuple(sorted(flat)))
            self._sets[name, self.number(found)] = flat
            return found
        self.conditions |= {(name, numbers[0])} if name in PARTIAL else set()
        found = self.atom(name, tuple(numbers), params)
        if name == "sqrt":
            self._roots[self.number(found)] = args[0]
        return found


def constant(form: Form) -> bool:
    return all(k == ONE for k in form)


def shortened(form: Form) -> Form:
    """Without coefficients that are 0."""
    return {k: c for k, c in form.items() if c != 0}


def raised(x: fmpq, exponent: int) -> fmpq:
    if x.height_bits() * abs(exponent) > MOST_BITS or (exponent < 0 and x == 0):
        raise Unfit
    return x**exponent


def scaled(form: Form, by: fmpq) -> Form:
    if by == 1:
        return form
    found = {k: c * by for k, c in form.items()} if by != 0 else {}
    if any(c.height_bits() > MOST_BITS for c in found.values()):
        raise Unfit
    return found


def combined(parts: Sequence[tuple[fmpq, Form]], own: bool = False) -> Form:
    """`Σ c_i form_i`; with `own` the first form may be changed in place."""
    weight, first = parts[0]
    total = scaled(first, weight)
    total = total if own or total is not first else dict(total)
    for weight, form in parts[1:]:
        for k, c in form.items():
            found = total.get(k, 0) + weight * c
            if found == 0:
                total.pop(k, None)
            else:
                total[k] = found
                if found.height_bits() > MOST_BITS:
                    raise Unfit
    return total


def forms_of(graph: Graph, inputs: Sequence[Form], atoms: Atoms) -> list[Form]:
    """The forms of the outputs of a graph, with forms in the place of its inputs."""
    uses, waiting, seen = Counter(graph.outputs), [*graph.outputs], set[int]()
    while waiting:
        k = waiting.pop()
        if k not in seen:
            seen.add(k)
            uses.update(graph.nodes[k][1])
            waiting += graph.nodes[k][1]
    once = {k for k, count in uses.items() if count == 1}
    found, held, sums = dict[int, Form](), 0, set[int]()  # a sum that is read once is nobody else's
    for k in sorted(seen):
        clock.tick()
        name, args, params = graph.nodes[k]
        own = bool(args) and args[0] in sums and args[0] in once
        sums |= {k} if name in SUMS else set()
        found[k] = _form(name, [found[a] for a in args], params, inputs, atoms, own)
        held += len(found[k])
        for a in args:  # forms that nothing needs any more are dropped
            uses[a] -= 1
            if uses[a] == 0:
                held -= len(found.pop(a, {}))
        if held > MOST_TERMS:
            raise Unfit
    return [found[k] for k in graph.outputs]


def _form(
    name: str, args: list[Form], params: tuple[Any, ...], inputs: Sequence[Form], atoms: Atoms, own: bool
) -> Form:
    if name == "input":
        found: Form = inputs[params[0]]
        return found
    if name == "const":
        return shortened({ONE: fraction(params[0])})
    if name in SUMS:
        last = -1 if name == "sub" else 1
        return combined([(fmpq(1), args[0]), *((fmpq(last), form) for form in args[1:])], own)
    if name == "neg":
        return scaled(args[0], fmpq(-1))
    if name == "mul":
        return atoms.times(args[0], args[1])
    if name == "div":
        return atoms.times(args[0], atoms.power(args[1], -1))
    if name == "pow":
        return atoms.power(args[0], params[0])
    return atoms.operation(name, args, params)


def wired_forms(wiring: Wiring, graphs: Sequence[Graph], atoms: Atoms) -> list[Form]:
    """The forms of the outputs of a wiring, with its exact coefficients and functions in the place of heads."""
    channels = [atoms.atom("input", i) for i in range(wiring.inputs)]

    def read(row: Row) -> Form:
        weights, bias = row.fractions()
        parts = [(w, channels[j]) for w, j in zip(weights, row.columns)]
        return combined([(fmpq(1), {ONE: bias} if bias else {}), *parts])

    for use in wiring.uses:
        clock.tick()
        channels += forms_of(graphs[use.head], [read(row) for row in use.rows], atoms)
    return [read(row) for row in wiring.output]


def same_function(graph: Graph, wiring: Wiring, graphs: Sequence[Graph]) -> str:
    """Why the wiring is not shown to compute the graph; an empty string if it does.

    An operation of the graph that may be undefined must occur in the wiring too, where the heads' proofs show that it is
    defined; or ("undefined") its caller has to show that the graph has finite values.
    """
    atoms = Atoms()
    try:
        theirs = wired_forms(wiring, graphs, atoms)
        known = set(atoms.conditions)
        ours = forms_of(graph, [atoms.atom("input", i) for i in range(graph.inputs)], atoms)
    except Unfit:
        return "its canonical form outgrows the limits, or divides by 0"
    for place, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if a != b:
            return f"output {place} of the wiring, with exact parts, was not shown to be that of the function"
    return "" if atoms.conditions <= known else "undefined"
