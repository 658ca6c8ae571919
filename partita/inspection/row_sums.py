"""What a head does to every query, in one pass over tiles of its scores: memory grows with the number of tokens, not its square.

Sums within a tile use the dtype of the pass. Tiles are combined in float64 (on a GPU: compensated float32), relative to the
largest score so far, as flash attention does. Besides the output, each query gets its two best keys and the sums behind
leakage, entropy, effective keys, spread of the scores and distance of attention. Large calls run through native loops
on a CPU where numba is installed (`partita.kernels.rows_native`), and through a Triton kernel on a CUDA device
(`partita.kernels.rows_triton`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from types import ModuleType

import torch
from torch import Tensor

from partita.inspection.calls import COLUMNS, AttentionCall
from partita.kernels import native, rows_native
from partita.kernels.devices import device_kernels
from partita.kernels.plain_arithmetic import plain_arithmetic

__all__ = ["RowSums", "pair_scores", "row_sums", "runs_on_device"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # supported by the GPU kernel
_ROWS, _KEYS = 512, 10 * COLUMNS  # of a tile
_SEGMENT = 32
_LN2, _LOG2E = math.log(2), math.log2(math.e)
_AT_ONCE = 1 << 20  # scores at a time, so that they stay in the cache
_OUTPUTS_AT_ONCE = 1 << 26  # numbers of the output held at once


@dataclass(frozen=True, eq=False)
class RowSums:
    """Sums over the keys that each query sees. s are the scores; all exponentials are relative to the largest of them.

    Attributes:
        best: the largest score; −∞ if no key is seen.
        winner: its key; ties go to the smallest label; −1 if no key is seen.
        margin: largest minus second largest score; infinite if only one key is seen.
        runner_up: the key of the second largest score; −1 if only one key is seen.
        rest: `Σ_{j ≠ winner} e^{s_j − best}`.
        weighted: `Σ e^{s_j − best}(s_j − best)`.
        squares: `Σ e^{2(s_j − best)}`.
        below: `Σ (s_j − best)`.
        below_squared: `Σ (s_j − best)²`.
        seen: how many keys the query sees.
        away: `Σ e^{s_j − best}|i − j|`, i the position of the query.
        same: `Σ e^{s_j − best}` over keys of the query's own token; NaN if tokens are unknown.
        after_same: the same over keys that follow a key of the query's own token.
        output: `Σ w_j V_j`, `(heads, rows, value_dim)`.
    """

    best: Tensor
    winner: Tensor
    margin: Tensor
    runner_up: Tensor
    rest: Tensor
    weighted: Tensor
    squares: Tensor
    below: Tensor
    below_squared: Tensor
    seen: Tensor
    away: Tensor
    same: Tensor
    after_same: Tensor
    output: Tensor


def row_sums(
    call: AttentionCall, *, dtype: torch.dtype | None = None, tokens: Tensor | None = None
) -> Iterator[tuple[int, slice, RowSums]]:
    """The sums of every query of a call, one sequence and a few heads at a time; each is `(heads, tokens)`.

    Args:
        call: the attention.
        dtype: of the scores and of the sums within a tile: float32 or float64; `call.score_dtype` by default.
        tokens: `(batch, keys)` integers, the tokens of self-attention; None if they are unknown.
    """
    dtype = dtype or call.score_dtype
    on_device = _device_kernels(call, dtype)
    count, width = call.queries.shape[2], call.values.shape[3]
    step = max(1, _OUTPUTS_AT_ONCE // max(1, count * width))
    for element in range(call.batch):
        ids = None if tokens is None or not call.is_square else tokens[element].to(call.queries.device)
        for start in range(0, call.heads, step):
            heads = slice(start, min(start + step, call.heads))
            with torch.no_grad(), plain_arithmetic(call.queries.device.type):
                if on_device is None:
                    yield element, heads, _blocked(call, element, heads, dtype, ids)
                else:
                    yield element, heads, _on_device(on_device, call, element, heads, ids)


def _device_kernels(call: AttentionCall, dtype: torch.dtype) -> ModuleType | None:
    """The GPU kernel if it can run this call; None if torch computes it in blocks."""
    if dtype != torch.float32 or call.positions is not None or call.modify is not None:
        return None
    if max(call.queries.shape[3], call.values.shape[3]) > 256:
        return None
    if not all(call.queries.shape) or not all(call.values.shape):
        return None
    return device_kernels("rows", call.queries, call.keys, call.values, dtypes=_DTYPES)


def runs_on_device(call: AttentionCall, dtype: torch.dtype) -> bool:
    """Whether the GPU kernel computes the sums of this call.

    Args:
        call: the attention.
        dtype: of the sums.
    """
    return _device_kernels(call, dtype) is not None


def pair_scores(call: AttentionCall, element: int, heads: slice, partners: Tensor, dtype: torch.dtype) -> Tensor:
    """`AttentionCall.pairs`, with the GPU kernel where it can run.

    Args:
        call: the attention.
        element: number of the sequence.
        heads: which heads.
        partners: `(tokens,)` or `(heads, tokens)`, the key of each query.
        dtype: to compute in.
    """
    kernels = _device_kernels(call, dtype)
    products = None
    if kernels is not None:
        held = partners.clamp(0, call.keys.shape[2] - 1).expand(len(range(call.heads)[heads]), -1)
        group = call.heads // call.keys.shape[1]
        products = call.scale * kernels.pair_products(
            call.queries[element, heads], call.keys[element], held, group=group, first_head=heads.start
        )
    return call.pairs(element, heads, partners, dtype, products)


def _on_device(kernels: ModuleType, call: AttentionCall, element: int, heads: slice, ids: Tensor | None) -> RowSums:
    mask = call.mask
    if mask is not None:
        mask = mask[element if mask.shape[0] > 1 else 0]
        mask = mask[heads] if mask.shape[0] > 1 else mask
    sums = kernels.sum_rows(
        call.queries[element, heads],
        call.keys[element],
        call.values[element],
        scale=call.scale,
        group=call.heads // call.keys.shape[1],
        first_head=heads.start,
        mask=mask,
        causal=call.causal,
        window=call.window,
        slopes=None if call.slopes is None else call.slopes[heads],
        ids=ids,
    )
    return RowSums(**sums)


def _blocked(call: AttentionCall, element: int, heads: slice, dtype: torch.dtype, ids: Tensor | None) -> RowSums:
    """Blocks of queries, tiles of keys."""
    count, tokens = len(range(call.heads)[heads]), call.queries.shape[2]
    size = max(1, min(_ROWS, _AT_ONCE // max(1, min(_KEYS, call.keys.shape[2]))))
    step = max(1, _AT_ONCE // max(1, size * min(_KEYS, call.keys.shape[2])))
    # reused: the system would clear fresh memory of this size for every tile, which takes as long as the sums
    room = min(step, count) * min(size, tokens) * min(_KEYS, call.keys.shape[2] + COLUMNS)
    numbers = None if ids is None else _Tokens.of(ids)
    starts = range(heads.start, heads.start + count, step)
    groups = [slice(first, min(first + step, heads.start + count)) for first in starts]
    blocks = [slice(first, first + size) for first in range(0, tokens, size) or [0]]

    def memory(tiles: int) -> list[Tensor]:
        return [torch.empty(room, dtype=dtype, device=call.queries.device) for _ in range(tiles)]

    if call.queries.device.type == "cpu" and native.worth_it(count * tokens, call.keys.shape[2]):
        # under a causal mask the last blocks are the largest; they run first, to balance the threads
        tasks = [(group, rows) for group in reversed(groups) for rows in reversed(blocks)]
        found = native.each_on_one_thread(tasks, lambda task: _block(call, element, *task, memory(1), numbers))[::-1]
    else:
        held = memory(3)
        found = [_block(call, element, group, rows, held, numbers) for group in groups for rows in blocks]
    each = len(blocks)
    return _joined([_joined(found[k * each : (k + 1) * each], 1) for k in range(len(groups))], 0)


@dataclass(frozen=True, eq=False)
class _Tokens:
    """Numbers of the tokens, counted from 0, and of the tokens before them: −1 before the first."""

    here: Tensor
    before: Tensor

    @classmethod
    def of(cls, ids: Tensor) -> _Tokens:
        here = torch.unique(ids, return_inverse=True)[1]
        return cls(here, torch.cat([here.new_full((1,), -1), here[:-1]]))


def _joined(parts: list[RowSums], axis: int) -> RowSums:
    if len(parts) == 1:
        return parts[0]
    return RowSums(*(torch.cat([getattr(p, f.name) for p in parts], dim=axis) for f in fields(RowSums)))


def _block(
    call: AttentionCall,
    element: int,
    heads: slice,
    rows: slice,
    memory: list[Tensor],
    tokens: _Tokens | None,
) -> RowSums:
    """The sums of some queries; by native loops if `memory` has one tensor only, for the scores."""
    dtype, values = memory[0].dtype, call.of_heads(call.values, element, heads)
    first, last = call.range_of_keys(rows)
    places, found = call.places[rows], None
    for keys in _tiles(first, last, int(places.min()) + 1 if call.causal and len(places) else last):
        scores = call.tile(element, heads, rows, keys, dtype, memory[0])
        held = values[:, keys].to(dtype)
        if len(memory) == 1:
            tile = _native_tile(scores, held, places, keys, tokens)
        else:
            full = call.is_full(rows, keys)
            tile = _tile(scores, held, places, keys.start, memory[1:], full=full, tokens=tokens)
        found = tile if found is None else _merged(found, tile)
    if found is None:
        scores = values.new_full((len(values), len(places), 1), -torch.inf, dtype=dtype)
        found = _tile(scores, values.new_zeros(len(values), 1, values.shape[2], dtype=dtype), places, 0, [scores] * 2)
    total = (found.rest + (found.seen > 0)).clamp(min=1e-300)
    return RowSums(**{**vars(found), "output": found.output / total[..., None]})


def _tiles(first: int, last: int, full: int) -> Iterator[slice]:
    """Tiles of the keys from first to last. Keys before `full`, which all queries see, do not share a tile with others."""
    cut = first + max(0, min(full, last) - first) // _SEGMENT * _SEGMENT
    for begin, end in ((first, cut), (cut, last)):
        for start in range(begin, end, _KEYS):
            yield slice(start, min(start + _KEYS, end))


def _tile(
    scores: Tensor,
    values: Tensor,
    places: Tensor,
    start: int,
    memory: list[Tensor],
    *,
    full: bool = False,
    tokens: _Tokens | None = None,
) -> RowSums:
    """The sums of one tile, `(heads, rows)` in float64. Overwrites the scores. The output is not divided by the total."""
    count = scores.shape[-1]
    best, winner, second, runner_up = _two_best(scores)
    if full:
        known = torch.full_like(winner, count)
    else:
        unseen = scores == -torch.inf
        known = count - torch.count_nonzero(unseen, dim=-1)
    there, several = known > 0, known > 1
    place = winner[..., None]
    scores -= best.nan_to_num(neginf=0.0)[..., None]
    scores *= _LOG2E  # torch computes powers of 2 three times as fast as powers of e
    scores.scatter_(-1, place, -torch.inf)
    # 0 at the winner, so that a tiny rest is not rounded away next to 1
    weights = torch.exp2(scores, out=_shaped(memory[0], scores.shape))
    scores.scatter_(-1, place, 0.0)
    if not full:
        scores.masked_fill_(unseen, 0.0)
    below, below_squared = scores.sum(dim=-1), torch.linalg.vector_norm(scores, dim=-1)
    rest, squares = weights.sum(dim=-1), torch.linalg.vector_norm(weights, dim=-1)
    output = weights @ values + values.gather(1, place.expand(-1, -1, values.shape[2])) * there[..., None]
    weighted = scores.mul_(weights).sum(dim=-1)
    same = after = torch.full_like(best, torch.nan)
    if tokens is not None:
        own = tokens.here[places][:, None]
        same, after = (
            torch.mul(weights, t, out=scores).sum(dim=-1) + t.expand_as(weights).gather(-1, place)[..., 0] * there
            for t in (own == numbers[start : start + count] for numbers in (tokens.here, tokens.before))
        )
    columns = torch.arange(start, start + count, device=scores.device, dtype=scores.dtype)
    apart = torch.sub(places.to(scores)[:, None], columns, out=_shaped(memory[1], scores.shape[1:]))
    away = weights.mul_(apart.abs_()).sum(dim=-1)  # overwrites the weights
    return RowSums(
        best=best.double(),
        winner=torch.where(there, start + winner, -1),
        margin=torch.where(several, best.double() - second.double(), torch.inf),
        runner_up=torch.where(several, start + runner_up, -1),
        rest=rest.double(),
        weighted=weighted.double() * _LN2,
        squares=squares.double().square() + there,
        below=below.double() * _LN2,
        below_squared=(below_squared.double() * _LN2).square(),
        seen=known,
        away=away.double() + (places - start - winner).abs() * there,
        same=same.double(),
        after_same=after.double(),
        output=output.double(),
    )


def _native_tile(scores: Tensor, values: Tensor, places: Tensor, keys: slice, tokens: _Tokens | None) -> RowSums:
    """The same by native loops."""
    known = None if tokens is None else (tokens.here[places], tokens.here[keys], tokens.before[keys])
    sums, found = rows_native.sum_tile(scores, places - keys.start, known)
    winner, there, several = found["winner"], found["seen"] > 0, found["seen"] > 1
    output = scores @ values + values.gather(1, winner[..., None].expand(-1, -1, values.shape[2])) * there[..., None]
    sums["margin"] = torch.where(several, sums["margin"], torch.inf)
    return RowSums(
        **sums,
        winner=torch.where(there, keys.start + winner, -1),
        runner_up=torch.where(several, keys.start + found["runner_up"], -1),
        seen=found["seen"],
        output=output.double(),
    )


def _shaped(memory: Tensor, shape: Sequence[int]) -> Tensor | None:
    """Part of the memory in a shape; None if there is too little, so that new memory is allocated."""
    size = math.prod(shape)
    return memory[:size].view(*shape) if 0 < size <= len(memory) else None


def _two_best(scores: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The largest score of each row and its place, then the second largest; ties go to the first."""
    count = scores.shape[-1]
    if count % _SEGMENT:
        best, winner = scores.max(dim=-1)
        others = scores.scatter(-1, winner[..., None], -torch.inf)
        return best, winner, *others.max(dim=-1)
    # torch finds maxima far faster than their places: maxima of segments first, then the place within one segment
    segments = scores.unflatten(-1, (-1, _SEGMENT))
    heights = segments.amax(dim=-1)
    best, where = heights.max(dim=-1)

    def inside(segment: Tensor) -> Tensor:
        found: Tensor = segments.gather(2, segment[..., None, None].expand(-1, -1, 1, _SEGMENT))
        return found[..., 0, :]

    own = inside(where)
    at = own.argmax(dim=-1)
    beside, second_at = own.scatter(-1, at[..., None], -torch.inf).max(dim=-1)
    elsewhere, other = heights.scatter(-1, where[..., None], -torch.inf).max(dim=-1)
    far = (elsewhere > beside) | ((elsewhere == beside) & (other < where))
    places = torch.where(far, other * _SEGMENT + inside(other).argmax(dim=-1), where * _SEGMENT + second_at)
    return best, where * _SEGMENT + at, torch.where(far, elsewhere, beside), places


def _merged(a: RowSums, b: RowSums) -> RowSums:
    """Two tiles combined; the keys of `a` come first, so it wins ties."""
    later = b.best > a.best
    best = torch.where(later, b.best, a.best)
    base = best.nan_to_num(neginf=0.0)
    fall_a, fall_b = (torch.where(t.seen > 0, t.best - base, 0.0) for t in (a, b))
    grow_a, grow_b = (torch.where(t.seen > 0, torch.exp(f), 0.0) for t, f in ((a, fall_a), (b, fall_b)))

    def total(t: RowSums) -> Tensor:
        return t.rest + (t.seen > 0)

    # the winner of the losing tile now belongs to the rest, and may be the runner-up
    rest = a.rest * grow_a + b.rest * grow_b + torch.where(later, grow_a, grow_b)
    lost = torch.where(later, -fall_a, -fall_b)
    loser = torch.where(later, a.winner, b.winner)
    empty = torch.where(later, a.seen, b.seen) == 0
    lost = lost.masked_fill(empty, torch.inf)
    old = torch.where(later, b.margin, a.margin)
    older = torch.where(later, b.runner_up, a.runner_up)
    first = torch.where(later, lost <= old, lost < old)  # ties go to the earlier key
    return RowSums(
        best=best,
        winner=torch.where(later, b.winner, a.winner),
        margin=torch.where(first, lost, old),
        runner_up=torch.where(first & ~empty, loser, older),
        rest=rest,
        weighted=grow_a * (a.weighted + fall_a * total(a)) + grow_b * (b.weighted + fall_b * total(b)),
        squares=a.squares * grow_a**2 + b.squares * grow_b**2,
        below=a.below + a.seen * fall_a + b.below + b.seen * fall_b,
        below_squared=_shifted(a, fall_a) + _shifted(b, fall_b),
        seen=a.seen + b.seen,
        away=a.away * grow_a + b.away * grow_b,
        same=a.same * grow_a + b.same * grow_b,
        after_same=a.after_same * grow_a + b.after_same * grow_b,
        output=a.output * grow_a[..., None] + b.output * grow_b[..., None],
    )


def _shifted(t: RowSums, by: Tensor) -> Tensor:
    """`Σ (s − best)²` after every s is shifted by the same amount."""
    return t.below_squared + 2 * by * t.below + t.seen * by.square()
