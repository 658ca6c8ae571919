"""The folded head on scattered centers: only the nearest cells are summed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from partita.arithmetic.precision import Precision
from partita.errors import DomainError, ShapeError
from partita.geometry.domains import Array, Box
from partita.geometry.partitions import PowerDiagram
from partita.heads.head import DivisibleHead, computing_dtype, numbers, recorded_shapes
from partita.heads.scores import AffineScores
from partita.kernels import partial_sums
from partita.kernels.attend_operator import LISTED_WHOLE, Operands, attend_near, share_left_out, sum_scattered
from partita.kernels.key_index import KeyIndex
from partita.kernels.point_sums import PointParts, worth_a_loop
from partita.kernels.scattered_torch import Sums, sum_all
from partita.kernels.trace_modes import wants_operator

__all__ = ["LISTED_WHOLE", "ScatteredHead", "exponent_cut"]


def exponent_cut(cells: int) -> float:
    """T = ln N + 45: cells whose exponent trails the best by more are left out; together they hold less than e^{−45}."""
    return math.log(cells) + 45.0


class ScatteredHead(DivisibleHead):
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
        self.register_buffer(
            "inverse_temperature", torch.tensor(inverse_temperature, dtype=computing_dtype(values.dtype))
        )
        self.register_buffer("values", values)
        self.register_buffer("powers", powers)
        self.register_buffer("value_slopes", value_slopes)
        self._index: list[KeyIndex] = []  # at most one; a list, as copies by `with_tensors` share it

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

    @property
    def key_counts(self) -> tuple[int, ...]:
        return (self.num_keys,)

    def divided(self, axis: int) -> frozenset[str]:
        return frozenset({"centers", "values", "powers", "value_slopes"})

    def tensors_between(self, axis: int, start: int, stop: int) -> dict[str, Tensor | None]:
        held = {**self._parameters, **self._buffers}
        cut = {n: t.detach()[start:stop] if t is not None and n in self.divided(axis) else t for n, t in held.items()}
        return {name: None if t is None else t.detach().clone() for name, t in cut.items()}

    def of_slice(self, axis: int, tensors: Mapping[str, Tensor | None]) -> Self:
        held = {name: t for name, t in tensors.items() if t is not None}
        return type(self)(
            held["centers"],
            float(held["inverse_temperature"]),
            held["values"],
            powers=held.get("powers"),
            value_slopes=held.get("value_slopes"),
            input_shapes=self.input_shapes,
            output_shape=self.output_shape,
        ).to(held["values"].device)

    def _operands(self) -> Operands:
        tables = self.centers, self.values, self.powers, self.value_slopes
        return Operands(*tables, self.inverse_temperature, exponent_cut(self.num_keys))

    def _sums(self, flat: Tensor, given: Operands) -> Sums:
        tensors = [t for t in (flat, *given.tensors) if t is not None]
        if torch.compiler.is_compiling() or (torch.is_grad_enabled() and any(t.requires_grad for t in tensors)):
            return sum_scattered(flat, given)
        return attend_near(flat, given, self._key_index())

    def _partial_sums(self, flat: Tensor) -> Tensor:
        given = self._operands()
        output, lse, dropped, _ = self._sums(flat, given)
        power = 0.0 if self.powers is None else float(self.powers.detach().abs().max())
        left_out = (1.01 * share_left_out(lse.detach(), dropped, given, power)).to(lse.dtype)
        return partial_sums.table(lse, lse - lse.detach(), left_out, output)

    def _evaluate(self, flat: Tensor) -> Tensor:
        return self._sums(flat, self._operands())[0] if wants_operator(flat) else self._evaluate_dense(flat)

    def point_parts(self) -> PointParts | None:
        """All cells, since few enough are left when this is worth it. An index of the keys would choose among them here."""
        keys, outs, m = self.num_keys, self.num_outputs, self.dimension
        stored = [self.inverse_temperature, self.centers, self.powers, self.values, self.value_slopes]
        expected = [(), (keys, m), (keys,), (keys, outs), (keys, outs, m)]
        steps = keys * (4 + 2 * m + (outs if self.value_slopes is None else outs * (1 + m)))
        fit = all(t is None or tuple(t.shape) == shape for t, shape in zip(stored, expected))
        if not fit or not worth_a_loop(steps):
            return None
        rate, *rest = [np.empty(0) if t is None else numbers(t).reshape(-1) for t in stored]
        return PointParts(
            "scattered",
            ((keys, len(rest[1])),),
            (rate * 0.5, *rest),
            (),
            (),
            length=keys,
            outputs=outs,
            steps=steps,
        )

    def _evaluate_dense(self, flat: Tensor) -> Tensor:
        tables = self.values, self.powers, self.value_slopes, self.inverse_temperature
        return sum_all(flat, self.centers, *tables)[0]

    def _key_index(self) -> KeyIndex | None:
        """The centers, sorted, if a search may be worth it; made again when they are not the stored ones any more.

        The numbers are compared, since writing through `.data` or a numpy view leaves no other trace.
        """
        if not self._index or not self._index[0].holds(self.centers, self.powers):
            stored = [t for t in (self.centers, self.powers) if t is not None]
            if self.num_keys <= LISTED_WHOLE or not all(bool(t.isfinite().all()) for t in stored):
                return None
            self._index[:] = [KeyIndex(self.centers.detach(), None if self.powers is None else self.powers.detach())]
        return self._index[0]
