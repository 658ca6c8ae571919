"""First derivatives over boxes, forward mode: enclosures of all slopes.

*Slope inclusion*: where `gradient` is finite, for x, y in the box there is a g in it with f(x) - f(y) = g · (x - y).
Hence |f(x) - f(y)| ≤ sup |g|₂ |x - y|₂ on the box. Each rule below keeps it:
    u + v        G_u + G_v
    u v          u(x)(v(x) - v(y)) + v(y)(u(x) - u(y))             ∈ (U G_v + V G_u)(x - y)
    u / v        ((u(x) - u(y)) - q(y)(v(x) - v(y))) / v(x)        ∈ ((G_u - Q G_v) / V)(x - y),  q = u / v
    φ(u)         φ' over the interval U, times G_u (mean value theorem; for |·|, relu and clamp the hull of the slopes)
    min(u, v)    t G_u + (1 - t) G_v for some t in [0, 1]: the hull where undecided
    where(c)     any slope along the axes that move c where its sign is undecided: f may jump
    floor(u)     0, and any slope along the axes that move u where it may pass an integer
A slope that is exactly 0 along an axis says that f does not depend on it, so 0 · [-inf, inf] = 0 is right.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from partita.arithmetic.interval import Floats, Interval, Mask, choose
from partita.arithmetic.rounding import down, up

__all__ = ["Dual"]

_NEAR_TWO_OVER_ROOT_PI = np.array(1.1283791670955126)
_TWO_OVER_ROOT_PI = Interval(down(_NEAR_TWO_OVER_ROOT_PI), up(_NEAR_TWO_OVER_ROOT_PI))


@dataclass(frozen=True, eq=False)
class Dual:
    """Values (boxes,) and slopes (boxes, dim) of one quantity on a batch of boxes; both broadcast over the boxes.

    >>> x = Dual.variable(np.array([0.0]), np.array([1.0]), axis=0, dim=1)
    >>> float((x * x).gradient.hi[0, 0]) >= 2.0
    True
    """

    value: Interval
    gradient: Interval

    @staticmethod
    def variable(lo: Floats, hi: Floats, *, axis: int, dim: int) -> "Dual":
        """The coordinate x[axis] on the boxes lo ≤ x ≤ hi."""
        return Dual(Interval(lo, hi), Interval.point(np.eye(dim)[axis : axis + 1]))

    @staticmethod
    def variables(lo: Floats, hi: Floats) -> list["Dual"]:
        """All coordinates of boxes, lo and hi (m, boxes)."""
        steps = np.eye(len(lo))
        return [Dual(x, Interval.point(steps[i : i + 1])) for i, x in enumerate(Interval.variables(lo, hi))]

    @staticmethod
    def constant(value: float, dim: int) -> "Dual":
        """A number that no coordinate moves."""
        return Dual(Interval.constant(value), Interval.point(np.zeros((1, dim))))

    @staticmethod
    def stacked(parts: Sequence["Dual"], boxes: tuple[int, ...], dim: int) -> tuple[Interval, Interval]:
        """Values (boxes, parts) and slopes (boxes, parts, dim)."""
        values, slopes = [p.value for p in parts], [p.gradient for p in parts]
        return Interval.stacked(values, boxes), Interval.stacked(slopes, (*boxes, dim))

    @property
    def is_entire(self) -> Mask:
        return self.value.is_entire

    def forget(self, mask: Mask) -> "Dual":
        """Nothing known of value and slopes where the mask holds."""
        return Dual(self.value.forget(mask), self.gradient.forget(mask[:, None])) if mask.any() else self

    @property
    def enclosure(self) -> Interval:
        """The values."""
        return self.value

    def through(self, value: Interval, slope: Interval, partly: Mask) -> "Dual":
        """A function of this quantity with these values and slopes, continued where it is undefined."""
        return self._chain(value, slope)

    def or_else(self, mask: Mask, other: "Dual") -> "Dual":
        """The other quantity where the mask holds, this one elsewhere."""
        return Dual(self.value.or_else(mask, other.value), self.gradient.or_else(mask[:, None], other.gradient))

    def _times(self, factor: Interval) -> Interval:
        """factor · gradient, laid out axis by axis so that numpy's inner loop runs over the boxes."""
        return (factor * self.gradient.T).T

    def _chain(self, value: Interval, slope: Interval) -> "Dual":
        return Dual(value, self._times(slope))

    def _switch(self, value: Interval, first: Mask, second: Mask, slopes: tuple[float, float]) -> "Dual":
        """A function with the first slope on one part of the line and the second on the rest."""
        return self._chain(value, choose(first, second, Interval.point(slopes[0]), Interval.point(slopes[1])))

    def __neg__(self) -> "Dual":
        return Dual(-self.value, -self.gradient)

    def __add__(self, other: "Dual") -> "Dual":
        return Dual(self.value + other.value, self.gradient + other.gradient)

    def __sub__(self, other: "Dual") -> "Dual":
        return Dual(self.value - other.value, self.gradient - other.gradient)

    def __mul__(self, other: "Dual") -> "Dual":
        return Dual(self.value * other.value, other._times(self.value) + self._times(other.value))

    def __truediv__(self, other: "Dual") -> "Dual":
        quotient = self.value / other.value
        return Dual(quotient, ((self.gradient - other._times(quotient)).T / other.value).T)

    @staticmethod
    def weighted_sums(terms: "Sequence[Dual]", matrix: Floats) -> "list[Dual]":
        """`Σ_k matrix[i, k] u_k` for each row i; a term that is undefined leaves nothing known, as in `Interval`."""
        values = Interval.weighted_sums([t.value for t in terms], matrix)
        slopes = Interval.weighted_sums([t.gradient for t in terms], matrix)
        undefined = np.logical_or.reduce(np.broadcast_arrays(*(t.is_entire for t in terms)))
        return [Dual(value, slope).forget(undefined) for value, slope in zip(values, slopes)]

    def square(self) -> "Dual":
        return self._chain(self.value.square(), 2.0 * self.value)

    def pow_int(self, exponent: int) -> "Dual":
        value = self.value.pow_int(exponent)
        return self._chain(
            value, float(exponent) * self.value.pow_int(exponent - 1) if exponent else Interval.point(0.0)
        )

    def exp(self) -> "Dual":
        value = self.value.exp()
        return self._chain(value, value)

    def log(self) -> "Dual":
        """Slope 1 / u, unbounded where u may be ≤ 0."""
        return self._chain(self.value.log(), (1.0 / self.value).forget(self.value.lo <= 0.0))

    def sqrt(self) -> "Dual":
        """Slope 1 / (2 √u), unbounded where u may be ≤ 0."""
        value = self.value.sqrt()
        return self._chain(value, (0.5 / value).forget(self.value.lo <= 0.0))

    def sin(self) -> "Dual":
        return self._chain(self.value.sin(), self.value.cos())

    def cos(self) -> "Dual":
        return self._chain(self.value.cos(), -self.value.sin())

    def tan(self) -> "Dual":
        """Slope 1 + tan² u, nothing known across a pole."""
        value = self.value.tan()
        return self._chain(value, (1.0 + value.square()).forget(value.is_entire))

    def atan(self) -> "Dual":
        return self._chain(self.value.atan(), 1.0 / (1.0 + self.value.square()))

    def tanh(self) -> "Dual":
        """Slope 1 - tanh²(u); far from 0, where that loses its digits, 4 σ(2u) σ(-2u), even and decreasing in |u|."""
        value = self.value.tanh()
        slope = (1.0 - value.square()).maximum(0.0)
        doubled = (2 * np.minimum(t, 1e300) for t in self._distances())
        near, far = (Interval.point(t).sigmoid() * Interval.point(-t).sigmoid() * 4.0 for t in doubled)
        is_far = self.value.mignitude > 8.0
        return self._chain(value, Interval(np.where(is_far, far.lo, slope.lo), np.where(is_far, near.hi, slope.hi)))

    def sigmoid(self) -> "Dual":
        """Slope σ(u) σ(-u), even and decreasing in |u|."""
        near, far = (Interval.point(t).sigmoid() * Interval.point(-t).sigmoid() for t in self._distances())
        return self._chain(self.value.sigmoid(), Interval(far.lo, near.hi))

    def erf(self) -> "Dual":
        """Slope (2 / √π) exp(-u²)."""
        return self._chain(self.value.erf(), _TWO_OVER_ROOT_PI * (-self.value.square()).exp())

    def asinh(self) -> "Dual":
        """Slope 1 / √(1 + u²)."""
        return self._chain(self.value.asinh(), 1.0 / (1.0 + self.value.square()).sqrt())

    def acosh(self) -> "Dual":
        """Slope 1 / √((u - 1)(u + 1)), unbounded where u may be ≤ 1."""
        root = ((self.value - 1.0) * (self.value + 1.0)).sqrt()
        return self._chain(self.value.acosh(), (1.0 / root).forget(self.value.lo <= 1.0))

    def atanh(self) -> "Dual":
        """Slope 1 / (1 - u²), unbounded where |u| may be ≥ 1."""
        slope = 1.0 / (1.0 - self.value.square())
        return self._chain(self.value.atanh(), slope.forget(self.value.magnitude >= 1.0))

    def floor(self) -> "Dual":
        """A constant, or a jump along the axes that move this."""
        value = self.value.floor()
        moving = (self.gradient.lo != 0.0) | (self.gradient.hi != 0.0)
        slopes = Interval.point(np.zeros(moving.shape)).forget((value.lo < value.hi)[:, None] & moving)
        return Dual(value, slopes)

    def _distances(self) -> tuple[Floats, Floats]:
        """The least and the largest |u|, finite."""
        largest = np.finfo(np.float64).max
        return np.minimum(self.value.mignitude, largest), np.minimum(self.value.magnitude, largest)

    def absolute(self) -> "Dual":
        u = self.value
        return self._switch(u.absolute(), u.lo >= 0.0, u.hi <= 0.0, (1.0, -1.0))

    def relu(self) -> "Dual":
        u = self.value
        return self._switch(u.relu(), u.lo >= 0.0, u.hi <= 0.0, (1.0, 0.0))

    def clamp(self, least: float, most: float) -> "Dual":
        u = self.value
        inside, outside = (u.lo >= least) & (u.hi <= most), (u.hi <= least) | (u.lo >= most)
        return self._switch(u.clamp(least, most), inside, outside, (1.0, 0.0))

    def minimum(self, other: "Dual") -> "Dual":
        u, v = self.value, other.value
        return Dual(u.minimum(v), _select(u.hi <= v.lo, v.hi <= u.lo, self, other))

    def maximum(self, other: "Dual") -> "Dual":
        u, v = self.value, other.value
        return Dual(u.maximum(v), _select(u.lo >= v.hi, v.lo >= u.hi, self, other))

    def where_sign(self, a: "Dual", b: "Dual") -> "Dual":
        """a where this is ≥ 0, b where it is < 0; a jump where undecided, along the axes that move this."""
        yes, no = self.value.lo >= 0.0, self.value.hi < 0.0
        moving = (self.gradient.lo != 0.0) | (self.gradient.hi != 0.0)
        slopes = _select(yes, no, a, b).forget(~(yes | no)[:, None] & moving)
        return Dual(self.value.where_sign(a.value, b.value), slopes)


def _select(first: Mask, second: Mask, a: Dual, b: Dual) -> Interval:
    """The slopes of a, of b, or the hull of both, box by box."""
    return choose(first[:, None], second[:, None], a.gradient, b.gradient)
