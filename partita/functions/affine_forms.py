"""Graphs as exact affine forms of atoms, so that two ways to write one function can be compared.

A form is `constant + Σ coefficient · atom` with rational numbers. An atom is an input of the function, or an operation applied to
forms. Equal atoms are stored once and have one number, so two functions are equal where both are defined if their forms are equal.

Every rule is an identity of real numbers, valid wherever both sides are defined:

    add, sub, neg, sum   sums of forms
    mul, div             by a rational number: multiples of forms; quotients of rational numbers are rational numbers
    mul                  otherwise: the atom `product` of two or more forms in any order, a product in a product taken apart.
                         Every factor is divided by its leading coefficient, which goes in front: (2x)·(3y) = 6·(x·y).
    div                  otherwise: a/b = a · recip(b)
    recip(b)             1/b, b divided by its leading coefficient; recip(a·b) = recip(a)·recip(b) and recip(recip(a)) = a
    pow(a, k)            1 for k = 0, a for k = 1, a rational number for a rational number; pow(sqrt(a), 2) = a
    max, min             in any order, a maximum in a maximum taken apart, and a minimum in a minimum
    everything else      an atom: the operation, its forms in their order, its parameters
The leading coefficient of a form is that of its atom with the smallest number. Sums are not multiplied out, x·x is not pow(x, 2),
and functions of numbers such as sqrt(2) are atoms.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property

from partita.errors import UnsupportedError
from partita.functions.graph import Graph
from partita.functions.operations import Node, encode

__all__ = ["Atom", "Form", "Interner", "Pending", "forms_of"]

_MOST_BITS = 4096  # of a numerator or denominator: two float64 numbers of opposite ends of the range take 2100
_MOST_TERMS = 2_000_000  # of the arguments of all atoms together
_ZERO, _ONE = Fraction(0), Fraction(1)


@dataclass(frozen=True)
class Form:
    """`constant + Σ_k terms[k] · (atom k)`, exactly. No coefficient is 0.

    Args:
        constant: the number added.
        terms: coefficients by the number of the atom, or of whatever else is combined (an input, a channel).

    >>> x, y = Form.of(0), Form.of(1)
    >>> print(x.scaled(Fraction(2)).plus(y, Fraction(-1, 3)))
    2·#0 - 1/3·#1
    """

    constant: Fraction = _ZERO
    terms: Mapping[int, Fraction] = field(default_factory=dict)

    @staticmethod
    def of(atom: int) -> Form:
        """One atom."""
        return Form(_ZERO, {atom: _ONE})

    @cached_property
    def _hash(self) -> int:
        return hash((self.constant, frozenset(self.terms.items())))

    def __hash__(self) -> int:
        return self._hash

    def __str__(self) -> str:
        parts = [(c, f"#{k}") for k, c in sorted(self.terms.items())]
        parts += [(self.constant, "")] if self.constant or not parts else []
        texts = [
            f"{'-' if c < 0 else '+'} {name if name and abs(c) == 1 else f'{abs(c)}·{name}'.rstrip('·')}"
            for c, name in parts
        ]
        return " ".join(texts).removeprefix("+ ")

    @property
    def lead(self) -> Fraction:
        """The leading coefficient: that of the smallest number; 1 for a constant."""
        return self.terms[min(self.terms)] if self.terms else _ONE

    @property
    def single(self) -> int | None:
        """The atom that this form is, with the coefficient 1 and nothing added; None for every other form."""
        if len(self.terms) != 1 or self.constant:
            return None
        ((atom, coefficient),) = self.terms.items()
        return atom if coefficient == 1 else None

    def scaled(self, factor: Fraction) -> Form:
        """`factor · self`."""
        if factor == 1:
            return self
        if not factor:
            return Form()
        return Form(self.constant * factor, {k: c * factor for k, c in self.terms.items()})

    def plus(self, other: Form, factor: Fraction = _ONE) -> Form:
        """`self + factor · other`."""
        return Form.total([(_ONE, self), (factor, other)])

    @staticmethod
    def total(parts: Iterable[tuple[Fraction, Form]]) -> Form:
        """`Σ factor · form`."""
        constant, terms = _ZERO, dict[int, Fraction]()
        for factor, form in parts:
            constant = _added(terms, constant, form, factor)
        return Form(constant, terms)

    def substituted(self, forms: Sequence[Form] | Mapping[int, Form]) -> Form:
        """`constant + Σ_k terms[k] · forms[k]`."""
        return Form.total([(_ONE, Form(self.constant)), *((c, forms[k]) for k, c in self.terms.items())])


def _added(terms: dict[int, Fraction], constant: Fraction, form: Form, factor: Fraction) -> Fraction:
    """Adds `factor · form` to the terms in place; returns the new constant."""
    if not factor:
        return constant
    for k, c in form.terms.items():
        change = c if factor == 1 else c * factor
        found = terms.get(k)
        if found is None:
            terms[k] = change
        elif found == -change:
            del terms[k]
        else:
            terms[k] = found + change
    return constant + factor * form.constant if form.constant else constant


@dataclass(frozen=True)
class Atom:
    """An input (`"input"`, its index a parameter), or an operation of forms; `product` and `recip` beside those of graphs."""

    operation: str
    arguments: tuple[Form, ...] = ()
    parameters: tuple[int | float, ...] = ()


class Interner:
    """The atoms of one comparison, each once. The arguments of an atom consist of atoms with smaller numbers.

    Attributes:
        atoms: by their numbers.
        spelled: for a `product` and a `recip`, the arguments as they were first written, before the leading coefficient went in
            front. They are multiples of the arguments and may have simpler coefficients.
        defined: whether roots and logarithms that are applied are known to be defined. Where a root has no value, proofs count it
            as 0, so that pow(sqrt(a), 2) = a holds only where it has one.

    >>> interner = Interner()
    >>> x, y = interner.input(0), interner.input(1)
    >>> interner.product([x.scaled(Fraction(2)), y]) == interner.product([y, x]).scaled(Fraction(2))
    True
    """

    def __init__(self) -> None:
        self.atoms: list[Atom] = []
        self.defined = True
        self._doubtful: set[int] = set()  # atoms that were applied where they are not known to be defined
        self.spelled: dict[int, tuple[Form, ...]] = {}
        self._numbers: dict[object, int] = {}
        self._terms = 0

    def input(self, index: int) -> Form:
        """The form of one input of the function."""
        return Form.of(self.number("input", (), (index,)))

    def apply(self, operation: str, arguments: Sequence[Form], parameters: tuple[int | float, ...] = ()) -> Form:
        """The form of an operation of the graph, applied to forms.

        Raises:
            UnsupportedError: a coefficient needs more than 4096 bits.
        """
        if operation in ("product", "mul"):
            return self.product(arguments)
        if operation == "div":
            return self.product([arguments[0], self.recip(arguments[1])])
        if operation == "recip":
            return self.recip(arguments[0])
        if operation in ("max", "min"):
            return self.extreme(operation, arguments)
        if operation == "pow":
            return self.power(arguments[0], int(parameters[0]))
        if operation in _LINEAR:
            return Form.total(_weighted(operation, arguments))
        found = self.number(operation, tuple(arguments), parameters)
        if not self.defined:
            self._doubtful.add(found)
        return Form.of(found)

    def assume_positive(self, form: Form) -> None:
        """Take it as known that a form is positive. This class makes no use of it; `Logarithms` does."""

    def product(self, factors: Sequence[Form]) -> Form:
        """The product of forms."""
        pending = Pending("product")
        for factor in factors:
            self.multiply(pending, factor)
        return self.finished(pending)

    def recip(self, form: Form) -> Form:
        """1 / form; an atom for the form 0, which has no reciprocal."""
        if not form.terms:
            return Form(1 / form.constant) if form.constant else Form.of(self.number("recip", (form,), ()))
        lead = form.lead
        unit = form.scaled(1 / lead)
        inner = None if unit.single is None else self.atoms[unit.single]
        if inner is not None and inner.operation == "recip" and inner.arguments[0].terms:
            return inner.arguments[0].scaled(1 / lead)
        if inner is not None and inner.operation == "product":
            factors = self.spelled[unit.single or 0]
            return self.product([self.recip(factor).scaled(factor.lead) for factor in factors]).scaled(1 / lead)
        number = self.number("recip", (unit,), ())
        self.spelled.setdefault(number, (form,))
        return Form(_ZERO, {number: 1 / lead})

    def extreme(self, operation: str, forms: Sequence[Form]) -> Form:
        """The maximum or minimum of forms."""
        pending = Pending(operation)
        for form in forms:
            self.compare(pending, form)
        return self.finished(pending)

    def power(self, form: Form, exponent: int) -> Form:
        """A form to an integer power."""
        if exponent in (0, 1):
            return form if exponent else Form(_ONE)
        if not form.terms and (form.constant or exponent > 0):
            return Form(_checked(form.constant**exponent))
        single = form.single
        is_root = single is not None and self.atoms[single].operation == "sqrt" and single not in self._doubtful
        if exponent == 2 and single is not None and is_root:
            return self.atoms[single].arguments[0]
        return Form.of(self.number("pow", (form,), (exponent,)))

    def multiply(self, pending: Pending, form: Form) -> None:
        """One more factor."""
        if not form.terms:
            pending.factor *= form.constant
            return
        lead = form.lead
        pending.factor = _checked(pending.factor * lead)
        unit = form.scaled(1 / lead)
        single = unit.single
        if single is not None and self.atoms[single].operation == "product":
            pending.parts += self.atoms[single].arguments
            pending.spelled += self.spelled[single]
        else:
            pending.parts.append(unit)
            pending.spelled.append(form)

    def compare(self, pending: Pending, form: Form) -> None:
        """One more argument of a maximum or minimum."""
        single = form.single
        if single is not None and self.atoms[single].operation == pending.operation:
            pending.parts += self.atoms[single].arguments
        else:
            pending.parts.append(form)

    def finished(self, pending: Pending) -> Form:
        """The form of a product, a maximum or a minimum whose parts are complete."""
        if pending.operation != "product":
            return Form.of(self.number(pending.operation, tuple(sorted(pending.parts, key=_order)), ()))
        if len(pending.parts) < 2 or not pending.factor:
            return pending.parts[0].scaled(pending.factor) if pending.parts else Form(pending.factor)
        pairs = sorted(zip(pending.parts, pending.spelled), key=lambda pair: _order(pair[0]))
        number = self.number("product", tuple(unit for unit, _ in pairs), ())
        self.spelled.setdefault(number, tuple(form for _, form in pairs))
        return Form(_ZERO, {number: pending.factor})

    def number(self, operation: str, arguments: tuple[Form, ...], parameters: tuple[int | float, ...]) -> int:
        """The number of an atom, new or known."""
        key = (operation, arguments, tuple(map(encode, parameters)))
        if key not in self._numbers:
            self._terms += sum(1 + len(form.terms) for form in arguments)
            if self._terms > _MOST_TERMS:
                raise UnsupportedError(
                    f"the exact forms of the function's parts take more than {_MOST_TERMS:,} terms, because they share many",
                    "Use the function as a whole, or compile its parts one by one.",
                )
            for form in arguments:
                _checked(form.constant)
                for c in form.terms.values():
                    _checked(c)
            self._numbers[key] = len(self.atoms)
            self.atoms.append(Atom(operation, arguments, parameters))
        return self._numbers[key]


@dataclass
class Pending:
    """A product, maximum or minimum to which parts may still be added: a chain of n operations is then one atom, not n."""

    operation: str
    factor: Fraction = _ONE
    parts: list[Form] = field(default_factory=list)
    spelled: list[Form] = field(default_factory=list)


def _order(form: Form) -> tuple[list[tuple[int, Fraction]], Fraction]:
    return sorted(form.terms.items()), form.constant


def _checked(number: Fraction) -> Fraction:
    if max(number.numerator.bit_length(), number.denominator.bit_length()) > _MOST_BITS:
        raise UnsupportedError(
            f"the exact coefficients of the function need more than {_MOST_BITS} bits",
            "Write it with fewer nested products of constants.",
        )
    return number


_LINEAR = ("add", "sub", "neg", "sum")
_CHAINS = {"mul": "product", "div": "product", "max": "max", "min": "min"}


def _weighted(operation: str, arguments: Sequence[Form]) -> list[tuple[Fraction, Form]]:
    first = -_ONE if operation == "neg" else _ONE
    rest = -_ONE if operation == "sub" else _ONE
    return [(rest if number else first, form) for number, form in enumerate(arguments)]


def forms_of(graph: Graph, inputs: Sequence[Form], interner: Interner, positive: Collection[int] = ()) -> list[Form]:
    """The forms of the outputs of a graph whose inputs are the given forms.

    Time and memory are about linear in the size of the graph: a chain of sums or products is gathered in place.

    Args:
        graph: the function.
        inputs: one form for each input: `interner.input(i)` for the function itself, other forms for a composition.
        interner: collects the atoms.
        positive: nodes whose values are known to be positive, which `interner` is told.

    Raises:
        UnsupportedError: a coefficient needs more than 4096 bits, or the forms more than 2,000,000 terms.

    >>> from partita.functions import parse
    >>> interner = Interner()
    >>> inputs = [interner.input(0), interner.input(1)]
    >>> a, b = (forms_of(parse(text, ["x", "y"]), inputs, interner) for text in ("2*x*(3*y) + x/y", "x*(1/y) + 6*(y*x)"))
    >>> a == b
    True
    """
    return _Walk(graph, inputs, interner, positive).outputs()


class _Walk:
    """One walk over a graph. A value that nothing else reads is extended in place by the operation that reads it."""

    def __init__(self, graph: Graph, inputs: Sequence[Form], interner: Interner, positive: Collection[int]) -> None:
        self.graph, self.inputs, self.interner, self.positive = graph, inputs, interner, positive
        self.values: dict[int, Form | Pending] = {}
        self.left = [0] * len(graph.nodes)  # reads to come
        for k in (*(k for node in graph.nodes for k in node.arguments), *graph.outputs):
            self.left[k] += 1
        self.once = [reads == 1 for reads in self.left]  # nothing else holds such a value
        self.owned: set[int] = set()  # sums that were made by this walk, so that they may be changed

    def outputs(self) -> list[Form]:
        for position, node in enumerate(self.graph.nodes):
            if self.left[position]:
                self.values[position] = self._value(position, node)
            for k in node.arguments:
                self.left[k] -= 1
                if not self.left[k]:
                    self.values.pop(k, None)
        return [self._form(k) for k in self.graph.outputs]

    def _form(self, k: int) -> Form:
        """The value of a node as a form; a pending product is finished, once."""
        value = self.values[k]
        if isinstance(value, Pending):
            value = self.values[k] = self.interner.finished(value)
        if k in self.positive:
            self.interner.assume_positive(value)
        return value

    def _value(self, position: int, node: Node) -> Form | Pending:
        operation = node.operation
        if operation == "input":
            return self.inputs[int(node.parameters[0])]
        if operation == "const":
            return Form(Fraction(node.parameters[0]))
        if operation in _LINEAR:
            self.owned.add(position)
            return self._sum(operation, node.arguments)
        if operation in ("mul", "div") and (scaled := self._multiple(position, operation, *node.arguments)) is not None:
            return scaled
        if operation in _CHAINS:
            return self._chain(operation, node.arguments)
        return self.interner.apply(operation, [self._form(k) for k in node.arguments], node.parameters)

    def _sum(self, operation: str, arguments: tuple[int, ...]) -> Form:
        """A sum, gathered in the longest sum that nothing else reads."""
        parts = _weighted(operation, [self._form(k) for k in arguments])
        free = [n for n, k in enumerate(arguments) if self.once[k] and k in self.owned and parts[n][0] == 1]
        if not free:
            return Form.total(parts)
        base = max(free, key=lambda n: len(parts[n][1].terms))
        terms, constant = parts[base][1].terms, parts[base][1].constant
        assert isinstance(terms, dict)
        for n, (factor, form) in enumerate(parts):
            if n != base:
                constant = _added(terms, constant, form, factor)
        return Form(constant, terms)

    def _multiple(self, position: int, operation: str, a: int, b: int) -> Form | None:
        """A product with a number, or a quotient by a number other than 0, without atoms; None for others."""
        for number, other in ((b, a), (a, b)) if operation == "mul" else ((b, a),):
            factor, value = self.values[number], self.values[other]
            if not isinstance(factor, Form) or factor.terms or not isinstance(value, Form):
                continue
            if operation == "mul" or factor.constant:
                scale = factor.constant if operation == "mul" else 1 / factor.constant
                if scale != 1:  # the multiple by 1 is the same form
                    self.owned.add(position)
                return value.scaled(_checked(scale))
        return None

    def _chain(self, operation: str, arguments: tuple[int, ...]) -> Pending:
        """A product, quotient, maximum or minimum, gathered in one that nothing else reads."""
        forms = list(enumerate(arguments))
        pending = Pending(_CHAINS[operation])
        for n, k in forms[:1] if operation == "div" else forms:
            value = self.values[k]
            if isinstance(value, Pending) and value.operation == pending.operation and self.once[k]:
                pending = value
                del forms[n]
                break
        for n, k in forms:
            form = self._form(k)
            if operation in ("max", "min"):
                self.interner.compare(pending, form)
            else:
                self.interner.multiply(pending, self.interner.recip(form) if operation == "div" and n else form)
        return pending
