"""Values on a product grid: least squares axis by axis, and then steps towards the least maximum error.

Tensors are `(n_1, …, n_m, out)`. `A = ⊗A_i` is never formed: every product contracts one axis at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np
import scipy

from partita.geometry.domains import Array

__all__ = ["BoundedFit", "Frame", "evaluate_points", "evaluate_tensor", "softmax", "softmax_matrix", "spread_of"]

_NOTHING = -100.0  # weights below e^-100 count as 0: subnormal numbers make LAPACK slow
_HOPELESS = 3.0  # least squares is hardly ever farther than this from the best possible largest error
_PATIENCE = {10: 1.25, 20: 1.1}  # after so many rounds the excess is hardly ever more than that above its limit
_LARGE = 1 << 16  # samples above which that is trusted
_AT_ONCE = 1 << 21


def softmax(exponents: Array) -> Array:
    """`e^s / Σ e^s` over the last axis. The exponents are overwritten."""
    exponents -= exponents.max(axis=-1, keepdims=True)
    exponents[exponents < _NOTHING] = -np.inf
    weights = np.exp(exponents, out=exponents)
    weights /= weights.sum(axis=-1, keepdims=True)
    return weights


def softmax_matrix(points: Array, centers: Array, rate: float) -> Array:
    """`softmax_k(−rate·(x_s − c_k)²/2)`, `(samples, centers)`."""
    return softmax(-0.5 * rate * (points[:, None] - centers) ** 2)


def evaluate_tensor(points: Sequence[Array], centers: Sequence[Array], rates: Sequence[float], values: Array) -> Array:
    """`(⊗A_i)V` on a product of points: values `(P_1, …, P_m, out)` to `(n_1, …, n_m, out)`."""
    matrices = [softmax_matrix(x, c, r) for x, c, r in zip(points, centers, rates)]
    return _outward(matrices, np.moveaxis(values, -1, 0))


def evaluate_points(points: Array, centers: Sequence[Array], rates: Sequence[float], values: Array) -> Array:
    """The head at scattered points, `(n, m)` to `(n, out)`, with values `(P_1, …, P_m, out)`."""
    rows = max(1, _AT_ONCE // (values.size // len(centers[0]) + 1))
    parts = []
    for start in range(0, len(points), rows):
        some = points[start : start + rows]
        total = softmax_matrix(some[:, 0], centers[0], rates[0]) @ values.reshape(len(centers[0]), -1)
        for i in range(1, len(centers)):
            weights = softmax_matrix(some[:, i], centers[i], rates[i])
            total = np.einsum("bi,bij->bj", weights, total.reshape(*weights.shape, -1))
        parts.append(total)
    return np.concatenate(parts)


def spread_of(values: Array) -> float:
    """The largest `max V − min V` over the components, values `(…, out)`."""
    return float(np.ptp(values.reshape(-1, values.shape[-1]), axis=0).max()) if values.size else 0.0


def _inward(matrices: Sequence[Array], tensor: Array) -> Array:
    """`(n_1, …, n_m, out)` to `(out, r_1, …, r_m)` with `(r_i, n_i)` matrices: one product per axis, which comes out last."""
    shape = list(tensor.shape)
    for matrix in matrices:
        tensor = tensor.reshape(shape[0], -1).T @ matrix.T
        shape = [*shape[1:], len(matrix)]
    return tensor.reshape(shape)


def _outward(matrices: Sequence[Array], tensor: Array) -> Array:
    """`(out, r_1, …, r_m)` to `(n_1, …, n_m, out)` with `(n_i, r_i)` matrices: the way back."""
    shape = list(tensor.shape)
    for matrix in reversed(matrices):
        tensor = matrix @ tensor.reshape(-1, shape[-1]).T
        shape = [len(matrix), *shape[:-1]]
    return tensor.reshape(shape)


@dataclass(frozen=True, eq=False)
class BoundedFit:
    """Values `(P_1, …, P_m, out)`, their largest error at the samples, and whether that and their size are within the limits."""

    values: Array
    error: float
    within: bool


@dataclass(frozen=True, eq=False)
class Frame:
    """`A = ⊗A_i` at a product of sample points, by the singular vectors of each axis: `A_i = Σ_k u_k σ_k w_kᵀ`.

    Attributes:
        left, right: u_k and w_k as columns, one matrix for each axis.
        strength: the products of the singular values, `(r_1, …, r_m)`.
    """

    left: tuple[Array, ...]
    right: tuple[Array, ...]
    strength: Array

    @classmethod
    def of(cls, matrices: Sequence[Array]) -> Frame:
        """From `A_i`, samples × centers."""
        parts = [scipy.linalg.svd(a, full_matrices=False, check_finite=False, lapack_driver="gesvd") for a in matrices]
        strength = reduce(np.multiply.outer, [sigma for _, sigma, _ in parts])
        return cls(tuple(u for u, _, _ in parts), tuple(w.T for _, _, w in parts), strength)

    def nearest(self, samples: Array, ridge: float, pull: Array | None = None) -> tuple[Array, Array]:
        """The V with the least `|AV − samples|² + |ridge·V − pull|²`, and AV at the samples."""
        ridge = min(ridge, 1e150)  # its square must be a number
        inner = self.strength * _inward([u.T for u in self.left], samples)
        if pull is not None:
            inner += ridge * _inward([w.T for w in self.right], pull)
        inner /= self.strength**2 + ridge**2
        return _outward(self.right, inner), _outward(self.left, self.strength * inner)

    def fit(
        self,
        samples: Array,
        target: float,
        *,
        reach: float,
        rounds: int,
        ends: tuple[Array | float, ...] = (-np.inf, np.inf),
        watch: Callable[[str], None] = lambda _: None,
    ) -> BoundedFit:
        """Values with `|AV − f| ≤ target` at the samples and `|V − middle| ≤ reach`, or the best of so many rounds.

        The middle is chosen such that all these values lie between the two `ends`, which are at least 2 reach apart.

        Douglas–Rachford between the pairs `(f − AV, μV)` and the box `|f − AV| ≤ target, |V| ≤ reach`: p the nearest such
        pair to z, `z ← z + clip(2p − z) − p`. From z = 0 the first p is least squares with ridge μ, whose largest error is
        1.2 to 2 times the best; some ten rounds gain most of that. (Weights sum to 1, so values and f may be moved by a
        common middle.)
        """
        ridge, middle = self._ridge(samples, target, reach, ends)
        f, state, pull = samples - middle, np.zeros_like(samples), None
        best, least = BoundedFit(np.zeros(1), np.inf, False), np.inf
        for step in range(rounds + 1):
            watch("fitting")
            values, fitted = self.nearest(f - state, ridge, pull)
            residual = f - fitted
            error, size = float(np.abs(residual).max()), float(np.abs(values).max())
            excess = max(error / target, size / reach)
            if excess < least:
                best, least = BoundedFit(values + middle, error, excess <= 1), excess
            slow = samples.size > _LARGE and least > _PATIENCE.get(step, np.inf)
            if least <= 1 or step == rounds or excess > _HOPELESS or slow:
                break
            state += np.clip(2 * residual - state, -target, target) - residual
            if pull is not None or size > reach / 2:
                before = 0.0 if pull is None else pull
                pull = before + np.clip(2 * ridge * values - before, -ridge * reach, ridge * reach) - ridge * values
        return best

    def _ridge(
        self, samples: Array, target: float, reach: float, ends: tuple[Array | float, ...]
    ) -> tuple[float, Array]:
        """The least ridge μ that keeps values within reach, if the error allows, and the middle of the values."""
        ridge = max(target / reach, 4e-16 * float(self.strength.max()))
        while True:
            values, fitted = self.nearest(samples, ridge)
            flat = values.reshape(-1, samples.shape[-1])
            own = flat.max(axis=0) / 2 + flat.min(axis=0) / 2
            middle = np.minimum(np.maximum(own, ends[0] + reach), ends[1] - reach)
            close = np.ptp(flat, axis=0).max() <= 2 * reach
            close = close and ((middle == own).all() or np.abs(flat - middle).max() <= reach)
            if close or np.abs(samples - fitted).max() > target:
                return ridge, middle
            ridge *= 4
