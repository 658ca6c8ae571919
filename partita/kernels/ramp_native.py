"""The ramp as native loops (extra: `fast`): the torch path's arithmetic without its temporaries.

The mean of the anchors is divided by the sum of the weights once, where the torch path divides every weight: one rounding less.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from partita.kernels import native
from partita.kernels.native import Floats
from partita.kernels.ramp_torch import RampOperands

__all__ = ["ramp_gradient", "ramp_sum"]

_BLOCK = 512  # queries at once
_BLOCK_ENTRIES = 1 << 14  # weights held at once


def ramp_sum(u: Tensor, ramp: RampOperands) -> Tensor:
    """`(n,)` to `(n,)`. All tensors are on the CPU and of one dtype, float64 or float32."""
    return _filled(u, None, ramp)


def ramp_gradient(grad: Tensor, u: Tensor, ramp: RampOperands) -> Tensor:
    """The product of `grad`, `(n,)`, with the derivative of `ramp_sum` in u."""
    return _filled(u, grad, ramp)


def _filled(u: Tensor, grad: Tensor | None, ramp: RampOperands) -> Tensor:
    x = np.ascontiguousarray(u.detach().numpy())
    factors = np.empty(0, x.dtype) if grad is None else np.ascontiguousarray(grad.detach().numpy())
    out, p, width = np.empty_like(x), ramp.anchors, ramp.width
    low, spacing, sharpness = (x.dtype.type(t.detach().item()) for t in (ramp.low, ramp.spacing, ramp.sharpness))
    sizes = (p - 1, p - 2, p - width, width // 2 - 1, 0.5)
    beyond = 1 + 64 / sharpness  # as in `in_spacings`: scores cannot overflow
    numbers = (low, spacing, sharpness, x.dtype.type(beyond), *(x.dtype.type(size) for size in sizes))

    def fill(part: slice) -> None:
        _fill(x[part], factors[part] if len(factors) else factors, numbers, width, out[part])

    native.compiled_once(("ramp", x.dtype), lambda: fill(slice(0, 1)))
    native.in_parts(len(x), fill)
    return torch.from_numpy(out)


def _fill(u: Floats, grad: Floats, numbers: tuple[np.floating, ...], width: int, out: Floats) -> None:
    from partita.kernels.ramp_loops import fill_ramp

    block = max(8, min(_BLOCK, _BLOCK_ENTRIES // width))
    fill_ramp(u, grad, numbers, np.empty((5, block), u.dtype), np.empty((width, block), u.dtype), out)
