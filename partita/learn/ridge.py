"""Ridge fits of a head's values, with the error of leaving each point out in closed form."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.linalg import LinAlgError, cholesky, lapack, solve_triangular

from partita.geometry.domains import Array
from partita.learn.parallel import ALONE, Jobs
from partita.learn.smoothing import Keys, Rows, Smoother

__all__ = ["PENALTIES", "Fit", "Ridge", "Trial", "try_ridge"]

PENALTIES = 10.0 ** np.arange(-8.0, 3.1, 0.25)  # in units of the largest eigenvalue
_LOST = 1e-13  # of the largest eigenvalue
_RANK = 1e-10  # of the largest singular value of the points: below it a direction is none
_LEAST_SLACK = 1e-10  # of 1 − H_ii: below it the formula divides rounding by rounding
_JUDGED = 500  # points at least whose errors are summed in a search
_FACTORED = 1e-11  # of the trace: smaller penalties go through the eigenvectors, where rounding does less


@dataclass(frozen=True, eq=False)
class Fit:
    """Fitted values and their leave-one-out errors.

    Attributes:
        smoother: the head.
        penalty: λ.
        share: λ over the mean diagonal entry of ΦΦᵀ, which is comparable between fits of different sizes.
        degrees_of_freedom: the trace of the hat matrix.
        left_out: `(n, out)`, the prediction at x_i of the fit that never saw (x_i, y_i).
        error: their weighted mean squared error.
    """

    smoother: Smoother
    penalty: float
    share: float
    degrees_of_freedom: float
    left_out: Array
    error: float


@dataclass(frozen=True, eq=False)
class Trial:
    """The error of a fit, and the fit itself once it is wanted."""

    error: float
    finish: Callable[[], Fit]


@dataclass(frozen=True, eq=False)
class _Base:
    """The functions that are not penalised: constants and, under affine values, all affine functions of x.

    Everything here is about rows that are multiplied by the roots of their weights.

    Attributes:
        roots: `(n, 1)`, √s.
        columns: `(n, p)`, orthonormal, the values of these functions at the points times √s, the constant first.
        slopes: `(m, p − 1)`, the others' slopes.
        middle: `(m,)`, where these vanish.
    """

    roots: Array
    columns: Array
    slopes: Array
    middle: Array

    @classmethod
    def of(cls, points: Array, weights: Array, *, affine: bool) -> _Base:
        (n, m), middle = points.shape, np.average(points, axis=0, weights=weights)
        roots = np.sqrt(weights)[:, None]
        constant = roots / np.linalg.norm(roots)
        if affine:
            left, sizes, right = np.linalg.svd((points - middle) * roots, full_matrices=False)
            rank = int((sizes > _RANK * max(sizes[0], 1e-300)).sum())
            if 2 * (rank + 1) <= n:  # else there is nothing to leave out
                return cls(roots, np.hstack([constant, left[:, :rank]]), right[:rank].T / sizes[:rank], middle)
        return cls(roots, constant, np.zeros((m, 0)), middle)

    def project_out(self, matrix: Array) -> Array:
        """`P√s·matrix`: weighted rows less their part in the span of the columns."""
        return self.projected(matrix * self.roots)

    def projected(self, rows: Array) -> Array:
        """`P·rows`, of rows that are weighted already."""
        return rows - self.columns @ (self.columns.T @ rows)

    def leverage(self) -> Array:
        """The diagonal of `QQᵀ`, `(n, 1)`."""
        out: Array = (self.columns**2).sum(axis=1, keepdims=True)
        return out

    def add(self, smoother: Smoother, rest: Array) -> Smoother:
        """The smoother plus the unpenalised function that is nearest to `rest` at the points."""
        parts = self.columns.T @ (rest * self.roots)
        slopes = (self.slopes @ parts[1:]).T
        constant = parts[0] / np.linalg.norm(self.roots)
        values = smoother.values + constant + (smoother.keys.centers - self.middle) @ slopes.T
        return Smoother(smoother.keys, values, None if smoother.slopes is None else smoother.slopes + slopes)


@dataclass(frozen=True, eq=False)
class _Spectrum:
    """The projected features Φ in their own axes: `ΦΦᵀ = TTᵀ`, T's columns orthogonal with squared lengths s."""

    rotated: Rows
    squares: Array
    targets: Array  # projected
    moments: Array  # Tᵀy
    leverage: Array  # of the base, (n, 1)
    vectors: Array  # coefficients are `vectors @ (shrinkage · moments)`

    def shrinkage(self, penalties: Array) -> Array:
        """`1/(s + λ)`, `(r, L)`; 0 where both vanish."""
        total = self.squares[:, None] + penalties
        return np.divide(1.0, total, out=np.zeros_like(total), where=total > 0)

    def errors(self, penalties: Array) -> Array:
        """Sums over the points of the squared leave-one-out residuals, `(L,)`."""
        shrink = self.shrinkage(penalties)
        fitted = (shrink[:, :, None] * self.moments[:, None, :]).reshape(len(shrink), -1)
        squares = np.zeros(len(penalties))
        for part, block in self.rotated:
            hat = self.leverage[part] + block**2 @ shrink
            rest = self.targets[part, None, :] - (block @ fitted).reshape(len(block), len(penalties), -1)
            squares += ((rest**2).sum(axis=2) / np.maximum(1 - hat, _LEAST_SLACK) ** 2).sum(axis=0)
        return squares

    def solved(self, penalty: float) -> _Solved:
        shrink = self.shrinkage(np.array([penalty]))
        residuals, hats = np.empty_like(self.targets), np.empty_like(self.leverage)
        for part, block in self.rotated:
            hats[part] = self.leverage[part] + block**2 @ shrink
            residuals[part] = self.targets[part] - block @ (shrink * self.moments)
        return _Solved(residuals, hats, lambda: self.vectors @ (shrink * self.moments))


@dataclass(frozen=True, eq=False)
class _Solved:
    """One λ: residuals `(n, out)` and the diagonal of H `(n, 1)`, both in weighted rows, and the coefficients."""

    residuals: Array
    hats: Array
    coefficients: Callable[[], Array]

    @property
    def left_out(self) -> Array:
        """`e_i/(1 − H_ii)`, `(n, out)`."""
        return self.residuals / np.maximum(1 - self.hats, _LEAST_SLACK)


class Ridge(ABC):
    """Values that minimise `Σ_i s_i|net(x_i) − y_i|² + λ(Σ_j |V_j − g(c_j)|² + Σ_j |J_j − ∇g|²/R)`, for keys of one R.

    g is free: a constant, or under affine values (and with points enough) any affine function. With rows multiplied by √s the
    hat matrix is `H = QQᵀ + Φ(ΦᵀΦ + λ)⁻¹Φᵀ`, Q an orthonormal basis of the g, Φ the features with Q projected out, and
    refitting without point i turns the residual there into `e_i/(1 − H_ii)`: keys stay where they are, everything fitted is
    refitted. Either one eigendecomposition, of the smaller of ΦᵀΦ and ΦΦᵀ, serves every λ, or one Cholesky factor serves one λ,
    which is some ten times cheaper.

    Args:
        keys: of the head.
        points: `(n, m)`, n ≥ 2.
        targets: `(n, out)`.
        weights: s `(n,)`, positive.
        squared: `|x_i − c_j|²`, if known.
        jobs: how many blocks of rows are worked on at the same time.
    """

    def __init__(
        self, keys: Keys, points: Array, targets: Array, weights: Array, squared: Array | None, jobs: Jobs
    ) -> None:
        self._keys, self._points, self._targets, self._weights, self._jobs = keys, points, targets, weights, jobs
        self._base = _Base.of(points, weights, affine=keys.affine)
        self._rest = self._base.project_out(targets)
        self._squared = squared
        self._prepare()

    @staticmethod
    def of(
        keys: Keys,
        points: Array,
        targets: Array,
        *,
        weights: Array | None = None,
        squared: Array | None = None,
        jobs: Jobs = ALONE,
    ) -> Ridge:
        """The problem in as many unknowns as there are features, or points if these are fewer."""
        kind = _Primal if keys.num_features < len(points) else _Dual
        return kind(keys, points, targets, np.ones(len(points)) if weights is None else weights, squared, jobs)

    @property
    def unit(self) -> float:
        """The mean diagonal entry of ΦΦᵀ: penalties are compared in this unit."""
        return self._trace() / len(self._points) or 1.0

    def best(self) -> Trial:
        """The λ of least leave-one-out error among `PENALTIES`."""
        spectrum = self._spectrum()
        penalties = PENALTIES * (float(spectrum.squares.max(initial=0.0)) or 1.0)
        squares = spectrum.errors(penalties)
        # of equal errors (two points, a constant target) the largest penalty: the simplest values
        best = float(penalties[np.flatnonzero(squares <= squares.min() * (1 + 1e-6))[-1]])
        return self._trial(best, spectrum.solved(best))

    def at(self, penalty: float) -> Trial:
        """One λ."""
        if penalty > _FACTORED * self._trace():
            try:
                return self._trial(penalty, self._factored(penalty))
            except LinAlgError:
                pass  # not positive definite after rounding
        return self._trial(penalty, self._spectrum().solved(penalty))

    def _trial(self, penalty: float, solved: _Solved) -> Trial:
        left_out = solved.left_out
        error = float((left_out**2).sum() / (self._weights.sum() * left_out.shape[1]))

        def finish() -> Fit:
            smoother = self._smoother(solved.coefficients())
            smoother = self._base.add(smoother, self._targets - smoother(self._points))
            predicted = self._targets - left_out / self._base.roots
            return Fit(smoother, penalty, penalty / self.unit, float(solved.hats.sum()), predicted, error)

        return Trial(error, finish)

    def error(self, penalty: float) -> float:
        """The error of `at(penalty)`, over some of the points if that saves much."""
        return self.at(penalty).error

    @abstractmethod
    def _prepare(self) -> None:
        """The Gram matrix."""

    @abstractmethod
    def _trace(self) -> float:
        """Of ΦᵀΦ."""

    @abstractmethod
    def _spectrum(self) -> _Spectrum: ...

    @abstractmethod
    def _factored(self, penalty: float) -> _Solved: ...

    @abstractmethod
    def _smoother(self, coefficients: Array) -> Smoother:
        """The penalised part of the head."""


class _Primal(Ridge):
    """Fewer features than points: ΦᵀΦ; the coefficients are those of the features."""

    def _prepare(self) -> None:
        features = Rows(self._weighted, len(self._points), self._keys.num_features)
        q, rest = self._base.columns, self._rest
        shadows = features.each(lambda part, block: q[part].T @ block, self._jobs)
        shadow = sum((found for _, found in shadows), start=np.zeros((q.shape[1], features.columns)))

        def projected(part: slice) -> Array:
            block = features.taken(part)
            block -= q[part] @ shadow
            return block

        self._rows = Rows(projected, features.rows, features.columns)
        self._gram = np.zeros((features.columns, features.columns))
        self._moments = np.zeros((features.columns, rest.shape[1]))
        products = self._rows.each(lambda part, block: (block.T @ block, block.T @ rest[part]), self._jobs)
        for _, (gram, moments) in products:
            self._gram += gram
            self._moments += moments

    def _weighted(self, part: slice) -> Array:
        squared = None if self._squared is None else self._squared[part]
        features = self._keys.features(self._points[part], squared)
        features *= self._base.roots[part]
        return features

    def _trace(self) -> float:
        return float(np.trace(self._gram))

    def _spectrum(self) -> _Spectrum:
        squares, vectors = np.linalg.eigh(self._gram)
        rotated = Rows(
            lambda part: self._rows.block(part) @ vectors,
            self._rows.rows,
            self._rows.columns,
            width=len(PENALTIES) * self._rest.shape[1],
        )
        moments = vectors.T @ self._moments
        return _Spectrum(rotated, np.maximum(squares, 0.0), self._rest, moments, self._base.leverage(), vectors)

    def error(self, penalty: float) -> float:
        step = len(self._points) // _JUDGED
        if step < 2 or not self._rows.whole or penalty <= _FACTORED * self._trace():
            return super().error(penalty)
        some = slice(None, None, step)
        try:
            factor, inner = self._factor(penalty)
        except LinAlgError:
            return super().error(penalty)
        half = solve_triangular(factor, self._rows.block(some).T, lower=True, check_finite=False)
        slack = np.maximum(1 - self._base.leverage()[some, 0] - np.einsum("ji,ji->i", half, half), _LEAST_SLACK)
        left_out = (self._rest[some] - half.T @ inner) / slack[:, None]
        return float((left_out**2).sum() / (self._weights[some].sum() * left_out.shape[1]))

    def _factor(self, penalty: float) -> tuple[Array, Array]:
        """L and `L⁻¹Φᵀy`."""
        factor = cholesky(_with_diagonal(self._gram, penalty), lower=True, overwrite_a=True, check_finite=False)
        return factor, solve_triangular(factor, self._moments, lower=True, check_finite=False)

    def _factored(self, penalty: float) -> _Solved:
        """With `ΦᵀΦ + λ = LLᵀ` and `Z = L⁻¹Φᵀ` the hat matrix is `QQᵀ + ZᵀZ`."""
        factor, inner = self._factor(penalty)
        residuals, hats = self._rest.copy(), self._base.leverage()

        def shares(_: slice, block: Array) -> tuple[Array, Array]:
            half = solve_triangular(factor, block.T, lower=True, check_finite=False)
            return np.einsum("ji,ji->i", half, half), half.T @ inner

        for part, (hat, fitted) in self._rows.each(shares, self._jobs):
            hats[part, 0] += hat
            residuals[part] -= fitted
        return _Solved(
            residuals, hats, lambda: solve_triangular(factor, inner, lower=True, trans="T", check_finite=False)
        )

    def _smoother(self, coefficients: Array) -> Smoother:
        keys = self._keys
        count, m = keys.centers.shape
        if not keys.affine:
            return Smoother(keys, coefficients)
        slopes = coefficients[count:].reshape(m, count, -1).transpose(1, 2, 0) * np.sqrt(keys.rate)
        return Smoother(keys, coefficients[:count], slopes)


class _Dual(Ridge):
    """At least as many features as points: ΦΦᵀ; the coefficients are those of the points."""

    def _prepare(self) -> None:
        self._kernel = self._keys.kernel(self._points, self._base.project_out, self._squared)

    def _trace(self) -> float:
        return float(np.trace(self._kernel))

    def _spectrum(self) -> _Spectrum:
        squares, vectors = np.linalg.eigh(self._kernel)
        # directions lost in rounding: shrunk to nothing by every penalty, but their coefficients, 1/λ, would not be
        squares = np.where(squares > _LOST * squares[-1], squares, 0.0)
        roots = np.sqrt(squares)
        rotated = vectors * roots
        rows = Rows(lambda part: rotated[part], *rotated.shape, width=len(PENALTIES) * self._rest.shape[1])
        inverse = np.divide(1.0, roots, out=np.zeros_like(roots), where=roots > 0)
        moments = rotated.T @ self._rest
        return _Spectrum(rows, squares, self._rest, moments, self._base.leverage(), vectors * inverse)

    def _factored(self, penalty: float) -> _Solved:
        """`I − H = λ(ΦΦᵀ + λ)⁻¹P`; with `t·QQᵀ` added, t the trace, the inverse is as it was but for `QQᵀ/(λ + t)`."""
        q, lifted = self._base.columns, self._trace()
        matrix = _with_diagonal(self._kernel, penalty)
        matrix += lifted * (q @ q.T)
        factor = cholesky(matrix, lower=True, overwrite_a=True, check_finite=False)
        inverse, failed = lapack.dtrtri(factor, lower=1)
        if failed:
            raise LinAlgError("a factor has a zero on its diagonal")
        slack = penalty * (
            np.einsum("ji,ji->i", inverse, inverse)[:, None] - self._base.leverage() / (penalty + lifted)
        )
        coefficients = inverse.T @ (inverse @ self._rest)
        return _Solved(penalty * coefficients, 1 - slack, lambda: coefficients)

    def _smoother(self, coefficients: Array) -> Smoother:
        """`V_j = Σ_i α_i w_ij`, `J_j = R Σ_i α_i w_ij (x_i − c_j)`."""
        keys, points = self._keys, self._points
        alphas = self._base.projected(coefficients) * self._base.roots
        weights = keys.weights(points, self._squared)
        values = weights.T @ alphas
        if not keys.affine:
            return Smoother(keys, values)
        pulls = np.stack([(weights * alpha[:, None]).T @ points for alpha in alphas.T], axis=1)
        return Smoother(keys, values, keys.rate * (pulls - values[:, :, None] * keys.centers[:, None, :]))


def _with_diagonal(matrix: Array, penalty: float) -> Array:
    """The symmetric matrix with λ added to its diagonal, by columns: LAPACK takes it without another copy."""
    out = matrix.copy()
    out.flat[:: len(out) + 1] += penalty
    return out.T


def try_ridge(
    keys: Keys, points: Array, targets: Array, *, penalty: float | None = None, weights: Array | None = None
) -> Trial:
    """The fit with penalty λ, or with the best of a grid; see `Ridge`."""
    problem = Ridge.of(keys, points, targets, weights=weights)
    return problem.best() if penalty is None else problem.at(float(penalty))
