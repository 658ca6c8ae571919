"""`torch.ops.partita.train_sum`: the sum over a tensor train as one operator, with the fastest kernel for where its tensors are.

The kernels are chosen as in `grid_operator`. Each forms `x − c` first and takes weights relative to the largest. The gradients in
points and cores are an operator of their own, `partita::train_sum_backward`. Those in centers and rates, and all derivatives
of gradients, are computed by plain torch operations.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from partita.kernels import native, train_native, train_torch
from partita.kernels.devices import device_kernels
from partita.kernels.differentiation import (
    differentiated,
    is_ordinary,
    is_tracked,
    needs_operator,
    needs_plain_operations,
)
from partita.kernels.plain_arithmetic import plain_arithmetic
from partita.kernels.trace_modes import wants_operator
from partita.kernels.train_torch import TrainOperands

__all__ = ["runs_natively", "train_sum"]

_OPERANDS = "Tensor points, Tensor[] centers, Tensor rates, Tensor[] cores"
_A_WINDOW = 24  # queries, on average, from which on the loops are faster than torch


def train_sum(points: Tensor, train: TrainOperands) -> Tensor:
    """`(n, m)` to `(n, out)`, by the operator, or without it where torch would not notice: if it records nothing.

    Args:
        points: the queries.
        train: centers, rates and cores.
    """
    # gradients in rates and centers come from plain operations
    if not wants_operator(points) or is_tracked((train.rates, *train.centers)):
        return train_torch.train_sum(points, train)
    if not needs_operator(points, *train.cores):
        if is_ordinary(points, *train.cores):
            return _run(points, train)
        if points.device.type == "cpu" and not runs_natively(points, train):
            return train_torch.train_sum(points, train)
    found: Tensor = torch.ops.partita.train_sum(points, *train)
    return found


def runs_natively(points: Tensor, train: TrainOperands) -> bool:
    """Whether a batch runs in native loops: on a CPU, if it is large enough.

    The loops run over the queries that share a window, so there must be some for every window.
    """
    if points.device.type != "cpu" or points.dtype not in (torch.float64, torch.float32):
        return False
    shared = points.shape[0] >= _A_WINDOW * max(len(c) for c in train.centers) or native.WORTH == 0
    return shared and native.worth_it(points.shape[0], train.reads)


def _run(points: Tensor, train: TrainOperands) -> Tensor:
    """By the fastest kernel for where the tensors are."""
    if (kernels := device_kernels("train", points, train.rates, *train.centers, *train.cores)) is not None:
        found: Tensor = kernels.sum_on_device(points, *train)
        return found
    if runs_natively(points, train):
        return train_native.train_sum(points, train)
    with plain_arithmetic(points.device.type):
        return train_torch.train_sum(points, train).contiguous()


@torch.library.custom_op("partita::train_sum", mutates_args=(), schema=f"({_OPERANDS}) -> Tensor")
def _sum(points: Tensor, *operands: Any) -> Tensor:
    return _run(points, TrainOperands(*operands))


@torch.library.custom_op(
    "partita::train_sum_backward",
    mutates_args=(),
    schema=f"(Tensor grad, {_OPERANDS}, bool[] needs) -> (Tensor, Tensor[])",
)
def _gradients(grad: Tensor, points: Tensor, *others: Any) -> tuple[Tensor, list[Tensor]]:
    train, needs = TrainOperands(*others[:-1]), others[-1]
    if (kernels := device_kernels("train", grad, points, train.rates, *train.centers, *train.cores)) is not None:
        found: tuple[Tensor, list[Tensor]] = kernels.gradients_on_device(grad, points, *train, needs)
        return found
    if runs_natively(points, train):
        return train_native.train_gradients(grad, points, train, needs)
    with plain_arithmetic(points.device.type):
        return train_torch.train_gradients(grad, points, train, needs)


@_sum.register_fake
def _(points: Tensor, *operands: Any) -> Tensor:
    return points.new_empty(points.shape[0], operands[2][-1].shape[2])


@_gradients.register_fake
def _(grad: Tensor, points: Tensor, *others: Any) -> tuple[Tensor, list[Tensor]]:
    wanted = zip((points, *others[2]), others[-1])
    first, *rest = (points.new_empty(t.shape if needed else 0) for t, needed in wanted)
    return first, rest


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    points, centers, rates, cores = inputs
    ctx.save_for_backward(points, rates, *centers, *cores)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    points, rates, *others = ctx.saved_tensors
    m = len(others) // 2
    centers, cores = others[:m], others[m:]
    train = TrainOperands(centers, rates, cores)
    in_points, in_centers, in_rates, in_cores = ctx.needs_input_grad
    if needs_plain_operations(grad) or in_rates or any(in_centers):
        which = (in_points, in_rates, *in_centers, *in_cores)
        found = differentiated(lambda: train_torch.train_sum(points, train), (points, rates, *others), which, grad)
        return found[0], found[2 : 2 + m], found[1], found[2 + m :]
    first, rest = torch.ops.partita.train_sum_backward(grad, points, *train, [in_points, *in_cores])
    in_train = [g if needed else None for g, needed in zip(rest, in_cores)]
    return first if in_points else None, [None] * m, None, in_train


_sum.register_autograd(_backward, setup_context=_keep)
