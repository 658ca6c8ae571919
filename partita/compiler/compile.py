"""compile: a function, a domain and a tolerance in; the smallest attention head with a certificate out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from partita.compiler.clock import Clock
from partita.compiler.compiled import Compiled, require_outside
from partita.compiler.request_options import request_for
from partita.errors import (
    LipschitzContradictedError,
    NotContinuousError,
    PartitaError,
    ProofRefutedError,
    SizeError,
    ToleranceError,
    UnsupportedError,
)
from partita.functions.regularity import Declared, Jumps, Modulus
from partita.geometry.domains import Box, Domain
from partita.methods.method import Candidate, Plan, size_text
from partita.methods.planner import best_plan, too_large
from partita.methods.request import DEFAULT_MAX_BYTES
from partita.proofs.certificate import Certificate
from partita.proofs.claim import Construction
from partita.proofs.proof import Progress

__all__ = ["build", "compile", "plan"]

_TO_PLAN = 0.67  # of a budget


def compile(
    function: Any,
    domain: Domain | tuple[Box, Box],
    *,
    tolerance: float,
    lipschitz: float | Sequence[float] | None = None,
    modulus: Modulus | None = None,
    hessian: float | None = None,
    jumps: Jumps | None = None,
    norm: float | str = "inf",
    method: str = "auto",
    accept: str = "strongest",
    dtype: torch.dtype = torch.float64,
    sharpness: float | None = None,
    outside: str = "raise",
    max_bytes: int = DEFAULT_MAX_BYTES,
    vectorize: bool = False,
    trace: bool | None = None,
    budget: float | None = None,
    progress: Progress | None = None,
    seed: int = 0,
) -> Compiled:
    """The smallest single-layer, single-head attention within `tolerance` of the function on the domain, with a certificate.

    `net(z) = Σ_j softmax_j(R(v_j·z − |v_j|²/2)) V_j`. `c.report()` shows what was considered and why this head was chosen: the
    strongest kind of claim first (`proved`, `proved_given`, `estimated`), then the fewest stored numbers.

    Args:
        function: a typed expression in x0, x1, … (k0, …, q0, … for pairs), a sympy expression in these symbols, an `nn.Module`,
            or a torch or numpy function of a batch.
        domain: `Box`, `PointCloud`, or a pair of boxes for cross-attention.
        tolerance: the error allowed.
        lipschitz: L with `|f(x) − f(y)|_∞ ≤ L|x − y|₂`, or one constant per coordinate. Not needed for expressions.
        modulus: a Hölder modulus instead. hessian: M with `|∇²f|₂ ≤ M` for each output, of a smooth black box.
        jumps: where f leaves its modulus (finite norms only).
        norm: "inf", the largest error of any output anywhere; or a number p ≥ 1, `(∫ Σ_outputs |f − net|^p)^{1/p}`.
        method: how the values are chosen: "hard" (the paper's: f at the centers, sharp), "tuned" (f at the centers, at the best
            temperature), "corrected" (its bias taken off), "fitted" (solved for), "affine" (f and its slopes in every cell),
            "adaptive" (the same on scattered centers, where they are needed), "pieces" (exact, for piecewise affine
            expressions), "train" (a tensor train, for many dimensions); "auto" finds the smallest head among them.
        accept: "estimated" takes a smaller head although its error is only sampled.
        dtype: of the head, torch.float64 or torch.float32; its rounding is part of the bound.
        sharpness: κ = R h². outside: "raise", "clamp" or "allow". max_bytes: refuse larger heads.
        vectorize: call f once per point. trace: torch functions and modules are followed operation by operation and become
            expressions, so that claims about them are proved; False leaves them black boxes, True insists.
        budget: seconds; planning ends after two thirds of them with what was found, a proof with the valid bound it has reached.
        progress: called with (what, done, of). seed: of the attack on the finished head.

    Raises:
        PartitaError: one subclass per kind of bad input (`partita.errors`).

    >>> import partita as pa
    >>> c = pa.compile("sin(3*x0) + x0*cos(2*x1)", pa.Box([-1, -1], [1, 1]), tolerance=1e-6)
    >>> c.certificate.kind, c.error_bound <= 1e-6, c.num_keys <= 144
    ('proved', True, True)
    """
    require_outside(outside)
    if seed < 0:
        raise UnsupportedError(f"seed is {seed}; expected a whole number ≥ 0.")
    clock = Clock(budget, progress)
    request = request_for(
        function,
        domain,
        tolerance=tolerance,
        norm=norm,
        dtype=dtype,
        sharpness=sharpness,
        max_bytes=max_bytes,
        method=method,
        accept=accept,
        declared=Declared(lipschitz, modulus, hessian, jumps),
        vectorize=vectorize,
        trace=trace,
    )
    planned = best_plan(request, progress=clock.until(_TO_PLAN))
    return build(planned, outside=outside, progress=clock.until(1.0), seed=seed)


def plan(
    function: Any,
    domain: Domain | tuple[Box, Box],
    *,
    tolerance: float,
    lipschitz: float | Sequence[float] | None = None,
    modulus: Modulus | None = None,
    hessian: float | None = None,
    jumps: Jumps | None = None,
    norm: float | str = "inf",
    method: str = "auto",
    accept: str = "strongest",
    dtype: torch.dtype = torch.float64,
    sharpness: float | None = None,
    max_bytes: int = DEFAULT_MAX_BYTES,
    vectorize: bool = False,
    trace: bool | None = None,
    progress: Progress | None = None,
) -> Plan:
    """Sizes, sharpness and error of the head that `compile` would build, and why. Arguments as in `compile`.

    A hard head is planned without evaluating f; the others are found from samples of f inside the domain.

    Raises:
        PartitaError: as `compile`.

    >>> import partita as pa
    >>> print(pa.plan("2*x0", pa.Box([0.0], [1.0]), tolerance=0.15, method="hard").why[0])
    7 keys
    """
    request = request_for(
        function,
        domain,
        tolerance=tolerance,
        norm=norm,
        dtype=dtype,
        sharpness=sharpness,
        max_bytes=max_bytes,
        method=method,
        accept=accept,
        declared=Declared(lipschitz, modulus, hessian, jumps),
        vectorize=vectorize,
        trace=trace,
    )
    return best_plan(request, progress=progress)


def build(plan: Plan, *, outside: str = "raise", progress: Progress | None = None, seed: int = 0) -> Compiled:
    """Build what `plan` described, attack it once, and return it with its certificate.

    If the finished head misses the tolerance, it is planned again: for a smaller share of the tolerance, then, if the method was
    left open, by the other methods.

    Args:
        plan: from `pa.plan`.
        outside, progress, seed: as in `compile`.

    Raises:
        ToleranceError: no head that was built meets the tolerance. PartitaError: as `compile`.

    >>> import partita as pa
    >>> pa.build(pa.plan("2*x0", pa.Box([0.0], [1.0]), tolerance=0.15, method="hard")).num_keys
    7
    """
    missed: list[Candidate] = []
    errors: list[PartitaError] = []
    while True:
        try:
            compiled = _finished(plan, outside, progress, seed)
            return replace(compiled, candidates=_rows(plan, compiled, missed))
        except (SizeError, ToleranceError) as error:
            errors.append(error)
            missed.append(plan.as_candidate(error.reason))
        if not plan.request.is_auto:
            raise errors[0]
        try:  # what was only forecast, or makes a weaker claim, has its turn now
            plan = best_plan(plan.request, without=frozenset(c.method for c in missed), progress=progress)
        except NotContinuousError:
            raise  # says more than that a tolerance was missed
        except PartitaError:
            raise errors[0] from None


def _finished(plan: Plan, outside: str, progress: Progress | None, seed: int) -> Compiled:
    """The head of a plan, attacked; or the error that says why it cannot be handed out."""
    construction, plan = _constructed(plan, progress, seed)
    certificate, target, request = construction.certificate, plan.target, plan.request
    size = sum(t.numel() * t.element_size() for t in construction.head.state_dict().values())
    if size > request.max_bytes:
        raise SizeError(
            f"the finished {plan.method} head takes {size_text(size)}; max_bytes allows {size_text(request.max_bytes)}",
            "Ask for a larger tolerance, or raise max_bytes.",
        )
    if certificate.error > request.tolerance:
        raise _missed(plan, certificate)
    compiled = Compiled(construction.head, construction.partition, certificate, target, outside, plan.explanation)
    witness = compiled.attack(samples=2048, seed=seed)
    seen = witness.error if certificate.norm == "inf" else _mean_error(compiled, float(certificate.norm), seed) / 1.2
    if seen > certificate.error_bound:
        raise _refuted(plan, certificate, seen, witness.point)
    if certificate.kind == "estimated" and certificate.norm == "inf":
        certificate = certificate.with_estimate(max(certificate.error, witness.error))
        if certificate.error > request.tolerance:
            raise _missed(plan, certificate)
    return replace(compiled, certificate=certificate.with_witness(witness, seed))


def _constructed(plan: Plan, progress: Progress | None, seed: int) -> tuple[Construction, Plan]:
    """The plan's head, and the plan it was built from: planned again for a smaller share where a proof misses the tolerance."""
    construction = plan.maker.build(plan, progress, seed)
    for share in plan.maker.shares[1:]:
        if construction.certificate.error <= plan.request.tolerance:
            break
        again = plan.maker.plan(plan.request, share, progress)
        if not isinstance(again, Plan):
            break
        if again.bytes > plan.request.max_bytes:
            raise too_large(again).exception()
        plan = replace(again, candidates=plan.candidates)
        construction = plan.maker.build(plan, progress, seed)
    return construction, plan


def _missed(plan: Plan, certificate: Certificate) -> ToleranceError:
    """Why a finished head is not good enough, and what to ask for instead."""
    label, tolerance = plan.target.label, plan.request.tolerance
    if certificate.kind == "estimated":
        return ToleranceError(
            f"{label}: the finished {plan.method} head errs by {certificate.error:.6g} at fresh points, above the tolerance "
            f"{tolerance:g}: f is rougher than its samples showed",
            f"Ask for {1.1 * certificate.error:.3g}.",
        )
    if not math.isfinite(certificate.error_bound):
        return ToleranceError(
            f"{label}: the proof for the {plan.method} head ({plan.keys:,} keys) ran out of boxes before it covered the domain",
            "Ask for accept='estimated', another method, or a larger tolerance.",
        )
    worst = max(certificate.terms, key=lambda t: t.value)
    return ToleranceError(
        f"{label}: the finished {plan.method} head has the bound {certificate.error_bound:.6g}, above the tolerance "
        f"{tolerance:g}: {worst.name} took more than was planned",
        f"Ask for {1.01 * certificate.error_bound:.3g}.",
    )


def _refuted(plan: Plan, certificate: Certificate, seen: float, point: Sequence[float]) -> PartitaError:
    """A point that refutes the claim: the caller's word does not hold, or, where there is none, the proof is wrong."""
    found = (
        f"{plan.target.label} and the head differ by {seen:.6g} in L{certificate.norm}, more than the bound "
        f"{certificate.error_bound:.6g} (worst point seen: {list(point)})"
    )
    if certificate.kind == "proved":
        return ProofRefutedError(
            found, "This is a bug in partita: please report the function, the domain and the tolerance."
        )
    return LipschitzContradictedError(
        found, "What is declared of the function does not hold, or it does not always return the same value."
    )


def _rows(plan: Plan, compiled: Compiled, missed: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """The rows of the plan, with what was found out by building."""
    certificate = compiled.certificate
    note = next((c.note for c in plan.candidates if c.method == plan.method), "") if not missed else "the next best"
    chosen = Candidate(
        plan.method,
        certificate.kind,
        note,
        compiled.num_keys,
        compiled.num_parameters,
        certificate.facts.get("largest_value", plan.largest),
        certificate.rounding,
        certificate.error,
        True,
    )
    told = {plan.method, *(c.method for c in missed)}
    return (chosen, *missed, *(c for c in plan.candidates if c.method not in told))


def _mean_error(compiled: Compiled, p: float, seed: int) -> float:
    """The L_p error over uniform samples, by the largest output only: an estimate from below, up to chance."""
    box = compiled.target.domain.bounding_box()
    errors = compiled.errors_at(box.sample(4096, np.random.default_rng(seed)))
    largest = float(errors.max())
    return largest * float(np.mean((errors / largest) ** p) * box.volume) ** (1 / p) if largest else 0.0
