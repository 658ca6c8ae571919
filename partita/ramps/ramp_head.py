"""The ramp head: a truncated linear function of every token at once, one softmax per token over the same anchors."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from partita.errors import DomainError
from partita.geometry.domains import Box
from partita.geometry.grid import ProductGrid
from partita.heads.grid_head import GridHead
from partita.heads.head import flatten_inputs
from partita.kernels import ramp_operator
from partita.kernels.guards import certified
from partita.kernels.ramp_torch import RampOperands, in_spacings
from partita.kernels.trace_modes import is_exporting, is_traced
from partita.ramps.anchors import half_window_for

__all__ = ["AnchoredRamp", "RampHead"]


class AnchoredRamp(nn.Module):
    """What ramps over anchors `L_k = a + kΔ` store: w, t, a, Δ and κ = RΔ²; no list of anchors."""

    slopes: Tensor
    offsets: Tensor
    low: Tensor
    spacing: Tensor
    sharpness: Tensor

    def __init__(
        self, slopes: Tensor, offsets: Tensor, *, ends: tuple[float, float], anchors: int, sharpness: float
    ) -> None:
        super().__init__()
        self.anchors = anchors
        self.register_buffer("slopes", slopes)
        self.register_buffer("offsets", offsets)
        for name, value in (
            ("low", ends[0]),
            ("spacing", (ends[1] - ends[0]) / (anchors - 1)),
            ("sharpness", sharpness),
        ):
            self.register_buffer(name, torch.tensor(value, dtype=slopes.dtype))

    def in_spacings(self, u: Tensor) -> Tensor:
        """`s = (u − a)/Δ`, clamped where an end's anchor holds all but e^{−64}, so that scores cannot overflow."""
        return in_spacings(u, self.low, self.spacing, self.sharpness, self.anchors)


class RampHead(AnchoredRamp):
    """`y_i = Σ_k softmax_k(−R(u_i − L_k)²/2)·L_k`, `u_i = w_i·x_i + t_i`, at one coordinate of every output token.

    Anchors `L_k = a + kΔ`, k < p, both ends included. Only the 2q anchors around u_i are summed, in coordinates of their own:
    with `s = (u − a)/Δ = c + y`, c the cell, the scores are `κ i(y − i/2)` for the anchors c + i. No large numbers are
    subtracted, so float32 holds for any p, and no list of anchors is stored; s is clamped where nothing more can change.

    Args:
        slopes: w, `(tokens, dim)`, or `(1, dim)` for one w and any number of tokens.
        offsets: t, `(tokens,)` or `(1,)`.
        low, high: a < b.
        anchors: p.
        sharpness: κ = RΔ².
        half_window: q.
        coordinate, out_dim: where in the output token the ramp goes; the rest is 0.

    Shapes: `(…, tokens, dim)` to `(…, tokens, out_dim)`.
    """

    def __init__(
        self,
        slopes: Tensor,
        offsets: Tensor,
        *,
        ends: tuple[float, float],
        anchors: int,
        sharpness: float,
        half_window: int,
        output: tuple[int, int],
    ) -> None:
        super().__init__(slopes, offsets, ends=ends, anchors=anchors, sharpness=sharpness)
        self.coordinate, self.out_dim = output
        self._given_ends = (float(self.low), float(self.spacing)), ends
        self._given_window = float(self.sharpness), half_window

    @property
    def ends(self) -> tuple[float, float]:
        """(a, b): those given, or what `low` and `spacing` say if they were changed."""
        stored, ends = self._given_ends
        low, spacing = float(self.low), float(self.spacing)
        return ends if (low, spacing) == stored else (low, low + spacing * (self.anchors - 1))

    @property
    def width(self) -> int:
        """Anchors that are summed, 2q at most. A changed sharpness gets a window of its own.

        Raises:
            DomainError: a sharpness that was changed to something that is not finite and > 0.
        """
        given_for, q = self._given_window
        if is_traced(self.sharpness):  # a graph takes the tensor as it will be when it runs
            if not is_exporting():
                message = "RampHead: the sharpness changed after compiling; compile again."
                torch._assert_async(self.sharpness == given_for, message)
            return min(2 * q, self.anchors)
        kappa = float(self.sharpness)
        if not 0 < kappa < math.inf:
            raise DomainError(f"RampHead: sharpness is {kappa}; expected a finite number > 0.")
        return min(2 * (q if kappa == given_for else half_window_for(kappa)), self.anchors)

    @property
    def dtype(self) -> torch.dtype:
        return self.slopes.dtype

    def extra_repr(self) -> str:
        tokens = "any number of" if len(self.slopes) == 1 else str(len(self.slopes))
        return f"{self.anchors:,} anchors on [{self.ends[0]:g}, {self.ends[1]:g}], {tokens} tokens, {self.dtype}"

    def queries(self, x: Any) -> Tensor:
        """`u_i = w_i·x_i + t_i`, `(…, tokens)`."""
        tokens, dim = self.slopes.shape
        if tokens == 1:
            flat, lead = flatten_inputs((x,), ((dim,),), self.dtype)
            return ((flat * self.slopes).sum(dim=1) + self.offsets).reshape(lead)
        flat, lead = flatten_inputs((x,), ((tokens, dim),), self.dtype)
        return ((flat.reshape(-1, tokens, dim) * self.slopes).sum(dim=2) + self.offsets).reshape(*lead, tokens)

    @certified
    def forward(self, x: Any) -> Tensor:
        u, width = self.queries(x), self.width
        ramp = ramp_operator.ramp_sum(
            u.reshape(-1), RampOperands(self.low, self.spacing, self.sharpness, self.anchors, width)
        )
        place = torch.zeros(self.out_dim, dtype=self.dtype, device=u.device)
        place[self.coordinate] = 1.0
        return ramp.reshape(*u.shape, 1) * place

    def as_grid_head(self) -> GridHead:
        """The same head in the first paper's terms: a product grid of one axis in u, with the anchors as centers and values."""
        grid = anchor_grid(self.ends, self.anchors, np.float32 if self.dtype == torch.float32 else np.float64)
        gap = (self.ends[1] - self.ends[0]) / (self.anchors - 1)
        return GridHead(
            grid,
            float(self.sharpness) / gap**2,
            torch.tensor(grid.axes[0], dtype=self.dtype)[:, None],
            half_windows=math.ceil(self.width / 2),
            input_shapes=((1,),),
            output_shape=(),
        )


def anchor_grid(ends: tuple[float, float], anchors: int, dtype: type[np.floating] = np.float64) -> ProductGrid:
    """The partition behind a ramp: p centers whose cells reach half a spacing beyond [a, b]."""
    low, high = ends
    centers = np.linspace(low, high, anchors).astype(dtype).astype(np.float64)
    half = (high - low) / (anchors - 1) / 2
    return ProductGrid(Box([low - half], [high + half]), (centers,))
