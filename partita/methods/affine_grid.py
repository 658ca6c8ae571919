"""Affine values on a hard product grid: every cell stores f and its slopes, and the error is of second order."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from partita.arithmetic.rounding import add_up, div_down, exp_up, expm1_up, mul_up
from partita.errors import BudgetSpentError
from partita.functions.graph import Graph
from partita.functions.target import Target
from partita.geometry.domains import Array, Box
from partita.geometry.grid import ProductGrid
from partita.geometry.moments import dropped_mass
from partita.heads.grid_head import GridHead
from partita.methods.on_grid import GridRecipe, head_facts, norm_name
from partita.proofs.center_values import Known, domain_factor, input_rounding, score_error
from partita.proofs.certificate import Certificate, Term, model_digest, total
from partita.proofs.construction import (
    Construction,
    Progress,
    describe_domain,
    describe_function,
    environment,
    platform_assumption,
    some_answers,
)
from partita.proofs.polynomials import bound_ranges
from partita.proofs.running import UNIT_ROUNDOFF
from partita.proofs.sampled import sampled_error
from partita.search.averaged_values import Slopes, smallest_scale

__all__ = [
    "OVERLAP",
    "SHARPNESS",
    "AffineCells",
    "AffineRecipe",
    "affine_cells",
    "affine_grid",
    "affine_head",
    "affine_terms",
    "graph_cells",
    "grid_of",
    "largest_value",
    "smallest_affine_grid",
]

CellError = Callable[[float, float], float]  # (spacings to each side, goal) to max_j sup |f − V_j|

SHARPNESS = 4096.0  # κ: a cell is left within a hundredth of its width, so that neighbours' slopes hardly enter
OVERLAP = 0.0135  # of a cell: beyond it a neighbour holds less than 1e-12
_AIM = 0.88  # of the tolerance, that the sampled error may take
_DEGREE = 3
_CELLS_AT_ONCE = 2048


@dataclass(frozen=True, eq=False)
class AffineRecipe:
    """A hard grid with `V_j(z) = A_j + J_j(z − o)`, o the middle of the box: A `(cells, out)`, J `(cells, out, m)`."""

    grid: GridRecipe
    values: Array
    slopes: Array

    @property
    def tolerance(self) -> float:
        return self.grid.tolerance

    @property
    def semantics(self) -> str:
        return self.grid.semantics


def affine_cells(target: Target, grid: ProductGrid) -> tuple[Array, Array]:
    """Values at the middle of the box and slopes of the affine function of each cell, from f at its center and at its faces.

    `J_i = (f₊ − f₋)/h_i`; half of the second differences is added to the value, which centres the residual of a parabola.
    """
    centers = grid.centers_of(np.arange(grid.num_cells))
    spacing = grid.box.sides / np.array(grid.counts)
    lo, hi = grid.box.lo.ravel(), grid.box.hi.ravel()
    here = target(centers)
    values, slopes = here.copy(), np.zeros((*here.shape, grid.dimension))
    for i, h in enumerate(spacing):
        left, right = centers.copy(), centers.copy()
        left[:, i] = np.maximum(centers[:, i] - h / 2, lo[i])
        right[:, i] = np.minimum(centers[:, i] + h / 2, hi[i])
        below, above = target(left), target(right)
        slopes[:, :, i] = (above - below) / (right - left)[:, i, None]
        values += ((above + below) / 2 - here) / 2
    origin = (lo + hi) / 2
    return values - np.einsum("jom,jm->jo", slopes, centers - origin), slopes


@dataclass(frozen=True, eq=False)
class AffineCells:
    """A uniform grid with affine values, and the largest error seen at test points."""

    counts: tuple[int, ...]
    rates: tuple[float, ...]
    values: Array
    slopes: Array
    error_estimate: float


def smallest_affine_grid(
    target: Target, *, tolerance: float, storage: type[np.floating], max_cells: int
) -> AffineCells | str:
    """The fewest cells of a uniform grid whose affine values meet the tolerance at test points, or why there are none."""
    box, slopes = target.domain.bounding_box(), Slopes.of(target)
    test = np.concatenate([box.sample(4096, np.random.default_rng(11)), box.corners(256)])
    need = slopes.cells_needed(box, tolerance)

    def at(scale: float) -> AffineCells | None:
        counts = tuple(np.maximum(np.ceil(scale * need), 1).astype(int).tolist())
        if math.prod(counts) > max_cells:
            return None
        rates = (SHARPNESS / (box.sides / np.array(counts)) ** 2).astype(storage).astype(float)
        grid = ProductGrid.uniform(box, counts, dtype=storage)
        values, tilts = affine_cells(target, grid)
        cells, points = _corners_of_cells(grid)
        cells, points = np.concatenate([cells, grid.cell(test)]), np.concatenate([points, test])
        origin = (box.lo.ravel() + box.hi.ravel()) / 2
        got = values[cells] + np.einsum("jom,jm->jo", tilts[cells], points - origin)
        error = np.abs(got - target(points)).max()
        return AffineCells(counts, tuple(rates.tolist()), values, tilts, float(error))

    return smallest_scale(at, _AIM * tolerance, max_cells)


def _corners_of_cells(grid: ProductGrid, most: int = 1 << 14) -> tuple[np.ndarray, Array]:
    """Labels of cells and a corner of each, `(n, m)`: where an affine function is farthest from f."""
    rng = np.random.default_rng(13)
    cells = np.arange(grid.num_cells) if grid.num_cells <= most else rng.integers(grid.num_cells, size=most)
    cells = np.repeat(cells, max(1, min(2**grid.dimension, most // len(cells))))
    half = grid.box.sides / np.array(grid.counts) / 2
    corners = grid.centers_of(cells) + half * rng.choice([-1.0, 1.0], (len(cells), grid.dimension))
    return cells, grid.box.clamp(corners)


def affine_grid(
    target: Target, recipe: AffineRecipe, known: Known | None, *, progress: Progress | None = None, seed: int = 0
) -> Construction:
    """The head of a recipe: proved cell by cell where f is a graph, estimated where not. *Theorem*: `affine-values`."""
    box = target.domain.bounding_box()
    grid = grid_of(box, recipe.grid)
    head = affine_head(target, grid, recipe.grid, recipe.values, recipe.slopes)
    common: dict[str, Any] = {
        "norm": norm_name(recipe.grid.norm),
        "semantics": recipe.semantics,
        "tolerance": recipe.tolerance,
        "theorem": "affine-values",
        "function": describe_function(target, *some_answers(target)),
        "domain": {"arguments": [describe_domain(d) for d in target.domains]},
        "model": {"sha256": model_digest(head.state_dict()), "type": "grid", "method": "affine"},
        "known": {} if known is None else known.to_json(),
        "facts": {"largest_value": largest_value(head, box), "covering_radius": grid.covering_radius},
        "environment": environment(),
    }
    if target.graph is None or (known is None and recipe.grid.dtype != torch.float64):
        seen = sampled_error(head, target, recipe.grid.norm, seed=seed)
        return Construction(head, grid, Certificate(**seen.fields(), **common))
    cells = partial(graph_cells, head, target.graph, box, recipe.grid, progress=progress)
    terms = affine_terms(head, cells, box, recipe.grid, known)
    certificate = Certificate(
        kind="proved",
        error_bound=total(terms),
        terms=tuple(terms),
        assumptions=(platform_assumption(recipe.grid.dtype),),
        proof={"method": "cells", "degree": _DEGREE, "boxes": grid.num_cells},
        **common,
    )
    return Construction(head, grid, certificate)


def grid_of(box: Box, recipe: GridRecipe) -> ProductGrid:
    """The uniform grid of a recipe, its centers rounded to the dtype of the head."""
    return ProductGrid.uniform(box, recipe.counts, dtype=np.float32 if recipe.dtype == torch.float32 else np.float64)


def affine_head(target: Target, grid: ProductGrid, recipe: GridRecipe, values: Array, slopes: Array) -> GridHead:
    """The head with `V_j(z) = values_j + slopes_j(z − o)`, o the middle of the box."""
    return GridHead(
        grid,
        recipe.rates,
        torch.tensor(values).to(recipe.dtype),
        value_slopes=torch.tensor(slopes).to(recipe.dtype),
        half_windows=recipe.half_windows,
        input_shapes=target.input_shapes,
        output_shape=target.output_shape,
    )


def affine_terms(
    head: GridHead, cell_error: CellError, box: Box, recipe: GridRecipe, known: Known | None
) -> list[Term]:
    """All terms from the stored tensors: every cell's own function against f on the cell and a little beyond.

    `cell_error(w, goal)` is `max_j sup |f − V_j|` over w spacings to each side of center j; above the goal it may be rough.

    `|net − f| ≤ Σ_j w_j(z)|V_j(z) − f(z)|`: cells whose widened box holds z have at most the largest error over those boxes, all
    others in the window, two centers wide, at most `mass · (the largest error two cells away)`. *Theorem*: `affine-values`.
    """
    facts = head_facts(head, box, recipe, 0.0)
    factor, u = domain_factor(facts, recipe.norm), UNIT_ROUNDOFF[recipe.semantics]
    goal = div_down(recipe.tolerance, factor)
    near, far = cell_error(0.5 + OVERLAP, goal), cell_error(1.6, math.inf)
    beyond = add_up(*(_beyond_overlap(r, a.gap_min) for r, a in zip(facts.rates, facts.axes) if a.count > 1))
    approximation = add_up(near, mul_up(beyond, far))
    largest = largest_value(head, box)
    left_out = add_up(*(dropped_mass(a, r, q) for a, r, q in zip(facts.axes, facts.rates, facts.half_windows)))
    operations = float(4 * len(head.counts) + 8 * len(head.counts) + 10)
    delta = score_error(facts)
    terms = [
        Term(
            "approximation",
            mul_up(approximation, factor),
            "(max_j sup |f − V_j| on its cell + mass beyond · two cells away) · factor",
            "affine-values",
            {"cells": near, "beyond": beyond, "far": far, "factor": factor},
        ),
        Term(
            "window",
            mul_up(left_out, 2.0, largest, factor),
            "mass left out · 2 max|V|",
            "window-tail",
            {"mass": left_out},
        ),
        Term(
            "score rounding",
            mul_up(expm1_up(mul_up(2.0, delta)), approximation, factor),
            "(e^{2δ} − 1) · approximation",
            "score-rounding",
            {"delta": delta},
        ),
        Term(
            "summation",
            mul_up(1.01, operations, u, largest, factor),
            "γ_K · max(|A| + |J||z − o|)",
            "score-rounding",
            {"operations": operations, "u": u, "largest": largest},
        ),
    ]
    if recipe.semantics != "float64" and known is not None:
        terms.append(input_rounding(facts, known, recipe.norm))
    return terms


def _beyond_overlap(rate: float, gap: float) -> float:
    """The mass, on one axis, of centers whose widened cell does not hold x: `e^{−κ(s + s²)/2}` for either neighbour."""
    exponent = -0.5 * rate * gap * gap * (1 - 1e-6) * (OVERLAP + OVERLAP**2)
    return mul_up(2.0, exp_up(exponent))


def largest_value(head: GridHead, box: Box) -> float:
    """`max_j sup_z |A_j| + Σ_i |J_ji||z_i − o_i|` over the box, rounded up."""
    slopes = head.value_slopes
    if slopes is None:
        return float(head.values.detach().abs().max())
    reach = box.sides / 2 * (1 + 1e-6) + 1e-6 * np.abs(box.lo.ravel() + box.hi.ravel())
    size = head.values.detach().double().abs().numpy() + slopes.detach().double().abs().numpy() @ reach
    return float(size.max()) * (1 + 1e-12)


def graph_cells(
    head: GridHead,
    graph: Graph,
    box: Box,
    recipe: GridRecipe,
    widths: float,
    goal: float,
    *,
    progress: Progress | None = None,
) -> float:
    """`max_j sup |f − V_j|` over the box of `widths` cells to each side of center j, cut to the domain, by Taylor models."""
    axes = tuple(a.double().numpy() for a in head.axes)
    grid = ProductGrid(box, axes)
    gaps = np.array([g.gap_max if g.count > 1 else s for g, s in zip(grid.geometry, box.sides)])
    lo, hi = box.lo.ravel(), box.hi.ravel()
    if recipe.dtype != torch.float64:  # an input may be rounded across the end of the domain
        pad = np.maximum(np.abs(lo), np.abs(hi)) * 2.0**-23
        lo, hi = lo - pad, hi + pad
    values = head.values.detach().double().numpy()
    slopes = head.get_buffer("value_slopes").double().numpy()
    origin = head.get_buffer("origin").double().numpy()
    worst, least = 0.0, 0.0
    for start in range(0, grid.num_cells, _CELLS_AT_ONCE):
        cells = np.arange(start, min(start + _CELLS_AT_ONCE, grid.num_cells))
        centers = grid.centers_of(cells)
        left, right = np.maximum(centers - widths * gaps, lo), np.minimum(centers + widths * gaps, hi)
        middle = (left + right) / 2
        radius = np.maximum(right - middle, middle - left) * (1 + 1e-15) + 1e-16 * np.abs(middle)
        model = graph.taylor(middle, radius, _DEGREE)
        difference = _minus_affine(
            model.coefficients, model.exponents, values[cells], slopes[cells], middle - origin, radius
        )
        rounding = 1e-15 * (
            np.abs(values[cells]).T + np.einsum("jom,jm->oj", np.abs(slopes[cells]), np.abs(middle - origin) + radius)
        )
        remainder = model.remainder + rounding * (origin.size + 2)
        if not np.isfinite(remainder).all():
            return math.inf
        flat = np.moveaxis(difference, 0, 1).reshape(len(model.exponents), -1)
        exponents = tuple(map(tuple, model.exponents.tolist()))
        found = bound_ranges(flat, remainder.reshape(-1), exponents, goal=goal, least=least)
        worst, least = max(worst, found.largest), max(least, found.least)
        try:
            if progress is not None:
                progress("proof", start + len(cells), grid.num_cells)
        except BudgetSpentError:
            progress = None  # what is left takes less time than a new beginning
    return worst


def _minus_affine(
    coefficients: Array, exponents: np.ndarray, values: Array, slopes: Array, at: Array, radius: Array
) -> Array:
    """`f − V_j` on every cell: constants and linear coefficients change, `(out, N, cells)`."""
    difference = coefficients.copy()
    difference[:, 0] -= (values + np.einsum("jom,jm->jo", slopes, at)).T
    listed = exponents.tolist()
    for i in range(radius.shape[1]):
        n = listed.index([int(k == i) for k in range(radius.shape[1])])
        difference[:, n] -= (slopes[:, :, i] * radius[:, i, None]).T
    return difference
