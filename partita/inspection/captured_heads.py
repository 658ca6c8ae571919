"""Recording the heads of a model while it runs: one record per head, one snapshot per sequence that passed through it."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from numbers import Integral, Number
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from partita.arithmetic.arguments import is_series, require_count, require_flag, require_number
from partita.arithmetic.notebook_cards import counted
from partita.errors import SizeError, UnsupportedError
from partita.functions.dropout import active_dropout
from partita.inspection.calls import AttentionCall
from partita.inspection.eager_attention import advice_on_eager
from partita.inspection.interception import Reader, watching
from partita.inspection.reading import Reading, padding_of, read_queries
from partita.inspection.snapshots import Snapshot
from partita.inspection.streams import StreamedSequence, stream_call
from partita.inspection.token_ids import SeenTokens, TokenIds

__all__ = [
    "CapturedHeads",
    "DropoutWarning",
    "HeadRecord",
    "are_captured",
    "capture",
    "evenly_spread",
    "no_query",
    "records_of",
    "require_kept",
]

DEFAULT_MAX_BYTES = 2 << 30
_LISTED = 20  # most layers named in a message


@dataclass(frozen=True, eq=False)
class HeadRecord:
    """One head of one layer, and every sequence that passed through it.

    Attributes:
        layer: the module path of the layer, as in `model.named_modules()`.
        head: its number within the layer, counted from 0.
        snapshots: one `Snapshot` per sequence; none with `capture(..., stream=True)`, unless `keep=True`.
        streamed: with `capture(..., stream=True)`, what was read from each sequence while the model ran.
    """

    layer: str
    head: int
    snapshots: tuple[Snapshot, ...]
    streamed: tuple[StreamedSequence, ...] = ()

    @property
    def name(self) -> str:
        """ "layer:head"."""
        return f"{self.layer}:{self.head}"

    def queries(self) -> dict[str, NDArray[Any]]:
        """One number per counted query, `(queries,)` each; sequences are concatenated.

        `sequence` and `positions` identify the query; `cells` and `runner_up` are the keys with the largest and second
        largest score. The others are `margins`, `leakage`, `leakage_bound`, `spread`, `entropy`, `effective_keys`, `changed`,
        `averaged`, `answered`, `value_spread`, `seen`, `score_error`, `sink`, `distance`, `on_self`, `on_previous`, `lags`,
        `on_lag`, `same_token`, `duplicate_token` and `induction`. `Figures` and `Roles` are computed from these.

        Raises:
            UnsupportedError: the head was streamed without `queries=True`.
        """
        readings = [s.reading for s in self.streamed] or [read_queries(s, s.tokens) for s in self.snapshots]
        found = [reading for reading in readings if reading is not None]
        if len(found) < len(readings) or not found:
            raise UnsupportedError(
                f"{self.name}: the numbers of single queries were not kept while the model ran",
                "Capture with stream=True, queries=True, or without stream.",
            )
        numbers = {f.name: np.concatenate([getattr(r, f.name) for r in found]) for f in fields(Reading)}
        sequence = np.repeat(np.arange(len(found)), [len(r.cells) for r in found])
        return {"sequence": sequence, "positions": numbers["cells"] + numbers["lags"], **numbers}

    def __repr__(self) -> str:
        if not self.snapshots:
            queries = sum(len(s.summary.margins) for s in self.streamed)
            sequences = counted(len(self.streamed), "sequence")
            return f"HeadRecord({self.name}, read while the model ran: {sequences}, {queries:,} queries)"
        shapes = ", ".join(f"{len(s.queries)}×{len(s.keys)}" for s in self.snapshots[:4])
        more = ", …" if len(self.snapshots) > 4 else ""
        return f"HeadRecord({self.name}, queries × keys {shapes}{more}, R^{self.snapshots[0].keys.shape[1]})"


def records_of(heads: Any, *, empty: bool = True, name: str = "heads", wanted: str = "") -> list[HeadRecord]:
    """The records of captured heads. Raises an UnsupportedError for anything else, such as a model.

    Args:
        heads: from `capture`, or one or several of its records.
        empty: whether an empty list is allowed.
        name: name of the argument, for the error message.
        wanted: what else the argument may be, for the error message.
    """
    records = list(heads) if is_series(heads) else [heads]
    if isinstance(heads, nn.Module) or not all(isinstance(record, HeadRecord) for record in records):
        kind = type(heads).__name__
        found = f"{'a model ' if isinstance(heads, nn.Module) else ''}of type {kind}"
        raise UnsupportedError(
            f"{name} is {found}; expected {wanted}what `capture` recorded while the model ran on inputs",
            "Use: with pa.inspect.capture(model) as heads: model(inputs). Then pass heads.",
        )
    if not records and not empty:
        raise UnsupportedError(
            "heads holds no records; expected what `capture` recorded while the model ran on inputs."
        )
    return records


def are_captured(given: Any) -> bool:
    """Whether captured heads were passed where inputs of a model are expected."""
    several = given if isinstance(given, list | tuple) else [given]
    return isinstance(given, CapturedHeads) or any(isinstance(one, HeadRecord) for one in several)


def require_kept(records: Iterable[HeadRecord]) -> None:
    """Raises an UnsupportedError for heads that were read while the model ran without keeping their keys.

    Args:
        records: from `capture`.
    """
    if any(record.streamed and not record.snapshots for record in records):
        raise UnsupportedError(
            "these heads were read while the model ran, and their keys were not kept",
            "Capture them without stream=True, or with keep=True.",
        )


def no_query(name: str) -> UnsupportedError:
    """The error for a head that has nothing to read.

    Args:
        name: of the head.
    """
    return UnsupportedError(f"{name}: no query sees a key: the input had no tokens, or every key was masked.")


class DropoutWarning:
    """Warns once if heads are read while dropout is on.

    Args:
        model: its modules are checked now; dropout passed to functions is checked later, by `of_call`.
        done: what happens to the heads, such as "recorded", for the message.
    """

    def __init__(self, model: object, done: str) -> None:
        self.done, self.given = done, False
        if where := active_dropout(model):
            self._warn(f"the model is in train mode: dropout is on in {where}", "Call model.eval() first.", 5)

    def of_call(self, layer: str, share: float) -> None:
        """Checks the dropout of one attention.

        Args:
            layer: the module path of its layer.
            share: the argument `dropout_p`.
        """
        if share > 0 and not self.given:
            self._warn(
                f"dropout is on in the attention of {layer!r} (dropout_p = {share:g})",
                "Call model.eval() first, and pass dropout_p=0 in evaluation mode.",
                3,
            )

    def _warn(self, found: str, hint: str, stacklevel: int) -> None:
        self.given = True
        warnings.warn(f"{found}, so the {self.done} heads are random. {hint}", stacklevel=stacklevel)


@dataclass(frozen=True, eq=False)
class _Limits:
    layers: tuple[str, ...] | None
    heads: tuple[int, ...] | None
    tokens: int | None
    batch: int | None
    max_bytes: int
    given: TokenIds | None
    stream: bool
    keep: bool
    null: bool
    seed: int
    queries: bool


@dataclass(eq=False)
class CapturedHeads:
    """What `capture` recorded. Iterates over one `HeadRecord` per head, layers in the order in which they first ran.

    Attributes:
        bytes_held: memory of the recorded arrays, in bytes.
        advice: what to change in the model if nothing was recorded. Usually empty.
        ran: layers that ran and their numbers of heads, including those that `layers=` and `heads=` left out.
    """

    _limits: _Limits
    _dropout: DropoutWarning = field(repr=False)
    _kept: dict[str, dict[int, list[Snapshot]]] = field(default_factory=dict)
    _streamed: dict[str, dict[int, list[StreamedSequence]]] = field(default_factory=dict)
    _tokens: SeenTokens = field(default_factory=SeenTokens, repr=False)
    _passed: dict[str, int] = field(default_factory=dict, repr=False)
    bytes_held: int = 0
    advice: str = field(default="", repr=False)
    ran: dict[str, int] = field(default_factory=dict, repr=False)

    def __iter__(self) -> Iterator[HeadRecord]:
        for layer, heads in self._heads().items():
            for head in heads:
                yield self._record(layer, head)

    def __len__(self) -> int:
        return sum(len(heads) for heads in self._heads().values())

    def _heads(self) -> dict[str, list[int]]:
        """The recorded heads of every layer."""
        held = self._streamed if self._limits.stream else self._kept
        return {layer: sorted(heads) for layer, heads in held.items()}

    def _record(self, layer: str, head: int) -> HeadRecord:
        kept, streamed = (held.get(layer, {}).get(head, []) for held in (self._kept, self._streamed))
        return HeadRecord(layer, head, tuple(kept), tuple(streamed))  # type: ignore[arg-type]

    @property
    def layers(self) -> tuple[str, ...]:
        """The module paths of the recorded layers."""
        return tuple(self._heads())

    def __getitem__(self, which: tuple[str, int]) -> HeadRecord:
        """The record of one head: `heads["encoder.layers.0.self_attn", 3]`."""
        if not isinstance(which, tuple) or len(which) != 2:
            raise UnsupportedError(f"the index is {which!r}; expected heads[layer, head]. Recorded: {self.describe()}.")
        layer, head = which
        if not isinstance(layer, str) or not isinstance(head, Integral):
            raise UnsupportedError(f"the index is {which!r}; expected heads[layer, head]. Recorded: {self.describe()}.")
        if head not in self._heads().get(layer, []):
            raise UnsupportedError(f"head {head} of layer {layer!r} was not recorded. Recorded: {self.describe()}.")
        return self._record(layer, head)

    def describe(self) -> str:
        """The recorded layers and their numbers of heads, in one line."""
        return ", ".join(f"{layer} ({len(heads)})" for layer, heads in self._heads().items()) or "no heads"

    def describe_ran(self) -> str:
        """The layers that ran, recorded or not, in a sentence for error messages."""
        listed = [f"{layer} ({counted(number, 'head')})" for layer, number in self.ran.items()]
        more = f", and {len(listed) - _LISTED} more" if len(listed) > _LISTED else ""
        return f"Its layers are {', '.join(listed[:_LISTED])}{more}. Heads are numbered from 0."

    def __repr__(self) -> str:
        heads, layers = counted(len(self), "head"), counted(len(self.layers), "layer")
        return f"CapturedHeads({heads} in {layers}, {self.bytes_held / 2**20:.1f} MiB)"

    def _add(self, layer: str, call: AttentionCall) -> None:
        limits = self._limits
        self.ran[layer] = call.heads
        self._tokens.attention_seen()
        if limits.layers is not None and not any(fnmatchcase(layer, pattern) for pattern in limits.layers):
            return
        chosen = range(call.heads) if limits.heads is None else [h for h in limits.heads if h < call.heads]
        if not len(chosen):
            return
        self._dropout.of_call(layer, call.dropout)
        batch = call.batch if limits.batch is None else min(call.batch, limits.batch)
        ids = self._ids_of(layer, call, batch)
        if limits.stream:
            self._stream(layer, call, list(chosen), batch, ids)
            if not limits.keep:
                return
        key_heads = sorted({call.key_head(h) for h in chosen})
        positions = evenly_spread(call.queries.shape[2], limits.tokens)
        self._make_room(layer, call, (batch, len(chosen), len(key_heads), len(positions)))
        index = torch.as_tensor(positions, device=call.queries.device)
        queries = _held(call.queries[:batch, list(chosen)].index_select(2, index))
        keys, values = (_held(t[:batch, key_heads]) for t in (call.keys, call.values))
        masks, offsets = _Masks(call, index), call.first_positions
        for slot, head in enumerate(chosen):
            place = key_heads.index(call.key_head(head))
            for element in range(batch):
                snapshot = Snapshot(
                    queries[element, slot],
                    keys[element, place],
                    values[element, place],
                    call.scale,
                    mask=masks.of(element, head),
                    causal=call.causal,
                    positions=positions,
                    padding=masks.padding_of(element, head)[positions] if masks.square else None,
                    dtype=str(call.queries.dtype).removeprefix("torch."),
                    same_tokens=call.is_square,
                    tokens=None if ids is None else ids[element],
                    follows_scores=call.follows_scores(element, head),
                    offset=offsets[element],
                    slope=0.0 if call.slopes is None else float(call.slopes[head]),
                    hides_below=call.hides_below if call.modify is None else -math.inf,
                )
                self._kept.setdefault(layer, {}).setdefault(head, []).append(snapshot)

    def _ids_of(self, layer: str, call: AttentionCall, batch: int) -> np.ndarray | None:
        """The token ids of a call, `(batch, keys)`: those that were given, or those that reached an embedding."""
        first = self._passed.get(layer, 0)
        self._passed[layer] = first + batch
        if not call.is_square:
            return None
        if self._limits.given is not None:
            return self._limits.given.of(range(first, first + batch), call.keys.shape[2], layer)
        found = self._tokens.of(call.batch, call.keys.shape[2])
        return None if found is None else found[:batch]

    def _stream(self, layer: str, call: AttentionCall, heads: list[int], batch: int, ids: np.ndarray | None) -> None:
        """Read the heads now and keep only their figures."""
        limits, count, most = self._limits, call.queries.shape[2], self._limits.tokens
        rows = None if most is None or count <= most else torch.as_tensor(evenly_spread(count, most))
        for element in range(batch):
            some, padding = call.subset(element, heads), None
            if rows is not None:  # padding can only be told from the whole sequence
                kept = rows.to(call.queries.device)
                padding = padding_of(some, 0, slice(0, some.heads)).at(kept)
                some = some.subset(0, range(some.heads), kept)
            tokens = None if ids is None else torch.from_numpy(ids[element : element + 1])
            seed = limits.seed + 15_485_863 * len(self._streamed) + 32_452_843 * self._passed[layer] + element
            queries = limits.keep or limits.queries
            read = stream_call(some, tokens=tokens, null=limits.null, queries=queries, seed=seed, padding=padding)
            for place, found in read:
                self._require_room(layer, found.size)
                self._streamed.setdefault(layer, {}).setdefault(heads[place], []).append(found)

    def _make_room(self, layer: str, call: AttentionCall, counts: tuple[int, int, int, int]) -> None:
        batch, heads, key_heads, tokens = counts
        width = 8 if call.queries.dtype == torch.float64 else 4
        keys, dim, value_dim = call.keys.shape[2], call.keys.shape[3], call.values.shape[3]
        needed = width * batch * (heads * tokens * dim + key_heads * keys * (dim + value_dim))
        if call.mask is not None:
            rows = tokens if call.mask.shape[2] > 1 else 1
            copies = min(batch, call.mask.shape[0]) * min(heads, call.mask.shape[1])
            needed += copies * rows * keys * (1 if call.mask.dtype == torch.bool else width)
        if call.modify is not None or call.window is not None:  # written out as a mask
            needed += batch * heads * tokens * keys * width
        self._require_room(layer, needed)

    def _require_room(self, layer: str, needed: int) -> None:
        if self.bytes_held + needed > self._limits.max_bytes:
            smaller = "" if self._limits.stream else ", or stream=True, which keeps figures only"
            raise SizeError(
                f"recording {layer} would hold {(self.bytes_held + needed) / 2**20:,.3g} MiB; max_bytes allows "
                f"{self._limits.max_bytes / 2**20:,.3g} MiB. Choose layers=, heads=, tokens= or batch=, or raise "
                f"max_bytes{smaller}."
            )
        self.bytes_held += needed


class _Masks:
    """The masks of one call, each copied once however many heads and sequences share it."""

    def __init__(self, call: AttentionCall, index: Tensor) -> None:
        self.call, self.index = call, index
        self.square = call.is_square and call.is_masked
        self._rows: dict[tuple[int, int], np.ndarray] = {}
        self._padding: dict[tuple[int, int], np.ndarray] = {}

    def _which(self, element: int, head: int) -> tuple[int, int]:
        if self.call.modify is not None:
            return element, head  # each has its own
        if self.call.mask is None:
            return 0, 0
        return (element if self.call.mask.shape[0] > 1 else 0), (head if self.call.mask.shape[1] > 1 else 0)

    def of(self, element: int, head: int) -> np.ndarray | None:
        which = self._which(element, head)
        if which not in self._rows:
            whole = self.call.whole_mask(element, head)
            if whole is None:
                return None
            self._rows[which] = _held(whole.index_select(0, self.index) if len(whole) > 1 else whole)
        return self._rows[which]

    def padding_of(self, element: int, head: int) -> np.ndarray:
        """Keys that no query sees, in self-attention where tokens may see themselves: padding, as queries too."""
        which = self._which(element, head)
        if which not in self._padding:
            hidden = padding_of(self.call, element, slice(head, head + 1)).queries
            count = self.call.queries.shape[2]
            self._padding[which] = np.zeros(count, dtype=bool) if hidden is None else _held(hidden[0])
        return self._padding[which]


def _held(tensor: Tensor) -> np.ndarray:
    """A copy that the model cannot reach, in float32 or float64; half precision fits into float32 exactly."""
    dtype = tensor.dtype if tensor.dtype in (torch.bool, torch.float64) else torch.float32
    try:
        return tensor.detach().to("cpu", dtype, copy=True).contiguous().numpy()
    except RuntimeError as error:
        raise UnsupportedError(
            f"a tensor of an attention cannot be copied ({error}); run the model outside torch.vmap and other transforms, on a "
            "real device."
        ) from error


def evenly_spread(count: int, most: int | None) -> NDArray[np.int64]:
    """Numbers from 0 to count − 1, evenly spread from the first to the last.

    Args:
        count: how many there are.
        most: how many to keep at most; None for all.
    """
    if most is None or count <= most:
        return np.arange(count)
    return np.unique(np.linspace(0, count - 1, most).round().astype(np.int64))


def _patterns(layers: Any) -> tuple[str, ...] | None:
    found = (layers,) if isinstance(layers, str) else tuple(layers) if is_series(layers) else layers
    if found is not None and not (isinstance(found, tuple) and all(isinstance(one, str) for one in found)):
        raise UnsupportedError(
            f"layers is {layers!r}; expected a pattern of module paths, as in 'encoder.layers.0.*', a list of patterns, or None "
            "for all."
        )
    return found


def _numbers(heads: Any) -> tuple[int, ...] | None:
    if heads is None:
        return None
    found = list(heads) if is_series(heads) else [heads]
    wrong = [h for h in found if isinstance(h, bool) or not isinstance(h, Integral) or h < 0]
    if wrong or not is_series(heads):
        raise UnsupportedError(
            f"heads {'contains' if is_series(heads) else 'is'} {(wrong or found)[0]!r}; expected a list of whole "
            "numbers ≥ 0, counted within a layer, as in [0, 3], or None for all."
        )
    return tuple(sorted({int(h) for h in found}))


@contextmanager
def capture(
    model: nn.Module | None = None,
    *,
    layers: str | Sequence[str] | None = None,
    heads: Iterable[int] | None = None,
    tokens: int | Any = None,
    batch: int | None = None,
    readers: Mapping[str, Reader] | None = None,
    max_bytes: int = DEFAULT_MAX_BYTES,
    stream: bool = False,
    keep: bool = False,
    queries: bool = False,
    null: bool = True,
    seed: int = 0,
) -> Iterator[CapturedHeads]:
    """Record queries, keys, values, scale, bias and mask of every attention that the model computes inside the `with`.

    The model is not changed, and its outputs are bit for bit the same. This records `F.scaled_dot_product_attention`,
    `F.multi_head_attention_forward`, `nn.MultiheadAttention` (including torch's fused encoder layers), Hugging Face models (even
    with `attn_implementation="eager"`), and flex attention (torch 2.9 and later). Other attention written out by hand is recorded
    if it calls `pa.inspect.record(q, k, v)`, or through `readers`. Scripted models are recorded only
    where they call a fused operator, and not in inference mode or under autocast. Compiled models run uncompiled inside the `with`.

    Args:
        model: the module to record. None records every attention that this thread computes.
        layers: a pattern of module paths (`"encoder.layers.0.*"`), or several. All by default.
        heads: head numbers within a layer. All by default.
        tokens: the largest number of queries per sequence, evenly spread. All by default. Keys are always kept in full,
            because fewer keys would be a different partition. Or the tokens themselves, as ids or labels, one list per
            sequence, so that repeated tokens can be recognised. By default these are the ids that reach an embedding.
        batch: the largest number of sequences per call. All by default.
        readers: `{pattern: f}`. After a module whose path matches has run, `f(module, args, kwargs, output)` returns
            `{"query": q, "key": k, "value": v}` (with `attn_mask`, `is_causal`, `scale`, `enable_gqa` as needed), or a list
            of these.
        max_bytes: largest size of the recorded arrays in bytes.
        stream: read the heads while the model runs, tile by tile, and keep only what `read` needs for its figures, instead of the
            vectors. With the random heads this is 16 bytes per query and head, and 8 per cell with queries. No array of size
            queries × keys is formed. Float16 and bfloat16 models are read in float32. Dead keys are not looked for.
        keep: with `stream`, also keep queries, keys and values, and the numbers of every query.
        queries: with `stream`, also keep the numbers of every query (winner, runner-up, margin, leakage, …) for
            `heads[layer, head].queries()`: 184 bytes per query and head.
        null: with `stream`, also read a random head of the same shape, which doubles the time.
        seed: random seed of these random heads.

    Yields:
        `CapturedHeads`, which is filled while the model runs.

    Raises:
        SizeError: the recording would exceed max_bytes. Raised in the forward pass, before more is copied.
        UnsupportedError: an argument is invalid, or floating-point token ids reach an embedding.
        DomainError: max_bytes or seed is not a valid number.

    Warns:
        UserWarning: dropout is on, so the recorded heads are random. The warning names the module or the attention.

    >>> import partita as pa
    >>> attention = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    >>> with pa.inspect.capture(attention) as heads, torch.no_grad():
    ...     _ = attention(*[torch.ones(1, 5, 8)] * 3)
    >>> [record.name for record in heads]
    ['MultiheadAttention:0', 'MultiheadAttention:1']
    """
    if model is not None and not isinstance(model, nn.Module):
        raise UnsupportedError(
            f"model is of type {type(model).__name__}; expected an nn.Module, or None to record everything."
        )
    most: Any = tokens if isinstance(tokens, Number) else None
    for name, limit in (("tokens", most), ("batch", batch)):
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, Integral) or limit < 1):
            raise UnsupportedError(f"{name} is {limit!r}; expected a whole number of at least 1, or None for all.")
    given = None if tokens is None or most is not None else TokenIds.of_any(tokens)
    require_number("max_bytes", max_bytes)
    require_count("seed", seed, least=-(2**63), most=2**64 - 1)
    flags = {"stream": stream, "null": null, "keep": keep, "queries": queries}
    stream, null, keep, queries = (require_flag(name, flag) for name, flag in flags.items())
    for name, wanted in (("keep", keep), ("queries", queries)):
        if wanted and not stream:
            raise UnsupportedError(
                f"{name} is {wanted!r} without stream=True",
                "Add stream=True, or leave this argument out: without stream, queries, keys and values are kept anyway.",
            )
    patterns, chosen = _patterns(layers), _numbers(heads)
    dropout = DropoutWarning(model, "recorded")
    limits = _Limits(patterns, chosen, most, batch, max_bytes, given, stream, keep or not stream, null, seed, queries)
    captured = CapturedHeads(limits, dropout, advice=advice_on_eager(model))
    with watching(model, captured._add, readers, on_tokens=captured._tokens.embedding_seen):
        yield captured
