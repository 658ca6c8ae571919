"""Centers where they are needed: scattered cells with affine values, dense where the function is hard."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from partita.errors import NonFiniteValueError
from partita.functions.target import Target
from partita.geometry.domains import Box
from partita.geometry.partitions import PowerDiagram
from partita.proofs.bisection import box_terms
from partita.proofs.certificate import Certificate, model_digest, total
from partita.proofs.construction import (
    Construction,
    Progress,
    describe_domain,
    describe_function,
    environment,
    platform_assumption,
    undefined_roots,
)
from partita.proofs.sampled import sampled_error
from partita.search.adaptation import DEGREE, Adaptation, Budget
from partita.search.adapted import AdaptiveRecipe

__all__ = ["AdaptiveRecipe", "adaptive", "adaptive_recipe"]

_TRY_CONSTANTS_UP_TO = 256  # keys
_REMEMBERED = 256  # answers by which a black box is known


def adaptive_recipe(
    target: Target,
    *,
    tolerance: float,
    dtype: torch.dtype = torch.float64,
    affine: bool | None = None,
    max_keys: int = 20_000,
    max_evaluations: int = 5_000_000,
    max_boxes: int = 500_000,
    polish: int = 1,
    progress: Progress | None = None,
) -> AdaptiveRecipe:
    """Few cells whose affine (or constant) values are within the tolerance, found by sampling, and proved where f is a graph.

    When a budget is spent, or f jumps, the best head found comes back with the bound it reached: `recipe.holds` tells.

    Args:
        affine: None for whichever stores fewer numbers.
        max_keys: leaves, from which the keys are chosen; max_evaluations: of f; max_boxes: of one proof.
        polish: rounds of trying for fewer keys after a success.
        progress: called with (what, done, of).

    Raises:
        UnsupportedError: the domain is no box. ToleranceError: below what the dtype rounds.
        NonFiniteValueError: f is NaN or infinite, or has no finite bound.

    >>> from partita.functions.target import make_target
    >>> recipe = adaptive_recipe(make_target("abs(x + 0.7*y)", Box([-1, -1], [1, 1])), tolerance=0.01)
    >>> recipe.keys, recipe.holds
    (2, True)
    """
    search = Adaptation(target, tolerance, dtype, Budget(max_keys, max_evaluations, max_boxes, polish), progress)
    found = search.run(affine=affine is not False)
    _require_finite(target, found)
    return found if affine is not None or not found.holds else _or_constants(search, found)


def _require_finite(target: Target, found: AdaptiveRecipe) -> None:
    if found.proof is not None and math.isinf(found.error_bound):
        raise NonFiniteValueError(
            f"{target.label} has no finite bound near {np.round(found.proof.worst[0], 6).tolist()}; expected finite values on the "
            "whole domain. Shrink the domain, or write f so that poles cancel."
        )


def _or_constants(search: Adaptation, found: AdaptiveRecipe) -> AdaptiveRecipe:
    """Constant values where those need fewer numbers, `m + 1 + out` per key instead of `m + 1 + out·(1 + m)`."""
    m, out = found.centers.shape[1], found.values.shape[1]
    room = found.keys * (m + 1 + out * (m + 1)) // (m + 1 + out)
    if room > _TRY_CONSTANTS_UP_TO:
        return found
    search.budget = replace(search.budget, keys=8 * room)
    if not search.is_easy(affine=False):
        return found
    return min(found, search.run(affine=False), key=lambda r: r.rank)


def adaptive(target: Target, recipe: AdaptiveRecipe, *, seed: int = 0) -> Construction:
    """The head of a recipe with what can be said of it: proved where f is a graph, estimated from fresh samples where not.

    `net(z) = Σ_j softmax_j(−R(|z − c_j|² − p_j)/2)·(V_j + J_j(z − c_j))`, the cells of a power diagram. *Theorem*: `ball-cells`.
    The bound is for the stored tensors as they are run, and may exceed the tolerance (`recipe.holds`). *Theorem*: `box-bisection`.

    Args: seed: of the samples that an estimate rests on.
    """
    head, box = recipe.head(target), target.domain.bounding_box()
    common = _description(target, recipe, box, model_digest(head.state_dict()))
    partition = PowerDiagram(recipe.centers, recipe.powers)
    if recipe.proof is None:
        fields = sampled_error(head, target, seed=seed).fields()
        return Construction(head, partition, Certificate(theorem="ball-cells", **fields, **common))
    terms = tuple(box_terms(head, recipe.proof, box))
    certificate = Certificate(
        kind="proved",
        theorem="box-bisection",
        error_bound=total(terms),
        terms=terms,
        assumptions=(*undefined_roots(target), platform_assumption(recipe.dtype)),
        proof={
            "method": "boxes",
            "degree": DEGREE,
            "boxes": recipe.proof.boxes,
            "depth": recipe.proof.depth,
            "axes": [] if recipe.axes is None else recipe.axes.ravel().tolist(),
        },
        **common,
    )
    return Construction(head, partition, certificate)


def _description(target: Target, recipe: AdaptiveRecipe, box: Box, digest: str) -> dict[str, Any]:
    """The fields of a certificate that do not depend on its kind."""
    asked = box.clamp(recipe.centers[:_REMEMBERED])
    answers = target(asked) if target.graph is None else np.zeros((len(asked), target.num_outputs))
    return {
        "norm": "inf",
        "semantics": recipe.semantics,
        "tolerance": recipe.tolerance,
        "function": describe_function(target, asked, answers),
        "domain": {"arguments": [describe_domain(d) for d in target.domains]},
        "model": {"sha256": digest, "type": "scattered", "method": "adaptive", "rate": recipe.rate},
        "facts": {
            "leaves": float(recipe.leaves),
            "evaluations": float(recipe.evaluations),
            "active_directions": float(recipe.active),
        },
        "environment": environment(),
    }
