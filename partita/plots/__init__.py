"""Figures of heads; nothing is computed here that a figure does not need."""

from partita.plots.heads import plot_head

__all__ = ["plot_head"]
