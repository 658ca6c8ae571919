"""Labels in the pictures of the documentation do not collide: measured boxes of texts, legends, lines and marks."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from partita.plots.style import new_figure, styled
from partita.reproduction.figure_list import FIGURES
from partita.reproduction.table import Table

ROOT = Path(__file__).parent.parent
GAP = 2.0  # pixels at 100 per inch that words keep apart from other texts; numbers at ticks may touch in a corner


def all_axes(figure: Figure) -> list[Axes]:
    return [a for a in figure.findobj(Axes) if a.get_visible()]


def hidden_ticks(figure: Figure) -> set[int]:
    """Labels of ticks beyond the ends of an axis: they exist and are not drawn."""
    found = set()
    for axis in (axis for axes in all_axes(figure) for axis in (axes.xaxis, axes.yaxis)):
        place = axis.get_transform().transform
        lo, hi = sorted(place(np.asarray(axis.get_view_interval())))
        for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks()):
            if not lo - 1e-6 * (hi - lo) <= place(tick.get_loc()) <= hi + 1e-6 * (hi - lo):
                found |= {id(tick.label1), id(tick.label2)}
    return found


def texts(figure: Figure) -> list[tuple[str, Bbox]]:
    """Every text that is drawn, with its box in pixels."""
    canvas = FigureCanvasAgg(figure)
    figure.set_dpi(100)
    figure.draw_without_rendering()
    hidden = hidden_ticks(figure)
    shown = [t for t in figure.findobj(Text) if id(t) not in hidden and t.get_visible() and t.get_text().strip()]
    shown = [t for t in shown if t.get_rotation() % 90 == 0]  # the boxes of slanted texts say little
    boxes = [(t.get_text(), t.get_window_extent(canvas.get_renderer())) for t in shown]
    return [(text, box) for text, box in boxes if box.width > 0]


def is_number(text: str) -> bool:
    return not any(letter.isalpha() for letter in text.replace("mathdefault", ""))


def near(a: Bbox, b: Bbox, gap: float) -> bool:
    across, up = min(a.x1, b.x1) - max(a.x0, b.x0), min(a.y1, b.y1) - max(a.y0, b.y0)
    return bool(across > -gap and up > -gap)


def along(line: Any, axes: Axes) -> np.ndarray:
    """Points of a line, close together, in pixels; only its marks if it has no line."""
    with np.errstate(all="ignore"):
        points = line.get_transform().transform(np.column_stack(line.get_data()))
    points = points[np.isfinite(points).all(axis=1)]
    if len(points) > 1 and line.get_linestyle() not in ("None", "", " "):
        lengths = np.hypot(*np.diff(points, axis=0).T)
        steps = [np.linspace(a, b, 2 + int(min(n, 2000))) for a, b, n in zip(points[:-1], points[1:], lengths)]
        points = np.concatenate(steps)
    inside = axes.get_window_extent().padded(1.0)
    return points[(points >= inside.min).all(axis=1) & (points <= inside.max).all(axis=1)]


def collisions(figure: Figure) -> Iterator[str]:
    """Texts on texts, texts beyond the figure, and legends or notes that a line or mark of their panel runs through."""
    found = texts(figure)
    renderer = figure.canvas.get_renderer()
    for (a, p), (b, q) in combinations(found, 2):
        if near(p, q, -2.0 if is_number(a) and is_number(b) else GAP):
            yield f"{a!r} on {b!r}"
    for a, p in found:
        if p.x0 < -0.5 or p.y0 < -0.5 or p.x1 > figure.bbox.x1 + 0.5 or p.y1 > figure.bbox.y1 + 0.5:
            yield f"{a!r} is cut"
    for axes in all_axes(figure):
        notes = [(t.get_text(), t.get_window_extent(renderer)) for t in axes.texts if t.get_text()]
        panel = axes.get_window_extent(renderer)
        for text, box in notes:
            if not (box.x0 >= panel.x0 and box.x1 <= panel.x1 and box.y0 >= panel.y0 and box.y1 <= panel.y1):
                yield f"the note {text!r} leaves its panel"
        legend = axes.get_legend()
        if legend is not None:
            notes += [(t.get_text(), t.get_window_extent(renderer)) for t in legend.get_texts()]
        for line in axes.lines:
            points = along(line, axes)
            for text, box in notes:
                if ((points > box.min).all(axis=1) & (points < box.max).all(axis=1)).any():
                    yield f"a line runs through {text!r}"


def lesson() -> ModuleType:
    """benchmarks/lesson.py, which draws the lesson's charts."""
    folder = str(ROOT / "benchmarks")
    sys.path.insert(0, folder)
    try:
        spec = importlib.util.spec_from_file_location("lesson", f"{folder}/lesson.py")
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(folder)


# what benchmarks/lesson.py prints, a few rows of each curve with its ends
CURVES = {
    "hard": [(132, 157, 0.496), (3239, 3361, 0.0994), (320399, 321601, 0.00999)],
    "tuned": [(120, 144, 0.232), (450, 495, 0.0284), (9760, 9964, 0.000992)],
    "corrected": [(143, 169, 0.0567), (475, 521, 0.000878), (4187, 4321, 9.58e-06)],
    "affine": [(15, 57, 0.272), (416, 1294, 0.00946), (4212, 12773, 0.000935)],
    "fitted": [(12, 21, 0.00664), (64, 82, 2.57e-07), (168, 196, 9.29e-11)],
    "Chebyshev": [(4, 4, 1.7), (100, 100, 8e-6), (225, 225, 6e-10)],
}


QUICK = ("attention-maps",)


def recorded(name: str) -> dict[str, Table]:
    return {p.stem: Table.from_csv(p.read_text()) for p in (ROOT / "docs/reproduction" / name).glob("*.csv")}


@pytest.mark.parametrize("name", ["lesson", "sharpness"])
def test_labels_of_the_lesson_do_not_collide(name: str) -> None:
    module = lesson()
    figure = module.draw_lesson(CURVES) if name == "lesson" else module.draw_sharpness(module.sharpness_curve())
    assert list(collisions(figure)) == []


@pytest.mark.parametrize("name", QUICK)
def test_labels_of_the_report_do_not_collide(name: str) -> None:
    with styled():
        assert list(collisions(FIGURES[name](recorded(name)))) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(FIGURES) - set(QUICK)))
def test_labels_of_the_other_figures_do_not_collide(name: str) -> None:
    with styled():
        assert list(collisions(FIGURES[name](recorded(name)))) == []


def test_collisions_are_noticed() -> None:
    """Negative control: a note on a line, a note beyond its panel, two notes on each other."""
    with styled():
        figure, panels = new_figure(1)
        panel = panels[0, 0]
        panel.plot([0, 1], [0, 1], label="a long name of a line")
        panel.set(xlim=(0, 1), ylim=(0, 1))
        assert list(collisions(figure)) == []
        panel.annotate("on the line", (0.5, 0.5))
        assert list(collisions(figure)) == ["a line runs through 'on the line'"]
        panel.annotate("off the panel", (0.1, -0.01))
        assert any("leaves its panel" in c for c in collisions(figure))
        panel.annotate("over it", (0.52, 0.5))
        assert any("'on the line' on 'over it'" in c for c in collisions(figure))
        panel.legend(loc="center")
        assert any("a line runs through 'a long name" in c for c in collisions(figure))
