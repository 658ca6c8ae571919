"""Searches for small heads: sizes, temperatures and values of product grids that fit samples of f. Nothing here is proved."""

from partita.search.grid_fit import GridFit, fit_grid, fit_values

__all__ = ["GridFit", "fit_grid", "fit_values"]
