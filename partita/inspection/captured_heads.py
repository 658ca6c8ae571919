"""Recording the heads of a model while it runs: one record per head, one snapshot per sequence that passed through it."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import numpy as np
import torch
from torch import Tensor, nn

from partita.errors import SizeError, UnsupportedError
from partita.functions.dropout import active_dropout
from partita.inspection.calls import AttentionCall
from partita.inspection.eager_attention import advice_on_eager
from partita.inspection.interception import Reader, watching
from partita.inspection.snapshots import Snapshot

__all__ = ["CapturedHeads", "HeadRecord", "capture"]

DEFAULT_MAX_BYTES = 2 << 30


@dataclass(frozen=True, eq=False)
class HeadRecord:
    """One head of one layer, and every sequence that passed through it.

    Attributes:
        layer: the module path of the layer, as in `model.named_modules()`.
        head: its number within the layer, counted from 0.
        snapshots: one `Snapshot` per sequence.
    """

    layer: str
    head: int
    snapshots: tuple[Snapshot, ...]

    @property
    def name(self) -> str:
        """ "layer:head"."""
        return f"{self.layer}:{self.head}"

    def __repr__(self) -> str:
        shapes = ", ".join(f"{len(s.queries)}×{len(s.keys)}" for s in self.snapshots[:4])
        more = ", …" if len(self.snapshots) > 4 else ""
        return f"HeadRecord({self.name}, queries × keys {shapes}{more}, R^{self.snapshots[0].keys.shape[1]})"


@dataclass(frozen=True, eq=False)
class _Limits:
    layers: tuple[str, ...] | None
    heads: tuple[int, ...] | None
    tokens: int | None
    batch: int | None
    max_bytes: int


@dataclass(eq=False)
class CapturedHeads:
    """What `capture` recorded. Iterates over one `HeadRecord` per head, layers in the order in which they first ran.

    Attributes:
        bytes_held: memory of the recorded arrays, in bytes.
        advice: what to change in the model if nothing was recorded. Usually empty.
    """

    _limits: _Limits
    _kept: dict[str, dict[int, list[Snapshot]]] = field(default_factory=dict)
    bytes_held: int = 0
    advice: str = field(default="", repr=False)

    def __iter__(self) -> Iterator[HeadRecord]:
        for layer, heads in self._kept.items():
            for head in sorted(heads):
                yield HeadRecord(layer, head, tuple(heads[head]))

    def __len__(self) -> int:
        return sum(len(heads) for heads in self._kept.values())

    @property
    def layers(self) -> tuple[str, ...]:
        """The module paths of the recorded layers."""
        return tuple(self._kept)

    def __getitem__(self, which: tuple[str, int]) -> HeadRecord:
        """The record of one head: `heads["encoder.layers.0.self_attn", 3]`."""
        if not isinstance(which, tuple) or len(which) != 2:
            raise UnsupportedError(f"the index is {which!r}; expected heads[layer, head]. Recorded: {self.describe()}.")
        layer, head = which
        try:
            return HeadRecord(layer, head, tuple(self._kept[layer][head]))
        except KeyError:
            raise UnsupportedError(
                f"head {head} of layer {layer!r} was not recorded. Recorded: {self.describe()}."
            ) from None

    def describe(self) -> str:
        """The recorded layers and their numbers of heads, in one line."""
        return ", ".join(f"{layer} ({len(heads)})" for layer, heads in self._kept.items()) or "no heads"

    def __repr__(self) -> str:
        return f"CapturedHeads({len(self)} heads in {len(self._kept)} layers, {self.bytes_held / 2**20:.1f} MiB)"

    def _add(self, layer: str, call: AttentionCall) -> None:
        limits = self._limits
        if limits.layers is not None and not any(fnmatchcase(layer, pattern) for pattern in limits.layers):
            return
        chosen = range(call.heads) if limits.heads is None else [h for h in limits.heads if h < call.heads]
        if not len(chosen):
            return
        batch = call.batch if limits.batch is None else min(call.batch, limits.batch)
        key_heads = sorted({call.key_head(h) for h in chosen})
        positions = _spread(call.queries.shape[2], limits.tokens)
        self._make_room(layer, call, (batch, len(chosen), len(key_heads), len(positions)))
        index = torch.as_tensor(positions, device=call.queries.device)
        queries = _held(call.queries[:batch, list(chosen)].index_select(2, index))
        keys, values = (_held(t[:batch, key_heads]) for t in (call.keys, call.values))
        masks = _Masks(call, index)
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
                )
                self._kept.setdefault(layer, {}).setdefault(head, []).append(snapshot)

    def _make_room(self, layer: str, call: AttentionCall, counts: tuple[int, int, int, int]) -> None:
        batch, heads, key_heads, tokens = counts
        width = 8 if call.queries.dtype == torch.float64 else 4
        keys, dim, value_dim = call.keys.shape[2], call.keys.shape[3], call.values.shape[3]
        needed = width * batch * (heads * tokens * dim + key_heads * keys * (dim + value_dim))
        if call.mask is not None:
            rows = tokens if call.mask.shape[2] > 1 else 1
            copies = min(batch, call.mask.shape[0]) * min(heads, call.mask.shape[1])
            needed += copies * rows * keys * (1 if call.mask.dtype == torch.bool else width)
        if self.bytes_held + needed > self._limits.max_bytes:
            raise SizeError(
                f"recording {layer} would hold {(self.bytes_held + needed) / 2**20:,.3g} MiB; max_bytes allows "
                f"{self._limits.max_bytes / 2**20:,.3g}. Choose layers=, heads=, tokens= or batch=, or raise max_bytes."
            )
        self.bytes_held += needed


class _Masks:
    """The masks of one call, each copied once however many heads and sequences share it."""

    def __init__(self, call: AttentionCall, index: Tensor) -> None:
        self.call, self.index = call, index
        self.square = call.queries.shape[2] == call.keys.shape[2] and call.mask is not None and not call.crosses
        self._rows: dict[tuple[int, int], np.ndarray] = {}
        self._padding: dict[tuple[int, int], np.ndarray] = {}

    def _which(self, element: int, head: int) -> tuple[int, int]:
        assert self.call.mask is not None
        return (element if self.call.mask.shape[0] > 1 else 0), (head if self.call.mask.shape[1] > 1 else 0)

    def of(self, element: int, head: int) -> np.ndarray | None:
        whole = self.call.mask_of(element, head)
        if whole is None:
            return None
        which = self._which(element, head)
        if which not in self._rows:
            self._rows[which] = _held(whole.index_select(0, self.index) if len(whole) > 1 else whole)
        return self._rows[which]

    def padding_of(self, element: int, head: int) -> np.ndarray:
        """Keys that no query sees, in self-attention where tokens may see themselves: padding, as queries too."""
        which = self._which(element, head)
        if which not in self._padding:
            whole = self.call.mask_of(element, head)
            assert whole is not None
            seen = np.broadcast_to(Snapshot.allows(_held(whole)), (self.call.queries.shape[2],) * 2)
            nobody = np.logical_not(seen.any(axis=0))
            self._padding[which] = np.logical_and(nobody, bool(seen.diagonal().any()))
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


def _spread(tokens: int, most: int | None) -> np.ndarray:
    """At most so many positions, evenly spread from the first to the last."""
    if most is None or tokens <= most:
        return np.arange(tokens)
    return np.unique(np.linspace(0, tokens - 1, most).round().astype(np.int64))


@contextmanager
def capture(
    model: nn.Module | None = None,
    *,
    layers: str | Sequence[str] | None = None,
    heads: Iterable[int] | None = None,
    tokens: int | None = None,
    batch: int | None = None,
    readers: Mapping[str, Reader] | None = None,
    max_bytes: int = DEFAULT_MAX_BYTES,
) -> Iterator[CapturedHeads]:
    """Record queries, keys, values, scale, bias and mask of every attention that the model computes inside the `with`.

    The model is not changed, and its outputs are bit for bit the same. Recorded are `F.scaled_dot_product_attention`,
    `F.multi_head_attention_forward` and `nn.MultiheadAttention`, including torch's fused encoder layers, and the attention of
    Hugging Face models, also with `attn_implementation="eager"`. Other attention written out by hand is recorded if it calls
    `pa.inspect.record(q, k, v)`, or through `readers`. Flex attention is not recorded; scripted models are recorded only where
    they call a fused operator. Compiled models run uncompiled inside the `with`.

    Args:
        model: the module to record. None records every attention that this thread computes.
        layers: a pattern of module paths (`"encoder.layers.0.*"`), or several. All by default.
        heads: head numbers within a layer. All by default.
        tokens: the largest number of queries per sequence, evenly spread. All by default. Keys are always kept in full,
            because fewer keys would make another partition.
        batch: the largest number of sequences per call. All by default.
        readers: `{pattern: f}`. After a module whose path matches has run, `f(module, args, kwargs, output)` returns
            `{"query": q, "key": k, "value": v}` (with `attn_mask`, `is_causal`, `scale`, `enable_gqa` as needed), or a list
            of these.
        max_bytes: largest size of the recorded arrays in bytes.

    Yields:
        `CapturedHeads`, which fills while the model runs.

    Raises:
        SizeError: the recording would exceed max_bytes. Raised in the forward pass, before more is copied.
        UnsupportedError: an argument is invalid, or floating-point token ids reach an embedding.

    Warns:
        UserWarning: dropout is on, so that the recorded heads are random. The warning names the module.

    >>> import partita as pa
    >>> attention = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    >>> with pa.inspect.capture(attention) as heads, torch.no_grad():
    ...     _ = attention(*[torch.ones(1, 5, 8)] * 3)
    >>> [record.name for record in heads]
    ['MultiheadAttention:0', 'MultiheadAttention:1']
    """
    if model is not None and not isinstance(model, nn.Module):
        raise UnsupportedError(
            f"model is a {type(model).__name__}; expected an nn.Module, or None to record everything."
        )
    for name, limit in (("tokens", tokens), ("batch", batch)):
        if limit is not None and limit < 1:
            raise UnsupportedError(f"{name} is {limit}; expected at least 1, or None for all.")
    patterns = (layers,) if isinstance(layers, str) else None if layers is None else tuple(layers)
    chosen = None if heads is None else tuple(sorted(set(heads)))
    if chosen and chosen[0] < 0:
        raise UnsupportedError(f"heads contains {chosen[0]}; expected numbers ≥ 0, counted within a layer.")
    if dropout := active_dropout(model):
        warnings.warn(
            f"the model is in train mode: dropout is on in {dropout}, so the recorded heads are random. Call model.eval() first.",
            stacklevel=3,
        )
    captured = CapturedHeads(_Limits(patterns, chosen, tokens, batch, max_bytes), advice=advice_on_eager(model))
    with watching(model, captured._add, readers):
        yield captured
