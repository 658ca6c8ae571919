"""Every operation of the graph as an enclosure of values, of slopes and by polynomials, against balls, with zero tolerance.

Boxes have all magnitudes: points, neighbours, wide ones, across zero, denormal, huge, far from zero, at multiples of π/2.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
from balls import exact, holds, settle, values
from flint import arb

from partita.arithmetic import Interval, dual, interval, polynomial, series, taylor
from partita.errors import DomainError
from partita.functions import Graph, parse
from partita.functions.operations import OPERATIONS

NAMES = ["x0", "x1", "x2"]
CASES = {
    "input": "x0",
    "const": "0.1",
    "add": "x0 + x1",
    "sub": "x0 - x1",
    "mul": "x0*x1",
    "square": "x0*x0",
    "div": "x0/x1",
    "neg": "-x0",
    **{f"pow {k}": f"x0^{k}" for k in (-64, -5, -2, -1, 0, 1, 2, 3, 6, 64)},
    "sum": "sum(x0, x1, x2)",
    "joint sum": "sum(0.1*x0, -3e10*x1, x2, 1e-10, 7)",
    "joint sum of small terms": "sum(1e-200*x0, 2e-200*x1, -1e-300*x2, 1e-320*(x0*x1))",
    "exp": "exp(x0)",
    "log": "log(x0)",
    "sqrt": "sqrt(x0)",
    "sin": "sin(x0)",
    "cos": "cos(x0)",
    "tan": "tan(x0)",
    "atan": "atan(x0)",
    "tanh": "tanh(x0)",
    "sigmoid": "sigmoid(x0)",
    "erf": "erf(x0)",
    "asinh": "asinh(x0)",
    "acosh": "acosh(x0)",
    "atanh": "atanh(x0)",
    "floor": "floor(x0)",
    "abs": "abs(x0)",
    "min": "min(x0, x1)",
    "max": "max(x0, x1)",
    "relu": "relu(x0)",
    "clamp": "clamp(x0, -1.5, 2.5)",
    "clamp tiny": "clamp(x0, 1e-310, 1e-300)",
    "where": "where(x0, x1, x2)",
}
RANGES = {"tanh": (-1.0, 1.0), "erf": (-1.0, 1.0), "sigmoid": (0.0, 1.0)}  # 1 − tanh(10⁶) asks for millions of bits
EXACT = {
    "input",
    "const",
    "neg",
    "pow 0",
    "pow 1",
    "abs",
    "min",
    "max",
    "relu",
    "clamp",
    "clamp tiny",
    "floor",
    "where",
}
DEGREES = (0, 1, 2, 5)
MAGNITUDES = (1.0, 1.0, 10.0, 100.0, 700.0, 1e5, 1e9, 1e15, 1e100, 1e300, 1e-3, 1e-8, 1e-30, 1e-160, 1e-300, 1e-315)


def graph_of(name: str) -> Graph:
    used = max((int(v[1:]) for v in NAMES if v in CASES[name]), default=0) + 1
    return parse(CASES[name], NAMES[:used])


def random_boxes(rng: np.random.Generator, count: int, dim: int) -> tuple[np.ndarray, np.ndarray]:
    """(count, dim) ends, of all magnitudes and widths."""
    shape = (count, dim)
    with np.errstate(all="ignore"):
        center = rng.normal(size=shape) * rng.choice(MAGNITUDES, shape)
        center = np.where(rng.random(shape) < 0.1, np.round(center / (np.pi / 2)) * (np.pi / 2), center)
        center = np.where(rng.random(shape) < 0.05, rng.choice([0.0, 1.0, -1.0, 2.5, -1.5, 5e-324], shape), center)
        relative = rng.choice([0.0, 0.0, 2e-16, 1e-15, 1e-6, 0.1, 1.0, 3.0], shape) * np.abs(center)
        other = rng.choice(MAGNITUDES, shape) * rng.choice([0.0, 0.0, 0.0, 1.0], shape)
        width = np.maximum(relative, other) * rng.random(shape)
        lo, hi = center - width, center + width
    largest = np.finfo(float).max
    return np.clip(lo, -largest, largest), np.clip(hi, -largest, largest)


def points_in(rng: np.random.Generator, lo: np.ndarray, hi: np.ndarray) -> np.ndarray:
    """An end, or a point between, or one near 0 or near a multiple of π/2 if the box holds such."""
    share = rng.random(lo.shape)
    between = lo * (1 - share) + hi * share
    turning = np.round(between / (np.pi / 2)) * (np.pi / 2)
    near_zero = rng.choice([0.0, 5e-324, -5e-324, 1e-300, -1e-20], lo.shape)
    return np.clip(np.choose(rng.integers(0, 5, lo.shape), [lo, hi, between, turning, near_zero]), lo, hi)


def tally(answers: list[bool | None]) -> tuple[int, int]:
    """How many enclosures were violated, and how many no number of bits decided."""
    return answers.count(False), answers.count(None)


def values_outside(name: str, count: int, seed: int) -> tuple[int, int]:
    """Violations of `Graph.enclose`; points where f is undefined do not count."""
    graph, rng = graph_of(name), np.random.default_rng(seed)
    lo, hi = random_boxes(rng, count, graph.num_inputs)
    found, points = graph.enclose(lo, hi), points_in(rng, lo, hi)
    answers = []
    least, most = RANGES.get(name, (-np.inf, np.inf))
    for low, high, z in zip(found.lo[:, 0].tolist(), found.hi[:, 0].tolist(), points.tolist(), strict=True):
        a, b = low if low > least else -np.inf, high if high < most else np.inf
        if a > -np.inf or b < np.inf:
            answers.append(settle(lambda a=a, b=b, z=z: _value_holds(graph, a, b, z)))
    return tally(answers)


def _value_holds(graph: Graph, lo: float, hi: float, point: list[float]) -> bool | None:
    (value,) = values(graph, point)
    return True if value.is_nan() else holds(lo, hi, value)


def slopes_outside(name: str, count: int, seed: int) -> tuple[int, int]:
    """Violations of slopes: for x, y that differ along one axis, (f(x) − f(y)) / (x − y) lies in that axis's slopes."""
    graph, rng = graph_of(name), np.random.default_rng(seed)
    lo, hi = random_boxes(rng, count, graph.num_inputs)
    slopes = graph.enclose_gradient(lo, hi)[1]
    first, second = points_in(rng, lo, hi), points_in(rng, lo, hi)
    axes = rng.integers(0, graph.num_inputs, count).tolist()
    answers = []
    for k, axis in enumerate(axes):
        a, b = float(slopes.lo[k, 0, axis]), float(slopes.hi[k, 0, axis])
        x = first[k].tolist()
        y = [*x[:axis], float(second[k, axis]), *x[axis + 1 :]]
        a, b = (-np.inf if name in RANGES and a <= 0.0 else a), b  # these increase: nothing to ask
        if x != y and np.isfinite(slopes.lo[k, 0, axis]) and b < np.inf:
            answers.append(settle(lambda a=a, b=b, x=x, y=y, axis=axis: _slope_holds(graph, a, b, x, y, axis)))
    return tally(answers)


def _slope_holds(graph: Graph, lo: float, hi: float, x: list[float], y: list[float], axis: int) -> bool | None:
    (at_x,), (at_y,) = values(graph, x), values(graph, y)
    if at_x.is_nan() or at_y.is_nan():
        return True
    return holds(lo, hi, (at_x - at_y) / (arb(x[axis]) - arb(y[axis])))


def models_outside(name: str, degree: int, count: int, seed: int) -> tuple[int, int]:
    """Violations of `|f(c + r t) − p(t)| ≤ remainder`; here an undefined f is a violation, for a finite remainder denies it."""
    graph, rng = graph_of(name), np.random.default_rng(seed)
    lo, hi = random_boxes(rng, count, graph.num_inputs)
    centers, radii = 0.5 * lo + 0.5 * hi, 0.5 * hi - 0.5 * lo
    models = graph.taylor(centers, radii, degree)
    steps = rng.choice([-1.0, 1.0, 0.0, 0.5, -0.984375, 0.140625], lo.shape)
    answers = []
    for k in np.flatnonzero(models.remainder[0] < np.inf).tolist():
        t = [Fraction(s) for s in steps[k].tolist()]
        z = [Fraction(c) + Fraction(r) * s for c, r, s in zip(centers[k].tolist(), radii[k].tolist(), t, strict=True)]
        rows = list(zip(models.exponents.tolist(), models.coefficients[0, :, k].tolist(), strict=True))
        rest = float(models.remainder[0, k])
        answers.append(settle(lambda rows=rows, t=t, z=z, rest=rest: _model_holds(graph, rows, t, z, rest)))
    return tally(answers)


def _model_holds(graph: Graph, rows: list, t: list[Fraction], point: list[Fraction], remainder: float) -> bool | None:
    (value,) = values(graph, point)
    if value.is_nan():
        return None
    for alpha, coefficient in rows:
        if coefficient:
            value -= arb(coefficient) * exact(_monomial(t, alpha))
    return holds(-remainder, remainder, value)


def _monomial(t: list[Fraction], alpha: list[int]) -> Fraction:
    out = Fraction(1)
    for x, k in zip(t, alpha, strict=True):
        out *= x**k
    return out


def test_the_cases_use_every_operation() -> None:
    assert {node.operation for name in CASES for node in graph_of(name).nodes} == OPERATIONS.keys()


@pytest.mark.parametrize("name", CASES)
def test_values(name: str) -> None:
    assert values_outside(name, 1500, 1) == (0, 0)


@pytest.mark.parametrize("name", CASES)
def test_slopes(name: str) -> None:
    assert slopes_outside(name, 500, 2) == (0, 0)


@pytest.mark.parametrize("degree", DEGREES)
@pytest.mark.parametrize("name", CASES)
def test_models(name: str, degree: int) -> None:
    assert models_outside(name, degree, 120, 3 + degree) == (0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_million_values(name: str) -> None:
    for seed in range(20):
        assert values_outside(name, 50_000, 100 + seed) == (0, 0), seed


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_many_slopes_and_models(name: str) -> None:
    for seed in range(4):
        assert slopes_outside(name, 25_000, 200 + seed) == (0, 0), seed
        for degree in DEGREES:
            assert models_outside(name, degree, 2_500, 300 + seed) == (0, 0), (seed, degree)


# --- negative controls: the same harness, on arithmetic that is wrong ------------------------------------------------


def as_it_is(x, *_):
    return x


def is_caught(violations: Callable[[], tuple[int, int]]) -> bool:
    """Whether the harness saw a violation, or the ends crossed, which `Interval` refuses."""
    try:
        return violations()[0] > 0
    except DomainError:
        return True


def without_padding(patch: pytest.MonkeyPatch) -> None:
    """No outward rounding anywhere: the ends are the nearest floats, remainders count no rounding."""
    for module in (interval, dual, series, taylor):
        for name in ("up", "down", "above"):
            patch.setattr(module, name, as_it_is, raising=False)
    for module in (series, polynomial):
        patch.setattr(module, "_ULP", 0.0)
    patch.setattr(polynomial, "above", as_it_is)


@pytest.mark.parametrize("name", [name for name in CASES if name not in EXACT and "joint" not in name])
def test_negative_control_values_without_padding_are_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    without_padding(monkeypatch)
    assert is_caught(lambda: values_outside(name, 4000, 1))


@pytest.mark.parametrize(
    "name", ["div", "pow 3", "exp", "log", "sqrt", "sin", "cos", "tan", "atan", "asinh", "acosh", "atanh", "erf"]
)
def test_negative_control_slopes_without_padding_are_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Points have no slopes, so neighbours are asked: there the quotient is all but the derivative."""
    without_padding(monkeypatch)
    assert is_caught(lambda: slopes_outside(name, 8000, 2))


@pytest.mark.parametrize("degree", DEGREES)
@pytest.mark.parametrize(
    "name", ["add", "mul", "div", "exp", "sin", "tanh", "erf", "atan", "asinh", "acosh", "atanh", "log", "sqrt"]
)
def test_negative_control_models_without_padding_are_caught(
    name: str, degree: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_padding(monkeypatch)
    assert is_caught(lambda: models_outside(name, degree, 1000, 4))


def moved_inward(found: Interval) -> Interval:
    return Interval(np.where(found.lo < found.hi, np.nextafter(found.lo, found.hi), found.lo), found.hi)


@pytest.mark.parametrize("name", sorted(EXACT - {"const", "pow 0"}))
def test_negative_control_one_ulp_less_is_caught_where_nothing_is_rounded(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    enclose = Graph.enclose
    monkeypatch.setattr(Graph, "enclose", lambda graph, lo, hi: moved_inward(enclose(graph, lo, hi)))
    assert is_caught(lambda: values_outside(name, 1500, 1))


BUGS: dict[str, tuple[str, Callable[[pytest.MonkeyPatch], None]]] = {
    "the first branch instead of the hull": ("where", lambda p: p.setattr(interval, "choose", lambda f, s, a, b: a)),
    "turning points overlooked": ("sin", lambda p: p.setattr(interval, "_may_hold", lambda x, *_: x.lo > np.inf)),
    "poles overlooked": ("tan", lambda p: p.setattr(interval, "_may_hold", lambda x, *_: x.lo > np.inf)),
    "sums without radii": ("joint sum", lambda p: p.setattr(Interval, "weighted_sums", staticmethod(_middles))),
    "the lower ends of both factors": ("mul", lambda p: p.setattr(interval, "_bilinear", _lower_corners)),
}


def _middles(terms: list[Interval], matrix: np.ndarray) -> list[Interval]:
    with np.errstate(all="ignore"):
        return [Interval.point(row) for row in matrix @ np.stack(np.broadcast_arrays(*(t.mid for t in terms)))]


def _lower_corners(operation, a: Interval, b: Interval) -> Interval:
    with np.errstate(all="ignore"):
        ends = np.sort([operation(a.lo, b.lo), operation(a.hi, b.hi)], axis=0)
    return Interval(np.nextafter(ends[0], -np.inf), np.nextafter(ends[1], np.inf))


@pytest.mark.parametrize("bug", BUGS)
def test_negative_control_wrong_rules_are_caught(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, plant = BUGS[bug]
    plant(monkeypatch)
    assert is_caught(lambda: values_outside(name, 3000, 5))
