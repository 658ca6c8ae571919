"""How wide a window of centers has to be on an axis, and whether it can be found by arithmetic."""

from __future__ import annotations

import math

import numpy as np

from partita.geometry.domains import Array
from partita.geometry.moments import AxisGeometry, dropped_mass

__all__ = ["displacement", "half_window"]


def half_window(centers: Array, rate: float, at_least: int, negligible: float) -> int:
    """q such that the 2q centers around any x hold all but a share `negligible` of the softmax; half the axis if none can be used.

    Args:
        centers: of the axis, `(P,)`.
        rate: R.
        at_least: the smallest q to return.
        negligible: the share that may be left out.
    """
    count = len(centers)
    whole = max(at_least, (count + 1) // 2)
    ordered = bool(np.isfinite(centers).all() and (np.diff(centers) > 0).all())
    if not (ordered and 0 < rate < math.inf) or displacement(centers) >= 1:
        return whole
    geometry = AxisGeometry.of(centers, float(centers[0]), float(centers[-1]))
    square = geometry.gap_min * geometry.gap_min
    kappa = rate * square
    if not (
        kappa * count * count > 1 and math.isfinite(square)
    ):  # nearly flat weights; products that under- or overflow
        return whole
    q = max(at_least, math.isqrt(int(2 / kappa)))
    while 2 * q < count and dropped_mass(geometry, rate, q) > negligible:
        q += 1 + q // 16
    return min(q, whole) if 2 * q < count else whole


def displacement(centers: Array) -> float:
    """How far a center lies from its place on an axis of equal spacing between the same ends, in spacings; inf if unusable.

    A window starts from the guess `k = ⌊(x − c_0)(P − 1)/(c_{P−1} − c_0)⌋`, corrected by one step after a comparison. The
    guess is off by at most one exactly if this displacement is at most 1; a little less leaves room for its rounding.
    """
    count = len(centers)
    if count < 2:
        return 0.0
    with np.errstate(all="ignore"):
        per_unit = (count - 1) / (centers[-1] - centers[0])
        away = np.abs((centers - centers[0]) * per_unit - np.arange(count)).max() + 8 * count * 2.0**-53
    return float(away) if math.isfinite(away) and 0 < per_unit < math.inf else math.inf
