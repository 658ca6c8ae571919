"""Further proved bounds: the error of a head's gradient, its range, and whether it rises in a variable."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from partita.arithmetic.rounding import add_up, sub_down
from partita.errors import DomainError, UnsupportedError
from partita.functions.differentiate import derivative
from partita.functions.graph import Graph, GraphBuilder
from partita.functions.ranges import range_over
from partita.functions.regions import Region
from partita.functions.target import Target, graph_target
from partita.geometry.domains import Array, Box
from partita.heads.grid_head import GridHead
from partita.heads.head import FoldedHead, Head
from partita.heads.scattered_head import ScatteredHead
from partita.proofs import proofs_for
from partita.proofs.center_values import GridFacts, soft_terms
from partita.proofs.grid_proof import GridProof, SoftGrid, prove_grid
from partita.proofs.head_graphs import MOST_KEYS, head_graph, minus
from partita.proofs.proof import Given, Progress, Proof, Proved, tightest
from partita.proofs.taylor_proof import soft_grid_of

__all__ = ["GradientError", "Range", "Slopes", "bound_gradient_error", "bound_range", "bound_slope", "sampled_slopes"]

_SAMPLES = 4096
_MOST_CELLS = 1 << 16  # of a grid that is proved; the hull of the values serves for larger ones
_LEAST = 1e-298  # proofs allow themselves 1e-300 for underflow
_WIDE = 1.5  # times the range seen: a bound that is not that close is not good
_NEAR = 1.005  # times what was seen: no proof aims closer


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
    """The error of the gradient, coordinate by coordinate, wherever f is differentiable. *Theorem*: `slope-series`.

    The series is for grids with constant values. Other heads with few keys are enclosed as the expressions that they are.
    """
    if target.graph is None:
        raise UnsupportedError(
            f"{target.label} is a black box: nothing can be proved about its gradient. Give an expression."
        )
    domain = target.region or target.box
    if not _has_series(head):
        return _gradient_error_of_expression(head_graph(head), head, target.graph, domain)
    grid = soft_grid_of(head)
    slopes = sampled_slopes(head, domain)
    bounds, seen = [], []
    for axis in range(domain.dimension):
        graph = derivative(target.graph, axis)
        truth = graph.evaluate(slopes.points).reshape(len(slopes.points), -1)
        error = float(np.abs(truth - slopes.values[:, :, axis]).max())
        prove = partial(_prove_slope, grid, domain, graph, along=axis, progress=progress)
        floor = max(1e-14 * float(np.abs(truth).max()), _least_slope(grid, axis))
        bounds.append(float(tightest(prove, error, floor).bound))
        seen.append(error)
    return GradientError(tuple(bounds), tuple(seen))


def bound_slope(
    head: FoldedHead, domain: Box | Region, axis: int, *, progress: Progress | None = None
) -> tuple[Range, ...]:
    """The range of `∂net/∂z_axis`, one per output, in exact arithmetic: its sign says whether the head rises or falls."""
    if not 0 <= axis < domain.dimension:
        raise DomainError(f"axis is {axis}; expected 0 to {domain.dimension - 1}.")
    if not _has_series(head):
        return _slope_of_expression(head_graph(head), head, domain, axis)
    grid = soft_grid_of(head)
    if len(grid.axes[axis]) == 1:  # one key: the weights along this axis do not move
        return (Range(0.0, 0.0, 0.0, 0.0),) * int(grid.values.shape[-1])
    slopes, ranges = sampled_slopes(head, domain).values[:, :, axis], []
    for output, seen in enumerate(slopes.T):
        one = SoftGrid(grid.axes, grid.rates, grid.values[..., output : output + 1])
        prove = partial(_prove_slope, one, domain, along=axis, progress=progress)
        ranges.append(_range_of(seen, domain.dimension, prove, _least_slope(one, axis)))
    return tuple(ranges)


def _has_series(head: FoldedHead) -> bool:
    """Whether gradients are bounded by the series for grids; also for heads that are too large for anything else."""
    is_grid = isinstance(head, GridHead) and head.value_slopes is None
    return is_grid or not isinstance(head, GridHead | ScatteredHead) or head.num_keys > MOST_KEYS


def _slope_of_expression(graph: Graph, head: FoldedHead, domain: Box | Region, axis: int) -> tuple[Range, ...]:
    box, seen = domain.bounding_box(), sampled_slopes(head, domain).values[:, :, axis]
    found = range_over(derivative(graph, axis), box.lo, box.hi)
    return tuple(
        Range(float(a), float(b), float(s.min()), float(s.max())) for a, b, s in zip(found.lo, found.hi, seen.T)
    )


def _gradient_error_of_expression(graph: Graph, head: FoldedHead, f: Graph, domain: Box | Region) -> GradientError:
    box, off, slopes = domain.bounding_box(), minus(graph, f), sampled_slopes(head, domain)
    bounds, seen = [], []
    for axis in range(domain.dimension):
        found = range_over(derivative(off, axis), box.lo, box.hi)
        bounds.append(float(found.magnitude.max()))
        truth = derivative(f, axis).evaluate(slopes.points).reshape(len(slopes.points), -1)
        seen.append(float(np.abs(truth - slopes.values[:, :, axis]).max()))
    if not all(map(math.isfinite, bounds)):
        raise UnsupportedError(
            f"no bound was found for the gradient of {f.infix()[:100]} on {box}: it may have a pole or a jump."
        )
    return GradientError(tuple(bounds), tuple(seen))


def bound_range(head: FoldedHead, target: Target, *, progress: Progress | None = None) -> tuple[Range, ...]:
    """The range of each output over the domain, of the head as it is run."""
    domain = target.region or target.box
    with torch.no_grad():
        table = head.evaluate(torch.from_numpy(_points(domain)).to(head.dtype)).double().numpy()
    return tuple(_output_range(head, target, k, seen, progress) for k, seen in enumerate(table.T))


def _output_range(head: FoldedHead, target: Target, output: int, seen: Array, progress: Progress | None) -> Range:
    """From proofs that the output is within r of a constant, and, for constant values, from the values themselves.

    Values that cancel are far from what a proof by cells can see; then the other proofs for such a head are asked as well.
    """
    hull = _hull(head, target.box, output, seen)
    if hull is not None and (head.num_keys > _MOST_CELLS or hull.hi - hull.lo <= _NEAR * np.ptp(seen)):
        return hull  # no proof aims closer to what was seen
    one, best = _one_output(head, output), hull
    for proof in proofs_for(head):

        def prove(graph: Graph, goal: float, proof: Proof = proof) -> Proved:
            constant = graph_target(graph, target.domains, "a constant")
            return proof.prove(one, constant, Given(aim=goal, sharpen=False, progress=progress))

        found = _range_of(seen, target.domain.dimension, prove)
        best = found if best is None else replace(found, lo=max(found.lo, best.lo), hi=min(found.hi, best.hi))
        if best.hi - best.lo <= _WIDE * np.ptp(seen):
            break
    assert best is not None
    return best


def _hull(head: FoldedHead, box: Box, output: int, seen: Array) -> Range | None:
    """An average of values lies between them; None for values that are not constant on their cells."""
    if not isinstance(head, GridHead) or head.value_slopes is not None:
        return None
    values = head.values.detach().double().numpy()[:, output]
    running = add_up(*(t.value for t in soft_terms(GridFacts.of(head, box), None, math.inf)))
    low, high = sub_down(float(values.min()), running), add_up(float(values.max()), running)
    return Range(low, high, float(seen.min()), float(seen.max()))


def _least_slope(grid: SoftGrid, axis: int) -> float:
    """About what rounding makes of a slope that is 0: to aim lower is hopeless."""
    one = len(grid.axes[axis]) == 1
    return _LEAST if one else max(_LEAST, 1e-13 * grid.steepness(axis) * float(np.abs(grid.values).max()))


def _prove_slope(
    grid: SoftGrid, domain: Box | Region, graph: Graph, goal: float, *, along: int, progress: Progress | None = None
) -> GridProof:
    box, region = domain.bounding_box(), domain if isinstance(domain, Region) else None
    ends = box.lo.ravel(), box.hi.ravel()
    if len(grid.axes[along]) == 1:  # the head does not move along it: f alone is the error
        still = SoftGrid(
            tuple(a[:1] for a in grid.axes), grid.rates, np.zeros((1,) * len(grid.axes) + grid.values.shape[-1:])
        )
        return prove_grid(still, graph, *ends, goal=goal, region=region, progress=progress)
    return prove_grid(grid, graph, *ends, goal=goal, region=region, along=along, progress=progress)


def _range_of(
    seen: Array, dimension: int, prove: Callable[[Graph, float], GridProof | Proved], floor: float = 0.0
) -> Range:
    """A range from a proof of `|net − c| ≤ r`, c the middle of what was seen; to aim below the floor is hopeless."""
    low, high = float(seen.min()), float(seen.max())
    middle, half = low / 2 + high / 2, high / 2 - low / 2
    builder = GraphBuilder(dimension)
    graph = builder.finish([builder.add("const", parameters=(middle,))], (1,))
    floor = max(1e-13 * max(abs(low), abs(high)), floor, _LEAST)
    reach = float(tightest(partial(prove, graph), half, floor).bound)
    return Range(sub_down(middle, reach), add_up(middle, reach), low, high)


@dataclass(frozen=True, eq=False)
class Slopes:
    """Points `(n, m)` and the head's gradients there, `(n, out, m)`."""

    points: Array
    values: Array


def _points(domain: Box | Region) -> Array:
    return np.concatenate([domain.sample(_SAMPLES, np.random.default_rng(5)), domain.corners(256)])


def sampled_slopes(head: Head, domain: Box | Region) -> Slopes:
    """Gradients at random points and corners, by autograd in float64."""
    points = _points(domain)
    z = torch.from_numpy(points).requires_grad_()
    out = copy.deepcopy(head).double().evaluate(z)
    columns = [torch.autograd.grad(out[:, k].sum(), z, retain_graph=True)[0] for k in range(out.shape[1])]
    return Slopes(points, torch.stack(columns, dim=1).double().numpy())


def _one_output(head: FoldedHead, output: int) -> FoldedHead:
    """The head with one of its outputs."""
    one = copy.deepcopy(head)
    one.output_shape = ()
    one.values = head.get_buffer("values")[:, output : output + 1].clone()
    if getattr(head, "value_slopes", None) is not None:
        one.value_slopes = head.get_buffer("value_slopes")[:, output : output + 1].clone()
    return one
