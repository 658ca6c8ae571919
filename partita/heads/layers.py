"""The paper's layers exactly as its section 2 defines them, in its own orientation: matrices are `dim × tokens`.

`Linear(Z) = Σ_i P_i Z Q_i + C` spans all affine maps between matrix shapes and may lengthen the sequence: it is not
`nn.Linear`. `W_O` acts from the right and mixes *tokens*: it is not a feature projection. A leading batch axis is carried along.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from partita.errors import ShapeError, UnsupportedError
from partita.heads.head import flatten_inputs
from partita.heads.tensor_digest import model_digest
from partita.kernels.guards import certified

_AT_ONCE = 1 << 25  # numbers held by one step of an evaluation: 256 MiB in float64

__all__ = [
    "CrossAttention",
    "CrossNetwork",
    "LinearSum",
    "LiteralNetwork",
    "Projection",
    "SelfAttention",
    "SelfNetwork",
]


def _attend(keys: Tensor, queries: Tensor, values: Tensor, w_o: Tensor) -> Tensor:
    """`V softmax(KᵀQ) W_O`, softmax down each column. Columns that W_O multiplies by zero are not computed."""
    used = w_o.ne(0).any(dim=1).nonzero().squeeze(1)
    weights = torch.softmax(keys.transpose(-1, -2) @ queries[..., used], dim=-2)
    return values @ weights @ w_o[used]


def _shapes(module: nn.Module) -> str:
    """Names and shapes of the tensors of a layer: what printing it shows."""
    return ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in module.named_buffers(recurse=False))


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

    def extra_repr(self) -> str:
        return _shapes(self)

    def forward(self, z: Tensor) -> Tensor:
        return torch.einsum("tor,brc,tcd->bod", self.left, z, self.right) + self.constant


@dataclass(frozen=True, eq=False)
class Projection:
    """`W·Linear(Z)` as one affine function, `Z ↦ Σ_i (W P_i) Z Q_i + W C`.

    Linear(Z) itself is never formed: the log form's has `(2 d G + 1) × 2 d G` numbers for every input, and W a few rows.

    Attributes:
        left: `W P`, `(terms, rows, rows_in)`.
        right: Q, `(terms, columns_in, columns)`.
        constant: `W C`, `(rows, columns)`.
    """

    left: Tensor
    right: Tensor
    constant: Tensor

    @classmethod
    def of(cls, weight: Tensor, linear: LinearSum, columns: Tensor | slice = slice(None)) -> Projection:
        """Of all columns of Linear(Z), or of some."""
        left = torch.einsum("ao,tor->tar", weight, linear.left)
        return cls(left, linear.right[..., columns], weight @ linear.constant[:, columns])

    def __call__(self, z: Tensor) -> Tensor:
        """`(batch, rows_in, columns_in)` to `(batch, rows, columns)`."""
        placed = torch.einsum("tar,brc->batc", self.left, z).flatten(2)
        return placed @ self.right.flatten(0, 1) + self.constant


class _Attention(nn.Module):
    w_k: Tensor
    w_q: Tensor
    w_v: Tensor
    w_o: Tensor

    def __init__(self, *, w_k: Tensor, w_q: Tensor, w_v: Tensor, w_o: Tensor) -> None:
        super().__init__()
        for name, tensor in (("w_k", w_k), ("w_q", w_q), ("w_v", w_v), ("w_o", w_o)):
            self.register_buffer(name, tensor)

    def extra_repr(self) -> str:
        return _shapes(self)


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


@dataclass(frozen=True)
class _Claim:
    """What is proved about the layers, and the tensors it is proved about."""

    error_bound: float
    rounding: float
    norm: str
    sha256: str


class LiteralNetwork(nn.Module):
    """The paper's Linear and attention as one module. Every tensor is a named buffer."""

    form: str
    attention: SelfAttention | CrossAttention
    input_shapes: tuple[tuple[int, ...], ...]
    output_shape: tuple[int, ...]
    _claim: _Claim | None = None

    @property
    def linears(self) -> tuple[LinearSum, LinearSum]:
        """The Linear of the keys and values, and that of the queries: the same one in self-attention."""
        raise NotImplementedError

    @property
    def num_keys(self) -> int:
        """Columns of Linear(Z): the keys of the literal layer."""
        return self.linears[0].constant.shape[1]

    @property
    def num_parameters(self) -> int:
        """Stored scalars, zeros and ones included."""
        return sum(t.numel() for t in self.buffers())

    @property
    def dtype(self) -> torch.dtype:
        return self.attention.w_k.dtype

    def extra_repr(self) -> str:
        shapes = ", ".join(map(str, self.input_shapes))
        try:
            claim = "" if self._claim is None else f", error bound {self.error_bound:.6g}"
        except UnsupportedError:
            claim = ", changed after it was certified"
        return f"form={self.form!r}, {self.num_keys:,} keys, {shapes} → {self.output_shape}, {self.dtype}{claim}"

    @property
    def error_bound(self) -> float:
        """The proved bound of `‖f − layers‖` on the domain, for these tensors as they run, in `norm`.

        It contains what this form and dtype round. Infinite if nothing is proved: for layers that were made from a bare head,
        or from a head whose error is an estimate.

        Raises:
            UnsupportedError: a tensor was changed or cast after the bound was proved.
        """
        return math.inf if self._claim is None else self._unchanged(self._claim).error_bound

    @property
    def rounding(self) -> float:
        """The proved bound of the distance between these layers as they run and the head in exact arithmetic, in `norm`.

        Part of `error_bound`; finite also where the error itself is only an estimate. Raises as `error_bound` does.
        """
        return math.inf if self._claim is None else self._unchanged(self._claim).rounding

    @property
    def norm(self) -> str:
        """The norm of both bounds: "inf", or p as certificates write it."""
        return "inf" if self._claim is None else self._claim.norm

    def claiming(self, *, error_bound: float, rounding: float, norm: str = "inf") -> Self:
        """The same module, which now states these bounds for its tensors as they are."""
        self._claim = _Claim(error_bound, rounding, norm, model_digest(self.state_dict()))
        return self

    def _unchanged(self, claim: _Claim) -> _Claim:
        if claim.sha256 != model_digest(self.state_dict()):
            raise UnsupportedError(
                "the layers were changed or cast after their bound was proved, so it does not apply",
                "Make them again, with dtype=… for another dtype.",
            )
        return claim

    def _matrices(
        self, inputs: tuple[Any, ...], shapes: tuple[tuple[int, ...], ...]
    ) -> tuple[list[Tensor], tuple[int, ...]]:
        """Token-major arguments as the paper's `(batch, dim, tokens)`, a vector being one token; and their leading shape."""
        flat, lead = flatten_inputs(inputs, shapes, self.dtype)
        parts = torch.split(flat, [math.prod(s) for s in shapes], dim=1)
        return [p.reshape(-1, s[0] if len(s) == 2 else 1, s[-1]).transpose(1, 2) for p, s in zip(parts, shapes)], lead

    def _shaped(self, out: Tensor, lead: tuple[int, ...]) -> Tensor:
        return out.transpose(1, 2).reshape((*lead, *self.output_shape))

    def _run(self, z_k: Tensor, z_q: Tensor) -> Tensor:
        """`W_V Y softmax((W_K Y)ᵀ W_Q Y') W_O`, `Y = Linear_K(Z_K)`, `Y' = Linear_Q(Z_Q)`, in steps of bounded memory.

        Columns of Y' that W_O multiplies by zero are not computed. A batch is cut where the keys, values and scores of all its
        inputs would not fit; the columns of Y are cut where those of one input do not.
        """
        w_o, (keys_from, queries_from) = self.attention.w_o, self.linears
        used = w_o.ne(0).any(dim=1).nonzero().squeeze(1)
        queries = Projection.of(self.attention.w_q, queries_from, used)
        if torch.compiler.is_compiling():
            step = None
        else:
            held = 2 * len(self.attention.w_k) + 2 * len(self.attention.w_v) + 3 * len(used)  # numbers per column
            step = _AT_ONCE // (held * self.num_keys)
        if step == 0:
            width = max(1, _AT_ONCE // held)
            cuts = [slice(a, a + width) for a in range(0, self.num_keys, width)]
            out = [self._by_columns(queries, cuts, a, b) for a, b in zip(torch.split(z_k, 1), torch.split(z_q, 1))]
        else:
            keys, values = (Projection.of(w, keys_from) for w in (self.attention.w_k, self.attention.w_v))
            pairs = [(z_k, z_q)] if step is None else zip(torch.split(z_k, step), torch.split(z_q, step))
            out = [values(a) @ torch.softmax(keys(a).transpose(-1, -2) @ queries(b), dim=-2) for a, b in pairs]
        return (torch.cat(out) if len(out) != 1 else out[0]) @ w_o[used]

    def _by_columns(self, queries: Projection, cuts: list[slice], z_k: Tensor, z_q: Tensor) -> Tensor:
        """The same for one input, some columns of Y at a time: once for the largest score, once for the sums."""
        asked = queries(z_q)

        def scores() -> Iterator[tuple[slice, Tensor]]:
            for cut in cuts:
                yield cut, Projection.of(self.attention.w_k, self.linears[0], cut)(z_k).transpose(-1, -2) @ asked

        top = torch.stack([s.detach().amax(dim=-2, keepdim=True) for _, s in scores()]).amax(dim=0)
        mass, total = torch.zeros_like(top), asked.new_zeros(len(z_k), len(self.attention.w_v), asked.shape[-1])
        for cut, found in scores():
            weights = torch.exp(found - top)
            mass = mass + weights.sum(dim=-2, keepdim=True)
            total = total + Projection.of(self.attention.w_v, self.linears[0], cut)(z_k) @ weights
        return total / mass


class SelfNetwork(LiteralNetwork):
    """`Attn ∘ Linear` as one module that takes what the compiled head takes: `(batch, m)` or `(batch, tokens, dim)`.

    Every tensor is a named buffer: `linear.left`, `linear.right`, `linear.constant`, `attention.w_k` … `attention.w_o`.
    """

    attention: SelfAttention

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
        self.input_shapes = (input_shape,)

    @property
    def linears(self) -> tuple[LinearSum, LinearSum]:
        return self.linear, self.linear

    @certified
    def forward(self, z: Any) -> Tensor:
        (matrix,), lead = self._matrices((z,), (self.input_shape,))
        return self._shaped(self._run(matrix, matrix), lead)


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
    def linears(self) -> tuple[LinearSum, LinearSum]:
        return self.linear_k, self.linear_q

    @certified
    def forward(self, z_k: Any, z_q: Any) -> Tensor:
        (k, q), lead = self._matrices((z_k, z_q), self.input_shapes)
        return self._shaped(self._run(k, q), lead)
