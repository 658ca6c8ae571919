"""The sum over a tensor train in plain torch operations: the reference of the other kernels, and what runs where they cannot.

`Π_i (Σ_k w_{i,k}(x_i) G_i[:, k, :])`, `w_i = softmax(−R_i(x_i − c_i)²/2)`, from the left, the batch last: short softmaxes and small
ranks still make long vectors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["TrainOperands", "train_gradients", "train_sum"]

_AT_ONCE = 1 << 18  # numbers held by one step: they should stay in the cache
_AT_ONCE_ON_DEVICES = 1 << 25


class TrainOperands(NamedTuple):
    """What a sum over a tensor train reads beside its points.

    Attributes:
        centers: of each axis, `(P_i,)`.
        rates: R_i, `(m,)`.
        cores: G_i, `(r_{i−1}, P_i, r_i)`, r_0 = 1, r_m the number of outputs.
    """

    centers: Sequence[Tensor]
    rates: Tensor
    cores: Sequence[Tensor]

    @property
    def reads(self) -> int:
        """Stored numbers that a query reads."""
        return sum(core.numel() for core in self.cores)


def train_sum(points: Tensor, train: TrainOperands) -> Tensor:
    """`(n, m)` to `(n, out)`; large batches in steps."""
    if torch.compiler.is_compiling():
        return _product(points, train)
    step = _step(points, train)
    if len(points) <= step:
        return _product(points, train)
    return torch.cat([_product(chunk, train) for chunk in torch.split(points, step)])


def train_gradients(
    grad: Tensor, points: Tensor, train: TrainOperands, needs: Sequence[bool]
) -> tuple[Tensor, list[Tensor]]:
    """The products of `grad`, `(n, out)`, with the derivatives of `train_sum` in the points and in the cores.

    Written out, because torch records nothing inside an operator. Only what `needs` asks for is computed; the rest is empty.

    Args:
        needs: of the points, and of each core.
    """
    found = [points.new_zeros(t.shape if needed else 0) for t, needed in zip((points, *train.cores), needs)]
    step = _step(points, train, held=3)
    for begin in range(0, len(points), step):
        part = slice(begin, begin + step)
        _add_gradients(grad[part], points[part], train, [found[0][part], *found[1:]])
    return found[0], found[1:]


def _step(points: Tensor, train: TrainOperands, *, held: int = 1) -> int:
    widest = max(core.numel() // core.shape[1] + core.shape[1] for core in train.cores)
    if held > 1:  # the matrices of all axes are kept
        widest = sum(core.numel() // core.shape[1] + held * core.shape[1] for core in train.cores)
    return max(1, (_AT_ONCE if points.device.type == "cpu" else _AT_ONCE_ON_DEVICES) // widest)


def _weights(x: Tensor, centers: Tensor, rate: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax weights `(P, n)` and the differences `x − c`, `(P, n)`."""
    difference = x - centers[:, None]
    return torch.softmax(-0.5 * rate * difference * difference, dim=0), difference


def _matrices(core: Tensor, weights: Tensor) -> Tensor:
    """`Σ_k w_k G[:, k, :]`, `(right, left, n)`."""
    left, count, right = core.shape
    return (core.permute(2, 0, 1).reshape(right * left, count) @ weights).reshape(right, left, -1)


def _product(points: Tensor, train: TrainOperands) -> Tensor:
    row = None
    for x, centers, rate, core in zip(points.unbind(1), train.centers, train.rates, train.cores):
        matrices = _matrices(core, _weights(x, centers, rate)[0])
        row = matrices[:, 0] if row is None else (matrices * row).sum(dim=1)
    assert row is not None  # there is an axis
    return row.T


def _add_gradients(grad: Tensor, points: Tensor, train: TrainOperands, found: Sequence[Tensor]) -> None:
    """Add those of a step: the rows from the left are kept, columns `Π_{j>i} M_j·grad` come from the right."""
    axes = [_weights(x, c, r) for x, c, r in zip(points.unbind(1), train.centers, train.rates)]
    matrices = [_matrices(core, weights) for core, (weights, _) in zip(train.cores, axes)]
    rows = [points.new_ones(1, len(points))]
    for matrix in matrices[:-1]:
        rows.append((matrix * rows[-1]).sum(dim=1))
    column = grad.T
    for i in range(len(matrices) - 1, -1, -1):
        weights, difference = axes[i]
        left, count, right = train.cores[i].shape
        if found[0].numel():
            mean = (weights * difference).sum(dim=0)
            pull = -train.rates[i] * weights * (difference - mean)
            moved = (_matrices(train.cores[i], pull) * rows[i]).sum(dim=1)
            found[0][:, i] += (moved * column).sum(dim=0)
        if found[1 + i].numel():
            pairs = (rows[i][:, None] * column).reshape(left * right, -1)
            found[1 + i].add_((pairs @ weights.T).reshape(left, right, count).transpose(1, 2))
        column = (matrices[i] * column[:, None]).sum(dim=0)
