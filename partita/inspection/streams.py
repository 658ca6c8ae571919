"""Reads heads while the model runs: figures of every head and sequence, without keeping queries or keys."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from partita.errors import NonFiniteValueError
from partita.inspection.calls import AttentionCall
from partita.inspection.figures import Gathered, Summary, gathered, on_host, summarised
from partita.inspection.reading import Padding, Reading, padding_of, random_call, read_call
from partita.inspection.snapshots import shared_offsets

__all__ = ["StreamedSequence", "stream_call"]

_CELLS_KEPT = 64
_ROWS_AT_ONCE = 256
_NUMBERS_AT_ONCE = 1 << 28  # numbers of the random heads held at once


@dataclass(frozen=True, eq=False)
class StreamedSequence:
    """One sequence that passed through a head and was read while the model ran.

    Attributes:
        summary: the numbers that the figures are computed from.
        null: the same for a random head of the same shape; None if not requested.
        reading: every counted query, if requested.
        dimension: number of coordinates in which the queries differ.
        value_dimension: dimension of the values.
        per_position: whether the bias depends on the query's position.
        dtype: dtype of the model.
    """

    summary: Summary
    null: Summary | None
    reading: Reading | None
    dimension: int
    value_dimension: int
    per_position: bool
    dtype: str

    @property
    def size(self) -> int:
        """Bytes that are held."""
        held = self.summary.size + (0 if self.null is None else self.null.size)
        return held + (0 if self.reading is None else sum(a.nbytes for a in vars(self.reading).values()))


def stream_call(
    call: AttentionCall, *, tokens: Tensor | None, null: bool, queries: bool, seed: int, padding: Padding | None
) -> Iterator[tuple[int, StreamedSequence]]:
    """Reads every head of a call. Yields the head, and what was read.

    Args:
        call: the attention, of one sequence.
        tokens: `(1, keys)`, the numbers of the tokens if they are known.
        null: also read a random head of the same shape, which doubles the time.
        queries: keep the reading of every query.
        seed: random seed of the random heads.
        padding: the padding of all heads; None to derive it from the masks.
    """
    held = max(1, call.queries.shape[2] * (2 * call.keys.shape[3] + call.values.shape[3]))
    step = max(1, _NUMBERS_AT_ONCE // held)
    waiting: _Heads | None = None
    for start in range(0, call.heads, step):
        some = call.subset(0, range(start, min(start + step, call.heads)))
        random = random_call(some, seed + 7919 * start) if null else None
        chosen = slice(start, start + some.heads)
        known = padding_of(some, 0, slice(0, some.heads)) if padding is None else padding.of(chosen)
        started = _Heads(start, some, random, tokens, queries, known)
        if waiting is not None:
            yield from waiting.figures()
        waiting = started
    if waiting is not None:
        yield from waiting.figures()


class _Heads:
    """Some heads of a sequence, and random heads beside them.

    On a GPU all work is queued without waiting for results. The figures are computed after the next heads have been queued, so
    that the device is never idle.
    """

    def __init__(
        self,
        first: int,
        call: AttentionCall,
        random: AttentionCall | None,
        ids: Tensor | None,
        queries: bool,
        padding: Padding,
    ) -> None:
        self.first, self.call, self.queries, self.padding = first, call, queries, padding
        finite = [t.isfinite().all() for t in (call.queries, call.keys, call.values)]
        self.finite = on_host(torch.stack(finite))
        self.dimensions = on_host(torch.stack([_dimension(q) for q in call.queries[0]]))
        self.readings: list[tuple[Reading, Tensor]] = []
        self.undefined: list[Tensor] = []
        self.offsets = [_offsets(call, head) for head in range(call.heads if call.tells_heads_apart else 1)]
        self.own = self._gathered(call, ids, most=_CELLS_KEPT)
        self.beside = None if random is None else self._gathered(random, ids, most=0)
        self.done = torch.cuda.Event() if call.queries.is_cuda else None
        if self.done is not None:
            self.done.record()

    def _gathered(self, call: AttentionCall, ids: Tensor | None, *, most: int) -> list[Gathered]:
        copies: dict[tuple[int, int], Tensor] = {}
        dtype = torch.float64 if call.queries.dtype == torch.float64 else torch.float32
        found = []
        for _, heads, reading in read_call(call, tokens=ids, known=self.padding):
            counted, repeated, hidden = reading.seen > 0, [], self.padding.of(heads).queries
            if hidden is not None:
                counted &= ~hidden
            for head in range(call.heads)[heads]:
                group = call.key_head(head), head if call.tells_heads_apart else 0
                if group not in copies:
                    copies[group] = (
                        _repeated(call, head, self.offsets[group[1]])
                        if most
                        else counted.new_zeros((), dtype=torch.int64)
                    )
                repeated.append(copies[group])
            self.undefined.append(on_host((reading.margins.isnan() & counted).any()))
            made = gathered(reading, counted, call, heads, torch.stack(repeated), most=most, dtype=dtype)
            found.append(made.to_host())
            if self.queries and most:
                self.readings.append((reading, counted))
        return found

    def figures(self) -> Iterator[tuple[int, StreamedSequence]]:
        """What was read of each of these heads."""
        if self.done is not None:
            self.done.synchronize()
        call = self.call
        for name, finite in zip(("queries", "keys", "values"), self.finite.tolist()):
            if not finite:
                raise NonFiniteValueError(f"{name} of a head contain NaN or infinity; check the model's activations.")
        if any(self.undefined):
            raise NonFiniteValueError(
                "scores of a head are NaN or overflow; check the model's activations and its mask."
            )
        own, null = self._summaries(self.own), self.beside and self._summaries(self.beside)
        readings = [
            reading.head(place, counted[place].cpu().numpy())
            for reading, counted in self.readings
            for place in range(len(counted))
        ]
        dtype = str(call.queries.dtype).removeprefix("torch.")
        for number, (summary, dimension) in enumerate(zip(own, self.dimensions.tolist())):
            about = (
                dimension or call.queries.shape[3],
                call.values.shape[3],
                self.offsets[number if call.tells_heads_apart else 0] is None,
            )
            kept, other = readings[number] if readings else None, null[number] if null else None
            yield self.first + number, StreamedSequence(summary, other, kept, *about, dtype)

    def _summaries(self, parts: list[Gathered]) -> list[Summary]:
        call, made = self.call, list[Summary]()
        alone = None if call.tells_heads_apart else call.count_seen(0, 0)
        for part in parts:
            heads = range(len(made), len(made) + len(part.errors))
            keys = [call.count_seen(0, head) if alone is None else alone for head in heads]
            made += summarised(part, keys=keys, square=call.is_square)
        return made


def _repeated(call: AttentionCall, head: int, offsets: Tensor | None) -> Tensor:
    """Keys that are exact copies of an earlier one, with their biases, among those that some query sees.

    They are found by a hash of their bits, which needs O(keys) extra memory.
    """
    keys = call.keys[0, call.key_head(head)]
    if not keys.numel():
        return torch.zeros((), dtype=torch.int64, device=keys.device)
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[keys.element_size()]
    bits = (keys.contiguous() + 0.0).view(whole).long()  # −0 is 0
    if offsets is not None:
        bits = torch.cat([bits, (offsets + 0.0).view(torch.int64)[:, None]], dim=1)
    factors = torch.arange(1, bits.shape[1] + 1, device=keys.device) * 0x1E3779B97F4A7C15  # well mixed odd numbers
    factors = (factors ^ (factors >> 30)) * 0x3F58476D1CE4E5B9
    factors = (factors ^ (factors >> 27)) * 0x14D049BB133111EB | 1
    bits = (bits ^ (bits >> 32)) * 0x1E3779B97F4A7C15  # round numbers end in many zeros, which would stay in a product
    hashes = ((bits ^ (bits >> 29)) * factors).sum(dim=1)  # overflow wraps, which is fine for a hash
    if call.is_masked or call.causal:
        hashes = hashes[call.seen_keys(0, head)[0]]
    hashes = hashes.sort().values
    return (hashes[1:] == hashes[:-1]).sum()


def _dimension(queries: Tensor) -> Tensor:
    """Coordinates in which the queries differ."""
    return (queries != queries[:1]).any(dim=0).sum()


def _offsets(call: AttentionCall, head: int) -> Tensor | None:
    """The part of the bias that depends only on the key, `(keys,)` in float64; None if there is no such part.

    The same as `Snapshot.offsets`, but computed row by row.
    """
    keys = call.keys.shape[2]
    if call.changes_scores or (call.slopes is not None and not call.causal):
        return None
    found = torch.zeros(keys, dtype=torch.float64, device=call.keys.device)
    if call.slopes is not None:
        found += call.slopes[head].to(found) * torch.arange(keys, device=found.device)
    mask = call.mask_of(0, head)
    if mask is None or mask.dtype == torch.bool:
        return found
    if len(mask) == 1:
        return found + torch.where(mask[0] > call.hides_below, mask[0], 0.0)
    largest, counts = 0.0, []
    for start in range(0, len(mask), _ROWS_AT_ONCE):
        part = mask[start : start + _ROWS_AT_ONCE]
        largest = max(largest, float(torch.where(part > call.hides_below, part.abs(), 0.0).max()))
        counts.append(call.visible(0, slice(head, head + 1), slice(start, start + len(part)))[0].sum(dim=1))
    if largest == 0:
        return found

    def rows() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for row in torch.cat(counts).argsort(descending=True, stable=True).tolist():
            seen = call.visible(0, slice(head, head + 1), slice(row, row + 1))[0, 0]
            yield torch.where(seen, mask[row], 0.0).double().cpu().numpy(), seen.cpu().numpy()

    shared = shared_offsets(rows(), keys, largest)
    return None if shared is None else found + torch.from_numpy(shared).to(found)
