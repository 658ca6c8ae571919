"""Rotary positions: scores that depend on relative positions, and the linear maps that they reach exactly."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn

from partita.arithmetic.arguments import real_array, require_dtype, require_number
from partita.arithmetic.precision import Precision
from partita.arithmetic.rounding import add_up, expm1_up, mul_up, up
from partita.errors import ShapeError, SizeError
from partita.heads.head import real_tensor
from partita.kernels.guards import certified
from partita.proofs.claim import require_ordinary

__all__ = ["RotaryConvolution", "rotary_convolution"]

_MOST_TOKENS = 2048


class RotaryConvolution(nn.Module):
    """Rotary encodings with the angle 2π/n: `out_i = Σ_k W_k x_{(i−k) mod n}`, one head per shift, weights shared by all tokens.

    Queries and keys are two constant vectors, rotated by the position: the score of tokens i and j is `β cos(2π(i − j − k)/n)`.

    Shapes: `(…, n, dim)` to `(…, n, out)`.

    Attributes:
        w_v: `(n, out, dim)`, one value matrix per head.
        query: `(n, 2)`, the bias of W_Q of each head before rotation. The key is (1, 0).
    """

    w_v: Tensor
    query: Tensor

    def __init__(self, w_v: Tensor, query: Tensor, residual: float) -> None:
        super().__init__()
        self.register_buffer("w_v", w_v)
        self.register_buffer("query", query)
        self.residual = residual

    @property
    def tokens(self) -> int:
        """n, also the number of heads."""
        return len(self.w_v)

    def scores(self) -> Tensor:
        """`(heads, n, n)`: query of token i, rotated by i, times key of token j, rotated by j."""
        angle = torch.arange(self.tokens, dtype=self.w_v.dtype, device=self.w_v.device) * (2 * math.pi / self.tokens)
        turn = torch.stack([angle.cos(), angle.sin()], dim=-1)
        a, b = self.query[:, None, 0], self.query[:, None, 1]
        queries = torch.stack([a * turn[:, 0] - b * turn[:, 1], a * turn[:, 1] + b * turn[:, 0]], dim=-1)
        return queries @ turn.T

    @certified
    def forward(self, x: Any) -> Tensor:
        z, shape = real_tensor("tokens", x), (self.tokens, self.w_v.shape[2])
        if z.dim() < 2 or tuple(z.shape[-2:]) != shape:
            raise ShapeError(f"tokens have shape {tuple(z.shape)}; expected (…, {shape[0]}, {shape[1]}).")
        weights = torch.softmax(self.scores(), dim=-1)
        return torch.einsum("hij,...jd,hod->...io", weights, z.to(self.w_v.dtype), self.w_v)

    def error_bound_for(self, size: float) -> float:
        """A bound of the distance from the convolution, in every entry, for inputs of this size. It is proportional to the size.

        Args:
            size: the largest absolute value of an entry of x, ≥ 0.

        Raises:
            DomainError: the size is negative or not a finite number.
        """
        size = require_number("size", size, zero=True)
        unit, n = Precision.of(self.w_v.dtype).unit, self.tokens
        beta = float(self.query.abs().max()) * 1.5
        delta = mul_up(unit, add_up(mul_up(40.0, beta), 40.0, 2.0 * n))
        gain = float(self.w_v.double().abs().sum(dim=(0, 2)).max()) * (1 + 1e-12)
        relative = add_up(
            expm1_up(mul_up(2.0, delta)), mul_up(1.01 * unit, 2.0 * n * (1 + self.w_v.shape[2]) + 2.0 * n + 40.0)
        )
        return mul_up(add_up(self.residual, mul_up(relative, gain)), size)


def rotary_convolution(kernel: ArrayLike, *, dtype: torch.dtype = torch.float64) -> RotaryConvolution:
    """Every linear map of sequences that commutes with cyclic shifts, by one attention layer with rotary encodings.

    A head with the score `β cos(2π(i − j − k)/n)` is a cyclic shift by k, blurred by a circulant matrix that does not depend on k.
    The values are divided by it, so the result is exact up to rounding. Maps that do not commute with shifts are out of reach of
    these encodings, with any weights: `equivariance_gap(f, box, group="shifts")` bounds the error that remains.

    *Theorem*: `rotary-convolution`.

    Args:
        kernel: W, `(n, out, dim)`: `out_i = Σ_k W_k x_{(i−k) mod n}`.
        dtype: torch.float64 or torch.float32.

    Raises:
        ShapeError: the kernel is not `(n, out, dim)`.
        DomainError: its numbers are out of the dtype's range.

    >>> shift = rotary_convolution(np.eye(4)[1][:, None, None])  # every token moves on by one
    >>> shift(torch.tensor([[1.0], [2.0], [3.0], [4.0]]))[:, 0].round().tolist(), shift.error_bound_for(size=4.0) < 1e-12
    ([4.0, 1.0, 2.0, 3.0], True)
    """
    w = real_array("the kernel", kernel)
    if w.ndim != 3 or not w.size or not np.isfinite(w).all():
        raise ShapeError(f"the kernel has shape {w.shape}; expected finite (n, out, dim).")
    require_dtype(dtype)
    n = len(w)
    if n > _MOST_TOKENS:
        raise SizeError(f"{n:,} tokens need as many heads; at most {_MOST_TOKENS:,} are allowed.")
    angle = 2 * math.pi * np.arange(n) / n
    beta = (math.log(n) + 5) / (1 - math.cos(2 * math.pi / n)) if n > 1 else 1.0
    blur = np.exp(beta * (np.cos(angle) - 1))
    blur /= blur.sum()
    with np.errstate(over="ignore", invalid="ignore"):
        values = np.fft.ifft(np.fft.fft(w, axis=0) / np.fft.fft(blur)[:, None, None], axis=0).real
        largest = float(np.nan_to_num(np.abs(values), nan=np.inf).max())
    if w.any():
        require_ordinary(dtype, largest_value=largest)
    stored = torch.tensor(values, dtype=dtype)
    query = torch.tensor(beta * np.stack([np.cos(angle), -np.sin(angle)], axis=1), dtype=dtype)
    index = (np.arange(n)[:, None] - np.arange(n)) % n
    kept = stored.double().numpy()
    made = np.einsum("kh,hod->kod", blur[index], kept)
    # the blur itself is known up to rounding of cos, of β and of exp
    unknown = (8 * beta + 40 + 4 * n) * 2.0**-53 * np.einsum("kh,hod->kod", blur[index], np.abs(kept))
    residual = float(up((np.abs(made - w) + unknown).sum(axis=(0, 2)).max() * (1 + 1e-9), 8))
    return RotaryConvolution(stored, query, residual)
