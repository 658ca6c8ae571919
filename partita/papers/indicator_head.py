"""Proposition 3.2: the attention matrix indicates the cell."""

from __future__ import annotations

import numpy as np
import torch

from partita.geometry.domains import Box, BoxLike
from partita.geometry.partitions import MaxAffine
from partita.papers.tokenwise_head import build_tokenwise
from partita.proofs.claim import Construction

__all__ = ["indicator"]


def indicator(
    partition: MaxAffine, domain: BoxLike, *, margin: float, epsilon: float, dtype: torch.dtype = torch.float64
) -> Construction:
    """Proposition 3.2: `|softmax(R s(x)) − E(x)|_∞ ≤ (N−1)e^{−RΔ} ≤ ε` wherever the best score leads by Δ.

    The head's values are the unit vectors, so its output *is* the softmax. `R = (ln(N−1) − ln ε)/Δ`: the paper
    multiplies by Δ (erratum 1). Near the boundaries, where the margin is below Δ, nothing is claimed.

    *Theorem*: `indicator` (3.2).

    Args:
        partition: N affine scores on R^d.
        domain: the box of single tokens.
        margin: Δ.
        epsilon: ε.
    """
    domain = Box.of(domain)
    values = np.eye(partition.num_cells)
    return build_tokenwise(
        partition, values, None, domain, margin=margin, tolerance=epsilon, spread=1.0, dtype=dtype, theorem="indicator"
    )
