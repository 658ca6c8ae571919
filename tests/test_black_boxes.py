"""Slow functions: how often they are evaluated, what a limit gives, and what is said about it. The user is an engineer."""

import importlib.util
import json
import math
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

import partita as pa
from partita.cli import main
from partita.cli.common import shown_progress
from partita.compiler import clock
from partita.errors import (
    BudgetSpentError,
    CurvatureContradictedError,
    LipschitzContradictedError,
    ToleranceMissedWarning,
    UnsupportedError,
)
from partita.functions.probing import Calls
from partita.search.interpolant import interpolate

_FILE = Path(__file__).parents[1] / "benchmarks" / "black_boxes.py"
_SPEC = importlib.util.spec_from_file_location("black_boxes", _FILE)
bench = sys.modules["black_boxes"] = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(bench)

SQUARE = pa.Box([-1, -1], [1, 1])
BATTERY = next(case for case in bench.CASES if case.name == "battery voltage")


class Remembering(bench.Counted):
    """Counts rows, and keeps them."""

    def __init__(self, function):
        super().__init__(function)
        self.seen = []

    def __call__(self, z):
        self.seen += [row.tobytes() for row in np.asarray(z)]
        return super().__call__(z)


def error_at_fresh_points(c, function, box, count=100_000):
    points = box.sample(count, np.random.default_rng(1234))
    return float(
        np.abs(c(torch.from_numpy(points)).numpy().reshape(count, -1) - function(points).reshape(count, -1)).max()
    )


@pytest.mark.parametrize("case", [c for c in bench.CASES if c.box.dimension != 6], ids=lambda case: case.name)
def test_few_evaluations_are_enough(case):
    f = bench.Counted(case.function)
    c = pa.compile(f, case.box, tolerance=case.tolerance)
    assert c.evaluations == f.rows <= case.most
    assert c.certificate.kind == "estimated" and c.tolerance_met and c.certificate.samples >= 256
    rough = "|" in case.name  # there an estimate from a few hundred points may be a little too low
    assert error_at_fresh_points(c, case.function, case.box) <= (1.2 if rough else 1.0) * case.tolerance
    assert c.certificate.facts["evaluations"] == f.rows == c.candidates[0].evaluations
    assert f"{f.rows:,}" in c.report() and "evaluations" in c.report().splitlines()[0]


def test_no_point_is_evaluated_twice_after_the_probes():
    f = Remembering(BATTERY.function)
    c = pa.compile(f, BATTERY.box, tolerance=BATTERY.tolerance)
    probes = 11 + 11 + 5  # again in torch, again the same, and alone
    assert len(f.seen) - len(set(f.seen)) <= probes
    assert len(f.seen) == c.evaluations - 2  # and it was not traceable


def test_many_variables_need_hundreds():
    box = pa.Box([-1] * 20, [1] * 20)
    f = bench.Counted(lambda z: np.sin(z).sum(axis=1) + z[:, 0] * z[:, 1])
    c = pa.compile(f, box, tolerance=1e-2)
    assert c.evaluations == f.rows <= 2_500 and error_at_fresh_points(c, f.function, box, 10_000) <= 1e-2


def test_a_region_needs_hundreds():
    ball = pa.Ball([0.0, 0.0], 1.0)
    f = bench.Counted(lambda z: np.sin(3 * z[:, 0]) + z[:, 1] ** 2)
    c = pa.compile(f, ball, tolerance=1e-3)
    assert c.evaluations == f.rows <= 1_500
    assert np.abs(c.errors_at(ball.sample(10_000, np.random.default_rng(5)))).max() <= 1e-3


def test_expressions_and_loaded_heads_are_counted_too(tmp_path):
    assert pa.compile("sin(x0)", pa.Box([0], [1]), tolerance=1e-2).evaluations == 0
    assert pa.compile("abs(x0)", pa.Box([-1], [1]), tolerance=0.1, method="adaptive").evaluations == 0
    c = pa.compile(lambda z: np.round(z[:, 0], 2), pa.Box([0], [1]), tolerance=0.1)
    assert pa.load(c.save(tmp_path / "head")).evaluations == c.evaluations > 0


@pytest.mark.parametrize("most", [100, 150, 300, 450, 3_000])
def test_a_limit_on_evaluations_is_kept(most):
    for function, box, tolerance in (
        (BATTERY.function, BATTERY.box, BATTERY.tolerance),
        (lambda z: np.where(z[:, 0] + z[:, 1] > 0.3, 1.0, 0.0), SQUARE, 1e-2),
    ):
        f = bench.Counted(function)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            c = pa.compile(f, box, tolerance=tolerance, max_evaluations=most)
        assert f.rows == c.evaluations <= most
        assert c.certificate.kind == "estimated" and c.tolerance_met == (c.error_estimate <= tolerance)
        missed = [w for w in said if w.category is ToleranceMissedWarning]
        assert len(missed) == (not c.tolerance_met)
        if not c.tolerance_met:
            assert "above the tolerance" in str(missed[0].message) and missed[0].filename == __file__
            assert "Nothing is proved" in c.explain()


@pytest.mark.parametrize("bad", [0, 99, -5, math.inf, math.nan, "many", True])
def test_a_limit_that_makes_no_sense_is_refused(bad):
    with pytest.raises(UnsupportedError, match="max_evaluations is"):
        pa.compile(BATTERY.function, BATTERY.box, tolerance=1e-2, max_evaluations=bad)


def test_a_false_constant_is_refused_early():
    f = bench.Counted(BATTERY.function)
    with pytest.raises(LipschitzContradictedError, match="declare at least"):
        pa.compile(f, BATTERY.box, tolerance=5e-3, lipschitz=1.0)
    assert f.rows <= 500
    f = bench.Counted(lambda z: (z**2).sum(axis=1))
    with pytest.raises(CurvatureContradictedError, match="declare at least"):
        pa.compile(f, SQUARE, tolerance=0.05, hessian=1.9)
    assert f.rows <= 500


def test_a_claim_that_needs_millions_of_evaluations_waits_for_permission():
    f = bench.Counted(BATTERY.function)
    plan = pa.plan(f, BATTERY.box, tolerance=5e-3, hessian=50)
    assert f.rows <= 500 and plan.kind == "estimated" and plan.evaluations < 1_000
    row = next(c for c in plan.candidates if c.method == "affine")
    assert "evaluations of f" in row.note and row.kind == "proved_given"
    c = pa.compile(lambda z: np.sin(z).sum(axis=1), SQUARE, tolerance=0.05, lipschitz=1.5)
    assert c.certificate.kind == "proved_given" and c.evaluations < c.num_keys + 600
    (declared,) = (a for a in c.certificate.assumptions if a.about == "regularity")
    granted = pa.compile(lambda z: np.sin(z).sum(axis=1), SQUARE, tolerance=0.05, lipschitz=1.5, max_evaluations=20_000)
    (tested,) = (a for a in granted.certificate.assumptions if a.about == "regularity")
    assert "1,024 pairs" in tested.attack and "1,024 pairs" not in declared.attack


def test_a_plan_forecasts_the_evaluations():
    f = bench.Counted(lambda z: np.sin(z).sum(axis=1))
    plan = pa.plan(f, SQUARE, tolerance=0.05, lipschitz=1.5, method="hard")
    asked = f.rows
    assert asked < 300 and plan.evaluations >= asked + plan.keys
    c = pa.build(plan)
    assert abs(c.evaluations - plan.evaluations) <= 300 and plan.to_json()["evaluations"] == plan.evaluations
    assert pa.plan("sin(x0)", pa.Box([0], [1]), tolerance=0.1).evaluations is None


def test_a_hidden_spike_is_an_honest_estimate():
    def spike(z):
        return np.sin(z[:, 0]) + np.exp(-1e6 * ((z - 0.1234) ** 2).sum(axis=1))

    c = pa.compile(spike, SQUARE, tolerance=1e-2)
    assert c.certificate.kind == "estimated" and math.isinf(c.error_bound)
    assert "of the domain. Nothing is proved about its supremum" in c.explain()
    assert c.errors_at(np.array([[0.1234, 0.1234]]))[0] > 0.9  # which is why
    declared = pa.compile(spike, SQUARE, tolerance=1e-2, accept="estimated", modulus="2000*t")
    assert declared.certificate.kind != "proved"


def test_interpolation_stops_where_it_is_told_to():
    def ask(z):
        return np.abs(z[:, :1] - z[:, 1:])

    few = interpolate(ask, SQUARE, outputs=1, tolerance=1e-6, most=200)
    assert not few.resolved and not few.stopped
    done = []

    def watch(error):
        done.append(error)
        if len(done) == 3:
            raise BudgetSpentError("enough")

    assert interpolate(ask, SQUARE, outputs=1, tolerance=1e-6, most=10_000, watch=watch).stopped
    exact = interpolate(lambda z: z[:, :1] ** 3 * z[:, 1:], SQUARE, outputs=1, tolerance=1e-9, most=200)
    assert exact.resolved and exact.error < 1e-12 and exact.boxes == 1
    where = SQUARE.sample(100, np.random.default_rng(0))
    assert np.abs(exact(where)[:, 0] - where[:, 0] ** 3 * where[:, 1]).max() < 1e-12


@pytest.mark.parametrize(
    "f",
    [
        lambda z: z[:, 0] * z[:, 1],  # 0 along both axes through the middle
        lambda z: np.prod(np.sin(np.pi * z), axis=1),  # 0 at the ends and in the middle
        lambda z: z[:, 0] * z[:, 1] * (z[:, 0] ** 2 - 0.17**2),
        lambda z: 1e200 * np.cos(z[:, 0] + z[:, 1]),
        lambda z: 1e-200 * np.cos(z[:, 0] + z[:, 1]) + 3e-200,
    ],
)
def test_functions_that_hide_at_special_points_are_found(f):
    scale = float(np.abs(f(SQUARE.sample(99, np.random.default_rng(3)))).max())
    c = pa.compile(f, SQUARE, tolerance=1e-3 * scale, trace=False)
    assert error_at_fresh_points(c, f, SQUARE, 20_000) <= 1e-3 * scale and c.evaluations < 1_000


def ticking(monkeypatch, seconds):
    """A clock that moves by so many seconds whenever it is read."""
    now = [0.0]

    def monotonic():
        now[0] += seconds
        return now[0]

    monkeypatch.setattr(clock, "time", type("time", (), {"monotonic": staticmethod(monotonic)}))
    return now


@pytest.mark.parametrize(
    ("f", "tolerance", "step"),
    [
        ("sin(9*x0*x1)+cos(8*x1)*x0", 1e-9, 0.02),
        ("sin(9*x0*x1)+cos(8*x1)*x0", 1e-9, 0.2),
        ("abs(x0^2 + x1 - 0.2)", 1e-3, 0.2),
        (lambda z: np.abs(z[:, 0] - z[:, 1]), 1e-3, 0.02),
        (lambda z: np.sin(9 * z[:, 0] * z[:, 1]), 1e-8, 0.2),
    ],
)
def test_a_budget_that_is_spent_gives_the_best_head_so_far(monkeypatch, f, tolerance, step):
    now = ticking(monkeypatch, step)
    with pytest.warns(ToleranceMissedWarning, match="above the tolerance"):
        c = pa.compile(f, SQUARE, tolerance=tolerance, budget=10.0)
    assert now[0] <= 10.0 + 6 * step  # a handful of reports after the end
    assert not c.tolerance_met and c.certificate.error > tolerance
    where = SQUARE.sample(2_000, np.random.default_rng(8))
    if c.certificate.kind == "proved":
        assert c.errors_at(where).max() <= c.error_bound
    else:
        assert c.error_estimate < math.inf


def test_a_budget_that_is_enough_changes_nothing(monkeypatch):
    ticking(monkeypatch, 1e-6)
    with_budget = pa.compile("sin(3*x0)", pa.Box([-1], [1]), tolerance=1e-3, budget=1e6)
    assert with_budget.tolerance_met
    assert with_budget.error_bound == pa.compile("sin(3*x0)", pa.Box([-1], [1]), tolerance=1e-3).error_bound


def test_progress_names_calls_and_errors_from_the_start():
    said = []
    pa.compile(
        lambda z: np.abs(z[:, 0] - 0.3), pa.Box([-1], [1]), tolerance=1e-2, progress=lambda *what: said.append(what)
    )
    assert "evaluations of f" in said[0][0]  # before f is called at length
    assert any("interpolated within" in what for what, _, _ in said)
    assert any("best error" in what for what, _, _ in said)


def test_slow_functions_are_called_in_small_batches():
    sizes = []

    def slow(z):
        sizes.append(len(z))
        time.sleep(0.002 * len(z))
        return np.sin(z[:, 0])

    pa.compile(slow, pa.Box([-1], [1]), tolerance=1e-2)
    assert max(sizes) <= 0.25 / 0.002 + 1


def test_the_cliff_is_gone():
    """1e-10 is out of reach for this head by a hair; the answer comes soon and names a tolerance that works."""
    f, one = "sin(x0)+x1", {"max_heads": 1, "max_layers": 1}
    assert pa.compile(f, SQUARE, tolerance=1e-9, **one).certificate.kind == "proved"
    with pytest.raises(pa.PartitaError, match=r"tolerance=1\.\d*e-10") as found:
        pa.compile(f, SQUARE, tolerance=1e-10, **one)
    advised = float(str(found.value).split("tolerance=")[1].split()[0].rstrip(".,"))
    assert pa.compile(f, SQUARE, tolerance=advised, **one).certificate.kind == "proved"
    with pytest.raises(pa.PartitaError, match="smallest error that was reached"):
        pa.compile(f, SQUARE, tolerance=1e-13, **one)


def test_calls_know_what_is_left():
    calls = Calls(most=1000, reserved=100)
    calls.take(300)
    assert calls.left == 600 and calls.allowance(5000) == 150 and Calls().allowance(5000) == 128
    with pytest.raises(BudgetSpentError, match="601 more would exceed"):
        calls.take(601)
    assert calls.rows == 300


def test_the_command_line_says_what_was_asked_and_whether_it_was_enough(tmp_path, capsys):
    (tmp_path / "simulator.py").write_text(
        "import numpy as np\n\n\ndef kink(z):\n    return np.abs(np.asarray(z)[:, 0] - np.asarray(z)[:, 1])\n"
    )
    common = [f"{tmp_path}/simulator.py:kink", "--domain", "[-1,1]^2", "--json"]

    def run(*arguments):
        with pytest.raises(SystemExit) as stop:
            main([*arguments])
        told = capsys.readouterr()
        return stop.value.code, json.loads(told.out), " ".join(told.err.split())

    code, found, said = run(
        "compile", *common, "--tolerance", "0.01", "--out", str(tmp_path / "a"), "--max-evaluations", "200"
    )
    assert code == 1 and not found["tolerance_met"] and found["evaluations"] <= 200 and "is not met" in said
    assert "--max-evaluations" in said and pa.load(tmp_path / "a").evaluations == found["evaluations"]
    code, found, said = run("compile", *common, "--tolerance", "0.8", "--out", str(tmp_path / "b"))
    assert code == 0 and found["tolerance_met"] and found["evaluations"] > 256 and "is not met" not in said
    code, found, said = run("plan", *common, "--tolerance", "0.8")
    assert code == 0 and found["evaluations"] > 256
    assert any(row["evaluations"] for row in found["candidates"] if not row["chosen"])


def test_a_bar_is_never_full_while_work_goes_on(monkeypatch):
    seen = []
    monkeypatch.setattr("rich.progress.Progress.update", lambda self, task, **what: seen.append(what))
    with shown_progress("proof", budget=7.0) as progress:
        progress("proof", 10, 10)
        progress("fitting", 0, 0)
    assert seen[0]["completed"] < seen[0]["total"] == 10 and "7 s of the budget left" in seen[0]["description"]
    assert seen[1]["total"] is None and seen[1]["description"].startswith("fitting")


@pytest.mark.filterwarnings("ignore::partita.errors.ToleranceMissedWarning")
def test_limits_that_leave_nothing_for_tests_are_kept():
    def kink(z):
        return np.abs(z[:, 0] - z[:, 1])

    for options in (
        {"tolerance": 0.0228, "max_evaluations": 3649, "lipschitz": (1, 1), "norm": 1.0},
        {"tolerance": 0.01, "max_evaluations": 300, "lipschitz": 1.5},
    ):
        f = bench.Counted(kink)
        c = pa.compile(f, SQUARE, trace=False, **options)
        assert c.evaluations == f.rows <= options["max_evaluations"]
    f = bench.Counted(kink)
    c = pa.head(f, SQUARE, keys=(10, 9), sharpness=1.35, values="fitted", lipschitz=(1, 1), trace=False)
    assert c.evaluations == f.rows <= 6_000
    assert c.with_sharpness(3.0).num_keys == 90
