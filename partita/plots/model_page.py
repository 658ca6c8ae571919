"""The page of an inspected model: a small multiple per head, its figures beside those of a random head, and the tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from threadpoolctl import threadpool_limits

from partita.inspection.captured_heads import CapturedHeads
from partita.inspection.planes import PlaneView, view
from partita.inspection.report import ModelReport, read, short
from partita.plots.html_blocks import Block, Grid, Heading, Picture, Text, as_html
from partita.plots.plane_plots import plot_heads
from partita.plots.style import save, styled

__all__ = ["InspectionPage", "write_inspection"]

_SHOWN = (
    "cells",
    "effective_cells",
    "dead",
    "undecided",
    "unvisited",
    "margin",
    "leakage",
    "leakage_bound",
    "inverse_temperature",
    "entropy",
    "effective_keys",
    "table_distance",
    "table_distance_of_values",
)
_WORDS = (
    "Each panel is one head on the first sequence: the principal plane of its queries, cut into the cells of the max-affine "
    "function that its keys make. Dark means a clear winner (a large margin), white a tie. Dots are queries, projected onto "
    "the plane; their colour is the cell that each is in, in the whole space. The number beside a head is its table distance: "
    "how much its output changes, relative to its size, when softmax becomes argmax."
)
_NULL = (
    "In brackets the same figure for a random head of the same shape: independent normal queries, keys and values of the "
    "same size. Margins, entropies and inverse temperatures are in nats, the temperature being part of the scores."
)


_COLUMNS = (
    "Cells: keys that some query fell into (effective: how many equally full ones that amounts to). Dead: keys that no query "
    "can reach; undecided: neither reached nor proved dead; unvisited: reached by none of these queries. Margin: median of "
    "largest minus second largest score. Leakage: mean mass outside the cell, and what Proposition 3.2 allows. Inverse "
    "temperature: median standard deviation of a query's scores. Entropy and effective keys are of the weights. Table "
    "distance: change of the output when softmax becomes argmax, over the size of the output, and over the spread of the "
    "values."
)
_POSITIONS = (
    "Some heads add a bias that depends on the query's position: each position has a diagram of its own, and the panel shows "
    "that of the last query."
)


@dataclass(frozen=True, eq=False)
class InspectionPage:
    """What was written, and the report behind it."""

    report: ModelReport
    files: tuple[Path, ...]


def write_inspection(
    heads: CapturedHeads,
    folder: str | Path,
    *,
    title: str = "Heads as partitions",
    figures: bool = True,
    progress: Callable[[str, int, int], None] | None = None,
    **options: Any,
) -> InspectionPage:
    """`report.json`, `heads.csv`, `heads.svg`, `heads.png` and a self-contained `index.html` in a folder.

    Args:
        figures: draw; needs the extra 'plot'. options: of `pa.inspect.read`.
    """
    report = read(heads, progress=progress, **options)
    place = report.save(folder)
    files = [place / "report.json", place / "heads.csv"]
    blocks: list[Block] = [Heading(1, title), Text(_counts(report))]
    if figures:
        views = _views(heads)
        notes = {(h.layer, h.head): f"{h.figures.table_distance:.2g}" for h in report.heads}
        figure = plot_heads(views, notes=notes)
        with styled():
            files += [save(figure, place / f"heads.{kind}") for kind in ("svg", "png")]
        blocks += [Text(_WORDS), *([Text(_POSITIONS)] if any(h.per_position for h in report.heads) else [])]
        blocks += [Picture(place / "heads.svg", "one panel per head, one row per layer")]
    blocks += [
        Heading(2, "Layers"),
        Text(_COLUMNS),
        Text(_NULL),
        _grid(report.layers(), ("layer",)),
        Heading(2, "Heads"),
    ]
    blocks += [_grid(report.rows(), ("layer", "head"))]
    page = place / "index.html"
    page.write_text(as_html(blocks, title), encoding="utf-8")
    return InspectionPage(report, (page, *files))


def _views(heads: CapturedHeads) -> dict[tuple[str, int], PlaneView]:
    """The first sequence with queries of every head, coarse enough for a page of many."""
    out = {}
    with threadpool_limits(limits=1, user_api="blas"):
        for record in heads:
            fresh = (replace(s) for s in record.snapshots)  # their masks are not kept beyond the picture
            out[record.layer, record.head] = view(next(s for s in fresh if len(s.counted)), pixels=48)
    return out


def _counts(report: ModelReport) -> str:
    whole = report.model()
    dead = "not computed (biases depend on positions)" if math.isnan(whole["dead"]) else f"{whole['dead']:,.0f}"
    return (
        f"{len(report.heads)} heads in {len(report.layers())} layers read {whole['queries']:,.0f} queries against "
        f"{whole['keys']:,.0f} keys. "
        f"Keys that no query can reach: {dead}; that no query reached: {whole['unvisited']:,.0f}."
    )


def _grid(rows: Sequence[dict[str, Any]], names: tuple[str, ...]) -> Grid:
    """Figures with those of the null in brackets."""
    body = [
        [*(str(row[n]) for n in names), *(f"{short(row[c])} ({short(row[f'null_{c}'])})" for c in _SHOWN)]
        for row in rows
    ]
    return Grid([*names, *(c.replace("_", " ") for c in _SHOWN)], body)
