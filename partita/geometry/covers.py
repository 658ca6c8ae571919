"""Covers of point clouds by balls, and how densely points fill a box."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import scipy
from numpy.typing import NDArray

from partita.arithmetic.rounding import down, up
from partita.geometry.domains import Array, Box

__all__ = ["Cover", "farthest_point_cover", "fill_distance_bounds"]


@dataclass(frozen=True, eq=False)
class Cover:
    """Balls of radius `radius` around `centers` that cover the points; `labels` are the centers' row numbers."""

    centers: Array
    labels: NDArray[np.int64]
    radius: float


def farthest_point_cover(points: Array, *, radius: float = 0.0, max_balls: int | None = None) -> Cover:
    """Greedy cover: start anywhere, add the point farthest from all centers until every point is within `radius`.

    With N balls its radius is at most twice that of the best N balls (Gonzalez 1985); the centers are points of the
    cloud, so f is never evaluated outside its domain. Starts from the point nearest the middle. O(N·n·m) time, O(n) memory.

    Args:
        points: `(n, m)`.
        radius: stop once this is reached.
        max_balls: or once there are so many.
    """
    centred = points - (points.min(axis=0) + points.max(axis=0)) / 2
    scale = float(np.abs(centred).max()) or 1.0  # squares must neither overflow nor vanish
    centred /= scale
    distance = np.full(len(points), np.inf)
    labels = [int(np.argmin((centred**2).sum(axis=1)))]
    slack = 8e-16 * np.sqrt(points.shape[1]) * float(np.abs(points).max())
    limit = len(points) if max_balls is None else min(max_balls, len(points))
    while True:
        difference = centred - centred[labels[-1]]
        np.minimum(distance, np.einsum("nm,nm->n", difference, difference), out=distance)
        farthest = int(distance.argmax())
        # rounding: of the shift, of the scaling and of the squares, all relative to the extent of the cloud
        reached = float(up(scale * np.sqrt(distance[farthest]), 8)) + slack
        if reached <= radius or distance[farthest] == 0 or len(labels) >= limit:
            index = np.array(labels)
            return Cover(
                points[index], index, 0.0 if distance[farthest] == 0 else reached * (1 + 4e-16 * points.shape[1])
            )
        labels.append(farthest)


def fill_distance_bounds(
    points: Array, box: Box, *, accuracy: float = 0.01, enough: float = 0.0, max_boxes: int = 200_000
) -> tuple[float, float]:
    """Proved bounds of the fill distance `sup_{z in box} min_i |z − x_i|`: (lower, upper).

    Branch and bound. On a part with middle c and half sides h every z is within `√Σ_k (|c_k − x_k| + h_k)²` of the pair x
    nearest to c, and c itself is a witness from below. Parts that may exceed the best witness are halved.

    Args:
        points: `(N, m)`, inside the box or not.
        box: a box in R^m.
        accuracy: stop once upper ≤ (1 + accuracy)·lower,
        enough: or once upper ≤ enough; nothing else will do as long as lower ≤ enough.
        max_boxes: or once so many parts were looked at; the bounds hold even then.
    """
    origin, unit = (box.lo.ravel() + box.hi.ravel()) / 2, float(box.sides.max())
    scaled = (
        points - origin
    ) / unit  # squares must neither overflow nor vanish; a few roundings of numbers up to reach
    reach = max(1.0, float(np.abs(scaled).max()))
    slack = 16 * 2.0**-53 * reach * np.sqrt(points.shape[1]) * (1 + float(np.abs(origin).max()) / unit)
    tree = scipy.spatial.KDTree(scaled)
    middle, half = np.zeros((1, points.shape[1])), box.sides[None] / (2 * unit)
    lower = upper = settled = 0.0
    looked = 0
    while len(middle):
        distance, nearest = tree.query(middle)
        lower = max(lower, float(distance.max()))
        most = np.sqrt(((np.abs(middle - scaled[nearest]) + half) ** 2).sum(axis=1))
        wanted = enough / unit - 2 * slack
        limit = wanted if lower <= wanted else (1 + accuracy) * lower
        open_ = most > limit
        settled = max(settled, float(most[~open_].max(initial=0.0)))
        upper = max(settled, float(most.max()))
        looked += len(middle)
        if looked > max_boxes or not open_.any():
            break
        middle, half = _halves(middle[open_], half[open_])
    pad = 1 + 64 * 2.0**-53 * points.shape[1]
    return max(0.0, float(down(unit * (lower / pad - slack), 8))), float(up(unit * (upper * pad + slack), 8))


def _halves(middle: Array, half: Array) -> tuple[Array, Array]:
    """Each part cut in two across its longest side."""
    rows, axis = np.arange(len(half)), half.argmax(axis=1)
    half = half.copy()
    half[rows, axis] /= 2
    step = np.zeros_like(half)
    step[rows, axis] = half[rows, axis]
    return np.concatenate([middle - step, middle + step]), np.concatenate([half, half])
