"""Softmax attention over scattered points in Triton: against dense float64 sums, under Triton's interpreter or on a GPU."""

from __future__ import annotations

import math
import os
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

CUDA = torch.cuda.is_available()
if find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)
if not CUDA:
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

from partita.kernels import scattered_triton as device  # noqa: E402

DEVICE = "cuda" if CUDA else "cpu"
pytestmark = pytest.mark.filterwarnings("ignore")  # the interpreter's numpy warns of infinities that are meant


@pytest.fixture
def small_superblocks(monkeypatch):
    """Superblocks of 32 points: several of them among few points."""
    monkeypatch.setattr(device, "SUPER", 2)


def dense(
    q: Tensor, k: Tensor, v: Tensor, p: Tensor | None = None, J: Tensor | None = None, rate: Tensor | float = 1.0
) -> tuple[Tensor, Tensor]:
    """Output and logarithm of the sum over all keys."""
    d = q[:, None] - k[None]
    x = (d * d).sum(-1)
    s = -rate * (x if p is None else x - p) / 2
    w = s.softmax(1)
    out = w @ v
    if J is not None:
        out = out + torch.einsum("ij,jod,ijd->io", w, J, d)
    return out, s.logsumexp(1)


def doubled(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if t is None else t.double() for t in tensors]


class Case:
    """Random points, values, and powers and slopes where asked for."""

    def __init__(
        self, queries: int, keys: int, m: int, outs: int = 1, *, extra: str = "", dtype: torch.dtype = torch.float64
    ):
        torch.manual_seed(queries + 7 * keys + m)
        options = {"dtype": dtype, "device": DEVICE}
        self.q, self.k = torch.rand(queries, m, **options), torch.rand(keys, m, **options)
        self.v = torch.randn(keys, outs, **options)
        self.p = 0.02 * torch.randn(keys, **options) if "p" in extra else None
        self.J = torch.randn(keys, outs, m, **options) if "J" in extra else None

    def exact(self, rate: float) -> tuple[Tensor, Tensor]:
        return dense(*doubled(self.q, self.k, self.v, self.p, self.J), rate)

    def summed(self, rate: float, cut: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return device.sum_on_device(self.q, device.build_index(self.k, self.p), self.v, self.J, rate, cut)

    def gradient_errors(self, rate: float, cut: float) -> list[float]:
        """Of queries, keys, values, powers, slopes and rate, over the largest entry of each."""
        g, g_lse = torch.randn(len(self.q), self.v.shape[1]).to(self.q), torch.randn(len(self.q)).to(self.q)
        index = device.build_index(self.k, self.p)
        out, lse, *_ = device.sum_on_device(self.q, index, self.v, self.J, rate, cut)
        needs = [True, True, True, self.p is not None, self.J is not None, True]
        found = device.gradients_on_device(g, g_lse, self.q, index, self.v, self.J, rate, cut, out, lse, needs)
        leaves = doubled(self.q, self.k, self.v, self.p, self.J, torch.tensor(rate, device=DEVICE, dtype=torch.float64))
        leaves = [None if t is None else t.clone().requires_grad_() for t in leaves]
        ref, ref_lse = dense(*leaves)
        ((ref * g).sum() + (ref_lse * g_lse).sum()).backward()
        assert [f is not None for f in found] == needs
        return [float((f - t.grad).abs().max() / t.grad.abs().max()) for f, t in zip(found, leaves) if f is not None]


SMALL = {
    "one axis": (Case(20, 600, 1, extra="J"), 1e6),
    "two axes, powers": (Case(20, 50, 2, 2, extra="p"), 300.0),
    "three axes, float32": (Case(33, 130, 3, dtype=torch.float32), 200.0),
    "all, float32": (Case(17, 40, 2, 3, extra="pJ", dtype=torch.float32), 30.0),
    "nine axes": (Case(4, 9, 9, extra="pJ"), 5.0),
    "five outputs": (Case(7, 20, 2, 5, extra="p"), 40.0),
}


@pytest.mark.parametrize("name", SMALL)
def test_sums_equal_the_dense_ones(name):
    case, rate = SMALL[name]
    out, lse, dropped, depth = case.summed(rate, 45.0)
    ref, size = case.exact(rate)
    close = 3e-6 if out.dtype == torch.float32 else 1e-12
    assert (out - ref).abs().max() < close
    assert (lse - size).abs().max() < close * (1 + size.abs().max())
    assert (dropped < -30).all()
    assert (depth >= 6).all()


@pytest.mark.parametrize("name", ["two axes, powers", "all, float32", "nine axes", "five outputs"])
def test_gradients_equal_those_of_the_dense_sum(name):
    case, rate = SMALL[name]
    close = 2e-5 if case.q.dtype == torch.float32 else 1e-12
    errors = case.gradient_errors(rate, 45.0)
    assert max(errors) < close, errors


def test_lists_over_several_superblocks(small_superblocks):
    case = Case(30, 150, 1, extra="p")
    case.q, case.p = 0.4 + 0.1 * case.q, case.p * 1e-3
    out, lse, dropped, _ = case.summed(2e4, 30.0)
    ref, size = case.exact(2e4)
    assert torch.isfinite(dropped).all()  # blocks were left out
    assert (out - ref).abs().max() < 1e-9 and (lse - size).abs().max() < 1e-9
    assert max(case.gradient_errors(2e4, 45.0)) < 1e-11


def test_what_is_left_out_is_bounded(small_superblocks):
    """With a small cut whole blocks go: the error stays below the bound, and there is one."""
    case = Case(30, 400, 1)
    case.q = 0.4 + 0.1 * case.q
    out, lse, dropped, _ = case.summed(5e4, 1.0)
    ref, size = case.exact(5e4)
    spread = case.v.max() - case.v.min()
    assert ((out - ref).abs()[:, 0] <= dropped.exp() * spread).all()
    assert (size - lse <= -torch.log1p(-dropped.exp().clamp(max=1)) + 1e-12).all()
    assert (out - ref).abs().max() > 1e-9  # something was left out
    assert (case.summed(5e4, 60.0)[0] - ref).abs().max() < 1e-12


def test_queries_that_are_not_finite_get_nan_and_harm_nobody():
    case = Case(30, 40, 2)
    clean = case.summed(500.0, 40.0)[0]
    case.q[[3, 17], 1] = math.nan
    case.q[5, 0] = math.inf
    out, lse, *_ = case.summed(500.0, 40.0)
    hit = ~case.q.isfinite().all(1)
    assert out[hit].isnan().all() and lse[hit].isnan().all()
    assert (out - clean)[~hit].abs().max() < 1e-12
    g = torch.ones_like(out)
    index = device.build_index(case.k, None)
    made = device.gradients_on_device(g, None, case.q, index, case.v, None, 500.0, 40.0, out, lse, [1, 1, 1, 0, 0, 0])
    assert made[0][hit].isnan().all() and made[0][~hit].isfinite().all()
    assert made[1].isfinite().all() and made[2].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rate", [1e-12, 1e12])
def test_extreme_temperatures(rate, dtype):
    case = Case(20, 40, 2, dtype=dtype)
    out = case.summed(rate, 40.0)[0]
    nearest = torch.cdist(case.q.double(), case.k.double()).argmin(1)
    expected = case.v[nearest] if rate > 1 else case.v.double().mean(0).expand(20, 1)
    assert (out - expected).abs().max() < 1e-6


def test_gradients_where_scores_are_large():
    """The logarithm of the sum in float32 says nothing about weights there."""
    case = Case(60, 30, 2, extra="p", dtype=torch.float32)
    errors = case.gradient_errors(1e10, 40.0)
    assert max(errors) < 1e-5, errors


@pytest.mark.parametrize("keys", ["one", "equal", "line", "clusters"])
def test_degenerate_keys(keys):
    case = Case(20, 60, 2)
    k, rate = {
        "one": (case.k[:1], 50.0),
        "equal": (torch.full_like(case.k, 0.3), 100.0),
        "line": (case.k[:, :1] * torch.tensor([1.0, -2.0]).to(case.k), 1e3),
        "clusters": (case.k[:3].repeat_interleave(20, 0) + 1e-6 * case.k, 1e4),
    }[keys]
    case.k, case.v = k, case.v[: len(k)]
    out, lse, *_ = case.summed(rate, 45.0)
    ref, size = case.exact(rate)
    assert (out - ref).abs().max() < 1e-11
    assert ((lse - size).abs() <= 1e-12 * (1 + size.abs())).all()


def test_no_queries():
    case = Case(1, 20, 2)
    case.q = case.q[:0]
    out, lse, dropped, depth = case.summed(10.0, 30.0)
    assert out.shape == (0, 1) and lse.shape == dropped.shape == depth.shape == (0,)


@pytest.mark.slow  # only under the interpreter
def test_chunks_and_parts_change_nothing_but_rounding(small_superblocks, monkeypatch):
    """Queries in chunks, lists in parts, outputs in groups: as with little memory."""
    case = Case(45, 150, 1, 5)
    case.q = 0.4 + 0.1 * case.q
    whole = case.summed(2e4, 45.0)
    assert torch.isfinite(whole[2]).all()
    for name, value in (("QUERIES", 40), ("ENTRIES", 4), ("ITEMS", 4)):
        monkeypatch.setattr(device, name, value)
    for one, other in zip(case.summed(2e4, 45.0)[:2], whole):
        assert (one - other).abs().max() < 1e-12
    monkeypatch.setattr(device, "ENTRIES", 1000)
    case.v = case.v[:, :1]
    assert max(case.gradient_errors(2e4, 45.0)) < 1e-12


@pytest.mark.parametrize("m, side", [(1, 16), (2, 8), (3, 4)])
def test_the_curve_goes_from_neighbour_to_neighbour(m, side):
    """A Hilbert curve through a lattice takes steps of one cell; a Morton curve would not."""
    axis = (torch.arange(side, device=DEVICE, dtype=torch.float64) + 0.5) / side
    cells = torch.cartesian_prod(*[axis] * m).reshape(-1, m)
    codes = device._codes(cells, torch.zeros(m).to(cells), torch.ones(m).to(cells))
    steps = cells[codes.argsort()].diff(dim=0).abs() * side
    assert torch.allclose(steps.sum(1), torch.ones(side**m - 1).to(steps))


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="no CUDA device")
@pytest.mark.parametrize("m", [2, 5, 8, 12])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_many_points_on_a_gpu(m, dtype):
    case = Case(3001, 20011, m, extra="p", dtype=dtype)
    case.p = case.p * 1e-2
    cut, close = (28.0, 3e-6) if dtype == torch.float32 else (48.0, 1e-12)
    rate = 6 * 20011 ** (2 / m)
    out, lse, dropped, _ = case.summed(rate, cut)
    assert (dropped < 10 - cut).all()
    assert torch.equal(out, case.summed(rate, cut)[0])
    case.q = case.q[:300]
    ref, size = case.exact(rate)
    assert (out[:300] - ref).abs().max() < close and (lse[:300] - size).abs().max() < 10 * close
    assert max(case.gradient_errors(rate, cut)) < 100 * close
