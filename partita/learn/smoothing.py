"""A softmax over centers as a linear smoother: its weights, its outputs, the features that a ridge fit sees."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from scipy.spatial.distance import cdist

from partita.geometry.domains import Array
from partita.learn.parallel import ALONE, Jobs

__all__ = ["AT_ONCE", "Keys", "Rows", "Smoother", "row_blocks", "squared_distances"]

Result = TypeVar("Result")

_FEW = 16  # features
AT_ONCE = 1 << 23  # numbers in one block of rows: 64 MiB


def squared_distances(points: Array, centers: Array) -> Array:
    """`|x_i − c_j|²`, `(n, N)`: by differences, or with many features by a matrix product around the mean center.

    The product is off by some 1e-16·|x|², which is more than rounding only for distances far below those between most points.
    """
    if points.shape[1] <= _FEW:
        out: Array = cdist(points, centers, "sqeuclidean")
        return out
    middle = centers.mean(axis=0)
    x, c = points - middle, centers - middle
    out = x @ (-2 * c.T)
    out += (x**2).sum(axis=1)[:, None]
    out += (c**2).sum(axis=1)
    return np.maximum(out, 0.0, out=out)


def _softmax(scores: Array) -> Array:
    scores -= scores.max(axis=1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=1, keepdims=True)
    return scores


def row_blocks(rows: int, columns: int) -> Iterator[slice]:
    """Row numbers of blocks that hold some eight million numbers each."""
    step = max(1, AT_ONCE // max(columns, 1))
    return (slice(i, min(i + step, rows)) for i in range(0, rows, step))


class Rows:
    """A tall matrix in blocks of rows: made anew on every pass, kept when one block holds it all.

    Args:
        make: the rows of a slice.
        columns: how many they have.
        width: numbers per row that a pass needs, if more.
    """

    def __init__(self, make: Callable[[slice], Array], rows: int, columns: int, *, width: int = 0) -> None:
        self._make, self.rows, self.columns, self._width = make, rows, columns, max(columns, width)
        self._kept: Array | None = None

    def __iter__(self) -> Iterator[tuple[slice, Array]]:
        for part in row_blocks(self.rows, self._width):
            if part.stop - part.start < self.rows:
                yield part, self._make(part)
                continue
            if self._kept is None:
                self._kept = self._make(part)
            yield part, self._kept

    def each(self, work: Callable[[slice, Array], Result], jobs: Jobs = ALONE) -> Iterator[tuple[slice, Result]]:
        """`work(part, block)` for every block, in the order of the blocks.

        Args:
            work: must not change what it is given, or anything else.
            jobs: how many blocks are worked on at the same time.
        """
        parts = list(row_blocks(self.rows, self._width))
        if len(parts) < 2:
            yield from ((part, work(part, block)) for part, block in self)
        else:
            yield from zip(parts, jobs.map(_OnBlock(self._make, work), parts))

    @property
    def whole(self) -> bool:
        """Whether all rows are kept."""
        return self._kept is not None

    def taken(self, part: slice) -> Array:
        """The rows of a slice, for the caller to change: nothing is kept of them."""
        if self._kept is None or part.stop - part.start < self.rows:
            return self._make(part)
        kept, self._kept = self._kept, None
        return kept

    def block(self, part: slice) -> Array:
        """The rows of any slice."""
        return self._make(part) if self._kept is None else self._kept[part]


@dataclass(frozen=True, eq=False)
class _OnBlock:
    """Work on the rows of a slice, which are made where the work is done."""

    make: Callable[[slice], Array]
    work: Callable[[slice, Array], Any]

    def __call__(self, part: slice) -> Any:
        return self.work(part, self.make(part))


@dataclass(frozen=True, eq=False)
class Keys:
    """The keys of a head: `w_j(x) = softmax_j(−R|x − c_j|²/2 + b_j)`, values constant or affine in x.

    The features that a ridge fit combines are the w_j, and with affine values the `√R·w_j(x)(x − c_j)` as well: R^{−1/2} is the
    width of a key, so that one penalty serves values and slopes.

    Args:
        centers: `(N, m)`.
        rate: R.
        affine: whether values have slopes.
        bias: b `(N,)`, or None for zeros.
    """

    centers: Array
    rate: float
    affine: bool = False
    bias: Array | None = None

    @property
    def num_features(self) -> int:
        return int(len(self.centers) * (1 + self.centers.shape[1] * self.affine))

    def weights(self, points: Array, squared: Array | None = None) -> Array:
        """`(n, N)`, rows that sum to 1.

        Args:
            points: `(n, m)`.
            squared: `|x_i − c_j|²` if they are known already; they are left as they are.
        """
        return _softmax(self._scores(squared_distances(points, self.centers) if squared is None else squared))

    def _scores(self, squared: Array) -> Array:
        scores = squared * (-0.5 * self.rate)
        return scores if self.bias is None else scores + self.bias

    def features(self, points: Array, squared: Array | None = None) -> Array:
        """`(n, num_features)`: the weights, then their products with each coordinate of `√R(x − c_j)`."""
        weights = self.weights(points, squared)
        if not self.affine:
            return weights
        offsets = points.T[:, :, None] - self.centers.T[:, None, :]
        moments = np.sqrt(self.rate) * weights * offsets
        return np.hstack([weights, moments.transpose(1, 0, 2).reshape(len(points), -1)])

    def kernel(self, points: Array, project: Callable[[Array], Array], squared: Array | None = None) -> Array:
        """Inner products of the features after `project`ing their columns, `(n, n)`, without listing those of the slopes.

        `Σ_j w_j w'_j (x − c_j)·(x' − c_j)` is expanded in four products of `(n, N)` matrices.
        """
        weights = self.weights(points, squared)
        projected = project(weights)
        out = projected @ projected.T
        if self.affine:
            cross = (weights * (points @ self.centers.T)) @ weights.T
            slopes = (points @ points.T) * (weights @ weights.T) - cross - cross.T
            slopes += (weights * (self.centers**2).sum(axis=1)) @ weights.T
            out += self.rate * project(project(slopes).T)
        return out

    def smoother_loo(self, targets: Array, rows: slice) -> Array:
        """What `Σ_j w_j y_j`, the keys being the data, says at x_i without key i: `Σ_{j≠i} w_ij y_j/(1 − w_ii)`.

        The own score is taken out before the softmax: nothing is divided by a rounded `1 − w_ii`. Args: targets `(N, out)`;
        rows: which points are left out, one at a time.
        """
        index = np.arange(len(self.centers))[rows]
        out = np.empty((len(index), targets.shape[1]))
        for part in row_blocks(len(index), len(self.centers)):
            scores = self._scores(squared_distances(self.centers[index[part]], self.centers))
            scores[np.arange(len(scores)), index[part]] = -np.inf
            out[part] = _softmax(scores) @ targets
        return out

    def trace(self, rows: slice) -> float:
        """`Σ_i w_ii` over the rows: the degrees of freedom of that smoother."""
        index = np.arange(len(self.centers))[rows]
        owns = (index[part] for part in row_blocks(len(index), len(self.centers)))
        blocks = ((self.weights(self.centers[own]), own) for own in owns)
        return float(sum(block[np.arange(len(block)), own].sum() for block, own in blocks))


@dataclass(frozen=True, eq=False)
class Smoother:
    """`net(x) = Σ_j w_j(x)(V_j + J_j(x − c_j))`: a head in numpy, by matrix products.

    Args:
        keys: where it looks.
        values: `(N, out)`.
        slopes: `(N, out, m)` or None.
    """

    keys: Keys
    values: Array
    slopes: Array | None = None

    def __call__(self, points: Array) -> Array:
        """`(n, out)`."""
        return np.concatenate([self._block(points[part]) for part in self._parts(points)])

    def _parts(self, points: Array) -> Iterator[slice]:
        outputs = self.values.shape[1] * (1 if self.slopes is None else self.keys.centers.shape[1])
        return row_blocks(len(points), len(self.keys.centers) + outputs)

    def _block(self, x: Array) -> Array:
        weights = self.keys.weights(x)
        if self.slopes is None:
            return weights @ self.values
        at_origin = self.values - np.einsum("jok,jk->jo", self.slopes, self.keys.centers)
        slopes = (weights @ self.slopes.reshape(len(weights.T), -1)).reshape(len(x), *self.slopes.shape[1:])
        out: Array = weights @ at_origin + np.einsum("nok,nk->no", slopes, x)
        return out

    def gradient_size(self, points: Array, row_weights: Array | None = None) -> Array:
        """Root mean square of `∂net/∂x_k` over points and outputs, `(m,)`; for constant values.

        `∇net = R(Σ_j w_j V_j c_j − net·Σ_j w_j c_j)`.
        """
        centers, total = self.keys.centers, np.zeros(points.shape[1])
        rows = np.ones(len(points)) if row_weights is None else row_weights
        pulls = (self.values.T[:, :, None] * centers).transpose(1, 0, 2).reshape(len(centers), -1)  # V_j c_j
        for part in row_blocks(len(points), max(pulls.shape)):
            weights = self.keys.weights(points[part])
            gradient = (weights @ pulls).reshape(len(weights), -1, points.shape[1])
            gradient -= (weights @ self.values)[:, :, None] * (weights @ centers)[:, None, :]
            total += np.einsum("n,nok,nok->k", rows[part], gradient, gradient)
        out: Array = self.keys.rate * np.sqrt(total / (rows.sum() * self.values.shape[1]))
        return out

    def effective_keys(self, points: Array, row_weights: Array | None = None) -> float:
        """Mean of `1/Σ_j w_j²` over the points: between 1 and N."""
        parts = self._parts(points)
        counts = [1 / (self.keys.weights(points[p]) ** 2).sum(axis=1) for p in parts]
        return float(np.average(np.concatenate(counts), weights=row_weights))
