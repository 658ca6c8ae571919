"""The attention matrix of a head with the labels of its tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from partita.errors import ShapeError
from partita.geometry.domains import Array
from partita.inspection.snapshots import Snapshot, require_snapshot
from partita.inspection.token_ids import labels_of

__all__ = ["Pattern", "pattern"]


@dataclass(frozen=True, eq=False)
class Pattern:
    """The weights of a head on one sequence.

    Attributes:
        weights: `(queries, keys)`, the softmax of the scores in float64; a row is all zeros if the query sees no key.
        query_labels: one per query: its token, or its position.
        key_labels: one per key.
    """

    weights: Array
    query_labels: tuple[str, ...]
    key_labels: tuple[str, ...]


def pattern(snapshot: Snapshot, *, tokens: Any = None, tokenizer: Any = None) -> Pattern:
    """The attention matrix of a head on one sequence, with labels.

    Args:
        snapshot: one sequence, from `capture`.
        tokens: labels or ids of its keys, `(keys,)`. By default the ids that reached the model's embedding, if they are known
            and a tokenizer is given, and positions otherwise.
        tokenizer: turns ids into labels: an object with `convert_ids_to_tokens` or `decode`, or a function of one id.

    Returns:
        A `Pattern`; `partita.plots.plot_pattern` draws it.

    Raises:
        ShapeError: there are more or fewer tokens than keys.
        UnsupportedError: snapshot, tokens or tokenizer have the wrong type.

    >>> import torch, partita as pa
    >>> with pa.inspect.capture() as heads:
    ...     pa.inspect.record(*[torch.ones(1, 1, 3, 4)] * 3)
    >>> pa.inspect.pattern(heads["attention", 0].snapshots[0], tokens=["a", "b", "c"]).key_labels
    ('a', 'b', 'c')
    """
    require_snapshot(snapshot)
    assert snapshot.positions is not None
    count = len(snapshot.keys)
    known = tokens
    if known is None and tokenizer is not None:
        known = snapshot.tokens
    rows = None if known is None else labels_of(known, tokenizer)
    if rows is None:
        names = [str(k) for k in range(count)]
    else:
        if len(rows) != 1 or len(rows[0]) != count:
            raise ShapeError(
                f"tokens has {[len(row) for row in rows]} labels; expected {count}, one per key of this sequence."
            )
        names = rows[0]
    positions = [int(p) for p in snapshot.positions]
    own = names if snapshot.same_tokens else [str(p) for p in range(max(positions, default=-1) + 1)]
    return Pattern(np.asarray(snapshot.weights()), tuple(own[p] for p in positions), tuple(names))
