"""Recorded heads under the names that TransformerLens uses."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from partita.arithmetic.notebook_cards import counted
from partita.errors import ShapeError, UnsupportedError
from partita.inspection.captured_heads import CapturedHeads, HeadRecord, records_of, require_kept
from partita.inspection.snapshots import Snapshot

__all__ = ["ActivationCache", "activation_cache"]

_ALIASES = {"query": "q", "key": "k", "value": "v", "attn": "pattern", "attn_logits": "attn_scores"}


def _scores(snapshot: Snapshot) -> np.ndarray:
    return snapshot.scores(np.arange(len(snapshot.queries)))


# tensor of one head on one sequence; whether the head axis comes before the last two axes (else between them)
_KINDS: dict[str, tuple[Callable[[Snapshot], np.ndarray], bool]] = {
    "q": (lambda s: s.queries, False),
    "k": (lambda s: s.keys, False),
    "v": (lambda s: s.values, False),
    "attn_scores": (_scores, True),
    "pattern": (lambda s: s.weights(), True),
    "z": (lambda s: s.weights() @ s.values.astype(np.float64), False),
}


class ActivationCache(Mapping[str, Tensor]):
    """A read-only mapping from TransformerLens' activation names to tensors, which are computed on access.

    Layers are numbered in the order in which they first ran, and heads along an axis in the order of their numbers. Scores,
    patterns and z are computed in float64 from the recorded vectors and returned in float32 (float64 for models in float64).

    Args:
        records: of the heads.

    Attributes:
        layers: the module path of each layer, by number.
    """

    def __init__(self, records: Iterable[HeadRecord]) -> None:
        self._records: dict[str, list[HeadRecord]] = {}
        for record in records:
            self._records.setdefault(record.layer, []).append(record)
        self.layers = tuple(self._records)

    def __getitem__(self, key: str | tuple[Any, ...]) -> Tensor:
        """`cache["blocks.0.attn.hook_pattern"]`, or `cache["pattern", 0]`; the last layer is −1."""
        found = self._place(key)
        if found is None:
            raise UnsupportedError(
                f"the cache has no {key!r}; expected one of {', '.join(_KINDS)} with a layer from 0 to {len(self.layers) - 1}, as "
                'in cache["blocks.0.attn.hook_pattern"] or cache["pattern", 0].'
            )
        kind, layer = found
        compute, heads_first = _KINDS[kind]
        return self._stacked(self._records[self.layers[layer]], compute, heads_first)

    def __contains__(self, key: object) -> bool:
        return self._place(key) is not None

    def get(self, key: str, default: Any = None) -> Any:
        """The tensor, or `default` if there is none of this name.

        Args:
            key: name of the activation.
            default: what to return otherwise.
        """
        return self[key] if self._place(key) is not None else default

    def __iter__(self) -> Iterator[str]:
        return (f"blocks.{layer}.attn.hook_{kind}" for layer in range(len(self.layers)) for kind in _KINDS)

    def __len__(self) -> int:
        return len(self.layers) * len(_KINDS)

    def __repr__(self) -> str:
        return f"ActivationCache({counted(len(self.layers), 'layer')}, {len(self)} names)"

    def _place(self, key: object) -> tuple[str, int] | None:
        """The kind of activation and the layer number that a name stands for; None if there is none."""
        if isinstance(key, str):
            named = re.fullmatch(r"blocks\.(\d+)\.attn\.hook_(\w+)", key)
            kind, layer = (named.group(2), int(named.group(1))) if named else ("", -1)
        elif isinstance(key, tuple) and len(key) in (2, 3) and isinstance(key[0], str) and isinstance(key[1], int):
            kind, layer = _ALIASES.get(key[0], key[0]), key[1] + len(self.layers) * (key[1] < 0)
            kind = kind if len(key) == 2 or key[2] in ("attn", "a") else ""
        else:
            return None
        return (kind, layer) if kind in _KINDS and 0 <= layer < len(self.layers) else None

    @staticmethod
    def _stacked(records: list[HeadRecord], compute: Callable[[Snapshot], np.ndarray], heads_first: bool) -> Tensor:
        require_kept(records)
        shapes = {(len(s.queries), len(s.keys)) for record in records for s in record.snapshots}
        if len(shapes) != 1:
            raise ShapeError(
                f"layer {records[0].layer!r} recorded sequences of different lengths, queries × keys "
                f"{', '.join(f'{q}×{k}' for q, k in sorted(shapes)[:4])}; expected one length",
                "Run sequences of one length inside `capture`, or build a cache for each.",
            )
        held = np.stack([[compute(s) for s in record.snapshots] for record in records])  # (heads, batch, …)
        dtype = torch.float64 if records[0].snapshots[0].dtype == "float64" else torch.float32
        return torch.from_numpy(np.moveaxis(held, 0, 1 if heads_first else 2)).to(dtype).contiguous()


def activation_cache(heads: CapturedHeads | HeadRecord | Iterable[HeadRecord]) -> ActivationCache:
    """Captured heads under the names of TransformerLens: `cache["blocks.0.attn.hook_pattern"]`, `cache["pattern", 0]`.

    `q`, `k`, `v` and `z` are `(batch, pos, head, d_head)`, `attn_scores` and `pattern` are `(batch, head, query_pos, key_pos)`.
    Scores include scale, bias and mask, and are −∞ where masked. The batch axis holds all recorded sequences. With grouped queries,
    `k` and `v` are repeated for every query head; TransformerLens has one for each key head.

    Args:
        heads: from `capture`, or one or several of its records.

    Returns:
        An `ActivationCache`.

    Raises:
        UnsupportedError: nothing was recorded; later, for a name that does not exist.
        ShapeError: on access to a tensor, if the recorded sequences have different lengths.

    >>> import torch, partita as pa
    >>> attention = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval()
    >>> with pa.inspect.capture(attention) as heads, torch.no_grad():
    ...     _ = attention(*[torch.randn(3, 5, 8)] * 3)
    >>> cache = pa.inspect.activation_cache(heads)
    >>> cache["pattern", 0].shape, cache["blocks.0.attn.hook_q"].shape
    (torch.Size([3, 2, 5, 5]), torch.Size([3, 5, 2, 4]))
    """
    return ActivationCache(records_of(heads, empty=False))
