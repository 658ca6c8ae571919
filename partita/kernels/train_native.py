"""The sum over a tensor train as native loops (extra: `fast`).

On each axis only the centers around x enter that hold all but a sixteenth of a unit roundoff of the weights. What that leaves out
changes the result by less than one of its roundings does (`window-tail`). Fitted trains, whose weights are wide, use all centers.
A term passes through `P_i + r_i` roundings an axis, as in the torch path: products of weights and core entries, then of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from partita.kernels import native
from partita.kernels.axis_windows import half_window
from partita.kernels.native import Floats
from partita.kernels.train_torch import TrainOperands

__all__ = ["train_gradients", "train_sum"]

_BLOCK = 256  # queries at once where all share one window
_SORTED = 4096  # where they are sorted by their windows
_SORTED_GRADIENTS = 1024
_NEGLIGIBLE = 1 / 32  # of the dtype's eps: the share of the weights that may be left out on an axis

Axes = tuple[Floats, NDArray[np.int64], NDArray[np.int64], Floats]


def train_sum(points: Tensor, train: TrainOperands) -> Tensor:
    """`(n, m)` to `(n, out)`. All tensors are on the CPU and of one dtype, float64 or float32."""
    x, work = _array(points), _Work(train)
    out = np.empty((len(x), train.cores[-1].shape[2]), x.dtype)
    native.compiled_once(("train", x.dtype), lambda: work.sum_part(x[:1], out[:1]))
    native.in_parts(len(x), lambda part: work.sum_part(x[part], out[part]))
    return torch.from_numpy(out)


def train_gradients(
    grad: Tensor, points: Tensor, train: TrainOperands, needs: Sequence[bool]
) -> tuple[Tensor, list[Tensor]]:
    """The products of `grad`, `(n, out)`, with the derivatives in the points and in the cores; empty where not needed.

    Each thread adds to gradients of its own in the cores, and these are added up in the order of the queries.
    """
    x, factors, work = _array(points), _array(grad), _Work(train)
    in_points = np.empty(x.shape if needs[0] else (0, x.shape[1]), x.dtype)
    size = train.reads if any(needs[1:]) else 0
    parts: dict[int, Floats] = {}

    def add(part: slice) -> None:
        parts[part.start] = np.zeros(size, x.dtype)
        work.add_part(x[part], factors[part], in_points[part] if needs[0] else in_points, parts[part.start])

    few = slice(0, 1)
    native.compiled_once(
        ("train gradients", x.dtype),
        lambda: work.add_part(x[few], factors[few], in_points[few], np.zeros(size, x.dtype)),
    )
    native.in_parts(len(x), add)
    total = parts.pop(0)
    for start in sorted(parts):
        total += parts[start]
    found, begin = [], 0
    for core, needed in zip(train.cores, needs[1:]):
        part = torch.from_numpy(total[begin : begin + core.numel()]) if needed else points.new_empty(0)
        found.append(part.reshape(core.shape).clone() if needed else part)
        begin += core.numel()
    return torch.from_numpy(in_points) if needs[0] else points.new_empty(0), found


class _Work:
    """The operands as arrays, and the scratch that the loops need."""

    def __init__(self, train: TrainOperands) -> None:
        centers, rates = [_array(c) for c in train.centers], _array(train.rates)
        counts = np.array([len(c) for c in centers], dtype=np.int64)
        firsts = np.concatenate([[0], np.cumsum(counts)[:-1]])
        self.axes: Axes = np.concatenate(centers), firsts, counts, rates * rates.dtype.type(0.5)
        self.cores = np.concatenate([_array(core).ravel() for core in train.cores])
        widths = [_width(c.tobytes(), c.dtype.str, float(rate)) for c, rate in zip(centers, rates)]
        sizes = np.array([core.numel() for core in train.cores], dtype=np.int64)
        begins = np.concatenate([[0], np.cumsum(sizes)[:-1]])
        self.shapes = np.array(
            [(*core.shape, width, begin) for core, width, begin in zip(train.cores, widths, begins)], dtype=np.int64
        )
        self.sorts = bool((self.shapes[:, 3] < counts).any())
        self.rank, self.width = int(self.shapes[:, [0, 2]].max()), int(self.shapes[:, 3].max())
        self.tally = int(counts.max()) + 2

    def sum_part(self, points: Floats, out: Floats) -> None:
        from partita.kernels.train_loops import sum_train

        block, tally = min(_SORTED if self.sorts else _BLOCK, max(len(points), 1)), np.empty(self.tally, np.int64)
        lines, rows, weights = (np.empty((*s, block), points.dtype) for s in ((4,), (2, self.rank), (self.width,)))
        integers = np.empty((3, block), np.int64)
        sum_train(points, self.axes, self.cores, self.shapes, lines, rows, weights, integers, tally, out)

    def add_part(self, points: Floats, grad: Floats, in_points: Floats, in_cores: Floats) -> None:
        from partita.kernels.train_loops import add_train_gradients

        m, tally = len(self.shapes), np.empty(self.tally, np.int64)
        block = min(_SORTED_GRADIENTS if self.sorts else _BLOCK, max(len(points), 1))
        sizes = ((4,), (m + 3, self.rank), (m, self.width), (self.width,))
        lines, rows, weights, pulls = (np.empty((*size, block), points.dtype) for size in sizes)
        integers, found = np.empty((2 * m + 2, block), np.int64), (in_points, in_cores)
        add_train_gradients(
            points, grad, self.axes, self.cores, self.shapes, lines, rows, weights, pulls, integers, tally, found
        )


def _array(tensor: Tensor) -> Floats:
    return np.ascontiguousarray(tensor.detach().numpy())


@lru_cache(maxsize=4096)
def _width(centers: bytes, dtype: str, rate: float) -> int:
    """How many centers enter on an axis."""
    axis = np.frombuffer(centers, dtype)
    negligible = float(np.finfo(dtype).eps) * _NEGLIGIBLE
    return min(2 * half_window(axis.astype(np.float64), rate, 1, negligible), len(axis))
