"""Values found without solving a system: f at the centers at a well-chosen temperature, and the same with one correction.

On a long uniform grid a softmax of sharpness κ averages neighbours with variance `σ²(κ) h²` and a first moment that never exceeds
`ρ₁(κ) h`: the odd terms cancel, the error of `V_j = f(v_j)` is `½ f″ h² σ² + f′ h ρ₁`, not O(h). *Theorem*: `tuned-values`.
Subtracting the known bias, `V_j = f_j − δ²f_j/(2κ)`, leaves O(h⁴). *Theorem*: `corrected-values`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from partita.arithmetic.precision import Precision
from partita.arithmetic.progress import Progress, report
from partita.errors import BudgetSpentError
from partita.functions.target import Target
from partita.geometry.domains import Array, Box
from partita.geometry.grid import ProductGrid
from partita.geometry.moments import window_for
from partita.heads.grid_head import GridHead

__all__ = [
    "AveragedGrid",
    "Slopes",
    "averaged_grid",
    "corrected_values",
    "lattice_moments",
    "plane_pieces_needed",
    "predicted_counts",
    "sharpness_for",
    "smallest_scale",
    "tuned_values",
]

_KAPPAS = np.geomspace(0.8, 16.0, 61)
_AIM = 0.95  # of the tolerance, that the sampled error may take


@dataclass(frozen=True, eq=False)
class AveragedGrid:
    """A soft grid with its values `(cells, out)` and the largest error seen at test points."""

    counts: tuple[int, ...]
    ghosts: tuple[int, ...]
    sharpness: tuple[float, ...]
    rates: tuple[float, ...]
    values: Array
    error_estimate: float


@lru_cache(maxsize=4096)
def lattice_moments(sharpness: float) -> tuple[float, float]:
    """`ρ₁ = sup |E(x − c)|/h` and `σ² = sup E(x − c)²/h²` on an infinite uniform grid, by sampling x: figures to plan with.

    With `q̂ = e^{−2π²/κ}` they are about `4π q̂/κ` and `1/κ + 8π² q̂/κ²`.
    """
    x = np.linspace(0, 0.5, 129)[:, None]
    reach = math.ceil(math.sqrt(80 / sharpness)) + 1
    d = x - np.arange(-reach, reach + 1)
    w = np.exp(-0.5 * sharpness * d * d)
    w /= w.sum(axis=1, keepdims=True)
    return float(np.abs((w * d).sum(axis=1)).max()), float((w * d * d).sum(axis=1).max())


def sharpness_for(spacing: float, slope: float, curvature: float) -> float:
    """The κ that minimises `slope·h ρ₁(κ) + ½ curvature·h² σ²(κ)`: it falls slowly as the grid gets finer."""
    errors = [slope * spacing * a + 0.5 * curvature * spacing**2 * b for a, b in map(lattice_moments, _KAPPAS.tolist())]
    return float(_KAPPAS[int(np.argmin(errors))])


@dataclass(frozen=True, eq=False)
class Slopes:
    """Estimates per axis of `sup |∂_i^k f|`, k = 1, 2, 4: from differences in the box and, if there is one, from the graph.

    `bend` is the mean of `√|∂_ii f|`, by differences alone: an affine piece of length l errs by at least `l² ∂_ii f/16`.
    """

    first: Array
    second: Array
    fourth: Array
    bend: Array

    @classmethod
    @np.errstate(all="ignore")  # numbers out of range end in a refusal
    def of(cls, target: Target, *, points: int = 256, seed: int = 5, progress: Progress | None = None) -> Slopes:
        box = target.box
        radius = 1e-2 * box.sides  # wide enough that a kink is met
        unit = np.random.default_rng(seed).random((points, box.dimension))
        centers = box.lo.ravel() + 2 * radius + (box.sides - 4 * radius) * unit
        found, bend = np.zeros((box.dimension, 3)), np.zeros(box.dimension)
        for i in range(box.dimension):
            report(progress, "slopes", i, box.dimension)
            found[i], bend[i] = _line_of_differences(target, centers, radius, i)
            if target.graph is not None:
                found[i] = np.maximum(found[i], _line_of_graph(target, centers, radius, i))
        return cls(found[:, 0] / radius, found[:, 1] / radius**2, found[:, 2] / radius**4, bend / radius)

    @np.errstate(all="ignore")  # numbers out of range end in a refusal
    def cells_needed(self, box: Box, tolerance: float, sloped: NDArray[np.bool_] | None = None) -> Array:
        """Cells per axis, up to a common factor: side·√curvature, 0 where f does not move.

        An axis that is not `sloped` holds constants: there, in the same units, side·slope/√tolerance.
        """
        moving = self.first * box.sides > 0.01 * tolerance
        need = np.minimum(box.sides * np.sqrt(self.second), 1e300)
        if sloped is not None:
            need = np.where(sloped, need, np.minimum(2 * box.sides * self.first / math.sqrt(tolerance), 1e300))
        need = np.where(moving, need, 0.0)
        return np.where(moving, np.maximum(need / need.max(), 0.05) if need.max() > 0 else 1.0, 0.0)

    def pieces_needed(self, box: Box, tolerance: float) -> float:
        """About how many affine pieces a line through the box needs at least, along the axis that needs most."""
        return float((box.sides * self.bend).max()) / math.sqrt(16 * tolerance)

    @property
    def finite(self) -> bool:
        return bool(np.isfinite([self.first, self.second, self.fourth]).all())


@np.errstate(all="ignore")  # numbers out of range end in a refusal
def plane_pieces_needed(target: Target, tolerance: float, *, points: int = 256, seed: int = 5) -> float:
    """About how many affine pieces a plane through the box needs at least, along the two axes that need most; 0 on a line.

    An affine piece of area A errs by at least `A √|det H|/(4π)`, attained by ellipses where H is definite: x·y needs many
    pieces, although it is straight along both axes. By differences.
    """
    box, most = target.box, 0.0
    radius = 1e-2 * box.sides
    unit = np.random.default_rng(seed).random((points, box.dimension))
    centers = box.lo.ravel() + 2 * radius + (box.sides - 4 * radius) * unit
    for i, j in itertools.combinations(range(box.dimension), 2):
        a, b = (np.eye(box.dimension)[k] * radius for k in (i, j))
        f = {(s, t): target(centers + s * a + t * b) for s in (-1, 0, 1) for t in (-1, 0, 1)}
        first, second = (f[1, 0] - 2 * f[0, 0] + f[-1, 0], f[0, 1] - 2 * f[0, 0] + f[0, -1])
        mixed = (f[1, 1] - f[1, -1] - f[-1, 1] + f[-1, -1]) / 4
        bent = np.sqrt(np.abs(first * second - mixed**2)).max(axis=1).mean() / (radius[i] * radius[j])
        most = max(most, float(bent * box.sides[i] * box.sides[j]) / (4 * math.pi * tolerance))
    return most


def _line_of_graph(target: Target, centers: Array, radius: Array, axis: int) -> tuple[float, float, float]:
    """The largest `|∂^k f| r^k`, k = 1, 2, 4, along one axis, from Taylor polynomials on short lines."""
    if target.graph is None:
        return (math.inf,) * 3
    only = np.where(np.arange(len(radius)) == axis, radius, 0.0)
    model = target.graph.taylor(centers, np.broadcast_to(only, centers.shape), 4)
    order = [model.exponents.tolist().index([k * (i == axis) for i in range(len(radius))]) for k in (1, 2, 4)]
    size = np.where(np.isfinite(model.remainder)[:, None], np.abs(model.coefficients[:, order]), np.inf).max(
        axis=(0, 2)
    )
    return float(size[0]), 2 * float(size[1]), 24 * float(size[2])


def _line_of_differences(
    target: Target, centers: Array, radius: Array, axis: int
) -> tuple[tuple[float, float, float], float]:
    step = np.eye(len(radius))[axis] * radius
    f = [target(centers + k * step) for k in (-2, -1, 0, 1, 2)]
    first, second = f[3] - f[1], f[3] - 2 * f[2] + f[1]
    fourth = f[0] - 4 * f[1] + 6 * f[2] - 4 * f[3] + f[4]
    sizes = float(np.abs(first).max()) / 2, float(np.abs(second).max()), float(np.abs(fourth).max())
    return sizes, float(np.sqrt(np.abs(second).max(axis=1)).mean())


@np.errstate(all="ignore")  # numbers out of range end in a refusal
def predicted_counts(slopes: Slopes, box: Box, method: str, tolerance: float) -> tuple[int, ...]:
    """Keys per axis, ghosts included, that the theorem's leading terms ask for: a forecast, before anything is built."""
    active = slopes.first * box.sides > 1e-3 * tolerance
    counts = []
    for side, first, second, fourth, moves in zip(box.sides, slopes.first, slopes.second, slopes.fourth, active):
        if not moves:
            counts.append(1)
            continue
        cells = 1.0
        while cells < 1e15 and _leading_error(side / cells, first, second, fourth, method) > tolerance / active.sum():
            cells *= 1.05
        counts.append(math.ceil(cells) + 6)
    return tuple(counts)


def _leading_error(h: float, first: float, second: float, fourth: float, method: str) -> float:
    moments = [(k, *lattice_moments(k)) for k in _KAPPAS[::4].tolist()]
    if method == "tuned":
        return min(first * h * rho + 0.5 * second * h**2 * sigma for _, rho, sigma in moments)
    return float(min(first * h * rho + fourth * h**4 * (1 / (8 * k * k) + 1 / (24 * k)) for k, rho, _ in moments))


def tuned_values(target: Target, grid: ProductGrid) -> Array:
    """`V_j = f(v_j)` inside; beyond the box `f(p) + ∇f(p)·(v − p)`, p the nearest point of the box; f is not evaluated outside."""
    centers = grid.centers_of(np.arange(grid.num_cells))
    inside = grid.box.clamp(centers)
    values = target(inside)
    for i in range(grid.dimension):
        beyond = np.flatnonzero(centers[:, i] != inside[:, i])
        if beyond.size:
            slope = _inward_slope(target, inside[beyond], i)
            values[beyond] += slope * (centers[beyond, i] - inside[beyond, i])[:, None]
    return values


def _inward_slope(target: Target, points: Array, axis: int) -> Array:
    """`∂_i f` at points of the boundary, by differences of third order that stay inside the box."""
    box = target.box
    lo, hi = box.lo.ravel()[axis], box.hi.ravel()[axis]
    step = np.where(points[:, axis] - lo < hi - points[:, axis], 1.0, -1.0) * 2e-4 * (hi - lo)
    asked = []
    for k in range(4):
        moved = points.copy()
        moved[:, axis] += k * step
        asked.append(target(moved))
    out: Array = (-11 * asked[0] + 18 * asked[1] - 9 * asked[2] + 2 * asked[3]) / (6 * step[:, None])
    return out


def corrected_values(target: Target, grid: ProductGrid, ghosts: tuple[int, ...], sharpness: tuple[float, ...]) -> Array:
    """`V = Π_i (1 − δ_i²/(2κ_i)) f`; beyond the box f is continued by the polynomial through the eight nearest centers."""
    own = ProductGrid(grid.box, tuple(a[g : len(a) - g] for a, g in zip(grid.axes, ghosts)))
    table = target(own.centers_of(np.arange(own.num_cells))).reshape(*own.counts, -1)
    for i, (ghost, kappa) in enumerate(zip(ghosts, sharpness)):
        if own.counts[i] == 1:
            continue
        table = np.moveaxis(_continued(np.moveaxis(table, i, 0), ghost + 1), 0, i)
        lines = np.moveaxis(table, i, 0)
        lines = lines[1:-1] - (lines[2:] - 2 * lines[1:-1] + lines[:-2]) / (2 * kappa)
        table = np.moveaxis(lines, 0, i)
    return table.reshape(grid.num_cells, -1)


def _continued(lines: Array, count: int) -> Array:
    """`count` more rows at both ends, by extrapolation of degree 7 (less on short axes)."""
    degree = min(8, len(lines))
    nodes = np.arange(degree)
    at = -np.arange(count, 0, -1.0)
    basis = np.ones((count, degree))
    for k in nodes:
        others = nodes[nodes != k]
        basis[:, k] = np.prod((at[:, None] - others) / (k - others), axis=1)
    before = np.tensordot(basis, lines[:degree], axes=1)
    after = np.tensordot(basis, lines[::-1][:degree], axes=1)[::-1]
    return np.concatenate([before, lines, after])


@np.errstate(all="ignore")  # numbers out of range end in a refusal
def averaged_grid(
    target: Target,
    slopes: Slopes,
    method: str,
    *,
    tolerance: float,
    storage: type[np.floating],
    max_cells: int,
    sharpness: float | None = None,
    progress: Progress | None = None,
) -> AveragedGrid | str:
    """The smallest tuned or corrected grid whose sampled error meets the tolerance, or the reason why there is none."""
    box = target.box
    if not slopes.finite:
        return "the derivatives of f are not finite everywhere"
    test = np.concatenate([box.sample(4096, np.random.default_rng(11)), box.corners(256)])
    truth = target(test)
    need = slopes.cells_needed(box, tolerance)
    moving = need > 0

    def at(scale: float) -> AveragedGrid | None:
        inner = np.where(moving, np.maximum(np.ceil(scale * need), 2), 1).astype(int)
        grids = []
        for kappa in _choices(method, sharpness) if inner.prod() <= max_cells else ():
            report(progress, f"trying {' × '.join(map(str, inner))} cells")
            grids.append(_one(target, method, box, inner, slopes, test, truth, storage, kappa, max_cells))
        return min((g for g in grids if g is not None), key=lambda g: g.error_estimate, default=None)

    return smallest_scale(at, _AIM * tolerance, max_cells)


def _choices(method: str, sharpness: float | None) -> tuple[float | None, ...]:
    return (sharpness,) if sharpness is not None or method == "tuned" else (1.0, 1.3, 1.7, 2.2, 2.8)


class _Measured(Protocol):
    @property
    def counts(self) -> tuple[int, ...]: ...
    @property
    def error_estimate(self) -> float: ...


Grid = TypeVar("Grid", bound=_Measured)


def smallest_scale(at: Callable[[float], Grid | None], aim: float, max_cells: int) -> Grid | str:
    """The grid at the smallest scale whose error meets the aim: double the scale until it does, then bisect while there is time."""
    low, scale = 0.5, 1.0
    best: Grid | None = None
    last: Grid | None = None
    while best is None:
        found = at(scale)
        if found is None:
            reached = (
                "" if last is None else f"; {math.prod(last.counts):,} keys leave an error of {last.error_estimate:.3g}"
            )
            return f"more than {max_cells:,} keys{reached}"
        last = found
        if found.error_estimate <= aim:
            best = found
        else:
            low, scale = scale, scale * (2 if found.error_estimate > 16 * aim else 1.5)
            if scale > 64 * max(found.counts):  # sizes do not grow with the scale
                keys = math.prod(found.counts)
                return f"f varies where its slopes were not sampled; {keys:,} keys leave an error of {found.error_estimate:.3g}"
    high = scale
    while high - low > max(0.5, 0.01 * high):
        middle = (low + high) / 2
        try:
            found = at(middle)
        except BudgetSpentError:
            return best
        if found is not None and found.error_estimate <= aim:
            best, high = found, middle
        else:
            low = middle
    return best


def _one(
    target: Target,
    method: str,
    box: Box,
    inner: Array,
    slopes: Slopes,
    test: Array,
    truth: Array,
    storage: type[np.floating],
    kappa: float | None,
    max_cells: int,
) -> AveragedGrid | None:
    """The grid with these many cells inside the box, its values and its error at the test points."""
    spacing = box.sides / inner
    kappas = [
        (kappa or sharpness_for(h, a, b)) if n > 1 else 1.0
        for h, a, b, n in zip(spacing, slopes.first, slopes.second, inner)
    ]
    ghosts = tuple(math.ceil(math.sqrt(2 * math.log(1e4) / k)) if n > 1 else 0 for k, n in zip(kappas, inner))
    counts = tuple(int(n) + 2 * g for n, g in zip(inner, ghosts))
    if math.prod(counts) > max_cells:
        return None
    grid = ProductGrid.uniform(box, counts, ghosts=ghosts, dtype=storage)
    rates = tuple(Precision.of(np.dtype(storage)).rates(np.array(kappas), spacing).tolist())
    values = tuned_values(target, grid) if method == "tuned" else corrected_values(target, grid, ghosts, tuple(kappas))
    values = values.astype(storage).astype(float)
    error = float(np.abs(_evaluate(grid, rates, values, test) - truth).max())
    return AveragedGrid(counts, ghosts, tuple(kappas), rates, values, error) if math.isfinite(error) else None


def _evaluate(grid: ProductGrid, rates: tuple[float, ...], values: Array, points: Array) -> Array:
    """The head at points `(n, m)`, in float64."""
    windows = window_for(grid.geometry, rates, 1e-15)
    shapes = {"input_shapes": ((grid.dimension,),), "output_shape": (values.shape[1],)}
    head = GridHead(grid, rates, torch.from_numpy(values), half_windows=windows, **shapes)  # type: ignore[arg-type]
    return head.evaluate(torch.from_numpy(points)).numpy()
