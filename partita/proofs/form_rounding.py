"""How far apart two forms of one head may be in floating point: the score-rounding bound, form by form.

If every score is off by at most δ, every weight is off by a factor within e^{±2δ}, so `|Δnet| ≤ (e^{2δ} − 1)·max|V|`; sums of N
products add `γ_N max|V|` in any order. *Theorem*: `score-rounding`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from partita.geometry.domains import Array
from partita.heads.head import DotProductAttention
from partita.heads.layers import CrossNetwork, LinearSum, SelfNetwork

__all__ = ["dot_product_rounding", "literal_rounding"]


def dot_product_rounding(attention: DotProductAttention, lo: Array, hi: Array) -> float:
    """Bound of |as_attention() − exact head| for z in [lo, hi], flat: `(e^{2δ} − 1 + γ_N)·max|V|`."""
    u = torch.finfo(attention.key.dtype).eps / 2
    lo_t, hi_t, origin = torch.tensor(lo).ravel(), torch.tensor(hi).ravel(), attention.origin.double()
    relative = torch.maximum((lo_t - origin).abs(), (hi_t - origin).abs())
    absolute = torch.maximum(lo_t.abs(), hi_t.abs())
    key = attention.key.double().abs()
    # δ: the products and their sum round relative to |k||q|; storing the origin and z rounds relative to |k||z|
    products = float((key[:, :-1] @ relative + key[:, -1]).max()) * (key.shape[1] + 6)
    stored = float((key[:, :-1] @ absolute).max()) * 3
    return _output_error((products + stored) * u, len(key), u, float(attention.value.abs().max()))


def literal_rounding(network: SelfNetwork | CrossNetwork, lo: Array, hi: Array) -> float:
    """Bound of |layers() − exact head| for z in [lo, hi], flat, from the magnitudes of the named tensors alone."""
    size = torch.maximum(torch.tensor(lo).abs(), torch.tensor(hi).abs()).ravel()
    attention = network.attention
    u = torch.finfo(attention.w_k.dtype).eps / 2
    if isinstance(network, SelfNetwork):
        keys_in = queries_in = _magnitude(network.linear, size, network.input_shape)
    else:
        cut = math.prod(network.input_shapes[0])
        keys_in = _magnitude(network.linear_k, size[:cut], network.input_shapes[0])
        queries_in = _magnitude(network.linear_q, size[cut:], network.input_shapes[1])
    used = attention.w_o.ne(0).any(dim=1)
    keys, queries = attention.w_k.double().abs() @ keys_in, (attention.w_q.double().abs() @ queries_in)[:, used]
    depth = (
        size.numel() + keys.shape[0] + 8 + _widest(attention.w_k, keys_in) + _widest(attention.w_q, queries_in[:, used])
    )
    delta = float((keys.T @ queries).max()) * depth * u
    values = float((attention.w_v.double().abs() @ keys_in).max())
    gain = float(attention.w_o.double().abs().sum(dim=0).max())
    return _output_error(delta, keys.shape[1], u, values * gain)


def _magnitude(linear: LinearSum, size: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Entrywise bound of |Linear(Z)| for |z| ≤ size."""
    matrix = size.reshape(shape).T if len(shape) == 2 else size[:, None]
    terms = torch.einsum("tor,rc,tcd->od", linear.left.double().abs(), matrix.double(), linear.right.double().abs())
    return terms + linear.constant.double().abs()


def _widest(weight: Tensor, block: Tensor) -> int:
    """The most non-zero products in one entry of `weight @ block`: zeros do not round."""
    return int((weight.ne(0).double() @ block.ne(0).double()).max())


def _output_error(delta: float, cells: int, u: float, largest: float) -> float:
    return min(math.expm1(min(2.02 * delta + 40 * u, 700.0)) + 2.02 * (cells + 16) * u, 2.0) * largest
