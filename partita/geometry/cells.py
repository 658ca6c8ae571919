"""Exact cells of 2-D partitions as polygons clipped to a box."""

from __future__ import annotations

import numpy as np
import scipy

from partita.errors import UnsupportedError
from partita.geometry.domains import Array, Box
from partita.geometry.partitions import MaxAffine, Partition

__all__ = ["polygons"]


def polygons(partition: Partition, box: Box) -> list[Array]:
    """The cells inside the box, one `(k, 2)` counter-clockwise polygon per cell; cells that miss the box are `(0, 2)`.

    The graph of `max_j (a_j·x + b_j)` is the upper envelope of planes, a convex polyhedron; Qhull finds which planes
    touch (dual hull of the points (a_j, b_j)), and each cell is clipped by its neighbours only.
    """
    if partition.dimension != 2 or box.dimension != 2:
        raise UnsupportedError(
            f"polygons are drawn in R^2; this partition is in R^{partition.dimension}. Slice it first."
        )
    affine = partition.to_max_affine()
    lo, hi = box.lo.ravel(), box.hi.ravel()
    # Unit-box coordinates and a common affine function taken off: neither moves a cell, both keep Qhull accurate.
    slopes = affine.slopes * (hi - lo)
    offsets = affine.offsets + affine.slopes @ lo
    slopes, offsets = slopes - slopes.mean(axis=0), offsets - offsets.mean()
    scale = max(np.abs(slopes).max(), np.abs(offsets).max(), np.finfo(float).tiny)
    unit = MaxAffine(slopes / scale, offsets / scale)
    neighbours = _neighbours(unit)
    return [lo + (hi - lo) * _clip(unit, j, neighbours[j]) for j in range(unit.num_cells)]


def _neighbours(affine: MaxAffine) -> list[Array]:
    """For each cell the labels that may bound it: all the others when there are few or Qhull declines."""
    n = affine.num_cells
    if n > 8:
        points = np.column_stack([affine.slopes, affine.offsets])
        try:
            # A plane far below keeps the hull three-dimensional; only upper facets matter, extra edges do no harm.
            hull = scipy.spatial.ConvexHull(
                np.vstack([points, [0.0, 0.0, points[:, 2].min() - 4.0]]), qhull_options="Qt"
            )
            near: list[set[int]] = [set() for _ in range(n)]
            for simplex in hull.simplices:
                members = [int(k) for k in simplex if k < n]
                for j in members:
                    near[j].update(members)
            return [np.array(sorted(s - {j}), dtype=int) for j, s in enumerate(near)]
        except scipy.spatial.QhullError:
            pass
    return [np.delete(np.arange(n), j) for j in range(n)]


def _clip(affine: MaxAffine, cell: int, others: Array) -> Array:
    """The unit square cut by `score_cell ≥ score_k` for k in others (Sutherland–Hodgman, exact up to rounding)."""
    if affine.num_cells > 1 and len(others) == 0:
        return np.empty((0, 2))  # strictly below the envelope
    polygon = np.array([[0.0, 0.0], [1.0, 0.0], [1.0, 1.0], [0.0, 1.0]])
    for k in others:
        gap = polygon @ (affine.slopes[cell] - affine.slopes[k]) + (affine.offsets[cell] - affine.offsets[k])
        if (gap >= 0).all() and not ((gap == 0).all() and k < cell):
            continue
        if (gap <= 0).all():
            return np.empty((0, 2))
        following, gap_next = np.roll(polygon, -1, axis=0), np.roll(gap, -1)
        kept: list[Array] = []
        for point, end, g, g_end in zip(polygon, following, gap, gap_next):
            if g >= 0:
                kept.append(point)
            if g * g_end < 0:
                kept.append(point + (end - point) * (g / (g - g_end)))
        polygon = np.array(kept)
    return polygon
