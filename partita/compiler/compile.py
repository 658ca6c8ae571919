"""compile: a function, a domain and a tolerance in; one attention head with a certificate out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from partita.compiler.compiled import Compiled, require_outside
from partita.compiler.options import DEFAULT_MAX_BYTES, DEFAULT_SHARPNESS, Options
from partita.compiler.plan import make_plan
from partita.compiler.planned import Plan
from partita.constructions.construction import Construction, Progress
from partita.constructions.cross_attention import cross_attention
from partita.constructions.on_grid import GridRecipe
from partita.constructions.self_attention import self_attention
from partita.constructions.small_domain import small_domain
from partita.errors import LipschitzContradictedError, ToleranceError, UnsupportedError
from partita.geometry.domains import Box, Domain
from partita.targets.knowledge import Jumps, Modulus
from partita.targets.target import make_target

__all__ = ["build", "compile"]


def compile(
    function: Any,
    domain: Domain | tuple[Box, Box],
    *,
    tolerance: float,
    lipschitz: float | Sequence[float] | None = None,
    modulus: Modulus | None = None,
    jumps: Jumps | None = None,
    norm: float | str = "inf",
    method: str = "auto",
    dtype: torch.dtype = torch.float64,
    sharpness: float = DEFAULT_SHARPNESS,
    outside: str = "raise",
    max_bytes: int = DEFAULT_MAX_BYTES,
    vectorize: bool = False,
    progress: Progress | None = None,
    seed: int = 0,
) -> Compiled:
    """A single-layer, single-head attention that is within `tolerance` of the function on the domain, with a certificate.

    `net(z) = Σ_j softmax_j(R(v_j·z − |v_j|²/2)) f(v_j)`. *Theorem*: `self-attention` (boxes), `cross-attention` (pairs of boxes),
    `small-domain` (point clouds), their L_p corollaries for finite `norm`.

    Args:
        function: a typed expression in x0, x1, … (k0, …, q0, … for pairs), or a torch or numpy function of a batch.
        domain: `Box`, `PointCloud`, or a pair of boxes for cross-attention.
        tolerance: the error allowed.
        lipschitz: L with `|f(x) − f(y)|_∞ ≤ L|x − y|₂`, or one constant per coordinate. Not needed for expressions.
        modulus: a Hölder modulus instead. jumps: where f leaves it (finite norms only).
        norm: "inf", the largest error of any output anywhere; or a number p ≥ 1, `(∫ Σ_outputs |f − net|^p)^{1/p}`.
        method: "hard", the paper's; "auto" picks it.
        dtype: of the head, torch.float64 or torch.float32; its rounding is part of the bound.
        sharpness: κ = R h². outside: "raise", "clamp" or "allow". max_bytes: refuse larger heads.
        vectorize: call f once per point. progress: called with (what, done, of). seed: of the attack on the finished head.

    Raises:
        PartitaError: one subclass per kind of bad input (`partita.errors`).

    >>> import partita as pa
    >>> c = pa.compile("sin(3*x0) + x0*cos(2*x1)", pa.Box([-1, -1], [1, 1]), tolerance=0.05)
    >>> c.certificate.kind, c.error_bound <= 0.05
    ('proved', True)
    """
    require_outside(outside)
    if seed < 0:
        raise UnsupportedError(f"seed is {seed}; expected a whole number ≥ 0.")
    options = Options.checked(tolerance, norm, dtype, sharpness, max_bytes, method)
    target = make_target(function, domain, vectorize=vectorize)
    return build(make_plan(target, options, lipschitz, modulus, jumps), outside=outside, progress=progress, seed=seed)


def build(planned: Plan, *, outside: str = "raise", progress: Progress | None = None, seed: int = 0) -> Compiled:
    """Build what `plan` described, attack it once, and return it with its certificate."""
    construction = _construct(planned, progress)
    certificate = construction.certificate
    if certificate.error_bound > planned.recipe.tolerance:
        raise ToleranceError(
            f"{planned.target.label}: the finished head has the bound {certificate.error_bound:.6g}, above the tolerance "
            f"{planned.recipe.tolerance:g}: {max(certificate.terms[1:], key=lambda t: t.value).name} took more than was planned. "
            f"Ask for {1.01 * certificate.error_bound:.3g}."
        )
    compiled = Compiled(construction.head, construction.partition, certificate, planned.target, outside, planned.why)
    witness = compiled.attack(samples=2048, seed=seed)
    seen = witness.error if certificate.norm == "inf" else _mean_error(compiled, float(certificate.norm), seed) / 1.2
    if seen > certificate.error_bound:
        raise LipschitzContradictedError(
            f"{planned.target.label} and the head differ by {seen:.6g} in L{certificate.norm}, more than the bound "
            f"{certificate.error_bound:.6g} (worst point seen: {list(witness.point)}): what is declared of it does not hold, "
            "or it does not always answer the same."
        )
    return replace(compiled, certificate=certificate.with_witness(witness, seed))


def _mean_error(compiled: Compiled, p: float, seed: int) -> float:
    """The L_p error over uniform samples, by the largest output only: an estimate from below, up to chance."""
    box = compiled.target.domain.bounding_box()
    errors = compiled.errors_at(box.sample(4096, np.random.default_rng(seed)))
    largest = float(errors.max())
    return largest * float(np.mean((errors / largest) ** p) * box.volume) ** (1 / p) if largest else 0.0


def _construct(planned: Plan, progress: Progress | None) -> Construction:
    target, known, declared = planned.target, planned.knowledge.known, planned.knowledge.declared
    if not isinstance(planned.recipe, GridRecipe):
        return small_domain(target, planned.recipe, known, declared=declared, progress=progress)
    construct = cross_attention if len(target.domains) == 2 else self_attention
    return construct(target, planned.recipe, known, declared=declared, progress=progress)
