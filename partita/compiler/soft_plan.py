"""Planning heads at a finite temperature: fitted, tuned and corrected values on product grids with ghosts."""

from __future__ import annotations

import math

import numpy as np
import torch

from partita.compiler.known_regularity import Knowledge
from partita.compiler.options import Options
from partita.compiler.planned import Candidate, Plan, rounding_of, size_text
from partita.functions.target import Target
from partita.geometry.domains import Array, Box, PointCloud
from partita.geometry.grid import ProductGrid
from partita.methods.on_grid import GridRecipe, grid_facts
from partita.methods.soft_grid import SoftRecipe
from partita.proofs.center_values import soft_terms, window_for
from partita.proofs.construction import Progress
from partita.proofs.running import UNIT_ROUNDOFF
from partita.search.averaged_values import Slopes, averaged_grid, predicted_counts
from partita.search.grid_fit import fit_grid

__all__ = ["forecast_averaged", "plan_averaged", "plan_fitted"]

_ROUNDING_SHARE = 0.1  # of the tolerance, that running in floats may take
_AVERAGED_CELLS = 1 << 17
_SAMPLED_CELLS = 1 << 12  # of a head whose error is only sampled: finer ones would hide from the samples


def plan_fitted(
    target: Target,
    knowledge: Knowledge | None,
    options: Options,
    *,
    share: float = 0.97,
    progress: Progress | None = None,
) -> Plan | Candidate:
    """The smallest fitted grid whose sampled error is within `share` of the tolerance."""
    if isinstance(target.domain, PointCloud):
        return Candidate("fitted", "", "needs a box, not a cloud of points")
    box = target.domain.bounding_box()
    aim = options.tolerance / options.domain_factor(box.volume, target.num_outputs)
    fit = fit_grid(
        target,
        box,
        tolerance=share * aim,
        outputs=target.num_outputs,
        storage=options.storage,
        max_spread=_largest_spread(target, box, aim, options),
        progress=None if progress is None else lambda what: progress(what, 0, 0),
    )
    if not fit.fitted:
        return Candidate(
            "fitted",
            "",
            f"{fit.status}: the best of the grids tried leaves {fit.error_estimate:.3g}"
            if fit.values.size
            else fit.status,
            keys=fit.num_cells if fit.values.size else None,
            error=fit.error_estimate if fit.values.size else None,
        )
    return _plan(
        target, knowledge, options, "fitted", fit.counts, fit.ghosts, fit.rates, fit.values, fit.error_estimate
    )


def _largest_spread(target: Target, box: Box, aim: float, options: Options) -> float:
    """How far fitted values may spread: rounding is proportional to it, and ten thousand times f's own range is enough."""
    seen = target(np.concatenate([box.sample(512, np.random.default_rng(3)), box.corners(64)]))
    range_of_f = float(np.ptp(seen, axis=0).max()) + float(np.abs(seen).max())
    rounding = UNIT_ROUNDOFF[options.semantics] * 110 * box.dimension
    return min(_ROUNDING_SHARE * aim / rounding, 1e4 * max(range_of_f, aim))


def forecast_averaged(target: Target, options: Options, method: str) -> Candidate:
    """The size that a tuned or corrected grid would have, by the leading terms of its theorem."""
    if isinstance(target.domain, PointCloud):
        return Candidate(method, "", "needs a box, not a cloud of points")
    box, slopes = target.domain.bounding_box(), Slopes.of(target)
    if not slopes.finite:
        return Candidate(method, "", "its derivatives are not finite everywhere")
    aim = options.tolerance / options.domain_factor(box.volume, target.num_outputs)
    counts = predicted_counts(slopes, box, method, aim)
    keys = math.prod(counts)
    return Candidate(
        method, "", "a forecast, not built", keys=keys, parameters=keys * target.num_outputs + sum(counts) + len(counts)
    )


def plan_averaged(target: Target, knowledge: Knowledge | None, options: Options, method: str) -> Plan | Candidate:
    """The smallest tuned or corrected grid whose sampled error meets the tolerance."""
    if isinstance(target.domain, PointCloud):
        return Candidate(method, "", "needs a box, not a cloud of points")
    box = target.domain.bounding_box()
    aim = options.tolerance / options.domain_factor(box.volume, target.num_outputs)
    cells = _AVERAGED_CELLS if target.graph is not None else _SAMPLED_CELLS
    largest = int(min(cells, options.max_bytes // (options.item_bytes * target.num_outputs)))
    found = averaged_grid(
        target, method, tolerance=aim, storage=options.storage, max_cells=largest, sharpness=options.sharpness
    )
    if isinstance(found, str):
        return Candidate(method, "", found)
    return _plan(
        target, knowledge, options, method, found.counts, found.ghosts, found.rates, found.values, found.error_estimate
    )


def _plan(
    target: Target,
    knowledge: Knowledge | None,
    options: Options,
    method: str,
    counts: tuple[int, ...],
    ghosts: tuple[int, ...],
    rates: tuple[float, ...],
    values: Array,
    error: float,
) -> Plan:
    box = target.domain.bounding_box()
    grid = ProductGrid.uniform(box, counts, ghosts=ghosts, dtype=options.storage)
    spread = float(np.ptp(values, axis=0).max())
    windows = _windows(grid, rates, 1e-4 * options.tolerance / max(spread, options.tolerance))
    recipe = SoftRecipe(
        GridRecipe(counts, rates, windows, options.norm, options.tolerance, options.dtype), method, ghosts, values
    )
    known = None if knowledge is None else knowledge.known
    largest = float(np.abs(values).max())
    facts = grid_facts(
        list(grid.axes), box, recipe.grid, outputs=values.shape[1], largest=largest, spread=spread, value_error=0.0
    )
    keys = math.prod(counts)
    parameters = keys * values.shape[1] + sum(counts) + len(counts)
    proved = target.graph is not None and (known is not None or options.dtype == torch.float64)
    return Plan(
        target=target,
        knowledge=knowledge,
        recipe=recipe,
        method=method,
        kind="proved" if proved else "estimated",
        keys=keys,
        parameters=parameters,
        bytes=parameters * options.item_bytes,
        sharpness=min(_sharpness(box, counts, ghosts, rates), default=0.0),
        error_bound=options.tolerance if proved else math.inf,
        largest=largest,
        rounding=rounding_of(soft_terms(facts, known, options.norm)),
        why=_why(box, recipe, options, keys, parameters, error),
        error_estimate=error * options.domain_factor(box.volume, target.num_outputs),
    )


def _windows(grid: ProductGrid, rates: tuple[float, ...], mass: float) -> tuple[int, ...]:
    """Whole axes where they are short; long ones (hundreds of keys) by windows that drop next to nothing."""
    found = window_for(grid.geometry, rates, max(mass / grid.dimension, 1e-17))
    whole = tuple((count + 1) // 2 for count in grid.counts)
    return tuple(w if count <= 64 else min(q, w) for q, w, count in zip(found, whole, grid.counts))


def _sharpness(box: Box, counts: tuple[int, ...], ghosts: tuple[int, ...], rates: tuple[float, ...]) -> list[float]:
    inner = np.array(counts) - 2 * np.array(ghosts)
    return [r * (s / n) ** 2 for r, s, n, c in zip(rates, box.sides, inner, counts) if c > 1]


def _why(box: Box, recipe: SoftRecipe, options: Options, keys: int, parameters: int, error: float) -> tuple[str, ...]:
    counts, ghosts = recipe.grid.counts, recipe.ghosts
    made = {
        "fitted": "values fitted to samples of f inside the box",
        "tuned": "values of f at the centers, the temperature chosen to cancel odd terms",
        "corrected": "values of f at the centers with the averaging's bias taken off, f − δ²f/(2κ)",
    }[recipe.method]
    kappas = ", ".join(f"{k:.3g}" for k in _sharpness(box, counts, ghosts, recipe.grid.rates))
    return (
        f"{' × '.join(map(str, counts))} = {keys:,} keys" if len(counts) > 1 else f"{keys:,} keys",
        f"{recipe.method}: {made}; {error:.3g} is the largest error sampled",
        f"sharpness κ = R h² is {kappas or 'free'} per axis, with {', '.join(map(str, ghosts))} ghosts beyond each end of the axes",
        f"{parameters:,} stored numbers, {size_text(parameters * options.item_bytes)} in {options.semantics}",
    )
