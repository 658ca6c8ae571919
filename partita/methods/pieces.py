"""Functions that are piecewise affine: one key per piece, exact up to the temperature."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
import torch
from numpy.typing import NDArray

from partita.arithmetic.precision import DOUBLE, Precision
from partita.errors import DomainError, SizeError, ToleranceError, UnsupportedError
from partita.functions.graph import Graph
from partita.functions.piecewise import READ, PiecewiseAffine
from partita.functions.target import Target
from partita.geometry.domains import Box, PointCloud
from partita.geometry.envelopes import Rows
from partita.geometry.moments import soft_maximum_gap
from partita.geometry.partitions import PowerDiagram
from partita.heads.scattered_head import ScatteredHead
from partita.methods.method import Method, Plan, Refusal, size_text
from partita.methods.request import Request
from partita.proofs.certificate import Assumption, total
from partita.proofs.claim import Construction, claim, describe_function
from partita.proofs.proof import Given, Progress
from partita.proofs.soft_maximum import (
    MAX_KEYS,
    PiecesProof,
    QueryKeys,
    exact,
    halfway,
    key_labels,
    key_rows,
    piece_facts,
    pieces_on,
    query_axes,
    query_slope,
    slope_scale,
)

__all__ = ["Pieces", "PiecesDraft", "pieces_head", "piecewise_affine", "softest_pieces"]

_SHARE = 0.9  # of the tolerance is for the temperature, the rest for rounding


class Pieces(Method):
    """`net = Σ_j w_j V_j(z)`, one key per tuple of pieces: its score is R times their sum, its value what they are together.

    Claim: `|net − f| ≤ W((N−1)/e)/R` on the domain, N the most pieces in one maximum, plus rounding; an affine f is one key and
    only rounds. *Theorem*: `max-affine-values`.

    For a pair of boxes the values must not depend on z_Q. A piece then has two keys for every coordinate of z_Q on which it
    depends, whose weights read that coordinate (`QueryKeys`). *Theorem*: `query-keys`.

    Hypotheses: the pieces are those of the graph (`recognise`, exact arithmetic); the domain lies in its bounding box.
    """

    name = "pieces"

    def applies(self, request: Request) -> Refusal | None:
        target = request.target
        if target.graph is None or isinstance(target.domain, PointCloud) or not math.isinf(request.norm):
            return Refusal("for piecewise affine expressions on a box, in the supremum norm")
        varies: list[bool] = []
        for node in target.graph.nodes:  # what `recognise` refuses in any case, without its exact arithmetic
            moved = any(varies[k] for k in node.arguments)
            if moved and node.operation not in READ:
                return Refusal(f"not piecewise affine: {node.operation} of variables")
            varies.append(moved or node.operation == "input")
        return None

    def plan(self, request: Request, share: float, progress: Progress | None = None) -> Plan | Refusal:
        graph, precision = request.target.graph, request.precision
        if graph is None:
            return Refusal("needs an expression, from which the pieces are read")
        try:
            draft = softest_pieces(
                graph,
                request.box,
                tolerance=share * request.tolerance,
                dtype=request.dtype,
                key_axes=int(request.value_axes.sum()),
                progress=progress,
            )
        except (SizeError, ToleranceError, UnsupportedError) as error:
            return Refusal(error.reason, error.hint)
        one, several = draft.keys == 1, draft.pieces.most > 1
        many = f"; the temperature adds W((N−1)/e)/R, within the tolerance {request.tolerance:g}" if several else ""
        values = "values are the pieces themselves, affine in z: only the choice between them is approximate"
        if draft.queries is not None:
            each = len(draft.queries.corners)
            values = f"values are affine in z_K alone: {each} keys for each piece read z_Q, and are nearly exact"
        return Plan(
            request=request,
            maker=self,
            kind="proved",
            keys=draft.keys,
            parameters=draft.parameters,
            draft=draft,
            why=(
                f"{draft.keys:,} key{'' if one else 's'}",
                f"pieces: f is piecewise affine, one key for each piece that matters{many}",
                values,
                f"{draft.parameters:,} stored numbers, {size_text(draft.parameters * precision.item_bytes)} in {precision.name}",
            ),
            error_bound=draft.error_bound,
            largest=math.nan if request.knowledge is None else request.knowledge.magnitude,
            caveat=request.caveat(None if draft.queries else draft.pieces.steepest()[None]),
        )

    def build(self, plan: Plan, progress: Progress | None = None, seed: int = 0) -> Construction:
        return piecewise_affine(plan.target, plan.draft, progress=progress)


@dataclass(frozen=True, eq=False)
class PiecesDraft:
    """All choices of a head made of pieces.

    Attributes:
        pieces: of every output, on the box as the dtype sees it.
        labels: `(keys, factors)`, the piece that each key takes of every maximum (`PiecewiseAffine.factors`).
        scale: s, a power of two: centers are the middle of the box plus s times the slopes, less their common part.
        rate: R/s, the head's inverse temperature. parameters: stored scalars. error_bound: what the certificate will say.
        queries: for a pair of boxes, the keys that read z_Q; None if the values are the pieces themselves.
    """

    pieces: PiecewiseAffine
    labels: NDArray[np.int64]
    scale: Fraction
    rate: float
    tolerance: float
    dtype: torch.dtype
    parameters: int
    error_bound: float = math.inf
    queries: QueryKeys | None = None

    @property
    def keys(self) -> int:
        return len(self.labels) * (1 if self.queries is None else len(self.queries.corners))


def softest_pieces(
    function: Graph | PiecewiseAffine,
    box: Box,
    *,
    tolerance: float,
    dtype: torch.dtype,
    key_axes: int | None = None,
    progress: Progress | None = None,
) -> PiecesDraft:
    """The pieces of f, or those given, and the softest temperature that leaves a tenth of the tolerance for rounding.

    Values depend on the first `key_axes` coordinates alone, on all of them by default.

    Raises:
        UnsupportedError: f is not piecewise affine. SizeError: too many pieces or keys.
        ToleranceError: below what the dtype can promise. DomainError: numbers out of range for the dtype.
    """
    pieces = function if isinstance(function, PiecewiseAffine) else pieces_on(box, function, dtype, progress=progress)
    axes = query_axes(pieces, box.dimension if key_axes is None else key_axes)
    allowed, terms = _SHARE * tolerance, []
    for _ in range(2):  # rounding hardly depends on the temperature: what it takes is known after the first round
        draft = _softest(pieces, axes, allowed, tolerance, dtype, progress)
        head = pieces_head(draft, ((box.dimension,),), (len(pieces.convex),))
        head.check_range(*Precision.of(dtype).widened(box.lo.ravel(), box.hi.ravel()))
        terms = piece_facts(head, box, pieces, draft.labels, draft.queries).terms()
        if total(terms) <= tolerance:
            return replace(draft, error_bound=total(terms))
        rest = [t for t in terms if t.source != "approximation"]
        allowed = _SHARE * (tolerance - total(rest))
        if allowed <= 0:
            break
    parts = ", ".join(f"{t.name} {t.value:.2g}" for t in rest if t.value)
    raise ToleranceError(
        f"tolerance {tolerance:g} is below what {Precision.of(dtype).name} can promise for these pieces: {parts}",
        f"Use a tolerance above {1.2 * total(rest):.3g}{' or dtype=torch.float64' if dtype == torch.float32 else ''}.",
    )


def _softest(
    pieces: PiecewiseAffine,
    axes: tuple[int, ...],
    allowed: float,
    tolerance: float,
    dtype: torch.dtype,
    progress: Progress | None,
) -> PiecesDraft:
    """The least R with `W((N−1)/e)/R ≤ allowed`, 1 for an affine f, and the keys that matter at it.

    Query keys for these axes take a third of what is allowed, all of it for an affine f.
    """
    gap, queries = soft_maximum_gap(pieces.most), None
    if axes:
        part = allowed / 3 if gap else allowed
        queries = QueryKeys.within(axes, part / query_slope(pieces, axes))
        allowed -= part
    scale = slope_scale(pieces, queries)
    sharp = Fraction(gap) / Fraction(allowed) if gap else Fraction(queries.tilt) if queries else scale
    rate = _stored_rate(sharp / scale, dtype)
    if not Fraction(rate) * scale < Fraction(DOUBLE.largest):
        raise DomainError("the inverse temperature of these pieces overflows float64", "Rescale the variables.")
    labels = key_labels(pieces, Fraction(rate) * scale, progress=progress)
    m, keys = len(pieces.middle), len(labels) * (len(queries.corners) if queries else 1)
    if keys > MAX_KEYS:
        raise SizeError(f"these pieces need more than {MAX_KEYS:,} keys; a grid needs fewer.")
    per_key = (m + 1) * len(pieces.convex) + m + (keys > 1)
    return PiecesDraft(pieces, labels, scale, rate, tolerance, dtype, per_key * keys + 1, queries=queries)


def piecewise_affine(target: Target, draft: PiecesDraft, *, progress: Progress | None = None) -> Construction:
    """The head of a draft with its certificate. *Theorem*: `max-affine-values`."""
    if target.graph is None:
        raise UnsupportedError(
            f"{target.label} is a black box; expected an expression, from which the pieces are read."
        )
    head = pieces_head(draft, target.input_shapes, target.output_shape)
    facts = piece_facts(head, target.box, draft.pieces, draft.labels, draft.queries)
    read = {} if draft.queries is None else {"tilt": draft.queries.tilt, "reach": draft.queries.reach}
    proved = PiecesProof().prove(head, target, Given(earlier=facts, details=read))
    if progress is not None:
        progress("keys", draft.keys, draft.keys)
    centers = head.centers.double().numpy()
    powers = None if head.powers is None else head.powers.double().numpy()
    found = Assumption("f is max g − max h with the pieces found by exact rational arithmetic", "construction")
    sides = {"convex": draft.pieces.convex, "concave": draft.pieces.concave}
    certificate = claim(
        head,
        describe_function(target, centers, head.values.double().numpy()),
        target.domains,
        proved.terms,
        dtype=draft.dtype,
        theorem="max-affine-values",
        tolerance=draft.tolerance,
        assumptions=(found,),
        details={
            "type": "scattered",
            "rate": draft.rate,
            "scale": float(draft.scale),
            "value_error": facts.value_error,
        },
        facts={"pieces": float(facts.cells), "distinct_numbers": float(draft.parameters)},
        proof={**proved.details, **{side: list(map(len, rows)) for side, rows in sides.items()}},
    )
    return Construction(head, PowerDiagram(centers, powers), certificate)


def _stored_rate(rate: Fraction, dtype: torch.dtype) -> float:
    """The least float of the dtype that is ≥ the rate."""
    precision = Precision.of(dtype)
    number = precision.number
    if not 16 * Fraction(precision.smallest) < rate < Fraction(precision.largest) / 16:
        raise DomainError(
            f"the inverse temperature of these pieces is out of range for {precision.name}", "Rescale the variables."
        )
    nearest = number(float(rate))
    return float(nearest if Fraction(float(nearest)) >= rate else np.nextafter(nearest, number(np.inf)))


def pieces_head(
    draft: PiecesDraft, input_shapes: tuple[tuple[int, ...], ...], output_shape: tuple[int, ...]
) -> ScatteredHead:
    """Centers from the slopes of the scores; powers and values such that both are right at the middle of the box."""
    sharp = Fraction(draft.rate) * draft.scale
    scores, values = key_rows(draft.pieces, draft.labels, draft.queries, sharp)
    middle, radii = (np.array(x, dtype=object) for x in (draft.pieces.middle, draft.pieces.radii))
    slopes = (scores[:, 1:] - halfway(scores[:, 1:])) / radii
    centers = _stored(middle + draft.scale * slopes, draft.dtype)
    away = exact(centers) - middle
    powers = 2 * draft.scale * scores[:, 0] + (away * away).sum(axis=1)
    value_slopes = _stored(values[:, :, 1:] / radii, draft.dtype)
    at_centers = values[:, :, 0] + (exact(value_slopes) * away[:, None]).sum(axis=2)
    return ScatteredHead(
        centers,
        draft.rate,
        _stored(at_centers, draft.dtype),
        powers=_stored(powers - halfway(powers), draft.dtype) if len(centers) > 1 else None,
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
        raise DomainError(
            f"the pieces have slopes or values beyond the range of {Precision.of(dtype).name}", "Rescale the variables."
        )
    return stored
