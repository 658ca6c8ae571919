"""A head of two inputs as a surface in space, with the cells of its keys on the floor below it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from partita.arithmetic.arguments import is_number
from partita.compiler.compiled import Compiled
from partita.errors import UnsupportedError
from partita.geometry.cells import polygons, sliced, touching
from partita.geometry.domains import Array, Box, PointCloud
from partita.geometry.grid import ProductGrid
from partita.plots.colours import ACCENT, INK, MUTED, RULE, TINTS, colour_map, tint_numbers
from partita.plots.head_panels import claim_text, panel_names
from partita.plots.head_plots import head_words, header
from partita.plots.head_views import HeadView
from partita.plots.style import require_vector_or_pixels, save, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["plot_surface"]

_SURFACES = ("head", "function", "error")
_ACROSS = 201  # points across a surface
_WIDTH, _HEIGHT = 5.2, 5.1  # inches of one surface
_DPI = 220  # of the surface, which is pixels also in .svg and .pdf
_CELLS_DRAWN = 4000
_DOTS_DRAWN = 600  # centers: more of them hide the cells
_DROP = 0.8  # how far the floor lies below the surface, as a share of its height
_FLAT = 1e-9  # of the largest value: a smaller difference is drawn as flat
_HALVINGS = 24  # of the side of a square, to find where the domain ends
_SUN = np.array([-0.45, -0.35, 0.82]) / np.linalg.norm([-0.45, -0.35, 0.82])


def plot_surface(
    compiled: Compiled,
    path: str | os.PathLike[str] | None = None,
    *,
    panels: str | Sequence[str] = "head",
    output: int = 0,
    axes: tuple[int, int] = (0, 1),
    at: Sequence[float] | Array | None = None,
    elevation: float = 27.0,
    azimuth: float = -58.0,
    size: tuple[float, float] | None = None,
    titles: bool = True,
) -> Figure:
    """Draw a head of two inputs as a surface in space, with the cells of its keys on the floor.

    On the floor, neighbouring cells have different tints, and a dot marks the center of each cell. In higher dimensions a slice is
    drawn. As in `plot_head`, nothing is drawn outside the domain. A black box is evaluated at 40 × 40 points, and not at all if
    only "head" is drawn. In .svg and .pdf files the surface is an image, and everything else stays vectors, so files are small.

    Args:
        compiled: the head.
        path: a file to write as well, .svg, .png or .pdf. It is replaced if it exists; parents are created.
        panels: what the height is: "head", "function" or "error"; several are drawn side by side.
        output: which scalar output, counted from 0.
        axes: the two coordinates that vary when there are more than two, counted from 0.
        at: a point of the domain through which the slice goes, `(m,)`; the middle of the domain's box if None.
        elevation: angle of the camera above the floor in degrees, −90 to 90. From below, the floor hides the surface.
        azimuth: angle of the camera around the vertical axis in degrees.
        size: width and height of the figure in inches.
        titles: write titles.

    Returns:
        The figure.

    Raises:
        UnsupportedError: another kind of file; a head of one input; a domain of isolated points; a panel, output, coordinate or
            angle that does not exist; a slice that misses the domain; a head that was changed after it was certified.
        ShapeError: `at` has another length.
        MissingExtraError: matplotlib is not installed.

    >>> import partita as pa
    >>> from partita.plots import plot_surface
    >>> c = pa.head("x0*x1", "[-1,1]^2", keys=(5, 5), sharpness=4.0)
    >>> figure = plot_surface(c)  # plot_surface(c, "surface.svg") also writes a file
    >>> figure.axes[0].get_zlabel()
    'value of the head'
    """
    if path is not None:
        require_vector_or_pixels(path)
    if compiled.head.dimension == 1:
        raise UnsupportedError(
            "a surface needs two inputs, and this head has one", "Use plot_head, which draws curves."
        )
    domain = compiled.target.domain
    if isinstance(domain, PointCloud) and domain.fill_distance == 0:
        raise UnsupportedError(
            "the domain is a set of isolated points, over which there is no surface",
            "Use plot_head, which draws points.",
        )
    for name, angle, least, most in (("elevation", elevation, -90, 90), ("azimuth", azimuth, -np.inf, np.inf)):
        if not (is_number(angle) and np.isfinite(angle) and least <= angle <= most):
            expected = "a finite number" if most == np.inf else f"a number from {least} to {most}"
            raise UnsupportedError(f"{name} is {angle!r}; expected {expected}, an angle in degrees.")
    view = HeadView.of(compiled, output=output, axes=axes, at=at, pixels=_ACROSS)
    names = panel_names(view, panels)
    for name in names:
        if name not in _SURFACES:
            raise UnsupportedError(f"panels: {name!r} is not drawn as a surface; expected {', '.join(_SURFACES)}.")
    with styled():
        from partita.plots.notebook_figure import NotebookFigure

        figure = NotebookFigure(figsize=size or (_WIDTH * len(names), _HEIGHT))
        if titles:
            header(figure, [*head_words(compiled, output), claim_text(compiled.certificate)])
        named = titles and (len(names) > 1 or view.is_slice)
        lines = figure.get_suptitle().count("\n") + 1 if titles else 0
        top = 1 - (0.16 * (lines > 0) + 0.17 * lines + 0.22 * named) / figure.get_figheight()
        compared = [name for name in names if name != "error"]
        for k, name in enumerate(names):
            rectangle = (k / len(names), 0.03, 1 / len(names), top - 0.03)
            place: Any = figure.add_axes(rectangle, projection="3d", computed_zorder=False)
            place.view_init(elev=float(elevation), azim=float(azimuth))
            limits = _limits(["error"] if name == "error" else compared, view)
            _draw(place, view, name, limits, below=elevation < 0)
            if named:
                words = {"head": "the head", "function": "the function", "error": "distance from the function"}
                title = words[name] + view.slice_text(" at ")
                figure.text((k + 0.5) / len(names), top, title, fontsize=9, color=INK, ha="center", va="bottom")
        if path is not None:
            save(figure, path, dpi=_DPI)
    return figure


@dataclass(frozen=True, eq=False)
class _Patches:
    """The domain on the plane, as small polygons with a number at each corner.

    Attributes:
        corners: `(n, k, 2)`; polygons with fewer than k corners repeat their last one.
        values: `(n, k)`.
        outline: pieces of the edge of the domain, `(pieces, 2, 2)`; empty for a box.
    """

    corners: Array
    values: Array
    outline: Array


def _limits(names: Sequence[str], view: HeadView) -> tuple[float, float]:
    """The least and the largest height of surfaces that share a scale; the error begins at zero.

    They are apart also where the values are equal up to roundings, which would fill the picture otherwise.
    """
    found = [patches.values for patches in (_patches(view, name) for name in names)]
    lo, hi = min(float(f.min()) for f in found), max(float(f.max()) for f in found)
    if "error" in names:
        return 0.0, hi or 1.0
    size = max(abs(lo), abs(hi))
    return (lo, hi) if hi - lo > _FLAT * size else (lo - (size or 1.0) / 2, hi + (size or 1.0) / 2)


def _draw(place: Any, view: HeadView, name: str, limits: tuple[float, float], *, below: bool) -> None:
    from mpl_toolkits.mplot3d.art3d import Poly3DCollection

    (x0, y0), (x1, y1) = view.window.lo, view.window.hi
    lo, hi = limits
    floor = lo - _DROP * (hi - lo)
    patches = _patches(view, name)
    _draw_floor(place, view, patches, floor, rank=3 if below else 1)
    corners = np.concatenate([patches.corners, patches.values[:, :, None]], axis=2)
    colours = _lit(corners, view.window, limits, "error" if name == "error" else "value")
    look: dict[str, Any] = {"linewidths": 0, "antialiaseds": False, "rasterized": True, "zorder": 2}
    place.add_collection3d(Poly3DCollection(list(corners), facecolors=colours, **look))
    place.set(xlim=(x0, x1), ylim=(y0, y1), zlim=(floor, hi))
    ratio = (y1 - y0) / (x1 - x0)
    place.set_box_aspect((1, ratio if 0.5 <= ratio <= 2 else 1, 0.95), zoom=1.0)
    small = _scale(place)
    place.set_xlabel(view.names[0], labelpad=-4 - 8 * (1 - small), fontsize=9 * small)
    place.set_ylabel(view.names[1], labelpad=-4 - 8 * (1 - small), fontsize=9 * small)
    words = {"head": "value of the head", "function": "value of the function", "error": "|head − function|"}
    place.set_zlabel(words[name], labelpad=-2 - 12 * (1 - small), fontsize=9 * small)
    _tidy(place, view, lo, hi)


def _patches(view: HeadView, name: str) -> _Patches:
    """Squares where the whole square lies in the domain, and what is left of it at the edge of the domain."""
    across = view.across if name == "head" else view.across_function
    values = {"head": view.computed, "function": view.function, "error": view.error}[name](across)
    plane = view.points(across)[:, list(view.axes)]
    number = np.arange(across**2).reshape(across, across)
    ring = (number[:-1, :-1], number[:-1, 1:], number[1:, 1:], number[1:, :-1])
    squares = np.stack([corner.ravel() for corner in ring], axis=1)
    known = np.isfinite(values[squares])
    whole, part = squares[known.all(axis=1)], squares[known.any(axis=1) & ~known.all(axis=1)]
    corners, heights, outline = plane[whole], values[whole], np.empty((0, 2, 2))
    asks_black_box = name != "head" and view.compiled.target.graph is None
    if len(part) and not asks_black_box:
        places, edge = _cut(view, plane, np.isfinite(values), part)
        measured = _measured_at(view, name, places.reshape(-1, 2)).reshape(places.shape[:2])
        filled = np.stack([corners[:, k] for k in (0, 1, 2, 3, 3, 3, 3, 3)], axis=1)
        corners = np.concatenate([filled, places])
        heights = np.concatenate([heights[:, [0, 1, 2, 3, 3, 3, 3, 3]], measured])
        outline = edge
    if not len(corners):
        raise UnsupportedError(
            f"the domain is too thin to be drawn as a surface at {across} × {across} points", "Use plot_head."
        )
    return _Patches(corners, heights, outline)


def _cut(view: HeadView, plane: Array, inside: NDArray[np.bool_], squares: NDArray[np.int64]) -> tuple[Array, Array]:
    """Squares that lie partly in the domain, cut at its edge: polygons `(n, 8, 2)` and pieces of the edge.

    A walk around each square keeps the corners inside, and where it enters or leaves the domain the point that bisection finds.
    """
    following = np.roll(squares, -1, axis=1)
    crossing = inside[squares] != inside[following]
    starts, ends = squares[crossing], following[crossing]
    near = np.where(inside[starts][:, None], plane[starts], plane[ends])
    far = np.where(inside[starts][:, None], plane[ends], plane[starts])
    for _ in range(_HALVINGS):
        middle = (near + far) / 2
        holds = view.inside(_lifted(view, middle))[:, None]
        near, far = np.where(holds, middle, near), np.where(holds, far, middle)
    places = np.full((len(squares), 8, 2), np.nan)
    places[:, ::2] = np.where(inside[squares][..., None], plane[squares], np.nan)
    places[:, 1::2][crossing] = near
    outline = [piece for row, flags in zip(places[:, 1::2], crossing) for piece in row[flags].reshape(-1, 2, 2)]
    for row in places:  # missing corners repeat one that is there
        kept = row[np.isfinite(row[:, 0])]
        row[:] = np.concatenate([kept, np.repeat(kept[-1:], 8 - len(kept), axis=0)])
    return places, np.array(outline).reshape(-1, 2, 2)


def _lifted(view: HeadView, plane: Array) -> Array:
    """Points of the plane as points of the input space."""
    points = np.tile(view.at, (len(plane), 1))
    points[:, list(view.axes)] = plane
    return points


def _measured_at(view: HeadView, name: str, plane: Array) -> Array:
    points = _lifted(view, plane)
    if name == "head":
        return view.computed_at(points)
    function = view.function_at(points)
    return function if name == "function" else np.abs(view.computed_at(points) - function)


def _scale(place: Any) -> float:
    """1 for a surface of the usual size, less for a smaller one: what texts and dots are scaled by."""
    figure = place.figure
    across, up = (
        place.get_position().width * figure.get_figwidth(),
        place.get_position().height * figure.get_figheight(),
    )
    return float(np.clip(min(across / _WIDTH, up / (0.85 * _HEIGHT)), 0.55, 1.0))


def _tidy(place: Any, view: HeadView, lo: float, hi: float) -> None:
    """Few ticks, none below the surface nor at the corners of the floor, where two axes meet; no walls."""
    from matplotlib.ticker import MaxNLocator

    choose = MaxNLocator(4, steps=[1, 2, 2.5, 5, 10])
    (x0, y0), (x1, y1) = view.window.lo, view.window.hi
    small = _scale(place)
    for axis, first, last, room in ((place.xaxis, x0, x1, 0.06), (place.yaxis, y0, y1, 0.06), (place.zaxis, lo, hi, 0)):
        inner = (last - first) * (room - 1e-9)
        axis.set_ticks([t for t in choose.tick_values(first, last) if first + inner <= t <= last - inner])
        axis.pane.set_visible(False)
        axis.line.set_color(RULE)
        axis.set_tick_params(labelsize=7.5 * small, pad=-2 - 2.5 * (1 - small), color=RULE)
    place.grid(False)


def _lit(corners: Array, window: Box, limits: tuple[float, float], name: str) -> Array:
    """Colours of the faces by height, darker on slopes that turn away from the light."""
    lo, hi = limits
    unit = (corners - [*window.lo, lo]) / [*(window.hi - window.lo), (hi - lo) / 0.6]
    normal = np.cross(unit[:, 2] - unit[:, 0], unit[:, 3] - unit[:, 1])
    length = np.linalg.norm(normal, axis=1, keepdims=True)
    normal = np.where(length > 0, normal / np.where(length > 0, length, 1.0), [0.0, 0.0, 1.0])
    light = np.abs(normal @ _SUN)
    colours = np.asarray(colour_map(name)((corners[:, :4, 2].mean(axis=1) - lo) / (hi - lo)))
    colours[:, :3] *= (0.8 + 0.2 * light)[:, None]
    return colours


@dataclass(frozen=True, eq=False)
class _Cells:
    """The cells of the keys inside the window.

    Attributes:
        shapes: a polygon for each; empty where they are too many to be seen.
        tints: of each polygon.
        centers: of each polygon, `(cells, 2)`.
        tint_at: the tints at points of the input space.
    """

    shapes: list[Array]
    tints: list[int]
    centers: Array
    tint_at: Callable[[Array], NDArray[np.int64]]


def _draw_floor(place: Any, view: HeadView, patches: _Patches, floor: float, *, rank: int) -> None:
    """The cells of the keys at the height of the floor."""
    from mpl_toolkits.mplot3d.art3d import Poly3DCollection

    cells, window = _cells(view), view.window
    frame = window.lo + np.array([(0, 0), (1, 0), (1, 1), (0, 1), (0, 0)]) * (window.hi - window.lo)
    if view.compiled.target.region is None and not view.is_cloud:
        plain, tints = (cells.shapes, cells.tints) if cells.shapes else ([frame[:4]], [len(TINTS) - 1])
        solid = _raised(plain, floor)
        edges: dict[str, Any] = {"edgecolors": INK, "linewidths": _thin(cells)} if cells.shapes else {"linewidths": 0}
        place.add_collection3d(Poly3DCollection(solid, facecolors=[TINTS[t] for t in tints], zorder=rank, **edges))
        _draw_lines(place, [frame], floor, INK, 0.8, rank + 0.1)
    else:
        look: dict[str, Any] = {"linewidths": 0, "antialiaseds": False, "rasterized": True}
        middles = _lifted(view, patches.corners.mean(axis=1))
        fills = [TINTS[t] for t in cells.tint_at(middles)]
        place.add_collection3d(
            Poly3DCollection(_raised(list(patches.corners), floor), facecolors=fills, zorder=rank, **look)
        )
        _draw_lines(place, list(patches.outline), floor, INK, 0.8, rank + 0.1)
        _draw_lines(place, _edges_inside(view, cells), floor, INK, _thin(cells), rank + 0.1)
        _draw_lines(place, [frame], floor, RULE, 0.6, 0.9)
    dots = cells.centers[((cells.centers >= window.lo) & (cells.centers <= window.hi)).all(axis=1)]
    if 0 < len(dots) <= _DOTS_DRAWN:
        big = (9.0 if len(dots) <= 120 else 4.0) * _scale(place) ** 2
        look = {"s": big, "c": ACCENT, "depthshade": False, "linewidths": 0}
        place.scatter(dots[:, 0], dots[:, 1], floor, zorder=rank + 0.2, **look)
    if not cells.shapes:
        look = {"transform": place.transAxes, "ha": "center", "fontsize": 8, "color": MUTED}
        said = f"{view.partition.num_cells:,} cells, too small to draw" if view.has_cells else "a network has no cells"
        place.text2D(0.5, 0.02, said, **look)


def _draw_lines(place: Any, lines: Sequence[Array], floor: float, colour: str, width: float, rank: float) -> None:
    from mpl_toolkits.mplot3d.art3d import Line3DCollection

    if lines:
        place.add_collection3d(Line3DCollection(_raised(lines, floor), colors=colour, linewidths=width, zorder=rank))


def _thin(cells: _Cells) -> float:
    return 0.5 if len(cells.shapes) <= 150 else 0.25


def _raised(lines: Sequence[Array], floor: float) -> list[Array]:
    """Polygons and lines of the plane, at the height of the floor."""
    return [np.column_stack([line, np.full(len(line), floor)]) for line in lines]


def _cells(view: HeadView) -> _Cells:
    if not view.has_cells:
        return _no_cells()
    partition = view.partition
    if isinstance(partition, ProductGrid):
        return _grid_cells(view, partition)
    centers = partition.to_power_diagram().centers[:, list(view.axes)]
    if partition.num_cells > _CELLS_DRAWN:
        return _no_cells()
    found = polygons(sliced(partition, view.axes, view.at), view.window)
    kept = [k for k, shape in enumerate(found) if len(shape)]
    shapes = [found[k] for k in kept]
    tints = tint_numbers(touching(shapes))
    of_cell = np.zeros(partition.num_cells, dtype=np.int64)
    of_cell[kept] = tints
    return _Cells(shapes, tints, centers[kept], lambda points: of_cell[partition.cell(points)])


def _grid_cells(view: HeadView, grid: ProductGrid) -> _Cells:
    """Rectangles, in tints that repeat every second column and row."""
    sides = []
    for k, axis in enumerate(view.axes):
        centers, lo, hi = grid.axes[axis], float(view.window.lo[k]), float(view.window.hi[k])
        edges = np.concatenate([[-np.inf], (centers[1:] + centers[:-1]) / 2, [np.inf]]).clip(lo, hi)
        sides.append([(j, edges[j], edges[j + 1], centers[j]) for j in range(len(centers)) if edges[j] < edges[j + 1]])
    if len(sides[0]) * len(sides[1]) > _CELLS_DRAWN:
        return _no_cells()
    cells = [(column, row) for row in sides[1] for column in sides[0]]
    first, second = view.axes

    def tint_at(points: Array) -> NDArray[np.int64]:
        index = grid.locate(points)
        return np.asarray(index[:, first] % 2 + 2 * (index[:, second] % 2))

    return _Cells(
        [np.array([(a[1], b[1]), (a[2], b[1]), (a[2], b[2]), (a[1], b[2])]) for a, b in cells],
        [a[0] % 2 + 2 * (b[0] % 2) for a, b in cells],
        np.array([(a[3], b[3]) for a, b in cells]),
        tint_at,
    )


def _no_cells() -> _Cells:
    return _Cells([], [], np.empty((0, 2)), lambda points: np.full(len(points), len(TINTS) - 1))


def _edges_inside(view: HeadView, cells: _Cells) -> list[Array]:
    """Short pieces of the edges of the cells, those that lie in the domain."""
    ends = [np.stack([shape, np.roll(shape, -1, axis=0)], axis=1) for shape in cells.shapes]
    if not ends:
        return []
    pieces = np.concatenate([_pieces(view.window, *edge) for edge in np.concatenate(ends)])
    return list(pieces[view.inside(_lifted(view, pieces.mean(axis=1)))])


def _pieces(window: Box, start: Array, end: Array) -> Array:
    """A line cut into pieces of about a 150th of the window."""
    long = float(np.linalg.norm((end - start) / (window.hi - window.lo)))
    ticks = start + np.linspace(0, 1, max(2, int(150 * long) + 1))[:, None] * (end - start)
    return np.stack([ticks[:-1], ticks[1:]], axis=1)
