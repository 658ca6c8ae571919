"""Figures of heads; nothing is computed here that a figure does not need."""

from partita.plots.heads import plot_head
from partita.plots.inspection import plot_heads, plot_plane

__all__ = ["plot_head", "plot_heads", "plot_plane"]
