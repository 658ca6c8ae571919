"""Product grids: centers `c_{k₁} × … × c_{k_m}`, one list per axis, optionally with ghosts beyond the domain."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from partita.arithmetic.rounding import up
from partita.errors import DomainError, ShapeError, SizeError
from partita.geometry.domains import Array, Box, frozen_array
from partita.geometry.moments import AxisGeometry
from partita.geometry.partitions import MaxAffine, Partition, PowerDiagram, points_in

__all__ = ["ProductGrid"]

_LISTED_AT_MOST = 1 << 27  # scalars that a method which lists every center may allocate


def _kept_inside(centers: Array, lo: float, hi: float, ghosts: int, dtype: type[np.floating]) -> Array:
    """Moves centers that rounding to the dtype carried out of the domain back into it: f may be undefined outside."""
    first, last = dtype(lo), dtype(hi)
    first = np.nextafter(first, dtype(np.inf)) if first < lo else first
    last = np.nextafter(last, dtype(-np.inf)) if last > hi else last
    own = centers[ghosts : len(centers) - ghosts]
    np.clip(own, float(first), float(last), out=own)
    if first > last:
        raise DomainError(
            f"no {np.dtype(dtype).name} number lies in [{lo!r}, {hi!r}]; use float64, or shift the variable towards 0."
        )
    return centers


@dataclass(frozen=True, eq=False, repr=False)
class ProductGrid(Partition):
    """The Voronoi partition of a product of sorted center lists over a box: every cell is a box.

    `ProductGrid.uniform(box, counts, ghosts=g)` puts `P_i` centers on axis i, `g_i` of them beyond each end, at
    `lo_i + h_i(k − g_i + ½)` with `h_i = side_i/(P_i − 2g_i)`. (Definition B.1 prints the cells' corners instead:
    erratum 3.) Cells are numbered row-major, the last axis fastest. With an inverse temperature R_i per axis the
    softmax over all `ΠP_i` cells is a product of one softmax per axis.

    Args:
        box: the domain.
        axes: sorted centers, one array `(P_i,)` per flat coordinate.

    Raises:
        ShapeError: the number of lists is not the dimension of the box, or a list is empty.

    >>> import partita as pa
    >>> grid = pa.ProductGrid(pa.Box([0, 0], [1, 1]), (np.array([0.25, 0.75]), np.array([0.5])))
    >>> grid.num_cells, grid.cell([[0.9, 0.1]]).tolist()
    (2, [1])
    """

    box: Box
    axes: tuple[Array, ...]
    counts: tuple[int, ...] = field(init=False)  # P_i, ghosts included
    dimension: int = field(init=False)
    num_cells: int = field(init=False)

    def __post_init__(self) -> None:
        axes = tuple(frozen_array(a) for a in self.axes)
        object.__setattr__(self, "axes", axes)
        object.__setattr__(self, "counts", tuple(map(len, axes)))
        object.__setattr__(self, "dimension", len(axes))
        object.__setattr__(self, "num_cells", math.prod(self.counts))
        if len(axes) != self.box.dimension or any(a.ndim != 1 or a.size == 0 for a in axes):
            raise ShapeError(
                f"ProductGrid: found {len(axes)} center lists; expected {self.box.dimension}, one non-empty list per axis."
            )

    @classmethod
    def uniform(
        cls, box: Box, counts: ArrayLike, *, ghosts: ArrayLike = 0, dtype: type[np.floating] = np.float64
    ) -> ProductGrid:
        """A grid of equally spaced centers.

        Args:
            box: the domain.
            counts: centers per axis, ghosts included: one number, or one per axis `(m,)`.
            ghosts: centers beyond each end of an axis: one number, or one per axis `(m,)`.
            dtype: numpy float type. Centers are rounded to it, so that a head of that dtype stores them exactly.

        Raises:
            DomainError: an axis has no cell inside the box, or the dtype has no number there.

        >>> ProductGrid.uniform(Box([0.0], [1.0]), 2).axes[0].tolist()
        [0.25, 0.75]
        """
        p = np.broadcast_to(np.asarray(counts, dtype=np.int64), box.dimension)
        g = np.broadcast_to(np.asarray(ghosts, dtype=np.int64), box.dimension)
        if (p < 1).any() or (g < 0).any() or (p - 2 * g < 1).any():
            raise DomainError(
                f"ProductGrid: counts {p.tolist()} with {g.tolist()} ghosts on each side leave no cell on some axis; "
                "expected counts of at least 2·ghosts + 1."
            )
        spacing = box.sides / (p - 2 * g)
        axes = []
        for lo, hi, h, count, ghost in zip(box.lo.ravel(), box.hi.ravel(), spacing, p, g):
            centers = (lo + h * (np.arange(count) - ghost + 0.5)).astype(dtype).astype(np.float64)
            axes.append(_kept_inside(centers, lo, hi, int(ghost), dtype))
        return cls(box, tuple(axes))

    @cached_property
    def geometry(self) -> tuple[AxisGeometry, ...]:
        """Spacing and covering radius of every axis, one `AxisGeometry` each."""
        return tuple(
            AxisGeometry.of(a, lo, hi) for a, lo, hi in zip(self.axes, self.box.lo.ravel(), self.box.hi.ravel())
        )

    @property
    def covering_radius(self) -> float:
        """The largest distance of a point of the box from its nearest center: `√Σ(h_i/2)²`, rounded up.

        >>> 0.25 <= ProductGrid.uniform(Box([0.0], [1.0]), 2).covering_radius < 0.250001
        True
        """
        return float(up(math.sqrt(math.fsum(g.covering_radius**2 for g in self.geometry)), 4))

    def scores(self, points: ArrayLike) -> Array:
        """`−|x − c_j|²/2` for every cell, `(n, cells)`.

        Args:
            points: `(n, m)`.

        >>> ProductGrid.uniform(Box([0.0], [4.0]), 2).scores([[1.0]]).tolist()
        [[0.0, -2.0]]
        """
        array = points_in(points, self.dimension)
        total = np.zeros((len(array), 1))
        for i, centers in enumerate(self.axes):
            term = -0.5 * (array[:, i, None] - centers) ** 2
            total = (total[:, :, None] + term[:, None, :]).reshape(len(array), -1)
        return total

    def locate(self, points: ArrayLike) -> NDArray[np.int64]:
        """The index of the nearest center on every axis, `(n, m)`. The time does not grow with the number of cells.

        Args:
            points: `(n, m)`.

        >>> ProductGrid.uniform(Box([0, 0], [1, 1]), [2, 3]).locate([[0.9, 0.5]]).tolist()
        [[1, 1]]
        """
        array = points_in(points, self.dimension)
        middles = [(a[1:] + a[:-1]) / 2 for a in self.axes]
        return np.stack([np.searchsorted(mid, array[:, i], side="left") for i, mid in enumerate(middles)], axis=1)

    def cell(self, points: ArrayLike) -> NDArray[np.int64]:
        """The row-major label of each point's cell, `(n,)`. The time does not grow with the number of cells.

        Args:
            points: `(n, m)`.

        >>> ProductGrid.uniform(Box([0, 0], [1, 1]), [2, 3]).cell([[0.9, 0.5]]).tolist()
        [4]
        """
        out: NDArray[np.int64] = np.ravel_multi_index(tuple(self.locate(points).T), self.counts)
        return out

    def margin(self, points: ArrayLike) -> Array:
        """Largest minus second largest score, `(n,)`: the smallest such gap over the axes, because the second best cell
        differs from the best on one axis only.

        Args:
            points: `(n, m)`.

        >>> ProductGrid.uniform(Box([0.0], [4.0]), 2).margin([[1.0]]).tolist()
        [2.0]
        """
        array = points_in(points, self.dimension)
        smallest = np.full(len(array), np.inf)
        for i, (centers, nearest) in enumerate(zip(self.axes, self.locate(points).T)):
            if len(centers) > 1:
                sides = np.stack([np.maximum(nearest - 1, 0), np.minimum(nearest + 1, len(centers) - 1)])
                squares = np.where(sides == nearest, np.inf, (array[:, i] - centers[sides]) ** 2)
                smallest = np.minimum(smallest, (squares.min(axis=0) - (array[:, i] - centers[nearest]) ** 2) / 2)
        return smallest

    def centers_of(self, cells: ArrayLike) -> Array:
        """The centers of cells, `(n, m)`.

        Args:
            cells: row-major labels, `(n,)`.

        >>> ProductGrid.uniform(Box([0.0], [1.0]), 2).centers_of([1]).tolist()
        [[0.75]]
        """
        index = np.unravel_index(np.asarray(cells, dtype=np.int64), self.counts)
        return np.stack([a[k] for a, k in zip(self.axes, index)], axis=-1)

    def to_power_diagram(self) -> PowerDiagram:
        """The same cells as a power diagram with every center listed.

        Raises:
            SizeError: the list would take more than 1 GiB.

        >>> ProductGrid.uniform(Box([0, 0], [1, 1]), 3).to_power_diagram()
        PowerDiagram(9 cells in R^2)
        """
        if self.num_cells * self.dimension > _LISTED_AT_MOST:
            raise SizeError(
                f"listing {self.num_cells:,} centers in R^{self.dimension} needs "
                f"{8 * self.num_cells * self.dimension / 2**30:.1f} GiB; "
                "use grid.axes instead, which holds the same centers axis by axis."
            )
        return PowerDiagram(self.centers_of(np.arange(self.num_cells)))

    def to_max_affine(self) -> MaxAffine:
        """The same cells as a max-affine function with every slope listed.

        Raises:
            SizeError: the list would take more than 1 GiB.

        >>> ProductGrid.uniform(Box([0, 0], [1, 1]), 3).to_max_affine()
        MaxAffine(9 cells in R^2)
        """
        return self.to_power_diagram().to_max_affine()
