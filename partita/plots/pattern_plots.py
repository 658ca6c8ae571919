"""Plot of an attention pattern: the weights of queries on keys, with the tokens along the sides."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np

from partita.errors import ShapeError, UnsupportedError
from partita.plots.colours import colour_map
from partita.plots.style import new_figure, require_vector_or_pixels, root_figure, save, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["plot_pattern"]

_LABELLED = 64  # most tokens shown along a side; with more, positions are shown instead
_LETTERS = 16  # most letters of a token


def plot_pattern(
    pattern: Any, path: str | os.PathLike[str] | None = None, *, title: str = "", ax: Axes | None = None
) -> Figure:
    """Draw an attention pattern as a heat map, as a matplotlib figure: a row per query, a column per key.

    The colours follow √w, so that small weights can be told from zero. Up to 64 tokens are shown along a side; with more, the
    axes show positions.

    Args:
        pattern: what `pa.inspect.pattern` returned: `weights (queries, keys)`, `query_labels` and `key_labels`.
        path: a file to write as well, .svg, .png or .pdf. It is replaced if it exists; parents are created.
        title: title above the figure.
        ax: your own matplotlib axes to draw into.

    Returns:
        The figure, or that of `ax`.

    Raises:
        UnsupportedError: the file type is not supported, or pattern is not a pattern.
        ShapeError: the number of labels differs from the number of queries or keys.
        MissingExtraError: matplotlib is not installed.

    >>> import numpy as np
    >>> from types import SimpleNamespace
    >>> from partita.plots import plot_pattern
    >>> pattern = SimpleNamespace(weights=np.eye(2), query_labels=("the", "cat"), key_labels=("the", "cat"))
    >>> figure = plot_pattern(pattern)
    >>> [label.get_text() for label in figure.axes[0].get_xticklabels()]
    ['the', 'cat']
    """
    if path is not None:
        require_vector_or_pixels(path)
    lacks = [name for name in ("weights", "query_labels", "key_labels") if not hasattr(pattern, name)]
    if lacks:
        raise UnsupportedError(
            f"pattern is {type(pattern).__name__} without {', '.join(lacks)}; expected what pa.inspect.pattern returned."
        )
    weights = np.asarray(pattern.weights, dtype=np.float64)
    sides = (tuple(map(str, pattern.query_labels)), tuple(map(str, pattern.key_labels)))
    if weights.shape != (len(sides[0]), len(sides[1])):
        raise ShapeError(
            f"the pattern has weights {weights.shape} with {len(sides[0])} query labels and {len(sides[1])} key labels; "
            "expected a label per row and per column."
        )
    with styled():
        from matplotlib.colors import PowerNorm

        if ax is None:
            figure, panels = new_figure(1, size=_size(weights.shape))
            panel = panels[0, 0]
        else:
            figure, panel = root_figure(ax), ax
        panel.grid(visible=False)
        image = panel.imshow(
            weights, cmap=colour_map("weight"), norm=PowerNorm(0.5, 0.0, 1.0), aspect="auto", interpolation="nearest"
        )
        for axis, labels in ((panel.yaxis, sides[0]), (panel.xaxis, sides[1])):
            if len(labels) <= _LABELLED:
                axis.set_ticks(range(len(labels)), [_short(label) for label in labels])
                axis.set_tick_params(length=0, labelsize=8 if len(labels) <= 24 else 6)
        if weights.shape[1] <= _LABELLED:
            panel.tick_params(axis="x", labelrotation=90)
        panel.set_xlabel("key")
        panel.set_ylabel("query")
        panel.set_title(title, fontsize=9)
        panel.figure.colorbar(image, ax=panel, shrink=0.8, label="weight", ticks=[0, 0.01, 0.1, 0.25, 0.5, 1])
        if path is not None:
            save(figure, path)
    return figure


def _size(shape: tuple[int, ...]) -> tuple[float, float]:
    """Size in inches: room for every token that is shown, at most a page."""
    height, width = (min(9.0, max(2.6, 0.17 * count)) for count in shape)
    return width + 2.0, height + 1.1


def _short(label: str) -> str:
    """One line without mathtext, cut where it is long."""
    flat = label.replace("\n", "↵").replace("\t", "⇥").replace("$", r"\$")
    return flat if len(flat) <= _LETTERS else flat[: _LETTERS - 1] + "…"
