"""The paper's layers exactly as its section 2 defines them, in its own orientation: matrices are `dim × tokens`.

`Linear(Z) = Σ_i P_i Z Q_i + C` spans all affine maps between matrix shapes and may lengthen the sequence: it is not
`nn.Linear`. `W_O` acts from the right and mixes *tokens*: it is not a feature projection. A leading batch axis is carried along.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from partita.errors import ShapeError
from partita.heads.guards import certified
from partita.heads.head import flatten_inputs

_AT_ONCE = 1 << 24  # numbers that Linear(Z) may hold for one step of a batch

__all__ = ["CrossAttention", "CrossNetwork", "LinearSum", "LiteralNetwork", "SelfAttention", "SelfNetwork"]


def _attend(keys: Tensor, queries: Tensor, values: Tensor, w_o: Tensor) -> Tensor:
    """`V softmax(KᵀQ) W_O`, softmax down each column. Columns that W_O multiplies by zero are not computed."""
    used = w_o.ne(0).any(dim=1).nonzero().squeeze(1)
    weights = torch.softmax(keys.transpose(-1, -2) @ queries[..., used], dim=-2)
    return values @ weights @ w_o[used]


class LinearSum(nn.Module):
    """The paper's `Linear`: `Z ↦ Σ_i P_i Z Q_i + C`.

    Args:
        left: P, `(terms, rows_out, rows_in)`.
        right: Q, `(terms, columns_in, columns_out)`.
        constant: C, `(rows_out, columns_out)` (the paper calls it R).

    Shapes: `(batch, rows_in, columns_in)` to `(batch, rows_out, columns_out)`.
    """

    left: Tensor
    right: Tensor
    constant: Tensor

    def __init__(self, left: Tensor, right: Tensor, constant: Tensor) -> None:
        super().__init__()
        if len(left) != len(right) or constant.shape != (left.shape[1], right.shape[2]):
            raise ShapeError(
                f"LinearSum: P {tuple(left.shape)}, Q {tuple(right.shape)}, C {tuple(constant.shape)} do not fit together; "
                "expected (terms, rows_out, rows_in), (terms, columns_in, columns_out), (rows_out, columns_out)."
            )
        self.register_buffer("left", left)
        self.register_buffer("right", right)
        self.register_buffer("constant", constant)

    def forward(self, z: Tensor) -> Tensor:
        return torch.einsum("tor,brc,tcd->bod", self.left, z, self.right) + self.constant


class _Attention(nn.Module):
    w_k: Tensor
    w_q: Tensor
    w_v: Tensor
    w_o: Tensor

    def __init__(self, *, w_k: Tensor, w_q: Tensor, w_v: Tensor, w_o: Tensor) -> None:
        super().__init__()
        for name, tensor in (("w_k", w_k), ("w_q", w_q), ("w_v", w_v), ("w_o", w_o)):
            self.register_buffer(name, tensor)


class SelfAttention(_Attention):
    """`Attn_s(Z) = W_V Z softmax((W_K Z)ᵀ W_Q Z) W_O`, single head, no scale.

    Args:
        w_k, w_q: `(d_attn, D)`.
        w_v: `(d_out, D)`.
        w_o: `(N, N_out)`.

    Shapes: `(batch, D, N)` to `(batch, d_out, N_out)`.
    """

    def forward(self, z: Tensor) -> Tensor:
        return _attend(self.w_k @ z, self.w_q @ z, self.w_v @ z, self.w_o)

    def weights(self, z: Tensor) -> Tensor:
        """The attention matrix `softmax((W_K Z)ᵀ W_Q Z)`, `(batch, N, N)`, whole."""
        return torch.softmax((self.w_k @ z).transpose(-1, -2) @ (self.w_q @ z), dim=-2)


class CrossAttention(_Attention):
    """`Attn_c(Z_K, Z_Q) = W_V Z_K softmax((W_K Z_K)ᵀ W_Q Z_Q) W_O`; shapes as in `SelfAttention`."""

    def forward(self, z_k: Tensor, z_q: Tensor) -> Tensor:
        return _attend(self.w_k @ z_k, self.w_q @ z_q, self.w_v @ z_k, self.w_o)


class LiteralNetwork(nn.Module):
    """The paper's Linear and attention as one module. Every tensor is a named buffer."""

    form: str
    output_shape: tuple[int, ...]

    @property
    def num_parameters(self) -> int:
        """Stored scalars, zeros and ones included."""
        return sum(t.numel() for t in self.buffers())

    def _matrices(
        self, inputs: tuple[Any, ...], shapes: tuple[tuple[int, ...], ...]
    ) -> tuple[list[Tensor], tuple[int, ...]]:
        """Token-major arguments as the paper's `(batch, dim, tokens)`, a vector being one token; and their leading shape."""
        flat, lead = flatten_inputs(inputs, shapes, next(self.buffers()).dtype)
        parts = torch.split(flat, [math.prod(s) for s in shapes], dim=1)
        return [p.reshape(-1, s[0] if len(s) == 2 else 1, s[-1]).transpose(1, 2) for p, s in zip(parts, shapes)], lead

    def _in_steps(self, linear: LinearSum, *matrices: Tensor) -> list[tuple[Tensor, ...]]:
        """The batch in parts that fit in memory: `Linear(Z)` has as many numbers as its constant, for every input."""
        step = max(1, _AT_ONCE // linear.constant.numel())
        if torch.compiler.is_compiling() or matrices[0].shape[0] <= step:
            return [matrices]
        return list(zip(*(torch.split(m, step) for m in matrices)))

    def _shaped(self, out: Tensor, lead: tuple[int, ...]) -> Tensor:
        return out.transpose(1, 2).reshape((*lead, *self.output_shape))


class SelfNetwork(LiteralNetwork):
    """`Attn ∘ Linear` as one module that takes what the compiled head takes: `(batch, m)` or `(batch, tokens, dim)`.

    Every tensor is a named buffer: `linear.left`, `linear.right`, `linear.constant`, `attention.w_k` … `attention.w_o`.
    """

    def __init__(
        self,
        linear: LinearSum,
        attention: SelfAttention,
        *,
        form: str,
        input_shape: tuple[int, ...],
        output_shape: tuple[int, ...],
    ) -> None:
        super().__init__()
        self.linear, self.attention = linear, attention
        self.form, self.input_shape, self.output_shape = form, input_shape, output_shape

    @property
    def num_keys(self) -> int:
        """Columns of Linear(Z): the keys of the literal layer."""
        return self.linear.constant.shape[1]

    @certified
    def forward(self, z: Any) -> Tensor:
        (matrix,), lead = self._matrices((z,), (self.input_shape,))
        parts = [self.attention(self.linear(z)) for (z,) in self._in_steps(self.linear, matrix)]
        return self._shaped(parts[0] if len(parts) == 1 else torch.cat(parts), lead)


class CrossNetwork(LiteralNetwork):
    """`Attn(Linear_K(Z_K), Linear_Q(Z_Q))` as one module, called with `(z_k, z_q)`."""

    def __init__(
        self,
        linears: tuple[LinearSum, LinearSum],
        attention: CrossAttention,
        *,
        form: str,
        input_shapes: tuple[tuple[int, ...], tuple[int, ...]],
        output_shape: tuple[int, ...],
    ) -> None:
        super().__init__()
        self.linear_k, self.linear_q = linears
        self.attention = attention
        self.form, self.input_shapes, self.output_shape = form, input_shapes, output_shape

    @property
    def num_keys(self) -> int:
        return self.linear_k.constant.shape[1]

    @certified
    def forward(self, z_k: Any, z_q: Any) -> Tensor:
        (k, q), lead = self._matrices((z_k, z_q), self.input_shapes)
        pairs = self._in_steps(self.linear_k, k, q)
        parts = [self.attention(self.linear_k(a), self.linear_q(b)) for a, b in pairs]
        return self._shaped(parts[0] if len(parts) == 1 else torch.cat(parts), lead)
