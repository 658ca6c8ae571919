"""The folded head on a product grid: one small softmax per axis, and only the window that matters."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from partita.errors import DomainError, FormatError, ShapeError
from partita.geometry.domains import Array, Box
from partita.geometry.grid import ProductGrid
from partita.heads.head import DivisibleHead, axis_sizes, computing_dtype, numbers, recorded_shapes
from partita.heads.scores import AffineScores
from partita.heads.table_blocks import blocks_of, largest_size
from partita.heads.windows import Windows
from partita.kernels import grid_operator, partial_sums
from partita.kernels.axis_windows import displacement
from partita.kernels.grid_torch import GridOperands, axis_log_sum, grid_sum, prefers_whole, tilted
from partita.kernels.plain_arithmetic import plain_arithmetic
from partita.kernels.point_sums import PointParts, worth_a_loop
from partita.kernels.trace_modes import is_exporting

__all__ = ["GridHead"]

_WIDENED_AT_MOST = 1 << 24  # numbers of a half type that are copied to evaluate a batch
_DENSE_AT_ONCE = 1 << 22  # scores held by one step of the dense reference
_LONGEST_RECORDED_WINDOW = 1 << 20


class GridHead(DivisibleHead):
    """`net(z) = Σ_j Π_i softmax_i(−R_i(z_i − c_{i,j_i})²/2) V_j(z)` over the cells j of a product grid.

    `V_j(z) = V_j`, or with slopes `V_j + J_j(z − o)`, one origin o for all cells. Differences are centred (`z_i − c` is formed
    first), so float32 loses nothing to large coordinates. Only the `2q_i` centers around z_i enter on axis i; what that
    drops is bounded by `geometry.dropped_mass` and part of the certificate. If the centers or the inverse temperatures are
    changed, the windows are widened to fit (`windows.Windows`). Windows are gathered where they are small; where
    they cover much of the grid the sum runs over all cells, with weight zero outside the window, as matrix products. Either
    way axis after axis is summed, so that a term passes through `Σ_i width_i` roundings (the dense reference: cells).

    Args:
        grid: the centers, increasing on each axis. Where the window is narrower than the axis they must be nearly uniform:
            each within one spacing of its place among equally spaced centers with the same ends (`windows.displacement`).
        inverse_temperature: R_i, a number or one per axis.
        values: `(cells, out)`, row-major like the grid.
        value_slopes: J, `(cells, out, m)`, or None for constant values.
        origin: o, `(m,)`; the middle of the grid's box if not given.
        half_windows: q_i per axis.
        input_shapes, output_shape: see `FoldedHead`.

    Buffers: `centers_0` … `centers_{m−1}`, `inverse_temperature` `(m,)`, `values` `(cells, out)`; with slopes
    `value_slopes` `(cells, out, m)` and `origin` `(m,)`.
    """

    kind = "grid"
    inverse_temperature: Tensor
    values: Tensor
    value_slopes: Tensor | None
    origin: Tensor | None

    def __init__(
        self,
        grid: ProductGrid,
        inverse_temperature: ArrayLike,
        values: Tensor,
        *,
        value_slopes: Tensor | None = None,
        origin: Tensor | None = None,
        half_windows: ArrayLike,
        input_shapes: tuple[tuple[int, ...], ...],
        output_shape: tuple[int, ...],
    ) -> None:
        super().__init__(input_shapes=input_shapes, output_shape=output_shape)
        if values.shape != (grid.num_cells, math.prod(output_shape)):
            raise ShapeError(
                f"values have shape {tuple(values.shape)}; expected ({grid.num_cells}, {math.prod(output_shape)})."
            )
        self.counts = grid.counts
        q = np.broadcast_to(np.asarray(half_windows, dtype=np.int64), len(self.counts))
        windows = tuple(int(k) for k in q)
        rates = np.broadcast_to(np.asarray(inverse_temperature, dtype=np.float64), grid.dimension)
        if min(windows) < 1 or not (np.isfinite(rates).all() and (rates > 0).all()):
            raise DomainError(
                f"half windows are {windows}, inverse temperatures {rates.tolist()}; expected finite numbers > 0."
            )
        if any((np.diff(axis) <= 0).any() for axis in grid.axes):
            raise DomainError("the centers of an axis do not increase; expected strictly increasing centers.")
        for i, axis in enumerate(grid.axes):
            self.register_buffer(f"centers_{i}", torch.tensor(axis, dtype=computing_dtype(values.dtype)))
        self.register_buffer("inverse_temperature", torch.tensor(rates.copy(), dtype=computing_dtype(values.dtype)))
        self.register_buffer("values", values)
        self._register_slopes(grid, value_slopes, origin)
        self._windows = Windows(windows, self._window_tensors())
        _require_even_axes(self.axes, self.half_windows)

    def _register_slopes(self, grid: ProductGrid, slopes: Tensor | None, origin: Tensor | None) -> None:
        m, values, computing = grid.dimension, self.values, computing_dtype(self.values.dtype)
        if slopes is not None and origin is None:
            middle = grid.box.lo.ravel() / 2 + grid.box.hi.ravel() / 2
            origin = torch.tensor(middle, dtype=computing, device=values.device)
        held = ("value_slopes", slopes, (*values.shape, m), values.dtype), ("origin", origin, (m,), computing)
        for name, tensor, shape, dtype in held:
            if tensor is not None and (slopes is None or tensor.shape != shape or tensor.dtype != dtype):
                raise ShapeError(
                    f"{name} has shape {tuple(tensor.shape)} and dtype {tensor.dtype}; expected {shape} and "
                    f"{dtype}, and an origin only with slopes."
                )
            self.register_buffer(name, tensor)

    @property
    def axes(self) -> tuple[Tensor, ...]:
        return tuple(self._buffers[f"centers_{i}"] for i in range(len(self.counts)))  # type: ignore[misc]

    def _window_tensors(self) -> tuple[Tensor, ...]:
        return (self.inverse_temperature, *self.axes)

    @property
    def half_windows(self) -> tuple[int, ...]:
        """q_i for the tensors as they are: those given while the tensors are unchanged, else wide enough for the new ones."""
        if not torch.compiler.is_compiling():
            return self._windows.current(self._window_tensors())
        if not is_exporting():  # the graph takes the tensors as they will be when it runs
            pairs = zip(self._windows.reference, self._window_tensors())
            unchanged = torch.stack([(old == new).all() for old, new in pairs]).all()
            torch._assert_async(
                unchanged, "GridHead: centers or inverse temperatures changed after compiling; compile again."
            )
        return self._windows.latest

    @property
    def widths(self) -> tuple[int, ...]:
        """Centers that enter on each axis, `min(2q_i, P_i)`."""
        return tuple(min(2 * q, count) for q, count in zip(self.half_windows, self.counts))

    @property
    def num_keys(self) -> int:
        return math.prod(self.counts)

    def middle(self) -> Array:
        return np.array([(float(a[0]) + float(a[-1])) / 2 for a in self.axes])

    def affine_scores(self, *, shift: bool = False) -> AffineScores:
        middle = self.middle()
        axes = [a.double().cpu().numpy() - (middle[i] if shift else 0.0) for i, a in enumerate(self.axes)]
        centers = np.stack([a.ravel() for a in np.meshgrid(*axes, indexing="ij")], axis=1)
        numbers = [None if t is None else t.detach().double().cpu().numpy() for t in (self.value_slopes, self.origin)]
        return AffineScores.of_centers(
            centers,
            self.inverse_temperature.double().cpu().numpy(),
            self.values.detach().double().cpu().numpy(),
            origin=None if shift else middle,
            value_slopes=numbers[0],
            value_origin=None if numbers[1] is None else numbers[1] - (middle if shift else 0.0),
        )

    def partition(self, box: Box) -> ProductGrid:
        return ProductGrid(box, tuple(a.double().cpu().numpy() for a in self.axes))

    def record(self) -> dict[str, Any]:
        common = super().record()
        return {"type": common.pop("type"), "half_windows": list(self.half_windows), **common}

    @classmethod
    def from_record(cls, record: Mapping[str, Any], tensors: Mapping[str, Tensor], box: Box) -> Self:
        needed, affine = {f"centers_{i}" for i in range(box.dimension)}, {"value_slopes", "origin"}
        needed |= {"inverse_temperature", "values"} | (affine if affine & set(tensors) else set())
        shapes = recorded_shapes(record, tensors, box, needed=needed, optional=set())
        windows = record.get("half_windows")
        if (
            not isinstance(windows, list | tuple)
            or len(windows) != box.dimension
            or not all(type(q) is int and 1 <= q <= _LONGEST_RECORDED_WINDOW for q in windows)
        ):
            raise FormatError(f"head record: half_windows is {windows}; expected {box.dimension} integers ≥ 1.")
        return cls(
            ProductGrid(box, tuple(tensors[f"centers_{i}"].double().cpu().numpy() for i in range(box.dimension))),
            tensors["inverse_temperature"].double().cpu().numpy(),
            tensors["values"],
            value_slopes=tensors.get("value_slopes"),
            origin=tensors.get("origin"),
            half_windows=windows,
            **shapes,
        )

    def largest_value(self, lo: ArrayLike, hi: ArrayLike) -> float:
        if self.value_slopes is None or self.origin is None:
            return largest_size(self.values)
        origin = numbers(self.origin)
        away = np.maximum(np.abs(np.ravel(lo) - origin), np.abs(np.ravel(hi) - origin))
        blocks = blocks_of(self.values, self.value_slopes)
        return float(np.max([(np.abs(numbers(v)) + np.abs(numbers(s)) @ away).max() for v, s in blocks]))

    def _sizes(self, lo: Array, hi: Array) -> Iterator[tuple[str, float]]:
        yield from axis_sizes(self.axes, self.inverse_temperature, lo, hi)
        size = largest_size(self.values)
        if self.value_slopes is not None and self.origin is not None:
            origin, parts = numbers(self.origin), blocks_of(self.value_slopes)
            steep = np.max([np.abs(numbers(s)).max(axis=(0, 1)) for (s,) in parts], axis=0)
            away = np.maximum(np.abs(lo - origin), np.abs(hi - origin))
            yield "z − o", float(away.max())
            yield "a slope", float(steep.max())
            size += float((steep * away).sum())  # slopes are averaged before they are multiplied
        yield "a value", size

    @property
    def operands(self) -> GridOperands:
        """What the sum over the grid reads."""
        return GridOperands(
            list(self.axes), self.inverse_temperature, list(self.widths), self.values, self.value_slopes, self.origin
        )

    @property
    def key_counts(self) -> tuple[int, ...]:
        return self.counts

    def divided(self, axis: int) -> frozenset[str]:
        return frozenset({"values", "value_slopes", f"centers_{axis}"})

    def tensors_between(self, axis: int, start: int, stop: int) -> dict[str, Tensor | None]:
        def held(name: str, tensor: Tensor) -> Tensor:
            if name not in self.divided(axis):
                return tensor.detach().clone()
            if name == f"centers_{axis}":
                return tensor.detach()[start:stop].clone()
            cut: Tensor = torch.unflatten(tensor.detach(), 0, self.counts).narrow(axis, start, stop - start)
            cells = math.prod(self.counts) // self.counts[axis] * (stop - start)
            return cut.clone(memory_format=torch.contiguous_format).reshape(cells, *tensor.shape[1:])

        return {name: None if t is None else held(name, t) for name, t in {**self._parameters, **self._buffers}.items()}

    def of_slice(self, axis: int, tensors: Mapping[str, Tensor | None]) -> Self:
        held = {name: t for name, t in tensors.items() if t is not None}
        axes = tuple(numbers(held[f"centers_{i}"]) for i in range(len(self.counts)))
        windows, length = list(self.half_windows), len(axes[axis])
        if displacement(axes[axis]) >= 1:  # the slice is less even than the whole axis
            windows[axis] = max(windows[axis], (length + 1) // 2)
        box = Box(np.full(len(axes), -1.0), np.full(len(axes), 1.0))  # only an origin that is not given depends on it
        return type(self)(
            ProductGrid(box, axes),
            numbers(held["inverse_temperature"]),
            held["values"],
            value_slopes=held.get("value_slopes"),
            origin=held.get("origin"),
            half_windows=windows,
            input_shapes=self.input_shapes,
            output_shape=self.output_shape,
        ).to(held["values"].device)

    def dropped(self) -> float:
        """An upper bound of the share of the weight that the windows leave out. *Theorem*: `window-tail`."""
        return self._windows.dropped(self._window_tensors())

    def _partial_sums(self, flat: Tensor) -> Tensor:
        grid = self.operands
        axes = zip(flat.unbind(1), grid.centers, grid.rates, grid.widths)
        maxima, log_sums = zip(*(axis_log_sum(x, centers, rate, width) for x, centers, rate, width in axes))
        dropped = self.dropped()
        if dropped:  # rounded to the dtype
            dropped = max(dropped * (1 + 1e-6), torch.finfo(flat.dtype).tiny)
        return partial_sums.table(sum(maxima), sum(log_sums), torch.full_like(maxima[0], dropped), self._evaluate(flat))

    def _widened(self) -> Self:
        """As in `FoldedHead`, but for large tables of a half type: of these only what a query reads is widened."""
        stored = sum(t.numel() for t in self.operands.tables())
        whole = prefers_whole("torch", self.counts, self.widths)
        return self if stored > _WIDENED_AT_MOST and not whole else super()._widened()

    def _evaluate(self, flat: Tensor) -> Tensor:
        if flat.dtype == self.values.dtype:
            return grid_operator.grid_sum(flat, self.operands)
        with plain_arithmetic(flat.device.type):
            return grid_sum(flat, self.operands)

    def point_parts(self) -> PointParts | None:
        m, cells, outs, widths = len(self.counts), self.num_keys, self.num_outputs, self.widths
        expected = [(m,), *((count,) for count in self.counts), (cells, outs)]
        if self.value_slopes is not None and self.origin is not None:
            expected += [(cells, outs, m), (m,)]
        stored = [self.inverse_temperature, *self.axes, self.values, self.value_slopes, self.origin]
        step = outs if self.value_slopes is None else outs * m
        steps = 2 * sum(widths) + math.prod(widths) * (outs if self.value_slopes is None else outs + step)
        if [tuple(t.shape) for t in stored if t is not None] != expected or not worth_a_loop(steps):
            return None
        rates, *axes = map(numbers, (self.inverse_temperature, *self.axes))
        none = np.empty(0, str(self.dtype).removeprefix("torch."))
        tables = [none if t is None else t.detach().numpy().reshape(-1) for t in stored[1 + m :]]
        return PointParts(
            "grid",
            (self.counts, widths),
            (rates * 0.5, np.concatenate(axes)),
            tuple(tables),
            ("values", "value_slopes", "origin"),
            length=sum(widths) + m * widths[-1] * step,
            outputs=outs,
            steps=steps,
        )

    def _evaluate_dense(self, flat: Tensor) -> Tensor:
        step = max(1, _DENSE_AT_ONCE // self.num_keys)
        out = []
        for chunk in torch.split(flat, step) if len(flat) else [flat]:
            scores = chunk.new_zeros(len(chunk), 1)
            for i, centers in enumerate(self.axes):
                difference = chunk[:, i, None] - centers
                term = -0.5 * self.inverse_temperature[i] * difference * difference
                scores = (scores[:, :, None] + term[:, None, :]).flatten(1)
            weights, grid = torch.softmax(scores, dim=1), self.operands
            out.append(tilted(chunk, grid, [weights @ table.to(weights.dtype) for table in grid.tables()]))
        return torch.cat(out)


def _require_even_axes(axes: Sequence[Tensor], windows: Sequence[int]) -> None:
    """A DomainError if a window could be looked for in the wrong place."""
    for i, (axis, q) in enumerate(zip(axes, windows)):
        if 2 * q < len(axis):
            away = displacement(axis.double().cpu().numpy())
            if away >= 1:
                raise DomainError(
                    f"axis {i}: a center lies {away:.3g} spacings from its place among {len(axis):,} equally spaced ones; a "
                    f"window of {2 * q} centers needs less than 1. Use half_windows ≥ {(len(axis) + 1) // 2}, the whole axis, or "
                    "rescale the variable if the spacing overflows."
                )
