"""Propositions 3.2 and 3.3 as weights: one partition of R^d, every token of a sequence looked up at once."""

from __future__ import annotations

import math

import numpy as np
import torch

from partita.errors import UnsupportedError
from partita.geometry.domains import Array
from partita.heads.forms import require_scalars
from partita.heads.layers import LinearSum, SelfAttention, SelfNetwork
from partita.heads.scattered_head import ScatteredHead

__all__ = ["DOMINATED", "tokenwise_layers"]

DOMINATED = 45.0  # of the exponent: components that are added hold less than e^{−45} together


def tokenwise_layers(
    head: ScatteredHead,
    tokens: int,
    *,
    token_sharpness: float = 0.0,
    encodings: Array | None = None,
    dtype: torch.dtype | None = None,
) -> SelfNetwork:
    """`X ↦ [F(X_1), …, F(X_n)]` as the paper's layers, F the head's reassignment of values to its cells.

    Constant values: section A.2 with its block sizes corrected (erratum 2), N ≥ n columns:
    `Linear(X) = [X 0; I_N]`, `W_K = [0 a_j; 0 b_j]`, `W_Q = R[I_d 0; 0 1_n 0]`, `W_V = [0 V_j]`, `W_O = [I_n; 0]`.
    The paper assumes N ≥ n without loss of generality. Where there are fewer cells than tokens, components are added that are
    dominated everywhere (`_padded`).
    Affine values (Figure 2): a column per cell *and* token, since a column's value depends on one token; scores get
    `S·[same token]`, and `(n−1)e^{−S}` of the mass leaks to other tokens.

    Args:
        tokens: n.
        token_sharpness: S, for affine values with n > 1.
        encodings: e, `(tokens, d)`, added to the tokens, for constant values: the first columns of R.
        dtype: of the layers; that of the head if None.

    Raises:
        SizeError: layers of more than 2 GiB.
        UnsupportedError: no tokens.
    """
    if tokens < 1:
        raise UnsupportedError(f"tokens is {tokens}; expected a number of tokens ≥ 1.")
    affine = head.value_slopes is not None
    columns = head.num_keys * tokens if affine else max(head.num_keys, tokens)
    held = (
        columns * (head.num_keys * tokens + 2 * (head.dimension + tokens) + head.num_outputs) if affine else columns**2
    )
    require_scalars(held, f"token-wise layers of {head.num_keys:,} cells for {tokens:,} tokens", "run the head itself")
    scores = head.affine_scores()
    d, r = head.dimension, head.sharpest_rate()
    slopes, offsets, values = scores.slopes / r, scores.offsets / r, scores.values
    out = values.shape[1]
    if scores.value_slopes is None:
        slopes, offsets, values = _padded(slopes, offsets, values, tokens, r)
        cells = len(offsets)
        constant = np.vstack([np.zeros((d, cells)), np.eye(cells)])
        if encodings is not None:
            constant[:d, :tokens] = encodings.T
        left, right = _copy_tokens(d, tokens, cells, height=d + cells)
        w_k = np.hstack([np.zeros((d + 1, d)), np.vstack([slopes.T, offsets])])
        w_q = np.zeros((d + 1, d + cells))
        w_q[:d, :d] = r * np.eye(d)
        w_q[d, d : d + tokens] = r
        w_v = np.hstack([np.zeros((out, d)), values.T])
        w_o = np.eye(cells, tokens)
    else:
        left, right, constant, w_k, w_q, w_v, w_o = _affine_blocks(
            slopes, offsets, scores.values, scores.value_slopes, tokens, r, token_sharpness
        )
    tensors = [
        torch.as_tensor(np.ascontiguousarray(a)).to(dtype or head.dtype)
        for a in (left, right, constant, w_k, w_q, w_v, w_o)
    ]
    linear = LinearSum(*tensors[:3])
    attention = SelfAttention(w_k=tensors[3], w_q=tensors[4], w_v=tensors[5], w_o=tensors[6])
    return SelfNetwork(linear, attention, form="tokenwise", input_shape=(tokens, d), output_shape=(tokens, out))


def _padded(slopes: Array, offsets: Array, values: Array, cells: int, r: float) -> tuple[Array, Array, Array]:
    """At least so many cells. The added ones are the first one, lowered so far that together they hold less than e^{−45}.

    `s_0 − T/R ≤ max_j s_j − T/R` everywhere, so an added cell never wins, and all k of them hold at most `k e^{−T}` of the mass,
    T = ln k + 45. *Theorem*: `indicator`.
    """
    extra = max(cells - len(offsets), 0)
    if not extra:
        return slopes, offsets, values
    lowered = offsets[0] - (math.log(extra) + DOMINATED) / r
    return (
        np.vstack([slopes, np.repeat(slopes[:1], extra, axis=0)]),
        np.append(offsets, np.full(extra, lowered)),
        np.vstack([values, np.repeat(values[:1], extra, axis=0)]),
    )


def _copy_tokens(d: int, tokens: int, columns: int, *, height: int) -> tuple[Array, Array]:
    """One term `[I_d; 0] X [I_n 0]`: the sequence in the first rows and columns."""
    return np.eye(height, d)[None], np.eye(tokens, columns)[None]


def _affine_blocks(
    slopes: Array, offsets: Array, values: Array, value_slopes: Array, tokens: int, r: float, s: float
) -> tuple[Array, Array, Array, Array, Array, Array, Array]:
    """Column (j, i) holds `V_j + A_j X_i`; rows: X (queries), ones, query tokens | a_j, b_j, key tokens | values."""
    (cells, d), out = slopes.shape, values.shape[1]
    columns, head_rows = cells * tokens, d + 1 + tokens
    height = 2 * head_rows + out
    constant = np.zeros((height, columns))
    constant[d, :tokens] = 1.0
    constant[d + 1 : head_rows, :tokens] = np.eye(tokens)
    of_cell = np.repeat(np.arange(cells), tokens)
    constant[head_rows : head_rows + d] = slopes[of_cell].T
    constant[head_rows + d] = offsets[of_cell]
    constant[head_rows + d + 1 : 2 * head_rows] = np.tile(np.eye(tokens), cells)
    constant[2 * head_rows :] = values[of_cell].T
    copy_left, copy_right = _copy_tokens(d, tokens, columns, height=height)
    left, right = np.zeros((cells, height, d)), np.zeros((cells, tokens, columns))
    for j in range(cells):  # P_j Z Q_j puts A_j X into the value rows of the columns of cell j
        left[j, 2 * head_rows :] = value_slopes[j]
        right[j, :, j * tokens : (j + 1) * tokens] = np.eye(tokens)
    w_k = np.zeros((head_rows, height))
    w_k[:, head_rows : 2 * head_rows] = np.eye(head_rows)
    w_q = np.zeros((head_rows, height))
    w_q[: d + 1, : d + 1] = r * np.eye(d + 1)
    w_q[d + 1 :, d + 1 : head_rows] = s * np.eye(tokens)
    w_v = np.eye(out, height, k=2 * head_rows)
    return (
        np.vstack([copy_left, left]),
        np.vstack([copy_right, right]),
        constant,
        w_k,
        w_q,
        w_v,
        np.eye(columns, tokens),
    )
