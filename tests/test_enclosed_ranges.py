"""Ranges of expressions over boxes: they hold every value, have no poles where f has none, and are close to what is seen."""

import math

import balls
import numpy as np
import pytest

from partita.errors import DomainError, ShapeError
from partita.functions import parse
from partita.functions import ranges as module
from partita.functions.ranges import enclose_each, range_over

# formulas and domains of the Virtual Library of Simulation Experiments (Surjanovic and Bingham)
_A = "(x4*x1 + 19.62*x0 - x3*x2/x1)"
_V = f"(x1/(2*x3)*(sqrt({_A}**2 + 4*x3*x4*x2/x6*x5) - {_A}))"
_HIGH = "(x5*(x4 + 9))"
_SUMS = ["+".join(f"x{j}" for j in range(i + 1)) for i in range(4)]
_ARM = [" + ".join(f"x{i + 4}*{wave}({s})" for i, s in enumerate(_SUMS)) for wave in ("cos", "sin")]
PHYSICS = {
    "piston": (
        f"2*pi*sqrt(x0/(x3 + x1**2*x4*x2/x6*x5/{_V}**2))",
        [(30, 60), (0.005, 0.02), (0.002, 0.01), (1000, 5000), (90_000, 110_000), (290, 296), (340, 360)],
        0.2,
    ),
    "borehole": (
        "2*pi*x2*(x3 - x5)/(log(x1/x0)*(1 + 2*x6*x2/(log(x1/x0)*x0**2*x7) + x2/x4))",
        [(0.05, 0.15), (100, 50_000), (63_070, 115_600), (990, 1110), (63.1, 116), (700, 820), (1120, 1680), (9855, 12_045)],
        0.03,
    ),
    "otl circuit": (
        f"(12*x1/(x0 + x1) + 0.74)*{_HIGH}/({_HIGH} + x2) + 11.35*x2/({_HIGH} + x2) + 0.74*x2*{_HIGH}/(({_HIGH} + x2)*x3)",
        [(50, 150), (25, 70), (0.5, 3), (1.2, 2.5), (0.25, 1.2), (50, 300)],
        0.01,
    ),
    "wing weight": (
        "0.036*x0**0.758*x1**0.0035*(x2/cos(x3*pi/180)**2)**0.6*x4**0.006*x5**0.04"
        "*(100*x6/cos(x3*pi/180))**(-0.3)*(x7*x8)**0.49 + x0*x9",
        [(150, 200), (220, 300), (6, 10), (-10, 10), (16, 45), (0.5, 1), (0.08, 0.18), (2.5, 6), (1700, 2500), (0.025, 0.08)],
        0.01,
    ),
    "robot arm": (
        f"sqrt(({_ARM[0]})**2 + ({_ARM[1]})**2)",
        [(0, 2 * math.pi)] * 4 + [(0, 1)] * 4,
        0.4,
    ),
}  # fmt: skip


def names(count):
    return [f"x{i}" for i in range(count)]


def sampled(lo, hi, count, rng):
    """Random points, corners, and points with some coordinates at an end."""
    x = lo + (hi - lo) * rng.random((count, len(lo)))
    ends = np.where(rng.random(x.shape) < 0.5, lo, hi)
    return np.clip(np.concatenate([x, ends, np.where(rng.random(x.shape) < 0.5, x, ends)]), lo, hi)


@pytest.mark.parametrize("name", PHYSICS)
def test_formulas_of_physics(name):
    """Never a sampled value outside, and not much wider than what is seen."""
    text, domain, slack = PHYSICS[name]
    graph, (lo, hi) = parse(text, names(len(domain))), np.array(domain, float).T
    found, rng = range_over(graph, lo, hi), np.random.default_rng(0)
    x = sampled(lo, hi, 20_000, rng)
    seen = graph.evaluate(x)
    for z in x[np.argsort(seen)[[*range(10), *range(-10, 0)]]]:  # where it matters, with 200 bits
        with balls.bits(200):
            assert balls.holds(float(found.lo[0]), float(found.hi[0]), balls.values(graph, z.tolist())[0])
    width = seen.max() - seen.min()
    assert found.lo[0] > seen.min() - slack * width and found.hi[0] < seen.max() + slack * width


RANDOM = [
    "x0*x1 - sin(3*x0)", "exp(x0)*cos(x1 + x0**2)", "x0/(2 + x1) - tanh(x0*x1)", "abs(x0 - 0.3) + max(x0, x1)",
    "sqrt(x0**2 + x1**2)", "log(2 + x0*x1)*erf(x1)", "relu(x0 + x1)**2 - sigmoid(5*x0)", "atan(x0)/(1 + x1**2) + x0**3",
    "where(x0, x1, -x1)", "clamp(2*x0, -0.5, 1.5)*x1", "sin(x0)/x0 + x1", "(x0 + x1)**2 - (x0 - x1)**2 - 4*x0*x1",
]  # fmt: skip


@pytest.mark.parametrize("text", RANDOM)
def test_values_and_slopes_on_random_boxes(text):
    """Values at points, and differences between points, of boxes of all sizes: settled by balls."""
    graph, rng = parse(text, names(2)), np.random.default_rng(len(text))
    centers, sizes = rng.uniform(-1, 1, (12, 2)), 10.0 ** rng.uniform(-6, 0, (12, 2))
    lo, hi = centers - sizes * (rng.random((12, 2)) < 0.8), centers + sizes
    values, slopes = enclose_each(graph, lo, hi)
    for k in range(len(lo)):
        found = range_over(graph, lo[k], hi[k], boxes=32)
        x = sampled(lo[k], hi[k], 4, rng)
        with balls.bits(200):
            y = [balls.values(graph, z.tolist())[0] for z in x]
            for z, value in zip(x, y):
                assert balls.holds(float(values.lo[k]), float(values.hi[k]), value) is not False, (text, z)
                assert balls.holds(float(found.lo[0]), float(found.hi[0]), value) is not False, (text, z)
            for i in range(1, len(x)):
                most = sum(
                    balls.arb(float(slopes.magnitude[k, j])) * abs(balls.arb(x[i, j]) - balls.arb(x[i - 1, j]))
                    for j in range(2)
                    if x[i, j] != x[i - 1, j]
                )
                assert not abs(y[i] - y[i - 1]) > most, (text, x[i - 1 : i + 1])


@pytest.mark.parametrize(
    ("text", "lo", "hi"),
    [("x - x**2", 0.0, 1.0), ("x*exp(-x)", 0.0, 4.0), ("0.5*x*(1 + erf(x/sqrt(2)))", -5.0, 5.0), ("sin(x)**2 + cos(x)**2", 0, 9)],
)  # fmt: skip
def test_functions_of_one_variable_are_enclosed_closely(text, lo, hi):
    graph = parse(text, ["x"])
    seen = graph.evaluate(np.linspace(lo, hi, 10_001)[:, None])
    values, _ = enclose_each(graph, np.array([[lo]]), np.array([[hi]]))
    slack = 0.01 * (seen.max() - seen.min()) + 0.1 * (text.startswith("sin"))
    for found in (values, range_over(graph, [lo], [hi])):
        assert seen.min() - slack <= found.lo[0] <= seen.min() and seen.max() <= found.hi[0] <= seen.max() + slack


def test_monotone_coordinates_are_exact_without_halving():
    graph = parse("exp(x0)*x1 - x2/x1 + x0*x3", names(4))
    lo, hi = np.array([0.0, 1.0, 1.0, 0.5]), np.array([1.0, 3.0, 2.0, 2.0])
    found = range_over(graph, lo, hi, boxes=1)
    assert found.lo[0] == pytest.approx(-1.0, abs=1e-12)  # x = (0, 1, 2, …)
    assert found.hi[0] == pytest.approx(3 * math.e - 1 / 3 + 2, abs=1e-12)


def test_a_difference_that_never_vanishes_is_told_from_zero():
    """One walk over the graph lets the divisor be 0; here its range is found first, and the function has a bound."""
    graph, lo, hi = parse("1/(sqrt(x0**2 + x1) - x0)", names(2)), np.array([-3.0, 1.0]), np.array([3.0, 9.0])
    assert graph.enclose(lo[None], hi[None]).is_entire.all()
    found = range_over(graph, lo, hi)
    most = 1 / (math.sqrt(10) - 3)
    assert 0 < found.lo[0] <= 1 / (math.sqrt(18) + 3) and most <= found.hi[0] < 1.2 * most
    assert range_over(graph, lo, hi, boxes=1).hi[0] > 1.2 * most  # not without looking


@pytest.mark.parametrize(
    ("text", "lo", "hi", "least", "most"),
    [
        ("1/x", -1.0, 1.0, -math.inf, math.inf),
        ("log(x)", 0.0, 1.0, -math.inf, 0.0),
        ("1/x**2", -1.0, 2.0, None, math.inf),
        ("exp(exp(x))", 0.0, 9.0, math.e, math.inf),
    ],
)
def test_poles_are_infinite_ends(text, lo, hi, least, most):
    found = range_over(parse(text, ["x"]), [lo], [hi], boxes=64)
    assert least is None or found.lo[0] == pytest.approx(least, rel=1e-9)
    assert found.hi[0] == pytest.approx(most, abs=1e-9)
    values, _ = enclose_each(parse(text, ["x"]), np.array([[lo]]), np.array([[hi]]))
    assert values.hi[0] >= most


def test_slopes_without_a_bound_say_nothing_about_the_others():
    _, slopes = enclose_each(parse("sqrt(x0)*x1", names(2)), np.array([[0.0, -1.0]]), np.array([[4.0, 1.0]]))
    assert np.isinf(slopes.magnitude[0, 0]) and slopes.magnitude[0, 1] == pytest.approx(2.0)
    _, jump = enclose_each(parse("floor(x0) + x1", names(2)), np.array([[0.5, 0.0]]), np.array([[1.5, 1.0]]))
    assert np.isinf(jump.magnitude[0, 0]) and jump.magnitude[0, 1] == pytest.approx(1.0)


def test_points_and_infinite_boxes():
    graph = parse("x0*x1", names(2))
    found = range_over(graph, [0.5, 3.0], [0.5, 3.0])
    assert found.lo[0] <= 1.5 <= found.hi[0] and found.hi[0] - found.lo[0] < 1e-15
    values, slopes = enclose_each(graph, np.array([[-math.inf, 0.0]]), np.array([[math.inf, 1.0]]))
    assert values.is_entire.all() and np.isinf(slopes.magnitude[0, 1])
    with pytest.raises(ShapeError, match="expected 2"):
        range_over(graph, [0.0], [1.0])
    for lo, hi in (([1.0, 0.0], [0.0, 1.0]), ([0.0, 0.0], [1.0, math.inf]), ([math.nan, 0.0], [1.0, 1.0])):
        with pytest.raises(DomainError, match="lo ≤ hi"):
            range_over(graph, lo, hi)


def test_several_outputs():
    graph = parse("x0 + x1, x0*x1", names(2))
    found = range_over(graph, [-1.0, -1.0], [1.0, 2.0])
    assert found.lo.tolist() == pytest.approx([-2.0, -2.0]) and found.hi.tolist() == pytest.approx([3.0, 2.0])


@pytest.mark.parametrize("wrong", ["faces", "spread"])
def test_wrong_enclosures_are_noticed(wrong, monkeypatch):
    """The tests above would fail if a coordinate were set to the wrong end, or slopes were forgotten."""
    if wrong == "faces":
        right = module._faces
        monkeypatch.setattr(module, "_faces", lambda *a: right(*a)[::-1])
    else:
        monkeypatch.setattr(module, "_spread", lambda slope, radius: np.zeros(len(radius)))
    with pytest.raises(AssertionError):
        test_values_and_slopes_on_random_boxes(RANDOM[1])
