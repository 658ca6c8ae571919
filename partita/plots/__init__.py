"""Figures of heads; nothing is computed here that a figure does not need."""

from partita.plots.head_plots import plot_head
from partita.plots.plane_plots import plot_heads, plot_plane

__all__ = ["plot_head", "plot_heads", "plot_plane"]
