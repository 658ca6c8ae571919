"""`torch.ops.partita.grid_sum`: the sum over a product grid as one operator, with the fastest kernel for where its tensors are.

On a CPU large batches run in native loops (`grid_native`), small ones in plain torch operations (`grid_torch`). On a CUDA device
Triton's kernels run where there are any, else plain torch operations. Each of them forms `x − c` first, takes weights relative
to the largest, and sums axis after axis. A term passes through `Σ_i width_i + 2m` products and sums, or fewer, and `m + 2` more for
affine values, which is what `score-rounding` counts. Autocast and torch's settings for float32 products change nothing
here, also in compiled graphs.

The gradients in points, values and slopes are an operator of their own, `partita::grid_sum_backward`. Those in centers and
rates, and all derivatives of gradients, are computed by plain torch operations.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from partita.kernels import grid_native, grid_torch, native
from partita.kernels.devices import device_kernels
from partita.kernels.differentiation import (
    differentiated,
    is_ordinary,
    is_tracked,
    needs_operator,
    needs_plain_operations,
)
from partita.kernels.grid_torch import GridOperands, prefers_whole
from partita.kernels.plain_arithmetic import plain_arithmetic
from partita.kernels.trace_modes import wants_operator

__all__ = ["grid_sum", "runs_natively"]

_OPERANDS = "Tensor points, Tensor[] centers, Tensor rates, int[] widths, Tensor values, Tensor? slopes, Tensor? origin"


def grid_sum(points: Tensor, grid: GridOperands) -> Tensor:
    """`(n, m)` to `(n, out)`, by the operator, or without it where torch would not notice: if it records nothing.

    Args:
        points: the queries.
        grid: centers, rates, widths, values, slopes and origin.
    """
    # gradients in rates and centers come from plain operations
    if not wants_operator(points) or is_tracked((grid.rates, *grid.centers)):
        return grid_torch.grid_sum(points, grid)
    if not needs_operator(points, grid.values, grid.slopes, grid.origin):
        if is_ordinary(points, grid.values, grid.slopes, grid.origin):
            return _run(points, grid)
        if points.device.type == "cpu" and not runs_natively(points, grid):
            return grid_torch.grid_sum(points, grid)
    found: Tensor = torch.ops.partita.grid_sum(points, *grid)
    return found


def runs_natively(points: Tensor, grid: GridOperands) -> bool:
    """Whether a batch runs in native loops: on a CPU, if it is large enough."""
    if points.device.type != "cpu" or points.dtype not in (torch.float64, torch.float32):
        return False
    cells = grid.counts if prefers_whole("native", grid.counts, grid.widths) else grid.widths
    return native.worth_it(points.shape[0], math.prod(cells) * grid.columns)


def _run(points: Tensor, grid: GridOperands) -> Tensor:
    """By the fastest kernel for where the tensors are."""
    if (kernels := device_kernels("grid", points, grid.values, grid.rates, *grid.centers)) is not None:
        found: Tensor = kernels.sum_on_device(points, *grid)
        return found
    if runs_natively(points, grid):
        return grid_native.grid_sum(points, grid)
    with plain_arithmetic(points.device.type):
        return grid_torch.grid_sum(points, grid)


@torch.library.custom_op("partita::grid_sum", mutates_args=(), schema=f"({_OPERANDS}) -> Tensor")
def _sum(points: Tensor, *operands: Any) -> Tensor:
    return _run(points, GridOperands(*operands))


@torch.library.custom_op(
    "partita::grid_sum_backward",
    mutates_args=(),
    schema=f"(Tensor grad, {_OPERANDS}, bool[] needs) -> (Tensor, Tensor, Tensor)",
)
def _gradients(grad: Tensor, points: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    grid, needs = GridOperands(*others[:-1]), others[-1]
    if (kernels := device_kernels("grid", grad, points, grid.values, grid.rates, *grid.centers)) is not None:
        found: tuple[Tensor, Tensor, Tensor] = kernels.gradients_on_device(grad, points, *grid, needs)
        return found
    if runs_natively(points, grid):
        return grid_native.grid_gradients(grad, points, grid, needs)
    with plain_arithmetic(points.device.type):
        return grid_torch.grid_gradients(grad, points, grid, needs)


@_sum.register_fake
def _(points: Tensor, *operands: Any) -> Tensor:
    return points.new_empty(points.shape[0], operands[3].shape[1])


@_gradients.register_fake
def _(grad: Tensor, points: Tensor, *others: Any) -> tuple[Tensor, ...]:
    wanted = zip((points, others[3], others[4]), others[-1])
    return tuple(points.new_empty(t.shape if needed and t is not None else 0) for t, needed in wanted)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    points, centers, rates, widths, values, slopes, origin = inputs
    ctx.widths = widths
    ctx.save_for_backward(points, rates, values, slopes, origin, *centers)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    points, rates, values, slopes, origin, *centers = ctx.saved_tensors
    grid = GridOperands(centers, rates, ctx.widths, values, slopes, origin)
    in_points, in_centers, in_rates, _, in_values, in_slopes, in_origin = ctx.needs_input_grad
    if needs_plain_operations(grad) or in_rates or in_origin or any(in_centers):
        of = (points, rates, values, slopes, origin, *centers)
        which = (in_points, in_rates, in_values, in_slopes, in_origin, *in_centers)
        found = differentiated(lambda: grid_torch.grid_sum(points, grid), of, which, grad)
        return found[0], found[5:], found[1], None, found[2], found[3], found[4]
    three = [in_points, in_values, in_slopes]
    got = torch.ops.partita.grid_sum_backward(grad, points, *grid, three)
    given = [t if needed else None for t, needed in zip(got, three)]
    return given[0], [None] * len(centers), None, None, given[1], given[2], None


_sum.register_autograd(_backward, setup_context=_keep)
