"""Claims that were once false, or might be: each stays refuted, refused or right."""

import numpy as np
import pytest
import torch

import partita as pa
from partita.attention import AffineScores, log_cross
from partita.constructions import reassignment
from partita.errors import DomainError, ToleranceError, UnsupportedError
from partita.geometry import farthest_point_cover


@pytest.mark.parametrize("tolerance", [2.0, 0.6])
def test_a_small_circle_has_a_disc_around_it(tolerance):
    """f = 1 inside a circle of radius 0.02: its length alone would promise too much; the tube of a curve does not."""
    tube = (2 * 2 * np.pi * 0.02, np.pi)
    c = pa.compile(
        lambda z: 1.0 * ((z**2).sum(1) < 0.02**2),
        pa.Box([-1, -1], [1, 1]),
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
        pa.compile("exp(-50*(x0-16777216.25))", box, tolerance=250, dtype=torch.float32)
    near = pa.Box([2.0**18 + 0.01], [2.0**18 + 1.01])
    c = pa.compile("exp(-2*(x0-262144.01))", near, tolerance=0.5, dtype=torch.float32)
    assert c.target.domain.contains(c.partition.axes[0][:, None]).all()
    assert c.attack(samples=2000).error <= c.error_bound


def test_affine_values_with_centers_far_outside_the_domain():
    p = pa.MaxAffine([[-100.0], [-104.0]], [0.0, 2.0])
    built = reassignment(
        p,
        [[102.03], [102.03]],
        pa.Box([0], [1]),
        margin=1.0,
        tolerance=1e-3,
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
        pa.compile(lambda z: z[:, 0], pa.Box([0], [side]), tolerance=side / 10, lipschitz=1.0, dtype=dtype)


def test_the_log_form_of_cross_attention_refuses_affine_values():
    scores = AffineScores(np.zeros((2, 2)), np.zeros(2), np.zeros((2, 1)), np.ones((2, 1, 2)))
    with pytest.raises(UnsupportedError, match="affine"):
        log_cross(scores, input_shapes=((1,), (1,)), output_shape=(), inverse_temperature=1.0, dtype=torch.float64)


@pytest.mark.parametrize("width", [1e-2, 1e-4, 1e-6])
@pytest.mark.parametrize("seed", range(4))
def test_hidden_spikes_never_slip_into_a_proved_claim(seed, width):
    """A spike in an expression is either resolved, or refused for its size: never certified away."""
    place = float(np.random.default_rng(seed).uniform(-1, 1))
    text = f"exp(-((x0 - {place!r})/{width!r})^2)"
    box = pa.Box([-1], [1])
    c = pa.compile(text, box, tolerance=0.2)
    at_spike = np.array([[place]])
    assert c.certificate.kind == "proved" and c.errors_at(at_spike)[0] <= c.error_bound <= 0.2
    declared = pa.compile(lambda z: c.target(z)[:, 0], box, tolerance=0.2, lipschitz=1 / width)
    assert declared.certificate.kind == "proved_given"
    assert declared.errors_at(at_spike)[0] <= declared.error_bound


@pytest.mark.parametrize("scale", [1e-8, 1.0, 1e8])
@pytest.mark.parametrize("offset", [0.0, 1e6, -1e6])
def test_badly_scaled_functions_and_domains(scale, offset):
    box = pa.Box([offset, -scale], [offset + 1, scale])
    c = pa.compile(f"{scale!r}*sin(x0 - {offset!r}) + x1", box, tolerance=0.2 * scale)
    assert c.attack(samples=2000).error <= c.error_bound <= 0.2 * scale


def test_six_dimensions():
    c = pa.compile("x0*x1 + sin(x2) + abs(x3) + x4 - x5", pa.Box([0] * 6, [1] * 6), tolerance=1.5)
    assert c.attack(samples=2000).error <= c.error_bound
    with pytest.raises(ToleranceError):
        pa.compile("1e16 + x0 + x1", pa.Box([0, 0], [1, 1]), tolerance=1e-3)
