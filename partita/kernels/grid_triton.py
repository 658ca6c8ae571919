"""The product-grid sum and its gradients on CUDA devices, as Triton kernels; float32 and float64.

A program holds a block of queries (`grid_triton_programs`). Where windows are gathered, the window of the last axis lies along
neighbouring threads, so that one instruction reads whole rows of the table. Where every axis is whole, all queries read the same
numbers. Tables larger than the cache are first copied into bricks of 64 bytes, the unit in which memory is read, if there are
queries enough: a window of 4³ float32 then meets 11 units instead of 19. Gradients of points take the sum's way with derivatives of
the weights beside the weights. Gradients of values are sums in registers where the table is small, else atomic additions: of four
neighbouring cells at once where the device can, and for tables larger than the cache in the order of slabs of the first axis.

Certificates (`score-rounding`, `window-tail`) cover these kernels. Windows are those of `grid_torch.axis_start`; differences are
centred. A score `½R·d·d` is off by 4 roundings, the difference to the best one by one more, its product with log₂e by another
(`triton_code.power`): under 7 of the 8 that δ allows. The exponential is within 2.1 ulp; 8 are assumed. Weights are divided by
their sum per axis (`div.full.f32` within 2 ulp, `div.rn.f64`), and axis after axis is summed: a term passes through at most
`2 Σ_i width_i + 5m` roundings, besides the m + 1 of an affine value. Only the exponential flushes subnormal numbers to zero:
a weight below 2^−126 is lost, far less than the rounding of the sum. There is no TF32 (no matrix products), and no atomic
addition in the sum: the same batch gives the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from partita.kernels import grid_torch
from partita.kernels.grid_torch import GridOperands
from partita.kernels.grid_triton_programs import (
    grid_collect_block,
    grid_slope_block,
    grid_spread_block,
    grid_sum_block,
)
from partita.kernels.plain_arithmetic import plain_arithmetic
from partita.kernels.triton_code import launch

__all__ = ["gradients_on_device", "sum_on_device"]

_MOST_LANES = 8  # widest window along neighbouring threads
_MOST_LEAVES = 144  # cells whose loads are written out; more are looped over
_MOST_WEIGHTS = 40  # of one query, in registers
_MOST_WEIGHTS_IN_1D = 16  # where each is used once
_MOST_COLUMNS = 32  # outputs of one tile
_AT_ONCE = 1 << 26  # numbers held by one step of what is not fused
_FEW_CELLS = 8  # per cell of the window: in so few, additions to one number would wait for each other
_SUMS_HELD = 128  # words of 4 bytes that a thread holds while it sums the gradient of a small table
_FEW_OUTPUTS = 8
_COLLECTED = 128  # queries at once
_PROGRAMS = 132 * 4
_BRICKED_FROM = 1 << 23  # bytes of a table: smaller ones stay in the cache
_ALIGNED = 4  # numbers: where atomic additions of several begin
_MOST_COPIES = 16  # of a table that atomic additions share
_COPIED_AT_MOST = 1 << 16


class _Plan(NamedTuple):
    """How a kernel cuts its work.

    loose: leading axes whose weights are computed where they are used; those of the others are held in registers.
    lanes: threads along the window of the last axis, or 1.
    columns, blocks: outputs of a tile, and how many tiles.
    """

    loose: int
    lanes: int
    columns: int
    blocks: int
    block: int
    warps: int


class _Bricks(NamedTuple):
    """A table stored in bricks of 64 bytes, `2^bits_i` cells long on axis i: the unit in which the memory is read."""

    counts: tuple[int, ...]
    bits: tuple[int, ...]

    @classmethod
    def of(cls, counts: tuple[int, ...], itemsize: int) -> _Bricks:
        together = (64 // itemsize).bit_length() - 1
        paired = min(len(counts) - 1, together - 1)  # axes along which bricks are two cells long
        return cls(counts, (0,) * (len(counts) - 1 - paired) + (1,) * paired + (together - paired,))

    @property
    def bricks(self) -> tuple[int, ...]:
        """How many there are along each axis."""
        return tuple(-(-count >> b) for count, b in zip(self.counts, self.bits))

    @property
    def size(self) -> int:
        return math.prod(self.bricks) << sum(self.bits)

    def steps(self) -> tuple[int, ...]:
        """How far apart neighbouring bricks lie."""
        return tuple(math.prod(self.bricks[i + 1 :]) << sum(self.bits) for i in range(len(self.counts)))

    def units(self) -> tuple[int, ...]:
        """How far apart neighbouring cells of a brick lie."""
        return tuple(1 << sum(self.bits[i + 1 :]) for i in range(len(self.counts)))

    def stored(self, table: Tensor) -> Tensor:
        """A table `(cells, 1)` in bricks, padded by zeros."""
        m, lengths = len(self.counts), [1 << b for b in self.bits]
        padded = [b * length for b, length in zip(self.bricks, lengths)]
        table = table.reshape(self.counts)
        if tuple(padded) != self.counts:
            ends = [k for p, count in zip(padded[::-1], self.counts[::-1]) for k in (0, p - count)]
            table = torch.nn.functional.pad(table, ends)
        apart = table.reshape([k for pair in zip(self.bricks, lengths) for k in pair])
        return apart.permute(*range(0, 2 * m, 2), *range(1, 2 * m, 2)).contiguous()


class _Grid(NamedTuple):
    """The arguments that all kernels share."""

    points: Tensor
    centers: tuple[Tensor, ...]
    rates: Tensor
    widths: tuple[int, ...]
    counts: tuple[int, ...]

    @classmethod
    def of(cls, points: Tensor, centers: Sequence[Tensor], rates: Tensor, widths: Sequence[int]) -> _Grid:
        counts = tuple(len(c) for c in centers)
        axes = tuple(c.contiguous() for c in centers)
        return cls(points.contiguous(), axes, rates.contiguous(), tuple(widths), counts)

    @property
    def cells(self) -> int:
        return math.prod(self.counts)

    @property
    def whole(self) -> tuple[bool, ...]:
        return tuple(w == count for w, count in zip(self.widths, self.counts))

    def steps(self, columns: int) -> tuple[int, ...]:
        """How far apart neighbours on each axis lie in a table with so many columns."""
        return tuple(math.prod(self.counts[i + 1 :]) * columns for i in range(len(self.counts)))

    def constants(self, plan: _Plan, columns: int, bricks: _Bricks | None) -> dict[str, Any]:
        return {
            "BITS": (0,) * len(self.counts) if bricks is None else bricks.bits,
            "M": len(self.counts),
            "WIDTHS": self.widths,
            "WHOLE": self.whole,
            "WIDE": self.cells * columns >= 2**31,
            "LOOSE": plan.loose,
            "LANES": plan.lanes,
            "COLUMNS": plan.columns,
            "BLOCKS": plan.blocks,
            "BLOCK": plan.block,
            "num_warps": plan.warps,
        }


def _bricks_for(grid: _Grid, table: Tensor) -> _Bricks | None:
    """Bricks, where rewriting the table costs less than they save: a large table, and many queries that gather from it."""
    n, m = grid.points.shape
    large = grid.cells * table.element_size() >= _BRICKED_FROM and 4 * n >= grid.cells
    if not large or m == 1 or any(grid.whole) or table.shape[1] > 1 or grid.widths[-1] > _MOST_LANES:
        return None
    if math.prod(grid.widths[:-1]) > _MOST_LEAVES or sum(grid.widths[:-1]) > _MOST_WEIGHTS:
        return None
    bricks = _Bricks.of(grid.counts, table.element_size())
    return bricks if bricks.size < 2**31 else None


def _plan(grid: _Grid, outs: int, *, bricked: bool = False, sloped: bool = False, in_lanes: bool = True) -> _Plan:
    """The fastest of those measured on an H200; `sloped`: for gradients, which take more registers."""
    m, widths = len(grid.counts), grid.widths
    columns = min(triton.next_power_of_2(outs), _MOST_COLUMNS)
    lanes = triton.next_power_of_2(widths[-1])
    too_wide = lanes > _MOST_LANES or lanes * columns > _MOST_COLUMNS
    if all(grid.whole) or too_wide or (lanes == 2 and not bricked) or not in_lanes:
        lanes = 1
    held, most = list(widths[:-1] if lanes > 1 else widths), _MOST_WEIGHTS if m > 1 or sloped else _MOST_WEIGHTS_IN_1D
    while math.prod(held) > _MOST_LEAVES or sum(held) > most:
        held.pop(0)
    loose = m - (lanes > 1) - len(held)
    block, warps = max(16, 128 // columns), 4
    if columns == 1 and not sloped:
        if 1 < lanes <= 4:
            block, warps = 32, 1
        elif lanes == 1 and m > 1:
            block = 256
    return _Plan(loose, lanes, columns, -(-outs // columns), block, warps)


def sum_on_device(
    points: Tensor,
    centers: Sequence[Tensor],
    rates: Tensor,
    widths: Sequence[int],
    values: Tensor,
    slopes: Tensor | None = None,
    origin: Tensor | None = None,
) -> Tensor:
    """`out[n, o] = Σ_cells Π_i softmax_i(x_n)·(values[cell, o] + slopes[cell, o]·(x_n − origin))` over each point's window.

    Args, on one CUDA device and of one dtype, float32 or float64:
        points: `(n, m)`.
        centers: of each axis, `(P_i,)`, increasing; nearly uniform where the window is narrower than the axis.
        rates: R_i, `(m,)`.
        widths: of the windows, even or P_i.
        values: `(cells, out)` row-major.
        slopes: `(cells, out, m)`, or None.
        origin: `(m,)`, with slopes.

    Returns:
        `(n, out)`. No memory is taken beyond it, except for a copy of a large table.
    """
    grid = _Grid.of(points, centers, rates, widths)
    (n, m), outs = points.shape, values.shape[1]
    slopes = None if slopes is None else slopes.contiguous()
    origin = None if origin is None else origin.contiguous()
    out = torch.empty((n, outs), dtype=values.dtype, device=values.device)
    if out.numel() == 0:
        return out
    bricks = None if slopes is not None else _bricks_for(grid, values)
    plan = _plan(grid, outs, bricked=bricks is not None)
    _launch_sum(
        *(grid_sum_block, (), grid, plan, bricks, values, slopes, origin, out),
        HALVINGS=(grid.widths[0] - 1).bit_length(),
        UNROLL=2 if plan.loose == m else 1,
    )
    return out


def _launch_sum(
    kernel: Any,
    leading: tuple[Tensor, ...],
    grid: _Grid,
    plan: _Plan,
    bricks: _Bricks | None,
    values: Tensor,
    slopes: Tensor | None,
    origin: Tensor | None,
    out: Tensor,
    **constants: Any,
) -> None:
    """Run one of the kernels that read the table, with its own leading arguments and constants."""
    (n, m), outs = grid.points.shape, values.shape[1]
    launch(
        kernel,
        (triton.cdiv(n, plan.block),),
        *(*leading, grid.points, grid.centers, grid.counts, grid.rates),
        *(values.contiguous() if bricks is None else bricks.stored(values), slopes, origin, out, n, outs),
        *(grid.steps(outs) if bricks is None else bricks.steps(), grid.steps(outs * m)),
        None if bricks is None else bricks.units(),
        AFFINE=slopes is not None,
        MASKED=plan.lanes > max(grid.widths[-1], 1) or plan.columns * plan.blocks > outs,
        **constants,
        **grid.constants(plan, outs * (1 if slopes is None else m), bricks),
    )


def gradients_on_device(
    grad: Tensor,
    points: Tensor,
    centers: Sequence[Tensor],
    rates: Tensor,
    widths: Sequence[int],
    values: Tensor,
    slopes: Tensor | None = None,
    origin: Tensor | None = None,
    needs: Sequence[bool] = (True, True, True),
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `Σ grad·sum_on_device(…)` with respect to points, values and slopes; empty where not needed.

    Args:
        grad: `(n, out)`.
        points, centers, rates, widths, values, slopes, origin: as in `sum_on_device`.
        needs: whether points, values and slopes need theirs.

    The gradients of values and slopes are added up in no fixed order, unless `torch.are_deterministic_algorithms_enabled()`
    or the table is small.
    """
    grid, grad = _Grid.of(points, centers, rates, widths), grad.contiguous()
    slopes = None if slopes is None else slopes.contiguous()
    origin = None if origin is None else origin.contiguous()
    of_slopes = values.new_empty(0)
    single = values.shape[1] == 1 and len(grid.counts) == 1 and slopes is None
    if needs[0] and needs[1] and single and len(points) and _is_small(grid, 1):
        of_points, of_values = _collected_small(grad, grid, values)
    else:
        of_points = _slopes_at(grad, grid, values, slopes, origin) if needs[0] else values.new_empty(0)
        of_values = _collected(grad, grid) if needs[1] else values.new_empty(0)
    if needs[2] and slopes is not None and origin is not None:
        of_slopes = values.new_zeros(slopes.shape).flatten(1)
        step = max(1, _AT_ONCE // of_slopes.shape[1])
        for begin in range(0, len(points), step):
            rows = slice(begin, begin + step)
            shares = grad[rows, :, None] * (points[rows] - origin)[:, None, :]
            of_slopes += _collected(shares.flatten(1), grid._replace(points=grid.points[rows]))
        of_slopes = of_slopes.reshape(slopes.shape)
    return of_points, of_values, of_slopes


def _slopes_at(grad: Tensor, grid: _Grid, values: Tensor, slopes: Tensor | None, origin: Tensor | None) -> Tensor:
    (n, m), outs = grid.points.shape, values.shape[1]
    out = torch.empty((n, m), dtype=values.dtype, device=values.device)
    if out.numel() == 0:
        return out
    bricks = None if slopes is not None else _bricks_for(grid, values)
    plan = _plan(grid, outs, bricked=bricks is not None, sloped=True)
    _launch_sum(grid_slope_block, (grad,), grid, plan, bricks, values, slopes, origin, out)
    return out


def _collected(grad: Tensor, grid: _Grid) -> Tensor:
    """`Σ_n weights[n, cell]·grad[n, o]`, `(cells, out)`."""
    n, outs = grad.shape
    if n == 0 or outs == 0:
        return grad.new_zeros(grid.cells, outs)
    if _is_small(grid, outs):
        return _collected_small(grad, grid)[1]
    if grid.cells <= _FEW_CELLS * math.prod(grid.widths):
        return _collected_by_products(grad, grid)
    if torch.are_deterministic_algorithms_enabled():
        operands = GridOperands(grid.centers, grid.rates, grid.widths, grad.new_empty(grid.cells, outs), None, None)
        return grid_torch.grid_gradients(grad, grid.points, operands, [False, True, False])[1]
    together = _added_together(grid, grad)
    plan = _plan(grid, outs, sloped=True, in_lanes=together == 1)
    pitch = -(-grid.cells * outs // _ALIGNED) * _ALIGNED + _ALIGNED
    copies = max(1, min(_MOST_COPIES, _COPIED_AT_MOST // pitch))
    out = grad.new_zeros(copies, together, pitch)
    order = _by_slabs(grid, together * pitch * grad.element_size())
    launch(
        grid_spread_block,
        (triton.cdiv(n, plan.block),),
        *(
            grad,
            grid.points,
            order,
            grid.centers,
            grid.counts,
            grid.rates,
            out,
            n,
            outs,
            pitch,
            together * pitch,
            copies,
        ),
        grid.steps(outs),
        ORDERED=order is not None,
        TOGETHER=together,
        **grid.constants(plan, outs, None),
    )
    # table s holds cell c at c − s
    tables = out.as_strided((copies, together, grid.cells * outs), (together * pitch, pitch - 1, 1))
    return tables.sum(dim=(0, 1)).reshape(-1, outs)


def _added_together(grid: _Grid, grad: Tensor) -> int:
    """How many neighbouring cells one atomic addition changes: 4 or 2 where the device can, which takes as many tables."""
    able = grad.is_cuda and grad.dtype == torch.float32 and torch.cuda.get_device_capability(grad.device) >= (9, 0)
    if not able or grad.shape[1] > 1 or grid.widths[-1] > _MOST_LANES:
        return 1
    together = math.gcd(grid.widths[-1], _ALIGNED)
    worth_it = together * grid.cells <= len(grad) * math.prod(grid.widths) // 2
    return together if worth_it else 1


def _by_slabs(grid: _Grid, size: int) -> Tensor | None:
    """The queries sorted by 256 slabs of the first axis, if the table is larger than the cache and they come in no order.

    Additions to one slab meet in the cache. One radix step sorts by a byte.
    """
    n, centers = len(grid.points), grid.centers[0]
    if size < _BRICKED_FROM or 4 * n < grid.cells:
        return None
    scale = 256 / (centers[-1] - centers[0])
    slabs = torch.addcmul(-centers[0] * scale, grid.points[:, 0], scale).clamp_(0, 255).byte()
    if not (slabs.is_cuda and torch.cuda.is_current_stream_capturing()):  # then nothing can be read
        step = max(1, n // 4096)
        apart = (slabs[: n - 1 : step].float() - slabs[1::step].float()).abs().mean()
        if apart.item() < 8:  # 85 for random points
            return None
    return slabs.sort().indices


def _is_small(grid: _Grid, outs: int) -> bool:
    """Whether the sums over a block's queries are held in registers, one per cell."""
    words = grid.points.element_size() // 4
    weights = 0 if len(grid.counts) == 1 else sum(grid.counts)
    return outs <= _FEW_OUTPUTS and grid.cells * words <= _SUMS_HELD and weights * words <= _MOST_WEIGHTS


def _collected_small(grad: Tensor, grid: _Grid, values: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Every thread sums over its queries first; then the threads' sums are added, always in the same order.

    With values, for one axis and one output, the gradient of the queries comes first.
    """
    n, outs = grad.shape
    parts = min(triton.cdiv(n, _COLLECTED), _PROGRAMS)
    sums = grad.new_empty(parts, outs, grid.cells, _COLLECTED)
    slopes = torch.empty_like(grid.points) if values is not None else grad.new_empty(0)
    launch(
        grid_collect_block,
        (parts, outs),
        *(grad, grid.points, grid.centers, grid.counts, grid.rates),
        *(None if values is None else values.contiguous(), slopes, sums, n, outs),
        M=len(grid.counts),
        COUNTS=grid.counts,
        WIDTHS=grid.widths,
        WHOLE=grid.whole,
        CELLS=grid.cells,
        SLOPED=values is not None,
        PARTS=parts,
        BLOCK=_COLLECTED,
        num_warps=4,
    )
    return slopes, sums.sum(dim=(0, 3)).T.contiguous()


def _collected_by_products(grad: Tensor, grid: _Grid) -> Tensor:
    """By matrix products over the queries, for windows that cover most of a table."""
    total = grad.new_zeros(grid.counts[0], grid.cells // grid.counts[0] * grad.shape[1])
    step = max(1, _AT_ONCE // (total.shape[1] + sum(grid.counts)))
    for begin in range(0, len(grad), step):
        rows = slice(begin, begin + step)
        spread = []
        for i, (centers, width) in enumerate(zip(grid.centers, grid.widths)):
            own, start = grid_torch.axis_window(grid.points[rows, i], centers, grid.rates[i], width)
            index = start[:, None] + torch.arange(width, device=own.device)
            spread.append(own.new_zeros(len(own), len(centers)).scatter_(1, index, own))
        shares = grad[rows]
        for own in reversed(spread[1:]):
            shares = (own[:, :, None] * shares[:, None, :]).flatten(1)
        with plain_arithmetic(grad.device.type):
            total += spread[0].T @ shares
    return total.reshape(grid.cells, -1)
