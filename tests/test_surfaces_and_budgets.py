"""Surfaces with cells on the floor, and error budgets: what is drawn is the head and its certificate."""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_pictures import collisions
from typer.testing import CliRunner

pytest.importorskip("matplotlib")

from matplotlib.figure import Figure
from matplotlib.text import Text
from PIL import Image

import partita as pa
from partita.cli import app
from partita.errors import MissingExtraError, ShapeError, UnsupportedError
from partita.plots import plot_error_budget, plot_surface, surface_plots
from partita.plots.colours import TINTS
from partita.plots.style import mark

WAVES = "sin(3*x0) + x0*cos(2*x1)"
CUBE = pa.Box([0] * 3, [1] * 3)
RING = pa.Region(pa.Box([-2, -2], [2, 2]), "1 <= x0**2 + x1**2 <= 2")


def black_box(z: np.ndarray) -> np.ndarray:
    return np.asarray(np.sin(3 * z[:, 0]))


@cache
def head(name: str) -> pa.Compiled:
    made: dict[str, Any] = {
        "grid": lambda: pa.head(WAVES, "[-1,1]^2", keys=(5, 4), sharpness=2.0),
        "scattered": lambda: pa.compile("abs(x0 - x1) + x0", "[0,1] x [-1,1]", tolerance=0.2, method="adaptive"),
        "ring": lambda: pa.compile("1/(x0**2 + x1**2)", RING, tolerance=0.1),
        "one key": lambda: pa.compile("x0 + x1", RING, tolerance=0.5),
        "line": lambda: pa.compile("sin(3*x0)", "[-1,1]", tolerance=0.01, norm=2),
        "vector": lambda: pa.compile("x0*x1, x0 - x1", "[-1,1]^2", tolerance=0.25),
        "cube": lambda: pa.compile("sin(x0)*x1 + x2", CUBE, tolerance=0.4, method="hard"),
        "cloud": lambda: pa.compile("sin(x0)+x1", pa.PointCloud([[0, 0], [1, 0.5], [2, 0], [3, 2]]), tolerance=0.2),
        "constant": lambda: pa.head("0*x0 + 3", "[-1,1]^2", keys=(2, 2), sharpness=2.0),
        "single": lambda: pa.compile(WAVES, "[-1,1]^2", tolerance=1e-2, dtype=torch.float32),
        "estimated": lambda: pa.compile(black_box, "[-1,1]^2", tolerance=0.1),
        "declared": lambda: pa.compile(black_box, "[-1,1]^2", tolerance=0.5, lipschitz=3.0),
    }
    return made[name]()


@pytest.fixture(autouse=True)
def few_points(monkeypatch: pytest.MonkeyPatch) -> None:
    """Coarse surfaces: drawing them takes most of the time."""
    monkeypatch.setattr(surface_plots, "_ACROSS", 31)


def words(figure: Figure) -> str:
    return "\n".join(t.get_text() for t in figure.findobj(Text))


def faces(figure: Figure, panel: int = 0) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The polygons of the floor and of the surface, each `(corners, 3)`."""
    from mpl_toolkits.mplot3d.art3d import Poly3DCollection

    found = [c for c in figure.axes[panel].collections if isinstance(c, Poly3DCollection)]
    assert len(found) == 2
    return _polygons(found[0]), _polygons(found[1])


def _polygons(collection: Any) -> list[np.ndarray]:
    """What the collection draws; matplotlib pads polygons with fewer corners."""
    padded = np.broadcast_to(collection._invalid_vertices, collection._faces.shape[:2])
    return [np.asarray(face)[~missing] for face, missing in zip(collection._faces, padded)]


# surfaces


@pytest.mark.parametrize("name", ["grid", "scattered"])
def test_the_surface_is_the_head_and_the_floor_its_cells(name: str) -> None:
    c = head(name)
    floor, surface = faces(plot_surface(c))
    corners = np.concatenate(surface)
    assert np.allclose(c(corners[:, :2]), corners[:, 2], atol=1e-12)
    assert not np.allclose(c(corners[:, :2]) + 1e-3, corners[:, 2], atol=1e-4)
    assert len(surface) == 30**2 and len({float(z) for shape in floor for z in shape[:, 2]}) == 1
    assert floor[0][0, 2] < corners[:, 2].min()
    if name == "grid":
        assert len(floor) == 20
    for shape in floor:  # each polygon is one cell: a point near each of its corners is in the cell of its middle
        middle = shape[:, :2].mean(axis=0)
        inner = middle + 0.99 * (shape[:, :2] - middle)
        assert len(set(c.partition.cell(np.vstack([inner, middle])).tolist())) == 1


@pytest.mark.parametrize("name", ["grid", "scattered"])
def test_neighbouring_cells_of_the_floor_have_different_tints(name: str) -> None:
    figure = plot_surface(head(name))
    floor, _ = faces(figure)
    drawn = figure.axes[0].collections[0]._facecolor3d
    named = [tuple(np.round(colour[:3], 4)) for colour in drawn]
    assert {f"#{''.join(f'{round(255 * v):02x}' for v in c)}" for c in named} <= set(TINTS)
    sides = [{tuple(np.round(corner, 5)) for corner in shape[:, :2]} for shape in floor]
    pairs = [(i, j) for i in range(len(floor)) for j in range(i) if len(sides[i] & sides[j]) >= 2]
    assert len(pairs) >= len(floor) - 1 and all(named[i] != named[j] for i, j in pairs)


def test_nothing_is_drawn_outside_a_region_and_its_edge_is_smooth() -> None:
    floor, surface = faces(plot_surface(head("ring")))
    for shapes in (floor, surface):
        squared = (np.concatenate(shapes)[:, :2] ** 2).sum(axis=1)
        assert squared.min() > 1 - 1e-6 and squared.max() < 2 + 1e-6
        assert np.sum(np.abs(squared - 1) < 1e-5) > 40 and np.sum(np.abs(squared - 2) < 1e-5) > 40  # cut at the edge
    corners = np.concatenate(surface)
    assert np.allclose(head("ring")(corners[:, :2]), corners[:, 2], atol=1e-12)
    assert len(faces(plot_surface(head("one key")))[0]) == len(floor)  # no edge between cells is in the domain


def test_several_surfaces_share_their_heights() -> None:
    figure = plot_surface(head("grid"), panels=("function", "head", "error"))
    first, second, third = figure.axes
    assert first.get_zlim() == second.get_zlim() != third.get_zlim()
    assert third.get_zlabel() == "|head − function|" and "the function" in words(figure)
    function, error = (np.concatenate(faces(figure, k)[1]) for k in (0, 2))
    assert np.allclose(np.sin(3 * function[:, 0]) + function[:, 0] * np.cos(2 * function[:, 1]), function[:, 2])
    assert error[:, 2].max() <= head("grid").error_bound


def test_slices_outputs_and_rotations() -> None:
    figure = plot_surface(head("cube"), axes=(0, 2), at=[0, 0.25, 0], elevation=-20, azimuth=100)
    corners = np.concatenate(faces(figure)[1])
    points = np.column_stack([corners[:, 0], np.full(len(corners), 0.25), corners[:, 1]])
    assert np.allclose(head("cube")(points), corners[:, 2])
    panel = figure.axes[0]
    assert "x1 = 0.25" in words(figure) and (panel.elev, panel.azim) == (-20, 100)
    from_above = plot_surface(head("cube")).axes[0]
    assert panel.collections[0].get_zorder() > 2 > from_above.collections[0].get_zorder()  # 2: the surface
    second = np.concatenate(faces(plot_surface(head("vector"), output=1))[1])
    assert np.allclose(head("vector")(second[:, :2])[:, 1], second[:, 2])


def test_a_constant_is_flat() -> None:
    panel = plot_surface(head("constant")).axes[0]
    assert panel.get_zlim()[1] - panel.get_zlim()[0] > 1  # not filled with roundings


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("line", {}, "two inputs"),
        ("cloud", {}, "isolated points"),
        ("grid", {"panels": "cells"}, "not drawn as a surface"),
        ("grid", {"panels": "height"}, "'height'"),
        ("grid", {"elevation": 91}, "elevation is 91"),
        ("grid", {"azimuth": np.nan}, "azimuth is nan"),
        ("grid", {"path": "a.jpg"}, r"\.svg, \.png or \.pdf"),
        ("grid", {"output": 1}, "output is 1"),
        ("cube", {"axes": (0, 0)}, "two different coordinates"),
    ],
)
def test_what_has_no_surface_is_refused(name: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedError, match=said):
        plot_surface(head(name), **options)


def test_a_wrong_slice_is_refused() -> None:
    with pytest.raises(ShapeError, match="expected 3"):
        plot_surface(head("cube"), at=[0, 0])


def test_a_black_box_is_asked_only_for_its_own_surface() -> None:
    asked: list[int] = []

    def counted(z: np.ndarray) -> np.ndarray:
        asked.append(len(z))
        return black_box(z)

    c = pa.compile(counted, "[-1,1]^2", tolerance=0.3)
    asked.clear()
    plot_surface(c)
    assert sum(asked) == 0
    plot_surface(c, panels="function")
    assert 1500 < sum(asked) <= 40 * 40


def test_surface_files_are_small_and_vectors_stay_vectors(tmp_path: Path) -> None:
    plot_surface(head("grid"), tmp_path / "new folder" / "a.svg")
    text = (tmp_path / "new folder" / "a.svg").read_text()
    assert len(text) < 300_000 and text.count("<image") == 1 and text.count("<path") > 25
    plot_surface(head("grid"), tmp_path / "a.png")
    with Image.open(tmp_path / "a.png") as picture:
        assert picture.width > 1000


@pytest.mark.parametrize("options", [{}, {"size": (2.6, 2.6)}, {"panels": ("function", "head", "error")}])
def test_labels_of_a_surface_keep_apart(options: dict[str, Any]) -> None:
    assert list(collisions(plot_surface(head("grid"), **options))) == []


# budgets


def row_of(figure: Figure, name: str) -> int:
    names = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    return names.index(name)


def drawn_marks(figure: Figure) -> dict[float, Any]:
    """The mark of each row."""
    marks = [line for line in figure.axes[0].lines if line.get_linestyle() == "None" and len(line.get_xdata())]
    return {float(line.get_ydata()[0]): line for line in marks}


@pytest.mark.parametrize("name", ["single", "line", "declared", "estimated", "constant"])
def test_a_budget_shows_every_term(name: str) -> None:
    c = head(name)
    figure = plot_error_budget(c)
    marks, numbers = drawn_marks(figure), [t.get_text() for t in figure.axes[1].get_yticklabels()]
    sources = ("approximation", "storage", "rounding", "input")
    for term in c.certificate.terms:
        row = row_of(figure, term.name)
        assert (row in marks) == (term.value > 0)
        if term.value > 0:
            assert marks[row].get_xdata()[0] == term.value
            assert marks[row].get_color() == mark(1 + sources.index(term.source))["color"]
        shown = float(numbers[row].lstrip("≈ ").split()[0])
        assert shown == pytest.approx(term.value, rel=0.01, abs=1e-300)
        assert shown >= term.value or c.certificate.kind == "estimated"
    assert figure.axes[0].get_xscale() == "log" and list(collisions(figure)) == []


def test_the_sum_the_tolerance_and_the_worst_error_are_marked() -> None:
    c = head("single")
    figure = plot_error_budget(c)
    assert drawn_marks(figure)[row_of(figure, "sum")].get_xdata()[0] == c.error_bound
    lines = [line for line in figure.axes[0].lines if line.get_linestyle() in ("--", ":")]
    upright = [line.get_xdata()[0] for line in lines]
    assert c.certificate.witness is not None
    assert sorted(upright) == sorted([0.01, c.certificate.witness.error])
    text = words(figure)
    assert "tolerance 0.01" in text and "worst error seen" in text and "rounding of the input" in text
    none_asked = words(plot_error_budget(head("grid")))
    assert "tolerance" not in none_asked
    assert "worst error seen" not in words(plot_error_budget(head("line")))  # a pointwise error, and a bound in L2


def test_an_estimate_has_no_sum() -> None:
    figure = plot_error_budget(head("estimated"))
    text = words(figure)
    assert "no bound is proved" in text and "nothing is proved about the largest error" in text
    assert "sum" not in [label.get_text() for label in figure.axes[0].get_yticklabels()]
    marks = drawn_marks(figure)
    assert marks[row_of(figure, "seen")].get_markerfacecolor() == "#ffffff"
    assert marks[row_of(figure, "summation")].get_markerfacecolor() != "#ffffff"
    proved = words(plot_error_budget(head("declared")))
    assert "no bound" not in proved and "if what was declared is true" in proved


def test_budgets_of_certificates_and_networks() -> None:
    alone = plot_error_budget(head("single").certificate)
    assert "sum" in words(alone)
    torch.manual_seed(0)
    mlp = torch.nn.Sequential(torch.nn.Linear(1, 2), torch.nn.ReLU(), torch.nn.Linear(2, 1)).eval()
    net = pa.attention_from_mlp(mlp, pa.Box([-1], [1]), tolerance=0.1)
    assert list(collisions(plot_error_budget(net))) == []
    with pytest.raises(UnsupportedError, match="Linear, which has none"):
        plot_error_budget(torch.nn.Linear(1, 1))  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match=r"\.svg, \.png or \.pdf"):
        plot_error_budget(head("single"), "a.jpg")


def test_terms_that_are_all_zero_are_drawn() -> None:
    claim = head("single").certificate
    zero = replace(claim, terms=tuple(replace(t, value=0.0) for t in claim.terms), error_bound=0.0, witness=None)
    assert list(collisions(plot_error_budget(zero))) == []
    tiny = replace(zero, terms=(replace(claim.terms[0], value=5e-324), *zero.terms[1:]), error_bound=5e-324)
    with warnings.catch_warnings(action="error"):
        assert plot_error_budget(tiny).axes[0].get_xlim()[0] > 0


# the command


def test_the_command_draws_surfaces_and_budgets(tmp_path: Path) -> None:
    folder = str(head("grid").save(tmp_path / "head"))

    def run(*options: str) -> Any:
        return CliRunner().invoke(app, ["plot", folder, *options])

    told = run("--out", str(tmp_path / "a.svg"), "--kind", "surface", "--camera", "40,10", "--panels", "head,error")
    assert told.exit_code == 0 and (tmp_path / "a.svg").read_text().count("<image") == 2, told.output
    told = run("--out", str(tmp_path / "b.svg"), "--kind", "budget")
    assert told.exit_code == 0 and (tmp_path / "b.svg").stat().st_size > 1000, told.output
    for options, said in (
        (["--kind", "map"], "head, surface, budget"),
        (["--kind", "surface", "--camera", "40"], "two angles"),
        (["--kind", "surface", "--sharpness", "1,4"], "one temperature"),
        (["--kind", "budget", "--panels", "head"], "Leave out --panels"),
    ):
        failed = run("--out", str(tmp_path / "c.svg"), *options)
        assert isinstance(failed.exception, UnsupportedError) and said in str(failed.exception)


def test_matplotlib_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    for draw in (plot_surface, plot_error_budget):
        with pytest.raises(MissingExtraError, match="plot"):
            draw(head("grid"))  # type: ignore[operator]
