"""What the heads of a model do, figure by figure, beside random heads of the same shapes: per head, per layer, for the
model."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits
from torch import nn

from partita.arithmetic.notebook_cards import card
from partita.errors import UnsupportedError
from partita.inspection.captured_heads import CapturedHeads, HeadRecord
from partita.inspection.figures import Cell, Figures, measure
from partita.inspection.reading import random_snapshot

__all__ = ["HeadReport", "ModelReport", "read", "short"]

FORMAT = "partita-inspection"
_ABOUT = ("layer", "head", "dimension", "value_dimension", "sequences", "dtype", "per_position")
_SHOWN = (
    "cells",
    "dead",
    "unvisited",
    "margin",
    "leakage",
    "inverse_temperature",
    "effective_keys",
    "table_distance",
)
_NULL = "in brackets: a random head of the same shape"
_COUNTS = ("queries", "keys", "cells", "reachable", "dead", "undecided", "unvisited", "repeated", "programs")


@dataclass(frozen=True, eq=False)
class HeadReport:
    """The figures of one head and, under the same names, of a random head of the same shape (the null).

    Attributes:
        layer: the module path of the layer.
        head: its number within the layer.
        dimension: dimension of the query space, without coordinates in which no query varies.
        value_dimension: dimension of the values.
        sequences: the number of sequences read.
        dtype: dtype of the model.
        per_position: whether the bias depends on the query's position, so that every position has its own diagram.
        figures: the head's figures.
        null: the figures of the random head.
        cells: the cells that queries fell into, with their values.
    """

    layer: str
    head: int
    dimension: int
    value_dimension: int
    sequences: int
    dtype: str
    per_position: bool
    figures: Figures
    null: Figures
    cells: tuple[Cell, ...]

    @property
    def name(self) -> str:
        """ "layer:head"."""
        return f"{self.layer}:{self.head}"

    def __repr__(self) -> str:
        return f"HeadReport({self.name}: {len(self.cells)} cells visited, {self.sequences} sequences, {self.dtype})"

    def row(self) -> dict[str, Any]:
        """One flat row: the figures, and those of the null as `null_…`."""
        null = {f"null_{name}": number for name, number in asdict(self.null).items() if name != "programs"}
        return {**self._about(), **asdict(self.figures), **null}

    def _about(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _ABOUT}

    def to_json(self, *, values: bool = False) -> dict[str, Any]:
        """The report as a dict of plain data.

        Args:
            values: include the value vector of every cell, not only its length.
        """
        cells = [asdict(cell) for cell in self.cells]
        if not values:
            cells = [{k: v for k, v in cell.items() if k != "value"} for cell in cells]
        out: dict[str, Any] = _plain(
            {**self._about(), "figures": asdict(self.figures), "null": asdict(self.null), "cells": cells}
        )
        return out


@dataclass(frozen=True, eq=False)
class ModelReport:
    """The reports of all heads that were read.

    Attributes:
        heads: one `HeadReport` per head.
    """

    heads: tuple[HeadReport, ...]

    def rows(self) -> list[dict[str, Any]]:
        """One row per head, for `pandas.DataFrame(report.rows())`."""
        return [head.row() for head in self.heads]

    def layers(self) -> list[dict[str, Any]]:
        """One row per layer: counts are summed over its heads, other figures averaged."""
        names = list(dict.fromkeys(head.layer for head in self.heads))
        return [{"layer": n, **_together([h for h in self.heads if h.layer == n])} for n in names]

    def model(self) -> dict[str, Any]:
        """One row for the model: counts are summed over all heads, other figures averaged."""
        return _together(self.heads)

    def to_json(self, *, values: bool = False) -> dict[str, Any]:
        """The report as a dict of numbers, lists and strings. Undefined figures are None.

        Args:
            values: include the value vector of every cell, not only its length.
        """
        return {
            "format": FORMAT,
            "version": 1,
            "model": _plain(self.model()),
            "layers": _plain(self.layers()),
            "heads": [head.to_json(values=values) for head in self.heads],
        }

    def save(self, folder: str | Path, *, values: bool = False) -> Path:
        """Write `report.json` and `heads.csv` to a folder.

        Args:
            folder: where to write. Created if missing.
            values: include the value vector of every cell, not only its length.
        """
        place = Path(folder)
        place.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.to_json(values=values), ensure_ascii=False, allow_nan=False, indent=1)
        (place / "report.json").write_text(text + "\n", encoding="utf-8")
        (place / "heads.csv").write_text(self.to_csv(), encoding="utf-8")
        return place

    def to_csv(self) -> str:
        """The table of heads as CSV text, for `pandas.read_csv`."""
        text = io.StringIO()
        rows = self.rows()
        writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(
            {k: "" if isinstance(v, float) and math.isnan(v) else v for k, v in row.items()} for row in rows
        )
        return text.getvalue()

    def __getitem__(self, which: tuple[str, int]) -> HeadReport:
        for head in self.heads:
            if (head.layer, head.head) == tuple(which):
                return head
        raise UnsupportedError(f"no head {which} in the report; it has {', '.join(h.name for h in self.heads[:6])}, ….")

    def _shown(self) -> Iterator[tuple[str, ...]]:
        """The rows that are shown: names, then figures with those of the random head in brackets."""
        yield "", *(c.replace("inverse_", "inv. ").replace("_", " ") for c in _SHOWN)
        for head in self.heads:
            pairs = ((getattr(head.figures, c), getattr(head.null, c)) for c in _SHOWN)
            yield head.name, *(f"{short(a)} ({short(b)})" for a, b in pairs)

    def __repr__(self) -> str:
        layers = len({head.layer for head in self.heads})
        return f"ModelReport({len(self.heads)} heads of {layers} layers; print it for the figures)"

    def _repr_html_(self) -> str:
        columns, *rows = self._shown()
        return card(f"{len(self.heads)} attention heads", columns=columns, rows=rows, note=_NULL)

    def __str__(self) -> str:
        width = max(len(head.name) for head in self.heads)
        lines = [f"{name:<{width}}" + "".join(f"{x:>18}" for x in figures) for name, *figures in self._shown()]
        return "\n".join([*lines, _NULL])


def read(
    heads: CapturedHeads | HeadRecord | Iterable[HeadRecord],
    *,
    budget: int = 1 << 18,
    reach: float = 10.0,
    seed: int = 0,
    progress: Callable[[str, int, int], None] | None = None,
) -> ModelReport:
    """Read captured heads as partitions: every figure, and beside it the figure of a random head of the same shape.

    Figures are computed in float64 from the recorded vectors. `Figures` explains each of them.

    Args:
        heads: from `capture`, or one or several of its records.
        budget: largest number of matrix entries of the linear programs that look for dead keys, per head; 0 solves none.
        reach: a key counts as reachable if a query up to this many times as large as the largest recorded one reaches it.
        seed: random seed of the random heads.
        progress: called as `progress(name, done, of)`.

    Returns:
        A `ModelReport`.

    Raises:
        UnsupportedError: nothing was recorded, heads is a model or another thing, or no query of a head sees a key.

    >>> import torch, partita as pa
    >>> attention = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval()
    >>> with pa.inspect.capture(attention) as heads, torch.no_grad():
    ...     _ = attention(*[torch.randn(1, 5, 8)] * 3)
    >>> [head.figures.keys for head in pa.inspect.read(heads).heads]
    [5, 5]
    """
    records = _records(heads)
    if not records:
        if isinstance(heads, CapturedHeads) and heads.advice:
            raise UnsupportedError("no attention was recorded", heads.advice)
        raise UnsupportedError(
            "no attention was recorded. Run the model inside `with capture(model)`; check that layers= and heads= match something; "
            "for attention written by hand use pa.inspect.record or readers=. Scripted models are not recorded."
        )
    done = []
    with threadpool_limits(limits=1, user_api="blas"):  # many small products: threads would mostly wait for each other
        for number, record in enumerate(records):
            if progress is not None:
                progress(record.name, number, len(records))
            done.append(_read_head(record, budget=budget, reach=reach, seed=seed + 1_000_003 * number))
    if progress is not None:
        progress("", len(records), len(records))
    return ModelReport(tuple(done))


def _records(heads: Any) -> list[HeadRecord]:
    """The records. Raises an UnsupportedError for models and other things that are not records."""
    records = [heads] if isinstance(heads, HeadRecord) else list(heads) if isinstance(heads, Iterable) else [heads]
    if isinstance(heads, nn.Module) or not all(isinstance(record, HeadRecord) for record in records):
        model = "a model, " if isinstance(heads, nn.Module) else ""
        raise UnsupportedError(
            f"heads is {model}of type {type(heads).__name__}; expected what `capture` recorded while the model ran on inputs",
            "Use: with pa.inspect.capture(model) as heads: model(inputs). Then pa.inspect.read(heads).",
        )
    return records


def _read_head(record: HeadRecord, *, budget: int, reach: float, seed: int) -> HeadReport:
    snapshots = [replace(s) for s in record.snapshots]  # what they work out, masks as large as scores, goes with them
    used = [s for s in snapshots if len(s.counted)]
    if not used:
        raise UnsupportedError(f"{record.name}: no query sees a key: the input had no tokens, or every key was masked.")
    figures, cells = measure(snapshots, reach=reach, budget=budget)
    null, _ = measure(
        [random_snapshot(s, seed + 7919 * k) for k, s in enumerate(snapshots)], reach=reach, budget=budget
    )
    return HeadReport(
        record.layer,
        record.head,
        max(int(s.free.sum()) for s in used),
        used[0].values.shape[1],
        len(snapshots),
        used[0].dtype,
        any(s.offsets is None for s in used),
        figures,
        null,
        tuple(cells),
    )


def _together(heads: Sequence[HeadReport]) -> dict[str, Any]:
    out: dict[str, Any] = {"heads": len(heads)}
    for prefix, kind in (("", "figures"), ("null_", "null")):
        for item in fields(Figures):
            numbers = np.array([getattr(getattr(h, kind), item.name) for h in heads], dtype=float)
            known = numbers[~np.isnan(numbers)]
            total = known.sum() if item.name in _COUNTS else known.mean() if len(known) else math.nan
            out[prefix + item.name] = float(total) if len(known) else math.nan
    return out


def short(number: float) -> str:
    """A figure for people: three digits, thousands in full, a dash for what is not defined."""
    if math.isnan(number):
        return "–"
    return f"{number:,.0f}" if 1000 <= abs(number) < math.inf else f"{number:.3g}"


def _plain(data: Any) -> Any:
    """For JSON: numbers that are not finite become None."""
    if isinstance(data, dict):
        return {k: _plain(v) for k, v in data.items()}
    if isinstance(data, (list, tuple)):
        return [_plain(v) for v in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data
