"""What the Triton kernels share: the launch, the exponential, the place of a coordinate among the centers of an axis.

Imported only where Triton is, when a batch on a CUDA device is run.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

__all__ = ["axis_cell", "launch", "power", "quotient"]


def launch(kernel: Any, blocks: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Run so many blocks of a kernel on the device of its first argument, a tensor, in that device's current stream."""
    with torch.cuda.device_of(arguments[0]):  # Triton itself takes the current device
        kernel[blocks](*arguments, **constants)


@triton.jit
def power(t, HALVINGS: tl.constexpr):
    """`e^t·2^−HALVINGS` for t ≤ 0, in the dtype of t.

    float32: `ex2.approx.ftz.f32` of `t·log₂e`, within 2.06 ulp on an H200, besides the rounding of its argument, which is |t|·u in
    the score; results below 2^−126 become 0. float64: `2ⁿ·p(r)`, p of degree 11 within 2·10⁻¹⁷ of 2^r relatively on |r| ≤ ½: within
    1.4 u, besides |t|·u as before; t below −690 counts as −690. A NaN may come out as a number: add `x − x` to a total.
    """
    if t.dtype == tl.float32:
        return tl.exp2(t * 1.4426950408889634 - HALVINGS)
    else:
        t = tl.where(t > -690.0, t, -690.0)
        shifter: tl.constexpr = 6755399441055744.0 - HALVINGS  # 1.5·2⁵²: the sum's low bits hold the nearest integer
        t = t * 1.4426950408889634
        shifted = t + shifter
        r = t - (shifted - shifter)
        p = r * 4.4558179083360645e-10 + 7.074194297288521e-09
        p = p * r + 1.0178057087733941e-07
        p = p * r + 1.3215432535912375e-06
        p = p * r + 1.5252733841556773e-05
        p = p * r + 0.00015403530463724353
        p = p * r + 0.001333355814640647
        p = p * r + 0.009618129107587256
        p = p * r + 0.055504108664821625
        p = p * r + 0.24022650695910158
        p = p * r + 0.6931471805599453
        p = p * r + 1.0
        bits = p.to(tl.int64, bitcast=True) + (shifted.to(tl.int64, bitcast=True) << 52)
        return bits.to(tl.float64, bitcast=True)


@triton.jit
def axis_cell(x, centers, count):
    """k with `centers[k] ≤ x < centers[k+1]`, 0 ≤ k ≤ count − 2, for nearly uniform centers; settled by comparison."""
    first = tl.load(centers).to(tl.float64)  # float32 could miss by more than a cell
    last = tl.load(centers + count - 1).to(tl.float64)
    guess = (x.to(tl.float64) - first) * ((count - 1) / (last - first))
    guess = tl.where(guess > 0, guess, 0.0)  # NaN too
    k = tl.where(guess < count - 2, guess, count - 2).to(tl.int32)
    k = tl.maximum(k - (x < tl.load(centers + k)).to(tl.int32), 0)
    return tl.minimum(k + (x >= tl.load(centers + k + 1)).to(tl.int32), count - 2)


@triton.jit
def quotient(a, b):
    """`a/b`, rounded once: in float32 `/` may be off by 2 ulp."""
    if b.dtype == tl.float32:
        return tl.div_rn(a, b)
    else:
        return a / b
