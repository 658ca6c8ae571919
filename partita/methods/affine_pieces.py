"""Functions that are piecewise affine: one key per piece, exact up to the temperature."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
import torch
from numpy.typing import NDArray

from partita.errors import DomainError, SizeError, ToleranceError, UnsupportedError
from partita.functions.graph import Graph
from partita.functions.piecewise import PiecewiseAffine
from partita.functions.target import Target
from partita.geometry.domains import Box
from partita.geometry.envelopes import Rows
from partita.geometry.moments import soft_maximum_gap
from partita.geometry.partitions import PowerDiagram
from partita.heads.scattered_head import ScatteredHead
from partita.proofs.certificate import Assumption, Certificate, model_digest, total
from partita.proofs.construction import (
    Construction,
    Progress,
    describe_domain,
    describe_function,
    environment,
    platform_assumption,
    semantics_of,
)
from partita.proofs.soft_maximum import (
    PieceFacts,
    exact,
    halfway,
    key_labels,
    key_rows,
    piece_facts,
    pieces_on,
    slope_scale,
)

__all__ = ["PiecesRecipe", "pieces_recipe", "piecewise_affine", "plan_pieces"]

_SHARE = 0.9  # of the tolerance is for the temperature, the rest for rounding


@dataclass(frozen=True, eq=False)
class PiecesRecipe:
    """All choices of a head made of pieces.

    Attributes:
        pieces: of every output, on the box as the dtype sees it.
        labels: `(keys, factors)`, the piece that each key takes of every maximum (`PiecewiseAffine.factors`).
        scale: s, a power of two: centers are the middle of the box plus s times the slopes, less their common part.
        rate: R/s, the head's inverse temperature. parameters: stored scalars. error_bound: what the certificate will say.
    """

    pieces: PiecewiseAffine
    labels: NDArray[np.int64]
    scale: Fraction
    rate: float
    tolerance: float
    dtype: torch.dtype
    parameters: int
    error_bound: float = math.inf

    @property
    def semantics(self) -> str:
        return semantics_of(self.dtype)

    @property
    def keys(self) -> int:
        return len(self.labels)


def plan_pieces(graph: Graph, box: Box, *, tolerance: float, dtype: torch.dtype) -> PiecesRecipe | None:
    """`pieces_recipe`, or None where there is none: f is not piecewise affine, too large, or the tolerance below rounding."""
    try:
        return pieces_recipe(graph, box, tolerance=tolerance, dtype=dtype)
    except (DomainError, SizeError, ToleranceError, UnsupportedError):
        return None


def pieces_recipe(graph: Graph, box: Box, *, tolerance: float, dtype: torch.dtype) -> PiecesRecipe:
    """The pieces of f and the softest temperature that leaves a tenth of the tolerance for rounding.

    Raises:
        UnsupportedError: f is not piecewise affine. SizeError: too many pieces or keys.
        ToleranceError: below what the dtype can promise. DomainError: numbers that the dtype does not hold.
    """
    pieces = pieces_on(box, graph, dtype)
    allowed, terms = _SHARE * tolerance, []
    for _ in range(2):  # rounding hardly depends on the temperature: what it takes is known after the first round
        recipe = _softest(pieces, allowed, tolerance, dtype)
        head = _head(recipe, ((box.dimension,),), (len(graph.outputs),))
        terms = piece_facts(head, box, pieces, recipe.labels).terms()
        if total(terms) <= tolerance:
            return replace(recipe, error_bound=total(terms))
        allowed = _SHARE * (tolerance - total(terms[1:]))
        if allowed <= 0:
            break
    parts = ", ".join(f"{t.name} {t.value:.2g}" for t in terms[1:] if t.value)
    raise ToleranceError(
        f"tolerance {tolerance:g} is below what {semantics_of(dtype)} can promise for these pieces: {parts}. "
        f"Ask for more than {1.2 * total(terms[1:]):.3g}{' or use dtype=torch.float64' if dtype == torch.float32 else ''}."
    )


def _softest(pieces: PiecewiseAffine, allowed: float, tolerance: float, dtype: torch.dtype) -> PiecesRecipe:
    """The least R with `W((N−1)/e)/R ≤ allowed`, 1 for an affine f, and the keys that matter at it."""
    scale, gap = slope_scale(pieces), soft_maximum_gap(pieces.most)
    rate = _stored_rate(Fraction(gap) / Fraction(allowed) / scale if gap else Fraction(1), dtype)
    labels = key_labels(pieces, Fraction(rate) * scale)
    m, keys = len(pieces.middle), len(labels)
    per_key = (m + 1) * len(pieces.convex) + m + (keys > 1)
    return PiecesRecipe(pieces, labels, scale, rate, tolerance, dtype, per_key * keys + 1)


def piecewise_affine(target: Target, recipe: PiecesRecipe, *, progress: Progress | None = None) -> Construction:
    """`net = Σ_j w_j V_j(z)`, one key per tuple of pieces: its score is R times their sum, its value what they are together.

    Claim: `|net − f| ≤ W((N−1)/e)/R` on the domain, N the most pieces in one maximum, plus rounding; an affine f is one key and
    only rounds. *Theorem*: `max-affine-values`.

    Hypotheses: the pieces are those of the graph (`recognise`, exact arithmetic); the domain lies in its bounding box.
    """
    if target.graph is None:
        raise UnsupportedError(f"{target.label} is a black box; pieces are read off an expression.")
    head = _head(recipe, target.input_shapes, target.output_shape)
    facts = piece_facts(head, target.domain.bounding_box(), recipe.pieces, recipe.labels)
    if progress is not None:
        progress("keys", recipe.keys, recipe.keys)
    centers = head.centers.double().numpy()
    powers = None if head.powers is None else head.powers.double().numpy()
    return Construction(head, PowerDiagram(centers, powers), _certificate(target, recipe, head, facts))


def _certificate(target: Target, recipe: PiecesRecipe, head: ScatteredHead, facts: PieceFacts) -> Certificate:
    terms = facts.terms()
    found = Assumption("f is max g − max h with the pieces found by exact rational arithmetic", "construction")
    sides = {"convex": recipe.pieces.convex, "concave": recipe.pieces.concave}
    return Certificate(
        kind="proved",
        norm="inf",
        semantics=recipe.semantics,
        tolerance=recipe.tolerance,
        error_bound=total(terms),
        terms=tuple(terms),
        assumptions=(found, platform_assumption(recipe.dtype)),
        theorem="max-affine-values",
        function=describe_function(target, head.centers.double().numpy(), head.values.double().numpy()),
        domain={"arguments": [describe_domain(d) for d in target.domains]},
        model={
            "sha256": model_digest(head.state_dict()),
            "type": "scattered",
            "rate": recipe.rate,
            "scale": float(recipe.scale),
            "value_error": facts.value_error,
        },
        facts={"pieces": float(facts.cells), "distinct_numbers": float(recipe.parameters)},
        environment=environment(),
        proof={"method": "pieces", **{side: list(map(len, rows)) for side, rows in sides.items()}},
    )


def _stored_rate(rate: Fraction, dtype: torch.dtype) -> float:
    """The least float of the dtype that is ≥ the rate."""
    number = np.float64 if dtype == torch.float64 else np.float32
    smallest, largest = (Fraction(float(x)) for x in (16 * np.finfo(number).tiny, np.finfo(number).max))
    if not smallest < rate < largest / 16:
        raise DomainError("the inverse temperature of these pieces is no ordinary number; rescale the variables.")
    nearest = number(float(rate))
    return float(nearest if Fraction(float(nearest)) >= rate else np.nextafter(nearest, number(np.inf)))


def _head(
    recipe: PiecesRecipe, input_shapes: tuple[tuple[int, ...], ...], output_shape: tuple[int, ...]
) -> ScatteredHead:
    """Centers from the slopes of the scores; powers and values such that both are right at the middle of the box."""
    scores, values = key_rows(recipe.pieces, recipe.labels)
    middle, radii = (np.array(x, dtype=object) for x in (recipe.pieces.middle, recipe.pieces.radii))
    slopes = (scores[:, 1:] - halfway(scores[:, 1:])) / radii
    centers = _stored(middle + recipe.scale * slopes, recipe.dtype)
    away = exact(centers) - middle
    powers = 2 * recipe.scale * scores[:, 0] + (away * away).sum(axis=1)
    value_slopes = _stored(values[:, :, 1:] / radii, recipe.dtype)
    at_centers = values[:, :, 0] + (exact(value_slopes) * away[:, None]).sum(axis=2)
    return ScatteredHead(
        centers,
        recipe.rate,
        _stored(at_centers, recipe.dtype),
        powers=_stored(powers - halfway(powers), recipe.dtype) if len(centers) > 1 else None,
        value_slopes=value_slopes,
        input_shapes=input_shapes,
        output_shape=output_shape,
    )


def _stored(numbers: Rows, dtype: torch.dtype) -> torch.Tensor:
    try:
        stored = torch.from_numpy(numbers.astype(np.float64)).to(dtype)
    except OverflowError:
        stored = torch.tensor(math.inf)
    if not stored.isfinite().all():
        raise DomainError(f"the pieces have slopes or values beyond the range of {semantics_of(dtype)}; rescale.")
    return stored
