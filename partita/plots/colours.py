"""The colours of figures, documentation and studio: one table of numbers, shared by all of them.

`partita/studio/page/colours.js` holds the same numbers, and a test compares them; `print_palette()` prints them as JSON.
Colours are sRGB, written #rrggbb. A colour map is a list of control points at equal distances; between them each channel is
interpolated linearly in sRGB, which is what shaders and canvases do most simply.

tests/test_colours.py tests what follows for normal vision, protanopia, deuteranopia and tritanopia. Neighbouring series differ by
at least 12 in CIEDE2000, and any two tints by at least 9. The maps are monotone in lightness (the signed map on either side of
zero), so they also survive printing in grey. In grey, markers and dashes tell series apart (`partita.plots.style.mark`).
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from partita.errors import MissingExtraError, UnsupportedError

if TYPE_CHECKING:
    from matplotlib.colors import Colormap

__all__ = [
    "ACCENT",
    "BACKGROUND",
    "COLOURS",
    "DARK",
    "INK",
    "LIGHT",
    "MAPS",
    "MUTED",
    "PANEL",
    "RULE",
    "SOFT",
    "TINTS",
    "Theme",
    "colour_at",
    "colour_map",
    "palette",
    "print_palette",
    "tint_numbers",
]


@dataclass(frozen=True)
class Theme:
    """The colours that depend on the background.

    Attributes:
        background: of the page and of figures.
        panel: of boxes that stand out from the page: code, cards, controls.
        rule: hairlines, grid lines, borders of tables.
        soft: frames, ticks and what is less important. Not for text.
        muted: text that is less important.
        ink: text and lines.
        accent: what the reader should look at first: the head, its keys.
        series: categorical colours (Okabe and Ito 2008), the first and the last adapted to the background.
        tints: fills of cells. `tint_numbers` gives neighbouring cells different ones.
    """

    background: str
    panel: str
    rule: str
    soft: str
    muted: str
    ink: str
    accent: str
    series: tuple[str, ...]
    tints: tuple[str, ...]


LIGHT = Theme(
    background="#ffffff",
    panel="#f5f7fa",
    rule="#e4e7eb",
    soft="#9aa5b1",
    muted="#52606d",
    ink="#1f2933",
    accent="#c2410c",
    series=("#000000", "#d55e00", "#0072b2", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#7f7f7f"),
    tints=("#d1c0f5", "#b7c3a8", "#f6f3da", "#f7d8a4", "#bbd7d0", "#e3e7fd"),
)
DARK = Theme(
    background="#12171d",
    panel="#1b222a",
    rule="#2b343e",
    soft="#66717d",
    muted="#a9b4c0",
    ink="#e8edf2",
    accent="#f0894d",
    series=("#e8edf2", "#d55e00", "#0072b2", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#7f7f7f"),
    tints=("#2f2014", "#255f4d", "#57350f", "#0f3937", "#28264c", "#4b4873"),
)

# value: functions and heads, dark to light · signed: blue below zero, orange above · error: size of an error, paper to dark ·
# weight: softmax weights and margins, paper to ink
MAPS: Mapping[str, tuple[str, ...]] = {
    "value": ("#1b1244", "#213070", "#13558e", "#0f7a9c", "#279ea7", "#5dbfa5", "#a2d986", "#dde984", "#fdf8a8"),
    "signed": ("#08306b", "#2a63a8", "#5e9bd0", "#aacbe8", "#f7f7f5", "#f8cfa6", "#ee9a55", "#c25a17", "#6f2c02"),
    "error": ("#fdfaf3", "#f6e9ce", "#f2ce9a", "#f1a353", "#e67b27", "#cf5613", "#a63e1e", "#72291e", "#361715"),
    "weight": ("#f8fafd", "#d6dde4", "#b4bfca", "#91a0b0", "#718295", "#55677b", "#3c4f62", "#293a4b", "#1b2835"),
}

# figures are drawn on white
BACKGROUND, PANEL, RULE, SOFT = LIGHT.background, LIGHT.panel, LIGHT.rule, LIGHT.soft
MUTED, INK, ACCENT = LIGHT.muted, LIGHT.ink, LIGHT.accent
COLOURS, TINTS = LIGHT.series, LIGHT.tints


def colour_at(name: str, at: float) -> tuple[float, float, float]:
    """A colour of a map as red, green and blue from 0 to 1.

    Args:
        name: "value", "signed", "error" or "weight".
        at: the place, from 0 to 1; clipped. For "signed", zero is at 0.5.

    Raises:
        UnsupportedError: there is no such map.

    >>> from partita.plots.colours import colour_at
    >>> [round(255 * c) for c in colour_at("value", 0.0)]  # 0x1b, 0x12, 0x44
    [27, 18, 68]
    """
    points = [_channels(colour) for colour in _map(name)]
    place = min(max(at, 0.0), 1.0) * (len(points) - 1)
    first = min(int(place), len(points) - 2)
    share = place - first
    red, green, blue = ((1 - share) * a + share * b for a, b in zip(points[first], points[first + 1]))
    return red, green, blue


@cache
def colour_map(name: str) -> Colormap:
    """The map as a matplotlib Colormap. Where a number is missing, nothing is drawn.

    Args:
        name: "value", "signed", "error" or "weight".

    Raises:
        UnsupportedError: there is no such map.
        MissingExtraError: matplotlib is not installed.

    >>> from partita.plots.colours import colour_map
    >>> colour_map("value").name
    'partita value'
    """
    points = _map(name)
    try:
        from matplotlib.colors import LinearSegmentedColormap
    except ImportError as error:
        raise MissingExtraError.of("plots need", "plot") from error
    return LinearSegmentedColormap.from_list(f"partita {name}", list(points), N=512)


def tint_numbers(neighbours: Sequence[Iterable[int]]) -> list[int]:
    """A tint for each cell, as an index into `Theme.tints`, such that neighbouring cells have different ones.

    The cell with the fewest neighbours is put aside until none is left; then tints are given in the opposite order, each the first
    that no neighbour has. In a plane some cell always has at most five neighbours among those left, so six tints suffice.

    Args:
        neighbours: for each cell the numbers of the cells that it touches, in both directions.

    >>> from partita.plots.colours import tint_numbers
    >>> tint_numbers([[1, 2], [0, 2], [0, 1], []])
    [2, 1, 0, 0]
    """
    around = [set(cells) - {number} for number, cells in enumerate(neighbours)]
    degree, placed = [len(cells) for cells in around], [False] * len(around)
    waiting = [(count, number) for number, count in enumerate(degree)]
    heapq.heapify(waiting)
    order = []
    while waiting:
        count, number = heapq.heappop(waiting)
        if placed[number] or count != degree[number]:  # an entry from before a neighbour was put aside
            continue
        placed[number] = True
        order.append(number)
        for other in around[number]:
            degree[other] -= 1
            if not placed[other]:
                heapq.heappush(waiting, (degree[other], other))
    tints = [-1] * len(around)
    for number in reversed(order):
        taken = {tints[other] for other in around[number]}
        tints[number] = next(k for k in range(len(around) + 1) if k not in taken)
    return [tint % len(TINTS) for tint in tints]


def palette() -> dict[str, Any]:
    """Every number of this file as plain data, for JSON: `light`, `dark` and `maps`.

    >>> import json
    >>> from partita.plots.colours import palette
    >>> json.loads(json.dumps(palette()))["light"]["ink"]
    '#1f2933'
    """
    found: dict[str, Any] = {name: asdict(theme) for name, theme in (("light", LIGHT), ("dark", DARK))}
    for theme in found.values():
        theme.update(series=list(theme["series"]), tints=list(theme["tints"]))
    return {**found, "maps": {name: list(points) for name, points in MAPS.items()}}


def print_palette() -> None:
    """Print every number of this file as JSON.

    >>> from partita.plots.colours import print_palette
    >>> print_palette()  # doctest: +ELLIPSIS
    {
      "light": {
        "background": "#ffffff",
    ...
    """
    print(json.dumps(palette(), indent=2))


def _map(name: str) -> tuple[str, ...]:
    if name not in MAPS:
        raise UnsupportedError(f"colour map {name!r}; expected one of {', '.join(MAPS)}.")
    return MAPS[name]


def _channels(colour: str) -> tuple[float, ...]:
    return tuple(int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5))
