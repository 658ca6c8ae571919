"""The picture of the front page, on a light and on a dark ground: `python docs/front_picture.py`.

A ring-shaped function as the head computes it, the cells of the head's keys, and the error, all over the same square.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure

import partita as pa
from partita.geometry import polygons
from partita.plots.colours import DARK, LIGHT, Theme, colour_map

FUNCTION, BOX, TOLERANCE = "exp(-20*(x0^2+x1^2-0.4)^2)", pa.Box([-1, -1], [1, 1]), 0.1
ACROSS = 420  # pixels of each image


def picture(compiled: pa.Compiled, theme: Theme) -> Figure:
    """Three squares: the head, its cells, its error."""
    lo, hi = -1.0, 1.0
    line = np.linspace(lo, hi, ACROSS)
    points = np.stack(np.meshgrid(line, line), axis=-1).reshape(-1, 2)
    head = np.asarray(compiled(points)).reshape(ACROSS, ACROSS)
    radius = (points * points).sum(axis=1)
    error = np.abs(head - np.exp(-20 * (radius - 0.4) ** 2).reshape(ACROSS, ACROSS))
    partition = compiled.partition
    cells = polygons(partition, BOX)
    centers = partition.to_power_diagram().centers
    heights = np.asarray(compiled(np.clip(centers, lo, hi)))

    figure = Figure(figsize=(12, 3.88), dpi=110)
    figure.patch.set_alpha(0)
    panels = figure.subplots(1, 3, gridspec_kw={"wspace": 0.06, "left": 0.002, "right": 0.998, "top": 1, "bottom": 0})
    where = {"extent": (lo, hi, lo, hi), "origin": "lower", "interpolation": "bilinear"}
    panels[0].imshow(head, cmap=colour_map("value"), **where)
    soft = colour_map("value")(np.clip(heights, 0, 1))
    ground = np.array([int(theme.background[k : k + 2], 16) / 255 for k in (1, 3, 5)])
    soft[:, :3] = 0.45 * soft[:, :3] + 0.55 * ground
    panels[1].add_collection(PolyCollection(cells, facecolors=soft, edgecolors=theme.ink, linewidths=0.8))
    panels[1].scatter(*centers.T, s=9, color=theme.accent, zorder=3)
    shades = colour_map("error") if theme is LIGHT else colour_map("error").reversed()
    panels[2].imshow(error, cmap=shades, vmin=0, vmax=compiled.error_bound, **where)
    for panel in panels:
        panel.set(xlim=(lo, hi), ylim=(lo, hi), xticks=[], yticks=[], aspect="equal", facecolor="none")
        for spine in panel.spines.values():
            spine.set_visible(False)
    return figure


def main(folder: Path) -> None:
    """Write `front-light.webp` and `front-dark.webp`."""
    compiled = pa.compile(FUNCTION, BOX, tolerance=TOLERANCE, method="adaptive")
    for name, theme in (("light", LIGHT), ("dark", DARK)):
        picture(compiled, theme).savefig(folder / f"front-{name}.webp", pil_kwargs={"quality": 88, "method": 6})


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "images")
