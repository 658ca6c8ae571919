"""The product-grid sum as native loops (extra: `fast`): the torch path's arithmetic without its temporaries.

Queries go in blocks, and every inner loop runs over the queries of a block: the compiler makes vector instructions of
the window search and of the softmax weights, exponential included, and the reads of the values need not wait for each
other. Where windows cover much of the grid (`whole`), every query reads the same values, so that one load serves the
block. Either way axis after axis is summed: an output passes through `Σ_i width_i` additions, not `Π_i width_i`.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from partita.kernels import native
from partita.kernels.grid_torch import GridOperands, prefers_whole
from partita.kernels.native import Floats

__all__ = ["grid_sum"]

_BLOCK = 128  # queries whose weights are held at once
_BLOCK_ENTRIES = 1 << 15  # window rows held at once: wide windows get smaller blocks
_BLOCK_WHOLE = 256  # the same where all queries of a block read the same values

# centers, firsts, counts, rates, widths
Axes = tuple[Floats, NDArray[np.int64], NDArray[np.int64], Floats, NDArray[np.int64]]
Tables = tuple[Floats, Floats, Floats]  # values, slopes, origin


def grid_sum(points: Tensor, grid: GridOperands) -> Tensor:
    """`out[n, o] = Σ_cells Π_i softmax_i(x_n)·(values[cell, o] + slopes[cell, o]·(x_n − origin))` over each point's window.

    All tensors are on the CPU and of one dtype, float64 or float32.
    """
    x, axes, tables = _array(points), _axes(grid), _tables(grid)
    out = np.empty((len(x), grid.values.shape[1]), x.dtype)
    whole = prefers_whole("native", grid.counts, grid.widths)
    sum_part = _sum_whole if whole else _sum_windows
    native.compiled_once(("grid", x.dtype, whole), lambda: sum_part(x[:1], axes, tables, out[:1]))
    native.in_parts(len(x), lambda part: sum_part(x[part], axes, tables, out[part]))
    return torch.from_numpy(out)


def _array(tensor: Tensor) -> Floats:
    return np.ascontiguousarray(tensor.detach().numpy())


def _axes(grid: GridOperands) -> Axes:
    counts = np.array(grid.counts, dtype=np.int64)
    centers = [_array(c) for c in grid.centers]
    return (
        centers[0] if len(centers) == 1 else np.concatenate(centers),  # one axis may be as long as the values: no copy
        np.concatenate([[0], np.cumsum(counts)[:-1]]),
        counts,
        _array(grid.rates) * grid.rates.detach().numpy().dtype.type(0.5),
        np.array(grid.widths, dtype=np.int64),
    )


def _tables(grid: GridOperands) -> Tables:
    values = _array(grid.values)
    none = np.empty(0, values.dtype)
    slopes, origin = (none if t is None else _array(t) for t in (grid.slopes, grid.origin))
    return values.reshape(-1), slopes.reshape(-1), origin


def _sum_windows(points: Floats, axes: Axes, tables: Tables, out: Floats) -> None:
    from partita.kernels.grid_loops import sum_windows

    _, _, counts, _, widths = axes
    rows = np.zeros(1, np.int64)
    for count, width in zip(counts[:-1], widths[:-1]):
        rows = (rows[:, None] * count + np.arange(width)).ravel()
    scratch = _Scratch(points, out, tables, max(8, min(_BLOCK, _BLOCK_ENTRIES // len(rows))))
    weights, sums = scratch.floats(len(counts), int(widths.max())), scratch.floats(len(rows))
    vectors = np.empty((len(rows), max(out.shape[1], scratch.tilts.shape[1])), out.dtype)
    lines = scratch.floats(2), scratch.integers
    sum_windows(points, axes, rows * counts[-1], *tables, *lines, weights, sums, vectors, scratch.tilts, out)


def _sum_whole(points: Floats, axes: Axes, tables: Tables, out: Floats) -> None:
    from partita.kernels.grid_loops import sum_whole

    counts = axes[2]
    scratch = _Scratch(points, out, tables, _BLOCK_WHOLE)
    weights, sums = scratch.floats(len(counts), int(counts.max())), scratch.floats(len(counts) + 1)
    sum_whole(points, axes, *tables, scratch.floats(2), scratch.integers, weights, sums, scratch.tilts, out)


class _Scratch:
    """Arrays that the loops work in, for blocks of at most so many queries."""

    def __init__(self, points: Floats, out: Floats, tables: Tables, block: int) -> None:
        self.block, self.dtype = max(1, min(block, len(points))), points.dtype
        self.integers = np.empty((2, self.block), np.int64)
        slopes = self.block if len(tables[1]) else 0
        self.tilts = np.empty((slopes, out.shape[1] * points.shape[1]), points.dtype)

    def floats(self, *shape: int) -> Floats:
        return np.empty((*shape, self.block), self.dtype)
