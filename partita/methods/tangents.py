"""Affine values for a black box whose second derivatives are declared: proved, given that bound."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from partita.arithmetic.rounding import add_up, mul_up
from partita.errors import CurvatureContradictedError
from partita.functions.regularity import Curvature, Modulus
from partita.functions.target import Target
from partita.geometry.domains import Array, Box
from partita.geometry.grid import ProductGrid
from partita.heads.grid_head import GridHead
from partita.methods.affine_grid import OVERLAP, SHARPNESS, affine_head, affine_terms, grid_of, largest_value
from partita.methods.on_grid import GridRecipe, head_facts, norm_name
from partita.proofs.center_values import Known, domain_factor, input_rounding
from partita.proofs.certificate import Assumption, Certificate, Term, model_digest, total
from partita.proofs.construction import (
    Construction,
    Progress,
    describe_domain,
    describe_function,
    environment,
    platform_assumption,
    some_answers,
)
from partita.proofs.running import UNIT_ROUNDOFF

__all__ = ["CurvedRecipe", "curved_grid", "curved_recipe", "curved_terms"]

_STEP = 1 / 32  # of a spacing: how far from a center f is asked for its slope
_AIM = {torch.float64: 0.995, torch.float32: 0.85}  # of the tolerance, for the tangents; the rest is for rounding
_ATTACKS = 4096
_ANSWER = 2.0**-51  # relative error of f's own answers


@dataclass(frozen=True)
class CurvedRecipe:
    """The grid of a head with tangent values, and the bound of second derivatives it relies on."""

    grid: GridRecipe
    curvature: Curvature

    @property
    def tolerance(self) -> float:
        return self.grid.tolerance

    @property
    def semantics(self) -> str:
        return self.grid.semantics


def curved_recipe(box: Box, curvature: Curvature, recipe: GridRecipe, *, aim: float) -> CurvedRecipe:
    """The fewest cells with `½M Σ((½ + s)h_i)² + M Σ d_i(½ + s)h_i/2 ≤ aim`, spacings alike; `recipe` gives the rest."""
    widths = 0.5 + OVERLAP
    per_cell = 0.5 * curvature.constant * (widths**2 + widths * _STEP)  # times Σ h_i²
    h = math.sqrt(_AIM[recipe.dtype] * aim / max(per_cell * box.dimension, 1e-300))
    counts = tuple(np.maximum(np.ceil(np.minimum(box.sides / h, 1e15)), 1).astype(np.int64).tolist())
    sides = box.sides / np.array(counts)
    storage = np.float32 if recipe.dtype == torch.float32 else np.float64
    rates = tuple((SHARPNESS / sides**2).astype(storage).astype(float).tolist())
    grid = GridRecipe(counts, rates, (1,) * box.dimension, recipe.norm, recipe.tolerance, recipe.dtype)
    return CurvedRecipe(grid, curvature)


def curved_grid(
    target: Target, recipe: CurvedRecipe, *, progress: Progress | None = None, seed: int = 0
) -> Construction:
    """The head whose cells hold the tangents of f at their centers, slopes by differences. *Theorem*: `declared-curvature`.

    Hypotheses: f is twice differentiable with `|∇²f|₂ ≤ M` on the box, which the caller declares and an attack on second
    differences along random lines tries to refute.

    Raises:
        CurvatureContradictedError: three points between which f bends more than declared.
    """
    box = target.domain.bounding_box()
    grid = grid_of(box, recipe.grid)
    ratio = _attack(target, box, recipe.curvature, seed)
    values, slopes, step = _tangents(target, grid, progress)
    head = affine_head(target, grid, recipe.grid, values, slopes)
    scale = float(np.abs(values).max()) + float(np.abs(slopes).max()) * float(box.sides.sum())
    terms = curved_terms(head, recipe.curvature, box, recipe.grid, step, scale)
    certificate = Certificate(
        kind="proved_given",
        norm=norm_name(recipe.grid.norm),
        semantics=recipe.semantics,
        tolerance=recipe.tolerance,
        error_bound=total(terms),
        terms=tuple(terms),
        assumptions=(
            Assumption(str(recipe.curvature), "caller", ratio, f"second differences along {_ATTACKS:,} random lines"),
            Assumption("f answers the same question the same way everywhere, within 2⁻⁵¹ of its value", "caller"),
            platform_assumption(recipe.grid.dtype),
        ),
        theorem="declared-curvature",
        function=describe_function(target, *some_answers(target)),
        domain={"arguments": [describe_domain(d) for d in target.domains]},
        model={"sha256": model_digest(head.state_dict()), "type": "grid", "method": "affine"},
        known={"curvature": recipe.curvature.constant, "differences": step, "scale": scale},
        facts={"largest_value": largest_value(head, box), "covering_radius": grid.covering_radius},
        environment=environment(),
        proof={"method": "curvature", "boxes": grid.num_cells},
    )
    return Construction(head, grid, certificate)


def curved_terms(
    head: GridHead, curvature: Curvature, box: Box, recipe: GridRecipe, step: float, scale: float
) -> list[Term]:
    """All terms: tangents against f by its second derivatives, then what rounding does to them.

    Args:
        step: d/h, how far from a center f was asked for its slope. scale: at least max |f| and what its tangents reach.
    """
    grid = ProductGrid(box, tuple(a.double().numpy() for a in head.axes))
    gaps = [g.gap_max if g.count > 1 else float(s) for g, s in zip(grid.geometry, box.sides)]
    terms = affine_terms(head, partial(_leaves_tangent, curvature, gaps, step, scale), box, recipe, None)
    facts, u = head_facts(head, box, recipe, 0.0), UNIT_ROUNDOFF[recipe.semantics]
    stored = mul_up(4.0, u, scale, 1.0 + len(gaps), domain_factor(facts, recipe.norm))
    formula = "4u · (1 + m) · scale of the tangents · factor"
    terms.append(Term("stored values", stored, formula, "declared-curvature", {"u": u, "scale": scale}))
    if recipe.semantics != "float64":
        slopes = head.get_buffer("value_slopes").double().numpy()
        steepest = float(np.sqrt((slopes**2).sum(axis=2)).max()) * (1 + 1e-12)
        reach = math.sqrt(sum(g * g for g in gaps))
        known = Known(Modulus(add_up(steepest, mul_up(curvature.constant, reach, 1.0 + step))))
        terms.append(input_rounding(facts, known, recipe.norm))
    return terms


def _leaves_tangent(
    curvature: Curvature, gaps: list[float], step: float, scale: float, widths: float, _: float
) -> float:
    """`½M Σ(w h_i)² + Σ(½M d_i + noise/d_i) w h_i`: how far f may be from its tangent w spacings away, d_i = step · h_i."""
    wide = [mul_up(widths * (1 + 1e-9), g) for g in gaps]
    bent = mul_up(0.5, curvature.constant, add_up(*(mul_up(w, w) for w in wide)))
    tilted = mul_up(0.5 * (1 + 1e-9), curvature.constant, add_up(*(mul_up(step, g, w) for g, w in zip(gaps, wide))))
    noise = mul_up(_ANSWER, scale, add_up(1.0, len(gaps) * widths / step * (1 + 1e-9)))
    return add_up(bent, tilted, noise)


def _tangents(target: Target, grid: ProductGrid, progress: Progress | None) -> tuple[Array, Array, float]:
    """Values at the middle of the box and slopes, from f at the centers and 2m places near each; and d/h as it came out."""
    centers = grid.centers_of(np.arange(grid.num_cells))
    spacing = grid.box.sides / np.array(grid.counts)
    here = target(centers)
    slopes, widest = np.zeros((*here.shape, grid.dimension)), 0.0
    for i, h in enumerate(spacing):
        left, right = centers.copy(), centers.copy()
        left[:, i] -= _STEP * h
        right[:, i] += _STEP * h
        left, right = grid.box.clamp(left), grid.box.clamp(right)
        slopes[:, :, i] = (target(right) - target(left)) / (right - left)[:, i, None]
        reach = np.maximum(right - centers, centers - left)[:, i].max() / h
        widest = max(widest, float(reach) * (1 + 1e-12))
        if progress is not None:
            progress("values", i + 1, grid.dimension)
    origin = (grid.box.lo.ravel() + grid.box.hi.ravel()) / 2
    return here - np.einsum("jom,jm->jo", slopes, centers - origin), slopes, widest


def _attack(target: Target, box: Box, curvature: Curvature, seed: int) -> float:
    """The largest `|f(x + d) − 2f(x) + f(x − d)|/(M|d|²)` on random lines; an error above 1, rounding aside."""
    rng = np.random.default_rng(seed)
    ends = box.sample(_ATTACKS, rng), box.sample(_ATTACKS, rng)
    share = 10.0 ** -rng.integers(0, 4, size=(_ATTACKS, 1)).astype(float)
    first, middle, last = _evenly(box, ends[0], ends[0] + share * (ends[1] - ends[0]))
    answers = [target(z) for z in (first, middle, last)]
    bend = np.abs(answers[0] - 2 * answers[1] + answers[2]).max(axis=1)
    noise = 8 * _ANSWER * max(float(np.abs(a).max()) for a in answers)
    allowed = curvature.constant * ((last - first) ** 2).sum(axis=1) / 4
    ratio = np.maximum(bend - noise, 0.0) / np.maximum(allowed, 1e-300)
    i = int(ratio.argmax())
    if ratio[i] > 1 + 1e-9:
        raise CurvatureContradictedError(
            f"{target.label} bends by {bend[i]:.6g} between {first[i].tolist()} and {last[i].tolist()}, {ratio[i]:.4g} times what "
            f"the declared bound {curvature.constant:g} of its second derivatives allows; declare at least "
            f"{ratio[i] * curvature.constant:.6g}."
        )
    return float(ratio[i])


def _evenly(box: Box, first: Array, last: Array) -> tuple[Array, Array, Array]:
    """First, middle and last of about these lines, all in the box, the middle exact: off by a rounding, slopes would look bent."""
    lo, hi = box.lo.ravel(), box.hi.ravel()
    unit = np.ldexp(1.0, np.frexp(np.maximum(np.abs(lo), np.abs(hi)))[1] - 51)
    middle = np.clip(np.round((first + last) / 2 / unit), np.ceil(lo / unit), np.floor(hi / unit)) * unit
    half = (last - first) / 2
    half = np.copysign(np.floor(np.maximum(np.abs(half) / unit - 1, 0)) * unit, half)
    return middle - half, middle, middle + half
