"""A softmax over centers as a linear smoother: its weights, its outputs, the features that a ridge fit sees."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.spatial.distance import cdist

from partita.geometry.domains import Array

__all__ = ["Keys", "Own", "Rows", "Smoother", "row_blocks", "squared_distances"]

Own = NDArray[np.int64]  # (n,): which key is the point itself, −1 for none

_AT_ONCE = 1 << 23  # numbers in one block of rows: 64 MiB


def squared_distances(points: Array, centers: Array) -> Array:
    """`|x_i − c_j|²`, `(n, N)`, by centred differences."""
    return cdist(points, centers, "sqeuclidean")


def _softmax(scores: Array) -> Array:
    scores -= scores.max(axis=1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=1, keepdims=True)
    return scores


def row_blocks(rows: int, columns: int) -> Iterator[slice]:
    """Row numbers of blocks that hold some eight million numbers each."""
    step = max(1, _AT_ONCE // max(columns, 1))
    return (slice(i, min(i + step, rows)) for i in range(0, rows, step))


class Rows:
    """A tall matrix in blocks of rows: made anew on every pass, kept when one block holds it all.

    Args:
        make: the rows of a slice; columns: how many they have; width: numbers per row that a pass needs, if more.
    """

    def __init__(self, make: Callable[[slice], Array], rows: int, columns: int, *, width: int = 0) -> None:
        self._make, self.shape, self._width = make, (rows, columns), max(columns, width)
        self._kept: Array | None = None

    def __iter__(self) -> Iterator[tuple[slice, Array]]:
        for part in row_blocks(self.shape[0], self._width):
            if part.stop - part.start < self.shape[0]:
                yield part, self._make(part)
                continue
            if self._kept is None:
                self._kept = self._make(part)
            yield part, self._kept

    def block(self, part: slice) -> Array:
        """The rows of any slice."""
        return self._make(part) if self._kept is None else self._kept[part]


@dataclass(frozen=True, eq=False)
class Keys:
    """Where a head looks: `w_j(x) = softmax_j(−R|x − c_j|²/2)`, values constant or affine in x.

    The features that a ridge fit combines are the w_j, and with affine values the `√R·w_j(x)(x − c_j)` as well: R^{−1/2} is the
    width of a key, so that one penalty serves values and slopes.

    Args:
        centers: `(N, m)`; rate: R; affine: whether values have slopes.
    """

    centers: Array
    rate: float
    affine: bool = False

    @property
    def num_features(self) -> int:
        return len(self.centers) * (1 + self.centers.shape[1] * self.affine)

    def weights(self, points: Array, own: Own | None = None) -> Array:
        """`(n, N)`, rows that sum to 1; the key that is a point's own, if it has one, is silent there: its score is left out."""
        scores = squared_distances(points, self.centers) * (-0.5 * self.rate)
        if own is not None and len(self.centers) > 1:
            rows = np.flatnonzero(own >= 0)
            scores[rows, own[rows]] = -np.inf
        return _softmax(scores)

    def features(self, points: Array, own: Own | None = None) -> Rows:
        """`(n, num_features)`: the weights, then their products with each coordinate of `√R(x − c_j)`."""

        def block(part: slice) -> Array:
            x = points[part]
            weights = self.weights(x, None if own is None else own[part])
            if not self.affine:
                return weights
            root = np.sqrt(self.rate)
            moments = (root * weights * (x[:, [k]] - self.centers[:, k]) for k in range(x.shape[1]))
            return np.hstack([weights, *moments])

        return Rows(block, len(points), self.num_features)

    def kernel(self, points: Array, base: Array, own: Own | None = None) -> Array:
        """Inner products of the features, `base @ baseᵀ` projected out, `(n, n)`; on the left side with own keys silent.

        `Σ_j w_j w'_j (x − c_j)·(x' − c_j)` is expanded in four products of `(n, N)` matrices, so that the slopes' features are
        never listed.
        """
        weights = self.weights(points)
        asked = weights if own is None else self.weights(points, own)
        shadow = base @ (base.T @ weights)
        out = (asked - shadow) @ (weights - shadow).T
        if self.affine:
            shadow = base @ (base.T @ self._slope_products(weights, weights, points))
            slopes = (self._slope_products(asked, weights, points) - shadow).T
            out += self.rate * (slopes - base @ (base.T @ slopes)).T
        return out

    def _slope_products(self, left: Array, right: Array, points: Array) -> Array:
        along = points @ self.centers.T
        out = (points @ points.T) * (left @ right.T) - (left * along) @ right.T - left @ (right * along).T
        return out + (left * (self.centers**2).sum(axis=1)) @ right.T

    def trace(self, rows: slice) -> float:
        """`Σ_i w_ii` over rows of the centers: the degrees of freedom of the smoother that has values there."""
        index = np.arange(len(self.centers))[rows]
        owns = (index[part] for part in row_blocks(len(index), len(self.centers)))
        blocks = ((self.weights(self.centers[own]), own) for own in owns)
        return float(sum(block[np.arange(len(block)), own].sum() for block, own in blocks))


@dataclass(frozen=True, eq=False)
class Smoother:
    """`net(x) = Σ_j w_j(x)(V_j + J_j(x − c_j))`: a head in numpy, by matrix products.

    Args:
        keys: where it looks; values: `(N, out)`; slopes: `(N, out, m)` or None.
    """

    keys: Keys
    values: Array
    slopes: Array | None = None

    def __call__(self, points: Array, own: Own | None = None) -> Array:
        """`(n, out)`; own keys are silent."""
        parts = self._parts(points)
        return np.concatenate([self._block(points[p], None if own is None else own[p]) for p in parts])

    def _parts(self, points: Array) -> Iterator[slice]:
        outputs = self.values.shape[1] * (1 if self.slopes is None else self.keys.centers.shape[1])
        return row_blocks(len(points), len(self.keys.centers) + outputs)

    def _block(self, x: Array, own: Own | None) -> Array:
        weights = self.keys.weights(x, own)
        if self.slopes is None:
            return weights @ self.values
        at_origin = self.values - np.einsum("jok,jk->jo", self.slopes, self.keys.centers)
        slopes = (weights @ self.slopes.reshape(len(weights.T), -1)).reshape(len(x), *self.slopes.shape[1:])
        return weights @ at_origin + np.einsum("nok,nk->no", slopes, x)

    def gradient_size(self, points: Array) -> Array:
        """Root mean square of `∂net/∂x_k` over points and outputs, `(m,)`; for constant values.

        `∇net = R(Σ_j w_j V_j c_j − net·Σ_j w_j c_j)`.
        """
        centers, total = self.keys.centers, np.zeros(points.shape[1])
        for part in self._parts(points):
            weights = self.keys.weights(points[part])
            middle = weights @ centers
            for values in self.values.T:
                gradient = (weights * values) @ centers - (weights @ values)[:, None] * middle
                total += (gradient**2).sum(axis=0)
        return self.keys.rate * np.sqrt(total / (len(points) * self.values.shape[1]))

    def effective_keys(self, points: Array) -> float:
        """Mean of `1/Σ_j w_j²` over the points: between 1 and N."""
        parts = self._parts(points)
        return float(np.concatenate([1 / (self.keys.weights(points[p]) ** 2).sum(axis=1) for p in parts]).mean())
