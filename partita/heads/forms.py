"""Theorem 4.1 and Theorem 4.2 as weights: the paper's log form and the indexed form, for both attentions.

All take the same data, scores and values per cell, and return the paper's layers with every tensor named.
Notation: G cells, input `d × n` (`m = dn` flat, token-major), output `d_o × n_o`.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from partita.errors import SizeError, UnsupportedError
from partita.geometry.domains import Array
from partita.heads.head import FoldedHead, count_text
from partita.heads.layers import CrossAttention, CrossNetwork, LinearSum, SelfAttention, SelfNetwork
from partita.heads.scores import AffineScores

__all__ = [
    "LOG_FORM_COLUMNS",
    "indexed_cross",
    "indexed_self",
    "literal_layers",
    "log_cross",
    "log_self",
    "require_scalars",
    "token_mixing",
]

LOG_FORM_COLUMNS = 8192  # the identity block is (2 d G)²: half a gigabyte in float64
_SCALARS = 1 << 28  # that the indexed and the token-wise layers may hold


def literal_layers(head: FoldedHead, form: str, dtype: torch.dtype | None = None) -> SelfNetwork | CrossNetwork:
    """The head as the paper's layers: `form` is "log" (the paper's) or "indexed" (ours); `dtype` that of the head if None."""
    if form not in ("log", "indexed"):
        raise UnsupportedError(f"form is {form!r}; expected 'log' (the paper's construction) or 'indexed' (ours).")
    if form == "log":
        _refuse_log(2 * _matrix_shape(head.output_shape)[0] * head.num_keys, _matrix_shape(head.output_shape)[1])
    else:
        _refuse_indexed(head.num_keys * _matrix_shape(head.output_shape)[1], head.dimension + head.num_outputs)
    scores, r, dtype = head.affine_scores(), head.sharpest_rate(), dtype or head.dtype
    if len(head.input_shapes) == 1:
        build = log_self if form == "log" else indexed_self
        return build(
            scores,
            input_shape=head.input_shapes[0],
            output_shape=head.output_shape,
            inverse_temperature=r,
            dtype=dtype,
        )
    build_cross = log_cross if form == "log" else indexed_cross
    return build_cross(
        scores,
        input_shapes=(head.input_shapes[0], head.input_shapes[1]),
        output_shape=head.output_shape,
        inverse_temperature=r,
        dtype=dtype,
    )


def _matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """(dim, tokens) of a shape: a scalar is 1 × 1, a vector is one token."""
    return (1, 1) if not shape else (shape[0], 1) if len(shape) == 1 else (shape[1], shape[0])


def _placed(rows: dict[int, Array], shape: tuple[int, int], height: int) -> tuple[Array, Array]:
    """P and Q of a Linear whose row `i` is `rows[i] z`, `rows[i]` of shape `(columns, m)`: one term per row and coordinate.

    The term of row i and coordinate (token t, feature c) is `(e_i e_cᵀ) Z (e_t rows[i][:, t·d + c]ᵀ)`; zero terms are left out.
    """
    d, n = shape
    columns = next(iter(rows.values())).shape[0]
    terms = [(i, k) for i, coefficients in rows.items() for k in range(d * n) if coefficients[:, k].any()] or [(0, 0)]
    left, right = np.zeros((len(terms), height, d)), np.zeros((len(terms), n, columns))
    for index, (i, k) in enumerate(terms):
        left[index, i, k % d] = 1.0
        right[index, k // d] = rows[i][:, k] if i in rows else 0.0
    return left, right


def _tensors(dtype: torch.dtype, **arrays: Array) -> dict[str, Tensor]:
    return {name: torch.as_tensor(np.ascontiguousarray(a)).to(dtype) for name, a in arrays.items()}


def _linear(rows: dict[int, Array], shape: tuple[int, int], constant: Array, dtype: torch.dtype) -> LinearSum:
    left, right = _placed(rows, shape, constant.shape[0])
    return LinearSum(**_tensors(dtype, left=left, right=right, constant=constant))


def _refuse_log(columns: int, tokens_out: int) -> None:
    if columns > LOG_FORM_COLUMNS:
        raise SizeError(
            f"the log form needs {count_text(columns)} columns and an identity block of {count_text(columns)}² numbers "
            f"({count_text(8 * columns**2 // 2**30)} GiB); the limit is {LOG_FORM_COLUMNS:,} columns. Use form='indexed', "
            f"or a larger tolerance."
        )
    if tokens_out > columns:
        raise UnsupportedError(
            f"the log form needs at least as many columns ({columns}) as output tokens ({tokens_out})."
        )


def _refuse_affine(scores: AffineScores) -> None:
    if scores.value_slopes is not None:
        raise UnsupportedError(
            "the log form stores values as logarithms, so they cannot be affine in z; use form='indexed'."
        )


def _split_logs(values: Array, d: int, n: int) -> tuple[Array, Array, float]:
    """`ln T`, `ln E` of shape `(n, d·G)` and B, with `T = 1 + V/B`, `E = 1 − V/B` (B.1, B.2), `B = 2 max|V|`.

    B must exceed max|V| strictly (erratum 5); twice it keeps both logarithms within [ln ½, ln 3/2].
    """
    bound = 2 * float(np.abs(values).max()) or 1.0
    ratio = values.reshape(len(values), n, d).transpose(1, 0, 2).reshape(n, -1) / bound
    return np.log1p(ratio), np.log1p(-ratio), bound


def _difference(d: int, n: int, cells: int, bound: float) -> tuple[Array, Array]:
    """`[I…I, −I…−I]` and `W_O = d B I_n` on the first n rows: together they turn `(T − E)/(2d)` into V."""
    identities = np.tile(np.eye(d), cells)
    return np.hstack([identities, -identities]), np.vstack([d * bound * np.eye(n), np.zeros((2 * d * cells - n, n))])


def log_self(
    scores: AffineScores,
    *,
    input_shape: tuple[int, ...],
    output_shape: tuple[int, ...],
    inverse_temperature: float,
    dtype: torch.dtype,
) -> SelfNetwork:
    """The paper's construction (B.5)–(B.15), errata 3–6 corrected: `2 d_o G` columns. *Theorem*: `self-attention`.

    Row 0 of `Linear(Z)` is `v_j·z`, repeated d_o times per cell, twice over; below it `I`. `W_K` adds −|v_j|²/2 and the
    rows `ln T(v_j)ᵀ`, `ln E(v_j)ᵀ`; `W_Q` holds R, R and I_n on the first n columns; `W_V = [0, I…I, −I…−I]`;
    `W_O = d_o B·I` on the first n rows.
    """
    _refuse_affine(scores)
    (d, n), cells, r = _matrix_shape(output_shape), len(scores.offsets), inverse_temperature
    columns = 2 * d * cells
    _refuse_log(columns, n)
    repeated = np.tile(np.repeat(np.arange(cells), d), 2)
    constant = np.vstack([np.zeros((1, columns)), np.eye(columns)])
    log_t, log_e, bound = _split_logs(scores.values, d, n)
    w_k = np.zeros((2 + n, 1 + columns))
    w_k[0, 0] = 1.0
    w_k[1, 1:] = scores.offsets[repeated] / r
    w_k[2:, 1:] = np.hstack([log_t, log_e])
    w_q = np.zeros((2 + n, 1 + columns))
    w_q[:2, 1 : 1 + n] = r
    w_q[2:, 1 : 1 + n] = np.eye(n)
    signs, w_o = _difference(d, n, cells, bound)
    w_v = np.hstack([np.zeros((d, 1)), signs])
    linear = _linear({0: scores.slopes[repeated] / r}, _matrix_shape(input_shape), constant, dtype)
    attention = SelfAttention(**_tensors(dtype, w_k=w_k, w_q=w_q, w_v=w_v, w_o=w_o))
    return SelfNetwork(linear, attention, form="log", input_shape=input_shape, output_shape=output_shape)


def token_mixing(tokens: int) -> tuple[float, Array]:
    """S and `q⁻¹` for `q = softmax(S·I)`: what the indexed form's `W_O` undoes exactly. S = ln n + 5, and 0 for one token.

    `q⁻¹ = ((e^S + n − 1)I − 11ᵀ)/(e^S − 1)`.
    """
    if tokens == 1:
        return 0.0, np.ones((1, 1))
    s = math.log(tokens) + 5
    return s, ((math.exp(s) + tokens - 1) * np.eye(tokens) - 1) / math.expm1(s)


def _refuse_indexed(columns: int, rows: int) -> None:
    require_scalars(
        rows * columns, f"the indexed form, {rows:,} × {count_text(columns)} numbers", "run the folded head"
    )


def require_scalars(scalars: int, what: str, instead: str) -> None:
    """A SizeError, before anything is allocated, if layers would hold more than 2²⁸ numbers."""
    if scalars > _SCALARS:
        raise SizeError(
            f"{what} would take {count_text(8 * scalars // 2**30)} GiB in float64; the limit is {8 * _SCALARS // 2**30} GiB. "
            f"{instead[0].upper()}{instead[1:]}, or compile with a larger tolerance."
        )


def _value_rows(scores: AffineScores, d: int, n: int, first: int) -> tuple[dict[int, Array], Array]:
    """Rows of Linear that hold `V_j[i]` in column (j, i): constants `(d, G·n)` and, if affine, their slopes by row."""
    constants = scores.values.reshape(-1, d).T
    if scores.value_slopes is None:
        return {}, constants
    slopes = scores.value_slopes.reshape(len(scores.values) * n, d, -1)
    return {first + c: slopes[:, c] for c in range(d)}, constants


def indexed_self(
    scores: AffineScores,
    *,
    input_shape: tuple[int, ...],
    output_shape: tuple[int, ...],
    inverse_temperature: float,
    dtype: torch.dtype,
) -> SelfNetwork:
    """Ours: `n_o G` columns, no logarithms, no identity block, values may be affine in z. *Theorem*: `indexed-form`.

    Column (j, i) scores `R s_j(z) + S·[i is the output token]` and holds `V_j[i]`. The weights factorise, so the leak between
    tokens is the constant matrix q = softmax(S·I), and `W_O = [q⁻¹; 0]` undoes it. Rows of `Linear(Z)`: the score;
    n one-hot rows that name the column's token; d value rows; a row of ones and n one-hot rows on the first n columns (queries):
    2n + d + 2 in all, `d_attn = n + 1`.
    """
    (d, n), cells, r = _matrix_shape(output_shape), len(scores.offsets), inverse_temperature
    columns, height = n * cells, 2 * n + d + 2
    affine, values = _value_rows(scores, d, n, 1 + n)
    _refuse_indexed(columns, height + math.prod(input_shape) * _matrix_shape(input_shape)[1] * (1 + len(affine)))
    s, unmix = token_mixing(n)
    of_cell = np.repeat(np.arange(cells), n)
    constant = np.zeros((height, columns))
    constant[0] = scores.offsets[of_cell] / r
    constant[1 : 1 + n] = np.tile(np.eye(n), cells)
    constant[1 + n : 1 + n + d] = values
    constant[1 + n + d, :n] = 1.0
    constant[2 + n + d :, :n] = np.eye(n)
    w_k = np.eye(1 + n, height)
    w_q = np.zeros((1 + n, height))
    w_q[0, 1 + n + d] = r
    w_q[1:, 2 + n + d :] = s * np.eye(n)
    w_v = np.eye(d, height, k=1 + n)
    w_o = np.vstack([unmix, np.zeros((columns - n, n))])
    linear = _linear({0: scores.slopes[of_cell] / r, **affine}, _matrix_shape(input_shape), constant, dtype)
    attention = SelfAttention(**_tensors(dtype, w_k=w_k, w_q=w_q, w_v=w_v, w_o=w_o))
    return SelfNetwork(linear, attention, form="indexed", input_shape=input_shape, output_shape=output_shape)


def _query_side(input_shape: tuple[int, ...], n: int, columns: int, dtype: torch.dtype) -> LinearSum:
    """`Linear_Q(Z_Q)`: m rows z_Q, a row of ones and I_n, all on the first n of the columns, zeros beyond."""
    d, tokens = _matrix_shape(input_shape)
    m = d * tokens
    rows = {}
    for k in range(m):
        rows[k] = np.zeros((columns, m))
        rows[k][:n, k] = 1.0
    constant = np.zeros((m + 1 + n, columns))
    constant[m, :n] = 1.0
    constant[m + 1 :, :n] = np.eye(n)
    return _linear(rows, (d, tokens), constant, dtype)


def log_cross(
    scores: AffineScores,
    *,
    input_shapes: tuple[tuple[int, ...], tuple[int, ...]],
    output_shape: tuple[int, ...],
    inverse_temperature: float,
    dtype: torch.dtype,
) -> CrossNetwork:
    """Theorem 4.2 with the paper's logarithms: `2 d_o G_K G_Q` columns, errata 6 and 9 corrected. *Theorem*: `cross-attention`.

    The score of a pair of cells is `v_K·z_K + v_Q·z_Q + offset`. `v_K·z_K` is a row of `Linear_K`; v_Q sits in the key as a
    constant (m rows; the paper's one-hot needs G) and meets z_Q in the query; R is counted once.
    """
    _refuse_affine(scores)
    (d, n), cells, r = _matrix_shape(output_shape), len(scores.offsets), inverse_temperature
    m_k, m_q = math.prod(input_shapes[0]), math.prod(input_shapes[1])
    columns = 2 * d * cells
    _refuse_log(columns, n)
    repeated = np.tile(np.repeat(np.arange(cells), d), 2)
    constant = np.vstack([np.eye(columns), np.zeros((1, columns))])
    linear_k = _linear({columns: scores.slopes[repeated, :m_k] / r}, _matrix_shape(input_shapes[0]), constant, dtype)
    log_t, log_e, bound = _split_logs(scores.values, d, n)
    w_k = np.zeros((2 + m_q + n, columns + 1))
    w_k[0, columns] = 1.0
    w_k[1, :columns] = scores.offsets[repeated] / r
    w_k[2 : 2 + m_q, :columns] = scores.slopes[repeated, m_k:].T / r
    w_k[2 + m_q :, :columns] = np.hstack([log_t, log_e])
    w_q = np.zeros((2 + m_q + n, m_q + 1 + n))
    w_q[:2, m_q] = r
    w_q[2 : 2 + m_q, :m_q] = r * np.eye(m_q)
    w_q[2 + m_q :, m_q + 1 :] = np.eye(n)
    signs, w_o = _difference(d, n, cells, bound)
    w_v = np.hstack([signs, np.zeros((d, 1))])
    attention = CrossAttention(**_tensors(dtype, w_k=w_k, w_q=w_q, w_v=w_v, w_o=w_o))
    linears = (linear_k, _query_side(input_shapes[1], n, columns, dtype))
    return CrossNetwork(linears, attention, form="log", input_shapes=input_shapes, output_shape=output_shape)


def indexed_cross(
    scores: AffineScores,
    *,
    input_shapes: tuple[tuple[int, ...], tuple[int, ...]],
    output_shape: tuple[int, ...],
    inverse_temperature: float,
    dtype: torch.dtype,
) -> CrossNetwork:
    """Theorem 4.2 in the indexed form: `n_o G_K G_Q` columns, `d_attn = 1 + m_Q + n_o`, n_o query columns.
    *Theorem*: `indexed-form`.
    """
    if scores.value_slopes is not None:
        raise UnsupportedError(
            "cross-attention values may depend on z_K only; this head's values are affine in both inputs."
        )
    (d, n), cells, r = _matrix_shape(output_shape), len(scores.offsets), inverse_temperature
    m_k, m_q = math.prod(input_shapes[0]), math.prod(input_shapes[1])
    columns, height = n * cells, 1 + m_q + n + d
    on_keys, on_queries = m_k * _matrix_shape(input_shapes[0])[1], m_q * (m_q + _matrix_shape(input_shapes[1])[1])
    _refuse_indexed(columns, height + on_keys + on_queries)
    s, unmix = token_mixing(n)
    of_cell = np.repeat(np.arange(cells), n)
    constant = np.zeros((height, columns))
    constant[0] = scores.offsets[of_cell] / r
    constant[1 : 1 + m_q] = scores.slopes[of_cell, m_k:].T / r
    constant[1 + m_q : 1 + m_q + n] = np.tile(np.eye(n), cells)
    constant[1 + m_q + n :] = scores.values.reshape(-1, d).T
    linear_k = _linear({0: scores.slopes[of_cell, :m_k] / r}, _matrix_shape(input_shapes[0]), constant, dtype)
    w_k = np.eye(1 + m_q + n, height)
    w_q = np.zeros((1 + m_q + n, m_q + 1 + n))
    w_q[0, m_q] = r
    w_q[1 : 1 + m_q, :m_q] = r * np.eye(m_q)
    w_q[1 + m_q :, m_q + 1 :] = s * np.eye(n)
    w_v = np.eye(d, height, k=1 + m_q + n)
    attention = CrossAttention(**_tensors(dtype, w_k=w_k, w_q=w_q, w_v=w_v, w_o=unmix))
    linears = (linear_k, _query_side(input_shapes[1], n, n, dtype))
    return CrossNetwork(linears, attention, form="indexed", input_shapes=input_shapes, output_shape=output_shape)
