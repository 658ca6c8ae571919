"""Derivatives of expressions, as expressions."""

import mpmath
import numpy as np
import pytest

from partita.functions import parse
from partita.functions.differentiate import derivative

SMOOTH = [
    "sin(3*x)*cos(y) + tan(x/4)",
    "exp(x*y) - log(3 + x) + sqrt(2 + x)",
    "tanh(x) + sigmoid(2*x) + erf(x) + atan(x - y)",
    "x^5 - 2/x^2 + x^(-1)*y + (x - y)/(2 + x*y)",
    "sum(x, x*y, 3) - (-x)",
    "cosh(x)*sinh(y)",
    "asinh(3*x)*y + acosh(1.5 + x) - atanh(x/2)",
    "x^0 + y^3",
]
KINKED = [
    "abs(x - y)",
    "max(x, 2*y)",
    "min(x^2, y)",
    "relu(x - 0.3)",
    "clamp(x + y, -0.5, 0.5)",
    "where(x, x^2, 3*x)",
    "floor(x)*y",
]


@pytest.mark.parametrize("text", SMOOTH + KINKED)
@pytest.mark.parametrize("variable", [0, 1])
def test_the_derivative_is_a_difference_quotient(text, variable):
    graph = parse(text, ["x", "y"])
    slope = derivative(graph, variable)
    points = np.random.default_rng(0).uniform(0.1, 1.5, size=(40, 2))
    step = np.zeros(2)
    step[variable] = 1e-6
    quotient = (graph.evaluate(points + step) - graph.evaluate(points - step)) / 2e-6
    found = slope.evaluate(points)
    close = np.abs(found - quotient) < 1e-6 * (1 + np.abs(found))
    assert close.mean() > (0.99 if text in SMOOTH else 0.9)
    assert not np.allclose(found, quotient + 1e-3, atol=1e-4)  # negative control


def test_against_mpmath():
    slope = derivative(parse("log(cosh(x))*exp(-x^2)", ["x"]), 0)
    exact = mpmath.diff(lambda x: mpmath.log(mpmath.cosh(x)) * mpmath.exp(-(x**2)), 0.7)
    assert abs(slope.evaluate([[0.7]])[0] - float(exact)) < 1e-12


def test_constants_have_no_slope_and_vectors_have_many():
    assert derivative(parse("3 + 0*y", ["x", "y"]), 0).evaluate([[1.0, 2.0]]).tolist() == [0.0]
    assert derivative(parse("x, x^2", ["x"]), 0).evaluate([[3.0]]).tolist() == [[1.0, 6.0]]
