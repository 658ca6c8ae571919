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
from partita.heads.head import FoldedHead, axis_sizes, computing_dtype, numbers, recorded_shapes
from partita.heads.scores import AffineScores
from partita.heads.windows import Windows, displacement
from partita.kernels import native
from partita.kernels.grid_native import grid_sum
from partita.kernels.trace_modes import is_exporting

__all__ = ["GridHead"]

_AT_ONCE = 1 << 18  # numbers held by one step of the torch paths: they should stay in the cache
_AT_ONCE_ON_DEVICES = 1 << 25  # accelerators wait for work more than for memory
_DENSE_AT_ONCE = 1 << 22  # scores held by one step of the dense reference
_CELLS_PER_READ = {"native": 3.0, "torch": 16.0}  # cells passed over in order in the time of gathering one (measured)
_LONGEST_RECORDED_WINDOW = 1 << 20
_CELLS_PER_READ_IN_1D = 1.5  # on a single axis the weights cost more than the sum


class GridHead(FoldedHead):
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

    @property
    def _columns(self) -> int:
        """Numbers that a cell holds: out, or out·(1 + m) with slopes."""
        return self.values.shape[1] * (1 if self.value_slopes is None else 1 + len(self.counts))

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
        values = np.abs(numbers(self.values))
        if self.value_slopes is not None and self.origin is not None:
            origin = numbers(self.origin)
            away = np.maximum(np.abs(np.ravel(lo) - origin), np.abs(np.ravel(hi) - origin))
            values = values + np.abs(numbers(self.value_slopes)) @ away
        return float(values.max())

    def _sizes(self, lo: Array, hi: Array) -> Iterator[tuple[str, float]]:
        yield from axis_sizes(self.axes, self.inverse_temperature, lo, hi)
        size = float(np.abs(numbers(self.values)).max())
        if self.value_slopes is not None and self.origin is not None:
            steep, origin = np.abs(numbers(self.value_slopes)).max(axis=(0, 1)), numbers(self.origin)
            away = np.maximum(np.abs(lo - origin), np.abs(hi - origin))
            yield "z − o", float(away.max())
            yield "a slope", float(steep.max())
            size += float((steep * away).sum())  # slopes are averaged before they are multiplied
        yield "a value", size

    def axis_start(self, x: Tensor, axis: int, width: int) -> Tensor:
        """The first index of the window of `width` centers around x on one axis, `(n,)`."""
        centers, count = self.axes[axis], self.counts[axis]
        if width == count:
            return torch.zeros(x.shape, dtype=torch.long, device=x.device)
        first, last = centers[0].double(), centers[-1].double()  # float32 could miss by more than a cell
        guess = (x.detach().double() - first) * ((count - 1) / (last - first))
        k = guess.nan_to_num(0.0).floor().clamp(0, count - 2).long()
        k = (k - (x < centers[k]).long()).clamp(0, count - 2)  # the guess is rounded: settle by comparison
        k = (k + (x >= centers[k + 1]).long()).clamp(0, count - 2)
        return (k - width // 2 + 1).clamp(0, count - width)

    def axis_window(self, x: Tensor, axis: int, width: int) -> tuple[Tensor, Tensor]:
        """Softmax weights `(n, width)` of the window around x on one axis, and the window's first index, `(n,)`."""
        start = self.axis_start(x, axis, width)
        near = self.axes[axis][start[:, None] + torch.arange(width, device=x.device)]
        return torch.softmax(self._axis_scores(x, near, axis), dim=1), start

    def axis_weights(self, x: Tensor, axis: int, width: int) -> Tensor:
        """The same weights at their places among all centers of the axis, `(n, P)`, and zeros outside the window."""
        scores = self._axis_scores(x, self.axes[axis], axis)
        if width < self.counts[axis]:
            behind = torch.arange(self.counts[axis], device=x.device) - self.axis_start(x, axis, width)[:, None]
            scores = scores.masked_fill((behind < 0) | (behind >= width), -math.inf)
        return torch.softmax(scores, dim=1)

    def _axis_scores(self, x: Tensor, centers: Tensor, axis: int) -> Tensor:
        difference = x[:, None] - centers
        return -0.5 * self.inverse_temperature[axis] * difference * difference

    def _evaluate(self, flat: Tensor) -> Tensor:
        widths = self.widths
        if self._can_run_natively(flat, widths):
            return self._evaluate_native(flat, widths)
        if self._prefers_whole("torch", widths) and _multiplies_plainly(self.dtype):
            left = math.prod(self.counts) // max(self.counts) * self._columns
            work, held = self._evaluate_contracted, left + sum(self.counts)
        else:
            work, held = self._evaluate_window, math.prod(widths) * self._columns
        step = max(1, (_AT_ONCE if flat.device.type == "cpu" else _AT_ONCE_ON_DEVICES) // held)
        if torch.compiler.is_compiling() or len(flat) <= step:
            return work(flat, widths)
        return torch.cat([work(chunk, widths) for chunk in torch.split(flat, step)])

    def _can_run_natively(self, flat: Tensor, widths: tuple[int, ...]) -> bool:
        constants = [t for t in (self.values, self.value_slopes) if t is not None]
        tracked = torch.is_grad_enabled() and any(t.requires_grad for t in (flat, *constants))
        plain = flat.device.type == "cpu" and self.dtype in (torch.float64, torch.float32)
        if not plain or tracked or torch.compiler.is_compiling():
            return False
        cells = self.counts if self._prefers_whole("native", widths) else widths
        return native.worth_it(len(flat), math.prod(cells) * self._columns)

    def _prefers_whole(self, path: str, widths: tuple[int, ...]) -> bool:
        """Whether running over all cells takes less time than gathering the window's."""
        worth = _CELLS_PER_READ[path] if len(self.counts) > 1 else _CELLS_PER_READ_IN_1D
        return math.prod(self.counts) <= worth * math.prod(widths)

    def _tables(self) -> list[Tensor]:
        """What is averaged: the values `(cells, out)` and, if there are any, the slopes `(cells, out·m)`."""
        return [self.values] if self.value_slopes is None else [self.values, self.value_slopes.flatten(1)]

    def _tilted(self, flat: Tensor, sums: Sequence[Tensor]) -> Tensor:
        """`Σ w V + (Σ w J)(z − o)` from the sums of `_tables`."""
        if self.origin is None:
            return sums[0]
        slopes = torch.unflatten(sums[1], 1, (self.values.shape[1], len(self.counts)))
        return sums[0] + (slopes * (flat - self.origin)[:, None, :]).sum(dim=2)

    def _evaluate_window(self, flat: Tensor, widths: tuple[int, ...]) -> Tensor:
        weights, cells = [], torch.zeros_like(flat[:, :1], dtype=torch.long)
        for i, count in enumerate(self.counts):
            w, start = self.axis_window(flat[:, i], i, widths[i])
            index = start[:, None] + torch.arange(widths[i], device=flat.device)
            cells = (cells[:, :, None] * count + index[:, None, :]).flatten(1)
            weights.append(w)
        return self._tilted(flat, [_fold(table[cells], weights) for table in self._tables()])

    def _evaluate_contracted(self, flat: Tensor, widths: tuple[int, ...]) -> Tensor:
        weights = [self.axis_weights(flat[:, i], i, width) for i, width in enumerate(widths)]
        return self._tilted(flat, [_contract(table, weights) for table in self._tables()])

    def _evaluate_native(self, flat: Tensor, widths: tuple[int, ...]) -> Tensor:
        values = self.values.detach().numpy()
        none = np.empty(0, values.dtype)
        out = np.empty((len(flat), values.shape[1]), values.dtype)
        counts = np.array(self.counts, dtype=np.int64)
        axes = [a.numpy() for a in self.axes]
        grid_sum(
            np.ascontiguousarray(flat.detach().numpy()),
            axes[0] if len(axes) == 1 else np.concatenate(axes),  # one axis may be as long as the values: no copy
            np.concatenate([[0], np.cumsum(counts)[:-1]]),
            counts,
            (self.inverse_temperature * 0.5).numpy(),
            np.array(widths, dtype=np.int64),
            self._prefers_whole("native", widths),
            np.ascontiguousarray(values),
            none if self.value_slopes is None else np.ascontiguousarray(self.value_slopes.detach().numpy()),
            none if self.origin is None else self.origin.numpy(),
            out,
        )
        return torch.from_numpy(out)

    def _evaluate_dense(self, flat: Tensor) -> Tensor:
        step = max(1, _DENSE_AT_ONCE // self.num_keys)
        out = []
        for chunk in torch.split(flat, step) if len(flat) else [flat]:
            scores = chunk.new_zeros(len(chunk), 1)
            for i, centers in enumerate(self.axes):
                term = self._axis_scores(chunk[:, i], centers, i)
                scores = (scores[:, :, None] + term[:, None, :]).flatten(1)
            weights = torch.softmax(scores, dim=1)
            out.append(self._tilted(chunk, [weights @ table for table in self._tables()]))
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


def _multiplies_plainly(dtype: torch.dtype) -> bool:
    """Whether matrix products are sure to keep the dtype: a compiled graph does not notice that torch's settings change."""
    return dtype == torch.float64 or not torch.compiler.is_dynamo_compiling()


def _contract(table: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """`Σ_j Π_i weights[i][n, j_i]·table[j, c]`, `(n, c)`: the longest axis by one matrix product, then axis after axis.

    The longest axis leaves the least behind; the others sum what their query has left.
    """
    counts = [w.shape[1] for w in weights]
    longest = counts.index(max(counts))
    sums = weights[longest] @ torch.unflatten(table, 0, counts).movedim(longest, 0).reshape(counts[longest], -1)
    for w in (*weights[:longest], *weights[longest + 1 :]):
        rows = torch.unflatten(sums, 1, (w.shape[1], -1))
        # a row times a column is no work for a matrix product
        sums = (rows * w[:, :, None]).sum(dim=1) if rows.shape[2] == 1 else (w[:, None, :] @ rows)[:, 0]
    return sums


def _fold(gathered: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """`(n, Π width_i, c)` to `(n, c)`, axis after axis; the first one first, so that inner runs stay long."""
    for w in weights:
        gathered = (torch.unflatten(gathered, 1, (w.shape[1], -1)) * w[:, :, None, None]).sum(dim=1)
    return gathered[:, 0]
