"""Covers of regions by balls whose centers lie in the region, so that f is never evaluated outside of it."""

from __future__ import annotations

import math

import numpy as np
import scipy

from partita.arithmetic.precision import Precision
from partita.arithmetic.progress import Progress, report
from partita.functions.regions import Region, halved
from partita.geometry.covers import Cover
from partita.geometry.domains import Array
from partita.proofs.cover_proof import covering_radius, farthest

__all__ = ["region_cover"]

_MOST_BOXES = 1 << 21
_FINEST = 8  # halvings of a box at the edge before any point near it will do


def region_cover(
    region: Region, radius: float, precision: Precision, *, max_balls: int, progress: Progress | None = None
) -> Cover | None:
    """Balls of this radius around points that the region and the dtype hold exactly; None if that takes more than `max_balls`.

    Boxes of that circumradius are laid over the region. The middle of a box is a center where the region holds it; along the edge a
    point of the region near the box is, unless another ball covers the box already.
    """
    lo, hi = _tiles(region, radius, max_balls)
    if lo is None or hi is None:
        return None
    middle = precision.rounded(0.5 * lo + 0.5 * hi)
    good = region.contains_firmly(middle) & (farthest(lo, hi, middle) <= radius)
    centers, (lo, hi) = middle[good], (lo[~good], hi[~good])
    for _ in range(_FINEST + 1):
        if not len(lo) or len(centers) > max_balls:
            break
        report(progress, "cover", len(centers))
        kept = ~region.outside(lo, hi)
        lo, hi = lo[kept], hi[kept]
        if len(centers):
            near = centers[scipy.spatial.KDTree(centers).query(0.5 * lo + 0.5 * hi)[1]]
            kept = farthest(lo, hi, near) > radius
            lo, hi = lo[kept], hi[kept]
        if not len(lo):
            break
        points = precision.rounded(region.clamp(0.5 * lo + 0.5 * hi))
        useful = region.contains_firmly(points) & (farthest(lo, hi, points) <= radius)
        new, rest = _few(lo[useful], hi[useful], points[useful], radius), ~useful
        centers = np.concatenate([centers, new])
        lo, hi = halved(lo[rest], hi[rest], np.ones(region.dimension))
    if len(centers) > max_balls or not len(centers):
        return None
    reached = covering_radius(region, centers, radius, progress=progress)
    return Cover(centers, np.arange(len(centers)), reached) if reached <= radius * (1 + 1e-12) else None


def _tiles(region: Region, radius: float, max_balls: int) -> tuple[Array | None, Array | None]:
    """Equal boxes of the circumradius that cover the region, found by halving blocks of them; None if they are too many."""
    box, m = region.bounding_box(), region.dimension
    with np.errstate(over="ignore"):
        counts = np.maximum(np.ceil(box.sides * math.sqrt(m) / (2 * radius * (1 - 1e-9))), 1)
    if not np.isfinite(counts).all() or counts.max() > 1 << 30:
        return None, None
    first, last, step = np.zeros((1, m)), counts[None], box.sides / counts
    while True:
        lo = np.where(first == 0, box.lo.ravel(), box.lo.ravel() + first * step)
        hi = np.where(last == counts, box.hi.ravel(), box.lo.ravel() + last * step)
        kept = ~region.outside(lo, hi)
        first, last, lo, hi = first[kept], last[kept], lo[kept], hi[kept]
        if len(first) > min(4 * max_balls + 64, _MOST_BOXES):
            return None, None
        size = last - first
        if size.max(initial=1) <= 1:
            return lo, hi
        axis, rows = size.argmax(axis=1), np.arange(len(first))
        whole = size[rows, axis] > 1
        middle, ends, starts = first + np.ceil(size / 2), last.copy(), first.copy()
        ends[rows[whole], axis[whole]] = starts[rows[whole], axis[whole]] = middle[rows[whole], axis[whole]]
        first, last = np.concatenate([first, starts[whole]]), np.concatenate([ends, last[whole]])


def _few(lo: Array, hi: Array, points: Array, radius: float) -> Array:
    """Some of the points, so that each box is within the radius of one: a point is taken unless those before do."""
    kept: list[int] = []
    for i in range(len(points)):
        if not kept or (farthest(lo[i][None], hi[i][None], points[kept[-64:]]) > radius).all():
            kept.append(i)
    return points[kept]
