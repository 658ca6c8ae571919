"""Black boxes that are sums: one head per term of one or two variables, found by sampling, with an estimate of the error."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from partita.arithmetic.progress import report
from partita.errors import EvaluationsSpentError, NothingKnownError, PartitaError, SizeError, ToleranceError
from partita.functions.target import Target
from partita.geometry.domains import Array, Box
from partita.heads.head import FoldedHead
from partita.heads.network import AttentionNetwork
from partita.heads.wiring import Affine, Group, Wiring
from partita.methods.averaged import Corrected
from partita.methods.fitted import Fitted
from partita.methods.method import FORMS, Method, Plan, Refusal, search_text, size_text
from partita.methods.planner import best_plan, constructed
from partita.methods.request import Request
from partita.methods.structured import network_not_worth
from partita.proofs.claim import Construction, claim, describe_function, some_answers
from partita.proofs.proof import Progress
from partita.proofs.sampled import fresh_points, sampled_error
from partita.search.interactions import SumOfTerms, represented

__all__ = ["SampledSums"]


class SampledSums(Method):
    """`net(z) = f(c) + Σ_i head_i(z_i) + Σ_ij head_ij(z_i, z_j)` for a black box. Nothing is proved.

    Mixed differences at random points show which variables interact. Each term is interpolated and fitted; the error of the
    sum is estimated at fresh points. *Theorem*: `carried-errors`, with estimates in place of bounds.
    """

    name = "heads"
    form = FORMS[1]
    shares = (0.9, 0.5)
    estimates = True
    exact = True  # interactions are looked for in f itself; its terms are interpolated, f is not

    def evaluations_to_build(self, target: Target, keys: int) -> int:
        return fresh_points(target)

    def applies(self, request: Request) -> Refusal | None:
        target = request.target
        if target.graph is not None or not isinstance(target.domain, Box) or len(target.domains) == 2:
            return Refusal("for black boxes on one box")
        if not math.isinf(request.norm) or request.precision.is_half or target.excluding is not None:
            return Refusal("for the supremum norm, in float64 or float32, of functions that have values everywhere")
        return None

    def worth(self, request: Request, plans: Sequence[Plan]) -> Refusal | None:
        if request.box.dimension == 1:
            return Refusal("not tried, because f has one variable")
        return network_not_worth(request, plans)

    def plan(self, request: Request, share: float, progress: Progress | None = None) -> Plan | Refusal:
        try:
            return self._sum(request, share, progress)
        except EvaluationsSpentError as error:  # other methods may manage with what is left
            return Refusal(error.reason)

    def _sum(self, request: Request, share: float, progress: Progress | None) -> Plan | Refusal:
        target = request.target
        report(progress, "looking for variables that interact")
        found = represented(target, request.box, (1 - share) * request.tolerance)
        if isinstance(found, str):
            return Refusal(found)
        wide = len(found.variables) * target.num_outputs
        if request.max_heads is not None and wide > request.max_heads:
            return Refusal(f"needs {wide} heads in a layer; max_heads allows {request.max_heads}")
        heads, uses, error = list[FoldedHead](), list[tuple[int, int]](), found.residual
        constant = found.constant.copy()
        for output in range(target.num_outputs):
            for k in range(len(found.variables)):
                report(progress, f"term {k + 1} of {len(found.variables)}", k, len(found.variables))
                part = _asked(request, found, k, output, share * request.tolerance / len(found.variables))
                construction = _fitted(part, progress)
                if isinstance(construction, PartitaError):
                    return Refusal(
                        f"the term in {_named(found.variables[k])} may take {part.tolerance:.2g} of the tolerance, and no head is "
                        f"that close: {construction.reason}",
                        construction.hint,
                        SizeError if isinstance(construction, SizeError) else None,
                    )
                head = construction.head
                assert isinstance(head, FoldedHead)
                error += construction.certificate.error
                if head.num_keys == 1 and not head.has_query_values:  # a constant needs no head
                    constant[output] += float(head.evaluate(torch.zeros(1, head.dimension, dtype=head.dtype)).item())
                else:
                    heads.append(head)
                    uses.append((output, k))
        if not heads:
            return Refusal("f looks constant: one key holds it")
        network = AttentionNetwork(
            heads,
            _wiring(found, uses, constant),
            input_shapes=target.input_shapes,
            output_shape=target.output_shape,
        )
        pairs = [v for v in found.variables if len(v) == 2]
        said = ", ".join(map(_named, pairs)) if pairs else "none"
        size = size_text(network.num_parameters * request.precision.item_bytes)
        return Plan(
            request=request,
            maker=self,
            kind="estimated",
            keys=network.num_keys,
            parameters=network.num_parameters,
            draft=network,
            why=(
                f"{len(heads)} heads in 1 layer, {network.num_keys:,} keys",
                f"heads: f as a sum of functions of one or two variables; pairs that interact: {said}; "
                f"{search_text(target, target.calls.rows)}",
                "nothing is proved: which variables interact, and the error, were sampled",
                f"{network.num_parameters:,} stored numbers, {size} in {request.precision.name}",
            ),
            error_estimate=error,
            largest=max(
                head.largest_value(*_ends(request.box, found.variables[k])) for head, (_, k) in zip(heads, uses)
            ),
        )

    def build(self, plan: Plan, progress: Progress | None = None, seed: int = 0) -> Construction:
        request, network = plan.request, plan.draft
        certificate = claim(
            network,
            describe_function(request.target, *some_answers(request.target)),
            request.target.domains,
            (),
            dtype=request.dtype,
            theorem="carried-errors",
            tolerance=request.tolerance,
            details={"type": "network", "method": self.name},
            facts={"heads": float(len(network.heads)), "layers": 1.0},
            seen=sampled_error(network, request.target, seed=seed),
        )
        return Construction(network, None, certificate)


def _asked(request: Request, found: SumOfTerms, k: int, output: int, tolerance: float) -> Request:
    """A request for one output of one term, interpolated so that searching costs no evaluations."""
    lo, hi = _ends(request.box, found.variables[k])
    term = found.term(k)

    def ask(points: Array) -> Array:
        return term(points)[:, output : output + 1]

    label = f"term in {_named(found.variables[k])}"
    target = Target((Box(lo, hi),), (), None, ask, label, calls=request.target.calls)
    asked = Request(target, tolerance, dtype=request.dtype, max_bytes=request.max_bytes, max_value=request.max_value)
    return asked.for_search()


def _ends(box: Box, variables: tuple[int, ...]) -> tuple[Array, Array]:
    return box.lo.ravel()[list(variables)], box.hi.ravel()[list(variables)]


def _named(variables: tuple[int, ...]) -> str:
    return " and ".join(f"x{i}" for i in variables)


def _chosen(m: int, variables: tuple[int, ...]) -> Array:
    """Rows that read these variables."""
    rows = np.zeros((len(variables), m))
    rows[np.arange(len(variables)), list(variables)] = 1.0
    return rows


def _wiring(found: SumOfTerms, uses: Sequence[tuple[int, int]], constant: Array) -> Wiring:
    """Heads that each read the variables of a term by index, each added to one output.

    Args:
        found: the terms.
        uses: for every head its output and its term.
        constant: of every output.
    """
    m = len(found.anchor)
    layer = tuple(
        Group(h, Affine(_chosen(m, found.variables[k]), np.zeros(len(found.variables[k]))))
        for h, (_, k) in enumerate(uses)
    )
    weight: Array = np.zeros((len(constant), len(uses)))
    weight[[o for o, _ in uses], np.arange(len(uses))] = 1.0
    return Wiring(m, (layer,), Affine(weight, constant, m))


def _fitted(request: Request, progress: Progress | None) -> Construction | PartitaError:
    """The head of a term: fitted, or, where such heads round too much, with the values of f corrected; or why there is none."""
    problem: PartitaError | None = None
    for method in (Fitted(), Corrected()):
        try:
            asked = replace(request, method=method.name)
            construction, _ = constructed(best_plan(asked, methods=[method], progress=progress), progress)
        except (NothingKnownError, SizeError, ToleranceError) as error:
            problem = problem or error
            continue
        reached = construction.certificate.error
        if reached <= request.tolerance:
            return construction
        problem = problem or ToleranceError(f"{request.target.label}: the best head has an error of {reached:.2g}")
    assert problem is not None
    return problem
