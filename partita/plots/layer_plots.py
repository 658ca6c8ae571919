"""Pictures of the paper's layers: every matrix with its blocks, and the attention beside the indicator it approximates.

A panel knows the room it takes in inches, texts measured, so that nothing overlaps and nothing is cut.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from partita.compiler.compiled import Compiled
from partita.geometry.cells import polygons
from partita.geometry.domains import Array, Box
from partita.plots.colours import ACCENT, INK, MUTED, RULE, SOFT, colour_map
from partita.plots.head_views import axis_names, partition_of
from partita.plots.layer_matrices import Block, LayersAt, Matrix, layers_at
from partita.plots.style import styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["HOW_TO_READ", "attention_figure", "draw_flow", "layers_figure", "matrix_figure"]

HOW_TO_READ = (
    "Orange is positive, blue negative. Shades follow the square root of the size. White is zero, or less than a thousandth of "
    "the largest entry. At the edges: the sizes of the blocks."
)
_WHITE = 1e-3  # of the largest entry: smaller ones are not drawn
_FAINTEST = 0.15  # of the colour scale: the shade of the smallest entry that is drawn, so that it differs from white
_CELLS_DRAWN = 400  # of a map: of more, those near the input
_ENTRY, _LEAST = 0.17, 0.30  # inches: an entry, and a block at least
_ALONE, _AMONG = (6.4, 4.2), (3.9, 2.3)  # inches: the most that a matrix takes across and down, alone and among others
_PIXELS = 110  # per inch: more entries than that are drawn as their largest
_TITLE, _GAP = 0.30, 0.30  # inches: the line of a title, and between panels
_SYMBOL, _WORDS, _SMALL = 10.0, 8.5, 7.5  # points

Line = tuple[tuple[float, float], tuple[float, float]]


def layers_figure(
    compiled: Compiled,
    *,
    form: str = "log",
    at: Sequence[float] | Array | None = None,
    dtype: torch.dtype | None = None,
    tolerance: float | None = None,
) -> Figure:
    """Every matrix of a head in the paper's form on one page, as a matplotlib figure.

    Orange is positive, blue negative, darker for larger ones (by the square root of their size). White is zero, or less than a
    thousandth of the largest entry; a note counts the entries that are white but not zero. Large matrices are coarsened: a pixel
    shows the largest of its entries, and a note says of how many. The last panels show how much attention each cell gets at the
    input, and the indicator of the cell that holds it.

    Args:
        compiled: the head.
        form: "log" (the paper's) or "indexed" (ours).
        at: the input, flat, `(m,)`; three tenths of the way along every axis if None.
        dtype: torch.float64 or torch.float32; that of the head if None.
        tolerance: the largest error of the layers to accept; that of the head if None.

    Returns:
        The figure; `figure.savefig("layers.svg")` writes it.

    Raises:
        SizeError: the matrices have more than 2²⁴ numbers.
        ShapeError: the input has another length.
        OutsideDomainError: the input lies outside the domain.
        ToleranceError: the error bound of the layers exceeds the tolerance.
        MissingExtraError: matplotlib is not installed.

    >>> import partita as pa
    >>> from partita.plots import layers_figure
    >>> c = pa.compile("2*x", pa.Box([0], [1]), tolerance=0.6, method="hard")
    >>> figure = layers_figure(c, form="log", at=[0.4])  # figure.savefig("layers.svg")
    >>> figure.texts[0].get_text()
    '2*x   ·   log form, 4 columns   ·   error ≤ 0.5 in Linf   ·   at z = (0.4)'
    """
    with styled():
        return draw_flow(layers_at(compiled, compiled.layers(form, dtype=dtype, tolerance=tolerance), at))


def matrix_figure(matrix: Matrix) -> Figure:
    """One matrix with its blocks."""
    with styled():
        return _placed([_Panel(matrix)])


def attention_figure(found: LayersAt) -> Figure:
    """The columns of the attention matrix that W_O keeps, the indicator that they approximate, and the mass on each cell."""
    shown = {m.file: m for m in found.matrices}
    limit = shown["indicator"]
    kept = Matrix(
        r"\mathrm{softmax}(K^\top Q)",
        "softmax",
        "",
        f"{shown['softmax'].place}, first n columns",
        "",
        found.weights,
        limit.rows,
        limit.columns,
        tuple(row[:1] for row in shown["softmax"].names),
    )
    scale = float(limit.values.max())
    with styled():
        return _placed([*(_Panel(m, scale=scale) for m in (kept, limit)), _mass_panel(found)], page=12.5)


def draw_flow(found: LayersAt) -> Figure:
    """All matrices in lines, as words are set, under one title."""
    network, label = found.network, found.compiled.target.label
    at = ", ".join(f"{x:.4g}".replace("-", "−") for x in found.at[:8]) + (", …" if len(found.at) > 8 else "")
    bound = (
        f"error ≤ {network.error_bound:.6g} in L{network.norm}" if network.error_bound < math.inf else "no proved error"
    )
    function = label if len(label) <= 48 else label[:47] + "…"
    parts = (function, f"{network.form} form, {network.num_keys:,} columns", bound, f"at z = ({at})")
    with styled():
        panels = [*(_Panel(m, _AMONG) for m in found.matrices), _mass_panel(found)]
        return _placed(panels, title="   ·   ".join(parts))


class _Drawn(ABC):
    """A panel: the room it takes, across and down, and how it is drawn on axes whose unit is an inch, y downward."""

    @property
    @abstractmethod
    def room(self) -> tuple[float, float]: ...

    @abstractmethod
    def draw(self, axes: Axes) -> None: ...

    def inset(self, axes: Axes, left: float, top: float, size: tuple[float, float]) -> Axes:
        """Axes of their own inside the panel's, all in inches."""
        across, down = self.room
        return axes.inset_axes((left / across, 1 - (top + size[1]) / down, size[0] / across, size[1] / down))


@dataclass(frozen=True, eq=False)
class _Bars(_Drawn):
    """How much weight the first query puts on each cell, and the indicator: 1 on the cell that holds the input."""

    found: LayersAt

    size = (4.0, 1.9)

    @property
    def room(self) -> tuple[float, float]:
        return self.size[0] + 0.6, self.size[1] + 2 * _TITLE + 0.45

    def draw(self, axes: Axes) -> None:
        from matplotlib.ticker import MaxNLocator

        mass, cell = self.found.mass, self.found.cell
        _heading(axes, "mass of the first query", f"z lies in cell {cell}")
        panel = self.inset(axes, 0.5, 2 * _TITLE, self.size)
        wide = max(0.8, len(mass) / 120)
        kept = np.flatnonzero(mass > _WHITE)
        panel.bar([cell], [1.0], wide, facecolor=RULE, edgecolor=SOFT, lw=0.6, label="indicator")
        panel.bar(kept, mass[kept], wide / 2, facecolor=ACCENT, label="attention, where above 0.001")
        panel.set_xlim(-0.5 - wide / 2, len(mass) - 0.5 + wide / 2)
        panel.set_ylim(0, 1.04)
        panel.xaxis.set_major_locator(MaxNLocator(nbins=12, integer=True, min_n_ticks=1))
        panel.grid(False)
        panel.set_xlabel("cell j", fontsize=_WORDS, labelpad=2)
        panel.tick_params(labelsize=_SMALL, pad=2)
        above: dict[str, Any] = {"bbox_to_anchor": (0, 1), "ncols": 2, "borderaxespad": 0.3, "handlelength": 1.2}
        panel.legend(loc="lower left", fontsize=_SMALL, **above)


@dataclass(frozen=True, eq=False)
class _Maps(_Drawn):
    """The same in the plane, each cell where it lies: the mass of the first query beside the indicator."""

    found: LayersAt

    size = (2.0, 2.0)

    @property
    def room(self) -> tuple[float, float]:
        across, down = self.size
        return max(2 * across + 1.4 + _key_width([]), _heading_width(*self._heading)), down + 2 * _TITLE + 0.4

    @cached_property
    def _box(self) -> Box:
        box = self.found.compiled.target.box
        return Box(np.ravel(box.lo), np.ravel(box.hi))

    @cached_property
    def _shapes(self) -> list[Array]:
        return polygons(partition_of(self.found.compiled, "the map of the cells"), self._box)

    @cached_property
    def _window(self) -> Box:
        """The box, or of many cells some twelve by twelve around the input and those that have mass."""
        lo, hi, at = self._box.lo, self._box.hi, self.found.at
        if len(self._shapes) <= _CELLS_DRAWN:
            return self._box
        half = 6 * (hi - lo) / math.sqrt(len(self._shapes))
        weighty = [s for s, m in zip(self._shapes, self.found.mass) if m >= _WHITE and len(s)]
        around = np.vstack([np.clip([at - half, at + half], lo, hi), *weighty])
        return Box(around.min(axis=0), around.max(axis=0))

    @property
    def _heading(self) -> tuple[str, str]:
        near = "" if self._window is self._box else f"; only cells near z, of {len(self._shapes):,}"
        return "mass of the first query on each cell", f"+ is z{near}"

    def draw(self, axes: Axes) -> None:
        mass, cell = self.found.mass, self.found.cell
        indicator = np.zeros(len(mass))
        indicator[cell] = 1.0
        masses = [f"{x:.2f}" if x >= 0.005 else "" for x in mass]
        numbers = [str(j) for j in range(len(mass))]
        _heading(axes, *self._heading)
        across, down = self.size
        for left, title, values, labels in (
            (0.5, f"attention: {mass[cell]:.3g} on cell {cell}", mass, masses),
            (across + 1.15, f"indicator of cell {cell}", indicator, numbers),
        ):
            panel = self.inset(axes, left, 2 * _TITLE, self.size)
            panel.set_title(title, fontsize=_WORDS, color=INK, pad=4)
            self._draw_map(panel, values, labels)
        _key(axes, 2 * across + 1.27, 2 * _TITLE, down, [1.0, 0.0, 0.0], 1.0)

    def _draw_map(self, panel: Axes, values: Array, labels: Sequence[str]) -> None:
        from matplotlib.collections import PolyCollection
        from matplotlib.patheffects import withStroke

        (x0, y0), (x1, y1) = self._window.lo, self._window.hi
        colours = colour_map("signed")((_shades(values, 1.0).filled(np.nan) + 1) / 2)
        drawn = [
            j
            for j, shape in enumerate(self._shapes)
            if len(shape) and (shape.max(axis=0) > (x0, y0)).all() and (shape.min(axis=0) < (x1, y1)).all()
        ]
        shapes = [self._shapes[j] for j in drawn]
        panel.add_collection(PolyCollection(shapes, facecolors=colours[drawn], edgecolors=SOFT, linewidths=0.5))
        scale = np.array(self.size) / (x1 - x0, y1 - y0)
        for j, shape in zip(drawn, shapes):
            self._write(panel, shape, labels[j], scale, "white" if values[j] > 0.3 else INK)
        halo = [withStroke(linewidth=2.6, foreground="white")]
        panel.plot(*self.found.at, "+", color=INK, ms=7, mew=1.2, zorder=4, path_effects=halo, clip_on=False)
        panel.set(xlim=(x0, x1), ylim=(y0, y1))
        panel.grid(False)
        panel.spines[["top", "right"]].set_visible(True)
        panel.locator_params(nbins=4)
        panel.tick_params(labelsize=_SMALL, pad=2)
        across, up = axis_names(self.found.compiled)
        panel.set_xlabel(across, fontsize=_WORDS, labelpad=2)
        panel.set_ylabel(up, fontsize=_WORDS, labelpad=2)

    def _write(self, panel: Axes, shape: Array, label: str, scale: Array, colour: str) -> None:
        """The label of a cell at its middle or beside the mark of the input, which is 0.1 inches wide; nothing without room."""
        half = np.array([_wide(label, _SMALL) / 2 + 0.03, 0.07])
        middle, free = _centroid(shape), half + np.array([0.04, 0.06])
        away = (middle - self.found.at) * scale
        if (np.abs(away) < free).all():
            middle[1] += (math.copysign(free[1], away[1]) - away[1]) / scale[1]
        corners = middle + np.array([[-1, -1], [1, -1], [1, 1], [-1, 1]]) * (half - 0.02) / scale
        if label and _holds(shape, corners) and self._window.contains(corners).all():
            x, y = middle
            panel.text(x, y, label, ha="center", va="center", fontsize=_SMALL, color=colour, zorder=5)


def _holds(polygon: Array, points: Array) -> bool:
    """Whether a convex polygon, counter-clockwise, holds all the points."""
    edges, away = np.roll(polygon, -1, axis=0) - polygon, points[:, None] - polygon
    return bool((edges[:, 0] * away[..., 1] - edges[:, 1] * away[..., 0] >= 0).all())


def _centroid(polygon: Array) -> Array:
    """Of the area."""
    a, b = polygon, np.roll(polygon, -1, axis=0)
    cross = a[:, 0] * b[:, 1] - a[:, 1] * b[:, 0]
    if not cross.sum():
        return np.asarray(polygon.mean(axis=0))
    middle: Array = ((a + b) * cross[:, None]).sum(axis=0) / (3 * cross.sum())
    return middle


def _mass_panel(found: LayersAt) -> _Drawn:
    return _Maps(found) if found.compiled.head.dimension == 2 else _Bars(found)


@dataclass(frozen=True, eq=False)
class _Panel(_Drawn):
    """A matrix with its blocks, the numbers that its colours stand for, and notes of what is not drawn."""

    matrix: Matrix
    most: tuple[float, float] = _ALONE
    scale: float | None = None  # the number that the darkest colour stands for, if not the largest here

    @cached_property
    def largest(self) -> float:
        return self.scale or float(np.abs(self.matrix.values).max(initial=0.0)) or 1.0

    @cached_property
    def _numbered(self) -> bool:
        """Few enough entries without a name: their numbers are written into them."""
        return self.matrix.values.size <= 16 and not any(any(row) for row in self.matrix.names)

    @cached_property
    def across(self) -> list[float]:
        labels = [_wide(_tex(b.text), _SMALL) + 0.08 for b in self.matrix.columns]
        if self._numbered:
            entry = max(_LEAST, *(_wide(_text(x), _SMALL) + 0.14 for x in self.matrix.values.ravel()))
            return [max(entry * b.size, label) for b, label in zip(self.matrix.columns, labels)]
        named = [max(_wide(_tex(n), _WORDS) + 0.1 for n in names) for names in zip(*self.matrix.names)]
        return _inches(self.matrix.columns, self.most[0], [min(0.6, max(both)) for both in zip(named, labels)])

    @cached_property
    def down(self) -> list[float]:
        if self._numbered:
            return [max(_LEAST, 0.2 * b.size) for b in self.matrix.rows]
        return _inches(self.matrix.rows, self.most[1], [0.0] * len(self.matrix.rows))

    @cached_property
    def _narrow(self) -> list[bool]:
        """Which columns are too narrow for their label."""
        return [_wide(_tex(b.text), _SMALL) > w - 0.02 for b, w in zip(self.matrix.columns, self.across)]

    @cached_property
    def _corner(self) -> tuple[float, float]:
        """Where the matrix begins: right of the labels of its rows, below the title and the labels of its columns."""
        left = max(_wide(_tex(b.text), _SMALL) for b in self.matrix.rows) + 0.07
        turned = [_wide(_tex(b.text), _SMALL) for b, narrow in zip(self.matrix.columns, self._narrow) if narrow]
        return left, _TITLE + 0.19 + max([0.64 * w - 0.05 for w in turned], default=0.0)

    @cached_property
    def room(self) -> tuple[float, float]:
        left, top = self._corner
        across, down = sum(self.across), sum(self.down)
        tilted = max(
            (
                _edges(self.across)[j] + w / 2 + 0.77 * _wide(_tex(self.matrix.columns[j].text), _SMALL) + 0.1
                for j, w in enumerate(self.across)
                if self._narrow[j]
            ),
            default=0.0,
        )
        keyed = across + 0.03 if self._numbered else across + _key_width(self._key_values)
        wide = [left + keyed, left + tilted, _heading_width(_tex(self.matrix.symbol), self._words)]
        notes = [_wide(note, _SMALL) for note in self.notes]
        return max([*wide, *notes]), top + max(down, _key_height(down)) + 0.14 * len(notes) + 0.08

    @cached_property
    def _key_values(self) -> list[float]:
        return _key_values(self.matrix.values)

    @cached_property
    def steps(self) -> tuple[int, int]:
        """Entries down and across that a pixel stands for, at most; 1 where they are all the same."""
        steps = [
            _steps(part.shape, (self.down[i], self.across[j]))
            for (i, j), part in self._parts()
            if part.size and part.min() < part.max()
        ]
        return max((down for down, _ in steps), default=1), max((across for _, across in steps), default=1)

    def _parts(self) -> Iterator[tuple[tuple[int, int], Array]]:
        rows, columns = _starts(self.matrix.rows), _starts(self.matrix.columns)
        for i, j in np.ndindex(len(rows) - 1, len(columns) - 1):
            yield (i, j), self.matrix.values[rows[i] : rows[i + 1], columns[j] : columns[j + 1]]

    @property
    def _words(self) -> str:
        return f"{self.matrix.shape_text}   {re.sub(r'^ours:.*', 'ours', self.matrix.place)}"

    @cached_property
    def notes(self) -> list[str]:
        """What the picture does not show: entries that share a pixel, and small ones."""
        notes = []
        if self.steps != (1, 1):
            notes.append("(each pixel: largest of up to {} × {} entries)".format(*self.steps))
        values = self.matrix.values
        small = np.count_nonzero((values != 0) & (np.abs(values) < _WHITE * self.largest))
        if small:
            many = "1 entry is" if small == 1 else f"{small:,} entries are"
            notes.append(f"({many} white but not zero: below {_text(_WHITE * self.largest)})")
        return notes

    def draw(self, axes: Axes) -> None:
        from matplotlib.collections import LineCollection

        left, top = self._corner
        xs, ys = [left + x for x in _edges(self.across)], [top + y for y in _edges(self.down)]
        between: list[Line] = []
        for (i, j), part in self._parts():
            extent = (xs[j], xs[j + 1], ys[i + 1], ys[i])
            self._draw_block(axes, part, self.matrix.names[i][j], extent)
            between += _separators(part.shape, extent)
        frame: list[Line] = [((x, ys[0]), (x, ys[-1])) for x in xs] + [((xs[0], y), (xs[-1], y)) for y in ys]
        axes.add_collection(LineCollection(between, colors=RULE, linewidths=0.4), autolim=False)
        axes.add_collection(LineCollection(frame, colors=INK, linewidths=0.7), autolim=False)
        self._label(axes, xs, ys)

    def _draw_block(self, axes: Axes, part: Array, name: str, extent: tuple[float, float, float, float]) -> None:
        x0, x1, y1, y0 = extent
        shade = _shades(_coarsened(part, *_steps(part.shape, (y1 - y0, x1 - x0))), self.largest)
        if shade.count():
            axes.imshow(
                shade, extent=extent, aspect="auto", interpolation="none", cmap=colour_map("signed"), vmin=-1, vmax=1
            )
        plate = {"boxstyle": "round,pad=0.12", "facecolor": "white", "edgecolor": "none", "alpha": 0.85}
        centred: dict[str, Any] = {"ha": "center", "va": "center", "color": INK, "bbox": plate}
        if self._numbered:
            for (i, j), value in np.ndenumerate(part):
                x, y = x0 + (j + 0.5) * (x1 - x0) / part.shape[1], y0 + (i + 0.5) * (y1 - y0) / part.shape[0]
                axes.text(x, y, _text(value), fontsize=_SMALL, **centred)
        elif name and x1 - x0 > _wide(_tex(name), _WORDS) + 0.05 and y1 - y0 > 0.2 + 0.1 * name.count("frac"):
            y = y0 + (y1 - y0) * _clear(shade, (0.1 / (y1 - y0), _wide(_tex(name), _WORDS) / 2 / (x1 - x0)))
            axes.text((x0 + x1) / 2, y, _tex(name), fontsize=_WORDS, **centred)

    def _label(self, axes: Axes, xs: list[float], ys: list[float]) -> None:
        for block, a, b, narrow in zip(self.matrix.columns, xs, xs[1:], self._narrow):
            turn = {"rotation": 40, "ha": "left", "rotation_mode": "anchor"} if narrow else {"ha": "center"}
            axes.text((a + b) / 2, ys[0] - 0.05, _tex(block.text), va="bottom", fontsize=_SMALL, color=INK, **turn)
        for block, a, b in zip(self.matrix.rows, ys, ys[1:]):
            axes.text(xs[0] - 0.05, (a + b) / 2, _tex(block.text), ha="right", va="center", fontsize=_SMALL, color=INK)
        _heading(axes, _tex(self.matrix.symbol), self._words)
        bottom = ys[0] + max(ys[-1] - ys[0], _key_height(ys[-1] - ys[0])) + 0.13
        for k, note in enumerate(self.notes):
            axes.text(0, bottom + 0.14 * k, note, va="center", fontsize=_SMALL, color=MUTED)
        if not self._numbered:
            _key(axes, xs[-1] + 0.12, ys[0], ys[-1] - ys[0], self._key_values, self.largest)


def _placed(panels: Sequence[_Drawn], *, title: str = "", page: float = 11.0) -> Figure:
    """Panels in lines of a page so many inches wide, at their own sizes; under a title how to read the colours."""
    from partita.plots.notebook_figure import NotebookFigure

    places, x, y, line = [], 0.0, 0.85 if title else 0.1, 0.0
    for panel in panels:
        w, h = panel.room
        if x and x + w > page:
            x, y, line = 0.0, y + line + 0.6 * _GAP, 0.0
        places.append((x + 0.1, y, w, h))
        x, line = x + w + _GAP, max(line, h)
    lines = [(title, 0.3, 12.0, INK), (HOW_TO_READ, 0.58, _WORDS, MUTED)] if title else []
    across = max([x + w for x, _, w, _ in places] + [0.1 + _wide(text, size) for text, _, size, _ in lines]) + 0.1
    down = y + line + 0.1
    figure = NotebookFigure(figsize=(across, down))
    for text, below, size, colour in lines:
        figure.text(0.1 / across, 1 - below / down, text, fontsize=size, color=colour)
    for panel, (x, y, w, h) in zip(panels, places):
        axes = figure.add_axes((x / across, 1 - (y + h) / down, w / across, h / down))
        axes.set(xlim=(0, w), ylim=(h, 0), autoscale_on=False)
        axes.set_axis_off()
        panel.draw(axes)
    return figure


@cache
def _wide(text: str, size: float) -> float:
    """Inches that a text takes across, hinting at low resolution included."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextPath

    path = TextPath((0, 0), text, prop=FontProperties(size=size)) if text else None
    return 0.0 if path is None else 1.015 * float(path.get_extents().x1) / 72


def _tex(text: str) -> str:
    """In TeX, except numbers and sizes: TeX is slow."""
    if re.fullmatch(r"[^\\_^{]*=\d+|\d*", text):
        return text.replace("-", "−").replace("=", " = ")
    return f"${text}$"


def _heading(axes: Axes, symbol: str, words: str) -> None:
    axes.text(0, 0.16, symbol, fontsize=_SYMBOL, color=INK)
    axes.text(_wide(symbol, _SYMBOL) + 0.14, 0.16, words, fontsize=_WORDS, color=MUTED)


def _heading_width(symbol: str, words: str) -> float:
    return _wide(symbol, _SYMBOL) + 0.14 + _wide(words, _WORDS) + 0.05


def _shades(values: Array, largest: float) -> np.ma.MaskedArray[Any, Any]:
    """From −1 to 1, by the square root of the size; masked, so not drawn, below a thousandth of the largest."""
    signed = np.asarray(values) / largest
    sizes = _FAINTEST + (1 - _FAINTEST) * np.sqrt(np.abs(signed))
    return np.ma.masked_where(np.abs(signed) < _WHITE, np.sign(signed) * sizes)


def _text(value: float) -> str:
    return f"{value + 0.0:.3g}".replace("-", "−")  # −0 is 0


def _key_values(values: Array) -> list[float]:
    """The few numbers other than zero of a matrix, largest first, or where they are many the ends of their range and zero."""
    found = np.unique(values[values != 0])[::-1]
    few = {_text(v): float(v) for v in (found if len(found) <= 64 else ())}
    if 0 < len(few) <= 4:
        return list(few.values())
    return [max(float(values.max(initial=0.0)), 0.0), 0.0, min(float(values.min(initial=0.0)), 0.0)]


def _key_width(numbers: Sequence[float]) -> float:
    return 0.12 + 0.15 + max([_wide(_text(v), _SMALL) for v in numbers] + [_wide("0.125", _SMALL)]) + 0.02


def _key_height(height: float) -> float:
    return min(max(height, 0.56), 1.2)


def _key(axes: Axes, x: float, y: float, height: float, numbers: Sequence[float], largest: float) -> None:
    """The numbers that colours stand for: a square for each where they are few, else a bar from the least to the largest."""
    shown: dict[str, Any] = {
        "aspect": "auto",
        "interpolation": "none",
        "cmap": colour_map("signed"),
        "vmin": -1,
        "vmax": 1,
    }
    if 0.0 not in numbers:
        for k, value in enumerate(numbers):
            at = y + 0.14 * k
            axes.imshow(_shades(np.array([[value]]), largest), extent=(x, x + 0.1, at + 0.1, at), **shown)
            axes.add_patch(_frame(x, at, 0.1, 0.1))
            axes.text(x + 0.15, at + 0.05, _text(value), fontsize=_SMALL, va="center_baseline", color=INK)
        return
    high, _, low = numbers
    tall = _key_height(height)
    top, bottom = math.sqrt(high / largest), -math.sqrt(-low / largest)
    if top == bottom:  # all zero
        return
    ramp = np.linspace(top, bottom, 128)[:, None]
    axes.imshow(_shades(np.sign(ramp) * ramp**2, 1.0), extent=(x, x + 0.1, y + tall, y), **shown)
    axes.add_patch(_frame(x, y, 0.1, tall))
    written: list[float] = []
    for value in (high, low, 0.0, largest / 4, -largest / 4):
        at = y + tall * (top - math.copysign(math.sqrt(abs(value) / largest), value)) / (top - bottom)
        if low <= value <= high and all(abs(at - other) > 0.12 for other in written):
            written.append(at)
            axes.text(x + 0.15, at, _text(value), fontsize=_SMALL, va="center_baseline", color=INK)


def _frame(x: float, y: float, across: float, down: float) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((x, y), across, down, fill=False, edgecolor=SOFT, linewidth=0.5)


def _inches(blocks: Sequence[Block], most: float, texts: Sequence[float]) -> list[float]:
    """Lengths of blocks: proportional to their entries, but none shorter than its texts and all together not too long."""
    least = [max(_LEAST, text) for text in texts]
    wanted = [max(short, _ENTRY * b.size) for short, b in zip(least, blocks)]
    if sum(wanted) <= most:
        return wanted
    least = [min(short, most / len(blocks)) for short in least]
    over = sum(wanted) - sum(least)
    return [short + (w - short) * (most - sum(least)) / over for short, w in zip(least, wanted)]


def _edges(lengths: Sequence[float]) -> list[float]:
    return [0.0, *np.cumsum(lengths).tolist()]


def _starts(blocks: Sequence[Block]) -> list[int]:
    return [0, *np.cumsum([b.size for b in blocks]).tolist()]


def _steps(shape: tuple[int, ...], inches: tuple[float, float]) -> tuple[int, int]:
    down, across = (math.ceil(n / (_PIXELS * length)) for n, length in zip(shape, inches))
    return down, across


def _coarsened(part: Array, down: int, across: int) -> Array:
    """The entry of largest size, with its sign, of every `down × across` entries."""
    for axis, step in ((0, down), (1, across)):
        if step > 1:
            starts = np.arange(0, part.shape[axis], step)
            high, low = np.maximum.reduceat(part, starts, axis=axis), np.minimum.reduceat(part, starts, axis=axis)
            part = np.where(high >= -low, high, low)
    return part


def _clear(shade: np.ma.MaskedArray[Any, Any], half: tuple[float, float]) -> float:
    """How far down a block a name covers nothing but white, if it can: the middle, a quarter or three. Sizes are fractions."""
    rows, columns = shade.shape
    across = slice(int(columns * (0.5 - half[1])), math.ceil(columns * (0.5 + half[1])))
    for middle in (0.5, 0.25, 0.75):
        a, b = middle - half[0], middle + half[0]
        if a >= 0 and b <= 1 and not shade[int(rows * a) : math.ceil(rows * b), across].count():
            return middle
    return 0.5


def _separators(shape: tuple[int, ...], extent: tuple[float, float, float, float]) -> list[Line]:
    """Lines between entries, where these are large enough."""
    x0, x1, y1, y0 = extent
    if min((y1 - y0) / shape[0], (x1 - x0) / shape[1]) <= 0.08:
        return []
    level = [((x0, y), (x1, y)) for y in np.linspace(y0, y1, shape[0] + 1)[1:-1].tolist()]
    return level + [((x, y0), (x, y1)) for x in np.linspace(x0, x1, shape[1] + 1)[1:-1].tolist()]
