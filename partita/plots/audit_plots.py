"""Pictures of audits: what skipping costs each head, and how much any rule could skip at the same lost mass."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np

from partita.errors import UnsupportedError
from partita.inspection.audited_heads import Audit, AuditedHead
from partita.plots.colours import INK, SOFT
from partita.plots.style import clean, mark, new_figure, require_vector_or_pixels, save, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["plot_audit"]

_MOST_LAYERS = 8  # that a legend names; as many colours and markers are told apart


def plot_audit(audit: Audit, path: str | os.PathLike[str] | None = None, *, title: str = "") -> Figure:
    """Draw what rules cost each head against what they skip, and the oracle beside it.

    Left: the largest change of a head's output over queries, and its proved bound (dashed), against the mean share that is
    skipped; a line per head, a point per rule. Rules that skip nothing in a head have no point there. Right: what is skipped
    against the most that any rule could skip at the same lost mass; points on the diagonal are as good as the oracle.

    Args:
        audit: what `pa.inspect.audit` returned, best for several rules, such as `SkipBlocks` at several thresholds.
        path: a file to write as well, .svg, .png or .pdf. It is replaced if it exists; parents are created.
        title: stands above the figure.

    Returns:
        The figure.

    Raises:
        UnsupportedError: another kind of file, or something that is not an audit.
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
    lines: dict[tuple[str, int], list[AuditedHead]] = {}
    for head in audit.heads:
        lines.setdefault((head.layer, head.head), []).append(head)
    layers = list(dict.fromkeys(layer for layer, _ in lines))
    with styled():
        figure, panels = new_figure(2, width=4.4, height=3.6)
        costs, shares = panels[0]
        for (layer, _), heads in lines.items():
            _draw_head(costs, shares, heads, layers.index(layer), thin=len(lines) > 12)
        costs.set_yscale("log")
        clean(costs, x="share skipped, mean over queries", y="largest change of the output")
        shares.axline((0, 0), slope=1, color=SOFT, lw=0.8)
        shares.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02), aspect="equal")
        clean(shares, x="the most any rule could skip at the same lost mass", y="share skipped, mean over queries")
        kinds = (("error", "-"), ("proved bound", "--"))
        handles = [costs.plot([], [], color=INK, lw=1.0, ls=dash, label=name)[0] for name, dash in kinds]
        if len(layers) <= _MOST_LAYERS:
            looks = [{**mark(n), "linestyle": ""} for n in range(len(layers))]
            handles += [shares.plot([], [], label=layer, **look)[0] for layer, look in zip(layers, looks)]
        figure.legend(handles=handles, loc="outside lower center", ncols=2 if len(layers) < 4 else 3)
        if title:
            figure.suptitle(title, fontsize=10, color=INK)
        if path is not None:
            save(figure, path)
    return figure


def _draw_head(costs: Axes, shares: Axes, heads: list[AuditedHead], number: int, *, thin: bool) -> None:
    """One head: its rules in the order of what they skip."""
    rows = sorted((head.row() for head in heads), key=lambda row: float(row["skipped"]))
    skipped, oracle, error, bound = (
        np.array([row[k] for row in rows]) for k in ("skipped", "oracle", "error", "error_bound")
    )
    look, some = mark(number), error > 0
    width, size = (0.6, 1.8) if thin else (1.2, 4.0)
    for y, dash, marker in ((error, "-", look["marker"]), (bound, "--", "")):
        costs.plot(skipped[some], y[some], color=look["color"], ls=dash, lw=width, marker=marker, ms=size)
    shares.plot(oracle[some], skipped[some], color=look["color"], ls="", marker=look["marker"], ms=size)
