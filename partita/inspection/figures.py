"""The figures of one head and of a random head of the same shape, computed from summaries of the sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from partita.arithmetic.rounding import up
from partita.geometry.domains import Array
from partita.inspection.calls import AttentionCall
from partita.inspection.reachability import DEAD, MASKED, REACHABLE, UNDECIDED, key_reach
from partita.inspection.reading import Reading, most_frequent_lags, read_all
from partita.inspection.snapshots import Snapshot

__all__ = [
    "Cell",
    "Figures",
    "Measured",
    "Roles",
    "Summary",
    "gathered",
    "measured",
    "on_host",
    "put_together",
    "summarised",
]


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
        reachable: keys that some query can reach, by `key_reach`; NaN if the bias depends on the position, or if the head was
            read while the model ran, without keeping its keys.
        dead: keys that no query can reach; NaN likewise.
        undecided: keys for which the budget ran out; NaN likewise.
        unvisited: keys that no recorded query fell into.
        repeated: keys that are exact copies of an earlier one.
        programs: linear programs solved.
        margin: median of largest minus second largest score.
        margin_low: its tenth percentile.
        leakage: mean mass outside the cell.
        leakage_bound: mean of Proposition 3.2's bound of the leakage, query by query.
        inverse_temperature: median over queries of the standard deviation of the scores over the keys seen. Sharpening a head
            by c multiplies it by c; adding the same affine function to all scores does not change it.
        entropy: mean entropy in nats.
        effective_keys: mean of `1/Σ w²`.
        table_distance: root mean square change of the output when softmax becomes argmax, over the root mean square of the
            output.
        table_distance_of_values: the same, over the root mean square deviation of the values from their mean: 0 for a table,
            near 1 for a plain average.
        mean_distance: root mean square change of the output when softmax becomes the plain mean of the values seen, over the
            root mean square of the output.
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
    mean_distance: float

    @property
    def kind(self) -> str:
        """`lookup` if the output is nearer to the cell's value than to the plain mean of the values seen, `average` if it is
        nearer to the mean, `either` if both are within 1 %."""
        if max(self.table_distance, self.mean_distance) <= 0.01:
            return "either"
        return "lookup" if self.table_distance < self.mean_distance else "average"


@dataclass(frozen=True)
class Roles:
    """Where a head looks, over all its sequences. NaN: undefined.

    Attributes:
        sink_mass: mean weight on the first key that is not padding. This mean and those of the weights below are over the queries
            that see such a key.
        distance: mean distance `Σ w |i − j|` in tokens. This and all below are NaN if queries and keys are not the same tokens.
        on_self: mean weight on the key at the query's own position.
        on_previous: mean weight on the token before it.
        lag: the most frequent distance from a query back to the key of its cell; negative if the key is ahead.
        lag_share: share of the queries whose cell is at that distance. Here and in `on_lag`, sequences with a different most
            frequent distance count as 0.
        on_lag: mean weight on the key at that distance, over the queries that see it.
        copies: queries that see another copy of their own token. This and all below are NaN if the tokens are unknown.
        same_token: mean weight on all keys with the query's token.
        duplicate_token: the same without the query's own position.
        induction: mean weight on the keys that follow another copy of the query's token.
    """

    sink_mass: float
    distance: float
    on_self: float
    on_previous: float
    lag: float
    lag_share: float
    on_lag: float
    copies: float
    same_token: float
    duplicate_token: float
    induction: float


class Measured(NamedTuple):
    """All that is measured of a head. `score_error` is the largest bound on the rounding error of a score."""

    figures: Figures
    roles: Roles
    cells: list[Cell]
    score_error: float


_MEANS = (
    *("leakage", "leakage_bound", "entropy", "effective_keys", "changed", "averaged", "answered", "value_spread"),
    *("sink", "distance", "on_self", "on_previous", "on_lag", "same_token", "duplicate_token", "induction"),
)


@dataclass(frozen=True, eq=False)
class Summary:
    """One sequence that passed through a head, without its vectors: the numbers that the figures are computed from.

    Attributes:
        keys: keys that some query sees.
        repeated: keys that are exact copies of an earlier one.
        margins: margin of every counted query, in rising order.
        spreads: standard deviation of every counted query's scores, in rising order.
        sums: for each name of `Reading`, the sum over the queries and the number of queries.
        lag: the most frequent lag; None if queries and keys are not the same tokens.
        lag_queries: how many queries have it.
        score_error: largest bound on the rounding error of a score.
        occupied: `(cells,)`, keys whose cells contain queries.
        occupancy: `(cells,)`, how many queries each contains.
        cells: the same with their values; with `capture(..., stream=True)`, only the fullest.
    """

    keys: int
    repeated: int
    margins: NDArray[np.floating]
    spreads: NDArray[np.floating]
    sums: dict[str, tuple[float, int]]
    lag: int | None
    lag_queries: int
    score_error: float
    occupied: NDArray[np.integer]
    occupancy: NDArray[np.integer]
    cells: tuple[Cell, ...]

    @property
    def size(self) -> int:
        """Bytes of the arrays."""
        return sum(a.nbytes for a in (self.margins, self.spreads, self.occupied, self.occupancy))


class Gathered(NamedTuple):
    """The numbers for the summaries of some heads on one sequence, still on the device: tensors, one row per head.

    Attributes:
        totals: `(names, heads)`, sums over the counted queries.
        counts: `(names, heads)`, numbers of queries in these sums.
        numbers: `(4, heads)`: counted queries, most frequent lag, queries that have it, copies of keys.
        errors: largest bound on the rounding error of a score.
        margins: `(heads, tokens)` in rising order; NaN at the end for queries that do not count.
        spreads: likewise.
        occupancy: `(heads, keys)`, how many queries fell into each cell.
        largest: `(heads, n)`, the cells with most queries.
        middles: `(heads, n)`, the medians of their margins.
        vectors: `(heads, n, value_dim)`, their values.
    """

    totals: Tensor
    counts: Tensor
    numbers: Tensor
    errors: Tensor
    margins: Tensor
    spreads: Tensor
    occupancy: Tensor
    largest: Tensor
    middles: Tensor
    vectors: Tensor

    def to_host(self) -> Gathered:
        """The same on the host; see `on_host`."""
        return Gathered(*(on_host(t) for t in self))


def on_host(tensor: Tensor) -> Tensor:
    """A copy on the host. From a GPU the copy is asynchronous: synchronise before reading it.

    Args:
        tensor: on any device.
    """
    if not tensor.is_cuda:
        return tensor.cpu()
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


def gathered(
    reading: Reading,
    counted: Tensor,
    call: AttentionCall,
    heads: slice,
    repeated: Tensor,
    *,
    most: int | None = None,
    dtype: torch.dtype = torch.float64,
) -> Gathered:
    """The numbers for the summaries of some heads. Nothing here waits for the device.

    Args:
        reading: of all queries, `(heads, tokens)`.
        counted: `(heads, tokens)`, which queries count.
        call: the attention, of one sequence.
        heads: which of its heads.
        repeated: `(heads,)`, keys that are exact copies of an earlier one.
        most: how many cells to keep with their values; all by default.
        dtype: of the margins and spreads that are kept.
    """
    numbers = torch.stack([getattr(reading, name).double() for name in _MEANS])
    known = counted & ~numbers.isnan()
    keys, values = call.keys.shape[2], call.of_heads(call.values, 0, heads)
    lags, lag_queries = most_frequent_lags(reading.lags, counted, keys, call.last_place)
    # queries that do not count, and those of a diverged model, go to an extra cell after the last
    cells = torch.where(counted & (reading.cells >= 0), reading.cells, keys)
    occupancy = torch.zeros(len(cells), keys + 1, dtype=torch.int64, device=cells.device)
    occupancy.scatter_add_(1, cells, torch.ones_like(cells))
    starts = occupancy.cumsum(dim=1) - occupancy
    largest = torch.argsort(occupancy[:, :keys], dim=1, descending=True, stable=True)[:, :most]
    margins = torch.where(counted, reading.margins, torch.nan)
    order = margins.argsort(dim=1)
    order = order.gather(1, cells.gather(1, order).argsort(dim=1, stable=True))  # sorted by cell, then by margin
    inside = functional.pad(margins.gather(1, order), (0, 1), value=torch.nan)  # of no queries, too
    first, sizes = starts.gather(1, largest), occupancy.gather(1, largest)
    low, high = (
        inside.gather(1, (first + k).clamp(max=inside.shape[1] - 1))
        for k in ((sizes - 1).clamp(min=0) // 2, sizes // 2)
    )
    vectors = values.gather(1, largest[..., None].expand(-1, -1, values.shape[2])).double()
    return Gathered(
        totals=torch.where(known, numbers, 0.0).sum(dim=-1),
        counts=known.sum(dim=-1),
        numbers=torch.stack([counted.sum(dim=1), lags, lag_queries, repeated]),
        errors=functional.pad(torch.where(counted, reading.score_error, 0.0), (0, 1)).amax(dim=1),
        margins=margins.to(dtype).sort(dim=1).values,
        spreads=torch.where(counted, reading.spread, torch.nan).to(dtype).sort(dim=1).values,
        occupancy=occupancy[:, :keys].int(),
        largest=largest,
        middles=torch.where(low == high, low, (low + high) / 2).double(),
        vectors=vectors,
    )


def summarised(found: Gathered, *, keys: Sequence[int], square: bool) -> list[Summary]:
    """The summaries of some heads on one sequence.

    Args:
        found: on the host.
        keys: for each head, keys that some query sees.
        square: whether queries and keys are the same tokens.
    """
    totals, counts, numbers, errors, margins, spreads, occupancy, largest, middles, vectors = (t.numpy() for t in found)
    made = []
    for head, seen in enumerate(keys):
        queries, lag, lag_queries, repeated = (int(n) for n in numbers[:, head])
        occupied = np.flatnonzero(occupancy[head])
        filled = np.flatnonzero(occupancy[head][largest[head]])
        filled = filled[np.argsort(largest[head][filled])]
        columns = (
            largest[head][filled],
            occupancy[head][largest[head][filled]],
            vectors[head][filled],
            middles[head][filled],
        )
        lengths = np.linalg.norm(columns[2], axis=1)
        cells = zip(*(c.tolist() for c in (*columns, lengths)))
        made.append(
            Summary(
                keys=seen,
                repeated=repeated,
                margins=margins[head, :queries].copy(),
                spreads=spreads[head, :queries].copy(),
                sums={name: (float(totals[k, head]), int(counts[k, head])) for k, name in enumerate(_MEANS)},
                lag=lag if square and queries else None,
                lag_queries=lag_queries,
                score_error=float(errors[head]),
                occupied=occupied.astype(np.int32),
                occupancy=occupancy[head][occupied],
                cells=tuple(Cell(0, k, n, tuple(v), length, m) for k, n, v, m, length in cells),
            )
        )
    return made


def measured(
    snapshots: Sequence[Snapshot],
    *,
    reach: float,
    budget: int,
    tokens: Sequence[NDArray[np.int64] | None],
) -> Measured:
    """All that is measured over these sequences; the linear programs' budget is shared between them.

    Args:
        snapshots: the sequences.
        reach: a key counts as reachable if a query up to this many times as large as the largest recorded one reaches it.
        budget: largest number of matrix entries of the linear programs.
        tokens: for each sequence the numbers of its tokens, `(keys,)`, or None.
    """
    summaries = [_summary(snapshot, own) for snapshot, own in zip(snapshots, tokens)]
    full = [k for k, s in enumerate(summaries) if len(s.margins)]
    status, programs, spent = [], 0, budget
    for place, k in enumerate(full):
        answers, work, solved = _reach(snapshots[k], reach, spent // (len(full) - place))
        status.append(answers)
        spent, programs = spent - work, programs + solved
    known = all(s is not None for s in status) and bool(status)
    every = np.concatenate([s for s in status if s is not None]) if known else None
    found = put_together(summaries)
    figures = replace(found.figures, programs=programs)
    if every is not None:
        reachable, dead, undecided = (float((every == label).sum()) for label in (REACHABLE, DEAD, UNDECIDED))
        figures = replace(figures, reachable=reachable, dead=dead, undecided=undecided)
    return found._replace(figures=figures)


def _summary(snapshot: Snapshot, tokens: NDArray[np.int64] | None) -> Summary:
    visible = np.flatnonzero(snapshot.visible_keys)
    counted = torch.zeros(1, len(snapshot.queries), dtype=torch.bool, device="cpu")
    counted[0, snapshot.counted] = True
    repeated = torch.tensor([_copies(snapshot, visible)], device="cpu")
    found = gathered(read_all(snapshot, tokens), counted, snapshot.as_call(), slice(0, 1), repeated)
    return summarised(found, keys=[len(visible)], square=bool(snapshot.same_tokens))[0]


def put_together(summaries: Sequence[Summary]) -> Measured:
    """All that is measured over these sequences, except figures that need the keys.

    Args:
        summaries: one per sequence.
    """
    full = [(k, s) for k, s in enumerate(summaries) if len(s.margins)]
    shares = [s.occupancy / s.occupancy.sum() for _, s in full]
    margins, spreads = (_joined([getattr(s, name) for _, s in full]) for name in ("margins", "spreads"))
    keys, entered = sum(s.keys for _, s in full), sum(len(s.occupied) for _, s in full)
    lags: dict[int, int] = {}
    for _, s in full:
        if s.lag is not None:
            lags[s.lag] = lags.get(s.lag, 0) + s.lag_queries
    lag = max(lags, key=lambda x: (lags[x], -abs(x))) if lags else None

    def mean(name: str) -> float:
        parts = [s.sums[name] for _, s in full]
        if name == "on_lag":
            parts = [s.sums[name] if s.lag == lag else (0.0, s.sums[name][1]) for _, s in full]
        count = sum(n for _, n in parts)
        return sum(total for total, _ in parts) / count if count else np.nan

    copies = sum(s.sums["duplicate_token"][1] for _, s in full)
    unknown = not any(s.sums["same_token"][1] for _, s in full)
    figures = Figures(
        queries=len(margins),
        keys=keys,
        cells=entered,
        effective_cells=_mean(np.array([1 / (s**2).sum() for s in shares])),
        largest_cell=_mean(np.array([s.max() for s in shares])),
        reachable=np.nan,
        dead=np.nan,
        undecided=np.nan,
        unvisited=keys - entered,
        repeated=sum(s.repeated for _, s in full),
        programs=0,
        margin=_quantile(margins, 0.5),
        margin_low=_quantile(margins, 0.1),
        leakage=mean("leakage"),
        leakage_bound=float(np.minimum(up(mean("leakage_bound") * (1 + 1e-12)), 1.0)),  # NaN of no queries stays NaN
        inverse_temperature=_quantile(spreads, 0.5),
        entropy=mean("entropy"),
        effective_keys=mean("effective_keys"),
        table_distance=_ratio(mean("changed"), mean("answered")),
        table_distance_of_values=_ratio(mean("changed"), mean("value_spread")),
        mean_distance=_ratio(mean("averaged"), mean("answered")),
    )
    roles = Roles(
        sink_mass=mean("sink"),
        distance=mean("distance"),
        on_self=mean("on_self"),
        on_previous=mean("on_previous"),
        lag=np.nan if lag is None else float(lag),
        lag_share=np.nan if lag is None else lags[lag] / len(margins),
        on_lag=mean("on_lag"),
        copies=np.nan if unknown else float(copies),
        same_token=mean("same_token"),
        duplicate_token=mean("duplicate_token"),
        induction=mean("induction"),
    )
    cells = [replace(cell, sequence=k) for k, s in full for cell in s.cells]
    return Measured(figures, roles, cells, max((s.score_error for _, s in full), default=np.nan))


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


def _mean(numbers: Array) -> float:
    return float(numbers.mean()) if len(numbers) else np.nan


def _joined(parts: list[NDArray[np.floating]]) -> NDArray[np.floating]:
    """Arrays in rising order as one."""
    return parts[0] if len(parts) == 1 else np.sort(np.concatenate(parts)) if parts else np.empty(0)


def _quantile(numbers: NDArray[np.floating], share: float) -> float:
    """Quantile of numbers in rising order that may be infinite: takes the next lower one instead of a mean with infinity."""
    return float(numbers[int(np.floor(share * (len(numbers) - 1)))]) if len(numbers) else np.nan


def _ratio(squared: float, against: float) -> float:
    """√ of a quotient of mean squares; 0/0 is no change at all."""
    if squared == 0 or np.isnan(squared):
        return float(squared)
    return float(np.sqrt(squared / against)) if against > 0 else np.inf
