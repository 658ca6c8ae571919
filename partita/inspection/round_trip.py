"""Recovers a head's diagram with its values and temperature, and measures how far training moved each of its cells."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from partita.errors import ShapeError, UnsupportedError
from partita.geometry.domains import Array
from partita.geometry.partitions import MaxAffine
from partita.inspection.captured_heads import HeadRecord, records_of, require_kept
from partita.inspection.reading import read_queries
from partita.inspection.snapshots import Snapshot

__all__ = ["CellMove", "Recovered", "Temperature", "moves", "recover", "temperature"]

_SAME = 1e-6  # of the offsets' size: what the fit may leave unexplained in float32 scores; float64 heads are at 1e-12


@dataclass(frozen=True, eq=False)
class Temperature:
    """The inverse temperature of a head whose cells are Voronoi cells, or the reason why it has none.

    Attributes:
        rates: R for every axis, `(dim,)`. None if it cannot be identified.
        centers: `(keys, dim)`, up to a common shift, so that the scores are `−Σ R_i(x_i − v_i)²/2` up to a common function. None
            if rates is None.
        reason: why there is no temperature; empty otherwise.
    """

    rates: Array | None
    centers: Array | None
    reason: str = ""

    @property
    def inverse_temperature(self) -> float | None:
        """R, if it is the same on all axes; otherwise None."""
        if self.rates is None or np.ptp(self.rates) > 0:
            return None
        return float(self.rates[0])


@dataclass(frozen=True, eq=False)
class Recovered:
    """A head read back: its cells, their values, and its temperature.

    Attributes:
        partition: the cells. Compare cells, not slopes: a common shift changes the slopes only.
        values: `(keys, value_dim)`.
        temperature: its inverse temperature, if it has one.
    """

    partition: MaxAffine
    values: Array
    temperature: Temperature


def recover(record: HeadRecord | Snapshot) -> Recovered:
    """Cells, values and temperature of a captured head, from its queries, keys and values.

    Slopes and offsets are the recorded keys in float64, so the cells are exactly those of the head that ran.
    *Theorem*: `max-affine-partition`, `equal-powers`.

    Args:
        record: a head, whose first sequence is used, or a snapshot.

    Returns:
        A `Recovered`.

    >>> import torch, partita as pa
    >>> attention = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval()
    >>> with pa.inspect.capture(attention) as heads, torch.no_grad():
    ...     _ = attention(*[torch.randn(1, 5, 8)] * 3)
    >>> pa.inspect.recover(next(iter(heads))).partition
    MaxAffine(5 cells in R^4)
    """
    snapshot = _first(record)
    partition = snapshot.max_affine()
    return Recovered(partition, snapshot.values.astype(np.float64), temperature(partition))


def temperature(partition: MaxAffine) -> Temperature:
    """The inverse temperature R of scores that are `−R|x − v_j|²/2` up to a common function, or one R per axis.

    `b_j = −|a_j|²/(2R) + a_j·c + e` is solved by least squares. There is no answer if all slopes lie on a sphere (every R
    fits) or if no R explains the offsets (the powers differ). *Theorem*: `equal-powers`.

    Args:
        partition: slopes a_j and offsets b_j.

    Returns:
        A `Temperature`.

    >>> import partita as pa
    >>> head = pa.MaxAffine([[0.0], [3.0], [6.0]], [0.0, -1.5, -6.0])  # −3(x − v)²/2, v = 0, 1, 2
    >>> round(pa.inspect.temperature(head).inverse_temperature, 6)
    3.0
    """
    slopes = partition.slopes - partition.slopes.mean(axis=0)
    size = float(np.abs(slopes).max())
    if size == 0:
        return Temperature(None, None, "all keys have the same slope, so the weights do not depend on the query.")
    unit, offsets = slopes / size, partition.offsets - partition.offsets.mean()
    for squares in ((unit**2).sum(axis=1, keepdims=True), unit**2):
        found, explained, unique = _solve(squares, unit, offsets)
        if not unique and squares.shape[1] == 1:
            return Temperature(None, None, "all slopes lie on a sphere, so every temperature gives the same weights.")
        if unique and explained and (found < 0).all():
            rates = np.broadcast_to(size**2 / (-2 * found), unit.shape[1]).copy()
            return Temperature(rates, slopes / rates)
    return Temperature(
        None, None, "no temperature explains the offsets with equal powers: the cells are not Voronoi cells."
    )


def _solve(squares: Array, slopes: Array, offsets: Array) -> tuple[Array, bool, bool]:
    """Coefficients of the squares, whether the fit leaves nothing, and whether they are unique."""
    rest = np.column_stack([slopes, np.ones(len(slopes))])
    basis, sizes, _ = np.linalg.svd(rest, full_matrices=False)
    basis = basis[:, sizes > 1e-10 * sizes[0]]
    squares_left = squares - basis @ (basis.T @ squares)
    offsets_left = offsets - basis @ (basis.T @ offsets)
    solution = np.linalg.lstsq(squares_left, offsets_left, rcond=1e-8)
    found, rank = np.asarray(solution[0], dtype=np.float64), solution[2]
    largest = float(np.abs(squares).max())
    unique = bool(rank == squares.shape[1]) and float(np.abs(squares_left).max(axis=0).min()) > 1e-8 * largest
    left = float(np.abs(offsets_left - squares_left @ found).max())
    return found, left <= _SAME * max(float(np.abs(offsets).max()), np.finfo(float).tiny), unique


@dataclass(frozen=True)
class CellMove:
    """How far one cell moved between two versions of a head, on the same inputs.

    Attributes:
        key: number of the key.
        before: inputs in the cell before.
        after: inputs in the cell after.
        overlap: inputs in both over inputs in either; 1 for the same cell, NaN if both are empty.
        drift: distance between the means of its queries before and after; NaN if either is empty.
        value_change: `|V_after − V_before|`.
        slope_change: `|a_after − a_before|`, without the change that all slopes share.
        offset_change: `|b_after − b_before|`, without the change that all offsets share.
    """

    key: int
    before: int
    after: int
    overlap: float
    drift: float
    value_change: float
    slope_change: float
    offset_change: float

    def row(self) -> dict[str, Any]:
        """The figures as a dict, for pandas."""
        return asdict(self)


def moves(before: HeadRecord | Snapshot, after: HeadRecord | Snapshot) -> list[CellMove]:
    """How every cell moved from one capture to another on the same inputs: one `CellMove` per key.

    Args:
        before: the earlier version of the head; the first sequence is used.
        after: the later version of the same head on the same inputs.

    Raises:
        ShapeError: the two do not have the same keys and queries.
        UnsupportedError: the bias depends on the query's position.

    >>> import torch, partita as pa
    >>> attention = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval()
    >>> with pa.inspect.capture(attention) as heads, torch.no_grad():
    ...     _ = attention(*[torch.randn(1, 5, 8)] * 3)
    >>> record = next(iter(heads))
    >>> {move.slope_change for move in pa.inspect.moves(record, record)}
    {0.0}
    """
    old, new = _first(before), _first(after)
    if old.keys.shape != new.keys.shape or len(old.counted) != len(new.counted) or old.values.shape != new.values.shape:
        raise ShapeError(
            f"before: {len(old.counted)} queries, keys {old.keys.shape}; after: {len(new.counted)} queries, keys {new.keys.shape}; "
            "expected two versions of one head on the same inputs."
        )
    if old.offsets is None or new.offsets is None:
        raise UnsupportedError(
            "the bias depends on the query's position, so every position has its own cells; moves needs common cells."
        )
    first, second = read_queries(old).cells, read_queries(new).cells
    slopes = new.scale * new.keys.astype(np.float64) - old.scale * old.keys
    offsets = new.offsets - old.offsets
    slopes, offsets = slopes - slopes.mean(axis=0), offsets - offsets.mean()
    values = new.values.astype(np.float64) - old.values
    queries = [s.queries[s.counted].astype(np.float64) for s in (old, new)]
    out = []
    for key in range(len(old.keys)):
        was, now = first == key, second == key
        out.append(
            CellMove(
                key,
                int(was.sum()),
                int(now.sum()),
                float((was & now).sum() / (was | now).sum()) if (was | now).any() else float("nan"),
                _distance(queries[0], was, queries[1], now),
                float(np.linalg.norm(values[key])),
                float(np.linalg.norm(slopes[key])),
                float(abs(offsets[key])),
            )
        )
    return out


def _distance(first: Array, was: NDArray[np.bool_], second: Array, now: NDArray[np.bool_]) -> float:
    if not (was.any() and now.any()):
        return float("nan")
    return float(np.linalg.norm(second[now].mean(axis=0) - first[was].mean(axis=0)))


def _first(given: Snapshot | HeadRecord) -> Snapshot:
    """A snapshot, or the first one of a record."""
    if isinstance(given, Snapshot):
        return given
    record = records_of([given])[0]
    require_kept([record])
    return record.snapshots[0]
