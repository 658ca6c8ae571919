"""The folded head on scattered centers: only the nearest cells are summed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Self

import numpy as np
import scipy
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from partita.arithmetic.precision import Precision
from partita.errors import DomainError, ShapeError
from partita.geometry.domains import Array, Box
from partita.geometry.partitions import PowerDiagram
from partita.heads.head import FoldedHead, numbers, recorded_shapes
from partita.heads.scores import AffineScores

__all__ = ["LISTED_WHOLE", "ScatteredHead", "exponent_cut"]

_AT_ONCE = 1 << 22
LISTED_WHOLE = 256  # cells: up to this many all are summed, which is faster than a tree; proofs rely on it


def exponent_cut(cells: int) -> float:
    """T = ln N + 45: cells whose exponent trails the best by more are left out; together they hold less than e^{−45}."""
    return math.log(cells) + 45.0


class ScatteredHead(FoldedHead):
    """`net(z) = Σ_j softmax_j(−R(|z − c_j|² − p_j)/2)·V_j(z)`, `V_j(z) = V_j + J_j(z − c_j)`.

    Cells are those of the power diagram of (c, p); those that trail too far are left out (`exponent_cut`).

    Args:
        centers: `(N, m)`.
        values: `(N, out)`.
        powers: `(N,)` or None for Voronoi.
        value_slopes: `(N, out, m)` or None.
        inverse_temperature: R.
    """

    kind = "scattered"
    centers: Tensor
    inverse_temperature: Tensor
    values: Tensor
    powers: Tensor | None
    value_slopes: Tensor | None

    def __init__(
        self,
        centers: Tensor,
        inverse_temperature: float,
        values: Tensor,
        *,
        powers: Tensor | None = None,
        value_slopes: Tensor | None = None,
        input_shapes: tuple[tuple[int, ...], ...],
        output_shape: tuple[int, ...],
    ) -> None:
        super().__init__(input_shapes=input_shapes, output_shape=output_shape)
        if values.shape != (len(centers), math.prod(output_shape)) or centers.shape[1] != self.dimension:
            raise ShapeError(
                f"centers have shape {tuple(centers.shape)}, values {tuple(values.shape)}; expected (N, "
                f"{self.dimension}) and (N, {math.prod(output_shape)})."
            )
        for name, tensor, shape in (
            ("powers", powers, (len(centers),)),
            ("value_slopes", value_slopes, (*values.shape, self.dimension)),
        ):
            if tensor is not None and tensor.shape != shape:
                raise ShapeError(f"{name} has shape {tuple(tensor.shape)}; expected {shape}.")
        if not (math.isfinite(inverse_temperature) and inverse_temperature > 0):
            raise DomainError(f"inverse_temperature is {inverse_temperature}; expected a finite number > 0.")
        self.register_buffer("centers", centers)
        self.register_buffer("inverse_temperature", torch.tensor(inverse_temperature, dtype=values.dtype))
        self.register_buffer("values", values)
        self.register_buffer("powers", powers)
        self.register_buffer("value_slopes", value_slopes)
        self._tree: scipy.spatial.KDTree | None = None

    @property
    def num_keys(self) -> int:
        return len(self.centers)

    def middle(self) -> Array:
        centers = numbers(self.centers)
        return np.asarray((centers.min(axis=0) + centers.max(axis=0)) / 2)

    def affine_scores(self, *, shift: bool = False) -> AffineScores:
        middle = self.middle()
        numbers = [None if t is None else t.detach().double().cpu().numpy() for t in (self.powers, self.value_slopes)]
        return AffineScores.of_centers(
            self.centers.double().cpu().numpy() - (middle if shift else 0.0),
            np.array(float(self.inverse_temperature)),
            self.values.detach().double().cpu().numpy(),
            powers=numbers[0],
            value_slopes=numbers[1],
            origin=None if shift else middle,
        )

    def partition(self, box: Box) -> PowerDiagram:
        """The power diagram of the centers; it is the same for every box."""
        powers = None if self.powers is None else self.powers.detach().double().cpu().numpy()
        return PowerDiagram(self.centers.detach().double().cpu().numpy(), powers)

    @classmethod
    def from_record(cls, record: Mapping[str, Any], tensors: Mapping[str, Tensor], box: Box) -> Self:
        needed = {"centers", "inverse_temperature", "values"}
        shapes = recorded_shapes(record, tensors, box, needed=needed, optional={"powers", "value_slopes"})
        return cls(
            tensors["centers"],
            float(tensors["inverse_temperature"]),
            tensors["values"],
            powers=tensors.get("powers"),
            value_slopes=tensors.get("value_slopes"),
            **shapes,
        )

    def _far(self, lo: ArrayLike, hi: ArrayLike) -> Array:
        """How far z in [lo, hi] may be from each center along each axis, `(N, m)`."""
        centers = numbers(self.centers)
        return np.asarray(np.maximum(np.abs(centers - np.ravel(lo)), np.abs(np.ravel(hi) - centers)))

    def largest_value(self, lo: ArrayLike, hi: ArrayLike) -> float:
        values = np.abs(numbers(self.values))
        if self.value_slopes is not None:
            values = values + np.einsum("jom,jm->jo", np.abs(numbers(self.value_slopes)), self._far(lo, hi))
        return float(values.max())

    def _sizes(self, lo: Array, hi: Array) -> Iterator[tuple[str, float]]:
        far = self._far(lo, hi)
        yield "z − c", float(far.max())
        power = 0.0 if self.powers is None else float(np.abs(numbers(self.powers)).max())
        square = float((far * far).sum(axis=1).max()) + 2 * power
        yield "|z − c|² with the powers", square
        yield "a score", float(self.inverse_temperature) / 2 * square
        if self.value_slopes is not None:
            yield "a slope", float(np.abs(numbers(self.value_slopes)).max())
        yield "a value", self.largest_value(lo, hi)

    def _lost_to_underflow(self, lo: Array, hi: Array, precision: Precision) -> float:
        """Squares are formed before R multiplies them, and each may lose the tiniest number."""
        return float(self.inverse_temperature) / 2 * (self.dimension + 2) * precision.tiniest

    def _evaluate(self, flat: Tensor) -> Tensor:
        if (
            self.num_keys <= LISTED_WHOLE
            or torch.compiler.is_compiling()
            or flat.device.type != "cpu"
            or not len(flat)
            or not self._can_search(flat)
        ):
            return self._evaluate_dense(flat)
        rows, parts = [], []
        for settled, cells in self._near_cells(flat.detach().double().numpy()):
            step = max(1, _AT_ONCE // (cells.shape[1] * (self.dimension + self.values.shape[1])))
            chunks = zip(torch.split(flat[torch.from_numpy(settled)], step), torch.split(torch.from_numpy(cells), step))
            parts += [self._sum(z, index) for z, index in chunks]
            rows.append(settled)
        return torch.cat(parts)[torch.from_numpy(np.argsort(np.concatenate(rows)))]

    def _evaluate_dense(self, flat: Tensor) -> Tensor:
        everything = torch.arange(self.num_keys, device=flat.device)[None]
        if torch.compiler.is_compiling():
            return self._sum(flat, everything)
        step = max(1, _AT_ONCE // (self.num_keys * (self.dimension + self.values.shape[1])))
        return torch.cat([self._sum(chunk, everything) for chunk in (torch.split(flat, step) if len(flat) else [flat])])

    def _sum(self, z: Tensor, cells: Tensor) -> Tensor:
        difference = z[:, None, :] - self.centers[cells]
        scores = -(difference * difference).sum(dim=2)
        if self.powers is not None:
            scores = scores + self.powers[cells]
        weights = torch.softmax(0.5 * self.inverse_temperature * scores, dim=1)
        values = self.values[cells]
        if self.value_slopes is not None:
            values = values + (self.value_slopes[cells] * difference[:, :, None, :]).sum(dim=3)
        return (weights[:, :, None] * values).sum(dim=1)

    def _can_search(self, flat: Tensor) -> bool:
        """Whether the nearest cells are the best ones: R > 0, and numbers that a k-d tree takes."""
        stored = [t for t in (self.inverse_temperature, flat, self.centers, self.powers) if t is not None]
        return bool(self.inverse_temperature > 0) and all(bool(t.isfinite().all()) for t in stored)

    def _near_cells(self, points: Array) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Row numbers and the labels `(rows, k)` of the cells that may matter there; k doubles until the k-th trails by T."""
        reach = 2 * exponent_cut(self.num_keys) / float(self.inverse_temperature)
        tree = self._search_tree()
        lifted = points if self.powers is None else np.column_stack([points, np.zeros(len(points))])
        k, rows = min(16, self.num_keys), np.arange(len(points))
        while len(rows):
            distance, cells = (np.reshape(a, (len(rows), k)) for a in tree.query(lifted[rows], k=k))
            settled = (distance[:, -1] ** 2 - distance[:, 0] ** 2 >= reach) | (k == self.num_keys)
            yield rows[settled], cells[settled]
            rows, k = rows[~settled], min(2 * k, self.num_keys)

    def _search_tree(self) -> scipy.spatial.KDTree:
        """A k-d tree of the centers, lifted by `√(max p − p)` so that nearest means best score.

        It is rebuilt when its points are not the stored centers any more. The numbers are compared, since writing through
        `.data` or a numpy view leaves no other trace.
        """
        points = self.centers.detach().double().numpy()
        if self.powers is not None:
            powers = self.powers.detach().double().numpy()
            points = np.column_stack([points, np.sqrt(np.maximum(powers.max() - powers, 0))])
        if self._tree is None or not np.array_equal(self._tree.data, points):
            self._tree = scipy.spatial.KDTree(points, copy_data=True)
        return self._tree
