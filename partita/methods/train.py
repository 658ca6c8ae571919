"""Many variables: a head with more keys than could be stored, whose values are a tensor train."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from partita.heads.head import count_text
from partita.heads.train_head import TrainHead
from partita.methods.method import Method, Plan, Refusal, needs_box, search_text, size_text
from partita.methods.request import Request
from partita.proofs.claim import Construction, claim, describe_function, some_answers
from partita.proofs.proof import Progress
from partita.proofs.sampled import sampled_error
from partita.search.train_fit import TrainFit, fit_train, held_out_error

__all__ = ["Train"]

_MANY = 5  # variables from which on "auto" looks for a train


class Train(Method):
    """`net(z) = Π_i Σ_k w_{i,k}(z_i) G_i[k]`, a product of m small matrices. *Theorem*: `tensor-train`.

    The matrices come from cross approximation. Nothing is proved: the error is estimated at points that were not used in the fit.
    """

    name = "train"
    shares = (0.9,)
    estimates = True

    def applies(self, request: Request) -> Refusal | None:
        if needs_box(request) or not math.isinf(request.norm):
            return Refusal("for boxes, in the supremum norm")
        return None

    def worth(self, request: Request, plans: Sequence[Plan]) -> Refusal | None:
        if request.target.domain.dimension >= _MANY and all(p.kind == "estimated" for p in plans):
            return None
        return Refusal("for five variables or more, if no stronger claim was found")

    def plan(self, request: Request, share: float, progress: Progress | None = None) -> Plan | Refusal:
        box, precision = request.box, request.precision
        fit = fit_train(
            request.target,
            box,
            tolerance=share * request.tolerance,
            outputs=request.target.num_outputs,
            progress=progress,
        )
        keys = fit.grid.num_cells
        parameters = sum(core.size for core in fit.cores) + sum(fit.grid.counts) + box.dimension
        if not fit.reached:
            return Refusal(
                f"{fit.status}: held-out error {fit.error_estimate:.3g} after {fit.evaluations:,} evaluations",
                kind="estimated",
                keys=keys,
                parameters=parameters,
                reached=fit.error_estimate,
            )
        spacing = [a[1] - a[0] if len(a) > 1 else 0.0 for a in fit.grid.axes]
        shape = " × ".join(map(str, fit.grid.counts))
        return Plan(
            request=request,
            maker=self,
            kind="estimated",
            keys=keys,
            parameters=parameters,
            draft=fit,
            why=(
                f"{shape} = {count_text(keys)} keys, kept as a tensor train of rank {max(fit.ranks)}",
                f"train: values by cross approximation; {search_text(request.target, fit.evaluations)}",
                f"the held-out error is {fit.error_estimate:.3g}",
                "nothing is proved: the error was sampled at fresh points, at corners, and where f is large or small",
                f"{parameters:,} stored numbers, {size_text(parameters * precision.item_bytes)} in {precision.name}",
            ),
            error_estimate=fit.error_estimate,
            sharpness=min((float(r * h * h) for r, h in zip(fit.rates, spacing) if h), default=0.0),
            largest=fit.scale,
        )

    def build(self, plan: Plan, progress: Progress | None = None, seed: int = 0) -> Construction:
        request, fit = plan.request, plan.draft
        target, head = request.target, _head(request, fit)
        seen = sampled_error(head, target, seed=seed)
        if target.graph is not None:
            held_out = held_out_error(head, target, request.box, seed=seed + 1)
            if held_out.error > seen.estimate:
                seen = replace(seen, estimate=held_out.error, point=held_out.point)
        certificate = claim(
            head,
            describe_function(target, *some_answers(target)),
            target.domains,
            (),
            dtype=request.dtype,
            theorem="tensor-train",
            tolerance=request.tolerance,
            details={"type": "train", "method": self.name},
            facts={"largest_rank": float(max(fit.ranks)), "evaluations": float(fit.evaluations)},
            seen=seen,
        )
        return Construction(head, head.partition(request.box), certificate)


def _head(request: Request, fit: TrainFit) -> TrainHead:
    cores = [torch.from_numpy(core).to(request.dtype) for core in fit.cores]
    shapes = {"input_shapes": request.target.input_shapes, "output_shape": request.target.output_shape}
    return TrainHead(fit.grid, fit.rates, cores, **shapes)  # type: ignore[arg-type]
