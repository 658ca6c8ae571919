"""Tables looked at block by block, so that a table that is larger than memory is never copied whole."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

__all__ = ["all_finite", "blocks_of", "largest_size"]

_NUMBERS_AT_ONCE = 1 << 18


def blocks_of(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The same rows of all tensors, in order, some at a time: views that share their memory.

    Args:
        tensors: of at least one axis, with equally many rows.
    """
    rows = tensors[0].shape[0]
    step = max(1, _NUMBERS_AT_ONCE * rows // max(1, *(t.numel() for t in tensors)))
    for start in range(0, rows, step):
        yield tuple(t.detach()[start : start + step] for t in tensors)


def all_finite(tensor: Tensor) -> bool:
    """Whether no number is NaN or infinite."""
    return all(bool(torch.isfinite(block).all()) for (block,) in blocks_of(tensor.reshape(-1)))


def largest_size(tensor: Tensor) -> float:
    """`max |x|`, NaN if a number is NaN, and 0 if there are none."""
    sizes = [float(end) for (block,) in blocks_of(tensor.reshape(-1)) for end in torch.aminmax(block)]
    return float(np.abs(sizes).max()) if sizes else 0.0
