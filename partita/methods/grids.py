"""What the methods on product grids share: the draft of a head, and the head made from it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from partita.geometry.domains import Array, Box
from partita.geometry.grid import ProductGrid
from partita.heads.grid_head import GridHead
from partita.methods.request import Request

__all__ = ["GridDraft", "sharpness_of"]


@dataclass(frozen=True, eq=False)
class GridDraft:
    """All choices of a head on a product grid.

    Attributes:
        counts: centers per axis, ghosts included. ghosts: how many of them lie beyond each end of the box; none by default.
        rates: R_i. half_windows: q_i.
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

    def head(self, request: Request, values: torch.Tensor | None = None) -> GridHead:
        """The head with these values, or with the draft's own."""
        slopes = None if self.slopes is None else torch.tensor(self.slopes).to(request.dtype)
        return GridHead(
            self.grid(request),
            self.rates,
            torch.tensor(self.values).to(request.dtype) if values is None else values,
            value_slopes=slopes,
            half_windows=self.half_windows,
            input_shapes=request.target.input_shapes,
            output_shape=request.target.output_shape,
        )


def sharpness_of(box: Box, draft: GridDraft) -> list[float]:
    """κ_i = R_i h_i² of the axes with more than one center."""
    ghosts = draft.ghosts or (0,) * len(draft.counts)
    inner = (n - 2 * g for n, g in zip(draft.counts, ghosts))
    sizes = zip(draft.rates, box.sides, inner, draft.counts)
    return [float(r * (s / n) ** 2) for r, s, n, c in sizes if c > 1]
