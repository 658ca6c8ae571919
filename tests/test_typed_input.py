"""What people type: domains as text and pairs, comparisons, new functions and constants, in Python and on the command line."""

from __future__ import annotations

import math
import re
from fractions import Fraction

import numpy as np
import pytest
import sympy
import torch
from partita_check.graph import parse as checked_parse
from typer.testing import CliRunner

import partita as pa
from partita.cli import app
from partita.errors import DomainError, ExpressionError, NonFiniteValueError, NotContinuousError
from partita.functions import parse
from partita.functions.branches import Truth
from partita.functions.expressions import FUNCTIONS, function_names
from partita.functions.sympy_trees import from_sympy
from partita.functions.target import make_target
from partita.functions.tracing import trace
from partita.papers import relu_head
from partita.ramps import ramp

NAMES, LETTERS = ["x0", "x1"], {"x": "x0", "y": "x1"}
SQUARE = pa.Box([-1, -1], [1, 1])


def read(text: str) -> object:
    return parse(text, NAMES, LETTERS)


# --- domains -----------------------------------------------------------------------------------------------------------

DOMAINS = [
    ("[-1,1]^2", [-1, -1], [1, 1]),
    ("[-1, 1] x [0, 2]", [-1, 0], [1, 2]),
    ("[-1,1]×[0,2]", [-1, 0], [1, 2]),
    ("[0, pi]", [0], [math.pi]),
    ("[-pi/2, 2*pi]", [-math.pi / 2], [2 * math.pi]),
    ("[1/3, 2/3] ** 2", [1 / 3, 1 / 3], [2 / 3, 2 / 3]),
    ("[-(1 + e), 1e-3]", [-(1 + math.e)], [1e-3]),
    ("[(0, 3), (273, 323)]", [0, 273], [3, 323]),
    ([(0, 3), (273, 323)], [0, 273], [3, 323]),
    (((0, 3), (273, 323)), [0, 273], [3, 323]),
    (np.array([[0, 3], [273, 323]]), [0, 273], [3, 323]),
    ([(0, "2*pi")], [0], [2 * math.pi]),
    ((0, 1), [0], [1]),
]


@pytest.mark.parametrize(("typed", "lo", "hi"), DOMAINS, ids=[str(d[0]) for d in DOMAINS])
def test_a_typed_domain_is_the_box_that_it_says(typed, lo, hi):
    assert pa.Box.of(typed) == pa.Box(lo, hi)


def test_ends_are_computed_exactly_and_rounded_once():
    nearest = float(Fraction(math.pi) * Fraction("0.1") / 3 + 1)
    assert pa.Box.of("[0, 0.1*pi/3 + 1]").hi[0] == nearest
    assert pa.Box.of("[0, 1]").hi[0] != pa.Box.of("[0, 1.0000000000000002]").hi[0]


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("(0,1)", "Domains are closed"),
        ("[0,1", "cannot be read"),
        ("[1,0]", "lo = 1 ≥ hi = 0 on axis 0"),
        ("[0, inf]", "finite number"),
        ("[0, 2pi]", "2*pi"),
        ("[0, 1/0]", "finite number"),
        ("[0, __import__('os').getpid()]", "finite number"),
        ("[0, 9**9**9**9]", "finite number"),
        ("[0," + "(" * 4000 + "1" + ")" * 4000 + "]", "finite number"),
        ("[0,1]^0", "no axes"),
        ([[-1, -1], [1, 1]], "pa.Box(lo, hi)"),
        ([0, 1, 2], "a pair (lo, hi) for each axis"),
        ([True, 2], "a pair (lo, hi) for each axis"),
        (5, "a pair (lo, hi) for each axis"),
    ],
)
def test_what_is_no_box_is_refused_with_an_example(typed, says):
    with pytest.raises(DomainError, match=re.escape(says)):
        pa.Box.of(typed)


def test_the_text_of_a_box_is_read_back():
    for box in (SQUARE, pa.Box([0, 1], [2, 3]), pa.Box.sequence(-1, 1, tokens=3, dim=2)):
        assert pa.Box.of(str(box)) == box
    many = pa.Box([-1] * 100, [1] * 100)
    assert repr(many) == "Box.of('[-1,1]^100')" and pa.Box.of("[-1,1]^100") == many
    assert "0.1" in repr(pa.Box([0.1] * 9, [0.1 + 0.2] * 9)) and "Box.of" not in repr(
        pa.Box([0.1] * 9, [0.1 + 0.2] * 9)
    )


def test_everything_that_takes_a_domain_takes_typed_ones():
    text = "sin(3*x) + x*cos(2*y)"
    same = [pa.plan(text, d, tolerance=0.5, method="hard").keys for d in (SQUARE, "[-1,1]^2", [(-1, 1), (-1, 1)])]
    assert len(set(same)) == 1
    c = pa.compile("x*y", "[-1,1]^2", tolerance=0.05, method="fitted")
    assert c.target.box == SQUARE and not pa.attack(c, samples=200).refuted
    assert not pa.attack(
        lambda z: z[:, 0] * z[:, 1], function="x*y", domain="[-1,1]^2", bound=0.05, samples=200
    ).refuted
    assert len(pa.compile("k0*q0", ("[0,1]", pa.Box([0], [1])), tolerance=0.2, method="hard").target.domains) == 2
    assert pa.Region("[-1,1]^2", "x**2 + y**2 <= 1") == pa.Region(SQUARE, "x**2 + y**2 <= 1")
    assert pa.in_context.function(lipschitz=1.0, fill_distance=0.1, tolerance=0.15, box="[-1,1]").box.dimension == 1
    assert relu_head([1.0], 0.0, "[-1,1]", tolerance=1e-3).certificate.error_bound <= 1e-3
    assert ramp([1.0], 0.0, (0, 1), anchors=8, domain=(-1, 1)) is not None


# --- comparisons -------------------------------------------------------------------------------------------------------

CONDITIONS = {
    "x > 0.5": lambda x, y: x > 0.5,
    "x >= 0.5": lambda x, y: x >= 0.5,
    "x < y": lambda x, y: x < y,
    "x <= y": lambda x, y: x <= y,
    "x ≥ 0": lambda x, y: x >= 0,
    "0 < x": lambda x, y: x > 0,
    "0 < x <= 0.5": lambda x, y: 0 < x <= 0.5,
    "0 <= x <= y < 0.5": lambda x, y: 0 <= x <= y < 0.5,
    "x > 0 and y > 0": lambda x, y: x > 0 and y > 0,
    "x > 0 && y >= 0.5": lambda x, y: x > 0 and y >= 0.5,
    "x > 0 or y < 0": lambda x, y: x > 0 or y < 0,
    "x >= 0.5 or y > 0 and x < 0": lambda x, y: x >= 0.5 or (y > 0 and x < 0),
    "not (x > 0 or y >= 0.5)": lambda x, y: not (x > 0 or y >= 0.5),
    "not x > y and not (y < 0)": lambda x, y: not x > y and not y < 0,
    "x + 1 > 2*y": lambda x, y: x + 1 > 2 * y,
}
ENDS = [-1.0, -0.5, -5e-324, 0.0, 5e-324, 0.25, 0.5, np.nextafter(0.5, 1), np.nextafter(0.5, 0), 1.0]
PLACES = np.array([(a, b) for a in ENDS for b in ENDS])


def disagreements(text: str) -> int:
    """Points, most of them on an edge, where a branch was chosen that Python's own comparison does not choose."""
    graph = read(f"where({text}, 7, x*0 - 3)")
    wanted = [7.0 if CONDITIONS[text](a, b) else -3.0 for a, b in PLACES.tolist()]
    in_torch = graph.evaluate_torch(torch.from_numpy(PLACES)).numpy().ravel()
    return int((graph.evaluate(PLACES).ravel() != wanted).sum() + (in_torch != wanted).sum())


@pytest.mark.parametrize("text", CONDITIONS)
def test_comparisons_are_exact_also_at_equality(text):
    assert disagreements(text) == 0
    graph = read(f"where({text}, x, y*y)")
    assert parse(graph.infix(), NAMES) == graph
    assert checked_parse(f"where({text}, x, y*y)", NAMES).canonical() == checked_parse(graph.infix(), NAMES).canonical()


def test_negative_control_a_strict_comparison_that_is_not_strict_is_caught(monkeypatch):
    compared = Truth.compared
    loose = {"<": "<=", ">": ">="}
    monkeypatch.setattr(Truth, "compared", staticmethod(lambda s, *rest: compared(loose.get(s, s), *rest)))
    assert disagreements("x > 0.5") > 0 and disagreements("x >= 0.5") == 0


def test_a_jump_is_proved_in_the_mean_and_refused_in_the_sup_norm():
    for text in ("where(x > 0.5, 1, 2)", "floor(3*x)", "sign(x - 0.3)"):
        c = pa.compile(text, (0, 1), tolerance=0.3, norm=1, method="hard")
        assert c.certificate.kind == "proved" and c.error_bound <= 0.3
        with pytest.raises(NotContinuousError):
            pa.plan(text, (0, 1), tolerance=0.3, method="hard")


def test_branches_that_meet_have_no_jump():
    c = pa.compile("where(x > 0, x, 0.1*x)", "[-1,1]", tolerance=0.05, method="hard")
    assert c.certificate.kind == "proved" and c.error_bound <= 0.05


@pytest.mark.parametrize(
    "text", ["x > 1", "(x > 0)*x", "where(x > 0 and y, 1, 2)", "not x", "sin(x > 0)", "where(x = 1, 1, 2)"]
)
def test_comparisons_belong_into_where(text):
    with pytest.raises(ExpressionError, match="comparison"):
        read(text)


# --- functions, constants, names -----------------------------------------------------------------------------------------

BATTERY = "3.4 - 2*8.314*y/96485*asinh(x/(1.6*exp(-3000*(1/y - 1/298.15))))"


def test_the_new_functions_are_proved_where_they_are_defined():
    cases = {
        "asinh(5*x)": (-1, 1),
        "acosh(1 + x)": (0, 1),
        "atanh(x)": (-0.9, 0.9),
        "asinh(x)/x + atanh(x/2)/x": (-1, 1),
        "erf(x) + sin(pi*x) - e": (-1, 1),
    }
    for text, domain in cases.items():
        c = pa.compile(text, domain, tolerance=0.1, method="hard" if "acosh" in text else "fitted")
        assert c.certificate.kind == "proved" and c.error_bound <= 0.1, text
    assert pa.plan(BATTERY, [(0, 3), (273, 323)], tolerance=0.2, method="hard").kind == "proved"


@pytest.mark.parametrize(("text", "domain"), [("acosh(x)", (0, 2)), ("atanh(x)", (-1, 1)), ("atanh(2*x)", (0, 1))])
def test_edges_of_definition_are_noticed(text, domain):
    with pytest.raises(NonFiniteValueError):
        pa.compile(text, domain, tolerance=0.1)


def test_an_acosh_on_a_region_must_follow_from_its_constraints():
    assert make_target("acosh(x**2 + y**2)", pa.Region("[-2,2]^2", "x**2 + y**2 >= 1")).graph is not None
    with pytest.raises(NonFiniteValueError, match="acosh"):
        make_target("acosh(x**2 + y**2)", pa.Region("[-2,2]^2", "x**2 + y**2 >= 0.99"))


def test_pi_and_e_are_said_to_be_rounded():
    c = pa.compile("sin(pi*x)", (0, 1), tolerance=0.1, method="fitted")
    assert "pi means the nearest float64 number" in c.explain()


def test_sympy_and_torch_know_the_new_functions():
    x = sympy.Symbol("x")
    tree = sympy.asinh(x) + sympy.acosh(x + 2) + sympy.atanh(x / 2) + sympy.floor(3 * x) - sympy.ceiling(x) + sympy.pi
    graph = from_sympy(tree + sympy.sign(x) + sympy.Heaviside(x) + sympy.E, ["x"])
    points = np.array([[-0.75], [0.0], [0.3], [0.9]])
    exact = [
        float((tree + sympy.sign(x) + sympy.Heaviside(x) + sympy.E).subs(x, sympy.Rational(v))) for v in points[:, 0]
    ]
    np.testing.assert_allclose(graph.evaluate(points).ravel(), exact, rtol=1e-13)
    strict = from_sympy(sympy.Piecewise((1, x > 0), (2, x >= -1), (3, True)), ["x"])
    assert strict.evaluate(np.array([[0.0], [5e-324], [-1.0], [-1.5]])).ravel().tolist() == [2, 1, 2, 3]
    traced = trace(lambda z: torch.asinh(z[:, 0]) + torch.floor(3 * z[:, 0]) + torch.sign(z[:, 0]), [(1,)])
    assert {"asinh", "floor"} <= {node.operation for node in traced.nodes}


def test_a_wrong_name_is_answered_with_a_suggestion_and_all_functions():
    for text, meant in (("arcsinh(x)", "asinh"), ("ln(x)", "log"), ("tanhh(x)", "tanh")):
        with pytest.raises(ExpressionError, match=f"did you mean {meant}\\?") as caught:
            read(text)
        assert all(name in str(caught.value) for name in FUNCTIONS)
    with pytest.raises(ExpressionError, match="also named x, y"):
        read("z")
    with pytest.raises(ExpressionError, match="up to three variables"):
        parse("x + x3", [f"x{i}" for i in range(4)])


def test_the_command_line_reads_and_lists_the_same():
    run = CliRunner().invoke
    for command in ("plan", "compile"):
        shown = re.sub(r"\W+", " ", run(app, [command, "--help"], env={"COLUMNS": "200"}).output)
        assert all(f" {name} " in shown for name in FUNCTIONS)
    domain = ["--domain", "[(0, 3), (273, 323)]", "--tolerance", "0.5", "--method", "hard", "--json"]
    found = run(app, ["plan", "where(x > 1.5, x, 1.5) + asinh(y/300)", *domain])
    assert found.exit_code == 0 and '"[0,3]x[273,323]"' in found.output
    assert function_names() == ", ".join(sorted(FUNCTIONS))
