"""What a network of heads shows of itself: the report of the three choices, the budget in words, the picture of its graph."""

from __future__ import annotations

import copy
import json
import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_pictures import collisions
from typer.testing import CliRunner

pytest.importorskip("matplotlib")

from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, PathPatch, Rectangle

import partita as pa
from partita.cli import app
from partita.errors import UnsupportedError
from partita.plots import (
    animate_temperature,
    layers_figure,
    plot_head,
    plot_network,
    plot_temperatures,
    write_layers,
)
from partita.plots.colours import ACCENT
from partita.proofs.network_budget import use_shares

SUM = "sin(3*x0) + sin(3*x1) + sin(3*x2) + exp(x3)"
BELL = "exp(-(x0^2 + x1^2 + x2^2 + x3^2))"
FOUR = pa.Box([-1] * 4, [1] * 4)


def black_box(z: np.ndarray) -> np.ndarray:
    return np.asarray(np.round(np.sin(3 * z[:, 0]), 4) + np.exp(z[:, 1]) + z[:, 2] ** 2 + z[:, 3])


@cache
def made(name: str) -> pa.Compiled:
    kinds: dict[str, Any] = {
        "sum": lambda: pa.compile(SUM, FOUR, tolerance=1e-3),
        "bell": lambda: pa.compile(BELL, FOUR, tolerance=1e-3),
        "ten": lambda: pa.compile(" + ".join(f"sin(3*x{i})" for i in range(10)), "[-1,1]^10", tolerance=1e-4),
        "head": lambda: pa.compile("sin(3*x)", "[-1,1]", tolerance=1e-3),
        "estimated": lambda: pa.compile(black_box, FOUR, tolerance=1e-2),
        "two outputs": lambda: pa.compile("sin(3*x0) + x1^3, exp(x1) + x0", "[-1,1]^2", tolerance=1e-3, method="heads"),
    }
    return kinds[name]()


def choices(text: str) -> dict[str, str]:
    """The table of the three choices: its rows without the arrow, by their first words."""
    table = text.split("\n\n")[1].splitlines()[1:]
    forms = ("one head", "several heads in one layer", "several layers")
    return {form: row for form, row in zip(forms, table) if row.lstrip("→ ").startswith(form)}


# the report


def test_the_report_shows_three_choices_and_says_why_in_one_sentence() -> None:
    c = made("sum")
    rows, why = choices(c.report()), c.report().split("\n\n")[-1]
    assert len(rows) == 3 and [r.startswith("→") for r in rows.values()] == [False, True, False]
    single = next(row for row in c.candidates if row.method == "fitted")
    assert f"{single.parameters:,}" in rows["one head"] and "proved" in rows["one head"]
    assert f"{c.num_parameters:,}" in rows["several heads in one layer"] and "≤" in rows["several heads in one layer"]
    assert "refused" in rows["several layers"] and "one layer holds all of f" in rows["several layers"]
    assert why.startswith("Several heads in one layer were chosen, because they store")
    assert f"{c.num_parameters:,}" in why and f"{single.parameters:,}" in why and "proved" in why
    assert why.count(".") == 1 and "\n" not in why


def test_layers_that_were_chosen_say_so() -> None:
    c = made("bell")
    rows = choices(c.report())
    assert rows["several layers"].startswith("→") and "not a sum" in rows["several heads in one layer"]
    assert c.report().split("\n\n")[-1].startswith("Several layers were chosen, because they store")


def test_networks_that_were_not_tried_are_said_to_be() -> None:
    text = made("head").report()
    rows = choices(text)
    assert rows["one head"].startswith("→") and "not tried" in rows["several layers"]
    assert "networks of heads are tried only if one head stores more than 2,000 numbers" in text.split("\n\n")[-1]


def test_one_head_that_was_not_looked_for_is_said_to_be() -> None:
    text = made("ten").report()
    assert "not tried" in choices(text)["one head"] and "one head was not looked for" in text.split("\n\n")[-1]


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ({"max_heads": 1, "max_layers": 1}, "max_heads=1 and max_layers=1 ask for one head"),
        ({"max_layers": 3}, "Within max_layers=3 one head was chosen, because it stores"),
    ],
)
def test_limits_that_were_given_are_named(limits: dict[str, int], said: str) -> None:
    text = pa.compile("sin(3*x)*y + x*y", "[-1,1]^2", tolerance=1e-3, **limits).report()
    assert said in text.split("\n\n")[-1]


def test_a_limit_that_stands_in_the_way_is_a_reason() -> None:
    found = pa.compile("sin(3*x0) + exp(x1) + x1^3", "[-1,1]^2", tolerance=1e-2, max_heads=1)
    assert "needs 2 heads in a layer; max_heads allows 1" in choices(found.report())["several heads in one layer"]


def test_a_method_that_was_asked_for_is_not_compared() -> None:
    text = pa.compile("sin(3*x)", "[-1,1]", tolerance=0.1, method="hard").report()
    assert text.split("\n\n")[1:] == ["method='hard' was asked for, and no other method was tried."]


def test_estimates_are_called_so_in_the_choice() -> None:
    text = made("estimated").report()
    assert "estimated" in choices(text)["several heads in one layer"] and "both errors are estimated" in text


def test_plans_and_the_command_line_tell_the_same_choice() -> None:
    found = CliRunner().invoke(app, ["plan", BELL, "--domain", "[-1,1]^4", "--tolerance", "1e-3"])
    assert found.exit_code == 0, found.output
    assert (
        "Several layers were chosen" in found.output.replace("\n", " ") and "several heads in one layer" in found.output
    )
    planned = pa.plan(BELL, FOUR, tolerance=1e-3)
    chosen = [row for row in planned.to_json()["candidates"] if row["because"]]
    assert len(chosen) == 1 and chosen[0]["form"] == "several layers" and chosen[0]["status"] == "found"
    assert chosen[0]["because"] in planned._repr_html_() and chosen[0]["because"] in made("bell")._repr_html_()


# the budget in words


@pytest.mark.parametrize("name", ["sum", "bell", "two outputs"])
def test_explain_walks_through_the_budget_and_its_parts_add_up(name: str) -> None:
    c = made(name)
    lines = c.explain().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("Where the error comes from"))
    end = next(i for i, line in enumerate(lines) if line.startswith("  sum: "))
    walk = lines[start + 1 : end]
    parts = [line for line in walk if line.startswith("  head ")]
    own = [re.search(r"at most (\S+), multiplied by (\S+) on the way.*: (\S+), ", line) for line in walk]
    found = [m for m in own if m is not None]
    assert len(parts) == len(found) == len(c.head.heads)
    for m in found:
        assert float(m[1]) * float(m[2]) == pytest.approx(float(m[3]), rel=2e-3)
    added = [float(re.search(r": (\S+), [^,]* of the bound", line)[1]) for line in walk if "of the bound" in line]
    assert len(added) == len(c.certificate.terms)
    assert sum(added) == pytest.approx(c.error_bound, rel=1e-4) and f"{c.error_bound:.6g}" in lines[end]


def test_the_walk_says_what_a_head_is_for_and_how_often_it_is_used() -> None:
    text = made("bell").explain()
    assert "x0^2 on [-1,1]: 2 keys, used 4 times in layer 1" in text and "used once in layer 2" in text
    assert "(4 uses together)" in text and "the affine maps between the heads are rounded" in text


def test_a_loaded_network_explains_itself_as_well(tmp_path: Path) -> None:
    c = made("bell")
    assert pa.load(c.save(tmp_path / "net")).explain() == c.explain()


def test_converted_networks_explain_their_budget() -> None:
    torch.manual_seed(0)
    mlp = torch.nn.Sequential(torch.nn.Linear(2, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    c = pa.Compiled.of_network(pa.attention_from_mlp(mlp, pa.Box([-1, -1], [1, 1]), 1e-3))
    assert "used 16 times in layer 1" in c.explain() and "sum: " in c.explain()


def test_single_heads_and_estimates_have_no_walk() -> None:
    assert "Where the error comes from" not in made("head").explain() + made("estimated").explain()


def test_the_shares_of_all_uses_add_up_to_those_of_the_certificate() -> None:
    c = made("bell")
    found = use_shares(c.head, c.certificate, c.target.box)
    assert [(u.layer, u.first, len(u.shares)) for u in found] == [(1, 4, 4), (2, 8, 1)]
    for u in found:
        term = next(t for t in c.certificate.terms if t.name == f"head {u.head}")
        assert u.shares.sum() * c.error_bound == pytest.approx(term.value, rel=1e-9)
        assert (u.gains > 0).all()


# the picture


def words(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.axes[0].texts]


def nodes(figure: Figure) -> list[FancyBboxPatch]:
    return [p for p in figure.axes[0].patches if isinstance(p, FancyBboxPatch)]


def edges(figure: Figure) -> list[PathPatch]:
    return [p for p in figure.axes[0].patches if type(p) is PathPatch]


def test_nodes_and_edges_are_those_of_the_network() -> None:
    figure = plot_network(made("bell"))
    said = words(figure)
    assert len(nodes(figure)) == 4 + 5 + 1 and len(edges(figure)) == 4 + 4 + 1
    assert [w for w in said if "²" in w] == ["x0²", "x1²", "x2²", "x3²"] and "exp(-u)" in said
    assert {"layer 1", "layer 2", "x0", "x3", "output"} <= set(said)
    for edge in edges(figure):  # from the right side of a node to the left side of another
        (x, y), *_, (to, at) = edge.get_path().vertices
        boxes = [n.get_bbox() for n in nodes(figure)]
        assert any(abs(b.x1 - x) < 1e-9 and abs((b.y0 + b.y1) / 2 - y) < 1e-9 for b in boxes)
        assert any(abs(b.x0 - to) < 1e-9 and abs((b.y0 + b.y1) / 2 - at) < 1e-9 for b in boxes)


def test_keys_and_shares_are_those_of_the_certificate() -> None:
    c = made("bell")
    said, outer = words(plot_network(c)), c.certificate.terms[1].value / c.error_bound
    assert f"5 keys · {100 * outer:.0f} %" in said and f"2 keys · {100 * (1 - outer) / 4:.0f} %" in said
    bars = [p for p in plot_network(c).axes[0].patches if isinstance(p, Rectangle) and p.get_facecolor()[0] > 0.7]
    filled = sorted(p.get_width() for p in bars if p.get_facecolor()[:3] == to_rgb(ACCENT))
    assert len(filled) == 5 and filled[-1] / filled[0] == pytest.approx(outer / ((1 - outer) / 4), rel=1e-6)


def test_equal_heads_have_one_colour_and_others_another() -> None:
    fills = [n.get_facecolor() for n in nodes(plot_network(made("sum")))[4:8]]
    assert len(set(fills)) == 2 and fills.count(fills[0]) in (1, 3)


def test_many_equal_heads_share_a_node() -> None:
    heads = " + ".join(f"sin(3*x{i})" for i in range(30))
    c = pa.compile(heads, "[-1,1]^30", tolerance=1e-3, method="heads")
    figure = plot_network(c)
    assert len(nodes(figure)) == 3 and len(edges(figure)) == 2
    assert any(w.endswith("× 30") for w in words(figure)) and "x0 … x29" in words(figure)
    assert len(nodes(plot_network(made("ten")))) == 10 + 10 + 1  # ten are drawn one by one


def test_more_different_heads_than_a_column_holds_are_summed() -> None:
    functions = [f"exp({i + 1}/5*x{i})*x{i}^{i % 3 + 1}" for i in range(16)]
    c = pa.compile(" + ".join(functions), "[-1,1]^16", tolerance=1e-1, method="heads")
    figure = plot_network(c)
    assert len(c.head.heads) > 12 and len(nodes(figure)) == 1 + 12 + 1
    rest = len(c.head.heads) - 11
    assert f"{rest} other heads" in words(figure)


def test_a_coordinate_that_skips_a_layer_is_an_edge_of_its_own() -> None:
    figure = plot_network(made("two outputs"))
    assert {"output 0", "output 1"} <= set(words(figure)) and "proved error ≤" in figure.get_suptitle()
    lanes = figure.axes[0].lines
    assert len(lanes) == 1 and len(edges(figure)) == 3 + 3 + 2  # x0 goes past the heads to the second output


@pytest.mark.parametrize("name", ["sum", "bell", "ten", "two outputs", "estimated"])
def test_no_label_covers_another_or_is_cut(name: str) -> None:
    assert list(collisions(plot_network(made(name)))) == []


def test_an_estimate_has_no_shares() -> None:
    figure = plot_network(made("estimated"))
    said = "\n".join(words(figure))
    assert "%" not in said and "error ≈" in said and "head 0: " in said
    assert "share" not in "".join(t.get_text() for t in figure.legends[0].get_texts())


def test_a_network_that_was_changed_or_is_one_head_is_not_drawn() -> None:
    with pytest.raises(UnsupportedError, match=r"found one head.*plot_head"):
        plot_network(made("head"))
    c = copy.deepcopy(made("bell"))
    c.head.heads[0].values += 1.0
    with pytest.raises(UnsupportedError, match="changed after it was certified"):
        plot_network(c)


def test_the_command_line_draws_networks_and_refuses_what_it_cannot(tmp_path: Path) -> None:
    net, single = (str(made(name).save(tmp_path / name)) for name in ("bell", "head"))
    run = CliRunner()
    for out, folder, more, said in [
        ("net.png", net, ["--kind", "network"], ""),
        ("head.svg", net, ["--kind", "head"], ""),  # a slice
        ("one.svg", single, ["--kind", "network"], "found one head"),
        ("at.svg", net, ["--kind", "network", "--at", "0,0,0,0"], "not a place"),
        ("cells.svg", net, ["--panels", "cells"], "found a network of heads"),
        ("kappa.svg", net, ["--sharpness", "1,4"], "found a network of heads"),
        ("move.gif", net, [], "found a network of heads"),
    ]:
        found = run.invoke(app, ["plot", folder, "--out", str(tmp_path / out), *more])
        assert (found.exit_code == 0) == (not said), found.output
        assert said in str(found.exception or "") and (tmp_path / out).exists() == (not said)
    found = run.invoke(app, ["layers", net, "--out", str(tmp_path / "layers")])
    assert found.exit_code == 1 and "as_attention()" in str(found.exception)


# wherever a head goes


def test_every_command_takes_a_network(tmp_path: Path) -> None:
    net, run = str(made("bell").save(tmp_path / "net")), CliRunner()
    (tmp_path / "points.csv").write_text("0.1,0.2,0.3,0.4\n-1,1,-1,1\n")
    for command, said in [
        (["verify", net], "tolerance"),
        (["attack", net], "not refuted"),
        (["bounds", net], "output 0 lies in"),
        (["plot", net, "--kind", "surface", "--out", str(tmp_path / "s.png")], "wrote"),
        (["plot", net, "--kind", "budget", "--out", str(tmp_path / "b.svg")], "wrote"),
    ]:
        found = run.invoke(app, command)
        assert found.exit_code == 0 and said in found.output, (command, found.output, found.exception)
    values = [float(line) for line in run.invoke(app, ["eval", net, str(tmp_path / "points.csv")]).output.split()]
    assert np.abs(np.array(values) - [np.exp(-0.3), np.exp(-4.0)]).max() <= made("bell").error_bound


def test_a_network_is_exported_and_runs_elsewhere(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    c, points = made("bell"), np.random.default_rng(0).uniform(-1, 1, (64, 4))
    session = onnxruntime.InferenceSession(str(c.export_onnx(tmp_path / "net.onnx", outside="clamp")))
    (out,) = session.run(None, {session.get_inputs()[0].name: points})
    assert np.abs(out.ravel() - c(points)).max() < 1e-12


def test_the_studio_serves_a_network(tmp_path: Path) -> None:
    pytest.importorskip("starlette")
    from partita.studio import work

    asked = {"text": "sin(3*x0) + exp(x1)", "domain": "[-1,1]^2", "tolerance": 1e-3, "method": "heads"}
    given = {"seconds": 60.0, "place": str(tmp_path / "kept"), "head_id": "n"}
    answer = work.compile_head(asked, given, lambda *_: None)
    json.dumps(answer, allow_nan=False)
    assert answer["head"] is None and answer["method"] == "heads" and answer["keys_per_axis"] is None
    assert "method='heads' was asked for" in answer["report"]["because"]
    kept = {"folder": given["place"]}
    sampled = work.sample({**asked, "grid": [5, 4]}, kept, lambda *_: None)["values"]
    f = work.sample({**asked, "grid": [5, 4]}, {}, lambda *_: None)["values"]
    assert len(sampled) == 20 and np.abs(np.array(sampled) - f).max() <= answer["bound"]
    for what, name in (("head", "net.zip"), ("onnx", "net.onnx"), ("png", "net.png")):
        if what == "onnx" and find_spec("onnx") is None:
            continue
        place = {"what": what, "place": str(tmp_path / name), "download": "", "name": name, **kept}
        assert work.export({}, place, lambda *_: None)["bytes"] > 100


def test_what_needs_one_head_refuses_a_network_and_says_why(tmp_path: Path) -> None:
    c = made("bell")
    for use in (
        lambda: c.with_sharpness(2.0),
        lambda: plot_head(c, panels="cells"),
        lambda: plot_head(c, panels="weights"),
        lambda: plot_temperatures(c, [1, 2]),
        lambda: animate_temperature(c, tmp_path / "a.gif"),
    ):
        with pytest.raises(UnsupportedError, match=r"found a network of heads.*expected a single head.*max_heads=1"):
            use()
    for use in (c.layers, lambda: layers_figure(c), lambda: write_layers(c, tmp_path / "w")):
        with pytest.raises(UnsupportedError, match=r"found a network of heads.*as_attention"):
            use()
