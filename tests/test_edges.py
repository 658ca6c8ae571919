"""Edges of the number line and of the clock: right numbers or an error of partita's own, within the time asked for.

Heads are built here without the sampling that `compile` ends with, so that a false proof is not caught by it but seen.
"""

from __future__ import annotations

import random
import time
import tracemalloc
import warnings
from contextlib import suppress

import numpy as np
import pytest
import torch
from balls import is_refuted

import partita as pa
from partita.arithmetic.precision import DOUBLE, SINGLE
from partita.compiler.clock import Clock
from partita.compiler.compiled import Compiled
from partita.compiler.request_options import method_names, request_for
from partita.errors import (
    BudgetSpentError,
    DomainError,
    PartitaError,
    ToleranceError,
    ToleranceMissedWarning,
    UnsupportedError,
)
from partita.functions import lipschitz_bounds, parse
from partita.geometry import PointCloud
from partita.methods.planner import best_plan
from partita.proofs.polynomials import bound_ranges
from partita.search.averaged_values import smallest_scale

DTYPES = (torch.float64, torch.float32)
METHODS = method_names()
LINE = pa.Box([-1], [1])


def unsampled(text, box, *, tolerance, seconds=20.0, method="auto", dtype=torch.float64) -> Compiled:
    """A head as its method builds and proves it, before anything looks for a point that refutes it."""
    clock = Clock(seconds, None)
    request = request_for(
        text,
        box,
        tolerance=tolerance,
        norm="inf",
        dtype=dtype,
        sharpness=None,
        max_bytes=1 << 28,
        method=method,
        accept="strongest",
        declared={},
        vectorize=False,
        trace=None,
    )
    plan = best_plan(request, progress=clock.until(0.67))
    made = plan.maker.build(plan, clock.until(1.0), 0)
    return Compiled(made.head, made.partition, made.certificate, plan.target, "raise", plan.explanation)


def require_true(compiled: Compiled, seed: int = 0) -> None:
    """No NaN, no point beyond the bound, no value beyond the range."""
    box, rng = compiled.target.domain.bounding_box(), np.random.default_rng(seed)
    points = np.concatenate([box.sample(256, rng), box.corners(16)])
    with torch.no_grad():
        got = compiled.head.evaluate(torch.from_numpy(points).to(compiled.head.dtype)).double().numpy()
    assert np.isfinite(got).all()
    if compiled.certificate.kind == "estimated":
        return
    worst = np.array([compiled.attack(samples=512, seed=seed).point]).reshape(1, -1)
    assert not is_refuted(compiled, np.concatenate([worst, points[:48]])), compiled
    for values, proved in zip(got.T, compiled.bound_range(), strict=True):
        assert proved.lo <= values.min() and values.max() <= proved.hi, compiled


FORMS = (
    "sin(3*A)",
    "sin(2*A)*cos(B)",
    "abs(A) - 0.5*B",
    "max(A, B)",
    "exp(-A*A)",
    "A*B",
    "tanh(3*A)",
    "relu(A - B) + A",
    "1/(1.5 + A)",
    "sqrt(A*A + 0.1)",
    "A",
    "0*A + 1",
)


def random_case(seed: int):
    """An expression with variables and values of any size, its box, and options."""
    rng = random.Random(seed)
    dtype = rng.choice(DTYPES)
    scale, height = (160, (-323, 308)) if dtype == torch.float64 else (20, (-45, 38))
    gentle = rng.random() < 0.5
    sides = [10.0 ** rng.uniform(-scale, scale) if gentle or rng.random() < 0.5 else 1.0 for _ in range(2)]
    middles = [s * rng.choice([0.0, 0.0, 1.0, -30.0]) for s in sides]
    size = 10.0 ** (rng.uniform(*height) if rng.random() < 0.5 else rng.uniform(-3, 3))
    form = rng.choice(FORMS)
    terms = {"A": f"((x0 - ({middles[0]!r}))/{sides[0]!r})", "B": f"((x1 - ({middles[1]!r}))/{sides[1]!r})"}
    used = 2 if "B" in form else 1
    text = f"{size!r}*({''.join(terms.get(c, c) for c in form)})"
    lo = [m - s for m, s in zip(middles, sides)][:used]
    hi = [m + s for m, s in zip(middles, sides)][:used]
    tolerance = max(size * 10.0 ** rng.uniform(-2.5, -0.3), 5e-324)
    return text, lo, hi, {"tolerance": tolerance, "dtype": dtype, "method": rng.choice(METHODS)}


def true_or_refused(seed: int) -> bool:
    """Whether a head came out; what comes out is true."""
    text, lo, hi, options = random_case(seed)
    try:
        built = unsampled(text, pa.Box(lo, hi), seconds=5.0, **options)
        require_true(built, seed)
    except PartitaError:
        return False
    return True


def test_proofs_stand_without_the_final_sampling():
    assert sum(map(true_or_refused, range(12))) >= 4


@pytest.mark.slow
@pytest.mark.parametrize("start", range(1000, 4000, 100))
def test_proofs_stand_without_the_final_sampling_at_length(start):
    assert sum(map(true_or_refused, range(start, start + 100))) >= 20


WIDTHS = {torch.float64: (1e155, 1e-200, 1e300), torch.float32: (1e22, 1e-40, 2e19, 1e37)}
SIZES = {torch.float64: (1e-305, 5e-324, 1e308), torch.float32: (3e-44, 3e38)}
NOTHING_TIMES_INFINITY = (
    ("max(0, x0*1e308)*0", LINE, 0.1),
    ("0*x0 + 2", pa.Box([-1e50, -1], [1e50, 1]), 0.01),
    ("x0*exp(700*x0)", LINE, 1e290),
    ("x0/1e18 + x1*1e18", pa.Box([-1e18, -1e-18], [1e18, 1e-18]), 0.3),
    ("1e300*x0", pa.Box([-1e-300], [1e-300]), 0.1),
)
SHORT_AND_LONG = [None, pytest.param(99, marks=pytest.mark.slow)]  # how many cases besides the first


def sweep(cases, method, more) -> None:
    """Heads that are true, or an error of partita's own: the first case, and more in long runs."""
    for text, box, tolerance, dtype in list(cases)[: more or 1]:
        with suppress(PartitaError):
            require_true(unsampled(text, box, tolerance=tolerance, seconds=5.0, method=method, dtype=dtype))


@pytest.mark.parametrize("more", SHORT_AND_LONG)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("method", METHODS)
def test_domains_of_every_width(method, dtype, more):
    texts = ("sin(x0/{!r}*3)", "x0/{!r}")
    sweep(((t.format(w), pa.Box([-w], [w]), 0.2, dtype) for w in WIDTHS[dtype] for t in texts), method, more)


@pytest.mark.parametrize("more", SHORT_AND_LONG)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("method", METHODS)
def test_values_of_every_size(method, dtype, more):
    sweep(((f"{s!r}*sin(3*x0)", LINE, max(0.1 * s, 5e-324), dtype) for s in SIZES[dtype]), method, more)


@pytest.mark.parametrize("more", SHORT_AND_LONG)
@pytest.mark.parametrize("method", METHODS)
def test_tolerances_of_every_size(method, more):
    tolerances = (1e-300, 5e-324, 1e-100, 1e-40, 1e300)
    sweep(((t, LINE, e, d) for e in tolerances for t in ("x0*x0", "0*x0 + 2") for d in DTYPES), method, more)


@pytest.mark.parametrize("more", SHORT_AND_LONG)
@pytest.mark.parametrize("method", METHODS)
def test_nothing_times_infinity(method, more):
    sweep(((*case, dtype) for case in NOTHING_TIMES_INFINITY for dtype in DTYPES), method, more)


def test_a_constant_on_a_very_long_box_is_one_key():
    text, box, tolerance = NOTHING_TIMES_INFINITY[1]
    assert unsampled(text, box, tolerance=tolerance, method="adaptive").num_keys == 1


def test_a_subnormal_temperature_is_refused_with_advice():
    w = [1.8054874962791559e22, 7.228308934382502e22, 3.9016255877875665e22]
    text = "sin(1.3361199824334825e-22*x0+0.3)*sin(3.862871613902725e-23*x1+0.3)*sin(8.809588126785823e-23*x2+0.3)"
    with pytest.raises(DomainError, match="Rescale"):
        pa.compile(text, pa.Box([-x for x in w], w), tolerance=0.3226, dtype=torch.float32, method="tuned")
    for width in (5e22, 1e23, 1e30):
        with pytest.raises((DomainError, ToleranceError), match="Rescale"):
            pa.compile(
                f"sin({3 / width!r}*x0)", pa.Box([-width], [width]), tolerance=0.3, dtype=torch.float32, method="tuned"
            )


def test_rates_are_normal_numbers():
    assert DOUBLE.rates(64.0, np.array([0.5])).tolist() == [256.0]
    for precision, spacing in ((DOUBLE, 1e155), (DOUBLE, 1e-160), (SINGLE, 1e21), (SINGLE, 1e-20)):
        with pytest.raises(DomainError, match=r"axis 1 .*Rescale"):
            precision.rates(np.array([1.0, 1.0]), np.array([1.0, spacing]))


@pytest.mark.parametrize(
    ("width", "dtype"),
    [pytest.param(1e155, torch.float64, marks=pytest.mark.slow), (1e160, torch.float64), (2e19, torch.float32)],
)
def test_an_affine_function_whose_scores_overflow_is_refused(width, dtype):
    text, box = f"{1 / width!r}*x0", pa.Box([-width], [width])
    for method in ("pieces", "adaptive"):
        with pytest.raises(DomainError, match=r"(?i)rescale"):
            pa.compile(text, box, tolerance=1e-3, dtype=dtype, method=method)
    with suppress(DomainError):  # a grid, whose scores are multiplied in another order, may do
        require_true(unsampled(text, box, tolerance=1e-3, dtype=dtype))


def test_a_box_whose_squares_overflow_is_refused_by_every_method():
    """The advice is to rescale, not to use a larger tolerance."""
    for method in ("auto", "hard"):
        with pytest.raises(DomainError, match=r"(?i)rescale"):
            pa.compile("1e-300*x0", pa.Box([-1e300], [1e300]), tolerance=1e-3, method=method)


def test_averaged_slopes_that_underflow_are_counted():
    """Slopes near the smallest float32, on a box so wide that what averaging them loses is a large part of f."""
    text, box = "1e-34*sin(3e-10*x0)", pa.Box([-1e10], [1e10])
    with suppress(ToleranceError):
        require_true(unsampled(text, box, tolerance=5e-35, method="affine", dtype=torch.float32))
    ordinary = unsampled("sin(3*x0)", LINE, tolerance=0.1, method="affine", dtype=torch.float32)
    small = unsampled("1e-34*sin(3e-10*x0)", box, tolerance=1e-34, method="affine", dtype=torch.float32)
    rounding = [next(t.value for t in c.certificate.terms if t.name == "summation") for c in (ordinary, small)]
    assert rounding[1] > 1e-34 * 100 * rounding[0]


def test_subnormal_values_keep_their_range():
    c = unsampled("3e-44*sin(3*x0)", LINE, tolerance=3e-43, dtype=torch.float32, method="hard")
    require_true(c)


def test_clouds_whose_squared_distances_vanish_are_refused():
    cloud = PointCloud(np.array([[0.0], [1e-170], [2e-170]]))
    with pytest.raises(DomainError, match="Rescale"):
        pa.compile(lambda z: z[:, 0] * 1e170, cloud, lipschitz=1e170, tolerance=0.5)


@pytest.mark.skipif(not torch.set_flush_denormal(False), reason="this processor cannot flush subnormal numbers")
@pytest.mark.parametrize("entry", [pa.compile, pa.plan])
def test_flushing_subnormal_numbers_is_refused_before_any_claim(entry):
    torch.set_flush_denormal(True)
    try:
        for function in ("x0", lambda z: z[:, 0]):
            with pytest.raises(UnsupportedError, match="set_flush_denormal"):
                entry(function, LINE, tolerance=0.1, accept="estimated")
    finally:
        torch.set_flush_denormal(False)
    assert entry("x0", LINE, tolerance=0.1) is not None


def test_slopes_along_an_axis_that_does_not_matter_take_no_memory():
    c = pa.compile("x1 + x0", pa.Box([-1] * 3, [1] * 3), tolerance=0.03, method="fitted")
    tracemalloc.start()
    start = time.process_time()
    errors = c.bound_gradient_error()
    assert c.bound_slope(2)[0].hi == c.bound_slope(2)[0].lo == 0.0
    assert errors.bounds[2] < 1e-200 and all(s <= b <= 1.1 * s for s, b in zip(errors.seen[:2], errors.bounds[:2]))
    assert time.process_time() - start < 20 and tracemalloc.get_traced_memory()[1] < 1 << 28
    tracemalloc.stop()


def test_slopes_of_a_constant_head_with_many_keys():
    c = pa.compile("sin(3*x0) + cos(2*x1)*x2", pa.Box([-1] * 3, [1] * 3), tolerance=0.1, method="fitted")
    with torch.no_grad():
        c.head.values.fill_(1.0)
    start = time.process_time()
    for axis in range(3):
        assert abs(c.bound_slope(axis)[0].hi) < 1e-11
    assert time.process_time() - start < 20


# budgets


SQUARE, CUBE = pa.Box([-1, -1], [1, 1]), pa.Box([-1] * 3, [1] * 3)
NARROW = pa.Box([0.001], [0.001 + 1e-7])
MAXIMA = "max(max(x0,x1),x2)+abs(x0-x3)-max(x1,abs(x2))+relu(x0+x1)-relu(x2+2*x3)+abs(x1-3*x2)"
QUICK = ("corrected", "pieces")  # the others only in long runs
LONG = {
    "corrected": ("max(1, (x0 - 0.001)*2e7)", NARROW, {"tolerance": 1e-3, "dtype": DTYPES[1], "method": "corrected"}),
    "kinks": ("min(max(relu(atan(x0)), x0/(1.5+x0^2) + x0/(0.1+x0^2)), x0)", pa.Box([-2], [2]), {"tolerance": 0.06}),
    "power": ("min(0.5, x0*x1 + exp(x1))^4", SQUARE, {"tolerance": 7e-4}),
    "jump": ("where(x0*x0 + x1, sin(3*x0)^7, x1^5)", SQUARE, {"tolerance": 0.01, "method": "adaptive"}),
    "cells": ("(x0*x1*x2)^6 + abs(x0 + x1)", CUBE, {"tolerance": 1e-3, "method": "adaptive"}),
    "pieces": (MAXIMA, pa.Box([-1] * 4, [1] * 4), {"tolerance": 1e-3, "method": "pieces"}),
    "waves": ("sin(60*x0)*sin(50*x1)", SQUARE, {"tolerance": 0.01, "method": "fitted"}),
    "grid": ("sin(9*x0)*sin(8*x1)", SQUARE, {"tolerance": 1e-3, "method": "affine"}),
    "five": ("sin(x0*x1+x2*x3+x4)*exp(-x0*x2)/(1.2+x3*x1)", pa.Box([-1] * 5, [1] * 5), {"tolerance": 1e-3}),
}


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in LONG])
def test_long_work_reports_often(name):
    """In seconds of this process, since other processes slow the clock on the wall: at most 0.6 between two reports."""
    text, box, options = LONG[name]
    gaps, last, seconds = [0.0], [0.0], 1.5

    def progress(what: str, done: int, of: int) -> None:
        now = time.process_time()
        gaps.append(now - last[0])
        last[0] = now
        if now - start > seconds:
            raise BudgetSpentError(f"spent on {what}")

    start = last[0] = time.process_time()
    with suppress(PartitaError):
        require_true(pa.compile(text, box, progress=progress, **options))
    assert max(gaps) < 0.6, (name, max(gaps))
    assert last[0] - start < seconds + 1.0


def test_a_budget_is_kept():
    for name in ("kinks", "power"):
        text, box, options = LONG[name]
        start = time.process_time()
        with suppress(PartitaError), warnings.catch_warnings():
            warnings.simplefilter("ignore", ToleranceMissedWarning)
            pa.compile(text, box, budget=2.0, **options)
        assert time.process_time() - start < 2.0 + 0.5


def spent(*_):
    raise BudgetSpentError("the budget was spent")


def test_the_grid_in_hand_is_kept_when_time_is_over():
    class Measured:
        def __init__(self, scale: float) -> None:
            self.counts, self.error_estimate = (int(scale),), 1 / scale

    asked = []

    def at(scale: float) -> Measured:
        asked.append(scale)
        if len(asked) > 10:
            raise BudgetSpentError("the budget was spent")
        return Measured(scale)

    found = smallest_scale(at, 0.05, 1000)
    assert not isinstance(found, str) and found.error_estimate <= 0.05 and len(asked) == 11


def test_bounds_reached_so_far_hold():
    whole = lipschitz_bounds(parse("sin(9*x)*x", ["x"]), [0.0], [3.0])
    cut = lipschitz_bounds(parse("sin(9*x)*x", ["x"]), [0.0], [3.0], progress=spent)
    assert whole.boxes > cut.boxes and cut.euclidean >= whole.observed and np.isfinite(cut.euclidean)
    with pytest.raises(BudgetSpentError):  # not: "f may jump"
        lipschitz_bounds(parse("sqrt(abs(x))", ["x"]), [-1.0], [1.0], progress=spent)
    polynomials = np.array([[1.0], [0.0], [-1.0]])  # 1 − t²
    exponents = ((0,), (1,), (2,))
    fine = bound_ranges(polynomials, np.zeros(1), exponents, goal=1.5)
    coarse = bound_ranges(polynomials, np.zeros(1), exponents, goal=1.5, progress=spent)
    assert fine.largest <= 1.5 < coarse.largest == pytest.approx(2.0)
