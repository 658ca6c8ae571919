"""`partita.attend_blocks`: attention that skips blocks of keys, bounds the change, and recomputes blocks if the bound is too large.

A reference for kernels that skip softmax blocks. It runs on every device that torch has, and is not written for speed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from partita.arithmetic.arguments import is_number, require_count, require_flag, require_number
from partita.errors import DomainError, NonFiniteValueError, ShapeError
from partita.kernels.dropped_keys import (
    LOG2_E,
    change_bound,
    needed_tiles,
    norms,
    score_drift,
    tiles_of,
    upper_masses,
    value_balls,
    value_extent,
)
from partita.kernels.plain_arithmetic import plain_arithmetic

__all__ = ["BlockAttention", "attend_blocks", "require_tile"]

_FARTHEST = 1000.0  # nats: exponentials of scores further below the maximum are 0 in every dtype


class BlockAttention(NamedTuple):
    """What `attend_blocks` returns.

    Attributes:
        output: `(…, heads, queries, value_dim)`.
        lse: `(…, heads, queries)`, `log Σ_j exp(s_j)` over the keys that were not skipped.
        bound: `(…, heads, queries)`, an upper bound on how far skipping moved each output; 0 where nothing was skipped.
    """

    output: Tensor
    lse: Tensor
    bound: Tensor


def _most(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).max


def require_tile(tile: Any) -> tuple[int, int]:
    """Queries and keys of a block as two integers ≥ 1; a DomainError otherwise."""
    if not isinstance(tile, (tuple, list)) or len(tile) != 2:
        raise DomainError(f"tile is {tile!r}; expected (queries, keys), two integers ≥ 1.")
    return require_count("tile[0]", tile[0]), require_count("tile[1]", tile[1])


def attend_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    error: float,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    threshold: float | None = None,
    tile: tuple[int, int] = (64, 128),
) -> BlockAttention:
    """Attention that skips tiles of keys, with a proof that this changes no output by more than `error`.

    A tile of keys is skipped for a block of queries if, in every row that sees it, `exp(tile max − running max) < threshold`.
    `q kᵀ` is computed for all tiles; exponentials and products with v only for those that are kept, per batch element and head.
    The change of each output is bounded by `|Δo| ≤ Σ_b U_b(|o − c_b| + r_b)/(Z + Σ_b L_b)` over its skipped tiles b, whose masses
    lie between L_b and U_b and whose values lie within r_b of c_b. Blocks of queries whose bound exceeds `error` are recomputed
    with their skipped tiles, so that the bound is at most `error` everywhere. *Theorem*: `dropped-keys`.

    The bound compares exact attention over all keys with exact attention over those that were kept. Rounding is separate, as in
    any dense attention: half precision is computed in float32 and rounded at the end, and products of float32 are not reduced to
    TF32 or bfloat16, whatever torch's settings are. With unit roundoff u,
    `δ = (d + 16)u(|scale||q| max|k| + max|s|)` and n keys, an output is off by at most
    `(e^{2δ} − 1)·max|v_i − v_j| + (2n + 16)u·max|v|`, as long as numbers stay in the normal range. NaN and infinity in the inputs,
    and scores that overflow, act as in dense attention: the bound is about skipping only. No gradients are computed.

    Args:
        q: `(…, heads, queries, dim)`, as for `F.scaled_dot_product_attention`; float64, float32, bfloat16 or float16.
        k: `(…, heads, keys, dim)`.
        v: `(…, heads, keys, value_dim)`.
        error: how far skipping may move an output, as a Euclidean norm. 0 skips nothing.
        attn_mask: True where a key may be attended to, or numbers added to the scores; broadcasts to `(…, queries, keys)`.
        is_causal: query i sees keys 0 … i only.
        scale: factor of the scores; `1/√dim` by default.
        enable_gqa: several query heads share a key head.
        threshold: from 0 to 1. By default `error/spread`, per batch element and head; spread bounds the distance between values.
            Larger thresholds skip more, but may recompute more.
        tile: queries and keys per block.

    Returns:
        `(output, lse, bound)`. A query that sees no key gets output 0 and lse −∞.

    Raises:
        ShapeError: shapes, dtypes or devices that do not fit together.
        DomainError: a negative error, a threshold outside [0, 1], an invalid tile, or a scale that is not finite.
        NonFiniteValueError: values are so large that sums of them may overflow.

    >>> import torch, partita as pa
    >>> _ = torch.manual_seed(0)
    >>> q, k = 6 * torch.randn(2, 1, 4, 256, 16, dtype=torch.float64)
    >>> v = torch.randn(1, 4, 256, 8, dtype=torch.float64)
    >>> found = pa.attend_blocks(q, k, v, error=1e-3, is_causal=True, tile=(16, 16))
    >>> dense = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    >>> bool(((found.output - dense).norm(dim=-1) <= found.bound + 1e-12).all()), bool((found.bound <= 1e-3).all())
    (True, True)
    """
    error, (rows, width) = require_number("error", error, zero=True), require_tile(tile)
    if threshold is not None and not (is_number(threshold) and 0 <= threshold <= 1):
        raise DomainError(f"threshold is {threshold!r}; expected a number from 0 to 1, or None.")
    is_causal, enable_gqa = require_flag("is_causal", is_causal), require_flag("enable_gqa", enable_gqa)
    lead, groups = _leading_axes(q, k, v, attn_mask, enable_gqa)
    dtype = torch.promote_types(q.dtype, torch.float32)
    if scale is not None and not (is_number(scale) and -_most(dtype) <= scale <= _most(dtype)):
        raise DomainError(f"scale is {scale!r}; expected a number that is finite in {dtype}, or None for 1/√dim.")
    with torch.no_grad(), plain_arithmetic(q.device.type):
        flat = [t.to(dtype) if g == 1 else t.to(dtype).repeat_interleave(g, dim=-3) for t, g in zip((q, k, v), groups)]
        queries, keys, values = (t.expand(*lead, *t.shape[-2:]).reshape(math.prod(lead), *t.shape[-2:]) for t in flat)
        factor = 1 / math.sqrt(max(q.shape[-1], 1)) if scale is None else float(scale)
        count, tokens = queries.shape[:2]
        output = values.new_zeros(count, tokens, values.shape[-1])
        lse = values.new_full((count, tokens), -torch.inf)
        bound = values.new_zeros(count, tokens)
        if keys.shape[1] and count:
            width, root = min(width, keys.shape[1]), math.sqrt(abs(factor))
            # scaled before the product, which may overflow otherwise
            queries, keys = queries * math.copysign(root, factor), keys * root
            held = _Held.of(keys, values, width)
            if bool((held.largest.isfinite() & (held.largest > _most(dtype) / (4 * keys.shape[1]))).any()):
                raise NonFiniteValueError(
                    f"values have norms up to {float(held.largest.max()):.3g}, so that sums of {keys.shape[1]} of them may "
                    f"overflow {dtype}; expected at most {_most(dtype) / (4 * keys.shape[1]):.3g}."
                )
            for start in range(0, tokens, rows):
                part = slice(start, min(start + rows, tokens))
                scores = _masked(queries[:, part] @ keys.mT, attn_mask, is_causal, part, lead)
                sizes = norms(queries[:, part]) * held.longest[:, None]
                output[:, part], lse[:, part], bound[:, part] = _one_block(scores, sizes, held, error, threshold, width)
        shape = (*lead, tokens)
        return BlockAttention(output.to(q.dtype).reshape(*shape, v.shape[-1]), lse.reshape(shape), bound.reshape(shape))


@dataclass(frozen=True, eq=False)
class _Held:
    """Keys and values of all heads, and what can be computed before the first query. The first axis is batch times heads."""

    values: Tensor
    centers: Tensor
    radii: Tensor
    spread: Tensor
    largest: Tensor
    longest: Tensor
    dim: int

    @classmethod
    def of(cls, keys: Tensor, values: Tensor, width: int) -> _Held:
        centers, radii = value_balls(values, width)
        spread, largest = value_extent(values, centers, radii)
        return cls(values, centers, radii, spread, largest, norms(keys).amax(dim=-1), keys.shape[-1])


def _one_block(
    scores: Tensor, sizes: Tensor, held: _Held, error: float, threshold: float | None, width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs, lse and bounds of one block of queries; scores are `(batch·heads, rows, keys)`."""
    best = tiles_of(scores, width, -torch.inf).amax(dim=-1)
    top = best.amax(dim=-1, keepdim=True)
    top = torch.where(top == -torch.inf, 0.0, top)  # rows that see nothing
    at = (error / held.spread).clamp(max=1.0)[:, None, None] if threshold is None else threshold
    at = torch.nan_to_num(at, nan=0.0) if isinstance(at, Tensor) else at
    visible = (best != -torch.inf).any(dim=1)
    kept = needed_tiles(best, at).any(dim=1)
    skipped = visible & ~kept
    mass = scores.new_zeros(scores.shape[:2])
    sums = scores.new_zeros(*scores.shape[:2], held.values.shape[-1])

    def add(where: Tensor) -> None:
        for b in where.any(dim=0).nonzero().flatten().tolist():
            chosen, part = where[:, b].nonzero().flatten(), slice(b * width, (b + 1) * width)
            weights = torch.exp(scores[chosen, :, part] - top[chosen])
            mass[chosen] += weights.sum(dim=-1)
            sums[chosen] += weights @ held.values[chosen, part]

    add(kept)
    bound = torch.zeros_like(mass)
    if skipped.any():
        bound = _skipped_bound(scores, sizes, held, skipped, (top, mass, sums), width)
        redone = ~(bound.double() <= error).all(dim=1)
        add(skipped & redone[:, None])
        bound[redone] = 0.0
    empty = mass == 0
    output = torch.where(empty[..., None], 0.0, sums / torch.where(empty, 1.0, mass)[..., None])
    return output, torch.where(empty, -torch.inf, top[..., 0] + mass.log()), bound


def _skipped_bound(
    scores: Tensor,
    sizes: Tensor,
    held: _Held,
    skipped: Tensor,
    done: tuple[Tensor, Tensor, Tensor],
    width: int,
) -> Tensor:
    """Bound on the change from the skipped tiles, `(batch·heads, rows)`."""
    top, mass, sums = done
    means = sums / torch.where(mass == 0, 1.0, mass)[..., None]
    upper, weighted = torch.zeros_like(mass), torch.zeros_like(mass)
    for b in skipped.any(dim=0).nonzero().flatten().tolist():
        chosen = skipped[:, b].nonzero().flatten()
        exponents = (scores[chosen, :, b * width : (b + 1) * width] - top[chosen]) * LOG2_E
        most = upper_masses(exponents).sum(dim=-1)
        reach = norms(means[chosen] - held.centers[chosen, None, b]) + held.radii[chosen, None, b]
        upper[chosen] += most
        weighted[chosen] += most * reach
    drift = score_drift(sizes, top[..., 0].abs() + _FARTHEST, held.dim, torch.finfo(scores.dtype).eps / 2)
    spread, largest = (t[:, None].expand_as(mass) for t in (held.spread, held.largest))
    terms = scores.shape[-1] + held.values.shape[-1]
    return change_bound(weighted, upper, mass, drift=drift, spread=spread, largest=largest, terms=terms)


def _masked(scores: Tensor, mask: Tensor | None, causal: bool, part: slice, lead: tuple[int, ...]) -> Tensor:
    if mask is not None:
        rows = mask[..., part, :] if mask.dim() > 1 and mask.shape[-2] > 1 else mask
        spelled = rows.expand(*lead, *scores.shape[-2:]).reshape(scores.shape)
        scores = scores.masked_fill(~spelled, -torch.inf) if mask.dtype == torch.bool else scores + spelled.to(scores)
    if causal:
        places = torch.arange(part.start, part.stop, device=scores.device)
        later = torch.arange(scores.shape[-1], device=scores.device) > places[:, None]
        scores = scores.masked_fill(later, -torch.inf)
    return scores


def _leading_axes(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, grouped: bool
) -> tuple[tuple[int, ...], tuple[int, int, int]]:
    """The broadcast axes before tokens, and how many query heads share each head of q (1), k and v."""
    given = {"q": q, "k": k, "v": v, **({} if mask is None else {"attn_mask": mask})}
    for name, tensor in given.items():
        if not isinstance(tensor, Tensor):
            raise ShapeError(f"{name}: found {type(tensor).__name__}; expected a tensor.")
        if tensor.device != q.device:
            raise ShapeError(f"{name} is on {tensor.device}; expected {q.device}, like q.")
    if {t.dtype for t in (q, k, v)} - {q.dtype} or not q.is_floating_point() or q.dtype.itemsize < 2:
        raise ShapeError(
            f"q, k and v are {q.dtype}, {k.dtype} and {v.dtype}; expected one dtype for all three: float64, float32, bfloat16 or "
            "float16."
        )
    if mask is not None and mask.dtype != torch.bool and not mask.is_floating_point():
        raise ShapeError(f"attn_mask is {mask.dtype}; expected bool or floating point.")
    shapes = ", ".join(f"{name} {tuple(t.shape)}" for name, t in given.items())
    wanted = "expected q (…, heads, queries, dim), k (…, heads, keys, dim), v (…, heads, keys, value_dim)"
    if min(t.dim() for t in (q, k, v)) < 2 or q.shape[-1] != k.shape[-1] or k.shape[-2] != v.shape[-2]:
        raise ShapeError(f"the shapes are {shapes}; {wanted}.")
    heads, groups = [], (1, 1, 1)
    if grouped and min(t.dim() for t in (q, k, v)) > 2:
        heads = [q.shape[-3]]
        if not all(t.shape[-3] and heads[0] % t.shape[-3] == 0 for t in (k, v)):
            raise ShapeError(
                f"the shapes are {shapes}; with enable_gqa the heads of k and of v must divide those of q."
            )
        groups = (1, heads[0] // k.shape[-3], heads[0] // v.shape[-3])
    try:
        lead = (*torch.broadcast_shapes(*(t.shape[: -3 if heads else -2] for t in (q, k, v))), *heads)
        if mask is not None:
            torch.broadcast_to(mask, (*lead, q.shape[-2], k.shape[-2]))
    except RuntimeError as problem:
        raise ShapeError(
            f"the shapes are {shapes}; {wanted}{', and attn_mask to broadcast' if mask is not None else ''}. "
            "For fewer key heads than query heads use enable_gqa=True."
        ) from problem
    return lead, groups
