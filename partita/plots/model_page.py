"""The page of an inspected model: all heads by any two figures, and for each its plane, pattern and clearest queries.

It is one HTML file that loads nothing else. partita/plots/page holds its markup, style and script; this file inserts the data.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from threadpoolctl import threadpool_limits

from partita.arithmetic.notebook_cards import counted
from partita.errors import ShapeError
from partita.inspection.audited_heads import Audit
from partita.inspection.audited_heads import audit as audit_heads
from partita.inspection.captured_heads import CapturedHeads, HeadRecord
from partita.inspection.figures import Figures, Roles
from partita.inspection.planes import PlaneView, view
from partita.inspection.report import HeadReport, ModelReport, read
from partita.inspection.rules import SkipBlocks, TopK
from partita.inspection.snapshots import Snapshot
from partita.inspection.token_ids import labels_of
from partita.plots.colours import DARK, LIGHT, Theme, palette
from partita.plots.head_details import first_sequence, head_details
from partita.plots.plane_plots import plot_heads
from partita.plots.style import save, styled
from partita.storage.files import write_whole

__all__ = ["FIGURE_WORDS", "InspectionPage", "write_inspection"]

_PAGE = Path(__file__).parent / "page"
_PIXELS = 48  # pixels of a plane along each axis
_THRESHOLDS = (1e-4, 1e-3, 1e-2, 3e-2, 1e-1, 3e-1)
_KEYS = (256, 128, 64, 32, 16, 8, 4, 2, 1)
_QUERIES = 512 * 144  # queries drawn on the whole page; fewer per head if there are more heads

# What each figure is called on the page and what it means, in the order of the menus.
FIGURE_WORDS: dict[str, tuple[str, str]] = {
    "table_distance": (
        "table distance",
        "how much the output changes when softmax becomes argmax, over the size of the output.",
    ),
    "table_distance_of_values": (
        "table distance of values",
        "the same change over the spread of the values: 0 for a table, near 1 for a plain average.",
    ),
    "mean_distance": (
        "mean distance",
        "how much the output changes when softmax becomes the plain mean of the visible values, over the size of the output.",
    ),
    "margin": ("margin", "median of the largest minus the second largest score, in nats."),
    "margin_low": ("margin, 10th percentile", "tenth percentile of the margin, in nats."),
    "leakage": ("leakage", "mean weight outside the cell of the query."),
    "leakage_bound": ("leakage bound", "upper bound on the leakage (Proposition 3.2), averaged over the queries."),
    "inverse_temperature": ("inverse temperature", "median standard deviation of a query's scores, in nats."),
    "entropy": ("entropy", "mean entropy of the weights, in nats."),
    "effective_keys": ("effective keys", "mean of 1/Σ w²: the number of keys that share the weight."),
    "sink_mass": ("weight on the first key", "mean weight on the first key that is not padding."),
    "distance": ("attention distance", "mean distance in tokens between a query and what it attends to."),
    "on_self": ("weight on its own position", "mean weight of a query on the key at its own position."),
    "on_previous": ("weight on the previous token", "mean weight of a query on the key just before it."),
    "lag": ("most frequent lag", "the most frequent distance in tokens from a query to the key of its cell."),
    "lag_share": ("queries at that lag", "share of the queries whose cell's key is at the most frequent lag."),
    "on_lag": ("weight at that lag", "mean weight at the most frequent lag."),
    "same_token": ("weight on same token", "mean weight on keys with the query's token."),
    "duplicate_token": ("weight on duplicates", "mean weight on other keys with the query's token."),
    "induction": ("induction", "mean weight on keys just after another occurrence of the query's token."),
    "copies": ("queries with copies", "queries that see another copy of their own token."),
    "cells": ("cells", "keys whose cell contains a query."),
    "effective_cells": ("effective cells", "1/Σ share²: the number of cells that share the queries."),
    "largest_cell": ("largest cell", "largest share of a sequence's queries in one cell."),
    "reachable": ("reachable keys", "keys that some query can reach."),
    "dead": ("dead keys", "keys that no query can reach."),
    "undecided": ("undecided keys", "keys neither reached nor proved dead."),
    "unvisited": ("unvisited keys", "keys that none of these queries reached."),
    "repeated": ("repeated keys", "keys that are exact copies of an earlier one."),
    "queries": ("queries", "queries that see a key and are not padding."),
    "keys": ("keys", "keys that some query sees."),
    "programs": ("linear programs", "linear programs solved to find dead keys."),
}
_POSITIONS = (
    "Some heads add a bias that depends on the query's position: each position has a diagram of its own, and the plane shows "
    "that of the last query."
)


@dataclass(frozen=True, eq=False)
class InspectionPage:
    """What was written, and the report behind it."""

    report: ModelReport
    files: tuple[Path, ...]


def write_inspection(
    heads: CapturedHeads | Sequence[HeadRecord],
    folder: str | Path,
    *,
    title: str = "Heads as partitions",
    figures: bool = True,
    tokens: Any = None,
    tokenizer: Any = None,
    audit: Audit | Literal[False] | None = None,
    progress: Callable[[str, int, int], None] | None = None,
    **options: Any,
) -> InspectionPage:
    """Write `report.json` with its schema, `heads.csv`, `heads.svg`, `heads.png` and a self-contained `index.html` to a folder.

    Args:
        heads: from `capture`, or some of its records.
        folder: where the files go. It is created; files of the same names are replaced.
        title: title of the page.
        figures: draw heads.svg and heads.png; needs the extra 'plot'.
        tokens: the tokens of each recorded sequence, as strings or as ids, padding included. By default the ids that reached the
            model's embedding, which are shown only with a tokenizer.
        tokenizer: converts ids to strings; see `pa.inspect.pattern`.
        audit: what `pa.inspect.audit` returned, for the curves of the heads. By default `TopK` and `SkipBlocks` with several
            numbers of keys and thresholds, on the sequence that is drawn. False: no curves.
        progress: called as `progress(name, done, of)`.
        options: options of `pa.inspect.read`.

    Returns:
        The report, and the files, with the page first.

    Raises:
        ShapeError: the length of tokens does not match a recorded sequence.
        UnsupportedError: nothing was recorded, or tokens is given for heads that were read while the model ran.

    >>> import tempfile, torch, partita as pa
    >>> attention = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval()
    >>> with pa.inspect.capture(attention) as heads, torch.no_grad():
    ...     _ = attention(*[torch.randn(1, 12, 8)] * 3)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     page = write_inspection(heads, folder, figures=False)
    ...     [file.name for file in page.files]
    ['index.html', 'report.json', 'report.schema.json', 'heads.csv']
    """
    given = _recorded_tokens(heads) if tokens is None and tokenizer is not None else tokens
    labels = [] if given is None else labels_of(given, tokenizer)
    names_keys = tokens is not None and not _names_others(labels, heads)
    report = read(heads, tokens=tokens if names_keys else None, progress=progress, **options)
    place = report.save(folder)
    files = [place / name for name in ("report.json", "report.schema.json", "heads.csv")]
    kept = [record for record in heads if record.snapshots]
    views = _views(kept)
    if figures and views:
        notes = {(h.layer, h.head): f"{h.figures.table_distance:.2g}" for h in report.heads}
        figure = plot_heads(views, notes=notes)
        with styled():
            files += [save(figure, place / f"heads.{kind}") for kind in ("svg", "png")]
    curves = {} if audit is False or not kept else _curves(_small_audit(kept) if audit is None else audit)
    text = _html(title, _counts(report), _data(heads, report, views, labels, curves))
    page = write_whole(place / "index.html", text)
    return InspectionPage(report, (page, *files))


def _recorded_tokens(heads: CapturedHeads | Sequence[HeadRecord]) -> list[Any] | None:
    """The ids that reached the model's embedding, one array per recorded sequence, if all are known."""
    for record in heads:
        known = [s.tokens for s in record.snapshots]
        if known and all(t is not None for t in known):
            return known
    return None


def _names_others(labels: Sequence[Sequence[str]], heads: CapturedHeads | Sequence[HeadRecord]) -> bool:
    """Whether in all heads queries and keys are different tokens, so that labels can name only one of the two. Raises a
    ShapeError if they match neither."""
    snapshots = [(k, s) for record in heads for k, s in enumerate(record.snapshots)]
    if not snapshots or any(s.same_tokens for _, s in snapshots):
        return False
    counts = [(len(labels[k]) if k < len(labels) else 0, len(s.keys), _length(s)) for k, s in snapshots]
    if not any(found in (keys, queries) for found, keys, queries in counts):
        found, keys, queries = counts[0]
        raise ShapeError(
            f"sequence 0 has {counted(found, 'token')}; expected {keys}, one per key, or {queries}, one per query",
            "Give one list of ids or labels per sequence, padding included.",
        )
    return True


def _length(snapshot: Snapshot) -> int:
    """Number of queries of the sequence, including those that were not recorded; the last one is always recorded."""
    assert snapshot.positions is not None
    return int(snapshot.positions.max(initial=-1)) + 1


def _views(heads: CapturedHeads | Sequence[HeadRecord]) -> dict[tuple[str, int], PlaneView]:
    """The first sequence with queries of every head, coarse enough for a page of many."""
    out = {}
    with threadpool_limits(limits=1, user_api="blas"):
        for record in heads:
            snapshot = replace(record.snapshots[first_sequence(record)])  # a copy: its mask is freed after drawing
            out[record.layer, record.head] = view(snapshot, pixels=_PIXELS)
    return out


def _data(
    heads: CapturedHeads | Sequence[HeadRecord],
    report: ModelReport,
    views: dict[tuple[str, int], PlaneView],
    labels: Sequence[Sequence[str]],
    curves: dict[tuple[str, int], dict[str, Any]],
) -> dict[str, Any]:
    """What the script of the page reads; partita/plots/page/model_page.js describes it."""
    known = {item.name for kind in (Figures, Roles) for item in fields(kind)}
    names = [n for n in FIGURE_WORDS if n in known] + sorted(known - set(FIGURE_WORDS))
    layers = report.layers()
    number = {row["layer"]: k for k, row in enumerate(layers)}
    drawn = {first_sequence(record) for record in heads if record.snapshots}
    each = max(64, min(512, _QUERIES // max(len(report.heads), 1)))
    rows = []
    with threadpool_limits(limits=1, user_api="blas"):
        for head, record in zip(report.heads, heads):
            detail = None
            if record.snapshots:
                packed = head_details(record, views[head.layer, head.head], head.cells, labels, queries=each)
                detail = base64.b64encode(packed).decode()
            row = head.row()
            rows.append(
                {
                    "layer": number[head.layer],
                    "head": head.head,
                    "kind": head.kind,
                    "sentence": head.sentence,
                    "about": _about(head),
                    "sequences": head.sequences,
                    "figures": [_number(row[n]) for n in names],
                    "null": _null(row, names) if head.null.queries else [None] * len(names),
                    "detail": detail,
                    "audit": curves.get((head.layer, head.head)),
                }
            )
    return {
        "figures": [dict(zip(("name", "label", "words"), (n, *_words(n)))) for n in names],
        "layers": [
            {
                "name": row["layer"],
                "figures": [_number(row.get(n, math.nan)) for n in names],
                "null": _null(row, names) if row["null_queries"] else [None] * len(names),
            }
            for row in layers
        ],
        "heads": rows,
        "tokens": {str(k): list(labels[k]) for k in sorted(drawn) if k < len(labels)},
        "note": _POSITIONS if any(h.per_position for h in report.heads) else "",
        "palette": palette(),
    }


def _null(row: dict[str, Any], names: Sequence[str]) -> list[float | str | None]:
    """The figures of the random head."""
    return [_number(row.get(f"null_{n}", math.nan)) for n in names]


def _small_audit(heads: CapturedHeads | Sequence[HeadRecord]) -> Audit:
    """An audit of `TopK` and `SkipBlocks` at several thresholds, on the sequences that are drawn. Tiles cut the longest sequence
    into about eight blocks, of at most 64 tokens."""
    drawn = [replace(record, snapshots=(record.snapshots[first_sequence(record)],)) for record in heads]
    longest = max(len(record.snapshots[0].keys) for record in drawn)
    side = 1 << max(0, min(6, int(math.log2(longest)) - 3))
    with threadpool_limits(limits=1):  # many small torch operations: threads would mostly wait for each other
        few = [TopK(k, (side, side)) for k in _KEYS if k < longest] or [TopK(1, (side, side))]
        return audit_heads(drawn, rule=[*few, *(SkipBlocks(t, (side, side)) for t in _THRESHOLDS)])


def _curves(audit: Audit) -> dict[tuple[str, int], dict[str, Any]]:
    """For each head its points: share skipped, the oracle's share, and bound and error over the mean norm of the output. Each kind
    of rule has its own curve; if `SkipBlocks` skipped no tile, a sentence says so."""
    out: dict[tuple[str, int], dict[str, Any]] = {}
    blocks: dict[tuple[str, int], list[tuple[float, bool]]] = {}
    for head in audit.heads:
        found = out.setdefault((head.layer, head.head), {"rules": [], "kinds": [], "points": [], "skippedNothing": ""})
        row = head.row()
        size = row["output_norm"] or 1.0
        numbers = (row["skipped"], row["oracle"], row["error_bound"] / size, row["error"] / size, row["mass_lost"])
        found["rules"].append(row["rule"])
        found["kinds"].append(type(head.rule).__name__)
        found["points"].append([_number(x) for x in numbers])
        if isinstance(head.rule, SkipBlocks):
            blocks.setdefault((head.layer, head.head), []).append((head.rule.threshold, bool(head.skipped.any())))
    for which, tried in blocks.items():
        if not any(skips for _, skips in tried):
            most = max(threshold for threshold, _ in tried)
            out[which]["skippedNothing"] = f"SkipBlocks skipped no tile at any threshold up to {most:g}."
    return out


def _words(name: str) -> tuple[str, str]:
    return FIGURE_WORDS.get(name, (name.replace("_", " "), ""))


def _number(value: float) -> float | str | None:
    """Six digits; None for NaN, and infinity as a string that the script converts to a number."""
    if math.isnan(value):
        return None
    return float(f"{value:.6g}") if math.isfinite(value) else "Infinity" if value > 0 else "-Infinity"


def _about(head: HeadReport) -> str:
    own = "; its bias depends on the position, so the plane uses that of the last query" if head.per_position else ""
    return (
        f"{head.figures.queries:,} {'query' if head.figures.queries == 1 else 'queries'} in R^{head.dimension} against "
        f"{counted(head.figures.keys, 'key')} with values in R^{head.value_dimension}; "
        f"{counted(head.sequences, 'sequence')}, {head.dtype}{own}."
    )


def _counts(report: ModelReport) -> str:
    whole = report.model()
    unvisited = f"these queries did not reach {whole['unvisited']:,.0f}"
    if math.isnan(whole["dead"]):
        why = "biases depend on positions" if any(h.per_position for h in report.heads) else "the keys were not kept"
        reached = f"{unvisited} of the keys; those that no query can reach were not computed ({why})"
    else:
        more = f" ({whole['undecided']:,.0f} undecided)" if whole["undecided"] else ""
        reached = f"no query can reach {whole['dead']:,.0f} of the keys{more}, and {unvisited}"
    return (
        f"{counted(len(report.heads), 'head')} in {counted(len(report.layers()), 'layer')}, "
        f"{counted(max(h.figures.keys for h in report.heads), 'key')} in "
        f"{counted(max(h.sequences for h in report.heads), 'sequence')}. Across all heads, {reached}."
    )


def _html(title: str, counts: str, data: dict[str, Any]) -> str:
    """The HTML with style, script and data in it, and a policy that allows this style and script and nothing else."""
    markup, style, script = (
        (_PAGE / f"model_page.{kind}").read_text(encoding="utf-8") for kind in ("html", "css", "js")
    )
    style = f"{_variables()}\n{style}"
    policy = (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    parts = {
        "title": html.escape(title),
        "counts": html.escape(counts),
        "policy": policy,
        "style": style,
        "script": script,
        "data": text.replace("<", "\\u003c"),  # so that no text in it can end the element
    }
    return re.sub(r"@@(\w+)@@", lambda found: parts[found[1]], markup)


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _variables() -> str:
    """The colours as variables, light, dark, and light again on paper."""
    light, dark = _block(LIGHT), _block(DARK)
    return (
        f":root {{ color-scheme: light; {light} }}\n"
        f"@media (prefers-color-scheme: dark) {{ :root {{ color-scheme: dark; {dark} }} }}\n"
        f"@media print {{ :root {{ color-scheme: light; {light} }} }}"
    )


def _block(theme: Theme) -> str:
    plain = {name: colour for name, colour in asdict(theme).items() if isinstance(colour, str)}
    series = {f"series-{k}": colour for k, colour in enumerate(theme.series)}
    return " ".join(f"--{name}: {colour};" for name, colour in {**plain, **series}.items())
