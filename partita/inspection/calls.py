"""One attention call, whichever function made it: q, k, v per head, scale, mask.

There are three cases: the arguments of `F.scaled_dot_product_attention`, those of `F.multi_head_attention_forward` (and so of
`nn.MultiheadAttention`), and those of the fused encoder layer. In the last two, q, k and v are not projected yet;
the projections are computed here a second time, in addition to the model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from partita.errors import ShapeError

__all__ = [
    "MASKED_BELOW",
    "AttentionCall",
    "from_encoder_layer",
    "from_multi_head",
    "from_multi_head_module",
    "from_sdpa",
]

# Masks are written as −∞, the least number of the dtype, −1e9 or −10000: no weight survives any of them. −10000 is −9984 in
# bfloat16, and a position bias may have been added to it.
MASKED_BELOW = -9e3


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """`softmax(scale·q kᵀ + mask) v` for every batch element and head.

    Attributes:
        queries: `(batch, heads, tokens, dim)`.
        keys: `(batch, key_heads, keys, dim)`.
        values: `(batch, key_heads, keys, value_dim)`. Fewer key heads than heads is
            grouped-query attention: head h uses key head `h·key_heads // heads`.
        mask: None, or `(batch or 1, heads or 1, tokens or 1, keys)`: boolean (True may be attended to) or added to the scores.
        causal: position i sees keys 0 … i only.
        crosses: queries are known to be of another sequence than keys.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    scale: float
    mask: Tensor | None = None
    causal: bool = False
    crosses: bool = False

    @property
    def heads(self) -> int:
        return self.queries.shape[1]

    @property
    def batch(self) -> int:
        return self.queries.shape[0]

    def key_head(self, head: int) -> int:
        return head * self.keys.shape[1] // self.heads

    def mask_of(self, element: int, head: int) -> Tensor | None:
        """`(tokens or 1, keys)`."""
        if self.mask is None:
            return None
        return self.mask[element if self.mask.shape[0] > 1 else 0, head if self.mask.shape[1] > 1 else 0]

    def scores(self, head: int) -> tuple[Tensor, Tensor]:
        """Scores of one head, `(batch, tokens, keys)`, in float32 at least, −∞ where masked, and where they are not."""
        dtype = torch.promote_types(self.queries.dtype, torch.float32)
        keys = self.keys[:, self.key_head(head)].to(dtype)
        scores = self.scale * (self.queries[:, head].to(dtype) @ keys.mT)
        if self.mask is not None:
            mask = self.mask[:, head if self.mask.shape[1] > 1 else 0]
            seen = mask if mask.dtype == torch.bool else mask > MASKED_BELOW
            scores = torch.where(seen, scores if mask.dtype == torch.bool else scores + mask.to(dtype), -torch.inf)
        if self.causal:
            rows, columns = scores.shape[-2:]
            scores = scores.masked_fill(
                ~torch.ones(rows, columns, dtype=torch.bool, device=scores.device).tril(), -torch.inf
            )
        return scores, scores > -torch.inf


def _four_axes(tensor: Tensor, lead: tuple[int, ...]) -> Tensor:
    """`(…, tokens, dim)` with leading axes broadcast to `lead`, as `(batch, heads, tokens, dim)`."""
    return tensor.expand(*lead, *tensor.shape[-2:]).reshape(math.prod(lead[:-1]), lead[-1], *tensor.shape[-2:])


def from_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Iterator[AttentionCall]:
    """The call that these arguments of `F.scaled_dot_product_attention` make; one per sequence if they are nested.

    `(…, heads, tokens, dim)`; three axes are read as (batch, tokens, dim) with one head.
    """
    if query.is_nested or key.is_nested or value.is_nested:
        if not (query.is_nested and key.is_nested and value.is_nested) or attn_mask is not None:
            raise ShapeError(
                "scaled_dot_product_attention got nested and plain tensors together; expected all nested or none."
            )
        for q, k, v in zip(query.unbind(), key.unbind(), value.unbind()):
            yield from from_sdpa(q[None], k[None], v[None], None, dropout_p, is_causal, scale, enable_gqa)
        return
    if query.dim() <= 3:  # (tokens, dim) or (batch, tokens, dim): one head
        query, key, value = (t.unsqueeze(-3) for t in (query, key, value))
        attn_mask = attn_mask.unsqueeze(-3) if attn_mask is not None and attn_mask.dim() > 2 else attn_mask
    if query.dim() == 3:
        query, key, value = query[None], key[None], value[None]
    grouped = key.shape[-3] != query.shape[-3] and enable_gqa
    lead = torch.broadcast_shapes(*(t.shape[: -3 if grouped else -2] for t in (query, key, value)))
    leads = [(*lead, t.shape[-3]) if grouped else tuple(lead) for t in (query, key, value)]
    q, k, v = (_four_axes(t, axes) for t, axes in zip((query, key, value), leads))
    mask = None
    if attn_mask is not None:
        mask = attn_mask.reshape((1,) * max(0, 4 - attn_mask.dim()) + tuple(attn_mask.shape))
        if mask.dim() > 4:  # several leading axes: spelled out, as the batch is
            mask = _four_axes(mask, (*leads[0][:-1], mask.shape[-3]))
        mask = mask.expand(*mask.shape[:-1], k.shape[2])
    used = 1 / math.sqrt(max(q.shape[-1], 1)) if scale is None else float(scale)
    yield AttentionCall(q, k, v, used, mask, is_causal)


def _float_mask(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """nn.MultiheadAttention's masks (True must *not* be attended to) as numbers to add."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -torch.inf)


def _split(projected: Tensor, heads: int) -> Tensor:
    """`(tokens, batch, embed)` to `(batch, heads, tokens, dim)`."""
    tokens, batch, embed = projected.shape
    return projected.reshape(tokens, batch, heads, embed // heads).permute(1, 2, 0, 3)


def _takes_hint(arguments: dict[str, Any]) -> bool:
    """Whether `F.multi_head_attention_forward` drops `attn_mask`, and every bias in it, for the hint `is_causal`."""
    needed = arguments.get("need_weights", True) or arguments.get("key_padding_mask") is not None
    return bool(arguments.get("is_causal")) and not needed


def from_multi_head(arguments: dict[str, Any]) -> AttentionCall:
    """The call that the arguments of `F.multi_head_attention_forward`, by name, lead to; q, k, v are projected here."""
    query, key, value = (arguments[name] for name in ("query", "key", "value"))
    crosses = arguments.get("crosses", query is not key)
    padding, heads = arguments.get("key_padding_mask"), arguments["num_heads"]
    if query.dim() == 2:
        query, key, value = query[:, None], key[:, None], value[:, None]
        padding = None if padding is None else padding[None]
    biases = arguments.get("in_proj_bias")
    b = (None, None, None) if biases is None else biases.chunk(3)
    w = (
        [arguments[f"{name}_proj_weight"] for name in "qkv"]
        if arguments.get("use_separate_proj_weight")
        else arguments["in_proj_weight"].chunk(3)
    )
    projected = [functional.linear(x, w_x, b_x) for x, w_x, b_x in zip((query, key, value), w, b)]
    batch = query.shape[1]
    extra = 0
    if arguments.get("bias_k") is not None:
        projected[1] = torch.cat([projected[1], arguments["bias_k"].repeat(1, batch, 1)])
        projected[2] = torch.cat([projected[2], arguments["bias_v"].repeat(1, batch, 1)])
        extra += 1
    q, k, v = (_split(p, heads) for p in projected)
    for name in ("static_k", "static_v"):
        if arguments.get(name) is not None:
            held = arguments[name].reshape(batch, heads, *arguments[name].shape[1:])
            k, v = (held, v) if name == "static_k" else (k, held)
    if arguments.get("add_zero_attn"):
        k, v = (torch.cat([t, torch.zeros_like(t[:, :, :1])], dim=2) for t in (k, v))
        extra += 1
    causal = _takes_hint(arguments)
    mask = None if causal else _float_mask(arguments.get("attn_mask"), q.dtype)
    if mask is not None:
        mask = mask[None, None] if mask.dim() == 2 else mask.reshape(batch, heads, *mask.shape[1:])
    padding = _float_mask(padding, q.dtype)
    if padding is not None:
        mask = padding[:, None, None] if mask is None else mask + padding[:, None, None]
    mask = functional.pad(mask, (0, extra)) if mask is not None and extra else mask
    return AttentionCall(q, k, v, 1 / math.sqrt(q.shape[-1]), mask, causal, crosses)


def from_multi_head_module(
    module: nn.MultiheadAttention, args: tuple[Any, ...], kwargs: dict[str, Any], *, fused: bool
) -> Iterator[AttentionCall]:
    """The call that an `nn.MultiheadAttention` makes of its arguments; one per nested sequence.

    Args:
        fused: it took its fused path, which follows the mask whatever the hint `is_causal` says.
    """
    names = (
        "query",
        "key",
        "value",
        "key_padding_mask",
        "need_weights",
        "attn_mask",
        "average_attn_weights",
        "is_causal",
    )
    given = {**dict(zip(names, args)), **kwargs}
    given["crosses"] = given["query"] is not given["key"]
    if given["query"].is_nested:
        for parts in zip(*(given[name].unbind() for name in names[:3])):
            yield from from_multi_head_module(module, tuple(part[None] for part in parts), {}, fused=fused)
        return
    if module.batch_first and given["query"].dim() == 3:
        given.update({name: given[name].transpose(0, 1) for name in names[:3]})
    held = ("in_proj_weight", "in_proj_bias", "bias_k", "bias_v", "q_proj_weight", "k_proj_weight", "v_proj_weight")
    given.update({name: getattr(module, name) for name in (*held, "num_heads", "add_zero_attn")})
    if fused:
        given["is_causal"] = False
    yield from_multi_head({**given, "use_separate_proj_weight": not module._qkv_same_embed_dim})


def from_encoder_layer(arguments: dict[str, Any]) -> Iterator[AttentionCall]:
    """The call inside the fused `aten::_transformer_encoder_layer_fwd`, its arguments by name; one per nested sequence."""
    source = arguments["src"]
    sequences = [s[None] for s in source.unbind()] if source.is_nested else [source]
    mask, kind = arguments.get("mask"), arguments.get("mask_type")
    for x in sequences:
        if arguments["norm_first"]:
            x = functional.layer_norm(
                x, x.shape[-1:], arguments["norm_weight_1"], arguments["norm_bias_1"], arguments["eps"]
            )
        x = x.transpose(0, 1)
        named = {"query": x, "key": x, "value": x, "num_heads": arguments["num_heads"]}
        call = from_multi_head(
            {**named, "in_proj_weight": arguments["qkv_weight"], "in_proj_bias": arguments["qkv_bias"]}
        )
        if mask is not None and not source.is_nested:
            # The kernel takes whatever is not 0 for True, which must not be attended to: it adds no finite bias.
            seen = mask == 0
            call = replace(call, mask=seen[:, None, None] if kind == 1 else seen[None, None] if kind == 0 else seen)
        yield call
