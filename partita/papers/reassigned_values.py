"""Proposition 3.3: attention reassigns values to the cells, constant or affine."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import ArrayLike

from partita.arithmetic.rounding import add_up, exp_up, mul_up
from partita.errors import ShapeError, UnsupportedError
from partita.geometry.domains import Array, Box, BoxLike
from partita.geometry.partitions import MaxAffine
from partita.heads.layers import SelfNetwork
from partita.heads.scattered_head import ScatteredHead
from partita.heads.tokenwise_layers import DOMINATED, tokenwise_layers
from partita.papers.tokenwise_head import build_tokenwise
from partita.proofs.claim import Construction
from partita.proofs.form_rounding import layers_rounding

__all__ = ["reassignment", "reassignment_layers"]


def reassignment(
    partition: MaxAffine,
    values: ArrayLike,
    domain: BoxLike,
    *,
    margin: float,
    tolerance: float,
    value_slopes: ArrayLike | None = None,
    dtype: torch.dtype = torch.float64,
) -> Construction:
    """Proposition 3.3: a head that is within `tolerance` of `F(x) = V_j` (or `V_j + A_j x`, Figure 2) on cell j.

    `|net(x) − F(x)| ≤ leak · max_{j,k}|V_j − V_k|` where the margin is at least Δ: up to 2‖V‖·ε₀, attained by V = (1, −1)
    (the paper prints ‖V‖ε₀: erratum 1). R is chosen so that this is the tolerance.

    *Theorem*: `reassignment` (3.3).

    Args:
        values: `(N, out)`.
        value_slopes: `(N, out, d)` for affine values in x.
        domain: the box of single tokens.
        margin: Δ.
    """
    domain = Box.of(domain)
    table = np.asarray(values, dtype=np.float64)
    slopes = None if value_slopes is None else np.asarray(value_slopes, dtype=np.float64)
    n = partition.num_cells
    if (
        table.ndim != 2
        or len(table) != n
        or (slopes is not None and slopes.shape != (*table.shape, partition.dimension))
    ):
        raise ShapeError(
            f"values have shape {table.shape} for {n} cells in R^{partition.dimension}; expected ({n}, out), "
            f"and slopes ({n}, out, d)."
        )
    spread = _spread(table, slopes, domain)
    return build_tokenwise(
        partition,
        table,
        slopes,
        domain,
        margin=margin,
        tolerance=tolerance,
        spread=spread,
        dtype=dtype,
        theorem="reassignment",
    )


def reassignment_layers(construction: Construction, tokens: int, *, token_leak: float = 1e-12) -> SelfNetwork:
    """The paper's layers of Propositions 3.2 and 3.3 for sequences of `tokens` tokens; see `tokenwise_layers`.

    Their `error_bound` is the certificate's plus what these layers round, plus `token_leak` times the spread of the values where
    those are affine. It holds where the certificate does. Constant values need at least as many components as tokens: where the
    partition has fewer, dominated ones are added, which hold less than e^{−45} of the mass.

    Args:
        token_leak: the mass that affine values may lose to other tokens, `S = ln((n−1)/leak)`.
    """
    head = construction.head
    if not isinstance(head, ScatteredHead):
        raise UnsupportedError(
            "this head has no token-wise layers; only the heads of Propositions 3.2 and 3.3 have them."
        )
    sharpness = math.log(max(tokens - 1, 1) / token_leak) * (1 + 2.0**-50)
    network, scores = tokenwise_layers(head, tokens, token_sharpness=sharpness), head.affine_scores()
    (token,) = construction.certificate.domain["arguments"]
    ends = (np.tile(np.asarray(token[end], dtype=np.float64), tokens) for end in ("lo", "hi"))
    rounded = layers_rounding(network, *ends, offset_error=scores.offset_error, value_error=scores.value_error)
    leaked = mul_up(token_leak, rounded.spread) if head.value_slopes is not None and tokens > 1 else 0.0
    padded = mul_up(exp_up(-DOMINATED), rounded.spread) if tokens > head.num_keys else 0.0
    rounding = add_up(rounded.bound(), leaked, padded)
    return network.claiming(error_bound=add_up(construction.certificate.error_bound, rounding), rounding=rounding)


def _spread(values: Array, slopes: Array | None, domain: Box) -> float:
    """`max_{x,j,k} |V_j(x) − V_k(x)|_∞` over the box, from the ends of each affine piece."""
    low = high = values
    if slopes is not None:
        middle, radius = (domain.lo + domain.hi).ravel() / 2, domain.sides / 2
        center = values + slopes @ middle
        low, high = center - np.abs(slopes) @ radius, center + np.abs(slopes) @ radius
    return float((high.max(axis=0) - low.min(axis=0)).max()) * (1 + 1e-12)
