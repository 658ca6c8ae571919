"""Hard heads waste nothing, and the attack on a finished head finds what is planted. Laws of all methods: test_method_laws.py."""

import copy
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from method_cases import BY_NAME, HARD, compiled

import partita as pa


@pytest.mark.parametrize("name", ["kink 1-D", "vector 2-D typed", "cross", "curve in R4", "single 2-D"])
def test_the_attack_finds_a_planted_error(name):
    """One value moved by three tolerances is found; as it stands, nothing is."""
    case, c = BY_NAME[name], compiled(name)
    moved = replace(c, head=copy.deepcopy(c.head))
    moved.head.values[c.num_keys // 2] += 3 * case.tolerance
    assert moved.attack(samples=3000, seed=11).error > c.error_bound >= c.attack(samples=3000, seed=11).error


@pytest.mark.parametrize("name", [name for name in HARD if BY_NAME[name].is_plain])
def test_hard_heads_waste_nothing(name):
    """error_bound ≤ 1.01·L·covering radius, and on a cube at most ⌈1.0014·L√m·D/ε⌉^m keys."""
    case, c = BY_NAME[name], compiled(name)
    lipschitz = case.options["lipschitz"]
    assert c.error_bound <= 1.01 * lipschitz * c.certificate.facts["covering_radius"]
    box = c.target.domain
    if np.ptp(box.sides) == 0:
        m, half = box.dimension, box.sides[0] / 2
        assert c.num_keys <= math.ceil(1.0014 * lipschitz * math.sqrt(m) * half / case.tolerance) ** m


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
    assert facts["paper_count"] == 3 * n + 2 * n + 2 * n + 3  # m N + 2 d n N + 2 d N + 3 n with m = 3 and one output


def test_points_of_the_cloud_are_the_only_places_f_is_asked():
    points = np.random.default_rng(0).normal(size=(50, 3))
    asked = []

    def f(z):
        asked.append(z.copy())
        return z[:, 0]

    pa.compile(f, pa.PointCloud(points), method="hard", tolerance=0.5, lipschitz=1.0)
    assert {tuple(row) for row in np.concatenate(asked)} <= {tuple(row) for row in points}


def test_a_jump_along_a_line_in_the_mean():
    """Measured by quadrature: the bound counts the cells that the line x0 = x1 crosses."""
    c = pa.compile("where(x0 - x1, x0, 0 - 1)", pa.Box([-1, -1], [1, 1]), method="hard", tolerance=0.5, norm=1)
    t = 2 * (np.arange(301) + 0.5) / 301 - 1
    points = np.stack([a.ravel() for a in np.meshgrid(t, t)], axis=1)
    got = c.head.evaluate(torch.from_numpy(points)).numpy()
    measured = 4 * np.abs(got - c.target(points)).mean()
    assert 0.01 * c.error_bound < measured <= c.error_bound <= 0.5
