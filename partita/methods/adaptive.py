"""Scattered cells with affine values, dense where the function is hard to approximate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from partita.errors import NonFiniteValueError, PartitaError, SizeError, ToleranceError, UnsupportedError
from partita.functions.target import Target
from partita.geometry.domains import PointCloud
from partita.geometry.partitions import PowerDiagram
from partita.methods.method import Method, Plan, Refusal, search_text, size_text
from partita.methods.request import Request
from partita.proofs.assumptions import undefined_roots
from partita.proofs.bisection import BisectionProof
from partita.proofs.center_values import lp_factor
from partita.proofs.certificate import Kind
from partita.proofs.claim import Construction, claim, function_of
from partita.proofs.proof import Given, Progress
from partita.proofs.sampled import sampled_error
from partita.search.adaptation import AdaptiveDraft, adaptive_cells
from partita.search.averaged_values import plane_pieces_needed

__all__ = ["Adaptive", "adaptive_construction"]

_MOST_KEYS = 2_500
_SMALL, _FEW = 2000, 3  # stored numbers up to which, and variables beyond which, "auto" looks for no adaptive head
_SMALL_BENT, _FEW_BENT = 24, 2  # the same for functions with kinks, which equal cells do not suit


class Adaptive(Method):
    """`net(z) = Σ_j softmax_j(−R(|z − c_j|² − p_j)/2)·(V_j + J_j(z − c_j))`, the cells of a power diagram, few where f is easy.

    *Theorem*: `ball-cells`; where f is an expression the bound is for the stored tensors as they are run, by `box-bisection`.
    """

    name = "adaptive"

    def applies(self, request: Request) -> Refusal | None:
        averaged = not math.isinf(request.norm) and request.target.tail is None
        if isinstance(request.target.domain, PointCloud) or averaged:
            return Refusal("for boxes and regions, in the supremum norm or for clipped functions")
        return None

    def worth(self, request: Request, plans: Sequence[Plan]) -> Refusal | None:
        best = min((p.parameters for p in plans if p.kind == "proved"), default=math.inf)
        target = request.target
        provable = target.graph is not None and (request.knowledge is not None or target.tail is not None)
        if target.region is not None and best == math.inf and (provable or not plans):
            return None  # nothing else is proved there: f may be undefined around the region, or steep at its edge
        bent = (
            target.is_bent and len(target.domains) == 1 and target.domain.dimension <= _FEW_BENT and best > _SMALL_BENT
        )
        wanted = best > _SMALL or bent or request.is_steep or target.tail is not None
        if provable and target.domain.dimension <= _FEW and wanted:
            pieces = 0.0
            if target.region is None:
                pieces = request.slopes.pieces_needed(request.box, request.aim)
            if target.region is None and pieces <= _MOST_KEYS:
                pieces = plane_pieces_needed(target, request.aim)
            if pieces <= _MOST_KEYS:
                return None
            return Refusal(f"needs more than {pieces:,.0f} cells; at most {_MOST_KEYS:,} are tried")
        return Refusal(
            f"for up to {_FEW} variables, if other proved heads store more than {_SMALL:,} numbers, or if f has kinks"
        )

    def plan(self, request: Request, share: float, progress: Progress | None = None) -> Plan | Refusal:
        """Few cells; refused if they need more than max_bytes."""
        target, precision = request.target, request.precision
        per_key = (target.domain.dimension + 1) * (target.num_outputs + 1)
        room = request.max_bytes // precision.item_bytes // per_key
        try:
            draft = adaptive_cells(
                target,
                tolerance=share * request.aim * (1.0 if math.isinf(request.norm) else 1 - 1e-9),
                dtype=request.dtype,
                affine=True if request.is_steep or target.tail is not None else None,  # constants would be too many
                max_keys=8 * max(min(_MOST_KEYS, room), 16),
                sloped=request.value_axes,
                polish=0 if target.domain.dimension > 1 and (request.is_steep or target.tail is not None) else 1,
                progress=progress,
            )
        except (NonFiniteValueError, ToleranceError, UnsupportedError) as error:
            return _without_error(error)
        except SizeError as error:
            return Refusal.of_a_search(error.reason, most=_MOST_KEYS, room=room)
        factor = 1.0 if math.isinf(request.norm) else lp_factor(target.volume, target.num_outputs, request.norm)
        reached = factor * (draft.error_seen if draft.proof is None else draft.error_bound)
        kind: Kind = "estimated" if draft.proof is None else "proved"
        if not draft.holds:
            refusal = Refusal.of_a_search(f"{draft.keys:,} keys reach only {reached:.3g}", most=_MOST_KEYS, room=room)
            return replace(
                refusal,
                kind=kind,
                keys=draft.keys,
                parameters=draft.parameters,
                reached=reached,
            )
        directions = f"{draft.active} direction{'s' * (draft.active != 1)}"
        return Plan(
            request=request,
            maker=self,
            kind=kind,
            keys=draft.keys,
            parameters=draft.parameters,
            draft=draft,
            why=(
                f"{draft.keys:,} key{'' if draft.keys == 1 else 's'}",
                f"adaptive: affine values on scattered centers, placed where needed; {draft.leaves:,} leaves were tried",
                f"{search_text(target, draft.evaluations)}, and varies in {directions}",
                f"{draft.parameters:,} stored numbers, {size_text(draft.parameters * precision.item_bytes)} in {precision.name}",
            ),
            error_bound=factor * draft.error_bound,
            error_estimate=factor * draft.error_seen if draft.proof is None else None,
            largest=float(np.abs(draft.values).max()),
            caveat=request.caveat(draft.slopes),
        )

    def build(self, plan: Plan, progress: Progress | None = None, seed: int = 0) -> Construction:
        request = plan.request
        return adaptive_construction(plan.target, plan.draft, tolerance=request.tolerance, norm=request.norm, seed=seed)


def adaptive_construction(
    target: Target, draft: AdaptiveDraft, *, tolerance: float | None = None, norm: float = math.inf, seed: int = 0
) -> Construction:
    """The head of a draft with its certificate; the bound may exceed the tolerance (`draft.holds`).

    Args:
        seed: of the samples that an estimate rests on.
    """
    head = draft.head(target)
    common: dict[str, Any] = {
        "dtype": draft.dtype,
        "norm": norm,
        "tolerance": draft.tolerance if tolerance is None else tolerance,
        "details": {"type": "scattered", "method": "adaptive", "rate": draft.rate},
        "facts": {
            "leaves": float(draft.leaves),
            "evaluations": float(draft.evaluations),
            "active_directions": float(draft.active),
        },
    }
    function, partition = function_of(target), PowerDiagram(draft.centers, draft.powers)
    if draft.proof is None:
        seen = sampled_error(head, target, norm, seed=seed)
        certificate = claim(head, function, target.domains, (), theorem="ball-cells", seen=seen, **common)
        return Construction(head, partition, certificate)
    axes = [] if draft.axes is None else draft.axes.ravel().tolist()
    proved = BisectionProof().prove(head, target, Given(norm=norm, details={"axes": axes}, earlier=draft.proof))
    certificate = claim(
        head,
        function,
        target.domains,
        proved.terms,
        theorem="box-bisection",
        assumptions=undefined_roots(target),
        proof=proved.details,
        **common,
    )
    return Construction(head, partition, certificate)


def _without_error(error: PartitaError) -> Refusal:
    """A refusal that lets another method's error be raised if nothing works."""
    return Refusal(*error.args[:2])
