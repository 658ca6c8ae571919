"""On a GPU heads stay within their certificates, whatever torch is set to. The last results are in docs/certificates.md."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch

import partita as pa

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
POINTS = 10**6
CASES = {
    "fitted, float32": ("sin(3*x0) + x0*cos(2*x1)", 2, {"tolerance": 5e-4, "method": "fitted", "dtype": torch.float32}),
    "fitted, float64": ("exp(x0*x1)*cos(4*x0 - x1)", 2, {"tolerance": 1e-9, "method": "fitted"}),
    "hard, float32": ("tanh(x0 + 2*x1)", 2, {"tolerance": 0.05, "method": "hard", "dtype": torch.float32}),
    "affine, float32": ("sin(3*x0)*x1", 2, {"tolerance": 1e-2, "method": "affine", "dtype": torch.float32}),
    "pieces, float32": ("abs(x0 + 0.7*x1 - 0.1)", 2, {"tolerance": 1e-2, "method": "pieces", "dtype": torch.float32}),
}


def exact(name: str, z: np.ndarray) -> np.ndarray:
    x, y = z[:, 0], z[:, 1]
    return {
        "fitted, float32": lambda: np.sin(3 * x) + x * np.cos(2 * y),
        "fitted, float64": lambda: np.exp(x * y) * np.cos(4 * x - y),
        "hard, float32": lambda: np.tanh(x + 2 * y),
        "affine, float32": lambda: np.sin(3 * x) * y,
        "pieces, float32": lambda: np.abs(x + 0.7 * y - 0.1),
    }[name]()


@contextlib.contextmanager
def hostile_settings():
    """TF32 products and autocast, as a training loop may have switched them on."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            yield
    finally:
        torch.set_float32_matmul_precision(before)


def worst_error(name: str) -> tuple[float, float, torch.dtype]:
    """The largest error of c on the GPU at 10⁶ points, corners included, its bound, and the dtype of what it returned."""
    text, m, options = CASES[name]
    c = pa.compile(text, pa.Box([-1] * m, [1] * m), **options)
    c.head.to("cuda")
    z = np.random.default_rng(5).uniform(-1, 1, (POINTS, m))
    z[:4] = [[-1, -1], [-1, 1], [1, -1], [1, 1]]
    with hostile_settings():
        out = c(torch.from_numpy(z).cuda())
    assert out.device.type == "cuda" and c.error_bound < np.inf
    return float(np.abs(out.double().cpu().numpy() - exact(name, z)).max()), c.error_bound, out.dtype


def report(name: str) -> str:
    """One line for docs/certificates.md."""
    error, bound, _ = worst_error(name)
    return f"{'holds' if error <= bound else 'VIOLATED'}: worst of 10⁶ points {error:.4g}, bound {bound:.4g}"


@pytest.mark.parametrize("name", CASES)
def test_the_bound_holds_on_the_gpu_with_autocast_and_tf32_switched_on_outside(name):
    error, bound, dtype = worst_error(name)
    assert error <= bound and dtype == CASES[name][2].get("dtype", torch.float64)


def test_arrays_go_to_the_head_and_come_back():
    c = pa.compile("2*x", pa.Box([0], [1]), tolerance=0.15, method="hard")
    c.head.to("cuda")
    assert isinstance(c([[0.5]]), np.ndarray) and abs(c([[0.5]])[0] - 1) <= c.error_bound
    with pytest.raises(pa.errors.UnsupportedError, match="found the devices"):
        c(torch.zeros(1, 1))
    assert not c.is_changed


def test_without_the_guard_tf32_would_be_noticed(monkeypatch):
    """Negative control: the fitted float32 head as plain matrix products, cut to TF32, leaves its bound."""
    from partita.heads import GridHead
    from partita.kernels import grid_torch

    monkeypatch.setattr(GridHead, "evaluate", lambda head, z: grid_torch.grid_sum(z, head.operands))
    error, bound, _ = worst_error("fitted, float32")
    assert error > bound
