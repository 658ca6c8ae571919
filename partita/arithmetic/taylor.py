"""Taylor models: polynomials with proved remainders on batches of boxes.

On the box {c + r ∘ t : t ∈ [-1, 1]ᵐ}, in exact arithmetic, a model of f of degree d states for every t
    f(c + r ∘ t) ∈ p(t) + [-ρ, ρ],   p(t) = Σ_{|α| ≤ d} coefficients[α] t^α,   ρ = remainder
What a polynomial operation rounds or drops, `lost`, goes into the remainder:
    u + v     ρ_u + ρ_v + lost
    u v       |u| ρ_v + ‖q‖ ρ_u + lost, as u v - p q = u (v - q) + q (u - p)
    g(u)      u - u₀ = q + e, |e| ≤ ρ: Σ g_k qᵏ with the errors and the tail of the series of g at u₀ = p₀, and
              ρ Σ k |g_k| |u - u₀|^(k-1) + lost
    |u|       undecided on [a, b]: λ u + [0, δ], λ ∈ [-1, 1], δ = max(b (1 - λ), -a (1 + λ)); relu, min, max likewise
    where     undecided: (a + b) / 2 ± |a - b| / 2
    floor(u)  a constant, or u - 1/2 ± 1/2 where u may pass an integer
Each model carries an interval enclosure `bounds` of f, the narrower of p ± ρ and of interval arithmetic. It decides
kinks and domains, and where its radius is below the remainder the model becomes a constant. A remainder of inf says
that p is not known, and is 0. Where f is not defined on all of a box nothing is known at all: `is_entire`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from partita.arithmetic import series
from partita.arithmetic.defects import Defect, defect_of_log, defect_of_reciprocal, defect_of_root
from partita.arithmetic.interval import Floats, Interval, Mask
from partita.arithmetic.polynomial import Basis, Polynomial
from partita.arithmetic.rounding import down, up
from partita.arithmetic.series import Around, Expansion, Series, above

__all__ = ["TaylorModel", "TaylorModels"]

_LEAST = 2.0**-1074
_LEAST_SCALE, _LARGEST_SCALE = 2.0**-1000, 2.0**1000
_SLOPE_STEPS = 2.0**20
_quiet = np.errstate(all="ignore")


@dataclass(frozen=True, eq=False)
class TaylorModels:
    """Models of the outputs of a graph: `exponents` (N, m) of the monomials, constants first and by total degree,
    `coefficients` (outputs, N, boxes), and `remainder` (outputs, boxes) ≥ 0, inf where nothing is known."""

    exponents: NDArray[np.intp]
    coefficients: Floats
    remainder: Floats

    @staticmethod
    def of(models: "Sequence[TaylorModel]", boxes: int) -> "TaylorModels":
        """The models side by side, each with all monomials of the basis and broadcast to all boxes."""
        basis = models[0].polynomial.basis
        coefficients, remainder = np.zeros((len(models), basis.sizes[-1], boxes)), np.empty((len(models), boxes))
        for output, model in enumerate(models):
            coefficients[output, : len(model.polynomial.coefficients)] = model.polynomial.coefficients
            remainder[output] = model.remainder
        return TaylorModels(basis.exponents, coefficients, remainder)


@dataclass(frozen=True, eq=False)
class TaylorModel:
    """One quantity on a batch of boxes; remainder and bounds are (boxes,), and a constant may have one box for all.

    >>> x = TaylorModel.variable(Basis.of(1, 3), 0, center=np.array([0.5]), radius=np.array([0.125]))
    >>> (x * x).polynomial.coefficients.T.tolist(), bool((x * x).remainder[0] < 1e-15)
    ([[0.25, 0.125, 0.015625]], True)
    """

    polynomial: Polynomial
    remainder: Floats
    bounds: Interval

    @staticmethod
    def variable(basis: Basis, axis: int, *, center: Floats, radius: Floats) -> "TaylorModel":
        """The coordinate c + r t of an axis, centers and radii (boxes,)."""
        bounds = Interval.point(center) + Interval(-radius, radius)
        if basis.degree == 0:
            return TaylorModel(Polynomial(basis, center[None]), radius, bounds)
        coefficients = np.zeros((basis.dim + 1, len(center)))
        coefficients[0], coefficients[1 + axis] = center, radius
        return TaylorModel(Polynomial(basis, coefficients), np.zeros(len(center)), bounds)

    @staticmethod
    def variables(basis: Basis, centers: Floats, radii: Floats) -> list["TaylorModel"]:
        """All coordinates, centers and radii (m, boxes)."""
        pairs = enumerate(zip(centers, radii, strict=True))
        return [TaylorModel.variable(basis, i, center=c, radius=r) for i, (c, r) in pairs]

    @staticmethod
    def constant(basis: Basis, value: float) -> "TaylorModel":
        """A number that no coordinate moves."""
        return TaylorModel(Polynomial(basis, np.array([[value]])), np.zeros(1), Interval.point([value]))

    @property
    def is_entire(self) -> Mask:
        return self.bounds.is_entire

    def forget(self, mask: Mask) -> "TaylorModel":
        """Nothing known where the mask holds."""
        if not mask.any():
            return self
        polynomial = Polynomial(self._basis, np.where(mask, 0.0, self.polynomial.coefficients))
        return TaylorModel(polynomial, np.where(mask, np.inf, self.remainder), self.bounds.forget(mask))

    @property
    def enclosure(self) -> Interval:
        """The values."""
        return self.bounds

    def through(self, value: Interval, slope: Interval, partly: Mask) -> "TaylorModel":
        """A function of this quantity with these values, as a constant; nothing known where it is not defined on all of the box."""
        constant = Polynomial(self._basis, np.zeros((1, *value.shape)))
        return _settled(constant, np.full(value.shape, np.inf), value).forget(partly)

    def or_else(self, mask: Mask, other: "TaylorModel") -> "TaylorModel":
        """The other model where the mask holds, this one elsewhere."""
        return _select(mask, other, self)

    @property
    def _basis(self) -> Basis:
        return self.polynomial.basis

    def __neg__(self) -> "TaylorModel":
        return TaylorModel(self.polynomial.negative, self.remainder, -self.bounds)

    @_quiet
    def __add__(self, other: "TaylorModel") -> "TaylorModel":
        polynomial, lost = self.polynomial.plus(other.polynomial)
        return _settled(polynomial, above(self.remainder + other.remainder + lost, 2), self.bounds + other.bounds)

    def __sub__(self, other: "TaylorModel") -> "TaylorModel":
        return self + -other

    @staticmethod
    @_quiet
    def weighted_sums(terms: "Sequence[TaylorModel]", matrix: Floats) -> "list[TaylorModel]":
        """`Σ_k matrix[i, k] u_k` for each row i: coefficients by one matrix product, remainders `Σ |c_k| ρ_k` and what rounds."""
        basis, boxes = terms[0]._basis, max(t.remainder.shape[0] for t in terms)
        rows = max(len(t.polynomial.coefficients) for t in terms)
        stacked = np.zeros((len(terms), rows, boxes))
        for place, term in zip(stacked, terms):
            place[: len(term.polynomial.coefficients)] = term.polynomial.coefficients
        norms = np.stack([np.broadcast_to(t.polynomial.norm, boxes) for t in terms])
        remainders = np.stack([np.broadcast_to(t.remainder, boxes) for t in terms])
        known, sizes, unit = np.isfinite(remainders), np.abs(matrix), (len(terms) + 4) * 2.0**-52
        sums = (matrix @ stacked.reshape(len(terms), -1)).reshape(len(matrix), rows, boxes)
        lost = sizes @ (np.where(known, remainders, 0.0) + unit * norms) * (1 + unit) + len(terms) * rows * 2.0**-1073
        lost = np.where((matrix != 0.0).astype(np.float64) @ (~known).astype(np.float64) > 0.0, np.inf, lost)
        bounds = Interval.weighted_sums([t.bounds for t in terms], matrix)
        undefined = np.logical_or.reduce([np.broadcast_to(t.is_entire, boxes) for t in terms])
        return [
            _settled(Polynomial(basis, polynomial), remainder, bound).forget(undefined)
            for polynomial, remainder, bound in zip(sums, lost, bounds)
        ]

    def __mul__(self, other: "TaylorModel") -> "TaylorModel":
        return self._product(other, self.bounds * other.bounds)

    def __truediv__(self, other: "TaylorModel") -> "TaylorModel":
        """u · (1 / v), nothing known where v may be 0."""
        return self._product(other.pow_int(-1), self.bounds / other.bounds)

    def square(self) -> "TaylorModel":
        return self._product(self, self.bounds.square())

    @_quiet
    def _product(self, other: "TaylorModel", bounds: Interval) -> "TaylorModel":
        polynomial, lost = self.polynomial.product(other.polynomial, self._basis.degree)
        carried = self.bounds.magnitude * other.remainder + other.polynomial.norm * self.remainder
        return _settled(polynomial, above(carried + lost, 4), bounds)

    @_quiet
    def _compose(self, expand: Series, bounds: Interval, defect: Defect | None = None) -> "TaylorModel":
        """g(u) from the series of g around p₀; bounds encloses g over `self.bounds`, and a defect may bound the error
        where the series does worse or does not converge."""
        center, spread = self.polynomial.coefficients[0], self.polynomial.spread
        hull = Interval.point(center).hull(self.bounds)
        reach = np.maximum(hull.hi - center, center - hull.lo)
        reach = np.where(reach == 0.0, 0.0, up(reach))
        widest = np.maximum(reach, spread)
        scale, inverse = _power_of_two(widest)
        expansion = expand(Around(center, hull, reach, scale), self._basis.degree)
        scaled = Polynomial(self._basis, self.polynomial.coefficients * inverse)
        polynomial, lost = scaled.substitute(expansion.coefficients[: self._basis.degree + 1])
        moved = above(self.remainder * inverse + len(scaled.coefficients) * _LEAST, 2)
        lost = above(lost + _unseen(expansion, self._basis.degree, moved, above(widest * inverse)))
        lost = np.where(widest <= scale, lost, np.inf)
        if defect is not None:
            lost = np.fmin(lost, defect(self.polynomial, self.remainder, self.bounds, polynomial))
        return _settled(polynomial, lost, bounds)

    def pow_int(self, exponent: int) -> "TaylorModel":
        """uᵏ for an integer k; nothing known for k < 0 where u may be 0."""
        if exponent in (0, 1, 2):
            return (TaylorModel.constant(self._basis, 1.0), self, self.square())[exponent]
        defect = defect_of_reciprocal if exponent == -1 else None
        return self._compose(series.series_of_power(exponent), self.bounds.pow_int(exponent), defect)

    def exp(self) -> "TaylorModel":
        return self._compose(series.exp, self.bounds.exp())

    def log(self) -> "TaylorModel":
        """Nothing known where u may be ≤ 0."""
        return self._compose(series.log, self.bounds.log(), defect_of_log).forget(self.bounds.lo <= 0.0)

    def sqrt(self) -> "TaylorModel":
        """A constant where u may be 0, nothing known where it may be < 0."""
        return self._compose(series.sqrt, self.bounds.sqrt(), defect_of_root).forget(self.bounds.lo < 0.0)

    def sin(self) -> "TaylorModel":
        return self._compose(series.sin, self.bounds.sin())

    def cos(self) -> "TaylorModel":
        return self._compose(series.cos, self.bounds.cos())

    def tan(self) -> "TaylorModel":
        """Nothing known where u may be at a pole."""
        return self._compose(series.tan, self.bounds.tan())

    def atan(self) -> "TaylorModel":
        return self._compose(series.atan, self.bounds.atan())

    def tanh(self) -> "TaylorModel":
        return self._compose(series.tanh, self.bounds.tanh())

    def sigmoid(self) -> "TaylorModel":
        return self._compose(series.sigmoid, self.bounds.sigmoid())

    def erf(self) -> "TaylorModel":
        return self._compose(series.erf, self.bounds.erf())

    def asinh(self) -> "TaylorModel":
        return self._compose(series.asinh, self.bounds.asinh())

    def acosh(self) -> "TaylorModel":
        """A constant where u may be 1, nothing known where it may be < 1."""
        return self._compose(series.acosh, self.bounds.acosh()).forget(self.bounds.lo < 1.0)

    def atanh(self) -> "TaylorModel":
        """Nothing known where |u| may be ≥ 1."""
        return self._compose(series.atanh, self.bounds.atanh()).forget(self.bounds.magnitude >= 1.0)

    def floor(self) -> "TaylorModel":
        drift = self + TaylorModel.constant(self._basis, -0.5)
        return _settled(drift.polynomial, above(drift.remainder + 0.5), self.bounds.floor())

    @_quiet
    def _hinge(self, left: float, right: float) -> tuple[Floats, Floats]:
        """Slope λ and width δ with f(u) ∈ λ u + [0, δ], for the convex f of slopes left < 0 < right of 0, (boxes,) each.

        f - λ u is convex, 0 at 0 and ≥ 0 for λ ∈ [left, right], so largest at an end. Steps of 2⁻²⁰ make 1 - λ exact.
        """
        a, b = np.minimum(self.bounds.lo, 0.0), np.maximum(self.bounds.hi, 0.0)
        chord = (right * b - left * a) / (b - a)
        slope = np.clip(np.rint(chord * _SLOPE_STEPS) / _SLOPE_STEPS, left, right)
        slope = np.where(self.bounds.lo >= 0.0, right, np.where(self.bounds.hi <= 0.0, left, slope))
        slope = np.where(np.isnan(slope), left, slope)
        width = np.fmax(np.fmax(b * (right - slope), a * (left - slope)), 0.0)
        return slope, np.where(width == 0.0, 0.0, up(width))

    @_quiet
    def _bent(self, left: float, right: float, bounds: Interval) -> "TaylorModel":
        slope, width = self._hinge(left, right)
        polynomial, lost = self.polynomial.times(slope)
        remainder = above(np.abs(slope) * self.remainder + lost, 2)
        return _shifted(polynomial, remainder, bounds, width)

    def absolute(self) -> "TaylorModel":
        return self._bent(-1.0, 1.0, self.bounds.absolute())

    def relu(self) -> "TaylorModel":
        return self._bent(0.0, 1.0, self.bounds.relu())

    def minimum(self, other: "TaylorModel") -> "TaylorModel":
        return -((-self).maximum(-other))

    @_quiet
    def maximum(self, other: "TaylorModel") -> "TaylorModel":
        """v + relu(u - v) ∈ λ u + (1 - λ) v + [0, δ] where undecided."""
        difference = (self - other).bounds
        slope, width = TaylorModel(self.polynomial, self.remainder, difference)._hinge(0.0, 1.0)
        (first, lost), (second, more) = self.polynomial.times(slope), other.polynomial.times(1.0 - slope)
        polynomial, rest = first.plus(second)
        remainder = above(slope * self.remainder + (1.0 - slope) * other.remainder + lost + more + rest, 8)
        bent = _shifted(polynomial, remainder, self.bounds.maximum(other.bounds), width)
        return _select(difference.lo >= 0.0, self, _select(difference.hi <= 0.0, other, bent))

    def clamp(self, least: float, most: float) -> "TaylorModel":
        """min(max(u, least), most) for constants least ≤ most."""
        low, high = (TaylorModel.constant(self._basis, end) for end in (least, most))
        return self.maximum(low).minimum(high)

    @_quiet
    def where_sign(self, a: "TaylorModel", b: "TaylorModel") -> "TaylorModel":
        """a where this is ≥ 0, b where it is < 0; their mean, widened by half their difference, where undecided."""
        total, apart = a + b, above(0.5 * (a - b).bounds.magnitude)
        polynomial, lost = total.polynomial.times(np.full(1, 0.5))
        both = _settled(polynomial, above(0.5 * total.remainder + apart + lost, 4), a.bounds.hull(b.bounds))
        return _select(self.bounds.lo >= 0.0, a, _select(self.bounds.hi < 0.0, b, both))


def _settled(polynomial: Polynomial, remainder: Floats, bounds: Interval) -> TaylorModel:
    """The model with its bounds narrowed to its range, or the constant `bounds.mid` where that errs less."""
    first = polynomial.coefficients[0]
    reach = above(polynomial.spread + remainder)
    known = np.isfinite(np.abs(first) + reach)
    lo = np.where(known, np.maximum(down(first - reach), bounds.lo), bounds.lo)
    hi = np.where(known, np.minimum(up(first + reach), bounds.hi), bounds.hi)
    bounds = Interval(np.where(lo <= hi, lo, -np.inf), np.where(lo <= hi, hi, np.inf))
    radius = bounds.radius
    constant = ~known | (remainder > radius)
    if not constant.any():
        return TaylorModel(polynomial, remainder, bounds)
    coefficients = np.where(constant, 0.0, polynomial.coefficients)
    coefficients[0] = np.where(constant & np.isfinite(radius), bounds.mid, coefficients[0])
    return TaylorModel(Polynomial(polynomial.basis, coefficients), np.where(constant, radius, remainder), bounds)


def _shifted(polynomial: Polynomial, remainder: Floats, bounds: Interval, width: Floats) -> TaylorModel:
    """p ± ρ + [0, width], centered."""
    coefficients = polynomial.coefficients + np.zeros(width.shape)
    coefficients[0] += 0.5 * width
    rounding = np.abs(coefficients[0]) * np.where(width > 0.0, 2.0**-52, 0.0)
    return _settled(Polynomial(polynomial.basis, coefficients), above(remainder + 0.5 * width + rounding, 4), bounds)


def _select(mask: Mask, a: TaylorModel, b: TaylorModel) -> TaylorModel:
    """a where the mask holds, b elsewhere."""
    if mask.all():
        return a
    if not mask.any():
        return b
    basis, rows = a.polynomial.basis, [len(a.polynomial.coefficients), len(b.polynomial.coefficients)]
    first, second = (
        np.pad(x.polynomial.coefficients, ((0, max(rows) - n), (0, 0))) for x, n in zip((a, b), rows, strict=True)
    )
    bounds = Interval(np.where(mask, a.bounds.lo, b.bounds.lo), np.where(mask, a.bounds.hi, b.bounds.hi))
    polynomial = Polynomial(basis, np.where(mask, first, second))
    return TaylorModel(polynomial, np.where(mask, a.remainder, b.remainder), bounds)


def _power_of_two(size: Floats) -> tuple[Floats, Floats]:
    """A power of two ≥ size, and its inverse; 0 for both where size is 0 or too large."""
    scale = np.ldexp(1.0, np.frexp(size)[1])
    scale = np.where((size > 0.0) & (size < _LARGEST_SCALE), np.maximum(scale, _LEAST_SCALE), 0.0)
    return scale, np.where(scale > 0.0, 1.0 / scale, 0.0)


def _unseen(expansion: Expansion, degree: int, moved: Floats, share: Floats) -> Floats:
    """What Σ_{k ≤ degree} g_k qᵏ leaves out of g(u): the errors of g_k, the terms and the tail beyond the degree, and
    Σ k |g_k| shareᵏ⁻¹ moved, where u - u₀ = q + e, |e| ≤ moved, |q| ≤ share and |u - u₀| ≤ share, in units of scale."""
    sizes = above(np.abs(expansion.coefficients) + expansion.errors)
    beyond, slope = np.zeros((2, len(share)))
    for k in range(len(sizes) - 1, 0, -1):
        beyond = above((beyond + sizes[k] if k > degree else beyond) * share, 2)
        if k <= degree:
            slope = above(slope * share + k * sizes[k], 3)
    errors = above(expansion.errors[: degree + 1].sum(axis=0), degree)
    return above(errors + beyond + expansion.tail + above(slope * moved), 3)
