"""Figures of the experiments, drawn from their tables alone."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from partita.plots.style import save, styled
from partita.reproduction import first_paper, second_paper
from partita.reproduction.heads_and_layers import draw_heads_and_layers
from partita.reproduction.image_figures import draw_noise_mechanism, draw_weight_scale
from partita.reproduction.positions import draw_positions
from partita.reproduction.table import Tables

__all__ = ["FIGURES", "draw_figure"]

FIGURES: Mapping[str, Callable[[Tables], Any]] = {
    "partition": first_paper.draw_partition,
    "weight-scale": draw_weight_scale,
    "noise-mechanism": draw_noise_mechanism,
    "step-function": first_paper.draw_step_function,
    "explicit-weights": first_paper.draw_explicit_weights,
    "temperature": first_paper.draw_temperature,
    "input-noise": first_paper.draw_input_noise,
    "learnability": first_paper.draw_learnability,
    "dimension": first_paper.draw_dimension,
    "robustness": first_paper.draw_robustness,
    "distribution-shift": first_paper.draw_distribution_shift,
    "small-domains": first_paper.draw_small_domains,
    "positions": draw_positions,
    "heads-and-layers": draw_heads_and_layers,
    "ramp-rate": second_paper.draw_ramp_rate,
    "ramp-heads": second_paper.draw_ramp_heads,
    "attention-maps": second_paper.draw_attention_maps,
    "two-layers": second_paper.draw_two_layers,
    "stability": second_paper.draw_stability,
    "in-context": second_paper.draw_in_context,
}


def draw_figure(name: str, tables: Tables, path: str | os.PathLike[str]) -> Path:
    """Write the figure of an experiment (.svg, .png or .pdf)."""
    with styled():
        return save(FIGURES[name](tables), path)
