"""Planning heads with affine values: exact pieces, uniform grids, and scattered centers where f is hard."""

from __future__ import annotations

import math

import numpy as np
import torch

from partita.compiler.known_regularity import Knowledge
from partita.compiler.options import Options
from partita.compiler.planned import Candidate, Plan, size_text
from partita.errors import DomainError, NonFiniteValueError, SizeError, ToleranceError, UnsupportedError
from partita.functions.regularity import Curvature
from partita.functions.target import Target
from partita.geometry.domains import PointCloud
from partita.methods.adaptive import adaptive_recipe
from partita.methods.affine_grid import AffineRecipe, smallest_affine_grid
from partita.methods.affine_pieces import pieces_recipe
from partita.methods.on_grid import GridRecipe
from partita.methods.tangents import curved_recipe
from partita.proofs.construction import Progress
from partita.search.averaged_values import Slopes

__all__ = ["forecast_affine_grid", "plan_adaptive", "plan_affine_grid", "plan_curved", "plan_pieces"]

_MOST_CELLS = 1 << 18
_MOST_SCATTERED = 2_500
_MOST_SAMPLED = 1 << 12  # cells of a head whose error is only sampled: finer ones would hide from the samples


def plan_pieces(target: Target, knowledge: Knowledge | None, options: Options) -> Plan | Candidate:
    """One key per affine piece, for expressions made of max, min, abs, relu, clamp and affine maps."""
    if target.graph is None or isinstance(target.domain, PointCloud) or not math.isinf(options.norm):
        return Candidate("pieces", "", "for piecewise affine expressions on a box, in the supremum norm")
    box = target.domain.bounding_box()
    try:
        recipe = pieces_recipe(target.graph, box, tolerance=options.tolerance, dtype=options.dtype)
    except (DomainError, SizeError, ToleranceError, UnsupportedError) as error:
        return Candidate("pieces", "", str(error).split(". ")[0].split("; ")[0])
    size = recipe.parameters * options.item_bytes
    if size > options.max_bytes:
        return Candidate("pieces", "", f"{size_text(size)} of pieces", keys=recipe.keys, parameters=recipe.parameters)
    many = "" if recipe.keys == 1 else f"; the temperature leaves W((N−1)/e)/R of the tolerance {options.tolerance:g}"
    return Plan(
        target=target,
        knowledge=knowledge,
        recipe=recipe,
        method="pieces",
        kind="proved",
        keys=recipe.keys,
        parameters=recipe.parameters,
        bytes=size,
        sharpness=0.0,
        error_bound=recipe.error_bound,
        largest=math.nan if knowledge is None else knowledge.magnitude,
        rounding=0.0,
        why=(
            f"{recipe.keys:,} key{'' if recipe.keys == 1 else 's'}",
            f"pieces: f is piecewise affine, one key for each piece that matters{many}",
            "values are the pieces themselves, affine in z: nothing is approximated but the choice between them",
            f"{recipe.parameters:,} stored numbers, {size_text(size)} in {options.semantics}",
        ),
    )


def plan_adaptive(
    target: Target,
    knowledge: Knowledge | None,
    options: Options,
    *,
    max_parameters: int | None = None,
    progress: Progress | None = None,
) -> Plan | Candidate:
    """Scattered centers with affine values, dense where f is hard; given up beyond `max_parameters` stored numbers."""
    if isinstance(target.domain, PointCloud) or not math.isinf(options.norm):
        return Candidate("adaptive", "", "for boxes, in the supremum norm")
    per_key = (target.domain.dimension + 1) * (target.num_outputs + 1)
    most = min(_MOST_SCATTERED, (max_parameters or _MOST_SCATTERED * per_key) // per_key)
    try:
        recipe = adaptive_recipe(
            target, tolerance=options.tolerance, dtype=options.dtype, max_keys=8 * max(most, 16), progress=progress
        )
    except (NonFiniteValueError, ToleranceError, UnsupportedError) as error:
        return Candidate("adaptive", "", str(error).split(". ")[0])
    reached = recipe.error_seen if recipe.proof is None else recipe.error_bound
    kind = "estimated" if recipe.proof is None else "proved"
    if not recipe.holds:
        note = f"{recipe.keys:,} keys reach {reached:.3g} only"
        return Candidate("adaptive", kind, note, keys=recipe.keys, parameters=recipe.parameters, error=reached)
    return Plan(
        target=target,
        knowledge=knowledge,
        recipe=recipe,
        method="adaptive",
        kind=kind,
        keys=recipe.keys,
        parameters=recipe.parameters,
        bytes=recipe.parameters * options.item_bytes,
        sharpness=0.0,
        error_bound=recipe.error_bound,
        largest=float(np.abs(recipe.values).max()),
        rounding=0.0,
        why=(
            f"{recipe.keys:,} key{'' if recipe.keys == 1 else 's'}",
            f"adaptive: affine values on scattered centers, where they are needed; {recipe.leaves:,} leaves were looked at",
            f"f was asked {recipe.evaluations:,} times, and varies in {recipe.active} direction{'s' * (recipe.active != 1)}",
            f"{recipe.parameters:,} stored numbers, {size_text(recipe.parameters * options.item_bytes)} in {options.semantics}",
        ),
        error_estimate=recipe.error_seen if recipe.proof is None else None,
    )


def plan_curved(target: Target, curvature: Curvature, options: Options) -> Plan | Candidate:
    """A hard uniform grid of tangents, for a black box whose second derivatives are declared."""
    if isinstance(target.domain, PointCloud):
        return Candidate("affine", "", "needs a box, not a cloud of points")
    box, m = target.domain.bounding_box(), target.domain.dimension
    aim = options.tolerance / options.domain_factor(box.volume, target.num_outputs)
    empty = GridRecipe((), (), (), options.norm, options.tolerance, options.dtype)
    recipe = curved_recipe(box, curvature, empty, aim=aim)
    keys = math.prod(recipe.grid.counts)
    parameters = keys * target.num_outputs * (1 + m) + sum(recipe.grid.counts) + 2 * m
    size = parameters * options.item_bytes
    if size > options.max_bytes:
        return Candidate("affine", "proved_given", "more keys than max_bytes hold", keys=keys, parameters=parameters)
    return Plan(
        target=target,
        knowledge=None,
        recipe=recipe,
        method="affine",
        kind="proved_given",
        keys=keys,
        parameters=parameters,
        bytes=size,
        sharpness=min(r * (s / c) ** 2 for r, s, c in zip(recipe.grid.rates, box.sides, recipe.grid.counts)),
        error_bound=options.tolerance,
        largest=math.nan,
        rounding=0.0,
        why=(
            f"{' × '.join(map(str, recipe.grid.counts))} = {keys:,} keys" if m > 1 else f"{keys:,} keys",
            f"affine: every cell stores the tangent of f, which f leaves by ½·{curvature.constant:g}·|z − c|² at most, as declared",
            f"halving the tolerance multiplies the keys by about {2 ** (sum(c > 1 for c in recipe.grid.counts) / 2):.3g}",
            f"{parameters:,} stored numbers, {size_text(size)} in {options.semantics}",
        ),
    )


def forecast_affine_grid(target: Target, options: Options) -> Candidate:
    """The size that a uniform grid of affine cells would have, by `Σ_i sup|∂_ii f| h_i²/16 ≤ ε`."""
    if isinstance(target.domain, PointCloud):
        return Candidate("affine", "", "needs a box, not a cloud of points")
    box, slopes = target.domain.bounding_box(), Slopes.of(target)
    aim = options.tolerance / options.domain_factor(box.volume, target.num_outputs)
    curved = slopes.second * box.sides**2 > 16 * aim / box.dimension
    cells = np.where(curved, box.sides * np.sqrt(slopes.second * max(1, curved.sum()) / (16 * aim)), 1.0)
    if not np.isfinite(cells).all():
        return Candidate("affine", "", "its second derivatives are not finite everywhere")
    counts = [math.ceil(c) for c in cells]
    keys = math.prod(counts)
    parameters = keys * target.num_outputs * (1 + box.dimension) + sum(counts) + 2 * box.dimension
    return Candidate("affine", "", "a forecast, not built", keys=keys, parameters=parameters)


def plan_affine_grid(
    target: Target, knowledge: Knowledge | None, options: Options, *, share: float = 1.0
) -> Plan | Candidate:
    """A hard uniform grid whose cells store f and its slopes, for this share of the tolerance."""
    if isinstance(target.domain, PointCloud):
        return Candidate("affine", "", "needs a box, not a cloud of points")
    box = target.domain.bounding_box()
    numbers = target.num_outputs * (1 + box.dimension)
    cells = _MOST_CELLS if target.graph is not None else _MOST_SAMPLED
    most = int(min(cells, options.max_bytes // (options.item_bytes * numbers)))
    aim = options.tolerance / options.domain_factor(box.volume, target.num_outputs)
    found = smallest_affine_grid(target, tolerance=share * aim, storage=options.storage, max_cells=most)
    if isinstance(found, str):
        return Candidate("affine", "", found)
    keys, m = math.prod(found.counts), box.dimension
    parameters = keys * numbers + sum(found.counts) + 2 * m
    recipe = GridRecipe(found.counts, found.rates, (1,) * m, options.norm, options.tolerance, options.dtype)
    proved = target.graph is not None and (knowledge is not None or options.dtype == torch.float64)
    return Plan(
        target=target,
        knowledge=knowledge,
        recipe=AffineRecipe(recipe, found.values, found.slopes),
        method="affine",
        kind="proved" if proved else "estimated",
        keys=keys,
        parameters=parameters,
        bytes=parameters * options.item_bytes,
        sharpness=min(r * (s / c) ** 2 for r, s, c in zip(found.rates, box.sides, found.counts)),
        error_bound=options.tolerance if proved else math.inf,
        largest=float(np.abs(found.values).max()),
        rounding=0.0,
        why=(
            f"{' × '.join(map(str, found.counts))} = {keys:,} keys" if m > 1 else f"{keys:,} keys",
            f"affine: every cell stores f and its slopes; {found.error_estimate:.3g} is the largest error sampled",
            f"halving the tolerance multiplies the keys by about {2 ** (sum(c > 1 for c in found.counts) / 2):.3g}",
            f"{parameters:,} stored numbers, {size_text(parameters * options.item_bytes)} in {options.semantics}",
        ),
        error_estimate=found.error_estimate * options.domain_factor(box.volume, target.num_outputs),
    )
