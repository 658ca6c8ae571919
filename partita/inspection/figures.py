"""The figures of one head, and the same for a random head of its shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from partita.arithmetic.rounding import up
from partita.geometry.domains import Array
from partita.inspection.reachability import DEAD, MASKED, REACHABLE, UNDECIDED, key_reach
from partita.inspection.reading import Reading, read_queries
from partita.inspection.snapshots import Snapshot

__all__ = ["Cell", "Figures", "measure"]


@dataclass(frozen=True)
class Cell:
    """A cell that queries fell into.

    Attributes:
        sequence: number of the snapshot.
        key: number of the key in it.
        queries: how many queries fell into the cell.
        value: the key's value vector.
        value_norm: length of the value vector.
        margin: median margin of its queries.
    """

    sequence: int
    key: int
    queries: int
    value: tuple[float, ...]
    value_norm: float
    margin: float


@dataclass(frozen=True)
class Figures:
    """What a head does, over all its sequences. The scores include the temperature, so margins are in nats. NaN: undefined.

    Attributes:
        queries: counted queries: those that see a key and are not padding.
        keys: keys that some query sees.
        cells: keys that some query fell into.
        effective_cells: `1/Σ share²` of the queries' shares, averaged over sequences.
        largest_cell: the largest share of a sequence's queries in one cell, averaged over sequences.
        reachable: keys that some query can reach, by `key_reach`; NaN if the bias depends on the position.
        dead: keys that no query can reach; NaN likewise.
        undecided: keys for which the budget was not enough; NaN likewise.
        unvisited: keys that no recorded query fell into.
        repeated: keys that are exact copies of an earlier one.
        programs: linear programs solved.
        margin: median of largest minus second largest score.
        margin_low: its tenth percentile.
        leakage: mean mass outside the cell.
        leakage_bound: mean of Proposition 3.2's bound of the leakage, query by query.
        inverse_temperature: median over queries of the standard deviation of the scores over the keys seen: the factor of
            standardised scores. Sharpening a head by c multiplies it by c; a common affine function does not change it.
        entropy: mean entropy in nats.
        effective_keys: mean of `1/Σ w²`.
        table_distance: root mean square change of the output when softmax becomes argmax, over the root mean square of the
            output.
        table_distance_of_values: the same, over the root mean square deviation of the values from their mean: 0 for a table,
            near 1 for a plain average.
    """

    queries: int
    keys: int
    cells: int
    effective_cells: float
    largest_cell: float
    reachable: float
    dead: float
    undecided: float
    unvisited: int
    repeated: int
    programs: int
    margin: float
    margin_low: float
    leakage: float
    leakage_bound: float
    inverse_temperature: float
    entropy: float
    effective_keys: float
    table_distance: float
    table_distance_of_values: float


def measure(snapshots: Sequence[Snapshot], *, reach: float, budget: int) -> tuple[Figures, list[Cell]]:
    """The figures over these sequences, the linear programs' budget shared between them, and the cells that were entered."""
    readings = [read_queries(s) for s in snapshots]
    full = [k for k, r in enumerate(readings) if len(r.cells)]
    shares = [np.bincount(readings[k].cells) / len(readings[k].cells) for k in full]
    status, programs, spent = [], 0, budget
    for place, k in enumerate(full):
        found, work, solved = _reach(snapshots[k], reach, spent // (len(full) - place))
        status.append(found)
        spent, programs = spent - work, programs + solved
    known = all(s is not None for s in status) and bool(status)
    every = np.concatenate([s for s in status if s is not None]) if known else np.empty(0)
    visible = [np.flatnonzero(snapshots[k].active[snapshots[k].counted].any(axis=0)) for k in full]
    keys = sum(map(len, visible))
    entered = sum(int((s > 0).sum()) for s in shares)

    def joined(name: str) -> Array:
        return np.concatenate([getattr(readings[k], name) for k in full]) if full else np.empty(0)

    margins, changed = joined("margins"), _mean(joined("changed"))
    figures = Figures(
        queries=len(margins),
        keys=keys,
        cells=entered,
        effective_cells=_mean(np.array([1 / (s**2).sum() for s in shares])),
        largest_cell=_mean(np.array([s.max() for s in shares])),
        reachable=float((every == REACHABLE).sum()) if known else np.nan,
        dead=float((every == DEAD).sum()) if known else np.nan,
        undecided=float((every == UNDECIDED).sum()) if known else np.nan,
        unvisited=keys - entered,
        repeated=sum(_copies(snapshots[k], seen) for k, seen in zip(full, visible)),
        programs=programs,
        margin=_quantile(margins, 0.5),
        margin_low=_quantile(margins, 0.1),
        leakage=_mean(joined("leakage")),
        leakage_bound=min(1.0, float(up(_mean(joined("leakage_bound")) * (1 + 1e-12)))),
        inverse_temperature=_quantile(joined("spread"), 0.5),
        entropy=_mean(joined("entropy")),
        effective_keys=_mean(joined("effective_keys")),
        table_distance=_ratio(changed, _mean(joined("answered"))),
        table_distance_of_values=_ratio(changed, _mean(joined("value_spread"))),
    )
    return figures, [cell for k in full for cell in _cells(k, snapshots[k], readings[k])]


def _reach(snapshot: Snapshot, reach: float, budget: int) -> tuple[NDArray[np.int8] | None, int, int]:
    """Answers for the keys that some query sees, entries spent, programs solved; None where every position has its own
    diagram."""
    if snapshot.offsets is None:
        return None, 0, 0
    partition = snapshot.max_affine()
    found = key_reach(
        partition.slopes,
        partition.offsets,
        snapshot.active[snapshot.counted],
        queries=snapshot.points,
        reach=reach,
        budget=budget,
    )
    return found.status[found.status != MASKED], found.entries, found.programs


def _copies(snapshot: Snapshot, visible: NDArray[np.int64]) -> int:
    """Keys (with their biases) that are exact copies of an earlier one."""
    offsets = np.zeros(len(snapshot.keys)) if snapshot.offsets is None else snapshot.offsets
    rows = np.column_stack([snapshot.keys, offsets])[visible]
    return len(rows) - len(np.unique(rows, axis=0))


def _cells(sequence: int, snapshot: Snapshot, reading: Reading) -> list[Cell]:
    order = np.argsort(reading.cells, kind="stable")
    keys, starts, counts = np.unique(reading.cells[order], return_index=True, return_counts=True)
    return [
        Cell(
            sequence,
            int(key),
            int(count),
            tuple(snapshot.values[key].astype(float).tolist()),
            float(np.linalg.norm(snapshot.values[key].astype(np.float64))),
            float(np.median(reading.margins[order[start : start + count]])),
        )
        for key, start, count in zip(keys, starts, counts)
    ]


def _mean(numbers: Array) -> float:
    return float(numbers.mean()) if len(numbers) else np.nan


def _quantile(numbers: Array, share: float) -> float:
    """Of numbers that may be infinite: the next one down, never a mean with infinity."""
    return float(np.quantile(numbers, share, method="lower")) if len(numbers) else np.nan


def _ratio(squared: float, against: float) -> float:
    """√ of a quotient of mean squares; 0/0 is no change at all."""
    if squared == 0:
        return 0.0
    return float(np.sqrt(squared / against)) if against > 0 else np.inf
