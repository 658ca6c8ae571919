"""The sums over a tile of scores as native loops (extra: `fast`). They take two passes; torch needs about fifteen."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from partita.kernels import native

__all__ = ["sum_tile"]

_ROWS = 16  # least rows per thread


def sum_tile(
    scores: Tensor, places: Tensor, tokens: tuple[Tensor, Tensor, Tensor] | None
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Sums and places by the names of `RowSums`, `(heads, rows)` each; the margin is NaN where no key is seen.

    Args:
        scores: `(heads, rows, keys)` on the CPU, float32 or float64, −∞ where masked; rows need not be adjacent, numbers of
            a row must be. Overwritten by the weights, relative to the best one and 0 at the winner.
        places: `(rows,)`, positions of the queries relative to the first key.
        tokens: integers below 2³¹: of the queries `(rows,)`, of the keys `(keys,)` and of the keys before them; None if unknown.
    """
    heads, rows, count = scores.shape
    stride = scores.stride(1)
    flat = scores.as_strided((scores.untyped_storage().nbytes() // scores.element_size(),), (1,), 0).numpy()
    flat = flat[scores.storage_offset() :]
    sums, found = np.full((10, heads * rows), np.nan), np.empty((3, heads * rows), np.int64)
    own, ids, before = (_integers(t) for t in tokens or (None, None, None))
    where, columns = places.to(scores.dtype).numpy(), np.arange(count, dtype=flat.dtype)

    def run(part: slice) -> None:
        from partita.kernels import rows_loops

        fixed = (where, columns, own, ids, before, sums, found)
        rows_loops.sum_tile(flat, stride, count, part.start, part.stop, *fixed)

    native.compiled_once(("rows", flat.dtype), lambda: run(slice(0, 0)))
    native.in_parts(heads * rows, run, least=_ROWS)
    shape = (heads, rows)
    names = ("best", "margin", "rest", "weighted", "squares", "below", "below_squared", "away", "same", "after_same")
    places_found = ("winner", "runner_up", "seen")
    return (
        {name: torch.from_numpy(row).view(shape) for name, row in zip(names, sums)},
        {name: torch.from_numpy(row).view(shape) for name, row in zip(places_found, found)},
    )


def _integers(tokens: Tensor | None) -> np.ndarray:
    return np.empty(0, np.int32) if tokens is None else tokens.to(torch.int32).numpy()
