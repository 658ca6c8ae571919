"""The folded head whose values are a tensor train: more keys than could ever be stored, contracted axis by axis."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from partita.arithmetic.precision import DOUBLE, Precision
from partita.errors import DomainError, ShapeError, SizeError
from partita.geometry.domains import Array, Box
from partita.geometry.grid import ProductGrid
from partita.heads.head import FoldedHead, axis_sizes, computing_dtype, numbers, recorded_shapes
from partita.heads.scores import AffineScores
from partita.kernels import train_operator
from partita.kernels.point_sums import PointParts, worth_a_loop
from partita.kernels.train_torch import TrainOperands

__all__ = ["TrainHead", "rounded_cores"]

_DENSE_AT_ONCE = 1 << 22  # scores held by one step of the dense reference
_EXPANDED_AT_MOST = 1 << 24  # values that the full tensor may have


class TrainHead(FoldedHead):
    """`net(z) = Σ_j Π_i w_{i,j_i}(z_i) V_j`, `V_j = G_1[j_1]·G_2[j_2]·…·G_m[j_m]`, a product of small matrices.

    `w_i = softmax(−R_i(z_i − c_i)²/2)` is the softmax of axis i over all its P_i centers (no window). The weights factorise over
    the axes and so does the sum: `net(z) = Π_i (Σ_k w_{i,k}(z_i) G_i[k])`, `O(Σ_i P_i r_{i−1} r_i)` operations a query
    where the tensor itself has `Π_i P_i` entries. Differences are centred, as in `GridHead`.

    Args:
        grid: the centers.
        inverse_temperature: R_i, a number or one per axis.
        cores: `G_i` of shape `(r_{i−1}, P_i, r_i)`, `r_0 = 1`, `r_m` the number of outputs.
        input_shapes, output_shape: see `FoldedHead`.

    Buffers: `centers_0` … `centers_{m−1}`, `inverse_temperature` `(m,)`, `core_0` … `core_{m−1}`. `unfreeze()` makes the
    cores parameters. `values`, `evaluate_dense`, `affine_scores` and what needs them (`as_attention`, the literal layers)
    list every key and raise a SizeError beyond 2²⁴ values.

    >>> from partita.geometry import Box
    >>> grid = ProductGrid.uniform(Box(-np.ones(20), np.ones(20)), 8)
    >>> cores = [torch.ones(1, 8, 1, dtype=torch.float64)] * 20
    >>> head = TrainHead(grid, 16.0, cores, input_shapes=((20,),), output_shape=())
    >>> f"{head.num_keys:,} keys in {head.num_parameters} numbers"
    '1,152,921,504,606,846,976 keys in 340 numbers'
    """

    kind = "train"
    inverse_temperature: Tensor

    def __init__(
        self,
        grid: ProductGrid,
        inverse_temperature: ArrayLike,
        cores: Sequence[Tensor],
        *,
        input_shapes: tuple[tuple[int, ...], ...],
        output_shape: tuple[int, ...],
    ) -> None:
        super().__init__(input_shapes=input_shapes, output_shape=output_shape)
        self.counts = grid.counts
        _require_chain(cores, self.counts, math.prod(output_shape))
        if self.dimension != grid.dimension:
            raise ShapeError(
                f"the grid is over R^{grid.dimension}, the inputs have {self.dimension} coordinates; expected the same number."
            )
        rates = np.broadcast_to(np.asarray(inverse_temperature, dtype=np.float64), grid.dimension)
        if not (np.isfinite(rates).all() and (rates > 0).all()):
            raise DomainError(f"inverse temperatures are {rates.tolist()}; expected finite numbers > 0.")
        if any((np.diff(axis) <= 0).any() for axis in grid.axes):
            raise DomainError("the centers of an axis do not increase; expected strictly increasing centers.")
        dtype = cores[0].dtype
        for i, axis in enumerate(grid.axes):
            self.register_buffer(f"centers_{i}", torch.tensor(axis, dtype=computing_dtype(dtype)))
        self.register_buffer("inverse_temperature", torch.tensor(rates.copy(), dtype=computing_dtype(dtype)))
        self.value_names = tuple(f"core_{i}" for i in range(len(cores)))
        for i, core in enumerate(cores):
            self.register_buffer(f"core_{i}", core.detach().to(dtype, copy=True).contiguous())

    @property
    def axes(self) -> tuple[Tensor, ...]:
        return tuple(getattr(self, f"centers_{i}") for i in range(len(self.counts)))

    @property
    def cores(self) -> tuple[Tensor, ...]:
        return tuple(getattr(self, f"core_{i}") for i in range(len(self.counts)))

    @property
    def ranks(self) -> tuple[int, ...]:
        """r_0 = 1, r_1, …, r_m = outputs."""
        return (1, *(core.shape[2] for core in self.cores))

    @property
    def num_keys(self) -> int:
        return math.prod(self.counts)

    @property
    def values(self) -> Tensor:
        """The whole tensor `V`, `(cells, out)`, row-major like the grid.

        Raises:
            SizeError: it has more than 2²⁴ entries.
        """
        self._require_listable()
        return _expanded(self.cores)

    def _require_listable(self) -> None:
        size = self.num_keys * math.prod(self.output_shape)
        if size > _EXPANDED_AT_MOST:
            raise SizeError(
                f"the values of this head's 10^{math.log10(self.num_keys):.1f} keys are 10^{math.log10(size):.1f} numbers, "
                f"too many to list; the limit is {_EXPANDED_AT_MOST:,}. "
                "Call the head, or use its cores, which hold the same values as a tensor train."
            )

    def middle(self) -> Array:
        return np.array([(float(a[0]) + float(a[-1])) / 2 for a in self.axes])

    def affine_scores(self, *, shift: bool = False) -> AffineScores:
        self._require_listable()
        cores = [core.detach().double().cpu() for core in self.cores]
        values, sizes = _expanded(cores).numpy(), _expanded([core.abs() for core in cores])
        roundings = sum(self.ranks) + 2 * len(cores)
        error = 1.01 * roundings * DOUBLE.unit * float(sizes.max()) + roundings * DOUBLE.smallest
        middle = self.middle()
        axes = [a.double().cpu().numpy() - (middle[i] if shift else 0.0) for i, a in enumerate(self.axes)]
        centers = np.stack([a.ravel() for a in np.meshgrid(*axes, indexing="ij")], axis=1)
        rates = self.inverse_temperature.double().cpu().numpy()
        return AffineScores.of_centers(centers, rates, values, origin=None if shift else middle, value_error=error)

    def partition(self, box: Box) -> ProductGrid:
        return ProductGrid(box, tuple(a.double().cpu().numpy() for a in self.axes))

    @classmethod
    def from_record(cls, record: Mapping[str, Any], tensors: Mapping[str, Tensor], box: Box) -> Self:
        m = box.dimension
        needed = {f"{part}_{i}" for part in ("centers", "core") for i in range(m)} | {"inverse_temperature"}
        shapes = recorded_shapes(record, tensors, box, needed=needed, optional=set())
        return cls(
            ProductGrid(box, tuple(tensors[f"centers_{i}"].double().cpu().numpy() for i in range(m))),
            tensors["inverse_temperature"].double().cpu().numpy(),
            [tensors[f"core_{i}"] for i in range(m)],
            **shapes,
        )

    def largest_value(self, lo: ArrayLike, hi: ArrayLike) -> float:
        row = np.ones(1)
        for size in self._core_sizes():
            row = row @ size
        return float(row.max())

    def _sizes(self, lo: Array, hi: Array) -> Iterator[tuple[str, float]]:
        yield from axis_sizes(self.axes, self.inverse_temperature, lo, hi)
        row = np.ones(1)
        for i, size in enumerate(self._core_sizes()):
            yield f"an entry of core {i}", float(size.max())
            row = row @ size
            yield f"the product of the cores up to {i}", float(row.max())

    def _core_sizes(self) -> list[Array]:
        """`max_k |G_i[k]|`, entry by entry, `(r_{i−1}, r_i)`: what the averaged matrices of axis i are bounded by."""
        return [np.abs(numbers(core)).max(axis=1) for core in self.cores]

    def _lost_to_underflow(self, lo: Array, hi: Array, precision: Precision) -> float:
        """A product that underflows loses up to the tiniest number: of an averaged matrix, which the cores before it may enlarge,
        or of a product of them, which the cores behind it may.
        """
        row, lost, least = np.ones(1), np.zeros(1), 0.0
        for size, count in zip(self._core_sizes(), self.counts):
            own = precision.tiniest * (count * float(row.sum()) + len(size))
            row, lost = row @ size, lost @ size
            lost = lost + np.where(row > 0, own, 0.0)
            least += precision.tiniest * (count + 1) * len(size)
        total = float(lost.max())
        return 0.0 if total <= least else total / float(row.max())  # up to `least` nothing was enlarged

    @property
    def operands(self) -> TrainOperands:
        """What the sum over the train reads."""
        return TrainOperands(list(self.axes), self.inverse_temperature, list(self.cores))

    def _evaluate(self, flat: Tensor) -> Tensor:
        return train_operator.train_sum(flat, self.operands)

    def point_parts(self) -> PointParts | None:
        m, ranks, cores = len(self.counts), self.ranks, self.cores
        expected = [(left, count, right) for left, count, right in zip(ranks, self.counts, ranks[1:])]
        axes = [tuple(t.shape) for t in (self.inverse_temperature, *self.axes)]
        fit = [tuple(core.shape) for core in cores] == expected and ranks[-1] == self.num_outputs
        steps = sum(2 * count + core.numel() for count, core in zip(self.counts, cores))
        if not fit or axes != [(m,), *((count,) for count in self.counts)] or not worth_a_loop(steps):
            return None
        joined = [np.concatenate([numbers(t).reshape(-1) for t in some]) for some in (self.axes, cores)]
        return PointParts(
            "train",
            (self.counts, ranks),
            (numbers(self.inverse_temperature) * 0.5, *joined),
            (),
            (),
            length=max(self.counts) + 3 * max(ranks),
            outputs=ranks[-1],
            steps=steps,
        )

    def _evaluate_dense(self, flat: Tensor) -> Tensor:
        values = self.values
        out = []
        for chunk in torch.split(flat, max(1, _DENSE_AT_ONCE // self.num_keys)) if len(flat) else [flat]:
            scores = chunk.new_zeros(len(chunk), 1)
            for i, centers in enumerate(self.axes):
                difference = chunk[:, i, None] - centers
                term = -0.5 * self.inverse_temperature[i] * difference * difference
                scores = (scores[:, :, None] + term[:, None, :]).flatten(1)
            out.append(torch.softmax(scores, dim=1) @ values)
        return torch.cat(out)


def _expanded(cores: Sequence[Tensor]) -> Tensor:
    """All values of a tensor train, `(cells, out)`."""
    table = cores[0].new_ones(1, 1)
    for core in cores:
        table = (table @ core.flatten(1)).reshape(-1, core.shape[2])
    return table


def _require_chain(cores: Sequence[Tensor], counts: tuple[int, ...], outputs: int) -> None:
    """A ShapeError unless the cores multiply: ranks that meet, one core per axis, from 1 to the outputs."""
    found = [tuple(core.shape) for core in cores]
    if len(found) != len(counts) or any(len(s) != 3 for s in found):
        raise ShapeError(f"cores have shapes {found}; expected {len(counts)} of shape (r, P, r').")
    ranks = [1, *(s[2] for s in found)]
    expected = [(r, count, s[2]) for r, count, s in zip(ranks, counts, found)]
    if found != expected or ranks[-1] != outputs or min(ranks) < 1:
        raise ShapeError(
            f"cores have shapes {found}; expected (r_{{i−1}}, P_i, r_i) with P = {counts}, matching ranks, r_0 = 1 and last rank "
            f"{outputs}, one per output."
        )


def rounded_cores(cores: Sequence[Tensor], tolerance: float) -> tuple[Tensor, ...]:
    """The train of least ranks (QR from the right, SVD from the left) within `tolerance` in the root mean square over the entries.

    Each of the m − 1 bonds may drop singular values whose squares add up to `tolerance²/(m − 1)`.
    """
    work = [core / math.sqrt(core.shape[1]) for core in cores]  # the Frobenius norm becomes a mean and cannot overflow
    for i in range(len(work) - 1, 0, -1):
        _, count, right = work[i].shape
        q, r = torch.linalg.qr(work[i].flatten(1).T)
        work[i] = q.T.reshape(-1, count, right)
        work[i - 1] = work[i - 1] @ r.T
    allowed = tolerance / math.sqrt(max(len(work) - 1, 1))
    for i in range(len(work) - 1):
        left, count, _ = work[i].shape
        u, s, vh = torch.linalg.svd(work[i].flatten(0, 1), full_matrices=False)
        tails = s.flip(0).square().cumsum(0).sqrt().flip(0)
        kept = max(1, int((tails > allowed).sum()))
        work[i] = u[:, :kept].reshape(left, count, kept)
        work[i + 1] = torch.tensordot(s[:kept, None] * vh[:kept], work[i + 1], dims=1)
    return tuple((core * math.sqrt(core.shape[1])).contiguous() for core in work)
