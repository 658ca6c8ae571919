"""The ramp in plain torch operations: the reference of the other kernels, and what runs where they cannot.

With `s = (u − a)/Δ = c + y`, c the cell, the result is `a + Δ(c + Σ_i w_i i)`, weights `softmax_i(κ i(y − i/2))` over the
anchors c + i of a window. No large numbers are subtracted, so float32 holds for any number of anchors.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["RampOperands", "in_spacings", "ramp_gradient", "ramp_sum"]

_AT_ONCE = 1 << 22  # weights held by one step


class RampOperands(NamedTuple):
    """What a ramp reads beside its queries.

    Attributes:
        low: a, a number as a tensor.
        spacing: Δ.
        sharpness: κ = RΔ².
        anchors: p.
        width: how many anchors around u are summed.
    """

    low: Tensor
    spacing: Tensor
    sharpness: Tensor
    anchors: int
    width: int


def in_spacings(u: Tensor, low: Tensor, spacing: Tensor, sharpness: Tensor, anchors: int) -> Tensor:
    """`s = (u − a)/Δ`, clamped where an end's anchor holds all but e^{−64}, so that scores cannot overflow."""
    beyond = 1 + 64 / sharpness.detach()
    s = (u - low) / spacing
    return torch.minimum(torch.maximum(s, -beyond), anchors - 1 + beyond)


def ramp_sum(u: Tensor, ramp: RampOperands) -> Tensor:
    """`(n,)` to `(n,)`: the mean of the anchors under the window's weights; large batches in steps."""
    step = max(1, _AT_ONCE // ramp.width)
    if len(u) <= step:
        return _mean(u, ramp)
    return torch.cat([_mean(part, ramp) for part in torch.split(u, step)])


def ramp_gradient(grad: Tensor, u: Tensor, ramp: RampOperands) -> Tensor:
    """The product of `grad`, `(n,)`, with the derivative of `ramp_sum` in u: κ times the variance of i, 0 where s is clamped."""
    step, found = max(1, _AT_ONCE // ramp.width), torch.empty_like(u)
    for begin in range(0, len(u), step):
        part = slice(begin, begin + step)
        s, _, i, weights = _window(u[part], ramp)
        beyond = 1 + 64 / ramp.sharpness
        inside = (s > -beyond) & (s < ramp.anchors - 1 + beyond) | s.isnan()
        away = i - (weights * i).sum(dim=1, keepdim=True)
        variance = (weights * away * away).sum(dim=1)
        found[part] = grad[part] * ramp.sharpness * torch.where(inside, variance, 0.0)
    return found


def _window(u: Tensor, ramp: RampOperands) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """s and its cell, `(n,)`; i and its weights, `(n, width)`."""
    low, spacing, sharpness, anchors, width = ramp
    s = in_spacings(u, low, spacing, sharpness, anchors)
    cell = s.detach().floor().clamp(0, anchors - 2)
    start = (cell - (width // 2 - 1)).clamp(0, anchors - width)
    i = (start - cell)[:, None] + torch.arange(width, dtype=u.dtype, device=u.device)
    return s, cell, i, torch.softmax(sharpness * i * ((s - cell)[:, None] - i / 2), dim=1)


def _mean(u: Tensor, ramp: RampOperands) -> Tensor:
    _, cell, i, weights = _window(u, ramp)
    return ramp.low + ramp.spacing * (cell + (weights * i).sum(dim=1))
