"""A ramp as the paper's layers, every tensor named: scores are dot products, so the dtype limits the number of anchors."""

from __future__ import annotations

import math

import numpy as np
import torch

from partita.arithmetic.precision import Precision
from partita.arithmetic.rounding import add_up, expm1_up, mul_up, sqrt_up
from partita.errors import ShapeError, SizeError
from partita.geometry.domains import Array
from partita.geometry.moments import AxisGeometry, distance_bounds, soft_maximum_gap
from partita.heads.layers import LinearSum, SelfAttention, SelfNetwork
from partita.proofs.claim import require_ordinary
from partita.ramps.anchors import ramp_constant
from partita.ramps.single_ramp import Ramp, query_size

__all__ = ["ramp_layers", "refuse_many", "require_ordinary_scores", "rounded_layers"]

_MOST_SCALARS = 1 << 26


def ramp_layers(built: Ramp, tokens: int | None = None) -> SelfNetwork:
    """`Attn ∘ Linear` of a ramp for sequences of `tokens` tokens: n queries, p keys.

    `Linear(X)` has p columns (each anchor several times over if p < n, which changes no weight) and five rows: `u_i − o` and 1
    on the first n columns (queries), `L_k − o`, `−(L_k − o)²/2` (keys) and `L_k` (values), o the middle of [a, b]. `W_K` and
    `W_Q` pick two rows each, W_Q times R; `W_V` puts the last row at the output coordinate; `W_O = [I_n; 0]`.
    Its `error_bound` is the head's approximation plus what dot products round. *Theorem*: `ramp`, `score-rounding`.

    Raises:
        SizeError: more anchors than the dtype's dot products carry (the number is in the message), or tensors too large.
    """
    head = built.head
    n = len(head.slopes) if tokens is None else tokens
    if len(head.slopes) not in (1, n) or n < 1:
        raise ShapeError(f"layers were requested for {n} tokens; this ramp has slopes for {len(head.slopes)}.")
    refuse_many(built)
    w = np.broadcast_to(head.slopes.double().numpy(), (n, head.slopes.shape[1]))
    t = np.broadcast_to(head.offsets.double().numpy(), (n,))
    columns = head.anchors * math.ceil(n / head.anchors)
    if columns * n * (w.shape[1] + 1) > _MOST_SCALARS:
        raise SizeError(
            f"these layers would store matrices of {n:,} × {columns:,} numbers; run the folded head instead."
        )
    low, high = head.ends
    middle, rate = (low + high) / 2, float(head.sharpness) / built.spacing**2
    anchors = np.tile(np.linspace(low, high, head.anchors), columns // head.anchors)
    constant = np.zeros((5, columns))
    constant[0, :n], constant[1, :n] = t - middle, 1.0
    constant[2], constant[3], constant[4] = anchors - middle, -0.5 * (anchors - middle) ** 2, anchors
    left, right = np.zeros((w.shape[1], 5, w.shape[1])), np.zeros((w.shape[1], n, columns))
    for c in range(w.shape[1]):  # the term of coordinate c: w_i[c]·x_i[c] into row 0, column i
        left[c, 0, c] = 1.0
        right[c, np.arange(n), np.arange(n)] = w[:, c]
    w_v = np.zeros((head.out_dim, 5))
    w_v[head.coordinate, 4] = 1.0
    tensors = {
        "w_k": np.eye(2, 5, k=2),
        "w_q": rate * np.eye(2, 5),
        "w_v": w_v,
        "w_o": np.eye(columns, n),
    }
    stored = {name: torch.tensor(a, dtype=head.dtype) for name, a in tensors.items()}
    linear = LinearSum(*(torch.tensor(a, dtype=head.dtype) for a in (left, right, constant)))
    network = SelfNetwork(
        linear,
        SelfAttention(**stored),
        form="ramp",
        input_shape=(n, w.shape[1]),
        output_shape=(n, head.out_dim),
    )
    approximation, rounding = rounded_layers(built, head.anchors, columns)
    return network.claiming(error_bound=add_up(approximation, rounding), rounding=rounding)


def refuse_many(built: Ramp) -> None:
    """A SizeError where rounding would move the output farther than the anchors' spacing does; a DomainError beyond the dtype's
    range.
    """
    head = built.head
    size = query_size(_array(head.slopes), _array(head.offsets), built.domain, head.dtype)
    require_ordinary_scores(head.dtype, head.ends, built.spacing, float(head.sharpness), size)
    approximation, rounding = rounded_layers(built, built.head.anchors, built.head.anchors)
    if rounding <= approximation:
        return
    fits, over = 1, built.head.anchors
    while over - fits > 1:
        middle = (fits + over) // 2
        approximated, rounded = rounded_layers(built, max(middle, 2), max(middle, 2))
        fits, over = (middle, over) if rounded <= approximated else (fits, middle)
    raise SizeError(
        f"{built.head.anchors:,} anchors as dot products in {Precision.of(built.head.dtype).name}: rounding "
        "moves the output by up to "
        f"{rounding:.2g}, the spacing by {approximation:.2g}. At most {fits:,} anchors fit in "
        f"{Precision.of(built.head.dtype).name}. "
        "Run the folded head, which centers its differences, use float64, or shrink the domain."
    )


def require_ordinary_scores(
    dtype: torch.dtype, ends: tuple[float, float], spacing: float, kappa: float, size: float
) -> None:
    """Dot products multiply squares of lengths with `R = κ/Δ²`: all of these must be numbers that the dtype holds well."""
    reach = size + abs(ends[0] + ends[1]) + ends[1] - ends[0]
    require_ordinary(dtype, squared_spacing_over_κ=spacing * spacing / kappa, squared_length=reach * reach)
    rate = kappa / spacing**2
    require_ordinary(dtype, inverse_temperature=rate, largest_query=rate * reach, largest_score=rate * reach * reach)


def rounded_layers(built: Ramp, anchors: int, columns: int) -> tuple[float, float]:
    """The approximation with p anchors, and what rounded dot products add to it.

    A score is off by `δ = 10u·R(|L||u| + L²/2) + 64u`, centred (64u: exp in fused attention kernels is coarser). Either
    `½(e^{2δ} − 1)·√E(u − L)²` is added; or, for hard heads, `E(u − L)² ≤ (Δ/2)² + (2/R)(W((p−1)/e) + 2δ)` replaces the
    approximation.
    """
    head = built.head
    u = Precision.of(head.dtype).unit
    low, high = head.ends
    spacing, kappa = (high - low) / (anchors - 1), float(head.sharpness)
    rate, half = kappa / spacing**2, (high - low) / 2
    size = query_size(_array(head.slopes), _array(head.offsets), built.domain, head.dtype)
    reach = add_up(size, abs(low + high) / 2)
    delta = mul_up(1.01 * u, add_up(mul_up(10 * rate * half, add_up(reach, half / 2)), 64.0))
    approximation = mul_up(spacing * (1 + 1e-12), ramp_constant(anchors, kappa))
    geometry = AxisGeometry(anchors, spacing * (1 - 1e-12), spacing * (1 + 1e-12), 0.0)
    soft = mul_up(0.5, expm1_up(min(2 * delta, 700.0)), distance_bounds(geometry, rate, 2)[0])
    square = add_up(
        (spacing / 2) ** 2 * (1 + 1e-12), mul_up(2 / rate * (1 + 1e-12), soft_maximum_gap(anchors) + 2 * delta)
    )
    hard = max(0.0, sqrt_up(square) - approximation)
    largest = max(abs(low), abs(high))
    sums = mul_up(1.01 * u, add_up(mul_up(w_terms(head.slopes.shape[1]), reach), mul_up(columns + 20.0, largest)))
    return approximation, add_up(min(soft, hard), sums)


def w_terms(dim: int) -> float:
    """Roundings that a query u sees: products and sums of a Linear with `dim` terms, stored slopes, the input."""
    return float(3 * dim + 8)


def _array(tensor: torch.Tensor) -> Array:
    return tensor.double().numpy()
