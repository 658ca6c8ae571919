"""Figures of the second paper's experiments."""

from __future__ import annotations

from typing import Any

import numpy as np

from partita.plots.colours import COLOURS, INK, SOFT, colour_map
from partita.plots.style import clean, legend_below, loosen, new_figure, series
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


def _sweep(panel: Any, rows: Table, column: str, number: int, label: str = "", error: str = "relative_rmse") -> None:
    """An error against a column: mean, deviation and every seed."""
    x, mean, spread = group_means(rows[column], rows[error])
    series(panel, x, mean, number, label, spread=spread)
    panel.plot(rows[column], rows[error], ".", color=COLOURS[number], ms=3, alpha=0.6)


def _rerun(panel: Any, rows: Table, column: str, name: str) -> None:
    """What a rerun of the public scripts gave, as crosses."""
    known = [row for row in rows.rows() if row[name] is not None]
    if known:
        x, y = [row[column] for row in known], [row[name] for row in known]
        panel.plot(x, y, "x", color=INK, ms=6, label="rerun of the public scripts")


def draw_ramp_rate(tables: Tables) -> Any:
    """Constructed: error against p at a fixed κ, on long sequences, and at a fixed β. The published networks against p."""
    built, long, fixed, trained = (tables[name] for name in ("constructed", "lengths", "fixed_beta", "trained"))
    figure, panels = new_figure(3, width=3.4, height=4.0)
    first, second, third = panels[0]
    for number, name in enumerate(built.distinct("sharpness")):
        rows = built.where(sharpness=name)
        series(first, rows["anchors"], rows["worst_seen"], number, f"{name}, n = 50")
        first.plot(
            rows["anchors"], rows["error_bound"], color=SOFT, lw=2.5, zorder=0, label=None if number else "proved bound"
        )
        for marker, n in zip("sD", long.distinct("tokens")):
            rows = long.where(sharpness=name, tokens=n)
            label = f"{name}, n = {n:,}"
            first.plot(rows["anchors"], rows["worst_seen"], marker, color=COLOURS[number], ms=3, label=label)
    first.loglog()
    clean(first, "constructed, κ fixed (β grows with p)", x="interpolation points p", y="error")
    legend_below(first, columns=2)
    series(second, fixed["anchors"], fixed["worst_seen"], 0, "worst seen")
    second.plot(fixed["anchors"], fixed["error_bound"], color=SOFT, lw=2.5, zorder=0, label="proved bound")
    second.plot(fixed["anchors"], fixed["limit"], color=INK, lw=0.8, ls="--", label="√(Δ/(πβ))")
    second.loglog()
    clean(second, f"constructed, β = {fixed['beta'][0]:g} for every p", x="p")
    legend_below(second)
    _sweep(third, trained.where(sweep="p"), "columns", 2, "trained here", "mse_all_channels")
    _rerun(third, trained.where(sweep="p"), "columns", "rerun_mse")
    third.set_yscale("log")
    clean(third, "the published networks", x="p", y="mean squared error, 32 channels")
    legend_below(third)
    return figure


def draw_ramp_heads(tables: Tables) -> Any:
    """Constructed: error against heads. The published networks against H."""
    built, trained = tables["constructed"], tables["trained"]
    figure, panels = new_figure(2, height=3.8)
    for number, n in enumerate(built.distinct("tokens")):
        rows = built.where(tokens=n)
        series(panels[0, 0], rows["heads"], rows["worst_seen"], number, f"n = {n:,}: worst seen")
        panels[0, 0].plot(
            rows["heads"], rows["error_bound"], color=SOFT, lw=2.5, zorder=0, label=None if number else "proved bound"
        )
    panels[0, 0].loglog(base=2)
    panels[0, 0].set_yscale("log")
    clean(panels[0, 0], "constructed networks", x="heads H", y="error")
    legend_below(panels[0, 0], columns=2)
    _sweep(panels[0, 1], trained, "heads", 2, "trained here", "mse_all_channels")
    _rerun(panels[0, 1], trained, "heads", "rerun_mse")
    panels[0, 1].set_xscale("log", base=2)
    panels[0, 1].set_yscale("log")
    clean(panels[0, 1], "the published networks, p = 60", x="heads H", y="mean squared error, 32 channels")
    legend_below(panels[0, 1])
    return figure


def draw_attention_maps(tables: Tables) -> Any:
    """One attention matrix per width: the published head, trained, and the constructed one."""
    maps, columns = tables["maps"], tables["columns"]
    widths, heads = maps.distinct("range"), maps.distinct("head")
    figure, panels = new_figure(len(widths), len(heads), width=2.7, height=2.8)
    loosen(figure)
    size = int(max(maps["anchor"].max(), maps["query"].max())) + 1
    for i, head in enumerate(heads):
        for j, width in enumerate(widths):
            rows, panel = maps.where(range=width, head=head), panels[i, j]
            matrix = np.zeros((size, size))
            matrix[rows["anchor"].astype(int), rows["query"].astype(int)] = rows["weight"]
            image = panel.imshow(
                matrix, cmap=colour_map("weight"), vmin=0, vmax=1, origin="lower", interpolation="nearest"
            )
            panel.grid(False)
            share = columns.where(range=width, head=head, queries="all")["share_above_0.9"].mean()
            clean(panel, f"|b − a| = {width:g}, {head}\n{100 * share:.0f} % of columns above 0.9")
    for panel in panels[-1]:
        panel.set_xlabel("query")
    for panel in panels[:, 0]:
        panel.set_ylabel("key")
    figure.colorbar(image, ax=panels, shrink=0.6, label="weight")
    return figure


def draw_two_layers(tables: Tables) -> Any:
    """The published networks: error against H and p. Constructed: error against tolerance and cells."""
    trained, built = tables["trained"], tables["constructed"]
    figure, panels = new_figure(4, width=3.0)
    for panel, sweep, label in ((panels[0, 0], "H", "heads H, n = 20"), (panels[0, 1], "p", "columns p, n = 10")):
        rows = trained.where(sweep=sweep)
        _sweep(panel, rows, "level", 2, "trained here", "mse")
        _rerun(panel, rows, "level", "rerun_mse")
        panel.axhline(rows["target_variance"].mean(), color=INK, lw=0.6, label="the best constant sequence")
        panel.set_ylim(bottom=0)
        clean(panel, "the published networks", x=label, legend=sweep == "H")
    panels[0, 0].set_ylabel("mean squared error")
    series(panels[0, 2], built["tolerance"], built["error_bound"], 0, "proved bound")
    series(panels[0, 2], built["tolerance"], built["worst_seen"], 1, "worst seen")
    panels[0, 2].loglog()
    panels[0, 2].invert_xaxis()
    clean(panels[0, 2], "the ReLU network as attention", x="tolerance", legend=True)
    bumps = tables["bumps"]
    for number, first in enumerate(bumps.distinct("first_layer")):
        rows = bumps.where(first_layer=first)
        series(panels[0, 3], rows["cells"], rows["worst_seen"], number, f"{first}: worst seen")
        panels[0, 3].plot(
            rows["cells"], rows["error_bound"], color=SOFT, lw=2.5, zorder=0, label=None if number else "proved bound"
        )
    panels[0, 3].loglog(base=2)
    clean(panels[0, 3], "bumps and selection, two tokens", x="cells per coordinate", legend=True)
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
