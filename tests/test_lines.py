"""A few lines mixed by a softmax: heads for functions that are straight at the ends of intervals of any length."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from balls import bits, values
from flint import arb
from partita_check.cli import run
from resealing import forge

import partita as pa
from partita.errors import ToleranceError
from partita.functions.expressions import parse
from partita.functions.target import graph_target
from partita.proofs import PROOFS, Given
from partita.proofs.straight_ends import line_of
from partita.search.line_fit import fit_lines

VERIFIED = 0
GELU = "0.5*x*(1 + erf(x/sqrt(2)))"
CASES = [
    (GELU, -12.0, 12.0, 1e-3, {}),
    (GELU, -60.0, 60.0, 1e-7, {}),
    (GELU, -5000.0, 5000.0, 1e-5, {}),
    ("0.5*x*(1 + tanh(0.7978845608028654*(x + 0.044715*x^3)))", -100.0, 60.0, 1e-4, {}),
    ("log(1 + exp(3*x - 1))", -30.0, 90.0, 1e-4, {}),
    ("erf(x) + exp(-x^2) + 2*x - 7", -1e6, 1e5, 1e-4, {}),
    (GELU, -60.0, 60.0, 1e-3, {"dtype": torch.float32}),
]


def worst(c: pa.Compiled) -> float:
    """The largest error found, a lower bound of it: near the centers, at the ends, and at all scales between; f in balls."""
    lo, hi = float(c.target.box.lo.ravel()[0]), float(c.target.box.hi.ravel()[0])
    rng = np.random.default_rng(0)
    scales = np.exp(rng.uniform(-3, math.log(max(-lo, hi)), 3000)) * np.where(rng.random(3000) < 0.5, 1, -1)
    x = np.clip(np.concatenate([rng.normal(size=4000) * 3, scales, rng.uniform(lo, hi, 500), [lo, hi]]), lo, hi)
    x = x.astype(str(c.head.dtype).removeprefix("torch.")).astype(np.float64)
    ran = c.head.evaluate(torch.from_numpy(x[:, None]).to(c.head.dtype)).double().numpy()[:, 0]
    guess = np.abs(ran - c.target(x[:, None])[:, 0])
    assert c.target.graph is not None
    with bits(300):
        return max(
            float(abs(arb(ran[i]) - values(c.target.graph, [x[i]])[0]).abs_lower()) for i in np.argsort(guess)[-40:]
        )


@pytest.mark.parametrize(
    ("text", "lo", "hi", "tolerance", "options"), CASES, ids=[f"{c[0][:20]} {c[2]:g}" for c in CASES]
)
def test_bounds_hold_and_are_confirmed(text, lo, hi, tolerance, options, tmp_path: Path) -> None:
    c = pa.compile(text, pa.Box([lo], [hi]), tolerance=tolerance, method="lines", **options)
    found = worst(c)
    assert found <= c.error_bound <= tolerance and c.num_keys <= 14 and c.num_parameters == 3 * c.num_keys + 2
    assert found > 0.3 * c.certificate.terms[0].value
    assert all(check.holds for check in pa.recheck(c))
    report, code = run(c.save(tmp_path / "head"), budget=20.0)
    assert code == VERIFIED, report
    forge(tmp_path / "head", error_bound=(0.95 * found).hex())
    assert run(tmp_path / "head", budget=1.0)[1] != VERIFIED  # control


def test_the_length_of_the_interval_does_not_matter() -> None:
    keys = {pa.compile(GELU, pa.Box([-r], [r]), tolerance=1e-5, method="lines").num_keys for r in (20, 300, 1e6)}
    assert keys == {8}


@pytest.mark.parametrize("text", ["sin(x)", "x^2", "exp(x/100)", "sqrt(1 + x^2)"])
def test_other_functions_are_refused(text: str) -> None:
    with pytest.raises(ToleranceError, match=r"not straight|not enough"):
        pa.compile(text, pa.Box([-50], [50]), tolerance=1e-4, method="lines")


def test_a_bump_far_away_that_no_sample_sees_is_not_certified() -> None:
    """The search does not find it; the proof does."""
    plain = pa.compile(GELU, pa.Box([-5000], [5000]), tolerance=1e-4, method="lines")
    spiked = parse(f"{GELU} + 0.01*exp(-1000*(x - 2345.678)^2)", ["x"])
    hidden = graph_target(spiked, plain.target.domains, "spiked")
    assert not isinstance(fit_lines(lambda x: hidden(x[:, None])[:, 0], -5000, 5000, 1e-4), str)
    assert PROOFS["taylor"].prove(plain.head, hidden, Given(tolerance=1e-3)).bound > 0.0099
    assert PROOFS["taylor"].prove(plain.head, plain.target, Given(tolerance=1e-3)).bound <= 1e-4


def test_far_from_the_centers_the_head_is_its_last_line() -> None:
    c = pa.compile(GELU, pa.Box([-300], [300]), tolerance=1e-5, method="lines")
    line = line_of(c.head)
    assert line is not None and c.target.graph is not None
    first, last = line.core(-300.0, 300.0, 1e-9)
    assert -40 < first < line.centers[0] and line.centers[-1] < last < 40
    x = np.linspace(last, 300, 2001)
    off = float(np.abs(c.head.evaluate(torch.from_numpy(x[:, None]))[:, 0].numpy() - x).max())
    bound = line.far_error(c.target.graph, last, 300.0)
    assert off <= bound + 300 * 2.0**-49 and bound < 1e-8
    assert line.far_error(parse("1.001*x", ["x"]), last, 300.0) > 0.29  # control: another function


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_rounding_is_counted_where_it_matters(dtype: torch.dtype) -> None:
    """The head in its dtype against the same head in float64 or balls, near and far."""
    c = pa.compile(GELU, pa.Box([-2000], [2000]), tolerance=0.02, method="lines", dtype=dtype)
    line, unit = line_of(c.head), torch.finfo(dtype).eps / 2
    assert line is not None
    moved, tall, _ = line.running(-2000.0, 2000.0)
    assert moved < 400 * unit and tall < 2010  # scores of 10⁶ far away do no harm
    rng = np.random.default_rng(1)
    x = np.concatenate([rng.normal(size=3000) * 3, rng.uniform(-2000, 2000, 1000)])
    x = x.astype(str(dtype).removeprefix("torch.")).astype(np.float64)
    ran = c.head.evaluate(torch.from_numpy(x[:, None]).to(dtype)).double().numpy()[:, 0]
    scores = -line.rate / 2 * (x[:, None] - line.centers) ** 2
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    exact = (weights * (line.values + line.slopes * (x[:, None] - line.origin))).sum(axis=1) / weights.sum(axis=1)
    rounding = sum(t.value for t in c.certificate.terms if t.source == "rounding")
    assert np.abs(ran - exact).max() <= rounding + 64 * 2.0**-53 * 2000
    near = np.abs(x) < 6
    assert dtype == torch.float64 or np.abs(ran - exact)[near].max() > moved / 100  # the bound is not empty talk
