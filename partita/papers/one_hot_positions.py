"""One-hot positions: the paper's `Linear(Z) = Σ P_i Z Q_i + R` as an attention whose weights are shared by all tokens.

The Linear knows positions through Q_i and R. An encoding added to each token supplies the same knowledge.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from partita.arithmetic.precision import Precision
from partita.arithmetic.rounding import add_up, expm1_up, mul_up, up
from partita.errors import SizeError, UnsupportedError
from partita.geometry.domains import Array, Box
from partita.heads.head import flatten_inputs
from partita.heads.layers import LinearSum, SelfNetwork
from partita.kernels.guards import certified
from partita.proofs.form_rounding import literal_rounding

__all__ = ["PositionalAttention", "SharedNetwork", "linear_as_attention", "shared_weights"]

_MOST_COLUMNS = 2048


class PositionalAttention(nn.Module):
    """A multi-head attention whose weights are shared by all tokens: `Z ↦ Σ_h W_V,h Y softmax((W_K Y)ᵀ W_Q,h Y)`, `Y = [Z 0; I]`.

    The encoding of position c is the unit vector e_c, added to the padded token `[x_c; 0]`; tokens beyond the input are blank.

    Shapes: `(batch, rows_in, columns_in)` to `(batch, rows_out, columns_out)`, the paper's orientation.

    Attributes:
        w_q: `(heads, N, N)`, on the encodings alone: the scores of position c are column c.
        w_v: `(heads, rows_out, rows_in + N)`.
        columns: `(columns_in, columns_out)`. N is at least one more than the first.
    """

    w_q: Tensor
    w_v: Tensor

    def __init__(self, w_q: Tensor, w_v: Tensor, columns: tuple[int, int]) -> None:
        super().__init__()
        self.register_buffer("w_q", w_q)
        self.register_buffer("w_v", w_v)
        self.columns = columns

    def encoded(self, z: Tensor) -> Tensor:
        """`[Z 0; I]`, `(batch, rows_in + N, N)`: tokens, blanks, and the encoding of every position."""
        size = self.w_q.shape[-1]
        padded = nn.functional.pad(z, (0, size - z.shape[-1]))
        eye = torch.eye(size, dtype=z.dtype, device=z.device).expand(*z.shape[:-2], size, size)
        return torch.cat([padded, eye], dim=-2)

    @certified
    def forward(self, z: Tensor) -> Tensor:
        """`Σ_h W_V,h Y softmax(W_Q,h)`: as `W_K = [0 I]` and the encodings are I, the scores are W_Q itself.

        What comes from tokens and what comes from encodings is summed apart, because blank tokens are 0.
        """
        (rows, columns), out = z.shape[-2:], self.columns[1]
        weights = torch.softmax(self.w_q, dim=-2)[..., :out]
        tokens = (self.w_v[..., :rows] @ z[..., None, :, :]) @ weights[:, :columns]
        return tokens.sum(dim=-3) + (self.w_v[..., rows:] @ weights).sum(dim=0)

    def rounding_bound(self, size: Array) -> Array:
        """How far it may be from its Linear, `(rows_out,)`, for tokens with |z| ≤ size, `(rows_in, columns_in)`."""
        unit, positions = Precision.of(self.w_q.dtype).unit, self.w_q.shape[-1]
        scores = float(self.w_q.abs().max())
        # log of a library, its storage, the product with 1, the subtraction of the largest, exp, sums over N keys and all heads
        delta = mul_up(unit, add_up(mul_up(12.0, scores), 40.0, 2.0 * positions))
        relative = add_up(
            expm1_up(mul_up(2.0, delta)), mul_up(1.01 * unit, 4.0 * positions + 4.0 * len(self.w_q) + 40.0)
        )
        rows = len(size)
        value = self.w_v.double().abs().numpy()
        tokens = (value[:, :, :rows] @ size).max(axis=2, initial=0.0)
        blanks = value[:, :, rows:].max(axis=2)
        return np.asarray(up(relative * (tokens + blanks).sum(axis=0) * (1 + 1e-12), 8))


def linear_as_attention(linear: LinearSum) -> PositionalAttention:
    """The paper's `Linear(Z) = Σ_t P_t Z Q_t + R` as a multi-head attention with shared token weights and one-hot encodings.

    Exact up to rounding. Term t takes two heads with attention matrices `A± = μ + max(±Q_t, 0)/s` on the tokens and the rest of
    the mass on blank tokens, whose value is 0: `s(A⁺ − A⁻) = Q_t`. R takes one head: `softmax(S·I)` over the encodings, undone
    by its inverse.

    *Theorem*: `linear-as-attention`.

    Args:
        linear: P `(terms, rows_out, rows_in)`, Q `(terms, columns_in, columns_out)`, R `(rows_out, columns_out)`.

    Raises:
        SizeError: more than 2,048 columns.
    """
    left, right, constant = (t.double().numpy() for t in (linear.left, linear.right, linear.constant))
    (_, rows_out, rows_in), (_, n, out) = left.shape, right.shape
    size = max(n + 1, out)
    if size > _MOST_COLUMNS:
        raise SizeError(
            f"{size:,} columns; each head stores {size:,}² scores, and at most {_MOST_COLUMNS:,} columns are allowed."
        )
    scores, values = [], []
    for p, q in zip(left, right):
        scale = 4 * float(np.abs(q).sum(axis=0).max())
        if scale == 0:
            continue
        for sign in (1.0, -1.0):
            matrix = np.empty((size, size))  # column c: the weights of position c
            matrix[:n] = 1 / (4 * n)
            matrix[:n, :out] += np.maximum(sign * q, 0) / scale
            matrix[n:] = (1 - matrix[:n].sum(axis=0)) / (size - n)
            scores.append(np.log(matrix))
            values.append(np.hstack([sign * scale * p, np.zeros((rows_out, size))]))
    sharp = math.log(size) + 5
    table = np.hstack([constant, np.zeros((rows_out, size - out))])
    table = ((math.exp(sharp) + size - 1) * table - table.sum(axis=1, keepdims=True)) / math.expm1(sharp)
    scores.append(sharp * np.eye(size))
    values.append(np.hstack([np.zeros((rows_out, rows_in)), table]))
    w_q, w_v = (torch.tensor(np.stack(parts), dtype=linear.left.dtype) for parts in (scores, values))
    return PositionalAttention(w_q, w_v, (n, out))


class SharedNetwork(nn.Module):
    """Two attention layers with shared token weights that compute what the paper's Linear and attention compute.

    Shapes: those of the network it was made of.

    Attributes:
        first: the Linear as a multi-head attention over encoded and blank tokens.
        source: the network; its W_K, W_Q and W_V are the second layer, its W_O only scales and drops blank tokens.
    """

    def __init__(self, first: PositionalAttention, source: SelfNetwork) -> None:
        super().__init__()
        self.first, self.attention, self.source = first, source.attention, source

    def forward(self, z: Any) -> Tensor:
        shape = self.source.input_shape
        flat, lead = flatten_inputs((z,), (shape,), self.first.w_q.dtype)
        tokens = flat.reshape(-1, shape[0] if len(shape) == 2 else 1, shape[-1]).transpose(1, 2)
        out: Tensor = self.attention(self.first(tokens))
        return out.transpose(1, 2).reshape((*lead, *self.source.output_shape))

    def rounding_bound(self, box: Box) -> float:
        """How far rounding may take it from the exact head of the network, on a box."""
        size = np.maximum(np.abs(box.lo), np.abs(box.hi))
        size = (size if size.ndim == 2 else size[None]).T
        moved = torch.tensor(self.first.rounding_bound(size))[:, None]
        linear, a = self.source.linear, self.attention
        terms = torch.einsum(
            "tor,rc,tcd->od", linear.left.double().abs(), torch.tensor(size), linear.right.double().abs()
        )
        held = (terms + linear.constant.double().abs()) * (1 + 1e-12)
        k, q, v = (w.double().abs() for w in (a.w_k, a.w_q, a.w_v))
        used = a.w_o.ne(0).any(dim=1)
        keys, queries = k @ held, (q @ held)[:, used]
        delta = float((keys.T @ (q @ moved) + (k @ moved).T @ queries + (k @ moved).T @ (q @ moved)).max()) * (
            1 + 1e-12
        )
        gain = float(a.w_o.double().abs().sum(dim=0).max())
        spread = mul_up(expm1_up(min(mul_up(2.0, delta), 700.0)), float((v @ held).max()), gain)
        own = literal_rounding(self.source, box.lo.ravel(), box.hi.ravel())
        return add_up(own, spread, mul_up(float((v @ moved).max()), gain))


def shared_weights(network: SelfNetwork) -> SharedNetwork:
    """Theorem 4.1 by two attention layers whose weights are shared by all tokens, with one-hot encodings and blank tokens.

    The first layer is `linear_as_attention` of the network's Linear, the second its attention. So what the paper's Linear knows of
    positions, encodings can supply.

    *Theorem*: `linear-as-attention`.

    Args:
        network: `compiled.layers(form="log")`, or another whose W_O is `c·[I_n; 0]`.

    Raises:
        UnsupportedError: W_O mixes tokens, as that of the indexed form does.
        SizeError: more than 2,048 columns.
    """
    w_o = network.attention.w_o
    if not torch.equal(w_o, w_o[0, 0] * torch.eye(*w_o.shape, dtype=w_o.dtype)):
        raise UnsupportedError(
            f"W_O of the {network.form} form mixes tokens; expected c·[I_n; 0]", "Use layers(form='log')."
        )
    return SharedNetwork(linear_as_attention(network.linear), network)
