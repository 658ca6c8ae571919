"""What a head does to each query: its cell, margin, leakage, entropy, and how far its output is from the cell's value."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from partita.arithmetic.rounding import up
from partita.geometry.domains import Array
from partita.inspection.snapshots import Snapshot

__all__ = ["Reading", "random_snapshot", "read_queries"]


@dataclass(frozen=True, eq=False)
class Reading:
    """One number per counted query, in float64, temperature included in the scores.

    Attributes:
        cells: the key with the largest score, ties to the smallest label.
        margins: largest minus second largest score; infinite where one key is seen.
        leakage: mass outside the cell, `1 − w_cell`.
        leakage_bound: `min(1, (N − 1)e^{−margin})`, N the keys the query sees; rounded up. *Theorem*: `indicator`
            (Proposition 3.2).
        spread: standard deviation of the scores over the keys seen: the inverse temperature, once scores are standardised.
        entropy: of the weights, in nats.
        effective_keys: `1/Σ w²`.
        changed: `|Σ w V − V_cell|²`, the squared change of the output when softmax becomes argmax.
        answered: `|Σ w V|²`.
        value_spread: `mean |V_j − mean V|²` over the keys seen.
        seen: how many keys the query sees.
    """

    cells: NDArray[np.int64]
    margins: Array
    leakage: Array
    leakage_bound: Array
    spread: Array
    entropy: Array
    effective_keys: Array
    changed: Array
    answered: Array
    value_spread: Array
    seen: NDArray[np.int64]


def read_queries(snapshot: Snapshot) -> Reading:
    """Every counted query of the sequence, a few at a time."""
    parts = [_read(snapshot, rows, scores) for rows, scores in snapshot.score_chunks()]
    if not parts:
        empty: dict[str, Any] = {f.name: np.empty(0) for f in fields(Reading)}
        return Reading(**{**empty, "cells": np.empty(0, dtype=np.int64), "seen": np.empty(0, dtype=np.int64)})
    return Reading(*(np.concatenate([getattr(p, f.name) for p in parts]) for f in fields(Reading)))


def _read(snapshot: Snapshot, rows: NDArray[np.int64], scores: Array) -> Reading:
    active, values = snapshot.active[rows], snapshot.values.astype(np.float64)
    here, seen = np.arange(len(rows)), active.sum(axis=1)
    cells = scores.argmax(axis=1)
    best = scores[here, cells]
    relative = scores - best[:, None]
    weights = np.exp(relative)
    others = weights.copy()
    others[here, cells] = 0.0
    outside, total = others.sum(axis=1), weights.sum(axis=1)
    with np.errstate(invalid="ignore"):
        logs = np.where(active, weights * relative, 0.0).sum(axis=1) / total
    rivals = scores.copy()
    rivals[here, cells] = -np.inf
    margins = best - rivals.max(axis=1)
    known = np.where(active, relative, 0.0)
    mean = known.sum(axis=1) / seen
    spread = np.sqrt(np.maximum((known**2).sum(axis=1) / seen - mean**2, 0.0))
    weights /= total[:, None]
    answer, centred = weights @ values, values - values.mean(axis=0)
    share = active / seen[:, None]
    scatter = share @ (centred**2).sum(axis=1) - ((share @ centred) ** 2).sum(axis=1)
    rounding = _score_rounding(snapshot, rows)
    nothing = values.shape[1] * ((len(values) + 4) * 2.0**-53 * np.abs(values).max(initial=0.0)) ** 2
    return Reading(
        cells,
        margins,
        outside / total,
        np.minimum(1.0, up((seen - 1) * np.exp(np.minimum(2 * rounding - margins, 0.0)) * (1 + 1e-14))),
        spread,
        np.log(total) - logs,
        1 / (weights**2).sum(axis=1),
        _above(((answer - values[cells]) ** 2).sum(axis=1), nothing),
        (answer**2).sum(axis=1),
        _above(scatter, nothing),
        seen,
    )


def _above(squares: Array, nothing: float) -> Array:
    """0 where rounding alone could have made the number: equal values differ by nothing."""
    return np.where(squares > nothing, squares, 0.0)


def _score_rounding(snapshot: Snapshot, rows: NDArray[np.int64]) -> Array:
    """A bound on how far each query's float64 scores are from those of the recorded numbers: (d + 4)u Σ|terms|."""
    largest = np.abs(snapshot.keys).astype(np.float64).max(axis=0, initial=0.0) * abs(snapshot.scale)
    terms = np.abs(snapshot.queries[rows]).astype(np.float64) @ largest
    if snapshot.bias is not None:
        terms = terms + np.abs(snapshot.bias).max()
    out: Array = (snapshot.keys.shape[1] + 4) * 2.0**-53 * terms * (1 + 1e-10)
    return out


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
