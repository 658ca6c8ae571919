"""Products of positive numbers written with logarithms, as the library and partita-check read them: the same function, and nothing
assumed without a reason."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from partita_check.cli import run
from partita_check.forms import Atoms, Unfit
from partita_check.forms import forms_of as checked_forms
from partita_check.graph import parse as checked_parse

import partita as pa
from partita.functions import parse
from partita.functions.affine_forms import Form, forms_of
from partita.functions.graph import Graph
from partita.functions.logarithms import Logarithms
from partita.functions.ranges import positive_nodes
from partita.functions.structure import Structure, Unit, layered, same_function
from partita.reproduction.structured_functions import KNOWN_FUNCTIONS

Evaluated = Callable[[Sequence[float]], float]
Maker = Callable[..., Callable[[str], object]]
NAMES = ["x0", "x1", "x2", "x3"]
POSITIVE = pa.Box([0.5] * 4, [2.0] * 4)

SAME = [
    ("x0*x1/x2", "exp(log(x0) + log(x1) - log(x2))"),
    ("sqrt(x0*x1)", "sqrt(x0)*sqrt(x1)"),
    ("sqrt(x0^2)", "x0"),
    ("x0/x0", "1 + 0*x0"),
    ("log(x0^2/x1)", "2*log(x0) - log(x1)"),
    ("exp(2*log(x0) + x1)", "x0^2*exp(x1)"),
    ("(100*x0/x1)^-0.3", "exp(-0.3*log(100) - 0.3*log(x0) + 0.3*log(x1))"),
    ("exp(x0)*exp(x1)/exp(x0)", "exp(x1)"),
    ("1/(x0 + x1*x2)", "exp(-log(x0) - log(1 + exp(log(x1) + log(x2) - log(x0))))"),
    ("x0/(x0 + x1*x2)", "1/(1 + exp(log(x1) + log(x2) - log(x0)))"),
]
SAME_TO_THE_LIBRARY = [("(3 - x0)*x1", "exp(log(3 - x0) + log(x1))")]  # it proves that 3 − x0 is positive on the box
SAME_TO_THE_CHECKER = [  # it multiplies out
    ("log(x0 + x1 + x2*x3)", "log(x0 + x1) + log(1 + exp(log(x2) + log(x3) - log(x0 + x1)))"),
    ("log(1 + x0/x1 + x2/x3)", "log(1 + x0/x1) + log(1 + exp(log(x2) - log(x3) - log(1 + x0/x1)))"),
]
DIFFERENT = [
    ("x0*x1", "exp(log(x0) + 2*log(x1))"),
    ("sqrt(x0 + x1)", "sqrt(x0) + sqrt(x1)"),
    ("exp(x0 + x1)", "exp(x0) + exp(x1)"),
    ("log(x0 + x1*x2)", "log(x0) + log(x1*x2)"),
    ("log(x0 + x1*x2)", "log(x0) + log(1 + exp(log(x0) - log(x1) - log(x2)))"),
    ("x0^0.5", "x0^0.25"),
    ("sqrt((x0 - x1)^2)", "x0 - x1"),
    ("(x0 - x1)/(x0 - x1)", "1 + 0*x0"),
    ("exp(log(2)/2 + x0)", "2*exp(x0)"),
]


def library(box: pa.Box = POSITIVE) -> Callable[[str], object]:
    """Forms as the library makes them, all of one interner."""
    interner = Logarithms()

    def form(text: str) -> object:
        graph = parse(text, NAMES)
        positive = positive_nodes(graph, box.lo, box.hi)
        return forms_of(graph, [interner.input(i) for i in range(4)], interner, positive)[0]

    return form


def checker(box: pa.Box = POSITIVE) -> Callable[[str], object]:
    """Forms as partita-check makes them."""
    atoms = Atoms()
    inputs = [atoms.atom("input", i) for i in range(4)]
    for i in np.flatnonzero(box.lo > 0):
        atoms.assume_positive(inputs[i])

    def form(text: str) -> object:
        found = checked_forms(checked_parse(text, NAMES), inputs, atoms)[0]
        return tuple(sorted(found.items(), key=lambda item: item[0]))

    return form


MAKERS = [library, checker]
BOTH = pytest.mark.parametrize("maker", MAKERS)
CASES = [(maker, *pair) for maker in MAKERS for pair in SAME]
CASES += [(library, *pair) for pair in SAME_TO_THE_LIBRARY] + [(checker, *pair) for pair in SAME_TO_THE_CHECKER]


@pytest.mark.parametrize(("maker", "a", "b"), CASES)
def test_one_function_has_one_form(maker: Maker, a: str, b: str) -> None:
    form = maker()
    assert form(a) == form(b)
    points = POSITIVE.sample(50, np.random.default_rng(1))
    np.testing.assert_allclose(*(parse(text, NAMES).evaluate(points) for text in (a, b)), rtol=1e-12)


@BOTH
@pytest.mark.parametrize(("a", "b"), DIFFERENT)
def test_other_functions_have_other_forms(maker: Maker, a: str, b: str) -> None:
    form = maker()
    assert form(a) != form(b)


@BOTH
@pytest.mark.parametrize(
    ("a", "b"), [("sqrt(x0^2)", "x0"), ("x0/x0", "1 + 0*x0"), ("sqrt(x0*x1)", "sqrt(x0)*sqrt(x1)")]
)
def test_signs_that_are_not_known_are_not_assumed(maker: Maker, a: str, b: str) -> None:
    form = maker(pa.Box([-2.0] * 4, [2.0] * 4))
    assert form(a) != form(b)


def test_positive_nodes_are_positive() -> None:
    """Natural enclosures, a search where they are too wide, and no node whose values change sign."""
    graph = parse("x0*(x1 - x2)*sqrt(x0^2 + x3) - x0*(sqrt(x0^2 + x3) - x0)", NAMES)
    box = pa.Box([1.0, 0.0, 0.0, 0.5], [3.0, 1.0, 1.0, 2.0])
    found = positive_nodes(graph, box.lo, box.hi)
    every = [parse_node.operation for k, parse_node in enumerate(graph.nodes) if k in found]
    assert "sqrt" in every and "sub" in every  # the second difference, which takes a search
    x = box.sample(2000, np.random.default_rng(0))
    whole = type(graph)(4, graph.nodes, tuple(range(len(graph.nodes))), (len(graph.nodes),)).evaluate(x)
    assert (whole[:, sorted(found)] > 0).all()
    assert not positive_nodes(parse("x0 - x1", NAMES), [0.0] * 4, [1.0] * 4)


@pytest.mark.parametrize("name", KNOWN_FUNCTIONS)
def test_known_functions_are_what_is_read(name: str) -> None:
    f = KNOWN_FUNCTIONS[name]
    graph = parse(f.expression, [f"x{i}" for i in range(len(f.lo))])
    structure = layered(graph, f.box, logarithms=True)
    assert same_function(graph, structure, f.box)
    x = f.box.sample(200, np.random.default_rng(2))
    channels = list(x.T)
    for unit in structure.units:
        reads = [_value(form, channels) for form in unit.reads]
        channels.append(unit.graph.evaluate(np.stack(reads, 1)))
    np.testing.assert_allclose(_value(structure.outputs[0], channels), graph.evaluate(x), rtol=1e-9)


def _value(form: Form, channels: Sequence[np.ndarray]) -> np.ndarray:
    return float(form.constant) + sum(float(c) * channels[k] for k, c in form.terms.items()) + 0 * channels[0]


def test_a_changed_structure_is_another_function() -> None:
    graph, box = parse("x0*x1/(x2 + x0*x3)", NAMES), POSITIVE
    structure = layered(graph, box, logarithms=True)
    assert same_function(graph, structure, box) and not same_function(graph, structure)
    for j, unit in enumerate(structure.units):
        reads = (unit.reads[0].plus(Form(Fraction(1, 10**9))), *unit.reads[1:])
        changed = Unit(unit.graph, reads)
        units = (*structure.units[:j], changed, *structure.units[j + 1 :])
        assert not same_function(graph, Structure(4, units, structure.outputs, ()), box)


def random_function(source: random.Random, depth: int) -> tuple[str, Evaluated]:
    """A text, and what it means; it raises where it is not defined."""
    if depth == 0 or source.random() < 0.15:
        i, number = source.randrange(3), source.choice([0.5, 2.0, 3.0])
        return (f"x{i}", lambda x: x[i]) if source.random() < 0.7 else (str(number), lambda x: number)
    (a, f), (b, g) = random_function(source, depth - 1), random_function(source, depth - 1)
    return source.choice(
        [
            (f"({a} + {b})", lambda x: f(x) + g(x)),
            (f"({a} - {b})", lambda x: f(x) - g(x)),
            (f"({a}*{b})", lambda x: f(x) * g(x)),
            (f"({a}/{b})", lambda x: f(x) / g(x)),
            (f"sqrt({a})", lambda x: math.sqrt(f(x))),
            (f"log({a})", lambda x: math.log(f(x))),
            (f"exp({a})", lambda x: math.exp(f(x))),
            (f"({a})^2", lambda x: f(x) ** 2),
        ]
    )


@BOTH
def test_random_functions_with_equal_forms_are_equal(maker: Maker) -> None:
    source, form, found, compared = random.Random(5), maker(), dict[object, list[tuple[str, Evaluated]]](), 0
    points = [[source.uniform(0.5, 2) for _ in range(4)] for _ in range(6)]
    for _ in range(2500):
        made = random_function(source, source.randrange(1, 4))
        with suppress(pa.PartitaError, Unfit):
            found.setdefault(form(made[0]), []).append(made)
    for same in found.values():
        for text, f in same[1:8]:
            fresh = maker()  # without what the logarithms of other functions say
            if fresh(same[0][0]) != fresh(text):
                continue
            for x in points:
                with suppress(ValueError, ZeroDivisionError, OverflowError):
                    left, right = same[0][1](x), f(x)
                    assert math.isclose(left, right, rel_tol=1e-6, abs_tol=1e-6), (same[0][0], text)
                    compared += same[0][0] != text
    assert compared > 500


@pytest.mark.parametrize("positive", [True, False])
@pytest.mark.parametrize("operation", ["recip", "sqrt", "sub"])
def test_chains_of_thousands_of_operations(operation: str, positive: bool) -> None:
    """Such as 1/(1 + 1/(1 + …)), which no text holds and a graph may."""
    interner = Logarithms()
    x = chain = interner.input(0)
    if positive:
        interner.assume_positive(x)
    for _ in range(2000):
        chain = chain.plus(x, Fraction(-1)) if operation == "sub" else chain.plus(Form(Fraction(1)))
        chain = interner.apply("sqrt" if operation == "sub" else operation, [chain])
    assert interner.is_positive(chain) == (positive and operation != "sub")
    assert len(interner.product([chain, x]).terms) == 1


def test_the_reading_with_fewer_numbers_is_taken() -> None:
    """Products of many factors are read with logarithms; a product of two inputs is smaller as it is."""
    c = pa.compile("x0*x1/(x2*(1 + x3)) + x0*sqrt(x2)", pa.Box([1.0] * 4, [2.0] * 4), tolerance=1e-3)
    texts = [Graph.from_json(part["graph"]).infix() for part in c.certificate.proof["parts"]]
    assert any("log(" in text for text in texts) and c.certificate.kind == "proved"
    assert all(check.holds for check in pa.recheck(c)) and c.attack().error <= c.error_bound
    plain = pa.compile("x0*x1 + x2*x3", POSITIVE, tolerance=1e-3, method="heads")
    assert not any("log(" in str(part["graph"]) for part in plain.certificate.proof["parts"])


@pytest.mark.slow
@pytest.mark.parametrize("name", KNOWN_FUNCTIONS)
def test_known_functions_are_proved_and_verified(name: str, tmp_path: Path) -> None:
    f = KNOWN_FUNCTIONS[name]
    c = pa.compile(f.expression, f.box, tolerance=1e-3 * (f.largest - f.least))
    assert c.certificate.kind == "proved" and all(check.holds for check in pa.recheck(c))
    assert run(c.save(tmp_path / "network"), budget=300.0)[1] == 0
