"""What the heads of a model do, figure by figure, beside random heads of the same shapes: per head, per layer, for the
model."""

from __future__ import annotations

import csv
import inspect
import io
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from partita.arithmetic.arguments import require_count, require_number
from partita.arithmetic.notebook_cards import card, counted, short
from partita.errors import UnsupportedError
from partita.inspection.captured_heads import CapturedHeads, HeadRecord, no_query, records_of
from partita.inspection.figures import Cell, Figures, Measured, Roles, measured, put_together
from partita.inspection.json_schemas import described_object, finish
from partita.inspection.reading import random_snapshot
from partita.inspection.sentences import sentence
from partita.inspection.token_ids import TokenIds
from partita.storage.files import write_json, write_whole

__all__ = ["HeadReport", "ModelReport", "finite_or_none", "read", "report_schema"]

FORMAT, VERSION = "partita-inspection", 1
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
_COUNTS = ("queries", "keys", "cells", "reachable", "dead", "undecided", "unvisited", "repeated", "programs", "copies")


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
        per_position: whether the bias depends on the query's position, so that each position has its own diagram.
        figures: the head's figures.
        null: the figures of the random head; NaN with 0 queries if none was read. None is read with `null=False`, or if a score_mod
            of flex attention depends on the scores and was not kept (`stream=True` evaluates it).
        cells: the cells that contain queries, with their values; only the 64 largest of each sequence with `stream=True`.
        roles: where the head looks.
        null_roles: where the random head looks.
        score_error: largest bound on the rounding error of a score. Margins are off by at most twice as much, plus 2^−22 of
            themselves in float32 (2^−15 on a GPU); weights by a factor of at most `e^{±2·score_error}`. Infinite if a score_mod
            of flex attention changes the scores.
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
    roles: Roles
    null_roles: Roles
    score_error: float

    @property
    def kind(self) -> str:
        """`lookup`, `average` or `either`: whether the output is nearer to the value of the cell or to the mean of the values."""
        return self.figures.kind

    @property
    def sentence(self) -> str:
        """What the head does, in one sentence, compared with a random head. Empty if nothing stands out."""
        return sentence(self.figures, self.null, self.roles, self.null_roles)

    @property
    def name(self) -> str:
        """ "layer:head"."""
        return f"{self.layer}:{self.head}"

    def __repr__(self) -> str:
        cells = counted(len(self.cells), "cell")
        return f"HeadReport({self.name}: {cells} visited, {counted(self.sequences, 'sequence')}, {self.dtype})"

    def row(self) -> dict[str, Any]:
        """One flat row: the figures, and those of the null as `null_…`."""
        other = {**asdict(self.null), **asdict(self.null_roles)}
        null = {f"null_{name}": number for name, number in other.items() if name != "programs"}
        own = {"kind": self.kind, "sentence": self.sentence, "score_error": self.score_error}
        return {**self._about(), **asdict(self.figures), **asdict(self.roles), **null, **own}

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
        out: dict[str, Any] = finite_or_none(
            {
                **self._about(),
                "kind": self.kind,
                "sentence": self.sentence,
                "score_error": self.score_error,
                "figures": asdict(self.figures),
                "null": asdict(self.null),
                "roles": asdict(self.roles),
                "null_roles": asdict(self.null_roles),
                "cells": cells,
            }
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
            "version": VERSION,
            "model": finite_or_none(self.model()),
            "layers": finite_or_none(self.layers()),
            "heads": [head.to_json(values=values) for head in self.heads],
        }

    def save(self, folder: str | Path, *, values: bool = False) -> Path:
        """Write `report.json`, its JSON Schema `report.schema.json`, and `heads.csv` to a folder.

        Args:
            folder: where to write. Created if missing.
            values: include the value vector of every cell, not only its length.
        """
        place = Path(folder)
        write_json(place / "report.json", self.to_json(values=values))
        write_json(place / "report.schema.json", report_schema())
        write_whole(place / "heads.csv", self.to_csv())
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
            if (head.layer, head.head) == (tuple(which) if isinstance(which, list) else which):
                return head
        some = ", ".join(repr((h.layer, h.head)) for h in self.heads[:6]) + (", …" if len(self.heads) > 6 else "")
        raise UnsupportedError(f"the index is {which!r}; expected report[layer, head], one of {some}.")

    def _shown(self) -> Iterator[tuple[str, ...]]:
        """The rows that are shown: names, then figures with those of the random head in brackets."""
        yield "", *(c.replace("inverse_", "inv. ").replace("_", " ") for c in _SHOWN)
        for head in self.heads:
            pairs = ((getattr(head.figures, c), getattr(head.null, c)) for c in _SHOWN)
            beside = bool(head.null.queries)
            yield head.name, *(f"{short(a)} ({short(b)})" if beside else short(a) for a, b in pairs)

    def _note(self) -> str:
        return _NULL if any(head.null.queries for head in self.heads) else ""

    def __repr__(self) -> str:
        layers = counted(len({head.layer for head in self.heads}), "layer")
        return f"ModelReport({counted(len(self.heads), 'head')} of {layers}; print it for the figures)"

    def _repr_html_(self) -> str:
        columns, *rows = self._shown()
        said = [(*row, head.sentence) for row, head in zip(rows, self.heads)]
        columns = (*columns, "what it does")
        return card(counted(len(self.heads), "attention head"), columns=columns, rows=said, note=self._note())

    def __str__(self) -> str:
        width = max(len(head.name) for head in self.heads)
        lines = [f"{name:<{width}}" + "".join(f"{x:>18}" for x in figures) for name, *figures in self._shown()]
        said = [f"{h.name:<{width}}  {h.sentence}" for h in self.heads if h.sentence]
        return "\n".join([*lines, *filter(None, [self._note()]), *(["", *said] if said else [])])


def read(
    heads: CapturedHeads | HeadRecord | Iterable[HeadRecord],
    *,
    tokens: Any = None,
    budget: int = 1 << 18,
    reach: float = 10.0,
    seed: int = 0,
    progress: Callable[[str, int, int], None] | None = None,
) -> ModelReport:
    """Read captured heads as partitions: every figure, beside the same figure of a random head of the same shape.

    Figures are computed in float64 from the recorded vectors. `Figures` explains each of them; `Roles` explains
    where a head looks. Heads that were read while the model ran (`capture(..., stream=True)`) already have their figures, computed
    in float32 (float64 for float64 models); `score_error` bounds the rounding of their scores.

    Args:
        heads: from `capture`, or one or several of its records.
        tokens: ids or labels of the tokens, one list per recorded sequence, so that copies of a token are known. By default
            the ids that reached the model's embedding are used. With `stream=True`, pass tokens to `capture` instead.
        budget: largest number of matrix entries of the linear programs that look for dead keys, per head; 0 solves none.
        reach: a key counts as reachable if a query up to this many times as large as the largest recorded one reaches it.
        seed: random seed of the random heads.
        progress: called as `progress(name, done, of)`.

    Returns:
        A `ModelReport`.

    Raises:
        UnsupportedError: nothing was recorded, heads has the wrong type (a model, for example), or no query of a head sees a key.
        DomainError: budget, reach or seed is not a valid number.

    >>> import torch, partita as pa
    >>> attention = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval()
    >>> with pa.inspect.capture(attention) as heads, torch.no_grad():
    ...     _ = attention(*[torch.randn(1, 5, 8)] * 3)
    >>> [head.figures.keys for head in pa.inspect.read(heads).heads]
    [5, 5]
    """
    records = records_of(heads)
    if not records:
        if isinstance(heads, CapturedHeads) and heads.ran:
            raise UnsupportedError(
                "no attention was recorded, because layers= or heads= of capture match no head of the model",
                heads.describe_ran(),
            )
        if isinstance(heads, CapturedHeads) and heads.advice:
            raise UnsupportedError("no attention was recorded", heads.advice)
        raise UnsupportedError(
            "no attention was recorded. Run the model inside `with capture(model)`; for attention written by hand use "
            "pa.inspect.record or readers=. Scripted models are not recorded in inference mode or under autocast. Flex attention "
            "requires torch ≥ 2.9."
        )
    require_count("budget", budget, least=0, most=2**62)
    require_number("reach", reach)
    require_count("seed", seed, least=-(2**63), most=2**63)
    given = None if tokens is None else TokenIds.of_any(tokens)
    if given is not None and any(not record.snapshots for record in records):
        raise UnsupportedError(
            "these heads were read while the model ran, so tokens= cannot be applied now",
            "Give the tokens to pa.inspect.capture(..., stream=True, tokens=tokens).",
        )
    done = []
    with threadpool_limits(limits=1, user_api="blas"):  # many small products: threads would mostly wait for each other
        for number, record in enumerate(records):
            if progress is not None:
                progress(record.name, number, len(records))
            own = seed + 1_000_003 * number
            if record.streamed:
                done.append(_streamed_head(record))
            else:
                done.append(_read_head(record, budget=budget, reach=reach, seed=own, tokens=given))
    if progress is not None:
        progress("", len(records), len(records))
    return ModelReport(tuple(done))


def _read_head(record: HeadRecord, *, budget: int, reach: float, seed: int, tokens: TokenIds | None) -> HeadReport:
    snapshots = [replace(s) for s in record.snapshots]  # copies: their cached masks, as large as the scores, are freed
    used = [s for s in snapshots if len(s.counted)]
    if not used:
        raise no_query(record.name)
    ids: list[NDArray[np.int64] | None] = [s.tokens for s in snapshots]
    if tokens is not None:
        same = [bool(s.same_tokens) for s in snapshots]
        counts = [len(s.keys) for s in snapshots]
        ids = [
            tokens.of(range(k, k + 1), n, record.layer)[0] if own else None
            for k, (n, own) in enumerate(zip(counts, same))
        ]
    found = measured(snapshots, reach=reach, budget=budget, tokens=ids)
    if any(s.follows_scores for s in snapshots):
        null = put_together([])  # the score_mod was not kept; what it added does not apply to other scores
    else:
        random = [random_snapshot(s, seed + 7919 * k) for k, s in enumerate(snapshots)]
        null = measured(random, reach=reach, budget=budget, tokens=ids)
    about = (max(int(s.free.sum()) for s in used), used[0].values.shape[1], len(snapshots), used[0].dtype)
    return _head_report(record, about, any(s.offsets is None for s in used), found, null)


def _streamed_head(record: HeadRecord) -> HeadReport:
    """The report of a head that was read while the model ran."""
    used = [s for s in record.streamed if len(s.summary.margins)]
    if not used:
        raise no_query(record.name)
    nothing = [replace(s.summary, margins=s.summary.margins[:0]) for s in used]
    null = put_together([s.null if s.null is not None else empty for s, empty in zip(used, nothing)])
    about = (max(s.dimension for s in used), used[0].value_dimension, len(record.streamed), used[0].dtype)
    found = put_together([s.summary for s in record.streamed])
    return _head_report(record, about, any(s.per_position for s in used), found, null)


def _head_report(
    record: HeadRecord, about: tuple[int, int, int, str], per_position: bool, found: Measured, null: Measured
) -> HeadReport:
    return HeadReport(
        record.layer,
        record.head,
        *about,
        per_position,
        found.figures,
        null.figures,
        tuple(found.cells),
        found.roles,
        null.roles,
        found.score_error,
    )


def _together(heads: Sequence[HeadReport]) -> dict[str, Any]:
    out: dict[str, Any] = {"heads": len(heads)}
    kinds = (("", "figures"), ("null_", "null"), ("", "roles"), ("null_", "null_roles"))
    for prefix, kind in kinds:
        for item in fields(Roles if kind.endswith("roles") else Figures):
            if item.name == "lag":  # a mean of lags has no meaning
                continue
            numbers = np.array([getattr(getattr(h, kind), item.name) for h in heads], dtype=float)
            known = numbers[~np.isnan(numbers)]
            total = known.sum() if item.name in _COUNTS else known.mean() if len(known) else math.nan
            out[prefix + item.name] = float(total) if len(known) else math.nan
    return out


def report_schema() -> dict[str, Any]:
    """The JSON Schema (2020-12) of `ModelReport.to_json()` and of `report.json`, made from the classes of the report.

    Numbers that are not defined, or not finite, are null.

    >>> import partita as pa
    >>> schema = pa.inspect.report_schema()
    >>> schema["$defs"]["Figures"]["properties"]["margin"]["description"]
    'median of largest minus second largest score.'
    """
    definitions: dict[str, Any] = {}
    written = (*_ABOUT, "score_error", "figures", "null", "roles", "null_roles", "cells")
    head = described_object(HeadReport, definitions, written=written, optional={Cell: ("value",)})
    for name in ("kind", "sentence"):
        head["properties"][name] = {"type": "string", "description": inspect.getdoc(getattr(HeadReport, name)) or ""}
        head["required"].append(name)
    figures = {**definitions["Figures"]["properties"], **definitions["Roles"]["properties"]}
    del figures["lag"]
    row: dict[str, Any] = {"heads": {"type": "integer", "description": "how many heads."}}
    for prefix, of in (("", ""), ("null_", "Of the random heads: ")):
        for name, item in figures.items():
            how = "sum over the heads." if name in _COUNTS else "mean over the heads where it is defined."
            row[prefix + name] = {
                "type": ["number", "null"],
                "description": f"{of}{item['description']} Here the {how}",
            }
    rows = {"type": "object", "properties": row, "required": list(row), "additionalProperties": False}
    layer = {"layer": {"type": "string", "description": "the module path of the layer."}, **row}
    return finish(
        FORMAT,
        VERSION,
        "What the heads of a model do, as partita reads them.",
        {
            "model": {**rows, "description": "one row for all heads."},
            "layers": {
                "type": "array",
                "description": "one row per layer.",
                "items": {**rows, "properties": layer, "required": list(layer)},
            },
            "heads": {"type": "array", "description": "one object per head.", "items": head},
        },
        definitions,
    )


def finite_or_none(data: Any) -> Any:
    """For JSON: numbers that are not finite become None, at every level."""
    if isinstance(data, dict):
        return {k: finite_or_none(v) for k, v in data.items()}
    if isinstance(data, (list, tuple)):
        return [finite_or_none(v) for v in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data
