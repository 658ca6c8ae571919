"""Taylor polynomials of the softmax weights of one axis, with proved remainders.

`w_p(x) = softmax_p(−R(x − c_p)²/2)`. The quadratic is common to all centers and cancels, so on `x = x₀ + r t` the weights are
`G_p(t)/S(t)`, `G_p = g_p e^{v_p t}`, `S = Σ G_p`, with constants `g_p = e^{−R(x₀ − c_p)²/2}` and `v_p = R(c_p − x₀) r`. A common
factor `e^{−v̄ t}` changes nothing; v̄, the mean of v under the weights, makes S nearly constant.

The polynomials q_p are the quotient series in floats, whatever their rounding: the remainder is proved afterwards, from
`w_p − q_p = (G_p − q_p S)/S`. The coefficients of `G_p − q_p S` are computed (those up to the degree vanish but for rounding),
the tails of the exponential series are bounded, and S, being convex, lies above its tangent at 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from partita.arithmetic.interval import Interval
from partita.geometry.domains import Array

__all__ = ["WeightSeries", "slope_series", "weight_series"]

_U = 2.0**-53
_INFLATE = 1 + 1e-12  # for sums and products of nonnegative floats: some hundred roundings
_TINY = 1e-300  # what may have been lost to underflow


@dataclass(frozen=True, eq=False)
class WeightSeries:
    """`|w_p(x₀ + r t) − Σ_{k≤d} coefficients[n, k, p] t^k| ≤ remainder[n, p]` for t in [−1, 1], rounding included.

    Shapes: coefficients `(intervals, d + 1, centers)`, remainder `(intervals, centers)`.
    """

    coefficients: Array
    remainder: Array


@np.errstate(all="ignore")  # overflow ends in an infinite remainder, which proves nothing
def weight_series(centers: Array, rate: float, middle: Array, radius: Array, *, degree: int) -> WeightSeries:
    """The weights of an axis on the intervals `middle ± radius`, `(n,)` each. *Theorem*: `weight-series`."""
    start, start_error, speed, speed_error = _numerators(centers, rate, middle, radius)
    powers = np.arange(1, degree + 1)[:, None]
    steps = np.concatenate([np.ones_like(start)[:, None], speed[:, None] / powers], axis=1)
    terms = start[:, None] * np.cumprod(steps, axis=1)  # g v^k/k!, (n, d + 1, centers)
    growth = np.exp(np.abs(speed)) * (1 + 1e-13)
    tail = np.abs(speed) ** (degree + 1) / math.factorial(degree + 1)
    moved = start_error * growth + (start + start_error) * growth * np.exp(speed_error) * speed_error
    tails = (start * growth * (tail + (3 * degree + 2) * _U) + moved) * _INFLATE + _TINY
    sums = terms.sum(axis=2, keepdims=True)
    sum_error = tails.sum(axis=1) + 1.01 * terms.shape[2] * _U * np.abs(terms).sum(axis=(1, 2))
    series = _quotient(terms, sums)
    least = _least_sum(start, start_error, speed, speed_error)
    defect = _residual(terms, sums, series) + tails + np.abs(series).sum(axis=1) * sum_error[:, None]
    remainder = np.where(least[:, None] > 0, defect * _INFLATE / least[:, None], np.inf)
    series = np.where(np.isfinite(series), series, 0.0)
    return WeightSeries(series, np.where(np.isfinite(remainder), remainder * _INFLATE + _TINY, np.inf))


@np.errstate(all="ignore")
def slope_series(weights: WeightSeries, centers: Array, rate: float, middle: Array) -> WeightSeries:
    """The slopes of the weights, `w_p' = R w_p (c_p − Σ_k w_k c_k)`, from their series on the same intervals.

    With `a = c − x₀`, `m = Σ w_k a_k` and its polynomial M, `|m − M| ≤ Σ ρ_k|a_k|`:
    `|w(a − m) − q(a − M)| ≤ ρ(|a| + ‖M‖ + ρ_m) + ‖q‖ρ_m`. *Theorem*: `slope-series`.
    """
    series, degree = weights.coefficients, weights.coefficients.shape[1] - 1
    offset = Interval.point(centers) - middle[:, None]
    a, a_error = offset.mid, offset.radius
    count, norms = len(centers) + degree + 6, np.abs(series).sum(axis=1)
    mean = (series * a[:, None]).sum(axis=2)
    sizes = (norms * np.abs(a)).sum(axis=1)
    mean_error = (weights.remainder * (np.abs(a) + a_error) + norms * a_error).sum(axis=1) + 1.01 * count * _U * sizes
    mean_size = np.abs(mean).sum(axis=1)
    factor = -mean[:, :, None] + np.zeros_like(series)
    factor[:, 0] += a
    product, beyond = np.zeros_like(series), np.zeros_like(norms)
    for k in range(2 * degree + 1):
        j = np.arange(max(0, k - degree), min(k, degree) + 1)
        terms = (series[:, j] * factor[:, k - j]).sum(axis=1)
        if k <= degree:
            product[:, k] = terms
        else:
            beyond += np.abs(terms)
    reach = np.abs(a) + a_error + mean_size[:, None] + mean_error[:, None]
    lost = weights.remainder * reach + norms * (mean_error[:, None] + a_error)
    remainder = beyond + lost + 1.01 * count * _U * norms * reach * (degree + 1)
    found = np.where(np.isfinite(remainder), rate * remainder * _INFLATE * (1 + 1e-12) + _TINY, np.inf)
    rounded = 2 * _U * rate * np.abs(product).sum(axis=1)
    return WeightSeries(np.where(np.isfinite(product), rate * product, 0.0), found + rounded)


def _numerators(centers: Array, rate: float, middle: Array, radius: Array) -> tuple[Array, Array, Array, Array]:
    """g and v with bounds of their errors, `(n, centers)` each, in units in which the largest g is about 1."""
    distance = Interval.point(centers) - middle[:, None]
    exponent = distance.square() * (-0.5 * rate)  # 0.5·rate is exact
    exponent = exponent - exponent.hi.max(axis=1, keepdims=True)  # a common factor, any float will do
    start = exponent.exp()
    speed = distance * rate * radius[:, None]
    near = start.mid / start.mid.sum(axis=1, keepdims=True)
    speed = speed - (near * speed.mid).sum(axis=1, keepdims=True)
    return start.mid, start.radius, speed.mid, speed.radius


def _least_sum(start: Array, start_error: Array, speed: Array, speed_error: Array) -> Array:
    """A lower bound of S over [−1, 1]: S is convex in t, so it lies above its tangent at 0, `Σ g + t Σ g v`."""
    size, count = np.abs(speed), 1.01 * (start.shape[1] + 3) * _U
    value_error = (start_error + count * start).sum(axis=1)
    slope_error = (start_error * (size + speed_error) + start * speed_error + count * start * size).sum(axis=1)
    slope = np.abs((start * speed).sum(axis=1))
    out: Array = (start.sum(axis=1) - (slope + value_error + slope_error) * _INFLATE) * (1 - 1e-12)
    return out


def _quotient(terms: Array, sums: Array) -> Array:
    """Coefficients of G/S up to the same degree: `q_k = (G_k − Σ_{j=1}^k S_j q_{k−j})/S_0`."""
    series = np.empty_like(terms)
    for k in range(terms.shape[1]):
        series[:, k] = terms[:, k] - (sums[:, 1 : k + 1] * series[:, :k][:, ::-1]).sum(axis=1)
        series[:, k] /= sums[:, 0]
    return series


def _residual(terms: Array, sums: Array, series: Array) -> Array:
    """An upper bound of `Σ_k |coefficient k of G − q S|`, k up to twice the degree, `(n, centers)`."""
    degree = terms.shape[1] - 1
    total = np.zeros(terms.shape[::2])
    for k in range(2 * degree + 1):
        j = np.arange(max(0, k - degree), min(k, degree) + 1)
        products = sums[:, j] * series[:, k - j]
        own = terms[:, k] if k <= degree else 0.0
        size = np.abs(own) + np.abs(products).sum(axis=1)
        total += np.abs(own - products.sum(axis=1)) + 1.01 * (len(j) + 2) * _U * size
    return total
