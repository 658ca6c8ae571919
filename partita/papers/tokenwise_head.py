"""What Propositions 3.2 and 3.3 share: one softmax over the cells of a max-affine function, token by token."""

from __future__ import annotations

import numpy as np
import torch

from partita.arithmetic.arguments import require_dtype, require_number
from partita.arithmetic.precision import Precision
from partita.arithmetic.rounding import add_up, exp_up, mul_up
from partita.errors import ToleranceError
from partita.geometry.domains import Array, Box
from partita.geometry.moments import leakage, temperature_for_leakage
from partita.geometry.partitions import MaxAffine, PowerDiagram
from partita.heads.scattered_head import ScatteredHead, exponent_cut
from partita.proofs.certificate import Assumption, Term, total
from partita.proofs.claim import Construction, claim
from partita.proofs.running import running_terms

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
    require_dtype(dtype)
    tolerance = require_number("tolerance", tolerance)
    leak_allowed = min(0.5, 0.9 * tolerance / spread) if spread else 0.5
    rate = max(temperature_for_leakage(partition.num_cells, margin, leak_allowed), 1.0 / margin)
    diagram = partition.to_power_diagram()
    at_center = values if slopes is None else values + np.einsum("com,cm->co", slopes, diagram.centers)
    head = _head(diagram, at_center, slopes, rate, dtype)
    far = np.maximum(np.abs(domain.lo.ravel() - diagram.centers), np.abs(domain.hi.ravel() - diagram.centers))
    largest = np.abs(at_center) if slopes is None else np.abs(at_center) + np.einsum("com,cm->co", np.abs(slopes), far)
    leak = leakage(partition.num_cells, rate, margin)
    leaked = Term(
        "leakage", mul_up(leak, spread), "(N−1)e^{−RΔ} · max|V_j − V_k|", "indicator", {"leak": leak, "spread": spread}
    )
    terms = [leaked, *_running(diagram, far, rate, leaked.value, spread, float(largest.max()) * (1 + 1e-12), dtype)]
    if total(terms) > tolerance:
        raise ToleranceError(
            f"tolerance {tolerance:g} is below what can be proved in {Precision.of(dtype).name}: {total(terms):.3g}, of which "
            f"{total(terms[1:]):.3g} is rounding. Use a larger tolerance."
        )
    promise = f"the best score leads by at least {margin:g} (the claim does not cover points nearer to a boundary)"
    certificate = claim(
        head,
        {"type": "piecewise", "cells": partition.num_cells},
        [domain],
        terms,
        dtype=dtype,
        theorem=theorem,
        tolerance=tolerance,
        assumptions=(Assumption(promise, "caller", about="domain"),),
        details={"type": "scattered", "rate": rate},
        facts={"margin": margin},
    )
    return Construction(head, partition, certificate)


def _head(diagram: PowerDiagram, values: Array, slopes: Array | None, rate: float, dtype: torch.dtype) -> ScatteredHead:
    return ScatteredHead(
        torch.tensor(diagram.centers, dtype=dtype),
        rate,
        torch.tensor(values, dtype=dtype),
        powers=torch.tensor(diagram.powers, dtype=dtype),
        value_slopes=None if slopes is None else torch.tensor(slopes, dtype=dtype),
        input_shapes=((diagram.dimension,),),
        output_shape=(values.shape[1],),
    )


def _running(
    diagram: PowerDiagram, far: Array, rate: float, leaked: float, spread: float, largest: float, dtype: torch.dtype
) -> list[Term]:
    """What rounding and leaving cells out add; `far` bounds |x − c_j| per cell and axis, `largest` every summand."""
    u, cells, m = Precision.of(dtype).unit, diagram.num_cells, diagram.dimension
    score = float(((far**2).sum(axis=1) + np.abs(diagram.powers)).max()) * rate / 2
    stored = float((far * np.abs(diagram.centers)).sum(axis=1).max()) * rate  # what storing centers and x moves
    return running_terms(
        leaked,
        mass_left_out=mul_up(float(cells), exp_up(-exponent_cut(cells) * (1 - 1e-6))),
        score_error=mul_up(u, add_up(mul_up(float(m + 8), score), mul_up(4.0, stored), 16.0)),
        operations=float(cells + m + 16),
        unit_roundoff=u,
        largest=largest,
        spread=spread,
        value_error=mul_up(4.0, u, largest) if dtype != torch.float64 else 0.0,
    )
