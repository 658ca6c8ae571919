"""Constructions in standard blocks: as `nn.MultiheadAttention`, under a causal mask, and inside `nn.TransformerEncoderLayer`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from partita.arithmetic.precision import Precision
from partita.arithmetic.rounding import add_up, expm1_up, mul_up
from partita.errors import ShapeError, UnsupportedError
from partita.heads.head import flatten_inputs
from partita.kernels.guards import certified
from partita.networks.descent import Descent
from partita.networks.prompt_functions import PromptFunction
from partita.ramps.anchors import sharing_excess
from partita.ramps.literal_ramps import refuse_many, rounded_layers
from partita.ramps.multi_head_ramps import MultiHeadRamp, SharedRamp
from partita.ramps.single_ramp import Ramp

__all__ = ["EncoderRamp", "PrefixRamp", "descent_attention", "encoder_ramp", "prefix_ramp", "prompt_attention"]

_BEHIND = 60.0  # by so much data tokens, as keys, trail every anchor


class PrefixRamp(nn.Module):
    """A ramp whose anchors are p tokens *before* the sequence, as one `nn.MultiheadAttention` with one head.

    Tokens have four coordinates: u − o (data), L − o and −(L − o)²/2 (anchors; data tokens hold a large negative number there,
    so that nobody attends to them), and the value. Every data token sees every anchor, with or without a causal mask.

    Shapes: `(…, tokens, dim)` to `(…, tokens, out_dim)`.

    Attributes:
        error_bound: as proved for the layers of the ramp, with p + tokens keys.
    """

    slopes: Tensor
    offsets: Tensor
    prefix: Tensor
    behind: Tensor

    def __init__(self, built: Ramp, tokens: int, *, causal: bool) -> None:
        super().__init__()
        head = built.head
        if tokens < 1 or len(head.slopes) not in (1, tokens):
            raise ShapeError(
                f"a prefix was requested for {tokens} tokens; this ramp has slopes for {len(head.slopes)}."
            )
        refuse_many(built)
        self.tokens, self.causal, self.output = tokens, causal, (head.coordinate, head.out_dim)
        low, high = head.ends
        middle, rate = (low + high) / 2, float(head.sharpness) / built.spacing**2
        away = np.linspace(low, high, head.anchors) - middle
        behind = (_BEHIND + math.log(tokens + 1) + float(head.sharpness) / 8) / rate
        prefix = np.stack([0 * away, away, -0.5 * away**2, away + middle], axis=1)
        self.register_buffer("slopes", head.slopes.clone())
        self.register_buffer("offsets", head.offsets - middle)
        self.register_buffer("prefix", torch.tensor(prefix, dtype=head.dtype))
        self.register_buffer("behind", torch.tensor([0.0, 0.0, -behind, 0.0], dtype=head.dtype))
        self.attention = _one_head(rate, head.dtype)
        approximation, rounding = rounded_layers(built, head.anchors, head.anchors + tokens)
        self.error_bound = add_up(approximation, rounding, mul_up(math.exp(-59), high - low + abs(low) + abs(high)))

    def embed(self, x: Any) -> Tensor:
        """Anchors, then data: `(batch, p + tokens, 4)`."""
        flat, _ = flatten_inputs((x,), ((self.tokens, self.slopes.shape[1]),), self.slopes.dtype)
        tokens = flat.reshape(-1, self.tokens, self.slopes.shape[1])
        u = (tokens * self.slopes).sum(dim=2, keepdim=True) + self.offsets[:, None]
        data = nn.functional.pad(u, (0, 3)) + self.behind
        return torch.cat([self.prefix.expand(len(data), -1, -1), data], dim=1)

    @certified
    def forward(self, x: Any) -> Tensor:
        z = self.embed(x)
        mask = None
        if self.causal:
            mask = torch.ones(z.shape[1], z.shape[1], dtype=torch.bool, device=z.device).triu(1)
        out: Tensor = self.attention(z, z, z, need_weights=False, attn_mask=mask)[0]
        ramp = out[:, len(self.prefix) :, 3]
        place = torch.zeros(self.output[1], dtype=ramp.dtype, device=ramp.device)
        place[self.output[0]] = 1.0
        _, lead = flatten_inputs((x,), ((self.tokens, self.slopes.shape[1]),), self.slopes.dtype)
        result: Tensor = (ramp[..., None] * place).reshape(*lead, self.tokens, self.output[1])
        return result


def prefix_ramp(built: Ramp, tokens: int, *, causal: bool = True) -> PrefixRamp:
    """The ramp as an `nn.MultiheadAttention` over `[anchors, tokens]`, usable under a causal mask. *Theorem*: `ramp`,
    `score-rounding`.

    Raises:
        SizeError: more anchors than the dtype's dot products carry.
    """
    return PrefixRamp(built, tokens, causal=causal)


def _one_head(rate: float, dtype: torch.dtype) -> nn.MultiheadAttention:
    """Query `2R(u, 1, 0, 0)` (torch divides by √4), key (L, −L²/2, 0, 0), value (0, 0, 0, L)."""
    in_weight, in_bias = np.zeros((3, 4, 4)), np.zeros((3, 4))
    in_weight[0, 0, 0], in_bias[0, 1] = 2 * rate, 2 * rate
    in_weight[1, 0, 1] = in_weight[1, 1, 2] = 1.0
    in_weight[2, 3, 3] = 1.0
    attention = nn.MultiheadAttention(4, 1, batch_first=True, dtype=dtype)
    tensors = {
        "in_proj_weight": in_weight.reshape(12, 4),
        "in_proj_bias": in_bias.reshape(12),
        "out_proj.weight": np.eye(4),
        "out_proj.bias": np.zeros(4),
    }
    attention.load_state_dict({name: torch.tensor(a, dtype=dtype) for name, a in tensors.items()}, strict=True)
    return attention.eval().requires_grad_(False)


def descent_attention(descent: Descent) -> nn.MultiheadAttention:
    """One step of squared-loss descent as an `nn.MultiheadAttention` of one head: `w + attention([w, 1], tokens, tokens)[…, :d]`.

    `tokens` are the mirrored examples (`descent.layer.mirrored(prompt)`), embed_dim is d + 1. *Theorem*: `descent-step`.

    Raises:
        UnsupportedError: another loss, whose slopes need a first attention with keys made of w; or ridge, which a residual
            cannot shrink.
    """
    layer, facts = descent.layer, descent.facts
    if layer.has_table or facts.ridge:
        raise UnsupportedError(
            f"loss is {descent.slope.name}, ridge is {facts.ridge:g}; expected squared loss without ridge. Only that is a single "
            "attention with a residual: keys of other losses depend on w, and ridge shrinks w itself."
        )
    size = descent.dim + 1
    eye = torch.eye(size, dtype=descent.dtype)
    query = math.sqrt(size) * facts.epsilon * eye
    query[-1, -1] *= -1
    value = torch.zeros_like(eye)
    value[: descent.dim] = layer.read.T
    attention = nn.MultiheadAttention(size, 1, bias=False, batch_first=True, dtype=descent.dtype)
    tensors = {"in_proj_weight": torch.cat([query, eye, value]), "out_proj.weight": eye}
    attention.load_state_dict(tensors, strict=True)
    return attention.eval().requires_grad_(False)


def prompt_attention(layer: PromptFunction, outputs: int = 1) -> nn.MultiheadAttention:
    """A function read from a prompt as an `nn.MultiheadAttention` of one head, within the same bound.

    `attention(q, t, t)[0][..., m + 1:]` are the answers, where `t = g.tokens(X, y)` and `q = g.query_tokens(Q, outputs)`, both
    transposed to `(…, tokens, m + 1 + outputs)`. *Theorem*: `in-context-function`.
    """
    size = layer.facts.dimension + 1 + outputs
    written = layer.layer(outputs)
    zeros = torch.zeros(outputs, size, dtype=layer.dtype)
    query, key = (torch.cat([w, zeros]) for w in (math.sqrt(size) * written.w_q, written.w_k))  # torch divides by √size
    value = torch.cat([torch.zeros(size - outputs, size, dtype=layer.dtype), written.w_v])
    attention = nn.MultiheadAttention(size, 1, bias=False, batch_first=True, dtype=layer.dtype)
    tensors = {"in_proj_weight": torch.cat([query, key, value]), "out_proj.weight": torch.eye(size, dtype=layer.dtype)}
    attention.load_state_dict(tensors, strict=True)
    return attention.eval().requires_grad_(False)


class EncoderRamp(nn.Module):
    """A multi-head ramp inside a pre-norm `nn.TransformerEncoderLayer`: residual, LayerNorm and feed-forward included.

    LayerNorm divides a token by its own size. Tokens are embedded as `[z, −z, B, −B, 0 …]` with a large B, so that mean and
    size hardly depend on z: what comes out is z up to a factor `1 ± u²/(2B²)`. The feed-forward part is 0, the residual keeps
    the token, and the ramp appears in the last coordinate, which was 0.

    Shapes: `(…, tokens, dim)` to `(…, tokens, d_model)`.
    """

    def __init__(self, built: SharedRamp, layer: nn.TransformerEncoderLayer, size: float, error_bound: float) -> None:
        super().__init__()
        self.source, self.layer, self.size, self.error_bound = _module(built), layer, size, error_bound
        self.spare = layer.self_attn.embed_dim - 2 * (self.source.tokens + 1) - 2

    def embed(self, x: Any) -> Tensor:
        """`(batch, tokens, d_model)`."""
        z = self.source.embed(x)[..., : self.source.tokens + 1]
        constant = torch.tensor([self.size, -self.size], dtype=z.dtype, device=z.device).expand(*z.shape[:-1], 2)
        return nn.functional.pad(torch.cat([z, -z, constant], dim=-1), (0, self.spare))

    @certified
    def forward(self, x: Any) -> Tensor:
        _, lead = flatten_inputs((x,), (self.source.input_shape,), self.source.linear.constant.dtype)
        out: Tensor = self.layer(self.embed(x))
        return out.reshape(*lead, self.source.tokens, -1)


def encoder_ramp(built: SharedRamp, *, norm_first: bool = True, causal: bool = False) -> EncoderRamp:
    """The multi-head ramp as an `nn.TransformerEncoderLayer`, with the bound that LayerNorm leaves. *Theorem*: `ramp-in-a-block`.

    Raises:
        UnsupportedError: `norm_first=False`; `causal=True`; a dtype other than float64; a folded ramp.
    """
    if causal:
        raise UnsupportedError(
            "causal masks are not supported: column j holds the j-th anchor of every head, and a causal mask hides it from "
            "earlier tokens. Use prefix_ramp, whose anchors stand before the sequence."
        )
    if not norm_first:
        raise UnsupportedError(
            "norm_first is False; expected a pre-norm block (norm_first=True). LayerNorm after the residual "
            "would divide the output by the token's size."
        )
    network, dtype = _module(built), _module(built).linear.constant.dtype
    if dtype != torch.float64:
        raise UnsupportedError(
            "the ramp is not float64; LayerNorm with a large constant needs float64. Build the ramp in float64."
        )
    n, heads, old = network.tokens, network.attention.num_heads, network.attention
    model = heads * max(2, math.ceil((2 * (n + 1) + 3) / heads))  # a head reads two coordinates
    reach = float(built.certificate.terms[3].inputs["size"])
    size = 1e4 * max(reach, 1.0)
    scale = math.sqrt(2 * (size**2 + 1 + reach**2 / 2) / model)  # the token's size, u² taken at half its largest
    layer = nn.TransformerEncoderLayer(
        model, heads, dim_feedforward=1, dropout=0.0, layer_norm_eps=0.0, norm_first=True, batch_first=True, dtype=dtype
    )
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
        layer.norm1.weight.fill_(scale)
        layer.norm2.weight.fill_(1.0)
        _embed_heads(layer.self_attn, old, n, built.ends)
    bound = add_up(built.error_bound, _norm_error(built, reach, size, model))
    return EncoderRamp(built, layer.eval().requires_grad_(False), size, bound)


def _module(built: SharedRamp) -> MultiHeadRamp:
    if not isinstance(built.network, MultiHeadRamp):
        raise UnsupportedError(
            "the ramp is folded; a Transformer block needs its nn.MultiheadAttention. Build it with form='module'."
        )
    return built.network


def _embed_heads(
    new: nn.MultiheadAttention, old: nn.MultiheadAttention, tokens: int, ends: tuple[float, float]
) -> None:
    """The old heads' tensors in the first coordinates of wider heads; torch's √(head size) is taken over; output last."""
    heads, width, before = new.num_heads, new.embed_dim // new.num_heads, old.embed_dim // old.num_heads
    ratio = math.sqrt(width / before)
    source, bias = old.in_proj_weight.reshape(3, heads, before, -1), old.in_proj_bias.reshape(3, heads, before)
    target, target_bias = (
        torch.zeros(3, heads, width, new.embed_dim, dtype=source.dtype),
        torch.zeros(3, heads, width, dtype=source.dtype),
    )
    for part, factor in ((0, ratio), (1, 1.0), (2, 1.0)):
        target[part, :, :2, : tokens + 1] = factor * source[part, :, :2, : tokens + 1]
        target_bias[part, :, :2] = factor * bias[part, :, :2]
    new.in_proj_weight.copy_(target.reshape(3 * new.embed_dim, -1))
    new.in_proj_bias.copy_(target_bias.reshape(-1))
    out = torch.zeros(new.embed_dim, heads, width, dtype=source.dtype)
    out[-1, :, 0] = 1.0
    new.out_proj.weight.copy_(out.reshape(new.embed_dim, -1))
    new.out_proj.bias[-1] = (ends[0] + ends[1]) / 2


def _norm_error(built: SharedRamp, reach: float, size: float, model: int) -> float:
    """What LayerNorm adds: tokens scaled by `1 ± η`, `η = u²/(2B²)`, and shifted by the rounding μ of their mean and size.

    It moves u by `η max|u| + μ`, scores by δ, values by a factor; as in `shared-anchors` the heads' weights sum to at most 1 + 2S.
    """
    u = Precision.of(torch.float64).unit
    low, high = built.ends
    n, kappa = _module(built).tokens, float(built.certificate.terms[1].inputs["sharpness"])
    factor = reach**2 / (2 * size**2) + 8 * (model + 8) * u
    shift = 8 * (model + 8) * u * size
    moved = factor + n * shift  # relative to the largest key and value
    reach_keys = (n / 2 + 2) * (reach / built.spacing + built.anchors / 2 + n / 2 + 2)
    delta = mul_up(2.02 * kappa * reach_keys, moved)
    heads_ = mul_up(expm1_up(min(2 * delta, 700.0)), (high - low) / 2, 1 + 2 * sharing_excess(kappa))
    own = mul_up(_module(built).attention.num_heads * 2.0 * moved, high - low)
    residual = 2 * u * (abs(low) + abs(high))
    return add_up(mul_up(1.01, factor * reach + shift), heads_, own, residual)
