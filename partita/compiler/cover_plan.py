"""Planning on point clouds: the balls of Theorem 5.1 and how sharply to choose between them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from partita.compiler.known_regularity import Knowledge
from partita.compiler.options import Options
from partita.compiler.planned import Plan, floor_message, rounding_of, size_text
from partita.errors import DomainError, SizeError, ToleranceError, UnsupportedError
from partita.functions.regularity import Modulus
from partita.functions.target import Target
from partita.geometry.covers import Cover, farthest_point_cover
from partita.geometry.domains import PointCloud
from partita.methods.cover import CoverRecipe, scattered_facts
from partita.proofs.certificate import total
from partita.proofs.cover_proof import rate_for, scattered_terms
from partita.proofs.running import UNIT_ROUNDOFF

__all__ = ["plan_cover"]


def plan_cover(target: Target, knowledge: Knowledge, options: Options) -> Plan:
    """Cover the cloud by balls that leave room for the fill distance, a finite temperature and rounding."""
    cloud, modulus = target.domain, knowledge.known.modulus
    if not isinstance(cloud, PointCloud) or not math.isinf(options.norm) or modulus is None:
        raise UnsupportedError(
            "on a PointCloud the norm must be 'inf' (it has no volume) and the Lipschitz constant one number "
            "for the Euclidean distance."
        )
    if knowledge.known.jumps is not None:
        raise UnsupportedError(
            "jumps= is for L_p norms on boxes; a head on a PointCloud is bounded in the supremum norm."
        )
    shares = _Shares.of(options)
    allowed = shares.radius(modulus, options.tolerance)
    cover = _cover(cloud, modulus, target, options, shares)
    radius, cells = cover.radius + cloud.fill_distance, len(cover.centers)
    recipe = CoverRecipe(cover, shares.rate(cells, radius, allowed, options), options.tolerance, options.dtype)
    value_error = knowledge.magnitude * (UNIT_ROUNDOFF[options.semantics] + 64 * UNIT_ROUNDOFF["float64"])
    facts = scattered_facts(
        cloud, recipe, largest=knowledge.magnitude, spread=2 * knowledge.magnitude, value_error=value_error
    )
    terms = scattered_terms(facts, modulus)
    if total(terms) > options.tolerance:
        raise ToleranceError(floor_message(target, options, terms))
    parameters = _parameters(cells, target)
    size = parameters * options.item_bytes
    why = (
        f"{cells:,} keys: balls of radius {cover.radius:.4g} that cover {len(cloud.points):,} points",
        f"the error is at most ω(√(ρ² + 2W/R)), ρ = {cover.radius:.4g} + {cloud.fill_distance:g} between points, "
        f"which must stay below {allowed:.4g}",
        f"what is known of f is {knowledge.source}",
        f"{parameters:,} stored numbers, {size_text(size)} in {options.semantics}",
    )
    return Plan(
        target=target,
        knowledge=knowledge,
        recipe=recipe,
        method="hard",
        kind="proved_given" if knowledge.declared or cloud.fill_distance > 0 else "proved",
        keys=cells,
        parameters=parameters,
        bytes=size,
        sharpness=recipe.rate * radius**2,
        error_bound=total(terms),
        largest=knowledge.magnitude,
        rounding=rounding_of(terms),
        why=why,
    )


@dataclass(frozen=True)
class _Shares:
    """What is kept aside: `softness`, of ρ², for a finite temperature; `rounding`, of the tolerance, for the dtype."""

    softness: float
    rounding: float

    @classmethod
    def of(cls, options: Options) -> _Shares:
        return cls(max(4e-2 / options.hard_sharpness, 1e-4), 2e-2 if options.dtype == torch.float32 else 1e-9)

    def radius(self, modulus: Modulus, tolerance: float) -> float:
        """The largest ρ with `ω(ρ√(1 + softness)) ≤ (1 − rounding)·tolerance`."""
        if modulus.constant == 0:
            return math.inf
        reach = (tolerance * (1 - self.rounding) / modulus.constant) ** (1 / modulus.exponent)
        return reach / (math.sqrt(1 + self.softness) * (1 + self.rounding))

    def tolerance(self, modulus: Modulus, radius: float) -> float:
        """The other way round: the tolerance that a radius can meet."""
        reach = radius * math.sqrt(1 + self.softness) * (1 + self.rounding)
        return modulus.constant * reach**modulus.exponent / (1 - self.rounding)

    def rate(self, cells: int, radius: float, allowed: float, options: Options) -> float:
        """R such that a finite temperature adds its share of ρ², or of the radius allowed where ρ is 0."""
        if cells == 1 or math.isinf(allowed):
            return 1.0
        added = self.softness * radius**2 or 1e-4 * allowed**2
        with np.errstate(over="ignore"):
            rate = float(np.asarray(rate_for(added, cells) if added else math.inf, dtype=options.storage))
        if not 16 * np.finfo(options.storage).tiny < rate < math.inf:
            raise DomainError("the inverse temperature of this cover is no ordinary number; rescale the variables.")
        return rate


def _parameters(cells: int, target: Target) -> int:
    return cells * (target.domain.dimension + target.num_outputs) + 1


def _cover(cloud: PointCloud, modulus: Modulus, target: Target, options: Options, shares: _Shares) -> Cover:
    """The cover, or the best tolerance that the samples or the memory allow."""
    allowed = shares.radius(modulus, options.tolerance)
    if allowed < cloud.fill_distance:
        raise ToleranceError(
            f"tolerance {options.tolerance:g} is below ω(fill_distance) = "
            f"{shares.tolerance(modulus, cloud.fill_distance):.4g}: between samples that leave gaps of "
            f"{cloud.fill_distance:g} nothing better can be promised. Give more points, or ask for more."
        )
    most = (options.max_bytes // options.item_bytes - 1) // (cloud.dimension + target.num_outputs)
    if most < 1:
        raise SizeError(f"max_bytes = {options.max_bytes:,} does not hold even a single key.")
    cover = farthest_point_cover(cloud.flat, radius=allowed - cloud.fill_distance, max_balls=most)
    if cover.radius + cloud.fill_distance > allowed * (1 + 1e-12):
        best = shares.tolerance(modulus, (cover.radius + cloud.fill_distance) * (1 + 1e-9))
        raise SizeError(
            f"tolerance {options.tolerance:g} needs more than the {most:,} keys that max_bytes = "
            f"{size_text(options.max_bytes)} holds. The best tolerance that fits is about {best:.4g}; or raise max_bytes."
        )
    return cover
