"""Claims that were once false, or might be: each stays refuted, refused or right."""

import math
import os
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch

import partita as pa
from partita.errors import (
    DomainError,
    LipschitzContradictedError,
    ProofRefutedError,
    ShapeError,
    SizeError,
    ToleranceError,
    UnsupportedError,
)
from partita.geometry import farthest_point_cover
from partita.heads import AffineScores, GridHead, log_cross
from partita.kernels.grid_torch import axis_window
from partita.papers import reassignment


@pytest.mark.parametrize("tolerance", [pytest.param(2.0, marks=pytest.mark.slow), 0.6])
def test_a_small_circle_has_a_disc_around_it(tolerance):
    """f = 1 inside a circle of radius 0.02: its length alone would promise too much; the tube of a curve does not."""
    tube = (2 * 2 * np.pi * 0.02, np.pi)
    c = pa.compile(
        lambda z: 1.0 * ((z**2).sum(1) < 0.02**2),
        pa.Box([-1, -1], [1, 1]),
        method="hard",
        tolerance=tolerance,
        lipschitz=0.0,
        jumps=pa.Jumps(height=1.0, tube=tube),
        norm=1,
    )
    t = (np.arange(2001) + 0.5) / 1000.5 - 1
    points = np.stack([a.ravel() for a in np.meshgrid(t, t)], axis=1)
    assert c.errors_at(points).mean() * 4 <= c.error_bound <= tolerance
    assert "neighbourhood" in c.certificate.explain()


def test_centers_rounded_to_float32_stay_inside_the_domain():
    """exp falls by 10⁵ outside: f must not be asked there."""
    box = pa.Box([2.0**24 + 0.25], [2.0**24 + 0.75])
    with pytest.raises(DomainError, match="float32"):
        pa.compile("exp(-50*(x0-16777216.25))", box, method="hard", tolerance=250, dtype=torch.float32)
    near = pa.Box([2.0**18 + 0.01], [2.0**18 + 1.01])
    c = pa.compile("exp(-2*(x0-262144.01))", near, method="hard", tolerance=0.5, dtype=torch.float32)
    assert c.target.domain.contains(c.partition.axes[0][:, None]).all()
    assert c.attack(samples=2000).error <= c.error_bound


def test_affine_values_with_centers_far_outside_the_domain():
    p = pa.MaxAffine([[-100.0], [-104.0]], [0.0, 2.0])
    built = reassignment(
        p,
        [[102.03], [102.03]],
        pa.Box([0], [1]),
        margin=1.0,
        tolerance=1e-2,
        value_slopes=[[[1.0]], [[1.0]]],
        dtype=torch.float32,
    )
    x = np.random.default_rng(0).uniform(0, 1, (20000, 1)).astype(np.float32).astype(np.float64)
    x = x[p.margin(x) >= 1.0]
    error = np.abs(built.head(torch.from_numpy(x)).double().numpy() - (102.03 + x)).max()
    assert error <= built.certificate.error_bound


def test_covers_of_tiny_and_huge_clouds():
    for scale in (1e-170, 1e150):
        cover = farthest_point_cover(scale * np.array([[0.0], [1.0]]), max_balls=1)
        assert cover.radius >= scale


@pytest.mark.parametrize(("side", "dtype"), [(1e-160, torch.float64), (1e-20, torch.float32)])
def test_boxes_too_small_for_any_temperature_are_refused(side, dtype):
    with pytest.raises(DomainError, match="Rescale"):
        pa.compile(
            lambda z: z[:, 0], pa.Box([0], [side]), method="hard", tolerance=side / 10, lipschitz=1.0, dtype=dtype
        )


def test_the_log_form_of_cross_attention_refuses_affine_values():
    scores = AffineScores(np.zeros((2, 2)), np.zeros(2), np.zeros((2, 1)), np.ones((2, 1, 2)))
    with pytest.raises(UnsupportedError, match="affine"):
        log_cross(scores, input_shapes=((1,), (1,)), output_shape=(), inverse_temperature=1.0, dtype=torch.float64)


@pytest.mark.parametrize("width", [1e-2, 1e-4, 1e-6])
@pytest.mark.parametrize("seed", [0, *(pytest.param(s, marks=pytest.mark.slow) for s in (1, 2, 3))])
def test_hidden_spikes_never_slip_into_a_proved_claim(seed, width):
    """A spike in an expression is either resolved, or refused for its size: never certified away."""
    place = float(np.random.default_rng(seed).uniform(-1, 1))
    text = f"exp(-((x0 - {place!r})/{width!r})^2)"
    box = pa.Box([-1], [1])
    c = pa.compile(text, box, method="hard", tolerance=0.2)
    at_spike = np.array([[place]])
    assert c.certificate.kind == "proved" and c.errors_at(at_spike)[0] <= c.error_bound <= 0.2
    declared = pa.compile(lambda z: c.target(z)[:, 0], box, method="hard", tolerance=0.2, lipschitz=1 / width)
    assert declared.certificate.kind == "proved_given"
    assert declared.errors_at(at_spike)[0] <= declared.error_bound


@pytest.mark.parametrize("scale", [1e-8, 1.0, 1e8])
@pytest.mark.parametrize("offset", [0.0, 1e6, -1e6])
def test_badly_scaled_functions_and_domains(scale, offset):
    box = pa.Box([offset, -scale], [offset + 1, scale])
    c = pa.compile(f"{scale!r}*sin(x0 - {offset!r}) + x1", box, method="hard", tolerance=0.2 * scale)
    assert c.attack(samples=2000).error <= c.error_bound <= 0.2 * scale


def test_six_dimensions():
    c = pa.compile("x0*x1 + sin(x2) + abs(x3) + x4 - x5", pa.Box([0] * 6, [1] * 6), method="hard", tolerance=1.5)
    assert c.attack(samples=2000).error <= c.error_bound
    with pytest.raises(ToleranceError):
        pa.compile("1e16 + x0 + x1", pa.Box([0, 0], [1, 1]), method="hard", tolerance=1e-3)


# --- claims and crashes that an attack once found ------------------------------------------------------------------


def test_volumes_neither_underflow_nor_overflow_on_the_way():
    box = pa.Box([0.0] * 6, [1.9e-108] * 3 + [1e108] * 3)
    assert np.isclose(box.volume, 1.9**3) and box.volume >= 1.9**3 * (1 - 1e-15)
    c = pa.compile("x3*1e-108", box, method="hard", tolerance=3.0, norm=1)
    assert 0.25 * 1.9**3 <= c.error_bound <= 3.0


def test_jumps_on_a_cloud_are_refused():
    cloud = pa.PointCloud(np.linspace(-1, 1, 401)[:, None])
    with pytest.raises(UnsupportedError, match="boxes"):
        pa.compile(
            lambda z: (z[:, 0] >= 0) * 1.0,
            cloud,
            method="hard",
            tolerance=0.05,
            lipschitz=0.5,
            jumps=pa.Jumps(1.0, 2.0),
        )


def test_a_function_that_changes_its_mind_is_not_certified():
    calls, last = [0], [math.inf]

    def f(z):
        calls[0] += 1
        return z[:, 0] + (0.9 if calls[0] >= last[0] else 0)

    options = {"method": "hard", "tolerance": 0.1, "lipschitz": 1, "trace": False}
    pa.compile(f, pa.Box([-1.0], [1.0]), **options)
    calls[0], last[0] = 0, calls[0]  # now the attack on the finished head sees another function
    with pytest.raises(LipschitzContradictedError, match="does not always return"):
        pa.compile(f, pa.Box([-1.0], [1.0]), **options)


def test_partial_square_roots_say_so():
    c = pa.compile("x + 0*sqrt(abs(x - 0.3) - 1e-9)", pa.Box([0.0], [1.0]), method="hard", tolerance=0.1)
    assert any("square root" in a.statement for a in c.certificate.assumptions)


def test_claims_say_where_f_may_have_no_value():
    said = "at which f is defined"
    box = pa.Box([-1.0], [1.0])
    gap = pa.compile("x0 + 0*log(abs(x0 - 0.3) - 1e-9)", box, method="hard", tolerance=0.2)
    assert any(said in a.statement for a in gap.certificate.assumptions)
    total = pa.compile("x0 + log(x0 + 2)/(3 + x0)", box, method="hard", tolerance=0.2)
    assert not any(said in a.statement for a in total.certificate.assumptions)


def test_norms_keep_their_digits():
    c = pa.compile("x0", pa.Box([0.0], [1.0]), method="hard", tolerance=0.1, norm=2.1234567)
    assert float(c.certificate.norm) == 2.1234567 and all(check.holds for check in pa.recheck(c))


def test_a_cast_head_is_no_longer_the_certified_one():
    c = pa.compile("x0", pa.Box([0.0], [1.0]), method="hard", tolerance=0.1)
    c.head.to(torch.float32)
    with pytest.raises(UnsupportedError, match="cast"):
        c([0.5])


def test_a_changed_head_is_not_saved(tmp_path):
    c = pa.compile("x0", pa.Box([0.0], [1.0]), method="hard", tolerance=0.1)
    c.head.values.add_(5.0)
    with pytest.raises(UnsupportedError, match="changed after"):
        c.save(tmp_path / "head")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("x", [1.5, 1e17, 1e20, -1e20, 1e300])
def test_clamping_lands_on_the_domain_exactly(x):
    c = pa.compile("x", pa.Box([-1.0], [1.0]), method="hard", tolerance=0.1, outside="clamp")
    assert c([x]) == c([np.sign(x)])


def test_f_is_never_asked_outside_a_cloud_far_from_zero():
    cloud = pa.PointCloud(1e8 + np.random.default_rng(0).uniform(-1, 1, (50, 2)), fill_distance=0.001)
    outside = []

    def f(z):
        outside.append((~cloud.contains(z)).sum())
        return z[:, 0] - 1e8

    pa.compile(f, cloud, method="hard", tolerance=0.1, lipschitz=1.0)
    assert sum(outside) == 0


@pytest.mark.parametrize(
    ("text", "lo", "hi"),
    [("sigmoid(x)", -1001, -999), ("erf(x)", 30, 31), ("exp(-x)", 800, 801), ("x*1e-154", -1e154, 1e154)],
)
def test_functions_that_hardly_move(text, lo, hi):
    c = pa.compile(text, pa.Box([float(lo)], [float(hi)]), method="hard", tolerance=0.6)
    assert c.attack(samples=500).error <= c.error_bound


@pytest.mark.parametrize(
    ("tolerance", "norm", "sharpness"),
    [(3e-4, 100, 512), (0.01, 200, 64), (3e-7, 50, 64), (0.1, 1e308, 64), (1e300, "inf", 64), (0.01, 8, 64)],
)
def test_the_planner_ends(tolerance, norm, sharpness):
    try:
        planned = pa.plan("x", pa.Box([0.0], [1.0]), method="hard", tolerance=tolerance, norm=norm, sharpness=sharpness)
    except pa.PartitaError:
        return
    assert planned.error_bound <= tolerance


@pytest.mark.parametrize("tolerance", [5e-324, 1e-320, 1e-200])
def test_absurd_tolerances_are_refused(tolerance):
    with pytest.raises((SizeError, ToleranceError)):
        pa.compile("x", pa.Box([0.0], [1.0]), method="hard", tolerance=tolerance)


@pytest.mark.parametrize("max_bytes", [0, -1, 1, 8, float("nan")])
def test_absurd_memory_limits_are_refused(max_bytes):
    with pytest.raises((SizeError, UnsupportedError)):
        pa.compile("x", pa.Box([0.0], [1.0]), method="hard", tolerance=0.1, max_bytes=max_bytes)
    with pytest.raises((SizeError, UnsupportedError)):
        pa.compile(
            lambda z: z[:, 0],
            pa.PointCloud([[0.0], [1.0]]),
            method="hard",
            tolerance=0.1,
            lipschitz=1.0,
            max_bytes=max_bytes,
        )


@pytest.mark.parametrize("options", [{"sharpness": "8"}, {"lipschitz": "abc"}, {"seed": -1}], ids=str)
def test_options_of_the_wrong_kind(options):
    with pytest.raises(pa.PartitaError):
        pa.compile(lambda z: z[:, 0], pa.Box([0.0], [1.0]), tolerance=0.1, **{"lipschitz": 1.0, **options})


def test_temperatures_that_underflow_are_refused():
    with pytest.raises(DomainError, match="Rescale"):
        pa.compile("x*1e-30", pa.Box([-1e30], [1e30]), method="hard", tolerance=0.1, dtype=torch.float32)


def test_clouds_of_one_repeated_point_and_inference_mode():
    assert pa.compile("x0", pa.PointCloud(np.zeros((50, 2))), method="hard", tolerance=0.1).num_keys == 1
    with torch.inference_mode():
        cloud = pa.PointCloud(np.random.default_rng(0).normal(size=(1000, 2)))
        c = pa.compile(lambda z: z[:, 0], cloud, method="hard", tolerance=0.05, lipschitz=1.0)
    assert c.num_keys > 256


def test_inputs_of_every_ordinary_kind():
    c = pa.compile("x0 + x1", pa.Box([0, 0], [1, 1]), method="hard", tolerance=0.1)
    z = np.random.default_rng(0).uniform(size=(6, 2))
    assert np.array_equal(c(z[::-1]), c(z)[::-1])
    assert np.array_equal(c(np.asfortranarray(z)), c(z)) and c(np.array([[0, 1]])).shape == (1,)
    for bad in ("abc", [[1j, 0.0]], [[1.0, 2.0], [3.0]]):
        with pytest.raises(ShapeError):
            c(bad)
    assert pickle.loads(pickle.dumps(c)).error_bound == c.error_bound


FORK = """
import os, sys, numpy as np, partita as pa
c = pa.compile("x0 + x1", pa.Box([0, 0], [1, 1]), tolerance=0.1, method="hard")
z = np.random.default_rng(0).uniform(size=(int(sys.argv[1]), 2))
expected = c(z)
child = os.fork()
if child == 0:
    os._exit(0 if np.array_equal(c(z), expected) else 3)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize(
    "queries", [pytest.param(20_000, id="torch", marks=pytest.mark.slow), pytest.param(40_000, id="native")]
)
def test_forked_children_can_evaluate(queries):
    command = [sys.executable, "-W", "ignore", "-c", FORK, str(queries)]
    threads = {"OMP_NUM_THREADS": "2"}  # forked children have none of them
    assert subprocess.run(command, timeout=60, env=os.environ | threads).returncode == 0


@pytest.mark.parametrize("offset", [0.0, 1e3, 1e6, -1e9])
def test_rounding_inside_a_black_box_is_no_contradiction(offset):
    c = pa.compile(
        lambda z: offset + np.sin(z[:, 0]), pa.Box([0.0], [3.0]), method="hard", tolerance=0.1, lipschitz=1.0
    )
    assert c.attack(samples=500).error <= c.error_bound
    with pytest.raises(LipschitzContradictedError):
        pa.compile(
            lambda z: offset + np.sin(z[:, 0]), pa.Box([0.0], [3.0]), method="hard", tolerance=0.1, lipschitz=0.99
        )


@pytest.mark.parametrize(
    ("text", "box", "p"),
    [
        ("1000 + step(x0 - 0.3)", pa.Box([-1], [1]), 100),
        ("1000000 + step(x0 - 0.3)", pa.Box([-1], [1]), 60),
        ("step(x0)", pa.Box([-1e-100] * 3, [1e-100] * 3), 100),
        ("step(x0)", pa.Box([-1e-80] * 4, [1e-80] * 4), 60),
    ],
)
def test_small_jumps_and_small_boxes_do_not_vanish_in_large_powers(text, box, p):
    """The L_p error of a jump of 1 is about (measure of the transition)^{1/p}, and no power may underflow on the way."""
    truth = (box.volume * 1e-9) ** (1 / p) / 4  # at least a 1e-9 share of the box is half a jump off
    try:
        c = pa.compile(text, box, method="hard", tolerance=0.97 * box.volume ** (1 / p), norm=p)
    except (SizeError, ToleranceError):
        return
    assert c.error_bound >= truth
    errors = c.errors_at(box.sample(20000, np.random.default_rng(0)))
    assert errors.max() * (np.mean((errors / errors.max()) ** p) * box.volume) ** (1 / p) <= c.error_bound


def test_the_window_is_right_on_huge_float32_axes():
    grid = pa.ProductGrid.uniform(pa.Box([1.0], [2.0]), [6_000_000], dtype=np.float32)
    head = GridHead(grid, 64 * 6e6**2, torch.zeros(6_000_000, 1), half_windows=1, input_shapes=((1,),), output_shape=())
    x = torch.from_numpy(np.random.default_rng(0).uniform(1, 2, 20000).astype(np.float32))
    _, start = axis_window(x, head.axes[0], head.inverse_temperature[0], 2)
    exact = (torch.searchsorted(head.axes[0], x, right=True) - 1).clamp(0, 6_000_000 - 2)
    assert torch.equal(start, exact)


# --- whose word a claim rests on ---------------------------------------------------------------------------------------

STEEP = "sin(50*(x0 - 1000))", pa.Box([1000.0], [1001.0])
IN_FLOAT32 = {"fitted": 2.5e-3, "affine": 2.5e-3, "tuned": 1e-2, "corrected": 1e-2}


@pytest.mark.parametrize("method", IN_FLOAT32)
def test_what_a_float32_claim_takes_from_the_caller_is_listed(method, monkeypatch):
    """The input-rounding term used a declared constant, 10⁻⁹ where 50 is true, and the claim was called `proved`."""
    options = {"tolerance": IN_FLOAT32[method], "method": method, "dtype": torch.float32, "lipschitz": [1e-9]}
    with pytest.raises(LipschitzContradictedError, match="declared"):
        pa.compile(*STEEP, **options)
    monkeypatch.setattr("partita.proofs.assumptions.worst_ratio", lambda *_: 0.5)  # as if no sample told
    plan = pa.plan(*STEEP, **options)
    certificate = plan.maker.build(plan).certificate
    assert plan.kind == certificate.kind == "proved_given"
    assert any(a.vouched_by == "caller" and "1e-09" in a.statement for a in certificate.assumptions)


@pytest.mark.parametrize("method", IN_FLOAT32)
def test_what_intervals_confirm_takes_nothing_from_the_caller(method):
    """Control: true constants, declared or not, leave the claim `proved`."""
    for declared in ({}, {"lipschitz": 60.0}):
        options = {"tolerance": 0.05, "method": method, "dtype": torch.float32, **declared}
        plan = pa.plan("sin(50*x0)", pa.Box([0.0], [1.0]), **options)
        certificate = plan.maker.build(plan).certificate
        assert plan.kind == certificate.kind == "proved"
        assert not [a for a in certificate.assumptions if a.vouched_by == "caller"]


@pytest.mark.parametrize(
    ("function", "options", "error"),
    [
        ("sin(3*x0)", {}, ProofRefutedError),
        ("sin(3*x0)", {"norm": 2}, ProofRefutedError),
        (lambda z: np.sin(3 * z[:, 0]), {"lipschitz": 3.0, "trace": False}, LipschitzContradictedError),
    ],
    ids=["proved", "proved in L2", "proved given a constant"],
)
def test_a_refuted_proof_is_our_bug_and_a_refuted_declaration_the_callers(function, options, error, monkeypatch):
    monkeypatch.setattr("partita.proofs.worst_point.errors_at", lambda head, target, points: np.full(len(points), 0.5))
    with pytest.raises(error, match="bug in partita" if error is ProofRefutedError else "declared"):
        pa.compile(function, pa.Box([-1], [1]), tolerance=0.1, method="hard", **options)
    monkeypatch.undo()
    assert (
        pa.compile(function, pa.Box([-1], [1]), tolerance=0.1, method="hard", **options).error_bound <= 0.1
    )  # control
