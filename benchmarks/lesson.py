"""The charts and tables of docs/lesson.md: error against keys for each choice of values, and error against temperature.

python benchmarks/lesson.py --out docs/images    # a minute or two; writes lesson.svg, sharpness.svg and prints the tables
"""

from __future__ import annotations

import argparse
import itertools
import math
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from accuracy import FUNCTIONS, chebyshev_error

import partita as pa
from partita.functions.target import make_target
from partita.heads import GridHead
from partita.plots.colours import COLOURS, INK
from partita.plots.style import clean, new_figure, save, styled
from partita.search.averaged_values import corrected_values, tuned_values

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EXPRESSION = "sin(3*x0) + x0*cos(2*x1)"
BOX = pa.Box([-1, -1], [1, 1])
TOLERANCES = {
    "hard": (0.5, 0.25, 0.1, 0.05, 0.02, 0.01),
    "tuned": (0.3, 0.1, 0.03, 0.01, 3e-3, 1e-3),
    "corrected": (0.1, 0.03, 1e-2, 1e-3, 1e-4, 1e-5),
    "affine": (0.3, 0.1, 0.03, 0.01, 3e-3, 1e-3),
    "fitted": (0.1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 1e-8, 1e-10),
}
# a colour and a marker for each, and where its name stands: points from the last mark, and which end of the text is there
STYLE = {
    "hard": (COLOURS[0], "s", (8, 0), "left"),
    "tuned": (COLOURS[2], "o", (8, 0), "left"),
    "corrected": (COLOURS[3], "^", (8, 0), "left"),
    "affine": (COLOURS[4], "D", (-2, -11), "right"),
    "fitted": (COLOURS[1], "o", (8, 0), "left"),
    "Chebyshev": (COLOURS[7], "x", (8, 0), "left"),
}


def build(method: str, tolerance: float) -> pa.Compiled:
    return pa.compile(EXPRESSION, BOX, tolerance=tolerance, method=method)


def row(method: str, tolerance: float, c: pa.Compiled | None = None) -> str:
    """A line of the table: method, tolerance, keys, stored numbers, proved bound."""
    c = c or build(method, tolerance)
    return f"| {method} | {tolerance:g} | {c.num_keys:,} | {c.num_parameters:,} | {c.error_bound:.3g} |"


def sharpness_lines(found: dict[str, list[tuple[float, float]]]) -> list[str]:
    """The best sharpness of each choice of values, and what the sharpest head loses."""
    lines = []
    for name, rows in found.items():
        kappa, error = min(rows, key=lambda r: r[1])
        lines.append(f"{name}: best κ {kappa:.2f}, error {error:.2e}; at κ = {rows[-1][0]:.0f}: {rows[-1][1]:.2e}")
    return lines


def curves() -> dict[str, list[tuple[int, int, float]]]:
    """Keys, stored numbers and proved bound of the smallest head of each method, tolerance by tolerance."""
    found: dict[str, list[tuple[int, int, float]]] = {}
    for method, tolerances in TOLERANCES.items():
        for tolerance in tolerances:
            c = build(method, tolerance)
            found.setdefault(method, []).append((c.num_keys, c.num_parameters, c.error_bound))
            print(row(method, tolerance, c), flush=True)
    function = next(f for f in FUNCTIONS if f.name == "sin 3x + x cos 2y")
    rows = [(n * n, n * n, chebyshev_error(function, (n, n))) for n in range(2, 22)]
    found["Chebyshev"] = [row for row in rows if row[2] > 1e-11]
    return found


def sharpness_curve(cells: int = 32) -> dict[str, list[tuple[float, float]]]:
    """The largest sampled error of a 1-D head on sin 3x with a fixed grid, as the temperature changes; ghosts 4."""
    box, target = pa.Box([-1.0], [1.0]), make_target("sin(3*x0)", pa.Box([-1.0], [1.0]))
    points = np.linspace(-1, 1, 4001)[:, None]
    truth, h, ghosts = np.sin(3 * points), 2 / cells, 4
    grid = pa.ProductGrid.uniform(box, cells + 2 * ghosts, ghosts=ghosts)
    found: dict[str, list[tuple[float, float]]] = {"tuned": [], "corrected": []}
    for kappa in np.geomspace(0.6, 64, 60):
        for name in found:
            values = (
                tuned_values(target, grid) if name == "tuned" else corrected_values(target, grid, (ghosts,), (kappa,))
            )
            head = GridHead(
                grid,
                kappa / h**2,
                torch.from_numpy(values),
                half_windows=grid.counts[0],
                input_shapes=((1,),),
                output_shape=(1,),
            )
            error = float(np.abs(head.evaluate(torch.from_numpy(points)).numpy() - truth).max())
            found[name].append((float(kappa), error))
    return found


def draw_lesson(found: dict[str, list[tuple[int, int, float]]]) -> Figure:
    """Error against keys, a curve for each choice of values with its name at its end."""
    with styled():
        figure, panels = new_figure(1, width=6.4, height=4.2)
        panel = panels[0, 0]
        for name, rows in found.items():
            colour, marker, offset, end = STYLE[name]
            line = ":" if name == "Chebyshev" else "-"
            panel.loglog([r[0] for r in rows], [r[2] for r in rows], line, color=colour, marker=marker)
            keys, _, error = rows[-1]
            panel.annotate(
                name, (keys, error), xytext=offset, textcoords="offset points", color=colour, va="center", ha=end
            )
        panel.margins(x=0.16, y=0.08)
        title = "sin 3x + x cos 2y on [−1, 1]²: the same head, other values"
        clean(panel, title, x="keys (for Chebyshev: coefficients)", y="proved error (Chebyshev: measured)")
    return figure


def draw_sharpness(found: dict[str, list[tuple[float, float]]]) -> Figure:
    """Error against sharpness; the best of each curve is named below it, where no curve passes."""
    with styled():
        figure, panels = new_figure(1, width=6.4, height=3.8)
        panel = panels[0, 0]
        for name, rows in found.items():
            colour, marker = STYLE[name][:2]
            panel.loglog(*zip(*rows), color=colour, lw=1.6)
            best = min(rows, key=lambda r: r[1])
            panel.plot(*best, marker, color=colour, ms=6)
            text = f"{name}: best at κ = {best[0]:.2g}, error {best[1]:.1g}"
            end = "right" if name == "tuned" else "center"  # the other curve passes to the right of this one
            panel.annotate(text, best, xytext=(0, -8), textcoords="offset points", color=colour, ha=end, va="top")
        limit = found["tuned"][-1][1]
        panel.axhline(limit, color=INK, lw=0.8, ls="--")
        start = min(rows[0][0] for rows in found.values())
        panel.annotate("the hard limit", (start, limit), xytext=(0, 4), textcoords="offset points", va="bottom")
        panel.margins(y=0.16)
        panel.set_xlim(0.4, 80)
        title = "sin 3x, 32 cells and 4 ghosts on each side: the limit is the wrong end"
        clean(panel, title, x="sharpness κ = R h² (inverse temperature →)", y="largest error sampled")
    return figure


def _write(figure: Figure, path: Path) -> None:
    with styled():
        save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/images"), help="where the charts go")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    sharpness = sharpness_curve()
    _write(draw_sharpness(sharpness), out / "sharpness.svg")
    print("\n".join(sharpness_lines(sharpness)))
    print("| method | tolerance | keys | stored numbers | proved error |\n|---|---|---|---|---|")
    found = curves()
    _write(draw_lesson(found), out / "lesson.svg")
    for name, rows in found.items():
        steps = [(a, b) for a, b in itertools.pairwise(rows) if b[0] > a[0] and b[2] < a[2]]
        last = steps[-1] if steps else None
        if last:
            slope = math.log(last[1][2] / last[0][2]) / math.log(last[1][0] / last[0][0])
            print(f"{name}: last slope of log error against log keys {slope:.1f}")


if __name__ == "__main__":
    main()
