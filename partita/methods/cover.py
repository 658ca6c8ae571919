"""Theorem 5.1: a small domain inside a large space needs as many keys as balls to cover it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from scipy.spatial import KDTree

from partita.arithmetic.rounding import add_up, up
from partita.errors import UnsupportedError
from partita.functions.target import Target
from partita.geometry.covers import Cover
from partita.geometry.domains import PointCloud
from partita.geometry.partitions import PowerDiagram
from partita.heads.scattered_head import ScatteredHead, exponent_cut
from partita.proofs.center_values import Known
from partita.proofs.certificate import Assumption, Certificate, model_digest, total
from partita.proofs.construction import (
    Construction,
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
from partita.proofs.cover_proof import ScatteredFacts, scattered_terms
from partita.proofs.running import UNIT_ROUNDOFF

__all__ = ["CoverRecipe", "scattered_facts", "small_domain"]


@dataclass(frozen=True, eq=False)
class CoverRecipe:
    """All choices of a head on a cover: the balls, how sharp, in which dtype."""

    cover: Cover
    rate: float
    tolerance: float
    dtype: torch.dtype

    @property
    def semantics(self) -> str:
        return semantics_of(self.dtype)


def small_domain(
    target: Target, recipe: CoverRecipe, known: Known, *, declared: bool, progress: Progress | None = None
) -> Construction:
    """The head of Theorem 5.1: centers of a cover by N balls of radius ρ instead of a grid.

    Claim: `|net − f| ≤ ω(√(ρ² + 2W((N−1)/e)/R))` on the domain, W Lambert's function: ρ may be ε/L where the paper takes
    ε/(3L), so 3^(intrinsic dimension) fewer balls; neither the diameter of the domain nor a second radius enters.

    *Theorem*: `small-domain` (5.1, corrected and sharpened by `soft-maximum`).

    Hypotheses: every point of the domain is within `fill_distance` of a listed point (caller); f obeys `known` between the domain
    and the centers, which are points of the cloud (caller, or interval arithmetic over the bounding box).
    """
    cloud = target.domain
    if not isinstance(cloud, PointCloud) or known.modulus is None or known.jumps is not None:
        raise UnsupportedError(
            "Theorem 5.1 needs a PointCloud and a modulus for the Euclidean distance, without jumps."
        )
    centers = torch.tensor(recipe.cover.centers).to(recipe.dtype)
    exact = centers.double().numpy()
    values, value_error = value_table(
        target, lambda a, b: recipe.cover.centers[a:b], len(exact), recipe.dtype, progress=progress
    )
    head = ScatteredHead(
        centers, recipe.rate, values, input_shapes=target.input_shapes, output_shape=target.output_shape
    )
    largest, spread = value_size(values)
    facts = scattered_facts(cloud, recipe, largest=largest, spread=spread, value_error=value_error)
    filled = f"every point of the domain is within {cloud.fill_distance:g} of a listed point"
    assumptions = (
        *vouched(target, known, declared=declared),
        Assumption(filled, "caller"),
        platform_assumption(recipe.dtype),
    )
    terms = scattered_terms(facts, known.modulus)
    certificate = Certificate(
        kind="proved_given" if declared or cloud.fill_distance > 0 else "proved",
        norm="inf",
        semantics=recipe.semantics,
        tolerance=recipe.tolerance,
        error_bound=total(terms),
        terms=tuple(terms),
        assumptions=assumptions,
        theorem="small-domain",
        function=describe_function(target, recipe.cover.centers, values.double().numpy()),
        domain={"arguments": [describe_domain(cloud)]},
        model={
            "sha256": model_digest(head.state_dict()),
            "type": "scattered",
            "radius": recipe.cover.radius,
            "rate": recipe.rate,
            "value_error": value_error,
        },
        known=known.to_json(),
        facts={
            "covering_radius": facts.radius,
            "sharpness": recipe.rate * facts.radius**2,
            **_parameter_counts(target, len(exact)),
        },
        environment=environment(),
    )
    return Construction(head, PowerDiagram(exact), certificate)


def scattered_facts(
    cloud: PointCloud, recipe: CoverRecipe, *, largest: float, spread: float, value_error: float
) -> ScatteredFacts:
    """The head on this cover in numbers; ρ is the cover's radius plus the fill distance plus what rounding moves."""
    centers = torch.tensor(recipe.cover.centers).to(recipe.dtype).double().numpy()
    u = UNIT_ROUNDOFF[recipe.semantics]
    reach = float(up(np.sqrt((cloud.flat**2).sum(axis=1)).max(), 8)) + cloud.fill_distance
    moved = (
        float(up(np.sqrt(((centers - recipe.cover.centers) ** 2).sum(axis=1)).max(), 8))
        if recipe.dtype != torch.float64
        else 0.0
    )
    radius = add_up(
        recipe.cover.radius, cloud.fill_distance, moved, 2 * u * reach if recipe.dtype != torch.float64 else 0.0
    )
    near_exponent = math.log(len(centers)) + (20.0 if recipe.dtype == torch.float32 else 40.0)
    near = 2 * radius + math.sqrt(2 * near_exponent / recipe.rate)
    count = (
        int(np.max(KDTree(centers).query_ball_point(centers, near * (1 + 1e-9), return_length=True)))
        if len(centers) > 1
        else 1
    )
    return ScatteredFacts(
        cells=len(centers),
        dimension=cloud.dimension,
        radius=radius,
        rate=recipe.rate,
        exponent_cut=exponent_cut(len(centers)),
        near_cells=count,
        reach=reach,
        largest=largest,
        spread=spread,
        value_error=value_error,
        center_shift=moved,
        semantics=recipe.semantics,
    )


def _parameter_counts(target: Target, balls: int) -> dict[str, float]:
    """Trainable parameters as the paper counts them (3dnN + 2dN + n; it prints 4dnN + …), and as distinct numbers."""
    m, out = target.domain.dimension, target.num_outputs
    d = target.output_shape[-1] if target.output_shape else 1
    n = out // d
    return {
        "paper_count": float((m + 2 * out + 2 * d) * balls + n),
        "distinct_numbers": float((m + out + 1) * balls + 1),
    }
