"""The certificate of a construction whose function is known exactly: a ramp, a gate, a network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from partita.errors import DomainError
from partita.geometry.domains import Box
from partita.proofs.certificate import Certificate, Term, model_digest, total
from partita.proofs.construction import describe_domain, environment, platform_assumption, semantics_of

__all__ = ["LEAST", "proved_claim", "require_ordinary"]

LEAST = {torch.float64: 2.0**-1074, torch.float32: 2.0**-149}  # what a product may lose to underflow


def require_ordinary(dtype: torch.dtype, **numbers: float) -> None:
    """A DomainError for a number so small or large that the dtype's relative precision does not hold around it.

    Proofs of rounding count relative errors; within a factor 2²⁰ of underflow and 16 of overflow they would be wrong.
    """
    least, most = 2.0**20 * torch.finfo(dtype).tiny, torch.finfo(dtype).max / 16
    for name, number in numbers.items():
        if not least <= number <= most:
            raise DomainError(
                f"{name.replace('_', ' ')} = {number:.3g} in {semantics_of(dtype)}; expected a number from {least:.2g} to "
                f"{most:.2g}. Rescale the variables{', or use float64' if dtype == torch.float32 else ''}."
            )


def proved_claim(
    terms: Sequence[Term],
    domain: Box,
    model: nn.Module,
    *,
    dtype: torch.dtype,
    theorem: str,
    function: Mapping[str, Any],
    details: Mapping[str, Any],
    facts: Mapping[str, float] | None = None,
    tolerance: float | None = None,
) -> Certificate:
    """`proved`, in the supremum norm, for the model's tensors as evaluated in `dtype`; the bound is the sum of the terms.

    Args:
        function: what is approximated, `details`: what the model is, as JSON. tolerance: asked; the bound itself if nobody did.
    """
    return Certificate(
        kind="proved",
        norm="inf",
        semantics=semantics_of(dtype),
        tolerance=total(terms) if tolerance is None else float(tolerance),
        error_bound=total(terms),
        terms=tuple(terms),
        assumptions=(platform_assumption(dtype),),
        theorem=theorem,
        function=function,
        domain={"arguments": [describe_domain(domain)]},
        model={"sha256": model_digest(model.state_dict()), **details},
        facts=facts or {},
        environment=environment(),
    )
