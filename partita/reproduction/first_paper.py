"""Figures of the first paper's experiments on known functions."""

from __future__ import annotations

from typing import Any

import numpy as np

from partita.geometry import Box, MaxAffine
from partita.geometry.cells import polygons, touching
from partita.plots.colours import COLOURS, INK, SOFT, TINTS, colour_map, tint_numbers
from partita.plots.style import clean, legend_below, new_figure, series, ticks
from partita.reproduction.statistics import group_means
from partita.reproduction.table import Tables

__all__ = [
    "draw_dimension",
    "draw_distribution_shift",
    "draw_explicit_weights",
    "draw_input_noise",
    "draw_learnability",
    "draw_partition",
    "draw_robustness",
    "draw_small_domains",
    "draw_step_function",
    "draw_temperature",
]


def draw_partition(tables: Tables) -> Any:
    """Figure 1: the cells and the max-affine function; Figure 2: other values for them; and the error against what was asked."""
    from matplotlib.collections import PolyCollection

    figure, panels = new_figure(3, width=3.4, height=3.1)
    cells, picture, heads = tables["cells"], tables["picture"], tables["tolerances"]
    partition = MaxAffine(np.stack([cells["slope_0"], cells["slope_1"]], axis=1), cells["offset"])
    shapes = polygons(partition, Box([-1.0, -1.0], [1.0, 1.0]))
    side = round(len(picture) ** 0.5)
    axes = [picture[name].reshape(side, side) for name in ("x0", "x1")]
    fills = [TINTS[number] for number in tint_numbers(touching(shapes))]
    panels[0, 0].add_collection(PolyCollection(shapes, facecolors=fills, edgecolors=INK, linewidths=1.1))
    levels = panels[0, 0].contour(*axes, picture["max_affine"].reshape(side, side), 8, colors=INK, linewidths=0.6)
    panels[0, 0].clabel(levels, fontsize=6)
    image = panels[0, 1].contourf(*axes, picture["head"].reshape(side, side), 14, cmap=colour_map("value"))
    panels[0, 1].add_collection(PolyCollection(shapes, facecolors="none", edgecolors="white", linewidths=0.8))
    figure.colorbar(image, ax=panels[0, 1], shrink=0.8)
    for panel in panels[0, :2]:
        panel.set(xlim=(-1, 1), ylim=(-1, 1), aspect="equal")
        panel.grid(False)
    series(panels[0, 2], heads["tolerance"], heads["error_bound"], 0, "proved bound")
    series(panels[0, 2], heads["tolerance"], heads["worst_seen"], 1, "worst seen, one score leading")
    series(panels[0, 2], heads["tolerance"], heads["worst_near_edges"], 2, "worst seen beside edges")
    panels[0, 2].loglog()
    clean(panels[0, 0], "max-affine function, cells (Figure 1)", x="x0", y="x1")
    clean(panels[0, 1], "same cells, other values (Figure 2)", x="x0")
    panels[0, 2].set_ylim(1e-7, 4)
    clean(panels[0, 2], "error of the head", x="tolerance", legend="lower right")
    return figure


def draw_step_function(tables: Tables) -> Any:
    """One trained head per number of keys, and how far jumps are from turning points."""
    jumps, curves = tables["jumps"], tables["curves"]
    keys = jumps.distinct("keys")
    figure, panels = new_figure(len(keys) + 1, width=3.1, height=2.9)
    for panel, count in zip(panels[0], keys):
        rows = curves.where(keys=count)
        panel.plot(rows["x"], rows["target"], color=SOFT, lw=3, label="target")
        panel.plot(rows["x"], rows["head"], color=COLOURS[1], label="head")
        panel.plot(rows["x"], rows["max_affine"] - 2.3, color=COLOURS[2], ls="--", label="max-affine function")
        for turn in tables["turns"].where(keys=count, seed=int(rows["seed"][0]))["turn"]:
            panel.axvline(turn, color=COLOURS[2], lw=0.7, ls=":")
        clean(panel, f"{count} keys (median error)", x="x")
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside lower left", ncols=3)
    last = panels[0, -1]
    for number, count in enumerate(keys):
        distance = np.sort(jumps.where(keys=count)["distance"])
        share = (np.arange(len(distance)) + 1) / len(distance)
        series(last, np.maximum(distance, 1e-4), share, number, f"{count} keys", marker=None)
    chance = np.sort(jumps["distance_at_random"])
    last.plot(chance, (np.arange(len(chance)) + 1) / len(chance), color=SOFT, lw=2, label="at random")
    last.axvline(0.05, color=INK, lw=0.6)
    last.set_xscale("log")
    clean(last, "jump to nearest turning point", x="distance", y="share of jumps")
    last.legend(fontsize=7, loc="upper left")
    return figure


def draw_explicit_weights(tables: Tables) -> Any:
    """Errors against ε, and what it costs."""
    t = tables["tolerances"]
    figure, panels = new_figure(2)
    left, right = panels[0]
    left.plot(t["tolerance"], t["tolerance"], color=SOFT, lw=2, label="ε")
    series(left, t["tolerance"], t["error_bound"], 0, "proved bound")
    series(left, t["tolerance"], t["worst_seen"], 1, "worst seen (attack)")
    series(left, t["tolerance"], t["layers_worst_seen"], 2, "literal layers, random points")
    series(right, t["tolerance"], t["keys"], 0, "keys")
    for number, form in enumerate(t.distinct("form"), 2):
        rows = t.where(form=form)
        series(right, rows["tolerance"], rows["layer_numbers"], number, f"numbers in the {form} form")
    series(right, t["tolerance"], t["paper_keys"], 1, "keys by the printed proof")
    for panel in (left, right):
        panel.loglog()
        panel.invert_xaxis()
    clean(left, "sin x + cos y on [−π, π]²", x="ε", y="error", legend=True)
    clean(right, "what it costs", x="ε", legend="lower right")
    right.set_ylim(bottom=1)
    return figure


def draw_temperature(tables: Tables) -> Any:
    """How far the softmax is from the indicator, training of both heads, and the largest error of a fixed grid against κ."""
    indicator, sweep, training = tables["partition"], tables["sharpness"], tables["training"]
    figure, panels = new_figure(4, width=3.0, height=3.6)
    first, second, third, last = panels[0]
    rate = indicator["inverse_temperature"]
    series(first, rate, np.maximum(indicator["share_blurred"], 1e-5), 0, "share of the domain off by > 0.1")
    series(first, rate, np.maximum(indicator["largest_where_clear"], 1e-16), 1, "largest where one score leads")
    series(first, rate, np.maximum(indicator["bound_where_clear"], 1e-16), 2, "leak bound there")
    first.loglog()
    first.set_ylim(1e-12, 3)
    clean(first, "softmax against indicator", x="R")
    legend_below(first)
    for number, head in enumerate(training.distinct("head")):
        rows = training.where(head=head)
        for panel, measure in ((second, rows["w_k"] * rows["w_q"]), (third, rows["entropy"])):
            step, mean, spread = group_means(rows["step"], measure)
            series(panel, step + 1, mean, number, head, spread=spread)
            panel.set_xscale("log")
            panel.set_ylim(bottom=0)
    clean(second, "training: ‖W_K‖·‖W_Q‖ (Frobenius)", x="step + 1")
    legend_below(second)
    clean(third, "training: entropy of the weights", x="step + 1")
    for number, name in enumerate(sweep.distinct("values")):
        rows = sweep.where(values=name)
        series(last, rows["sharpness"], rows["error"], number, name)
        best = int(rows["error"].argmin())
        last.plot(rows["sharpness"][best], rows["error"][best], "o", ms=9, mfc="none", mec=COLOURS[number])
    last.loglog()
    clean(last, "a fixed grid: largest error", x="sharpness κ = R h²")
    legend_below(last)
    return figure


def draw_input_noise(tables: Tables) -> Any:
    """Norms and entropy of trained heads against the noise on their inputs."""
    t = tables["heads"]
    figure, panels = new_figure(2)
    left, right = panels[0]
    for number, (name, label) in enumerate((("w_k", "‖W_K‖"), ("w_q", "‖W_Q‖"))):
        level, mean, spread = group_means(t["level"], t[name])
        series(left, level, mean, number, label, spread=spread)
    names = (
        ("entropy", "entropy, noised inputs"),
        ("entropy_clean", "entropy, clean inputs"),
        ("rmse_clean", "error on clean inputs"),
    )
    for number, (name, label) in enumerate(names):
        level, mean, spread = group_means(t["level"], t[name])
        series(right, level, mean, number, label, spread=spread)
    right.set_ylim(bottom=0)
    clean(left, "norms", x="noise level", legend=True)
    clean(right, "selecting or averaging", x="noise level", legend=True)
    return figure


def draw_learnability(tables: Tables) -> Any:
    """A row per function: error against steps for each start, untrained weights as lines; and the cells that are found."""
    training, fixed, heads = tables["training"], tables["constructed"], tables["heads"]
    names = training.distinct("function")
    figure, panels = new_figure(2, len(names))
    for row, function in enumerate(names):
        left, right = panels[row]
        for number, start in enumerate(training.distinct("start")):
            rows = training.where(function=function, start=start)
            steps = np.unique(rows["step"])
            values = [rows["sup_error"][rows["step"] == s] for s in steps]
            series(left, steps + 1, np.array([np.median(v) for v in values]), number, f"from {start}")
            low, high = [v.min() for v in values], [v.max() for v in values]
            left.fill_between(steps + 1, low, high, color=COLOURS[number], alpha=0.15, lw=0)
            cells = heads.where(function=function, start=start)
            for place, step in enumerate(sorted(set(cells["step"]))):
                found = cells.where(step=step)["cells_found"]
                spots = number + 0.3 * place + np.linspace(-0.06, 0.06, len(found))
                right.plot(spots, found, "o", color=COLOURS[number], mfc=None if place else "none", ms=4)
        for line, dash in zip(fixed.where(function=function).rows(), ("-", "--", ":")):
            left.axhline(line["sup_error"], color=SOFT, ls=dash, lw=1.4, label=f"untrained, {line['values']}")
        left.loglog()
        right.axhline(0.5, color=INK, lw=0.6)
        right.set(ylim=(-0.03, 1.03), xticks=np.arange(3) + 0.15)
        right.set_xticklabels(["from hard", "from soft", "from random"])
        size = fixed.where(function=function)["keys"][0]
        clean(left, f"{function}, {size} keys: sup error", x="step + 1")
        clean(right, "constructed cells found (open: before)")
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside right center")
    return figure


def draw_dimension(tables: Tables) -> Any:
    """Stored numbers against the dimension."""
    table = tables["sizes"]
    names = table.distinct("function")
    figure, panels = new_figure(len(names))
    labels = {"hard": "theorem's grid", "fitted": "fitted values", "train": "tensor train (estimates)"}
    for panel, name in zip(panels[0], names):
        for number, (method, label) in enumerate(labels.items()):
            rows = table.where(function=name, method=method)
            if len(rows):
                series(panel, rows["dimension"], rows["stored_numbers"], number, label)
        panel.set_yscale("log")
        clean(
            panel,
            {"wave": "sin(2e·x)", "bell": "1/(1 + 4|x|²/m)"}[name],
            x="dimension m",
            y="stored numbers",
            legend="upper left",
        )
    return figure


def draw_robustness(tables: Tables) -> Any:
    """A column per head, a row per form: the error against the relative size of the perturbation, tensor by tensor."""
    table = tables["perturbations"].where(perturbed="relative")
    heads, forms = table.distinct("head"), table.distinct("form")
    figure, panels = new_figure(len(heads), len(forms), width=3.2)
    for column, head in enumerate(heads):
        for row, form in enumerate(forms):
            rows, panel = table.where(head=head, form=form), panels[row, column]
            for number, tensor in enumerate(rows.distinct("tensor")):
                some = rows.where(tensor=tensor)
                series(panel, some["size"], some["error"], number, tensor)
            panel.loglog()
            clean(
                panel,
                f"{head}, {rows['keys'][0]:,} keys, {form} form",
                x="relative perturbation",
                y="" if column else "error",
            )
    for row in range(len(forms)):
        panels[row, -1].legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


def draw_distribution_shift(tables: Tables) -> Any:
    """A panel per function: the largest error against the distance from the domain, with the bounds that hold there."""
    t = tables["shift"]
    names = t.distinct("function")
    figure, panels = new_figure(len(names))
    for panel, name in zip(panels[0], names):
        for number, head in enumerate(t.where(function=name).distinct("head")):
            rows = t.where(function=name, head=head)
            at = np.maximum(rows["distance"], 0.01)
            series(panel, at, np.maximum(rows["error"], 1e-16), number, head)
            panel.plot(at, rows["bound_outside"].astype(float), color=COLOURS[number], ls="--", lw=1)
        panel.loglog()
        panel.set_ylim(bottom=1e-6)
        clean(panel, f"{name} (dashed: bounds)", x="distance from the domain", y="largest error", legend=True)
    return figure


def draw_small_domains(tables: Tables) -> Any:
    """Keys against ε for a curve and for clusters, and how much of ε is used."""
    t = tables["domains"]
    figure, panels = new_figure(2)
    left, right = panels[0]
    pairs = [(kind, m) for kind in t.distinct("domain") for m in t.distinct("dimension")]
    for number, (kind, m) in enumerate(pairs):
        rows = t.where(domain=kind, dimension=m)
        series(left, rows["tolerance"], rows["keys"], number, f"{kind} in R^{m}")
        series(right, rows["tolerance"], rows["worst_seen"] / rows["tolerance"], number, f"{kind} in R^{m}")
    left.loglog()
    right.set_xscale("log")
    right.set_ylim(0, 1.05)
    for panel in (left, right):
        panel.invert_xaxis()
        ticks(panel, sorted(set(t["tolerance"]))[::2])
    clean(left, "keys", x="ε")
    clean(right, "worst error seen, over ε", x="ε")
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=len(pairs))
    return figure
