"""A user's function fails at points, or is not what compile expects: the message names the point or the mistake, once."""

import json
import math
import re
import traceback
import zlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from test_cli import partita

import partita as pa
from partita import errors
from partita.functions.probing import Asker, Calls
from partita.functions.target import make_target
from partita.proofs.sampled import sampled_error
from partita.proofs.worst_point import errors_at, search_worst

LINE, SQUARE = pa.Box([0.0], [1.0]), pa.Box([-1, -1], [1, 1])


def unlucky(point, per_mille=10):
    """Scattered points, as where a solver does not converge."""
    return zlib.crc32(np.ascontiguousarray(point, dtype=np.float64).tobytes()) % 1000 < per_mille


def wave(z):
    return np.sin(3 * z[:, 0]) + z[:, 0] * np.cos(2 * z[:, 1])


class Counted:
    """A function that counts its calls, and raises where `bad` is true of a point."""

    __name__ = "solver"

    def __init__(self, bad, value=lambda z: z[0]):
        self.bad, self.value, self.calls = bad, value, 0

    def __call__(self, z):
        self.calls += 1
        if any(self.bad(row) for row in np.asarray(z)):
            raise ValueError("no convergence")
        return np.array([self.value(row) for row in np.asarray(z)])


# the message names the point


def named_point(caught):
    """The one point that a message names."""
    _, _, rest = str(caught.value).partition("at the point ")
    point = json.loads(rest[: rest.index("]") + 1])
    assert str(caught.value).count(str(point)) == 1 == str(caught.value).count("no convergence")
    return np.array(point)


def test_a_batch_that_fails_names_its_point():
    f = Counted(lambda z: 0.3 < z[0] < 0.32)  # the probes miss it
    with pytest.raises(errors.TargetFailedError, match="solver raised ValueError at the point") as caught:
        pa.compile(f, LINE, tolerance=0.01, trace=False)
    point = named_point(caught)
    assert 0.3 < point[0] < 0.32 and "on_error='exclude'" in str(caught.value)
    with pytest.raises(ValueError):
        f(point[None])  # as printed it can be pasted


def test_a_probe_that_fails_names_its_point():
    with pytest.raises(errors.TargetFailedError) as caught:
        pa.compile(Counted(lambda z: abs(z[0] - 0.9) < 0.15), LINE, tolerance=0.01)
    assert abs(named_point(caught)[0] - 0.9) < 0.15


def test_a_function_of_single_points_names_its_point():
    calls = []

    def solver(z):
        calls.append(z)
        if 0.3 < z[0] < 0.32:
            raise ValueError("no convergence")
        return math.sin(z[0])

    with pytest.raises(errors.TargetFailedError) as caught:
        pa.compile(solver, LINE, tolerance=0.01, vectorize=True)
    assert named_point(caught)[0] == calls[-1][0]  # nothing was asked again
    assert "".join(traceback.format_exception(caught.value)).count("at the point") == 1
    assert isinstance(caught.value.__cause__, ValueError)  # what the solver raised, with its own lines


@pytest.mark.parametrize("row", [0, 1, 517, 1022, 1023])
def test_the_point_is_found_with_few_calls(row):
    points = np.linspace(0, 1, 1024)[:, None]
    f = Counted(lambda z: z[0] == points[row, 0])
    asker = Asker(f, ((1,),), "numpy", "solver", Calls())
    asker.divisible = True  # as the probes of such a function say
    with pytest.raises(errors.TargetFailedError) as caught:
        asker.fresh(points)
    assert named_point(caught)[0] == points[row, 0]
    assert f.calls <= 1 + 10 + 1  # the batch, log2 of its size, and one to confirm a row found by elimination


def test_no_point_is_blamed_for_a_batch_that_is_too_large():
    def small_batches(z):
        if len(z) > 300:
            raise MemoryError("too large")
        return z[:, 0]

    asker = Asker(small_batches, ((1,),), "numpy", "f", Calls())
    asker.divisible = True
    with pytest.raises(errors.TargetFailedError, match="works for each point separately") as caught:
        asker.fresh(np.linspace(0, 1, 1000)[:, None])
    assert "at the point" not in str(caught.value)


def test_nan_names_its_points_in_full():
    with pytest.raises(errors.NonFiniteValueError, match=r"the first at \[0\.\d{10,}\]"):
        pa.compile(
            lambda z: np.where(np.abs(z[:, 0] - 0.31) < 0.01, np.nan, z[:, 0]), LINE, tolerance=0.01, trace=False
        )


# the hint fits the mistake


def sine_of_a_number(x):
    return math.sin(x)


def two_columns(x, y):
    return np.sin(x) * y


def two_numbers(x, y):
    return math.sin(x) * y


def forgot_to_return(z):
    z.sum()


@pytest.mark.parametrize(
    ("f", "box", "options", "advice"),
    [
        (sine_of_a_number, LINE, {}, "lambda z: sine_of_a_number(z[0]) with vectorize=True"),
        (sine_of_a_number, SQUARE, {}, "np.sin(z[:, 0]) in place of math.sin"),
        (two_columns, SQUARE, {}, "lambda z: two_columns(z[:, 0], z[:, 1])"),
        (two_numbers, SQUARE, {}, "lambda z: two_numbers(*z) with vectorize=True"),
        (two_numbers, SQUARE, {"vectorize": True}, "pass lambda z: two_numbers(*z)."),
        (np.hypot, SQUARE, {}, "lambda z: hypot(z[:, 0], z[:, 1])"),
        (lambda z: z[:, 0], (LINE, LINE), {}, "z_K and z_Q"),
        (lambda: 1.0, LINE, {}, "def f(z)"),
        (lambda z: [str(x) for x in z[:, 0]], LINE, {}, "float(…)"),
        (lambda z: "three", LINE, {"vectorize": True}, "float(…)"),
        (lambda z: [z[:, 0], z[:, 1]], SQUARE, {}, "np.stack"),
        (lambda z: [[1.0]] * (len(z) - 1) + [[1.0, 2.0]], LINE, {}, "of the same length"),
        (forgot_to_return, LINE, {}, "return statement"),
        (forgot_to_return, LINE, {"vectorize": True}, "return statement"),
        (lambda z: {"volts": z[:, 0]}, LINE, {}, "(z)['volts']"),
        (lambda z: z[0], LINE, {}, "vectorize=True"),
        (lambda z: z[:, 0], LINE, {"vectorize": True}, "leave vectorize=True out"),
        (lambda z: z[:, 0] if z[:, 0] > 0 else 0.0, LINE, {}, "np.where"),
        (lambda z: z[:, 0] + 1j, LINE, {}, "v.real"),
        (lambda z: (x for x in z), LINE, {}, "a list or an array"),
    ],
)
def test_the_hint_fits_the_mistake(f, box, options, advice):
    with pytest.raises(errors.PartitaError) as caught:
        pa.compile(f, box, tolerance=0.1, **options)
    told = str(caught.value)
    assert advice in told and "torch float32" not in told


@pytest.mark.parametrize(
    ("f", "box", "options"),
    [
        (lambda z: two_columns(z[:, 0], z[:, 1]), SQUARE, {}),
        (lambda z: two_numbers(*z), SQUARE, {"vectorize": True}),
        (lambda z: sine_of_a_number(z[0]), LINE, {"vectorize": True}),
        (lambda z: z[:, 0].tolist(), LINE, {}),
    ],
)
def test_what_the_hints_say_works(f, box, options):
    assert pa.compile(f, box, tolerance=0.1, **options).certificate.kind == "estimated"


# points that are left out


@pytest.mark.parametrize("one_by_one", [False, True])
def test_scattered_failures_are_left_out_and_told(one_by_one):
    def batch(z):
        if any(map(unlucky, z)):
            raise RuntimeError("no convergence")
        return wave(z)

    failed = []

    def single(z):
        if unlucky(z):
            failed.append(z.tobytes())
            raise RuntimeError("no convergence")
        return float(wave(np.asarray(z)[None])[0])

    f = single if one_by_one else batch
    c = pa.compile(f, SQUARE, tolerance=1e-2, on_error="exclude", vectorize=one_by_one)
    fresh = SQUARE.sample(20_000, np.random.default_rng(5))
    assert np.abs(c(fresh) - wave(fresh)).max() <= 1e-2  # also where f had failed
    assert c.certificate.kind == "estimated" and math.isinf(c.error_bound)
    facts = c.certificate.facts
    assert 0 < facts["points_excluded"] < 0.03 * facts["points_asked"] and 0 < facts["share_excluded"] < 0.03
    assert all(map(unlucky, c.excluded)) and len(c.excluded) > 0
    told = f"failed at {facts['points_excluded']:,} of the {facts['points_asked']:,} points"
    assert told in c.explain() and told in c.report() and "where f has values" in c.explain()
    assert np.isnan(c.errors_at(c.excluded)).all()
    assert c.evaluations <= (1500 if one_by_one else 4000)  # a batch that fails is halved
    assert len(set(failed)) == len(failed)  # no point that failed was asked again
    assert not pa.attack(c, samples=500, restarts=4).refuted


def test_a_corner_without_values_is_left_out(tmp_path):
    c = pa.compile(
        lambda z: np.where((z[:, 0] > 0.7) & (z[:, 1] > 0.7), np.nan, wave(z)),
        SQUARE,
        tolerance=1e-2,
        on_error="exclude",
    )
    fresh = SQUARE.sample(20_000, np.random.default_rng(5))
    there = ~((fresh[:, 0] > 0.7) & (fresh[:, 1] > 0.7))
    assert np.abs(c(fresh) - wave(fresh))[there].max() <= 1e-2
    assert c.certificate.facts["share_excluded"] == pytest.approx(0.0225, abs=0.02)
    again = pa.load(c.save(tmp_path / "head"))
    assert again.certificate.facts == c.certificate.facts and "failed at" in again.explain()
    assert all(check.holds for check in pa.recheck(c))


def test_errors_where_f_has_values_still_count():
    """The negative control: a narrow bump beside the points that are left out is seen, not excused."""

    def bump(z):
        return np.sin(3 * z[:, 0]) + np.exp(-(((z[:, 0] - 0.8) / 0.03) ** 2))

    def failing(z):
        return np.where(z[:, 0] > 0.96, np.nan, bump(z))

    c = pa.compile(failing, LINE, tolerance=0.05, on_error="exclude")
    mean = pa.compile(failing, LINE, tolerance=0.05, on_error="exclude", norm=2, trace=False)
    assert 0 < mean.error_estimate <= 0.05 and mean.certificate.excluded
    fresh = np.linspace(0, 0.96, 5001)[:, None]
    assert np.abs(c(fresh) - bump(fresh)).max() <= 0.05
    false = replace(c, target=replace(c.target, ask=lambda z: c.target.ask(z) + 0.2))
    assert pa.attack(false, bound=0.1, samples=500, restarts=4).refuted


def test_failures_count_as_evaluations_and_end_with_them():
    def single(z):
        if unlucky(z, 50):
            raise RuntimeError("no convergence")
        return float(wave(np.asarray(z)[None])[0])

    with pytest.warns(errors.ToleranceMissedWarning):
        c = pa.compile(
            single, SQUARE, tolerance=1e-8, on_error="exclude", vectorize=True, max_evaluations=400, method="fitted"
        )
    assert c.evaluations <= 400 and not c.tolerance_met and c.certificate.facts["points_excluded"] > 0


def test_stand_ins_are_compared_with_nothing():
    """f is 0 and fails above 0.9; the head x errs by 0.9 where f has values, and by 1 where only a stand-in could say so."""
    head = pa.compile("x0", LINE, tolerance=1e-6).head
    target = make_target(
        lambda z: np.where(z[:, 0] > 0.9, np.nan, 0.0), LINE, vectorize=False, trace=False, max_excluded=0.3
    )
    assert np.abs(target(np.array([[0.95]]))).max() < 1e-9  # the stand-in
    seen = sampled_error(head, target, samples=1000)
    assert 0.85 < seen.estimate <= 0.9 and seen.samples + seen.failed == 1000 and seen.failed > 50
    worst = search_worst(lambda z: errors_at(head, target, z), LINE, samples=500)
    assert 0.85 < worst.error <= 0.9


def test_too_many_failures_are_an_error():
    def half(z):
        return np.where(z[:, 0] > 0.2, np.nan, z[:, 0])

    def end(z):
        return np.where(z[:, 0] > 0.85, np.nan, z[:, 0])

    with pytest.raises(errors.TargetFailedError, match=r"more than max_excluded=0\.1 allows; the first .* at \["):
        pa.compile(half, LINE, tolerance=0.1, on_error="exclude")
    with pytest.raises(errors.TargetFailedError, match=r"more than max_excluded=0\.05 allows"):
        pa.compile(end, LINE, tolerance=0.1, on_error="exclude", max_excluded=0.05)
    allowed = pa.compile(end, LINE, tolerance=0.1, on_error="exclude", max_excluded=0.3)
    assert allowed.certificate.facts["share_excluded"] == pytest.approx(0.15, abs=0.1)


def test_a_function_that_always_fails_gets_the_usual_hint():
    with pytest.raises(errors.NotVectorizedError, match="vectorize=True"):
        pa.compile(sine_of_a_number, LINE, tolerance=0.1, on_error="exclude")


def test_leaving_points_out_makes_no_proof():
    with pytest.raises(errors.UnsupportedError, match="lipschitz is declared"):
        pa.compile(wave, SQUARE, tolerance=0.1, on_error="exclude", lipschitz=5.0)
    with pytest.raises(errors.UnsupportedError, match="an expression"):
        pa.compile("log(x0)", LINE, tolerance=0.1, on_error="exclude")
    for wrong in ({"on_error": "ignore"}, {"on_error": "exclude", "max_excluded": 0}):
        with pytest.raises(errors.UnsupportedError, match="expected"):
            pa.compile(wave, SQUARE, tolerance=0.1, **wrong)
    undefined = pa.compile(lambda z: z[:, 0] + 0 * torch.sqrt(0.95 - z[:, 0]), LINE, tolerance=0.1, on_error="exclude")
    assert undefined.certificate.kind == "estimated"  # although its trace is an expression
    known = pa.compile(lambda z: torch.sin(z[:, 0]), SQUARE, tolerance=0.1, on_error="exclude")
    assert known.certificate.kind == "proved" and not known.certificate.excluded  # it is proved to fail nowhere


# functions of one's own on the command line


@pytest.fixture
def mine(tmp_path):
    (tmp_path / "own_simulator.py").write_text(
        "import math\nimport numpy as np\nimport torch\n\n"
        "def wave(z):\n    print('working')\n    return np.sin(3 * z[:, 0])\n\n"
        "def single(z):\n    return math.sin(3 * z[0])\n\n"
        "def corner(z):\n    return np.where(z[:, 0] > 0.95, np.nan, np.sin(3 * z[:, 0]))\n\n"
        "def wrong(z):\n    return np.sin(3 * z[:, 0]) + 1\n\n"
        "def network():\n    return torch.nn.Tanh()\n\n"
        "number = 7\n"
    )
    return tmp_path


OPTIONS = ("--domain", "[-1,1]", "--tolerance", "0.1", "--json")


def test_compile_plan_and_attack_take_a_function_of_ones_own(mine):
    made = partita("compile", "own_simulator:wave", *OPTIONS, "--out", "head", cwd=mine)
    data = json.loads(made.stdout)
    assert made.returncode == 0 and data["kind"] == "estimated" and data["function"] == "wave"
    assert "running your own code" in made.stderr
    planned = partita("plan", mine / "own_simulator.py:single", *OPTIONS, "--vectorize")
    assert planned.returncode == 0 and json.loads(planned.stdout)["keys"] == data["keys"]
    found = partita("attack", "head", "--function", "own_simulator:wave", "--json", "--samples", "200", cwd=mine)
    assert found.returncode == 2 and json.loads(found.stdout)["error"] <= 0.1
    attack = ("attack", "head", "--json", "--samples", "200", "--function")
    false = partita(*attack, "own_simulator:wave", "--bound", "1e-9", cwd=mine)
    assert false.returncode == 1 and json.loads(false.stdout)["refuted"]  # negative control: a false bound
    other = partita(*attack, "own_simulator:wrong", cwd=mine)
    assert other.returncode == 1 and json.loads(other.stdout)["error"]["type"] == "AnotherFunctionError"
    network = partita("plan", f"{mine}/own_simulator.py:network", *OPTIONS)
    assert json.loads(network.stdout)["kind"] == "proved"  # traced


def test_excluded_points_on_the_command_line(mine):
    spec = f"{mine}/own_simulator.py:corner"
    stopped = partita("compile", spec, *OPTIONS[:-1], "--out", mine / "head")
    assert stopped.returncode == 1 and "--on-error exclude" in stopped.stderr and "on_error" not in stopped.stderr
    made = partita("compile", spec, *OPTIONS, "--out", mine / "head", "--on-error", "exclude")
    data = json.loads(made.stdout)
    assert made.returncode == 0 and 0 < data["points_excluded"] < data["points_asked"]
    found = partita("attack", mine / "head", "--function", spec, "--bound", "0.1", "--samples", "200", "--json")
    assert found.returncode == 0 and json.loads(found.stdout)["refuted"] is False
    few = ("--on-error", "exclude", "--max-excluded", "0.01")
    refused = partita("compile", spec, *OPTIONS[:-1], *few, "--out", mine / "other")
    assert refused.returncode == 1 and "--max-excluded 0.01" in refused.stderr and "--region" in refused.stderr


def test_wrong_names_of_functions(mine):
    for spec, words in (
        ("own_simulator:nothing", "no function"),
        ("own_simulator:number", "int"),
        ("nowhere:f", "module"),
    ):
        answer = partita("plan", spec, *OPTIONS[:-1], cwd=mine)
        assert answer.returncode == 64 and words in answer.stderr
    single = partita("plan", "own_simulator:single", *OPTIONS[:-1], cwd=mine)
    assert (
        single.returncode == 1
        and re.search(r"--vectorize(?! True)", single.stderr)
        and "vectorize=True" not in single.stderr
    )
