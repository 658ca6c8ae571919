"""Drawing heads as a teacher does: figures without files, single panels on one's own axes, temperatures, an animation."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_pictures import collisions
from typer.testing import CliRunner

pytest.importorskip("matplotlib")

import matplotlib
import matplotlib.pyplot as plt
from matplotlib.animation import FuncAnimation
from matplotlib.figure import Figure
from PIL import Image

import partita as pa
from partita.cli import app
from partita.errors import ShapeError, UnsupportedError
from partita.geometry.cells import intervals, polygons, sliced
from partita.plots import animate_temperature, plot_head, plot_heads, plot_plane, plot_temperatures
from partita.plots.head_panels import claim_text
from partita.plots.head_views import HeadView

WAVES = "sin(3*x0) + x0*cos(2*x1)"
SQUARE = pa.Box([-1, -1], [1, 1])


@cache
def head(name: str) -> pa.Compiled:
    line = pa.Box([-1], [1])
    made: dict[str, Any] = {
        "hard": lambda: pa.compile("sin(3*x0)", line, tolerance=0.4, method="hard"),
        "ghosts": lambda: pa.compile(WAVES, SQUARE, tolerance=1e-3, method="fitted"),
        "one key": lambda: pa.compile("0*x0 + 3", line, tolerance=0.1),
        "vector": lambda: pa.compile("x0*x1, x0 - x1", SQUARE, tolerance=0.25),
        "cube": lambda: pa.compile("sin(x0)*x1 + x2", pa.Box([0] * 3, [1] * 3), tolerance=0.4, method="hard"),
        "scattered cube": lambda: pa.compile(
            "abs(x0 + x1 - x2)", pa.Box([0] * 3, [1] * 3), tolerance=0.4, method="adaptive"
        ),
        "pair": lambda: pa.compile("k0*q0", (line, pa.Box([0], [2])), tolerance=0.5, method="hard"),
        "ring": lambda: pa.compile(
            "x0 + x1", pa.Region(pa.Box([-2, -2], [2, 2]), "1 <= x0**2 + x1**2 <= 2"), tolerance=0.5
        ),
        "train": lambda: pa.compile("sin(x0+x1+x2+x3)", pa.Box([-1] * 4, [1] * 4), tolerance=0.1, method="train"),
        "cloud": lambda: pa.compile("sin(x0)+x1", pa.PointCloud([[0, 0], [1, 0.5], [2, 0], [3, 2]]), tolerance=0.2),
    }
    return made[name]()


def words(figure: Figure) -> str:
    texts = [t.get_text() for t in figure.findobj(matplotlib.text.Text)]
    return "\n".join(texts)


def colours(path: Path) -> int:
    with Image.open(path) as picture:
        return len(picture.convert("RGB").getcolors(1 << 24) or [])


# a figure comes back, nothing else happens


def test_a_figure_comes_back_and_no_file_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    before, open_before = dict(matplotlib.rcParams), plt.get_fignums()
    figure = plot_head(head("hard"))
    assert isinstance(figure, Figure) and len(figure.axes) == 2
    assert list(tmp_path.iterdir()) == [] and plt.get_fignums() == open_before
    assert dict(matplotlib.rcParams) == before
    figure.savefig("mine.png")  # what a user does next
    assert colours(tmp_path / "mine.png") > 10
    assert figure._repr_png_()[:4] == b"\x89PNG"  # notebooks show it without pyplot


@pytest.mark.parametrize("suffix", [".svg", ".png", ".pdf"])
def test_a_path_still_writes_the_file(suffix: str, tmp_path: Path) -> None:
    place = tmp_path / "new folder" / f"head{suffix}"
    assert isinstance(plot_head(head("hard"), place), Figure)
    assert place.read_bytes()[:4] in (b"<?xm", b"\x89PNG", b"%PDF") and [*place.parent.iterdir()] == [place]
    with pytest.raises(UnsupportedError, match=r"\.svg, \.png or \.pdf"):
        plot_head(head("hard"), tmp_path / "head.jpg")


@pytest.mark.slow  # a second interpreter
def test_no_display_is_needed() -> None:
    program = (
        "import os; [os.environ.pop(k, None) for k in ('DISPLAY', 'WAYLAND_DISPLAY')]\n"
        "import partita as pa; from partita.plots import plot_head\n"
        "import sys; assert 'matplotlib.pyplot' not in sys.modules\n"
        "plot_head(pa.compile('2*x', pa.Box([0], [1]), tolerance=0.5, method='hard')).savefig(os.devnull, format='png')\n"
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_every_plot_function_returns_a_figure() -> None:
    rng = np.random.default_rng(0)
    import torch

    attention = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval()
    with pa.inspect.capture(attention) as heads, torch.no_grad():
        attention(*[torch.from_numpy(rng.normal(size=(1, 12, 8))).float()] * 3, need_weights=False)
    views = {(r.layer, r.head): pa.inspect.view(r.snapshots[0], pixels=8) for r in heads}
    assert isinstance(plot_heads(views), Figure)
    first = next(iter(views.values()))
    assert isinstance(plot_plane(first), Figure)
    figure, panel = plt.subplots()
    try:
        assert plot_plane(first, ax=panel) is figure and panel.collections
    finally:
        plt.close(figure)


# panels and one's own axes


def test_a_panel_is_drawn_into_the_axes_of_the_user() -> None:
    figure, panels = plt.subplots(1, 2)
    try:
        panels[1].plot([0, 1], [0, 1])
        kept = panels[1].get_position().bounds
        assert plot_head(head("hard"), ax=panels[0]) is figure
        assert panels[0].get_title() == "head and function" and len(panels[0].lines) == 3
        assert panels[1].get_position().bounds == kept and len(panels[1].lines) == 1  # the other one is not touched
        assert figure.get_size_inches().tolist() == plt.rcParams["figure.figsize"] and not figure.texts
        assert plt.fignum_exists(figure.number)
        plot_head(head("hard"), ax=panels, panels=("weights", "error"))
        with pytest.raises(UnsupportedError, match="2 axes for 3 panels"):
            plot_head(head("hard"), ax=panels, panels=("head", "cells", "error"))
        with pytest.raises(UnsupportedError, match="size"):
            plot_head(head("hard"), ax=panels[0], size=(3, 3))
    finally:
        plt.close(figure)


def test_an_axes_in_a_subfigure() -> None:
    figure = Figure()
    left, _ = figure.subfigures(1, 2)
    assert plot_head(head("cloud"), ax=left.subplots(), panels="error") is figure


def test_single_panels_size_and_titles() -> None:
    figure = plot_head(head("hard"), panels="cells", size=(3.0, 2.0), titles=False)
    assert len(figure.axes) == 1 and figure.get_size_inches().tolist() == [3.0, 2.0]
    assert figure.get_suptitle() == "" and figure.axes[0].get_title() == ""
    titled = plot_head(head("hard"), panels="cells")
    assert titled.get_suptitle() and titled.axes[0].get_title()
    every = plot_head(head("ghosts"), panels=("function", "head", "cells", "weights", "error"))
    assert len([a for a in every.axes if a.get_title()]) == 5
    for wrong in ("cell", (), ("head", "errors")):
        with pytest.raises(UnsupportedError, match="function, head, cells, weights, error"):
            plot_head(head("hard"), panels=wrong)


def test_what_the_panels_show_is_the_head() -> None:
    """Numbers in the picture against numbers from the head: curves, weights that sum to one, values of the cells."""
    c = head("hard")
    curves, weights, error, cells = plot_head(c, panels=("head", "weights", "error", "cells")).axes
    drawn = {line.get_label(): line for line in curves.lines}
    x = drawn["head"].get_xdata()
    assert np.array_equal(drawn["head"].get_ydata(), c(x[:, None]))
    assert np.allclose(drawn["function"].get_ydata(), np.sin(3 * x), atol=1e-14)
    total = np.sum([line.get_ydata() for line in weights.lines], axis=0)
    assert len(weights.lines) == c.num_keys and np.allclose(total, 1)
    assert error.lines[0].get_ydata().max() <= c.error_bound == error.lines[1].get_ydata()[0]
    (steps,) = cells.collections
    values = sorted(float(s[0, 1]) for s in steps.get_segments())
    assert np.allclose(values, sorted(c.head.values[:, 0].tolist()))


# words


def test_ghosts_are_labelled_and_told_from_keys_that_win() -> None:
    c = head("ghosts")
    figure = plot_head(c, panels="cells")
    marks = {line.get_label(): line for line in figure.axes[0].lines}
    ghosts = np.column_stack(marks["ghost: wins nowhere in the domain"].get_data())
    keys = np.column_stack(marks["key (the center of its cell)"].get_data())
    assert len(ghosts) + len(keys) == c.num_keys and len(ghosts) > 0
    points = np.random.default_rng(0).uniform(-1, 1, (20_000, 2))
    winners = c.partition.to_power_diagram().centers[np.unique(c.partition.cell(points))]
    assert {tuple(p) for p in keys} == {tuple(p) for p in winners}
    assert "ghost: wins nowhere in the domain" in [t.get_text() for t in figure.legends[0].get_texts()]
    no_ghosts = plot_head(head("hard"), panels="cells")
    assert "ghost" not in words(no_ghosts)
    assert not plot_head(c, panels="cells", legend=False).legends


def test_titles_count_and_round_as_people_do() -> None:
    title = plot_head(head("one key")).get_suptitle()
    assert "1 key " in title and "keys" not in title
    told = plot_head(head("hard")).get_suptitle()
    shown = float(told.rsplit("≤", 1)[1])
    bound = head("hard").error_bound
    assert f"{head('hard').num_keys} keys" in told
    assert bound <= shown <= 1.01 * bound and len(f"{shown:g}") <= 6  # rounded, and upward


def test_bounds_are_never_rounded_down() -> None:
    for bound in (0.1, 0.100001, 0.99999, 1e-300, 123456.0, 2.0**-1070):
        claim = replace(head("hard").certificate, error_bound=bound)
        assert float(claim_text(claim).split("≤")[1]) >= bound


def test_colour_bars_are_explained_in_words() -> None:
    text = words(plot_head(head("ghosts"), panels=("head", "weights", "error")))
    for told in ("value of the head", "largest weight (1: one key decides)", "|head − function| (top: proved bound)"):
        assert told in text
    assert "error_bound" not in text


# domains


@pytest.mark.parametrize("name", ["vector", "cube", "scattered cube", "pair", "ring", "train", "cloud", "one key"])
def test_every_kind_of_domain_is_drawn_and_labels_keep_apart(name: str) -> None:
    c = head(name)
    figure = plot_head(c, output=c.head.num_outputs - 1)
    assert list(collisions(figure)) == []
    if name == "cube":
        assert "x2 = 0.5" in figure.axes[0].get_title()
    if name == "pair":
        assert figure.axes[0].get_xlabel() == "k0" and figure.axes[0].get_ylabel() == "q0"
    if name == "ring":
        shown = figure.axes[0].images[0].get_array()
        assert shown.mask.any() and not shown.mask.all()  # empty where the domain is not


def test_a_slice_goes_where_it_is_told() -> None:
    c = head("cube")
    panel = plot_head(c, panels="head", axes=(0, 2), at=[0, 0.25, 0]).axes[0]
    values = np.asarray(panel.images[0].get_array())
    side = np.linspace(0, 1, len(values))
    assert panel.get_ylabel() == "x2" and "x1 = 0.25" in panel.get_title()
    assert values[7, 40] == c([side[40], 0.25, side[7]])
    with pytest.raises(UnsupportedError, match="two different coordinates"):
        plot_head(c, axes=(1, 1))
    with pytest.raises(ShapeError, match="at has 2 numbers; expected 3"):
        plot_head(c, at=[0, 0])
    shell = pa.Region(pa.Box([-1] * 3, [1] * 3), "abs(x2) >= 0.5")
    d = pa.compile("x0 + x2", shell, tolerance=0.5)
    with pytest.raises(UnsupportedError, match=r"x2 = 0 meets no point .* Pass at="):
        plot_head(d)
    assert isinstance(plot_head(d, at=[0, 0, 0.75], panels="head"), Figure)


def test_a_black_box_is_asked_little_and_only_where_it_is_drawn() -> None:
    asked: list[int] = []

    def slow(z: np.ndarray) -> np.ndarray:
        asked.append(len(z))
        return np.sin(3 * z[:, 0])

    c = pa.compile(slow, SQUARE, tolerance=0.5, lipschitz=3.0, method="hard", trace=False)
    asked.clear()
    plot_head(c, panels=("head", "cells", "weights"))
    assert asked == []
    figure = plot_head(c)
    assert 1500 < sum(asked) <= 1600 and "40 × 40 points" in figure.axes[-1].get_title()
    asked.clear()
    plot_temperatures(c, (1, 4, 16))
    assert sum(asked) <= 1600  # once for all temperatures, if not remembered from before


def test_a_stored_black_box_is_drawn_without_its_function(tmp_path: Path) -> None:
    c = pa.compile(lambda z: np.abs(z[:, 0]), pa.Box([-1], [1]), tolerance=0.4, lipschitz=1.0, trace=False)
    d = pa.load(c.save(tmp_path / "head"))
    assert len(plot_head(d).axes) == 1
    assert isinstance(plot_temperatures(d, (1, 4)), Figure)
    with pytest.raises(UnsupportedError, match="needs the function"):
        plot_head(d, panels="error")


# cells, exactly


@pytest.mark.parametrize("shift", [0.0, 1e8])
def test_intervals_and_slices_hold_the_points_of_their_cells(shift: float) -> None:
    rng = np.random.default_rng(1)
    diagram = pa.PowerDiagram(shift + rng.uniform(-1, 1, (30, 1)), rng.uniform(0, 0.05, 30))
    ends = intervals(diagram, pa.Box([shift - 1.0], [shift + 1.0]))
    x = shift + rng.uniform(-1, 1, 2000)
    cells = diagram.cell(x[:, None])
    assert np.isnan(ends[:, 0]).any()  # some keys never win
    assert set(cells) <= set(np.flatnonzero(~np.isnan(ends[:, 0])))
    assert ((ends[cells, 0] - 1e-6 <= x) & (x <= ends[cells, 1] + 1e-6)).all()
    assert np.nansum(ends[:, 1] - ends[:, 0]) == pytest.approx(2.0, abs=1e-6)
    space = pa.PowerDiagram(rng.uniform(-1, 1, (40, 3)), rng.uniform(0, 0.2, 40))
    at = np.array([0.0, 0.3, 0.0])
    plane = sliced(space, (0, 2), at)
    points = rng.uniform(-1, 1, (500, 3))
    points[:, 1] = 0.3
    assert np.array_equal(plane.cell(points[:, [0, 2]]), space.cell(points))
    drawn = [len(p) > 0 for p in polygons(plane, SQUARE)]
    assert all(np.array(drawn)[np.unique(space.cell(points))])


# temperatures


def test_three_temperatures_in_one_call() -> None:
    c = head("hard")
    figure = plot_temperatures(c, sharpness=(1, 4, 16))
    grid = np.array(figure.axes[:6]).reshape(2, 3)
    assert [panel.get_title() for panel in grid[0]] == ["κ = 1", "κ = 4", "κ = 16"]
    assert len({panel.get_ylim() for panel in grid[0]}) == 1  # one scale: they can be compared
    h, centers, values = 2 / c.num_keys, c.partition.axes[0], c.head.values[:, 0].numpy()
    for panel, kappa in zip(grid[0], (1, 4, 16)):
        (curve,) = [line for line in panel.lines if line.get_label() == "head"]
        x = curve.get_xdata()
        weights = np.exp(-0.5 * kappa / h**2 * (x[:, None] - centers) ** 2)
        assert np.allclose(curve.get_ydata(), weights @ values / weights.sum(axis=1), atol=1e-9)
    assert not c.is_changed  # the head itself stays as it was
    assert list(collisions(figure)) == []
    own = HeadView.of(c, output=0, axes=(0, 1), at=None).own_sharpness
    assert "as compiled" in plot_temperatures(c, (own, 1.0)).axes[0].get_title()
    for wrong in ((1, 0), (-1,), (np.inf,), ("warm",), ()):
        with pytest.raises(UnsupportedError, match="sharpness"):
            plot_temperatures(c, wrong)


def test_maps_at_several_temperatures_share_their_scale(tmp_path: Path) -> None:
    figure = plot_temperatures(head("scattered cube"), (1, 30), tmp_path / "t.png", panels=("head", "weights"))
    images = [panel.images[0] for panel in figure.axes[:4]]
    assert images[0].get_clim() == images[1].get_clim() and images[2].get_clim() == (0.0, 1.0)
    low, high = (np.asarray(image.get_array()).mean() for image in images[2:])
    assert low < high and colours(tmp_path / "t.png") > 100  # a higher sharpness: one key decides


def test_an_animation_over_temperature(tmp_path: Path) -> None:
    place = tmp_path / "head.gif"
    animation = animate_temperature(head("hard"), place, sharpness=(0.5, 16), frames=3, size=(4, 2))
    assert isinstance(animation, FuncAnimation)
    with Image.open(place) as gif:
        assert gif.format == "GIF" and gif.n_frames == 4  # up in three, back by one
        frames = []
        for k in range(gif.n_frames):
            gif.seek(k)
            frames.append(np.asarray(gif.convert("RGB")).astype(int))
    assert all(np.abs(a - b).max() > 50 for a, b in pairwise(frames))
    assert [*tmp_path.iterdir()] == [place]
    for options, told in (({"frames": 1}, "frames"), ({"sharpness": (1,)}, "two numbers"), ({"fps": 0}, "fps")):
        with pytest.raises(UnsupportedError, match=told):
            animate_temperature(head("hard"), **options)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match=r"\.gif"):
        animate_temperature(head("hard"), tmp_path / "head.mp4")


# on the command line


def test_the_command_draws_panels_and_temperatures(tmp_path: Path) -> None:
    folder = head("hard").save(tmp_path / "head")
    for name, options in (
        ("a.svg", []),
        ("b.svg", ["--panels", "head,cells", "--no-titles"]),
        ("c.svg", ["--sharpness", "1,4,16"]),
    ):
        told = CliRunner().invoke(app, ["plot", str(folder), "--out", str(tmp_path / name), *options])
        assert told.exit_code == 0 and (tmp_path / name).stat().st_size > 1000, told.output
    texts = [(tmp_path / name).read_text() for name in ("a.svg", "b.svg", "c.svg")]
    assert len(set(texts)) == 3
    failed = CliRunner().invoke(app, ["plot", str(folder), "--out", str(tmp_path / "x.svg"), "--sharpness", "warm"])
    assert isinstance(failed.exception, UnsupportedError) and "numbers separated by commas" in str(failed.exception)


def test_the_command_animates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("partita.cli.plot_command.animate_temperature", partial(animate_temperature, frames=2))
    folder, place = head("hard").save(tmp_path / "head"), tmp_path / "d.gif"
    told = CliRunner().invoke(app, ["plot", str(folder), "--out", str(place), "--sharpness", "1,16"])
    assert told.exit_code == 0 and place.read_bytes()[:3] == b"GIF", told.output
