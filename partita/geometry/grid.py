"""Product grids: centers `c_{k₁} × … × c_{k_m}`, one list per axis, optionally with ghosts beyond the domain."""

from __future__ import annotations

import math
from dataclasses import dataclass
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
    """Rounding to the dtype must not carry a center out of the domain, where nobody may ask f."""
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
    """The Voronoi partition of a product of sorted center lists over a box: cells are boxes.

    `ProductGrid.uniform(box, counts, ghosts)` puts `P_i` centers on axis i, `g_i` of them beyond each end, at
    `lo_i + h_i(k − g_i + ½)`, `h_i = side_i/(P_i − 2g_i)`. (Definition B.1 prints the cells' corners instead:
    erratum 3.) Cells are numbered row-major, the last axis fastest. With an inverse temperature R_i per axis the softmax
    weights of all `ΠP_i` cells factorise into one softmax per axis.

    Args:
        box: the domain.
        axes: sorted centers, one array per flat coordinate.
    """

    box: Box
    axes: tuple[Array, ...]

    def __post_init__(self) -> None:
        axes = tuple(frozen_array(a) for a in self.axes)
        object.__setattr__(self, "axes", axes)
        if len(axes) != self.box.dimension or any(a.ndim != 1 or a.size == 0 for a in axes):
            raise ShapeError(
                f"a grid over R^{self.box.dimension} needs that many non-empty center lists, found {len(axes)}."
            )

    @classmethod
    def uniform(
        cls, box: Box, counts: ArrayLike, *, ghosts: ArrayLike = 0, dtype: type[np.floating] = np.float64
    ) -> ProductGrid:
        """`counts` centers per axis, ghosts included, each rounded to `dtype` so that a head in that dtype stores it exactly."""
        p = np.broadcast_to(np.asarray(counts, dtype=np.int64), box.dimension)
        g = np.broadcast_to(np.asarray(ghosts, dtype=np.int64), box.dimension)
        if (p < 1).any() or (g < 0).any() or (p - 2 * g < 1).any():
            raise DomainError(
                f"grid counts {p.tolist()} with {g.tolist()} ghosts on each side leave an axis without cells."
            )
        spacing = box.sides / (p - 2 * g)
        axes = []
        for lo, hi, h, count, ghost in zip(box.lo.ravel(), box.hi.ravel(), spacing, p, g):
            centers = (lo + h * (np.arange(count) - ghost + 0.5)).astype(dtype).astype(np.float64)
            axes.append(_kept_inside(centers, lo, hi, int(ghost), dtype))
        return cls(box, tuple(axes))

    @property
    def dimension(self) -> int:
        return len(self.axes)

    @property
    def counts(self) -> tuple[int, ...]:
        """P_i, ghosts included."""
        return tuple(len(a) for a in self.axes)

    @property
    def num_cells(self) -> int:
        return math.prod(self.counts)

    @cached_property
    def geometry(self) -> tuple[AxisGeometry, ...]:
        return tuple(
            AxisGeometry.of(a, lo, hi) for a, lo, hi in zip(self.axes, self.box.lo.ravel(), self.box.hi.ravel())
        )

    @property
    def covering_radius(self) -> float:
        """The farthest that a point of the box is from its nearest center: `√Σ(h_i/2)²`, rounded up."""
        return float(up(math.sqrt(math.fsum(g.covering_radius**2 for g in self.geometry)), 4))

    def scores(self, points: ArrayLike) -> Array:
        """`−|x − c_j|²/2` for every cell, `(n, cells)`."""
        array = points_in(points, self.dimension)
        total = np.zeros((len(array), 1))
        for i, centers in enumerate(self.axes):
            term = -0.5 * (array[:, i, None] - centers) ** 2
            total = (total[:, :, None] + term[:, None, :]).reshape(len(array), -1)
        return total

    def locate(self, points: ArrayLike) -> NDArray[np.int64]:
        """The nearest center's index on every axis, `(n, m)`, without looking at other cells."""
        array = points_in(points, self.dimension)
        middles = [(a[1:] + a[:-1]) / 2 for a in self.axes]
        return np.stack([np.searchsorted(mid, array[:, i], side="left") for i, mid in enumerate(middles)], axis=1)

    def cell(self, points: ArrayLike) -> NDArray[np.int64]:
        """Row-major labels, axis by axis: the time does not grow with the cells."""
        out: NDArray[np.int64] = np.ravel_multi_index(tuple(self.locate(points).T), self.counts)
        return out

    def margin(self, points: ArrayLike) -> Array:
        """The least gap between the two best scores of an axis: moving to the second best center changes one axis only."""
        array = points_in(points, self.dimension)
        smallest = np.full(len(array), np.inf)
        for i, (centers, nearest) in enumerate(zip(self.axes, self.locate(points).T)):
            if len(centers) > 1:
                sides = np.stack([np.maximum(nearest - 1, 0), np.minimum(nearest + 1, len(centers) - 1)])
                squares = np.where(sides == nearest, np.inf, (array[:, i] - centers[sides]) ** 2)
                smallest = np.minimum(smallest, (squares.min(axis=0) - (array[:, i] - centers[nearest]) ** 2) / 2)
        return smallest

    def centers_of(self, cells: ArrayLike) -> Array:
        """The centers of the cells with these row-major labels, `(n, m)`."""
        index = np.unravel_index(np.asarray(cells, dtype=np.int64), self.counts)
        return np.stack([a[k] for a, k in zip(self.axes, index)], axis=-1)

    def to_power_diagram(self) -> PowerDiagram:
        if self.num_cells * self.dimension > _LISTED_AT_MOST:
            raise SizeError(
                f"listing {self.num_cells:,} centers in R^{self.dimension} needs "
                f"{8 * self.num_cells * self.dimension / 2**30:.1f} GiB; "
                "use the grid's axes, which say the same in a few numbers."
            )
        return PowerDiagram(self.centers_of(np.arange(self.num_cells)))

    def to_max_affine(self) -> MaxAffine:
        return self.to_power_diagram().to_max_affine()
