"""Activations as heads of a few keys with affine values: ReLU and max-affine functions up to the temperature, SiLU, tanh and
sigmoid exactly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import ArrayLike

from partita.arithmetic.arguments import require_dtype
from partita.arithmetic.precision import Precision
from partita.arithmetic.rounding import mul_up
from partita.errors import DomainError, ShapeError, ToleranceError
from partita.functions.graph import Graph, GraphBuilder
from partita.functions.target import graph_target
from partita.geometry.domains import Array, Box, BoxLike
from partita.geometry.partitions import PowerDiagram
from partita.heads.scattered_head import ScatteredHead
from partita.methods.pieces import piecewise_affine, softest_pieces
from partita.proofs.certificate import Term
from partita.proofs.claim import Construction, claim, require_ordinary

__all__ = ["max_affine_head", "relu_head", "sigmoid_head", "silu_head", "tanh_head"]


def max_affine_head(
    slopes: ArrayLike, offsets: ArrayLike, domain: BoxLike, *, tolerance: float, dtype: torch.dtype = torch.float64
) -> Construction:
    """`Σ_j softmax(βy)_j y_j`, `y_j = a_j·x + b_j`: the maximum of N affine functions within `W((N−1)/e)/β`, one key per piece.

    Pieces that are nowhere the largest on the domain need no key. *Theorem*: `max-affine-values`, `soft-maximum`.

    Args:
        slopes: a, `(N, m)`.
        offsets: b, `(N,)`.
        domain: a box in R^m.
        tolerance: what temperature and rounding may take.
    """
    domain = Box.of(domain)
    a, b = np.atleast_2d(np.asarray(slopes, dtype=np.float64)), np.asarray(offsets, dtype=np.float64)
    if a.ndim != 2 or b.shape != a.shape[:1] or a.shape[1:] != domain.shape or not np.isfinite([*a.flat, *b]).all():
        raise ShapeError(
            f"slopes have shape {a.shape}, offsets {b.shape}, the domain {domain.shape}; expected finite (N, m), (N,) and (m,)."
        )
    require_dtype(dtype)
    if not 0 < tolerance < math.inf:
        raise ToleranceError(f"tolerance is {tolerance!r}; expected a number > 0.")
    require_ordinary(dtype, squared_length=_squared(domain))
    graph = _maximum(a, b)
    target = graph_target(graph, (domain,), f"max of {len(a)} affine functions")
    return piecewise_affine(target, softest_pieces(graph, domain, tolerance=tolerance, dtype=dtype))


def relu_head(
    slope: ArrayLike, offset: float, domain: BoxLike, *, tolerance: float, dtype: torch.dtype = torch.float64
) -> Construction:
    """ReLU of `u = w·x + t` in two keys: scores {0, βu}, values {0, u}, so `u·sigmoid(βu)`; error `W(1/e)/β = 0.2785/β`.

    *Theorem*: `max-affine-values`, `soft-maximum`.

    >>> built = relu_head([1.0], 0.0, Box([-1], [1]), tolerance=1e-3)
    >>> built.head.num_keys, built.certificate.error_bound <= 1e-3
    (2, True)
    """
    w = np.asarray(slope, dtype=np.float64)
    return max_affine_head(np.stack([0 * w, w]), [0.0, offset], domain, tolerance=tolerance, dtype=dtype)


def silu_head(slope: ArrayLike, offset: float, domain: BoxLike, *, dtype: torch.dtype = torch.float64) -> Construction:
    """SiLU, `u·sigmoid(u)`, in two keys: scores {0, u}, values {0, u}. Only rounding errs. *Theorem*: `two-keys`."""
    domain = Box.of(domain)
    return _exact(
        slope, offset, domain, "silu", scores=(0.0, 1.0), constants=(0.0, 0.0), multiples=(0.0, 1.0), dtype=dtype
    )


def tanh_head(slope: ArrayLike, offset: float, domain: BoxLike, *, dtype: torch.dtype = torch.float64) -> Construction:
    """tanh u in two keys: scores {−u, u}, values {−1, 1}. Only rounding errs. *Theorem*: `two-keys`."""
    domain = Box.of(domain)
    return _exact(
        slope, offset, domain, "tanh", scores=(-1.0, 1.0), constants=(-1.0, 1.0), multiples=(0.0, 0.0), dtype=dtype
    )


def sigmoid_head(
    slope: ArrayLike, offset: float, domain: BoxLike, *, dtype: torch.dtype = torch.float64
) -> Construction:
    """1/(1 + e^{−u}) in two keys: scores {0, u}, values {0, 1}. Only rounding errs. *Theorem*: `two-keys`."""
    domain = Box.of(domain)
    return _exact(
        slope, offset, domain, "sigmoid", scores=(0.0, 1.0), constants=(0.0, 1.0), multiples=(0.0, 0.0), dtype=dtype
    )


def _squared(domain: Box) -> float:
    """max |x|² over the domain: heads square differences of that size."""
    return float(np.square(np.maximum(np.abs(domain.lo), np.abs(domain.hi))).sum())


def _maximum(a: Array, b: Array) -> Graph:
    builder = GraphBuilder(a.shape[1])
    inputs = [builder.add("input", parameters=(i,)) for i in range(a.shape[1])]
    pieces = [_affine(builder, inputs, row, offset) for row, offset in zip(a, b)]
    top = pieces[0]
    for piece in pieces[1:]:
        top = builder.add("max", top, piece)
    return builder.finish([top], ())


def _affine(builder: GraphBuilder, inputs: Sequence[int], row: Array, offset: float) -> int:
    total_ = builder.add("const", parameters=(float(offset),))
    for i, c in zip(inputs, row):
        term = builder.add("mul", builder.add("const", parameters=(float(c),)), i)
        total_ = builder.add("add", total_, term)
    return total_


def _exact(
    slope: ArrayLike,
    offset: float,
    domain: Box,
    name: str,
    *,
    scores: tuple[float, float],
    constants: tuple[float, float],
    multiples: tuple[float, float],
    dtype: torch.dtype,
) -> Construction:
    """A head with scores `s_j u` and values `c_j + m_j u`, u = w·x + t, as a power diagram of two cells."""
    require_dtype(dtype)
    w = np.asarray(slope, dtype=np.float64)
    if w.shape != domain.shape or not (np.isfinite(w).all() and np.isfinite(offset)):
        raise ShapeError(f"the slope has shape {w.shape}, the domain {domain.shape}; expected finite (m,) for both.")
    if not w.any():
        raise DomainError(f"{name}: the slope is 0; expected a slope that is not 0.")
    require_ordinary(dtype, squared_length=_squared(domain), squared_slope=float(w @ w))
    middle = (domain.lo + domain.hi).ravel() / 2
    s, m = np.array(scores), np.array(multiples)
    away = (s - s.mean())[:, None] * w  # −|x − o − a|²/2 is a·(x − o) up to what is common, with powers |a|²
    centers = torch.tensor(middle + away, dtype=dtype)
    kept = centers.double().numpy() - middle
    powers = (kept**2).sum(axis=1) + 2 * (s - s.mean()) * (w @ middle + offset)
    slopes = torch.tensor(m[:, None, None] * w, dtype=dtype)
    at_middle = np.array(constants) + m * (w @ middle + offset)
    values = at_middle[:, None] + np.einsum("com,cm->co", slopes.double().numpy(), kept)
    head = ScatteredHead(
        centers,
        1.0,
        torch.tensor(values, dtype=dtype),
        powers=torch.tensor(powers, dtype=dtype),
        value_slopes=slopes if m.any() else None,
        input_shapes=(domain.shape,),
        output_shape=(1,),
    )
    certificate = claim(
        head,
        {"type": name},
        [domain],
        _rounding(head, kept, powers, domain, w, offset),
        dtype=dtype,
        theorem="two-keys",
        details={"type": "scattered"},
    )
    return Construction(head, PowerDiagram(centers.double().numpy(), powers), certificate)


def _rounding(head: ScatteredHead, kept: Array, powers: Array, domain: Box, w: Array, offset: float) -> list[Term]:
    """Scores off by δ move `tanh(δ/2)` of the mass between the two values; values and inputs round besides.

    The head squares x − c, |x − o| + |c − o| at most, o the middle. Storing c turns the slope by u|c|, which counts times |x − o|;
    powers hold `w·o + t`, computed in float64.
    """
    u, dim = Precision.of(head.dtype).unit, len(w)
    reach = np.maximum(np.abs(domain.lo), np.abs(domain.hi)).ravel()
    radius = domain.sides.ravel() / 2 * (1 + 1e-6) + 2 * u * reach
    far = radius + np.abs(kept)
    line = float(np.abs(w) @ reach + abs(offset))
    score = float(((far**2).sum(axis=1) + np.abs(powers)).max()) / 2
    stored = float((radius * (reach + np.abs(kept))).sum(axis=1).max())
    delta = mul_up(1.01 * u, (dim + 10) * score + 4 * stored + 2 * (dim + 4) * line + 24)
    slopes = np.zeros((2, 1, dim)) if head.value_slopes is None else head.value_slopes.double().numpy()
    largest = float((np.abs(head.values.double().numpy())[:, 0] + (np.abs(slopes[:, 0]) * far).sum(axis=1)).max())
    at_middle = abs(float(w @ (domain.lo + domain.hi).ravel() / 2 + offset)) + (dim + 4) * u * line
    spread = max(2.0, at_middle + float(np.abs(w) @ radius)) if slopes.any() else 2.0  # |w·x + t|
    values = mul_up(1.01 * u * (dim + 12), largest + line)
    inputs = 0.0 if head.dtype == torch.float64 else mul_up(1.01 * u * 1.1, line)
    return [
        Term(
            "score rounding",
            mul_up(0.5, delta, spread),
            "δ/2 · spread of the values",
            "score-rounding",
            {"delta": delta},
        ),
        Term("value rounding", values, "(dim + 12)u · max|V|", "score-rounding", {"largest": largest}),
        Term("input rounding", inputs, "1.1u · (|w|·|x| + |t|)", "two-keys", {"size": line}),
    ]
