"""Heads during training: figures over steps, one line per head, the loss beside them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from partita.arithmetic.notebook_cards import counted
from partita.errors import UnsupportedError
from partita.geometry.domains import Array
from partita.inspection.training_watch import TrainingWatch
from partita.plots.colours import COLOURS, INK, MUTED, colour_at
from partita.plots.head_plots import header
from partita.plots.style import clean, mark, new_figure, require_vector_or_pixels, save, series, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["plot_training"]

_ONE_BY_ONE = len(COLOURS)  # up to this many heads have a colour each; with more, each layer has one
_LAYER_BY_LAYER = 3  # up to this many layers have a line of random heads each
_DOTS: Any = (0, (1, 1.6))
_WIDE = 100.0  # least ratio of largest to smallest number for a logarithmic axis


def plot_training(
    watch: TrainingWatch,
    path: str | os.PathLike[str] | None = None,
    *,
    figures: Sequence[str] = ("cells", "margin", "inverse_temperature"),
    size: tuple[float, float] | None = None,
    titles: bool = True,
    legend: bool = True,
) -> Figure:
    """Draw how the heads of a model changed while it was trained: a panel per figure, a line per head, and the loss.

    Dotted lines are means over random heads of the same shapes. Up to three layers have a line each, in the colour of the layer's
    first head; with more layers there is one line for all. Up to eight heads have a colour each; with more, each layer has one,
    from the first (dark) to the last (light). Numbers over a wide range are drawn on a logarithmic axis.

    Args:
        watch: the `TrainingWatch` that recorded the training.
        path: a file to write as well, .svg, .png or .pdf. It is replaced if it exists; parents are created.
        figures: fields of `Figures` or of `Roles`, such as `induction`.
        size: width and height of the figure in inches.
        titles: write titles.
        legend: explain the lines.

    Returns:
        The figure.

    Raises:
        UnsupportedError: watch is not a watch, nothing was recorded, the file type is not supported, or a figure does not exist.
        MissingExtraError: matplotlib is not installed.

    >>> import torch, partita as pa
    >>> from partita.plots import plot_training
    >>> model = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    >>> watch = pa.inspect.TrainingWatch(model, torch.randn(2, 5, 8), every=1)
    >>> for step in range(3):
    ...     _ = watch(step, loss=1 / (1 + step))
    >>> [panel.get_title() for panel in plot_training(watch).axes]
    ['loss', 'cells', 'margin', 'inverse temperature']
    """
    if path is not None:
        require_vector_or_pixels(path)
    if not isinstance(watch, TrainingWatch):
        raise UnsupportedError(f"watch is {type(watch).__name__}; expected a pa.inspect.TrainingWatch.")
    if not watch.heads:
        raise UnsupportedError("nothing was recorded; call watch(step) in the training loop first.")
    if not figures:
        raise UnsupportedError("figures is empty; name at least one field of Figures or of Roles.")
    drawn = {name: [watch.series(*head, name) for head in watch.heads] for name in figures}
    null = {name: [watch.series(*head, name, null=True) for head in watch.heads] for name in figures}
    losses = np.array(watch.losses)
    panels = [*(["loss"] if np.isfinite(losses).any() else []), *figures]
    with styled():
        columns = len(panels) if len(panels) <= 3 else 2
        rows = -(-len(panels) // columns)
        figure, grid = new_figure(columns, rows, width=3.9, height=2.45, size=size)
        for spare in grid.ravel()[len(panels) :]:
            spare.remove()
        for name, panel in zip(panels, grid.ravel()):
            if name == "loss":
                panel.plot(watch.steps, losses, color=INK, linewidth=1.6)
                _scale(panel, [losses])
            else:
                _draw(panel, watch, drawn[name], null[name])
            clean(panel, name.replace("_", " ") if titles else "", x="step")
            panel.margins(x=0.02)
        for panel in grid[:-1].ravel():
            panel.set_xlabel("")
        if titles:
            read = f"{counted(len(watch.steps), 'step')} read"
            header(figure, [f"{counted(len(watch.heads), 'head')} during training", read])
        if legend:
            _legend(figure, watch)
        if path is not None:
            save(figure, path)
    return figure


def _draw(panel: Any, watch: TrainingWatch, lines: list[Array], null: list[Array]) -> None:
    for number, ((layer, head), line) in enumerate(zip(watch.heads, lines)):
        series(panel, watch.steps, line, number, f"{layer}:{head}", **_look(watch, number))
    for name, color, members in _random_heads(watch):
        known = np.array([null[k] for k in members], dtype=float)
        some = np.isfinite(known).any(axis=0)
        mean = np.full(known.shape[1], np.nan)
        mean[some] = np.nanmean(np.where(np.isfinite(known), known, np.nan)[:, some], axis=0)
        panel.plot(watch.steps, mean, color=color, linestyle=_DOTS, linewidth=1.4, zorder=1.5, label=f"_{name}")
    _scale(panel, lines)


def _random_heads(watch: TrainingWatch) -> list[tuple[str, str, list[int]]]:
    """Name, colour and heads of each dotted line. Layers differ in scale, so a mean over all would be close to none of them."""
    layers = list(dict.fromkeys(layer for layer, _ in watch.heads))
    if not 1 < len(layers) <= _LAYER_BY_LAYER:
        return [("random heads, mean", MUTED, list(range(len(watch.heads))))]
    members = {layer: [k for k, (name, _) in enumerate(watch.heads) if name == layer] for layer in layers}
    colour = {layer: {**mark(ks[0]), **_look(watch, ks[0])}["color"] for layer, ks in members.items()}
    return [(f"random heads, {layer}", colour[layer], ks) for layer, ks in members.items()]


def _look(watch: TrainingWatch, number: int) -> dict[str, Any]:
    """Colour, width and marks of a head's line."""
    if len(watch.heads) <= _ONE_BY_ONE:
        # solid; markers distinguish heads without colour, and the random heads' line is dotted
        return {"markersize": 3.2, "linestyle": "-"}
    layers = list(dict.fromkeys(layer for layer, _ in watch.heads))
    at = layers.index(watch.heads[number][0]) / max(len(layers) - 1, 1)
    colour = colour_at("value", 0.1 + 0.68 * at)
    return {"color": colour, "marker": "", "linestyle": "-", "linewidth": 0.9, "alpha": 0.85}


def _scale(panel: Any, lines: Sequence[Array]) -> None:
    numbers = np.concatenate([np.asarray(line, dtype=float) for line in lines])
    numbers = numbers[np.isfinite(numbers)]
    if len(numbers) and numbers.min() > 0 and numbers.max() > _WIDE * numbers.min():
        panel.set_yscale("log")
        panel.yaxis.set_minor_formatter("")


def _legend(figure: Figure, watch: TrainingWatch) -> None:
    from matplotlib.lines import Line2D

    layers = list(dict.fromkeys(layer for layer, _ in watch.heads))
    if len(watch.heads) <= _ONE_BY_ONE:
        marks = [
            Line2D([], [], **{**mark(k), **_look(watch, k)}, label=f"{layer}:{head}")
            for k, (layer, head) in enumerate(watch.heads)
        ]
    else:
        shown = layers if len(layers) <= 8 else [layers[0], layers[len(layers) // 2], layers[-1]]
        firsts = {layer: next(k for k, (name, _) in enumerate(watch.heads) if name == layer) for layer in shown}
        marks = [Line2D([], [], **{**_look(watch, k), "linewidth": 2}, label=layer) for layer, k in firsts.items()]
    for name, color, _ in _random_heads(watch):
        marks.append(Line2D([], [], color=color, linestyle=_DOTS, linewidth=1.4, label=name))
    letters = sum(len(str(m.get_label())) + 8 for m in marks)
    rows = -(-letters // max(1, int(14 * figure.get_figwidth())))
    figure.legend(handles=marks, loc="outside lower center", ncols=max(1, -(-len(marks) // rows)), fontsize=8.5)
