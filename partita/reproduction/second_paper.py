"""Figures of the second paper's experiments."""

from __future__ import annotations

from typing import Any

import numpy as np

from partita.plots.style import COLOURS, INK, SOFT, clean, new_figure, series
from partita.reproduction.statistics import group_means
from partita.reproduction.table import Table, Tables

__all__ = [
    "draw_attention_maps",
    "draw_in_context",
    "draw_ramp_heads",
    "draw_ramp_rate",
    "draw_stability",
    "draw_two_layers",
]


def _sweep(panel: Any, rows: Table, column: str, number: int, label: str = "") -> None:
    """Relative error against a column: mean, deviation and every seed."""
    x, mean, spread = group_means(rows[column], rows["relative_rmse"])
    series(panel, x, mean, number, label, spread=spread)
    panel.plot(rows[column], rows["relative_rmse"], ".", color=COLOURS[number], ms=3, alpha=0.6)


def draw_ramp_rate(tables: Tables) -> Any:
    """Constructed: error against p. Trained: relative error against p and against |b − a|."""
    built, trained = tables["constructed"], tables["trained"]
    figure, panels = new_figure(3, width=3.2)
    for number, name in enumerate(built.distinct("sharpness")):
        rows = built.where(sharpness=name)
        series(panels[0, 0], rows["anchors"], rows["worst_seen"], number, f"{name}: worst seen")
        panels[0, 0].plot(
            rows["anchors"], rows["error_bound"], color=SOFT, lw=2.5, zorder=0, label=None if number else "proved bound"
        )
    panels[0, 0].loglog()
    clean(panels[0, 0], "constructed heads", x="interpolation points p", y="error", legend=True)
    _sweep(panels[0, 1], trained.where(sweep="p"), "columns", 2)
    clean(panels[0, 1], "trained heads, [a, b] = [−25, 25]", x="p", y="error / deviation of the target")
    _sweep(panels[0, 2], trained.where(sweep="range"), "range", 2)
    clean(panels[0, 2], "trained heads, smallest p", x="|b − a|")
    for panel in panels[0, 1:]:
        panel.set_ylim(bottom=0)
    return figure


def draw_ramp_heads(tables: Tables) -> Any:
    """Constructed: error against shared points. Trained: relative error against H."""
    built, trained = tables["constructed"], tables["trained"]
    figure, panels = new_figure(2)
    for number, n in enumerate(built.distinct("tokens")):
        rows = built.where(tokens=n)
        series(panels[0, 0], rows["heads"], rows["worst_seen"], number, f"n = {n}: worst seen")
        panels[0, 0].plot(
            rows["heads"], rows["error_bound"], color=SOFT, lw=2.5, zorder=0, label=None if number else "proved bound"
        )
    panels[0, 0].loglog(base=2)
    panels[0, 0].set_yscale("log")
    clean(panels[0, 0], "constructed networks", x="heads H", y="error", legend=True)
    _sweep(panels[0, 1], trained, "heads", 2)
    panels[0, 1].set_xscale("log", base=2)
    panels[0, 1].set_ylim(bottom=0)
    clean(panels[0, 1], "trained networks", x="heads H", y="error / deviation of the target")
    return figure


def draw_attention_maps(tables: Tables) -> Any:
    """One attention matrix per width: queries as published, and inside [a, b] (sorted)."""
    maps, columns = tables["maps"], tables["columns"]
    widths, wheres = maps.distinct("range"), maps.distinct("queries")
    figure, panels = new_figure(len(widths), len(wheres), width=2.7, height=2.6)
    size = int(max(maps["anchor"].max(), maps["query"].max())) + 1
    for i, where in enumerate(wheres):
        for j, width in enumerate(widths):
            rows, panel = maps.where(range=width, queries=where), panels[i, j]
            matrix = np.zeros((size, size))
            matrix[rows["anchor"].astype(int), rows["query"].astype(int)] = rows["weight"]
            image = panel.imshow(matrix, cmap="cividis", vmin=0, vmax=1, origin="lower", interpolation="nearest")
            panel.grid(False)
            share = columns.where(range=width, queries=where)["share_above_0.9"][0]
            clean(panel, f"|b − a| = {width:g}, {where}\n{100 * share:.0f} % of columns above 0.9")
    for panel in panels[-1]:
        panel.set_xlabel("query")
    for panel in panels[:, 0]:
        panel.set_ylabel("anchor")
    figure.colorbar(image, ax=panels, shrink=0.6, label="weight")
    return figure


def draw_two_layers(tables: Tables) -> Any:
    """Trained: relative error against p and H. Constructed: error against tolerance and cells."""
    trained, built = tables["trained"], tables["constructed"]
    figure, panels = new_figure(4, width=3.0)
    for panel, sweep, column, label in (
        (panels[0, 0], "p", "columns", "columns p"),
        (panels[0, 1], "H", "heads", "heads H"),
    ):
        _sweep(panel, trained.where(sweep=sweep), column, 2)
        panel.set_xscale("log", base=2)
        panel.set_ylim(bottom=0)
        clean(panel, "trained, two layers", x=label)
    panels[0, 0].set_ylabel("error / deviation of the target")
    series(panels[0, 2], built["tolerance"], built["error_bound"], 0, "proved bound")
    series(panels[0, 2], built["tolerance"], built["worst_seen"], 1, "worst seen")
    panels[0, 2].loglog()
    panels[0, 2].invert_xaxis()
    clean(panels[0, 2], "the ReLU network as attention", x="tolerance", legend=True)
    bumps = tables["bumps"]
    series(panels[0, 3], bumps["cells"], bumps["error_bound"], 0, "proved bound")
    series(panels[0, 3], bumps["cells"], bumps["worst_seen"], 1, "worst seen")
    panels[0, 3].loglog(base=2)
    clean(panels[0, 3], "bumps and selection, two tokens", x="cells per coordinate")
    return figure


def draw_stability(tables: Tables) -> Any:
    """Error in spacings against β for each p, by dtype and how scores are formed; ends against interior."""
    precision, edges = tables["precision"], tables["edges"]
    counts = precision.distinct("anchors")
    figure, panels = new_figure(len(counts) + 1, width=3.0)
    for panel, p in zip(panels[0], counts):
        for number, dtype in enumerate(precision.distinct("dtype")):
            for scores, filled in (("dot product", True), ("centred", False)):
                rows = precision.where(anchors=p, dtype=dtype, scores=scores)
                look: dict[str, Any] = {} if filled else {"markerfacecolor": "none", "alpha": 0.7}
                series(panel, rows["beta"], rows["error_over_spacing"], number, f"{dtype}, {scores}", **look)
        panel.axhline(0.5, color=INK, lw=0.6)
        panel.loglog()
        clean(panel, f"p = {p:,}", x="β")
    panels[0, 0].set_ylabel("largest error / Δ")
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=6)
    last = panels[0, -1]
    for number, (name, label) in enumerate(
        (("near_ends", "near a and b"), ("interior", "interior"), ("outside", "outside [a, b]"))
    ):
        series(last, edges["sharpness"], np.maximum(edges[name], 1e-6), number, label)
    last.loglog()
    clean(last, f"where the error is, p = {edges['anchors'][0]}", x="sharpness κ = RΔ²", legend=True)
    return figure


def draw_in_context(tables: Tables) -> Any:
    """Distance to the optimum, and the drift from exact descent with its bound."""
    table = tables["steps"]
    figure, panels = new_figure(2)
    left, right = panels[0]
    for number, problem in enumerate(table.distinct("problem")):
        rows = table.where(problem=problem)
        series(left, rows["step"], rows["network_to_optimum"], number, f"{problem}, attention")
        left.plot(
            rows["step"],
            rows["descent_to_optimum"],
            color=SOFT,
            lw=3,
            zorder=0,
            label=None if number else "exact descent",
        )
        later = rows["step"] > 0
        series(right, rows["step"][later], np.maximum(rows["drift"][later], 1e-17), number, problem)
        right.plot(
            rows["step"][later],
            rows["drift_bound"][later],
            color=COLOURS[number],
            lw=0.8,
            ls=":",
            label=None if number else "bounds",
        )
    for panel in (left, right):
        panel.set_yscale("log")
    clean(left, "distance to the optimum", x="step", legend=True)
    clean(right, "drift from exact descent", x="step", legend=True)
    return figure
