"""Enclosures of functions at points where their own rules fail although they have a limit there: powers and logarithms at 0."""

from dataclasses import dataclass

import numpy as np

from partita.arithmetic.interval import Floats, Interval
from partita.arithmetic.rounding import LIBRARY_ULPS, down, up

__all__ = ["LogProduct", "quotient", "real_power", "root_slopes"]

_quiet = np.errstate(all="ignore")


@_quiet
def real_power(v: Interval, exponent: Interval) -> tuple[Interval, Interval]:
    """Values and slopes of `v^e` over the part of V in [0, ∞), for V that reaches down to 0 and exponents of one sign.

    0^e is 0 for e > 0. For e < 0 there is a pole, and the values have no upper end. Slopes are unknown for e < 1.

    >>> value, slope = real_power(Interval(np.zeros(1), np.full(1, 4.0)), Interval.point(np.full(1, 1.5)))
    >>> bool(value.hi >= 8.0), bool(slope.hi >= 3.0)
    (True, True)
    """
    top = np.maximum(v.hi, 0.0)
    ends = [_power(top, e) for e in (exponent.lo, exponent.hi)]
    rising = exponent.lo > 0.0
    lo = np.where(rising, 0.0, np.minimum(ends[0].lo, ends[1].lo))
    value = Interval(lo, np.where(rising, np.maximum(ends[0].hi, ends[1].hi), np.inf)).forget(v.hi < 0.0)
    less = exponent - 1.0
    steep = np.maximum(*(_power(top, np.maximum(e, 0.0)).hi for e in (less.lo, less.hi)))
    slope = Interval(np.zeros(steep.shape), up(np.maximum(exponent.hi, 0.0) * steep))
    return value, slope.forget(np.broadcast_to(exponent.lo < 1.0, steep.shape))


def _power(base: Floats, exponent: Floats) -> Interval:
    """base^e for base ≥ 0 and e ≠ 0; 0^e is 0 or ∞."""
    value = np.power(base, exponent)
    exact = (base == 0.0) | (base == 1.0) | (exponent == 0.0)
    lo = np.where(exact, value, np.maximum(down(value, LIBRARY_ULPS), 0.0))
    hi = np.where(exact, value, up(value, LIBRARY_ULPS))
    return Interval(np.minimum(lo, np.finfo(np.float64).max), hi)


@dataclass(frozen=True)
class LogProduct:
    """`g(w) = w^s · log(c |w|^r)` with s, r > 0 and c in an interval of positive numbers; g(0) = 0 is the limit.

    Attributes:
        power: s. odd: whether w^s has the sign of w (else it is |w|^s). log_power: r.
        scale: encloses log c.
        half_line: whether g is defined for w ≥ 0 only.
    """

    power: float
    odd: bool
    log_power: float
    scale: Interval
    half_line: bool

    @_quiet
    def over(self, w: Interval) -> tuple[Interval, Interval]:
        """Values and slopes over W, which may hold 0. Slopes are unknown for s ≤ 1.

        `φ(y) = y^s (log c + r log y)` falls from 0 to `−(r/s) c^{−s/r}/e` and rises from there, so its range on [0, M] follows from
        φ(M) and, where the minimum may lie before M, from its value. `φ' = s y^{s−1}(log c + r log y) + r y^{s−1}`.

        >>> g = LogProduct(1.0, False, 1.0, Interval.point(0.0), False)
        >>> value, _ = g.over(Interval(np.array([-1e-3]), np.array([1e-3])))
        >>> bool(value.hi == 0.0), bool(-7e-3 < value.lo < -6.9e-3)
        (True, True)
        """
        most = np.maximum(w.hi, 0.0) if self.half_line else w.magnitude
        range_of = self._range(most, self.power)
        below, above = w.hi <= 0.0, w.lo >= 0.0
        largest = range_of.magnitude
        lo = np.where(above, range_of.lo, np.where(below, -range_of.hi, -largest))
        hi = np.where(above, range_of.hi, np.where(below, -range_of.lo, largest))
        value = Interval(lo, hi) if self.odd and not self.half_line else range_of
        if self.power <= 1.0:
            return value, Interval(np.full(w.shape, -np.inf), np.full(w.shape, np.inf))
        steep = self._range(most, self.power - 1.0).magnitude
        other = self.log_power * _power(most, np.full(most.shape, self.power - 1.0)).hi
        steepest = up(up(self.power * steep) + up(other))
        return value, Interval(-steepest, steepest)

    def _range(self, most: Floats, power: float) -> Interval:
        """The range of `y^power (log c + r log y)` on [0, most]."""
        ends = _power(most, np.full(most.shape, power)) * (
            self.scale + self.log_power * Interval.point(np.where(most > 0.0, most, 1.0)).log()
        )
        dip = (
            -(self.log_power / Interval.point(power))
            * (-(power / Interval.point(self.log_power)) * self.scale - 1.0).exp()
        )
        turns_at = (-self.scale / self.log_power - 1.0 / Interval.point(power)).exp()
        lo = np.where(most >= turns_at.lo, np.minimum(dip.lo, 0.0), np.minimum(ends.lo, 0.0))
        empty = most == 0.0
        return Interval(np.where(empty, 0.0, lo), np.where(empty, 0.0, np.maximum(ends.hi, 0.0)))


def quotient(function: str, hull: Interval) -> tuple[Interval, Interval]:
    """Values and slopes of `ψ(v) = φ(v)/v`, φ(0) = 0, from the hull of V and 0.

    `ψ(v) = ∫₀¹ φ'(sv) ds` lies in φ'(hull), and `ψ'(v) = ∫₀¹ s φ''(sv) ds` in ½φ''(hull).

    >>> value, slope = quotient("sin", Interval(np.array([-0.1]), np.array([0.1])))
    >>> bool(0.99 < value.lo <= 1.0 <= value.hi), bool(slope.hi < 0.06)
    (True, True)
    """
    v = hull
    if function == "sin":
        first, second = v.cos(), -v.sin()
    elif function == "tan":
        first = 1.0 + v.tan().square()
        second = 2.0 * v.tan() * first
    elif function == "tanh":
        first = 1.0 - v.tanh().square()
        second = -2.0 * v.tanh() * first
    elif function == "atan":
        first = 1.0 / (1.0 + v.square())
        second = -2.0 * v * first.square()
    elif function == "asinh":
        first = 1.0 / (1.0 + v.square()).sqrt()
        second = -v * first * first.square()
    elif function == "atanh":
        first = 1.0 / (1.0 - v.square())
        second = 2.0 * v * first.square()
    else:  # erf
        first = (2.0 / Interval(down(np.sqrt(np.pi), 4), up(np.sqrt(np.pi), 4))) * (-v.square()).exp()
        second = -2.0 * v * first
    return first, 0.5 * second


def root_slopes(slopes: "list[tuple[float, Interval]]") -> Interval:
    """Slopes of `√(b + Σ_i c_i u_i²)`, b and c_i ≥ 0, from the (c_i, slopes of u_i): the k-th is within `√Σ_i c_i (∂_k u_i)²`.

    `√Σu(x)² − √Σu(y)² = Σ_i a_i (u_i(x) − u_i(y))` with `a_i = (u_i(x) + u_i(y))/(|u(x)| + |u(y)|)`, a vector of length at most 1.
    """
    total = Interval.point(0.0)
    for factor, slope in slopes:
        total = total + factor * slope.square()
    reach = total.sqrt().hi
    return Interval(-reach, reach)
