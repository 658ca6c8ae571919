"""compile finds the smallest head with the strongest claim, and says why; each method can be forced."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import partita as pa
from partita import errors
from partita.methods.fitted import Fitted
from partita.methods.method import Candidate
from partita.methods.planner import report
from partita.search.averaged_values import lattice_moments, sharpness_for

SQUARE = pa.Box([-1, -1], [1, 1])
SMOOTH = "sin(3*x0) + x0*cos(2*x1)"


def smooth(z):
    return np.sin(3 * z[:, 0]) + z[:, 0] * np.cos(2 * z[:, 1])


def test_an_expression_gets_the_smallest_proved_head():
    c = pa.compile(SMOOTH, SQUARE, tolerance=1e-4)
    assert c.certificate.kind == "proved" and c.error_bound <= 1e-4 and c.error_estimate is None
    chosen, *others = c.candidates
    assert chosen.chosen and chosen.keys == c.num_keys and chosen.parameters == c.num_parameters
    assert not any(o.chosen for o in others)
    assert all(o.parameters is None or o.parameters >= c.num_parameters for o in others if o.kind in ("proved", ""))
    text = c.report()
    assert [table.count("→") for table in text.split("\n\n")[:2]] == [1, 1]
    assert all(o.method in text for o in c.candidates)


@pytest.mark.parametrize("method", ["hard", "tuned", "corrected", "fitted"])
def test_a_method_can_be_forced(method):
    c = pa.compile(SMOOTH, SQUARE, tolerance=0.05, method=method)
    assert [k.method for k in c.candidates] == [method]
    assert c.certificate.kind == "proved" and c.attack(samples=4000, seed=2).error <= c.error_bound <= 0.05


def test_sizes_fall_from_hard_to_fitted():
    keys = [
        pa.compile(SMOOTH, SQUARE, tolerance=0.01, method=m).num_keys for m in ("hard", "tuned", "corrected", "fitted")
    ]
    assert keys == sorted(keys, reverse=True) and keys[0] > 1000 * keys[-1]


def test_a_black_box_of_which_nothing_is_declared_is_estimated():
    c = pa.compile(smooth, SQUARE, tolerance=1e-5)
    assert c.certificate.kind == "estimated" and math.isinf(c.error_bound)
    assert 0 < c.error_estimate <= 1e-5 and c.certificate.samples == 256
    assert "estimate" in repr(c) and "≤" not in repr(c)
    assert "Nothing is proved" in c.explain() and "estimated" in c.report()
    assert c.num_keys <= 144


def test_a_declared_constant_is_a_stronger_claim_than_a_smaller_head():
    c = pa.compile(smooth, SQUARE, tolerance=0.1, lipschitz=4.0)
    assert c.certificate.kind == "proved_given" and c.candidates[0].method == "hard"
    smaller = pa.compile(smooth, SQUARE, tolerance=0.1, lipschitz=4.0, accept="estimated")
    assert smaller.certificate.kind == "estimated" and smaller.num_parameters < c.num_parameters / 10
    assert any("weaker claim" in k.note for k in c.candidates)


def test_what_would_not_fit_hard_is_estimated_instead():
    c = pa.compile(smooth, SQUARE, tolerance=1e-7, lipschitz=4.0)
    assert c.certificate.kind == "estimated" and c.error_estimate <= 1e-7
    assert any(k.method == "hard" and "keys" in k.note for k in c.candidates)


def test_modules_sequences_and_cross_attention():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    c = pa.compile(module, SQUARE, tolerance=1e-4)
    z = torch.rand(50, 2, dtype=torch.float64) * 2 - 1
    assert c(z).shape == (50, 3) and (c(z) - module(z)).abs().max() <= 1e-4
    s = pa.compile("tanh(x0 + x3), x1; x2*x0, x3", pa.Box.sequence(-1, 1, tokens=2, dim=2), tolerance=1e-2)
    assert s.certificate.kind == "proved" and s(np.zeros((7, 2, 2))).shape == (7, 2, 2)
    x = pa.compile("sin(k0)*q0 + q1", (pa.Box([0], [1]), pa.Box([-1, 0], [1, 2])), tolerance=1e-4)
    assert x.certificate.kind == "proved" and len(x.head.input_shapes) == 2


@pytest.mark.parametrize("p", [1, 2, 3.5])
def test_fitted_heads_in_lp(p):
    c = pa.compile(SMOOTH, SQUARE, tolerance=1e-4, norm=p)
    assert c.certificate.kind == "proved" and c.candidates[0].method == "fitted"
    points = np.random.default_rng(0).uniform(-1, 1, (20000, 2))
    mean = (c.errors_at(points) ** p).mean() * 4
    assert mean ** (1 / p) <= c.error_bound <= 1e-4


def test_f_is_never_asked_outside():
    asked = []

    def f(z):
        asked.append(z.copy())
        return np.exp(z[:, 0]) * z[:, 1]

    box = pa.Box([0.1, -3.0], [0.7, 5.0])
    for method in ("fitted", "tuned", "corrected"):
        pa.compile(f, box, tolerance=0.01, method=method)
    points = np.concatenate(asked)
    assert box.contains(points).all()


@pytest.mark.parametrize(
    ("expression", "box", "tolerance"),
    [
        ("0*x0 + 3", SQUARE, 1e-9),
        ("exp(x1) + 0*x0", SQUARE, 1e-6),
        ("100000000*sin(x0)", SQUARE, 1.0),
        ("0.00000001*sin(3*x0)*x1", SQUARE, 1e-13),
        ("sin(x0)", pa.Box([1e6], [1e6 + 2]), 1e-5),
        ("sin(x0/10000)*x1", pa.Box([-1e4, -1], [1e4, 1]), 1e-5),
        *(
            pytest.param("*".join(f"x{k}" for k in range(m)), pa.Box([-1] * m, [1] * m), 1e-1, marks=pytest.mark.slow)
            for m in (4, 5)
        ),
    ],
)
def test_unusual_functions_get_small_proved_heads(expression, box, tolerance):
    c = pa.compile(expression, box, tolerance=tolerance)
    assert c.certificate.kind == "proved" and c.attack(samples=4000, seed=4).error <= c.error_bound <= tolerance
    assert c.num_keys <= 3000


def test_a_function_of_one_variable_spends_no_keys_on_the_other():
    c = pa.compile("exp(x1) + 0*x0", SQUARE, tolerance=1e-6, method="fitted")
    assert c.head.counts[0] == 1 and c.head.counts[1] <= 10


def test_jumps_are_refused_in_the_supremum_norm():
    with pytest.raises(errors.NotContinuousError, match="norm=1"):
        pa.compile("step(x0 - 0.3)", pa.Box([-1], [1]), tolerance=0.01)
    with pytest.raises(errors.PartitaError, match=r"stagnates|errs by|known"):
        pa.compile(lambda z: np.sign(z[:, 0] - 0.1234), pa.Box([-1], [1]), tolerance=0.01)


def test_noise_is_not_fitted():
    def noisy(z):
        return np.sin(z[:, 0]) + 1e-3 * np.sin(1e7 * z[:, 0])

    with pytest.raises(errors.PartitaError, match=r"stagnates|errs by|samples"):
        pa.compile(noisy, pa.Box([-1], [1]), tolerance=1e-6)
    assert pa.compile(noisy, pa.Box([-1], [1]), tolerance=1e-2).error_estimate <= 1e-2


def test_single_precision_says_what_it_can_reach():
    c = pa.compile(SMOOTH, SQUARE, tolerance=1e-3, dtype=torch.float32)
    assert c.certificate.kind == "proved" and c.head.dtype == torch.float32
    assert c.candidates[0].rounding <= 0.1 * 1e-3
    with pytest.raises(errors.PartitaError, match=r"float64|rounding|float32"):
        pa.compile(SMOOTH, SQUARE, tolerance=1e-8, dtype=torch.float32)


def test_rounding_takes_at_most_a_tenth_of_the_tolerance():
    for tolerance in (1e-2, 1e-6, 1e-10):
        c = pa.compile(SMOOTH, SQUARE, tolerance=tolerance)
        assert c.candidates[0].rounding <= 0.1 * tolerance and c.error_bound <= tolerance


def test_sharpness_is_for_methods_that_take_one():
    with pytest.raises(errors.UnsupportedError, match="chooses its own"):
        pa.compile(SMOOTH, SQUARE, tolerance=0.1, method="fitted", sharpness=2.0)
    with pytest.raises(errors.UnsupportedError, match="accept"):
        pa.compile(SMOOTH, SQUARE, tolerance=0.1, accept="anything")


def test_the_best_temperature_is_finite_and_falls_slowly():
    best = [sharpness_for(h, 3.0, 9.0) for h in (0.1, 0.01, 0.001)]
    assert 8 > best[0] > best[1] > best[2] > 1
    rho, sigma = lattice_moments(2.5)
    q = math.exp(-2 * math.pi**2 / 2.5)
    assert rho == pytest.approx(4 * math.pi * q / 2.5, rel=0.01)
    assert sigma == pytest.approx(1 / 2.5 + 8 * math.pi**2 * q / 2.5**2, rel=0.01)


def test_reports_show_what_was_not_found_out_as_blank():
    text = report(
        [Candidate("hard", "", "too large"), Candidate("fitted", "proved", "", 10, 20, 1.0, 1e-9, 1e-6, True)],
        built=True,
    )
    assert text.splitlines()[1].endswith("too large") and "≤ 1e-06" in text


@pytest.mark.slow  # test_adaptive.py has a smaller one
def test_a_narrow_peak_gets_few_keys_where_it_is():
    """The best uniform fitted grid needs tens of thousands; adaptive centers are asked for at most 2,000."""
    c = pa.compile("exp(-(x0^2 + x1^2)/0.0002)", SQUARE, tolerance=1e-2, method="adaptive")
    assert c.certificate.kind == "proved" and c.num_keys <= 2000
    assert c.attack(samples=20000, seed=1).error <= c.error_bound <= 1e-2
    assert all(check.holds for check in pa.recheck(c))
    with torch.no_grad():
        c.head.values[np.abs(c.head.values.numpy()).argmax()] += 0.1
    assert "approximation" in {check.name for check in pa.recheck(c) if not check.holds}


def test_what_was_only_forecast_has_its_turn_when_a_proof_misses(monkeypatch):
    """Auto plans a fitted head first; if its proof misses, methods that it had beaten are planned after all."""
    box = pa.Box([-1, -1], [1, 1])
    usual = pa.compile("sin(3*x0) + x0*cos(2*x1)", box, tolerance=0.05)
    assert usual.candidates[0].method == "fitted"
    honest = Fitted.build

    def worse(self, plan, *rest):
        built = honest(self, plan, *rest)
        return replace(built, certificate=replace(built.certificate, error_bound=10.0))

    monkeypatch.setattr(Fitted, "build", worse)
    monkeypatch.setattr(Fitted, "shares", Fitted.shares[:1])
    other = pa.compile("sin(3*x0) + x0*cos(2*x1)", box, tolerance=0.05)
    assert (
        other.candidates[0].method in ("affine", "hard", "adaptive", "tuned", "corrected") and other.error_bound <= 0.05
    )
    assert any(c.method == "fitted" and "above the tolerance" in c.note for c in other.candidates)


def test_a_declared_constant_that_proves_nothing_is_told():
    c = pa.compile(lambda z: np.sin(3 * z[:, 0]), pa.Box([-1], [1]), tolerance=1e-9, lipschitz=3.0)
    assert c.certificate.kind == "estimated" and "only an estimate" in c.explain()
    small = pa.compile(lambda z: np.sin(3 * z[:, 0]), pa.Box([-1], [1]), tolerance=0.1, lipschitz=3.0)
    assert small.certificate.kind == "proved_given" and "only an estimate" not in small.explain()


@pytest.mark.parametrize("method", ["fitted", "affine", "auto"])
def test_expressions_that_jump_are_not_sampled_unasked(method):
    text, box = "0.3*x0 + where(8.75e-07 - abs(x0 + 0.66), 0.5, 0)", pa.Box([-1], [1])
    with pytest.raises(pa.PartitaError, match="jump"):
        pa.compile(text, box, tolerance=0.2, method=method, dtype=torch.float32)
    asked = pa.compile(text, box, tolerance=0.2, method="fitted", dtype=torch.float32, accept="estimated")
    assert asked.certificate.kind == "estimated"


@pytest.mark.parametrize(
    ("text", "dimension", "tolerance", "best"),
    [
        ("abs(x0) + x0**2", 1, 1e-2, "convex"),
        ("clamp(exp(x0), 0.5, 2)", 1, 1e-2, "adaptive"),
        ("max(x0**2, x1)", 2, 0.1, "convex"),
    ],
)
def test_auto_is_as_small_as_the_best_method_where_f_has_kinks(text, dimension, tolerance, best):
    def numbers(method):
        try:
            box = pa.Box([-1] * dimension, [1] * dimension)
            return pa.plan(text, box, tolerance=tolerance, method=method).parameters
        except errors.PartitaError:
            return math.inf

    assert numbers("auto") <= numbers(best) < numbers("fitted")
