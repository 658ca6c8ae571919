"""Plots of audits: what skipping costs each head, and how much any rule could skip at the same lost mass."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np

from partita.errors import UnsupportedError
from partita.inspection.audited_heads import Audit, AuditedHead
from partita.inspection.rules import Rule
from partita.plots.colours import BACKGROUND, INK, SOFT
from partita.plots.style import clean, mark, new_figure, require_vector_or_pixels, save, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["plot_audit"]

_MOST_LAYERS = 8  # in the legend; there are as many distinct colours and markers


def plot_audit(audit: Audit, path: str | os.PathLike[str] | None = None, *, title: str = "") -> Figure:
    """Draw what rules cost each head against what they skip, and the oracle beside it.

    Left: the largest change of a head's output over queries, and its proved bound (dashed, hollow marks), against the mean share
    that is skipped. There is a line per head and kind of rule, and a point per rule; `SkipBlocks` in ascending and in
    descending order are two kinds. Layers differ in colour, and kinds, if there are several, in the shape of their marks. A rule
    that skips nothing in a head and does not change its output has no point there; a rule that changes it without skipping, such
    as `Quantized`, is drawn at 0. Right: the share skipped against the most that any rule could skip at the same lost mass;
    points on the diagonal are as good as the oracle.

    Args:
        audit: what `pa.inspect.audit` returned, preferably for several rules, such as `SkipBlocks` at several thresholds.
        path: a file to write as well, .svg, .png or .pdf. It is replaced if it exists; parents are created.
        title: title above the figure.

    Returns:
        The figure.

    Raises:
        UnsupportedError: the file type is not supported, or audit is not an audit.
        MissingExtraError: matplotlib is not installed.

    >>> import torch, partita as pa
    >>> from partita.plots import plot_audit
    >>> attention = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval()
    >>> x = torch.randn(1, 12, 8)
    >>> figure = plot_audit(pa.inspect.audit(attention, (x, x, x), [pa.inspect.TopK(k) for k in (2, 4, 8)]))
    >>> figure.axes[0].get_xlabel()
    'share skipped, mean over queries'
    """
    if path is not None:
        require_vector_or_pixels(path)
    if not isinstance(audit, Audit):
        raise UnsupportedError(f"audit is {type(audit).__name__}; expected what pa.inspect.audit returned.")
    lines: dict[tuple[str, int, str], list[AuditedHead]] = {}
    for head in audit.heads:
        lines.setdefault((head.layer, head.head, _kind(head.rule)), []).append(head)
    layers = list(dict.fromkeys(layer for layer, _, _ in lines))
    kinds = list(dict.fromkeys(kind for _, _, kind in lines))
    several, thin = len(kinds) > 1, len({key[:2] for key in lines}) > 12
    entries = 2 + len(layers) * (len(layers) <= _MOST_LAYERS) + len(kinds) * several
    columns = 2 if entries < 6 else 3
    with styled():
        figure, panels = new_figure(2, width=4.4, height=3.6 + 0.18 * max(0, -(-entries // columns) - 2))
        costs, shares = panels[0]
        for (layer, _, kind), heads in lines.items():
            color, marker = _look(layers.index(layer), kinds.index(kind) if several else None)
            _draw_line(costs, shares, heads, color, marker, thin=thin)
        costs.set_yscale("log")
        clean(costs, x="share skipped, mean over queries", y="largest change of the output")
        shares.axline((0, 0), slope=1, color=SOFT, lw=0.8, zorder=1)
        shares.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02), aspect="equal")
        clean(shares, x="the most any rule could skip\nat the same lost mass", y="share skipped, mean over queries")
        solid, hollow = {"markerfacecolor": INK}, {"markerfacecolor": BACKGROUND}
        errors = (("error", "-", solid), ("proved bound", "--", hollow))
        handles = [
            costs.plot([], [], color=INK, lw=1.0, ls=dash, marker="o", ms=3.0, label=name, **fill)[0]
            for name, dash, fill in errors
        ]
        if len(layers) <= _MOST_LAYERS:
            for number, layer in enumerate(layers):
                color, marker = _look(number, 0 if several else None)
                dots = {"marker": "", "lw": 4.0} if several else {"marker": marker, "ls": ""}
                handles += shares.plot([], [], color=color, label=layer, **dots)
        if several:
            for number, kind in enumerate(kinds):
                handles += shares.plot([], [], color=INK, ls="", marker=_look(0, number)[1], label=kind)
        figure.legend(handles=handles, loc="outside lower center", ncols=columns)
        if title:
            figure.suptitle(title, fontsize=10, color=INK)
        if path is not None:
            save(figure, path)
    return figure


def _kind(rule: Rule) -> str:
    """Rules of one kind differ only in a number, so they can be joined by a line."""
    return type(rule).__name__ + (", descending" if getattr(rule, "descending", False) else "")


def _look(layer: int, kind: int | None) -> tuple[str, str]:
    """Colour and marker of a line; with only one kind, the marker is that of the layer."""
    return mark(layer)["color"], mark(layer if kind is None else kind)["marker"]


def _draw_line(costs: Axes, shares: Axes, heads: list[AuditedHead], color: str, marker: str, *, thin: bool) -> None:
    """One head under rules of one kind, ordered by what they skip."""
    rows = sorted((head.row() for head in heads), key=lambda row: float(row["skipped"]))
    skipped, oracle, error, bound = (
        np.array([row[k] for row in rows]) for k in ("skipped", "oracle", "error", "error_bound")
    )
    some = (skipped > 0) | (error > 0)
    width, size = (0.6, 1.8) if thin else (1.2, 4.0)
    for y, dash, fill, each in ((error, "-", color, size), (bound, "--", BACKGROUND, 0.75 * size)):
        drawn = some & (y > 0)  # 0 cannot be drawn on a logarithmic axis
        (line,) = costs.plot(skipped[drawn], y[drawn], color=color, ls=dash, lw=width, marker=marker, ms=each, mfc=fill)
        line.set(markeredgewidth=min(width, 0.8), zorder=2.0 if dash == "-" else 1.9)
    shares.plot(oracle[some], skipped[some], color=color, ls="", marker=marker, ms=size)
