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
from partita.errors import DomainError, ShapeError, ToleranceError
from partita.functions.graph import Graph, GraphBuilder
from partita.functions.target import graph_target
from partita.geometry.domains import Array, Box, BoxLike
from partita.methods.pieces import piecewise_affine, softest_pieces
from partita.methods.two_keys import two_keys_draft, two_keys_head
from partita.proofs.claim import Construction, require_ordinary

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
    """SiLU, `u·sigmoid(u)`, of `u = w·x + t` in two keys: scores {0, u}, values {0, u}. *Theorem*: `two-keys`."""
    return _exact("silu", slope, offset, domain, dtype)


def tanh_head(slope: ArrayLike, offset: float, domain: BoxLike, *, dtype: torch.dtype = torch.float64) -> Construction:
    """tanh of `u = w·x + t` in two keys: scores {−u, u}, values {−1, 1}. Only rounding errs. *Theorem*: `two-keys`."""
    return _exact("tanh", slope, offset, domain, dtype)


def sigmoid_head(
    slope: ArrayLike, offset: float, domain: BoxLike, *, dtype: torch.dtype = torch.float64
) -> Construction:
    """1/(1 + e^{−u}) of `u = w·x + t` in two keys: scores {0, u}, values {0, 1}. Only rounding errs. *Theorem*: `two-keys`."""
    return _exact("sigmoid", slope, offset, domain, dtype)


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


def _exact(name: str, slope: ArrayLike, offset: float, box: BoxLike, dtype: torch.dtype) -> Construction:
    """The head of two keys for an activation of `w·x + t`."""
    require_dtype(dtype)
    w, domain = np.asarray(slope, dtype=np.float64), Box.of(box)
    if w.shape != domain.shape or not (np.isfinite(w).all() and np.isfinite(offset)):
        raise ShapeError(f"the slope has shape {w.shape}, the domain {domain.shape}; expected finite (m,) for both.")
    if not w.any():
        raise DomainError(f"{name}: the slope is 0; expected a slope that is not 0.")
    require_ordinary(dtype, squared_length=_squared(domain), squared_slope=float(w @ w))
    builder = GraphBuilder(len(w))
    inputs = [builder.add("input", parameters=(i,)) for i in range(len(w))]
    line = _affine(builder, inputs, w, offset)
    bent = builder.add("tanh" if name == "tanh" else "sigmoid", line)
    graph = builder.finish([builder.add("mul", line, bent) if name == "silu" else bent], (1,))
    target = graph_target(graph, (domain,), graph.infix())
    return two_keys_head(target, two_keys_draft(target, dtype=dtype))
