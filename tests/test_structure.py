"""Structures: they compute the function, their forms agree with it, and changed ones do not."""

from dataclasses import replace
from fractions import Fraction
from functools import reduce
from itertools import pairwise

import numpy as np
import pytest
import torch
from flint import fmpq
from partita_check import forms as checked
from partita_check.graph import read_graph

from partita.errors import UnsupportedError
from partita.functions import Graph, parse
from partita.functions import structure as structure_module
from partita.functions.affine_forms import Form, Interner, forms_of
from partita.functions.graph import GraphBuilder
from partita.functions.operations import OPERATIONS
from partita.functions.structure import Structure, Unit, layered, one_layer, same_function
from partita.functions.tracing import trace
from partita.geometry.domains import Box


def graph_of(text: str, m: int) -> Graph:
    return parse(text, [f"x{i}" for i in range(m)])


def evaluated(structure: Structure, x: np.ndarray) -> np.ndarray:
    """The outputs of a structure at the rows of x, unit by unit."""
    channels = list(x.T)

    def value(form: Form) -> np.ndarray:
        return sum((float(c) * channels[k] for k, c in form.terms.items()), np.full(len(x), float(form.constant)))

    for unit in structure.units:
        channels.append(unit.graph.evaluate(np.column_stack([value(form) for form in unit.reads])))
    return np.column_stack([value(form) for form in structure.outputs]).reshape(len(x), *structure.output_shape)


BOREHOLE = "2*pi*x2*(x3-x5)/(log(x1/x0)*(1 + 2*x6*x2/(log(x1/x0)*x0^2*x7) + x2/x4))"
PISTON_V = "(x1/(2*x3)*(sqrt((x5*x1 + 19.62*x0 - x3*x2/x1)^2 + 4*x3*x5*x2*x6/x4) - (x5*x1 + 19.62*x0 - x3*x2/x1)))"
PISTON = f"2*pi*sqrt(x0/(x3 + x1^2*x5*x2*x6/(x4*{PISTON_V}^2)))"
OTL_MIDDLE = "(12*x1/(x0+x1) + 0.74)*x5*(x4+9)"
OTL = f"{OTL_MIDDLE}/(x5*(x4+9)+x2) + 11.35*x2/(x5*(x4+9)+x2) + 0.74*x2*x5*(x4+9)/((x5*(x4+9)+x2)*x3)"
WING = "0.036*x0^0.758*x1^0.0035*(x2/cos(x3)^2)^0.6*x4^0.006*x5^0.04*(100*x6/cos(x3))^-0.3*(x7*x8)^0.49 + x0*x9"
ANGLES = ["x0", "(x0+x1)", "(x0+x1+x2)", "(x0+x1+x2+x3)"]
ARM_U, ARM_V = (" + ".join(f"x{4 + i}*{f}({a})" for i, a in enumerate(ANGLES)) for f in ("cos", "sin"))
ARM = f"sqrt(({ARM_U})^2 + ({ARM_V})^2)"
SOFTMAX = ", ".join(f"exp(x{i})/(exp(x0)+exp(x1)+exp(x2))" for i in range(3))
FUNCTIONS = {
    "ishigami": ("sin(x0) + 7*sin(x1)^2 + 0.1*x2^4*sin(x0)", 3),
    "borehole": (BOREHOLE, 8),
    "piston": (PISTON, 7),
    "otl": (OTL, 6),
    "wing": (WING, 10),
    "arm": (ARM, 8),
    "gaussian": ("exp(-(" + " + ".join(f"x{i}^2" for i in range(10)) + "))", 10),
    "radial": ("sin(sqrt(" + " + ".join(f"x{i}^2" for i in range(20)) + "))", 20),
    "softmax": (SOFTMAX, 3),
    "norms": ("sqrt(x0^2+x1^2), sqrt(4*x0*x0 + x1^2 + 2*x2^2), abs(x0)+abs(x1)", 3),
    "product": ("x0*x1*x2*x3", 4),
    "powers": ("x0*x1*x0*x2*sin(x1)*x0/(x2*x0)", 3),
    "extremes": ("max(x0, x1, x2) - min(x0, 2*x1, x2, x0 + x1)", 3),
    "sinc": ("sin(x0)/x0 + x1*sin(3*x0)/(2*x0)", 2),
    "one": ("x0/x0", 1),
    "constant": ("3, sqrt(2), 1/3 + log(2)", 2),
    "irrational": (
        "sqrt(2)*x0*x1 + x0 + sqrt(3), sin(x0 + sqrt(2)) + exp(1)*x1, exp(x0 + sin(x1) + log(2)) + log(3)",
        2,
    ),
    "affine": ("2*x0 - x1/3 + 0.1, 3*(x0 + 1) - 3*x0", 2),
    "twice": ("exp(x0*x1) + exp(x1*x0)*sin(x0*x1) + exp(x0*x1)", 2),
    "branches": ("where(x0 > x1, sin(x1), x2^2) + where(x0, exp(x0), 1) + where(x0 + x1, x0*x1, 0)", 3),
    "clipped": ("clamp(x0 + sin(x1), -0.5, 0.5) + relu(x0*x1) + floor(2*x0)", 2),
    "mixed": ("exp(sin(x0) + x0 + cos(x1)) + tanh(x0 + x1 + sin(x0 + x1)) + exp(x0 + sin(x1) + exp(x0 + sin(x1)))", 2),
    "logarithm": ("x0*log(abs(x0)) + x1*x0*log(abs(x0)) + abs(x1)^0.3", 2),
    "vector": ("sin(x0) + x0^2, sin(x0) - x0^2, sin(x0) + 3*x0^2; x0*x1, 2*x1*x0, exp(x0*x1)", 2),
}
BOXES = {
    "borehole": [
        (0.05, 0.15),
        (100, 5e4),
        (63070, 115600),
        (990, 1110),
        (63.1, 116),
        (700, 820),
        (1120, 1680),
        (9855, 12045),
    ],
    "piston": [(30, 60), (0.005, 0.02), (0.002, 0.01), (1000, 5000), (340, 360), (90000, 110000), (290, 296)],
    "otl": [(50, 150), (25, 70), (0.5, 3), (1.2, 2.5), (0.25, 1.2), (50, 300)],
    "wing": [
        (150, 200),
        (220, 300),
        (6, 10),
        (-0.17, 0.17),
        (16, 45),
        (0.5, 1),
        (0.08, 0.18),
        (2.5, 6),
        (1700, 2500),
        (0.025, 0.08),
    ],
    "arm": [(0, 6.2)] * 4 + [(0, 1)] * 4,
}


def box_of(name: str) -> Box:
    m = FUNCTIONS[name][1]
    lo, hi = zip(*BOXES.get(name, [(-1.0, 1.0)] * m))
    return Box(np.array(lo, float), np.array(hi, float))


def structures(graph: Graph, box: Box) -> list[Structure]:
    return [one_layer(graph), layered(graph), layered(graph, box)]


def is_sound(structure: Structure) -> bool:
    """Units read earlier channels, are read themselves, have one output, and are distinct."""
    read = {k for form in structure.outputs for k in form.terms}
    for j, unit in enumerate(structure.units):
        channels = {k for form in unit.reads for k in form.terms}
        if max(channels, default=0) >= structure.inputs + j or unit.graph.output_shape != ():
            return False
        if unit.graph.num_inputs != len(unit.reads):
            return False
        read |= channels
    return read >= set(range(structure.inputs, structure.inputs + len(structure.units))) and len(
        set(structure.units)
    ) == len(structure.units)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_both_structures_are_the_function(name: str) -> None:
    text, m = FUNCTIONS[name]
    graph, box = graph_of(text, m), box_of(name)
    points = box.sample(200, np.random.default_rng(1))
    expected = graph.evaluate(points)
    for structure in structures(graph, box):
        assert same_function(graph, structure)
        assert is_sound(structure)
        np.testing.assert_allclose(evaluated(structure, points), expected, rtol=1e-8, atol=1e-12)
    assert all(k < m for unit in one_layer(graph).units for form in unit.reads for k in form.terms)
    for structure in (layered(graph), layered(graph, box)):
        for unit in structure.units:
            is_where = any(node.operation == "where" for node in unit.graph.nodes)
            assert len(unit.reads) <= 2 or is_where


def test_negative_controls() -> None:
    """A changed coefficient, a swapped argument, a dropped term, another function: each is seen."""
    graph = graph_of("3*x0/(1 + x1^2) + sin(x0 + 2*x1) - x2*exp(x0)", 3)
    for structure in (one_layer(graph), layered(graph)):
        assert same_function(graph, structure)
        for changed in changes(structure):
            assert not same_function(graph, changed)
        assert not same_function(graph_of("3*x0/(1 + x1^2) + sin(x0 + 2*x1)", 3), structure)
        assert not same_function(graph_of("3*x0/(1 + x1^2) + sin(x0 + 2*x1) - x2*exp(x0)", 4), structure)


def changes(structure: Structure) -> list[Structure]:
    """The structure with one thing wrong, for each thing."""
    found = [replace(structure, output_shape=(1,))]
    for i, form in enumerate(structure.outputs):
        others = altered(form)
        found += [replace(structure, outputs=(*structure.outputs[:i], f, *structure.outputs[i + 1 :])) for f in others]
    for j, unit in enumerate(structure.units):
        other = [replace(unit, reads=unit.reads[::-1])] if len(unit.reads) == 2 and not is_symmetric(unit) else []
        for i, form in enumerate(unit.reads):
            other += [replace(unit, reads=(*unit.reads[:i], f, *unit.reads[i + 1 :])) for f in altered(form)]
        builder = GraphBuilder(unit.graph.num_inputs)
        builder.nodes = list(unit.graph.nodes)
        other.append(replace(unit, graph=builder.finish([builder.add("tanh", unit.graph.outputs[0])], ())))
        found += [replace(structure, units=(*structure.units[:j], u, *structure.units[j + 1 :])) for u in other]
    return found


def altered(form: Form) -> list[Form]:
    found = [Form(form.constant + Fraction(1, 1 << 60), form.terms)]
    for k, c in form.terms.items():
        found.append(Form(form.constant, {**form.terms, k: c * Fraction(10**20 + 1, 10**20)}))
        found.append(Form(form.constant, {j: d for j, d in form.terms.items() if j != k}))
    return found


def is_symmetric(unit: Unit) -> bool:
    return unit.graph.nodes[-1].operation == "mul" and len(unit.graph.nodes) == 3


def texts(structure: Structure) -> list[tuple[str, ...]]:
    return [(unit.graph.infix(), *map(str, unit.reads)) for unit in structure.units]


def test_one_layer_finds_directions() -> None:
    """Affine changes of variables, merged terms, constants and affine parts."""
    found = one_layer(graph_of("exp(sin(x0 + 2*x1) + (2*x0 + 4*x1)^2) + 5*x0 + 7", 2))
    assert texts(found) == [("exp(sin(x0) + (2*x0)^2)", "#0 + 2·#1")]
    assert [str(form) for form in found.outputs] == ["5·#0 + #2 + 7"]
    assert texts(one_layer(graph_of("sin(3*x0) - 4*sin(5*x1 + 1)", 2))) == [
        ("sin(x0)", "3·#0"),
        ("sin(x0)", "5·#1 + 1"),
    ]
    assert texts(one_layer(graph_of("sin(x0) + x0^2 + x0*x1 + sin(x0*x1)", 2))) == [
        ("sin(x0) + x0^2", "#0"),
        ("x0*x1 + sin(x0*x1)", "#0", "#1"),
    ]
    assert [len(u.reads) for u in one_layer(graph_of("exp(x0+x1)*sin(x1+x2)*cos(x0-x2)", 3)).units] == [2]
    assert [len(u.reads) for u in one_layer(graph_of("exp(x0+x1)*sin(x1+x2)*cos(x0+x2)", 3)).units] == [3]
    assert one_layer(graph_of("2*x0 - x1/3 + 1", 2)).units == ()
    assert one_layer(graph_of("x0*x1 - x1*x0 + 2", 2)).units == ()


def test_layered_fuses_what_has_one_direction() -> None:
    """Powers, sinc, gates and quotients stay whole; sums become reads; equal functions have equal graphs."""
    assert texts(layered(graph_of("x0^0.758", 1))) == [("exp(0.758*log(x0))", "#0")]
    assert texts(layered(graph_of("sin(2*x0)/x0", 1))) == [("sin(2*x0)/x0", "#0")]
    assert texts(layered(graph_of("exp(sin(x0) + x0^2 + x0)", 1))) == [("exp(x0 + sin(x0) + x0^2)", "#0")]
    assert texts(layered(graph_of("x1/(1 + x0^2)", 2))) == [
        ("1/(x0^2 + 1)", "#0"),
        ("x0*x1", "#1", "#2"),
    ]
    gaussian = layered(graph_of(*FUNCTIONS["gaussian"]))
    assert {unit.graph.infix() for unit in gaussian.units} == {"x0^2", "exp(x0)"}
    assert len(gaussian.units) == 11 and gaussian.depth == 2
    softmax = layered(graph_of(SOFTMAX, 3))
    assert len(softmax.units) == 7 and len({unit.graph for unit in softmax.units}) == 3
    assert [softmax.level(j) for j in range(7)] == [1, 1, 1, 2, 3, 3, 3]
    product = layered(graph_of("x0*x1*x2*x3*x4*x5*x6*x7", 8))
    assert (len(product.units), product.depth) == (7, 3)
    assert len({u.graph for u in one_layer(graph_of("x0*sin(x1) + sin(2*x2)*x3", 4)).units}) == 1


def test_norms_that_reach_zero_are_trees_of_norms() -> None:
    """√(Σ x²) on a box around 0 has bounded slopes only as a norm; away from 0 it is cut into squares."""
    graph = graph_of("sqrt(x0^2 + x1^2 + x2^2 + x3^2 + x4^2)", 5)
    around, away = Box(-np.ones(5), np.ones(5)), Box(np.ones(5), 2 * np.ones(5))
    assert {unit.graph.infix() for unit in layered(graph, around).units} == {"sqrt(x0^2 + x1^2)"}
    assert len(layered(graph, around).units) == 4
    assert {unit.graph.infix() for unit in layered(graph, away).units} == {"x0^2", "sqrt(x0)"}
    assert layered(graph, away) == layered(graph)
    arm = layered(graph_of(ARM, 8), box_of("arm"))
    assert arm.units[-1].graph.infix() == "sqrt(x0^2 + x1^2)"
    assert same_function(graph, layered(graph, around))


def mlp(sizes: list[int], gate: torch.nn.Module) -> Graph:
    torch.manual_seed(1)
    layers: list[torch.nn.Module] = []
    for a, b in pairwise(sizes):
        layers += [torch.nn.Linear(a, b, dtype=torch.float64), gate]
    return trace(torch.nn.Sequential(*layers[:-1]), ((sizes[0],),), dtype=torch.float64)


@pytest.mark.parametrize(
    ("gate", "text"), [(torch.nn.GELU(), "erf"), (torch.nn.Tanh(), "tanh"), (torch.nn.SiLU(), "exp")]
)
def test_a_traced_network_is_one_gate(gate: torch.nn.Module, text: str) -> None:
    """All hidden neurons share one unit graph, and read sums with the weights of the network, which are float64 numbers."""
    graph = mlp([4, 12, 10, 2], gate)
    found = layered(graph)
    assert same_function(graph, found) and is_sound(found)
    assert len(found.units) == 22 and found.depth == 2
    assert len({unit.graph for unit in found.units}) == 1
    weights = [c for unit in found.units for form in unit.reads for c in (*form.terms.values(), form.constant)]
    first = [c for unit in found.units[:12] for form in unit.reads for c in form.terms.values()]
    assert len(weights) == 12 * 5 + 10 * 13 and all(Fraction(float(c)) == c for c in first)
    points = np.random.default_rng(2).uniform(-2, 2, (50, 4))
    np.testing.assert_allclose(evaluated(found, points), graph.evaluate(points), rtol=1e-10, atol=1e-13)


def chain(operation: str, length: int) -> Graph:
    """x ∘ c_1 ∘ c_2 …, and a nested chain of sines of sums."""
    builder = GraphBuilder(3)
    x = [builder.add("input", parameters=(i,)) for i in range(3)]
    value = x[0]
    for i in range(length):
        if operation == "nested":
            value = builder.add("sin", builder.add("add", value, x[i % 3]))
        elif operation == "unary":
            value = builder.add("sin", builder.add("add", value, builder.add("const", parameters=(float(i % 7),))))
        elif operation == "terms":
            value = builder.add(
                "add",
                value,
                builder.add("sin", builder.add("mul", x[i % 3], builder.add("const", parameters=(float(i),)))),
            )
        else:
            value = builder.add(
                operation,
                value,
                builder.add("sin", builder.add("mul", x[i % 3], builder.add("const", parameters=(float(i),)))),
            )
    return builder.finish([value], ())


@pytest.mark.parametrize("operation", ["nested", "unary", "terms", "mul", "max"])
def test_long_chains(operation: str) -> None:
    """Thousands of nodes, without recursion and without quadratic cost."""
    graph = chain(operation, 1500)
    for structure in (one_layer(graph), layered(graph)):
        assert same_function(graph, structure)
        assert is_sound(structure)


def test_enormous_coefficients_are_refused() -> None:
    builder = GraphBuilder(1)
    value = builder.add("input", parameters=(0,))
    for _ in range(100):
        value = builder.add("mul", value, builder.add("const", parameters=(0.1,)))
    graph = builder.finish([builder.add("sin", value)], ())
    with pytest.raises(UnsupportedError, match="4096 bits"):
        layered(graph)


def test_forms_of_quadratic_size_are_refused() -> None:
    """All partial products of a long product, each read by something else: their forms have n²/2 factors."""
    builder = GraphBuilder(1)
    x = builder.add("input", parameters=(0,))
    value, outputs = x, []
    for _ in range(2100):
        value = builder.add("mul", value, x)
        outputs.append(builder.add("sin", value))
    graph = builder.finish([builder.add("sum", *outputs)], ())
    with pytest.raises(UnsupportedError, match="terms"):
        layered(graph)


def test_too_many_shared_nodes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every partial result of a long chain is an output: one unit for each would take a quadratic number of nodes."""
    builder = GraphBuilder(2)
    value, y = (builder.add("input", parameters=(i,)) for i in range(2))
    outputs = []
    for _ in range(100):
        value = builder.add("sin", builder.add("mul", value, y))
        outputs.append(value)
    graph = builder.finish(outputs, (100,))
    monkeypatch.setattr(structure_module, "_MOST_NODES", 5000)
    with pytest.raises(UnsupportedError, match="nodes together"):
        one_layer(graph)
    assert same_function(graph, layered(graph))


def random_graph(rng: np.random.Generator) -> Graph:
    """A random function with shared nodes, defined almost everywhere on [0.2, 2]^m."""
    m = int(rng.integers(1, 5))
    builder = GraphBuilder(m)
    nodes = [builder.add("input", parameters=(i,)) for i in range(m)]
    for _ in range(int(rng.integers(2, 25))):
        a, b, c = (nodes[int(k)] for k in rng.integers(max(0, len(nodes) - 8), len(nodes), 3))
        number = builder.add("const", parameters=(float(rng.choice([0.1, 2.0, -1.0, 3.0, 1e-3, 0.0])),))
        pick = int(rng.integers(20))
        if pick < 5:
            nodes.append(builder.add(str(rng.choice(["add", "sub", "mul", "max", "min"])), a, b))
        elif pick < 8:
            nodes.append(builder.add(str(rng.choice(["add", "sub", "mul"])), a, number))
        elif pick < 10:
            positive = builder.add(
                "add", builder.add("pow", b, parameters=(2,)), builder.add("const", parameters=(1.5,))
            )
            nodes.append(builder.add("div", positive if pick == 8 and rng.random() < 0.3 else a, positive))
        elif pick < 12:
            nodes.append(builder.add("sum", a, b, c, number))
        elif pick == 12:
            jump = builder.add("sub", a, builder.add("const", parameters=(float(rng.uniform(0.2, 1.0)),)))
            nodes.append(builder.add("where", jump, b, c))
        elif pick == 13:
            nodes.append(builder.add("pow", a, parameters=(int(rng.integers(-1, 4)),)))
        elif pick == 14:
            nodes.append(builder.add("clamp", a, parameters=(-0.5, 2.0)))
        elif pick == 15:
            nodes.append(
                builder.add(
                    "sqrt", builder.add("add", builder.add("pow", a, parameters=(2,)), builder.add("mul", b, b))
                )
            )
        else:
            nodes.append(
                builder.add(str(rng.choice(["sin", "tanh", "atan", "abs", "relu", "neg", "sigmoid", "erf"])), a)
            )
    outputs = [nodes[int(k)] for k in rng.integers(0, len(nodes), int(rng.integers(1, 4)))] + [nodes[-1]]
    return builder.finish(outputs, (len(outputs),))


@pytest.mark.parametrize("seed", range(12))
def test_random_functions(seed: int) -> None:
    """Evaluated unit by unit, both structures agree with the graph; their forms do too."""
    rng = np.random.default_rng(seed)
    for _ in range(25):
        graph = random_graph(rng)
        box = Box(np.full(graph.num_inputs, 0.2), np.full(graph.num_inputs, 2.0))
        points = box.sample(20, rng)
        expected = graph.evaluate(points)
        for structure in structures(graph, box):
            assert same_function(graph, structure) and checked_as_same(graph, structure)
            assert is_sound(structure)
            found = evaluated(structure, points)
            usable = np.isfinite(expected) & (np.abs(expected) < 1e6)
            close = np.isclose(found, expected, rtol=1e-6, atol=1e-9) | ~usable
            assert close.mean() > 0.97  # rounding may move a point across a jump


def values_of(forms: list[Form], interner: Interner, x: np.ndarray) -> np.ndarray:
    """The values of forms at the rows of x, atom by atom."""
    values: list[np.ndarray] = []

    def value(form: Form) -> np.ndarray:
        return sum((float(c) * values[k] for k, c in form.terms.items()), np.full(len(x), float(form.constant)))

    for atom in interner.atoms:
        arguments = [value(form) for form in atom.arguments]
        if atom.operation == "input":
            values.append(x[:, int(atom.parameters[0])])
        elif atom.operation == "recip":
            values.append(1 / arguments[0])
        elif atom.operation in ("product", "max", "min"):
            operation = OPERATIONS["mul" if atom.operation == "product" else atom.operation].numpy
            values.append(reduce(operation, arguments))
        else:
            values.append(OPERATIONS[atom.operation].numpy(*arguments, *atom.parameters))
    return np.column_stack([value(form) for form in forms])


@pytest.mark.parametrize("seed", range(6))
@np.errstate(all="ignore")
def test_forms_have_the_values_of_the_graph(seed: int) -> None:
    """A wrong rule would make two different functions equal, and both sides of a comparison wrong in the same way."""
    rng = np.random.default_rng(100 + seed)
    graphs = [random_graph(rng) for _ in range(25)] + [graph_of(*FUNCTIONS[name]) for name in FUNCTIONS]
    for graph in graphs if seed == 0 else graphs[:25]:
        points = rng.uniform(0.2, 2.0, (20, graph.num_inputs))
        interner = Interner()
        forms = forms_of(graph, [interner.input(i) for i in range(graph.num_inputs)], interner)
        expected = graph.evaluate(points).reshape(20, -1)
        usable = np.isfinite(expected) & (np.abs(expected) < 1e6)
        close = np.isclose(values_of(forms, interner, points), expected, rtol=1e-6, atol=1e-9) | ~usable
        assert close.mean() > 0.97  # rounding may move a point across a jump


def test_forms_know_the_identities() -> None:
    """What is equal has equal forms; what differs has not."""

    def form(text: str) -> Form:
        return forms_of(graph_of(text, 3), inputs, interner)[0]

    interner = Interner()
    inputs = [interner.input(i) for i in range(3)]
    for a, b in [
        ("2*x0*(3*x1)", "6*(x1*x0)"),
        ("(x0*x1)*(x2*x0)", "x0*(x0*(x1*x2))"),
        ("x0/(2*x1)", "0.5*(1/x1)*x0"),
        ("x0/(x1*x2)", "x0/x1/x2"),
        ("1/(1/x0)", "x0"),
        ("sqrt(x0 + x1)^2", "x1 + x0"),
        ("max(x0, max(x1, x2))", "max(max(x2, x0), x1)"),
        ("sin(2*(x0 + x1) - x1)", "sin(2*x0 + x1)"),
        ("(2*x0 + 4*x1)*x2", "2*((x0 + 2*x1)*x2)"),
        ("x0^1 + x1^0", "x0 + 1"),
        ("2^3*x0/4", "2*x0"),
    ]:
        assert form(a) == form(b), (a, b)
    for a, b in [
        ("x0*x1", "x0*x2"),
        ("x0*x0", "x0"),
        ("x0/x1", "x1/x0"),
        ("max(x0, x1)", "min(x0, x1)"),
        ("max(x0, x1)", "max(x0, x1, x2)"),
        ("sin(x0)", "cos(x0)"),
        ("x0^2", "x0^3"),
        ("clamp(x0, 0, 1)", "clamp(x0, 0, 2)"),
        ("0.1 + 0.2 + x0", "0.3 + x0"),
        ("x0/x0", "1"),
        ("x0/x0", "1/(x0*x0)"),
        ("(x0 + x1)/(x0 + x1)", "1/(x0 + x1)/(x0 + x1)"),
        ("(x0*x1)/(x0*x1)", "1/(x0*x1)/(x0*x1)"),
        ("x0 - x1", "x1 - x0"),
    ]:
        assert form(a) != form(b), (a, b)


def shared_sums() -> Graph:
    """Sums that something reads before another sum extends them: as they are, under a root, times 1, to the power 1."""
    builder = GraphBuilder(3)
    x = [builder.add("input", parameters=(i,)) for i in range(3)]
    one, outputs = builder.add("const", parameters=(1.0,)), []
    for operation in ("sqrt", "mul", "pow", "max"):
        total = builder.add(
            "add",
            builder.add(
                operation,
                x[0],
                *([one] if operation in ("mul", "max") else []),
                parameters=(3,) if operation == "pow" else (),
            ),
            x[1],
        )
        first = {
            "sqrt": lambda k: builder.add("sqrt", k),
            "mul": lambda k: builder.add("mul", one, k),
            "pow": lambda k: builder.add("pow", k, parameters=(1,)),
            "max": lambda k: builder.add("max", k, x[2]),
        }[operation](total)
        longer = builder.add("sub", total, x[2])
        outputs += [first, longer, builder.add("pow", first, parameters=(2,)), builder.add("add", first, longer)]
    return builder.finish(outputs, (len(outputs),))


@pytest.mark.parametrize("seed", range(4))
def test_forms_do_not_depend_on_what_else_is_read(seed: int) -> None:
    """Sums are gathered in place; a form that something else holds must not change. Here and in the checker."""
    rng = np.random.default_rng(seed)
    for graph in [shared_sums(), *(random_graph(rng) for _ in range(10))]:
        interner, atoms = Interner(), checked.Atoms()
        inputs = [interner.input(i) for i in range(graph.num_inputs)]
        theirs = [atoms.atom("input", i) for i in range(graph.num_inputs)]
        together = forms_of(graph, inputs, interner)
        checked_together = checked.forms_of(read_graph(graph.to_json()), theirs, atoms)
        for k, form, other in zip(graph.outputs, together, checked_together, strict=True):
            alone = replace(graph, outputs=(k,), output_shape=())
            assert forms_of(alone, inputs, interner) == [form]
            assert checked.forms_of(read_graph(alone.to_json()), theirs, atoms) == [other]


def checked_as_same(graph: Graph, structure: Structure) -> bool:
    """What the checker's own forms say."""
    atoms = checked.Atoms()
    channels = [atoms.atom("input", i) for i in range(graph.num_inputs)]
    expected = checked.forms_of(read_graph(graph.to_json()), channels, atoms)

    def value(form: Form) -> checked.Form:
        constant = {checked.ONE: fmpq(form.constant.numerator, form.constant.denominator)} if form.constant else {}
        parts = [(fmpq(c.numerator, c.denominator), channels[k]) for k, c in form.terms.items()]
        return checked.combined([(fmpq(1), constant), *parts])

    for unit in structure.units:
        channels += checked.forms_of(read_graph(unit.graph.to_json()), [value(form) for form in unit.reads], atoms)
    return expected == [value(form) for form in structure.outputs]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_checker_recognises_the_structures(name: str) -> None:
    """It has forms of its own, with at least the identities that structures rely on."""
    graph = graph_of(*FUNCTIONS[name])
    for structure in structures(graph, box_of(name)):
        assert checked_as_same(graph, structure)
        wrong = structure.outputs[0].plus(Form(Fraction(1, 10**30)))
        assert not checked_as_same(graph, replace(structure, outputs=(wrong, *structure.outputs[1:])))


def test_constants_are_written_exactly() -> None:
    """Sums and quotients of constants that float64 does not hold are exact in units too."""
    graph = graph_of("exp((x0 + sin(x0))*(0.1*0.3) + x0^2/3 + x0^3*(1e200 + 1e-200))", 1)
    for structure in (one_layer(graph), layered(graph)):
        assert same_function(graph, structure)
