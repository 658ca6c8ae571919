"""One sequence passing through one head: recorded vectors, and the max-affine function that they make."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from partita.errors import NonFiniteValueError, UnsupportedError
from partita.geometry.domains import Array
from partita.geometry.partitions import MaxAffine
from partita.inspection.calls import MASKED_BELOW, AttentionCall

__all__ = ["Snapshot", "require_snapshot", "shared_offsets"]

_SAME = 1e-5  # of the largest bias: float32 biases that are sums of a row and a column part are so to rounding only


@dataclass(frozen=True, eq=False)
class Snapshot:
    """Queries, keys and values of one head on one sequence. Scores are `s_j(x) = scale·k_j·x + bias_j`, temperature included.

    Attributes:
        queries: `(queries, dim)`, as computed; half precision is widened exactly.
        keys: `(keys, dim)`.
        values: `(keys, value_dim)`.
        scale: factor of the scores.
        mask: None, or `(queries or 1, keys)`: True where a key may be attended to, or numbers that are added to the scores.
        causal: the query at position i sees keys 0 … i only.
        positions: `(queries,)`, positions of the recorded queries in the sequence.
        padding: `(queries,)`, True for tokens that no query attends to in self-attention; they do not count as queries. Or None.
        dtype: dtype of the model.
        same_tokens: whether queries and keys are the same tokens, so that distances between them have a meaning. By default
            true if there are equally many.
        tokens: `(keys,)`, numbers of the tokens, equal for equal tokens; None if they are unknown.
        follows_scores: whether the mask is what flex attention added to these scores, and would differ for other scores.
        offset: position of the first query of the call among the keys: what a cache held before, with fewer queries than keys.
        slope: `−slope·|i − j|` is added to the scores (ALiBi).
        hides_below: numbers in the mask up to this one hide a key.
    """

    queries: NDArray[np.floating]
    keys: NDArray[np.floating]
    values: NDArray[np.floating]
    scale: float
    mask: NDArray[Any] | None = None
    causal: bool = False
    positions: NDArray[np.int64] | None = None
    padding: NDArray[np.bool_] | None = None
    dtype: str = "float32"
    same_tokens: bool | None = None
    tokens: NDArray[np.int64] | None = None
    follows_scores: bool = False
    offset: int = 0
    slope: float = 0.0
    hides_below: float = MASKED_BELOW

    def __repr__(self) -> str:
        return f"Snapshot({len(self.queries)} queries × {len(self.keys)} keys, R^{self.keys.shape[1]}, {self.dtype})"

    def __post_init__(self) -> None:
        if self.same_tokens is None:
            object.__setattr__(self, "same_tokens", len(self.queries) == len(self.keys))
        if self.positions is None:
            object.__setattr__(self, "positions", np.arange(len(self.queries)))
        for name in ("queries", "keys", "values"):
            if not np.isfinite(getattr(self, name)).all():
                raise NonFiniteValueError(f"{name} of a head contain NaN or infinity; check the model's activations.")

    @cached_property
    def _allowed(self) -> NDArray[np.bool_]:
        """Which keys the mask shows, `(queries or 1, keys)`."""
        if self.mask is None:
            return np.ones((1, len(self.keys)), dtype=np.bool_)
        return self.mask if self.mask.dtype == np.bool_ else self.mask > self.hides_below

    @cached_property
    def active(self) -> NDArray[np.bool_]:
        """Which keys each query may see, `(queries, keys)`."""
        shape = (len(self.queries), len(self.keys))
        seen = np.broadcast_to(self._allowed, shape)  # no copies yet
        if self.causal:
            assert self.positions is not None
            seen = seen & (np.arange(shape[1]) <= self.positions[:, None])
        return seen

    @cached_property
    def counted(self) -> NDArray[np.int64]:
        """Rows of the queries that count: those that see a key and are not padding."""
        seen = self.active.any(axis=1) if self.active.size else np.zeros(len(self.queries), bool)
        return np.flatnonzero(seen if self.padding is None else seen & ~self.padding)

    @cached_property
    def visible_keys(self) -> NDArray[np.bool_]:
        """Keys that some counted query sees, `(keys,)`."""
        return np.asarray(self.active[self.counted].any(axis=0))

    @cached_property
    def bias(self) -> Array | None:
        """What is added to the scores, `(queries or 1, keys)`, 0 where masked; None if nothing is added."""
        added: Any = 0.0
        if self.mask is not None and self.mask.dtype != np.bool_:
            added = np.where(self._allowed, self.mask, 0.0).astype(np.float64)
        if self.slope:
            assert self.positions is not None
            apart = np.abs(self.positions[:, None] - np.arange(len(self.keys)))
            added = np.where(self._allowed, added - self.slope * apart, 0.0)
        return added if np.any(added) else None

    def scores(self, rows: NDArray[np.int64]) -> Array:
        """`scale·k_j·x + bias_j` in float64, −∞ where a key is masked, `(rows, keys)`.

        Args:
            rows: which queries, `(rows,)`.
        """
        scores = self.queries[rows].astype(np.float64) @ (self.scale * self.keys.astype(np.float64)).T
        if self.bias is not None:
            scores += self.bias[rows] if len(self.bias) > 1 else self.bias
        active = self.active[rows]
        if not active.all():
            scores[~active] = -np.inf
        return scores

    def as_call(self) -> AttentionCall:
        """This head and sequence as a call in float64."""
        queries, keys, values = (
            torch.from_numpy(np.ascontiguousarray(a, dtype=np.float64))[None, None]
            for a in (self.queries, self.keys, self.values)
        )
        mask = None if self.mask is None else torch.from_numpy(np.ascontiguousarray(self.mask))[None, None]
        assert self.positions is not None
        places = torch.from_numpy(np.ascontiguousarray(self.positions, dtype=np.int64))
        crosses = not self.same_tokens
        slopes = torch.tensor([self.slope], dtype=torch.float64) if self.slope else None
        call = AttentionCall(
            queries, keys, values, self.scale, mask, self.causal, crosses, slopes=slopes, positions=places
        )
        return replace(call, offsets=(self.offset,), hides_below=self.hides_below)

    def weights(self) -> Array:
        """The attention matrix, `(queries, keys)`, in float64: the softmax of the scores. A row is 0 if the query sees no key."""
        scores = self.scores(np.arange(len(self.queries)))
        seen = self.active.any(axis=1) if self.active.size else np.zeros(len(scores), bool)
        scores[~seen] = 0.0
        weights = np.exp(scores - scores.max(axis=1, keepdims=True, initial=-np.inf))
        weights[~seen] = 0.0
        return np.asarray(weights / np.where(seen, weights.sum(axis=1), 1.0)[:, None])

    @cached_property
    def offsets(self) -> Array | None:
        """The b_j if one diagram serves every query, `(keys,)`; None if the bias depends on the query's position.

        A bias that is a part per query plus a part per key, where keys are seen, moves no cell from query to query: ALiBi
        under a causal mask, `m(j − i)`, is of this kind; `−m|i − j|` is not.
        """
        bias = self.bias
        if bias is None:
            return np.zeros(len(self.keys))
        if len(bias) == 1:
            return np.asarray(bias[0])
        rows = self.counted[np.argsort(-self.active[self.counted].sum(axis=1), kind="stable")]
        return shared_offsets(
            ((bias[row], self.active[row]) for row in rows), len(self.keys), float(np.abs(bias).max())
        )

    @cached_property
    def free(self) -> NDArray[np.bool_]:
        """Coordinates in which the recorded queries differ; one that never varies only shifts the scores.

        All of them if the queries are one point.
        """
        queries = self.queries[self.counted]
        varies = (queries != queries[:1]).any(axis=0) if len(queries) else np.ones(self.keys.shape[1], bool)
        return varies if varies.any() else np.ones(self.keys.shape[1], bool)

    @property
    def points(self) -> Array:
        """The counted queries in the free coordinates, float64: points of the space that `max_affine` cuts."""
        return self.queries[self.counted][:, self.free].astype(np.float64)

    def max_affine(self, position: int | None = None) -> MaxAffine:
        """The function whose cells the head makes of its query space: slopes `scale·k_j`, offsets the biases.

        *Theorem*: `max-affine-partition`. Coordinates in which no query varies are folded into the offsets; `points` are the
        queries in the others. Masked keys are part of it; `active` says into which of its cells each query may fall.

        Args:
            position: row of a recorded query, when the bias depends on it; its diagram is then the one returned.
        """
        if not len(self.keys) or not len(self.counted):
            raise UnsupportedError("this sequence has no query that sees a key, so there is no partition to read.")
        if position is None:
            offsets = self.offsets
            if offsets is None:
                raise UnsupportedError(
                    "the bias of this head depends on the query's position (as relative position biases do), so every "
                    "position has its own diagram; use max_affine(position=row)."
                )
        else:
            bias = self.bias
            offsets = np.zeros(len(self.keys)) if bias is None else bias[position if len(bias) > 1 else 0]
        slopes = self.scale * self.keys.astype(np.float64)
        fixed = self.queries[self.counted[0]].astype(np.float64)[~self.free]
        return MaxAffine(slopes[:, self.free], offsets + slopes[:, ~self.free] @ fixed)


def require_snapshot(given: Any) -> None:
    """Raises an UnsupportedError for anything but a `Snapshot`, such as a record or all captured heads.

    Args:
        given: the argument to check.
    """
    if not isinstance(given, Snapshot):
        raise UnsupportedError(
            f"snapshot is of type {type(given).__name__}; expected one recorded sequence of one head",
            "Use record.snapshots[0], where record = heads[layer, head].",
        )


def shared_offsets(rows: Iterable[tuple[Array, NDArray[np.bool_]]], keys: int, largest: float) -> Array | None:
    """The part b_j per key of a bias that is a part per query plus a part per key where keys are seen; None for other biases.

    Args:
        rows: the bias of each query, `(keys,)`, and which keys it sees; queries that see most keys come first.
        keys: number of keys.
        largest: the largest absolute bias.
    """
    found = np.full(keys, np.nan)
    for bias, seen in rows:
        shared = seen & ~np.isnan(found)
        difference = (bias - found)[shared]
        if difference.size and np.ptp(difference) > _SAME * largest:
            return None
        fresh = seen & np.isnan(found)
        found[fresh] = bias[fresh] - (difference.mean() if difference.size else 0.0)
    return np.asarray(np.nan_to_num(found))
