"""What Theorems 4.1 and 4.2 and their corollaries share: values at the centers of a product grid."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from partita.arithmetic.rounding import up
from partita.attention.grid_head import GridHead
from partita.certify.certificate import Assumption, Certificate, model_digest, total
from partita.certify.grid_bounds import GridFacts, Known, grid_terms, optimal_ratio
from partita.constructions.construction import (
    Construction,
    Progress,
    check_pairs,
    describe_domain,
    describe_function,
    environment,
    platform_assumption,
    semantics_of,
    value_size,
    value_table,
    vouched,
)
from partita.geometry.domains import Array, Box
from partita.geometry.grid import ProductGrid
from partita.geometry.moments import AxisGeometry
from partita.targets.target import Target

__all__ = ["GridRecipe", "build_on_grid", "grid_facts", "head_facts"]


@dataclass(frozen=True, eq=False)
class GridRecipe:
    """All choices of a product-grid head: how many centers, how sharp, how wide a window, in which dtype, for which norm."""

    counts: tuple[int, ...]
    rates: tuple[float, ...]
    half_windows: tuple[int, ...]
    norm: float
    tolerance: float
    dtype: torch.dtype

    @property
    def semantics(self) -> str:
        return semantics_of(self.dtype)


def grid_facts(
    axes: list[Array], box: Box, recipe: GridRecipe, *, outputs: int, largest: float, spread: float, value_error: float
) -> GridFacts:
    """`GridFacts` of these centers; below float64 the domain is widened by one rounding of its ends."""
    lo, hi = box.lo.ravel(), box.hi.ravel()
    if recipe.dtype != torch.float64:
        pad = np.maximum(np.abs(lo), np.abs(hi)) * 2.0**-23
        lo, hi = lo - pad, hi + pad
    return GridFacts(
        axes=tuple(AxisGeometry.of(a, x, y) for a, x, y in zip(axes, lo, hi)),
        rates=recipe.rates,
        half_windows=recipe.half_windows,
        volume=float(up(box.volume, 4 * box.dimension)),
        outputs=outputs,
        reach=float(up(math.sqrt((np.maximum(np.abs(lo), np.abs(hi)) ** 2).sum()), 8)),
        largest=largest,
        spread=spread,
        value_error=value_error,
        semantics=recipe.semantics,
    )


def build_on_grid(
    target: Target, recipe: GridRecipe, known: Known, *, declared: bool, theorem: str, progress: Progress | None
) -> Construction:
    """Ask f at every center, attach the answers, and add up the terms of the bound."""
    box = target.domain
    assert isinstance(box, Box)
    grid = ProductGrid.uniform(box, recipe.counts, dtype=np.float32 if recipe.dtype == torch.float32 else np.float64)
    values, value_error = value_table(
        target, lambda a, b: grid.centers_of(np.arange(a, b)), grid.num_cells, recipe.dtype, progress
    )
    head = GridHead(
        grid,
        recipe.rates,
        values,
        half_windows=recipe.half_windows,
        input_shapes=target.input_shapes,
        output_shape=target.output_shape,
    )
    assumptions = vouched(target, known, declared=declared)
    if declared:
        assumptions = _attack_neighbours(target, grid, values, known, assumptions)
    assumptions.append(platform_assumption(recipe.dtype))
    certificate = _certify(target, head, grid, recipe, known, value_error, assumptions, theorem, declared)
    return Construction(head, grid, certificate)


def head_facts(head: GridHead, box: Box, recipe: GridRecipe, value_error: float) -> GridFacts:
    largest, spread = value_size(head.values)
    axes = [a.double().numpy() for a in head.axes]
    return grid_facts(
        axes, box, recipe, outputs=head.values.shape[1], largest=largest, spread=spread, value_error=value_error
    )


def _certify(
    target: Target,
    head: GridHead,
    grid: ProductGrid,
    recipe: GridRecipe,
    known: Known,
    value_error: float,
    assumptions: list[Assumption],
    theorem: str,
    declared: bool,
) -> Certificate:
    facts = head_facts(head, grid.box, recipe, value_error)
    terms = grid_terms(facts, known, recipe.norm)
    bound = total(terms)
    ratio = optimal_ratio(bound, known, grid.covering_radius) if math.isinf(recipe.norm) else None
    sharpness = [r * g.gap_min**2 for r, g in zip(facts.rates, facts.axes) if g.count > 1]
    sample = np.arange(min(grid.num_cells, 4096))
    return Certificate(
        kind="proved_given" if declared else "proved",
        norm="inf" if math.isinf(recipe.norm) else f"{recipe.norm:g}",
        semantics=recipe.semantics,
        tolerance=recipe.tolerance,
        error_bound=bound,
        terms=tuple(terms),
        assumptions=tuple(assumptions),
        theorem=theorem,
        function=describe_function(target, grid.centers_of(sample), head.values[: len(sample)].double().numpy()),
        domain={"arguments": [describe_domain(d) for d in target.domains]},
        model={
            "sha256": model_digest(head.state_dict()),
            "type": "grid",
            "counts": list(recipe.counts),
            "rates": list(recipe.rates),
            "half_windows": list(recipe.half_windows),
            "value_error": value_error,
        },
        known=known.to_json(),
        facts={"covering_radius": grid.covering_radius, "sharpness": min(sharpness, default=0.0)}
        | ({} if ratio is None else {"optimal_ratio": ratio}),
        environment=environment(),
    )


def _attack_neighbours(
    target: Target, grid: ProductGrid, values: torch.Tensor, known: Known, assumptions: list[Assumption]
) -> list[Assumption]:
    """Compare every pair of neighbouring centers with what the declared modulus allows; keep the worst ratio seen."""
    table = values.double().numpy().reshape(*grid.counts, -1)
    scale, worst = float(np.abs(table).max()), 0.0
    for i, axis in enumerate(grid.axes):
        if len(axis) < 2:
            continue
        moved = np.abs(np.diff(table, axis=i)).max(axis=-1)
        gaps = np.diff(axis).reshape([-1 if k == i else 1 for k in range(grid.dimension)])
        flat = int((moved / gaps).argmax())
        index = list(np.unravel_index(flat, moved.shape))
        x = grid.centers_of([np.ravel_multi_index(index, grid.counts)])
        index[i] += 1
        y = grid.centers_of([np.ravel_multi_index(index, grid.counts)])
        slack = scale * (1e-6 if values.dtype == torch.float32 else 0.0)
        change = np.array([max(moved.ravel()[flat] - slack, 0.0)])
        worst = max(worst, check_pairs(target.label, known, x, y, change, np.abs(y - x), scale))
    return [
        Assumption(a.statement, a.vouched_by, max(a.worst_ratio, worst), a.attack) if a.worst_ratio is not None else a
        for a in assumptions
    ]
