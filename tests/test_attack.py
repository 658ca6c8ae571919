"""The attack: it finds what is there, is certain where it says so, and leaves true claims alone."""

import math

import mpmath
import numpy as np
import pytest
import torch
from torch import nn

import partita as pa
from partita.errors import UnsupportedError
from partita.functions import parse
from partita.proofs.balls import value_in_balls

SQUARE = pa.Box([-1, -1], [1, 1])
CLAIMS = [
    ("sin(3*x0) + x0*cos(2*x1)", SQUARE, {"tolerance": 1e-6}),
    ("abs(x0 + 0.5*x1)", SQUARE, {"tolerance": 1e-2}),
    ("abs(x0^2 + x1 - 0.2)", SQUARE, {"tolerance": 0.1, "method": "adaptive"}),
    ("exp(x0)", pa.Box([0], [3]), {"tolerance": 0.3, "method": "hard"}),
    ("sin(3*x0)", pa.Box([-1], [1]), {"tolerance": 0.01, "method": "affine", "dtype": torch.float32}),
    ("k0*q0", (pa.Box([0], [1]), pa.Box([0], [1])), {"tolerance": 0.1, "method": "hard"}),
]


@pytest.mark.parametrize(
    ("text", "domain", "options"),
    [pytest.param(*c, id=c[0], marks=[pytest.mark.slow] * (c[0] == "abs(x0 + 0.5*x1)")) for c in CLAIMS],
)
def test_true_claims_stand_and_false_ones_fall(text, domain, options):
    c = pa.compile(text, domain, **options)
    found = pa.attack(c, samples=4096, restarts=16)
    assert not found.refuted and found.lowest <= found.error * (1 + 1e-9) and found.error <= found.highest * (1 + 1e-9)
    assert found.ratio < (1.2 if c.candidates[0].method in ("fitted", "pieces") else 4)
    false = pa.attack(c, bound=0.99 * found.lowest, samples=4096, restarts=16)
    assert false.refuted and "REFUTED" in str(false) and "ball" in false.arithmetic


def test_gradient_ascent_finds_what_samples_do_not():
    """Worst in a corner region of six dimensions, off the corners themselves."""
    f = "exp(-4*((x0-0.9)^2 + (x1+0.8)^2 + (x2-0.7)^2 + (x3+0.6)^2 + (x4-0.5)^2 + (x5+0.4)^2))"
    found = pa.attack(lambda z: 0 * z[:, 0], f, pa.Box([-1] * 6, [1] * 6), bound=0.999, samples=512)
    assert found.refuted and found.error > 0.9999
    few = pa.attack(lambda z: 0 * z[:, 0], f, pa.Box([-1] * 6, [1] * 6), bound=0.999, samples=64, restarts=0)
    assert few.error <= found.error


def test_other_peoples_claims():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1), nn.Flatten(0))
    found = pa.attack(network, "sin(3*x0)", SQUARE, bound=0.01)
    assert found.refuted and found.lowest > 0.01
    assert not pa.attack(torch.sin, "sin(x0),", pa.Box([0], [1]), bound=1e-12).refuted
    black = pa.attack(lambda z: z[:, 0], lambda z: np.sin(z[:, 0]), pa.Box([0], [1]), bound=0.1)
    assert black.refuted and black.lowest is None and black.arithmetic == "floats"


def test_what_cannot_be_attacked():
    with pytest.raises(UnsupportedError, match="give function="):
        pa.attack(lambda z: z[:, 0])
    c = pa.compile("x0", pa.Box([0], [1]), tolerance=0.1, norm=2, method="hard")
    with pytest.raises(UnsupportedError, match="single point cannot"):
        pa.attack(c)
    assert not pa.attack(c, bound=1.0).refuted


@pytest.mark.parametrize(
    ("text", "point", "truth"),
    [
        ("exp(x0) - 1 - x0", 1e-9, 5.000000001666667e-19),
        ("(1e8 + x0) - 1e8", 0.1, 0.1),
        ("sin(x0*1e22)", 1.0, math.sin(1e22)),
        ("x0^-3 + sqrt(x0) + log(x0)", 2.0, 0.125 + math.sqrt(2) + math.log(2)),
        (
            "where(x0, 1, 2) + clamp(x0, -1, 0.5) + relu(-x0) + min(x0, 3) + abs(x0)",
            -0.25,
            2 - 0.25 + 0.25 - 0.25 + 0.25,
        ),
        ("sigmoid(x0) + erf(x0) + atan(x0) + tanh(x0) + tan(x0) + cos(x0)", 0.0, 1.5),
    ],
)
def test_balls_know_more_digits_than_floats(text, point, truth):
    ((lo, hi),) = value_in_balls(parse(text, ["x0"]), [point])
    assert lo <= hi <= lo + 1e-15 * abs(truth) + 5e-324 and math.isclose((lo + hi) / 2, truth, rel_tol=1e-12)


def test_balls_say_nothing_where_f_has_no_value():
    for text in ("1/x0", "log(x0)", "sqrt(x0 - 1)"):
        ((lo, hi),) = value_in_balls(parse(text, ["x0"]), [0.0])
        assert (lo, hi) == (-math.inf, math.inf)


@pytest.mark.parametrize(
    "options", [{}, {"method": "hard", "tolerance": 0.3}, {"method": "affine", "tolerance": 0.05}], ids=str
)
def test_bounds_in_exact_arithmetic(options):
    """Against 60 digits of the head itself; what running adds is left out of the bound, and is there."""
    c = pa.compile(
        "sin(3*x0)",
        pa.Box([-1], [1]),
        **{"tolerance": 1e-6, "dtype": torch.float32 if options else torch.float64, **options},
    )
    assert 0 < c.certificate.exact_bound < c.error_bound
    worst = 0.0
    with mpmath.workdps(60):
        centers = [mpmath.mpf(float(v)) for v in c.head.axes[0].double()]
        values, rate = c.head.values.double()[:, 0].tolist(), mpmath.mpf(float(c.head.inverse_temperature[0]))
        slopes = (
            [0.0] * len(values) if c.head.value_slopes is None else c.head.value_slopes.double().reshape(-1).tolist()
        )
        origin = 0.0 if c.head.value_slopes is None else float(c.head.origin[0])
        for x in np.random.default_rng(0).uniform(-1, 1, 40):
            z = mpmath.mpf(float(x))
            weights = [mpmath.exp(-rate * (z - v) ** 2 / 2) for v in centers]
            net = mpmath.fsum(w * (v + s * (z - origin)) for w, v, s in zip(weights, values, slopes)) / mpmath.fsum(
                weights
            )
            worst = max(worst, float(abs(net - mpmath.sin(3 * z))))
    assert worst <= c.certificate.exact_bound


def test_an_estimate_claims_nothing_that_could_be_refuted():
    """It did say REFUTED, of a number that was only seen; a bound that the caller names is a claim again."""
    c = pa.compile(lambda z: np.sin(3 * z[:, 0]), pa.Box([-1], [1]), tolerance=1e-3, trace=False)
    assert c.certificate.kind == "estimated"
    found = pa.attack(c, samples=4096, restarts=16)
    assert not found.claimed and not found.refuted and "nothing to refute" in str(found)
    named = pa.attack(c, bound=found.error / 2, samples=4096, restarts=16)
    assert named.claimed and named.refuted
