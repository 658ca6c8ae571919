"""Ridge fits of a head's values, with the error of leaving each point out in closed form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from partita.geometry.domains import Array
from partita.learn.smoothing import Keys, Rows, Smoother

__all__ = ["PENALTIES", "Fit", "Trial", "try_ridge"]

PENALTIES = 10.0 ** np.arange(-8.0, 3.1, 0.25)  # in units of the largest eigenvalue
_LOST = 1e-13  # of the largest eigenvalue
_RANK = 1e-10  # of the largest singular value of the points: below it a direction is none
_LEAST_SLACK = 1e-10  # of 1 − H_ii: below it the formula divides rounding by rounding


@dataclass(frozen=True, eq=False)
class Fit:
    """Fitted values and their leave-one-out errors.

    Attributes:
        smoother: the head.
        penalty: λ.
        degrees_of_freedom: the trace of the hat matrix.
        left_out: `(n, out)`, the prediction at x_i of the fit that never saw (x_i, y_i).
        error: their mean squared error.
    """

    smoother: Smoother
    penalty: float
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

    Attributes:
        columns: `(n, p)`, orthonormal, their values at the points, the constant first.
        slopes: `(m, p − 1)`, the others' slopes.
        middle: `(m,)`, where these vanish.
    """

    columns: Array
    slopes: Array
    middle: Array

    @classmethod
    def of(cls, points: Array, *, affine: bool) -> _Base:
        (n, m), middle = points.shape, points.mean(axis=0)
        constant = np.full((n, 1), n**-0.5)
        if affine:
            left, sizes, right = np.linalg.svd(points - middle, full_matrices=False)
            rank = int((sizes > _RANK * max(sizes[0], 1e-300)).sum())
            if 2 * (rank + 1) <= n:  # else there is nothing to leave out
                return cls(np.hstack([constant, left[:, :rank]]), right[:rank].T / sizes[:rank], middle)
        return cls(constant, np.zeros((m, 0)), middle)

    def project_out(self, matrix: Array) -> Array:
        return matrix - self.columns @ (self.columns.T @ matrix)

    def add(self, smoother: Smoother, rest: Array) -> Smoother:
        """The smoother plus the unpenalised function that is nearest to `rest` at the points."""
        slopes = (self.slopes @ (self.columns.T @ rest)[1:]).T
        values = smoother.values + rest.mean(axis=0) + (smoother.keys.centers - self.middle) @ slopes.T
        return Smoother(smoother.keys, values, None if smoother.slopes is None else smoother.slopes + slopes)


@dataclass(frozen=True, eq=False)
class _Spectrum:
    """The projected features Φ in their own axes: `ΦΦᵀ = TTᵀ`, T's columns orthogonal with squared lengths s."""

    rotated: Rows
    squares: Array
    targets: Array  # projected
    moments: Array  # Tᵀy
    leverage: Array  # of the base, (n, 1)

    def shrinkage(self, penalties: Array) -> Array:
        """`1/(s + λ)`, `(r, L)`; 0 where both vanish."""
        total = self.squares[:, None] + penalties
        return np.divide(1.0, total, out=np.zeros_like(total), where=total > 0)

    def residuals(self, penalties: Array) -> tuple[Array, Array]:
        """Sums over the points of the squared leave-one-out residuals, `(L,)`, and the traces of the hat matrices."""
        shrink = self.shrinkage(penalties)
        fitted = (shrink[:, :, None] * self.moments[:, None, :]).reshape(len(shrink), -1)
        squares, traces = np.zeros(len(penalties)), np.zeros(len(penalties))
        for part, block in self.rotated:
            hat = self.leverage[part] + block**2 @ shrink
            rest = self.targets[part, None, :] - (block @ fitted).reshape(len(block), len(penalties), -1)
            squares += ((rest / np.maximum(1 - hat, _LEAST_SLACK)[:, :, None]) ** 2).sum(axis=(0, 2))
            traces += hat.sum(axis=0)
        return squares, traces

    def left_out(self, penalty: float) -> Array:
        """`e_i/(1 − H_ii)`, `(n, out)`."""
        shrink = self.shrinkage(np.array([penalty]))
        out = np.empty_like(self.targets)
        for part, block in self.rotated:
            hat = self.leverage[part] + block**2 @ shrink
            out[part] = (self.targets[part] - block @ (shrink * self.moments)) / np.maximum(1 - hat, _LEAST_SLACK)
        return out


def try_ridge(keys: Keys, points: Array, targets: Array, *, penalty: float | None = None) -> Trial:
    """Values that minimise `Σ_i |net(x_i) − y_i|² + λ(Σ_j |V_j − g(c_j)|² + Σ_j |J_j − ∇g|²/R)`; λ by leave-one-out.

    g is free: a constant, or under affine values (and with points enough) any affine function. The hat matrix is
    `H = QQᵀ + Φ(ΦᵀΦ + λ)⁻¹Φᵀ`, Q an orthonormal basis of the g, Φ the features with Q projected out, and refitting without
    point i turns the residual there into `e_i/(1 − H_ii)`: keys stay where they are, everything fitted is refitted. One
    eigendecomposition, of the smaller of ΦᵀΦ and ΦΦᵀ, serves every λ.

    Args:
        points: `(n, m)`, n ≥ 2.
        targets: `(n, out)`.
        penalty: λ itself, or None for the best of a grid.
    """
    base = _Base.of(points, affine=keys.affine)
    few = keys.num_features < len(points)
    spectrum, vectors = (_primal if few else _dual)(keys, points, targets, base)
    top = float(spectrum.squares.max(initial=0.0)) or 1.0
    penalties = PENALTIES * top if penalty is None else np.array([float(penalty)])
    squares, traces = spectrum.residuals(penalties)
    # of equal errors (two points, a constant target) the largest penalty: the simplest values
    best = int(np.flatnonzero(squares <= squares.min() * (1 + 1e-6))[-1])
    chosen, error = float(penalties[best]), float(squares[best]) / targets.size

    def finish() -> Fit:
        coefficients = vectors @ (spectrum.shrinkage(np.array([chosen])) * spectrum.moments)
        smoother = _from_primal(keys, coefficients) if few else _from_dual(keys, points, base.project_out(coefficients))
        smoother = base.add(smoother, targets - smoother(points))
        return Fit(smoother, chosen, float(traces[best]), targets - spectrum.left_out(chosen), error)

    return Trial(error, finish)


def _primal(keys: Keys, points: Array, targets: Array, base: _Base) -> tuple[_Spectrum, Array]:
    """Fewer features than points: the eigenvectors of ΦᵀΦ; coefficients are `vectors @ (shrinkage · moments)`."""
    features, q = keys.features(points), base.columns
    shadow = sum((q[part].T @ block for part, block in features), start=np.zeros((q.shape[1], features.columns)))
    rest = base.project_out(targets)
    gram, moments = np.zeros((features.columns, features.columns)), np.zeros((features.columns, targets.shape[1]))
    for part, block in features:
        projected = block - q[part] @ shadow
        gram += projected.T @ projected
        moments += projected.T @ rest[part]
    squares, vectors = np.linalg.eigh(gram)
    rotated = Rows(
        lambda part: (features.block(part) - q[part] @ shadow) @ vectors,
        len(points),
        features.columns,
        width=len(PENALTIES) * targets.shape[1],
    )
    leverage = (q**2).sum(axis=1, keepdims=True)
    return _Spectrum(rotated, np.maximum(squares, 0.0), rest, vectors.T @ moments, leverage), vectors


def _dual(keys: Keys, points: Array, targets: Array, base: _Base) -> tuple[_Spectrum, Array]:
    """At least as many features as points: those of ΦΦᵀ; the coefficients are those of the points."""
    squares, vectors = np.linalg.eigh(keys.kernel(points, base.project_out))
    # directions lost in rounding: shrunk to nothing by every penalty, but their coefficients, 1/λ, would not be
    squares = np.where(squares > _LOST * squares[-1], squares, 0.0)
    roots = np.sqrt(squares)
    rotated, rest = vectors * roots, base.project_out(targets)
    rows = Rows(lambda part: rotated[part], *rotated.shape, width=len(PENALTIES) * targets.shape[1])
    spectrum = _Spectrum(rows, squares, rest, rotated.T @ rest, (base.columns**2).sum(axis=1, keepdims=True))
    inverse = np.divide(1.0, roots, out=np.zeros_like(roots), where=roots > 0)
    return spectrum, vectors * inverse


def _from_primal(keys: Keys, coefficients: Array) -> Smoother:
    count, m = keys.centers.shape
    if not keys.affine:
        return Smoother(keys, coefficients)
    slopes = coefficients[count:].reshape(m, count, -1).transpose(1, 2, 0) * np.sqrt(keys.rate)
    return Smoother(keys, coefficients[:count], slopes)


def _from_dual(keys: Keys, points: Array, coefficients: Array) -> Smoother:
    """`V_j = Σ_i α_i w_ij`, `J_j = R Σ_i α_i w_ij (x_i − c_j)`."""
    weights = keys.weights(points)
    values = weights.T @ coefficients
    if not keys.affine:
        return Smoother(keys, values)
    pulls = np.stack([(weights * alpha[:, None]).T @ points for alpha in coefficients.T], axis=1)
    return Smoother(keys, values, keys.rate * (pulls - values[:, :, None] * keys.centers[:, None, :]))
