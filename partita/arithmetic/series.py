"""Taylor series of the elementary functions at float centers, with proved coefficients and proved tails.

For u₀ = `center` and every h with |h| ≤ `reach` and u₀ + h ∈ `hull`, an `Expansion` of order D states
    g(u₀ + h) = Σ_{k ≤ D} g_k (h / s)ᵏ + e,   |e| ≤ `tail`,   g_k = g⁽ᵏ⁾(u₀) sᵏ / k! ∈ coefficients[k] ± errors[k]
where s = `scale` is a power of two ≥ reach, so that neither 10⁻¹⁵⁰ nor 10¹⁵⁰ overflows, or 0 where reach is 0.
What bounds the tail beyond D, with n = D + 1:
    exp, sin, cos     Lagrange: sup |g⁽ⁿ⁾| reachⁿ / n! over the hull
    xᵏ                Lagrange, and no tail for 0 ≤ k ≤ D
    log, √x, x⁻ᵏ      ratios |g_{k+1} / g_k| ≤ q < 1 for k ≥ n, so the tail is ≤ |g_n| / (1 - q)
    atan              |g_k| ≤ (s / √(1 + u₀²))ᵏ / k: atan' is the imaginary part of 1 / (x - i)
    asinh             |g_k| ≤ (s / √(1 + u₀²))ᵏ / k: asinh' = Σ P_k(-u₀ / r) hᵏ / rᵏ⁺¹, r = √(1 + u₀²), Legendre's P_k, |P_k| ≤ 1
    acosh             |g_k| ≤ √(a / b) (s / a)ᵏ / k, a = u₀ - 1, b = u₀ + 1: acosh' = (a + h)^(-1/2) (b + h)^(-1/2), both with
                      alternating coefficients, and Σ_j |C(-1/2, j) C(-1/2, k - j)| = 1
    atanh             |g_k| ≤ (s / (1 - |u₀|))ᵏ / k: atanh' = (1 / (1 - x) + 1 / (1 + x)) / 2
    erf               Lagrange with Cramér's inequality |H_D(x)| ≤ 1.0865 √(2ᴰ D!) e^(x²/2)
    tan               Lagrange: tan⁽ⁿ⁾ is a polynomial in tan with coefficients ≥ 0, largest where |tan| is
    tanh, sigmoid     Lagrange with Cauchy's estimate on circles of radius y < π/2: |tanh| ≤ max(1, tan y)
The last three would lose much at the degree asked for, which D exceeds by `EXTRA_ORDERS`; elsewhere D is the degree.
A tail of inf says that the series does not reach that far.
"""

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache, partial

import numpy as np

from partita.arithmetic.interval import Floats, Interval
from partita.arithmetic.rounding import down, up

__all__ = ["Around", "Expansion", "above", "series_of_power"]

EXTRA_ORDERS = 6
_TINY = 2.0**-1022
_LARGEST = sys.float_info.max
_ULP = 2.0**-52
_CRAMER = Fraction(10865, 10000)
_CIRCLES = (0.3, 0.6, 0.9, 1.1, 1.3, 1.4, 1.48, 1.53, 1.75, 2.0, 2.5, 3.0, 4.0, 6.0)


def above(x: Floats, operations: int = 1) -> Floats:
    """A float ≥ the exact value of which x was computed by `operations` sums and products of nonnegative floats.

    n operations lose a factor ≥ (1 - 2⁻⁵³)ⁿ ≥ 1 / (1 + 1.01 n 2⁻⁵³) and n underflows below 2⁻¹⁰⁷⁴ each; the factor
    here is 1 + 2 (n + 2) 2⁻⁵³, of which its own two roundings take 2 · 2⁻⁵³. For n ≤ 10⁹, far below what is used.
    """
    return x * (1.0 + (operations + 2) * _ULP) + _TINY


@dataclass(frozen=True, eq=False)
class Around:
    """Where a series is asked for, (boxes,) each: see the module. `hull` holds the centers."""

    center: Floats
    hull: Interval
    reach: Floats
    scale: Floats

    @property
    def point(self) -> Interval:
        return Interval.point(self.center)

    def scales(self, count: int) -> Interval:
        """s⁰, …, s^(count - 1), (count, boxes): products of powers of two are exact unless they leave the range."""
        powers = np.ones((count, len(self.scale)))
        for k in range(1, count):
            powers[k] = powers[k - 1] * self.scale
        small = (powers < _TINY) & (self.scale > 0.0)
        return Interval(np.where(small, 0.0, np.minimum(powers, _LARGEST)), np.where(small, _TINY, powers))

    def tail(self, supremum: Interval, order: int) -> Floats:
        """sup |g_n (h / s)ⁿ| for enclosures of g_n over the hull, n = order."""
        share = Interval.point(self.reach) / np.where(self.scale > 0.0, self.scale, 1.0)
        return (supremum.absolute() * share.pow_int(order)).hi


@dataclass(frozen=True, eq=False)
class Expansion:
    """Coefficients and their errors, (D + 1, boxes) each, and the tail (boxes,)."""

    coefficients: Floats
    errors: Floats
    tail: Floats


Series = Callable[[Around, int], Expansion]


def _expansion(coefficients: Interval, tail: Floats) -> Expansion:
    return Expansion(coefficients.mid, coefficients.radius, tail)


def _rows(rows: Sequence[Interval]) -> Interval:
    return Interval(np.stack([row.lo for row in rows]), np.stack([row.hi for row in rows]))


def _rationals(numbers: Sequence[Fraction]) -> Interval:
    """Enclosures (len, 1) of exact fractions."""
    nearest = np.array([[float(number)] for number in numbers])
    exact = np.array([[Fraction(float(number)) == number] for number in numbers])
    return Interval(np.where(exact, nearest, down(nearest)), np.where(exact, nearest, up(nearest)))


@lru_cache
def _inverse_factorials(count: int) -> Interval:
    return _rationals([Fraction(1, math.factorial(k)) for k in range(count)])


@lru_cache
def _inverses(count: int) -> Interval:
    """1, 1, 1/2, …, 1/(count - 1), the first for the constant term."""
    return _rationals([Fraction(1, max(k, 1)) for k in range(count)])


def _binomial(power: Fraction, k: int) -> Fraction:
    return math.prod(((power - j) / (j + 1) for j in range(k)), start=Fraction(1))


def exp(around: Around, degree: int) -> Expansion:
    weights = around.scales(degree + 2) * _inverse_factorials(degree + 2)
    tail = around.tail(around.hull.exp() * weights[degree + 1], degree + 1)
    return _expansion(around.point.exp() * weights[: degree + 1], tail)


def _wave(around: Around, degree: int, *, shift: int) -> Expansion:
    """sin for shift 0, cos for shift 1: the derivatives are sin, cos, -sin, -cos in turn."""
    weights = around.scales(degree + 2) * _inverse_factorials(degree + 2)
    sine, cosine = around.point.sin(), around.point.cos()
    turns = (sine, cosine, -sine, -cosine)
    last = around.hull.cos() if (degree + 1 + shift) % 2 else around.hull.sin()
    tail = around.tail(last * weights[degree + 1], degree + 1)
    return _expansion(_rows([turns[(k + shift) % 4] for k in range(degree + 1)]) * weights[: degree + 1], tail)


sin, cos = partial(_wave, shift=0), partial(_wave, shift=1)


def _ratios(ratio: Interval, count: int) -> Interval:
    """1, r, r², …, (count, boxes)."""
    rows = [Interval.point(np.ones(ratio.shape))]
    for _ in range(1, count):
        rows.append(rows[-1] * ratio)
    return _rows(rows)


def _geometric(first: Interval, share: Interval, growth: Fraction | int = 1) -> Floats:
    """first / (1 - q) for q = growth · share, inf where q may reach 1."""
    q = share * _rationals([Fraction(growth)])[0]
    return (first / (1.0 - q)).forget(q.hi >= 1.0).hi


def log(around: Around, degree: int) -> Expansion:
    """g_k = -(-s / u₀)ᵏ / k, where k / (k + 1) < 1 makes s / u₀ the ratio."""
    terms = _ratios(-Interval.point(around.scale) / around.point, degree + 1) * -_inverses(degree + 1)
    share = Interval.point(around.reach) / around.point
    first = share.absolute().pow_int(degree + 1) * _inverses(degree + 2)[degree + 1]
    rows = _rows([around.point.log(), *(terms[k] for k in range(1, degree + 1))])
    return _expansion(rows, np.where(around.center > 0.0, _geometric(first, share), np.inf))


def _power(around: Around, degree: int, power: Fraction, value: Interval) -> Expansion:
    """xᵖ for p not in {0, 1, …}: g_k = C(p, k) (s / u₀)ᵏ u₀ᵖ, whose ratios are ≤ max(1, |p - n| / (n + 1)) |h / u₀|."""
    binomials = [_binomial(power, k) for k in range(degree + 2)]
    terms = _ratios(Interval.point(around.scale) / around.point, degree + 1) * _rationals(binomials[:-1])
    share = (Interval.point(around.reach) / around.point).absolute()
    first = share.pow_int(degree + 1) * _rationals([abs(binomials[-1])])[0] * value.absolute()
    growth = max(Fraction(1), abs(power - degree - 1) / (degree + 2))
    return _expansion(terms * value, _geometric(first, share, growth))


def sqrt(around: Around, degree: int) -> Expansion:
    root = _power(around, degree, Fraction(1, 2), around.point.sqrt())
    return Expansion(root.coefficients, root.errors, np.where(around.center > 0.0, root.tail, np.inf))


def series_of_power(exponent: int) -> Series:
    """xᵏ for an integer k; for k ≥ 0 it is g_j = C(k, j) u₀^(k - j) sʲ, and sup C(k, n) |x|^(k - n) beyond."""

    def negative(around: Around, degree: int) -> Expansion:
        return _power(around, degree, Fraction(exponent), around.point.pow_int(exponent))

    def positive(around: Around, degree: int) -> Expansion:
        binomials = _rationals([Fraction(math.comb(exponent, k)) for k in range(degree + 2)])
        weights = around.scales(degree + 2) * binomials
        powers = [around.point.pow_int(max(exponent - k, 0)) for k in range(degree + 1)]
        last = around.hull.pow_int(max(exponent - degree - 1, 0))
        tail = around.tail(last * weights[degree + 1], degree + 1)
        return _expansion(_rows(powers) * weights[: degree + 1], tail)

    return positive if exponent >= 0 else negative


def _three_terms(first: Interval, a: Interval, b: Interval, count: int, divide: bool) -> list[Interval]:
    """e₀ = first, e_k = -(a e_{k-1} + b e_{k-2}), divided by k where asked."""
    rows = [first, -(a * first)]
    for k in range(2, count):
        step = -(a * rows[-1] + b * rows[-2])
        rows.append(step * _inverses(k + 1)[k] if divide else step)
    return rows[:count]


def _integral(value: Interval, derivative: Sequence[Interval], around: Around) -> Interval:
    """The coefficients of g from g(u₀) and those of g'."""
    return _rows([value, *(row * around.scale for row in derivative)]) * _inverses(len(derivative) + 1)


def atan(around: Around, degree: int) -> Expansion:
    """(1 + (u₀ + h)²) g' = 1."""
    center, scale = around.point, Interval.point(around.scale)
    square = 1.0 + center.square()
    a, b = 2.0 * center * scale / square, scale.square() / square
    slopes = _three_terms(1.0 / square, a, b, degree, divide=False)
    share = Interval.point(around.reach) / square.sqrt()
    first = share.pow_int(degree + 1) * _inverses(degree + 2)[degree + 1]
    return _expansion(_integral(center.atan(), slopes, around), _geometric(first, share))


def _from_roots(
    value: Interval, around: Around, square: Interval, share: Interval, factor: Interval, degree: int
) -> Expansion:
    """g with y = g' = (q + 2 u₀ h + h²)^(-1/2), q = square: k q y_k = -((2 k - 1) u₀ y_{k-1} + (k - 1) y_{k-2})."""
    scale = Interval.point(around.scale)
    a, b = around.point * scale / square, scale.square() / square
    rows = [1.0 / square.sqrt()]
    for k in range(1, degree):
        step = (2.0 * k - 1.0) * a * rows[-1]
        step = step + (k - 1.0) * b * rows[-2] if k > 1 else step
        rows.append(-step * _inverses(k + 1)[k])
    first = share.pow_int(degree + 1) * factor * _inverses(degree + 2)[degree + 1]
    return _expansion(_integral(value, rows[:degree], around), _geometric(first, share))


def asinh(around: Around, degree: int) -> Expansion:
    square = 1.0 + around.point.square()
    share = Interval.point(around.reach) / square.sqrt()
    return _from_roots(around.point.asinh(), around, square, share, Interval.point(1.0), degree)


def acosh(around: Around, degree: int) -> Expansion:
    """No tail is known where u₀ may be ≤ 1."""
    inside = around.center > 1.0
    center = np.where(inside, around.center, 2.0)
    less, more = Interval.point(center) - 1.0, Interval.point(center) + 1.0
    moved = Around(center, around.hull, around.reach, around.scale)
    share = Interval.point(around.reach) / less
    found = _from_roots(moved.point.acosh(), moved, less * more, share, (less / more).sqrt(), degree)
    return Expansion(found.coefficients, found.errors, np.where(inside, found.tail, np.inf))


def atanh(around: Around, degree: int) -> Expansion:
    """(1 - (u₀ + h)²) g' = 1; no tail is known where |u₀| ≥ 1."""
    inside = np.abs(around.center) < 1.0
    center, scale = Interval.point(np.where(inside, around.center, 0.0)), Interval.point(around.scale)
    left, right = 1.0 - center, 1.0 + center
    square = left * right
    slopes = _three_terms(1.0 / square, -2.0 * center * scale / square, -scale.square() / square, degree, divide=False)
    share = Interval.point(around.reach) / left.minimum(right)
    first = share.pow_int(degree + 1) * _inverses(degree + 2)[degree + 1]
    found = _expansion(_integral(center.atanh(), slopes, around), _geometric(first, share))
    return Expansion(found.coefficients, found.errors, np.where(inside, found.tail, np.inf))


def erf(around: Around, degree: int) -> Expansion:
    """g' = (2 / √π) w with w' = -2 (u₀ + h) w, and w⁽ᵏ⁾ = (-1)ᵏ H_k w."""
    center, scale, degree = around.point, Interval.point(around.scale), degree + EXTRA_ORDERS
    near = 2.0 / math.sqrt(math.pi)
    factor = Interval(down(np.array([near]), 4), up(np.array([near]), 4))
    slopes = _three_terms((-center.square()).exp() * factor, 2.0 * center * scale, 2.0 * scale.square(), degree, True)
    hermite = _rationals([_CRAMER**2 * Fraction(2**degree, math.factorial(degree))])[0].sqrt()
    decay = (around.hull.absolute().square() * -0.5).exp()
    weight = around.scales(degree + 2)[degree + 1] * _inverses(degree + 2)[degree + 1]
    tail = around.tail(decay * (hermite * factor) * weight, degree + 1)
    return _expansion(_integral(center.erf(), slopes, around), tail)


@dataclass(frozen=True, eq=False)
class _Riccati:
    """g' = a + b g + c g² with c = ±1: g₀, g₁ / s and b + 2 c g₀, from which the rest follows, for k ≥ 1:
    (k + 1) g_{k+1} = s ((b + 2 c g₀) g_k + c Σ_{0 < j < k} g_j g_{k-j})."""

    first: Interval
    slope: Interval
    linear: Interval
    sign: float

    @np.errstate(all="ignore")
    def rows(self, scale: Floats, count: int) -> tuple[Floats, Floats]:
        """Coefficients and errors, (count, boxes), as balls: with values m_j ± r_j and b ± q, a step errs by at most
        |b| r_k + q (|m_k| + r_k) + Σ r_j (2 |m_{k-j}| + r_{k-j}), and (k + 2) roundings of the sum of magnitudes."""
        middles, errors = np.zeros((2, count, len(scale)))
        start = _rows([self.first, self.slope * scale])
        middles[:2], errors[:2] = start.mid[:count], start.radius[:count]
        b, q = self.linear.mid, self.linear.radius
        for k in range(1, count - 1):
            m, r, size = middles[1:k], errors[1:k], np.abs(middles[: k + 1])
            inner = size[1:k][::-1]
            total = b * middles[k] + self.sign * (m * m[::-1]).sum(axis=0)
            largest = np.abs(b) * size[k] + (size[1:k] * inner).sum(axis=0)
            moved = np.abs(b) * errors[k] + q * (size[k] + errors[k]) + (r * (2.0 * inner + r[::-1])).sum(axis=0)
            step = scale / (k + 1)
            middles[k + 1] = total * step
            errors[k + 1] = above(above(moved + (k + 4) * _ULP * largest, 4 * k + 8) * step, 3)
        return middles, errors


def tan(around: Around, degree: int) -> Expansion:
    """g' = 1 + g²; at the largest |tan| of the hull the same recursion bounds every derivative over it."""

    def equation(value: Interval) -> _Riccati:
        return _Riccati(value, 1.0 + value.square(), 2.0 * value, 1.0)

    count = degree + 1 + EXTRA_ORDERS
    rows = equation(around.point.tan()).rows(around.scale, count)
    most = np.minimum(around.hull.tan().magnitude, _LARGEST)
    last, slack = (part[count] for part in equation(Interval.point(most)).rows(around.scale, count + 1))
    return Expansion(*rows, around.tail(Interval(np.zeros(last.shape), above(last + slack)), count))


def _tanh_tail(hull: Interval, reach: Interval, order: int) -> Floats:
    """min over y of M(y) (reach / y)ⁿ, where |tanh ∓ 1| or |tanh| is ≤ M(y) on the circles of radius y around the hull.

    |tanh z| ≤ max(1, tan |Im z|) for |Im z| < π/2, and |tanh z - 1| = 2 / |e^(2z) + 1| ≤ 2 / (e^(2 Re z) - 1).
    """
    distance = Interval.point(np.minimum(hull.mignitude, 300.0))
    tail = np.full(hull.shape, np.inf)
    for y in _CIRCLES:
        growth = (2.0 * (distance - y)).exp() - 1.0
        largest = (2.0 / growth).forget(growth.lo <= 0.0).hi
        if y < 1.57:
            largest = np.minimum(largest, up(max(1.0, math.tan(y)), 8))
        tail = np.fmin(tail, (Interval.point(largest).absolute() * (reach / y).pow_int(order)).hi)
    return tail


def tanh(around: Around, degree: int) -> Expansion:
    """g' = 1 - g² = 4 σ(2 x) σ(-2 x)."""
    count, value = degree + 1 + EXTRA_ORDERS, around.point.tanh()
    slope = 4.0 * (2.0 * around.point).sigmoid() * (-2.0 * around.point).sigmoid()
    rows = _Riccati(value, slope, -2.0 * value, -1.0).rows(around.scale, count)
    return Expansion(*rows, _tanh_tail(around.hull, Interval.point(around.reach), count))


def sigmoid(around: Around, degree: int) -> Expansion:
    """g' = g - g² = σ(x) σ(-x), and σ(x) = (1 + tanh(x / 2)) / 2."""
    count, value = degree + 1 + EXTRA_ORDERS, around.point.sigmoid()
    slope, linear = value * (-around.point).sigmoid(), (around.point * -0.5).tanh()
    rows = _Riccati(value, slope, linear, -1.0).rows(around.scale, count)
    return Expansion(*rows, _tanh_tail(around.hull * 0.5, Interval.point(around.reach) * 0.5, count))
