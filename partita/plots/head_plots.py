"""One picture of a compiled head: what it computes, the cells behind it, and how far it is from the function."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from partita.compiler.compiled import Compiled
from partita.errors import UnsupportedError
from partita.geometry.domains import Array
from partita.heads.head import count_text
from partita.plots.colours import INK
from partita.plots.head_panels import Drawn, claim_text, draw_panel, panel_names
from partita.plots.head_views import HeadView
from partita.plots.style import loosen, new_figure, require_vector_or_pixels, root_figure, save, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["add_bar", "add_legend", "add_title", "head_words", "header", "plot_head", "tidy"]

_WIDTH, _HEIGHT = {1: 4.4, 2: 3.3}, {1: 3.3, 2: 3.75}  # inches of a panel on a line and on a plane


def plot_head(
    compiled: Compiled,
    path: str | os.PathLike[str] | None = None,
    *,
    panels: str | Sequence[str] | None = None,
    output: int = 0,
    axes: tuple[int, int] = (0, 1),
    at: Sequence[float] | Array | None = None,
    ax: Axes | Sequence[Axes] | None = None,
    size: tuple[float, float] | None = None,
    titles: bool = True,
    legend: bool = True,
) -> Figure:
    """Draw a head as a matplotlib figure: in 1-D curves, in 2-D a map, its cells and the error.

    In higher dimensions a slice is drawn. Nothing is drawn where nothing is claimed: outside the domain the picture stays empty,
    and the function is not evaluated there. A black box is evaluated at 257 points of a line or 40 × 40 of a plane, and not at all
    if neither "function" nor "error" is drawn. No window opens, and pyplot does not manage the figure.

    Args:
        compiled: the head.
        path: a file to write as well, .svg, .png or .pdf. It is replaced if it exists; parents are created.
        panels: one or several of "function", "head", "cells", "weights", "error". By default "head" and "error" in 1-D, "head",
            "cells" and "error" in 2-D.
        output: which scalar output, counted from 0.
        axes: the two coordinates that vary when there are more than two, counted from 0.
        at: a point of the domain through which the slice goes, `(m,)`; the middle of the domain's box if None.
        ax: your own matplotlib axes to draw into, one for each panel; with one and no panels, "head" is drawn.
        size: width and height of the figure in inches.
        titles: write titles.
        legend: explain marks and colours: a legend, and words beside the colour bars.

    Returns:
        The figure, or that of `ax`. Notebooks display it; `figure.savefig("head.svg")` writes it.

    Raises:
        UnsupportedError: another kind of file; a panel, output or coordinate that does not exist; a slice that misses the domain; a
            head that was changed after it was certified.
        ShapeError: `at` has another length.
        MissingExtraError: matplotlib is not installed.

    >>> import partita as pa
    >>> from partita.plots import plot_head
    >>> c = pa.compile("abs(x)", pa.Box([-1], [1]), tolerance=0.1)
    >>> figure = plot_head(c)  # plot_head(c, "head.svg") also writes a file
    >>> [panel.get_title() for panel in figure.axes]
    ['head and function', 'distance from the function']
    """
    if path is not None:
        require_vector_or_pixels(path)
    view = HeadView.of(compiled, output=output, axes=axes, at=at)
    given = None if ax is None else list(np.ravel(np.asarray(ax, dtype=object)))
    names = ("head",) if given is not None and panels is None and len(given) == 1 else panel_names(view, panels)
    if given is not None and len(given) != len(names):
        raise UnsupportedError(
            f"ax has {len(given)} axes for {len(names)} panels ({', '.join(names)}); expected one for each",
            "Pass panels= with one name for each of your axes.",
        )
    with styled():
        if given is None:
            columns = len(names) if len(names) <= 3 else 2 if len(names) == 4 else 3
            figure, grid = new_figure(
                columns,
                -(-len(names) // columns),
                width=_WIDTH[view.dimension],
                height=_HEIGHT[view.dimension],
                size=size,
            )
            places = list(grid.ravel()[: len(names)])
            for spare in grid.ravel()[len(names) :]:
                spare.remove()
        else:
            figure, places = root_figure(given[0]), given
            if size is not None:
                raise UnsupportedError(
                    "size cannot be combined with ax, because ax already belongs to a figure", "Leave size= out."
                )
        drawn = [draw_panel(name, place, view) for name, place in zip(names, places)]
        for panel, found in zip(places, drawn):
            if titles:
                add_title(panel, found)
            if found.mappable is not None:
                add_bar(panel, found, words=legend, own=given is None)
            if legend and given is not None and found.marks:
                panel.legend(handles=list(found.marks), loc="best", fontsize=8)
        if given is None:
            for first in range(0, len(places), columns):
                tidy(places[first : first + columns])
            if titles:
                header(figure, [*head_words(compiled, output), claim_text(compiled.certificate)])
            if legend:
                add_legend(figure, drawn)
            figure.draw_without_rendering()  # the layout of panels with a fixed aspect is final the second time
        if path is not None:
            save(figure, path)
    return figure


def head_words(compiled: Compiled, output: int) -> tuple[str, str]:
    """The function and the number of keys."""
    label, count = compiled.target.label, compiled.num_keys
    shown = label if len(label) <= 60 else label[:59] + "…"
    which = "" if compiled.head.num_outputs == 1 else f", output {output}"
    return shown + which, f"{count_text(count)} key{'' if count == 1 else 's'}"


def header(figure: Figure, parts: Sequence[str]) -> None:
    """A line above everything; several where the figure is too narrow for one."""
    room = 12.5 * figure.get_figwidth()  # characters, at this size
    lines = [parts[0]]
    for part in parts[1:]:
        longer = f"{lines[-1]}   ·   {part}"
        lines = [*lines[:-1], longer] if len(longer) <= room else [*lines, part]
    figure.suptitle("\n".join(lines), fontsize=10.5, color=INK)
    loosen(figure, 0.055)


def add_title(panel: Axes, drawn: Drawn) -> None:
    """The panel's title, broken before what stands in brackets where it would be long."""
    text = drawn.title if len(drawn.title) <= 30 else drawn.title.replace(" (", "\n(", 1).replace(" at ", "\nat ", 1)
    panel.set_title(text, fontsize=9, color=INK)


def add_bar(panel: Axes, drawn: Drawn, *, words: bool, own: bool) -> None:
    """A colour bar: as tall as the panel in figures of ours; in the caller's it takes room from the axes, as matplotlib does."""
    place: dict[str, Any] = {"cax": panel.inset_axes((1.03, 0.0, 0.045, 1.0))} if own else {"ax": panel}
    bar = panel.figure.colorbar(drawn.mappable, label=drawn.words if words else "", **place)
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=8)


def add_legend(figure: Figure, drawn: Sequence[Drawn]) -> None:
    """One legend for all panels, below them: each label once."""
    marks = {mark.get_label(): mark for found in reversed(drawn) for mark in reversed(found.marks)}
    if marks:
        handles = list(reversed(marks.values()))
        letters = sum(len(str(mark.get_label())) + 8 for mark in handles)
        rows = -(-letters // max(1, int(14 * figure.get_figwidth())))
        figure.legend(handles=handles, loc="outside lower center", ncols=max(1, -(-len(handles) // rows)), fontsize=8.5)


def tidy(panels: Sequence[Axes]) -> None:
    """Few ticks, and those of the vertical axis only once where neighbours share it."""
    first, name = panels[0], panels[0].get_ylabel()
    for panel in panels:
        panel.locator_params(nbins=5)
        if panel is not first and panel.get_ylabel() == name:
            panel.set_ylabel("")
            if panel.get_ylim() == first.get_ylim():
                panel.tick_params(labelleft=False)
