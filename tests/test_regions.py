"""Regions: what counts as inside, what proofs leave out, and that f is never needed outside."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from balls import bits, values
from flint import arb
from partita_check.cli import run
from resealing import forge, reseal
from typer.testing import CliRunner

import partita as pa
from partita import errors
from partita.cli import app
from partita.functions.definedness import is_bounded, undefined_root
from partita.functions.expressions import parse
from partita.functions.regions import Piece, Region
from partita.functions.target import graph_target, make_target
from partita.plots import plot_head
from partita.proofs import PROOFS, Given
from partita.proofs.cover_proof import covering_radius
from partita.proofs.grid_proof import prove_grid
from partita.proofs.taylor_proof import soft_grid_of
from partita.search.extension import extended

TRIANGLE = [[1, 0], [0, 1], [1, 1]]


def box() -> pa.Box:
    return pa.Box([-2, -2], [2, 2])


SHAPES = {
    "disc": (lambda: pa.Ball([0, 0], 1), lambda x, y: x * x + y * y <= 1),
    "far disc": (
        lambda: pa.Ball([1000.5, -3], 0.25),
        lambda x, y: (x - Fraction(2001, 2)) ** 2 + (y + 3) ** 2 <= Fraction(1, 16),
    ),
    "ring": (lambda: pa.Region(box(), "1 <= x**2 + y**2 <= 1.125"), lambda x, y: 1 <= x * x + y * y <= Fraction(9, 8)),
    "triangle": (lambda: pa.Simplex(TRIANGLE), lambda x, y: x <= 1 and y <= 1 and x + y >= 1),
    "polytope": (
        lambda: pa.Polytope([[-1, 0], [1, 3], [0, -1]], [0, 1, 0.5]),
        lambda x, y: x >= 0 and x + 3 * y <= 1 and y >= Fraction(-1, 2),
    ),
    "two": (
        lambda: pa.Ball([0, 0], 1) | pa.Box([1, 1], [2, 2]),
        lambda x, y: x * x + y * y <= 1 or (1 <= x <= 2 and 1 <= y <= 2),
    ),
    "or": (lambda: pa.Region(box(), "x <= -1 or abs(x) + y >= 3"), lambda x, y: x <= -1 or abs(x) + y >= 3),
}


@cache
def shape(name: str) -> Region:
    return SHAPES[name][0]()


def holds(name: str, points: np.ndarray) -> np.ndarray:
    """In rational arithmetic."""
    return np.array([SHAPES[name][1](*map(Fraction, p)) for p in points.tolist()])


def near_the_edge(name: str, count: int = 120) -> np.ndarray:
    """Random points of the bounding box, points of the edge, and their neighbours a few roundings and 1e-9 away."""
    rng, region = np.random.default_rng(1), shape(name)
    edge = region.corners(count)
    steps = rng.choice([0.0, 1e-16, -1e-16, 1e-13, -1e-13, 1e-9, -1e-9], edge.shape)
    hull = region.bounding_box()
    return np.concatenate([hull.sample(count, rng), edge, edge + steps * np.abs(edge).max()])


# --- the set ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SHAPES)
def test_every_point_of_the_set_is_inside_and_every_point_accepted_obeys_the_slack(name: str) -> None:
    region, points = shape(name), near_the_edge(name)
    inside, member = region.contains(points), holds(name, points)
    hull = region.bounding_box()
    assert (inside | ~member | ~hull.contains(points)).all()
    with bits(200):
        for point in points[inside & ~member]:  # by roundings only
            assert any(
                p.box.contains(point[None])[0]
                and all(values(c.graph, point.tolist())[0] <= arb(c.slack) for c in p.constraints)
                for p in region.pieces
            )
    assert 0 < inside.sum() < len(points)


@pytest.mark.parametrize("name", SHAPES)
def test_no_box_with_a_point_of_the_set_counts_as_outside_and_no_other_as_inside(name: str) -> None:
    region, rng = shape(name), np.random.default_rng(2)
    points = near_the_edge(name)
    size = region.bounding_box().sides * 10.0 ** rng.uniform(-12, 0, points.shape)
    lo, hi = points - size * rng.random(points.shape), points + size * rng.random(points.shape)
    assert not (region.outside(lo, hi) & region.contains(points)).any()
    assert not (region.inside(lo, hi) & ~region.contains(points)).any()
    assert region.outside(lo, hi).any() and region.inside(lo, hi).any()


@pytest.mark.parametrize("name", SHAPES)
def test_samples_edges_and_clamped_points_lie_in_the_set(name: str) -> None:
    region, rng = shape(name), np.random.default_rng(3)
    far = region.bounding_box().sides * 3 * rng.standard_normal((200, 2)) + region.bounding_box().lo
    for points in (region.sample(300, rng), region.corners(), region.clamp(far)):
        assert holds(name, points).all()
    moved = region.clamp(region.sample(50, rng))
    assert region.contains(moved).all()
    assert region.clamp(moved).tolist() == moved.tolist()


def test_clamping_is_close_to_the_nearest_point() -> None:
    far = np.random.default_rng(0).standard_normal((100, 2)) * 4
    far = far[np.hypot(*far.T) > 1]
    nearest = far / np.hypot(*far.T)[:, None]
    assert np.abs(shape("disc").clamp(far) - nearest).max() < 1e-4


@pytest.mark.parametrize(
    ("name", "area"), [("disc", math.pi), ("ring", math.pi / 8), ("triangle", 0.5), ("two", math.pi + 1)]
)
def test_the_volume_is_an_upper_bound_and_samples_are_uniform(name: str, area: float) -> None:
    region = shape(name)
    assert area <= region.volume <= 1.15 * area
    points = region.sample(4000, np.random.default_rng(4))
    if name == "disc":
        assert abs((np.hypot(*points.T) < 0.5).mean() - 0.25) < 0.03
    if name == "two":
        assert abs((points > 1).all(axis=1).mean() - 1 / area) < 0.03


def test_bounding_boxes_are_tight() -> None:
    found = pa.Region(pa.Box([-9, -9], [9, 9]), "(x - 1)**2 + y**2 <= 1").bounding_box()
    assert np.abs(found.lo - [0, -1]).max() < 0.05 and np.abs(found.hi - [2, 1]).max() < 0.05


def test_sequences_and_descriptions() -> None:
    region = pa.Ball(np.zeros((2, 2)), 1.0)
    assert region.shape == (2, 2) and region.dimension == 4
    assert str(pa.Ball([0, 0], 1)) == "[-1,1]^2 and x0^2 + x1^2 - 1 <= 0"
    assert pa.Ball([0, 0], 1) == pa.Region.of_pieces(pa.Ball([0, 0], 1).pieces) != pa.Ball([0, 0], 2)
    assert pa.Region(pa.Box([0], [1])).contains(np.array([[0.5], [2.0]])).tolist() == [True, False]
    assert pa.Ball([0, 0], 1).is_convex and pa.Simplex(TRIANGLE).is_convex
    assert not shape("ring").is_convex and not shape("two").is_convex


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: pa.Region(box(), "x >= 3"), "empty"),
        (lambda: pa.Region(box(), "x**2 + y**2 <= 0"), "interior|thin"),
        (lambda: pa.Region(box(), ["x**2 + y**2 <= 1", "x**2 + y**2 >= 1"]), "thin"),
        (lambda: pa.Region(box(), "x < 1"), "write <= for <"),
        (lambda: pa.Region(box(), "x == 1"), "expected a <= b"),
        (lambda: pa.Region(box(), "x + y"), "no inequality"),
        (lambda: pa.Region(box(), "x, y <= 1"), "vectors"),
        (lambda: pa.Region(box(), "x <= w"), "unknown"),
        (lambda: pa.Region(box(), "__import__('os') <= 1"), "expected|not a function"),
        (lambda: pa.Region("x <= 1"), "cannot be read"),
        (lambda: pa.Region(box(), [3]), "expected text"),
        (lambda: pa.Ball([0, 0], 0), "radius"),
        (lambda: pa.Ball([0, math.nan], 1), "finite"),
        (lambda: pa.Simplex([[0, 0], [1, 1], [2, 2]]), "plane"),
        (lambda: pa.Simplex([[0, 0], [1, 1]]), r"\(m \+ 1, m\)"),
        (lambda: pa.Polytope([[1, 0]], [1]), "unbounded"),
        (lambda: pa.Polytope([[1.0], [-1.0]], [0, -1]), "empty"),
        (lambda: pa.Polytope([[1.0], [-1.0]], [0, 0]), "interior"),
        (lambda: pa.Polytope([[math.nan], [-1.0]], [0, 0]), "NaN"),
        (lambda: pa.Polytope([[1.0], [-1.0]], [0]), "expected"),
        (lambda: pa.Ball([0], 1) | pa.Ball([0, 0], 1), "same for a union"),
        (lambda: pa.compile("x", 7, tolerance=1), "a Region"),
    ],
)
def test_bad_regions_are_refused(make, words: str) -> None:
    with pytest.raises(pa.PartitaError, match=words):
        make()


# --- where f is defined -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "name", "defined"),
    [
        ("sqrt(1 - x**2 - y**2)", "disc", True),
        ("sqrt(2 - 2*(x**2 + y**2))", "disc", True),
        ("sqrt(4 - x**2 - y**2)", "disc", True),
        ("sqrt(x + y - 1)", "triangle", True),
        ("sqrt(2*x + y - 1 - x)", "triangle", True),
        ("sqrt(0.99 - x**2 - y**2)", "disc", False),
        ("sqrt(x)", "disc", False),
        ("sqrt(x + y - 1.01)", "triangle", False),
        ("sqrt(1 - x**2 - y**2)", "two", False),
    ],
)
def test_roots_must_be_defined_on_the_region(text: str, name: str, defined: bool) -> None:
    graph = parse(text, ["x0", "x1"], {"x": "x0", "y": "x1"})
    assert (undefined_root(graph, shape(name)) == "") is defined
    if not defined:
        with pytest.raises(errors.NonFiniteValueError, match="not proved to be defined"):
            make_target(text, shape(name))


def test_poles_outside_are_noticed() -> None:
    assert is_bounded(parse("1/(x + 3)", ["x"]), pa.Box([-2], [2]))
    assert not is_bounded(parse("1/(x + 2)", ["x"]), pa.Box([-2], [2]))
    assert not make_target("1/(x**2 + y**2)", shape("ring")).fills_box
    assert make_target("1/(x**2 + y**2 + 1)", shape("ring")).fills_box


# --- proofs -------------------------------------------------------------------------------------------------------------


def largest_error(c: pa.Compiled, points: np.ndarray) -> float:
    """|f − head| at points, f in balls at the worst of them."""
    with torch.no_grad():
        ran = c.head.evaluate(torch.from_numpy(points).to(c.head.dtype)).double().numpy()
    off = np.abs(ran - c.target.graph.evaluate(points).reshape(len(points), -1)).max(axis=1)
    worst = 0.0
    with bits(160):
        for i in np.argsort(np.nan_to_num(off))[-3:]:
            for f, y in zip(values(c.target.graph, points[i].tolist()), ran[i].tolist()):
                if f.is_finite():
                    worst = max(worst, float(abs(f - arb(y)).abs_lower()))
    return worst


HEADS = {
    "root on a disc": ("sqrt(1 - x**2 - y**2)", "disc", 0.3, {"method": "adaptive"}),
    "pole inside a ring": ("1/(x**2 + y**2)", "ring", 0.2, {"method": "fitted"}),
    "logarithm on a triangle": ("log(x + y)", "triangle", 1e-3, {"method": "fitted"}),
    "cover of a triangle": ("log(x + y)", "triangle", 0.2, {"method": "hard", "dtype": torch.float32}),
    "total on a union": ("sin(x)*y", "two", 1e-2, {"dtype": torch.float32}),
}


@cache
def compiled(name: str) -> pa.Compiled:
    text, region, tolerance, options = HEADS[name]
    return pa.compile(text, shape(region), tolerance=tolerance, **options)


@pytest.mark.parametrize("name", HEADS)
def test_the_bound_is_above_the_error_at_every_point_of_the_set(name: str) -> None:
    c, region = compiled(name), HEADS[name][1]
    points = np.concatenate(
        [near_the_edge(region), shape(region).bounding_box().sample(1000, np.random.default_rng(8))]
    )
    points = points[holds(region, points)]
    assert c.certificate.kind == "proved"
    assert 0.2 * c.error_bound < largest_error(c, points) <= c.error_bound <= c.certificate.tolerance
    found = pa.attack(c, samples=512, restarts=4)
    assert not found.refuted and shape(region).contains(np.array([found.point]))[0]
    assert pa.attack(c, bound=0.2 * c.error_bound, samples=512, restarts=4).refuted


LONGER = {"pole inside a ring", "root on a disc"}  # for the checker


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in LONGER)) for n in HEADS])
def test_files_recheck_and_the_checker_know_regions(name: str, tmp_path: Path) -> None:
    c = compiled(name)
    back = pa.load(c.save(tmp_path / "head"))
    assert back.target.domain == c.target.domain
    assert [check.name for check in pa.recheck(back) if not check.holds] == []
    report, code = run(tmp_path / "head", budget=60.0)
    assert code == 0, report
    assert "<=" in report["domain"]


def on_the_box(target, region: Region):
    """The same function, on the box around the region: what a proof without constraints is about."""
    return graph_target(target.graph, (region.bounding_box(),), target.label)


@pytest.mark.parametrize("name", ["pole inside a ring", "logarithm on a triangle"])
def test_without_the_constraint_the_proof_fails(name: str) -> None:
    c = compiled(name)
    proof = PROOFS[str(c.certificate.proof["method"])]
    given = Given(tolerance=c.certificate.tolerance, details={**c.certificate.proof, "boxes": 200}, sharpen=False)
    assert proof.prove(c.head, c.target, given).bound <= c.certificate.tolerance
    assert not proof.prove(c.head, on_the_box(c.target, c.target.domain), given).bound <= c.certificate.tolerance


def test_a_thin_corner_is_neither_lost_by_the_proof_nor_by_the_attack() -> None:
    """The head is right but for a spike that lives in the tip of a needle, which has 1e-5 of the area."""
    needle = pa.Simplex([[0, -0.5], [0, 0.5], [1, 0]])
    spike = "0.3*exp(-((x - 0.995)/0.002)**2)"
    flat = pa.compile("0*x", needle, tolerance=0.1, method="fitted")
    target = graph_target(parse(spike, ["x0", "x1"], {"x": "x0"}), (needle,), spike)
    grid, hull = soft_grid_of(flat.head), needle.bounding_box()
    proof = prove_grid(grid, target.graph, hull.lo, hull.hi, goal=0.1, region=needle)
    assert proof.bound >= 0.299
    found = pa.attack(flat.head, spike, needle, bound=0.1, samples=512, restarts=4)
    assert found.refuted and found.error > 0.29


def test_a_region_that_claims_to_be_smaller_than_it_is_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: a proof that drops boxes with points of the region states a bound that points of the region refute."""
    honest = Piece.outside
    monkeypatch.setattr(Piece, "outside", lambda self, lo, hi: honest(self, lo, hi) | (hi[:, 0] > 0.51))
    head = pa.compile("0*x0", pa.Ball([0, 0], 1), tolerance=0.1, method="fitted").head
    target = make_target("relu(x0 - 0.5)", pa.Ball([0, 0], 1))
    wrong = prove_grid(
        soft_grid_of(head), target.graph, np.array([-1.0, -1]), np.array([1.0, 1]), goal=0.1, region=target.region
    )
    monkeypatch.undo()
    right = prove_grid(
        soft_grid_of(head), target.graph, np.array([-1.0, -1]), np.array([1.0, 1]), goal=0.1, region=target.region
    )
    assert wrong.bound < 0.1 < 0.499 <= right.bound


def test_a_larger_region_than_certified_is_not_confirmed(tmp_path: Path) -> None:
    c = compiled("logarithm on a triangle")
    c.save(tmp_path / "head")
    data = json.loads((tmp_path / "head" / "head.json").read_text())
    rows = data["domains"][0]["pieces"][0]["constraints"]
    assert any("+ 1 <= 0" in row["text"] for row in rows)

    def forged(name: str, change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]) -> Path:
        place = tmp_path / name
        shutil.copytree(tmp_path / "head", place)
        domains = json.loads((place / "head.json").read_text())["domains"]
        domains[0]["pieces"][0]["constraints"] = change(domains[0]["pieces"][0]["constraints"])
        forge(place, domain={"arguments": domains})
        reseal(place, domains=domains)
        return place

    larger = forged("larger", lambda rows: [row for row in rows if "+ 1 <= 0" not in row["text"]])
    assert run(larger, budget=5.0)[1] in (1, 2)
    other = forged("text", lambda rows: [{**rows[0], "text": "x0 - 2 <= 0"}, *rows[1:]])
    assert run(other, budget=5.0)[1] == 3
    with pytest.raises(errors.FormatError):
        pa.load(other)
    assert run(forged("same", lambda rows: rows), budget=30.0)[1] == 0


def test_covers_reach_every_point_and_a_missing_ball_is_noticed() -> None:
    c = compiled("cover of a triangle")
    region, centers, radius = c.target.domain, c.head.centers.double().numpy(), float(c.certificate.proof["radius"])
    assert holds("triangle", centers).all()
    assert covering_radius(region, centers, radius) <= radius
    points = region.sample(2000, np.random.default_rng(0))
    assert np.sqrt(((points[:, None] - centers) ** 2).sum(axis=2)).min(axis=1).max() <= radius
    assert covering_radius(region, centers[1:], radius) > radius


def test_inputs_that_float32_moves_across_the_edge_are_covered() -> None:
    c = compiled("total on a union")
    t = np.linspace(0, 2 * np.pi, 4000)
    edge = np.stack([np.cos(t), np.sin(t)], axis=1) * (1 - 1e-15)
    edge = edge[holds("two", edge)]
    rounded = edge.astype(np.float32).astype(np.float64)
    crossed = ~holds("two", rounded)
    assert crossed.sum() > 100
    assert largest_error(c, edge[crossed]) <= c.error_bound


# --- black boxes, norms, calls ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "kind"), [("hard", "proved_given"), ("fitted", "estimated"), ("adaptive", "estimated")]
)
def test_a_black_box_is_never_called_outside(method: str, kind: str) -> None:
    asked = []

    def f(z: np.ndarray) -> np.ndarray:
        asked.append(np.array(z))
        return np.log(z[:, 0] + z[:, 1])

    c = pa.compile(f, shape("triangle"), tolerance=0.1, lipschitz=1.42, method=method, trace=False)
    assert c.certificate.kind == kind
    points = np.concatenate(asked)
    assert len(points) > 300 and holds("triangle", points).all()


def test_the_region_alone_is_integrated() -> None:
    """A tolerance that the box around the region does not allow with the same supremum."""
    c = pa.compile("x*y", shape("triangle"), tolerance=0.02, norm=1, method="fitted")
    points = shape("triangle").bounding_box().sample(20_000, np.random.default_rng(0))
    inside = holds("triangle", points)
    error = np.where(inside, np.abs(c.with_outside("allow")(points) - points[:, 0] * points[:, 1]), 0.0)
    assert error.mean() <= c.error_bound <= 0.02
    factor = c.certificate.terms[0].inputs["factor"]
    assert 0.5 <= factor <= 0.55


def test_inputs_outside_are_refused_moved_or_let_through() -> None:
    c = compiled("root on a disc")
    assert c([0.6, 0.8]).shape == ()
    with pytest.raises(errors.OutsideDomainError, match="x0\\^2"):
        c([0.9, 0.9])
    near = shape("disc").clamp(np.array([[3.0, 4.0]]))
    assert c.with_outside("clamp")([[3.0, 4.0]]).tolist() == c(near).tolist()
    assert np.abs(near - [0.6, 0.8]).max() < 1e-4
    assert np.isfinite(c.with_outside("allow")([0.9, 0.9]))


def test_ranges_slopes_and_pictures_are_those_of_the_region(tmp_path: Path) -> None:
    c = compiled("logarithm on a triangle")
    (found,) = c.bound_range()
    assert -0.02 <= found.lo <= 0 and math.log(2) - 1e-3 <= found.hi <= math.log(2) + 0.02
    (slope,) = c.bound_slope(0)
    assert slope.trend == "increasing"
    assert max(c.bound_gradient_error().bounds) < 0.2
    plot_head(compiled("root on a disc"), tmp_path / "disc.png")
    assert (tmp_path / "disc.png").exists()


def test_f_is_continued_smoothly() -> None:
    target = make_target("1/(x**2 + y**2)", shape("ring"))
    found = extended(target, 1e-2)
    assert found is not None and found.error <= 1e-2
    corners = target.box.corners()
    assert np.abs(found(corners)).max() < 100
    assert extended(make_target("step(x)", shape("disc")), 1e-2) is None


def test_the_command_line_takes_regions(tmp_path: Path) -> None:
    arguments = ["--domain", "[-1,1]^2", "--region", "x0**2 + x1**2 <= 1", "--tolerance", "0.05"]
    done = CliRunner().invoke(app, ["compile", "x0*x1", *arguments, "--out", str(tmp_path / "head"), "--json"])
    assert done.exit_code == 0, done.output
    assert "x0^2 + x1^2 - 1 <= 0" in json.loads(done.stdout)["domain"][0]
    assert CliRunner().invoke(app, ["plan", "x0*x1", *arguments]).exit_code == 0
    assert run(tmp_path / "head", budget=30.0)[1] == 0


@pytest.mark.parametrize("make", [lambda: pa.Ball([0, 0], 1e200), lambda: pa.Simplex([[0.0], [1e-310]])])
def test_numbers_out_of_range_are_named(make):
    with pytest.raises(pa.PartitaError, match=r"escale the variables|few floating-point"):
        make()


def test_volumes_enclose_the_volume() -> None:
    for m in (1, 2, 3):
        ball, volume = pa.Ball([0.5] * m, 1.5), math.pi ** (m / 2) / math.gamma(m / 2 + 1) * 1.5**m
        assert 0.6 * volume < ball.inner_volume <= volume * (1 + 1e-9) and volume <= ball.volume * (1 + 1e-9)


def test_a_cover_that_needs_too_many_balls_is_refused_with_a_tolerance_that_fits() -> None:
    def head(tolerance: float) -> pa.Compiled:
        text = "sqrt(1.5 - x**2 - y**2)"
        return pa.compile(text, pa.Ball([0, 0], 1), tolerance=tolerance, method="hard", max_bytes=40_000)

    with pytest.raises(pa.errors.SizeError, match="A tolerance that fits") as error:
        head(1e-4)
    fits = float(str(error.value).split("is about ")[1].split(";")[0])
    assert head(1.05 * fits).error_bound <= 1.05 * fits
    with pytest.raises(pa.errors.SizeError):
        head(fits / 3)
