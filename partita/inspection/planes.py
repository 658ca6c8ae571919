"""A plane through a head's query space: the cells and margins on it, and the queries projected onto it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from partita.errors import ShapeError, UnsupportedError
from partita.geometry.cells import polygons
from partita.geometry.domains import Array, Box
from partita.geometry.partitions import MaxAffine
from partita.inspection.reading import read_queries
from partita.inspection.snapshots import Snapshot, require_snapshot

__all__ = ["PlaneView", "view"]

Plane = str | tuple[int, int] | tuple[ArrayLike, ArrayLike, ArrayLike]


@dataclass(frozen=True, eq=False)
class PlaneView:
    """A head on a plane of its query space: what a figure shows.

    Attributes:
        partition: the head's max-affine function on the plane, exact: `x = origin + s·axes[0] + t·axes[1]`; of the keys that some
            query sees.
        keys: the labels of these keys.
        origin: a point of the plane, `(dim,)`.
        axes: two orthonormal directions, `(2, dim)`.
        window: the part of the plane that is shown.
        shapes: per key its cell inside the window as a polygon, `(k, 2)`; empty if it misses the window.
        margins: largest minus second largest score on a grid of the window, `(pixels, pixels)`, rows along t.
        points: the queries projected onto the plane, `(queries, 2)`.
        cells: the cell of each query in the whole space, `(queries,)`.
        held: the share of the queries' variance that lies in the plane; 1 if all queries lie on it.
        named: a description of the plane.
    """

    partition: MaxAffine
    keys: NDArray[np.int64]
    origin: Array
    axes: Array
    window: Box
    shapes: tuple[Array, ...]
    margins: Array
    points: Array
    cells: NDArray[np.int64]
    held: float
    named: str


def view(snapshot: Snapshot, *, plane: Plane = "principal", pixels: int = 96, position: int | None = None) -> PlaneView:
    """The head on a plane of its query space.

    Queries off the plane are projected onto it, so a query may belong to a different cell than the one drawn beneath it. Its
    colour shows its own cell.

    Args:
        snapshot: one sequence of one head.
        plane: "principal": through the mean of the queries along their two directions of largest variance. `(i, j)`: along two
            free coordinates through the mean. `(origin, u, v)`: vectors of the free coordinates.
        pixels: resolution of the margins along each axis.
        position: row of the query whose diagram is shown, if the bias depends on the position; the last one by default.

    Returns:
        A `PlaneView`.

    Raises:
        UnsupportedError: snapshot is not a `Snapshot`, plane is not one of these, or the query sees no key.
        ShapeError: the plane's vectors have the wrong dimension.

    >>> import torch, partita as pa
    >>> attention = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval()
    >>> with pa.inspect.capture(attention) as heads, torch.no_grad():
    ...     _ = attention(*[torch.randn(1, 5, 8)] * 3)
    >>> pa.inspect.view(next(iter(heads)).snapshots[0], pixels=16).margins.shape
    (16, 16)
    """
    require_snapshot(snapshot)
    if position is None and len(snapshot.counted) and snapshot.offsets is None:
        position = int(snapshot.counted[-1])
    whole, queries = snapshot.max_affine(position), snapshot.points
    origin, axes, named = _place(plane, queries, whole)
    keys = _shown(snapshot, position)
    slopes = whole.slopes[keys]
    flat = MaxAffine(slopes @ axes.T, whole.offsets[keys] + slopes @ origin)
    points = (queries - origin) @ axes.T
    window = _window(points)
    s, t = (np.linspace(a, b, pixels) for a, b in zip(window.lo, window.hi))
    across = np.stack([g.ravel() for g in np.meshgrid(s, t)], axis=1)
    spread = float(((queries - queries.mean(axis=0)) ** 2).sum())
    on_it = float(((points - points.mean(axis=0)) ** 2).sum())
    shapes = [np.empty((0, 2))] * len(whole.slopes)
    for key, shape in zip(keys, polygons(flat, window)):
        shapes[key] = shape
    return PlaneView(
        flat,
        keys,
        origin,
        axes,
        window,
        tuple(shapes),
        flat.margin(across).reshape(pixels, pixels),
        points,
        read_queries(snapshot).cells,
        on_it / spread if spread else 1.0,
        named if position is None else f"{named}, scored as query {position}",
    )


def _shown(snapshot: Snapshot, position: int | None) -> NDArray[np.int64]:
    """The keys that take part: padding that nobody sees has no cell."""
    seen = snapshot.active[snapshot.counted].any(axis=0) if position is None else snapshot.active[position]
    if not seen.any():
        raise UnsupportedError(
            f"query {position} sees no key, so there is no partition to show; choose another position."
        )
    return np.flatnonzero(seen)


def _place(plane: Plane, queries: Array, whole: MaxAffine) -> tuple[Array, Array, str]:
    """Origin, two orthonormal axes (the second 0 in one dimension), and words."""
    d, middle = whole.dimension, queries.mean(axis=0)
    if isinstance(plane, str):
        if plane != "principal":
            raise UnsupportedError(f"plane is {plane!r}; expected 'principal', two coordinates, or (origin, u, v).")
        about = queries - middle
        if not about.any():
            about = whole.slopes - whole.slopes.mean(axis=0)  # one query: the keys say where to look
        axes = np.linalg.svd(about, full_matrices=True)[2][:2] if d > 1 else np.ones((1, 1))
        axes = axes * np.where(axes[np.arange(len(axes)), np.abs(axes).argmax(axis=1)] < 0, -1.0, 1.0)[:, None]
        return middle, _two(axes, d), "principal plane of the queries"
    if len(plane) == 2:
        i, j = (int(c) for c in plane)
        if not (0 <= i < d and 0 <= j < d and i != j):
            raise UnsupportedError(f"plane is {plane} in R^{d}; expected two different coordinates, counted from 0.")
        return middle, np.eye(d)[[i, j]], f"coordinates {i} and {j}"
    origin, *directions = (np.asarray(v, dtype=np.float64) for v in plane)
    if origin.shape != (d,) or any(v.shape != (d,) for v in directions):
        raise ShapeError(
            f"the plane's vectors have shapes {[v.shape for v in (origin, *directions)]}; expected three of ({d},)."
        )
    axes, sizes = np.linalg.qr(np.stack(directions, axis=1))
    if np.abs(np.diag(sizes)).min() <= 1e-12 * max(np.abs(sizes).max(), 1e-300):
        raise UnsupportedError("the plane's directions are parallel or zero; expected two independent vectors.")
    return origin, (axes * np.sign(np.diag(sizes))).T, "chosen plane"


def _two(axes: Array, dimension: int) -> Array:
    return axes if len(axes) == 2 else np.vstack([axes, np.zeros(dimension)])


def _window(points: Array) -> Box:
    """Around the points, with a tenth to spare; as high as wide if they lie on a line."""
    lo, hi = points.min(axis=0), points.max(axis=0)
    side = hi - lo
    side = np.where(side > 1e-9 * side.max(), side, side.max() or 2.0)
    middle = (lo + hi) / 2
    return Box(middle - 0.6 * side, middle + 0.6 * side)
