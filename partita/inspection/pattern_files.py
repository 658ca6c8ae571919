"""Attention matrices with their tokens as plain JSON, for viewers outside partita."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from partita.arithmetic.arguments import require_number
from partita.errors import ShapeError, SizeError, UnsupportedError
from partita.inspection.captured_heads import CapturedHeads, HeadRecord, records_of, require_kept
from partita.inspection.json_schemas import described_object, finish
from partita.inspection.snapshots import Snapshot
from partita.inspection.token_ids import labels_of
from partita.storage.files import write_json

__all__ = ["export_patterns", "pattern_schema"]

FORMAT, VERSION = "partita-patterns", 1


@dataclass(frozen=True)
class _Matrix:
    """One head on one sequence.

    Attributes:
        sequence: number of the sequence, counted from 0.
        query_positions: positions of the queries in the sequence, one per row.
        weights: rows of the attention matrix, one number per key; all zeros if the query sees no key.
    """

    sequence: int
    query_positions: tuple[int, ...]
    weights: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class _Head:
    """One head.

    Attributes:
        layer: number of its layer in `layers`.
        head: its number within the layer.
        patterns: its attention matrices, one per sequence.
    """

    layer: int
    head: int
    patterns: tuple[_Matrix, ...]


@dataclass(frozen=True)
class _File:
    """What a file holds.

    Attributes:
        digits: digits after the decimal point to which weights are rounded.
        layers: module paths, in the order in which the layers first ran.
        tokens: tokens of each sequence, one per key; null if they are not known.
        heads: one object per head.
    """

    digits: int
    layers: tuple[str, ...]
    tokens: tuple[tuple[str, ...], ...] | None
    heads: tuple[_Head, ...]


def pattern_schema() -> dict[str, Any]:
    """The JSON Schema (2020-12) of the files that `export_patterns` writes.

    >>> import partita as pa
    >>> pa.inspect.pattern_schema()["title"]
    'partita-patterns'
    """
    definitions: dict[str, Any] = {}
    found = described_object(_File, definitions)
    return finish(FORMAT, VERSION, "Attention matrices of heads.", found["properties"], definitions)


def export_patterns(
    heads: CapturedHeads | HeadRecord | Iterable[HeadRecord],
    path: str | os.PathLike[str],
    *,
    tokens: Any = None,
    tokenizer: Any = None,
    digits: int = 4,
    max_bytes: int = 64 << 20,
) -> Path:
    """Write the attention matrices of heads as JSON, and the file's JSON Schema beside it (`NAME.schema.json`).

    The weights are `softmax(scale·q kᵀ + bias)`, computed in float64 and rounded to `digits` digits after the decimal point, so
    rows sum to 1 up to `keys·10^−digits/2`.

    Args:
        heads: from `capture`, or one or several of its records. Choose few: each matrix has queries × keys numbers.
        path: the file, which must end in .json. Parents are created.
        tokens: labels or ids, one per key: one list per sequence, or a single list if there is only one sequence.
        tokenizer: turns ids into labels: an object with `convert_ids_to_tokens` or `decode`, or a function of one id.
        digits: digits after the decimal point, 1 to 17.
        max_bytes: largest size of the file, estimated before anything is computed.

    Returns:
        The path of the file.

    Raises:
        ShapeError: the number of token lists differs from the number of sequences, or a list's length from the number of keys.
        SizeError: the file would be larger than max_bytes.
        UnsupportedError: nothing was recorded, or an argument is invalid.

    >>> import json, tempfile, torch, partita as pa
    >>> attention = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval()
    >>> with pa.inspect.capture(attention) as heads, torch.no_grad():
    ...     _ = attention(*[torch.randn(1, 3, 8)] * 3)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pa.inspect.export_patterns(heads, f"{folder}/heads.json", tokens=["a", "b", "c"])
    ...     json.loads(path.read_text())["tokens"]
    [['a', 'b', 'c']]
    """
    place = Path(path)
    if place.suffix.lower() != ".json":
        raise UnsupportedError(f"{path}: expected a file name that ends in .json.")
    if isinstance(digits, bool) or not isinstance(digits, int) or not 1 <= digits <= 17:
        raise UnsupportedError(f"digits is {digits!r}; expected a whole number from 1 to 17.")
    require_number("max_bytes", max_bytes)
    records = records_of(heads, empty=False)
    require_kept(records)
    entries = sum(len(s.queries) * len(s.keys) for r in records for s in r.snapshots)
    if entries * (digits + 4) > max_bytes:
        raise SizeError(
            f"{len(records)} heads have {entries:,} weights: about {entries * (digits + 4) / 2**20:,.3g} MiB of JSON; max_bytes "
            f"allows {max_bytes / 2**20:,.3g} MiB",
            "Choose layers=, heads=, tokens= or batch= of capture, fewer digits, or raise max_bytes.",
        )
    labels = _labels(records, tokens, tokenizer)
    layers = tuple(dict.fromkeys(r.layer for r in records))
    made = tuple(
        _Head(layers.index(r.layer), r.head, tuple(_matrix(k, s, digits) for k, s in enumerate(r.snapshots)))
        for r in records
    )
    data = {"format": FORMAT, "version": VERSION, **asdict(_File(digits, layers, labels, made))}
    write_json(place.with_suffix(".schema.json"), pattern_schema())
    return write_json(place, data, indent=None)


def _labels(records: list[HeadRecord], tokens: Any, tokenizer: Any) -> tuple[tuple[str, ...], ...] | None:
    """The tokens of each sequence. Raises a ShapeError where there are more or fewer of them than keys."""
    if tokens is None:
        return None
    labels = tuple(tuple(sequence) for sequence in labels_of(tokens, tokenizer))
    for record in records:
        counts = [len(s.keys) for s in record.snapshots]
        if [len(sequence) for sequence in labels] != counts:
            raise ShapeError(
                f"the sequences have {_listed(map(len, labels))} tokens; {record.name} has {_listed(counts)} keys",
                "Give one list of tokens per recorded sequence. Export layers with different key tokens separately.",
            )
    return labels


def _listed(counts: Iterable[int]) -> str:
    return ", ".join(map(str, counts)) or "no"


def _matrix(sequence: int, snapshot: Snapshot, digits: int) -> _Matrix:
    weights = snapshot.weights()
    assert snapshot.positions is not None
    rows = tuple(tuple(row) for row in np.round(weights, digits).tolist())
    return _Matrix(sequence, tuple(int(p) for p in snapshot.positions), rows)
