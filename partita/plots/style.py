"""One style for every figure: vector output, colours that stay apart for colour-blind readers and in grey, reproducible bytes.

Each series has a colour (Okabe and Ito), a marker and a dash of its own, so that no reader depends on colour alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from partita.errors import MissingExtraError, UnsupportedError
from partita.plots.colours import BACKGROUND, COLOURS, INK, RULE, SOFT
from partita.storage.files import whole_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "clean",
    "legend_below",
    "loosen",
    "mark",
    "new_figure",
    "require_vector_or_pixels",
    "root_figure",
    "save",
    "series",
    "styled",
    "ticks",
]

_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_DASHES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)), "-")
_STYLE: dict[Any, Any] = {
    "font.size": 9,
    "figure.facecolor": BACKGROUND,
    "axes.facecolor": BACKGROUND,
    "axes.edgecolor": SOFT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": RULE,
    "grid.linewidth": 0.5,
    "axes.axisbelow": True,
    "text.color": INK,
    "axes.labelcolor": INK,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "xtick.major.size": 2,
    "ytick.major.size": 2,
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "legend.handlelength": 2.6,
    "lines.linewidth": 1.3,
    "lines.markersize": 4,
    "svg.hashsalt": "partita",
    "svg.fonttype": "path",
    "path.simplify_threshold": 0.5,
}


@contextmanager
def styled() -> Iterator[None]:
    """matplotlib with this style, inside the block only; or, as a decorator, inside the function."""
    try:
        from matplotlib import rc_context
    except ImportError as error:
        raise MissingExtraError.of("plots need", "plot") from error
    with rc_context(_STYLE):
        yield


@styled()
def new_figure(
    columns: int,
    rows: int = 1,
    *,
    width: float = 3.7,
    height: float = 3.0,
    size: tuple[float, float] | None = None,
) -> tuple[Figure, np.ndarray]:
    """A figure and its panels `(rows, columns)`. `width` and `height` are per panel, `size` is that of the figure instead."""
    from partita.plots.notebook_figure import NotebookFigure

    figure = NotebookFigure(figsize=size or (width * columns, height * rows), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def loosen(figure: Figure, inches: float = 0.08) -> None:
    """Room between the rows of a figure of ours, so that titles keep clear of what is above them."""
    engine: Any = figure.get_layout_engine()
    if engine is not None:
        engine.set(h_pad=inches, hspace=0.0)


def root_figure(panel: Axes) -> Figure:
    """The figure that holds the axes, also where they are in a subfigure of it."""
    figure: Any = panel.figure
    while getattr(figure, "figure", figure) is not figure:
        figure = figure.figure
    return cast("Figure", figure)


def mark(number: int) -> dict[str, Any]:
    """Colour, marker and dash of a series."""
    k = number % len(COLOURS)
    return {"color": COLOURS[k], "marker": _MARKERS[k], "linestyle": _DASHES[k]}


@styled()
def series(
    panel: Any,
    x: Any,
    y: Any,
    number: int,
    label: str = "",
    *,
    spread: Any = None,
    every: int | None = None,
    **more: Any,
) -> None:
    """A line with its marks; with `spread` a band of ± that much around it. `every`: draw only every n-th marker."""
    look = {**mark(number), **more}
    x, y = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    if every is None:
        every = max(1, len(x) // 14)
    panel.plot(x, y, label=label or None, markevery=every, **look)
    if spread is not None:
        panel.fill_between(x, y - spread, y + spread, color=look["color"], alpha=0.16, linewidth=0)


@styled()
def clean(panel: Any, title: str = "", *, x: str = "", y: str = "", legend: bool | str = False) -> None:
    """Title, axis labels, and a legend (a place, or True for wherever there is room)."""
    panel.set_title(title, fontsize=9, color=INK)
    panel.set_xlabel(x)
    panel.set_ylabel(y)
    if legend:
        panel.legend(loc="best" if legend is True else legend)


@styled()
def legend_below(panel: Any, columns: int = 1) -> None:
    """A legend under the panel's axis label, where it covers nothing."""
    from matplotlib.transforms import ScaledTranslation

    below = panel.transAxes + ScaledTranslation(0, -34 / 72, panel.figure.dpi_scale_trans)  # under ticks and label
    panel.legend(loc="upper center", bbox_to_anchor=(0.5, 0.0), bbox_transform=below, ncols=columns, borderaxespad=0.2)


def ticks(panel: Any, values: Any, *, axis: str = "x") -> None:
    """These numbers as tick labels of a logarithmic axis, and no others."""
    from matplotlib.ticker import NullFormatter

    chosen = panel.xaxis if axis == "x" else panel.yaxis
    chosen.set_ticks(list(values), [f"{v:g}" for v in values])
    chosen.set_minor_formatter(NullFormatter())


def require_vector_or_pixels(path: str | os.PathLike[str]) -> Path:
    """The path, or an error that lists the file types a figure may have."""
    place = Path(path)
    if place.suffix.lower() not in (".svg", ".png", ".pdf"):
        raise UnsupportedError(f"{path}: expected a file name that ends in .svg, .png or .pdf.")
    return place


def save(figure: Figure, path: str | os.PathLike[str], *, dpi: int = 130) -> Path:
    """Write .svg, .png or .pdf, whole or not at all. `dpi`: of pixels, also of those inside .svg and .pdf."""
    place = require_vector_or_pixels(path)
    metadata = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(place.suffix.lower())
    with whole_file(place) as waiting:
        figure.savefig(waiting, dpi=dpi, metadata=metadata)
    return place
