"""What fitted, tuned and corrected values share: product grids with ghosts, at a finite temperature."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any, ClassVar

import numpy as np

from partita.errors import ToleranceError
from partita.functions.regularity import Knowledge, Known
from partita.geometry.domains import Array
from partita.methods.grids import GridDraft, sharpness_of
from partita.methods.hard import wider_text
from partita.methods.method import Method, Plan, Refusal, keys_text, needs_box, size_text
from partita.methods.request import Request
from partita.proofs.assumptions import undefined_roots, vouched
from partita.proofs.center_values import GridFacts, soft_terms
from partita.proofs.certificate import Assumption, Kind
from partita.proofs.claim import Construction, claim, function_of
from partita.proofs.proof import Given, Progress
from partita.proofs.sampled import sampled_error
from partita.proofs.taylor_proof import TaylorProof

__all__ = ["SoftValues", "can_be_proved", "input_assumptions", "kind_of_claim", "soft_construction", "too_narrow"]


class SoftValues(Method):
    """`net = (⊗_i A_i) V`, `A_i(x)_k = softmax_k(−R_i(x − c_k)²/2)`; a subclass chooses counts, ghosts, rates and values V.

    Whatever they are, `taylor-proof` bounds the error of the stored head if f is an expression; otherwise it is sampled.
    """

    estimates = True
    theorem: ClassVar[str]
    made: ClassVar[str]

    def applies(self, request: Request) -> Refusal | None:
        return needs_box(request)

    @abstractmethod
    def plan(self, request: Request, share: float, progress: Progress | None = None) -> Plan | Refusal: ...

    def planned(
        self,
        request: Request,
        counts: tuple[int, ...],
        ghosts: tuple[int, ...],
        rates: tuple[float, ...],
        values: Array,
        error: float,
    ) -> Plan:
        """The plan of a grid whose largest sampled error is `error`."""
        precision, keys = request.precision, math.prod(counts)
        draft = GridDraft(counts, rates, (), ghosts, values)
        parameters = keys * values.shape[1] + sum(counts) + len(counts)
        kappas = sharpness_of(request.box, draft)
        shown = ", ".join(f"{k:.3g}" for k in kappas)
        size = size_text(precision.bytes_of(parameters, sum(counts) + len(counts)))
        return Plan(
            request=request,
            maker=self,
            kind=kind_of_claim(request),
            keys=keys,
            parameters=parameters,
            draft=draft,
            why=(
                keys_text(counts),
                f"{self.name}: {self.made}; {error:.3g} is the largest error sampled",
                f"sharpness κ = R h² is {shown or 'free'} per axis, with {', '.join(map(str, ghosts))} ghosts beyond each end "
                "of the axes",
                f"{parameters:,} stored numbers, {size} in {precision.name}",
            ),
            error_bound=request.tolerance if can_be_proved(request) else math.inf,
            error_estimate=error * request.domain_factor,
            sharpness=min(kappas, default=0.0),
            largest=float(np.abs(values).max()),
            counts=counts,
        )

    def build(self, plan: Plan, progress: Progress | None = None, seed: int = 0) -> Construction:
        request = plan.request
        return soft_construction(
            request, plan.draft, request.knowledge, name=self.name, theorem=self.theorem, progress=progress, seed=seed
        )


def soft_construction(
    request: Request,
    draft: GridDraft,
    knowledge: Knowledge | None,
    *,
    name: str,
    theorem: str,
    progress: Progress | None = None,
    seed: int = 0,
) -> Construction:
    """The head of a draft with its certificate: proved where f is an expression, estimated from fresh samples where not."""
    target, values = request.target, draft.values
    assert values is not None
    spread, largest = float(np.ptp(values, axis=0).max()), float(np.abs(values).max())
    mass = 1e-4 * request.tolerance / max(spread, request.tolerance)  # of the weight, that windows may leave out
    provable, known = can_be_proved(request), None if knowledge is None else knowledge.known
    declared = input_assumptions(request) if provable else []
    facts = {
        "sharpness": min(sharpness_of(request.box, draft), default=0.0),
        "largest_value": largest,
        "spread": spread,
    }
    head = draft.head(request, mass=mass)
    common: dict[str, Any] = {
        "dtype": request.dtype,
        "theorem": theorem,
        "norm": request.norm,
        "tolerance": request.tolerance,
        "details": {"type": "grid", "method": name},
        "facts": facts,
    }
    if provable:
        roots = undefined_roots(target)
        given = Given(request.tolerance, request.norm, known, progress=progress)
        proved = TaylorProof().prove(head, target, given)
        common |= {"terms": proved.terms, "assumptions": (*declared, *roots), "proof": proved.details}
    else:
        seen = sampled_error(head, target, request.norm, seed=seed)
        common |= {
            "terms": soft_terms(GridFacts.of(head, request.box, volume=target.volume), known, request.norm),
            "seen": seen,
        }
    function, moduli = function_of(target), {} if known is None else known.to_json()
    certificate = claim(head, function, target.domains, known=moduli, **common)
    return Construction(head, draft.grid(request), certificate)


def too_narrow(request: Request, share: float) -> Refusal | None:
    """Why this share of the tolerance is out of reach in a half type, with a tolerance that is not; None if it is in reach."""
    lost, precision = request.set_aside * request.domain_factor, request.precision
    if lost < 0.75 * share * request.tolerance:
        return None
    return Refusal(
        f"tolerance {request.asked:g} is below what {precision.name} can promise for {request.target.label}: rounding inputs "
        f"and storing values alone add {lost:.3g}",
        f"Use {wider_text(precision)}a tolerance above {request.stated(2.1 * lost / share):.3g}.",
        ToleranceError,
    )


def can_be_proved(request: Request) -> bool:
    """Whether f is an expression, and rounding its inputs moves it by a known amount: on a region perhaps across its edge."""
    if request.target.graph is None or not request.precision.rounds_inputs:
        return request.target.graph is not None
    return request.knowledge is not None and (request.target.region is None or needs_box(request) is None)


def kind_of_claim(request: Request) -> Kind:
    """What `soft_construction` will claim."""
    if not can_be_proved(request):
        return "estimated"
    return "proved" if _declared_moduli(request) is None else "proved_given"


def input_assumptions(request: Request) -> list[Assumption]:
    """The declared moduli that the input-rounding term uses: none where inputs are not rounded or the moduli are proved."""
    known = _declared_moduli(request)
    return (
        [] if known is None else [a for a in vouched(request.target, known, declared=True) if a.about == "regularity"]
    )


def _declared_moduli(request: Request) -> Known | None:
    knowledge = request.knowledge if request.precision.rounds_inputs else None
    return None if knowledge is None or not knowledge.declared else knowledge.known
