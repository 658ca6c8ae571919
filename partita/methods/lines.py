"""A few lines mixed by a softmax: for functions of one variable that are straight at both ends of a wide interval."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from partita.geometry.domains import Array, Box
from partita.geometry.grid import ProductGrid
from partita.heads.grid_head import GridHead
from partita.methods.method import Method, Plan, Refusal, size_text
from partita.methods.request import Request
from partita.methods.soft_values import can_be_proved, input_assumptions, kind_of_claim
from partita.proofs.claim import Construction, claim, function_of
from partita.proofs.proof import Given, Progress
from partita.proofs.taylor_proof import TaylorProof
from partita.search.line_fit import LineFit, fit_lines

__all__ = ["Lines", "LinesDraft"]


class Lines(Method):
    """`net(x) = Σ_j softmax_j(−R(x − c_j)²/2)(A_j + J_j(x − o))`: the lines of f's ends, and fitted ones between them.

    How far the ends reach does not matter: GELU within 1e-5 takes eight keys on [−12, 12] and on [−5000, 5000].
    *Theorem*: `straight-ends`, `taylor-proof`.
    """

    name = "lines"
    shares = (0.9, 0.6, 0.3)

    def applies(self, request: Request) -> Refusal | None:
        target = request.target
        if target.graph is None or not isinstance(target.domain, Box) or target.num_outputs != 1:
            return Refusal("for expressions with one output on an interval")
        if request.box.dimension != 1:
            return Refusal("for functions of one variable that are straight at both ends")
        return (
            None
            if can_be_proved(request)
            else Refusal("there is no bound on how far f moves when its inputs are rounded")
        )

    def plan(self, request: Request, share: float, progress: Progress | None = None) -> Plan | Refusal:
        lo, hi = (float(end[0]) for end in request.seen)
        found = fit_lines(lambda x: request.target(x[:, None])[:, 0], lo, hi, share * request.aim, progress=progress)
        if isinstance(found, str):
            return Refusal(found)
        draft, precision, count = LinesDraft(found), request.precision, len(found.centers)
        parameters = 3 * count + 2
        return Plan(
            request=request,
            maker=self,
            kind=kind_of_claim(request),
            keys=count,
            parameters=parameters,
            draft=draft,
            why=(
                f"{count} keys",
                f"lines: f is straight at both ends, and {count - 2} lines between them are mixed; "
                f"{found.error_estimate:.3g} is the largest error sampled",
                f"sharpness κ = R h² is {found.kappa:.3g}",
                f"{parameters:,} stored numbers, {size_text(parameters * precision.item_bytes)} in {precision.name}",
            ),
            error_bound=request.tolerance,
            error_estimate=found.error_estimate * request.domain_factor,
            largest=float(draft.head(request).largest_value(*request.seen)),
        )

    def build(self, plan: Plan, progress: Progress | None = None, seed: int = 0) -> Construction:
        request, head = plan.request, plan.draft.head(plan.request)
        target, known = request.target, None if request.knowledge is None else request.knowledge.known
        given = Given(request.tolerance, request.norm, known, progress=progress)
        proved = TaylorProof().prove(head, target, given)
        more: dict[str, Any] = {
            "facts": {"largest_value": plan.largest},
            "known": {} if known is None else known.to_json(),
        }
        certificate = claim(
            head,
            function_of(target),
            target.domains,
            proved.terms,
            dtype=request.dtype,
            theorem="straight-ends",
            norm=request.norm,
            tolerance=request.tolerance,
            assumptions=input_assumptions(request),
            details={"type": "grid", "method": self.name},
            proof=proved.details,
            **more,
        )
        return Construction(head, head.partition(request.box), certificate)


@dataclass(frozen=True, eq=False)
class LinesDraft:
    """The lines of a head; `values` are for limits on them."""

    fit: LineFit

    @property
    def values(self) -> Array:
        return self.fit.values

    def head(self, request: Request) -> GridHead:
        """The head as the dtype stores it."""
        fit, dtype, rounded = self.fit, request.dtype, request.precision.rounded
        head = GridHead(
            ProductGrid(request.box, (rounded(fit.centers),)),
            fit.rate,
            torch.tensor(fit.values[:, None]).to(dtype),
            value_slopes=torch.tensor(fit.slopes[:, None, None]).to(dtype),
            origin=torch.tensor([fit.origin]).to(dtype),
            half_windows=math.ceil(len(fit.centers) / 2),
            input_shapes=request.target.input_shapes,
            output_shape=request.target.output_shape,
        )
        head.check_range(*request.seen)
        return head
