"""Proved Lipschitz constants against known ones, automatic differentiation, and functions that have none."""

import math

import numpy as np
import pytest
import torch

from partita.arithmetic import Interval
from partita.errors import DomainError, NonFiniteValueError
from partita.functions import lipschitz_bounds, parse

KNOWN = {
    "sin(3*x)": ([0.0], [1.0], 3.0),
    "3*x - 4*y": ([-1.0, 0.0], [1.0, 2.0], 5.0),
    "exp(-x^2)": ([-2.0], [2.0], math.sqrt(2 / math.e)),
    "exp(-x^2 - y^2)": ([-2.0, -2.0], [2.0, 2.0], math.sqrt(2 / math.e)),
    "x^3": ([-2.0], [1.0], 12.0),
    "tanh(5*x) + y": ([-1.0, -1.0], [1.0, 1.0], math.sqrt(26.0)),
    "erf(x)": ([-1.0], [1.0], 2 / math.sqrt(math.pi)),
    "sigmoid(4*x)": ([-1.0], [1.0], 1.0),
    "abs(x - 0.3)": ([-1.0], [1.0], 1.0),
    "max(x, -x/2) + min(2*x, 0.5)": ([-1.0], [1.0], 3.0),
    "relu(2*x) + clamp(x, -0.5, 0.5)": ([-1.0], [1.0], 3.0),
    "1/x": ([0.5], [2.0], 4.0),
    "log(x)": ([0.25], [2.0], 4.0),
    "sqrt(x)": ([0.25], [2.0], 1.0),
    "atan(2*x), sin(x)": ([-1.0], [1.0], 2.0),
    "asinh(3*x)": ([-1.0], [1.0], 3.0),
    "acosh(x)": ([1.25], [3.0], 4 / 3),
    "atanh(x)": ([-0.5], [0.5], 4 / 3),
    "floor(x) + x": ([0.25], [0.75], 1.0),
    "x*y*z": ([-1.0] * 3, [1.0] * 3, math.sqrt(3.0)),
}
VARIABLES = ["x", "y", "z"]


def graph_on(text: str, lo: list[float]):
    return parse(text, VARIABLES[: len(lo)])


@pytest.mark.parametrize("text", KNOWN)
def test_known_constants(text: str) -> None:
    lo, hi, expected = KNOWN[text]
    found = lipschitz_bounds(graph_on(text, lo), lo, hi)
    assert found.is_lipschitz
    assert expected * (1 - 1e-14) <= found.euclidean <= expected * 1.0102
    assert expected / 1.0102 <= found.observed <= expected * (1 + 1e-14)


@pytest.mark.parametrize("text", KNOWN)
def test_bounds_hold_at_random_points(text: str) -> None:
    lo, hi, _ = KNOWN[text]
    graph = graph_on(text, lo)
    found = lipschitz_bounds(graph, lo, hi, relative_gap=0.1)
    z, gradients = autograd(graph, np.random.default_rng(31).uniform(lo, hi, (500, len(lo))))
    assert (np.linalg.norm(gradients, axis=2) <= found.euclidean * (1 + 1e-12)).all()
    assert (np.abs(gradients).max(axis=(0, 1)) <= found.per_axis * (1 + 1e-12)).all()
    assert (np.abs(graph.evaluate(z)) <= found.magnitude).all()


def autograd(graph, points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The points and the gradients (points, outputs, dim) by reverse mode, which shares no code with `Dual`."""
    z = torch.from_numpy(points).requires_grad_()
    outputs = graph.evaluate_torch(z).reshape(len(points), -1)
    gradients = [
        torch.autograd.grad(column.sum() + 0 * z.sum(), z, retain_graph=True)[0] for column in outputs.unbind(1)
    ]
    return points, torch.stack(gradients, dim=1).numpy()


def slopes_missed(slopes: Interval, gradients: np.ndarray) -> int:
    slack = 1e-12 * (1 + np.abs(gradients))
    return int(((gradients + slack < slopes.lo) | (gradients - slack > slopes.hi)).sum())


@pytest.mark.parametrize("text", [*KNOWN, "sin(3*x)*exp(y)/(2 + z^2)", "tan(x/2)*y^3 + cosh(z)", "x^1.5*log(1 + y^2)"])
@pytest.mark.parametrize("width", [0.0, 0.01, 0.3])
def test_slopes_hold_automatic_derivatives(text: str, width: float) -> None:
    lo, hi, _ = KNOWN.get(text, ([0.2] * 3, [1.2] * 3, 0.0))
    graph = graph_on(text, lo)
    rng = np.random.default_rng(32)
    points, gradients = autograd(graph, rng.uniform(lo, hi, (300, len(lo))))
    low = np.maximum(points - width * rng.random(points.shape), lo)
    high = np.minimum(points + width * rng.random(points.shape), hi)
    slopes = graph.enclose_gradient(low, high)[1]
    assert slopes_missed(slopes, gradients) == 0
    assert np.isfinite(slopes.magnitude).all()


def test_negative_control_slopes_of_another_function_are_caught() -> None:
    points = np.random.default_rng(33).uniform(0.2, 1.2, (300, 1))
    _, gradients = autograd(parse("sin(3*x)", ["x"]), points)
    wrong = parse("sin(3.0000001*x)", ["x"]).enclose_gradient(points, points)[1]
    assert slopes_missed(wrong, gradients) > 0


@pytest.mark.parametrize(
    ("text", "dim", "inside"),
    [
        ("where(x - 0.3, 1, x)", 1, [0.3]),
        ("step(x - 0.3) + y", 2, [0.3, 0.9]),
        ("step(x^2 + y^2 - 0.25)", 2, [0.3, 0.4]),
        ("sign(x + y)*sin(x)", 2, [0.25, -0.25]),
        ("sqrt(abs(x))", 1, [0.0]),
        ("sqrt(1 - x^2)", 1, [1.0]),
        ("step(x - y), x", 2, [0.5, 0.5]),
    ],
)
def test_jumps_and_infinite_slopes_stay_in_rough_boxes(text: str, dim: int, inside: list[float]) -> None:
    lo, hi = np.full(dim, -1.0), np.full(dim, 1.0)
    graph = graph_on(text, list(lo))
    found = lipschitz_bounds(graph, lo, hi)
    assert not found.is_lipschitz and math.isfinite(found.euclidean) and found.observed <= found.euclidean
    assert ((found.rough_lo <= inside) & (inside <= found.rough_hi)).all(axis=1).any()
    assert np.prod((found.rough_hi - found.rough_lo) / 2, axis=1).sum() < 0.02
    points = np.random.default_rng(34).uniform(lo, hi, (2000, dim))
    rough = ((found.rough_lo[:, None] <= points) & (points <= found.rough_hi[:, None])).all(axis=2).any(axis=0)
    _, gradients = autograd(graph, points[~rough])
    assert (np.linalg.norm(gradients, axis=2) <= found.euclidean + 1e-12).all()


def test_a_jump_across_one_axis_is_one_slab() -> None:
    found = lipschitz_bounds(parse("step(x - 0.3) + y*z", VARIABLES), [-1.0] * 3, [1.0] * 3)
    assert len(found.rough_lo) == 1
    assert found.rough_lo[0, 1:].tolist() == [-1.0, -1.0] and found.rough_hi[0, 1:].tolist() == [1.0, 1.0]
    assert found.rough_hi[0, 0] - found.rough_lo[0, 0] <= 2e-3


def test_a_kink_between_axes_costs_at_most_the_hull_of_its_slopes() -> None:
    found = lipschitz_bounds(parse("max(x, y)", ["x", "y"]), [-1.0] * 2, [1.0] * 2, max_boxes=1000)
    assert 1.0 <= found.euclidean <= math.sqrt(2.0) * (1 + 1e-14)
    assert found.per_axis == pytest.approx([1.0, 1.0], rel=1e-14)


def test_guarded_expressions_are_lipschitz() -> None:
    found = lipschitz_bounds(parse("max(sqrt(abs(x)), 0.5) + relu(x)", ["x"]), [-1.0], [1.0])
    assert found.is_lipschitz and 1.5 <= found.euclidean <= 2.02


@pytest.mark.parametrize(
    ("text", "lo", "hi", "place"),
    [
        ("1/x", [-1.0], [1.0], r"inf at x = \[0"),
        ("1/(x - 0.3)", [-1.0], [1.0], r"on the box from \[0.29999"),
        ("log(x)", [-2.0], [-1.0], "nan at x"),
        ("log(x)", [0.0], [1.0], r"on the box from \[0"),
        ("sqrt(x)", [-1.0], [1.0], "nan at x"),
        ("sqrt(x - 0.000001)", [0.0], [1.0], r"nan at x = \[0"),
        ("tanh(1/x)", [-1.0], [2.0], "on the box"),
        ("sin(x), tan(x)", [0.0], [3.0], "on the box"),
        ("1/(x - y)", [-1.0, -1.3], [1.0, 1.0], "on the box"),
        ("exp(1000*x)", [0.0], [1.0], "f is inf|on the box"),
        ("x + 0*log(x)", [-1.0], [1.0], "nan at x"),
    ],
)
def test_undefined_and_unbounded_functions_are_refused(text: str, lo: list, hi: list, place: str) -> None:
    with pytest.raises(NonFiniteValueError, match=place):
        lipschitz_bounds(graph_on(text, lo), lo, hi)


@pytest.mark.parametrize("max_boxes", [1, 10, 100, 1000])
def test_any_budget_gives_a_valid_bound(max_boxes: int) -> None:
    lo, hi, expected = KNOWN["exp(-x^2 - y^2)"]
    found = lipschitz_bounds(graph_on("exp(-x^2 - y^2)", lo), lo, hi, max_boxes=max_boxes)
    assert found.observed <= expected <= found.euclidean
    assert found.boxes <= max_boxes + 2


def test_constants_do_not_move() -> None:
    found = lipschitz_bounds(parse("3", ["x"]), [0.0], [1.0])
    assert (found.euclidean, found.observed, found.magnitude, found.boxes) == (0.0, 0.0, 3.0, 1)


@pytest.mark.parametrize(
    ("lo", "hi"), [([0.0], [0.0]), ([1.0], [0.0]), ([0.0], [np.inf]), ([np.nan], [1.0]), ([0.0, 0.0], [1.0, 1.0])]
)
def test_domains_that_are_none_are_refused(lo: list[float], hi: list[float]) -> None:
    with pytest.raises(DomainError, match="expected finite lo < hi"):
        lipschitz_bounds(parse("x", ["x"]), lo, hi)


def test_many_variables_get_few_boxes() -> None:
    """With 60 variables, halving gains little and every box carries 60 slopes: 11,000 boxes took a minute."""
    graph = parse(" + ".join(f"sin(3*x{i})" for i in range(60)), [f"x{i}" for i in range(60)])
    bounds = lipschitz_bounds(graph, np.full(60, -1.0), np.full(60, 1.0))
    assert bounds.is_lipschitz and bounds.boxes < 1000
    assert (bounds.per_axis >= 3.0).all() and (bounds.per_axis < 3.1).all()
    assert bounds.magnitude >= 60 * np.sin(1.5)
