"""What a head does to every query, on a GPU: flash attention with more sums per row, one pass, no matrix of scores.

Scores are products on the tensor cores with float32 sums, exact products for half precision; float32 inputs are multiplied as
float32. The weights that multiply the values are rounded to the dtype of the values, as flash attention does; all other sums
take them in float32. Sums within a tile are plain, sums over tiles are compensated. The two best keys of a tile come from one
minimum over `best − score` with the column number in its lowest bits, so a margin is within 2^−16 of itself, besides the
rounding of the scores.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from partita.kernels.triton_code import launch

__all__ = ["pair_products", "sum_rows"]

_LOG2E = math.log2(math.e)
_NONE = tl.constexpr(0x7F800000)  # the bits of infinity


@triton.jit
def _two_least(a, b, c, d):
    """The two smallest numbers of two ordered pairs."""
    return tl.minimum(a, c), tl.minimum(tl.maximum(a, c), tl.minimum(b, d))


@triton.jit
def _added(total, lost, more, factor):
    """`total·factor + more`, and the rounding error of that addition (Kahan)."""
    total = total * factor
    more = more - lost * factor
    sum = total + more
    return sum, (sum - total) - more


@triton.jit
def _tiles(
    state,
    begin,
    end,
    q,
    keys,
    values,
    mask,
    ids,
    rows,
    own,
    slope,
    key_stride,
    value_stride,
    mask_stride,
    M,
    rate,
    window,
    D: tl.constexpr,
    DV: tl.constexpr,
    BN: tl.constexpr,
    SIDE: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    MASK: tl.constexpr,
    ALIBI: tl.constexpr,
    TOKENS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The tiles of keys from begin to end. SIDE −1 or 1: every query sees all keys, all before it or all after it; 0: otherwise."""
    (
        top,
        winner,
        second,
        runner_up,
        total,
        total_lost,
        weighted,
        weighted_lost,
        squares,
        squares_lost,
        below,
        below_lost,
        below2,
        below2_lost,
        seen,
        away,
        away_lost,
        same,
        after,
        out,
    ) = state
    columns = tl.arange(0, BN)
    dims = tl.arange(0, D)
    outs = tl.arange(0, DV)
    for start in range(begin, end, BN):
        j = start + columns
        k = tl.load(keys + j[:, None].to(tl.int64) * key_stride + dims[None, :], mask=j[:, None] < M, other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if SIDE == 0:
            visible = j[None, :] < M
            if CAUSAL:
                visible = visible & (j[None, :] <= rows[:, None])
            else:
                visible = visible & (rows[:, None] >= 0)
            if WINDOW:
                visible = visible & (rows[:, None] - j[None, :] < window) & (j[None, :] - rows[:, None] < window)
            if MASK > 0:
                place = mask + rows[:, None].to(tl.int64) * mask_stride + j[None, :]
                if MASK == 1:
                    visible = visible & (tl.load(place, mask=visible, other=0) != 0)
                else:
                    added = tl.load(place, mask=visible, other=0.0).to(tl.float32)
                    visible = visible & (added > -9e3)
                    s = s * rate + added * 1.4426950408889634
        SCALED: tl.constexpr = (MASK == 2) or ALIBI  # adding biases has already scaled the scores
        if ALIBI:
            if MASK != 2:
                s = s * rate
            s = s - slope * tl.abs((rows[:, None] - j[None, :]).to(tl.float32))
        if SIDE == 0:
            s = tl.where(visible, s, -float("inf"))
        height = tl.max(s, 1)
        if not SCALED:
            height = height * rate
        new = tl.maximum(top, height)
        base = tl.where(new == -float("inf"), 0.0, new)
        rise = tl.where(top == -float("inf"), 0.0, base - top)
        fall = tl.exp2(-rise)
        if SCALED:
            t = s - base[:, None]
        else:
            t = s * rate - base[:, None]
        p = tl.exp2(t)
        # the two best keys of the tile
        bits = (t.to(tl.int32, bitcast=True) & (0x7FFFFFFF - (BN - 1))) | columns[None, :]
        first, next = tl.reduce((bits, tl.full(bits.shape, 0x7FFFFFFF, tl.int32)), 1, _two_least)
        later = height > top
        first_gap = (first & (0x7FFFFFFF - (BN - 1))).to(tl.float32, bitcast=True)
        next_gap = (next & (0x7FFFFFFF - (BN - 1))).to(tl.float32, bitcast=True)
        next_gap = tl.where(next >= _NONE, float("inf"), next_gap)
        first_gap = tl.where(first >= _NONE, float("inf"), first_gap)
        lost = tl.where(top == -float("inf"), float("inf"), rise)  # how far the old winner is below a new one
        runner_up = tl.where(
            later,
            tl.where(lost <= next_gap, winner, tl.where(next >= _NONE, -1, start + (next & (BN - 1)))),
            tl.where(first_gap < second, start + (first & (BN - 1)), runner_up),
        )
        second = tl.where(later, tl.minimum(lost, next_gap), tl.minimum(first_gap, second))
        winner = tl.where(later, start + (first & (BN - 1)), winner)
        # the sums
        mass = tl.sum(p, 1)
        if SIDE == 0:
            t = tl.where(visible, t, 0.0)
            here = tl.sum(visible.to(tl.float32), 1)
            apart = tl.sum(p * tl.abs((rows[:, None] - j[None, :]).to(tl.float32)), 1)
        else:
            here = BN * 1.0
            apart = tl.abs((rows - start).to(tl.float32) * mass - tl.sum(p * columns[None, :].to(tl.float32), 1))
        weighted, weighted_lost = _added(weighted - rise * total, weighted_lost, tl.sum(p * t, 1), fall)
        total, total_lost = _added(total, total_lost, mass, fall)
        squares, squares_lost = _added(squares, squares_lost, tl.sum(p * p, 1), fall * fall)
        below2, below2_lost = _added(below2 + rise * (seen * rise - 2 * below), below2_lost, tl.sum(t * t, 1), 1.0)
        below, below_lost = _added(below - seen * rise, below_lost, tl.sum(t, 1), 1.0)
        seen += here
        away, away_lost = _added(away, away_lost, apart, fall)
        if TOKENS:
            token = tl.load(ids + j, mask=j < M, other=-2)
            before = tl.load(ids + j - 1, mask=(j < M) & (j > 0), other=-2)
            same = same * fall + tl.sum(tl.where(own[:, None] == token[None, :], p, 0.0), 1)
            after = after * fall + tl.sum(tl.where(own[:, None] == before[None, :], p, 0.0), 1)
        v = tl.load(values + j[:, None].to(tl.int64) * value_stride + outs[None, :], mask=j[:, None] < M, other=0.0)
        out = tl.dot(p.to(v.dtype), v, out * fall[:, None], input_precision=PRECISION)
        top = new
    return (
        top,
        winner,
        second,
        runner_up,
        total,
        total_lost,
        weighted,
        weighted_lost,
        squares,
        squares_lost,
        below,
        below_lost,
        below2,
        below2_lost,
        seen,
        away,
        away_lost,
        same,
        after,
        out,
    )


@triton.jit
def _rows(
    queries,
    keys,
    values,
    mask,
    slopes,
    ids,
    reals,
    labels,
    output,
    query_head,
    query_stride,
    key_head,
    key_stride,
    value_head,
    value_stride,
    mask_head,
    mask_stride,
    N,
    M,
    group,
    first_head,
    rate,
    window,
    D: tl.constexpr,
    DV: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    MASK: tl.constexpr,
    ALIBI: tl.constexpr,
    TOKENS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    head = tl.program_id(1)
    # under a causal mask the longest rows come first, so that the last blocks to run are short
    block = tl.num_programs(0) - 1 - tl.program_id(0) if CAUSAL else tl.program_id(0)
    rows = block * BM + tl.arange(0, BM)
    dims = tl.arange(0, D)
    outs = tl.arange(0, DV)
    shared = ((first_head + head) // group).to(tl.int64)
    keys += shared * key_head
    values += shared * value_head
    q = tl.load(
        queries + head.to(tl.int64) * query_head + rows[:, None].to(tl.int64) * query_stride + dims[None, :],
        mask=rows[:, None] < N,
        other=0.0,
    )
    if MASK > 0:
        mask += head.to(tl.int64) * mask_head
    slope = 0.0
    if ALIBI:
        slope = tl.load(slopes + head) * 1.4426950408889634
    own = rows
    if TOKENS:
        own = tl.load(ids + rows, mask=rows < N, other=-1)
    zero = tl.zeros([BM], tl.float32)
    nobody = tl.full([BM], -1, tl.int32)
    lowest = tl.full([BM], -float("inf"), tl.float32)
    state = (
        lowest,
        nobody,
        -lowest,
        nobody,
        zero,
        zero,
        zero,
        zero,
        zero,
        zero,
        zero,
        zero,
        zero,
        zero,
        zero,
        zero,
        zero,
        zero,
        zero,
        tl.zeros([BM, DV], tl.float32),
    )
    # the keys: [low, left) partly seen, [left, middle) seen and before the queries, [middle, right) partly seen or beside the
    # queries, [right, tail) seen and after them, [tail, high) partly seen. Bounds are multiples of BN
    low = 0
    high = tl.cdiv(M, BN) * BN
    whole = M // BN * BN
    start = block * BM
    stop = start + BM
    if CAUSAL:
        high = tl.minimum(high, tl.cdiv(stop, BN) * BN)
    if WINDOW:
        low = tl.maximum(start - window + 1, 0) // BN * BN
        high = tl.minimum(high, tl.cdiv(stop + window, BN) * BN)
    left = low
    middle = tl.minimum(tl.minimum(start // BN * BN, whole), high)
    if WINDOW:
        left = tl.minimum(tl.cdiv(tl.maximum(stop - window, 0), BN) * BN, middle)
        left = tl.maximum(left, low)
    right = tl.minimum(tl.cdiv(stop, BN) * BN, high)
    tail = tl.maximum(right, tl.minimum(whole, high))
    if CAUSAL or WINDOW:
        right = high
        tail = high
    if MASK > 0:
        left = low
        middle = low
        right = high
        tail = high
    middle = tl.maximum(middle, left)
    right = tl.maximum(right, middle)
    if WINDOW:
        state = _tiles(
            state, low, left, q, keys, values, mask, ids, rows, own, slope, key_stride, value_stride, mask_stride, M,
            rate, window, D, DV, BN, 0, CAUSAL, WINDOW, MASK, ALIBI, TOKENS, PRECISION,
        )  # fmt: skip
    if MASK == 0:
        state = _tiles(
            state, left, middle, q, keys, values, mask, ids, rows, own, slope, key_stride, value_stride, mask_stride, M,
            rate, window, D, DV, BN, -1, CAUSAL, WINDOW, MASK, ALIBI, TOKENS, PRECISION,
        )  # fmt: skip
    state = _tiles(
        state, middle, right, q, keys, values, mask, ids, rows, own, slope, key_stride, value_stride, mask_stride, M,
        rate, window, D, DV, BN, 0, CAUSAL, WINDOW, MASK, ALIBI, TOKENS, PRECISION,
    )  # fmt: skip
    if MASK == 0 and not CAUSAL and not WINDOW:
        state = _tiles(
            state, right, tail, q, keys, values, mask, ids, rows, own, slope, key_stride, value_stride, mask_stride, M,
            rate, window, D, DV, BN, 1, CAUSAL, WINDOW, MASK, ALIBI, TOKENS, PRECISION,
        )  # fmt: skip
        state = _tiles(
            state, tail, high, q, keys, values, mask, ids, rows, own, slope, key_stride, value_stride, mask_stride, M,
            rate, window, D, DV, BN, 0, CAUSAL, WINDOW, MASK, ALIBI, TOKENS, PRECISION,
        )  # fmt: skip
    inside = rows < N
    heads = tl.num_programs(1).to(tl.int64)
    place = head.to(tl.int64) * N + rows
    step = heads * N
    LN2: tl.constexpr = 0.6931471805599453
    any = state[14] > 0
    tl.store(reals + place, state[0] * LN2, mask=inside)
    tl.store(reals + step + place, state[2] * LN2, mask=inside)
    tl.store(reals + 2 * step + place, tl.where(any, tl.maximum((state[4] - 1.0) - state[5], 0.0), 0.0), mask=inside)
    tl.store(reals + 3 * step + place, (state[6] - state[7]) * LN2, mask=inside)
    tl.store(reals + 4 * step + place, state[8] - state[9], mask=inside)
    tl.store(reals + 5 * step + place, (state[10] - state[11]) * LN2, mask=inside)
    tl.store(reals + 6 * step + place, (state[12] - state[13]) * (LN2 * LN2), mask=inside)
    tl.store(reals + 7 * step + place, state[15] - state[16], mask=inside)
    tl.store(reals + 8 * step + place, state[17], mask=inside)
    tl.store(reals + 9 * step + place, state[18], mask=inside)
    tl.store(labels + place, state[1], mask=inside)
    tl.store(labels + step + place, state[3], mask=inside)
    tl.store(labels + 2 * step + place, state[14].to(tl.int32), mask=inside)
    divisor = tl.where(any, state[4], 1.0)
    tl.store(
        output + place[:, None] * DV + outs[None, :],
        state[19] / divisor[:, None],
        mask=inside[:, None],
    )


def sum_rows(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    scale: float,
    group: int = 1,
    first_head: int = 0,
    mask: Tensor | None = None,
    causal: bool = False,
    window: int | None = None,
    slopes: Tensor | None = None,
    ids: Tensor | None = None,
    blocks: tuple[int, int, int, int] | None = None,
) -> dict[str, Tensor]:
    """The sums of `partita.inspection.row_sums.RowSums` by name, `(heads, tokens)` in float32.

    Args:
        queries: `(heads, tokens, dim)`: some heads of one sequence.
        keys: `(key_heads, keys, dim)`, all of them.
        values: `(key_heads, keys, value_dim)`.
        scale: factor of the scores.
        group: query heads that share a key head.
        first_head: number of the first of these heads.
        mask: `(heads or 1, tokens or 1, keys)`, booleans or numbers to add.
        causal: query i sees keys 0 … i only.
        window: query i sees the keys j with `|i − j| < window` only.
        slopes: `(heads,)` for ALiBi.
        ids: `(keys,)`, the tokens of self-attention.
        blocks: queries and keys of a tile, warps and stages, to override the defaults.
    """
    heads, count, _ = queries.shape
    width = values.shape[2]
    # the largest product is the largest score only if the factor is positive
    queries = -queries if scale < 0 else queries
    queries, keys, values = (_padded(t) for t in (queries, keys, values))
    reals = queries.new_empty(10, heads, count, dtype=torch.float32)
    labels = queries.new_empty(3, heads, count, dtype=torch.int32)
    output = queries.new_empty(heads, count, values.shape[2], dtype=torch.float32)
    kind, mask_strides = 0, (0, 0)
    if mask is not None:
        kind = 1 if mask.dtype == torch.bool else 2
        mask = mask if mask.stride(-1) == 1 else mask.contiguous()
        mask_strides = (mask.stride(0) if mask.shape[0] > 1 else 0, mask.stride(1) if mask.shape[1] > 1 else 0)
    bm, bn, warps, stages = blocks or _blocks(queries.dtype, max(queries.shape[2], values.shape[2]))
    held = queries  # placeholder pointer for missing arguments
    numbers = (
        None if ids is None else torch.unique(ids, return_inverse=True)[1]
    )  # any integers, renumbered to fit into 32 bits
    launch(
        _rows,
        (triton.cdiv(count, bm), heads),
        queries,
        keys,
        values,
        held if mask is None else mask.view(torch.uint8) if kind == 1 else mask,
        held if slopes is None else slopes.to(queries.device, torch.float32).contiguous(),
        held if numbers is None else numbers.to(queries.device, torch.int32).contiguous(),  # −1 and −2: no token
        reals,
        labels,
        output,
        *(queries.stride(0), queries.stride(1), keys.stride(0), keys.stride(1), values.stride(0), values.stride(1)),
        *mask_strides,
        count,
        keys.shape[1],
        group,
        first_head,
        abs(scale) * _LOG2E,
        window or 0,
        D=queries.shape[2],
        DV=values.shape[2],
        BM=bm,
        BN=bn,
        CAUSAL=causal,
        WINDOW=window is not None,
        MASK=kind,
        ALIBI=slopes is not None,
        TOKENS=ids is not None,
        PRECISION="ieee" if queries.dtype == torch.float32 else "tf32",
        num_warps=warps,
        num_stages=stages,
    )
    best, margin, rest, weighted, squares, below, below_squared, away, same, after = reals
    unknown = torch.full_like(same, torch.nan) if ids is None else None
    found: dict[str, Any] = {
        "best": best,
        "winner": labels[0],
        "margin": margin,
        "runner_up": labels[1],
        "rest": rest,
        "weighted": weighted,
        "squares": squares,
        "below": below,
        "below_squared": below_squared,
        "seen": labels[2],
        "away": away,
        "same": same if unknown is None else unknown,
        "after_same": after if unknown is None else unknown,
        "output": output[..., :width],
    }
    return found


@triton.jit
def _pairs(
    queries,
    keys,
    partners,
    output,
    query_head,
    query_stride,
    key_head,
    key_stride,
    N,
    group,
    first_head,
    D: tl.constexpr,
    BM: tl.constexpr,
):
    head = tl.program_id(1)
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    dims = tl.arange(0, D)
    inside = rows < N
    place = head.to(tl.int64) * N + rows
    shared = ((first_head + head) // group).to(tl.int64)
    partner = tl.load(partners + place, mask=inside, other=0)
    q = tl.load(
        queries + head.to(tl.int64) * query_head + rows[:, None].to(tl.int64) * query_stride + dims[None, :],
        mask=inside[:, None],
        other=0.0,
    )
    k = tl.load(
        keys + shared * key_head + partner[:, None].to(tl.int64) * key_stride + dims[None, :],
        mask=inside[:, None],
        other=0.0,
    )
    tl.store(output + place, tl.sum(q.to(tl.float32) * k.to(tl.float32), 1), mask=inside)


def pair_products(queries: Tensor, keys: Tensor, partners: Tensor, *, group: int = 1, first_head: int = 0) -> Tensor:
    """The product of each query with one key, `(heads, tokens)` in float32.

    Args:
        queries: `(heads, tokens, dim)`: some heads of one sequence.
        keys: `(key_heads, keys, dim)`, all of them.
        partners: `(heads, tokens)`, numbers of keys.
        group: query heads that share a key head.
        first_head: number of the first of these heads.
    """
    heads, count, _ = queries.shape
    queries, keys = _padded(queries), _padded(keys)
    output = queries.new_empty(heads, count, dtype=torch.float32)
    strides = queries.stride(0), queries.stride(1), keys.stride(0), keys.stride(1)
    block = 32
    launch(
        _pairs,
        (triton.cdiv(count, block), heads),
        queries,
        keys,
        partners.contiguous(),
        output,
        *strides,
        count,
        group,
        first_head,
        D=queries.shape[2],
        BM=block,
    )
    return output


def _padded(tensor: Tensor) -> Tensor:
    """Contiguous rows padded to a power of two, at least 16, as kernel blocks require."""
    missing = max(16, triton.next_power_of_2(tensor.shape[-1])) - tensor.shape[-1]
    tensor = torch.nn.functional.pad(tensor, (0, missing)) if missing else tensor
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _blocks(dtype: torch.dtype, width: int) -> tuple[int, int, int, int]:
    """Queries and keys of a tile, warps, stages."""
    if dtype == torch.float32:
        return 32, 32, 4, 1
    return (128, 128, 8, 2) if width <= 128 else (64, 32, 4, 2)
