"""The product-grid sum as native loops (extra: `fast`): the torch path's arithmetic without its temporaries.

Queries go in blocks, and every inner loop runs over the queries of a block: the compiler makes vector instructions of
the window search and of the softmax weights, exponential included, and the reads of the values need not wait for each
other. Where windows cover much of the grid (`whole`), every query reads the same values, so that one load serves the
block. Either way axis after axis is summed: an output passes through `Σ_i width_i` additions, not `Π_i width_i`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from partita.kernels import native
from partita.kernels.grid_torch import GridOperands, prefers_whole
from partita.kernels.native import Floats

__all__ = ["grid_gradients", "grid_sum"]

_BLOCK = 128  # queries whose weights are held at once
_BLOCK_ENTRIES = 1 << 15  # window rows held at once: wide windows get smaller blocks
_BLOCK_WHOLE = 256  # the same where all queries of a block read the same values
_PRIVATE = 1 << 27  # numbers that the threads' own gradients may hold together

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


def grid_gradients(
    grad: Tensor, points: Tensor, grid: GridOperands, needs: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """The products of `grad`, `(n, out)`, with the derivatives in points, values and slopes; empty where not needed.

    Each thread adds to gradients in values and slopes of its own, and these are added up in the order of the queries.
    """
    x, factors, axes, tables = _array(points), _array(grad), _axes(grid), _tables(grid)
    whole = prefers_whole("native", grid.counts, grid.widths)
    add_part = _add_whole if whole else _add_windows
    sizes = [t.size if needed else 0 for t, needed in zip(tables[:2], needs[1:])]
    in_points = np.empty(x.shape if needs[0] else (0, x.shape[1]), x.dtype)
    parts: dict[int, list[Floats]] = {}

    def add(part: slice) -> None:
        parts[part.start] = [np.zeros(size, x.dtype) for size in sizes]
        add_part(x[part], factors[part], axes, tables, (in_points[part] if needs[0] else in_points, *parts[part.start]))

    def first() -> None:
        few = slice(0, 1)
        add_part(x[few], factors[few], axes, tables, (in_points[few], *(np.zeros(size, x.dtype) for size in sizes)))

    native.compiled_once(("grid gradients", x.dtype, whole), first)
    threads = max(1, _PRIVATE // max(1, sum(sizes)))
    native.in_parts(len(x), add, least=max(native.CHUNK, -(-len(x) // threads)))
    totals = parts.pop(0)
    for start in sorted(parts):
        for total, part in zip(totals, parts[start]):
            total += part
    shapes = [grid.values.shape, grid.values.shape if grid.slopes is None else grid.slopes.shape]
    found = [torch.from_numpy(t).reshape(s if t.size else 0) for t, s in zip(totals, shapes)]
    return torch.from_numpy(in_points) if needs[0] else points.new_empty(0), found[0], found[1]


def _sum_windows(points: Floats, axes: Axes, tables: Tables, out: Floats) -> None:
    from partita.kernels.grid_loops import sum_windows

    rows, widths = _window_rows(axes), axes[-1]
    scratch = _Scratch(points, out, tables, max(8, min(_BLOCK, _BLOCK_ENTRIES // len(rows))))
    weights, sums = scratch.floats(len(widths), int(widths.max())), scratch.floats(len(rows))
    vectors = np.empty((len(rows), max(out.shape[1], scratch.tilts.shape[1])), out.dtype)
    lines = scratch.floats(2), scratch.integers
    sum_windows(points, axes, rows, *tables, *lines, weights, sums, vectors, scratch.tilts, out)


def _add_windows(points: Floats, grad: Floats, axes: Axes, tables: Tables, found: tuple[Floats, ...]) -> None:
    from partita.kernels.grid_gradient_loops import add_window_gradients

    rows, widths = _window_rows(axes), axes[-1]
    fields = 2 * len(widths) + 1
    scratch = _Scratch(points, grad, tables, max(8, min(_BLOCK, _BLOCK_ENTRIES // (fields * len(rows)))))
    lines = scratch.floats(4), scratch.integers
    weights, pulls = (scratch.floats(len(widths), int(widths.max())) for _ in range(2))
    sums = scratch.floats(fields, len(rows))
    add_window_gradients(points, grad, axes, rows, tables, *lines, weights, pulls, sums, found)


def _window_rows(axes: Axes) -> NDArray[np.int64]:
    """Cell numbers of the window's innermost rows, relative to its first cell."""
    _, _, counts, _, widths = axes
    rows: NDArray[np.int64] = np.zeros(1, np.int64)
    for count, width in zip([*counts[1:], 1], widths[:-1]):
        rows = (rows[:, None] + np.arange(width)).ravel() * count
    return rows


def _sum_whole(points: Floats, axes: Axes, tables: Tables, out: Floats) -> None:
    from partita.kernels.grid_loops import sum_whole

    counts, (order, strides) = axes[2], _order(axes, out.shape[1])
    scratch = _Scratch(points, out, tables, _BLOCK_WHOLE)
    weights, sums = scratch.floats(len(counts), int(counts.max())), scratch.floats(len(counts) + 1)
    lines = scratch.floats(2), scratch.integers
    sum_whole(points, axes, order, strides, *tables, *lines, weights, sums, scratch.tilts, out)


def _add_whole(points: Floats, grad: Floats, axes: Axes, tables: Tables, found: tuple[Floats, ...]) -> None:
    from partita.kernels.grid_gradient_loops import add_whole_gradients

    counts, (order, strides) = axes[2], _order(axes, grad.shape[1])
    scratch = _Scratch(points, grad, tables, _BLOCK_WHOLE)
    lines = scratch.floats(4), scratch.integers
    weights, pulls = (scratch.floats(len(counts), int(counts.max())) for _ in range(2))
    sums = scratch.floats(len(counts) + 1, len(counts) + 3)
    add_whole_gradients(points, grad, axes, order, strides, tables, *lines, weights, pulls, sums, found)


def _order(axes: Axes, outputs: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The axes from the shortest to the longest; strides of values and slopes along each axis, and a line of scratch."""
    counts = axes[2]
    strides = outputs * np.append(np.cumprod(counts[:0:-1])[::-1], 1)
    return np.argsort(counts, kind="stable"), np.stack([strides, strides * len(counts), strides])


class _Scratch:
    """Arrays that the loops work in, for blocks of at most so many queries."""

    def __init__(self, points: Floats, out: Floats, tables: Tables, block: int) -> None:
        self.block, self.dtype = max(1, min(block, len(points))), points.dtype
        self.integers = np.empty((3, self.block), np.int64)
        slopes = self.block if len(tables[1]) else 0
        self.tilts = np.empty((slopes, out.shape[1] * points.shape[1]), points.dtype)

    def floats(self, *shape: int) -> Floats:
        return np.empty((*shape, self.block), self.dtype)
