"""Pictures of captured heads: one plane of one head, or a small multiple per head of a model."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from partita.inspection.planes import PlaneView
from partita.plots.colours import ACCENT, COLOURS, INK, SOFT, colour_map
from partita.plots.style import new_figure, require_vector_or_pixels, root_figure, save, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["plot_heads", "plot_plane"]

_POINTS_AS_VECTORS = 1000  # beyond this queries are drawn as pixels, or the file grows with the input


def plot_plane(
    view: PlaneView, path: str | os.PathLike[str] | None = None, *, title: str = "", ax: Axes | None = None
) -> Figure:
    """Draw one captured head on a plane of its query space, as a matplotlib figure.

    It shows the cells of the keys, the margin between the two largest scores as shading (dark where the winner is clear), and
    the queries in the colours of their cells.

    Args:
        view: what `pa.inspect.view` returned.
        path: a file to write as well, .svg, .png or .pdf. It is replaced if it exists; parents are created.
        title: stands above the figure.
        ax: your own matplotlib axes to draw into.

    Returns:
        The figure, or that of `ax`.

    Raises:
        UnsupportedError: another kind of file.
        MissingExtraError: matplotlib is not installed.

    >>> import torch, partita as pa
    >>> from partita.plots import plot_plane
    >>> attention = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval()
    >>> with pa.inspect.capture(attention) as heads, torch.no_grad():
    ...     _ = attention(*[torch.randn(1, 12, 8)] * 3, need_weights=False)
    >>> figure = plot_plane(pa.inspect.view(next(iter(heads)).snapshots[0], pixels=16), title="one head")
    >>> figure.axes[0].get_title()  # figure.savefig("plane.svg") writes it
    'one head'
    """
    if path is not None:
        require_vector_or_pixels(path)
    with styled():
        if ax is None:
            figure, panels = new_figure(1, width=4.8, height=4.4)
            panel = panels[0, 0]
        else:
            figure, panel = root_figure(ax), ax
        panel.grid(visible=False)
        image = _draw(panel, view, dots=14.0)
        panel.figure.colorbar(image, ax=panel, shrink=0.8, label="margin between the two largest scores (nats)")
        panel.set_title(title, fontsize=9)
        panel.set_xlabel(f"{view.named}; {view.held:.0%} of the queries' variance")
        if path is not None:
            save(figure, path)
    return figure


def plot_heads(
    views: Mapping[tuple[str, int], PlaneView],
    path: str | os.PathLike[str] | None = None,
    *,
    notes: Mapping[tuple[str, int], str] | None = None,
) -> Figure:
    """Draw a small panel per captured head and a row per layer, as a matplotlib figure.

    Args:
        views: for each layer's name and head's number what `pa.inspect.view` returned.
        path: a file to write as well, .svg, .png or .pdf. It is replaced if it exists; parents are created.
        notes: a few words to write above the panel of a head.

    Returns:
        The figure.

    Raises:
        UnsupportedError: another kind of file.
        MissingExtraError: matplotlib is not installed.

    >>> import torch, partita as pa
    >>> from partita.plots import plot_heads
    >>> attention = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval()
    >>> with pa.inspect.capture(attention) as heads, torch.no_grad():
    ...     _ = attention(*[torch.randn(1, 12, 8)] * 3, need_weights=False)
    >>> views = {(r.layer, r.head): pa.inspect.view(r.snapshots[0], pixels=16) for r in heads}
    >>> figure = plot_heads(views, notes={next(iter(views)): "first"})
    >>> [panel.get_title() for panel in figure.axes]
    ['0  first', '1']
    """
    if path is not None:
        require_vector_or_pixels(path)
    layers = list(dict.fromkeys(layer for layer, _ in views))
    heads = sorted({head for _, head in views})
    with styled():
        from partita.plots.notebook_figure import NotebookFigure

        columns, rows = len(heads), len(layers)
        figure = NotebookFigure(figsize=(1.15 * columns + 1.3, 1.3 * rows + 0.3))
        panels = figure.subplots(rows, columns, squeeze=False)
        figure.subplots_adjust(
            left=1.25 / (1.15 * columns + 1.3),
            right=0.995,
            top=1 - 0.2 / (1.3 * rows + 0.3),
            bottom=0.01,
            wspace=0.08,
            hspace=0.16,
        )
        for row, layer in enumerate(layers):
            for column, head in enumerate(heads):
                panel = panels[row, column]
                panel.set_xticks([])
                panel.set_yticks([])
                panel.grid(visible=False)
                if (layer, head) not in views:
                    panel.set_axis_off()
                    continue
                _draw(panel, views[layer, head], dots=2.0, pixels=True)
                note = (notes or {}).get((layer, head), "")
                panel.set_title(f"{head}  {note}".strip(), fontsize=6, pad=2)
            panels[row, 0].set_ylabel(_wrapped(layer), fontsize=6, rotation=0, ha="right", va="center")
        if path is not None:
            save(figure, path)
    return figure


def _wrapped(layer: str) -> str:
    """A long module path on two lines, broken at the dot nearest to its middle."""
    dots = [k for k, c in enumerate(layer) if c == "."]
    if len(layer) <= 20 or not dots:
        return layer
    cut = min(dots, key=lambda k: abs(k - len(layer) / 2))
    return f"{layer[: cut + 1]}\n{layer[cut + 1 :]}"


def _draw(panel: Any, view: PlaneView, *, dots: float, pixels: bool = False) -> Any:
    from matplotlib.collections import PolyCollection

    (x0, y0), (x1, y1) = view.window.lo, view.window.hi
    finite = view.margins[np.isfinite(view.margins)]
    top = float(np.quantile(finite, 0.95)) if finite.size else 1.0
    shade = np.where(np.isfinite(view.margins), view.margins, top)
    image = panel.imshow(
        shade,
        extent=(x0, x1, y0, y1),
        origin="lower",
        aspect="auto",
        cmap=colour_map("weight"),
        vmin=0,
        vmax=1.6 * top or 1.0,
        alpha=0.75,
    )
    shapes = [shape for shape in view.shapes if len(shape)]
    panel.add_collection(PolyCollection(shapes, facecolors="none", edgecolors=INK, linewidths=0.3 if pixels else 0.6))
    panel.scatter(
        *view.points.T,
        s=dots,
        c=_colours(view),
        linewidths=0.0 if pixels else 0.3,
        edgecolors="white",
        rasterized=pixels or len(view.points) > _POINTS_AS_VECTORS,
        zorder=3,
    )
    panel.set_xlim(x0, x1)
    panel.set_ylim(y0, y1)
    return image


def _colours(view: PlaneView) -> list[str]:
    """A colour for each of the fullest cells, one more for the rest."""
    keys, counts = np.unique(view.cells, return_counts=True)
    fullest = keys[np.argsort(-counts, kind="stable")][: len(COLOURS) - 2].tolist()
    colour = dict(zip(fullest, [ACCENT, *COLOURS[2:-1]]))
    return [colour.get(key, SOFT) for key in view.cells.tolist()]
