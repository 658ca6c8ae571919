"""The data of a proof by bisection: the stored cells, boxes with lists of the cells that matter there, and f on boxes."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from partita.arithmetic.precision import DOUBLE, SINGLE
from partita.arithmetic.rounding import up
from partita.errors import ShapeError
from partita.functions.graph import Graph, GraphBuilder
from partita.geometry.domains import Array, Box
from partita.heads.scattered_head import ScatteredHead

__all__ = ["OUTWARD", "BoxList", "CellTable", "Expansion", "Labels", "Mask", "Place", "U", "View"]

Labels = NDArray[np.int64]
Mask = NDArray[np.bool_]

U = 2.0**-53
_STEEPEST = 1e100
OUTWARD = 1 + 1e-12  # more than all roundings of one bound together


@dataclass(frozen=True, eq=False)
class CellTable:
    """A stored head in float64; `unit` is the roundoff it is run with and `shift`, `(m,)`, how far that may move an input.

    Centers `(N, m)`, powers `(N,)`, values `(N, out)`, slopes `(N, out, m)`.
    """

    centers: Array
    powers: Array
    values: Array
    slopes: Array
    rate: float
    unit: float
    shift: Array

    @classmethod
    def of(cls, head: ScatteredHead, box: Box, unit: float) -> CellTable:
        def exact(tensor: torch.Tensor | None, *shape: int) -> Array:
            return np.zeros(shape) if tensor is None else tensor.detach().double().cpu().numpy()

        n, m, out = head.num_keys, head.dimension, head.values.shape[1]
        return cls(
            centers=exact(head.centers),
            powers=exact(head.powers, n),
            values=exact(head.values),
            slopes=exact(head.value_slopes, n, out, m),
            rate=float(head.inverse_temperature),
            unit=unit,
            shift=(SINGLE if unit > U else DOUBLE).moved(box.lo.ravel(), box.hi.ravel()),
        )

    def farthest(self, box: Box) -> Array:
        """`sup |z − c_j|` over the box, axis by axis, `(N, m)`."""
        return np.maximum(np.abs(box.lo.ravel() - self.centers), np.abs(box.hi.ravel() - self.centers)) + self.shift

    def largest(self, box: Box) -> float:
        """`max_j sup |V_j(z)|` over the box, as evaluated."""
        reach = np.abs(self.values) + np.einsum("nom,nm->no", np.abs(self.slopes), self.farthest(box))
        terms = int(reach.shape[1] + self.centers.shape[1] + 4)
        return float(reach.max()) * (1 + terms * self.unit) * OUTWARD


@dataclass(frozen=True, eq=False)
class View:
    """Coordinates y in which boxes are halved, `z = origin + axes·y`; `graph` is f of y, and `lo ≤ y ≤ hi` covers the domain."""

    graph: Graph
    origin: Array
    axes: Array
    lo: Array
    hi: Array

    @classmethod
    def plain(cls, graph: Graph, box: Box) -> View:
        return cls(graph, np.zeros(box.dimension), np.eye(box.dimension), box.lo.ravel(), box.hi.ravel())

    @classmethod
    def turned(cls, graph: Graph, box: Box, axes: Array) -> View:
        """Orthogonal axes `(m, m)` around the middle of the box; their inverse is their transpose but for roundings."""
        defect = float(np.abs(axes.T @ axes - np.eye(len(axes))).max()) * len(axes)
        if not defect < 1e-9:
            raise ShapeError(f"axes of a view must be orthogonal, found a defect of {defect:.3g}.")
        origin = (box.lo + box.hi).ravel() / 2
        reach = np.abs(axes).T @ np.maximum(box.hi.ravel() - origin, origin - box.lo.ravel())
        reach = reach + (2 * defect + 8 * len(axes) * U) * reach.max()
        return cls(_turned(graph, origin, axes), origin, axes, -reach, reach)

    @cached_property
    def is_plain(self) -> bool:
        return not self.origin.any() and np.array_equal(self.axes, np.eye(len(self.axes)))

    def entered(self, graph: Graph) -> Graph:
        """A function of z as one of y."""
        return graph if self.is_plain else _turned(graph, self.origin, self.axes)

    def leave(self, middle: Array) -> tuple[Array, Array]:
        """z of points y, `(n, m)`, and how far roundings may have moved them."""
        if self.is_plain:
            return middle, np.zeros_like(middle)
        blur = (len(self.origin) + 2) * U * (np.abs(self.origin) + np.abs(middle) @ np.abs(self.axes).T)
        return self.origin + middle @ self.axes.T, blur


def _turned(graph: Graph, origin: Array, axes: Array) -> Graph:
    """The graph of `y ↦ f(origin + axes·y)`, constants exact."""
    builder = GraphBuilder(graph.num_inputs)
    inputs = [builder.add("input", parameters=(i,)) for i in range(graph.num_inputs)]
    coordinates = []
    for start, row in zip(origin.tolist(), axes.tolist()):
        position = builder.add("const", parameters=(start,))
        for factor, y in zip(row, inputs):
            if factor:
                product = builder.add("mul", builder.add("const", parameters=(factor,)), y)
                position = builder.add("add", position, product)
        coordinates.append(position)
    places: list[int] = []
    for node in graph.nodes:
        if node.operation == "input":
            places.append(coordinates[int(node.parameters[0])])
        else:
            places.append(builder.add(node.operation, *(places[k] for k in node.arguments), parameters=node.parameters))
    return builder.finish([places[k] for k in graph.outputs], graph.output_shape)


@dataclass(frozen=True, eq=False)
class BoxList:
    """Boxes and the cells that may matter there: the next `counts[i]` of `cells` are those of box i, all others hold ≤ `mass[i]`.

    `bound` of |f − net| and `size` of |f|; `least`, at the middle, is what no halving can lower the bound below; `axis` to halve.
    `shard`: the part of the domain that the box belongs to.
    """

    lo: Array
    hi: Array
    depth: Labels
    counts: Labels
    cells: Labels
    mass: Array
    bound: Array
    size: Array
    least: Array
    axis: Labels
    shard: Labels

    @classmethod
    def whole(cls, view: View, cells: int) -> BoxList:
        """One box, with all cells."""
        none, zero = np.zeros(1), np.zeros(1, np.int64)
        return cls(
            view.lo[None], view.hi[None], zero, np.array([cells]), np.arange(cells), none, none, none, none, zero, zero
        )

    def __len__(self) -> int:
        return len(self.lo)

    @cached_property
    def owner(self) -> Labels:
        return np.repeat(np.arange(len(self)), self.counts)

    @property
    def middle(self) -> Array:
        return 0.5 * self.lo + 0.5 * self.hi

    @property
    def starts(self) -> Labels:
        return np.cumsum(self.counts) - self.counts

    def take(self, chosen: Labels | Mask) -> BoxList:
        """These boxes, with their cells."""
        chosen = np.arange(len(self))[chosen]
        counts = self.counts[chosen]
        first = np.repeat(self.starts[chosen] - (np.cumsum(counts) - counts), counts)
        rows = {f.name: getattr(self, f.name)[chosen] for f in fields(self) if f.name not in ("counts", "cells")}
        return BoxList(**rows, counts=counts, cells=self.cells[first + np.arange(len(first))])

    def keep(self, pairs: Mask, mass: Array) -> BoxList:
        """Only these of the (box, cell) pairs."""
        counts = np.bincount(self.owner[pairs], minlength=len(self))
        return replace(self, counts=counts, cells=self.cells[pairs], mass=mass)

    def join(self, *others: BoxList) -> BoxList:
        columns = {f.name: [getattr(boxes, f.name) for boxes in (self, *others)] for f in fields(self)}
        return BoxList(**{name: np.concatenate(parts) for name, parts in columns.items()})

    def halves(self) -> BoxList:
        """Both halves along the axis of each box; they share the midpoint, so nothing is lost between them."""
        rows, middle = np.arange(len(self)), self.middle
        left_hi, right_lo = self.hi.copy(), self.lo.copy()
        left_hi[rows, self.axis] = right_lo[rows, self.axis] = middle[rows, self.axis]
        deeper = self.depth + 1
        return replace(self, hi=left_hi, depth=deeper).join(replace(self, lo=right_lo, depth=deeper))


@dataclass(frozen=True, eq=False)
class Place:
    """Boxes in z, `(n, m)` each: middles, radii along the axes of the view, `moved` by roundings, half widths of the hull."""

    z: Array
    radius: Array
    moved: Array
    hull: Array

    @classmethod
    def of(cls, boxes: BoxList, view: View, shift: Array) -> Place:
        middle = boxes.middle
        radius = up(np.maximum(boxes.hi - middle, middle - boxes.lo))
        z, blur = view.leave(middle)
        moved = blur + shift
        return cls(z, radius, moved, (radius @ np.abs(view.axes).T + moved) * OUTWARD)

    def take(self, chosen: Mask) -> Place:
        return Place(self.z[chosen], self.radius[chosen], self.moved[chosen], self.hull[chosen])


@dataclass(frozen=True, eq=False)
class Expansion:
    """f on boxes `b + r∘t`: within `higher` of `constant + linear·t`, and in [lo, hi]; `(n, out)`, slopes `(n, out, m)`.

    `curved`, `(n, out, m)`: how much of `higher` each axis has a part in, to choose where to halve.
    """

    constant: Array
    linear: Array
    higher: Array
    curved: Array
    lo: Array
    hi: Array

    @classmethod
    def of(cls, graph: Graph, boxes: BoxList, radius: Array, degree: int) -> Expansion:
        """From Taylor models of degree ≥ 1; `a t² = a/2 ± |a|/2` halves what squares cost."""
        m, models = graph.num_inputs, graph.taylor(boxes.middle, radius, degree)
        coefficients, exponents = np.moveaxis(models.coefficients, 2, 0), models.exponents[m + 1 :]
        sizes = np.abs(coefficients[:, :, m + 1 :])
        squares = np.flatnonzero((exponents.sum(axis=1) == 2) & (exponents.max(axis=1, initial=0) == 2))
        halves = 0.5 * coefficients[:, :, m + 1 + squares]
        sizes[:, :, squares] *= 0.5
        constant = coefficients[:, :, 0] + halves.sum(axis=2)
        rounded = (m + 1) * U * (np.abs(coefficients[:, :, 0]) + np.abs(halves).sum(axis=2))
        plain = graph.enclose(boxes.lo, boxes.hi)
        curved = np.einsum("nok,km->nom", sizes, (exponents > 0).astype(float))
        blank = np.flatnonzero(~coefficients[:, :, 1:].any(axis=(1, 2)) & models.remainder.any(axis=0))
        if len(blank):  # the model is a constant: slopes must tell which axes matter
            slopes = graph.enclose_gradient(boxes.lo[blank], boxes.hi[blank])[1].magnitude
            curved[blank] = np.minimum(slopes, _STEEPEST) * radius[blank][:, None, :]
        return cls(
            constant=constant,
            linear=coefficients[:, :, 1 : m + 1],
            higher=(sizes.sum(axis=2) + models.remainder.T + rounded) * OUTWARD,
            curved=curved,
            lo=plain.lo,
            hi=plain.hi,
        )

    @property
    def magnitude(self) -> Array:
        """Bounds of |f| on each box, `(n,)`."""
        model = (np.abs(self.constant) + np.abs(self.linear).sum(axis=2) + self.higher) * OUTWARD
        out: Array = np.fmin(np.maximum(np.abs(self.lo), np.abs(self.hi)), model).max(axis=1)
        return out
