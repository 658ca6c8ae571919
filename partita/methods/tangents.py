"""Affine values for a black box whose second derivatives are declared: proved, given that bound."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from partita.errors import UnsupportedError
from partita.functions.curvature import LINES, Curvature, attack_curvature, worst_bend
from partita.functions.target import Target
from partita.geometry.domains import Array
from partita.geometry.grid import ProductGrid
from partita.methods.affine import affine_parameters, halving_text
from partita.methods.grids import GridDraft, sharpness_of
from partita.methods.method import Method, Plan, Refusal, keys_text, needs_box, size_text
from partita.methods.request import Request
from partita.proofs.cell_proof import OVERLAP, CurvatureProof, largest_value
from partita.proofs.certificate import Assumption
from partita.proofs.claim import Construction, claim, describe_function, some_answers
from partita.proofs.proof import Given, Progress
from partita.proofs.sampled import fresh_points
from partita.search.affine_cells import SHARPNESS

__all__ = ["Tangents", "curvature_assumptions", "tangent_values"]

_STEP = 1 / 32  # of a spacing: how far from a center f is evaluated for its slope
_AIM = {torch.float64: 0.995, torch.float32: 0.85}  # of the tolerance, for the tangents; the rest is for rounding


class Tangents(Method):
    """A hard grid whose cells hold the tangents of f at their centers, slopes by differences. *Theorem*: `declared-curvature`.

    Hypotheses: f is twice differentiable with `|vᵀ∇²f v| ≤ Σ M_i v_i²` on the box, which the caller declares (`hessian=M`, or
    one M_i per axis) and an attack on second differences along lines tries to refute.
    """

    name = "affine"
    exact = True
    shares = (1.0, 0.85, 0.6)  # slopes across cells without slopes are known only when the head is built

    def evaluations_to_build(self, target: Target, keys: int) -> int:
        return fresh_points(target) + keys * (1 + 2 * target.box.dimension)

    def applies(self, request: Request) -> Refusal | None:
        if request.declared.curvature is None or request.target.graph is not None:
            return Refusal("for black boxes with a declared bound on the second derivatives (hessian=)")
        return needs_box(request)

    def plan(self, request: Request, share: float, progress: Progress | None = None) -> Plan | Refusal:
        curvature, precision = _declared(request), request.precision
        draft = _draft(request, curvature, share)
        parameters = affine_parameters(request, draft.counts)
        one = not isinstance(curvature.constants, tuple)
        bent = f"½·{curvature.constants:g}·|z − c|²" if one else f"½·({curvature.form}), v = z − c"
        return Plan(
            request=request,
            maker=self,
            kind="proved_given",
            keys=math.prod(draft.counts),
            parameters=parameters,
            draft=draft,
            why=(
                keys_text(draft.counts),
                f"affine: every cell stores the tangent of f, and as declared, f differs from it by at most {bent}",
                halving_text(draft.counts),
                f"{parameters:,} stored numbers, {size_text(parameters * precision.item_bytes)} in {precision.name}",
            ),
            error_bound=request.tolerance,
            sharpness=min(sharpness_of(request.box, draft), default=0.0),
            counts=draft.counts,
            caveat=request.caveat(np.ones((1, 1, request.box.dimension)) * request.value_axes),
        )

    def build(self, plan: Plan, progress: Progress | None = None, seed: int = 0) -> Construction:
        """The head and its claim.

        Raises:
            CurvatureContradictedError: f bends more than declared between three points.
        """
        request, box = plan.request, plan.request.box
        target, curvature, grid = request.target, _declared(request), plan.draft.grid(request)
        attacks = target.calls.allowance(3 * LINES) // 3
        ratio = attack_curvature(target, curvature, lines=attacks, seed=seed)
        values, slopes, known = tangent_values(target, grid, request.value_axes, curvature, progress)
        head = replace(plan.draft, values=values, slopes=slopes).head(request)
        proved = CurvatureProof().prove(head, target, Given(request.tolerance, request.norm, details=known))
        certificate = claim(
            head,
            describe_function(target, *some_answers(target)),
            target.domains,
            proved.terms,
            dtype=request.dtype,
            theorem="declared-curvature",
            norm=request.norm,
            tolerance=request.tolerance,
            assumptions=curvature_assumptions(curvature, ratio, attacks),
            details={"type": "grid", "method": self.name},
            known=known,
            facts={"largest_value": largest_value(head, box), "covering_radius": grid.covering_radius},
            proof=proved.details,
        )
        return Construction(head, grid, certificate)


def curvature_assumptions(curvature: Curvature, ratio: float, attacks: int) -> tuple[Assumption, ...]:
    """What a claim about tangents rests on; `ratio` is what so many attacks on the declared bound found."""
    lines = f"second differences along {attacks:,} random lines"
    repeats = "f always returns the same value at the same point, with a relative error of at most 2⁻⁵¹"
    return (
        Assumption(str(curvature), "caller", ratio, lines, "curvature"),
        Assumption(repeats, "caller", about="function"),
    )


def _declared(request: Request) -> Curvature:
    if request.declared.curvature is None:
        raise UnsupportedError(
            "tangents need a declared bound on the second derivatives: pass hessian=M, or one number per coordinate."
        )
    return request.declared.curvature


@np.errstate(all="ignore")  # numbers out of range end in a refusal
def _draft(request: Request, curvature: Curvature, share: float) -> GridDraft:
    """The fewest cells with `½ Σ M_i((½ + s)h_i)² + Σ M_i d_i(½ + s)h_i/2 ≤ aim`: every axis takes as much of it as the others."""
    box, widths = request.box, 0.5 + OVERLAP
    per_cell = 0.5 * curvature.per_axis(box.dimension) * (widths**2 + widths * _STEP)  # times h_i², summed
    aim, flat = _AIM[request.dtype] * share * request.aim, ~request.value_axes
    if flat.any():  # fewest cells where an axis of first order takes twice the share of one of second order
        part = aim * np.where(flat, 2, 1) / (box.dimension + flat.sum())
        rise = np.where(flat, 1.05 * request.slopes.first * widths, 0.0)
        h = 2 * part / (rise + np.sqrt(rise**2 + 4 * per_cell * part))
    else:
        h = _spacings(aim, per_cell, box.sides)
    counts = tuple(np.maximum(np.ceil(np.minimum(box.sides / h, 1e15)), 1).astype(np.int64).tolist())
    rates = request.precision.rates(SHARPNESS, box.sides / np.array(counts))
    return GridDraft(counts, tuple(rates.tolist()), (1,) * box.dimension)


def _spacings(aim: float, per_cell: Array, sides: Array) -> Array:
    """Spacings h with `Σ per_cell_i h_i² ≤ aim`, equal shares; what an axis of one cell leaves goes to the others."""
    whole = np.zeros(len(sides), dtype=bool)
    while True:
        left = aim - float((per_cell * sides**2)[whole].sum())
        h = np.where(whole, sides, np.sqrt(left / np.maximum(per_cell * max((~whole).sum(), 1), 1e-300)))
        more = ~whole & (h >= sides)
        if not more.any():
            return np.asarray(h)
        whole |= more


@np.errstate(all="ignore")  # numbers out of range end in a refusal
def tangent_values(
    target: Target, grid: ProductGrid, sloped: NDArray[np.bool_], curvature: Curvature, progress: Progress | None
) -> tuple[Array, Array, dict[str, Any]]:
    """Values at the middle of the box and slopes, from f at the centers and 2m places near each, and what `CurvatureProof` needs.

    Axes that are not `sloped` hold no slopes; `across` has the largest slope that f has along each, 0 for the others.

    Raises:
        CurvatureContradictedError: f bends more than declared around a center.
    """
    centers = grid.centers_of(np.arange(grid.num_cells))
    spacing = grid.box.sides / np.array(grid.counts)
    here = target(centers)
    slopes, widest = np.zeros((*here.shape, grid.dimension)), 0.0
    for i, h in enumerate(spacing):
        left, right = centers.copy(), centers.copy()
        left[:, i] -= _STEP * h
        right[:, i] += _STEP * h
        left, right = grid.box.clamp(left), grid.box.clamp(right)
        beside = target(right), target(left)
        worst_bend(target.label, curvature, (left, centers, right), (beside[1], here, beside[0]), roundings=64)
        slopes[:, :, i] = (beside[0] - beside[1]) / (right - left)[:, i, None]
        reach = np.maximum(right - centers, centers - left)[:, i].max() / h
        widest = max(widest, float(reach) * (1 + 1e-12))
        if progress is not None:
            progress("values", i + 1, grid.dimension)
    across = np.where(sloped, 0.0, np.abs(slopes).max(axis=(0, 1)) * (1 + 1e-12))
    slopes[:, :, ~sloped] = 0.0
    origin = (grid.box.lo.ravel() + grid.box.hi.ravel()) / 2
    values = here - np.einsum("jom,jm->jo", slopes, centers - origin)
    steep = np.abs(slopes).max(axis=(0, 1))
    if isinstance(curvature.constants, tuple):  # the axes may have different units
        rise = float(steep @ grid.box.sides) * (1 + 1e-12)
    else:
        rise = float(steep.max()) * float(grid.box.sides.sum())
    scale = float(np.abs(values).max()) + rise
    known: dict[str, Any] = {"curvature": curvature.to_json(), "differences": widest, "scale": scale}
    return values, slopes, known | ({"across": across.tolist()} if across.any() else {})
