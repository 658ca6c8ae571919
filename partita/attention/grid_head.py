"""The folded head on a product grid: one small softmax per axis, and only the window that matters."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from partita.attention import kernels
from partita.attention.head import FoldedHead
from partita.attention.scores import AffineScores
from partita.errors import DomainError, ShapeError
from partita.geometry.domains import Array
from partita.geometry.grid import ProductGrid

__all__ = ["GridHead"]

_WINDOW_AT_ONCE = 1 << 18  # window entries held by one step of the torch path: they should stay in the cache
_DENSE_AT_ONCE = 1 << 22  # scores held by one step of the dense reference


class GridHead(FoldedHead):
    """`net(z) = Σ_j Π_i softmax_i(−R_i(z_i − c_{i,j_i})²/2) V_j` over the cells j of a product grid.

    Differences are centred (`z_i − c` is formed first), so float32 loses nothing to large coordinates. Only the `2q_i` centers
    around z_i enter on axis i; what that drops is bounded by `geometry.dropped_mass` and part of the certificate.

    Args:
        grid: the centers, uniform on each axis.
        inverse_temperature: R_i, a number or one per axis.
        values: `(cells, out)`, row-major like the grid.
        half_windows: q_i per axis.
        input_shapes, output_shape: see `FoldedHead`.

    Buffers: `centers_0` … `centers_{m−1}`, `inverse_temperature` `(m,)`, `values` `(cells, out)`.
    """

    inverse_temperature: Tensor

    def __init__(
        self,
        grid: ProductGrid,
        inverse_temperature: ArrayLike,
        values: Tensor,
        *,
        half_windows: ArrayLike,
        input_shapes: tuple[tuple[int, ...], ...],
        output_shape: tuple[int, ...],
    ) -> None:
        super().__init__(input_shapes=input_shapes, output_shape=output_shape)
        if values.shape != (grid.num_cells, math.prod(output_shape)):
            raise ShapeError(
                f"values of shape {tuple(values.shape)}; expected ({grid.num_cells}, {math.prod(output_shape)})."
            )
        self.counts = grid.counts
        q = np.broadcast_to(np.asarray(half_windows, dtype=np.int64), len(self.counts))
        self.half_windows = tuple(int(k) for k in q)
        rates = np.broadcast_to(np.asarray(inverse_temperature, dtype=np.float64), grid.dimension)
        if min(self.half_windows) < 1 or not (np.isfinite(rates).all() and (rates > 0).all()):
            raise DomainError(
                f"half windows {self.half_windows} and inverse temperatures {rates.tolist()} must be positive."
            )
        if any((np.diff(axis) <= 0).any() for axis in grid.axes):
            raise DomainError("the centers of an axis must increase strictly.")
        self.widths = tuple(min(2 * k, count) for k, count in zip(self.half_windows, self.counts))
        for i, axis in enumerate(grid.axes):
            self.register_buffer(f"centers_{i}", torch.tensor(axis, dtype=values.dtype))
        self.register_buffer("inverse_temperature", torch.tensor(rates.copy(), dtype=values.dtype))
        self.register_buffer("values", values)

    @property
    def axes(self) -> tuple[Tensor, ...]:
        return tuple(self._buffers[f"centers_{i}"] for i in range(len(self.counts)))  # type: ignore[misc]

    @property
    def num_keys(self) -> int:
        return math.prod(self.counts)

    def middle(self) -> Array:
        return np.array([(float(a[0]) + float(a[-1])) / 2 for a in self.axes])

    def affine_scores(self, *, shift: bool = False) -> AffineScores:
        middle = self.middle()
        axes = [a.double().cpu().numpy() - (middle[i] if shift else 0.0) for i, a in enumerate(self.axes)]
        centers = np.stack([a.ravel() for a in np.meshgrid(*axes, indexing="ij")], axis=1)
        rates = self.inverse_temperature.double().cpu().numpy()
        values = self.values.detach().double().cpu().numpy()
        return AffineScores.of_centers(centers, rates, values, origin=None if shift else middle)

    def axis_window(self, x: Tensor, axis: int) -> tuple[Tensor, Tensor]:
        """Softmax weights `(n, width)` of the window around x on one axis, and the window's first index, `(n,)`."""
        centers, count, width = self.axes[axis], self.counts[axis], self.widths[axis]
        start = torch.zeros(x.shape, dtype=torch.long, device=x.device)
        if width < count:
            first, last = centers[0].double(), centers[-1].double()  # float32 could miss by more than a cell
            guess = (x.detach().double() - first) * ((count - 1) / (last - first))
            k = guess.nan_to_num(0.0).floor().clamp(0, count - 2).long()
            k = (k - (x < centers[k]).long()).clamp(0, count - 2)  # the guess is rounded: settle by comparison
            k = (k + (x >= centers[k + 1]).long()).clamp(0, count - 2)
            start = (k - width // 2 + 1).clamp(0, count - width)
        near = centers[start[:, None] + torch.arange(width, device=x.device)]
        difference = x[:, None] - near
        return torch.softmax(-0.5 * self.inverse_temperature[axis] * difference * difference, dim=1), start

    def evaluate(self, flat: Tensor) -> Tensor:
        if self._can_run_natively(flat):
            return self._evaluate_native(flat)
        if torch.compiler.is_compiling():
            return self._evaluate_window(flat)
        step = max(1, _WINDOW_AT_ONCE // (math.prod(self.widths) * self.values.shape[1]))
        if len(flat) <= step:
            return self._evaluate_window(flat)
        return torch.cat([self._evaluate_window(chunk) for chunk in flat.split(step)])

    def _can_run_natively(self, flat: Tensor) -> bool:
        tracked = torch.is_grad_enabled() and (flat.requires_grad or self.values.requires_grad)
        plain = flat.device.type == "cpu" and self.dtype in (torch.float64, torch.float32)
        return kernels.AVAILABLE and plain and not tracked and not torch.compiler.is_compiling()

    def _evaluate_window(self, flat: Tensor) -> Tensor:
        weights, start = self.axis_window(flat[:, 0], 0)
        cells = start[:, None] + torch.arange(self.widths[0], device=flat.device)
        for i in range(1, len(self.counts)):
            w, start = self.axis_window(flat[:, i], i)
            index = start[:, None] + torch.arange(self.widths[i], device=flat.device)
            weights = (weights[:, :, None] * w[:, None, :]).flatten(1)
            cells = (cells[:, :, None] * self.counts[i] + index[:, None, :]).flatten(1)
        return (weights[:, :, None] * self.values[cells]).sum(dim=1)

    def _evaluate_native(self, flat: Tensor) -> Tensor:
        values = self.values.detach().numpy()
        out = np.empty((len(flat), values.shape[1]), values.dtype)
        counts = np.array(self.counts, dtype=np.int64)
        axes = [a.numpy() for a in self.axes]
        kernels.grid_window_sum(
            np.ascontiguousarray(flat.detach().numpy()),
            axes[0] if len(axes) == 1 else np.concatenate(axes),  # one axis may be as long as the values: no copy
            np.concatenate([[0], np.cumsum(counts)[:-1]]),
            counts,
            (self.inverse_temperature * 0.5).numpy(),
            np.array(self.widths, dtype=np.int64),
            np.ascontiguousarray(values),
            out,
        )
        return torch.from_numpy(out)

    def evaluate_dense(self, flat: Tensor) -> Tensor:
        step = max(1, _DENSE_AT_ONCE // self.num_keys)
        out = []
        for chunk in flat.split(step) if len(flat) else [flat]:
            scores = chunk.new_zeros(len(chunk), 1)
            for i, centers in enumerate(self.axes):
                difference = chunk[:, i, None] - centers
                term = -0.5 * self.inverse_temperature[i] * difference * difference
                scores = (scores[:, :, None] + term[:, None, :]).flatten(1)
            out.append(torch.softmax(scores, dim=1) @ self.values)
        return torch.cat(out)
