"""The first law: attacked error ≤ error_bound ≤ tolerance, on every construction; and nothing is wasted."""

import math

import numpy as np
import pytest
import torch
from registry import CASES, LP_CASES, compiled

import partita as pa

NAMES = [c.name for c in CASES]


def violates(c: pa.Compiled, seed: int = 11) -> bool:
    """Whether an attack finds a point where the error exceeds the bound."""
    return c.attack(samples=3000, seed=seed).error > c.error_bound


@pytest.mark.parametrize("name", NAMES)
def test_attacked_error_is_below_the_bound_and_the_bound_below_the_tolerance(name):
    c = compiled(name)
    assert not violates(c)
    assert c.error_bound <= c.certificate.tolerance
    assert c.certificate.witness.error <= c.error_bound


@pytest.mark.parametrize("name", ["kink 1-D", "vector 2-D typed", "cross", "curve in R4", "single 2-D"])
def test_the_attack_finds_a_planted_error(name):
    """Negative control: one value moved by three tolerances is found."""
    case = next(c for c in CASES if c.name == name)
    c = pa.compile(case.function, case.domain(), tolerance=case.tolerance, **case.options)
    with torch.no_grad():
        c.head.values[c.num_keys // 2] += 3 * case.tolerance
    assert violates(c)


@pytest.mark.parametrize("name", [c.name for c in CASES if c.true_lipschitz is not None and "dtype" not in c.options])
def test_hard_heads_waste_nothing(name):
    """error_bound ≤ 1.01·L·covering radius, and on a cube at most ⌈1.0014·L√m·D/ε⌉^m keys."""
    case = next(c for c in CASES if c.name == name)
    c = compiled(name)
    assert c.error_bound <= 1.01 * case.true_lipschitz * c.certificate.facts["covering_radius"]
    box = c.target.domain
    if np.ptp(box.sides) == 0:
        m, half = box.dimension, box.sides[0] / 2
        assert c.num_keys <= math.ceil(1.0014 * case.true_lipschitz * math.sqrt(m) * half / case.tolerance) ** m


@pytest.mark.parametrize("tolerance", [0.3, 0.11, 0.05])
@pytest.mark.parametrize("m", [1, 2, 3])
def test_key_count_on_cubes(m, tolerance):
    c = pa.compile(
        lambda z: np.abs(z).sum(1) / math.sqrt(m),
        pa.Box([-2] * m, [2] * m),
        tolerance=tolerance,
        lipschitz=1.0,
        method="hard",
    )
    assert c.num_keys <= math.ceil(1.0014 * math.sqrt(m) * 2 / tolerance) ** m
    assert c.error_bound <= 1.01 * c.certificate.facts["covering_radius"]


@pytest.mark.parametrize("case", LP_CASES, ids=lambda c: c.name)
def test_lp_error_measured_by_quadrature_is_below_the_bound(case):
    c = compiled(case.name)
    assert c.error_bound <= case.tolerance
    measured = lp_error(c)
    assert measured <= c.error_bound
    assert measured > 0.01 * c.error_bound  # the bound is not vacuous


def lp_error(c: pa.Compiled) -> float:
    """`(∫ Σ_o |f − head|^p)^{1/p}` by the midpoint rule on a fine grid that the cells do not divide."""
    box, p = c.target.domain, float(c.certificate.norm)
    n = 100_003 if box.dimension == 1 else 701
    axes = [lo + (hi - lo) * (np.arange(n) + 0.5) / n for lo, hi in zip(box.lo.ravel(), box.hi.ravel())]
    points = np.stack([a.ravel() for a in np.meshgrid(*axes, indexing="ij")], axis=1)
    got = c.head.evaluate(torch.from_numpy(points)).numpy()
    return float((np.abs(got - c.target(points)) ** p).sum(axis=1).mean() * box.volume) ** (1 / p)


def test_lp_law_can_fail():
    """Negative control: values shifted by the tolerance break the L1 bound."""
    case = next(c for c in LP_CASES if c.name == "L1 kink")
    c = pa.compile(case.function, case.domain(), tolerance=case.tolerance, **case.options)
    with torch.no_grad():
        c.head.values += 0.02
    assert lp_error(c) > c.error_bound


@pytest.mark.parametrize("name", NAMES)
def test_certificates_say_what_they_rest_on(name):
    c = compiled(name)
    certificate = c.certificate
    known = c.target.graph is not None
    filled = isinstance(c.target.domain, pa.PointCloud) and c.target.domain.fill_distance > 0
    assert certificate.kind == ("proved" if known and not filled else "proved_given")
    assert math.fsum(t.value for t in certificate.terms) <= certificate.error_bound
    assert all(t.theorem and t.formula for t in certificate.terms)
    assert {a.vouched_by for a in certificate.assumptions} <= {
        "caller",
        "interval arithmetic",
        "construction",
        "platform",
    }
    assert all(a.worst_ratio is None or a.worst_ratio <= 1 + 1e-9 for a in certificate.assumptions)
    text = c.explain()
    assert certificate.kind in text and "keys" in text


def test_computed_lipschitz_constant_assumes_nothing_of_the_caller():
    c = compiled("sine 1-D typed")
    assert c.certificate.kind == "proved"
    assert not [a for a in c.certificate.assumptions if a.vouched_by == "caller"]


def test_declared_constant_that_intervals_confirm_stays_proved():
    c = pa.compile("sin(3*x0)", pa.Box([-1], [1]), method="hard", tolerance=0.1, lipschitz=5.0)
    assert c.certificate.kind == "proved"


def test_float32_rounding_is_part_of_the_bound():
    single, double = compiled("single 2-D"), None
    names = {t.name for t in single.certificate.terms}
    assert {"score rounding", "summation", "stored values", "input rounding"} <= names
    double = pa.compile(
        lambda z: z[:, 0] * z[:, 1], pa.Box([-1, -1], [1, 1]), method="hard", tolerance=0.25, lipschitz=1.5, trace=False
    )
    assert single.error_bound > double.error_bound
    assert single.certificate.semantics == "float32" and single.head.values.dtype == torch.float32
    doubles = torch.rand(100, 2, dtype=torch.float64)  # not representable: rounding them is covered too
    assert (single(doubles) - doubles[:, 0] * doubles[:, 1]).abs().max() <= single.error_bound


def test_small_domain_takes_a_third_of_the_papers_radius():
    """Theorem 5.1 with ρ = ε/L: on a curve about a third of the paper's balls."""
    t = np.linspace(0, 1, 5000)
    curve = np.stack([t, np.sin(3 * t), t**2], axis=1)
    ours = pa.compile(
        lambda z: z[:, 0], pa.PointCloud(curve, fill_distance=1e-3), method="hard", tolerance=0.1, lipschitz=1.0
    )
    papers = pa.compile(
        lambda z: z[:, 0], pa.PointCloud(curve, fill_distance=1e-3), method="hard", tolerance=0.1 / 3, lipschitz=1.0
    )
    assert 2 <= papers.num_keys / ours.num_keys <= 4
    facts = ours.certificate.facts
    n = ours.num_keys
    assert facts["paper_count"] == 3 * n + 2 * n + 2 * n + 1  # m N + 2 d n N + 2 d N + n with m = 3 and one output


def test_points_of_the_cloud_are_the_only_places_f_is_asked():
    points = np.random.default_rng(0).normal(size=(50, 3))
    asked = []

    def f(z):
        asked.append(z.copy())
        return z[:, 0]

    pa.compile(f, pa.PointCloud(points), method="hard", tolerance=0.5, lipschitz=1.0)
    assert {tuple(row) for row in np.concatenate(asked)} <= {tuple(row) for row in points}
