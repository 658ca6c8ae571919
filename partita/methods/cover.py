"""Theorem 5.1: a small domain inside a large space needs only as many keys as there are balls in a cover of it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from partita.errors import DomainError, SizeError, ToleranceError, UnsupportedError
from partita.functions.moduli import Modulus
from partita.functions.regions import Region
from partita.functions.target import Target
from partita.geometry.covers import Cover, farthest_point_cover
from partita.geometry.domains import Box, PointCloud
from partita.geometry.partitions import PowerDiagram
from partita.heads.scattered_head import ScatteredHead
from partita.methods.hard import Hard, floor_refusal
from partita.methods.method import Method, Plan, Refusal, size_text
from partita.methods.request import Request
from partita.proofs.assumptions import vouched
from partita.proofs.center_values import value_table
from partita.proofs.certificate import Assumption, total
from partita.proofs.claim import Construction, claim, describe_function
from partita.proofs.cover_proof import CoverProof, rate_for, scattered_facts, scattered_terms
from partita.proofs.proof import Given, Progress
from partita.search.region_cover import region_cover

__all__ = ["BallCover", "CoverDraft"]

_MOST_BALLS = 1 << 18  # of a cover of a region
_SPARE = 1.5  # times the cubes that fill a region: enough for those along its edge


@dataclass(frozen=True, eq=False)
class CoverDraft:
    """The balls and the inverse temperature of a head on a cover."""

    cover: Cover
    rate: float


class BallCover(Method):
    """f at the centers of a cover by N balls of radius ρ instead of a grid.

    Claim: `|net − f| ≤ ω(√(ρ² + 2W((N−1)/e)/R))` on the domain, W Lambert's function: ρ may be ε/L where the paper takes
    ε/(3L), so 3^(intrinsic dimension) fewer balls; neither the diameter of the domain nor a second radius enters.

    *Theorem*: `small-domain` (5.1, corrected and sharpened by `soft-maximum`).

    Hypotheses: every point of the domain is within `fill_distance` of a listed point (caller); f obeys its modulus between the
    domain and the centers, which are points of the cloud (caller, or interval arithmetic over the bounding box).

    On a region the balls cover the region itself, which boxes prove, and their centers lie in it: f is not evaluated outside, and
    a modulus that the caller declares need hold between points of the region only. *Theorem*: `regions`.
    """

    name = "hard"
    takes_sharpness = True
    exact = True

    def applies(self, request: Request) -> Refusal | None:
        if isinstance(request.target.domain, Box):
            return Refusal("for point clouds and regions only")
        if request.target.region is not None and Hard().applies(request) is None:
            return Refusal("a grid on the box around the region takes fewer numbers")
        if request.knowledge is None:
            return Refusal("nothing is known about how fast f changes")
        known = request.knowledge.known
        if (request.target.region is None and not math.isinf(request.norm)) or known.modulus is None:
            return Refusal(
                "on a PointCloud the norm must be 'inf' (it has no volume), and on a PointCloud or a Region the Lipschitz constant "
                "must be one number for the Euclidean distance",
                error=UnsupportedError,
            )
        if known.jumps is not None:
            return Refusal(
                "jumps= is for L_p norms on boxes; a head on a PointCloud or a Region is bounded in the supremum norm",
                error=UnsupportedError,
            )
        return None

    def plan(self, request: Request, share: float, progress: Progress | None = None) -> Plan | Refusal:
        """Balls that leave room for the fill distance, a finite temperature and rounding."""
        domain, modulus, knowledge, precision = *_usable(request), request.knowledge, request.precision
        assert knowledge is not None
        shares = _Shares.of(request)
        allowed = shares.radius(modulus, request.aim)
        cover = (
            _cover(request, domain, modulus, shares)
            if isinstance(domain, PointCloud)
            else _region_cover(request, domain, modulus, shares, progress)
        )
        if isinstance(cover, Refusal):
            return cover
        fill = domain.fill_distance if isinstance(domain, PointCloud) else 0.0
        radius, cells = cover.radius + fill, len(cover.centers)
        rate = shares.rate(cells, radius, allowed, request)
        facts = scattered_facts(
            domain,
            cover,
            rate,
            precision,
            largest=knowledge.magnitude,
            spread=2 * knowledge.magnitude,
            value_error=knowledge.magnitude * (precision.unit + 64 * 2.0**-53),
        )
        terms = scattered_terms(facts, modulus)
        if total(terms) > request.aim:
            return floor_refusal(request, terms)
        parameters = cells * (domain.dimension + request.target.num_outputs) + 1
        return Plan(
            request=request,
            maker=self,
            kind="proved_given" if knowledge.declared or fill > 0 else "proved",
            keys=cells,
            parameters=parameters,
            draft=CoverDraft(cover, rate),
            why=(
                f"{cells:,} keys: balls of radius {cover.radius:.4g} that cover {_named(domain)}",
                f"the error is at most ω(√(ρ² + 2W/R)), ρ = {cover.radius:.4g} + fill distance {fill:g}, "
                f"which must stay below {allowed:.4g}",
                f"what is known about f is {knowledge.source}",
                f"{parameters:,} stored numbers, {size_text(parameters * precision.item_bytes)} in {precision.name}",
            ),
            error_bound=total(terms) * request.domain_factor,
            sharpness=rate * radius**2,
            largest=knowledge.magnitude,
            rounding=sum(t.value for t in terms if t.source != "approximation") * request.domain_factor,
        )

    def build(self, plan: Plan, progress: Progress | None = None, seed: int = 0) -> Construction:
        request, draft = plan.request, plan.draft
        target, knowledge, cover = request.target, request.knowledge, draft.cover
        domain, _ = _usable(request)
        assert knowledge is not None
        values, value_error = value_table(target, cover.centers, request.dtype, progress=progress)
        head = ScatteredHead(
            torch.tensor(cover.centers).to(request.dtype),
            draft.rate,
            values,
            input_shapes=target.input_shapes,
            output_shape=target.output_shape,
        )
        given = Given(request.tolerance, request.norm, knowledge.known, value_error, earlier=cover)
        proved = CoverProof().prove(head, target, given)
        radius = proved.terms[0].inputs["radius"]
        certificate = claim(
            head,
            describe_function(target, cover.centers, values.double().numpy()),
            target.domains,
            proved.terms,
            dtype=request.dtype,
            theorem="small-domain",
            norm=request.norm,
            tolerance=request.tolerance,
            assumptions=(
                *vouched(target, knowledge.known, declared=knowledge.declared),
                *((_filled(domain),) if isinstance(domain, PointCloud) else ()),
            ),
            details={
                "type": "scattered",
                "radius": cover.radius,
                "rate": draft.rate,
                "value_error": value_error,
            },
            known=knowledge.known.to_json(),
            facts={
                "covering_radius": radius,
                "sharpness": draft.rate * radius**2,
                **_parameter_counts(target, len(cover.centers)),
            },
            proof=proved.details,
        )
        return Construction(head, PowerDiagram(head.centers.double().numpy()), certificate)


def _named(domain: PointCloud | Region) -> str:
    return f"{len(domain.points):,} points" if isinstance(domain, PointCloud) else "the region"


def _filled(cloud: PointCloud) -> Assumption:
    """What lies between the points: the caller vouches for it, unless the points are the whole domain."""
    text = f"every point of the domain is within {cloud.fill_distance:g} of a listed point"
    return Assumption(text, "caller" if cloud.fill_distance > 0 else "construction", about="domain")


def _usable(request: Request) -> tuple[PointCloud | Region, Modulus]:
    domain, knowledge = request.target.domain, request.knowledge
    if isinstance(domain, Box) or knowledge is None or knowledge.known.modulus is None:
        raise UnsupportedError("Theorem 5.1 needs a PointCloud or a Region, and a modulus for the Euclidean distance.")
    return domain, knowledge.known.modulus


@dataclass(frozen=True)
class _Shares:
    """What is kept aside: `softness`, of ρ², for a finite temperature; `rounding`, of the tolerance, for the dtype."""

    softness: float
    rounding: float

    @classmethod
    def of(cls, request: Request) -> _Shares:
        return cls(max(4e-2 / request.hard_sharpness, 1e-4), 2e-2 if request.precision.rounds_inputs else 1e-9)

    def radius(self, modulus: Modulus, tolerance: float) -> float:
        """The largest ρ with `ω(ρ√(1 + softness)) ≤ (1 − rounding)·tolerance`."""
        if modulus.reach(tolerance) == math.inf:
            return math.inf
        reach = modulus.reach(tolerance * (1 - self.rounding))
        return float(reach / (math.sqrt(1 + self.softness) * (1 + self.rounding)))

    def tolerance(self, modulus: Modulus, radius: float) -> float:
        """The other way round: the tolerance that a radius can meet."""
        reach = radius * math.sqrt(1 + self.softness) * (1 + self.rounding)
        return float(modulus.at(reach) / (1 - self.rounding))

    def rate(self, cells: int, radius: float, allowed: float, request: Request) -> float:
        """R such that a finite temperature adds its share of ρ², or of the radius allowed where ρ is 0."""
        if cells == 1 or math.isinf(allowed):
            return 1.0
        added = self.softness * radius**2 or 1e-4 * allowed**2
        with np.errstate(over="ignore"):
            rate = float(request.precision.rounded(np.array(rate_for(added, cells) if added else math.inf)))
        if not request.precision.is_normal(rate):
            raise DomainError(
                f"the inverse temperature of this cover is out of range for {request.precision.name}",
                "Rescale the variables.",
            )
        return rate


def _cover(request: Request, cloud: PointCloud, modulus: Modulus, shares: _Shares) -> Cover | Refusal:
    """The cover, or the best tolerance that the samples or the memory allow."""
    allowed, item = shares.radius(modulus, request.tolerance), request.precision.item_bytes
    if allowed < cloud.fill_distance:
        return Refusal(
            f"tolerance {request.tolerance:g} is below ω(fill_distance) = {shares.tolerance(modulus, cloud.fill_distance):.4g}: "
            f"nothing better can be guaranteed for points up to {cloud.fill_distance:g} away from the listed ones",
            "Give more points, or use a larger tolerance.",
            ToleranceError,
        )
    most = (request.max_bytes // item - 1) // (cloud.dimension + request.target.num_outputs)
    if most < 1:
        return Refusal(f"max_bytes = {request.max_bytes:,} has no room for a single key", "Raise it.", SizeError)
    cover = farthest_point_cover(cloud.flat, radius=allowed - cloud.fill_distance, max_balls=most)
    if cover.radius + cloud.fill_distance > allowed * (1 + 1e-12):
        best = shares.tolerance(modulus, (cover.radius + cloud.fill_distance) * (1 + 1e-9))
        return Refusal(
            f"tolerance {request.tolerance:g} needs more than the {most:,} keys that max_bytes = "
            f"{size_text(request.max_bytes)} holds",
            f"The best tolerance that fits is about {best:.4g}; or raise max_bytes.",
            SizeError,
        )
    return cover


def _region_cover(
    request: Request, region: Region, modulus: Modulus, shares: _Shares, progress: Progress | None
) -> Cover | Refusal:
    """The cover of a region, or the best tolerance for which one is found in the memory allowed."""
    most = min(
        (request.max_bytes // request.precision.item_bytes - 1) // (region.dimension + request.target.num_outputs),
        _MOST_BALLS,
    )
    if most < 1:
        return Refusal(f"max_bytes = {request.max_bytes:,} has no room for a single key", "Raise it.", SizeError)
    box = region.bounding_box()
    half = float(np.sqrt((box.sides**2).sum())) / 2
    moved = 2 * request.precision.unit * float(np.sqrt((np.maximum(np.abs(box.lo), np.abs(box.hi)) ** 2).sum()))
    allowed = min(shares.radius(modulus, request.aim), 2 * half) - (moved if request.precision.rounds_inputs else 0.0)
    if allowed > 0 and not _is_too_large(region, allowed, most):
        cover = region_cover(region, allowed, request.precision, max_balls=most, progress=progress)
        if cover is not None:
            return cover
    side = (_SPARE * region.volume / most) ** (1 / region.dimension)
    radius = side * math.sqrt(region.dimension) / 2  # of cubes, so many of which fill the region
    hint = "Use a larger tolerance."
    if allowed < radius < half:
        fits = shares.tolerance(modulus, radius + moved) * request.domain_factor
        hint = f"A tolerance that fits is about {request.stated(fits):.4g}; or raise max_bytes."
    return Refusal(
        f"tolerance {request.asked:g} needs more than the {most:,} keys that are allowed, or points of the region that "
        f"{request.precision.name} holds are too far from its edge",
        hint,
        SizeError,
    )


def _is_too_large(region: Region, radius: float, most: int) -> bool:
    """Whether the region has more volume than so many balls; in logarithms, as balls of many dimensions are tiny."""
    m, volume = region.dimension, region.inner_volume
    ball = m / 2 * math.log(math.pi) - math.lgamma(m / 2 + 1) + m * math.log(radius)
    return volume > 0 and math.log(volume) > math.log(most) + ball


def _parameter_counts(target: Target, balls: int) -> dict[str, float]:
    """Trainable parameters as Remark C.1 counts them (3dnN + 2dN + 3n; printed: 4dnN + 2dN + n), and as distinct numbers."""
    m, out = target.domain.dimension, target.num_outputs
    d = target.output_shape[-1] if target.output_shape else 1
    n = out // d
    return {
        "paper_count": float((m + 2 * out + 2 * d) * balls + 3 * n),
        "distinct_numbers": float((m + out + 1) * balls + 1),
    }
