"""Scores as affine functions, from which every form of a head is built.

`s_j(z) = slopes_j·z + offsets_j` with the temperature already inside; two score lists that differ by a common affine
function make the same softmax.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from partita.arithmetic.precision import DOUBLE
from partita.geometry.domains import Array

__all__ = ["AffineScores"]


@dataclass(frozen=True, eq=False)
class AffineScores:
    """`s_j(z) = slopes_j·z + offsets_j`, inverse temperatures included, and the values the cells hold.

    Attributes:
        slopes: `(cells, m)`.
        offsets: `(cells,)`.
        values: `(cells, out)`.
        value_slopes: `(cells, out, m)` if the values are affine, `V_j(z) = values_j + value_slopes_j·z`, else None.
        offset_error, value_error: how far the sums that made an offset or a value may have rounded it. Slopes are products,
            off by less than 4 units of roundoff of themselves.
    """

    slopes: Array
    offsets: Array
    values: Array
    value_slopes: Array | None = None
    offset_error: float = 0.0
    value_error: float = 0.0

    @classmethod
    def of_centers(
        cls,
        centers: Array,
        inverse_temperature: Array,
        values: Array,
        *,
        powers: Array | None = None,
        origin: Array | None = None,
        value_slopes: Array | None = None,
        value_origin: Array | None = None,
        value_error: float = 0.0,
    ) -> AffineScores:
        """From `−Σ_i R_i(z_i − c_i)²/2 + R p/2`, less the score of a center at `origin`: same softmax, smaller numbers.

        `value_slopes` here multiply `z − value_origin`, or `z − c_j` if that is None (the forms in which tangents are
        stored), and are rewritten for z. `value_error`: how far `values` are from those of the head.
        """
        o = np.zeros(centers.shape[1]) if origin is None else origin
        r = np.broadcast_to(inverse_temperature, centers.shape[1])
        slopes = (centers - o) * r
        offsets = -0.5 * (slopes * (centers + o)).sum(axis=1)
        added = (np.abs(slopes) * (np.abs(centers) + np.abs(o))).sum(axis=1)
        if powers is not None:
            offsets = offsets + 0.5 * r.max() * powers
            added = added + r.max() * np.abs(powers)
        roundings = centers.shape[1] + 6
        offset_error = _summed(0.5 * added, roundings) + roundings * float(r.max()) * DOUBLE.smallest
        if value_slopes is not None:
            about = centers if value_origin is None else np.broadcast_to(value_origin, centers.shape)
            moved = np.einsum("com,cm->co", np.abs(value_slopes), np.abs(about)) + np.abs(values)
            value_error = value_error + _summed(moved, roundings) + roundings * DOUBLE.smallest
            values = values - np.einsum("com,cm->co", value_slopes, about)
        return cls(slopes, offsets, values, value_slopes, offset_error, value_error)


def _summed(sizes: Array, roundings: int) -> float:
    """What so many roundings in float64 may change in sums of these sizes, the sizes being rounded themselves."""
    return 1.01 * roundings * DOUBLE.unit * float(sizes.max())
