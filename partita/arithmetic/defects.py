"""How far a polynomial w is from 1 / u, √u or log u, by the defect in the equation that it should satisfy.

Each bound holds for every w, however it was found; u = p + e with |e| ≤ ρ and u ∈ bounds. The series of 1 / u around u₀
converges as (‖u - u₀‖ / u₀)ᵏ, where the Taylor polynomial of 1 / (1 + x²) in x itself does better; the defect sees this.
    1 / u     1 / u - w = (1 - u w) / u
    √u        √u - w = (u - w²) / (√u + w)
    log u     along rays, with E = Σ_i t_i ∂_i, which multiplies t^α by |α|:
              log p(t) - w(t) = log p₀ - w₀ + ∫₀¹ (E p - p E w)(τ t) / (τ p(τ t)) dτ,   ∫₀¹ τᵏ⁻¹ dτ = 1 / k
and |log u - log p| ≤ ρ / min(u, p). The products are exact up to degree d, but for rounding, where w is a truncated
series; what lies beyond d is of degree > d.
"""

from collections.abc import Callable

import numpy as np

from partita.arithmetic.interval import Floats, Interval
from partita.arithmetic.polynomial import Polynomial
from partita.arithmetic.rounding import down
from partita.arithmetic.series import above

__all__ = ["Defect", "defect_of_log", "defect_of_reciprocal", "defect_of_root"]

_ULP = 2.0**-52

Defect = Callable[[Polynomial, Floats, Interval, Polynomial], Floats]


def defect_of_reciprocal(p: Polynomial, remainder: Floats, bounds: Interval, w: Polynomial) -> Floats:
    """sup |1 / u - w|, (boxes,); inf where u may be 0."""
    product, lost = p.product(w, p.basis.degree)
    one = Polynomial(p.basis, np.ones((1, 1)))
    rest, rounding = product.plus(one.negative)
    return _quotient(above(rest.norm + lost + rounding + remainder * w.norm, 5), bounds.mignitude)


def defect_of_root(p: Polynomial, remainder: Floats, bounds: Interval, w: Polynomial) -> Floats:
    """sup |√u - w|, (boxes,); inf where √u + w may be ≤ 0."""
    square, lost = w.product(w, p.basis.degree)
    rest, rounding = p.plus(square.negative)
    least = down(bounds.sqrt().lo + down(w.coefficients[0] - w.spread))
    return _quotient(above(rest.norm + lost + rounding + remainder, 4), np.where(bounds.lo >= 0.0, least, 0.0))


def defect_of_log(p: Polynomial, remainder: Floats, bounds: Interval, w: Polynomial) -> Floats:
    """sup |log u - w|, (boxes,); inf where u or p may be ≤ 0. E p and E w are rounded once, as products by |α|."""
    degree = p.basis.degree
    euler_p, euler_w = p.euler, w.euler
    product, rounding = p.convolution(euler_w, degree)
    rest, more = euler_p.plus(product.negative)
    beyond = p.dropped(euler_w, degree) / (degree + 1)
    rounded = above((euler_p.norm + above(p.norm * euler_w.norm)) * _ULP, 2)
    start = (Interval.point(p.coefficients[0]).log() - w.coefficients[0]).magnitude
    least = np.minimum(np.maximum(down(bounds.lo - remainder), down(p.coefficients[0] - p.spread)), bounds.lo)
    total = above(rest.norm + rounding + more + beyond + rounded + remainder, 8)
    return above(start + _quotient(total, least))


def _quotient(size: Floats, divisor: Floats) -> Floats:
    """size / divisor or more, inf where the divisor is not positive."""
    positive = divisor > 0.0
    return np.where(positive, above(size / np.where(positive, divisor, 1.0), 2), np.inf)
