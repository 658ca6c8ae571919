"""Pictures of the paper's layers: every matrix with its blocks, and the attention beside the indicator it approximates."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from partita.compiler.compiled import Compiled
from partita.geometry.domains import Array
from partita.plots.layer_matrices import Block, LayersAt, Matrix, layers_at
from partita.plots.style import ACCENT, INK, SOFT, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure

__all__ = ["attention_figure", "draw_flow", "layers_figure", "matrix_figure"]

_ENTRY, _LEAST = 0.17, 0.30  # inches: an entry, and a block at least
_ALONE, _AMONG = (
    (6.4, 4.2),
    (3.9, 2.3),
)  # inches: the most that a matrix takes across and down, alone and on a page of many
_PIXELS = 110  # per inch: more entries than that are drawn as their largest
_LEFT, _TOP, _RIGHT, _BOTTOM = 0.62, 0.62, 0.75, 0.12  # inches around a matrix: sizes of blocks, title, colour bar


def layers_figure(
    compiled: Compiled,
    *,
    form: str = "log",
    at: Sequence[float] | Array | None = None,
    dtype: torch.dtype | None = None,
    tolerance: float | None = None,
) -> Figure:
    """Every matrix of a head in the paper's form on one page, as a matplotlib figure.

    Zeros are white, negative numbers blue, positive ones orange, darker for larger ones (by the square root of their size). Large
    matrices are coarsened: a pixel shows the largest of its entries, and the title says how many that are.

    Args:
        compiled: the head.
        form: "log" (the paper's) or "indexed" (ours).
        at: the input, flat, `(m,)`; three tenths of the way along every axis if None.
        dtype, tolerance: as in `Compiled.layers`.

    Raises:
        SizeError: the matrices have more than 2²⁴ numbers.
        OutsideDomainError: the input lies outside the domain.
        ToleranceError: the error bound of the layers exceeds the tolerance.

    >>> import partita as pa
    >>> from partita.plots import layers_figure
    >>> c = pa.compile("2*x", pa.Box([0], [1]), tolerance=0.15, method="hard")
    >>> figure = layers_figure(c, form="log", at=[0.4])  # figure.savefig("layers.svg")
    >>> figure.texts[0].get_text()
    'log form, 14 columns, error ≤ 0.142857 in Linf, at (0.4)'
    """
    found = layers_at(compiled, compiled.layers(form, dtype=dtype, tolerance=tolerance), at)
    with styled():
        return draw_flow(found, found.matrices)


def matrix_figure(matrix: Matrix) -> Figure:
    """One matrix with its blocks."""
    with styled():
        return _placed([_Panel(matrix)], width=0.0, title="")


def attention_figure(found: LayersAt) -> Figure:
    """The columns of the attention matrix that W_O keeps, the indicator that they approximate, and the mass on each cell."""
    shown = {m.file: m for m in found.matrices}
    limit = shown["indicator"]
    kept = Matrix(
        limit.symbol.replace(r"\lim_{R\to\infty}\mathrm{softmax}", r"\mathrm{softmax}(K^\top Q)"),
        "softmax",
        "",
        shown["softmax"].place,
        "",
        found.weights,
        limit.rows,
        limit.columns,
        tuple(row[:1] for row in shown["softmax"].names),
    )
    scale = float(np.abs(limit.values).max())
    with styled():
        return _placed([_Panel(m, scale=scale) for m in (kept, limit)] + [_Mass(found)], width=11.0, title="")


def draw_flow(found: LayersAt, matrices: Sequence[Matrix]) -> Figure:
    """These matrices in lines, as words are set, under one title."""
    network = found.network
    at = ", ".join(f"{x:.4g}" for x in found.at)
    bound = (
        f"error ≤ {network.error_bound:.6g} in L{network.norm}" if network.error_bound < math.inf else "no proved error"
    )
    title = f"{network.form} form, {network.num_keys:,} columns, {bound}, at ({at})"
    with styled():
        return _placed([*(_Panel(m, _AMONG) for m in matrices), _Mass(found)], width=11.0, title=title)


class _Mass:
    """How much weight the first query puts on each cell, and the indicator: 1 on the cell that holds the input."""

    size = (3.6, 1.9)

    def __init__(self, found: LayersAt) -> None:
        self.found = found

    def draw(self, axes: Axes) -> None:
        mass, cell = self.found.mass, self.found.cell
        axes.plot([cell, cell], [0, 1], color=SOFT, lw=5, solid_capstyle="butt", label="indicator", zorder=1)
        kept = np.flatnonzero(mass > 1e-4)
        axes.vlines(kept, 0, mass[kept], color=ACCENT, lw=1.8, zorder=2, label="attention")
        axes.set_xlim(-0.5 - 0.02 * len(mass), len(mass) - 0.5 + 0.02 * len(mass))
        axes.set_ylim(0, 1.08)
        axes.set_xlabel("cell j", fontsize=7, labelpad=1)
        axes.tick_params(labelsize=6, pad=1)
        axes.set_title(rf"mass on each cell; the input lies in cell {cell}", fontsize=8, loc="left", color=INK)
        axes.legend(fontsize=6, loc="upper right")


@dataclass(frozen=True, eq=False)
class _Panel:
    """A matrix in inches."""

    matrix: Matrix
    most: tuple[float, float] = _ALONE
    scale: float | None = None  # the number that the darkest colour stands for, if not the largest here

    @property
    def across(self) -> list[float]:
        return _inches(self.matrix.columns, self.most[0])

    @property
    def down(self) -> list[float]:
        return _inches(self.matrix.rows, self.most[1])

    @property
    def size(self) -> tuple[float, float]:
        room = 0.062 * (len(self._words) + _letters(self.matrix.symbol) + 3) - _LEFT - _RIGHT + 0.4
        return max(sum(self.across), room), sum(self.down)

    @property
    def steps(self) -> tuple[int, int]:
        """Entries down and across that a pixel stands for, at most."""
        rows, columns = (
            max(math.ceil(b.size / (_PIXELS * inches)) for b, inches in zip(blocks, lengths))
            for blocks, lengths in ((self.matrix.rows, self.down), (self.matrix.columns, self.across))
        )
        return rows, columns

    @property
    def _words(self) -> str:
        place = re.sub(r"^ours:.*", "ours", self.matrix.place)
        note = "" if self.steps == (1, 1) else "   (pixel: largest of {} × {})".format(*self.steps)
        return f"   {self.matrix.shape_text}   {place}{note}"

    def draw(self, axes: Axes) -> None:
        values = self.matrix.values
        largest = self.scale or float(np.abs(values).max(initial=0.0)) or 1.0
        xs, ys = _edges(self.across), _edges(self.down)
        rows, columns = _starts(self.matrix.rows), _starts(self.matrix.columns)
        plate = {"boxstyle": "round,pad=0.12", "facecolor": "white", "edgecolor": "none", "alpha": 0.85}
        for i, j in np.ndindex(len(rows) - 1, len(columns) - 1):
            part = values[rows[i] : rows[i + 1], columns[j] : columns[j + 1]]
            lengths = ys[i + 1] - ys[i], xs[j + 1] - xs[j]
            steps = [math.ceil(n / (_PIXELS * inches)) for n, inches in zip(part.shape, lengths)]
            signed = _coarsened(part, steps[0], steps[1]) / largest
            shade = np.ma.masked_equal(np.sign(signed) * np.sqrt(np.abs(signed)), 0.0)
            extent = (xs[j], xs[j + 1], ys[i + 1], ys[i])
            axes.imshow(shade, extent=extent, aspect="auto", interpolation="none", cmap=_colours(), vmin=-1, vmax=1)
            _separate(axes, part.shape, extent)
            name, room = self.matrix.names[i][j], xs[j + 1] - xs[j]
            if name and room > 0.055 * _letters(name) + 0.06 and ys[i + 1] - ys[i] > 0.16 * name.count("frac") + 0.12:
                x, y = (xs[j] + xs[j + 1]) / 2, (ys[i] + ys[i + 1]) / 2
                axes.text(x, y, f"${name}$", ha="center", va="center", fontsize=8, color=INK, bbox=plate)
        for x in xs:
            axes.plot([x, x], [ys[0], ys[-1]], color=INK, lw=0.7)
        for y in ys:
            axes.plot([xs[0], xs[-1]], [y, y], color=INK, lw=0.7)
        self._label(axes, xs, ys, largest)

    def _label(self, axes: Axes, xs: list[float], ys: list[float], largest: float) -> None:
        width, height = self.size
        for j, block in enumerate(self.matrix.columns):
            middle, text = (xs[j] + xs[j + 1]) / 2, block.text
            narrow = xs[j + 1] - xs[j] < 0.055 * _letters(text) + 0.04
            turn = {"rotation": 40, "ha": "left"} if narrow else {"ha": "center"}
            axes.text(middle, -0.05, f"${text}$", va="bottom", fontsize=6.5, color=INK, **turn)
        for i, block in enumerate(self.matrix.rows):
            axes.text(
                -0.06, (ys[i] + ys[i + 1]) / 2, f"${block.text}$", ha="right", va="center", fontsize=6.5, color=INK
            )
        axes.text(-_LEFT + 0.05, -0.42, f"${self.matrix.symbol}${self._words}", fontsize=8, color=INK)
        _key(axes, xs[-1] + 0.12, height, largest)
        axes.set_xlim(-_LEFT, width + _RIGHT)
        axes.set_ylim(height + _BOTTOM, -_TOP)
        axes.set_axis_off()


def _placed(panels: Sequence[Any], *, width: float, title: str) -> Figure:
    """Panels in lines, left to right, at their own sizes in inches."""
    from matplotlib.figure import Figure

    places, x, y, line = [], 0.0, 0.1 + (0.45 if title else 0.0), 0.0
    for panel in panels:
        w, h = panel.size[0] + _LEFT + _RIGHT, panel.size[1] + _TOP + _BOTTOM
        if isinstance(panel, _Mass):
            h += 0.35
        if x and x + w > width:
            x, y, line = 0.0, y + line, 0.0
        places.append((x, y, w, h))
        x, line = x + w, max(line, h)
    across, down = max(x + w for x, _, w, _ in places), y + line + 0.1
    figure = Figure(figsize=(across, down))
    if title:
        figure.text(0.12 / across, 1 - 0.3 / down, title, fontsize=11, color=INK)
    for panel, (x, y, w, h) in zip(panels, places):
        if isinstance(panel, _Mass):
            box = (x + _LEFT - 0.2, down - y - h + 0.42, panel.size[0], panel.size[1])
        else:
            box = (x, down - y - h, w, h)
        axes = figure.add_axes((box[0] / across, box[1] / down, box[2] / across, box[3] / down))
        axes.grid(False)
        panel.draw(axes)
    return figure


def _colours() -> Colormap:
    """Blue below zero, orange above, white at zero alone: the least nonzero number has a tint of its own."""
    from matplotlib.colors import LinearSegmentedColormap

    below, above = ("#08306b", "#4292c6", "#d6e6f4"), ("#fee3c8", "#ec7014", "#6f2c02")
    steps = [(0.0, below[0]), (0.25, below[1]), (0.5, below[2]), (0.5, above[0]), (0.75, above[1]), (1.0, above[2])]
    return LinearSegmentedColormap.from_list("signed", steps, N=512).with_extremes(bad="white")


def _key(axes: Axes, x: float, height: float, largest: float) -> None:
    """A colour bar with the numbers it stands for."""
    tall = min(max(height, 0.5), 1.4)
    ramp = np.linspace(1, -1, 128)[:, None]
    axes.imshow(
        ramp, extent=(x, x + 0.09, tall, 0), aspect="auto", interpolation="none", cmap=_colours(), vmin=-1, vmax=1
    )
    for value, y in ((largest, 0.0), (0.0, tall / 2), (-largest, tall)):
        axes.text(x + 0.13, y, f"{value:.3g}".replace("-", "−"), fontsize=6, va="center", color=INK)


def _inches(blocks: Sequence[Block], most: float) -> list[float]:
    """Lengths of blocks: proportional to their entries, but none too short to see and all together not too long."""
    wanted = [max(_LEAST, _ENTRY * b.size) for b in blocks]
    if sum(wanted) <= most:
        return wanted
    least = min(_LEAST, most / len(blocks))
    over = sum(w - least for w in wanted)
    return [least + (w - least) * (most - least * len(blocks)) / over for w in wanted]


def _edges(lengths: Sequence[float]) -> list[float]:
    return [0.0, *np.cumsum(lengths).tolist()]


def _starts(blocks: Sequence[Block]) -> list[int]:
    return [0, *np.cumsum([b.size for b in blocks]).tolist()]


def _coarsened(part: Array, down: int, across: int) -> Array:
    """The entry of largest size, with its sign, of every `down × across` entries."""
    for axis, step in ((0, down), (1, across)):
        if step > 1:
            starts = np.arange(0, part.shape[axis], step)
            high, low = np.maximum.reduceat(part, starts, axis=axis), np.minimum.reduceat(part, starts, axis=axis)
            part = np.where(high >= -low, high, low)
    return part


def _separate(axes: Axes, shape: tuple[int, ...], extent: tuple[float, float, float, float]) -> None:
    """Thin white lines between entries where there are few."""
    x0, x1, y1, y0 = extent
    if (y1 - y0) / shape[0] > 0.05:
        axes.hlines(np.linspace(y0, y1, shape[0] + 1)[1:-1], x0, x1, color="#e4e7eb", lw=0.4)
    if (x1 - x0) / shape[1] > 0.05:
        axes.vlines(np.linspace(x0, x1, shape[1] + 1)[1:-1], y0, y1, color="#e4e7eb", lw=0.4)


def _letters(text: str) -> int:
    """About how many letters TeX shows."""
    return len(re.sub(r"\\[a-zA-Z]+|[\\{}^_$,]", "", text)) + len(re.findall(r"\\(?:ln|tilde|cdot|times)", text))
