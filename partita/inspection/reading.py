"""What a head does to each query: cell, margin, leakage, entropy, distance of the output from the cell's value, and where
the head looks.

Everything is computed from one pass over the scores (row_sums.py) and from single pairs of a query and a key, so that memory
grows with the number of tokens, not with its square.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from partita.errors import NonFiniteValueError
from partita.geometry.domains import Array
from partita.inspection.calls import AttentionCall
from partita.inspection.row_sums import RowSums, pair_scores, row_sums, runs_on_device
from partita.inspection.snapshots import Snapshot

__all__ = [
    "Padding",
    "Reading",
    "most_frequent_lags",
    "padding_of",
    "random_call",
    "random_snapshot",
    "read_all",
    "read_call",
    "read_queries",
]

_VISIBLE_AT_ONCE = 1 << 22  # pairs of a query and a key
_BLOCK = 256  # rows that are summed as one block
_OUTPUTS_AT_ONCE = 1 << 24  # numbers
# In units: where values are equal, sums of tiles are off by at most half of this (measured up to 131,072 keys).
_ROUNDED = 256


@dataclass(frozen=True, eq=False)
class Reading:
    """Numbers of every query, temperature included in the scores: arrays `(queries,)` of one head, or tensors
    `(heads, queries)` of several heads. NaN if a query sees no such key.

    Attributes:
        cells: the key with the largest score; ties go to the smallest label.
        runner_up: the key with the second largest score; −1 if only one key is seen.
        margins: largest minus second largest score; infinite if only one key is seen.
        leakage: mass outside the cell, `1 − w_cell`.
        leakage_bound: `min(1, (N − 1)e^{−margin})`, N the keys the query sees; rounded up. *Theorem*: `indicator`
            (Proposition 3.2).
        spread: standard deviation of the scores over the keys seen: the inverse temperature, once scores are standardised.
        entropy: entropy of the weights, in nats.
        effective_keys: `1/Σ w²`.
        changed: `|Σ w V − V_cell|²`, the squared change of the output when softmax becomes argmax.
        averaged: `|Σ w V − mean V|²`, the squared change of the output when softmax becomes a plain mean over the keys seen.
        answered: `|Σ w V|²`.
        value_spread: `mean |V_j − mean V|²` over the keys seen.
        seen: how many keys the query sees.
        score_error: a bound on the rounding error of the query's scores; infinite if a score_mod of flex attention changes them.
        sink: weight on the first key that is not padding.
        distance: `Σ w |i − j|` in tokens. This and all below are NaN if queries and keys are not the same tokens.
        on_self: weight on the key at the query's own position.
        on_previous: weight on the token before it.
        lags: position of the query minus position of its cell.
        on_lag: weight on the key at the sequence's most frequent lag.
        same_token: weight on the keys with the query's token; NaN if tokens are unknown or no such key is seen.
        duplicate_token: the same without the query's own position.
        induction: weight on the keys that follow another key with the query's token.
    """

    cells: Any
    runner_up: Any
    margins: Any
    leakage: Any
    leakage_bound: Any
    spread: Any
    entropy: Any
    effective_keys: Any
    changed: Any
    averaged: Any
    answered: Any
    value_spread: Any
    seen: Any
    score_error: Any
    sink: Any
    distance: Any
    on_self: Any
    on_previous: Any
    lags: Any
    on_lag: Any
    same_token: Any
    duplicate_token: Any
    induction: Any

    def of(self, rows: Any) -> Reading:
        """The reading of some of its queries.

        Args:
            rows: index of the arrays.
        """
        return Reading(*(getattr(self, f.name)[rows] for f in fields(Reading)))

    def head(self, place: int, rows: Any) -> Reading:
        """Some queries of one of several heads, as arrays in float64.

        Args:
            place: number of the head among these.
            rows: which queries.
        """
        arrays = (getattr(self, f.name)[place].cpu().numpy() for f in fields(Reading))
        return Reading(*(a.astype(np.int64 if a.dtype.kind == "i" else np.float64)[rows] for a in arrays))


def read_queries(snapshot: Snapshot, tokens: NDArray[np.int64] | None = None) -> Reading:
    """Every counted query of the sequence, in float64.

    Args:
        snapshot: a sequence that passed through a head.
        tokens: `(keys,)`, the numbers of the tokens if they are known.
    """
    return read_all(snapshot, tokens).head(0, snapshot.counted)


def read_all(snapshot: Snapshot, tokens: NDArray[np.int64] | None) -> Reading:
    """The same as tensors `(1, queries)`, including queries that do not count.

    Args:
        snapshot: a sequence that passed through a head.
        tokens: `(keys,)`, the numbers of the tokens if they are known.
    """
    ids = None if tokens is None else torch.from_numpy(np.ascontiguousarray(tokens, dtype=np.int64))[None]
    call = snapshot.as_call()
    first = int(np.flatnonzero(snapshot.visible_keys)[0]) if snapshot.visible_keys.any() else 0
    padding = None if snapshot.padding is None else torch.from_numpy(snapshot.padding)[None]
    known = Padding(torch.tensor([[first]], device="cpu"), padding)
    ((_, _, reading),) = read_call(call, dtype=torch.float64, tokens=ids, known=known)
    return reading


def read_call(
    call: AttentionCall,
    *,
    dtype: torch.dtype | None = None,
    tokens: Tensor | None = None,
    known: Padding | None = None,
) -> Iterator[tuple[int, slice, Reading]]:
    """Every query of every sequence and head of a call, including those that see no key. Yields sequence number, heads, reading.

    Args:
        call: the attention.
        dtype: float32 or float64; `call.score_dtype` by default.
        tokens: `(batch, keys)`, the numbers of the tokens if they are known.
        known: the padding of all heads; derived from the masks by default.
    """
    dtype = dtype or call.score_dtype
    for element, heads, sums in row_sums(call, dtype=dtype, tokens=tokens):
        ids = None if tokens is None or not call.is_square else tokens[element].to(call.queries.device)
        with torch.no_grad():
            padding = padding_of(call, element, heads) if known is None else known.of(heads)
            yield element, heads, _reading(call, element, heads, sums, dtype, ids, padding)


class Padding(NamedTuple):
    """The padding in some heads of a sequence.

    Attributes:
        first: `(heads, 1)`, the first key that any query sees.
        queries: `(heads, tokens)`, which queries are padding; None if none are.
    """

    first: Tensor
    queries: Tensor | None

    def of(self, heads: slice) -> Padding:
        """The padding of some of the heads."""
        return Padding(self.first[heads], None if self.queries is None else self.queries[heads])

    def at(self, rows: Tensor) -> Padding:
        """The padding of some of the queries."""
        return Padding(self.first, None if self.queries is None else self.queries[:, rows])


def padding_of(call: AttentionCall, element: int, heads: slice) -> Padding:
    """The padding, derived from the masks of a call: in self-attention, tokens that no query sees, if any token sees itself.

    Args:
        call: the attention.
        element: number of the sequence.
        heads: which heads.
    """
    count = len(range(call.heads)[heads])
    if (call.mask is None and call.modify is None) or not call.keys.shape[2]:
        return Padding(torch.zeros(count, 1, dtype=torch.int64, device=call.keys.device), None)
    shared = call.modify is None and call.mask is not None and call.mask.shape[1] == 1
    found = [call.seen_keys(element, head) for head in range(call.heads)[heads][: 1 if shared else None]]
    found = found * count if shared else found
    first = torch.stack([seen.to(torch.int8).argmax() for seen, _ in found])[:, None]
    if not call.is_square or not any(own for _, own in found):
        return Padding(first, None)
    hidden = torch.stack(
        [~seen[call.places] if own else torch.zeros_like(call.places, dtype=torch.bool) for seen, own in found]
    )
    return Padding(first, hidden)


def _reading(
    call: AttentionCall,
    element: int,
    heads: slice,
    sums: RowSums,
    dtype: torch.dtype,
    ids: Tensor | None,
    padding: Padding,
) -> Reading:
    there = sums.seen > 0
    total = (sums.rest + there).clamp(min=1e-30)
    seen = sums.seen.clamp(min=1)
    mean = sums.below / seen
    rounding = _score_rounding(call, element, heads, dtype).to(total)
    allowed = 2 * rounding + _MARGIN_ERRORS[dtype, runs_on_device(call, dtype)] * sums.margin.nan_to_num(posinf=0.0)
    falls = torch.exp((allowed - sums.margin).clamp(max=0.0))
    tiny = 1e-14 if total.dtype == torch.float64 else 1e-6
    outside = (sums.seen - 1).clamp(min=0) * (falls * (1 + tiny) + torch.finfo(dtype).tiny)
    return Reading(
        cells=sums.winner.long(),
        runner_up=sums.runner_up.long(),
        margins=sums.margin,
        leakage=sums.rest / total,
        leakage_bound=torch.nextafter(outside, torch.full_like(outside, torch.inf)).clamp(max=1.0),
        spread=(sums.below_squared / seen - mean.square()).clamp(min=0.0).sqrt(),
        entropy=total.log() - sums.weighted / total,
        effective_keys=total.square() / sums.squares.clamp(min=1e-30),
        seen=sums.seen.long(),
        score_error=rounding,
        distance=sums.away / total if call.is_square else torch.full_like(total, torch.nan),
        lags=call.places - sums.winner.long(),
        **_changes(call, element, heads, sums, dtype),
        **_places(call, element, heads, sums, dtype, ids, padding),
    )


# Relative error of a margin in addition to that of the scores, by dtype and whether the GPU kernel computed it.
_MARGIN_ERRORS = {
    (torch.float64, False): 2.0**-50,
    (torch.float32, False): 2.0**-22,
    (torch.float32, True): 2.0**-15,
}


def _score_rounding(call: AttentionCall, element: int, heads: slice, dtype: torch.dtype) -> Tensor:
    """Bound on the rounding error of each query's scores, `(heads, tokens)`: `(d + 4)u` times the sum of the absolute
    values of the terms, which is at most `scale·|q|·max|k|` plus the biases."""
    unit = 2.0**-53 if dtype == torch.float64 else 2.0**-22 if runs_on_device(call, dtype) else 2.0**-24
    least = (call.keys.shape[3] + 4) * torch.finfo(dtype).tiny  # for products that underflow
    if not call.keys.shape[2]:
        return call.queries.new_zeros(len(range(call.heads)[heads]), call.queries.shape[2], dtype=torch.float64)
    lengths, longest = _lengths(call.queries[element, heads]), _lengths(call.keys[element]).amax(dim=-1)
    numbers = torch.arange(heads.start, heads.stop, device=longest.device)  # a list would wait for the device
    shared = numbers * call.keys.shape[1] // call.heads
    terms = abs(call.scale) * lengths * longest[shared][:, None]
    if call.mask is not None and call.mask.dtype != torch.bool:
        terms = terms + _largest_bias(call)
    if call.slopes is not None:
        terms = terms + (call.slopes[heads].abs().double() * max(call.last_place + 1, call.keys.shape[2]))[:, None]
    if call.changes_scores:
        return torch.full_like(terms, torch.inf)  # a score_mod may amplify any error
    bound: Tensor = (call.keys.shape[3] + 4) * unit * terms * (1 + 1e-4) + least * (1 + longest[shared][:, None])
    return bound


def _lengths(vectors: Tensor) -> Tensor:
    """Euclidean norms in float64, slightly overestimated where squares overflow or underflow. The vectors are not copied."""
    if not vectors.shape[-1]:
        return vectors.new_zeros(vectors.shape[:-1], dtype=torch.float64)
    least, most = vectors.aminmax(dim=-1)
    size, wide = torch.maximum(-least, most).double(), torch.promote_types(vectors.dtype, torch.float32)
    safe = torch.finfo(wide).tiny ** 0.4  # its square and that of its inverse are far from overflow and underflow
    lengths = torch.linalg.vector_norm(vectors, dim=-1, dtype=wide).double()
    return torch.where((size > safe) & (size < 1 / safe), lengths, math.sqrt(vectors.shape[-1]) * size)


def _largest_bias(call: AttentionCall) -> float:
    assert call.mask is not None
    parts = list(call.mask.flatten(0, 1)) if call.mask.numel() else []
    sizes = [float(torch.where(p <= call.hides_below, 0.0, p).abs().max()) for p in parts]
    if not all(map(math.isfinite, sizes)):
        raise NonFiniteValueError(
            "the mask of a head contains NaN or +infinity; expected finite numbers, and −infinity to mask."
        )
    return max(sizes, default=0.0)


def _changes(call: AttentionCall, element: int, heads: slice, sums: RowSums, dtype: torch.dtype) -> dict[str, Tensor]:
    """Distance of the output from the cell's value and from the plain mean, and the spread of the values."""
    numbers = sums.output.shape[1] * sums.output.shape[2]
    step = max(1, _OUTPUTS_AT_ONCE // max(1, numbers))  # heads: several tensors of the size of their outputs are held
    parts = []
    for start in range(heads.start, heads.stop, step):
        some = slice(start, min(start + step, heads.stop))
        own = slice(some.start - heads.start, some.stop - heads.start)
        parts.append(_changes_of(call, element, some, sums.winner[own], sums.seen[own], sums.output[own], dtype))
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _changes_of(
    call: AttentionCall,
    element: int,
    heads: slice,
    winner: Tensor,
    seen: Tensor,
    output: Tensor,
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    values = call.of_heads(call.values, element, heads)
    unit = 2.0**-53 if dtype == torch.float64 else 2.0**-24
    count, width = values.shape[1:]
    if not count or not width:
        zero = output.new_zeros(output.shape[:2])
        return {"changed": zero, "averaged": zero, "answered": zero, "value_spread": zero}
    size = values.abs().amax(dim=(1, 2)).to(output)[:, None]
    nothing = width * (min(count + 4, _ROUNDED) * unit * size) ** 2
    picked = values.gather(1, winner.clamp(min=0).long()[..., None].expand(-1, -1, width)).to(output)
    changed = _above((output - picked).square().sum(dim=-1), nothing)
    del picked
    mean, scatter = _visible_values(call, element, heads, values, seen, output.dtype)
    return {
        "changed": changed,
        "averaged": _above((output - mean).square().sum(dim=-1), nothing),
        "answered": output.square().sum(dim=-1),
        "value_spread": _above(scatter, nothing),
    }


def _above(squares: Tensor, nothing: Tensor) -> Tensor:
    """0 where rounding alone could have made the number: equal values differ by nothing."""
    return torch.where(squares > nothing, squares, 0.0)


def _visible_values(
    call: AttentionCall, element: int, heads: slice, values: Tensor, seen: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The mean of the values that each query sees, `(heads, tokens, value_dim)`, and their mean square distance from it."""
    middle = values.to(dtype).mean(dim=1, keepdim=True)
    centred = values.to(dtype) - middle
    columns = torch.cat([centred, centred.square().sum(dim=-1, keepdim=True)], dim=-1)
    if call.is_masked_by_rows:
        step = max(1, _VISIBLE_AT_ONCE // max(1, len(values) * values.shape[1]))
        starts = range(0, call.queries.shape[2], step)
        parts = [call.visible(element, heads, slice(s, s + step)).to(dtype) @ columns for s in starts]
        sums = torch.cat(parts, dim=1)
    else:
        masks = [m[0] for h in range(call.heads)[heads] if (m := call.mask_of(element, h)) is not None]  # one row each
        if masks:
            rows = torch.stack(masks)
            columns = columns * (rows if rows.dtype == torch.bool else rows > call.hides_below)[..., None]
        if call.causal or call.window is not None:
            prefix = _prefix_sums(columns)
            places, count = call.places, values.shape[1]
            low = torch.zeros_like(places) if call.window is None else (places - call.window + 1).clamp(0, count)
            high = places + (1 if call.causal or call.window is None else call.window)
            if call.window is None and call.positions is None and len(places) == count:
                sums = prefix[:, 1:]
            else:
                sums = prefix[:, high.clamp(0, count)] - prefix[:, low]
        else:
            sums = columns.sum(dim=1, keepdim=True).expand(-1, call.queries.shape[2], -1)
    sums = sums / seen.clamp(min=1).to(dtype)[..., None]
    mean = sums[..., :-1]
    return mean + middle, (sums[..., -1] - mean.square().sum(dim=-1)).clamp(min=0.0)


def _prefix_sums(columns: Tensor) -> Tensor:
    """Sums of the first 0 … n rows, `(heads, n + 1, width)`, of `(heads, n, width)`; by blocks, for speed and accuracy."""
    count = columns.shape[1]
    blocks = functional.pad(columns, (0, 0, 0, -count % _BLOCK)).unflatten(1, (-1, _BLOCK))
    inside = blocks.cumsum(dim=2)
    before = inside[:, :, -1].cumsum(dim=1) - inside[:, :, -1]
    whole = (inside + before[:, :, None]).flatten(1, 2)[:, :count]
    return functional.pad(whole, (0, 0, 1, 0))


def _places(
    call: AttentionCall,
    element: int,
    heads: slice,
    sums: RowSums,
    dtype: torch.dtype,
    ids: Tensor | None,
    padding: Padding,
) -> dict[str, Tensor]:
    """The weights on certain keys: the first, the query's own, the one before it, copies of its token."""
    total = (sums.rest + (sums.seen > 0)).clamp(min=1e-30)
    unknown = torch.full_like(total, torch.nan)

    def weight(partners: Tensor) -> Tensor:
        """The weight on one key per query; NaN if the query does not see it."""
        scores = pair_scores(call, element, heads, partners, dtype).to(total)
        return torch.where(scores > -torch.inf, (scores - sums.best).exp() / total, torch.nan)

    places = call.places
    names = ("on_self", "on_previous", "on_lag", "same_token", "duplicate_token", "induction")
    found = {"sink": weight(padding.first.expand(-1, len(places))), **dict.fromkeys(names, unknown)}
    if not call.is_square or not call.keys.shape[2]:
        return found
    found["on_self"], found["on_previous"] = weight(places), weight(places - 1)
    counted = sums.seen > 0 if padding.queries is None else (sums.seen > 0) & ~padding.queries
    lags, _ = most_frequent_lags(places - sums.winner.long(), counted, call.keys.shape[2], call.last_place)
    found["on_lag"] = weight(places - lags[:, None])
    if ids is None:
        return found
    before, after = (copies[places] for copies in _copies(ids))
    own, duplicate = found["on_self"].nan_to_num(0.0), (sums.same / total).clamp(max=1.0)
    copy = ~weight(before).isnan() | ~weight(after).isnan()
    found["same_token"] = torch.where(copy | ~found["on_self"].isnan(), duplicate, torch.nan)
    found["duplicate_token"] = torch.where(copy, (duplicate - own).clamp(min=0.0), torch.nan)
    following = ~weight(_next(before)).isnan() | ~weight(_next(after)).isnan()
    # the next token follows the query itself, which does not count as a copy
    trivial = weight(places + 1).nan_to_num(0.0)
    found["induction"] = torch.where(following, (sums.after_same / total - trivial).clamp(0.0, 1.0), torch.nan)
    return found


def most_frequent_lags(lags: Tensor, counted: Tensor, keys: int, last: int) -> tuple[Tensor, Tensor]:
    """The most frequent lag of every head and how many queries have it, `(heads,)`. Ties go to the smallest absolute lag.

    Nothing here waits for the device.

    Args:
        lags: `(heads, tokens)`.
        counted: `(heads, tokens)`, which queries count.
        keys: number of keys.
        last: largest position of a query.
    """
    found = torch.arange(-keys, last + 1, device=lags.device)
    counts = torch.zeros(len(lags), len(found), dtype=torch.int64, device=lags.device)
    counts.scatter_add_(1, (lags + keys).clamp(0, len(found) - 1), counted.long())
    best = (counts * (2 * len(found)) - found.abs()).argmax(dim=1)
    return found[best], counts.gather(1, best[:, None])[:, 0]


def _copies(ids: Tensor) -> tuple[Tensor, Tensor]:
    """For each token, the positions of the nearest earlier and nearest later copy; −1 if there is none."""
    order = torch.argsort(ids, stable=True)
    equal = ids[order[1:]] == ids[order[:-1]]
    before, after = torch.full_like(order, -1), torch.full_like(order, -1)
    before[order[1:][equal]] = order[:-1][equal]
    after[order[:-1][equal]] = order[1:][equal]
    return before, after


def _next(places: Tensor) -> Tensor:
    return torch.where(places < 0, -1, places + 1)


def random_snapshot(snapshot: Snapshot, seed: int) -> Snapshot:
    """The null: a head of the same shape without structure.

    Independent normal numbers. Queries: mean 0, the root mean square of the head's own. Keys: mean 0, the root mean square
    deviation of the head's keys from their mean (a common shift of all keys moves no weight). Values: the mean of the head's
    values, and their root mean square deviation from it. Scale, masks, biases, the number of queries and of keys stay.
    Scores are then as large as the head's would be if its directions meant nothing.
    """
    rng = np.random.default_rng(seed)
    queries, keys, values = (a.astype(np.float64) for a in (snapshot.queries, snapshot.keys, snapshot.values))
    keys = keys - keys.mean(axis=0) if len(keys) else keys
    middle = values.mean(axis=0) if len(values) else 0.0
    noise = [_size(a) * rng.standard_normal(a.shape) for a in (queries, keys, values - middle)]
    return replace(snapshot, queries=noise[0], keys=noise[1], values=noise[2] + middle)


def _size(numbers: Array) -> float:
    return float(np.sqrt((numbers**2).mean())) if numbers.size else 0.0


def random_call(call: AttentionCall, seed: int) -> AttentionCall:
    """The same null for a whole call, in its dtype and on its device; the scales of the vectors are per head.

    Args:
        call: the attention.
        seed: random seed.
    """
    device = call.queries.device
    generator = torch.Generator(device).manual_seed(seed % 2**63)

    def noise(given: Tensor, *, centred: bool, kept: bool) -> Tensor:
        made = torch.empty_like(given, memory_format=torch.contiguous_format).normal_(generator=generator)
        if not given.numel():
            return made
        wide = torch.promote_types(given.dtype, torch.float32)
        squares = torch.linalg.vector_norm(given, dim=(2, 3), dtype=wide).double().square() / given.shape[2]
        middle = (
            given.mean(dim=2, keepdim=True, dtype=wide) if centred else torch.zeros_like(given[:, :, :1], dtype=wide)
        )
        squares = (squares - middle.double().square().sum(dim=(2, 3))).clamp(min=0.0) / given.shape[3]
        made *= squares.sqrt()[..., None, None].to(made.dtype)
        return made.add_(middle.to(made.dtype)) if kept else made

    with torch.no_grad():
        return replace(
            call,
            queries=noise(call.queries, centred=False, kept=False),
            keys=noise(call.keys, centred=True, kept=False),
            values=noise(call.values, centred=True, kept=True),
        )
