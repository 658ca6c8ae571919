"""What Theorems 4.1 and 4.2 and their corollaries share: values at the centers of a product grid."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from partita.arithmetic.rounding import up
from partita.functions.regularity import RoughBoxes
from partita.functions.target import Target
from partita.geometry.domains import Array, Box
from partita.geometry.grid import ProductGrid
from partita.geometry.moments import AxisGeometry
from partita.heads.grid_head import GridHead
from partita.proofs.center_values import GridFacts, Known, grid_terms, optimal_ratio
from partita.proofs.certificate import Certificate, model_digest, total
from partita.proofs.construction import (
    Construction,
    PairTable,
    Progress,
    describe_domain,
    describe_function,
    environment,
    platform_assumption,
    semantics_of,
    value_size,
    value_table,
    vouched,
)

__all__ = ["GridRecipe", "build_on_grid", "grid_facts", "head_facts", "norm_name", "sample_of"]


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
        volume=box.volume,
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
    box = target.domain.bounding_box()
    grid = ProductGrid.uniform(box, recipe.counts, dtype=np.float32 if recipe.dtype == torch.float32 else np.float64)
    values, value_error = value_table(
        target,
        lambda a, b: grid.centers_of(np.arange(a, b)),
        grid.num_cells,
        recipe.dtype,
        rough=known.jumps if isinstance(known.jumps, RoughBoxes) else None,
        progress=progress,
    )
    head = GridHead(
        grid,
        recipe.rates,
        values,
        half_windows=recipe.half_windows,
        input_shapes=target.input_shapes,
        output_shape=target.output_shape,
    )
    pairs = _steepest_neighbours(grid, values) if declared else None
    assumptions = vouched(target, known, declared=declared, table=pairs)
    facts = head_facts(head, box, recipe, value_error)
    terms = grid_terms(facts, known, recipe.norm)
    certificate = Certificate(
        kind="proved_given" if declared else "proved",
        norm=norm_name(recipe.norm),
        semantics=recipe.semantics,
        tolerance=recipe.tolerance,
        error_bound=total(terms),
        terms=tuple(terms),
        assumptions=(*assumptions, platform_assumption(recipe.dtype)),
        theorem=theorem,
        function=describe_function(target, *sample_of(grid, values)),
        domain={"arguments": [describe_domain(d) for d in target.domains]},
        model=_describe_model(head, recipe, value_error),
        known=known.to_json(),
        facts=_facts(grid, facts, known, recipe, total(terms)),
        environment=environment(),
    )
    return Construction(head, grid, certificate)


def norm_name(norm: float) -> str:
    """As certificates write it: "inf", or p."""
    return "inf" if math.isinf(norm) else str(int(norm)) if norm.is_integer() else repr(norm)


def sample_of(grid: ProductGrid, values: torch.Tensor) -> tuple[Array, Array]:
    """The first centers and their values: what a black box is known by."""
    count = min(grid.num_cells, 4096)
    return grid.centers_of(np.arange(count)), values[:count].double().numpy()


def _describe_model(head: GridHead, recipe: GridRecipe, value_error: float) -> dict[str, Any]:
    return {
        "sha256": model_digest(head.state_dict()),
        "type": "grid",
        "counts": list(recipe.counts),
        "rates": list(recipe.rates),
        "half_windows": list(recipe.half_windows),
        "value_error": value_error,
    }


def _facts(grid: ProductGrid, facts: GridFacts, known: Known, recipe: GridRecipe, bound: float) -> dict[str, float]:
    sharpness = [r * g.gap_min**2 for r, g in zip(facts.rates, facts.axes) if g.count > 1]
    found = {"covering_radius": grid.covering_radius, "sharpness": min(sharpness, default=0.0)}
    ratio = optimal_ratio(bound, known, grid.covering_radius) if math.isinf(recipe.norm) else None
    return found if ratio is None else {**found, "optimal_ratio": ratio}


def head_facts(head: GridHead, box: Box, recipe: GridRecipe, value_error: float) -> GridFacts:
    largest, spread = value_size(head.values)
    axes = [a.double().numpy() for a in head.axes]
    return grid_facts(
        axes, box, recipe, outputs=head.values.shape[1], largest=largest, spread=spread, value_error=value_error
    )


def _steepest_neighbours(grid: ProductGrid, values: torch.Tensor) -> PairTable | None:
    """Of all pairs of neighbouring centers, the one per axis between which the table moves fastest."""
    table = values.double().numpy().reshape(*grid.counts, -1)
    scale = float(np.abs(table).max())
    slack = scale * (2.0**-22 if values.dtype == torch.float32 else 0.0)  # storing the values moved them
    x, y, moved = [], [], []
    for i, axis in enumerate(grid.axes):
        if len(axis) < 2:
            continue
        moves = np.abs(np.diff(table, axis=i)).max(axis=-1)
        gaps = np.diff(axis).reshape([-1 if k == i else 1 for k in range(grid.dimension)])
        index = list(np.unravel_index(int((moves / gaps).argmax()), moves.shape))
        moved.append(max(float(moves[tuple(index)]) - slack, 0.0))
        x.append(np.ravel_multi_index(index, grid.counts))
        index[i] += 1
        y.append(np.ravel_multi_index(index, grid.counts))
    return (
        PairTable(grid.centers_of(x), grid.centers_of(y), np.array(moved), scale, "all neighbouring centers")
        if x
        else None
    )
