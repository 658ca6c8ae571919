"""What the methods on product grids share: the draft of a head, and the head made from it, in memory or in a file."""

from __future__ import annotations

import math
import secrets
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from partita.geometry.domains import Array, Box
from partita.geometry.grid import ProductGrid
from partita.geometry.moments import window_for
from partita.heads.grid_head import GridHead
from partita.heads.tensor_file import TensorFile, map_tensors, stored_name
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
        slopes: `(cells, out, m)` for values affine in z, or None, as the values.
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

    def head(self, request: Request, values: Tensor | None = None, *, mass: float = 0.0) -> GridHead:
        """The head with these values, or with the draft's own; a draft without windows gets such as leave out at most `mass`."""
        own = [torch.tensor(t).to(request.dtype) for t in (self.values, self.slopes) if t is not None]
        head = self._with(request, own if values is None else [values, *own], mass)
        head.check_range(*request.seen)
        return head

    def filled(
        self, request: Request, blocks: Iterable[Sequence[Tensor]], *, sloped: bool = False
    ) -> tuple[GridHead, Path | None]:
        """The head whose tables are these blocks one after the other, and the file that holds its tensors, if one does.

        The tables lie in memory, or, if the request names a folder, in a file there that is mapped into memory.

        Args:
            blocks: rows of the tables, in the order of the cells: values `(n, out)`, and slopes `(n, out, m)` if `sloped`.

        Raises:
            NotWrittenError: the tables do not fit on the disk.
        """
        outputs, cells = math.prod(request.target.output_shape), math.prod(self.counts)
        shapes = {"values": (cells, outputs)} | ({"value_slopes": (cells, outputs, len(self.counts))} if sloped else {})
        if request.folder is None:
            tables, start = [torch.empty(shape, dtype=request.dtype) for shape in shapes.values()], 0
            for block in blocks:
                for table, part in zip(tables, block):
                    table[start : start + len(part)] = part
                start += len(block[0])
            path = None
        else:
            path = request.folder / f"{secrets.token_hex(8)}.safetensors"
            # views of a single number say how large the tables will be, and take no memory
            empty = [torch.zeros((), dtype=request.dtype).expand(shape) for shape in shapes.values()]
            tensors = {stored_name(n): t for n, t in self._with(request, empty).state_dict().items()}
            names = [stored_name(n) for n in shapes]
            with TensorFile(path, tensors) as file:
                for name, tensor in tensors.items():
                    if name not in names:
                        file.append(name, tensor)
                for block in blocks:
                    for name, part in zip(names, block):
                        file.append(name, part)
            with open(path, "rb") as whole:
                mapped = map_tensors(whole)
            tables = [mapped[name] for name in names]
        head = self._with(request, tables)
        if path is not None:  # a head that is not wanted any more leaves no file behind
            weakref.finalize(head, path.unlink, missing_ok=True)
        head.check_range(*request.seen)
        return head, path

    def _with(self, request: Request, tables: Sequence[Tensor], mass: float = 0.0) -> GridHead:
        grid, (values, *slopes) = self.grid(request), tables
        return GridHead(
            grid,
            self.rates,
            values,
            value_slopes=slopes[0] if slopes else None,
            half_windows=self.half_windows or _windows(grid, self.rates, mass),
            input_shapes=request.target.input_shapes,
            output_shape=request.target.output_shape,
        )


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
