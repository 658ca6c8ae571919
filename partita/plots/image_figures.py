"""Figure 3: norms, spread and entropy against noise, and the controls."""

from __future__ import annotations

from typing import Any

from partita.experiments.statistics import group_means
from partita.experiments.table import Table, Tables
from partita.experiments.weight_scale import VARIANTS
from partita.plots.style import clean, new_figure, series

__all__ = ["draw_weight_scale"]

_SHORT = {
    "input noise": "input noise",
    "input noise, weight decay": "… weight decay",
    "label noise": "label noise",
    "label noise, weight decay": "… weight decay",
    "input noise, fresh each step": "input, fresh each step",
    "input noise, a third of the rate": "input, a third of the rate",
}


def draw_weight_scale(tables: Tables) -> Any:
    """A column per set: the norms (mean ± deviation over seeds), the scores' spread and entropy, and ‖W_K‖‖W_Q‖ in the controls."""
    norms = tables["norms"]
    sets = norms.distinct("set")
    figure, panels = new_figure(len(sets), 3, width=3.6, height=2.55)
    for column, name in enumerate(sets):
        rows = norms.where(set=name)
        plain = rows.where(variant="input noise")
        title, _, part = name.partition(" (")
        _draw_norms(panels[0, column], plain, title + (f"\n({part}" if part else ""))
        _draw_scores(panels[1, column], plain)
        _draw_controls(panels[2, column], rows)
    panels[0, 0].set_ylabel("spectral norm")
    panels[2, 0].set_ylabel("‖W_K‖·‖W_Q‖, relative to level 0")
    panels[0, 0].legend()
    panels[2, -1].legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


def _draw_norms(panel: Any, rows: Table, title: str) -> None:
    for number, (measure, label) in enumerate((("w_k", "‖W_K‖"), ("w_q", "‖W_Q‖"))):
        level, mean, spread = group_means(rows["level"], rows[measure])
        series(panel, level, mean, number, label, spread=spread)
    clean(panel, title)


def _draw_scores(panel: Any, rows: Table) -> None:
    level, mean, spread = group_means(rows["level"], rows["spread"])
    series(panel, level, mean, 2, spread=spread)
    level, clean_mean, deviation = group_means(rows["level"], rows["spread_clean"])
    series(panel, level, clean_mean, 5, spread=deviation)
    panel.set_ylim(bottom=0)
    panel.annotate("noised", (level[-1], mean[-1]), xytext=(-2, 5), textcoords="offset points", ha="right", fontsize=7)
    panel.annotate(
        "clean", (level[-1], clean_mean[-1]), xytext=(-2, 5), textcoords="offset points", ha="right", fontsize=7
    )
    other = panel.twinx()
    other.grid(False)
    level, entropy, spread = group_means(rows["level"], rows["entropy"])
    series(other, level, entropy, 3, spread=spread)
    other.set_ylim(0, 1.05)
    panel.set_ylabel("spread of scores (▲ ✚)")
    other.set_ylabel("entropy / ln T (◆)")


def _draw_controls(panel: Any, rows: Table) -> None:
    for number, variant in enumerate(VARIANTS):
        some = rows.where(variant=variant)
        level, mean, _ = group_means(some["level"], some["w_k"] * some["w_q"])
        series(panel, level, mean / mean[0], number, _SHORT[variant])
    clean(panel, x="noise level (share of wrong labels)")
