"""Error bounds for values placed at scattered centers, and for max-affine cells with a margin."""

from __future__ import annotations

from dataclasses import dataclass

from partita.arithmetic.rounding import add_up, div_up, exp_up, mul_up, pow_up, sqrt_up
from partita.functions.regularity import Modulus
from partita.geometry.moments import soft_maximum_gap
from partita.proofs.certificate import Term
from partita.proofs.running import UNIT_ROUNDOFF, running_terms

__all__ = ["ScatteredFacts", "rate_for", "scattered_terms"]


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


def scattered_terms(facts: ScatteredFacts, modulus: Modulus) -> list[Term]:
    """`|f − net| ≤ ω(√(ρ² + 2W((N−1)/e)/R))`, plus what the cut drops and the dtype rounds. *Theorem*: `small-domain`.

    The soft-maximum lemma with `y_j = −|z − v_j|²/2` bounds `E|z − v|²` by `ρ² + 2W((N−1)/e)/R`; Jensen does the rest.
    """
    u = UNIT_ROUNDOFF[facts.semantics]
    softness = div_up(mul_up(2.0, soft_maximum_gap(facts.cells)), facts.rate)
    distance = sqrt_up(add_up(mul_up(facts.radius, facts.radius), softness))
    approximation = mul_up(modulus.constant, pow_up(distance, modulus.exponent))
    inputs = {"constant": modulus.constant, "exponent": modulus.exponent, "radius": facts.radius, "softness": softness}
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
        shifted = mul_up(modulus.constant, pow_up(facts.center_shift, modulus.exponent))
        terms.append(
            Term(
                "stored centers",
                shifted,
                "ω(how far storing a center moved it)",
                "small-domain",
                {"shift": facts.center_shift},
            )
        )
    if facts.semantics != "float64":
        moved = mul_up(modulus.constant, pow_up(mul_up(u, facts.reach), modulus.exponent))
        terms.append(
            Term("input rounding", moved, "ω(u·max|z|)", "score-rounding", {"distance": mul_up(u, facts.reach)})
        )
    return terms


def rate_for(added: float, cells: int) -> float:
    """The inverse temperature at which softness adds `added` to ρ²: `2W((N−1)/e)/added`."""
    return 2 * soft_maximum_gap(cells) / added
