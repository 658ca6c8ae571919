"""Polynomials in float coefficients on [-1, 1]ᵐ, batched over boxes, with bounds on what truncation and rounding lose.

As |t^α| ≤ 1, the norm ‖p‖ = Σ_α |p_α| bounds |p(t)|. Every operation returns its float coefficients and a number `lost`,
(boxes,), so that the exact result differs from them by at most `lost` at every t. Coefficients are laid out (n, boxes)
with n the number of monomials up to the degree, so that numpy's inner loops run over the boxes.
"""

import math
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import chain, combinations_with_replacement

import numpy as np
from numpy.typing import NDArray

from partita.arithmetic.interval import Floats
from partita.arithmetic.series import above
from partita.errors import SizeError

__all__ = ["Basis", "Polynomial"]

MAX_MONOMIALS = 100_000
_ULP = 2.0**-52
_LEAST = 2.0**-1074

Positions = NDArray[np.intp]


@dataclass(frozen=True)
class Basis:
    """The monomials t^α of `dim` variables with |α| ≤ `degree`: by total degree, then α₀ descending, α₁ descending, …

    Raises `SizeError` where there are more than `MAX_MONOMIALS`.

    >>> Basis(2, 2).exponents.tolist()
    [[0, 0], [1, 0], [0, 1], [2, 0], [1, 1], [0, 2]]
    """

    dim: int
    degree: int
    _targets: dict[int, Positions] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        count = math.comb(self.dim + self.degree, self.dim)
        if count > MAX_MONOMIALS:
            raise SizeError(
                f"Taylor model: found {count} monomials for {self.dim} inputs and degree {self.degree}; expected at most "
                f"{MAX_MONOMIALS}. Lower the degree."
            )

    @staticmethod
    @lru_cache
    def of(dim: int, degree: int) -> "Basis":
        """The basis with its tables, built once."""
        return Basis(dim, degree)

    @cached_property
    def sizes(self) -> list[int]:
        """How many monomials have degree < k, for k = 0, …, degree + 1."""
        return [math.comb(self.dim + k - 1, self.dim) if k else 0 for k in range(self.degree + 2)]

    @cached_property
    def exponents(self) -> Positions:
        """α, (N, dim)."""
        table = np.zeros((self.sizes[-1], self.dim), np.intp)
        words = chain.from_iterable(combinations_with_replacement(range(self.dim), k) for k in range(self.degree + 1))
        for row, word in zip(table, words, strict=False):
            np.add.at(row, list(word), 1)
        table.setflags(write=False)
        return table

    @cached_property
    def degrees(self) -> list[int]:
        """|α|, N of them."""
        return [int(k) for k in self.exponents.sum(axis=1)]

    @cached_property
    def multinomials(self) -> Floats:
        """|α|! / α!, (N, 1), each rounded once at most."""
        rows = self.exponents.tolist()
        return np.array([[float(math.factorial(sum(a)) // math.prod(map(math.factorial, a)))] for a in rows])

    @cached_property
    def parents(self) -> tuple[Positions, Positions]:
        """For each α ≠ 0 the first axis i with α_i > 0 and the position of α - e_i, (N,) each."""
        lower = self.exponents.copy()
        axis = (lower > 0).argmax(axis=1) if self.dim else np.zeros(1, np.intp)
        lower[np.arange(1, len(lower)), axis[1:]] -= 1
        return axis, self._positions(lower)

    @cached_property
    def _counts(self) -> Positions:
        """C(s + m - i - 1, m - i) at (i, s): how many monomials of the last m - i variables have degree < s."""
        table = [[math.comb(s + i - 1, i) if s else 0 for s in range(self.degree + 1)] for i in range(self.dim, 0, -1)]
        return np.array(table, np.intp).reshape(self.dim, self.degree + 1)

    def _positions(self, exponents: Positions) -> Positions:
        """Where each α stands: Σ_i C(s_i + m - i - 1, m - i) with the tail sums s_i = α_i + … + α_{m-1}."""
        tails = exponents[:, ::-1].cumsum(axis=1)[:, ::-1]
        out: Positions = self._counts[np.arange(self.dim), tails].sum(axis=1)
        return out

    def targets(self, row: int) -> Positions:
        """The positions of α + β for β = 0, … with |α| + |β| ≤ degree, where α stands at `row`."""
        if row not in self._targets:
            partners = self.exponents[: self.sizes[self.degree - self.degrees[row] + 1]]
            self._targets[row] = self._positions(partners + self.exponents[row])
        return self._targets[row]


@dataclass(frozen=True, eq=False)
class Polynomial:
    """Σ_α coefficients[α] t^α, (n, boxes), over the first n monomials of a basis, all of those up to some degree."""

    basis: Basis
    coefficients: Floats

    @property
    def degree(self) -> int:
        return self.basis.sizes.index(len(self.coefficients)) - 1

    @cached_property
    def graded(self) -> Floats:
        """P_k ≥ Σ_{|α|=k} |p_α|, (degree + 1, boxes)."""
        starts = self.basis.sizes[: self.degree + 1]
        return above(np.add.reduceat(np.abs(self.coefficients), starts, axis=0), len(self.coefficients))

    @cached_property
    def norm(self) -> Floats:
        """‖p‖ or more, (boxes,)."""
        return above(self.graded.sum(axis=0), self.degree)

    @cached_property
    def spread(self) -> Floats:
        """‖p - p₀‖ or more, (boxes,)."""
        return above(self.graded[1:].sum(axis=0), self.degree) if self.degree else np.zeros(self.graded.shape[1])

    @property
    def negative(self) -> "Polynomial":
        return Polynomial(self.basis, -self.coefficients)

    @property
    def euler(self) -> "Polynomial":
        """E p = Σ_i t_i ∂p/∂t_i, of coefficients |α| p_α, each rounded once."""
        degrees = np.array(self.basis.degrees[: len(self.coefficients)], np.float64)
        return Polynomial(self.basis, self.coefficients * degrees[:, None])

    def plus(self, other: "Polynomial") -> tuple["Polynomial", Floats]:
        """p + q; each coefficient present in both is rounded once, and sums of floats do not underflow."""
        long, short = self.coefficients, other.coefficients
        if len(long) < len(short):
            long, short = short, long
        both = long[: len(short)] + short
        lost = above(np.abs(both).sum(axis=0), len(short)) * _ULP
        rest = np.broadcast_to(long[len(short) :], (len(long) - len(short), both.shape[1]))
        return Polynomial(self.basis, np.concatenate([both, rest])), lost

    def times(self, factor: Floats) -> tuple["Polynomial", Floats]:
        """p times floats (boxes,); exact for the factors -1, 0 and 1."""
        size = np.abs(factor)
        lost = np.where((size == 0.0) | (size == 1.0), 0.0, above(above(size * self.norm) * _ULP))
        return Polynomial(self.basis, self.coefficients * factor), lost

    def product(self, other: "Polynomial", degree: int) -> tuple["Polynomial", Floats]:
        """p q up to the degree, and what rounding and truncation lose."""
        product, rounding = self.convolution(other, degree)
        return product, above(rounding + self.dropped(other, degree))

    def convolution(self, other: "Polynomial", degree: int) -> tuple["Polynomial", Floats]:
        """p q up to the degree, and what rounding loses.

        A coefficient sums at most n products, n the number of rows of the shorter factor that are not 0, so that is
        ≤ 1.01 n 2⁻⁵³ ‖p‖ ‖q‖, and 2⁻¹⁰⁷⁴ for each underflow.
        """
        a, b = self.coefficients, other.coefficients
        rows_a, rows_b = np.flatnonzero(a.any(axis=1)), np.flatnonzero(b.any(axis=1))
        if len(rows_a) > len(rows_b):
            a, b, rows_a, rows_b = b, a, rows_b, rows_a
        degrees, sizes = self.basis.degrees, self.basis.sizes
        highest = degrees[rows_a[-1]] + degrees[rows_b[-1]] if len(rows_a) else 0
        reached = min(degree, highest)
        out = np.zeros((sizes[reached + 1], max(a.shape[1], b.shape[1])))
        for i in rows_a.tolist():
            partners = rows_b[: np.searchsorted(rows_b, sizes[max(reached - degrees[i] + 1, 0)])]
            out[self.basis.targets(i)[partners]] += a[i] * b[partners]
        return Polynomial(self.basis, out), above(above(self.norm * other.norm) * (len(rows_a) * _ULP))

    def dropped(self, other: "Polynomial", degree: int) -> Floats:
        """Σ_{i+j>degree} P_i Q_j or more."""
        beyond = other.graded[::-1].cumsum(axis=0)[::-1]
        total = np.zeros(max(self.graded.shape[1], other.graded.shape[1]))
        for i in range(self.degree + 1):
            if (j := max(degree - i + 1, 0)) <= other.degree:
                total += self.graded[i] * beyond[j]
        return above(total, self.degree + other.degree + 2)

    def substitute(self, series: Floats) -> tuple["Polynomial", Floats]:
        """Σ_{k ≤ d} series[k] qᵏ up to degree d, for q = p - p₀ with ‖q‖ ≤ 1; series (d + 1, boxes), d of the basis."""
        if self.degree == 0:
            return Polynomial(self.basis, series[:1]), np.zeros(series.shape[1])
        return self._substitute_linear(series) if self.degree == 1 else self._horner(series)

    def _substitute_linear(self, series: Floats) -> tuple["Polynomial", Floats]:
        """The multinomial theorem: series[|α|] |α|! / α! q^α.

        At most |α| + 3 roundings each, which Σ_{|α|=k} |α|! / α! |q^α| ≤ ‖q‖ᵏ ≤ 1 sums up; an underflow of q^α or of a
        factor errs by 2⁻¹⁰⁷⁴, 2 k + 2 of them, and then Σ_{|α|=k} |α|! / α! = mᵏ.
        """
        basis, degree = self.basis, self.basis.degree
        axis, parent = basis.parents
        monomials = np.ones((basis.sizes[-1], self.coefficients.shape[1]))
        lost = np.zeros(self.coefficients.shape[1])
        for k in range(degree, 0, -1):
            absolute = float((2 * k + 2) * basis.dim**k) * _LEAST
            lost = above(lost + np.abs(series[k]) * ((k + 4) * _ULP + absolute), 4)
        for k in range(1, degree + 1):
            level = slice(basis.sizes[k], basis.sizes[k + 1])
            np.multiply(monomials[parent[level]], self.coefficients[1 + axis[level]], out=monomials[level])
        for k in range(degree + 1):
            level = slice(basis.sizes[k], basis.sizes[k + 1])
            monomials[level] *= basis.multinomials[level]
            monomials[level] *= series[k]
        return Polynomial(basis, monomials), lost

    def _horner(self, series: Floats) -> tuple["Polynomial", Floats]:
        """s_d, then s_k + q (…): q has no constant term, so s_k is set, not added, and degrees above d - k would exceed
        d once multiplied by qᵏ."""
        degree = self.basis.degree
        coefficients = self.coefficients.copy()
        coefficients[0] = 0.0
        q = Polynomial(self.basis, coefficients)
        total, lost = Polynomial(self.basis, series[degree:].copy()), np.zeros(series.shape[1])
        for k in range(degree - 1, -1, -1):
            step, fresh = total.product(q, degree - k)
            lost = above(lost * q.norm + fresh, 2)
            step.coefficients[0] = series[k]
            total = step
        return total, lost
