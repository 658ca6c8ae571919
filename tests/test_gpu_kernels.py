"""Heads and `attend` on a GPU: the same answers as on the CPU, through the operators, compiled graphs and other streams."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import partita as pa
from partita.geometry import Box, ProductGrid
from partita.heads import GridHead, ScatteredHead, TrainHead
from partita.ramps.ramp_head import RampHead

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
LIMIT = {torch.float64: 1e-12, torch.float32: 2e-5}  # between two orders of summation, values up to 2


def uniform(*shape, seed=0, dtype=torch.float64):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def grid_of(dtype, counts, sharpness, windows, outputs=1, slopes=False):
    grid = ProductGrid.uniform(Box([0.0] * len(counts), [1.0] * len(counts)), counts)
    rates = sharpness * np.array(counts, dtype=float) ** 2
    values = uniform(grid.num_cells, outputs, dtype=dtype)
    tilt = uniform(grid.num_cells, outputs, len(counts), seed=1, dtype=dtype) if slopes else None
    shapes = {"input_shapes": ((len(counts),),), "output_shape": (outputs,)}
    return GridHead(grid, rates, values, value_slopes=tilt, half_windows=windows, **shapes)


def head_of(kind, dtype):
    if kind == "scattered":
        centers = uniform(3000, 3, dtype=dtype)
        shapes = {"input_shapes": ((3,),), "output_shape": (2,)}
        powers, tilt = 1e-3 * uniform(3000, seed=2, dtype=dtype), uniform(3000, 2, 3, seed=3, dtype=dtype)
        values = uniform(3000, 2, seed=1, dtype=dtype)
        return ScatteredHead(centers, 6 * 3000 ** (2 / 3), values, powers=powers, value_slopes=tilt, **shapes)
    if kind == "train":
        grid = ProductGrid.uniform(Box([0.0] * 4, [1.0] * 4), 8)
        cores = [uniform(a, 8, b, seed=a + b, dtype=dtype) / 2 for a, b in ((1, 5), (5, 6), (6, 4), (4, 2))]
        return TrainHead(grid, 64.0, cores, input_shapes=((4,),), output_shape=(2,))
    if kind == "window":
        return grid_of(dtype, (20, 30, 25), 8.0, 2, outputs=2, slopes=True)
    return grid_of(dtype, (9, 7, 8), 0.7, 9)


KINDS = ["scattered", "train", "window", "fitted"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, on its own use of itself
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_head_gives_the_same_on_both_devices(kind, dtype):
    head, z = head_of(kind, dtype), None
    z = uniform(5000, head.dimension, seed=9, dtype=dtype)
    here = head(z)
    there = head.to("cuda")
    found = there(z.cuda())
    assert found.is_cuda and torch.allclose(found.cpu(), here, rtol=0, atol=LIMIT[dtype])
    assert torch.equal(there(z.cuda()), found)  # the same bits again
    compiled = torch.compile(there, fullgraph=True)
    assert torch.allclose(compiled(z.cuda()), found, rtol=0, atol=LIMIT[dtype])


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_agree_on_both_devices(kind):
    found = []
    for device in ("cpu", "cuda"):
        head = head_of(kind, torch.float64).to(device).unfreeze()
        z = uniform(2000, head.dimension, seed=9).to(device).requires_grad_()
        (head(z) * torch.linspace(-1, 1, 2000, dtype=torch.float64, device=device)[:, None]).sum().backward()
        found.append([z.grad.cpu(), *(p.grad.cpu() for p in head.parameters())])
    for here, there in zip(*found):
        assert torch.allclose(here, there, rtol=1e-8, atol=1e-9 * float(here.abs().max()))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("m", [1, 2, 3, 6, 10])
def test_attend_stays_within_its_bound(m, dtype):
    keys, queries = uniform(2500, m, dtype=dtype).cuda(), (1.4 * uniform(1500, m, seed=1, dtype=dtype) - 0.2).cuda()
    values = torch.sin(5 * keys).sum(dim=1, keepdim=True)
    rate = float(torch.tensor(6 * 2500 ** (2 / m), dtype=dtype))
    queries[3] = torch.nan
    found = pa.attend(queries, keys, values, inverse_temperature=rate, tolerance=1e-7)
    scores = -rate / 2 * (queries.double()[:, None] - keys.double()).square().sum(dim=2)
    expected = torch.softmax(scores, dim=1) @ values.double()
    assert found.output[3].isnan().all() and found.output.isnan().sum() == 1
    error = (found.output.double() - expected).abs().amax(dim=1)
    rest = torch.arange(1500, device="cuda") != 3
    assert (error[rest] <= found.bound[rest]).all()


def test_ramps_on_both_devices():
    slopes, offsets = torch.tensor([[1.0, -1.0]], dtype=torch.float64), torch.tensor([0.1], dtype=torch.float64)
    ramp = RampHead(slopes, offsets, ends=(0.0, 1.0), anchors=50, sharpness=8.0, half_window=4, output=(0, 1))
    x = uniform(4, 7, 2)
    assert torch.allclose(ramp(x), ramp.to("cuda")(x.cuda()).cpu(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_the_current_stream_is_used(kind):
    """The input is written late on a side stream; a kernel on another stream would read it too early."""
    head = head_of(kind, torch.float64).to("cuda")
    z = uniform(4000, head.dimension, seed=9).cuda()
    expected, slow = head(z), torch.rand(4096, 4096, device="cuda")
    late = torch.zeros_like(z)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(20):
            slow = torch.nn.functional.normalize(slow @ slow)
        late.copy_(z)
        found = head(late)
    side.synchronize()
    assert torch.equal(found, expected)


def test_deterministic_gradients_on_request():
    head = head_of("window", torch.float32).to("cuda").unfreeze()
    z, found = uniform(20_000, 3, seed=9, dtype=torch.float32).cuda(), []
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(2):
            head.zero_grad()
            head(z).sum().backward()
            found.append([p.grad.clone() for p in head.parameters()])
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(*found))
