"""Heads at a finite temperature: a product grid with ghosts and values that make the averaging an asset."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from partita.arithmetic.rounding import add_up, div_down, mul_up, sub_down
from partita.functions.target import Target
from partita.geometry.domains import Array
from partita.geometry.grid import ProductGrid
from partita.heads.grid_head import GridHead
from partita.methods.on_grid import GridRecipe, head_facts, norm_name
from partita.proofs.center_values import Known, domain_factor, soft_terms
from partita.proofs.certificate import Certificate, Term, model_digest, total
from partita.proofs.construction import (
    Construction,
    Progress,
    describe_domain,
    describe_function,
    environment,
    platform_assumption,
    some_answers,
    undefined_roots,
    value_size,
)
from partita.proofs.grid_proof import GridProof, SoftGrid, prove_grid
from partita.proofs.sampled import sampled_error

__all__ = ["THEOREMS", "SoftRecipe", "proved_terms", "soft_grid"]

THEOREMS = {"tuned": "tuned-values", "corrected": "corrected-values", "fitted": "fitted-values"}


@dataclass(frozen=True, eq=False)
class SoftRecipe:
    """A `GridRecipe` with ghosts beyond both ends of every axis, and the values `(cells, out)` that `method` made."""

    grid: GridRecipe
    method: str
    ghosts: tuple[int, ...]
    values: Array

    @property
    def tolerance(self) -> float:
        return self.grid.tolerance

    @property
    def semantics(self) -> str:
        return self.grid.semantics


def soft_grid(
    target: Target, recipe: SoftRecipe, known: Known | None, *, progress: Progress | None = None, seed: int = 0
) -> Construction:
    """The head of a recipe with what can be said of it: proved where f is a graph, estimated from fresh samples where not.

    `net = (⊗_i A_i) V`, `A_i(x)_k = softmax_k(−R_i(x − c_k)²/2)`. *Theorem*: `tuned-values`, `corrected-values`, `fitted-values`
    say how the values are chosen; whatever they are, `taylor-proof` bounds the error of the stored head.
    """
    head, grid = _assembled(target, recipe)
    box = target.domain.bounding_box()
    common: dict[str, Any] = {
        "norm": norm_name(recipe.grid.norm),
        "semantics": recipe.semantics,
        "tolerance": recipe.tolerance,
        "theorem": THEOREMS[recipe.method],
        "function": describe_function(target, *some_answers(target)),
        "domain": {"arguments": [describe_domain(d) for d in target.domains]},
        "model": {"sha256": model_digest(head.state_dict()), "type": "grid", "method": recipe.method},
        "known": {} if known is None else known.to_json(),
        "facts": _facts(head, recipe),
        "environment": environment(),
    }
    if target.graph is None or (known is None and recipe.grid.dtype != torch.float64):
        running = soft_terms(head_facts(head, box, recipe.grid, 0.0), known, recipe.grid.norm)
        seen = sampled_error(head, target, recipe.grid.norm, seed=seed)
        return Construction(head, grid, Certificate(**seen.fields(running), **common))
    terms, proof = proved_terms(head, target, recipe.grid, known, progress=progress)
    certificate = Certificate(
        kind="proved",
        error_bound=total(terms),
        terms=tuple(terms),
        assumptions=(*undefined_roots(target), platform_assumption(recipe.grid.dtype)),
        proof={"method": "taylor", "degree": proof.degree, "boxes": proof.boxes, "pieces": proof.pieces},
        **common,
    )
    return Construction(head, grid, certificate)


_SHARPENINGS, _SMALL = 8, 0.02  # proofs tried; a bound below that share of what rounding adds is near enough
_SHARP_PIECES = 1 << 14
_CLOSE, _CLOSER = 1.08, 1.04  # times a value attained: bounds that close are left alone, and what to aim at


def proved_terms(
    head: GridHead, target: Target, recipe: GridRecipe, known: Known | None, *, progress: Progress | None = None
) -> tuple[list[Term], GridProof]:
    """`taylor-proof` for the stored tensors, aiming at what the tolerance leaves after the running terms; all terms.

    Below float64 an input is rounded before the head sees it, perhaps across the end of the domain: so the box is widened by that.
    """
    if target.graph is None:
        raise ValueError("only a graph can be enclosed")
    box = target.domain.bounding_box()
    lo, hi = box.lo.ravel(), box.hi.ravel()
    if recipe.dtype != torch.float64:
        pad = np.maximum(np.abs(lo), np.abs(hi)) * 2.0**-23
        lo, hi = lo - pad, hi + pad
    facts = head_facts(head, box, recipe, 0.0)
    running, factor = soft_terms(facts, known, recipe.norm), domain_factor(facts, recipe.norm)
    goal = div_down(max(sub_down(recipe.tolerance, add_up(*(t.value for t in running))), 0.0), factor)
    axes = tuple(a.double().numpy() for a in head.axes)
    values = head.values.detach().double().numpy().reshape(*head.counts, -1)
    soft = SoftGrid(axes, tuple(head.inverse_temperature.double().tolist()), values)
    prove = partial(prove_grid, soft, target.graph, lo, hi, progress=progress)
    proof = _near_the_truth(prove, goal, floor=div_down(_SMALL * add_up(*(t.value for t in running)), factor))
    return [_approximation(proof, factor), *running], proof


def _near_the_truth(prove: Callable[..., GridProof], goal: float, *, floor: float) -> GridProof:
    """A proof that meets the goal, and where the error is far below it another that says so.

    Remainders are kept small against the goal only; heads that happen to be much better deserve a bound that shows it.
    """
    proof = prove(goal=goal)
    for _ in range(_SHARPENINGS):
        closer = max(_CLOSER * proof.least, 0.01 * proof.bound)
        if not proof.settled or proof.bound <= max(_CLOSE * proof.least, floor):
            break
        again = prove(goal=closer, max_boxes=4 * proof.boxes + 4096, max_pieces=_SHARP_PIECES)
        if again.bound > proof.bound:
            # something between: values attained beyond the new goal are at least known now
            if again.least <= proof.least:
                break
            proof = replace(proof, least=again.least)
        else:
            proof = replace(again, settled=True, least=max(again.least, proof.least))
    return proof


def _approximation(proof: GridProof, factor: float) -> Term:
    value = mul_up(proof.bound, factor) if math.isfinite(proof.bound) else math.inf
    inputs = {"supremum": proof.bound, "attained": proof.least, "factor": factor}
    return Term("approximation", value, "sup |f − net| by Taylor polynomials on boxes · factor", "taylor-proof", inputs)


def _assembled(target: Target, recipe: SoftRecipe) -> tuple[GridHead, ProductGrid]:
    storage = np.float32 if recipe.grid.dtype == torch.float32 else np.float64
    box = target.domain.bounding_box()
    grid = ProductGrid.uniform(box, recipe.grid.counts, ghosts=recipe.ghosts, dtype=storage)
    head = GridHead(
        grid,
        recipe.grid.rates,
        torch.tensor(recipe.values).to(recipe.grid.dtype),
        half_windows=recipe.grid.half_windows,
        input_shapes=target.input_shapes,
        output_shape=target.output_shape,
    )
    return head, grid


def _facts(head: GridHead, recipe: SoftRecipe) -> dict[str, float]:
    largest, spread = value_size(head.values)
    gaps = [float(np.diff(a.double().numpy()).mean()) if len(a) > 1 else 0.0 for a in head.axes]
    sharpness = [r * g * g for r, g in zip(recipe.grid.rates, gaps) if g]
    return {"sharpness": min(sharpness, default=0.0), "largest_value": largest, "spread": spread}
