"""Outward rounding: floats that are proved to lie on the stated side of a real number.

Arrays are moved by units in the last place (`up`, `down`). Scalars of certificates use directed arithmetic: `*_up`
returns a float ≥ the exact real result and `*_down` one ≤ it. Sums, products, quotients and square roots are the
*nearest* such float, found by comparing exact fractions; functions of the C library are padded by `LIBRARY_ULPS`.

±inf stands for a bound that is not known. NaN is refused: it bounds nothing.
"""

import math
import sys
from collections.abc import Callable, Iterable
from fractions import Fraction
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from partita.errors import NonFiniteValueError, OutsideDomainError

__all__ = [
    "LIBRARY_ULPS",
    "add_down",
    "add_up",
    "div_down",
    "div_up",
    "down",
    "exp_down",
    "exp_up",
    "expm1_up",
    "log_down",
    "log_up",
    "mul_down",
    "mul_up",
    "pow_down",
    "pow_up",
    "sqrt_down",
    "sqrt_up",
    "sub_down",
    "sub_up",
    "up",
]

LIBRARY_ULPS = 4
_EPSILON = sys.float_info.epsilon
_TINY = sys.float_info.min
_LARGEST = sys.float_info.max

Real = TypeVar("Real", float, NDArray[np.float64])


@np.errstate(all="ignore")
def up(x: Real, ulps: int = 1) -> Real:
    """A float ≥ every real within `ulps` units in the last place of x; -inf (an overflow) turns finite.

    One ulp is `nextafter`, above every real that rounds to x. For k > 1, with y = nextafter(x), it is
    y + (|y| k 2⁻⁵² + k 2⁻¹⁰²²) in floats, at least x + k ulp(x). As ulp(y) ≤ |y| 2⁻⁵² for normal y, and multiples of
    ulp(y) are floats, the float increment is ≥ k ulp(y); rounding the sum loses at most one ulp, which the step from x
    to y has already paid. At x = -2ⁿ, where the ulp halves, |y| ≥ |x| (1 - 2⁻⁵³) gives the same. The second term serves
    subnormal y.
    """
    y = np.nextafter(x, np.inf)
    out: Real = y if ulps == 1 else y + (np.abs(y) * (ulps * _EPSILON) + ulps * _TINY)
    return out


@np.errstate(all="ignore")
def down(x: Real, ulps: int = 1) -> Real:
    """A float ≤ every real within `ulps` units in the last place of x: -up(-x)."""
    out: Real = -up(np.negative(x), ulps)
    return out


def _numbers(name: str, values: Iterable[float], *, least: float = -math.inf) -> list[float]:
    """The values as floats; refuses NaN and anything below `least`."""
    numbers = [float(value) for value in values]
    for number in numbers:
        if math.isnan(number):
            raise NonFiniteValueError(f"{name}: found NaN; expected a number")
        if number < least:
            raise OutsideDomainError(f"{name}: found {number!r}; expected at least {least!r}")
    return numbers


def _ceil(exact: Fraction) -> float:
    """The least float ≥ exact."""
    try:
        nearest = float(exact)
    except OverflowError:
        return math.inf if exact > 0 else -_LARGEST
    return nearest if Fraction(nearest) >= exact else math.nextafter(nearest, math.inf)


def _floor(exact: Fraction) -> float:
    """The largest float ≤ exact."""
    return -_ceil(-exact)


def _padded_up(value: float) -> float:
    """The float `LIBRARY_ULPS` steps above."""
    for _ in range(LIBRARY_ULPS):
        value = math.nextafter(value, math.inf)
    return value


def _padded_down(value: float) -> float:
    """The float `LIBRARY_ULPS` steps below."""
    return -_padded_up(-value)


def _overflowing(function: Callable[..., float], *arguments: float) -> float:
    """The library's value, with +inf where it overflows."""
    try:
        return function(*arguments)
    except OverflowError:
        return math.inf


def add_up(*terms: float) -> float:
    """The least float ≥ the exact sum."""
    numbers = _numbers("add_up", terms)
    infinite = {number for number in numbers if math.isinf(number)}
    if len(infinite) == 2:
        raise NonFiniteValueError("add_up: found both inf and -inf; expected infinities of one sign")
    return infinite.pop() if infinite else _ceil(sum(map(Fraction, numbers), Fraction(0)))


def add_down(*terms: float) -> float:
    """The largest float ≤ the exact sum."""
    return -add_up(*(-float(term) for term in terms))


def sub_up(a: float, b: float) -> float:
    """The least float ≥ a - b."""
    return add_up(a, -float(b))


def sub_down(a: float, b: float) -> float:
    """The largest float ≤ a - b."""
    return add_down(a, -float(b))


def _product(name: str, factors: Iterable[float]) -> Fraction | None:
    """The exact product of nonnegative factors, 0 · inf = 0; None for infinity."""
    numbers = _numbers(name, factors, least=0.0)
    if 0.0 in numbers:
        return Fraction(0)
    return None if math.inf in numbers else math.prod(map(Fraction, numbers), start=Fraction(1))


def mul_up(*factors: float) -> float:
    """The least float ≥ the exact product of nonnegative factors; 0 · inf = 0, as each factor bounds a real number."""
    exact = _product("mul_up", factors)
    return math.inf if exact is None else _ceil(exact)


def mul_down(*factors: float) -> float:
    """The largest float ≤ the exact product of nonnegative factors; 0 · inf = 0."""
    exact = _product("mul_down", factors)
    return math.inf if exact is None else _floor(exact)


def _quotient(name: str, a: float, b: float) -> Fraction | None:
    """The exact a / b for a ≥ 0 and b > 0, with a / inf = 0; None for infinity."""
    a, b = _numbers(name, (a, b), least=0.0)
    if b == 0.0 or (math.isinf(a) and math.isinf(b)):
        raise OutsideDomainError(f"{name}: found {a!r} / {b!r}; expected a positive divisor and at most one infinity")
    if math.isinf(b):
        return Fraction(0)
    return None if math.isinf(a) else Fraction(a) / Fraction(b)


def div_up(a: float, b: float) -> float:
    """The least float ≥ a / b, for a ≥ 0 and b > 0."""
    exact = _quotient("div_up", a, b)
    return math.inf if exact is None else _ceil(exact)


def div_down(a: float, b: float) -> float:
    """The largest float ≤ a / b, for a ≥ 0 and b > 0."""
    exact = _quotient("div_down", a, b)
    return math.inf if exact is None else _floor(exact)


def sqrt_up(a: float) -> float:
    """The least float ≥ √a, for a ≥ 0: the library's root, or its successor when its square falls short of a."""
    (a,) = _numbers("sqrt_up", (a,), least=0.0)
    root = math.sqrt(a)
    return root if math.isinf(a) or Fraction(root) ** 2 >= Fraction(a) else math.nextafter(root, math.inf)


def sqrt_down(a: float) -> float:
    """The largest float ≤ √a, for a ≥ 0."""
    (a,) = _numbers("sqrt_down", (a,), least=0.0)
    root = math.sqrt(a)
    return root if math.isinf(a) or Fraction(root) ** 2 <= Fraction(a) else math.nextafter(root, 0.0)


def exp_up(a: float) -> float:
    """A float ≥ eᵃ."""
    (a,) = _numbers("exp_up", (a,))
    return math.exp(a) if a in (0.0, -math.inf) else _padded_up(_overflowing(math.exp, a))


def exp_down(a: float) -> float:
    """A float ≤ eᵃ, and ≥ 0."""
    (a,) = _numbers("exp_down", (a,))
    return math.exp(a) if a in (0.0, math.inf) else max(0.0, _padded_down(_overflowing(math.exp, a)))


def expm1_up(a: float) -> float:
    """A float ≥ eᵃ - 1, accurate near a = 0."""
    (a,) = _numbers("expm1_up", (a,))
    return 0.0 if a == 0.0 else _padded_up(_overflowing(math.expm1, a))


def _log(name: str, a: float, pad: Callable[[float], float]) -> float:
    """The padded natural logarithm of a ≥ 0, with log 0 = -inf and log 1 = 0 exactly."""
    (a,) = _numbers(name, (a,), least=0.0)
    if a == 0.0:
        return -math.inf
    return math.log(a) if a in (1.0, math.inf) else pad(math.log(a))


def log_up(a: float) -> float:
    """A float ≥ log a, for a ≥ 0."""
    return _log("log_up", a, _padded_up)


def log_down(a: float) -> float:
    """A float ≤ log a, for a ≥ 0."""
    return _log("log_down", a, _padded_down)


def _pow(name: str, a: float, p: float, pad: Callable[[float], float]) -> float:
    """The padded power aᵖ of a ≥ 0 and finite p > 0, exact for a ∈ {0, 1, inf} and p = 1."""
    (a,), (p,) = _numbers(name, (a,), least=0.0), _numbers(name, (p,), least=_TINY)
    if math.isinf(p):
        raise OutsideDomainError(f"{name}: the exponent is inf; expected a finite one")
    return a if a in (0.0, 1.0, math.inf) or p == 1.0 else pad(_overflowing(math.pow, a, p))


def pow_up(a: float, p: float) -> float:
    """A float ≥ aᵖ, for a ≥ 0 and p > 0."""
    return _pow("pow_up", a, p, _padded_up)


def pow_down(a: float, p: float) -> float:
    """A float ≤ aᵖ, and ≥ 0, for a ≥ 0 and p > 0."""
    return max(0.0, _pow("pow_down", a, p, _padded_down))
