"""A student and a teacher choose heads: keys, temperature and values first, and the bound that such a head has."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from partita_check.cli import run
from torch import nn

import partita as pa
from partita import errors
from partita.cli import main
from partita.geometry.moments import AxisGeometry, moment_bounds
from partita.proofs import PROOFS, Given
from partita.proofs.taylor_proof import running_soft

SQUARE = pa.Box([-1, -1], [1, 1])
LINE = pa.Box([-1], [1])
WAVES = "sin(3*x0) + x0*cos(2*x1)"


def waves(z):
    """The same as a black box."""
    return np.sin(3 * z[:, 0]) + z[:, 0] * np.cos(2 * z[:, 1])


def softmax_by_hand(c: pa.Compiled, points: np.ndarray) -> np.ndarray:
    """`Σ_j w_j (V_j + J_j(z − o))` as the papers write it, from the stored tensors."""
    head = c.head
    axes = [a.double().numpy() for a in head.axes]
    centers = np.stack([g.ravel() for g in np.meshgrid(*axes, indexing="ij")], axis=1)
    rates = head.inverse_temperature.double().numpy()
    scores = -0.5 * (rates * (points[:, None] - centers) ** 2).sum(axis=2)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    values = head.values.double().numpy()[None]
    if head.value_slopes is not None:
        away = points - head.origin.double().numpy()
        values = values + np.einsum("jom,nm->njo", head.value_slopes.double().numpy(), away)
    return np.einsum("nj,njo->no", weights, np.broadcast_to(values, (len(points), *values.shape[1:])))


def verdict(c: pa.Compiled, folder) -> str:
    report, code = run(c.save(folder), budget=60)
    return {0: "verified", 1: "refuted"}.get(code, str(report))


@pytest.mark.parametrize("values", ["centers", "corrected", "fitted", "affine"])
@pytest.mark.parametrize("kappa", [0.31, 2.0])
def test_a_student_chooses_keys_temperature_and_values(values, kappa):
    c = pa.head(WAVES, SQUARE, keys=(8, 8), sharpness=kappa, values=values)
    assert isinstance(c, pa.Compiled)
    assert (c.num_keys, c.certificate.kind) == (64, "proved")
    assert c.certificate.facts["sharpness"] == pytest.approx(kappa)
    points = SQUARE.sample(2000, np.random.default_rng(5))
    seen = c.errors_at(points).max()
    assert seen <= c.error_bound <= 1.02 * c.certificate.witness.error
    assert np.abs(softmax_by_hand(c, points)[:, 0] - c(points)).max() < 1e-12 * max(1, c.head.values.abs().max())
    assert all(check.holds for check in pa.recheck(c))


def test_hard_heads_are_as_good_as_compiled_ones():
    hard = pa.compile(WAVES, SQUARE, tolerance=0.4, method="hard")
    chosen = pa.head(WAVES, SQUARE, keys=hard.head.counts, sharpness=64)
    assert torch.equal(chosen.head.values, hard.head.values)
    assert chosen.error_bound <= (1 + 1e-9) * hard.error_bound
    sloped = pa.compile(WAVES, SQUARE, tolerance=0.1, method="affine")
    assert pa.head(WAVES, SQUARE, keys=sloped.head.counts, sharpness=4096, values="affine").error_bound <= 0.1
    softer = [pa.head(WAVES, SQUARE, keys=8, sharpness=k, values="affine") for k in (100, 300)]
    assert all(c.certificate.witness.error <= c.error_bound <= 3 * c.certificate.witness.error for c in softer)


def test_a_teacher_shows_the_same_cells_at_three_temperatures():
    c = pa.head("sin(3*x)", LINE, keys=16, ghosts=3, sharpness=3.4)
    before = c.error_bound
    table = {kappa: c.with_sharpness(kappa) for kappa in (0.3, 3.4, 64)}
    bounds = [d.error_bound for d in table.values()]
    assert bounds[1] < bounds[2] < bounds[0]  # the middle one is best
    for kappa, d in table.items():
        assert torch.equal(d.head.values, c.head.values)
        assert all(torch.equal(a, b) for a, b in zip(d.head.axes, c.head.axes))
        assert float(d.head.inverse_temperature[0]) == pytest.approx(kappa / 0.2**2)
        assert d.certificate.witness.error <= d.error_bound <= 1.02 * d.certificate.witness.error
        assert not d.is_changed
    assert table[3.4].error_bound == pytest.approx(before, rel=1e-3)
    assert c.error_bound == before  # the first head is as it was


def test_no_tolerance_is_shown_where_none_was_asked(tmp_path):
    c = pa.head("sin(3*x)", LINE, keys=8, sharpness=0.5)
    assert not c.certificate.has_tolerance
    assert all("no tolerance was set" in text for text in (c.explain(), repr(c.certificate), c._repr_html_()))
    assert "→" in c.report() and "no tolerance" in c.report()
    assert c.layers().error_bound >= c.error_bound  # no tolerance stands in the way of rounding
    from partita.plots import plot_head

    assert plot_head(c, tmp_path / "head.svg")
    asked = pa.compile("sin(3*x)", LINE, tolerance=0.3, method="hard")
    assert asked.certificate.has_tolerance and "tolerance 0.3" in asked.explain()


@pytest.mark.parametrize("kappa", [1e-4, 0.05, 0.31, 0.999])
def test_any_sharpness_above_zero_compiles(kappa):
    c = pa.compile("2*x", pa.Box([0], [1]), tolerance=0.3, sharpness=kappa)
    assert c.certificate.facts["sharpness"] == pytest.approx(kappa)
    assert c.certificate.witness.error <= c.error_bound <= 0.3
    assert c.num_keys <= 8 / kappa**0.5  # distances grow like 1/√κ


@pytest.mark.parametrize("kappa", [0.0, -1.0, float("nan"), float("inf"), "soft", (1.0, 2.0, 3.0)])
def test_what_is_no_sharpness_is_refused(kappa):
    for make in (
        lambda: pa.head("x", LINE, keys=4, sharpness=kappa),
        lambda: pa.head("x", LINE, keys=1).with_sharpness(kappa),
        lambda: pa.compile("x", LINE, tolerance=0.5, sharpness=kappa),
    ):
        with pytest.raises(errors.UnsupportedError, match="κ = R h² > 0"):
            make()


def test_absurd_temperatures_stay_within_what_averages_can_do():
    for kappa in (1e-300, 1e30, 1e300):  # between the mean of all values and a step function, rounding included
        assert pa.head("sin(3*x)", LINE, keys=4, sharpness=kappa).error_bound < 4


def test_too_soft_for_the_memory_is_refused_with_the_number():
    with pytest.raises(errors.SizeError, match="keys"):
        pa.compile(WAVES, SQUARE, tolerance=0.1, sharpness=1e-6, max_bytes=1 << 20)


@pytest.mark.parametrize(
    ("error", "text", "options"),
    [
        (errors.ShapeError, "keys", {"keys": (8, 8, 8)}),
        (errors.ShapeError, "keys", {"keys": 0}),
        (errors.ShapeError, "keys", {"keys": 2.5}),
        (errors.UnsupportedError, "values", {"keys": 4, "values": "best"}),
        (errors.DomainError, "ghosts", {"keys": 4, "ghosts": 2}),
        (errors.DomainError, "ghosts", {"keys": 8, "ghosts": 1, "values": "affine"}),
        (errors.SizeError, "max_bytes", {"keys": 10**5}),
        (errors.UnsupportedError, "256 keys per axis", {"keys": (300, 2), "values": "fitted"}),
    ],
)
def test_what_cannot_be_chosen_is_named(error, text, options):
    with pytest.raises(error, match=text):
        pa.head(WAVES, SQUARE, **options)


CASES = {
    "vector": (("sin(x0), x0*x1", SQUARE), {"keys": (6, 5), "sharpness": (1, 3.0)}),
    "vector, one variable": (("sin(x0), x0*x0", LINE), {"keys": 6, "sharpness": 0.7, "values": "corrected"}),
    "far away": (("sin(3*x0)*x1", pa.Box([100, -1], [101, 5])), {"keys": 6, "dtype": torch.float32}),
    "sloped, float32": (
        ("sin(3*x0)*x1", pa.Box([100, -1], [101, 5])),
        {"keys": 5, "values": "affine", "dtype": torch.float32},
    ),
    "three variables": (("sin(x0)*x1 + x2", pa.Box([0] * 3, [1] * 3)), {"keys": (4, 5, 3), "sharpness": 1}),
    "pair": (("k0*q0", (LINE, pa.Box([0], [1]))), {"keys": 5, "values": "affine"}),
    "region": (("x0*x1", pa.Ball([0, 0], 1.0)), {"keys": 3}),
    "mean square": (("sin(x0)*x1", SQUARE), {"keys": 5, "norm": 2, "values": "affine"}),
    "kink": (("abs(x0 - 0.3)", LINE), {"keys": 9, "values": "fitted", "ghosts": 1, "sharpness": 0.7}),
    "one key": (("exp(x0)", LINE), {"keys": 1, "values": "affine"}),
    "two sloped keys": (("sin(3*x0)", LINE), {"keys": 2, "sharpness": 0.4, "values": "affine"}),
    "module": ((nn.Sequential(nn.Linear(1, 3), nn.Tanh(), nn.Linear(3, 2)).eval(), LINE), {"keys": 5}),
    "jump": (("step(x0 - 0.2) + x0", LINE), {"keys": 7}),
    "steep": (("sqrt(x0)", pa.Box([0], [1])), {"keys": 7}),
    "constant": (("3 + 0*x0", LINE), {"keys": 4, "sharpness": 0.01}),
}


@pytest.mark.parametrize(
    "case", [case for case in CASES if case not in ("three variables", "region", "pair", "vector", "far away", "steep")]
)
def test_every_kind_of_head_is_proved_and_saved(case, tmp_path):
    (function, domain), options = CASES[case]
    c = pa.head(function, domain, **options)
    assert c.certificate.kind == "proved"
    if c.certificate.norm == "inf":
        assert c.certificate.witness.error <= c.error_bound
        assert not pa.attack(c).refuted
    again = pa.load(c.save(tmp_path / "head"))
    assert again.error_bound == c.error_bound and not again.certificate.has_tolerance
    assert all(check.holds for check in pa.recheck(again))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_every_kind_of_head_is_verified(case, tmp_path):
    (function, domain), options = CASES[case]
    c = pa.head(function, domain, **options)
    assert verdict(c, tmp_path / "head") == "verified"
    again = pa.load(tmp_path / "head")
    assert all(check.holds for check in pa.recheck(again))
    assert again.with_sharpness(5.0).error_bound == pytest.approx(c.with_sharpness(5.0).error_bound)


def test_the_checker_verifies_soft_heads(tmp_path):
    for case in ("two sloped keys", "kink", "soft"):
        (function, domain), options = CASES.get(case, (("sin(3*x)", LINE), {"keys": 8, "sharpness": 0.31}))
        assert verdict(pa.head(function, domain, **options), tmp_path / case) == "verified"


def test_black_boxes_are_estimated_unless_something_is_declared(tmp_path):
    sampled = pa.head(waves, SQUARE, keys=8, sharpness=0.5, values="fitted")
    assert sampled.certificate.kind == "estimated" and sampled.error_bound == np.inf
    assert 64 < sampled.evaluations < 3000 and str(sampled.evaluations) in sampled.report().replace(",", "")
    assert all(check.holds for check in pa.recheck(sampled))
    low = replace(sampled.certificate, tolerance=sampled.error_estimate / 2).with_estimate(sampled.error_estimate / 2)
    assert not all(check.holds for check in pa.recheck(replace(sampled, certificate=low)))  # negative control
    for options in ({"lipschitz": 4.2}, {"lipschitz": (4.0, 2.0)}, {"hessian": 10, "values": "affine"}):
        c = pa.head(waves, SQUARE, keys=6, sharpness=0.6, **options)
        assert c.certificate.kind == "proved_given"
        assert c.certificate.witness.error <= c.error_bound
        assert verdict(c, tmp_path / str(options)) == "verified"
        loaded = pa.load(tmp_path / str(options)).with_sharpness(2.0)  # needs no answers of f
        assert loaded.certificate.kind == "proved_given"
        said = [[a.statement for a in d.certificate.assumptions if a.vouched_by == "caller"] for d in (c, loaded)]
        assert said[0] == said[1] != []
        assert loaded.error_bound == pytest.approx(c.with_sharpness(2.0).error_bound)
    with pytest.raises(errors.LipschitzContradictedError):
        pa.head(waves, SQUARE, keys=6, sharpness=0.6, lipschitz=1.0)
    with pytest.raises(errors.CurvatureContradictedError):
        pa.head(waves, SQUARE, keys=6, sharpness=0.6, hessian=0.1, values="affine")
    sampled.save(tmp_path / "sampled")
    with pytest.raises(errors.PartitaError, match="function"):
        pa.load(tmp_path / "sampled").with_sharpness(2.0)


@pytest.mark.parametrize("kappa", [0.02, 0.3, 1.5, 5.0])
def test_declared_slopes_give_the_best_bound_that_they_can(kappa):
    """f(x) = x attains `L·E|x − v|` at the edge of the box."""
    c = pa.head(lambda z: z[:, 0], LINE, keys=10, sharpness=kappa, lipschitz=[1.0], trace=False)
    attained = c.errors_at(np.array([[-1.0]]))[0]
    assert attained <= c.error_bound <= 1.01 * attained


@pytest.mark.parametrize("power", [1.0, 3.5])
@pytest.mark.parametrize("count", [2, 20])
@pytest.mark.parametrize("kappa", [1e-4, 0.03, 0.9, 4.0, 6.9])
def test_soft_moments_are_bounds_and_sharp(kappa, count, power):
    centers = np.arange(count) + 0.5
    x = np.linspace(0, count, 3001)
    scores = -0.5 * kappa * (x[:, None] - centers) ** 2
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    moment = (weights * np.abs(x[:, None] - centers) ** power).sum(axis=1) / weights.sum(axis=1)
    supremum, average = moment_bounds(AxisGeometry.of(centers, 0, count), kappa, power)
    assert moment.max() <= supremum <= (1.02 if power > 2 else 1.012) * moment.max()
    assert moment.mean() <= 1.001 * average
    assert not moment.max() <= 0.97 * supremum  # negative control: nothing smaller by three per cent would do


def test_proofs_of_slopes_notice_what_changes():
    """Negative controls: a proof by polynomials must see every slope, and a proof by cells must refuse soft heads."""
    c = pa.head(WAVES, SQUARE, keys=8, sharpness=2.0, values="affine")
    bound = c.error_bound
    moved = pa.head(WAVES, SQUARE, keys=8, sharpness=2.0, values="affine")
    moved.head.value_slopes[20, 0, 1] += 3.0
    assert moved.errors_at(SQUARE.sample(2000, np.random.default_rng(0))).max() > bound
    again = PROOFS["taylor"].prove(moved.head, moved.target, Given(tolerance=bound)).bound
    assert again > moved.errors_at(SQUARE.sample(2000, np.random.default_rng(0))).max()
    with pytest.raises(errors.UnsupportedError, match="softer"):
        PROOFS["cells"].prove(c.head, c.target, Given(tolerance=1.0))
    assert running_soft(c.head, SQUARE, None, np.inf)[1].value > 0
    assert c.bound_range()[0].hi >= float(c(SQUARE.sample(500, np.random.default_rng(1))).max())


def test_the_checker_refutes_a_smaller_bound(tmp_path):
    for values in ("centers", "affine"):
        c = pa.head("sin(3*x)", LINE, keys=6, sharpness=0.8, values=values)
        terms = tuple(replace(t, value=0.9 * t.value) for t in c.certificate.terms)
        lower = replace(c.certificate, error_bound=0.9 * c.error_bound, tolerance=0.9 * c.error_bound, terms=terms)
        assert verdict(replace(c, certificate=lower), tmp_path / values) == "refuted"


def test_compiled_heads_take_other_temperatures_too():
    fitted = pa.compile(WAVES, SQUARE, tolerance=1e-3)
    assert fitted.with_sharpness(4.0).error_bound > 1e-3  # fitted for another temperature
    scattered = pa.compile("abs(x0) + abs(x1)", SQUARE, tolerance=1e-2, method="pieces")
    with pytest.raises(errors.UnsupportedError, match="grid"):
        scattered.with_sharpness(4.0)
    c = pa.head("x0", LINE, keys=4)
    c.head.values[0] += 1
    with pytest.raises(errors.UnsupportedError, match="changed"):
        c.with_sharpness(4.0)


def command(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main(["head", *arguments])
    return int(stop.value.code or 0)


def test_the_command_line_prints_the_table(capsys, tmp_path):
    given = ("sin(3*x)", "--domain", "[-1,1]", "--keys", "16", "--ghosts", "3")
    assert command(*given, "--sharpness", "0.3,3.4,64") == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[3:]]
    assert [row[0] for row in rows] == ["0.3", "3.4", "64"]
    assert [row[1] for row in rows] == ["proved"] * 3
    assert command(*given, "--sharpness", "3.4", "--json", "--out", str(tmp_path / "head")) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["heads"][0]["error_bound"] == pa.load(tmp_path / "head").error_bound
    assert command(*given, "--sharpness", "0") == 64
    assert command(*given, "--keys", "many") == 64
    assert command(*given, "--sharpness", "1,2", "--out", str(tmp_path / "two")) == 64
