"""Convex functions as maxima of affine functions: one key per tangent, whose score and value are the tangent."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np
import torch

from partita.arithmetic.precision import Precision
from partita.errors import DomainError
from partita.functions.piecewise import PiecewiseAffine
from partita.geometry.domains import Box
from partita.geometry.moments import soft_maximum_gap
from partita.geometry.partitions import PowerDiagram
from partita.heads.scattered_head import ScatteredHead
from partita.methods.method import Method, Plan, Refusal, size_text
from partita.methods.pieces import PiecesDraft, pieces_head, softest_pieces
from partita.methods.request import Request
from partita.proofs.assumptions import undefined_roots
from partita.proofs.bisection import BisectionProof, BoxProof, box_terms, prove_boxes
from partita.proofs.certificate import total
from partita.proofs.claim import Construction, claim, describe_function
from partita.proofs.proof import Given, Progress
from partita.proofs.soft_maximum import exact
from partita.search.tangent_planes import Planes, Samples, bending, fewest_planes

__all__ = ["Convex"]

_SMALL, _FEW, _MOST_KEYS = 100, 3, 1000  # stored numbers up to which, and variables beyond which, "auto" does not try
_SMALL_BENT = 12  # the same for functions with kinks, which equal cells do not suit
_TEMPERATURE = 0.08  # of the tolerance
_LEVELS = (0.9, 0.86, 0.8, 0.7)  # of the tolerance, for the planes
_LESSONS = 4  # rounds in which a failed proof adds samples, for each level
_TAUGHT = 256  # points
_PER_PLANE = 64  # samples


@dataclass(frozen=True, eq=False)
class ConvexDraft:
    """A head made of planes, and its proof. sign: −1 for a concave f. error_bound: of the head as it is run."""

    pieces: PiecesDraft
    sign: int
    head: ScatteredHead
    proof: BoxProof
    error_bound: float


class Convex(Method):
    """`net = Σ_j softmax_j(R t_j)·t_j(z)`, t_j affine: the soft maximum of planes that are close to a convex f (Kim and Kim, 2022).

    The paper cites that max-affine functions are universal approximators of convex functions, and goes on to reassign values.
    For a convex f the values need no reassignment: they are the planes. For a concave f the signs are turned.

    The planes are found by sampling. The bound is that of the finished head, by `box-bisection`; it does not use that f is convex.
    *Theorem*: `convex-planes`.
    """

    name = "convex"

    def applies(self, request: Request) -> Refusal | None:
        target = request.target
        if len(target.domains) > 1:
            return Refusal(
                "for one box: on a pair its planes would be values that depend on z_Q, and those of cross-attention do not"
            )
        if target.graph is None or not math.isinf(request.norm):
            return Refusal("for convex or concave expressions on a box, in the supremum norm")
        if not isinstance(target.domain, Box) or target.num_outputs > 1:
            return Refusal("for one output on a box")
        return None

    def worth(self, request: Request, plans: Sequence[Plan]) -> Refusal | None:
        best = min((p.parameters for p in plans if p.kind == "proved"), default=math.inf)
        wanted = best > (_SMALL_BENT if request.target.is_bent else _SMALL)
        if request.knowledge is not None and request.box.dimension <= _FEW and wanted:
            return None
        return Refusal(
            f"for up to {_FEW} variables, if other proved heads store more than {_SMALL:,} numbers, or if f has kinks"
        )

    @np.errstate(all="ignore")  # numbers out of range end in a refusal
    def plan(self, request: Request, share: float, progress: Progress | None = None) -> Plan | Refusal:
        """The fewest planes, proved: the level is lowered where the proof does not meet the tolerance."""
        target, precision = request.target, request.precision
        if request.knowledge is None:
            return Refusal("f may jump or be infinitely steep")
        sign = bending(target)
        if not sign:
            return Refusal("f is neither convex nor concave: it lies above some of its chords and below others")
        per_key = 2 * request.box.dimension + 2
        room = request.max_bytes // precision.item_bytes // per_key
        most = max(min(_MOST_KEYS, room), 2)
        found = _proved(request, sign, share * request.tolerance, most, progress)
        if isinstance(found, str):
            return Refusal.of_a_search(found, most=_MOST_KEYS, room=room)
        keys, shape = found.head.num_keys, "convex" if sign > 0 else "concave"
        return Plan(
            request=request,
            maker=self,
            kind="proved",
            keys=keys,
            parameters=found.pieces.parameters,
            draft=found,
            why=(
                f"{keys:,} key{'' if keys == 1 else 's'}",
                f"convex: f is {shape} as far as it was sampled, and within the tolerance of so many affine functions",
                "scores and values are the same affine functions, which the temperature joins smoothly",
                f"{found.pieces.parameters:,} stored numbers, "
                f"{size_text(found.pieces.parameters * precision.item_bytes)} in {precision.name}",
            ),
            error_bound=found.error_bound,
            largest=request.knowledge.magnitude,
        )

    def build(self, plan: Plan, progress: Progress | None = None, seed: int = 0) -> Construction:
        target, draft = plan.target, plan.draft
        proved = BisectionProof().prove(draft.head, target, Given(earlier=draft.proof))
        centers = draft.head.centers.double().numpy()
        powers = None if draft.head.powers is None else draft.head.powers.double().numpy()
        details: dict[str, Any] = {"type": "scattered", "method": self.name, "rate": draft.pieces.rate}
        certificate = claim(
            draft.head,
            describe_function(target, centers, draft.head.values.double().numpy()),
            target.domains,
            proved.terms,
            dtype=plan.request.dtype,
            theorem="convex-planes",
            tolerance=plan.request.tolerance,
            assumptions=undefined_roots(target),
            details=details,
            facts={"planes": float(draft.head.num_keys)},
            proof=proved.details,
        )
        return Construction(draft.head, PowerDiagram(centers, powers), certificate)


def _proved(request: Request, sign: int, tolerance: float, most: int, progress: Progress | None) -> ConvexDraft | str:
    """The head with the fewest planes whose proof meets the tolerance, or why there is none."""
    samples, why = Samples.of(request.target, sign), f"more than {most:,} planes are needed"
    for level in _LEVELS:
        for _ in range(_LESSONS):
            planes = fewest_planes(samples, level * tolerance, most, progress)
            if planes is None:
                return why
            if _PER_PLANE * len(planes) > len(samples.points):  # too few samples to trust the planes
                more = request.box.sample(_PER_PLANE * len(planes), np.random.default_rng(29))
                samples = samples.join(more)
                continue
            draft = _draft(request, sign, planes, tolerance, progress)
            if draft.error_bound <= tolerance:
                return draft
            why = f"{len(planes):,} planes have the bound {draft.error_bound:.3g}"
            taught = draft.proof.missed[0][:_TAUGHT]
            top = (taught @ planes.slopes.T + planes.offsets).max(axis=1)
            off = np.abs(top - sign * request.target(taught)[:, 0]) if len(taught) else np.zeros(0)
            samples = samples.join(taught)
            if not len(off) or off.max() <= planes.error * (1 + 1e-3):
                break  # the samples knew: only a lower level helps
    return why


def _draft(request: Request, sign: int, planes: Planes, tolerance: float, progress: Progress | None) -> ConvexDraft:
    """The head of these planes: raised by half of what a soft maximum of two may lose, and proved."""
    box, target = request.box, request.target
    allowed, lost = _TEMPERATURE * tolerance, soft_maximum_gap(max(len(planes), 1))
    raised = 0.5 * allowed * 0.9 * (soft_maximum_gap(2) / lost if lost else 0.0)
    planned = _maximum(planes, raised, request, sign)
    pieces = softest_pieces(planned, box, tolerance=allowed, dtype=request.dtype, progress=progress)
    head = pieces_head(pieces, target.input_shapes, target.output_shape)
    assert target.graph is not None
    proof = prove_boxes(
        head,
        target.graph,
        box,
        target=tolerance * (1 - 1e-6) - (2 * 64 + box.dimension + 16) * request.precision.unit * 2 * tolerance,
        max_boxes=20_000 + 1_000 * len(planes),
        give_up=_TAUGHT,
        unit_roundoff=Precision.of(request.dtype).unit,
        progress=progress,
    )
    bound = total(box_terms(head, proof, box)) if math.isfinite(proof.bound) else math.inf
    return ConvexDraft(replace(pieces, parameters=head.num_parameters), sign, head, proof, bound)


def _maximum(planes: Planes, raised: float, request: Request, sign: int) -> PiecewiseAffine:
    """`sign · max_j (a_j·z + b_j)` on the box, as wide as the dtype sees it, in exact arithmetic."""
    if not (np.isfinite(planes.slopes).all() and np.isfinite(planes.offsets).all()):
        raise DomainError("the tangents of f overflow float64", "Rescale the variables.")
    lo, hi, slopes, offsets = (
        exact(torch.from_numpy(np.array(a))) for a in (*request.seen, planes.slopes, planes.offsets + raised)
    )
    middle, radii = (lo + hi) / 2, (hi - lo) / 2
    listed = np.column_stack([offsets + (slopes * middle).sum(axis=1), slopes * radii])
    rows = np.array(list(dict.fromkeys(map(tuple, listed))), dtype=object)
    zero = np.array([[Fraction(0)] * rows.shape[1]], dtype=object)
    sides = ((rows,), (zero,))
    convex, concave = sides if sign > 0 and len(rows) > 1 else sides[::-1]
    if len(rows) == 1:
        convex, concave = (sign * rows,), (zero,)
    return PiecewiseAffine(tuple(middle), tuple(radii), convex, concave)
