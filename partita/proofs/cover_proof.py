"""Values of f at the centers of balls that cover a point cloud or a region."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import scipy

from partita.arithmetic.precision import Precision
from partita.arithmetic.progress import Progress, report
from partita.arithmetic.rounding import add_up, div_up, exp_up, mul_up, sqrt_up, up
from partita.errors import DomainError, UnsupportedError
from partita.functions.moduli import Modulus
from partita.functions.regions import Domain, Region, halved
from partita.functions.target import Target
from partita.geometry.covers import Cover
from partita.geometry.domains import Array, Box, PointCloud
from partita.geometry.moments import soft_maximum_gap
from partita.heads.head import FoldedHead, Head, require_folded
from partita.heads.scattered_head import ScatteredHead, exponent_cut
from partita.proofs.center_values import lp_factor, value_error, value_size
from partita.proofs.certificate import Term
from partita.proofs.proof import Given, Proof, Proved
from partita.proofs.running import running_terms

__all__ = [
    "CoverProof",
    "ScatteredFacts",
    "covering_radius",
    "farthest",
    "rate_for",
    "scattered_facts",
    "scattered_terms",
]

_MOST_BOXES = 1 << 21  # looked at for a covering radius
_LARGEST = 1e140  # of coordinates: their squares, and the squares of 1e-22 of them, are ordinary numbers


@dataclass(frozen=True)
class ScatteredFacts:
    """A scattered head in numbers.

    Attributes:
        cells: N; dimension: m; radius: ρ, every point of the domain is that close to a center.
        rate: R; exponent_cut: T, cells trailing by more are left out; near_cells: how many do not, at most.
        reach: max |z|₂ over the domain; center_shift: how far storing a center moved it; largest, spread,
        value_error, semantics: as in `GridFacts`.
    """

    cells: int
    dimension: int
    radius: float
    rate: float
    exponent_cut: float
    near_cells: int
    reach: float
    largest: float
    spread: float
    value_error: float
    center_shift: float
    semantics: str


class CoverProof(Proof):
    """Values of f at the centers of balls that cover a cloud or a region, and a modulus of f. *Theorem*: `small-domain`.

    On a region `given.details` has `radius`, within which boxes are to find a center. *Theorem*: `regions`.
    """

    name = "cover"
    rests_on = "regularity"
    mean_distance = 1.0

    def _prove(self, head: FoldedHead, target: Target, given: Given) -> Proved:
        known = given.known
        if isinstance(target.domain, Box) or known is None or known.modulus is None:
            raise UnsupportedError(
                "a proof by a cover needs a PointCloud or a Region, and a modulus for the Euclidean distance."
            )
        error = given.value_error
        if error is None:
            error = value_error(head, target, self.centers(head, target), known)
        largest, spread = value_size(head.get_buffer("values"))
        aim = float(given.details.get("radius", 0.0))
        cover, rate = given.earlier or _cover_again(head, target.domain, aim), float(head.inverse_temperature)
        facts = scattered_facts(
            target.domain,
            cover,
            rate,
            Precision.of(head.dtype),
            largest=largest,
            spread=spread,
            value_error=error,
        )
        terms, details = scattered_terms(facts, known.modulus), {"method": self.name}
        if target.region is None:
            return Proved(terms, details)
        factor = 1.0 if math.isinf(given.norm) else lp_factor(target.volume, target.num_outputs, given.norm)
        return Proved([_times(t, factor) for t in terms], {**details, "radius": cover.radius})

    def centers(self, head: Head, target: Target) -> Callable[[int, int], Array]:
        head = require_folded(head, "centers of a cover")
        if target.region is not None:
            stored = head.get_buffer("centers").double().numpy()
            return lambda start, stop: stored[start:stop]
        centers = _cover_again(head, target.domain, 0.0).centers
        return lambda start, stop: centers[start:stop]


def _times(term: Term, factor: float) -> Term:
    """A bound of the supremum as one in L_p."""
    if factor == 1.0:
        return term
    return replace(
        term,
        value=mul_up(term.value, factor),
        formula=f"({term.formula}) · factor",
        inputs={**term.inputs, "factor": factor},
    )


def _cover_again(head: FoldedHead, cloud: Domain, aim: float) -> Cover:
    """The cover that the stored centers make of the cloud: each center is the listed point it was rounded from.

    The centers of a cover of a region are stored as they are; every point is within `aim` of one, or a little farther.
    """
    if isinstance(head, ScatteredHead) and isinstance(cloud, Region):
        stored = head.centers.double().numpy()
        return Cover(stored, np.arange(len(stored)), covering_radius(cloud, stored, aim))
    if not isinstance(head, ScatteredHead) or not isinstance(cloud, PointCloud):
        raise UnsupportedError("a proof by a cover needs a scattered head and a PointCloud or a Region.")
    _, labels = scipy.spatial.KDTree(cloud.flat).query(head.centers.double().numpy())
    centers = cloud.flat[labels]
    distance, _ = scipy.spatial.KDTree(centers).query(cloud.flat)
    return Cover(centers, labels, float(up(distance.max(), 8)) if distance.max() else 0.0)


def covering_radius(region: Region, centers: Array, aim: float, *, progress: Progress | None = None) -> float:
    """A radius within which every point of the region has a center: `aim` or a little more where that is proved, else more.

    Boxes that may meet the region are halved until one center is within `aim` of every corner. *Theorem*: `regions`.
    """
    tree, box, aim = scipy.spatial.KDTree(centers), region.bounding_box(), aim if aim > 0 else math.inf
    lo, hi, worst, looked = box.lo.ravel()[None], box.hi.ravel()[None], 0.0, 0
    while len(lo):
        report(progress, "cover", looked)
        kept = ~region.outside(lo, hi)
        lo, hi = lo[kept], hi[kept]
        if not len(lo):
            break
        looked += len(lo)
        reach = farthest(lo, hi, centers[tree.query(0.5 * lo + 0.5 * hi)[1]])
        done = reach <= aim
        worst = max(worst, float(reach[done].max(initial=0.0)))
        lo, hi = lo[~done], hi[~done]
        middle = 0.5 * lo + 0.5 * hi
        missed = len(lo) > 0 and (tree.query(middle)[0] > aim * (1 + 1e-9)) & region.contains(middle)
        if looked > _MOST_BOXES or np.any(missed):
            return max(worst, float(reach.max()))
        lo, hi = halved(lo, hi, np.ones(region.dimension))
    return worst


def farthest(lo: Array, hi: Array, points: Array) -> Array:
    """The distance from each point to the farthest corner of its box, rounded up, `(n,)`."""
    reach = up(np.maximum(np.abs(hi - points), np.abs(points - lo)))
    out: Array = up(np.sqrt((reach**2).sum(axis=1)), 8 + lo.shape[1])
    return out


def scattered_facts(
    domain: PointCloud | Region,
    cover: Cover,
    rate: float,
    precision: Precision,
    *,
    largest: float,
    spread: float,
    value_error: float,
) -> ScatteredFacts:
    """The head on this cover in numbers; ρ is the cover's radius plus the fill distance plus what rounding moves."""
    centers, rounds = precision.rounded(cover.centers), precision.rounds_inputs
    ends = domain.flat if isinstance(domain, PointCloud) else _ends(domain)
    fill = domain.fill_distance if isinstance(domain, PointCloud) else 0.0
    _require_squares(ends)
    farthest_end = np.abs(ends).max(axis=0) if isinstance(domain, Region) else ends
    reach = float(up(np.sqrt((np.atleast_2d(farthest_end) ** 2).sum(axis=1)).max(), 8)) + fill
    moved = float(up(np.sqrt(((centers - cover.centers) ** 2).sum(axis=1)).max(), 8)) if rounds else 0.0
    radius = add_up(cover.radius, fill, moved, 2 * precision.moved_by(reach, domain.dimension) if rounds else 0.0)
    near_exponent = math.log(len(centers)) + (20.0 if rounds else 40.0)
    near = 2 * radius + math.sqrt(2 * near_exponent / rate)
    count = (
        int(np.max(scipy.spatial.KDTree(centers).query_ball_point(centers, near * (1 + 1e-9), return_length=True)))
        if len(centers) > 1
        else 1
    )
    return ScatteredFacts(
        cells=len(centers),
        dimension=domain.dimension,
        radius=radius,
        rate=rate,
        exponent_cut=exponent_cut(len(centers)),
        near_cells=count,
        reach=reach,
        largest=largest,
        spread=spread,
        value_error=value_error,
        center_shift=moved,
        semantics=precision.name,
    )


def _ends(region: Region) -> Array:
    box = region.bounding_box()
    return np.stack([box.lo.ravel(), box.hi.ravel()])


def _require_squares(points: Array) -> None:
    """A DomainError where squared distances overflow float64, or underflow so that different points look equal."""
    size = float(np.abs(points).max()), float(np.ptp(points, axis=0).max())
    if size[0] > _LARGEST or 0 < size[1] < 1 / _LARGEST:
        raise DomainError(
            f"the points of the domain have coordinates up to {size[0]:.3g} and extend over {size[1]:.3g}, "
            "so squared distances overflow or underflow",
            "Rescale the variables.",
        )


def scattered_terms(facts: ScatteredFacts, modulus: Modulus) -> list[Term]:
    """`|f − net| ≤ ω(√(ρ² + 2W((N−1)/e)/R))`, plus what the cut drops and the dtype rounds. *Theorem*: `small-domain`.

    The soft-maximum lemma with `y_j = −|z − v_j|²/2` bounds `E|z − v|²` by `ρ² + 2W((N−1)/e)/R`; Jensen does the rest.
    """
    u = Precision.of(facts.semantics).unit
    softness = div_up(mul_up(2.0, soft_maximum_gap(facts.cells)), facts.rate)
    distance = sqrt_up(add_up(mul_up(facts.radius, facts.radius), softness))
    approximation = modulus.above(distance)
    stated = {} if modulus.expression else {"constant": modulus.constant, "exponent": modulus.exponent}
    inputs = {**stated, "radius": facts.radius, "softness": softness}
    score = add_up(mul_up(facts.rate / 2, facts.radius, facts.radius), facts.exponent_cut)
    delta = mul_up(u, add_up(mul_up(float(facts.dimension + 8), score), 16.0))
    dropped = mul_up(float(facts.cells), exp_up(-facts.exponent_cut * (1 - 1e-6)))
    terms = [Term("approximation", approximation, "constant · √(radius² + softness)^exponent", "small-domain", inputs)]
    terms += running_terms(
        approximation,
        mass_left_out=dropped,
        score_error=delta,
        operations=float(2 * facts.near_cells + facts.dimension + 16),
        unit_roundoff=u,
        largest=facts.largest,
        spread=facts.spread,
        value_error=facts.value_error,
    )
    if facts.center_shift:
        shifted = modulus.above(facts.center_shift)
        terms.append(
            Term(
                "stored centers",
                shifted,
                "ω(how far storing a center moved it)",
                "small-domain",
                {"shift": facts.center_shift},
                source="storage",
            )
        )
    if facts.semantics != "float64":
        distance = Precision.of(facts.semantics).moved_by(facts.reach, facts.dimension)
        terms.append(
            Term(
                "input rounding",
                modulus.above(distance),
                "ω(u·max|z|)",
                "score-rounding",
                {"distance": distance},
                source="input",
            )
        )
    return terms


def rate_for(added: float, cells: int) -> float:
    """The inverse temperature at which softness adds `added` to ρ²: `2W((N−1)/e)/added`."""
    return 2 * soft_maximum_gap(cells) / added
