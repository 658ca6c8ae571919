"""The ramp over anchors and its gradient on CUDA devices, as Triton kernels; float32 and float64.

The arithmetic is that of `RampHead`: `s = (u − a)/Δ = c + y` with an IEEE division, scores `κ i(y − i/2)` for the anchors c + i,
relative to the better of the anchors 0 and 1, between which or beyond which y lies; the exponential is `triton_code.power`, and
the sums run over the window in order. So the certificate's terms for the torch path hold here.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from partita.kernels.triton_code import launch, power, quotient

__all__ = ["gradients_on_device", "sum_on_device"]

_BLOCK = 512


@triton.jit
def _place(u, low, spacing, sharpness, anchors, WIDTH: tl.constexpr):
    """`s − c`, c, the window's first anchor relative to c, and whether s was clamped."""
    beyond = 1 + quotient(64.0, sharpness)
    end = (anchors - 1).to(u.dtype) + beyond
    s = quotient(u - low, spacing)
    clamped = (s < -beyond) | (s > end)
    s = tl.where(s < -beyond, -beyond, tl.where(s > end, end, s))  # NaN stays
    last = (anchors - 2).to(u.dtype)
    cell = tl.floor(s)
    cell = tl.where(cell > 0, tl.where(cell < last, cell, last), 0.0)
    start = cell - (WIDTH // 2 - 1)
    most = (anchors - WIDTH).to(u.dtype)
    start = tl.where(start > 0, tl.where(start < most, start, most), 0.0)
    return s - cell, cell, start - cell, clamped


@triton.jit
def _moments(y, first, sharpness, WIDTH: tl.constexpr):
    """`Σ w i` and `Σ w i(i − 1)` over the anchors c + i of the window."""
    best = sharpness * (y - 0.5)
    best = tl.where(best > 0, best, 0.0)
    mass = y - y  # NaN if y is not finite
    mean = y - y
    second = y - y
    for k in range(WIDTH):
        i = first + k
        e = power(sharpness * i * (y - i / 2) - best, 0)
        mass += e
        mean += e * i
        second += e * (i * (i - 1))
    return mean / mass, second / mass


@triton.jit(do_not_specialize=["n", "anchors"])
def _sum_block(
    u, low, spacing, sharpness, out, n, anchors, WIDTH: tl.constexpr, SLOPED: tl.constexpr, BLOCK: tl.constexpr
):
    """The ramp, or with SLOPED its derivative times what `out` holds."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    x = tl.load(u + at, mask=inside, other=0.0)
    kappa = tl.load(sharpness)
    a = tl.load(low)
    gap = tl.load(spacing)
    y, cell, first, clamped = _place(x, a, gap, kappa, anchors, WIDTH)
    mean, second = _moments(y, first, kappa, WIDTH)
    if SLOPED:
        # the variance of i: Σ w i(i − 1) + mean(1 − mean), in which nothing cancels
        slope = tl.where(clamped, 0.0, kappa * (second + mean * (1 - mean)))
        tl.store(out + at, tl.load(out + at, mask=inside, other=0.0) * slope, mask=inside)
    else:
        tl.store(out + at, a + gap * (cell + mean), mask=inside)


def sum_on_device(u: Tensor, low: Tensor, spacing: Tensor, sharpness: Tensor, anchors: int, width: int) -> Tensor:
    """`Σ_k softmax_k(−κ(s − k)²/2)·(a + kΔ)`, `s = (u − a)/Δ`, over the `width` anchors around s.

    Args, on one CUDA device and of one dtype, float32 or float64:
        u: `(n,)`.
        low, spacing, sharpness: a, Δ and κ, without dimensions.
        anchors: their number, at least 2.
        width: of the window, even or `anchors`.

    Returns:
        `(n,)`.
    """
    out = torch.empty_like(u, memory_format=torch.contiguous_format)
    return _filled(out, u, (low, spacing, sharpness), anchors, width, sloped=False)


def gradients_on_device(
    grad: Tensor, u: Tensor, low: Tensor, spacing: Tensor, sharpness: Tensor, anchors: int, width: int
) -> Tensor:
    """The gradient of `Σ grad·sum_on_device(u, …)` with respect to u, `(n,)`; 0 where u lies so far outside that s is clamped."""
    out = grad.clone(memory_format=torch.contiguous_format)
    return _filled(out, u, (low, spacing, sharpness), anchors, width, sloped=True)


def _filled(out: Tensor, u: Tensor, numbers: tuple[Tensor, ...], anchors: int, width: int, *, sloped: bool) -> Tensor:
    """`out` after the kernel: the ramp, or its derivative times what `out` held."""
    if len(u):
        arguments, constants = (u.contiguous(), *numbers, out, len(u), anchors), {"WIDTH": width, "SLOPED": sloped}
        launch(_sum_block, (triton.cdiv(len(u), _BLOCK),), *arguments, **constants, BLOCK=_BLOCK, num_warps=4)
    return out
