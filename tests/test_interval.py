"""Every primitive of `Interval` against ball arithmetic, with zero tolerance."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from flint import arb, ctx
from scipy.special import erf, expit

from partita.arithmetic import Dual, Interval
from partita.errors import DomainError

ENCLOSURES = 20_000


@dataclass(frozen=True)
class Primitive:
    """An operation on intervals, the same one on balls, its unpadded numpy version, and where to try it."""

    enclose: Callable[..., Interval]
    ball: Callable[..., arb]
    naive: Callable[..., np.ndarray]
    scale: float = 10.0
    positive: bool = False
    arity: int = 1
    bits: int = 256


def _sigmoid(x: arb) -> arb:
    return 1 / (1 + (-x).exp())


PRIMITIVES = {
    "add": Primitive(lambda a, b: a + b, lambda a, b: a + b, np.add, arity=2),
    "sub": Primitive(lambda a, b: a - b, lambda a, b: a - b, np.subtract, arity=2),
    "mul": Primitive(lambda a, b: a * b, lambda a, b: a * b, np.multiply, arity=2),
    "div": Primitive(lambda a, b: a / b, lambda a, b: a / b, np.divide, arity=2),
    "square": Primitive(Interval.square, lambda x: x * x, np.square),
    "pow3": Primitive(lambda x: x.pow_int(3), lambda x: x**3, lambda x: x * x * x),
    "pow6": Primitive(lambda x: x.pow_int(6), lambda x: x**6, lambda x: x * x * x * x * x * x),
    "pow-2": Primitive(lambda x: x.pow_int(-2), lambda x: 1 / (x * x), lambda x: x**-2.0),
    "pow-5": Primitive(lambda x: x.pow_int(-5), lambda x: 1 / x**5, lambda x: x**-5.0),
    "exp": Primitive(Interval.exp, lambda x: x.exp(), np.exp, scale=200.0),
    "log": Primitive(Interval.log, lambda x: x.log(), np.log, positive=True),
    "sqrt": Primitive(Interval.sqrt, lambda x: x.sqrt(), np.sqrt, positive=True),
    "sin": Primitive(Interval.sin, lambda x: x.sin(), np.sin),
    "sin_far": Primitive(Interval.sin, lambda x: x.sin(), np.sin, scale=3e5),
    "cos": Primitive(Interval.cos, lambda x: x.cos(), np.cos),
    "cos_far": Primitive(Interval.cos, lambda x: x.cos(), np.cos, scale=3e5),
    "tan": Primitive(Interval.tan, lambda x: x.tan(), np.tan),
    "tan_far": Primitive(Interval.tan, lambda x: x.tan(), np.tan, scale=3e5),
    "atan": Primitive(Interval.atan, lambda x: x.atan(), np.arctan),
    "tanh": Primitive(Interval.tanh, lambda x: x.tanh(), np.tanh),
    "sigmoid": Primitive(Interval.sigmoid, _sigmoid, expit, scale=100.0, bits=1500),
    "erf": Primitive(Interval.erf, lambda x: x.erf(), erf, scale=3.0, bits=1500),
    "asinh": Primitive(Interval.asinh, lambda x: x.asinh(), np.arcsinh),
    "acosh": Primitive(
        lambda x: (x + 1.0).acosh(), lambda x: (x + 1).acosh(), lambda x: np.arccosh(x + 1), positive=True
    ),
    "atanh": Primitive(Interval.atanh, lambda x: x.atanh(), np.arctanh, scale=0.5),
    "floor": Primitive(Interval.floor, lambda x: x.floor(), np.ceil),
    "abs": Primitive(Interval.absolute, abs, np.negative),
    "min": Primitive(Interval.minimum, lambda a, b: a.min(b), np.maximum, arity=2),
    "max": Primitive(Interval.maximum, lambda a, b: a.max(b), np.minimum, arity=2),
    "clamp": Primitive(lambda x: x.clamp(-1.5, 2.5), lambda x: x.max(arb(-1.5)).min(arb(2.5)), np.negative),
}


def random_boxes(rng: np.random.Generator, primitive: Primitive) -> tuple[Interval, np.ndarray]:
    """Points, narrow and wide boxes, some at multiples of π/2 and at 0, and a point in each: an end or between."""
    center = rng.normal(0, primitive.scale, ENCLOSURES) * 10.0 ** rng.choice([0, 0, 0, -3, -12], ENCLOSURES)
    special = rng.random(ENCLOSURES) < 0.1
    center[special] = np.round(center[special] / (np.pi / 2)) * (np.pi / 2)
    if primitive.positive:
        center = np.abs(center) + 1e-300
    width = np.abs(center) * rng.choice([0.0, 0.0, 1e-15, 1e-6, 0.1, 1.0], ENCLOSURES) * rng.random(ENCLOSURES)
    lo, hi = center - width, center + width
    between = np.clip(lo + (hi - lo) * rng.random(ENCLOSURES), lo, hi)
    return Interval(lo, hi), np.choose(rng.integers(0, 3, ENCLOSURES), [lo, hi, between])


def violations(enclosure: Interval, points: list[np.ndarray], primitive: Primitive) -> int:
    """How many exact results are not proved to lie inside; undefined results do not count."""
    count = 0
    before, ctx.prec = ctx.prec, primitive.bits
    for lo, hi, *x in zip(enclosure.lo.tolist(), enclosure.hi.tolist(), *(p.tolist() for p in points), strict=True):
        exact = primitive.ball(*map(arb, x))
        above = lo == -np.inf or arb(lo) <= exact
        below = hi == np.inf or exact <= arb(hi)
        count += exact.is_finite() and not (above and below)
    ctx.prec = before
    return count


def arguments(primitive: Primitive, seed: int) -> tuple[list[Interval], list[np.ndarray]]:
    rng = np.random.default_rng(seed)
    boxes, points = zip(*(random_boxes(rng, primitive) for _ in range(primitive.arity)), strict=True)
    return list(boxes), list(points)


@pytest.mark.parametrize("name", PRIMITIVES)
def test_primitive_encloses(name: str) -> None:
    primitive = PRIMITIVES[name]
    boxes, points = arguments(primitive, seed=11)
    assert violations(primitive.enclose(*boxes), points, primitive) == 0


@pytest.mark.parametrize("name", PRIMITIVES)
def test_negative_control_unpadded_results_are_caught(name: str) -> None:
    primitive = PRIMITIVES[name]
    _, points = arguments(primitive, seed=12)
    with np.errstate(all="ignore"):
        naive = primitive.naive(*points)
    keep = np.isfinite(naive)
    assert violations(Interval.point(naive[keep]), [p[keep] for p in points], primitive) > 0


@pytest.mark.parametrize("name", ["sin", "exp", "add", "min"])
def test_negative_control_shrunk_enclosures_are_caught(name: str) -> None:
    primitive = PRIMITIVES[name]
    boxes, points = arguments(primitive, seed=13)
    found = primitive.enclose(*boxes)
    shrunk = Interval(found.lo + 0.01 * (found.hi - found.lo), np.maximum(found.hi, found.lo))
    assert violations(shrunk, points, primitive) > 0


@pytest.mark.parametrize("name", ["sin", "cos", "tanh", "exp", "sqrt", "erf", "sigmoid", "add", "mul", "div"])
def test_enclosures_of_points_are_narrow(name: str) -> None:
    primitive = PRIMITIVES[name]
    _, points = arguments(primitive, seed=14)
    found = primitive.enclose(*map(Interval.point, points))
    assert (found.hi - found.lo <= 40 * np.finfo(float).eps * found.magnitude + 1e-300).all()


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (Interval(-1, 1) / Interval(0, 1), (-np.inf, np.inf)),
        (Interval(-1, 1).log(), (-np.inf, 0.0)),
        (Interval(-2, -1).log(), (-np.inf, np.inf)),
        (Interval(-2, -1).sqrt(), (-np.inf, np.inf)),
        (Interval(-1, 4).sqrt(), (0.0, 2.0)),
        (Interval(1, 2).tan(), (-np.inf, np.inf)),
        (Interval(2e6, 2e6 + 1e-9).tan(), (-np.inf, np.inf)),
        (Interval(2e6, 2e6 + 1e-9).sin(), (-1.0, 1.0)),
        (Interval(-np.inf, np.inf).cos(), (-1.0, 1.0)),
        (Interval(-1, 7).sin(), (-1.0, 1.0)),
        (Interval(0, 0) * Interval(-np.inf, np.inf), (0.0, 0.0)),
        (Interval(0, 1) * Interval(2, np.inf), (0.0, np.inf)),
        (Interval(-1, 1).pow_int(-1), (-np.inf, np.inf)),
        (Interval(-3, 3).pow_int(0), (1.0, 1.0)),
        (Interval(np.nan, 1), (-np.inf, np.inf)),
        (Interval.point(np.inf), (-np.inf, np.inf)),
        (Interval(0, 1) + Interval(0, 0), (0.0, 1.0)),
        (Interval(1e308, 1e308) * 10.0, (1.7e308, np.inf)),
        (Interval(-1, 2).where_sign(Interval(3, 4), Interval(7, 8)), (3.0, 8.0)),
        (Interval(0, 2).where_sign(3.0, 7.0), (3.0, 3.0)),
        (Interval(-2, -1).where_sign(3.0, 7.0), (7.0, 7.0)),
        (Interval(-np.inf, np.inf).atan(), (-np.pi / 2, np.pi / 2)),
        (Interval(-np.inf, 0).exp(), (0.0, 1.0)),
        (Interval(-800, -750).sigmoid(), (0.0, 0.0)),
    ],
)
def test_edges(found: Interval, expected: tuple[float, float]) -> None:
    assert not np.isnan(found.lo) and not np.isnan(found.hi)
    assert (found.lo, found.hi) == (pytest.approx(expected[0], rel=0.06), pytest.approx(expected[1], rel=1e-12))


def test_zero_survives_so_that_roots_of_sums_of_squares_are_defined() -> None:
    x = Interval([-1.0, 0.0], [1.0, 0.0])
    assert (x.square() + x.square()).lo.tolist() == [0.0, 0.0]
    assert (x.square() + x.square()).sqrt().hi[1] == 0.0


def test_descriptions() -> None:
    x = Interval([-3.0, 1.0, -np.inf], [1.0, 2.0, np.inf])
    assert x.magnitude.tolist() == [3.0, 2.0, np.inf]
    assert x.mignitude.tolist() == [0.0, 1.0, 0.0]
    assert x.mid.tolist() == [-1.0, 1.5, 0.0]
    assert (x.radius[:2] >= [2.0, 0.5]).all() and x.radius[2] == np.inf
    assert x.is_entire.tolist() == [False, False, True]
    assert (np.ones(3) - x).shape == (1.0 / x).shape == (3,)


def test_crossed_ends_are_refused() -> None:
    with pytest.raises(DomainError, match="expected lo ≤ hi"):
        Interval([0.0, 2.0], [1.0, 1.0])


@pytest.mark.parametrize(
    ("f", "slope"),
    [
        (lambda x: x.absolute(), (-1.0, 1.0)),
        (lambda x: x.relu(), (0.0, 1.0)),
        (lambda x: x.clamp(-0.5, 0.5), (0.0, 1.0)),
        (lambda x: x.minimum(-x), (-1.0, 1.0)),
        (lambda x: x.sqrt(), (-np.inf, np.inf)),
        (lambda x: x.log(), (-np.inf, np.inf)),
        (lambda x: Dual.constant(1.0, 1) / x, (-np.inf, np.inf)),
        (lambda x: x.where_sign(x, -x), (-np.inf, np.inf)),
        (lambda x: Dual.constant(1.0, 1).where_sign(x, -x), (1.0, 1.0)),
        (lambda x: x.pow_int(0), (0.0, 0.0)),
    ],
)
def test_slopes_on_a_box_around_zero(f: Callable[[Dual], Dual], slope: tuple[float, float]) -> None:
    gradient = f(Dual.variable(np.array([-1.0]), np.array([1.0]), axis=0, dim=1)).gradient
    assert (gradient.lo[0, 0], gradient.hi[0, 0]) == pytest.approx(slope, rel=1e-15)
    assert gradient.lo[0, 0] <= slope[0] and slope[1] <= gradient.hi[0, 0]
