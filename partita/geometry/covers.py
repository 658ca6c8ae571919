"""Covers of point clouds by balls."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from partita.arithmetic.rounding import up
from partita.geometry.domains import Array

__all__ = ["Cover", "farthest_point_cover"]


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
