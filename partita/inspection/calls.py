"""One attention call, whichever function made it: q, k, v per head, scale, mask.

There are three cases: the arguments of `F.scaled_dot_product_attention`, those of `F.multi_head_attention_forward` (and so of
`nn.MultiheadAttention`), and those of the fused encoder layer. In the last two, q, k and v are not projected yet;
the projections are computed here a second time, in addition to the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.bias import CausalBias

from partita.errors import ShapeError
from partita.inspection.layer_names import names_cross_attention
from partita.kernels.plain_arithmetic import uses_autocast

__all__ = [
    "COLUMNS",
    "MASKED_BELOW",
    "AttentionCall",
    "from_cast_sdpa",
    "from_encoder_layer",
    "from_multi_head",
    "from_multi_head_module",
    "from_sdpa",
]

# Masks are written as −∞, the least number of the dtype, −1e9 or −10000: no weight survives any of them. −10000 is −9984 in
# bfloat16, and a position bias may have been added to it.
MASKED_BELOW = -9e3
# Matrix products treat this many columns alike: a multiple of what kernels take at once (4 to 48). The columns left over at the
# end of a product may be summed in a different order.
COLUMNS = 192
_VISIBLE_AT_ONCE = 1 << 24  # pairs of a query and a key
_SCORES_AT_ONCE = 1 << 21
_ROWS_LOOKED_AT = 32
_MODULE_NAMES = tuple(signature(nn.MultiheadAttention.forward).parameters)[1:]  # query, key, value, …


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
        crosses: queries and keys are known to come from different sequences.
        window: position i sees the keys j with `|i − j| < window` only.
        slopes: `(heads,)`, `−slope·|i − j|` is added to the scores (ALiBi), or None.
        positions: `(tokens,)`, positions of the queries; `0 … tokens − 1` by default.
        modify: how flex attention changes the scores, or None. `modify(scores, element, heads, rows, keys)` takes
            `scale·q kᵀ`, `(heads, rows, keys)`, of sequence number `element`. `heads`, `rows` and `keys` are their numbers, as
            tensors that broadcast to that shape. It returns the scores that softmax sees, −∞ where masked.
        dropout: share of the weights that the model drops at random here. It is not applied.
        offsets: for each sequence the position of the first query among the keys, as `first_positions` gives it; derived from the
            masks by default.
        hides_below: numbers in the mask up to this one hide a key.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    scale: float
    mask: Tensor | None = None
    causal: bool = False
    crosses: bool = False
    window: int | None = None
    slopes: Tensor | None = None
    positions: Tensor | None = None
    modify: Callable[[Tensor, int, Tensor, Tensor, Tensor], Tensor] | None = None
    dropout: float = 0.0
    offsets: tuple[int, ...] | None = None
    hides_below: float = MASKED_BELOW

    @property
    def heads(self) -> int:
        return self.queries.shape[1]

    @property
    def batch(self) -> int:
        return self.queries.shape[0]

    @property
    def score_dtype(self) -> torch.dtype:
        """The dtype in which scores are computed: that of the queries, float32 at least."""
        return torch.promote_types(self.queries.dtype, torch.float32)

    @property
    def places(self) -> Tensor:
        """The position of every query, `(tokens,)`."""
        if self.positions is not None:
            return self.positions
        return torch.arange(self.queries.shape[2], device=self.queries.device)

    @property
    def last_place(self) -> int:
        """The largest position of a query; −1 if there is none."""
        if self.positions is None:
            return self.queries.shape[2] - 1
        return int(self.positions.max()) if len(self.positions) else -1

    @property
    def first_positions(self) -> tuple[int, ...]:
        """For each sequence the position of query 0 among the keys, for rules that compare the two.

        With fewer queries than keys the queries are the last tokens of a longer sequence whose keys are cached: the last query
        stands at the last key that it sees. 0 if queries and keys are known to come from different sequences, and where a window
        or ALiBi says how far apart they are.
        """
        if self.offsets is not None:
            return self.offsets
        room = self.keys.shape[2] - self.last_place - 1
        if room <= 0 or self.last_place < 0 or self.crosses or self.window is not None or self.slopes is not None:
            return (0,) * self.batch
        last = slice(self.queries.shape[2] - 1, None)
        ends = [self.visible(element, slice(0, 1), last)[0, 0].nonzero()[-1:, 0] for element in range(self.batch)]
        return tuple(min(max(int(end) - self.last_place, 0), room) if len(end) else 0 for end in ends)

    @property
    def is_square(self) -> bool:
        """Whether queries and keys are the same tokens, as far as shapes tell, so that distances between them have a meaning."""
        tokens, keys = self.queries.shape[2], self.keys.shape[2]
        return not self.crosses and (tokens == keys or self.positions is not None)

    def key_head(self, head: int) -> int:
        return head * self.keys.shape[1] // self.heads

    def of_heads(self, tensor: Tensor, element: int, heads: slice) -> Tensor:
        """Keys or values of some heads of one sequence, `(heads, keys, ·)`."""
        chosen = [self.key_head(h) for h in range(self.heads)[heads]]
        if len(set(chosen)) == 1:
            return tensor[element, chosen[0]].expand(len(chosen), -1, -1)
        return tensor[element, chosen[0] : chosen[-1] + 1] if _consecutive(chosen) else tensor[element, chosen]

    def in_layer(self, layer: str) -> AttentionCall:
        """The same call; known to cross two sequences if the layer's name says so. Equal lengths do not show it.

        Args:
            layer: the module path of its layer.
        """
        return replace(self, crosses=True) if names_cross_attention(layer) else self

    def subset(self, element: int | None, heads: Sequence[int], rows: Tensor | None = None) -> AttentionCall:
        """Some heads of one sequence, and some of its queries, as a call of their own.

        Args:
            element: number of the sequence; None for all.
            heads: numbers of the heads.
            rows: `(rows,)`, which queries; all by default.
        """
        chosen, which = list(heads), slice(None) if element is None else slice(element, element + 1)
        shared = [self.key_head(h) for h in chosen]
        apart = sorted(set(shared))
        even = len(chosen) % len(apart) == 0 and shared == [
            apart[i * len(apart) // len(chosen)] for i in range(len(chosen))
        ]
        used = apart if even else shared  # groups of equal size can still share their keys
        mask = self.mask
        if mask is not None:
            mask = mask[which] if mask.shape[0] > 1 else mask
            mask = _picked(mask, chosen) if mask.shape[1] > 1 else mask
            mask = mask if rows is None or mask.shape[2] == 1 else mask[:, :, rows]
        offsets = self.offsets if self.is_square else self.first_positions
        queries = _picked(self.queries[which], chosen)
        keys, values = (_picked(t[which], used) for t in (self.keys, self.values))
        return replace(
            self,
            queries=queries if rows is None else queries[:, :, rows],
            keys=keys,
            values=values,
            mask=mask,
            crosses=not self.is_square,
            slopes=None if self.slopes is None else self.slopes[chosen],
            positions=self.positions if rows is None else self.places[rows],
            modify=None if self.modify is None else _Renumbered(self.modify, element, chosen),
            offsets=None if offsets is None else offsets[which],
        )

    def mask_of(self, element: int, head: int) -> Tensor | None:
        """The mask of one head, `(tokens or 1, keys)`: boolean or added to the scores."""
        if self.mask is None:
            return None
        return self.mask[element if self.mask.shape[0] > 1 else 0, head if self.mask.shape[1] > 1 else 0]

    def scores(self, head: int, rows: slice = slice(None), dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        """Scores of one head, `(batch, rows, keys)`, −∞ where masked, and a mask of those that are not.

        Args:
            head: number of the head.
            rows: which queries; all by default. Only their scores are formed.
            dtype: to compute in; `score_dtype` by default.
        """
        dtype = dtype or self.score_dtype
        tiles = [self.tile(e, slice(head, head + 1), rows, slice(None), dtype)[0] for e in range(self.batch)]
        scores = torch.stack(tiles) if tiles else self.queries.new_zeros(0, len(self.places[rows]), self.keys.shape[2])
        return scores, scores > -torch.inf

    def tile(
        self, element: int, heads: slice, rows: slice, keys: slice, dtype: torch.dtype, memory: Tensor | None = None
    ) -> Tensor:
        """A tile of scores of one sequence, `(heads, rows, keys)`, −∞ where masked. Only this tile is formed.

        Args:
            element: number of the sequence.
            heads: which heads.
            rows: which queries.
            keys: which keys.
            dtype: to compute in.
            memory: of that dtype; the scores are written to it if it is large enough.
        """
        held = self.of_heads(self.keys[:, :, keys], element, heads).to(dtype)
        # a few leftover columns would be summed in a different order, but equal keys must have equal scores
        count = held.shape[1]
        held = functional.pad(held, (0, 0, 0, -count % COLUMNS))
        queries = self.scale * self.queries[element, heads, rows].to(dtype)
        shape = (*queries.shape[:2], held.shape[1])
        place = (
            memory[: math.prod(shape)].view(shape)
            if memory is not None and 0 < math.prod(shape) <= len(memory)
            else None
        )
        scores = torch.matmul(queries, held.mT, out=place)[..., :count]
        if self.is_full(rows, keys) and self.slopes is None:
            return scores
        columns = torch.arange(self.keys.shape[2], device=scores.device)[keys]
        return self._masked(scores, element, heads, rows, self.places[rows][:, None], columns)

    def pairs(
        self, element: int, heads: slice, partners: Tensor, dtype: torch.dtype, products: Tensor | None = None
    ) -> Tensor:
        """The score of each query with one key, `(heads, tokens)`, −∞ where masked.

        Args:
            element: number of the sequence.
            heads: which heads.
            partners: `(tokens,)` or `(heads, tokens)`, the key of each query. A number that no key has counts as masked.
            dtype: to compute in.
            products: `scale·q·k` of the pairs, if already computed.
        """
        count = self.keys.shape[2]
        shape = (len(range(self.heads)[heads]), self.queries.shape[2])
        if not count:
            return self.queries.new_full(shape, -torch.inf, dtype=dtype)
        held = partners.clamp(0, count - 1).expand(shape)
        if products is None:
            keys = self.of_heads(self.keys, element, heads)
            picked = keys.gather(1, held[..., None].expand(-1, -1, keys.shape[2])).to(dtype)
            products = self.scale * torch.linalg.vecdot(self.queries[element, heads].to(dtype), picked)
        scores = self._masked(products[..., None], element, heads, slice(None), self.places[:, None], held[..., None])
        return scores[..., 0].masked_fill((partners < 0) | (partners >= count), -torch.inf)

    def _masked(self, scores: Tensor, element: int, heads: slice, rows: slice, i: Tensor, j: Tensor) -> Tensor:
        """Scores `(heads, rows, n)` of queries at positions i with keys j (broadcast), with masks and biases applied."""
        if self.mask is not None:
            mask = self.mask[element if self.mask.shape[0] > 1 else 0]
            mask = mask[heads] if mask.shape[0] > 1 else mask
            mask = mask[:, rows] if mask.shape[1] > 1 else mask
            mask = mask[..., j] if j.dim() == 1 else mask.expand(len(j), j.shape[1], -1).gather(2, j)
            # NaN does not hide a key, so that it shows in the scores
            seen = mask if mask.dtype == torch.bool else ~(mask <= self.hides_below)
            scores = torch.where(seen, scores if mask.dtype == torch.bool else scores + mask.to(scores), -torch.inf)
        if self.modify is not None:
            scores = scores + self._added(scores, element, heads, i, j).to(scores)
        if self.slopes is not None:
            scores = scores - self.slopes[heads].to(scores)[:, None, None] * (i - j).abs()
        if self.causal:
            scores = scores.masked_fill(j > i, -torch.inf)
        if self.window is not None:
            scores = scores.masked_fill((i - j).abs() >= self.window, -torch.inf)
        return scores

    def _added(self, scores: Tensor, element: int, heads: slice, i: Tensor, j: Tensor) -> Tensor:
        """What `modify` adds to these scores, in the precision in which flex attention runs it; −∞ where masked."""
        assert self.modify is not None
        scores = scores.to(self.score_dtype)
        numbers = torch.arange(self.heads, device=scores.device)[heads][:, None, None]
        return self.modify(scores, element, numbers, i, j) - scores

    @property
    def changes_scores(self) -> bool:
        """Whether flex attention does more to the scores than mask them. The effect of rounding is then unknown."""
        return self.modify is not None and not getattr(self.modify, "only_masks", False)

    def follows_scores(self, element: int, head: int) -> bool:
        """Whether what flex attention adds to a score depends on the score, as in soft-capping. Tested in some rows, by
        comparing what it adds at the call's own scores with what it adds at 0.

        Args:
            element: number of the sequence.
            head: number of the head.
        """
        if not self.changes_scores:
            return False
        heads = slice(head, head + 1)
        rows = slice(None, None, max(1, self.queries.shape[2] // _ROWS_LOOKED_AT))
        columns, places = torch.arange(self.keys.shape[2], device=self.keys.device), self.places[rows][:, None]
        plain = replace(self, mask=None, modify=None, window=None, slopes=None, causal=False)
        scores = plain.tile(element, heads, rows, slice(None), self.score_dtype)
        own = self._added(scores, element, heads, places, columns)
        other = self._added(torch.zeros_like(scores), element, heads, places, columns)
        seen = (own > -torch.inf) & (other > -torch.inf)
        differ = torch.where(seen, own - other, 0.0).abs()
        return bool((differ > 2.0**-18 * (scores.abs() + own.abs())).any())  # more than rounding

    @property
    def is_masked(self) -> bool:
        """Whether anything but `causal` hides keys or is added to scores."""
        return any(given is not None for given in (self.mask, self.modify, self.window, self.slopes))

    @property
    def tells_heads_apart(self) -> bool:
        """Whether heads may differ in the keys they see or in their biases."""
        own = self.mask is not None and self.mask.shape[1] > 1
        return own or self.modify is not None or self.slopes is not None

    def whole_mask(self, element: int, head: int) -> Tensor | None:
        """Everything but `causal` and `slopes` as one mask, `(tokens or 1, keys)`: boolean, or numbers to add. `modify` is
        evaluated at the call's own scores."""
        if self.modify is None and self.window is None:
            return self.mask_of(element, head)
        heads, columns = slice(head, head + 1), torch.arange(self.keys.shape[2], device=self.keys.device)
        free = replace(self, causal=False, slopes=None)
        plain = replace(free, mask=None, modify=None, window=None)
        dtype = self.score_dtype
        step = max(1, _SCORES_AT_ONCE // max(self.keys.shape[2], 1))
        parts = []
        for start in range(0, max(self.queries.shape[2], 1), step):
            rows = slice(start, start + step)
            places = self.places[rows][:, None]
            if self.modify is None:
                nothing = torch.zeros(1, len(places), len(columns), dtype=dtype, device=columns.device)
                parts.append(free._masked(nothing, element, heads, rows, places, columns)[0])
            else:
                scores = plain.tile(element, heads, rows, slice(None), dtype)
                parts.append((free._masked(scores, element, heads, rows, places, columns) - scores)[0])
        whole = torch.cat(parts)
        seen = whole > -torch.inf
        return whole if (whole[seen] != 0).any() else seen

    def range_of_keys(self, rows: slice) -> tuple[int, int]:
        """The first key that any of these queries may see, and the last one plus 1. Keys outside this range are masked."""
        first, last = 0, self.keys.shape[2]
        lowest, highest = self._extent(rows)
        if highest < lowest:
            return 0, 0
        if self.causal:
            last = min(last, highest + 1)
        if self.window is not None:
            first = max(first, lowest - self.window + 1)
            last = min(last, highest + self.window)
        return first, max(first, last)

    def _extent(self, rows: slice) -> tuple[int, int]:
        """The smallest and the largest position of these queries; (0, −1) if there are none. Avoids waiting for the device."""
        if self.positions is None:
            numbers = range(self.queries.shape[2])[rows]
            return (numbers[0], numbers[-1]) if len(numbers) else (0, -1)
        places = self.positions[rows]
        return (int(places.min()), int(places.max())) if len(places) else (0, -1)

    def visible(self, element: int, heads: slice, rows: slice) -> Tensor:
        """Which keys some queries may see, `(heads, rows, keys)`."""
        nothing = self.keys.new_zeros((), dtype=torch.float32)
        shape = (len(range(self.heads)[heads]), len(self.places[rows]), self.keys.shape[2])
        columns = torch.arange(self.keys.shape[2], device=nothing.device)
        return (
            self._masked(nothing.expand(shape), element, heads, rows, self.places[rows][:, None], columns) > -torch.inf
        )

    @property
    def is_masked_by_rows(self) -> bool:
        """Whether a mask may differ between queries, so that it must be evaluated to know what each query sees."""
        return self.modify is not None or (self.mask is not None and self.mask.shape[2] > 1)

    def seen_keys(self, element: int, head: int) -> tuple[Tensor, bool]:
        """Which keys are seen by any query, `(keys,)`, and whether any query sees the key at its own position."""
        tokens, keys = self.queries.shape[2], self.keys.shape[2]
        seen = torch.zeros(keys, dtype=torch.bool, device=self.keys.device)
        own = False
        # if the mask has no rows, the first and the last query reach as far as all queries do
        step = max(1, _VISIBLE_AT_ONCE // max(keys, 1)) if self.is_masked_by_rows else max(tokens, 1)
        for start in range(0, tokens, step):
            rows = slice(start, min(start + step, tokens))
            if self.is_masked_by_rows:
                found = self.visible(element, slice(head, head + 1), rows)[0]
                diagonal = self.places[rows].clamp(max=keys - 1)
                own = own or bool(found.gather(1, diagonal[:, None]).any())
                seen |= found.any(dim=0)
            else:
                if self._leaves_gaps:
                    seen |= self._in_windows()
                else:
                    first, last = self.range_of_keys(rows)
                    seen[first:last] = True
                mask = self.mask_of(element, head)
                if mask is not None:
                    seen &= mask[0] if mask.dtype == torch.bool else mask[0] > self.hides_below
                own = bool(seen.any())
        return seen, own

    @property
    def _leaves_gaps(self) -> bool:
        """Whether a key between visible keys may be seen by no query: only some positions are there, each with a window."""
        return self.window is not None and self.positions is not None

    def _in_windows(self) -> Tensor:
        """Which keys lie in the window of a query, `(keys,)`."""
        assert self.window is not None
        keys, places = self.keys.shape[2], self.places
        first = (places - self.window + 1).clamp(0, keys)
        last = ((places + 1) if self.causal else (places + self.window)).clamp(0, keys)
        steps = torch.zeros(keys + 1, dtype=torch.int64, device=places.device)
        ones = torch.ones_like(places)
        steps.index_add_(0, first, ones).index_add_(0, torch.maximum(first, last), -ones)
        return steps.cumsum(dim=0)[:-1] > 0

    def count_seen(self, element: int, head: int) -> int:
        """How many keys some query sees."""
        if self.mask is None and self.modify is None and not self._leaves_gaps:
            first, last = self.range_of_keys(slice(None))
            return last - first
        return int(self.seen_keys(element, head)[0].sum())

    def is_full(self, rows: slice, keys: slice) -> bool:
        """Whether each of these queries is known to see each of these keys."""
        lowest, highest = self._extent(rows)
        if self.mask is not None or self.modify is not None or highest < lowest:
            return False
        first, last = (0, self.keys.shape[2]) if keys == slice(None) else (keys.start, keys.stop)
        if self.causal and last - 1 > lowest:
            return False
        return self.window is None or max(highest - first, last - 1 - lowest) < self.window


@dataclass(frozen=True, eq=False)
class _Renumbered:
    """`modify` of a call for some of its heads and sequences, which keep their numbers in the model."""

    modify: Callable[[Tensor, int, Tensor, Tensor, Tensor], Tensor]
    element: int | None
    heads: list[int]

    @property
    def only_masks(self) -> bool:
        return bool(getattr(self.modify, "only_masks", False))

    def __call__(self, scores: Tensor, element: int, heads: Tensor, rows: Tensor, keys: Tensor) -> Tensor:
        numbers = torch.tensor(self.heads, device=heads.device)[heads]
        return self.modify(scores, element if self.element is None else self.element, numbers, rows, keys)


def _picked(tensor: Tensor, heads: list[int]) -> Tensor:
    """Some of the heads, `(batch, heads, …)`; a view if they are consecutive."""
    return tensor[:, heads[0] : heads[-1] + 1] if heads and _consecutive(heads) else tensor[:, heads]


def _consecutive(numbers: list[int]) -> bool:
    return numbers == list(range(numbers[0], numbers[0] + len(numbers)))


def _four_axes(tensor: Tensor, lead: tuple[int, ...]) -> Tensor:
    """`(…, tokens, dim)` with leading axes broadcast to `lead`, as `(batch, heads, tokens, dim)`."""
    return tensor.expand(*lead, *tensor.shape[-2:]).reshape(math.prod(lead[:-1]), lead[-1], *tensor.shape[-2:])


def from_cast_sdpa(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[AttentionCall]:
    """`from_sdpa` of what attention gets under autocast: floats other than float64 in autocast's dtype."""

    def cast(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point() or value.dtype == torch.float64:
            return value
        device = value.device.type
        return value.to(torch.get_autocast_dtype(device)) if uses_autocast(device) else value

    return from_sdpa(*map(cast, args), **{name: cast(value) for name, value in kwargs.items()})


def from_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    window: int | None = None,
    slopes: Tensor | None = None,
) -> Iterator[AttentionCall]:
    """These arguments of `F.scaled_dot_product_attention` as a call; one call per sequence if they are nested.

    `(…, heads, tokens, dim)`; three axes are read as (batch, tokens, dim) with one head. `window` and `slopes` are those of
    `AttentionCall`.
    """
    if query.is_nested or key.is_nested or value.is_nested:
        if not (query.is_nested and key.is_nested and value.is_nested) or attn_mask is not None:
            raise ShapeError(
                "scaled_dot_product_attention got nested and plain tensors together; expected all nested or none."
            )
        for q, k, v in zip(query.unbind(), key.unbind(), value.unbind()):
            yield from from_sdpa(
                q[None], k[None], v[None], None, dropout_p, is_causal, scale, enable_gqa, window, slopes
            )
        return
    if isinstance(attn_mask, CausalBias):
        attn_mask = attn_mask._materialize(query.device)
    heads_first = enable_gqa and query.dim() == 3 and not query.shape[0] == key.shape[0] == value.shape[0]
    if query.dim() <= 3 and not heads_first:  # (tokens, dim) or (batch, tokens, dim): one head
        query, key, value = (t.unsqueeze(-3) for t in (query, key, value))
        attn_mask = attn_mask.unsqueeze(-3) if attn_mask is not None and attn_mask.dim() > 2 else attn_mask
    if query.dim() == 3:
        query, key, value = query[None], key[None], value[None]
    grouped = enable_gqa and not query.shape[-3] == key.shape[-3] == value.shape[-3]
    lead = torch.broadcast_shapes(*(t.shape[: -3 if grouped else -2] for t in (query, key, value)))
    leads = [(*lead, t.shape[-3]) if grouped else tuple(lead) for t in (query, key, value)]
    q, k, v = (_four_axes(t, axes) for t, axes in zip((query, key, value), leads))
    if grouped and k.shape[1] != v.shape[1]:  # keys and values are shared by groups of different sizes
        common = math.lcm(k.shape[1], v.shape[1])
        k, v = (t.repeat_interleave(common // t.shape[1], dim=1) for t in (k, v))
    mask = None
    if attn_mask is not None:
        _require_fitting_mask(attn_mask, (*leads[0], q.shape[2], k.shape[2]))
        mask = attn_mask.reshape((1,) * max(0, 4 - attn_mask.dim()) + tuple(attn_mask.shape))
        if len(leads[0]) > 2 and attn_mask.dim() > 3:  # several leading axes: spelled out, as the batch is
            mask = _four_axes(attn_mask, (*leads[0][:-1], attn_mask.shape[-3]))
        mask = mask.expand(*mask.shape[:-1], k.shape[2])
    used = 1 / math.sqrt(max(q.shape[-1], 1)) if scale is None else float(scale)
    if slopes is not None and slopes.shape != (q.shape[1],):
        raise ShapeError(f"slopes has shape {tuple(slopes.shape)}; expected ({q.shape[1]},), one per head.")
    yield AttentionCall(q, k, v, used, mask, is_causal, window=window, slopes=slopes, dropout=dropout_p)


def _require_fitting_mask(mask: Tensor, shape: tuple[int, ...]) -> None:
    own = (1,) * (len(shape) - mask.dim()) + tuple(mask.shape)
    if len(own) > len(shape) or any(a not in (1, b) for a, b in zip(own, shape)):
        raise ShapeError(f"attn_mask has shape {tuple(mask.shape)}; expected one that broadcasts to {shape}.")


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
    given = {**dict(zip(_MODULE_NAMES, args)), **kwargs}
    given["crosses"] = given["query"] is not given["key"]
    if given["query"].is_nested:
        for parts in zip(*(given[name].unbind() for name in _MODULE_NAMES[:3])):
            yield from from_multi_head_module(module, tuple(part[None] for part in parts), {}, fused=fused)
        return
    if module.batch_first and given["query"].dim() == 3:
        given.update({name: given[name].transpose(0, 1) for name in _MODULE_NAMES[:3]})
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
