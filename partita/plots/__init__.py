"""Figures of heads; nothing is computed here that a figure does not need."""

from partita.plots.audit_plots import plot_audit
from partita.plots.budget_plots import plot_error_budget
from partita.plots.head_plots import plot_head
from partita.plots.layer_folder import write_layers
from partita.plots.layer_plots import layers_figure
from partita.plots.network_plots import plot_network
from partita.plots.pattern_plots import plot_pattern
from partita.plots.plane_plots import plot_heads, plot_plane
from partita.plots.surface_plots import plot_surface
from partita.plots.temperature_plots import animate_temperature, plot_temperatures
from partita.plots.training_plots import plot_training

__all__ = [
    "animate_temperature",
    "layers_figure",
    "plot_audit",
    "plot_error_budget",
    "plot_head",
    "plot_heads",
    "plot_network",
    "plot_pattern",
    "plot_plane",
    "plot_surface",
    "plot_temperatures",
    "plot_training",
    "write_layers",
]
