"""Moments, leakage and tails of a softmax over centers, with proved bounds.

For scores `−R(x − c_k)²/2` on one axis let E be the mean under `w = softmax`. Everything that the error bounds need of a
grid is `sup_x E|x − c|^p` and its average over x, and the mass outside a window: one-dimensional quantities. The functions
below enclose them from above for *any* sorted centers (so also for grids whose centers were rounded to float32), and
are sharp for uniform ones. For scattered centers the soft-maximum lemma takes their place.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import scipy

from partita.arithmetic.rounding import up
from partita.errors import DomainError
from partita.geometry.domains import Array

__all__ = [
    "AxisGeometry",
    "distance_bounds",
    "dropped_mass",
    "leakage",
    "moment_bounds",
    "soft_maximum_gap",
    "temperature_for_leakage",
    "window_for",
]

_INFLATE = 1 + 1e-11  # covers the float64 rounding of the positive sums below (a few thousand operations)
_SOFT = 7.0  # κ below which many centers share the mass, so that they are all summed
_SOFTER = 2.0  # κ below which comparing them with the two nearest is never better
_STEPS = 1024  # pieces of a gap, for soft heads; fewer where distances are many gaps long
_AT_ONCE = 1 << 21  # floats of one array
_UNDERFLOWS = 1e-280  # sums of weights below it may have lost what matters


@dataclass(frozen=True)
class AxisGeometry:
    """What the bounds need to know about the sorted centers of one axis over [lo, hi].

    `gap_min`, `gap_max`: between neighbours; `overhang`: how far the domain reaches beyond the outermost center.
    A single center has no gaps: both are 0 and the overhang is its distance to the farther end.
    """

    count: int
    gap_min: float
    gap_max: float
    overhang: float

    @classmethod
    def of(cls, centers: Array, lo: float, hi: float) -> AxisGeometry:
        gaps = np.diff(centers)
        if len(gaps) and not (gaps > 0).all():
            raise DomainError(
                "the centers of an axis do not increase strictly: the grid is finer than the dtype can "
                "represent. Use fewer cells or float64."
            )
        smallest, largest = (float(np.nextafter(gaps.min(), 0)), float(up(gaps.max()))) if len(gaps) else (0.0, 0.0)
        beyond = max(centers[0] - lo, hi - centers[-1], 0.0)
        return cls(len(centers), smallest, largest, float(up(beyond)) if beyond else 0.0)

    @property
    def covering_radius(self) -> float:
        """The farthest that a point of [lo, hi] is from its nearest center."""
        return max(self.gap_max / 2, self.overhang)


def _tail(near: tuple[Array, Array], geometry: AxisGeometry, inverse_temperature: float, power: float) -> Array:
    """`Σ_{i≥1} (r + i g)^p exp(−R(i²g² + 2igr)/2)`: what the centers behind the nearest one, at distance r, contribute.

    `near` brackets r. With `R g² ≥ p` every term decreases in r and in the true distances, so the smallest gap g and the smallest
    r are the worst. For softer heads `d^p exp(−R(d² − r²)/2)` may first grow in the distance d, up to d = √(p/R): then
    that maximum, `(p/R)^{p/2} exp(−(p − R r²)/2)`, is taken where it is reachable.
    """
    g, rate = geometry.gap_min, inverse_temperature
    count = min(geometry.count - 1, 2 + math.ceil(math.sqrt(1500 / (rate * g * g)))) if geometry.count > 1 else 0
    steps = g * np.arange(1, count + 1)
    smallest, largest = near[0][:, None], near[1][:, None]
    if rate * g * g >= power:
        distance = smallest + steps
        exponent = -rate / 2 * (steps**2 + 2 * steps * smallest)
    else:
        distance = largest + steps
        exponent = -rate / 2 * (steps**2 + 2 * steps * smallest)
        peak = (power / rate) ** (power / 2) * np.exp(-np.maximum(power - rate * largest**2, 0.0) / 2)
        reachable = smallest + steps < math.sqrt(power / rate)
        terms = np.maximum(distance**power * np.exp(exponent), np.where(reachable, peak, 0.0))
        return np.asarray(terms.sum(axis=1))
    return np.asarray((distance**power * np.exp(exponent)).sum(axis=1))


def _soft_moments(geometry: AxisGeometry, inverse_temperature: float, power: float) -> tuple[float, float]:
    """The same bounds as `moment_bounds`, for soft heads: quotients of sums over all centers, on short pieces of a gap.

    With x at a distance u of its left neighbour, the i-th center to the left is `u + i g` away and the i-th to the right
    `g − u + i g`, g between the extreme gaps. On a piece of u, `d^p` and the weight are at their largest in the numerator and the
    weight at its smallest in the denominator. How many centers lie to the left is free; the worst number counts.
    """
    n, rate, least, most = geometry.count, inverse_temperature, geometry.gap_min, geometry.gap_max
    seen = min(n, 2 + math.ceil(math.sqrt(1500 / (rate * least * least))))  # the weights beyond are below e^{−750}
    i = np.arange(seen)
    steps = math.ceil(_STEPS * min(1.0, max(math.sqrt(rate) * least, 2 / n, 1 / 64)))
    if n < 2 * seen:
        left = np.arange(max(1, n - seen), min(n - 1, seen) + 1)
        sides = left - 1, n - left - 1
    else:  # long axes: either side may be cut short by the end of the axis, or reach farther than the weights
        short, full = np.arange(seen), np.full(seen, seen - 1)
        sides = np.concatenate([short, full]), np.concatenate([full, short])

    def sums(smallest: Array, largest: Array) -> tuple[Array, Array]:
        """Numerators and denominators over the first 1, 2, … centers on one side, `(pieces, seen)`."""
        near, far = smallest[:, None] + least * i, largest[:, None] + most * i
        weight, lost = np.exp(-0.5 * rate * near**2), np.exp(-0.5 * rate * far**2)
        return np.cumsum(far**power * weight, axis=1), np.cumsum(lost, axis=1)

    def quotients(ends: Array, between: bool) -> Array:
        found, at_once = [], max(1, _AT_ONCE // seen)
        for start in range(0, len(ends) - 1, at_once):
            a, b = ends[:-1][start : start + at_once], ends[1:][start : start + at_once]
            top, bottom = sums(a, b)
            if between:
                top_right, bottom_right = sums(np.maximum(least - b, 0.0), most - a)
                top = top[:, sides[0]] + top_right[:, sides[1]]
                bottom = bottom[:, sides[0]] + bottom_right[:, sides[1]]
            else:
                top, bottom = top[:, -1:], bottom[:, -1:]
            known = bottom > _UNDERFLOWS
            found.append(np.where(known, top / np.where(known, bottom, 1.0), np.inf).max(axis=1))
        return np.concatenate(found)

    inside = quotients(np.linspace(0, most, steps + 1), True)
    supremum, average = float(inside.max()), float(inside.mean()) * most / least
    if geometry.overhang:
        beyond = quotients(np.linspace(0, geometry.overhang, steps + 1), False)
        supremum, average = max(supremum, float(beyond.max())), max(average, float(beyond.mean()))
    return float(up(supremum * _INFLATE)), float(up(average * _INFLATE))


def moment_bounds(
    geometry: AxisGeometry, inverse_temperature: float, power: float, *, quick: bool = False
) -> tuple[float, float]:
    """Upper bounds of `sup_x E|x − c|^p` and of the average of `E|x − c|^p` over x in [lo, hi].

    The average supposes that [lo, hi] is made of whole gaps, of halves of them, and of overhangs, as on the grids built here.
    Soft heads, κ = R g² below 7, take the smaller of two bounds, unless a `quick` one will do.

    Between two centers at distance g, at `x = middle + a g`, the two nearest have distances `(½ ∓ a)g` and the farther
    one the weight `1/(1 + e^{κa})`, κ = R g²; the pair's moment grows in both distances and in that weight, so on each
    piece [a₁, a₂] of [0, ½] the ends bound it. All other centers are bounded by `_tail`, outside the outermost
    center likewise; soft heads sum them (`_soft_moments`). *Theorem*: `grid-moments` (for uniform grids the supremum is
    attained at cell edges).
    """
    if geometry.count == 1:
        farthest = geometry.overhang**power * _INFLATE  # averaging |x − c|^p over either side of c gives 1/(p+1) of it
        return float(up(farthest)), float(up(farthest / (power + 1)))
    sharpness = inverse_temperature * geometry.gap_min**2
    if sharpness >= _SOFT or quick:
        return _pair_moments(geometry, inverse_temperature, power)
    soft = _soft_moments(geometry, inverse_temperature, power)
    if sharpness < _SOFTER and geometry.gap_max < 1.01 * geometry.gap_min:
        return soft
    pair = _pair_moments(geometry, inverse_temperature, power)
    return min(soft[0], pair[0]), min(soft[1], pair[1])


def _pair_moments(geometry: AxisGeometry, inverse_temperature: float, power: float) -> tuple[float, float]:
    """`moment_bounds` by the two nearest centers, and all others compared with them."""
    pieces = np.concatenate([[0.0], np.geomspace(1e-7, 0.02, 1200), np.linspace(0.02, 0.5, 1200)[1:]])
    a, b = pieces[:-1], pieces[1:]
    kappa = inverse_temperature * geometry.gap_min**2
    with np.errstate(over="ignore"):
        far_weight = 1 / (1 + np.exp(kappa * a))
        pair_mass = 1 + np.exp(-inverse_temperature * geometry.gap_max**2 * b)
    near, far = 0.5 - a, 0.5 + b
    pair = geometry.gap_max**power * (near**power * (1 - far_weight) + far**power * far_weight)
    nearest = geometry.gap_min * (0.5 - b), geometry.gap_max * (0.5 - a)
    between = pair + 2 * _tail(nearest, geometry, inverse_temperature, power) / pair_mass
    supremum, average = between.max(), 2 * float((between * (b - a)).sum())
    if geometry.overhang:
        r = geometry.overhang * np.linspace(0, 1, 1025)
        beyond = r[1:] ** power + _tail((r[:-1], r[1:]), geometry, inverse_temperature, power)
        supremum, average = max(supremum, beyond.max()), max(average, float(beyond.mean()))
    return float(up(supremum * _INFLATE)), float(up(average * _INFLATE))


def distance_bounds(
    geometry: AxisGeometry, inverse_temperature: float, power: float, *, quick: bool = False
) -> tuple[float, float]:
    """`(sup_x E|x − c|^p)^{1/p}` and the same of the average, rounded up: lengths, computed in units that cannot underflow."""
    unit = max(geometry.gap_max, geometry.overhang)
    if unit == 0:
        return 0.0, 0.0
    scaled = AxisGeometry(
        geometry.count, geometry.gap_min / unit, float(up(geometry.gap_max / unit)), float(up(geometry.overhang / unit))
    )
    rate = inverse_temperature * unit * unit * (1 - 1e-14)  # a softer head only looks farther
    largest, average = (m ** (1 / power) * unit * _INFLATE for m in moment_bounds(scaled, rate, power, quick=quick))
    return float(up(largest)), float(up(average))


def dropped_mass(geometry: AxisGeometry, inverse_temperature: float, half_window: int) -> float:
    """Upper bound of the mass outside the `2q` centers around x: `2 Σ_{i≥q} exp(−R g² i²/2)`, q = half_window.

    A center outside the window lies at least q gaps behind the nearer end of the interval that holds x.
    """
    if 2 * half_window >= geometry.count:
        return 0.0
    kappa = inverse_temperature * geometry.gap_min**2 * (1 - 1e-6)  # also covers scores that were rounded
    last = min(geometry.count, half_window + 2 + math.ceil(math.sqrt(1500 / kappa)))
    return float(up(2 * np.exp(-kappa / 2 * np.arange(half_window, last + 1) ** 2.0).sum() * _INFLATE))


def soft_maximum_gap(cells: int) -> float:
    """`W((N−1)/e)`: `0 ≤ max y − Σ softmax(βy)_j y_j ≤ W((N−1)/e)/β`, tight. *Theorem*: `soft-maximum`.

    >>> round(soft_maximum_gap(2), 4)
    0.2785
    """
    return float(scipy.special.lambertw((cells - 1) / math.e).real) * (1 + 1e-9)


def leakage(cells: int, inverse_temperature: float, margin: float) -> float:
    """`(N−1)e^{−RΔ}`: the mass outside the best cell when every other score trails by Δ. *Theorem*: `indicator`."""
    return min(1.0, float(up((cells - 1) * math.exp(-inverse_temperature * margin) * _INFLATE)))


def temperature_for_leakage(cells: int, margin: float, epsilon: float) -> float:
    """The inverse temperature `(ln(N−1) − ln ε)/Δ` that keeps `leakage` below ε (the paper multiplies by Δ)."""
    if not (margin > 0 and 0 < epsilon < 1):
        raise DomainError(f"margin is {margin:g}, epsilon is {epsilon:g}; expected margin > 0 and 0 < epsilon < 1.")
    return max(0.0, (math.log(max(cells - 1, 1)) - math.log(epsilon) + 1e-10) / margin) * (1 + 1e-12)


def window_for(geometry: Sequence[AxisGeometry], rates: Sequence[float], mass: float) -> tuple[int, ...]:
    """The smallest half-windows whose dropped mass is at most `mass` per axis."""
    windows = []
    for axis, rate in zip(geometry, rates):
        low, q = 0, 1
        while dropped_mass(axis, rate, q) > mass:
            low, q = q, 2 * q
        while q - low > 1:  # what is dropped falls as q grows
            middle = (low + q) // 2
            low, q = (middle, q) if dropped_mass(axis, rate, middle) > mass else (low, middle)
        windows.append(q)
    return tuple(windows)
