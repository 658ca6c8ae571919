"""Figure 3 (norms, spread and entropy against noise, and the controls), and what is behind it."""

from __future__ import annotations

from typing import Any

from partita.plots.style import clean, new_figure, series
from partita.reproduction.statistics import group_means
from partita.reproduction.table import Table, Tables
from partita.reproduction.weight_scale import VARIANTS

__all__ = ["draw_noise_mechanism", "draw_weight_scale"]

_SHORT = {
    "input noise": "input noise",
    "input noise, weight decay": "… weight decay",
    "label noise": "label noise",
    "label noise, weight decay": "… weight decay",
    "input noise, fresh each step": "input, fresh each step",
    "input noise, a third of the rate": "input, a third of the rate",
}


def draw_weight_scale(tables: Tables) -> Any:
    """A column per set: Frobenius and spectral norms, the scores' spread, the weights' entropy, and the controls.

    Means ± standard deviations over seeds.
    """
    norms = tables["norms"]
    sets = norms.distinct("set")
    figure, panels = new_figure(len(sets), 5, width=3.4, height=2.1)
    rows_of_lines = (
        (("w_k_frobenius", "‖W_K‖"), ("w_q_frobenius", "‖W_Q‖")),
        (("w_k", "‖W_K‖"), ("w_q", "‖W_Q‖")),
        (("spread", "on inputs noised as in training"), ("spread_clean", "on clean inputs")),
        (("entropy", "on inputs noised as in training"), ("entropy_clean", "on clean inputs")),
    )
    for column, name in enumerate(sets):
        rows = norms.where(set=name)
        plain = rows.where(variant="input noise")
        for row, lines in enumerate(rows_of_lines):
            for number, (measure, label) in enumerate(lines):
                level, mean, spread = group_means(plain["level"], plain[measure])
                series(panels[row, column], level, mean, number + 2 * (row > 1), label, spread=spread)
            panels[row, column].set_ylim(bottom=0)
        panels[3, column].set_ylim(0, 1)
        _draw_controls(panels[4, column], rows)
        title, _, part = name.partition(" (")
        clean(panels[0, column], title + (f"\n({part}" if part else ""))
    labels = ("Frobenius norm", "spectral norm", "spread of scores", "entropy / ln T", "‖W_K‖·‖W_Q‖ over level 0")
    for row, label in enumerate(labels):
        panels[row, 0].set_ylabel(label)
        panels[row, -1].legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


def _draw_controls(panel: Any, rows: Table) -> None:
    for number, variant in enumerate(VARIANTS):
        some = rows.where(variant=variant)
        level, mean, _ = group_means(some["level"], some["w_k_frobenius"] * some["w_q_frobenius"])
        series(panel, level, mean / mean[0], number, _SHORT[variant])
    panel.set_ylim(bottom=0)
    clean(panel, x="noise level (share of wrong labels)")


def draw_noise_mechanism(tables: Tables) -> Any:
    """A column per set: Frobenius norms, those outside the images' directions, entropy, and the weight of a row on itself."""
    models = tables["models"]
    sets = models.distinct("set")
    labels = ("‖W_K‖·‖W_Q‖ (Frobenius)", "… outside the images", "entropy / ln T", "weight on its own row")
    figure, panels = new_figure(len(sets), len(labels), width=3.0, height=1.9)
    for column, name in enumerate(sets):
        for number, drawn in enumerate(models.distinct("noise")):
            rows = models.where(set=name, noise=drawn)
            measures = (
                rows["w_k_frobenius"] * rows["w_q_frobenius"],
                rows["w_k_outside"] * rows["w_q_outside"],
                rows["entropy"],
                rows["own_row"],
            )
            for row, measure in enumerate(measures):
                level, mean, spread = group_means(rows["level"], measure)
                series(panels[row, column], level, mean, number, f"noise {drawn}", spread=spread)
        for panel in panels[:, column]:
            panel.set_ylim(bottom=0)
        clean(panels[0, column], name)
        panels[-1, column].set_xlabel("noise level")
    for row, label in enumerate(labels):
        panels[row, 0].set_ylabel(label)
    panels[0, -1].legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure
