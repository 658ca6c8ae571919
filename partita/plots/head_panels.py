"""The panels that pictures of heads are made of: function, head, cells, weights and error, on a line or on a plane.

A panel is drawn once, for one view. What it returns can show the same panel at another temperature.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import ROUND_CEILING, Context, Decimal
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from partita.errors import UnsupportedError
from partita.geometry.cells import intervals, polygons, sliced
from partita.geometry.domains import Array
from partita.geometry.grid import ProductGrid
from partita.heads.head import require_folded
from partita.plots.colours import ACCENT, COLOURS, INK, SOFT, colour_map
from partita.plots.head_views import LISTED, HeadView
from partita.proofs.certificate import Certificate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["PANELS", "Drawn", "Limits", "claim_text", "draw_panel", "limits_of", "panel_names", "rounded_up"]

PANELS = ("function", "head", "cells", "weights", "error")
_DEFAULT = {1: ("head", "error"), 2: ("head", "cells", "error")}
_COMPARES = ("function", "error")  # panels for which the function is asked
_OF_CELLS = ("cells", "weights")  # panels that show the keys of one softmax
_CELLS_DRAWN = 4000  # polygons
_CELLS_ACROSS = 40  # of a grid: finer ones are drawn magnified
_KEYS_ON_A_LINE = 120  # that cells and weights show side by side: of more, the first ones
_DOTS_ACROSS = 24  # keys of a grid that are drawn as dots
_COLOUR_MAPS = {"function": "value", "head": "value", "weights": "weight", "error": "error"}
_BARS = {"function": "value of the function", "head": "value of the head"}
_GHOST = "ghost: wins nowhere in the domain"
_GHOST_SEEN = "ghost: wins nowhere that is drawn"  # in a region cells are tried at the points that are drawn

Flags = NDArray[np.bool_]
Limits = tuple[float, float]
Refresh = Callable[[HeadView], None]


@dataclass(frozen=True, eq=False)
class Drawn:
    """A panel on its axes.

    Attributes:
        title: in words.
        refresh: draws another view of the same head into the same artists.
        mappable: what a colour bar belongs to; None if there is none.
        words: what stands beside the colour bar.
        marks: artists that a legend explains. Their labels are the words.
    """

    title: str
    refresh: Refresh
    mappable: Any = None
    words: str = ""
    marks: tuple[Any, ...] = ()


def panel_names(view: HeadView, wanted: str | Sequence[str] | None) -> tuple[str, ...]:
    """The panels to draw: those that were named, or those that suit the dimension and do not lack their function or cells.

    Raises:
        UnsupportedError: there is no such panel, it compares with a function that was not stored, or it shows the cells of one head
            and this is a network.
    """
    if wanted is None:
        lacking = (() if view.has_function else _COMPARES) + (() if view.has_cells else _OF_CELLS)
        return tuple(n for n in _DEFAULT[view.dimension] if n not in lacking)
    names = (wanted,) if isinstance(wanted, str) else tuple(wanted)
    for name in names:
        if name not in PANELS:
            raise UnsupportedError(f"panels: found {name!r}; expected {', '.join(PANELS)}.")
        if name in _COMPARES and not view.has_function:
            raise UnsupportedError(
                f"panels: {name!r} needs the function, and this head was read from a file, which does not store a black box",
                "Draw 'head', 'cells' or 'weights', or compile the function again.",
            )
        if name in _OF_CELLS and not view.has_cells:
            require_folded(view.head, f"panels: {name!r}")
    if not names:
        raise UnsupportedError(f"panels is empty; expected at least one of {', '.join(PANELS)}.")
    return names


def claim_text(certificate: Certificate) -> str:
    """What is claimed: "proved error ≤ 0.1", the bound rounded up to three digits."""
    norm = "" if certificate.norm == "inf" else f" in L{certificate.norm}"
    if certificate.error_estimate is not None:
        return f"estimated error ≈ {certificate.error_estimate:.2g}{norm}"
    given = "" if certificate.kind == "proved" else " (given what was declared)"
    return f"proved error ≤ {rounded_up(certificate.error_bound)}{norm}{given}"


def rounded_up(number: float) -> str:
    """Three significant digits, never less than the number."""
    return f"{float(Context(prec=3, rounding=ROUND_CEILING).create_decimal(Decimal(number))):.3g}"


def limits_of(name: str, views: Sequence[HeadView]) -> Limits | None:
    """One scale for a panel at several temperatures; None where each keeps its own."""
    if name == "weights":
        return 0.0, 1.0
    if name == "cells":
        return None
    found = [_measured(name, view) for view in views]
    if name in ("head", "function") and views[0].has_function:
        found.append(_measured("function", views[0]))
    lo = 0.0 if name == "error" else min(float(np.nanmin(f)) for f in found)
    hi = max(float(np.nanmax(f)) for f in found)
    return lo, hi if hi > lo else lo + (abs(lo) or 1.0)


def _measured(name: str, view: HeadView) -> Array:
    return np.concatenate([_measure(name, view, across) for across in _places(name, view)])


def _places(name: str, view: HeadView) -> list[int]:
    """Where a panel is evaluated: across the picture, and at the listed points of a cloud."""
    across = view.across_function if name in _COMPARES else view.across
    domain = view.compiled.target.domain
    if not view.is_cloud:
        return [across]
    filled = domain.fill_distance > 0 and not view.is_slice  # type: ignore[union-attr]
    return [across, LISTED] if filled else [LISTED]


def _measure(name: str, view: HeadView, across: int) -> Array:
    measures = {
        "function": view.function,
        "head": view.computed,
        "weights": view.largest_weight,
        "error": view.error,
    }
    return measures[name](across)


def draw_panel(name: str, panel: Axes, view: HeadView, *, limits: Limits | None = None, edges: bool = False) -> Drawn:
    """Draw a panel by its name. `limits`: of the values; `edges`: draw the cells over a map of the head."""
    if view.dimension == 1:
        draw = {"cells": _line_cells, "weights": _line_weights, "error": _line_error}.get(name, _line_values)
        drawn = draw(panel, view, name, limits)
        panel.set_xlabel(view.names[0])
        return drawn
    if name == "cells":
        drawn = _map_cells(panel, view)
    else:
        drawn = _map(panel, view, name, limits)
        if edges:
            _faint_edges(panel, view)
    panel.grid(False)
    panel.set_xlabel(view.names[0])
    panel.set_ylabel(view.names[1])
    return drawn


def _title(name: str, view: HeadView) -> str:
    words = {
        "function": "the function",
        "head": "what the head computes",
        "cells": "the cells of the keys",
        "weights": "how much one key decides",
        "error": "distance from the function",
    }
    at = view.slice_text(" at ")
    if name in _COMPARES and view.compiled.target.graph is None and not view.is_cloud:
        across = view.across_function
        at += f" ({across} points)" if view.dimension == 1 else f" ({across} × {across} points)"
    return words[name] + at


def _error_scale(view: HeadView) -> tuple[float, str] | None:
    """The claim as the end of the error's scale, and its name; None where the claim is not about this head or this norm."""
    certificate = view.compiled.certificate
    if view.sharpness is not None or certificate.norm != "inf":
        return None
    return certificate.error, "proved bound" if certificate.error_estimate is None else "estimate"


# on a line


def _line_values(panel: Axes, view: HeadView, name: str, limits: Limits | None) -> Drawn:
    """The head and the function as curves; the centers along the bottom."""
    marks: list[Any] = []
    if view.has_function:
        marks += _curve(panel, view, "function", color=INK, lw=0.9, ls="--", label="function")
    curves: list[Any] = []
    if name == "head":
        curves = _curve(panel, view, "head", color=ACCENT, lw=1.4, label="head")
        marks += curves
    lo, hi = view.window.lo[0], view.window.hi[0]
    panel.set_xlim(lo, hi)
    panel.margins(y=0.08)
    if limits is not None:
        room = 0.06 * (limits[1] - limits[0])
        panel.set_ylim(limits[0] - room, limits[1] + room)
    if name == "head" and view.has_cells and view.partition.num_cells <= 400:
        centers, ghosts = _line_keys(view)
        told = "centers of the cells" + (f" ({_counted(ghosts.sum(), 'ghost')} not shown)" if ghosts.any() else "")
        along = panel.get_xaxis_transform()
        marks += panel.plot(
            centers[~ghosts], np.full((~ghosts).sum(), 0.02), "|", color=SOFT, ms=6, transform=along, label=told
        )

    def refresh(other: HeadView) -> None:
        for curve, across in zip(curves, _places("head", other)):
            curve.set_ydata(other.computed(across))

    panel.set_ylabel("value")
    title = "head and function" if name == "head" and view.has_function else _title(name, view)
    return Drawn(title, refresh, marks=tuple(m for m in marks if not m.get_label().startswith("_")))


def _curve(panel: Axes, view: HeadView, name: str, **look: Any) -> list[Any]:
    """A line for each place where the panel is evaluated; listed points are dots."""
    out: list[Any] = []
    for across in _places("error" if name == "function" else name, view):
        style = {**look, "ls": "", "marker": "."} if across == LISTED else look
        if out:
            style = {**style, "label": "_"}
        out += panel.plot(view.points(across)[:, 0], _measure(name, view, across), **style)
    return out


def _line_error(panel: Axes, view: HeadView, name: str, limits: Limits | None) -> Drawn:
    curves, marks = _curve(panel, view, "error", color=ACCENT, lw=1.1), []
    scale = _error_scale(view)
    top = max([float(np.nanmax(_measured("error", view))), *([] if scale is None else [scale[0]])])
    if scale is not None:
        marks = [panel.axhline(scale[0], color=INK, lw=0.9, ls=":", label=scale[1])]
    panel.set_ylim(0, 1.12 * (top if limits is None else limits[1]) or 1.0)
    panel.set_xlim(view.window.lo[0], view.window.hi[0])
    panel.set_ylabel("|head − function|")

    def refresh(other: HeadView) -> None:
        for curve, across in zip(curves, _places("error", other)):
            curve.set_ydata(other.error(across))

    return Drawn(_title(name, view), refresh, marks=tuple(marks))


def _line_keys(view: HeadView) -> tuple[Array, Flags]:
    """Centers on a line, and which keys are ghosts: they win nowhere in the domain."""
    partition = view.partition
    return partition.to_power_diagram().centers[:, 0], np.isnan(intervals(partition, view.window)[:, 0])


def _first_keys(panel: Axes, view: HeadView) -> tuple[NDArray[np.int64], Array, Flags, str]:
    """Keys that are shown one by one, from the left, their centers, which are ghosts, and what a title says about the others."""
    centers = view.partition.to_power_diagram().centers[:, 0]
    keys, lo, hi = np.argsort(centers, kind="stable"), view.window.lo[0], view.window.hi[0]
    if len(keys) > _KEYS_ON_A_LINE:
        keys = keys[:_KEYS_ON_A_LINE]
        shown = centers[keys]
        panel.set_xlim(min(lo, shown[0]), shown[-1])
        ghosts = shown < lo
        return keys, shown, ghosts, f" (the first {_KEYS_ON_A_LINE} of {len(centers):,})"
    ghosts = np.isnan(intervals(view.partition, view.window)[keys, 0])
    first, last = min(lo, centers.min()), max(hi, centers.max())
    room = 0.02 * (last - first) if ghosts.any() else 0.0
    panel.set_xlim(first - room, last + room)
    return keys, centers[keys], ghosts, ""


def _domain_ends(panel: Axes, view: HeadView, ghosts: Flags) -> list[Any]:
    """Where the domain ends, if there is something beyond it."""
    if not ghosts.any():
        return []
    lines = [panel.axvline(float(end[0]), color=INK, lw=1.2) for end in (view.window.lo, view.window.hi)]
    lines[0].set_label("end of the domain")
    return lines[:1]


def _line_cells(panel: Axes, view: HeadView, name: str, limits: Limits | None) -> Drawn:
    """Each key's value over its cell: what the head would be at temperature zero."""
    from matplotlib.collections import LineCollection

    keys, centers, ghosts, more = _first_keys(panel, view)
    scores = view.folded.affine_scores()
    level = scores.values[keys, view.output]
    tilt = np.zeros(len(keys)) if scores.value_slopes is None else scores.value_slopes[keys, view.output, 0]
    window = view.window
    if more:
        ends = np.column_stack(
            [
                np.r_[window.lo[0], (centers[1:] + centers[:-1]) / 2],
                np.r_[(centers[1:] + centers[:-1]) / 2, centers[-1]],
            ]
        )
    else:
        ends = intervals(view.partition, window)[keys]
    heights = level[:, None] + tilt[:, None] * ends
    steps = np.stack([ends, heights], axis=2)[~ghosts]
    panel.add_collection(LineCollection(list(steps), colors=ACCENT, linewidths=1.6))
    for edge in np.unique(ends[~ghosts]):
        panel.axvline(float(edge), color=SOFT, lw=0.4)
    marks = _dots(panel, centers, level + tilt * centers, ghosts, _GHOST)
    panel.margins(y=0.1)
    panel.autoscale_view(scalex=False)
    panel.set_ylabel("value stored with the key")
    return Drawn(_title(name, view) + more, lambda _: None, marks=(*marks, *_domain_ends(panel, view, ghosts)))


def _line_weights(panel: Axes, view: HeadView, name: str, limits: Limits | None) -> Drawn:
    """The softmax weight of each key along the line."""
    keys, _, ghosts, more = _first_keys(panel, view)
    lo, hi = view.window.lo[0], min(view.window.hi[0], panel.get_xlim()[1])
    x = np.linspace(lo, hi, 801)
    panel.set_xlim(lo, hi)
    colours = (ACCENT, *COLOURS[2:7])
    curves, number = [], 0
    for weight, is_ghost in zip(view.weights_on_line(x, keys).T, ghosts):
        look: dict[str, Any] = (
            {"color": SOFT, "ls": "--", "lw": 0.9} if is_ghost else {"color": colours[number % len(colours)], "lw": 1.3}
        )
        number += not is_ghost
        curves += panel.plot(x, weight, **look)
    marks = []
    for some, label in (
        (~ghosts, "weight of a key, one colour each"),
        (ghosts, "weight of a ghost, which wins nowhere"),
    ):
        if some.any():
            first = curves[int(np.flatnonzero(some)[0])]
            first.set_label(label)
            marks.append(first)
    panel.set_ylim(0, 1.04)
    panel.set_ylabel("softmax weight")

    def refresh(other: HeadView) -> None:
        for curve, weight in zip(curves, other.weights_on_line(x, keys).T):
            curve.set_ydata(weight)

    return Drawn("the weight of every key" + more, refresh, marks=tuple(marks))


# on a plane


def _map(panel: Axes, view: HeadView, name: str, limits: Limits | None) -> Drawn:
    """A map of one number; the listed points of a cloud as dots of its colours."""
    window, scale = view.window, _error_scale(view) if name == "error" else None
    if limits is None and name == "weights":
        limits = 0.0, 1.0
    elif limits is None:
        values = _measured(name, view)
        lo, hi = float(np.nanmin(values)), float(np.nanmax(values))
        if name == "error":
            lo, hi = 0.0, hi if scale is None else max(hi, scale[0])
        limits = lo, hi if hi > lo else lo + (abs(lo) or 1.0)
    look: dict[str, Any] = {"cmap": colour_map(_COLOUR_MAPS[name]), "vmin": limits[0], "vmax": limits[1]}
    artists: list[tuple[Any, int]] = []
    panel.set_xlim(window.lo[0], window.hi[0])
    panel.set_ylim(window.lo[1], window.hi[1])
    for across in _places(name, view):
        numbers = _measure(name, view, across)
        if across == LISTED:
            points = view.points(LISTED)[:, list(view.axes)]
            artists.append((panel.scatter(points[:, 0], points[:, 1], c=numbers, s=14, zorder=3, **look), across))
        else:
            artists.append((panel.imshow(numbers.reshape(across, across), **look, **_placed(view)), across))
    if view.is_cloud:  # some points may lie on the frame
        panel.margins(0.04)
        panel.autoscale(True)

    def refresh(other: HeadView) -> None:
        for artist, across in artists:
            numbers = _measure(name, other, across)
            artist.set_array(numbers if across == LISTED else numbers.reshape(across, across))

    words = {
        **_BARS,
        "weights": "largest weight (1: one key decides)",
        "error": "|head − function|" + ("" if scale is None else f" (top: {scale[1]})"),
    }
    return Drawn(_title(name, view), refresh, artists[-1][0], words[name])


def _placed(view: HeadView) -> dict[str, Any]:
    """Where an image lies, and the shape of its pixels."""
    (x0, y0), (x1, y1) = view.window.lo, view.window.hi
    aspect = "equal" if 0.75 <= (y1 - y0) / (x1 - x0) <= 4 / 3 else "auto"
    return {"extent": (x0, x1, y0, y1), "origin": "lower", "aspect": aspect, "interpolation": "nearest"}


def _map_cells(panel: Axes, view: HeadView) -> Drawn:
    """Cells over a faint map of the head: a grid's lines (magnified if there are too many), or exact polygons."""
    if not view.is_cloud:
        numbers = view.computed(view.across).reshape(view.across, view.across)
        image = panel.imshow(numbers, cmap=colour_map("value"), alpha=0.35, **_placed(view))

        def refresh(other: HeadView) -> None:
            image.set_data(other.computed(other.across).reshape(other.across, other.across))

    else:

        def refresh(other: HeadView) -> None: ...

    marks, more = _grid_cells(panel, view) if isinstance(view.partition, ProductGrid) else _power_cells(panel, view)
    return Drawn(_title("cells", view) + more, refresh, marks=tuple(marks))


def _faint_edges(panel: Axes, view: HeadView) -> None:
    """The cells as thin lines over a map, if there are few enough to see something between them."""
    from matplotlib.collections import LineCollection, PolyCollection

    look: dict[str, Any] = {"linewidths": 0.4, "alpha": 0.6}
    partition, (x0, y0), (x1, y1) = view.partition, view.window.lo, view.window.hi
    if isinstance(partition, ProductGrid):
        across, up = (_inner_edges(view, k) for k in (0, 1))
        if max(len(across), len(up)) <= _CELLS_ACROSS:
            lines = [[(e, y0), (e, y1)] for e in across] + [[(x0, e), (x1, e)] for e in up]
            panel.add_collection(LineCollection(lines, colors="white", **look), autolim=False)
    elif not (view.is_cloud and view.is_slice) and partition.num_cells <= _CELLS_DRAWN:
        shapes = [p for p in polygons(sliced(partition, view.axes, view.at), view.window) if len(p)]
        panel.add_collection(PolyCollection(shapes, facecolors="none", edgecolors="white", **look), autolim=False)


def _inner_edges(view: HeadView, k: int) -> Array:
    """Edges between the cells of a grid on the k-th drawn axis that lie inside the domain."""
    centers = view.partition.axes[view.axes[k]]  # type: ignore[attr-defined]
    edges = (centers[1:] + centers[:-1]) / 2
    return np.asarray(edges[(edges > view.window.lo[k]) & (edges < view.window.hi[k])])


def _grid_cells(panel: Axes, view: HeadView) -> tuple[list[Any], str]:
    from matplotlib.collections import LineCollection
    from matplotlib.patches import Rectangle

    (x0, y0), (x1, y1) = view.window.lo, view.window.hi
    columns, rows = (view.partition.axes[k] for k in view.axes)  # type: ignore[attr-defined]
    factor = max(1.0, max(len(columns), len(rows)) / _CELLS_ACROSS)
    x1, y1 = x0 + (x1 - x0) / factor, y0 + (y1 - y0) / factor
    frame: list[Any] = []
    ghosts = [_ghosts_on_axis(a, view.window.lo[k], view.window.hi[k]) for k, a in enumerate((columns, rows))]
    in_box = view.compiled.target.region is None and not view.is_cloud
    if any(g.any() for g in ghosts):  # show them, and the domain as a frame
        corner, told = ((x0, y0), x1 - x0, y1 - y0), "domain" if in_box else "box around the domain"
        frame = [panel.add_patch(Rectangle(*corner, fill=False, edgecolor=INK, linewidth=1.4, label=told))]
        (x0, x1), (y0, y1) = _reach(columns, x0, x1, factor), _reach(rows, y0, y1, factor)
    across, up = ((a[1:] + a[:-1]) / 2 for a in (columns, rows))
    lines = [[(e, y0), (e, y1)] for e in across if e < x1] + [[(x0, e), (x1, e)] for e in up if e < y1]
    panel.add_collection(LineCollection(lines, colors=INK, linewidths=0.5), autolim=False)
    panel.set_xlim(x0, x1)
    panel.set_ylim(y0, y1)
    shown = [np.flatnonzero((a >= lo) & (a <= hi)) for a, lo, hi in ((columns, x0, x1), (rows, y0, y1))]
    marks: list[Any] = []
    if max(map(len, shown)) <= _DOTS_ACROSS:
        i, j = (index.ravel() for index in np.meshgrid(*shown))
        dark = ghosts[0][i] | ghosts[1][j]
        if not (in_box or view.is_slice):
            dark |= ~_meets_domain(view, (columns, rows), (i, j))
        marks = _dots(panel, columns[i], rows[j], dark, _GHOST if in_box or view.is_slice else _GHOST_SEEN)
    return marks + frame, f" (lower left, {factor:.0f}× magnified)" if factor > 1.5 else ""


def _meets_domain(view: HeadView, axes: tuple[Array, Array], index: tuple[NDArray[np.int64], ...]) -> Flags:
    """Whether cells of a grid hold points of the domain, tried at 7 × 7 places in each."""
    spots = []
    for k, (centers, chosen) in enumerate(zip(axes, index)):
        middles = (centers[1:] + centers[:-1]) / 2
        edges = np.clip(np.concatenate([[-np.inf], middles, [np.inf]]), view.window.lo[k], view.window.hi[k])
        spots.append(edges[chosen, None] + (edges[chosen + 1] - edges[chosen])[:, None] * np.linspace(0.02, 0.98, 7))
    points = np.tile(view.at, (len(index[0]), 7, 7, 1))
    points[..., view.axes[0]], points[..., view.axes[1]] = spots[0][:, :, None], spots[1][:, None, :]
    inside = view.inside(points.reshape(-1, points.shape[-1]))
    return np.asarray(inside.reshape(len(points), -1).any(axis=1))


def _ghosts_on_axis(centers: Array, lo: float, hi: float) -> Flags:
    """Which centers of an axis win nowhere between lo and hi: their cells end before lo or begin behind hi."""
    edges = np.concatenate([[-np.inf], (centers[1:] + centers[:-1]) / 2, [np.inf]])
    slack = 1e-9 * (hi - lo)  # an edge on the end of the domain, rounded
    return np.asarray((edges[1:] <= lo + slack) | (edges[:-1] >= hi - slack))


def _power_cells(panel: Axes, view: HeadView) -> tuple[list[Any], str]:
    """Exact polygons of scattered keys, on a slice those that meet it; only the centers where polygons would say nothing."""
    from matplotlib.collections import PolyCollection

    (x0, y0), (x1, y1) = view.window.lo, view.window.hi
    partition = view.partition
    centers = partition.to_power_diagram().centers[:, list(view.axes)]
    panel.set_xlim(x0, x1)
    panel.set_ylim(y0, y1)
    if partition.num_cells > _CELLS_DRAWN or (view.is_cloud and view.is_slice):
        return _dots(panel, centers[:, 0], centers[:, 1], np.zeros(len(centers), dtype=bool), _GHOST), ""
    shapes = polygons(sliced(partition, view.axes, view.at), view.window)
    drawn = [p for p in shapes if len(p)]
    panel.add_collection(PolyCollection(drawn, facecolors="none", edgecolors=INK, linewidths=0.5), autolim=False)
    wins = np.array([len(p) > 0 for p in shapes])
    if view.is_slice:  # keys whose cells miss the slice may win elsewhere
        return _dots(panel, centers[wins, 0], centers[wins, 1], np.zeros(int(wins.sum()), dtype=bool), _GHOST), ""
    label = _GHOST
    if view.compiled.target.region is not None or view.is_cloud:
        points = np.concatenate([view.points(across) for across in _places("head", view)])
        won = np.zeros(len(wins), dtype=bool)
        won[partition.cell(points[view.inside(points)])] = True
        wins, label = won, _GHOST_SEEN
    if (~wins).any():
        far = centers[~wins]
        room = 0.03 * (view.window.hi - view.window.lo)
        (x0, y0), (x1, y1) = np.minimum([x0, y0], far.min(axis=0) - room), np.maximum([x1, y1], far.max(axis=0) + room)
        panel.set_xlim(x0, x1)
        panel.set_ylim(y0, y1)
    return _dots(panel, centers[:, 0], centers[:, 1], ~wins, label), ""


def _dots(panel: Axes, x: Array, y: Array, ghosts: Flags, ghost: str) -> list[Any]:
    """The centers of the keys: filled where the key wins somewhere, hollow for ghosts. What a legend shows of them."""
    marks: list[Any] = []
    if (~ghosts).any():
        marks += panel.plot(x[~ghosts], y[~ghosts], ".", color=ACCENT, ms=3.5, label="key (the center of its cell)")
    if ghosts.any():
        marks += panel.plot(x[ghosts], y[ghosts], "o", mec=INK, mfc="white", mew=0.6, ms=2.8, label=ghost)
    return marks


def _reach(centers: Array, lo: float, hi: float, factor: float) -> Limits:
    """From half a gap before the first center to half a gap behind the last, or as much of it as is shown."""
    gap = float(centers[1] - centers[0]) if len(centers) > 1 else 0.0
    return min(lo, centers[0] - gap / 2), hi if factor > 1.5 else max(hi, centers[-1] + gap / 2)


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
