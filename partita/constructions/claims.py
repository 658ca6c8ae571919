"""The certificate of a construction whose function is known exactly: a ramp, a gate, a network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from partita.certify.certificate import Certificate, Term, model_digest, total
from partita.constructions.construction import describe_domain, environment, platform_assumption, semantics_of
from partita.geometry.domains import Box

__all__ = ["proved_claim"]


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
