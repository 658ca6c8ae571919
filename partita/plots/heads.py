"""One picture of a compiled head: what it computes, the cells behind it, and how far it is from the function."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from partita.compiler.compiled import Compiled
from partita.errors import MissingExtraError, UnsupportedError
from partita.geometry.cells import polygons
from partita.geometry.domains import Array, Box
from partita.geometry.grid import ProductGrid

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["plot_head"]

_INK, _SOFT, _ACCENT = "#1f2933", "#9aa5b1", "#c2410c"
_CELLS_DRAWN = 4000


def plot_head(
    compiled: Compiled, path: str | os.PathLike[str], *, output: int = 0, axes: tuple[int, int] = (0, 1)
) -> Path:
    """Write a figure (suffix .svg, .png or .pdf): 1-D as curves, 2-D as a map, its cells and the error; higher dimensions as
    the slice through the middle of the domain along `axes`. Point clouds show the cells' centers.

    Args:
        output: which scalar output. axes: the two coordinates to show when there are more than two.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise MissingExtraError("plots need the extra 'plot': pip install 'partita[plot]'.") from error
    matplotlib.use("Agg", force=False)
    from matplotlib import pyplot as plt

    if not 0 <= output < compiled.head.values.shape[-1]:
        raise UnsupportedError(f"output {output} of {compiled.head.values.shape[-1]}.")
    one = compiled.head.dimension == 1
    style: dict[Any, Any] = {
        "font.family": "DejaVu Sans",
        "font.size": 9,
        "axes.edgecolor": _SOFT,
        "text.color": _INK,
        "axes.labelcolor": _INK,
        "svg.hashsalt": "partita",
    }
    with plt.rc_context(style):
        figure, panels = plt.subplots(
            1, 2 if one else 3, figsize=(9.2, 3.4) if one else (11.2, 3.9), layout="constrained"
        )
        (_draw_line if one else _draw_map)(compiled, panels, output, axes)
        certificate = compiled.certificate
        figure.suptitle(
            f"{_short(compiled.target.label)}   ·   {compiled.num_keys:,} keys   ·   {certificate.kind} error ≤ "
            f"{certificate.error_bound:.3g}",
            fontsize=11,
        )
        place = Path(path)
        place.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(place, dpi=160, metadata={"Date": None} if place.suffix == ".svg" else None)
        plt.close(figure)
    return place


def _short(text: str, most: int = 60) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def _values(compiled: Compiled, points: Array, output: int) -> Array:
    with torch.no_grad():
        return compiled.head.evaluate(torch.from_numpy(points).to(compiled.head.dtype))[:, output].double().numpy()


def _function(compiled: Compiled, points: Array, output: int) -> Array | None:
    return None if compiled.target.ask is None else compiled.target(points)[:, output]


def _draw_line(compiled: Compiled, panels: Any, output: int, _axes: tuple[int, int]) -> None:
    box = compiled.target.domain.bounding_box()
    x = np.linspace(float(box.lo.ravel()[0]), float(box.hi.ravel()[0]), 2001)[:, None]
    got, f = _values(compiled, x, output), _function(compiled, x, output)
    left, right = panels
    left.plot(x, got, color=_ACCENT, lw=1.3, label="head")
    if f is not None:
        left.plot(x, f, color=_INK, lw=0.9, ls="--", label="function")
        right.plot(x, np.abs(got - f), color=_ACCENT, lw=1.0)
    centers = compiled.partition.to_power_diagram().centers[:, 0]
    if len(centers) <= 400:
        left.plot(centers, np.full(len(centers), left.get_ylim()[0]), "|", color=_SOFT, ms=7, label="centers")
    left.legend(frameon=False, loc="best")
    right.axhline(compiled.error_bound, color=_INK, lw=0.9)
    right.set_ylim(0, 1.15 * compiled.error_bound)
    right.annotate(
        "error_bound", (x[0, 0], compiled.error_bound), xytext=(2, 3), textcoords="offset points", color=_INK
    )
    for panel, title in ((left, "head and function"), (right, "|head − function|")):
        _clean(panel, title)
        panel.set_xlabel("x0")


def _draw_map(compiled: Compiled, panels: Any, output: int, axes: tuple[int, int]) -> None:
    box = compiled.target.domain.bounding_box()
    lo, hi = box.lo.ravel(), box.hi.ravel()
    i, j = axes
    if not (0 <= i < len(lo) and 0 <= j < len(lo) and i != j):
        raise UnsupportedError(f"axes {axes} of a domain in R^{len(lo)}; expected two different coordinates.")
    window = Box([lo[i], lo[j]], [hi[i], hi[j]])
    size = 320
    u, v = np.linspace(lo[i], hi[i], size), np.linspace(lo[j], hi[j], size)
    points = np.tile((lo + hi) / 2, (size * size, 1))
    points[:, i], points[:, j] = (g.ravel() for g in np.meshgrid(u, v))
    got, f = _values(compiled, points, output).reshape(size, size), _function(compiled, points, output)
    extent = (lo[i], hi[i], lo[j], hi[j])
    image = panels[0].imshow(got, extent=extent, origin="lower", cmap="cividis", aspect="auto", interpolation="nearest")
    panels[0].figure.colorbar(image, ax=panels[0], shrink=0.85)
    panels[1].imshow(
        got, extent=extent, origin="lower", cmap="cividis", aspect="auto", interpolation="nearest", alpha=0.35
    )
    _draw_cells(compiled, panels[1], window, (i, j))
    if f is not None:
        error = np.abs(got - f.reshape(size, size))
        image = panels[2].imshow(
            error, extent=extent, origin="lower", cmap="magma", vmin=0, vmax=compiled.error_bound, aspect="auto"
        )
        panels[2].figure.colorbar(image, ax=panels[2], shrink=0.85, label="0 … error_bound")
    slice_note = "" if len(lo) == 2 else f" (slice, x{i} and x{j})"
    for panel, title in zip(
        panels, ("what the head computes" + slice_note, "the cells its scores cut", "|head − function|")
    ):
        _clean(panel, title)
        panel.set_xlabel(f"x{i}")
    panels[0].set_ylabel(f"x{j}")


def _draw_cells(compiled: Compiled, panel: Axes, window: Box, axes: tuple[int, int]) -> None:
    """Cells in the plane: exact polygons in 2-D, grid lines for grids with many cells, centers otherwise."""
    from matplotlib.collections import LineCollection, PolyCollection

    i, j = axes
    (x0, y0), (x1, y1) = window.lo, window.hi
    panel.set_xlim(x0, x1)
    panel.set_ylim(y0, y1)
    partition = compiled.partition
    if isinstance(partition, ProductGrid):
        lines = [[(e, y0), (e, y1)] for e in _edges(partition.axes[i])] + [
            [(x0, e), (x1, e)] for e in _edges(partition.axes[j])
        ]
        panel.add_collection(LineCollection(lines, colors=_INK, linewidths=min(0.6, 40 / (1 + len(lines)))))
        return
    centers = partition.to_power_diagram().centers
    if partition.dimension == 2 and partition.num_cells <= _CELLS_DRAWN:
        shapes = [p for p in polygons(partition, window) if len(p)]
        panel.add_collection(PolyCollection(shapes, facecolors="none", edgecolors=_INK, linewidths=0.5))
    panel.plot(centers[:, i], centers[:, j], ".", color=_ACCENT, ms=3)


def _edges(centers: Array) -> Array:
    return (centers[1:] + centers[:-1]) / 2


def _clean(panel: Axes, title: str) -> None:
    panel.set_title(title, fontsize=9, color=_INK)
    panel.tick_params(colors=_SOFT, labelcolor=_INK, length=2)
