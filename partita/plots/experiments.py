"""Figures of the experiments, drawn from their tables alone."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from partita.experiments.table import Tables
from partita.plots.image_figures import draw_weight_scale
from partita.plots.style import save, styled

__all__ = ["FIGURES", "draw_figure"]

FIGURES: Mapping[str, Callable[[Tables], Any]] = {"weight-scale": draw_weight_scale}


def draw_figure(name: str, tables: Tables, path: str | os.PathLike[str]) -> Path:
    """Write the figure of an experiment (.svg, .png or .pdf)."""
    with styled():
        return save(FIGURES[name](tables), path)
