"""Certificates say where a head may run: what evaluators may round, and on which devices."""

import math

import numpy as np
import pytest
import torch

import partita as pa
from partita import errors
from partita.kernels import guards, plain_arithmetic
from partita.proofs.running import EXP_UNITS, SCORE_UNITS

U = 2.0**-24
LOG2E = np.float32(1 / math.log(2))
SMALLEST = 2.0**-126


# ---- what an evaluator may round -------------------------------------------------------------------------------------


def centred(x, centers, rate):
    """Scores as in the docs: differences first, log₂e as a factor of every score, base 2."""
    d = x[:, None] - centers
    return np.float32(rate * np.float32(0.5)) * d * d * LOG2E


def dot_products(x, centers, rate):
    """What is not covered: `c²/2 − x·c`, large numbers whose differences are small."""
    return (centers * centers * np.float32(0.5) - x[:, None] * centers) * rate * LOG2E


def score_errors(scores, shift):
    """How far logarithms of weights are off, as a share of `u(8s + 16)`, `(points, centers)`; NaN where they are lost.

    Exponentials are in base 2 and off by 7 units in the last place; those below the smallest normal number are lost.
    """
    centers, rate = np.linspace(shift - 1, shift + 1, 13).astype(np.float32), np.float32(47.3)
    x = np.random.default_rng(1).uniform(shift - 1, shift + 1, 20_000).astype(np.float32)
    exact = 0.5 * float(rate) * (x[:, None].astype(np.float64) - centers.astype(np.float64)) ** 2
    found = scores(x, centers, rate)
    best = found.min(axis=1, keepdims=True)
    off = np.random.default_rng(2).choice([-14 * U, 14 * U], found.shape)
    exponentials = np.exp2((best - found).astype(np.float64)) * (1 + off)
    with np.errstate(divide="ignore"):
        logarithms = np.where(exponentials < SMALLEST, np.nan, np.log(exponentials))
    common = best.astype(np.float64) * math.log(2)  # the best score's own error is the same for all weights
    return np.abs(logarithms - common + exact) / (U * (SCORE_UNITS * exact + EXP_UNITS)), exact


@pytest.mark.parametrize("shift", [0.0, 30.0])
def test_an_exponential_in_base_two_with_the_worst_error_is_covered(shift):
    share, scores = score_errors(centred, shift)
    assert 0.8 < np.nanmax(share) <= 1
    assert (
        0.2 < np.nanmax(share[scores > 20]) <= 1
    )  # where the roundings of scores matter, not those of the exponential


def test_scores_as_dot_products_are_not_covered():
    """Negative control: the same exponentials of scores whose differences drown."""
    assert np.nanmax(score_errors(dot_products, 30.0)[0]) > 10


def test_the_count_of_roundings_fits():
    u = 2.0**-24
    assert (1 + u) ** 7 - 1 <= SCORE_UNITS * u < (1 + u) ** 8 - 1
    assert max(math.log1p(14 * u), -math.log1p(-14 * u)) <= EXP_UNITS * u < -math.log1p(-16 * u)


# ---- devices -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compiled():
    return pa.compile("2*x", pa.Box([0], [1]), tolerance=0.15, method="hard", dtype=torch.float32)


def test_a_certificate_names_the_devices_it_covers(compiled):
    assert compiled.certificate.runs_on == "CPU; CUDA with IEEE float32 and float64 products"
    assert f"runs on: {compiled.certificate.runs_on}" in compiled.explain()


@pytest.mark.parametrize("device", ["meta", "mps", "xla"])
def test_other_devices_are_refused(device):
    with pytest.raises(errors.UnsupportedError, match=r"(?s)found the device .*expected CPU, or CUDA.*c\.head"):
        guards.require_covered(torch.device("cpu"), torch.device(device))


def test_a_call_on_an_uncovered_device_is_refused_and_the_head_still_runs(compiled):
    z = torch.empty(3, 1, device="meta")
    with pytest.raises(errors.UnsupportedError, match="meta"):
        compiled(z)
    moved = pa.compile("2*x", pa.Box([0], [1]), tolerance=0.15, method="hard")
    moved.head.to("meta")
    with pytest.raises(errors.UnsupportedError, match="meta"):
        moved([0.5])


def test_a_call_on_a_covered_device_of_another_kind_is_refused_until_the_head_is_moved(compiled, monkeypatch):
    monkeypatch.setitem(guards.DEVICES, "meta", "the device that stands for CUDA here")
    with pytest.raises(errors.UnsupportedError, match=r"found the devices cpu and meta.*c\.head\.to\('meta'\)"):
        compiled(torch.empty(3, 1, device="meta"))


def test_the_guard_runs_for_the_device_of_the_input(monkeypatch):
    """Autocast and short products are switched off on the device where the inputs are, not on the host."""
    asked = []
    monkeypatch.setattr(
        plain_arithmetic, "product_setting", lambda device: asked.append(device) or ("ieee", lambda value: None)
    )
    monkeypatch.setattr(guards, "require_finite", lambda *args: None)
    monkeypatch.setattr(
        guards.torch.amp, "is_autocast_available", lambda device: True
    )  # "meta" stands for a device with it
    monkeypatch.setattr(guards.torch, "is_autocast_enabled", lambda device: asked.append(device))

    class Probe(torch.nn.Module):
        @guards.certified
        def forward(self, z: torch.Tensor) -> torch.Tensor:
            return z

    Probe()(torch.empty(2, device="meta"))
    assert asked == ["meta", "meta"]


@pytest.mark.skipif(not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="torch before 2.9")
@pytest.mark.parametrize("outside", ["the device's own setting", "the setting for all devices"])
def test_tf32_is_switched_off_on_cuda(outside):
    """The settings can be changed without a GPU; products are checked by the tests that need one."""
    where = torch.backends.cuda.matmul if outside.startswith("the device") else torch.backends
    before = where.fp32_precision, torch.backends.cuda.matmul.fp32_precision
    try:
        torch.backends.cuda.matmul.fp32_precision = "none"  # as torch comes: the setting for all devices counts
        where.fp32_precision = "tf32"
        assert plain_arithmetic.product_setting("cuda")[0] not in plain_arithmetic._FULL
        with plain_arithmetic._full_products("cuda"):
            assert plain_arithmetic.product_setting("cuda")[0] == "ieee"
        assert plain_arithmetic.product_setting("cuda")[0] == "tf32"  # the caller's setting is back
    finally:
        where.fp32_precision = before[0]
        torch.backends.cuda.matmul.fp32_precision = before[1]
