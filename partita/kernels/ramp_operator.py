"""`torch.ops.partita.ramp_sum`: the ramp as one operator, with the fastest kernel for where its tensors are.

The kernels are chosen as in `grid_operator`; each takes s, its cell and the scores `κ i(y − i/2)` as `ramp_torch` does, which is
what the terms of `ramp` count. The gradient in u is an operator of its own, `partita::ramp_sum_backward`. Those in the other
tensors, and all derivatives of gradients, are computed by plain torch operations.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from partita.kernels import native, ramp_native, ramp_torch
from partita.kernels.devices import device_kernels
from partita.kernels.differentiation import (
    differentiated,
    is_ordinary,
    is_tracked,
    needs_operator,
    needs_plain_operations,
)
from partita.kernels.plain_arithmetic import plain_arithmetic
from partita.kernels.ramp_torch import RampOperands
from partita.kernels.trace_modes import wants_operator

__all__ = ["ramp_sum", "runs_natively"]

_OPERANDS = "Tensor u, Tensor low, Tensor spacing, Tensor sharpness, int anchors, int width"


def ramp_sum(u: Tensor, ramp: RampOperands) -> Tensor:
    """`(n,)` to `(n,)`, by the operator, or without it where torch would not notice: if it records nothing.

    Args:
        u: the queries.
        ramp: low, spacing, sharpness, anchors and width.
    """
    if not wants_operator(u) or is_tracked(ramp[:3]):  # gradients in these come from plain operations
        return ramp_torch.ramp_sum(u, ramp)
    if not needs_operator(u):
        if is_ordinary(u):
            return _run(u, ramp)
        if u.device.type == "cpu" and not runs_natively(u, ramp):
            return ramp_torch.ramp_sum(u, ramp)
    found: Tensor = torch.ops.partita.ramp_sum(u, *ramp)
    return found


def runs_natively(u: Tensor, ramp: RampOperands) -> bool:
    """Whether a batch runs in native loops: on a CPU, if it is large enough."""
    plain = u.device.type == "cpu" and u.dtype in (torch.float64, torch.float32)
    return plain and native.worth_it(u.shape[0], ramp.width)


def _run(u: Tensor, ramp: RampOperands) -> Tensor:
    """By the fastest kernel for where the tensors are."""
    if (kernels := device_kernels("ramp", u, ramp.low, ramp.spacing, ramp.sharpness)) is not None:
        found: Tensor = kernels.sum_on_device(u, *ramp)
        return found
    if runs_natively(u, ramp):
        return ramp_native.ramp_sum(u, ramp)
    with plain_arithmetic(u.device.type):
        return ramp_torch.ramp_sum(u, ramp)


@torch.library.custom_op("partita::ramp_sum", mutates_args=(), schema=f"({_OPERANDS}) -> Tensor")
def _sum(u: Tensor, *operands: Any) -> Tensor:
    return _run(u, RampOperands(*operands))


@torch.library.custom_op("partita::ramp_sum_backward", mutates_args=(), schema=f"(Tensor grad, {_OPERANDS}) -> Tensor")
def _gradient(grad: Tensor, u: Tensor, *operands: Any) -> Tensor:
    ramp = RampOperands(*operands)
    if (kernels := device_kernels("ramp", grad, u, ramp.low, ramp.spacing, ramp.sharpness)) is not None:
        found: Tensor = kernels.gradients_on_device(grad, u, *ramp)
        return found
    if runs_natively(u, ramp):
        return ramp_native.ramp_gradient(grad, u, ramp)
    with plain_arithmetic(u.device.type):
        return ramp_torch.ramp_gradient(grad, u, ramp)


@_sum.register_fake
def _(u: Tensor, *operands: Any) -> Tensor:
    return u.new_empty(u.shape)


@_gradient.register_fake
def _(grad: Tensor, u: Tensor, *operands: Any) -> Tensor:
    return u.new_empty(u.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.sizes = inputs[4:]


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    u, *numbers = ctx.saved_tensors
    ramp, needs = RampOperands(*numbers, *ctx.sizes), ctx.needs_input_grad
    if needs_plain_operations(grad) or any(needs[1:4]):
        found = differentiated(lambda: ramp_torch.ramp_sum(u, ramp), (u, *numbers), needs[:4], grad)
        return (*found, None, None)
    return (torch.ops.partita.ramp_sum_backward(grad, u, *ramp) if needs[0] else None, None, None, None, None, None)


_sum.register_autograd(_backward, setup_context=_keep)
