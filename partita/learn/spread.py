"""How large the leave-one-out errors are around each key: what `predict(X, return_std=True)` is made of."""

from __future__ import annotations

import numpy as np

from partita.geometry.domains import Array
from partita.learn.smoothing import Keys, row_blocks

__all__ = ["local_variances"]

_PRIORS = 10.0 ** np.arange(0.0, 4.1, 0.5)  # rows of the overall mean that are mixed into every key
_ROWS = 500  # on which these are compared


def local_variances(keys: Keys, points: Array, squares: Array, weights: Array) -> Array:
    """Mean squared errors `(N, out)`, one per key, so that `Σ_j w_j(x)·v_j` is the mean squared error around x.

    `v_j = (Σ_i s_i w_j(x_i) r_i² + a·r̄²)/(Σ_i s_i w_j(x_i) + a)`. The prior weight a is the one under which the errors of some
    rows are most likely (as independent Gaussians), each under the variances that the other rows give.

    Args:
        keys: of the head.
        points: `(n, m)`.
        squares: r² `(n, out)`, squared leave-one-out errors.
        weights: s `(n,)`.
    """
    rows = weights / weights.mean()
    overall = np.average(squares, axis=0, weights=rows)
    sums, masses = np.zeros((len(keys.centers), squares.shape[1])), np.zeros(len(keys.centers))
    for part in row_blocks(len(points), len(keys.centers)):
        mixed = keys.weights(points[part]) * rows[part, None]
        sums += mixed.T @ squares[part]
        masses += mixed.sum(axis=0)
    some = slice(None, None, max(1, len(points) // _ROWS))
    prior = _likeliest(keys.weights(points[some]), squares[some], rows[some], sums, masses, overall)
    out: Array = (sums + prior * overall) / (masses + prior)[:, None]
    return out


def _likeliest(shares: Array, squares: Array, rows: Array, sums: Array, masses: Array, overall: Array) -> float:
    """The best of `_PRIORS`; the largest of equals."""
    own = shares * rows[:, None]
    rest = np.maximum(masses - own, 0.0)
    losses = np.zeros(len(_PRIORS))
    for column in np.flatnonzero(overall > 0):
        others = np.maximum(sums[:, column] - own * squares[:, [column]], 0.0)
        for k, prior in enumerate(_PRIORS):
            variance = (shares * (others + prior * overall[column]) / (rest + prior)).sum(axis=1)
            losses[k] += rows @ (np.log(variance) + squares[:, column] / variance)
    return float(_PRIORS[np.flatnonzero(losses <= losses.min() + 1e-9 * np.abs(losses).max())[-1]])
