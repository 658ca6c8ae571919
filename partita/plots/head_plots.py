"""One picture of a compiled head: what it computes, the cells behind it, and how far it is from the function."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from partita.compiler.compiled import Compiled
from partita.errors import UnsupportedError
from partita.geometry.cells import polygons
from partita.geometry.domains import Array, Box
from partita.geometry.grid import ProductGrid
from partita.plots.style import ACCENT, INK, SOFT, new_figure, require_vector_or_pixels, save, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["axis_names", "plot_head"]

_CELLS_DRAWN = 4000  # polygons
_CELLS_ACROSS = 40  # of a grid: finer ones are drawn magnified
_PIXELS = 320


def plot_head(
    compiled: Compiled, path: str | os.PathLike[str], *, output: int = 0, axes: tuple[int, int] = (0, 1)
) -> Path:
    """Write a figure (.svg, .png or .pdf): in 1-D curves, in 2-D a map, its cells and the error.

    In higher dimensions the slice through the middle of the domain is shown. Nothing is drawn where nothing is claimed: outside a
    point cloud the map stays empty, and the function is not evaluated there.

    Args:
        compiled: the head.
        path: the file to write, or replace. Parents are created.
        output: which scalar output, counted from 0.
        axes: the two coordinates to show when there are more than two, counted from 0.

    Returns:
        The path.

    Raises:
        UnsupportedError: another kind of file, an output or a coordinate that the head does not have, or a head that was
            changed after it was certified.
        MissingExtraError: matplotlib is not installed.

    >>> import partita as pa, tempfile
    >>> from partita.plots import plot_head
    >>> c = pa.compile("abs(x)", pa.Box([-1], [1]), tolerance=0.1)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     plot_head(c, f"{folder}/head.svg").name
    'head.svg'
    """
    require_vector_or_pixels(path)
    compiled.require_unchanged()
    outputs = compiled.head.num_outputs
    if not 0 <= output < outputs:
        raise UnsupportedError(f"output is {output}; this head has {outputs}, counted from 0.")
    one = compiled.head.dimension == 1
    panels = (1 if one else 2) + _can_compare(compiled)
    with styled():
        figure, grid = new_figure(panels, width=4.6 if one else 3.75, height=3.4 if one else 3.9)
        (_draw_line if one else _draw_map)(compiled, grid[0], output, axes)
        figure.suptitle(_title(compiled, output), fontsize=11)
        return save(figure, path)


def _can_compare(compiled: Compiled) -> bool:
    """A black box read from a file has no function to compare with."""
    return compiled.target.ask is not None


def _title(compiled: Compiled, output: int) -> str:
    label, certificate = compiled.target.label, compiled.certificate
    shown = label if len(label) <= 60 else label[:59] + "…"
    which = "" if compiled.head.num_outputs == 1 else f", output {output}"
    norm = "" if certificate.norm == "inf" else f" in L{certificate.norm}"
    return f"{shown}{which}   ·   {compiled.num_keys:,} keys   ·   {certificate.kind} error {certificate.claim}{norm}"


def axis_names(compiled: Compiled) -> list[str]:
    """x0, x1, …; k0, …, q0, … for cross-attention."""
    if len(compiled.target.domains) == 1:
        return [f"x{i}" for i in range(compiled.head.dimension)]
    keys, queries = (d.dimension for d in compiled.target.domains)
    return [f"k{i}" for i in range(keys)] + [f"q{i}" for i in range(queries)]


def _values(compiled: Compiled, points: Array, output: int) -> tuple[Array, Array | None]:
    """The head and |head − function| at flat points; NaN where the domain is not."""
    inside = compiled.target.domain.contains(points)
    got, error = np.full(len(points), np.nan), np.full(len(points), np.nan)
    with torch.no_grad():
        head = compiled.head.evaluate(torch.from_numpy(points[inside]).to(compiled.head.dtype))
    got[inside] = head[:, output].double().numpy()
    if not _can_compare(compiled):
        return got, None
    error[inside] = np.abs(got[inside] - _function(compiled, points[inside])[:, output])
    return got, error


def _function(compiled: Compiled, points: Array) -> Array:
    """f at points of the domain; within roundings of the edge of a region beside them, where f has a value."""
    region = compiled.target.region
    return compiled.target(points if region is None else region.clamp(points))


def _draw_line(compiled: Compiled, panels: Any, output: int, _axes: tuple[int, int]) -> None:
    box = compiled.target.box
    x = np.linspace(float(box.lo.ravel()[0]), float(box.hi.ravel()[0]), 2001)[:, None]
    got, error = _values(compiled, x, output)
    if error is not None:
        inside = np.isfinite(got)
        panels[0].plot(
            x[inside], _function(compiled, x[inside])[:, output], color=INK, lw=0.9, ls="--", label="function"
        )
    panels[0].plot(x, got, color=ACCENT, lw=1.3, label="head")
    centers = compiled.partition.to_power_diagram().centers[:, 0]
    if len(centers) <= 400:
        panels[0].plot(centers, np.full(len(centers), panels[0].get_ylim()[0]), "|", color=SOFT, ms=7, label="centers")
    panels[0].legend(frameon=False, loc="best")
    _clean(panels[0], "head and function" if error is not None else "head (the function was not stored)")
    if error is not None:
        panels[1].plot(x, error, color=ACCENT, lw=1.0)
        panels[1].set_ylim(bottom=0)
        if compiled.certificate.norm == "inf":
            top, name = compiled.certificate.error, _top_name(compiled)
            panels[1].axhline(top, color=INK, lw=0.9)
            panels[1].set_ylim(0, 1.15 * top)
            panels[1].annotate(name, (x[0, 0], top), xytext=(2, 3), textcoords="offset points", color=INK)
        _clean(panels[1], "|head − function|")
    for panel in panels:
        panel.set_xlabel("x0")


def _draw_map(compiled: Compiled, panels: Any, output: int, axes: tuple[int, int]) -> None:
    box, names = compiled.target.box, axis_names(compiled)
    lo, hi = box.lo.ravel(), box.hi.ravel()
    i, j = axes
    if not (0 <= i < len(lo) and 0 <= j < len(lo) and i != j):
        raise UnsupportedError(f"axes are {axes} in R^{len(lo)}; expected two different coordinates, counted from 0.")
    middle = (lo + hi) / 2
    points = np.tile(middle, (_PIXELS * _PIXELS, 1))
    u, v = np.linspace(lo[i], hi[i], _PIXELS), np.linspace(lo[j], hi[j], _PIXELS)
    points[:, i], points[:, j] = (g.ravel() for g in np.meshgrid(u, v))
    got, error = _values(compiled, points, output)
    aspect = "equal" if 0.75 <= (hi[j] - lo[j]) / (hi[i] - lo[i]) <= 4 / 3 else "auto"
    picture: dict[str, Any] = {
        "extent": (lo[i], hi[i], lo[j], hi[j]),
        "origin": "lower",
        "aspect": aspect,
        "interpolation": "nearest",
    }
    image = panels[0].imshow(got.reshape(_PIXELS, _PIXELS), cmap="cividis", **picture)
    panels[0].figure.colorbar(image, ax=panels[0], shrink=0.8)
    panels[1].imshow(got.reshape(_PIXELS, _PIXELS), cmap="cividis", alpha=0.35, **picture)
    magnified = _draw_cells(compiled, panels[1], Box([lo[i], lo[j]], [hi[i], hi[j]]), (i, j))
    if error is not None:
        top = compiled.certificate.error if compiled.certificate.norm == "inf" else None
        image = panels[2].imshow(error.reshape(_PIXELS, _PIXELS), cmap="magma", vmin=0, vmax=top, **picture)
        panels[2].figure.colorbar(
            image, ax=panels[2], shrink=0.8, label="" if top is None else f"0 … {_top_name(compiled)}"
        )
    rest = ", ".join(f"{names[k]} = {middle[k]:.3g}" for k in range(len(lo)) if k not in axes)
    titles = (
        "what the head computes" + (f" at {rest}" if rest else ""),
        "the cells its scores cut" + magnified,
        "|head − function|",
    )
    for panel, title in zip(panels, titles):
        _clean(panel, title)
        panel.grid(False)
        panel.set_xlabel(names[i])
    panels[0].set_ylabel(names[j])


def _draw_cells(compiled: Compiled, panel: Axes, window: Box, axes: tuple[int, int]) -> str:
    """Cells in the plane: a grid's lines (magnified where they are too many), exact polygons in 2-D, centers otherwise."""
    from matplotlib.collections import LineCollection, PolyCollection
    from matplotlib.patches import Rectangle

    i, j = axes
    (x0, y0), (x1, y1) = window.lo, window.hi
    partition = compiled.partition
    if isinstance(partition, ProductGrid):
        columns, rows = partition.axes[i], partition.axes[j]
        factor = max(1.0, max(len(columns), len(rows)) / _CELLS_ACROSS)
        x1, y1 = x0 + (x1 - x0) / factor, y0 + (y1 - y0) / factor
        if columns[0] < x0 or rows[0] < y0:  # ghosts: show them, and the domain as a frame
            panel.add_patch(Rectangle((x0, y0), x1 - x0, y1 - y0, fill=False, edgecolor=INK, linewidth=1.4))
            (x0, x1), (y0, y1) = _reach(columns, x0, x1, factor), _reach(rows, y0, y1, factor)
            panel.plot(*(g.ravel() for g in np.meshgrid(columns, rows)), ".", color=ACCENT, ms=3)
        across, up = ((a[1:] + a[:-1]) / 2 for a in (columns, rows))
        lines = [[(e, y0), (e, y1)] for e in across if e < x1] + [[(x0, e), (x1, e)] for e in up if e < y1]
        panel.add_collection(LineCollection(lines, colors=INK, linewidths=0.5))
        panel.set_xlim(x0, x1)
        panel.set_ylim(y0, y1)
        return f" ({factor:.0f}× magnified)" if factor > 1.5 else ""
    panel.set_xlim(x0, x1)
    panel.set_ylim(y0, y1)
    centers = partition.to_power_diagram().centers
    if partition.dimension == 2 and partition.num_cells <= _CELLS_DRAWN:
        shapes = [p for p in polygons(partition, window) if len(p)]
        panel.add_collection(PolyCollection(shapes, facecolors="none", edgecolors=INK, linewidths=0.5))
    panel.plot(centers[:, i], centers[:, j], ".", color=ACCENT, ms=3)
    return ""


def _reach(centers: Array, lo: float, hi: float, factor: float) -> tuple[float, float]:
    """From half a gap before the first center to half a gap behind the last, or as much of it as is shown."""
    gap = float(centers[1] - centers[0]) if len(centers) > 1 else 0.0
    return min(lo, centers[0] - gap / 2), hi if factor > 1.5 else max(hi, centers[-1] + gap / 2)


def _top_name(compiled: Compiled) -> str:
    return "error_bound" if compiled.error_estimate is None else "error_estimate"


def _clean(panel: Axes, title: str) -> None:
    panel.set_title(title, fontsize=9, color=INK)
    panel.tick_params(colors=SOFT, labelcolor=INK, length=2)
