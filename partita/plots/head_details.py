"""What the page of a model shows when a head is chosen: its plane, pattern, clearest queries and fullest cells.

`head_details` packs this into bytes, small enough for a page of many heads. They are a zlib stream of

    4 bytes     length of the JSON that follows, little endian
    JSON        figures and lists, and under "arrays" name → [type, offset, length] of the arrays that follow
    arrays      little endian: "u1", "u2", "u4" (unsigned integers) and "f2" (half precision), offsets in bytes

Coordinates on the plane are 0 … 4095 across the window, shades 0 … 63. The weights of a pattern are stored as √w · 255, to
distinguish small ones; those of single keys have two digits. Positions and keys of shapes are stored as differences from the
previous one.
"""

from __future__ import annotations

import json
import math
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from partita.geometry.domains import Array
from partita.inspection.captured_heads import HeadRecord, evenly_spread
from partita.inspection.figures import Cell
from partita.inspection.planes import PlaneView
from partita.inspection.reading import Reading, read_queries
from partita.inspection.snapshots import Snapshot

__all__ = ["first_sequence", "head_details"]

_STEPS = 4095  # steps of a coordinate across the window
_BLOCKS = 64  # blocks of a pattern along each axis
_MORE_KEYS = 3  # keys listed for a query, after that of its cell
_LEAST_WEIGHT = 1e-4  # of a key that is listed: half precision is coarser below
_DECIDED, _TIED, _CELLS, _SEQUENCES = 10, 5, 10, 8  # rows of the lists
_CONTEXT = 3  # tokens shown on either side


def first_sequence(record: HeadRecord) -> int:
    """The number of the sequence that is drawn: the first with a query that counts."""
    return next(k for k, s in enumerate(record.snapshots) if len(replace(s).counted))


def head_details(
    record: HeadRecord,
    shown: PlaneView,
    cells: Sequence[Cell],
    labels: Sequence[Sequence[str]],
    *,
    queries: int = 512,
) -> bytes:
    """One head for the page, in the format above.

    Args:
        record: the head.
        shown: its first sequence on a plane.
        cells: the cells of its report.
        labels: the tokens of each sequence, where they are known.
        queries: the largest number of queries to keep, evenly spread.
    """
    drawn = first_sequence(record)
    snapshots = [replace(s) for s in record.snapshots]  # copies: their cached masks, as large as the scores, are freed
    readings = [read_queries(s) for s in snapshots]
    names = [_Names(s, labels[k] if k < len(labels) else ()) for k, s in enumerate(snapshots)]
    snapshot, reading = snapshots[drawn], readings[drawn]
    kept = evenly_spread(len(reading.cells), queries)
    assert snapshot.positions is not None
    arrays = {
        "position": np.diff(snapshot.positions[snapshot.counted[kept]], prepend=0).astype("<u4"),
        "cell": _whole(reading.cells[kept]),
        "margin": _half(reading.margins[kept]),
        "leakage": _half(reading.leakage[kept]),
        **_plane_arrays(shown, kept),
        **_pattern_arrays(snapshot, kept, reading.cells[kept]),
    }
    header = {
        "sequence": drawn,
        "queries": len(reading.cells),
        "keys": len(snapshot.keys),
        "named": shown.named,
        "held": round(shown.held, 4),
        "keyTokens": names[drawn].keys is not None,
        "queryTokens": names[drawn].queries is not None,
        "decided": _queries(snapshots, readings, names, _DECIDED, clearest=True),
        "tied": _queries(snapshots, readings, names, _TIED, clearest=False),
        "cells": [_cell(cell, names[cell.sequence]) for cell in sorted(cells, key=lambda c: -c.queries)[:_CELLS]],
        "tokens": _tokens(cells, names),
        "sequences": _sequences(readings, names) if len(snapshots) > 1 else [],
    }
    return _packed(header, arrays)


def _packed(header: dict[str, Any], arrays: dict[str, NDArray[Any]]) -> bytes:
    places, parts, offset = {}, [], 0
    for name, array in arrays.items():
        part = np.ascontiguousarray(array).tobytes()
        places[name] = [array.dtype.str[1:], offset, array.size]
        padding = -len(part) % 4  # every array starts at an aligned offset
        parts.append(part + bytes(padding))
        offset += len(part) + padding
    text = json.dumps({**header, "arrays": places}, ensure_ascii=False, allow_nan=False).encode()
    text += b" " * (-len(text) % 4)
    packer = zlib.compressobj(9)
    packed = packer.compress(len(text).to_bytes(4, "little") + text)
    for part in parts:  # each array begins a block of the stream, with a code of its own: a tenth smaller
        packed += packer.flush(zlib.Z_SYNC_FLUSH) + packer.compress(part)
    return packed + packer.flush()


def _plane_arrays(shown: PlaneView, kept: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
    side = shown.window.hi - shown.window.lo

    def placed(points: Array) -> NDArray[Any]:
        return (np.clip((points - shown.window.lo) / side, 0, 1) * _STEPS).round().astype("<u2")

    seen = [(key, shape) for key, shape in enumerate(shown.shapes) if len(shape)]
    corners = np.concatenate([shape for _, shape in seen]) if seen else np.empty((0, 2))
    finite = shown.margins[np.isfinite(shown.margins)]
    top = 1.6 * float(np.quantile(finite, 0.95)) if finite.size else 0.0  # same shading as plot_plane
    share = np.where(np.isfinite(shown.margins), shown.margins / top, 1.0) if top else np.zeros(shown.margins.shape)
    return {
        "x": placed(shown.points[kept])[:, 0],
        "y": placed(shown.points[kept])[:, 1],
        "shade": (63 * np.clip(share, 0, 1)).round().astype("u1"),
        "shapeKey": _whole(np.diff([0, *(key for key, _ in seen)]).astype(np.int64)),
        "shapeSize": np.array([len(shape) for _, shape in seen], dtype="<u2"),
        "corners": placed(corners).ravel(),  # neighbours share corners, which zlib finds
    }


def _pattern_arrays(snapshot: Snapshot, kept: NDArray[np.int64], cells: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
    """Blocks of the pattern: the weight on a block of keys, averaged over a block of queries. For each query, the keys with the
    largest weights after that of its cell, and the weights of all these."""
    rows, keys = snapshot.counted[kept], len(snapshot.keys)
    down, across = -(-len(rows) // _BLOCKS), -(-keys // _BLOCKS)
    starts, most = np.arange(0, keys, across), min(_MORE_KEYS, keys - 1)
    blocks, more, named = [], [], []
    for first in range(0, len(rows), down):
        part = slice(first, first + down)
        scores = snapshot.scores(rows[part])
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        blocks.append(np.add.reduceat(weights, starts, axis=1).mean(axis=0))
        each = np.arange(len(weights))
        own = weights[each, cells[part]]
        weights[each, cells[part]] = -1.0
        order = np.argsort(-weights, axis=1, kind="stable")[:, :most]
        more.append(order)
        named.append(np.column_stack([own, np.take_along_axis(weights, order, axis=1)]))
    shares = np.concatenate(named)
    shares[:, 1:][shares[:, 1:] < _LEAST_WEIGHT] = 0.0
    return {
        "pattern": _root(np.stack(blocks)),
        "moreKey": _whole(np.where(shares[:, 1:] > 0, np.concatenate(more), 0)),
        "weight": _two_digits(shares),
    }


class _Names:
    """The tokens of one sequence as queries and as keys, where their counts match."""

    def __init__(self, snapshot: Snapshot, labels: Sequence[str]) -> None:
        assert snapshot.positions is not None
        self.positions = snapshot.positions
        reach = int(self.positions.max(initial=-1))
        self.queries = labels if labels and reach < len(labels) else None
        self.keys = labels if labels and len(snapshot.keys) == len(labels) else None

    @staticmethod
    def around(labels: Sequence[str] | None, place: int) -> list[Any] | None:
        """The token at a position, with its neighbours before and after."""
        if labels is None:
            return None
        first = max(0, place - _CONTEXT)
        return [list(labels[first:place]), labels[place], list(labels[place + 1 : place + 1 + _CONTEXT])]


def _queries(
    snapshots: Sequence[Snapshot], readings: Sequence[Reading], names: Sequence[_Names], most: int, *, clearest: bool
) -> list[dict[str, Any]]:
    """The queries with the largest or smallest margins in all sequences, among those that see more than one key."""
    found = []
    for k, reading in enumerate(readings):
        margins = np.where(np.isfinite(reading.margins), -reading.margins if clearest else reading.margins, np.inf)
        found += [(float(margins[q]), k, int(q)) for q in np.argsort(margins, kind="stable")[:most]]
    out = []
    for margin, k, q in sorted(found)[:most]:
        if not math.isfinite(margin):
            continue
        place, key = int(names[k].positions[snapshots[k].counted[q]]), int(readings[k].cells[q])
        out.append(
            {
                "sequence": k,
                "query": place,
                "key": key,
                "margin": _number(readings[k].margins[q]),
                "leakage": _number(readings[k].leakage[q]),
                "queryText": names[k].around(names[k].queries, place),
                "keyText": names[k].around(names[k].keys, key),
            }
        )
    return out


def _cell(cell: Cell, names: _Names) -> dict[str, Any]:
    return {
        "sequence": cell.sequence,
        "key": cell.key,
        "queries": cell.queries,
        "margin": _number(cell.margin),
        "value": _number(cell.value_norm),
        "text": names.around(names.keys, cell.key),
    }


def _tokens(cells: Sequence[Cell], names: Sequence[_Names]) -> list[list[Any]]:
    """Tokens by number of queries in the cells of their keys, over all sequences."""
    count: Counter[str] = Counter()
    for cell in cells:
        labels = names[cell.sequence].keys
        if labels is not None:
            count[labels[cell.key]] += cell.queries
    return [[token, queries] for token, queries in count.most_common(_CELLS)]


def _sequences(readings: Sequence[Reading], names: Sequence[_Names]) -> list[dict[str, Any]]:
    """The sequences with the clearest winners: smallest mean leakage first."""
    rows = [
        {
            "sequence": k,
            "queries": len(r.cells),
            "leakage": _number(r.leakage.mean()),
            "margin": _number(np.quantile(r.margins, 0.5, method="lower")),
            "text": _opening(names[k]),
        }
        for k, r in enumerate(readings)
        if len(r.cells)
    ]
    return sorted(rows, key=lambda row: (row["leakage"], row["sequence"]))[:_SEQUENCES]


def _opening(names: _Names) -> list[str] | None:
    return None if names.queries is None else list(names.queries[: 4 * _CONTEXT])


def _whole(numbers: NDArray[np.int64]) -> NDArray[Any]:
    return numbers.astype("<u2" if numbers.max(initial=0) < 1 << 16 else "<u4")


def _half(numbers: Array) -> NDArray[Any]:
    return np.where(np.isfinite(numbers), np.minimum(numbers, 65504.0), np.inf).astype("<f2")


def _two_digits(numbers: Array) -> NDArray[Any]:
    """Half precision without its last three bits: rounded to 0.4 %. Keeps the order and compresses better."""
    bits = _half(numbers).view("<u2")
    return ((bits + 4) & 0xFFF8).astype("<u2").view("<f2")


def _root(weights: Array) -> NDArray[Any]:
    return (255 * np.sqrt(np.clip(weights, 0, 1))).round().astype("u1")


def _number(value: float) -> float | None:
    """Four digits, None for what JSON has no number for."""
    return float(f"{value:.4g}") if math.isfinite(value) else None
