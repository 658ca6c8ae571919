"""What Propositions 3.2 and 3.3 share: one softmax over the cells of a max-affine function, token by token."""

from __future__ import annotations

import numpy as np
import torch

from partita.arithmetic.rounding import add_up, expm1_up, mul_up
from partita.attention.scattered_head import ScatteredHead
from partita.certify.certificate import Assumption, Certificate, Term, model_digest, total
from partita.certify.deployment import UNIT_ROUNDOFF
from partita.constructions.construction import Construction, describe_domain, environment, semantics_of
from partita.geometry.domains import Array, Box
from partita.geometry.moments import leakage, temperature_for_leakage
from partita.geometry.partitions import MaxAffine

__all__ = ["build_tokenwise"]


def build_tokenwise(
    partition: MaxAffine,
    values: Array,
    slopes: Array | None,
    domain: Box,
    *,
    margin: float,
    tolerance: float,
    spread: float,
    dtype: torch.dtype,
    theorem: str,
) -> Construction:
    """The head with R just large enough that `leak · spread` stays below 0.9 of the tolerance where the margin is Δ."""
    leak_allowed = min(0.5, 0.9 * tolerance / spread) if spread else 0.5
    rate = max(temperature_for_leakage(partition.num_cells, margin, leak_allowed), 1.0 / margin)
    diagram = partition.to_power_diagram()
    at_center = values if slopes is None else values + np.einsum("com,cm->co", slopes, diagram.centers)
    head = ScatteredHead(
        torch.tensor(diagram.centers, dtype=dtype),
        rate,
        torch.tensor(at_center, dtype=dtype),
        powers=torch.tensor(diagram.powers, dtype=dtype),
        value_slopes=None if slopes is None else torch.tensor(slopes, dtype=dtype),
        input_shapes=((partition.dimension,),),
        output_shape=(values.shape[1],),
    )
    semantics = semantics_of(dtype)
    far = np.maximum(np.abs(domain.lo.ravel() - diagram.centers), np.abs(domain.hi.ravel() - diagram.centers))
    largest = np.abs(at_center) if slopes is None else np.abs(at_center) + np.einsum("com,cm->co", np.abs(slopes), far)
    terms = _terms(
        diagram.centers, diagram.powers, far, rate, margin, spread, float(largest.max()) * (1 + 1e-12), semantics
    )
    certificate = Certificate(
        kind="proved",
        norm="inf",
        semantics=semantics,
        tolerance=tolerance,
        error_bound=total(terms),
        terms=tuple(terms),
        assumptions=(
            Assumption(
                f"the best score leads by at least {margin:g} (nothing is claimed nearer to a boundary)", "construction"
            ),
        ),
        theorem=theorem,
        function={"type": "piecewise", "cells": partition.num_cells},
        domain={"arguments": [describe_domain(domain)], "margin": margin},
        model={"sha256": model_digest(head.state_dict()), "type": "scattered", "rate": rate},
        environment=environment(),
    )
    return Construction(head, partition, certificate)


def _terms(
    centers: Array, powers: Array, far: Array, rate: float, margin: float, spread: float, largest: float, semantics: str
) -> list[Term]:
    """Leakage, what rounding adds to it, and summation; `far` bounds |x − c_j| per cell and axis, `largest` every summand."""
    u, cells = UNIT_ROUNDOFF[semantics], len(centers)
    leak = leakage(cells, rate, margin)
    score = float(((far**2).sum(axis=1) + np.abs(powers)).max()) * rate / 2
    stored = float((far * np.abs(centers)).sum(axis=1).max()) * rate  # what rounding centers and x to the dtype moves
    delta = mul_up(u, add_up(mul_up(float(centers.shape[1] + 8), score), mul_up(4.0, stored), 16.0))
    rounding = mul_up(leak, expm1_up(min(mul_up(2.0, delta), 700.0)), spread)
    return [
        Term(
            "leakage",
            mul_up(leak, spread),
            "(N−1)e^{−RΔ} · max|V_j − V_k|",
            "indicator",
            {"leak": leak, "spread": spread},
        ),
        Term("score rounding", rounding, "(e^{2δ} − 1) · leakage", "score-rounding", {"delta": delta}),
        Term(
            "summation",
            mul_up(1.01, float(cells + centers.shape[1] + 16), u, largest),
            "γ_K · max|V|",
            "score-rounding",
            {"u": u},
        ),
    ]
