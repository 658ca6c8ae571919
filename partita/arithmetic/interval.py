"""Interval arithmetic on arrays of boxes: every operation returns an enclosure of all real results.

*Inclusion*: for x ∈ X and y ∈ Y at which the operation is defined, x ∘ y ∈ X ∘ Y. The ends are binary64, lo < +inf and
hi > -inf; an overflow turns into the largest finite float on the inner side and into infinity on the outer one.
numpy's + - * / and sqrt are correctly rounded, so one ulp outward encloses; exp, log, … are padded by `LIBRARY_ULPS`,
erf, sigmoid, asinh, acosh and atanh by `SPECIAL_ULPS`, and clipped to their range. [-inf, inf] says that nothing is known.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy
from numpy.typing import ArrayLike, NDArray

from partita.arithmetic.rounding import LIBRARY_ULPS, down, up
from partita.errors import DomainError

__all__ = ["SPECIAL_ULPS", "Interval", "choose", "product_of_nodes"]

SPECIAL_ULPS = 8
_LARGEST = sys.float_info.max
_LARGEST_ANGLE = 1e6
_TURN_MARGIN = 1e-9
_RIGHT_ANGLE = up(np.pi / 2)

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]
_quiet = np.errstate(all="ignore")


@dataclass(frozen=True, eq=False)
class Interval:
    """The boxes [lo, hi], elementwise; ends that are not real numbers (NaN, lo = inf, hi = -inf) mean [-inf, inf].

    Raises `DomainError` where lo > hi.

    >>> x = Interval(0.0, 1.0)
    >>> bool((x * x - x).hi >= 0.0)
    True
    """

    lo: Floats
    hi: Floats

    __array_ufunc__ = None  # so that numpy hands array + Interval to __radd__

    def __post_init__(self) -> None:
        lo, hi = np.asarray(self.lo, np.float64), np.asarray(self.hi, np.float64)
        if lo.shape != hi.shape:
            lo, hi = np.broadcast_arrays(lo, hi)
        sound = (lo <= hi) & (lo < np.inf) & (hi > -np.inf)
        if not sound.all():
            if (crossed := lo > hi).any():
                raise DomainError(f"Interval: found lo = {lo[crossed][0]} > hi = {hi[crossed][0]}; expected lo ≤ hi")
            lo, hi = np.where(sound, lo, -np.inf), np.where(sound, hi, np.inf)
        object.__setattr__(self, "lo", lo)
        object.__setattr__(self, "hi", hi)

    @staticmethod
    def point(x: ArrayLike) -> "Interval":
        """The interval that holds x alone."""
        ends = np.asarray(x, np.float64)
        return Interval(ends, ends)

    @staticmethod
    def variables(lo: Floats, hi: Floats) -> list["Interval"]:
        """The coordinates of boxes, lo and hi (m, boxes)."""
        return [Interval(a, b) for a, b in zip(lo, hi, strict=True)]

    @staticmethod
    def constant(value: float) -> "Interval":
        """One number, (1,)."""
        return Interval.point([value])

    @staticmethod
    def stacked(parts: Sequence["Interval"], shape: tuple[int, ...]) -> "Interval":
        """The parts side by side on axis 1, each broadcast to the shape."""
        los, his = ([np.broadcast_to(getattr(p, end), shape) for p in parts] for end in ("lo", "hi"))
        return Interval(np.stack(los, axis=1), np.stack(his, axis=1))

    @property
    def shape(self) -> tuple[int, ...]:
        return self.lo.shape

    @property
    def T(self) -> "Interval":
        """The transposed array of intervals."""
        return Interval(self.lo.T, self.hi.T)

    def __getitem__(self, index: Any) -> "Interval":
        return Interval(self.lo[index], self.hi[index])

    @property
    def mid(self) -> Floats:
        """A finite point inside, the middle up to rounding."""
        return 0.5 * np.maximum(self.lo, -_LARGEST) + 0.5 * np.minimum(self.hi, _LARGEST)

    @property
    @_quiet
    def radius(self) -> Floats:
        """A float r with every point within r of `mid`."""
        return up(np.maximum(self.hi - self.mid, self.mid - self.lo))

    @property
    def magnitude(self) -> Floats:
        """max |x| over the interval."""
        return np.maximum(np.abs(self.lo), np.abs(self.hi))

    @property
    def mignitude(self) -> Floats:
        """min |x| over the interval."""
        return np.maximum(np.maximum(self.lo, -self.hi), 0.0)

    @property
    def is_entire(self) -> Mask:
        """Where nothing is known: [-inf, inf]."""
        out: Mask = (self.lo == -np.inf) & (self.hi == np.inf)
        return out

    def forget(self, mask: Mask) -> "Interval":
        """[-inf, inf] where the mask holds, unchanged elsewhere."""
        return Interval(np.where(mask, -np.inf, self.lo), np.where(mask, np.inf, self.hi)) if mask.any() else self

    def hull(self, other: "Interval | ArrayLike") -> "Interval":
        """The smallest interval that holds both."""
        other = _interval(other)
        return Interval(np.minimum(self.lo, other.lo), np.maximum(self.hi, other.hi))

    @property
    def enclosure(self) -> "Interval":
        """The values, in every kind of enclosure: here the interval itself."""
        return self

    def through(self, value: "Interval", slope: "Interval", partly: Mask) -> "Interval":
        """A function of this quantity with these values and slopes; `partly` marks where it is not defined on all of the box."""
        return value

    def or_else(self, mask: Mask, other: "Interval") -> "Interval":
        """The other interval where the mask holds, this one elsewhere."""
        return Interval(np.where(mask, other.lo, self.lo), np.where(mask, other.hi, self.hi))

    def __neg__(self) -> "Interval":
        return Interval(-self.hi, -self.lo)

    @_quiet
    def __add__(self, other: "Interval | ArrayLike") -> "Interval":
        """X + Y. A float sum is zero only when it is exact, so zeros stay: sqrt(x² + y²) keeps its domain."""
        other = _interval(other)
        lo, hi = self.lo + other.lo, self.hi + other.hi
        return Interval(np.where(lo == 0.0, 0.0, down(lo)), np.where(hi == 0.0, 0.0, up(hi)))

    def __sub__(self, other: "Interval | ArrayLike") -> "Interval":
        return self + -_interval(other)

    def __mul__(self, other: "Interval | ArrayLike") -> "Interval":
        return _bilinear(np.multiply, self, _interval(other))

    def __truediv__(self, other: "Interval | ArrayLike") -> "Interval":
        """X / Y, and [-inf, inf] where Y holds 0."""
        other = _interval(other)
        pole = (other.lo <= 0.0) & (other.hi >= 0.0)
        divisor = Interval(np.where(pole, 1.0, other.lo), np.where(pole, 1.0, other.hi))
        return _bilinear(np.divide, self, divisor).forget(pole)

    __radd__ = __add__
    __rmul__ = __mul__

    def __rsub__(self, other: ArrayLike) -> "Interval":
        return _interval(other) - self

    def __rtruediv__(self, other: ArrayLike) -> "Interval":
        return _interval(other) / self

    @_quiet
    def square(self) -> "Interval":
        """X², which is nonnegative, unlike X · X of two unrelated quantities; 0² = 0."""
        least, most = self.mignitude, self.magnitude
        return Interval(np.maximum(down(least * least), 0.0), np.where(most == 0.0, 0.0, up(most * most)))

    @_quiet
    def pow_int(self, exponent: int) -> "Interval":
        """Xᵏ for an integer k; for k < 0 it is 1 / X⁻ᵏ."""
        if exponent < 0:
            return 1.0 / self.pow_int(-exponent)
        if exponent in (0, 1, 2):
            return (Interval.point(np.ones(self.shape)), self, self.square())[exponent]
        lo, hi = (self.mignitude, self.magnitude) if exponent % 2 == 0 else (self.lo, self.hi)
        low, high = down(np.power(lo, float(exponent)), LIBRARY_ULPS), up(np.power(hi, float(exponent)), LIBRARY_ULPS)
        return Interval(
            np.where(lo >= 0.0, np.maximum(low, 0.0), low), np.where(hi <= 0.0, np.minimum(high, 0.0), high)
        )

    @_quiet
    def exp(self) -> "Interval":
        return _increasing(np.exp, self, 0.0, np.inf)

    @_quiet
    def log(self) -> "Interval":
        """log X: lo = -inf where X touches (-inf, 0], [-inf, inf] where X lies in it."""
        positive = Interval(np.maximum(self.lo, 0.0), np.maximum(self.hi, 0.0))
        return _increasing(np.log, positive, -np.inf, np.inf).forget(self.hi <= 0.0)

    @_quiet
    def sqrt(self) -> "Interval":
        """√X of the part of X in [0, inf), [-inf, inf] where there is none; √0 = 0."""
        lo, hi = np.sqrt(np.maximum(self.lo, 0.0)), np.sqrt(np.maximum(self.hi, 0.0))
        return Interval(np.maximum(down(lo), 0.0), np.where(hi == 0.0, 0.0, up(hi))).forget(self.hi < 0.0)

    def sin(self) -> "Interval":
        return _wave(np.sin, self, crest=0.25)

    def cos(self) -> "Interval":
        return _wave(np.cos, self, crest=0.0)

    @_quiet
    def tan(self) -> "Interval":
        """tan X, and [-inf, inf] where X may hold a pole π/2 + kπ."""
        pole = _may_hold(self, 0.5, np.pi)
        lo, hi = down(np.tan(self.lo), LIBRARY_ULPS), up(np.tan(self.hi), LIBRARY_ULPS)
        return Interval(np.where(pole, -np.inf, lo), np.where(pole, np.inf, hi))

    @_quiet
    def atan(self) -> "Interval":
        return _increasing(np.arctan, self, -_RIGHT_ANGLE, _RIGHT_ANGLE)

    @_quiet
    def tanh(self) -> "Interval":
        return _increasing(np.tanh, self, -1.0, 1.0)

    @_quiet
    def sigmoid(self) -> "Interval":
        """1 / (1 + e⁻ˣ); where the library underflows to 0 the exact value is below 2⁻¹⁰²², which `up` adds."""
        return _increasing(scipy.special.expit, self, 0.0, 1.0, SPECIAL_ULPS)

    @_quiet
    def erf(self) -> "Interval":
        return _increasing(scipy.special.erf, self, -1.0, 1.0, SPECIAL_ULPS)

    @_quiet
    def asinh(self) -> "Interval":
        return _increasing(np.arcsinh, self, -np.inf, np.inf, SPECIAL_ULPS)

    @_quiet
    def acosh(self) -> "Interval":
        """acosh of the part of X in [1, inf), [-inf, inf] where there is none."""
        defined = Interval(np.maximum(self.lo, 1.0), np.maximum(self.hi, 1.0))
        return _increasing(np.arccosh, defined, 0.0, np.inf, SPECIAL_ULPS).forget(self.hi < 1.0)

    @_quiet
    def atanh(self) -> "Interval":
        """atanh X: an end is infinite where X touches -1 or 1, [-inf, inf] where X does not meet (-1, 1)."""
        defined = Interval(np.clip(self.lo, -1.0, 1.0), np.clip(self.hi, -1.0, 1.0))
        outside = (self.hi <= -1.0) | (self.lo >= 1.0)
        inner = Interval(np.where(outside, 0.0, defined.lo), np.where(outside, 0.0, defined.hi))
        return _increasing(np.arctanh, inner, -np.inf, np.inf, SPECIAL_ULPS).forget(outside)

    def floor(self) -> "Interval":
        """The largest integer ≤ x, exactly."""
        return Interval(np.floor(self.lo), np.floor(self.hi))

    def absolute(self) -> "Interval":
        return Interval(self.mignitude, self.magnitude)

    def minimum(self, other: "Interval | ArrayLike") -> "Interval":
        other = _interval(other)
        return Interval(np.minimum(self.lo, other.lo), np.minimum(self.hi, other.hi))

    def maximum(self, other: "Interval | ArrayLike") -> "Interval":
        other = _interval(other)
        return Interval(np.maximum(self.lo, other.lo), np.maximum(self.hi, other.hi))

    def relu(self) -> "Interval":
        return self.maximum(0.0)

    def clamp(self, least: float, most: float) -> "Interval":
        """min(max(X, least), most) for constants least ≤ most."""
        return self.maximum(least).minimum(most)

    @staticmethod
    @_quiet
    def weighted_sums(terms: "Sequence[Interval]", matrix: Floats) -> "list[Interval]":
        """`Σ_k matrix[i, k] X_k` for each row i, and nothing known where a term that counts is unbounded, or any is undefined.

        By middles and radii, |Σ c x − Σ c m| ≤ Σ |c| r; a float sum of n products in any order, fused or not, is within
        1.01 (n + 1) 2⁻⁵³ of the sum of their sizes, and 2⁻¹⁰⁷⁴ for each underflow.
        """
        los, his = (np.stack(np.broadcast_arrays(*ends)) for ends in ([t.lo for t in terms], [t.hi for t in terms]))
        flat = (len(terms), -1)
        bounded = np.isfinite(los) & np.isfinite(his)
        middle = np.where(bounded, 0.5 * los + 0.5 * his, 0.0)
        reach = np.where(bounded, np.maximum(his - middle, middle - los), 0.0)
        reach = np.where(reach == 0.0, 0.0, up(reach))
        unit = (len(terms) + 4) * 2.0**-52
        sizes = np.abs(matrix)
        sums = matrix @ middle.reshape(flat)
        radii = (sizes @ (reach + unit * np.abs(middle)).reshape(flat)) * (1 + unit) + len(terms) * 2.0**-1073
        counts = (matrix != 0.0).astype(np.float64)
        exact = counts @ ((middle != 0.0) | (reach != 0.0)).reshape(flat) == 0.0  # not: sums that underflow to 0
        undefined = ((los == -np.inf) & (his == np.inf)).any(axis=0).reshape(1, -1)
        lost = (counts @ (~bounded).reshape(flat) > 0.0) | undefined
        radii = np.where(exact, 0.0, radii)
        lo, hi = np.where(exact, 0.0, down(sums - radii)), np.where(exact, 0.0, up(sums + radii))
        known = np.isfinite(lo) & np.isfinite(hi) & ~lost
        lo, hi = np.where(known, lo, -np.inf), np.where(known, hi, np.inf)
        return [Interval(a.reshape(los.shape[1:]), b.reshape(los.shape[1:])) for a, b in zip(lo, hi)]

    def where_sign(self, a: "Interval | ArrayLike", b: "Interval | ArrayLike") -> "Interval":
        """a where X ≥ 0, b where X < 0, their hull where the sign is not decided."""
        return choose(self.lo >= 0.0, self.hi < 0.0, _interval(a), _interval(b))


def choose(first: Mask, second: Mask, a: Interval, b: Interval) -> Interval:
    """a where only `first` holds, b where only `second` holds, the hull of both elsewhere."""
    first, second = first & ~second, second & ~first
    hull = a.hull(b)
    lo = np.where(first, a.lo, np.where(second, b.lo, hull.lo))
    return Interval(lo, np.where(first, a.hi, np.where(second, b.hi, hull.hi)))


def _interval(x: Interval | ArrayLike) -> Interval:
    return x if isinstance(x, Interval) else Interval.point(x)


@_quiet
def _bilinear(operation: Callable[..., Floats], a: Interval, b: Interval) -> Interval:
    """a · b, or a / b for b without 0: extremes lie at the corners, one ulp outward, clipped to the sign known exactly.

    A corner 0 · inf or inf / inf is NaN, which fmin and fmax pass over: the corner beside it has the same limit, except
    in 0 · [-inf, inf], which is 0 as the second factor is real.
    """
    corners = [operation(x, y) for x in (a.lo, a.hi) for y in (b.lo, b.hi)]
    lo = down(np.fmin(np.fmin(corners[0], corners[1]), np.fmin(corners[2], corners[3])))
    hi = up(np.fmax(np.fmax(corners[0], corners[1]), np.fmax(corners[2], corners[3])))
    a_positive, a_negative, b_positive, b_negative = a.lo >= 0.0, a.hi <= 0.0, b.lo >= 0.0, b.hi <= 0.0
    zero = (a_positive & a_negative) | (b_positive & b_negative)
    nonnegative = (a_positive & b_positive) | (a_negative & b_negative) | zero
    nonpositive = (a_positive & b_negative) | (a_negative & b_positive) | zero
    return Interval(np.where(nonnegative, np.fmax(lo, 0.0), lo), np.where(nonpositive, np.fmin(hi, 0.0), hi))


def _increasing(
    f: Callable[[Floats], Floats], x: Interval, least: float, most: float, ulps: int = LIBRARY_ULPS
) -> Interval:
    """f(X) for an increasing f with values in [least, most]."""
    return Interval(np.maximum(down(f(x.lo), ulps), least), np.minimum(up(f(x.hi), ulps), most))


@_quiet
def _may_hold(x: Interval, offset: float, period: float) -> Mask:
    """Where X, if it has a width, may hold a point (k + offset) · period with k an integer; never False when it does.

    For |x| ≤ 10⁶ the quotient x / period errs by less than 3·10⁻¹⁰ and the margin is 10⁻⁹; beyond, the answer is True. A
    single float needs no answer: it is no multiple of π/2 but 0, and the library's value at it is within its ulps.
    """
    first = np.ceil(x.lo / period - (offset + _TURN_MARGIN))
    last = np.floor(x.hi / period - (offset - _TURN_MARGIN))
    return ((first <= last) | (x.magnitude > _LARGEST_ANGLE)) & (x.lo < x.hi)


@_quiet
def _wave(f: Callable[[Floats], Floats], x: Interval, *, crest: float) -> Interval:
    """sin or cos: largest at `crest` turns, smallest half a turn later, monotone between; wide ones give [-1, 1]."""
    left, right = f(x.lo), f(x.hi)
    lo = np.maximum(down(np.minimum(left, right), LIBRARY_ULPS), -1.0)
    hi = np.minimum(up(np.maximum(left, right), LIBRARY_ULPS), 1.0)
    period = 2.0 * np.pi
    return Interval(
        np.where(_may_hold(x, crest + 0.5, period), -1.0, lo), np.where(_may_hold(x, crest, period), 1.0, hi)
    )


def product_of_nodes(a: Any, b: Any) -> Any:
    """a · b of two enclosures; the square when both are the same object, whose two factors move together."""
    return a.square() if a is b else a * b
