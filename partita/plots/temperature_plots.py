"""The same keys and values at other temperatures: side by side, and as an animation.

Only the compiled temperature is certified. What is drawn at the others is computed, not claimed.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from partita.arithmetic.arguments import is_number
from partita.compiler.compiled import Compiled
from partita.errors import UnsupportedError
from partita.geometry.domains import Array
from partita.plots.colours import INK
from partita.plots.head_panels import draw_panel, limits_of, panel_names
from partita.plots.head_plots import add_bar, add_legend, add_title, head_words, header, tidy
from partita.plots.head_views import HeadView
from partita.plots.style import new_figure, require_vector_or_pixels, save, styled
from partita.storage.files import whole_file

if TYPE_CHECKING:
    from matplotlib.animation import FuncAnimation
    from matplotlib.figure import Figure

__all__ = ["animate_temperature", "plot_temperatures"]

_DEFAULT = {1: ("head", "weights"), 2: ("head", "error")}
_WIDTH, _HEIGHT = {1: 3.5, 2: 3.0}, {1: 2.5, 2: 2.9}  # inches of a panel on a line and on a plane
_LEAST, _MOST = 2, 500  # frames
_PIXELS = 200  # across a plane: many are drawn


def plot_temperatures(
    compiled: Compiled,
    sharpness: Sequence[float] = (1.0, 4.0, 16.0),
    path: str | os.PathLike[str] | None = None,
    *,
    panels: str | Sequence[str] | None = None,
    output: int = 0,
    axes: tuple[int, int] = (0, 1),
    at: Sequence[float] | Array | None = None,
    size: tuple[float, float] | None = None,
    titles: bool = True,
    legend: bool = True,
) -> Figure:
    """Draw the same cells and values at several temperatures, a column for each and a row for each panel.

    A row has one scale, so that its panels can be compared. The cells do not depend on the temperature: a low sharpness blends
    neighbouring cells, a high one selects one of them. The sharpness is κ = R h², R the inverse temperature and h the spacing of
    the centers on each axis; where centers are scattered, h is the median distance to the nearest other center. The errors that are
    drawn are computed, not proved; `c.certificate` is about the compiled temperature.

    Args:
        compiled: the head.
        sharpness: κ of each column, > 0.
        path: a file to write as well, .svg, .png or .pdf. It is replaced if it exists; parents are created.
        panels: the rows, any of "function", "head", "cells", "weights", "error". By default "head" and "weights" in 1-D, "head" and
            "error" in 2-D.
        output: which scalar output, counted from 0.
        axes: the two coordinates that vary when there are more than two, counted from 0.
        at: a point of the domain through which the slice goes, `(m,)`; the middle of the domain's box if None.
        size: width and height of the figure in inches.
        titles: write titles.
        legend: explain marks and colours.

    Returns:
        The figure.

    Raises:
        UnsupportedError: another kind of file, a sharpness that is not a finite number > 0, or what `plot_head` refuses.
        ShapeError: `at` has another length.
        MissingExtraError: matplotlib is not installed.

    >>> import partita as pa
    >>> from partita.plots import plot_temperatures
    >>> c = pa.compile("abs(x)", pa.Box([-1], [1]), tolerance=0.1, method="hard")
    >>> figure = plot_temperatures(c, sharpness=(1, 4, 16))
    >>> [panel.get_title() for panel in figure.axes][:3]
    ['κ = 1', 'κ = 4', 'κ = 16']
    """
    if path is not None:
        require_vector_or_pixels(path)
    view = HeadView.of(compiled, output=output, axes=axes, at=at, pixels=_PIXELS)
    kappas = list(np.ravel(np.asarray(sharpness, dtype=object)))
    if not kappas:
        raise UnsupportedError("sharpness is empty; expected at least one κ > 0.")
    views = [view.at_sharpness(kappa) for kappa in kappas]
    rows = _rows(view, panels)
    with styled():
        width, height = _WIDTH[view.dimension], _HEIGHT[view.dimension]
        figure, grid = new_figure(len(views), len(rows), width=width, height=height, size=size)
        everything = []
        for name, places in zip(rows, grid):
            limits = limits_of(name, views)
            drawn = [draw_panel(name, p, v, limits=limits, edges=name == "head") for p, v in zip(places, views)]
            everything += drawn
            if drawn[-1].mappable is not None:
                add_bar(places[-1], drawn[-1], words=legend, own=True)
            elif titles and view.dimension == 1:
                places[0].set_ylabel(places[0].get_ylabel() or drawn[0].title)
            tidy(list(places))
        for panel in grid[:-1].ravel():
            panel.set_xlabel("")
        if titles:
            for panel, other in zip(grid[0], views):
                panel.set_title(_sharpness_text(other), fontsize=10, color=INK)
            header(figure, [*head_words(compiled, output), f"the same keys and values at {_counted(len(views))}"])
        if legend:
            add_legend(figure, everything)
        figure.draw_without_rendering()  # as in plot_head
        if path is not None:
            save(figure, path)
    return figure


def animate_temperature(
    compiled: Compiled,
    path: str | os.PathLike[str] | None = None,
    *,
    sharpness: Sequence[float] = (0.25, 32.0),
    frames: int = 24,
    panels: str | Sequence[str] | None = None,
    output: int = 0,
    axes: tuple[int, int] = (0, 1),
    at: Sequence[float] | Array | None = None,
    size: tuple[float, float] | None = None,
    titles: bool = True,
    legend: bool = True,
    fps: float = 10.0,
) -> FuncAnimation:
    """Animate a head over the temperature: from the first sharpness to the second in equal ratios, and back.

    Keys, cells and values stay; only the temperature changes. The scales are the same in all frames. As in
    `plot_temperatures`, errors are computed, not proved.

    Args:
        compiled: the head.
        path: a .gif file to write as well (pillow writes it; no other program is needed). It is replaced if it exists.
        sharpness: the first and the last κ, > 0.
        frames: temperatures from the first to the last, 2 to 500.
        panels: side by side, any of "function", "head", "cells", "weights", "error". By default "head" and "weights" in 1-D, "head"
            and "error" in 2-D.
        output: which scalar output, counted from 0.
        axes: the two coordinates that vary when there are more than two, counted from 0.
        at: a point of the domain through which the slice goes, `(m,)`; the middle of the domain's box if None.
        size: width and height of the figure in inches.
        titles: write titles.
        legend: explain marks and colours.
        fps: frames per second.

    Returns:
        The animation. Keep a reference to it. `a.save("head.gif", writer="pillow")` writes it; in notebooks,
        `IPython.display.HTML(a.to_jshtml())` shows it.

    Raises:
        UnsupportedError: another kind of file, a sharpness or a number of frames out of range, or what `plot_head` refuses.
        ShapeError: `at` has another length.
        MissingExtraError: matplotlib is not installed.

    >>> import partita as pa, pathlib, tempfile
    >>> from partita.plots import animate_temperature
    >>> c = pa.compile("abs(x)", pa.Box([-1], [1]), tolerance=0.1, method="hard")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     animation = animate_temperature(c, f"{folder}/head.gif", frames=2)
    ...     pathlib.Path(f"{folder}/head.gif").read_bytes()[:3]
    b'GIF'
    """
    if path is not None and Path(path).suffix.lower() != ".gif":
        raise UnsupportedError(f"{path}: expected a file name that ends in .gif.")
    if isinstance(frames, bool) or not isinstance(frames, int) or not _LEAST <= frames <= _MOST:
        raise UnsupportedError(f"frames is {frames!r}; expected a whole number from {_LEAST} to {_MOST}.")
    if not (is_number(fps) and 0 < fps < np.inf):
        raise UnsupportedError(f"fps is {fps!r}; expected a finite number > 0.")
    view = HeadView.of(compiled, output=output, axes=axes, at=at, pixels=_PIXELS)
    ends = list(np.ravel(np.asarray(sharpness, dtype=object)))
    if len(ends) != 2:
        raise UnsupportedError(f"sharpness is {sharpness!r}; expected two numbers, the first and the last κ.")
    for kappa in ends:
        view.at_sharpness(kappa)  # checked before anything is drawn
    first_kappa, last_kappa = map(float, ends)
    kappas = np.geomspace(first_kappa, last_kappa, frames)
    names = _rows(view, panels)
    with styled():
        from matplotlib.animation import FuncAnimation, PillowWriter

        dimension = view.dimension
        figure, grid = new_figure(
            len(names), width=1.25 * _WIDTH[dimension], height=1.25 * _HEIGHT[dimension], size=size
        )
        few = [view.at_sharpness(k) for k in np.geomspace(first_kappa, last_kappa, 5)]
        places, first = list(grid[0]), view.at_sharpness(kappas[0])
        drawn = [
            draw_panel(name, panel, first, limits=limits_of(name, few), edges=name == "head")
            for name, panel in zip(names, places)
        ]
        for panel, found in zip(places, drawn):
            if found.mappable is not None:
                add_bar(panel, found, words=legend, own=True)
            if titles:
                add_title(panel, found)
        tidy(places)
        heading = figure.suptitle(_sharpness_text(first), fontsize=11, color=INK)
        heading.set_visible(titles)
        if legend:
            add_legend(figure, drawn)
        figure.draw_without_rendering()
        figure.set_layout_engine("none")  # placed once: panels do not move between frames

        def show(kappa: float) -> list[object]:
            other = view.at_sharpness(kappa)
            for found in drawn:
                found.refresh(other)
            heading.set_text(_sharpness_text(other))
            return []

        steps = [*kappas.tolist(), *kappas[-2:0:-1].tolist()]
        animation = FuncAnimation(figure, show, frames=steps, interval=1000 / fps, cache_frame_data=False)  # type: ignore[arg-type]
        if path is not None:
            with whole_file(path) as waiting:
                animation.save(waiting, writer=PillowWriter(fps=fps), dpi=100)  # type: ignore[arg-type]
    return animation


def _rows(view: HeadView, panels: str | Sequence[str] | None) -> tuple[str, ...]:
    if panels is not None:
        return panel_names(view, panels)
    return tuple(n for n in _DEFAULT[view.dimension] if view.has_function or n != "error")


def _sharpness_text(view: HeadView) -> str:
    """κ of a view to three digits, and whether it is that of the compiled head."""
    kappa = view.sharpness or view.own_sharpness
    own = abs(kappa / view.own_sharpness - 1) < 1e-6 if view.own_sharpness else False
    return f"κ = {kappa:.3g}" + (", as compiled" if own else "")


def _counted(temperatures: int) -> str:
    words = {1: "one temperature", 2: "two temperatures", 3: "three temperatures"}
    return words.get(temperatures, f"{temperatures} temperatures")
