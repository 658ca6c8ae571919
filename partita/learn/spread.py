"""How large the leave-one-out errors are around each key: what `predict(X, return_std=True)` is made of."""

from __future__ import annotations

import math

import numpy as np

from partita.geometry.domains import Array
from partita.learn.search import rate_range
from partita.learn.smoothing import Keys, Smoother, row_blocks, squared_distances

__all__ = ["local_variances"]

_PRIORS = np.array([0.01, 0.1, 1.0, 10.0, 1e9])  # rows of the overall mean that are mixed into every key
_RATES = 6
_ROWS = 1000  # on which these are compared


def local_variances(centers: Array, points: Array, squares: Array, weights: Array) -> Smoother:
    """A head with positive values that says how large squared errors are around x.

    Its values are `v_j = (Σ_i s_i u_j(x_i) r_i² + a·r̄²)/(Σ_i s_i u_j(x_i) + a)`, u its own softmax weights. Their inverse
    temperature and the prior weight a are those under which the errors are most likely (as independent Gaussians), each
    under the variances that the other rows give.

    Args:
        centers: `(N, m)`.
        points: `(n, m)`.
        squares: r² `(n, out)`, squared leave-one-out errors.
        weights: s `(n,)`.
    """
    rows = weights / weights.mean()
    some = slice(None, None, math.ceil(len(points) / _ROWS))
    squared = squared_distances(points[some], centers)
    losses: dict[tuple[float, float], float] = {}
    for rate in np.geomspace(*rate_range(centers), _RATES):
        shares = Keys(centers, float(rate)).weights(points[some], squared)
        losses |= {(prior, -rate): loss for prior, loss in _losses(shares, squares[some], rows[some]).items()}
    least = min(losses.values())
    margin = 1e-9 * max(map(abs, losses.values()))
    prior, rate = max(key for key, loss in losses.items() if loss <= least + margin)  # of equals the smoothest
    keys = Keys(centers, float(-rate))
    sums, masses = np.zeros((len(centers), squares.shape[1])), np.zeros(len(centers))
    for part in row_blocks(len(points), len(centers)):
        mixed = keys.weights(points[part]) * rows[part, None]
        sums += mixed.T @ squares[part]
        masses += mixed.sum(axis=0)
    return Smoother(keys, (sums + prior * _overall(squares, rows)) / (masses + prior)[:, None])


def _overall(squares: Array, rows: Array) -> Array:
    out: Array = np.average(squares, axis=0, weights=rows)
    return out


def _losses(shares: Array, squares: Array, rows: Array) -> dict[float, float]:
    """Minus the logarithm of the likelihood for every prior weight, with each row under the variances of the others."""
    own, overall = shares * rows[:, None], _overall(squares, rows)
    rest = np.maximum(own.sum(axis=0) - own, 0.0)
    losses = dict.fromkeys(_PRIORS.tolist(), 0.0)
    for column in np.flatnonzero(overall > 0):
        parts = own * squares[:, [column]]
        others = np.maximum(parts.sum(axis=0) - parts, 0.0)
        for prior in losses:
            variance = np.einsum("ij,ij->i", shares, (others + prior * overall[column]) / (rest + prior))
            losses[prior] += float(rows @ (np.log(variance) + squares[:, column] / variance))
    return losses
