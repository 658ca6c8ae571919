"""More than values: the error of a head's gradient, its range, and whether it rises in a variable. What is asked of a surrogate."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import numpy as np
import torch

from partita.arithmetic.rounding import add_up, sub_down
from partita.errors import DomainError, UnsupportedError
from partita.functions.differentiate import derivative
from partita.functions.graph import Graph, GraphBuilder
from partita.functions.target import Target
from partita.geometry.domains import Array, Box
from partita.heads.grid_head import GridHead
from partita.heads.head import FoldedHead
from partita.heads.scattered_head import ScatteredHead
from partita.methods.affine_grid import affine_terms, graph_cells
from partita.methods.on_grid import GridRecipe, head_facts
from partita.proofs.bisection import box_terms, prove_boxes
from partita.proofs.center_values import soft_terms
from partita.proofs.certificate import total
from partita.proofs.construction import Progress, semantics_of
from partita.proofs.grid_proof import GridProof, SoftGrid, prove_grid
from partita.proofs.running import UNIT_ROUNDOFF

__all__ = ["GradientError", "Range", "bound_gradient_error", "bound_range", "bound_slope", "soft_grid_of"]

Head = TypeVar("Head", GridHead, ScatteredHead)
_SAMPLES = 4096
_MOST_CELLS = 1 << 16  # of a grid that is proved; the hull of the values serves for larger ones
_GOALS = (1.005, 1.03, 1.1, 1.3, 2.0, 8.0)  # times what was seen: what to aim a proof at


@dataclass(frozen=True)
class Range:
    """Every value lies in [lo, hi], proved; values as low as `seen_lo` and as high as `seen_hi` were seen."""

    lo: float
    hi: float
    seen_lo: float
    seen_hi: float

    @property
    def trend(self) -> str:
        """Of a range of slopes: "increasing", "decreasing", or "unknown" where it holds both signs."""
        return "increasing" if self.lo >= 0 else "decreasing" if self.hi <= 0 else "unknown"


@dataclass(frozen=True)
class GradientError:
    """`sup |∂f/∂z_i − ∂net/∂z_i| ≤ bounds[i]` over all outputs, for the stored tensors in exact arithmetic; `seen` at samples."""

    bounds: tuple[float, ...]
    seen: tuple[float, ...]


def bound_gradient_error(head: FoldedHead, target: Target, *, progress: Progress | None = None) -> GradientError:
    """The error of the gradient, coordinate by coordinate, wherever f is differentiable. *Theorem*: `slope-series`."""
    if target.graph is None:
        raise UnsupportedError(
            f"{target.label} is a black box: nothing can be proved of its gradient. Give an expression."
        )
    grid, box = soft_grid_of(head), target.domain.bounding_box()
    slopes = _sampled_slopes(head, box)
    bounds, seen = [], []
    for axis in range(box.dimension):
        graph = derivative(target.graph, axis)
        truth = graph.evaluate(slopes.points).reshape(len(slopes.points), -1)
        error = float(np.abs(truth - slopes.values[:, :, axis]).max())
        prove = partial(_prove, grid, box, graph, along=axis, progress=progress)
        bounds.append(_tightest(prove, error, 1e-14 * max(float(np.abs(truth).max()), 1e-300)))
        seen.append(error)
    return GradientError(tuple(bounds), tuple(seen))


def bound_slope(head: FoldedHead, box: Box, axis: int, *, progress: Progress | None = None) -> tuple[Range, ...]:
    """The range of `∂net/∂z_axis`, one per output, in exact arithmetic: its sign says whether the head rises or falls."""
    if not 0 <= axis < box.dimension:
        raise DomainError(f"axis is {axis}; expected 0 to {box.dimension - 1}.")
    grid, slopes = soft_grid_of(head), _sampled_slopes(head, box).values[:, :, axis]
    ranges = []
    for output, seen in enumerate(slopes.T):
        one = SoftGrid(grid.axes, grid.rates, grid.values[..., output : output + 1])
        prove = partial(_prove, one, box, along=axis, progress=progress)
        ranges.append(_range_of(seen, box.dimension, prove))
    return tuple(ranges)


def bound_range(head: FoldedHead, box: Box, *, progress: Progress | None = None) -> tuple[Range, ...]:
    """The range of each output over the box, of the head as it is run."""
    with torch.no_grad():
        points = torch.from_numpy(_points(box)).to(head.dtype)
        box = _as_seen(box, head.dtype)
        table = head.evaluate(points).double().numpy()
    return tuple(_output_range(head, box, k, seen, progress) for k, seen in enumerate(table.T))


def _output_range(head: FoldedHead, box: Box, output: int, seen: Array, progress: Progress | None) -> Range:
    if isinstance(head, ScatteredHead):
        return _range_of(seen, box.dimension, partial(_prove_scattered, _one_output(head, output), box))
    if not isinstance(head, GridHead):
        raise UnsupportedError(f"the range of a {type(head).__name__} is not proved; grids and scattered heads are.")
    recipe = _recipe_of(head)
    if head.value_slopes is not None:
        return _range_of(seen, box.dimension, partial(_prove_cells, _one_output(head, output), box, recipe))
    values = head.values.detach().double().numpy()[:, output]
    running = add_up(*(t.value for t in soft_terms(head_facts(head, box, recipe, 0.0), None, math.inf)))
    low, high = sub_down(float(values.min()), running), add_up(float(values.max()), running)
    hull = Range(low, high, float(seen.min()), float(seen.max()))
    if head.num_keys > _MOST_CELLS:
        return hull  # an average of values lies between them
    grid = soft_grid_of(head)
    one_grid = SoftGrid(grid.axes, grid.rates, grid.values[..., output : output + 1])
    found = _range_of(seen, box.dimension, partial(_prove, one_grid, box, progress=progress))
    low, high = max(sub_down(found.lo, running), hull.lo), min(add_up(found.hi, running), hull.hi)
    return Range(low, high, found.seen_lo, found.seen_hi)


def soft_grid_of(head: FoldedHead) -> SoftGrid:
    """The head in exact arithmetic, or an UnsupportedError: gradients are proved of grids with constant values only."""
    if not isinstance(head, GridHead) or head.value_slopes is not None:
        raise UnsupportedError(
            "gradients are proved of heads on a product grid with constant values; those with affine values or scattered centers "
            "jump from cell to cell. Compile with method='fitted'."
        )
    rates = tuple(head.inverse_temperature.double().tolist())
    values = head.values.detach().double().numpy().reshape(*head.counts, -1)
    return SoftGrid(tuple(a.double().numpy() for a in head.axes), rates, values)


def _prove(
    grid: SoftGrid, box: Box, graph: Graph, goal: float, *, along: int | None = None, progress: Progress | None = None
) -> GridProof:
    return prove_grid(grid, graph, box.lo.ravel(), box.hi.ravel(), goal=goal, along=along, progress=progress)


@dataclass(frozen=True)
class _Bound:
    """What another proof says, in the words of `GridProof`."""

    bound: float
    settled: bool


def _prove_scattered(head: ScatteredHead, box: Box, graph: Graph, goal: float) -> _Bound:
    u = UNIT_ROUNDOFF[semantics_of(head.dtype)]
    proof = prove_boxes(head, graph, box, target=goal, unit_roundoff=u)
    bound = total(box_terms(head, proof, box))
    return _Bound(bound, proof.bound <= goal)


def _prove_cells(head: GridHead, box: Box, recipe: GridRecipe, graph: Graph, goal: float) -> _Bound:
    recipe = replace(recipe, tolerance=goal)
    terms = affine_terms(head, partial(graph_cells, head, graph, box, recipe), box, recipe, None)
    return _Bound(total(terms), terms[0].value <= goal)


def _tightest(prove: Callable[[float], GridProof | _Bound], seen: float, floor: float) -> float:
    """The bound of the first goal that is proved, from what was seen upwards; of the last, if none is."""
    best = math.inf
    for factor in _GOALS:
        proof = prove(factor * seen + floor)
        best = min(best, float(proof.bound))
        if proof.settled:
            break
    return best


def _range_of(seen: Array, dimension: int, prove: Callable[[Graph, float], GridProof | _Bound]) -> Range:
    """A range from a proof of `|net − c| ≤ r`, c the middle of what was seen."""
    low, high = float(seen.min()), float(seen.max())
    middle, half = (low + high) / 2, (high - low) / 2
    builder = GraphBuilder(dimension)
    graph = builder.finish([builder.add("const", parameters=(middle,))], (1,))
    reach = _tightest(partial(prove, graph), half, 1e-13 * max(abs(low), abs(high), 1e-300))
    return Range(float(np.nextafter(middle - reach, -np.inf)), float(np.nextafter(middle + reach, np.inf)), low, high)


@dataclass(frozen=True, eq=False)
class _Slopes:
    """Points `(n, m)` and the head's gradients there, `(n, out, m)`."""

    points: Array
    values: Array


def _points(box: Box) -> Array:
    return np.concatenate([box.sample(_SAMPLES, np.random.default_rng(5)), box.corners(256)])


def _sampled_slopes(head: FoldedHead, box: Box) -> _Slopes:
    points = _points(box)
    z = torch.from_numpy(points).requires_grad_()
    out = copy.deepcopy(head).double().evaluate(z)
    columns = [torch.autograd.grad(out[:, k].sum(), z, retain_graph=True)[0] for k in range(out.shape[1])]
    return _Slopes(points, torch.stack(columns, dim=1).double().numpy())


def _as_seen(box: Box, dtype: torch.dtype) -> Box:
    """The box that inputs lie in after they were rounded to the dtype."""
    if dtype == torch.float64:
        return box
    pad = np.maximum(np.abs(box.lo), np.abs(box.hi)) * 2.0**-23
    return Box(box.lo - pad, box.hi + pad)


def _one_output(head: Head, output: int) -> Head:
    """The head with one of its outputs."""
    one = copy.deepcopy(head)
    one.output_shape = ()
    one.values = head.get_buffer("values")[:, output : output + 1].clone()
    if head.value_slopes is not None:
        one.value_slopes = head.get_buffer("value_slopes")[:, output : output + 1].clone()
    return one


def _recipe_of(head: GridHead) -> GridRecipe:
    rates = tuple(head.inverse_temperature.double().tolist())
    return GridRecipe(head.counts, rates, head.half_windows, math.inf, math.inf, head.dtype)
