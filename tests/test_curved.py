"""Black boxes with a declared bound of their second derivatives."""

import math

import numpy as np
import pytest
import torch

import partita as pa
from partita.errors import CurvatureContradictedError, DomainError
from partita.proofs.certificate import Certificate

SQUARE = pa.Box([-1, -1], [1, 1])


def bowl(z):
    """Hessian 2·identity: the bound is met everywhere, so that the tangents err as much as they may."""
    return (z**2).sum(axis=1)


@pytest.mark.parametrize(
    ("f", "box", "hessian", "tolerance"),
    [
        (bowl, SQUARE, 2.0, 0.05),
        (lambda z: np.sin(3 * z[:, 0]) + np.cos(2 * z[:, 1]), SQUARE, 9.0, 0.02),
        (lambda z: np.stack([np.exp(z[:, 0]), np.sin(z[:, 0])], 1), pa.Box([0], [1]), math.e, 1e-4),
        (lambda z: 1e6 + np.cos(z[:, 0]), pa.Box([-1e3], [-9.9e2]), 1.0, 1e-3),
        (lambda z: 3 * z[:, 0] - z[:, 1], SQUARE, 0.0, 1e-9),
        (lambda z: 1e-9 * (z[:, 0] / 1e-5) ** 2, pa.Box([0], [1e-5]), 20.0, 1e-11),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_bound_holds(f, box, hessian, tolerance, dtype):
    try:
        c = pa.compile(f, box, tolerance=tolerance, hessian=hessian, dtype=dtype, trace=False)
    except pa.PartitaError:
        assert dtype == torch.float32 and tolerance < 1e-2
        return
    assert c.certificate.kind == "proved_given" and c.candidates[0].method == "affine"
    assert c.attack(samples=4000).error <= c.error_bound <= tolerance
    assert all(check.holds for check in pa.recheck(c))


def test_the_bound_is_nearly_attained():
    c = pa.compile(bowl, SQUARE, tolerance=0.05, hessian=2.0, trace=False)
    assert c.attack(samples=4000).error > 0.85 * c.error_bound
    assert Certificate.from_json(c.certificate.to_json()) == c.certificate


@pytest.mark.parametrize("far", [1e3, -1e5])
def test_a_true_declaration_is_not_refuted_far_from_zero(far):
    """Middles of lines that were off by a rounding made a slope of 2 look like a bend."""
    c = pa.compile(
        lambda z: (z[:, 0] - far) ** 2, pa.Box([far - 1], [far + 1]), tolerance=0.05, hessian=2.0, trace=False
    )
    assert 0.99 < c.certificate.assumptions[0].worst_ratio <= 1.0 + 1e-9
    with pytest.raises(CurvatureContradictedError):
        pa.compile(
            lambda z: (z[:, 0] - far) ** 2, pa.Box([far - 1], [far + 1]), tolerance=0.05, hessian=1.99, trace=False
        )


def test_a_declared_bound_that_is_too_small_is_refuted():
    with pytest.raises(CurvatureContradictedError, match="declare at least"):
        pa.compile(bowl, SQUARE, tolerance=0.05, hessian=1.9, trace=False)
    with pytest.raises(CurvatureContradictedError):
        pa.compile(lambda z: np.abs(z[:, 0]), SQUARE, tolerance=0.05, hessian=5.0, trace=False)
    for bad in (-1.0, math.nan, math.inf):
        with pytest.raises(DomainError, match="hessian is"):
            pa.compile(bowl, SQUARE, tolerance=0.05, hessian=bad, trace=False)


def test_the_smaller_of_two_declared_heads_is_taken():
    both = pa.compile(bowl, SQUARE, tolerance=0.05, hessian=2.0, lipschitz=3.0, trace=False)
    assert both.candidates[0].method == "affine" and {c.method for c in both.candidates} >= {"hard", "affine"}


def test_mean_errors_and_files(tmp_path):
    c = pa.compile(bowl, SQUARE, tolerance=0.05, hessian=2.0, norm=2, trace=False)
    z = SQUARE.sample(20000, np.random.default_rng(0))
    assert math.sqrt((c.errors_at(z) ** 2).mean() * 4) <= c.error_bound <= 0.05
    again = pa.load(c.save(tmp_path / "head"))
    assert all(check.holds for check in pa.recheck(again))
    forged = again.certificate.to_json()
    forged["known"]["curvature"] = (0.5).hex()
    lying = pa.Compiled(again.head, again.partition, Certificate.from_json(forged), again.target)
    assert [check.name for check in pa.recheck(lying) if not check.holds] == ["knowledge"]
