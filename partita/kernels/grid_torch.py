"""The product-grid sum in plain torch operations: the reference of the other kernels, and what runs where they cannot.

`Σ_cells Π_i softmax_i(−R_i(x_i − c_i)²/2)·(V[cell] + J[cell](x − o))` over a window of centers on each axis. Windows are gathered
where they are small. Where they cover much of the grid the sum runs over all cells, with weight zero outside the window, as
matrix products. Either way axis after axis is summed, so that a term passes through `Σ_i width_i` roundings.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from partita.kernels.trace_modes import is_exporting

__all__ = [
    "GridOperands",
    "axis_log_sum",
    "axis_start",
    "axis_window",
    "grid_gradients",
    "grid_sum",
    "prefers_whole",
    "tilted",
]

_AT_ONCE = 1 << 18  # numbers held by one step: they should stay in the cache
_AT_ONCE_ON_DEVICES = 1 << 25  # accelerators wait for work more than for memory
_CELLS_PER_READ = {"native": 3.0, "torch": 16.0}  # cells passed over in order in the time of gathering one (measured)
_CELLS_PER_READ_IN_1D = 1.5  # on a single axis the weights cost more than the sum
_COUNTED_AT_ONCE = 1024  # centers that an exported graph compares a point with


class GridOperands(NamedTuple):
    """What a sum over a product grid reads beside its points.

    Attributes:
        centers: of each axis, `(P_i,)`.
        rates: R_i, `(m,)`.
        widths: how many centers around x_i enter, per axis.
        values: V, `(cells, out)`, row-major.
        slopes: J, `(cells, out, m)`, or None.
        origin: o, `(m,)`, or None without slopes.
    """

    centers: Sequence[Tensor]
    rates: Tensor
    widths: Sequence[int]
    values: Tensor
    slopes: Tensor | None
    origin: Tensor | None

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(c.shape[0] for c in self.centers)

    @property
    def columns(self) -> int:
        """Numbers that a cell holds: out, or out·(1 + m) with slopes."""
        return self.values.shape[1] * (1 if self.slopes is None else 1 + len(self.centers))

    def tables(self) -> list[Tensor]:
        """What is averaged: the values `(cells, out)` and, if there are any, the slopes `(cells, out·m)`."""
        return [self.values] if self.slopes is None else [self.values, self.slopes.flatten(1)]


def prefers_whole(path: str, counts: Sequence[int], widths: Sequence[int]) -> bool:
    """Whether running over all cells takes less time than gathering the window's, natively or in torch."""
    worth = _CELLS_PER_READ[path] if len(counts) > 1 else _CELLS_PER_READ_IN_1D
    return math.prod(counts) <= worth * math.prod(widths)


# ---- weights ---------------------------------------------------------------------------------------------------------


def axis_start(x: Tensor, centers: Tensor, width: int) -> Tensor:
    """The first index of the window of `width` centers around x, `(n,)`."""
    count = centers.shape[0]
    if width == count:
        return torch.zeros(x.shape, dtype=torch.long, device=x.device)
    if is_exporting():
        return _counted_start(x, centers, width)
    first, last = centers[0].double(), centers[-1].double()  # float32 could miss by more than a cell
    guess = (x.detach().double() - first) * ((count - 1) / (last - first))
    k = guess.nan_to_num(0.0).floor().clamp(0, count - 2).long()
    k = (k - (x < centers[k]).long()).clamp(0, count - 2)  # the guess is rounded: settle by comparison
    k = (k + (x >= centers[k + 1]).long()).clamp(0, count - 2)
    return (k - width // 2 + 1).clamp(0, count - width)


def _counted_start(x: Tensor, centers: Tensor, width: int) -> Tensor:
    """The same index from comparisons and sums alone, which every runtime has in float32 too; for NaN it is 0.

    A window starts at i if i of the centers with the numbers `width//2, …, P − 1 − (width − width//2)` are at most x. Where they
    are many, the last one of each block is compared first, and then one block, filled up with NaN, which is never at most x.
    """
    half, many = width // 2, centers.shape[0] - width
    inner = centers[half : half + many]
    if many <= _COUNTED_AT_ONCE:
        return _counted(x, inner)
    size = math.isqrt(many - 1) + 1
    blocks = torch.cat([inner, inner.new_full((size - many % size,), math.nan)]).reshape(-1, size)
    block = _counted(x, inner[size - 1 :: size])
    return block * size + _counted(x, blocks.index_select(0, block))


def _counted(x: Tensor, centers: Tensor) -> Tensor:
    """How many of the centers, those of its row if there are rows, each point has reached, `(n,)`."""
    return torch.where(x[:, None] >= centers, 1.0, 0.0).sum(dim=1).long()


def _taken(table: Tensor, index: Tensor) -> Tensor:
    """`table[index]`. An exported graph gets one `Gather` along the first axis and no `GatherND`."""
    if not is_exporting():
        return table[index]
    return table.index_select(0, index.flatten()).reshape(-1, *index.shape[1:], *table.shape[1:])


def axis_window(x: Tensor, centers: Tensor, rate: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Softmax weights `(n, width)` of the window around x on one axis, and the window's first index, `(n,)`."""
    start = axis_start(x, centers, width)
    near = _taken(centers, start[:, None] + torch.arange(width, device=x.device))
    return torch.softmax(_scores(x, near, rate), dim=1), start


def axis_log_sum(x: Tensor, centers: Tensor, rate: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The largest score of the window around x on one axis and `log Σ exp(s − maximum)` over the window, both `(n,)`.

    The maximum is not differentiated; it cancels in their sum.
    """
    parts = []
    for some in torch.split(x, _step(x, width)) if len(x) else [x]:
        near = centers
        if width < len(centers):
            near = centers[axis_start(some, centers, width)[:, None] + torch.arange(width, device=x.device)]
        scores = _scores(some, near, rate)
        maximum = scores.detach().amax(dim=1)
        parts.append((maximum, torch.exp(scores - maximum[:, None]).sum(dim=1).log()))
    return torch.cat([maximum for maximum, _ in parts]), torch.cat([log_sum for _, log_sum in parts])


def _axis_weights(x: Tensor, centers: Tensor, rate: Tensor, width: int) -> Tensor:
    """The same weights at their places among all centers of the axis, `(n, P)`, and zeros outside the window."""
    count, scores = centers.shape[0], _scores(x, centers, rate)
    if width == count:
        return torch.softmax(scores, dim=1)
    behind = torch.arange(count, device=x.device) - axis_start(x, centers, width)[:, None]
    return torch.softmax(scores.masked_fill((behind < 0) | (behind >= width), -math.inf), dim=1)


def _scores(x: Tensor, centers: Tensor, rate: Tensor) -> Tensor:
    difference = x[:, None] - centers
    return -0.5 * rate * difference * difference


def _windows(points: Tensor, grid: GridOperands) -> tuple[list[Tensor], Tensor]:
    """Weights of every axis, `(n, width_i)`, and the cells of the windows, `(n, Π width_i)`."""
    weights, cells = [], None
    for x, centers, rate, width in zip(points.unbind(1), grid.centers, grid.rates, grid.widths):
        w, start = axis_window(x, centers, rate, width)
        index = start[:, None] + torch.arange(width, device=points.device)
        cells = index if cells is None else (cells[:, :, None] * centers.shape[0] + index[:, None, :]).flatten(1)
        weights.append(w)
    assert cells is not None  # there is an axis
    return weights, cells


def _whole(points: Tensor, grid: GridOperands) -> list[Tensor]:
    """Weights of every axis at their places among all centers, `(n, P_i)`."""
    axes = zip(points.unbind(1), grid.centers, grid.rates, grid.widths)
    return [_axis_weights(x, centers, rate, width) for x, centers, rate, width in axes]


# ---- sums ------------------------------------------------------------------------------------------------------------


def grid_sum(points: Tensor, grid: GridOperands) -> Tensor:
    """`(n, m)` to `(n, out)`; large batches in steps."""
    if _contracts(points.dtype, grid):
        left = math.prod(grid.counts) // max(grid.counts) * grid.columns
        work, held = _contracted, left + sum(grid.counts)
    else:
        work, held = _gathered, math.prod(grid.widths) * grid.columns
    step = _step(points, held)
    if torch.compiler.is_compiling() or len(points) <= step:
        return work(points, grid)
    return torch.cat([work(chunk, grid) for chunk in torch.split(points, step)])


def _contracts(dtype: torch.dtype, grid: GridOperands) -> bool:
    """Whether to use matrix products. A compiled graph does not notice that torch's settings for float32 products change."""
    plain = dtype == torch.float64 or not torch.compiler.is_dynamo_compiling()
    return plain and prefers_whole("torch", grid.counts, grid.widths)


def _step(points: Tensor, held: int) -> int:
    return max(1, (_AT_ONCE if points.device.type == "cpu" else _AT_ONCE_ON_DEVICES) // held)


def _gathered(points: Tensor, grid: GridOperands) -> Tensor:
    weights, cells = _windows(points, grid)
    return tilted(points, grid, [_fold(_taken(table, cells).to(points.dtype), weights) for table in grid.tables()])


def _contracted(points: Tensor, grid: GridOperands) -> Tensor:
    weights = _whole(points, grid)
    return tilted(points, grid, [_contract(table, weights) for table in grid.tables()])


def tilted(points: Tensor, grid: GridOperands, sums: Sequence[Tensor]) -> Tensor:
    """`Σ w V + (Σ w J)(z − o)` from the sums of the tables."""
    if grid.origin is None:
        return sums[0]
    slopes = torch.unflatten(sums[1], 1, (grid.values.shape[1], len(grid.centers)))
    return sums[0] + (slopes * (points - grid.origin)[:, None, :]).sum(dim=2)


def _contract(table: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """`Σ_j Π_i weights[i][n, j_i]·table[j, c]`, `(n, c)`: the longest axis by one matrix product, then axis after axis.

    The longest axis leaves the least behind; the others sum what their query has left.
    """
    counts = [w.shape[1] for w in weights]
    longest = counts.index(max(counts))
    sums = weights[longest] @ torch.unflatten(table, 0, counts).movedim(longest, 0).reshape(counts[longest], -1)
    for w in (*weights[:longest], *weights[longest + 1 :]):
        rows = torch.unflatten(sums, 1, (w.shape[1], -1))
        # a row times a column is no work for a matrix product
        sums = (rows * w[:, :, None]).sum(dim=1) if rows.shape[2] == 1 else (w[:, None, :] @ rows)[:, 0]
    return sums


def _fold(gathered: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """`(n, Π width_i, c)` to `(n, c)`, axis after axis; the first one first, so that inner runs stay long."""
    for w in weights:
        gathered = (torch.unflatten(gathered, 1, (w.shape[1], -1)) * w[:, :, None, None]).sum(dim=1)
    return gathered[:, 0]


# ---- gradients -------------------------------------------------------------------------------------------------------


def grid_gradients(
    grad: Tensor, points: Tensor, grid: GridOperands, needs: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """The products of `grad`, `(n, out)`, with the derivatives of `grid_sum` in points, values and slopes.

    Written out, because torch records nothing inside an operator. Only what `needs` asks for is computed; the rest is empty.
    """
    whole = _contracts(points.dtype, grid)
    cells = math.prod(grid.counts) if whole else math.prod(grid.widths)
    step = _step(points, cells * (2 + len(grid.centers) + (0 if whole else grid.columns)))
    tables = (grid.values, grid.slopes if grid.slopes is not None else grid.values)
    found = [points.new_zeros(t.shape if needed else 0) for t, needed in zip((points, *tables), needs)]
    for begin in range(0, len(points), step):
        part = slice(begin, begin + step)
        _add_gradients(grad[part], points[part], grid, whole, needs[0], [found[0][part], *found[1:]])
    return found[0], found[1], found[2]


def _add_gradients(
    grad: Tensor, points: Tensor, grid: GridOperands, whole: bool, in_points: bool, found: Sequence[Tensor]
) -> None:
    """Add those of a step. `found`: of its points, of all values, of all slopes; empty where none is needed."""
    weights, cells = (_whole(points, grid), None) if whole else _windows(points, grid)
    factors = [grad]  # of the entries of each table
    if grid.origin is not None:
        factors.append((grad[:, :, None] * (points - grid.origin)[:, None, :]).flatten(1))
    if in_points:
        tables = grid.tables()
        if cells is None:
            products = [factor @ table.T for factor, table in zip(factors, tables)]
        else:
            products = [(table[cells] * factor[:, None, :]).sum(dim=2) for factor, table in zip(factors, tables)]
        scalars = products[0] if len(products) == 1 else products[0] + products[1]
        for i, w in enumerate(weights):
            mixed = [*weights[:i], _pull(points[:, i], grid, i, w, whole), *weights[i + 1 :]]
            found[0][:, i] += _fold(scalars[:, :, None], mixed)[:, 0]
        if grid.slopes is not None:
            mean = _contract(tables[1], weights) if cells is None else _fold(tables[1][cells], weights)
            found[0].add_((torch.unflatten(mean, 1, (grad.shape[1], -1)) * grad[:, :, None]).sum(dim=1))
    if not any(total.numel() for total in found[1:]):
        return
    shares = torch.ones_like(points[:, :1])
    for w in weights:
        shares = (shares[:, :, None] * w[:, None, :]).flatten(1)
    for total, factor in zip(found[1:], factors):
        if total.numel() and cells is None:
            total.view(-1, factor.shape[1]).add_(shares.T @ factor)
        elif total.numel() and cells is not None:
            entries = (shares[:, :, None] * factor[:, None, :]).flatten(0, 1)
            total.view(-1, factor.shape[1]).index_add_(0, cells.flatten(), entries)


def _pull(x: Tensor, grid: GridOperands, axis: int, weights: Tensor, whole: bool) -> Tensor:
    """The derivatives of one axis' weights in x: `−R w(d − Σ w d)`, `d = x − c`."""
    centers, width = grid.centers[axis], grid.widths[axis]
    if not whole:
        centers = centers[axis_start(x, centers, width)[:, None] + torch.arange(width, device=x.device)]
    difference = x[:, None] - centers
    mean = (weights * difference).sum(dim=1, keepdim=True)
    return -grid.rates[axis] * weights * (difference - mean)
