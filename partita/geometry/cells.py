"""Exact cells of a partition inside a box: intervals in 1-D, polygons in 2-D, and the cells that a slice meets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import combinations

import numpy as np
import scipy

from partita.errors import UnsupportedError
from partita.geometry.domains import Array, Box
from partita.geometry.partitions import MaxAffine, Partition, PowerDiagram

__all__ = ["intervals", "polygons", "sliced", "touching"]

_SAME_CORNER = 1e-6  # of the whole picture: corners of neighbouring polygons differ by roundings


def sliced(partition: Partition, axes: Sequence[int], at: Array) -> PowerDiagram:
    """The cells on the slice where only the coordinates `axes` vary and the others are those of `at`, `(m,)`.

    They are the power diagram of the projected centers with powers `p_j − Σ_rest (at − c_j)²`.
    """
    diagram = partition.to_power_diagram()
    rest = [k for k in range(partition.dimension) if k not in axes]
    away = np.asarray(at)[rest] - diagram.centers[:, rest]
    return PowerDiagram(diagram.centers[:, list(axes)], diagram.powers - (away * away).sum(axis=1))


def intervals(partition: Partition, box: Box) -> Array:
    """The cells of a 1-D partition inside the box, `(cells, 2)`: the two ends of each. Cells that miss the box are NaN."""
    if partition.dimension != 1 or box.dimension != 1:
        raise UnsupportedError(
            f"intervals are cells of R^1; this partition is in R^{partition.dimension}. Slice it first."
        )
    lo, hi = box.lo.ravel(), box.hi.ravel()
    unit = _on_unit_box(partition, lo, hi)
    ends = np.empty((unit.num_cells, 2))
    for j in range(unit.num_cells):
        rise, lead = unit.slopes[j, 0] - unit.slopes[:, 0], unit.offsets[j] - unit.offsets
        rising, falling, equal = rise > 0, rise < 0, rise == 0  # cell j is where rise·t + lead ≥ 0 for every rival
        first = (-lead[rising] / rise[rising]).max(initial=0.0)
        last = (-lead[falling] / rise[falling]).min(initial=1.0)
        beaten = (lead[equal] < 0).any() or (lead[:j][equal[:j]] == 0).any()
        ends[j] = (np.nan, np.nan) if beaten or not first < last else (first, last)
    return np.asarray(lo + (hi - lo) * ends)


def polygons(partition: Partition, box: Box) -> list[Array]:
    """The cells inside the box, one `(k, 2)` counter-clockwise polygon per cell; cells that miss the box are `(0, 2)`.

    The graph of `max_j (a_j·x + b_j)` is the upper envelope of planes, a convex polyhedron; Qhull finds which planes
    touch (dual hull of the points (a_j, b_j)), and each cell is clipped by its neighbours only.
    """
    if partition.dimension != 2 or box.dimension != 2:
        raise UnsupportedError(
            f"polygons are drawn in R^2; this partition is in R^{partition.dimension}. Slice it first."
        )
    lo, hi = box.lo.ravel(), box.hi.ravel()
    unit = _on_unit_box(partition, lo, hi)
    neighbours = _neighbours(unit)
    return [lo + (hi - lo) * _clip(unit, j, neighbours[j]) for j in range(unit.num_cells)]


def touching(shapes: Sequence[Array]) -> list[set[int]]:
    """For each polygon of `polygons` the numbers of those that share an edge with it: two corners, up to rounding.

    >>> import partita as pa
    >>> from partita.geometry.cells import polygons, touching
    >>> touching(polygons(pa.PowerDiagram([[0.2, 0.5], [0.5, 0.5], [0.8, 0.5]]), pa.Box([0, 0], [1, 1])))
    [{1}, {0, 2}, {1}]
    """
    near: list[set[int]] = [set() for _ in shapes]
    owners = np.repeat(np.arange(len(shapes)), [len(shape) for shape in shapes])
    if not len(owners):
        return near
    corners = np.concatenate(shapes)
    size = corners.max(axis=0) - corners.min(axis=0)
    pairs = scipy.spatial.KDTree(corners / np.where(size > 0, size, 1.0)).query_pairs(
        _SAME_CORNER, output_type="ndarray"
    )
    joined = scipy.sparse.coo_array((np.ones(len(pairs)), pairs.T), shape=(len(corners),) * 2)
    _, corner = scipy.sparse.csgraph.connected_components(joined, directed=False)
    meeting: dict[int, set[int]] = {}
    for number, owner in zip(corner.tolist(), owners.tolist()):
        meeting.setdefault(number, set()).add(owner)
    shared = Counter(pair for cells in meeting.values() for pair in combinations(sorted(cells), 2))
    for (one, other), count in shared.items():
        if count >= 2:
            near[one].add(other)
            near[other].add(one)
    return near


def _on_unit_box(partition: Partition, lo: Array, hi: Array) -> MaxAffine:
    """The same cells in coordinates in which the box is [0, 1]^m, the scores scaled and a common affine function taken off.

    Neither moves a cell, both keep Qhull accurate. Centers are shifted before they are squared: far from the origin the
    offsets of a max-affine function have lost the digits that tell neighbours apart.
    """
    if isinstance(partition, MaxAffine):
        slopes, offsets = partition.slopes, partition.offsets + partition.slopes @ lo
    else:
        diagram = partition.to_power_diagram()
        slopes = diagram.centers - lo
        offsets = (diagram.powers - (slopes * slopes).sum(axis=1)) / 2
    slopes = slopes * (hi - lo)
    slopes, offsets = slopes - slopes.mean(axis=0), offsets - offsets.mean()
    scale = max(np.abs(slopes).max(), np.abs(offsets).max(), np.finfo(float).tiny)
    return MaxAffine(slopes / scale, offsets / scale)


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
