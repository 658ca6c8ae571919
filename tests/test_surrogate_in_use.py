"""An engineer's surrogate: declared second derivatives per axis, heads loaded from disk, limits on values, ONNX files."""

import hashlib
import json
import math

import numpy as np
import onnxruntime as ort
import pinned
import pytest
import torch
from test_cli import partita

import partita as pa
from partita import errors

SQUARE = pa.Box([-1, -1], [1, 1])
WAVE = "sin(3*x0) + x0*cos(2*x1)"


def counted(f):
    """f, and a list of the rows that it received, call by call."""
    rows = []

    def called(z):
        rows.append(np.array(z))
        return f(z)

    return called, rows


# --- one bound on the second derivatives per axis -----------------------------------------------------------------------


def steep_and_flat(z):
    """Hessian diag(−9 sin 3x, 0.1): nearly all of the bending is along the first axis."""
    return np.sin(3 * z[:, 0]) + 0.05 * z[:, 1] ** 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_constants_per_axis_make_a_smaller_head_with_a_true_bound(dtype, tmp_path):
    one = pa.compile(steep_and_flat, SQUARE, tolerance=0.02, hessian=9.0, dtype=dtype)
    each = pa.compile(steep_and_flat, SQUARE, tolerance=0.02, hessian=[9.0, 0.1], dtype=dtype)
    assert each.certificate.kind == "proved_given" and each.num_keys < one.num_keys / 4
    assert each.attack(samples=2000).error <= each.error_bound <= 0.02
    assert each.attack(samples=2000).error > 0.5 * each.error_bound  # the bound is not slack along either axis
    assert "|vᵀ∇²f v| ≤ 9·v0² + 0.1·v1² for every v" in each.explain()
    assert all(check.holds for check in pa.recheck(pa.load(each.save(tmp_path / "head"))))


def test_equal_constants_say_the_same_as_one_number():
    one = pa.compile(steep_and_flat, SQUARE, tolerance=0.05, hessian=9.0)
    each = pa.compile(steep_and_flat, SQUARE, tolerance=0.05, hessian=(9.0, 9.0))
    assert one.head.counts == each.head.counts and one.error_bound == pytest.approx(each.error_bound, rel=1e-12)


def test_an_axis_without_bending_takes_one_cell():
    c = pa.compile(lambda z: np.sin(3 * z[:, 0]) + 5 * z[:, 1], SQUARE, tolerance=0.02, hessian=(9.0, 0.0))
    assert c.head.counts[1] == 1 and c.attack(samples=1000).error <= c.error_bound <= 0.02


def test_mixed_derivatives_count_for_both_axes():
    """f = xy has no pure second derivatives, so constants of 0 are false; by row sums they are 1 and 1."""
    with pytest.raises(errors.CurvatureContradictedError, match=r"add at least \d"):
        pa.compile(lambda z: z[:, 0] * z[:, 1], SQUARE, tolerance=0.05, trace=False, hessian=(0.0, 0.0))
    c = pa.compile(lambda z: z[:, 0] * z[:, 1], SQUARE, tolerance=0.05, trace=False, hessian=(1.0, 1.0))
    assert c.attack(samples=1000).error <= c.error_bound <= 0.05
    other = pa.compile(
        lambda z: z[:, 0] * z[:, 1], SQUARE, tolerance=0.05, trace=False, hessian=(4.0, 0.25)
    )  # M_1 M_2 = 1 will do
    assert other.attack(samples=1000).error <= other.error_bound <= 0.05


@pytest.mark.parametrize(
    "hessian, kind, words",
    [
        ([9.0], errors.ShapeError, "hessian has 1 constants; expected 2"),
        ([9.0, 1.0, 1.0], errors.ShapeError, "hessian has 3 constants; expected 2"),
        ([9.0, -1.0], errors.DomainError, "hessian is"),
        ([9.0, math.nan], errors.DomainError, "hessian is"),
        ("9", errors.DomainError, "hessian is '9'"),
        ([[9.0, 1.0]], errors.DomainError, "hessian is"),
        (True, errors.DomainError, "hessian is True"),
    ],
)
def test_constants_that_cannot_be_read(hessian, kind, words):
    with pytest.raises(kind, match=words):
        pa.compile(steep_and_flat, SQUARE, tolerance=0.05, hessian=hessian)


def test_a_false_bound_is_refused_before_f_is_evaluated_at_every_center():
    f, rows = counted(steep_and_flat)
    with pytest.raises(
        errors.CurvatureContradictedError, match=r"between \[.*\], \[.*\] and \[.*\], .* times what"
    ) as caught:
        pa.plan(f, SQUARE, tolerance=1e-4, hessian=(1.0, 0.1))
    assert sum(map(len, rows)) < 700
    places = [json.loads(f"[{part}]") for part in str(caught.value).split("[")[1:4] for part in [part.split("]")[0]]]
    first, middle, last = np.array(places)  # the three points refute it by themselves
    bend = abs(steep_and_flat(first[None]) - 2 * steep_and_flat(middle[None]) + steep_and_flat(last[None]))[0]
    assert bend > (np.array([1.0, 0.1]) * (last - first) ** 2).sum() / 4


def test_a_false_constant_is_refused_at_points_that_were_evaluated_anyway():
    f, rows = counted(lambda z: np.sin(20 * z[:, 0]))
    with pytest.raises(errors.LipschitzContradictedError, match=r"between \[.*\] and \[.*\]"):
        pa.compile(f, SQUARE, tolerance=1e-3, lipschitz=1.0)
    assert sum(map(len, rows)) < 300
    f, rows = counted(lambda z: np.abs(z[:, 0]))  # a true one is used
    assert pa.compile(f, SQUARE, tolerance=0.2, lipschitz=1.0).certificate.kind == "proved_given"


def test_a_constant_that_few_points_do_not_refute_is_refused_before_the_centers():
    """Steep on a strip of one hundredth: 64 points hardly see it, the near pairs of the attack do."""
    f, rows = counted(lambda z: np.clip(40 * z[:, 0], -0.4, 0.4))
    with pytest.raises(errors.LipschitzContradictedError):
        pa.compile(f, SQUARE, tolerance=2e-3, lipschitz=2.0, method="hard")
    assert sum(map(len, rows)) < 3000  # the grid would have had about two million


def test_hessian_on_the_command_line():
    ran = partita("plan", WAVE, "--domain", "[-1,1]^2", "--tolerance", "0.05", "--hessian", "9,x")
    assert ran.returncode == 64 and "one per coordinate" in ran.stderr
    ran = partita("plan", WAVE, "--domain", "[-1,1]^2", "--tolerance", "0.05", "--hessian", "9,1,1")
    assert ran.returncode == 1 and "expected 2, one per coordinate" in ran.stderr


# --- heads from disk whose function was a black box ----------------------------------------------------------------------


def simulator(z):
    return np.sin(3 * z[:, 0]) + z[:, 0] * np.cos(2 * z[:, 1])


def other_simulator(z):
    return simulator(z) + 0.01 * (z[:, 1] > 0.5)


@pytest.fixture(scope="module", params=["lipschitz", "hessian", "nothing"])
def loaded(request, tmp_path_factory):
    """Heads of the simulator as a colleague finds them, by what was declared."""
    declared = {"lipschitz": {"lipschitz": 4.2}, "hessian": {"hessian": 10.0}, "nothing": {}}[request.param]
    c = pa.compile(simulator, SQUARE, tolerance=0.1, **declared)
    return c, pa.load(c.save(tmp_path_factory.mktemp("heads") / request.param))


def test_a_loaded_head_takes_its_function(loaded):
    c, again = loaded
    points = SQUARE.sample(50, np.random.default_rng(0))
    with pytest.raises(errors.TargetFailedError, match="with_function"):
        again.errors_at(points)
    assert np.array_equal(again.errors_at(points, function=simulator), c.errors_at(points))
    assert again.attack(samples=100, function=simulator).error > 0
    found = pa.attack(again, function=simulator, samples=500, restarts=2)
    assert not found.refuted and found.error <= 0.1
    checks = {check.name: check for check in pa.recheck(again, function=simulator)}
    assert all(check.holds for check in checks.values()) and checks["witness"].checked
    assert "witness" not in {check.name for check in pa.recheck(again)}


def test_a_loaded_head_refuses_another_function(loaded):
    _, again = loaded
    with pytest.raises(
        errors.AnotherFunctionError, match=r"other_simulator is not the function .*simulator.* at \["
    ) as caught:
        pa.attack(again, function=other_simulator)
    place = np.array(json.loads("[" + str(caught.value).split("at [")[1].split("]")[0] + "]"))
    assert other_simulator(place[None]) != simulator(place[None])
    with pytest.raises(errors.AnotherFunctionError):
        again.errors_at(np.zeros((1, 2)), function=other_simulator)
    with pytest.raises(errors.AnotherFunctionError):
        pa.recheck(again, function=other_simulator)
    with pytest.raises(errors.ShapeError, match=r"shape \(2,\); expected \(\)"):
        again.with_function(lambda z: np.stack([simulator(z)] * 2, axis=1))
    nearly = again.with_function(lambda z: simulator(z) * (1 + 1e-13))  # another machine rounds otherwise
    assert nearly.errors_at(np.zeros((1, 2)))[0] <= 0.1


def test_a_function_of_single_points_and_one_that_is_not_needed(loaded):
    _, again = loaded
    single = again.with_function(lambda z: math.sin(3 * z[0]) + z[0] * math.cos(2 * z[1]), vectorize=True)
    assert single.errors_at(np.zeros((1, 2)))[0] <= 0.1
    typed = pa.compile("2*x", pa.Box([0], [1]), tolerance=0.15, method="hard")
    with pytest.raises(errors.UnsupportedError, match=r"expression 2\*x, which is stored with it"):
        pa.attack(typed, function=lambda z: 2 * z[:, 0])


def test_verify_takes_the_function_on_the_command_line(tmp_path):
    (tmp_path / "plant.py").write_text(
        "import numpy as np\ndef f(z):\n    return np.sin(3 * z[:, 0])\ndef g(z):\n    return np.sin(4 * z[:, 0])\n"
    )
    c = pa.compile(lambda z: np.sin(3 * z[:, 0]), pa.Box([-1], [1]), tolerance=0.1, lipschitz=3.0)
    c.save(tmp_path / "head")
    plain = json.loads(partita("verify", tmp_path / "head", "--json").stdout)
    ran = partita("verify", tmp_path / "head", "--function", f"{tmp_path / 'plant.py'}:f", "--json")
    with_f = json.loads(ran.stdout)
    assert ran.returncode == 0 and len(with_f["checks"]) > len(plain["checks"])
    ran = partita("verify", tmp_path / "head", "--function", f"{tmp_path / 'plant.py'}:g")
    assert ran.returncode == 1 and "g is not the function that was compiled" in ran.stderr


@pytest.mark.parametrize("name", ["tangents", "tangents-float32"])
def test_heads_of_earlier_versions_are_compared_by_their_hash(name):
    """Files that were written before values were stored have a hash of 256 of them."""
    old = pa.load(pinned.FOLDER / name)
    assert "sample" not in old.certificate.function
    if json.loads((pinned.FOLDER / "machine.json").read_text()) == pinned.machine():
        assert not pa.attack(old, function=pinned.waves, samples=100, restarts=1).refuted
    with pytest.raises(errors.AnotherFunctionError, match="hash of its values"):
        old.with_function(lambda z: 1.001 * pinned.waves(z))


# --- large values ---------------------------------------------------------------------------------------------------------


def test_large_fitted_values_are_explained_and_can_be_limited():
    free = pa.compile(WAVE, SQUARE, tolerance=1e-6)
    largest = float(free.head.values.abs().max())
    said = f"the values reach {largest:.3g}"
    assert largest > 1000 and said in free.explain() and said in free.report().splitlines()[1]
    assert "cancel in the softmax average" in free.explain() and "in float32 to an error of about" in free.explain()
    limited = pa.compile(WAVE, SQUARE, tolerance=1e-6, max_value=2.0)
    assert float(limited.head.values.abs().max()) <= 2.0 and limited.error_bound <= 1e-6
    assert limited.candidates[0].method == "fitted" and limited.num_keys < 10 * free.num_keys
    assert "times |f|" not in limited.explain()
    assert limited.certificate.rounding < free.certificate.rounding / 100


def test_the_limit_holds_for_functions_far_from_zero():
    """The values of an offset function must stay within the limit on one side."""
    c = pa.compile("1000 + " + WAVE, SQUARE, tolerance=1e-4, max_value=1003.0)
    assert float(c.head.values.abs().max()) <= 1003.0 and c.candidates[0].method == "fitted"


@pytest.mark.parametrize("method", ["hard", "tuned", "corrected", "fitted", "affine", "adaptive", "train", "paper"])
def test_every_method_obeys_the_limit(method):
    line = pa.Box([0.0], [1.0])
    c = pa.compile("sin(3*x0)", line, tolerance=0.1, method=method)
    largest = c.head.largest_value(line.lo, line.hi)
    again = pa.compile("sin(3*x0)", line, tolerance=0.1, method=method, max_value=1.01 * largest)
    assert again.head.largest_value(line.lo, line.hi) <= 1.01 * largest
    assert c.candidates[0].largest == pytest.approx(largest)
    if method == "fitted":
        return  # finds other values
    with pytest.raises(errors.PartitaError, match="max_value"):
        pa.compile("sin(3*x0)", line, tolerance=0.1, method=method, max_value=0.99 * largest)


def test_a_limit_below_f_is_refused_at_once():
    with pytest.raises(errors.SizeError, match=r"is 1\.\d+ at \[.*max_value=0\.5 cannot.*at least max_value=1\.5"):
        pa.compile(WAVE, SQUARE, tolerance=1e-3, max_value=0.5)
    for bad in (0, -1.0, math.nan, "5", True):
        with pytest.raises(errors.UnsupportedError, match="max_value is"):
            pa.compile(WAVE, SQUARE, tolerance=1e-3, max_value=bad)


def test_max_value_on_the_command_line(tmp_path):
    command = ("compile", WAVE, "--domain", "[-1,1]^2", "--tolerance", "1e-5", "--out", tmp_path / "head")
    ran = partita(*command, "--max-value", "6", "--json")
    assert ran.returncode == 0 and json.loads(ran.stdout)["candidates"][0]["largest"] <= 6
    ran = partita("plan", WAVE, "--domain", "[-1,1]^2", "--tolerance", "1e-5", "--max-value", "0.5")
    assert ran.returncode == 1 and "--max-value 1.5" in ran.stderr


# --- ONNX -----------------------------------------------------------------------------------------------------------------


def run(path, *inputs):
    session = ort.InferenceSession(path)
    names = [i.name for i in session.get_inputs()]
    return session.run(None, dict(zip(names, inputs)))[0], session


def test_an_onnx_file_says_what_is_claimed_and_marks_inputs_outside_the_domain(tmp_path):
    c = pa.compile(WAVE, SQUARE, tolerance=1e-2)
    points = np.array([[0.2, 0.3], [-1.0, 1.0], [3.0, 0.0], [0.0, -1.5], [0.5, np.inf], [np.nan, 0.0]])
    marked, session = run(c.export_onnx(tmp_path / "mark.onnx", outside="mark"), points)
    said = session.get_modelmeta().custom_metadata_map
    assert session.get_inputs()[0].type == "tensor(double)"
    assert np.isfinite(marked).tolist() == [True, True, False, False, False, False]
    assert np.allclose(marked[:2], c(points[:2]), atol=1e-12)
    (domain,) = json.loads(said["partita.domain"])
    assert pa.Box(domain["lo"], domain["hi"]) == SQUARE and said["partita.function"] == WAVE
    assert float(said["partita.error_bound"]) == c.error_bound and float(said["partita.tolerance"]) == 0.01
    assert [said[f"partita.{name}"] for name in ("kind", "norm", "dtype", "outside")] == [
        "proved",
        "inf",
        "float64",
        "mark",
    ]
    saved = c.save(tmp_path / "head") / "certificate.json"
    assert said["partita.certificate_sha256"] == hashlib.sha256(saved.read_bytes()).hexdigest()
    clamped, _ = run(c.export_onnx(tmp_path / "clamp.onnx", outside="clamp"), points[:5])
    assert np.allclose(clamped, c(np.clip(points[:5], -1, 1)), atol=1e-12)
    assert abs(clamped[2] - float(c.head(torch.tensor([[3.0, 0.0]])))) > 0.1  # "allow" has another value there


def test_a_float32_file_takes_float32_and_does_not_mark_what_rounding_moved_across_the_end(tmp_path):
    """float32(0.1) lies above 0.1: it is what a caller gets who stores the end of the domain."""
    domain, single = (pa.Box([-0.3], [0.1]), pa.Box([0], [2])), {"dtype": torch.float32, "method": "pieces"}
    c = pa.compile("max(k0, q0)", domain, tolerance=0.05, **single)
    keys = np.array([[-0.3], [0.1], [0.1 + 1e-6], [0.0]], dtype=np.float32)
    queries = np.array([[0.5], [2.0], [0.5], [-0.1]], dtype=np.float32)
    assert float(keys[1, 0]) > 0.1
    found, session = run(c.export_onnx(tmp_path / "head.onnx", outside="mark"), keys, queries)
    assert {i.type for i in session.get_inputs()} == {"tensor(float)"} and found.dtype == np.float32
    assert np.isfinite(found).tolist() == [True, True, False, False]


RING = ("--domain", "[-2,2]^2", "--region", "1 <= x0**2 + x1**2 <= 2", "--tolerance", "0.5", "--method", "pieces")


def test_rules_that_a_domain_does_not_allow(tmp_path):
    assert partita("compile", "x0 + x1", *RING, "--out", tmp_path / "ring").returncode == 0
    for rule, words in (("clamp", "needs a box; the domain is"), ("raise", "expected one of 'allow', 'clamp', 'mark'")):
        ran = partita("export", tmp_path / "ring", "--onnx", tmp_path / "no.onnx", "--outside", rule)
        assert ran.returncode == 64 and words in ran.stderr.replace("\n", " ")
    assert not (tmp_path / "no.onnx").exists()


@pytest.mark.slow
def test_a_region_marks_what_its_inequalities_exclude(tmp_path):
    place, file = tmp_path / "ring", tmp_path / "ring.onnx"
    assert partita("compile", "x0 + x1", *RING, "--out", place).returncode == 0
    ran = partita("export", place, "--onnx", file, "--outside", "mark", "--json")
    assert ran.returncode == 0 and json.loads(ran.stdout)["outside"] == "mark"
    angles = np.linspace(0, 6, 40)
    circle, c = np.stack([np.cos(angles), np.sin(angles)], axis=1), pa.load(place)
    edge, session = c.target.domain.clamp(circle), ort.InferenceSession(file)
    for points, inside in ((edge, 1.0), (1.2 * circle, 1.0), (0.99 * circle, 0.0), (1.5 * circle, 0.0)):
        assert np.isfinite(session.run(None, {"z": points})[0]).mean() == inside


@pytest.mark.slow
def test_an_estimate_is_not_written_as_a_bound(tmp_path):
    c = pa.compile(lambda z: np.sin(3 * z[:, 0]), pa.Box([-1], [1]), tolerance=0.05, method="tuned")
    _, session = run(c.export_onnx(tmp_path / "head.onnx"), np.array([[0.5]]))
    said = session.get_modelmeta().custom_metadata_map
    assert said["partita.kind"] == "estimated" and "partita.error_bound" not in said
    assert float(said["partita.error_estimate"]) == c.error_estimate
