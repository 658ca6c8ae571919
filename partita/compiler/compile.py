"""compile: a function, a domain and a tolerance in; the smallest attention head with a certificate out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from partita.compiler.affine_plan import plan_affine_grid
from partita.compiler.clock import Clock
from partita.compiler.compiled import Compiled, require_outside
from partita.compiler.known_regularity import Declared
from partita.compiler.options import DEFAULT_MAX_BYTES, Options
from partita.compiler.plan import make_plan
from partita.compiler.planned import Candidate, Plan, rounding_of
from partita.compiler.soft_plan import plan_fitted
from partita.errors import (
    LipschitzContradictedError,
    NotContinuousError,
    PartitaError,
    ToleranceError,
    UnsupportedError,
)
from partita.functions.regularity import Jumps, Modulus
from partita.functions.target import make_target
from partita.geometry.domains import Box, Domain
from partita.methods.adaptive import AdaptiveRecipe, adaptive
from partita.methods.affine_grid import AffineRecipe, affine_grid
from partita.methods.affine_pieces import PiecesRecipe, piecewise_affine
from partita.methods.cover import CoverRecipe, small_domain
from partita.methods.cross_attention import cross_attention
from partita.methods.self_attention import self_attention
from partita.methods.soft_grid import SoftRecipe, soft_grid
from partita.methods.tangents import CurvedRecipe, curved_grid
from partita.methods.train import TrainRecipe, tensor_train
from partita.proofs.certificate import Certificate
from partita.proofs.construction import Construction, Progress

__all__ = ["build", "compile"]

_TO_PLAN = 0.67  # of a budget
_SHARES = (0.85, 0.6)  # of the tolerance: sizes are found again for these when a proof misses it


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
    options = Options.checked(tolerance, norm, dtype, sharpness, max_bytes, method, accept)
    clock = Clock(budget, progress)
    target = make_target(function, domain, vectorize=vectorize, trace=trace)
    planned = make_plan(target, options, Declared(lipschitz, modulus, hessian, jumps), progress=clock.until(_TO_PLAN))
    return build(planned, outside=outside, progress=clock.until(1.0), seed=seed)


def build(planned: Plan, *, outside: str = "raise", progress: Progress | None = None, seed: int = 0) -> Compiled:
    """Build what `plan` described, attack it once, and return it with its certificate; plan again without it if it misses."""
    missed: list[Candidate] = []
    errors: list[PartitaError] = []
    while True:
        try:
            compiled = _finished(planned, outside, progress, seed)
            return replace(compiled, candidates=_report_rows(planned, compiled, missed))
        except ToleranceError as error:
            errors.append(error)
            missed.append(replace(planned.as_candidate(str(error).split(". ")[0]), chosen=False))
        if planned.plan_without is None:
            raise errors[0]
        try:  # what was only forecast, or makes a weaker claim, has its turn now
            planned = planned.plan_without(frozenset(c.method for c in missed), progress)
        except NotContinuousError:
            raise  # says more than that a tolerance was missed
        except PartitaError:
            raise errors[0] from None


def _finished(planned: Plan, outside: str, progress: Progress | None, seed: int) -> Compiled:
    construction, planned = _construct(planned, progress, seed)
    certificate = construction.certificate
    if certificate.error > planned.recipe.tolerance:
        raise ToleranceError(_missed(planned, certificate))
    target, why = planned.target, planned.explanation
    compiled = Compiled(construction.head, construction.partition, certificate, target, outside, why)
    witness = compiled.attack(samples=2048, seed=seed)
    seen = witness.error if certificate.norm == "inf" else _mean_error(compiled, float(certificate.norm), seed) / 1.2
    if seen > certificate.error_bound:
        raise LipschitzContradictedError(
            f"{planned.target.label} and the head differ by {seen:.6g} in L{certificate.norm}, more than the bound "
            f"{certificate.error_bound:.6g} (worst point seen: {list(witness.point)}): what is declared of it does not hold, "
            "or it does not always answer the same."
        )
    if certificate.kind == "estimated" and certificate.norm == "inf":
        certificate = certificate.with_estimate(max(certificate.error, witness.error))
        if certificate.error > planned.recipe.tolerance:
            raise ToleranceError(_missed(planned, certificate))
    return replace(compiled, certificate=certificate.with_witness(witness, seed))


def _missed(planned: Plan, certificate: Certificate) -> str:
    """Why a finished head is not good enough, and what to ask for instead."""
    if certificate.kind == "estimated":
        return (
            f"{planned.target.label}: the finished {planned.method} head errs by {certificate.error:.6g} at fresh points, above "
            f"the tolerance {planned.recipe.tolerance:g}: f is rougher than its samples showed. "
            f"Ask for {1.1 * certificate.error:.3g}."
        )
    worst = max(certificate.terms, key=lambda t: t.value)
    if not math.isfinite(certificate.error_bound):
        return (
            f"{planned.target.label}: the proof for the {planned.method} head ({planned.keys:,} keys) ran out of boxes before it "
            f"covered the domain. Ask for accept='estimated', another method, or a larger tolerance."
        )
    return (
        f"{planned.target.label}: the finished {planned.method} head has the bound {certificate.error_bound:.6g}, above the "
        f"tolerance {planned.recipe.tolerance:g}: {worst.name} took more than was planned. "
        f"Ask for {1.01 * certificate.error_bound:.3g}."
    )


def _report_rows(built: Plan, compiled: Compiled, missed: list[Candidate]) -> tuple[Candidate, ...]:
    """The rows of the plan, with what was found out by building."""
    certificate = compiled.certificate
    note = next((c.note for c in built.candidates if c.method == built.method), "") if not missed else "the next best"
    rounding = rounding_of(certificate.terms)
    largest = certificate.facts.get("largest_value", built.largest)
    chosen = Candidate(
        built.method,
        certificate.kind,
        note,
        compiled.num_keys,
        compiled.num_parameters,
        largest,
        rounding,
        certificate.error,
        True,
    )
    told = {built.method, *(c.method for c in missed)}
    return (chosen, *missed, *(c for c in built.candidates if c.method not in told))


def _mean_error(compiled: Compiled, p: float, seed: int) -> float:
    """The L_p error over uniform samples, by the largest output only: an estimate from below, up to chance."""
    box = compiled.target.domain.bounding_box()
    errors = compiled.errors_at(box.sample(4096, np.random.default_rng(seed)))
    largest = float(errors.max())
    return largest * float(np.mean((errors / largest) ** p) * box.volume) ** (1 / p) if largest else 0.0


def _construct(planned: Plan, progress: Progress | None, seed: int) -> tuple[Construction, Plan]:
    """The head of a plan's recipe, and the plan it was built from: sampled sizes are found again where a proof misses narrowly."""
    construction = _built(planned, progress, seed)
    for share in _SHARES:
        grid = planned.recipe.grid if isinstance(planned.recipe, SoftRecipe | AffineRecipe) else None
        if grid is None or construction.certificate.error <= planned.recipe.tolerance:
            break
        options = Options(grid.tolerance, grid.norm, grid.dtype)
        if planned.method == "affine":
            again = plan_affine_grid(planned.target, planned.knowledge, options, share=share)
        elif planned.method == "fitted":
            again = plan_fitted(planned.target, planned.knowledge, options, share=share, progress=progress)
        else:
            break
        if not isinstance(again, Plan):
            break
        planned = again
        construction = _built(planned, progress, seed)
    return construction, planned


def _built(planned: Plan, progress: Progress | None, seed: int) -> Construction:
    target, knowledge, recipe = planned.target, planned.knowledge, planned.recipe
    known = None if knowledge is None else knowledge.known
    if isinstance(recipe, SoftRecipe):
        return soft_grid(target, recipe, known, progress=progress, seed=seed)
    if isinstance(recipe, AffineRecipe):
        return affine_grid(target, recipe, known, progress=progress, seed=seed)
    if isinstance(recipe, CurvedRecipe):
        return curved_grid(target, recipe, progress=progress, seed=seed)
    if isinstance(recipe, AdaptiveRecipe):
        return adaptive(target, recipe, seed=seed)
    if isinstance(recipe, TrainRecipe):
        return tensor_train(target, recipe, seed=seed)
    if isinstance(recipe, PiecesRecipe):
        return piecewise_affine(target, recipe, progress=progress)
    if knowledge is None or known is None:
        raise UnsupportedError(f"a {planned.method} head needs to know how fast f moves.")
    if isinstance(recipe, CoverRecipe):
        return small_domain(target, recipe, known, declared=knowledge.declared, progress=progress)
    construct = cross_attention if len(target.domains) == 2 else self_attention
    return construct(target, recipe, known, declared=knowledge.declared, progress=progress)
