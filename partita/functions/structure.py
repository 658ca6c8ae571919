"""The structure of a function: f as a network of functions of few variables, read off its graph exactly.

A unit is a function of one, two or a few affine combinations of channels. Channels are the inputs and the values of earlier
units; the outputs are affine combinations of channels. `one_layer` writes f as a sum of functions of the inputs, `layered` cuts
compositions apart. Both work on the affine forms of the graph (`affine_forms`), so everything affine is found and costs no unit.
"""

from __future__ import annotations

import heapq
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import combinations

from partita.errors import UnsupportedError
from partita.functions.affine_forms import Form, Interner, forms_of
from partita.functions.graph import Graph, GraphBuilder
from partita.functions.logarithms import Logarithms
from partita.functions.ranges import positive_nodes
from partita.geometry.domains import Box

__all__ = ["Structure", "Unit", "layered", "one_layer", "same_function"]

_MOST_NODES = 100_000  # of all units together
_MOST_DIRECTIONS = 16  # with more, a unit reads inputs
_MOST_PARTS = 32  # of a product that is searched for pairs that are known
_MOST_BASES = 4  # candidates for the affine form that a unit reads
_ZERO, _ONE = Fraction(0), Fraction(1)
_VANISHING = frozenset(("sin", "tan", "tanh", "atan", "asinh", "atanh", "erf"))  # φ(0) = 0: φ(u)/u has a limit


@dataclass(frozen=True)
class Unit:
    """One function of few variables, and what it reads.

    Attributes:
        graph: the function, with one output of shape ().
        reads: for each input of the graph, an affine form of channels.
    """

    graph: Graph
    reads: tuple[Form, ...]


@dataclass(frozen=True)
class Structure:
    """f as units: channels 0, …, inputs − 1 are the inputs, channel inputs + j is the value of unit j.

    Attributes:
        inputs: the number of inputs.
        units: a unit reads inputs and earlier units only.
        outputs: affine forms of channels, in row-major order.
        output_shape: the shape of the outputs.

    >>> from partita.functions import parse
    >>> found = layered(parse("exp(-(x0^2 + x1^2)) + 2*x0", ["x0", "x1"]))
    >>> [(unit.graph.infix(), *map(str, unit.reads)) for unit in found.units]
    [('x0^2', '#0'), ('x0^2', '#1'), ('exp(x0)', '- #2 - #3')]
    >>> [str(form) for form in found.outputs], found.depth
    (['2·#0 + #4'], 2)
    """

    inputs: int
    units: tuple[Unit, ...]
    outputs: tuple[Form, ...]
    output_shape: tuple[int, ...]

    @cached_property
    def _levels(self) -> tuple[int, ...]:
        levels: list[int] = []
        for unit in self.units:
            channels = (k for form in unit.reads for k in form.terms)
            levels.append(1 + max((levels[k - self.inputs] for k in channels if k >= self.inputs), default=0))
        return tuple(levels)

    @property
    def depth(self) -> int:
        """The number of layers; 0 for an affine function."""
        return max(self._levels, default=0)

    def level(self, j: int) -> int:
        """The layer of unit j, counted from 1: one more than the last layer that it reads."""
        return self._levels[j]


def one_layer(graph: Graph) -> Structure:
    """f as an affine function plus units that read the inputs only, each a function of as few directions as its terms allow.

    A direction is a linear combination of inputs. Terms of the same directions are one unit; rational factors of a unit, constants
    and affine parts are in `outputs`.

    Args:
        graph: f.

    Raises:
        UnsupportedError: the units would be larger than 100,000 nodes together, or coefficients are out of range.

    >>> from partita.functions import parse
    >>> found = one_layer(parse("7*sin(3*x0) + cos(x0 + 2*x1) + (2*x0 + 4*x1)^3 - 5*sin(2*x1 + 1)", ["x0", "x1"]))
    >>> [(unit.graph.infix(), *map(str, unit.reads)) for unit in found.units]
    [('sin(x0)', '3·#0'), ('cos(x0) + (2*x0)^3', '#0 + 2·#1'), ('sin(x0)', '2·#1 + 1')]
    >>> [str(form) for form in found.outputs]
    ['7·#2 + #3 - 5·#4']
    """
    interner = Interner()
    outputs = forms_of(graph, [interner.input(i) for i in range(graph.num_inputs)], interner)
    return _Whole(interner, outputs, graph.num_inputs).structure(graph.output_shape)


def layered(graph: Graph, box: Box | None = None, *, logarithms: bool = False) -> Structure:
    """f cut into units of one direction, and products, maxima and minima of two; a direction is an affine form of channels.

    Whatever depends on one direction only is one unit. Quotients are products with a reciprocal. Products, maxima and minima of
    many are trees of pairs. `where` of several directions is one unit of up to three. A norm √(Σ c_i u_i²) whose square may be 0
    on the box has no bounded slope as a root of a sum, so it is a tree of norms of two directions.

    Args:
        graph: f.
        box: the domain. Without it, norms are cut into squares and a root.
        logarithms: write products of numbers that are positive on the box as exp of a sum of logarithms (`Logarithms`).

    Raises:
        UnsupportedError: the units would be larger than 100,000 nodes together, or coefficients are out of range.

    >>> from partita.functions import parse
    >>> found = layered(parse("x0*sin(x0)/(1 + x1^2)", ["x0", "x1"]))
    >>> [unit.graph.infix() for unit in found.units]
    ['1/(x0^2 + 1)', 'sin(x0)*x0', 'x0*x1']
    >>> found = layered(parse("x0*x1/x2", ["x0", "x1", "x2"]), Box([1] * 3, [2] * 3), logarithms=True)
    >>> [(unit.graph.infix(), *map(str, unit.reads)) for unit in found.units]
    [('log(x0)', '#0'), ('log(x0)', '#1'), ('log(x0)', '#2'), ('exp(x0)', '#3 + #4 - #5')]
    """
    interner, positive = _interner(graph, box if logarithms else None)
    inputs = [interner.input(i) for i in range(graph.num_inputs)]
    outputs = forms_of(graph, inputs, interner, positive)
    vanishing = set() if box is None else _vanishing_radicands(graph, inputs, interner, box)
    return _Cut(interner, outputs, graph.num_inputs, vanishing).structure(graph.output_shape)


def same_function(graph: Graph, structure: Structure, box: Box | None = None) -> bool:
    """Whether the exact forms of both agree, which proves that they are equal wherever both are defined.

    Args:
        graph: f.
        structure: units, taken as the exact functions of their graphs.
        box: where they must be equal; there products of positive numbers may be written with logarithms.

    >>> from partita.functions import parse
    >>> f, g = parse("x0*x1*x2", ["x0", "x1", "x2"]), parse("x0*x1*x1", ["x0", "x1", "x2"])
    >>> same_function(f, layered(f)), same_function(g, layered(f))
    (True, False)
    """
    if graph.num_inputs != structure.inputs or graph.output_shape != structure.output_shape:
        return False
    interner, positive = _interner(graph, box)
    channels = [interner.input(i) for i in range(graph.num_inputs)]
    expected = forms_of(graph, channels, interner, positive)
    for unit in structure.units:
        channels += forms_of(unit.graph, [form.substituted(channels) for form in unit.reads], interner)
    return expected == [form.substituted(channels) for form in structure.outputs]


def _interner(graph: Graph, box: Box | None) -> tuple[Interner, frozenset[int]]:
    """What collects atoms, with logarithms of what is positive on the box, and which nodes are."""
    return (Interner(), frozenset()) if box is None else (Logarithms(), positive_nodes(graph, box.lo, box.hi))


def _vanishing_radicands(graph: Graph, inputs: Sequence[Form], interner: Interner, box: Box) -> set[Form]:
    """The arguments of square roots that are not proved to be positive on the box."""
    found = sorted({node.arguments[0] for node in graph.nodes if node.operation == "sqrt"})
    if not found:
        return set()
    radicands = Graph(graph.num_inputs, graph.nodes, tuple(found), (len(found),))
    lo = radicands.enclose(box.lo[None], box.hi[None]).lo[0]
    forms = forms_of(radicands, inputs, interner)
    return {form for form, least in zip(forms, lo, strict=True) if not least > 0}


@dataclass(frozen=True)
class _Split:
    """A form as `factor · direction + constant + Σ rest`, rest being atoms that are functions of the direction (or of several)."""

    direction: Form | None
    factor: Fraction
    constant: Fraction
    rest: tuple[tuple[int, Fraction], ...]


@dataclass(frozen=True)
class _Written:
    """`factor · graph(axes)`."""

    factor: Fraction
    graph: Graph
    axes: tuple[_Axis, ...]


@dataclass(frozen=True)
class _Axis:
    """One input of a unit: it reads `scale · direction + shift`."""

    direction: Form
    scale: Fraction = _ONE
    shift: Fraction = _ZERO

    def applied(self, form: Form) -> Form:
        """What is read, with the direction as a form of channels."""
        return form.scaled(self.scale).plus(Form(self.shift))


Coordinates = Mapping[int, Fraction]


class _Reading(ABC):
    """How the atoms of a function are divided among units."""

    def __init__(self, interner: Interner, outputs: Sequence[Form], inputs: int) -> None:
        self.interner, self.inputs, self.outputs = interner, inputs, outputs
        self.fixed: set[int] = set()  # atoms without inputs, such as sqrt(2)
        self.shapes: dict[int, int] = {}
        self.ranks: dict[int, int] = {}  # an order of the atoms in which arguments come first
        self.size = 0
        self.units: list[Unit] = []
        self.levels: list[int] = []
        self._known_units: dict[tuple[Graph, tuple[Form, ...]], int] = {}
        self._numbers: dict[object, int] = {}
        self._arguments: dict[int, tuple[Fraction, tuple[Form, ...]]] = {}

    @abstractmethod
    def split(self, form: Form, atom: int) -> _Split:
        """A form, as an argument of an atom."""

    @abstractmethod
    def axes(self, directions: Sequence[Form]) -> tuple[list[Form], Mapping[Form, Coordinates]]:
        """The directions that a unit reads, and each of the given directions in terms of them."""

    def needed(self) -> list[int]:
        """The atoms that the outputs need, arguments first."""
        found, waiting = set[int](), [k for form in self.outputs for k in form.terms]
        while waiting:
            k = waiting.pop()
            if k not in found:
                found.add(k)
                waiting += [j for form in self.interner.atoms[k].arguments for j in form.terms]
        return sorted(found)

    def arguments(self, atom: int) -> tuple[Fraction, tuple[Form, ...]]:
        """c and forms such that the atom is c times the operation of the forms, whose coefficients are as simple as possible."""
        if atom not in self._arguments:
            data = self.interner.atoms[atom]
            forms, factor = list(data.arguments), _ONE
            if data.operation in ("product", "recip"):
                for i, (form, spelled) in enumerate(zip(forms, self.interner.spelled.get(atom, forms))):
                    forms[i] = self.simplest([form, spelled])
                    scale = forms[i].lead / form.lead
                    factor *= scale if data.operation == "recip" else 1 / scale
            if data.operation in ("product", "max", "min"):
                forms.sort(key=lambda form: self._shape_of_form(form, atom))
            self._arguments[atom] = factor, tuple(forms)
        return self._arguments[atom]

    def simplest(self, forms: Sequence[Form]) -> Form:
        """The form whose coefficients take the fewest numbers to write; the first of equals."""
        return forms[0] if forms[0] == forms[-1] else min(forms, key=lambda form: _cost(self.stored(form)))

    def stored(self, form: Form) -> list[Fraction]:
        """The constant and the coefficients of a form, in front of atoms as they are written."""
        return [form.constant, *(c * self.arguments(k)[0] for k, c in form.terms.items())]

    def shape(self, atom: int) -> None:
        """Gives the atom a number that does not depend on what it reads: equal functions of different directions get one number."""
        data = self.interner.atoms[atom]
        if data.operation == "input":
            key: object = "input"
        else:
            _, forms = self.arguments(atom)
            key = data.operation, tuple(self._shape_of_form(form, atom) for form in forms), data.parameters
        self.shapes[atom] = self._numbers.setdefault(key, len(self._numbers))

    def _shape_of_form(self, form: Form, atom: int) -> tuple[bool, tuple[tuple[int, Fraction], ...]]:
        split = self.split(form, atom)
        return bool(split.factor), tuple(sorted((self.shapes[k], c) for k, c in split.rest))

    def by_shape(self, terms: Iterable[tuple[int, Fraction]], seen: Mapping[int, int]) -> list[tuple[int, Fraction]]:
        """Atoms and their factors in an order that does not depend on what they read; of equal ones, those seen first."""
        known = len(self.ranks)
        return sorted(
            terms, key=lambda term: (self.shapes[term[0]], term[1], seen.get(term[0], known), self.ranks[term[0]])
        )

    def unit(self, graph: Graph, reads: tuple[Form, ...]) -> int:
        """The channel of a unit, new or known; reads are forms of channels."""
        key = graph, reads
        if key not in self._known_units:
            self._known_units[key] = self.inputs + len(self.units)
            self.units.append(Unit(graph, reads))
            below = (k - self.inputs for form in reads for k in form.terms if k >= self.inputs)
            self.levels.append(1 + max(map(self.levels.__getitem__, below), default=0))
        return self._known_units[key]

    def written(self, root: Form) -> _Written:
        """A linear combination of atoms as a unit."""
        writer = _Writer(self, root)
        self.size += len(writer.result.graph.nodes)
        if self.size > _MOST_NODES:
            raise UnsupportedError(
                f"the parts of the function would take more than {_MOST_NODES:,} nodes together, because they share many of them",
                "Use the function as a whole, or compile its parts one by one.",
            )
        return writer.result


class _Writer:
    """Writes one unit as a graph."""

    def __init__(self, reading: _Reading, root: Form) -> None:
        self.reading, self.interner = reading, reading.interner
        self.leaves: dict[Form, dict[tuple[Fraction, Fraction], None]] = {}  # by direction: factors and constants
        self.multiples: dict[Form, Form] = {}  # of the multiples of a sum, the one that is written
        self.seen: dict[int, int] = {}  # the atoms of the unit, in an order that depends on its shape only
        self._walk(root)
        self.axes, self.coordinates = self._choose_axes()
        self.builder = GraphBuilder(max(len(self.axes), min(1, reading.inputs)))
        self.nodes: dict[int, tuple[int, Fraction]] = {}  # an atom is the number times the node
        for atom in sorted(self.seen, key=reading.ranks.__getitem__):
            self.nodes[atom] = self._atom(atom)
        parts = self._terms(root.terms.items())
        factor = _common_factor([c for c, _ in parts])
        node = self._combined([(c / factor, node) for c, node in parts], _ZERO)
        graph = self.builder.finish([node], ())
        self.result = _Written(factor, graph, tuple(self.axes))

    def _walk(self, root: Form) -> None:
        """Finds the atoms and the leaves."""
        waiting = [k for k, _ in reversed(self.reading.by_shape(root.terms.items(), self.seen))]
        while waiting:
            atom = waiting.pop()
            if atom in self.seen:
                continue
            self.seen[atom] = len(self.seen)
            inner: list[int] = []
            for form in self.reading.arguments(atom)[1]:
                split = self.reading.split(form, atom)
                if split.direction is not None and split.factor:
                    self.leaves.setdefault(split.direction, {})[split.factor, split.constant] = None
                if len(form.terms) > 1:
                    key = form.scaled(1 / form.lead)
                    if form != self.multiples.get(key):
                        self.multiples[key] = self.reading.simplest([self.multiples.get(key, form), form])
                inner += [k for k, _ in self.reading.by_shape(split.rest, self.seen)]
            waiting += reversed(inner)

    def _terms(self, terms: Iterable[tuple[int, Fraction]]) -> list[tuple[Fraction, int]]:
        """Atoms and their factors as factors and nodes."""
        return [(c * self.nodes[k][1], self.nodes[k][0]) for k, c in self.reading.by_shape(terms, self.seen)]

    def _choose_axes(self) -> tuple[list[_Axis], Mapping[Form, Coordinates]]:
        basis, coordinates = self.reading.axes(list(self.leaves))
        alone: dict[int, list[tuple[Fraction, Fraction]]] = {j: [] for j in range(len(basis))}
        shared = {j for direction in self.leaves for j in coordinates[direction] if len(coordinates[direction]) > 1}
        for direction, leaves in self.leaves.items():
            if len(coordinates[direction]) == 1:
                ((j, factor),) = coordinates[direction].items()
                alone[j] += [(factor * scale, shift) for scale, shift in leaves]
        axes = []
        for j, direction in enumerate(basis):
            candidates = [] if j in shared else [_Axis(direction, *leaf) for leaf in alone[j][:_MOST_BASES]]
            axes.append(min([*candidates, _Axis(direction)], key=lambda axis: self._cost(axis, alone[j])))
        return axes, coordinates

    def _cost(self, axis: _Axis, leaves: Sequence[tuple[Fraction, Fraction]]) -> tuple[int, int, int]:
        """The coefficients that are not float64 numbers; the leaves that are not what is read; the numbers stored."""
        factors = [(scale / axis.scale, shift - scale / axis.scale * axis.shift) for scale, shift in leaves]
        inexact, stored = _cost(self.reading.stored(axis.applied(axis.direction)))
        inside = _cost(c for pair in factors for c in pair)[0]
        return inexact + inside, sum(pair != (_ONE, _ZERO) for pair in factors), stored

    def _leaf(self, split: _Split) -> tuple[list[tuple[Fraction, int]], Fraction]:
        """`factor · direction + constant` in terms of the inputs of the unit."""
        parts, constant = [], split.constant
        if split.direction is not None and split.factor:
            for j, c in self.coordinates[split.direction].items():
                factor = split.factor * c / self.axes[j].scale
                parts.append((factor, self.builder.add("input", parameters=(j,))))
                constant -= factor * self.axes[j].shift
        return parts, constant

    def _form(self, form: Form, atom: int, *, free: bool = False) -> tuple[int, Fraction]:
        """A node, and the number by which it is multiplied; 1 unless the form is `free` to be scaled."""
        if len(form.terms) > 1:
            written = self.multiples[form.scaled(1 / form.lead)]
            if written != form:
                factor, node = form.lead / written.lead, self._form(written, atom)[0]
                return (node, factor) if free else (self._multiple(factor, node), _ONE)
        split = self.reading.split(form, atom)
        parts, constant = self._leaf(split)
        parts += self._terms(split.rest)
        if free and len(parts) == 1 and not constant:
            return parts[0][1], parts[0][0]
        return self._combined(parts, constant), _ONE

    def _atom(self, atom: int) -> tuple[int, Fraction]:
        data = self.interner.atoms[atom]
        factor, forms = self.reading.arguments(atom)
        if data.operation == "product":
            node, scale = self._product(atom, forms)
            return node, factor * scale
        if data.operation == "recip":
            node, scale = self._form(forms[0], atom, free=True)
            return self.builder.add("div", self._number(_ONE), node), factor / scale
        nodes = [self._form(form, atom)[0] for form in forms]
        if data.operation in ("max", "min"):
            node = nodes[0]
            for other in nodes[1:]:
                node = self.builder.add(data.operation, node, other)
            return node, _ONE
        return self.builder.add(data.operation, *nodes, parameters=data.parameters), _ONE

    def _product(self, atom: int, forms: Sequence[Form]) -> tuple[int, Fraction]:
        """A product, as a power of another product if it is one: enclosures see that a·a ≥ 0 for equal factors only."""
        counts, factor = Counter[int](), _ONE
        for form in forms:
            node, scale = self._form(form, atom, free=True)
            counts[node] += 1
            factor *= scale
        times = math.gcd(*counts.values())
        base = self._factors([node for node, count in counts.items() for _ in range(count // times)])
        product = base
        for _ in range(times - 1):
            product = self.builder.add("mul", product, base)
        return product, factor

    def _factors(self, nodes: Sequence[int]) -> int:
        """Factors, logarithms last and divisors after them; sin(u)/u and its like as one quotient, which has a limit at 0."""
        above, below = list[int](), list[int]()
        for node in nodes:
            data = self.builder.nodes[node]
            if data.operation == "div" and data.arguments[0] == self._number(_ONE):
                below.append(data.arguments[1])
            else:
                above.append(node)
        for u in list(below):
            for number, node in enumerate(above):
                if self.builder.nodes[node].operation in _VANISHING and self._is_multiple(node, u):
                    above[number] = self.builder.add("div", node, u)
                    below.remove(u)
                    break
        above.sort(key=lambda node: self.builder.nodes[node].operation == "log")
        product = above[0] if above else self._number(_ONE)
        for node in above[1:]:
            product = self.builder.add("mul", product, node)
        for node in below:
            product = self.builder.add("div", product, node)
        return product

    def _is_multiple(self, node: int, u: int) -> bool:
        """Whether the argument of a node is c·u."""
        argument = self.builder.nodes[node].arguments[0]
        data = self.builder.nodes[argument]
        return argument == u or (data.operation in ("mul", "div", "neg") and u in data.arguments)

    def _combined(self, parts: Sequence[tuple[Fraction, int]], constant: Fraction) -> int:
        """The node of `Σ factor · node + constant`."""
        if not parts:
            return self._number(constant)
        if len(parts) > 3:
            nodes = [self._multiple(c, node) for c, node in parts]
            return self.builder.add("sum", *nodes, *([self._number(constant)] if constant else []))
        parts = sorted(parts, key=lambda part: part[0] < 0)
        if parts[0][0] < 0 < constant:
            total, left = self._number(constant), parts
        else:
            total, left = self._multiple(*parts[0]), parts[1:]
        for c, node in left:
            total = self.builder.add("add" if c > 0 else "sub", total, self._multiple(abs(c), node))
        if constant and (parts[0][0] > 0 or constant < 0):
            total = self.builder.add("add" if constant > 0 else "sub", total, self._number(abs(constant)))
        return total

    def _multiple(self, factor: Fraction, node: int) -> int:
        if abs(factor) == 1:
            return node if factor > 0 else self.builder.add("neg", node)
        if _is_float(factor):
            return self.builder.add("mul", self._number(factor), node)
        above, below = Fraction(factor.numerator), Fraction(factor.denominator)
        if _is_float(above) and _is_float(below):
            return self.builder.add("div", self._multiple(above, node), self._number(below))
        return self.builder.add("mul", self._number(factor), node)

    def _number(self, value: Fraction) -> int:
        """A constant of the graph: a float64 number, or sums and quotients of them that are exactly the value."""
        if _is_float(value):
            return self.builder.add("const", parameters=(float(value),))
        odd, twos = _odd_part(value.denominator)
        parts = [self._number(part) for part in _float_parts(value.numerator, twos)]
        total = parts[0]
        for part in parts[1:]:
            total = self.builder.add("add", total, part)
        return total if odd == 1 else self.builder.add("div", total, self._number(Fraction(odd)))


def _odd_part(number: int) -> tuple[int, int]:
    """The odd factor, and how often 2 divides the number."""
    twos = (number & -number).bit_length() - 1
    return number >> twos, twos


def _float_parts(numerator: int, twos: int) -> list[Fraction]:
    """numerator / 2^twos as a sum of float64 numbers, the largest first."""
    parts: list[Fraction] = []
    sign, left = (-1 if numerator < 0 else 1), abs(numerator)
    while left:
        low = max(left.bit_length() - 53, 0)
        part = Fraction(sign * (left >> low << low), 1 << twos)
        if not _is_float(part):
            raise UnsupportedError(
                "an exact coefficient of the function is outside the range of float64",
                "Scale the function or its variables.",
            )
        parts.append(part)
        left &= (1 << low) - 1
    return parts


def _is_float(value: Fraction) -> bool:
    try:
        return Fraction(float(value)) == value
    except OverflowError:
        return False


def _cost(numbers: Iterable[Fraction]) -> tuple[int, int]:
    """How many numbers are not float64 numbers, and how many have to be stored."""
    stored = [c for c in numbers if c not in (0, 1)]
    return sum(not _is_float(c) for c in stored), len(stored)


def _common_factor(coefficients: Sequence[Fraction]) -> Fraction:
    """The factor in front of a sum: one of its coefficients, so that the others stay float64 numbers if possible; or 1."""
    for factor in coefficients[:_MOST_BASES]:
        if all(_is_float(c / factor) for c in coefficients):
            return factor
    return _ONE if all(map(_is_float, coefficients)) else coefficients[0]


def _direction(form: Form) -> Form:
    """A form without its constant, divided by its leading coefficient."""
    return Form(_ZERO, form.scaled(1 / form.lead).terms)


def _part(form: Form, keep: Iterable[int]) -> Form:
    return Form(_ZERO, {k: form.terms[k] for k in keep})


class _Whole(_Reading):
    """One layer: units read inputs, and are not cut."""

    def __init__(self, interner: Interner, outputs: Sequence[Form], inputs: int) -> None:
        super().__init__(interner, outputs, inputs)
        self.splits: dict[Form, _Split] = {}
        self.directions: dict[int, tuple[Form, ...] | None] = {}  # of an atom; None for too many
        self.touched: dict[int, int] = {}  # the inputs of an atom, as bits
        for rank, atom in enumerate(self.needed()):
            self.ranks[atom] = rank
            self._read(atom)
            self.shape(atom)

    def _read(self, atom: int) -> None:
        data = self.interner.atoms[atom]
        if data.operation == "input":
            self.touched[atom], self.directions[atom] = 1 << int(data.parameters[0]), (Form.of(atom),)
            return
        touched, found = 0, dict[Form, None]()
        many = False
        for form in data.arguments:
            split = self.split(form, atom)
            if split.direction is not None:
                found[split.direction] = None
            for k in form.terms:
                touched |= self.touched[k]
            for k, _ in split.rest:
                inner = self.directions[k]
                many = many or inner is None
                found |= dict.fromkeys(inner or ())
        self.touched[atom] = touched
        self.directions[atom] = None if many or len(found) > _MOST_DIRECTIONS else tuple(found)
        if not touched:
            self.fixed.add(atom)

    def split(self, form: Form, atom: int) -> _Split:
        if form not in self.splits:
            inputs = [k for k in form.terms if self.interner.atoms[k].operation == "input"]
            rest = tuple((k, c) for k, c in form.terms.items() if self.interner.atoms[k].operation != "input")
            linear = _part(form, inputs)
            self.splits[form] = _Split(
                _direction(linear) if inputs else None, linear.lead if inputs else _ZERO, form.constant, rest
            )
        return self.splits[form]

    def axes(self, directions: Sequence[Form]) -> tuple[list[Form], Mapping[Form, Coordinates]]:
        basis = _basis(directions)
        if basis is None:  # the inputs
            order = {k: None for d in directions if len(d.terms) == 1 for k in d.terms}
            order |= {k: None for d in directions for k in sorted(d.terms)}
            number = {k: j for j, k in enumerate(order)}
            return [Form.of(k) for k in order], {d: {number[k]: c for k, c in d.terms.items()} for d in directions}
        return basis.chosen, {d: basis.coordinates(d) for d in directions}

    def structure(self, output_shape: tuple[int, ...]) -> Structure:
        """Every output: its inputs, and one unit for all atoms with the same space of directions."""
        spaces: dict[int, object] = {}
        for atom in {k: None for form in self.outputs for k in form.terms}:
            spaces[atom] = self._space(atom)
        sums = [_Sum.of(form, spaces) for form in self.outputs]
        roots = _roots(sums)
        values: dict[Form, Form] = {}
        for root in dict.fromkeys(root for total in roots for _, root in total):
            written = self.written(root)
            reads = [axis.applied(axis.direction.substituted(self._inputs_of(axis.direction))) for axis in written.axes]
            channel = self.unit(written.graph, _padded(reads, written.graph))
            values[root] = Form.of(channel).scaled(written.factor)
        outputs = []
        for total, parts in zip(sums, roots):
            linear = total.linear.substituted(self._inputs_of(total.linear))
            outputs.append(Form.total([(_ONE, linear), *((c, values[root]) for c, root in parts)]))
        return Structure(self.inputs, tuple(self.units), tuple(outputs), output_shape)

    def _space(self, atom: int) -> object:
        """What terms of one unit share: the space of their directions; "input" for an input, None for a constant."""
        if self.interner.atoms[atom].operation == "input":
            return "input"
        if atom in self.fixed:
            return None
        directions = self.directions[atom]
        basis = None if directions is None else _basis(directions)
        return self.touched[atom] if basis is None else basis.space

    def _inputs_of(self, form: Form) -> dict[int, Form]:
        return {k: Form.of(int(self.interner.atoms[k].parameters[0])) for k in form.terms}


def _padded(reads: Sequence[Form], graph: Graph) -> tuple[Form, ...]:
    """A unit without inputs is a constant, which reads input 0 and ignores it."""
    return tuple(reads) if reads or not graph.num_inputs else (Form.of(0),)


@dataclass(frozen=True)
class _Sum:
    """A form as an affine part of channels, groups of atoms that may be one unit, and constants such as sqrt(2)."""

    linear: Form
    groups: Mapping[object, Form]
    fixed: Form

    @staticmethod
    def of(form: Form, spaces: Mapping[int, object]) -> _Sum:
        linear, fixed, groups = list[int](), list[int](), dict[object, list[int]]()
        for k in form.terms:
            space = spaces[k]
            if space == "input":
                linear.append(k)
            elif space is None:
                fixed.append(k)
            else:
                groups.setdefault(space, []).append(k)
        parts = {space: _part(form, atoms) for space, atoms in groups.items()}
        return _Sum(Form(form.constant, _part(form, linear).terms), parts, _part(form, fixed))


def _roots(sums: Sequence[_Sum]) -> list[list[tuple[Fraction, Form]]]:
    """The units of every sum with their factors. A group is one unit, unless its atoms on their own are fewer units for all sums.

    Constants join the first unit of a sum, or are one of their own.
    """
    combinations: dict[object, dict[Form, None]] = {}
    atoms: dict[object, set[int]] = {}
    for total in sums:
        for space, group in total.groups.items():
            combinations.setdefault(space, {})[_direction(group)] = None
            atoms.setdefault(space, set()).update(group.terms)
    found = []
    for total in sums:
        parts: list[tuple[Fraction, Form]] = []
        for space, group in total.groups.items():
            if len(combinations[space]) <= len(atoms[space]):
                parts.append((group.lead, _direction(group)))
            else:
                parts += [(c, Form.of(k)) for k, c in group.terms.items()]
        if total.fixed.terms:
            joined = total.fixed.plus(parts[0][1], parts[0][0]) if parts else total.fixed
            parts[:1] = [(joined.lead, _direction(joined))]
        found.append(parts)
    return found


class _Basis:
    """Independent directions, in exact arithmetic."""

    def __init__(self, directions: Iterable[Form]) -> None:
        self.chosen: list[Form] = []
        self._rows: dict[
            int, tuple[Form, dict[int, Fraction]]
        ] = {}  # by pivot: a reduced row, in terms of the chosen ones
        for direction in directions:
            row, made = self._reduced(direction)
            if row.terms:
                pivot, lead = min(row.terms), row.lead
                made = {j: -c / lead for j, c in made.items()} | {len(self.chosen): 1 / lead}
                self._rows[pivot] = row.scaled(1 / lead), made
                self.chosen.append(direction)

    def _reduced(self, direction: Form) -> tuple[Form, dict[int, Fraction]]:
        """The rest of a direction, and what was subtracted in terms of the chosen ones."""
        row, made = direction, dict[int, Fraction]()
        for pivot, (other, parts) in self._rows.items():
            c = row.terms.get(pivot)
            if c:
                row = row.plus(other, -c)
                for j, part in parts.items():
                    made[j] = made.get(j, _ZERO) + c * part
        return row, made

    def coordinates(self, direction: Form) -> Coordinates:
        """A direction of the space in terms of the chosen ones."""
        return {j: c for j, c in self._reduced(direction)[1].items() if c}

    @property
    def space(self) -> frozenset[Form]:
        """The same for every basis of the space: its reduced echelon form."""
        rows = {pivot: row for pivot, (row, _) in self._rows.items()}
        for pivot in rows:
            for other in rows:
                if other != pivot and pivot in rows[other].terms:
                    rows[other] = rows[other].plus(rows[pivot], -rows[other].terms[pivot])
        return frozenset(rows.values())


def _basis(directions: Sequence[Form]) -> _Basis | None:
    """The simplest independent directions; None if they are no fewer than the inputs, or too many to look at."""
    touched = {k for d in directions for k in d.terms}
    if len(directions) > _MOST_DIRECTIONS:
        return None
    found = _Basis(sorted(directions, key=lambda d: len(d.terms)))
    if len(found.chosen) == len(touched):
        return None
    order = {d: number for number, d in enumerate(directions)}
    return _Basis(sorted(found.chosen, key=order.__getitem__))


class _Cut(_Reading):
    """Several layers: an operation of two or more directions is cut off, and its value is a channel that others read."""

    def __init__(self, interner: Interner, outputs: Sequence[Form], inputs: int, vanishing: set[Form]) -> None:
        super().__init__(interner, outputs, inputs)
        self.vanishing = vanishing
        self.directions: dict[int, object] = {}  # of an atom: a Form; "input" for a channel, None for a constant
        self.splits: dict[Form, _Split] = {}
        self.parts: dict[int, list[Form]] = {}  # of an atom that becomes a tree of pairs
        self.norms: set[int] = set()  # roots of squares of two directions, which are one unit
        self.channels: dict[int, Form] = {}  # the values of atoms that are channels, as forms of channels
        self.values: dict[Form, Form] = {}  # the values of units, likewise
        self.pairs: dict[tuple[str, frozenset[Form]], Form] = {}  # operations of two forms of channels, likewise
        self.sums: dict[Form, tuple[_Sum, list[tuple[Fraction, Form]]]] = {}
        for atom in self.needed():
            self._classify(atom)

    def _classify(self, atom: int) -> None:
        if atom in self.directions:
            return
        data = self.interner.atoms[atom]
        found = dict.fromkeys(self.split(form, atom).direction for form in data.arguments)
        directions = [d for d in found if d is not None]
        if data.operation == "input":
            self.directions[atom] = "input"
        elif (
            data.operation == "sqrt" and data.arguments[0] in self.vanishing and len(squares := self._squares(atom)) > 1
        ):
            if len(squares) == 2:
                self.norms.add(atom)
            else:
                self.parts[atom] = self._paired(squares)
            self.directions[atom] = "input"
        elif len(directions) < 2:
            self.directions[atom] = directions[0] if directions else None
        else:
            if data.operation in ("product", "max", "min"):
                self.parts[atom] = self._grouped(atom)
            self.directions[atom] = "input"
        self.ranks[atom] = len(self.ranks)
        self.shape(atom)

    def _squares(self, atom: int) -> list[Form]:
        """The argument of a root as sums of squares, one for each direction; [] if it is anything else."""
        form = self.interner.atoms[atom].arguments[0]
        groups: dict[object, list[int]] = {}
        for k, c in form.terms.items():
            data = self.interner.atoms[k]
            square = data.operation == "pow" and data.parameters[0] == 2
            square = square or (
                data.operation == "product" and len(data.arguments) == 2 == data.arguments.count(data.arguments[0])
            )
            if not square or c < 0 or self.directions[k] in ("input", None):
                return []
            groups.setdefault(self.directions[k], []).append(k)
        return [] if form.constant else [_part(form, atoms) for atoms in groups.values()]

    def _paired(self, squares: Sequence[Form]) -> list[Form]:
        """Norms of two directions each, whose norm is that of all; a direction that is left over is read as it is."""
        found = []
        for i in range(0, len(squares), 2):
            root = self.interner.apply("sqrt", [Form.total((_ONE, form) for form in squares[i : i + 2])])
            single = squares[i].single
            if i + 1 == len(squares) and single is not None and self.interner.atoms[single].operation == "pow":
                root = self.interner.atoms[single].arguments[0]
            elif root.single is not None and root.single not in self.directions:
                if i + 1 < len(squares):
                    self.norms.add(root.single)
                    self.directions[root.single] = "input"
                    self.ranks[root.single] = len(self.ranks)
                    self.shape(root.single)
                else:
                    self._classify(root.single)
            found.append(root)
        return found

    def _grouped(self, atom: int) -> list[Form]:
        """The parts of a product, maximum or minimum, those of one direction joined."""
        data = self.interner.atoms[atom]
        parts: dict[Form | None, list[Form]] = {}
        for form, spelled in zip(data.arguments, self.interner.spelled.get(atom, data.arguments)):
            parts.setdefault(self.split(form, atom).direction, []).append(spelled)
        constants = parts.pop(None, [])
        if constants:  # they join a part that is a unit anyway, if there is one
            max(parts.values(), key=lambda forms: any(self.split(form, atom).rest for form in forms)).extend(constants)
        found = []
        for forms in parts.values():
            form = self.interner.apply(data.operation, forms) if len(forms) > 1 else forms[0]
            for k in form.terms:
                self._classify(k)
            found.append(form)
        return found

    def split(self, form: Form, atom: int) -> _Split:
        if atom in self.norms:
            return _Split(None, _ZERO, form.constant, tuple(form.terms.items()))
        if form not in self.splits:
            self.splits[form] = self._split(form)
        return self.splits[form]

    def _split(self, form: Form) -> _Split:
        varying = [k for k in form.terms if self.directions[k] is not None]
        candidates = dict.fromkeys(d for k in varying if isinstance(d := self.directions[k], Form))
        for direction in candidates:
            factor = form.terms.get(min(direction.terms), _ZERO)
            rest = self._rest(form, direction, factor)
            if rest is not None:
                return _Split(direction, factor, form.constant, rest)
        if not varying:
            return _Split(None, _ZERO, form.constant, tuple(form.terms.items()))
        linear = _part(form, varying)
        rest = tuple((k, c) for k, c in form.terms.items() if self.directions[k] is None)
        return _Split(_direction(linear), linear.lead, form.constant, rest)

    def _rest(self, form: Form, direction: Form, factor: Fraction) -> tuple[tuple[int, Fraction], ...] | None:
        """What is left of a form after `factor · direction`, if it consists of functions of the direction; None otherwise."""
        rest, used = [], 0
        for k, c in form.terms.items():
            if factor and k in direction.terms:
                if c != factor * direction.terms[k]:
                    return None
                used += 1
            elif self.directions[k] is None or self.directions[k] == direction:
                rest.append((k, c))
            else:
                return None
        return tuple(rest) if not factor or used == len(direction.terms) else None

    def axes(self, directions: Sequence[Form]) -> tuple[list[Form], Mapping[Form, Coordinates]]:
        return list(directions), {d: {j: _ONE} for j, d in enumerate(directions)}

    def structure(self, output_shape: tuple[int, ...]) -> Structure:
        """The units that the outputs need, those first that others read."""
        forms = dict.fromkeys(self.outputs)
        forms |= dict.fromkeys(split.direction for split in self.splits.values() if split.direction is not None)
        forms |= dict.fromkeys(form for parts in self.parts.values() for form in parts)
        sums = [_Sum.of(form, self.directions) for form in forms]
        self.sums = {form: (total, roots) for form, total, roots in zip(forms, sums, _roots(sums))}
        written: dict[Form | int, _Written | None] = {}
        waiting = list[tuple[int, int, Form | int]]()  # the last first
        order = list[Form | int]()

        def need(form: Form) -> None:
            total, roots = self.sums[form]
            for k in total.linear.terms:
                if k not in written and self.interner.atoms[k].operation != "input":
                    written[k] = None
                    heapq.heappush(waiting, (-self.ranks[k], len(written), k))
            for _, root in roots:
                if root not in written:
                    written[root] = None
                    heapq.heappush(waiting, (-max(map(self.ranks.__getitem__, root.terms)), len(written), root))

        for form in self.outputs:
            need(form)
        while waiting:
            _, _, item = heapq.heappop(waiting)
            order.append(item)
            if isinstance(item, int) and item in self.parts:
                for form in self.parts[item]:
                    need(form)
            else:
                written[item] = found = self.written(Form.of(item) if isinstance(item, int) else item)
                for axis in found.axes:
                    need(axis.direction)
        for item in reversed(order):
            value = self._tree(item) if isinstance(item, int) and item in self.parts else self._value(written[item])
            if isinstance(item, int):
                self.channels[item] = value
            else:
                self.values[item] = value
        outputs = tuple(self._channel_form(form) for form in self.outputs)
        return Structure(self.inputs, tuple(self.units), outputs, output_shape)

    def _value(self, written: _Written | None) -> Form:
        assert written is not None
        reads = [axis.applied(self._channel_form(axis.direction)) for axis in written.axes]
        return Form.of(self.unit(written.graph, _padded(reads, written.graph))).scaled(written.factor)

    def _channel_form(self, form: Form) -> Form:
        """A form of atoms as a form of channels."""
        total, roots = self.sums[form]
        linear = total.linear.substituted({k: self._channel(k) for k in total.linear.terms})
        return Form.total([(_ONE, linear), *((c, self.values[root]) for c, root in roots)])

    def _channel(self, atom: int) -> Form:
        data = self.interner.atoms[atom]
        return Form.of(int(data.parameters[0])) if data.operation == "input" else self.channels[atom]

    def _tree(self, atom: int) -> Form:
        """An operation of many, pair by pair: pairs that are units already, then values of early layers first."""
        operation, factor = self.interner.atoms[atom].operation, _ONE
        forms: list[Form] = []
        for part in self.parts[atom]:
            form = self._channel_form(part)
            if operation == "product":
                simple = min(form.scaled(1 / form.lead), form, key=lambda f: _cost([f.constant, *f.terms.values()]))
                factor *= form.lead / simple.lead / part.lead
                form = simple
            forms.append(form)
        while len(forms) <= _MOST_PARTS and (known := self._known_pair(operation, forms)):
            for form in known:
                forms.remove(form)
            forms.append(self._joined(operation, *known))
        waiting = [(self._level(form), number, form) for number, form in enumerate(forms)]
        heapq.heapify(waiting)
        while len(waiting) > 1:
            (_, first, a), (_, _, b) = heapq.heappop(waiting), heapq.heappop(waiting)
            form = self._joined(operation, a, b)
            heapq.heappush(waiting, (self._level(form), len(forms) + first, form))
        return waiting[0][2].scaled(factor)

    def _known_pair(self, operation: str, forms: Sequence[Form]) -> tuple[Form, Form] | None:
        pairs = ((a, b) for a, b in combinations(forms, 2) if (operation, frozenset((a, b))) in self.pairs)
        return next(pairs, None)

    def _joined(self, operation: str, a: Form, b: Form) -> Form:
        key = operation, frozenset((a, b))
        if key not in self.pairs:
            self.pairs[key] = Form.of(self.unit(_PAIRS[operation], (a, b)))
        return self.pairs[key]

    def _level(self, form: Form) -> int:
        return max((self.levels[k - self.inputs] for k in form.terms if k >= self.inputs), default=0)


def _pair(operation: str) -> Graph:
    builder = GraphBuilder(2)
    x, y = (builder.add("input", parameters=(i,)) for i in range(2))
    if operation == "sqrt":
        squares = [builder.add("pow", z, parameters=(2,)) for z in (x, y)]
        return builder.finish([builder.add("sqrt", builder.add("add", *squares))], ())
    return builder.finish([builder.add(operation, x, y)], ())


_PAIRS = {"product": _pair("mul"), "max": _pair("max"), "min": _pair("min"), "sqrt": _pair("sqrt")}
