"""What the methods on product grids share: the draft of a head, and the head made from it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from partita.geometry.domains import Array, Box
from partita.geometry.grid import ProductGrid
from partita.geometry.moments import window_for
from partita.heads.grid_head import GridHead
from partita.methods.request import Request

__all__ = ["GridDraft", "sharpness_of"]

_WHOLE = 64  # keys on an axis up to which a query looks at all of them


@dataclass(frozen=True, eq=False)
class GridDraft:
    """All choices of a head on a product grid.

    Attributes:
        counts: centers per axis, ghosts included. ghosts: how many of them lie beyond each end of the box; none by default.
        rates: R_i. half_windows: q_i; empty to choose them when the head is built.
        values: `(cells, out)`, None where f is to be evaluated when the head is built.
        slopes: `(cells, out, m)` for values affine in z, or None.
    """

    counts: tuple[int, ...]
    rates: tuple[float, ...]
    half_windows: tuple[int, ...]
    ghosts: tuple[int, ...] | None = None
    values: Array | None = None
    slopes: Array | None = None

    def grid(self, request: Request) -> ProductGrid:
        """The centers, rounded to the dtype of the head."""
        number = request.precision.number
        if self.ghosts is None:
            return ProductGrid.uniform(request.box, self.counts, dtype=number)
        return ProductGrid.uniform(request.box, self.counts, ghosts=self.ghosts, dtype=number)

    def head(self, request: Request, values: torch.Tensor | None = None, *, mass: float = 0.0) -> GridHead:
        """The head with these values, or with the draft's own; a draft without windows gets such as leave out at most `mass`."""
        grid = self.grid(request)
        slopes = None if self.slopes is None else torch.tensor(self.slopes).to(request.dtype)
        head = GridHead(
            grid,
            self.rates,
            torch.tensor(self.values).to(request.dtype) if values is None else values,
            value_slopes=slopes,
            half_windows=self.half_windows or _windows(grid, self.rates, mass),
            input_shapes=request.target.input_shapes,
            output_shape=request.target.output_shape,
        )
        head.check_range(*request.seen)
        return head


def sharpness_of(box: Box, draft: GridDraft) -> list[float]:
    """κ_i = R_i h_i² of the axes with more than one center."""
    ghosts = draft.ghosts or (0,) * len(draft.counts)
    inner = (n - 2 * g for n, g in zip(draft.counts, ghosts))
    sizes = zip(draft.rates, box.sides, inner, draft.counts)
    return [float(r * (s / n) ** 2) for r, s, n, c in sizes if c > 1]


def _windows(grid: ProductGrid, rates: tuple[float, ...], mass: float) -> tuple[int, ...]:
    """Whole axes where they are short; long ones (hundreds of keys) by windows that drop next to nothing."""
    counts = np.array(grid.counts)
    whole = (counts + 1) // 2
    found = window_for(grid.geometry, rates, max(mass / grid.dimension, 1e-17))
    windows: list[int] = np.where(counts <= _WHOLE, whole, np.minimum(found, whole)).tolist()
    return tuple(windows)
