"""Few cells of a uniform grid whose affine values fit f: f at each center and at the faces around it, sizes by sampling."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from partita.arithmetic.precision import Precision
from partita.arithmetic.progress import Progress, report
from partita.functions.target import Target
from partita.geometry.domains import Array
from partita.geometry.grid import ProductGrid
from partita.search.averaged_values import Slopes, smallest_scale
from partita.workers import crew

__all__ = ["SHARPNESS", "AffineCells", "affine_blocks", "affine_cells", "smallest_affine_grid"]

SHARPNESS = 4096.0  # κ: a cell is left within a hundredth of its width, so that neighbours' slopes hardly enter
_LISTED_AT_MOST = 1 << 18  # cells whose values are held while a size is looked for
_CELLS_AT_ONCE = 1 << 15
_AIM = 0.88  # of the tolerance, that the sampled error may take


def affine_blocks(
    target: Target, grid: ProductGrid, sloped: NDArray[np.bool_], dtype: torch.dtype, progress: Progress | None = None
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """`affine_cells` of an expression, block after block, as a head of this dtype holds them; workers may share the blocks."""
    parts = [(start, min(start + _CELLS_AT_ONCE, grid.num_cells)) for start in range(0, grid.num_cells, _CELLS_AT_ONCE)]
    shared = target.for_workers(), grid, sloped, Precision.of(dtype).name
    for (_, stop), raw in zip(parts, crew().spread(_block_of_cells, shared, parts, progress)):
        values, slopes = (torch.from_numpy(part).view(dtype) for part in raw)
        yield values.reshape(-1, target.num_outputs), slopes.reshape(-1, target.num_outputs, grid.dimension)
        report(progress, "values", stop, grid.num_cells)


def _block_of_cells(
    shared: tuple[Target, ProductGrid, NDArray[np.bool_], str], part: tuple[int, int], _: Progress | None
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """The values and the slopes of some cells as bytes."""
    target, grid, sloped, name = shared
    values, slopes = (
        torch.from_numpy(numbers).to(getattr(torch, name)).contiguous().reshape(-1).view(torch.uint8).numpy()
        for numbers in affine_cells(target, grid, sloped, np.arange(*part))
    )
    return values, slopes


def affine_cells(
    target: Target,
    grid: ProductGrid,
    sloped: NDArray[np.bool_] | None = None,
    cells: NDArray[np.int64] | None = None,
) -> tuple[Array, Array]:
    """Values at the middle of the box and slopes of the affine function of each cell, from f at its center and at its faces.

    `J_i = (f₊ − f₋)/h_i`; half of the second differences is added to the value, which centres the residual of a parabola.
    `sloped`, `(m,)`: the axes that have slopes, all by default. `cells`: the labels of those that are wanted, all by default.
    """
    centers = grid.centers_of(np.arange(grid.num_cells) if cells is None else cells)
    spacing = grid.box.sides / np.array(grid.counts)
    lo, hi = grid.box.lo.ravel(), grid.box.hi.ravel()
    here = target(centers)
    values, slopes = here.copy(), np.zeros((*here.shape, grid.dimension))
    for i, h in enumerate(spacing):
        left, right = centers.copy(), centers.copy()
        left[:, i] = np.maximum(centers[:, i] - h / 2, lo[i])
        right[:, i] = np.minimum(centers[:, i] + h / 2, hi[i])
        below, above = target(left), target(right)
        if sloped is None or sloped[i]:
            slopes[:, :, i] = (above - below) / (right - left)[:, i, None]
        values += ((above + below) / 2 - here) / 2
    origin = (lo + hi) / 2
    return values - np.einsum("jom,jm->jo", slopes, centers - origin), slopes


@dataclass(frozen=True, eq=False)
class AffineCells:
    """A uniform grid with affine values, and the largest error seen at test points.

    `is_whole`: whether values and slopes are those of all cells; otherwise those of the cells that were looked at.
    """

    counts: tuple[int, ...]
    rates: tuple[float, ...]
    values: Array
    slopes: Array
    error_estimate: float
    is_whole: bool = True


@np.errstate(all="ignore")  # numbers out of range end in a refusal
def smallest_affine_grid(
    target: Target,
    slopes: Slopes,
    *,
    tolerance: float,
    storage: type[np.floating[Any]],
    max_cells: int,
    sloped: NDArray[np.bool_],
    progress: Progress | None = None,
) -> AffineCells | str:
    """The fewest cells of a uniform grid whose affine values meet the tolerance at test points, or why there are none.

    Values have slopes along the `sloped` axes alone, `(m,)`. Along the others the error is of first order.
    """
    box = target.box
    test = np.concatenate([box.sample(4096, np.random.default_rng(11)), box.corners(256)])
    need = slopes.cells_needed(box, tolerance, sloped)

    def at(scale: float) -> AffineCells | None:
        counts = tuple(np.maximum(np.ceil(scale * need), 1).astype(int).tolist())
        if math.prod(counts) > max_cells:
            return None
        report(progress, f"trying {' × '.join(map(str, counts))} cells")
        rates = Precision.of(np.dtype(storage)).rates(SHARPNESS, box.sides / np.array(counts))
        grid = ProductGrid.uniform(box, counts, dtype=storage)
        cells, points = _corners_of_cells(grid)
        cells, points = np.concatenate([cells, grid.cell(test)]), np.concatenate([points, test])
        wanted = None if grid.num_cells <= _LISTED_AT_MOST else np.unique(cells)
        values, tilts = affine_cells(target, grid, sloped, wanted)
        rows = cells if wanted is None else np.searchsorted(wanted, cells)
        origin = (box.lo.ravel() + box.hi.ravel()) / 2
        got = values[rows] + np.einsum("jom,jm->jo", tilts[rows], points - origin)
        error = np.abs(got - target(points)).max()
        return AffineCells(counts, tuple(rates.tolist()), values, tilts, float(error), wanted is None)

    return smallest_scale(at, _AIM * tolerance, max_cells)


def _corners_of_cells(grid: ProductGrid, most: int = 1 << 14) -> tuple[np.ndarray, Array]:
    """Labels of cells and a corner of each, `(n, m)`: where an affine function is farthest from f."""
    rng = np.random.default_rng(13)
    cells = np.arange(grid.num_cells) if grid.num_cells <= most else rng.integers(grid.num_cells, size=most)
    cells = np.repeat(cells, max(1, min(2**grid.dimension, most // len(cells))))
    half = grid.box.sides / np.array(grid.counts) / 2
    corners = grid.centers_of(cells) + half * rng.choice([-1.0, 1.0], (len(cells), grid.dimension))
    return cells, grid.box.clamp(corners)
