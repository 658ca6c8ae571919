"""Certified modules compute in the arithmetic that their certificates are about, whatever torch is set to."""

import contextlib

import numpy as np
import pytest
import torch
from torch import nn

import partita as pa
from partita import errors
from partita.arithmetic.environment import flushes_denormals, require_gradual_underflow
from partita.geometry import Box, ProductGrid
from partita.heads import GridHead, ScatteredHead, TrainHead, literal_layers
from partita.kernels import guards
from partita.kernels.plain_arithmetic import product_setting
from partita.networks.blocks import prefix_ramp
from partita.ramps import multi_head_ramp, ramp, two_layers
from partita.ramps.literal_ramps import ramp_layers

SINGLE = torch.float32
SQUARE = Box([-1, -1], [1, 1])
LINE = Box([-1], [1])


def points(*shape: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(3).uniform(-1, 1, shape).astype(np.float32))


def grid_head() -> GridHead:
    grid = ProductGrid.uniform(SQUARE, [12, 9], dtype=np.float32)
    values = torch.randn(108, 2, generator=torch.Generator().manual_seed(0))
    return GridHead(grid, [100.0, 80.0], values, half_windows=9, input_shapes=((2,),), output_shape=(2,))


def scattered_head(keys: int = 40) -> ScatteredHead:
    g = torch.Generator().manual_seed(0)
    centers, values = torch.rand(keys, 2, generator=g) * 2 - 1, torch.randn(keys, 2, generator=g)
    return ScatteredHead(centers, 50.0, values, input_shapes=((2,),), output_shape=(2,))


def train_head() -> TrainHead:
    g = torch.Generator().manual_seed(0)
    cores = [torch.randn(1, 12, 5, generator=g), torch.randn(5, 9, 2, generator=g)]
    grid = ProductGrid.uniform(SQUARE, [12, 9], dtype=np.float32)
    return TrainHead(grid, [100.0, 80.0], cores, input_shapes=((2,),), output_shape=(2,))


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 8), nn.GELU(), nn.Linear(8, 1)).double()


def descent() -> nn.Module:
    boxes = {"x": Box([-1] * 3, [1] * 3), "y": LINE, "w": Box([-3] * 3, [3] * 3)}
    return pa.in_context.gradient_descent("squared", 10, 0.5, **boxes, dtype=SINGLE, prompt_length=50)


def logistic_descent() -> nn.Module:
    boxes = {"x": Box([-1] * 3, [1] * 3), "y": Box([0], [1]), "w": Box([-3] * 3, [3] * 3)}
    return pa.in_context.gradient_descent("logistic", 5, 0.5, **boxes, dtype=SINGLE, prompt_length=50)


RAMP = {"ends": (-0.5, 0.75), "domain": Box([-1, -1], [1, 1]), "dtype": SINGLE}
MODULES = {
    "grid": (grid_head, points(64, 2)),
    "grid, cells": (lambda: grid_head().unfreeze(), points(64, 2)),
    "scattered": (scattered_head, points(64, 2)),
    "scattered, tree": (lambda: scattered_head(400), points(64, 2)),
    "train": (train_head, points(64, 2)),
    "dot products": (lambda: grid_head().as_attention(), points(64, 2)),
    "indexed form": (lambda: literal_layers(grid_head(), "indexed"), points(64, 2)),
    "log form": (lambda: literal_layers(scattered_head(), "log"), points(64, 2)),
    "ramp": (lambda: ramp([0.7, 0.4], 0.1, anchors=9, **RAMP).head, points(64, 2)),
    "ramp layers": (lambda: ramp_layers(ramp([0.7, 0.4], 0.1, anchors=9, **RAMP), 4), points(8, 4, 2)),
    "prefix ramp": (lambda: prefix_ramp(ramp([0.7, 0.4], 0.1, anchors=9, **RAMP), 4), points(8, 4, 2)),
    "folded shared ramp": (
        lambda: multi_head_ramp(np.full((6, 2), 0.5), 0.1, heads=2, form="folded", **RAMP).network,
        points(8, 6, 2),
    ),
    "shared ramp": (
        lambda: multi_head_ramp(np.full((6, 2), 0.5), 0.1, heads=2, sharpness=16.0, **RAMP).network,
        points(8, 6, 2),
    ),
    "two layers": (lambda: two_layers("x0*x1", SQUARE, cells=3).two_layers.float(), points(16, 2)),
    "layer then softmax": (lambda: two_layers("x0*x1", SQUARE, cells=3).layer_then_softmax.float(), points(16, 2)),
    "mlp": (lambda: pa.attention_from_mlp(mlp(), SQUARE, 1e-3, dtype=SINGLE), points(64, 2)),
    "squared descent": (descent, points(20, 4)),
    "logistic descent": (logistic_descent, points(20, 4).abs()),
}
_built: dict[str, nn.Module] = {}


def built(name: str) -> tuple[nn.Module, torch.Tensor]:
    if name not in _built:
        _built[name] = MODULES[name][0]()
    return _built[name], MODULES[name][1]


@pytest.mark.parametrize("name", MODULES)
def test_autocast_changes_nothing(name):
    module, x = built(name)
    plain = module(x).detach()
    assert plain.dtype == SINGLE and bool(plain.isfinite().all())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(module(x).detach(), plain)
        assert torch.is_autocast_enabled("cpu")  # the caller's own setting is left alone


@pytest.mark.parametrize("name", ["dot products", "indexed form", "mlp", "squared descent", "train"])
def test_without_the_guard_autocast_would_be_noticed(name, monkeypatch):
    """Negative control: the same modules inside autocast, with the guard taken off."""
    module, x = built(name)
    plain = module(x).detach()
    monkeypatch.setattr(guards.torch, "is_autocast_enabled", lambda _: False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (module(x).detach().float() - plain).abs().max() > 1e-4 * plain.abs().max()


@pytest.mark.parametrize("name", ["mlp", "squared descent", "train", "indexed form"])
def test_autocast_changes_nothing_in_compiled_graphs(name):
    module, x = built(name)
    torch._dynamo.reset()
    inputs = x[None] if "descent" in name else x  # graphs take batches of prompts
    plain = module(inputs).detach()
    if name == "indexed form" and not hasattr(torch.backends.mkldnn, "matmul"):
        pytest.skip("torch before 2.9 cannot look up in a graph which columns are in use")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = torch.compile(module, backend="aot_eager", fullgraph=True)(inputs).detach()
    torch._dynamo.reset()
    assert found.dtype == SINGLE and torch.allclose(found, plain, rtol=1e-4, atol=1e-5)


@contextlib.contextmanager
def short_products(precision: str):
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision(precision)
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("precision", ["high", "medium"])
def test_float32_products_are_float32_products(precision):
    seen = []

    class Probe(nn.Module):
        @guards.certified
        def forward(self, z: torch.Tensor) -> torch.Tensor:
            seen.append(product_setting("cpu")[0])
            return z

    with short_products(precision):
        before = product_setting("cpu")[0]
        Probe()(torch.ones(1))
        assert product_setting("cpu")[0] == before
    if before != "none":  # "medium" cuts products to bfloat16 on CPUs that can
        assert seen[-1] in ("ieee", "highest")
    for name in MODULES:
        module, x = built(name)
        plain = module(x).detach()
        with short_products(precision):
            assert torch.equal(module(x).detach(), plain), name


# ---- subnormal numbers -----------------------------------------------------------------------------------------------


@pytest.fixture
def flushing():
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush subnormal numbers")
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


def test_gradual_underflow_is_the_normal_state():
    assert not flushes_denormals()
    require_gradual_underflow()


def test_flushed_subnormal_numbers_are_noticed(flushing):
    assert flushes_denormals()
    with pytest.raises(errors.UnsupportedError, match=r"set_flush_denormal\(False\)"):
        require_gradual_underflow()


@pytest.mark.parametrize("name", MODULES)
def test_no_certified_module_runs_where_subnormal_numbers_are_flushed(name, flushing):
    torch.set_flush_denormal(False)
    module, x = built(name)
    torch.set_flush_denormal(True)
    with pytest.raises(errors.UnsupportedError, match="subnormal"):
        module(x)
