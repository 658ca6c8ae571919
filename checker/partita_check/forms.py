"""Canonical forms: whether two ways to write a function agree, by exact identities alone.

A form is an affine function of atoms with rational coefficients. An atom is an input, a product of powers of forms, or another
operation with the forms of its arguments. Equal forms are equal functions wherever both are defined. The identities are:

- sums, differences, negatives, and products with rational constants are computed;
- a product is a multiset of factors, whatever its order and brackets; a quotient has factors below the line, and an integer
  power has one factor several times. Factors never cancel, so that poles stay. Rational contents are pulled out of factors:
  2x·3y is 6(x·y). Two equal square roots are what is under the root;
- a maximum, or a minimum, is a set of arguments, whatever its order and brackets.

Where forms are known to be positive, their powers have any rational exponents, which add up and may cancel: roots are powers,
the logarithm of a product is a sum, exp(q log a) is a^q, and exp(u)·exp(v) is exp(u + v). What the terms of a sum have in
common goes in front of it, so that a + b and a·(1 + b/a) are the same.

So forms that differ may still be the same function, and nothing is concluded from that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
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

MOST_EXPANDED = 64  # terms of a sum whose products are multiplied out
MOST_POWER = 64  # of a number that is multiplied out

Form = dict[int, fmpq]  # atom → coefficient other than 0
# form → how often it stands above and below the line; for one that is known to be positive, its exponent and 0
Factors = dict[int, tuple[fmpq, fmpq]]
ONCE = (fmpq(1), fmpq(0))


class Unfit(Exception):
    """A form outgrew its limits, or divides by 0: nothing can be said."""


class Atoms:
    """Atoms and forms by number: equal ones have equal numbers.

    Attributes:
        conditions: (operation, form of its argument) for operations that need not be defined everywhere.
        defined: whether roots and logarithms that are read are known to be defined: a root without a value counts as 0 elsewhere,
            so that √a·√a is a only where it is defined, and the argument of a logarithm is then positive.
        learns: whether the arguments of such logarithms are taken as positive from now on.
    """

    def __init__(self) -> None:
        self.defined, self.learns = True, False
        self._atoms: dict[Any, int] = {}
        self._forms: dict[Any, int] = {}
        self._held: list[Form] = []
        self._factors: dict[int, Factors] = {}  # of atoms that are products
        self._roots: dict[int, Form] = {}  # arguments of forms that are square roots
        self._sets: dict[tuple[str, int], set[int]] = {}  # arguments of forms that are maxima or minima
        self._exps: dict[int, Form] = {}  # arguments of forms that are exp of something
        self._logs: dict[int, int] = {}  # atoms that are logarithms: the forms of their arguments
        self._positive: set[int] = set()  # forms that are known to be positive
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

    def assume_positive(self, form: Form) -> None:
        """Take it as known that a form is positive, and so its one factor whose sign is not known yet."""
        if constant(form):
            return
        coefficient, factors = self.factors(form)
        unknown = [k for k in factors if not self.is_positive(k)]
        if len(unknown) == 1 and factors[unknown[0]] == ONCE:
            signed = scaled(self._held[unknown[0]], fmpq(1 if coefficient > 0 else -1))
            self._positive.add(self.number(signed))

    def is_positive(self, k: int) -> bool:
        """Whether a form is known to be positive: by assumption, or as a sum of positive terms."""
        if k in self._positive or k in self._exps:
            return True
        form = self._held[k]
        if all(c > 0 for c in form.values()) and all(
            atom == ONE or all(j != k and self.is_positive(j) for j in self._monomial(atom)) for atom in form
        ):
            self._positive.add(k)
        return k in self._positive

    def _monomial(self, atom: int) -> Factors:
        """An atom as a product of powers."""
        if atom == ONE:
            return {}
        if atom not in self._factors:
            return {self.number({atom: fmpq(1)}): ONCE}
        return self._powers(atom)

    def _powers(self, atom: int) -> Factors:
        """The factors of a product. Those that are known to be positive now, and were not when it was made, have one exponent."""
        found = Factors()
        for k, (above, below) in self._factors[atom].items():
            if below == 0 or not self.is_positive(k):
                found[k] = above, below
            elif above != below:
                found[k] = above - below, fmpq(0)
        return found

    def factors(self, form: Form) -> tuple[fmpq, Factors]:
        """A form that is not constant as a coefficient and factors."""
        lead = form[min(k for k in form if k != ONE)]
        if len(form) == 1:
            (atom,) = form
            if atom in self._factors:
                return lead, self._powers(atom)
        elif common := self._common(form):
            rest = combined([(c, self._quotient(atom, common)) for atom, c in form.items()])
            if not constant(rest):
                coefficient, factors = self.factors(rest)
                return coefficient, _merged(factors, common)
        size = abs(lead)
        for sign in (1, -1):
            if self.is_positive(k := self.number(scaled(form, sign / size))):
                return sign * size, {k: ONCE}
        return lead, {self.number(scaled(form, 1 / lead)): ONCE}

    def _common(self, form: Form) -> Factors:
        """The powers of positive forms that all terms of a sum have in common, those below the line of any among them."""
        terms = [self._monomial(atom) for atom in form]
        bases = {k for term in terms for k in term if self.is_positive(k) and k not in self._exps}
        least = {k: min(term[k][0] if k in term else fmpq(0) for term in terms) for k in bases}
        return {k: (exponent, fmpq(0)) for k, exponent in least.items() if exponent != 0}

    def _quotient(self, atom: int, common: Factors) -> Form:
        """A term divided by what is common, sums in it multiplied out."""
        left = _merged(self._monomial(atom), {k: (-exponent, fmpq(0)) for k, (exponent, _) in common.items()})
        sums = {k: pair for k, pair in left.items() if self._is_expanded(k, pair)}
        found = self.product(fmpq(1), {k: pair for k, pair in left.items() if k not in sums})
        for k, (exponent, _) in sums.items():
            for _ in range(int(exponent.p)):
                terms = [
                    (c * d, self.times({i: fmpq(1)}, {j: fmpq(1)}))
                    for i, c in found.items()
                    for j, d in self._held[k].items()
                ]
                if len(terms) > MOST_EXPANDED:
                    raise Unfit
                found = combined(terms)
        return found

    def _is_expanded(self, k: int, pair: tuple[fmpq, fmpq]) -> bool:
        return len(self._held[k]) > 1 and self.is_positive(k) and pair[0] > 0 and pair[0].q == 1

    def product(self, coefficient: fmpq, factors: Factors) -> Form:
        """The form of a product of factors."""
        for k, powers in factors.items():
            if k in self._roots and max(powers) >= 2:  # pairs of roots
                above, below = (fmpq((n / 2).floor()) for n in powers)
                single = {**factors, k: (powers[0] - 2 * above, powers[1] - 2 * below)}
                rest = self.product(coefficient, {j: pair for j, pair in single.items() if any(pair)})
                for exponent in (above, -below):
                    rest = self.times(rest, self.power(self._roots[k], exponent))
                return rest
        coefficient, factors = self._simplified(coefficient, factors)
        if not factors:
            return {ONE: coefficient}
        if list(factors.values()) == [ONCE]:
            return scaled(self._held[next(iter(factors))], coefficient)
        found = self.atom("product", tuple(sorted((k, str(a), str(b)) for k, (a, b) in factors.items())))
        self._factors[next(iter(found))] = factors
        return scaled(found, coefficient)

    def _simplified(self, coefficient: fmpq, factors: Factors) -> tuple[fmpq, Factors]:
        """Exponents of positive forms in one number, whole powers of numbers multiplied out, one exp for all."""
        found, exponents = Factors(), list[tuple[fmpq, Form]]()
        for k, (above, below) in factors.items():
            net = above - below
            if k in self._exps:
                exponents.append((net, self._exps[k]))
            elif constant(self._held[k]):
                whole = net.floor()
                if abs(whole) > MOST_POWER:
                    raise Unfit
                coefficient *= raised(self._held[k][ONE], int(whole))
                found |= {k: (net - whole, fmpq(0))} if net != whole else {}
            elif self.is_positive(k):
                found |= {k: (net, fmpq(0))} if net != 0 else {}
            else:
                found[k] = above, below
        return coefficient, found | self._exp_atom(combined([(fmpq(1), {}), *exponents]))

    def power(self, form: Form, exponent: int | fmpq) -> Form:
        """`form^q`; negative exponents put its factors below the line. Rational ones are for positive forms only."""
        q = fmpq(exponent)
        if constant(form) and q.q == 1:
            return shortened({ONE: raised(form.get(ONE, fmpq(0)), int(q.p))})
        if q == 0:
            return {ONE: fmpq(1)}
        coefficient, factors = (form.get(ONE, fmpq(0)), Factors()) if constant(form) else self.factors(form)
        if q.q != 1:
            factors, coefficient = _merged(factors, self._number_factor(coefficient)), fmpq(1)
        found = Factors()
        for k, (a, b) in factors.items():
            if self.is_positive(k) or constant(self._held[k]):
                found[k] = (a - b) * q, fmpq(0)
            else:
                found[k] = (a * q, b * q) if q > 0 else (-b * q, -a * q)
        self.conditions |= {("recip", k) for k, (_, below) in found.items() if below}
        return self.product(raised(coefficient, int(q.p)) if q.q == 1 else coefficient, found)

    def _number_factor(self, x: fmpq) -> Factors:
        return {} if x == 1 else {self.number({ONE: x}): ONCE}

    def times(self, a: Form, b: Form) -> Form:
        for one, other in ((a, b), (b, a)):
            if constant(one):
                return scaled(other, one.get(ONE, fmpq(0)))
        (c, first), (d, second) = self.factors(a), self.factors(b)
        return self.product(c * d, _merged(first, second))

    def _all_positive(self, form: Form) -> bool:
        if constant(form):
            return form.get(ONE, fmpq(0)) > 0
        coefficient, factors = self.factors(form)
        return coefficient > 0 and all(map(self.is_positive, factors))

    def logarithm(self, form: Form) -> Form:
        """The logarithm of a form that is known to be positive: a sum over its factors."""
        coefficient, factors = (form[ONE], Factors()) if constant(form) else self.factors(form)
        if coefficient < 1:
            parts = [(fmpq(-1), self._log_atom({ONE: 1 / coefficient}))]
        else:
            parts = [] if coefficient == 1 else [(fmpq(1), self._log_atom({ONE: coefficient}))]
        for k, (exponent, _) in factors.items():
            parts.append((exponent, self._exps[k] if k in self._exps else self._log_atom(self._held[k])))
        return combined([(fmpq(1), {}), *parts])

    def _log_atom(self, form: Form) -> Form:
        found = self.atom("log", (self.number(form),), ())
        self._logs[next(iter(found))] = self.number(form)
        return found

    def exponential(self, form: Form) -> Form:
        """exp of a form: powers of what it has logarithms of, times exp of the rest."""
        factors, rest = Factors(), dict(form)
        for atom, c in form.items():
            k = self._logs.get(atom)
            if k is not None and (constant(self._held[k]) or self.is_positive(k)):
                del rest[atom]
                factors[k] = c, fmpq(0)
        return self.product(fmpq(1), factors | self._exp_atom(rest))

    def _exp_atom(self, form: Form) -> Factors:
        """exp of a form without known logarithms, as a factor."""
        if not form:
            return {}
        k = self.number(self.atom("exp", (self.number(form),), ()))
        self._exps[k] = form
        return {k: ONCE}

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
        if name == "exp":
            return self.exponential(args[0])
        if name == "log" and self.learns and self.defined:
            self.assume_positive(args[0])
        if name in ("log", "sqrt") and self._all_positive(args[0]):
            return self.logarithm(args[0]) if name == "log" else self.power(args[0], fmpq(1, 2))
        self.conditions |= {(name, numbers[0])} if name in PARTIAL and self.defined else set()
        found = self.atom(name, tuple(numbers), params)
        if name == "sqrt" and self.defined:
            self._roots[self.number(found)] = args[0]
        return found


def _merged(first: Factors, second: Factors) -> Factors:
    """The factors of a product of two."""
    found = dict(first)
    for k, (above, below) in second.items():
        x, y = found.get(k, (fmpq(0), fmpq(0)))
        found[k] = (x + above, y + below)
    return {k: pair for k, pair in found.items() if any(pair)}


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


def wired_forms(wiring: Wiring, graphs: Sequence[Graph], atoms: Atoms, undefined: Collection[int] = ()) -> list[Form]:
    """The forms of the outputs of a wiring, with its exact coefficients and functions in the place of heads.

    `undefined` are heads whose functions are not known to be defined wherever they are read.
    """
    channels = [atoms.atom("input", i) for i in range(wiring.inputs)]

    def read(row: Row) -> Form:
        weights, bias = row.fractions()
        parts = [(w, channels[j]) for w, j in zip(weights, row.columns)]
        return combined([(fmpq(1), {ONE: bias} if bias else {}), *parts])

    for use in wiring.uses:
        clock.tick()
        atoms.defined = use.head not in undefined
        channels += forms_of(graphs[use.head], [read(row) for row in use.rows], atoms)
    atoms.defined = True
    return [read(row) for row in wiring.output]


def same_function(
    graph: Graph,
    wiring: Wiring,
    graphs: Sequence[Graph],
    positive: Sequence[int] = (),
    undefined: Collection[int] = (),
) -> str:
    """Why the wiring is not shown to compute the graph; an empty string if it does. `positive` are inputs that are, and
    `undefined` are heads whose functions are not known to be defined wherever they are read.

    An operation of the graph that may be undefined must occur in the wiring too, where the heads' proofs show that it is
    defined; or ("undefined") its caller has to show that the graph has finite values.
    """
    atoms = Atoms()
    try:
        for i in positive:
            atoms.assume_positive(atoms.atom("input", i))
        atoms.learns = True
        wired_forms(wiring, graphs, atoms, undefined)  # now all logarithms are known
        theirs = wired_forms(wiring, graphs, atoms, undefined)
        known, atoms.learns = set(atoms.conditions), False
        ours = forms_of(graph, [atoms.atom("input", i) for i in range(graph.inputs)], atoms)
    except Unfit:
        return "its canonical form outgrows the limits, or divides by 0"
    for place, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if a != b:
            return f"output {place} of the wiring, with exact parts, was not shown to be that of the function"
    return "" if atoms.conditions <= known else "undefined"
