"""Theorem 4.1 and Theorem 4.2 as weights: the paper's log form and the indexed form, for both attentions.

All take the same data, scores and values per cell, and return the paper's layers with every tensor named.
Notation: G cells, input `d × n` (`m = dn` flat, token-major), output `d_o × n_o`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from partita.errors import SizeError, UnsupportedError
from partita.geometry.domains import Array
from partita.heads.head import FoldedHead, count_text, require_full
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
    require_full(head, "layers()")
    if form == "log":
        _refuse_log(_log_columns(head), _matrix_shape(head.output_shape)[1])
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


@dataclass(frozen=True, eq=False)
class _LogColumns:
    """The columns of the log form, `2 d G` for each carrier: what a column's weight is multiplied with.

    Constant values have one carrier, the number 1: `W_V` adds the columns T and subtracts the columns E, `(T − E)/2 = V/B`.
    Values that are affine in z have an affine part `A_j z`, with one row of Linear for each of its d features:
    - one output token: as `T + E = 2`, the two columns (j, s) hold together the share `w_j/d`, whatever V is. Both hold
      `(A_j z)[s]/B`.
    - several tokens: a column's value cannot depend on the token, but its weight does. Every coordinate z_k that occurs is a
      further carrier: its columns encode `A_j[·, k]` as T and E do V, and hold `±z_k`.

    Attributes:
        cell: `(columns,)`. logs: the rows `ln T`, `ln E` of W_K, `(n, columns)`. signs: `(d, columns)`, the part of W_V.
        tilts: what row s of the affine part multiplies z with, `(columns, m)` each; empty for constant values.
        gain: what W_O multiplies with, `d B` times the number of carriers.
    """

    cell: NDArray[np.int64]
    logs: Array
    signs: Array
    tilts: tuple[Array, ...]
    gain: float

    @classmethod
    def of(cls, scores: AffineScores, d: int, n: int) -> _LogColumns:
        cells, slopes = len(scores.offsets), scores.value_slopes
        of_cell, feature = np.repeat(np.arange(cells), d), np.tile(np.arange(d), cells)
        log_t, log_e, bound = _split_logs(scores.values, d, n)
        identities = np.tile(np.eye(d), cells)
        blocks = [(log_t, identities), (log_e, -identities)]
        if slopes is None:
            tilts: tuple[Array, ...] = ()
        elif n == 1:
            tilts = tuple(np.tile((feature == s)[:, None] * slopes[of_cell, s] / bound, (2, 1)) for s in range(d))
        else:
            parts = [np.zeros((2 * d * cells, slopes.shape[2]))]
            for k in np.flatnonzero(slopes.any(axis=(0, 1))):
                log_t, log_e, size = _split_logs(slopes[:, :, k], d, n)
                blocks += [(log_t, 0 * identities), (log_e, 0 * identities)]
                parts.append(np.repeat([size / bound, -size / bound], d * cells)[:, None] * np.eye(slopes.shape[2])[k])
            rows = np.concatenate(parts)
            tilts = tuple((np.tile(feature, len(blocks)) == s)[:, None] * rows for s in range(d))
        carriers = len(blocks) // 2
        return cls(
            np.tile(of_cell, 2 * carriers),
            np.hstack([logs for logs, _ in blocks]),
            np.hstack([signs for _, signs in blocks]),
            tilts,
            d * bound * carriers,
        )

    def __len__(self) -> int:
        return len(self.cell)

    def value_rows(self, first: int) -> dict[int, Array]:
        """The rows of Linear that hold the affine part, from row `first` on."""
        return {first + s: tilt for s, tilt in enumerate(self.tilts)}

    def w_o(self, n: int) -> Array:
        """`gain · I_n` on the first n rows."""
        return np.vstack([self.gain * np.eye(n), np.zeros((len(self) - n, n))])


def _log_columns(head: FoldedHead) -> int:
    """How many columns the log form of a head has, before anything is allocated."""
    d, n = _matrix_shape(head.output_shape)
    slopes = head.state_dict().get("value_slopes") if n > 1 else None
    carriers = 1 + (0 if slopes is None else int(slopes.ne(0).any(dim=0).any(dim=0).sum()))
    return 2 * d * head.num_keys * carriers


def _split_logs(values: Array, d: int, n: int) -> tuple[Array, Array, float]:
    """`ln T`, `ln E` of shape `(n, d·G)` and B, with `T = 1 + V/B`, `E = 1 − V/B` (B.1, B.2), `B = 2 max|V|`.

    B must exceed max|V| strictly (erratum 5); twice it keeps both logarithms within [ln ½, ln 3/2].
    """
    bound = 2 * float(np.abs(values).max()) or 1.0
    ratio = values.reshape(len(values), n, d).transpose(1, 0, 2).reshape(n, -1) / bound
    return np.log1p(ratio), np.log1p(-ratio), bound


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
    `W_O = d_o B·I` on the first n rows. Values that are affine in z add d_o rows to Linear, which W_V picks (`_LogColumns`).
    """
    (d, n), r = _matrix_shape(output_shape), inverse_temperature
    columns = _LogColumns.of(scores, d, n)
    size = len(columns)
    _refuse_log(size, n)
    more = columns.value_rows(1 + size)
    constant = np.vstack([np.zeros((1, size)), np.eye(size), np.zeros((len(more), size))])
    w_k = np.zeros((2 + n, len(constant)))
    w_k[0, 0] = 1.0
    w_k[1, 1 : 1 + size] = scores.offsets[columns.cell] / r
    w_k[2:, 1 : 1 + size] = columns.logs
    w_q = np.zeros((2 + n, len(constant)))
    w_q[:2, 1 : 1 + n] = r
    w_q[2:, 1 : 1 + n] = np.eye(n)
    w_v = np.hstack([np.zeros((d, 1)), columns.signs, np.eye(d, len(more))])
    rows = {0: scores.slopes[columns.cell] / r, **more}
    linear = _linear(rows, _matrix_shape(input_shape), constant, dtype)
    attention = SelfAttention(**_tensors(dtype, w_k=w_k, w_q=w_q, w_v=w_v, w_o=columns.w_o(n)))
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
    constant (m rows; the paper's one-hot needs G) and meets z_Q in the query; R is counted once. Values may be affine in z_K, as
    in `log_self`.
    """
    (d, n), r = _matrix_shape(output_shape), inverse_temperature
    m_k, m_q = math.prod(input_shapes[0]), math.prod(input_shapes[1])
    scores = _of_keys(scores, m_k)
    columns = _LogColumns.of(scores, d, n)
    size = len(columns)
    _refuse_log(size, n)
    more = columns.value_rows(1 + size)
    constant = np.vstack([np.eye(size), np.zeros((1 + len(more), size))])
    rows = {size: scores.slopes[columns.cell, :m_k] / r, **more}
    linear_k = _linear(rows, _matrix_shape(input_shapes[0]), constant, dtype)
    w_k = np.zeros((2 + m_q + n, len(constant)))
    w_k[0, size] = 1.0
    w_k[1, :size] = scores.offsets[columns.cell] / r
    w_k[2 : 2 + m_q, :size] = scores.slopes[columns.cell, m_k:].T / r
    w_k[2 + m_q :, :size] = columns.logs
    w_q = np.zeros((2 + m_q + n, m_q + 1 + n))
    w_q[:2, m_q] = r
    w_q[2 : 2 + m_q, :m_q] = r * np.eye(m_q)
    w_q[2 + m_q :, m_q + 1 :] = np.eye(n)
    w_v = np.hstack([columns.signs, np.zeros((d, 1)), np.eye(d, len(more))])
    attention = CrossAttention(**_tensors(dtype, w_k=w_k, w_q=w_q, w_v=w_v, w_o=columns.w_o(n)))
    linears = (linear_k, _query_side(input_shapes[1], n, size, dtype))
    return CrossNetwork(linears, attention, form="log", input_shapes=input_shapes, output_shape=output_shape)


def _of_keys(scores: AffineScores, m_k: int) -> AffineScores:
    """The scores with value slopes in z_K alone, `(cells, out, m_K)`.

    Raises:
        UnsupportedError: a value depends on z_Q.
    """
    slopes = scores.value_slopes
    if slopes is None:
        return scores
    if slopes[:, :, m_k:].any():
        raise UnsupportedError(
            "the values of this head are affine in z_Q, and the values of cross-attention, W_V Linear_K(Z_K), depend on z_K "
            "alone: there are no such layers",
            "Compile without query_values=True.",
        )
    return replace(scores, value_slopes=slopes[:, :, :m_k])


def indexed_cross(
    scores: AffineScores,
    *,
    input_shapes: tuple[tuple[int, ...], tuple[int, ...]],
    output_shape: tuple[int, ...],
    inverse_temperature: float,
    dtype: torch.dtype,
) -> CrossNetwork:
    """Theorem 4.2 in the indexed form: `n_o G_K G_Q` columns, `d_attn = 1 + m_Q + n_o`, n_o query columns.

    Values may be affine in z_K. *Theorem*: `indexed-form`.
    """
    (d, n), cells, r = _matrix_shape(output_shape), len(scores.offsets), inverse_temperature
    m_k, m_q = math.prod(input_shapes[0]), math.prod(input_shapes[1])
    scores = _of_keys(scores, m_k)
    columns, height = n * cells, 1 + m_q + n + d
    affine, values = _value_rows(scores, d, n, 1 + m_q + n)
    on_keys = m_k * _matrix_shape(input_shapes[0])[1] * (1 + len(affine))
    on_queries = m_q * (m_q + _matrix_shape(input_shapes[1])[1])
    _refuse_indexed(columns, height + on_keys + on_queries)
    s, unmix = token_mixing(n)
    of_cell = np.repeat(np.arange(cells), n)
    constant = np.zeros((height, columns))
    constant[0] = scores.offsets[of_cell] / r
    constant[1 : 1 + m_q] = scores.slopes[of_cell, m_k:].T / r
    constant[1 + m_q : 1 + m_q + n] = np.tile(np.eye(n), cells)
    constant[1 + m_q + n :] = values
    rows = {0: scores.slopes[of_cell, :m_k] / r, **affine}
    linear_k = _linear(rows, _matrix_shape(input_shapes[0]), constant, dtype)
    w_k = np.eye(1 + m_q + n, height)
    w_q = np.zeros((1 + m_q + n, m_q + 1 + n))
    w_q[0, m_q] = r
    w_q[1 : 1 + m_q, :m_q] = r * np.eye(m_q)
    w_q[1 + m_q :, m_q + 1 :] = s * np.eye(n)
    w_v = np.eye(d, height, k=1 + m_q + n)
    attention = CrossAttention(**_tensors(dtype, w_k=w_k, w_q=w_q, w_v=w_v, w_o=unmix))
    linears = (linear_k, _query_side(input_shapes[1], n, n, dtype))
    return CrossNetwork(linears, attention, form="indexed", input_shapes=input_shapes, output_shape=output_shape)
