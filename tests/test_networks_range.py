"""The edges of the dtypes: products that underflow, scores that overflow, dead neurons. Bounds hold there, or an error says why."""

import math

import mpmath
import numpy as np
import pytest
import torch
from torch import nn

import partita as pa
from partita.errors import DomainError, ToleranceError, UnsupportedError
from partita.networks import prefix_ramp
from partita.papers import relu_head, silu_head, tanh_head
from partita.ramps import multi_head_ramp, ramp, ramp_layers

ORDINARY = "[Rr]escale"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("sharpness", ["best", "hard", 1.0, 1e6])
def test_tokens_far_beyond_the_ends_do_not_overflow(sharpness, dtype):
    """u/Δ times κ times the window is beyond the dtype; the answer is an end all the same."""
    far = 1e36 if dtype == torch.float32 else 1e304
    built = ramp([1.0], 0.0, (0, 1), anchors=100_000, domain=pa.Box([-far], [far]), sharpness=sharpness, dtype=dtype)
    out = built.head(torch.tensor([[-far], [-far / 7], [far / 7], [far]], dtype=torch.float64))
    assert out[:, 0].tolist() == pytest.approx([0, 0, 1, 1], abs=1e-4)
    assert (
        ramp([1.0], 0.0, (0, 1), anchors=64, domain=pa.Box([-3], [3])).error_bound < 1e-3
    )  # no cost where none is due


@pytest.mark.parametrize("scale", [1e-12, 1e-3, 1e10])
def test_ramps_of_any_ordinary_size_are_within_their_bound(scale):
    domain, u = pa.Box([-3 * scale], [3 * scale]), scale * np.linspace(-3, 3, 4001).astype(np.float32)
    built = ramp([1.0], 0.0, (0, scale), anchors=20, domain=domain, dtype=torch.float32)
    layers = ramp_layers(built)
    exact = u.astype(np.float64).clip(0, scale)
    x = torch.from_numpy(u)[:, None]
    assert np.abs(built.head(x)[:, 0].double().numpy() - exact).max() <= built.error_bound < 0.1 * scale / 19
    assert np.abs(layers(x[:, None])[:, 0, 0].double().numpy() - exact).max() <= layers.error_bound


@pytest.mark.parametrize("scale", [1e-42, 1e-25, 1e25])
def test_dot_products_of_lengths_that_single_precision_cannot_square(scale):
    domain = pa.Box([-scale], [scale])
    with pytest.raises(DomainError, match=ORDINARY):
        multi_head_ramp(np.ones((4, 1)), 0.0, (0, scale), heads=2, domain=domain, dtype=torch.float32)
    with pytest.raises(DomainError, match=ORDINARY):
        ramp_layers(ramp([1.0], 0.0, (0, scale), anchors=8, domain=domain, dtype=torch.float32))
    with pytest.raises(DomainError, match=ORDINARY):
        prefix_ramp(ramp([1.0], 0.0, (0, scale), anchors=8, domain=domain, dtype=torch.float32), 2)
    shared = multi_head_ramp(np.ones((4, 1)), 0.0, (0, scale), heads=2, domain=domain)  # float64 holds them
    x = torch.linspace(-scale, scale, 400, dtype=torch.float64).reshape(100, 4, 1)
    error = (shared.network(x)[..., 0] - x[..., 0].clamp(0, scale)).abs().max()
    assert error <= shared.error_bound < scale


def test_spacings_below_the_normal_numbers_are_refused():
    with pytest.raises(DomainError, match=ORDINARY):
        ramp([1.0], 0.0, (0, 1e-42), anchors=20, domain=pa.Box([-1], [1]), dtype=torch.float32)
    with pytest.raises(DomainError, match=ORDINARY):
        ramp([1.0], 0.0, (0, 1), anchors=20, domain=pa.Box([-1e39], [1e39]), dtype=torch.float32)


def test_heads_of_two_keys_on_boxes_that_cannot_be_squared():
    wide, narrow = pa.Box([-1e20], [1e20]), pa.Box([-1e-20], [1e-20])
    for slope, domain in (([1e-20], wide), ([1e20], narrow)):
        with pytest.raises(DomainError, match=ORDINARY):
            tanh_head(slope, 0.0, domain, dtype=torch.float32)
        with pytest.raises(DomainError, match=ORDINARY):
            relu_head(slope, 0.0, domain, tolerance=1e-2, dtype=torch.float32)
    with pytest.raises(UnsupportedError, match="float16"):
        tanh_head([1.0], 0.0, pa.Box([-1], [1]), dtype=torch.float16)
    for tolerance in (0.0, math.nan):
        with pytest.raises(ToleranceError, match="> 0"):
            relu_head([1.0], 0.0, pa.Box([-1], [1]), tolerance=tolerance)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_two_keys_on_a_box_far_from_the_origin(dtype):
    """The head subtracts before it squares: the bound speaks of the box's width, times what u itself rounds by."""
    x = torch.linspace(9999, 10001, 801, dtype=torch.float64)[:, None]
    for build, exact, allowed in ((tanh_head, mpmath.tanh, 1e6), (silu_head, lambda u: u / (1 + mpmath.exp(-u)), 2e6)):
        built = build([1.0], -1e4, pa.Box([9999], [10001]), dtype=dtype)
        out = built.head(x).double().reshape(-1).tolist()
        error = max(abs(o - exact(mpmath.mpf(z) - 10000)) for o, z in zip(out, x[:, 0].tolist()))
        assert error <= built.certificate.error_bound <= allowed * torch.finfo(dtype).eps


def chain(*factors: float) -> nn.Sequential:
    model = nn.Sequential(*(nn.Linear(1, 1, bias=False) for _ in factors)).double()
    for layer, factor in zip(model, factors):
        layer.weight.data.fill_(factor)
    return model


@pytest.mark.parametrize(
    ("factors", "largest", "dtype"),
    [
        ((1e-30,), 1e-12, torch.float32),
        ((1e-30, 1e30), 1e-12, torch.float32),
        ((1e-41,), 1.0, torch.float32),
        ((1e-300,), 1e-20, torch.float64),
        ((1e-300, 1e300), 1e-20, torch.float64),
    ],
)
def test_products_that_underflow_are_in_the_bound(factors, largest, dtype):
    model = chain(*factors)
    net = pa.attention_from_mlp(model, pa.Box([0], [largest]), 1.0, dtype=dtype)
    x = np.linspace(0, largest, 101)
    out, at = net(torch.from_numpy(x)[:, None])[:, 0].double().tolist(), net.error_bound_at(x[:, None])
    for o, z, bound in zip(out, x, at):
        error = abs(mpmath.mpf(o) - mpmath.mpf(z) * mpmath.fprod(factors))
        assert error <= bound and error <= net.error_bound


@pytest.mark.parametrize("activation", [[], [nn.ReLU()]])
@pytest.mark.parametrize("factors", [(1e38, 1e-38), (1e-41, 1e41)])
def test_networks_that_overflow_in_single_precision_are_refused(factors, activation):
    first, last = chain(*factors)
    model = nn.Sequential(first, *activation, last)
    with pytest.raises(ToleranceError, match="float32: inf"):
        pa.attention_from_mlp(model, pa.Box([0], [10]), 1e30, dtype=torch.float32)
    assert pa.attention_from_mlp(model, pa.Box([0], [10]), 1e-3).error_bound <= 1e-3


def test_gates_before_dead_neurons_stay_sharp():
    """Every neuron of the second layer is dead, so that the first one's errors do not matter — as long as they stay small."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 6), nn.ReLU6(), nn.Linear(6, 6), nn.ReLU6(), nn.Linear(6, 1)).double()
    model[2].bias.data.fill_(-100.0)
    net = pa.attention_from_mlp(model, pa.Box([-1, -1], [1, 1]), 1e-3)
    x = torch.rand(500, 2, dtype=torch.float64) * 2 - 1
    with torch.no_grad():
        assert (net(x) - model(x)).abs().max() <= net.error_bound <= 1e-3


def test_descent_beyond_the_range_of_single_precision():
    box = pa.Box([-1, -1], [1, 1])
    given = {"x": box, "y": pa.Box([-1e36], [1e36]), "w": box}
    with pytest.raises(DomainError, match=ORDINARY):
        pa.in_context.gradient_descent("squared", 2, 0.3, dtype=torch.float32, **given)
    with pytest.raises(DomainError, match="at least 1"):
        pa.in_context.gradient_descent("squared", 2, 0.3, **given).error_bound_for(0)
