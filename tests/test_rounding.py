"""Directed arithmetic against ball arithmetic and exact fractions."""

import math
from fractions import Fraction

import numpy as np
import pytest
from flint import arb, ctx

from partita.arithmetic import rounding
from partita.errors import NonFiniteValueError, OutsideDomainError

SAMPLES = 2000
EXACT = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
}
LIBRARY = {
    "exp": (lambda a: a.exp(), (-745.0, 709.7)),
    "log": (lambda a: a.log(), (1e-320, 1e300)),
    "sqrt": (lambda a: a.sqrt(), (0.0, 1e300)),
    "expm1": (lambda a: a.expm1(), (-40.0, 700.0)),
}


@pytest.fixture(autouse=True)
def precision():
    before, ctx.prec = ctx.prec, 300
    yield
    ctx.prec = before


def wide_floats(rng: np.random.Generator, size: int) -> np.ndarray:
    """Positive floats of all magnitudes, with a few small integers."""
    values = rng.random(size) * 2.0 ** rng.integers(-500, 500, size)
    values[::5] = rng.integers(1, 10, len(values[::5]))
    return values


def directed(name: str):
    return getattr(rounding, f"{name}_up"), getattr(rounding, f"{name}_down", None)


@pytest.mark.parametrize("name", EXACT)
def test_arithmetic_is_the_nearest_float_on_its_side(name: str) -> None:
    rng = np.random.default_rng(1)
    above, below = directed(name)
    for a, b in zip(wide_floats(rng, SAMPLES).tolist(), wide_floats(rng, SAMPLES).tolist(), strict=True):
        exact = EXACT[name](Fraction(a), Fraction(b))
        high, low = above(a, b), below(a, b)
        assert Fraction(low) <= exact <= Fraction(high)
        assert high == low if Fraction(high) == exact else math.nextafter(low, math.inf) == high


@pytest.mark.parametrize("name", LIBRARY)
def test_library_functions_are_on_their_side(name: str) -> None:
    function, (least, most) = LIBRARY[name]
    above, below = directed(name)
    rng = np.random.default_rng(2)
    points = np.concatenate([rng.uniform(least, most, SAMPLES), np.clip(rng.normal(0, 1, SAMPLES), least, most)])
    for a in points.tolist():
        exact = function(arb(a))
        assert exact <= arb(above(a))
        assert below is None or arb(below(a)) <= exact


def test_pow_is_on_its_side() -> None:
    rng = np.random.default_rng(3)
    for a, p in zip(wide_floats(rng, SAMPLES).tolist(), rng.uniform(0.01, 2.0, SAMPLES).tolist(), strict=True):
        exact = arb(a) ** arb(p)
        assert exact <= arb(rounding.pow_up(a, p))
        assert arb(rounding.pow_down(a, p)) <= exact


def test_negative_control_the_library_itself_is_not_on_its_side() -> None:
    points = np.random.default_rng(4).uniform(-5, 5, SAMPLES).tolist()
    assert any(not arb(a).exp() <= arb(math.exp(a)) for a in points)
    assert any(not arb(math.exp(a)) <= arb(a).exp() for a in points)


@pytest.mark.parametrize("ulps", [1, 2, 4, 8])
def test_steps_move_by_at_least_the_ulps_asked(ulps: int) -> None:
    rng = np.random.default_rng(5)
    edges = [0.0, 5e-324, 2.0**-1022, 1.0, 1.0 - 2**-53, 1.0 + 2**-52, 2.0**1000]
    x = np.concatenate([wide_floats(rng, SAMPLES), edges])
    x = np.concatenate([x, -x])
    for value, high, low in zip(x, rounding.up(x, ulps), rounding.down(x, ulps), strict=True):
        step = ulps * Fraction(math.ulp(value)) if ulps > 1 else 0
        assert Fraction(high) >= Fraction(value) + step and high > value
        assert Fraction(low) <= Fraction(value) - step and low < value


@pytest.mark.parametrize("ulps", [1, 4])
def test_overflow_turns_finite_on_the_inner_side(ulps: int) -> None:
    ends = np.array([-np.inf, np.inf])
    assert np.isfinite(rounding.up(ends, ulps)).tolist() == [True, False]
    assert np.isfinite(rounding.down(ends, ulps)).tolist() == [False, True]


def test_what_is_exact_stays_exact() -> None:
    assert rounding.add_up(0.5, 0.25, -0.75) == rounding.add_down() == 0.0
    assert rounding.mul_up(0.0, math.inf) == rounding.mul_down(3.0, 0.0) == 0.0
    assert rounding.sqrt_up(4.0) == rounding.sqrt_down(4.0) == 2.0
    assert rounding.exp_up(0.0) == rounding.exp_down(0.0) == 1.0
    assert rounding.expm1_up(0.0) == rounding.log_up(1.0) == rounding.pow_up(0.0, 2.0) == 0.0
    assert rounding.pow_down(3.0, 1.0) == rounding.pow_up(3.0, 1.0) == 3.0


def test_infinities_are_unknown_bounds() -> None:
    assert rounding.add_up(1.0, math.inf) == rounding.mul_up(2.0, math.inf) == math.inf
    assert rounding.mul_up(1e300, 1e300) == rounding.exp_up(1000.0) == rounding.pow_up(1e300, 2.0) == math.inf
    assert 1e308 < rounding.mul_down(1e300, 1e300) < math.inf
    assert 1e308 < rounding.exp_down(1000.0) < math.inf
    assert rounding.log_up(0.0) == -math.inf
    assert rounding.div_up(math.inf, 2.0) == math.inf and rounding.div_up(2.0, math.inf) == 0.0


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: rounding.add_up(math.nan, 1.0), NonFiniteValueError),
        (lambda: rounding.add_up(math.inf, -math.inf), NonFiniteValueError),
        (lambda: rounding.mul_up(-1.0, 2.0), OutsideDomainError),
        (lambda: rounding.div_up(1.0, 0.0), OutsideDomainError),
        (lambda: rounding.div_down(-1.0, 2.0), OutsideDomainError),
        (lambda: rounding.sqrt_up(-1.0), OutsideDomainError),
        (lambda: rounding.log_down(-1.0), OutsideDomainError),
        (lambda: rounding.pow_up(2.0, 0.0), OutsideDomainError),
        (lambda: rounding.pow_up(2.0, math.inf), OutsideDomainError),
        (lambda: rounding.exp_up(math.nan), NonFiniteValueError),
    ],
)
def test_misuse_is_refused(call, error: type[Exception]) -> None:
    with pytest.raises(error):
        call()
