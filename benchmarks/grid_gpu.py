"""Product grids, tensor trains and ramps on a CUDA device: queries a second, errors against float64, backward over forward.

    python3 benchmarks/grid_gpu.py [seconds]

Every case draws fresh numbers. Times are medians of five runs between CUDA events, bricks included; "sorted" means that the queries
come in the order of their cells. The last lines give the exponential's worst errors on this device.
"""

from __future__ import annotations

import itertools
import math
import sys
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from partita.kernels import grid_triton, ramp_triton, train_triton
from partita.kernels.grid_torch import GridOperands, grid_sum
from partita.kernels.train_torch import TrainOperands, train_sum
from partita.kernels.triton_code import power

CHECKED = 1 << 12


def milliseconds(run: Callable[[], object], repeats: int = 5) -> float:
    """The median time of `run` on the device, after one run to compile."""
    run()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times)[repeats // 2]


def operands(
    counts: Sequence[int], widths: Sequence[int], dtype: torch.dtype, kappa: float, outs: int = 1
) -> GridOperands:
    """Equally spaced centers on [−1, 1] with sharpness κ, random values."""
    centers = [torch.linspace(-1, 1, c, dtype=torch.float64).to(dtype).cuda() for c in counts]
    rates = torch.tensor([kappa * ((c - 1) / 2) ** 2 for c in counts], dtype=dtype, device="cuda")
    values = torch.randn(math.prod(counts), outs, dtype=dtype, device="cuda")
    return GridOperands(centers, rates, list(widths), values, None, None)


def uniform_queries(n: int, counts: Sequence[int], dtype: torch.dtype, *, in_order: bool) -> Tensor:
    x = torch.rand(n, len(counts), dtype=dtype, device="cuda") * 2 - 1
    if not in_order:
        return x
    cell = torch.zeros(n, dtype=torch.long, device="cuda")
    for i, count in enumerate(counts):
        cell = cell * count + ((x[:, i] + 1) * ((count - 1) / 2)).floor().long().clamp(0, count - 2)
    return x[cell.argsort()].contiguous()


def in_float64(grid: GridOperands) -> GridOperands:
    return grid._replace(
        centers=[c.double() for c in grid.centers], rates=grid.rates.double(), values=grid.values.double()
    )


def grid_row(name: str, grid: GridOperands, n: int, *, in_order: bool = False) -> str:
    """Speed and error of the sum and of both gradients."""
    x = uniform_queries(n, grid.counts, grid.values.dtype, in_order=in_order)
    grad = torch.randn(n, grid.values.shape[1], dtype=x.dtype, device="cuda")
    few = x[:CHECKED].double().requires_grad_()
    exact = grid_sum(few, in_float64(grid))
    (slopes,) = torch.autograd.grad((exact * grad[:CHECKED].double()).sum(), few)
    found = grid_triton.sum_on_device(x, *grid)
    error = (found[:CHECKED] - exact).abs().max().item()
    same = torch.equal(found, grid_triton.sum_on_device(x, *grid))
    of_points, of_values, _ = grid_triton.gradients_on_device(grad, x, *grid, [True, True, False])
    off = ((of_points[:CHECKED] - slopes).abs().max() / slopes.abs().max()).item()
    adjoint = (of_values.double() * grid.values.double()).sum().item(), (found.double() * grad.double()).sum().item()
    scale = (found.double() * grad.double()).abs().sum().item()
    del found, of_points, of_values
    forward = milliseconds(lambda: grid_triton.sum_on_device(x, *grid))

    def backward(*needs: bool) -> float:
        return milliseconds(lambda: grid_triton.gradients_on_device(grad, x, *grid, [*needs, False])) / forward

    shares = [backward(True, False), backward(False, True), backward(True, True)]
    return (
        f"{name:22s} {'sorted' if in_order else 'random'} {n / forward / 1e6:6.2f} Gq/s  error {error:.1e}  same bits {same}  "
        f"backward: points {shares[0]:.2f}, values {shares[1]:.2f}, both {shares[2]:.2f} times forward  "
        f"error {off:.1e}, {abs(adjoint[0] - adjoint[1]) / scale:.0e}"
    )


def train_row(dtype: torch.dtype, rank: int, m: int, count: int = 32, n: int = 1 << 18) -> str:
    ranks = [1, *[rank] * (m - 1), 1]
    centers = [torch.linspace(-1, 1, count, dtype=dtype, device="cuda") for _ in range(m)]
    cores = [torch.randn(a, count, b, dtype=dtype, device="cuda") / rank**0.5 for a, b in itertools.pairwise(ranks)]
    train = TrainOperands(centers, torch.full((m,), 200.0, dtype=dtype, device="cuda"), cores)
    wide = TrainOperands([c.double() for c in centers], train.rates.double(), [c.double() for c in cores])
    x = torch.rand(n, m, dtype=dtype, device="cuda") * 2 - 1
    few = x[:CHECKED].double().requires_grad_()
    exact = train_sum(few, wide)
    found = train_triton.sum_on_device(x, *train)
    grad = torch.randn_like(found)
    (slopes,) = torch.autograd.grad((exact * grad[:CHECKED].double()).sum(), few)
    off = train_triton.gradients_on_device(grad[:CHECKED], x[:CHECKED], *train)[0] - slopes
    forward = milliseconds(lambda: train_triton.sum_on_device(x, *train))
    backward = milliseconds(lambda: train_triton.gradients_on_device(grad, x, *train))
    plain = milliseconds(lambda: train_sum(x, train))
    work = 2 * n * sum(a * count * b for a, b in itertools.pairwise(ranks)) / forward / 1e9
    error = ((found[:CHECKED] - exact).abs().max() / exact.abs().max()).item()
    slope_error = (off.abs().max() / slopes.abs().max()).item()
    return (
        f"train {str(dtype)[6:]} rank {rank} m {m}: {n / forward / 1e3:.0f} Mq/s, {work:.1f} TFLOP/s, torch {plain / forward:.2f} "
        f"and backward {backward / forward:.2f} times forward  error {error:.1e}, {slope_error:.1e}"
    )


def ramp_row(dtype: torch.dtype, n: int = 1 << 25) -> str:
    low, spacing, sharpness = (torch.tensor(v, dtype=dtype, device="cuda") for v in (-1.0, 0.02, 8.0))
    u = torch.randn(n, dtype=dtype, device="cuda")
    forward = milliseconds(lambda: ramp_triton.sum_on_device(u, low, spacing, sharpness, 100, 6))
    backward = milliseconds(lambda: ramp_triton.gradients_on_device(u, u, low, spacing, sharpness, 100, 6))
    return f"ramp {str(dtype)[6:]} width 6: {n / forward / 1e6:.1f} Gq/s, backward {backward / forward:.2f}"


@triton.jit
def _powers(t, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, power(tl.load(t + at, mask=at < n, other=0.0), 0), mask=at < n)


def exponential_row(dtype: torch.dtype) -> str:
    """The worst of `error/u − 1.5|t|` over the range in which e^t is normal: what is beyond the rounding of the score."""
    unit, far = torch.finfo(dtype).eps / 2, 87.0 if dtype == torch.float32 else 689.0
    t = -torch.rand(1 << 22, dtype=dtype, device="cuda") * far
    t[: 1 << 20] /= far
    found = torch.empty_like(t)
    _powers[(1 << 12,)](t, found, t.numel(), BLOCK=1024)
    exact = np.exp(t.cpu().numpy().astype(np.longdouble))
    off = np.abs((found.cpu().numpy() - exact) / exact) / unit
    near = np.abs(t.cpu().numpy()) < 1
    beyond = (off - 1.5 * np.abs(t.cpu().numpy())).max()
    return f"e^t {str(dtype)[6:]}: within {off[near].max():.2f} u for |t| < 1, {beyond:.2f} u + 1.5|t| u anywhere"


def rows() -> list[Callable[[], str]]:
    single, double, many = torch.float32, torch.float64, 1 << 25
    cube, plane = (256,) * 3, (1024,) * 2

    def case(
        name: str, counts: Sequence[int], widths: Sequence[int], dtype: torch.dtype, kappa: float, n: int
    ) -> Callable[..., str]:
        return lambda **order: grid_row(name, operands(counts, widths, dtype, kappa), n, **order)

    w4, w2 = (
        case("256^3 window 4", cube, (4,) * 3, single, 8.0, many),
        case("256^3 window 2", cube, (2,) * 3, single, 30.0, many),
    )
    w6 = case("256^3 window 6", cube, (6,) * 3, single, 3.0, many // 2)
    flat = case("1024^2 window 4", plane, (4,) * 2, single, 8.0, many)
    line = case("64 keys, window 24, f64", (64,), (24,), double, 1.0, many)
    square = case("8x8 keys, whole, f64", (8, 8), (8, 8), double, 1.0, many)
    found: list[Callable[[], str]] = [lambda: w4(), lambda: w4(in_order=True), lambda: w2(), lambda: w2(in_order=True)]
    found += [lambda: line(), lambda: square()]
    found += [lambda: train_row(single, 16, 10), lambda: train_row(double, 16, 10), lambda: train_row(single, 64, 6)]
    found += [
        lambda: exponential_row(single),
        lambda: exponential_row(double),
        lambda: ramp_row(single),
        lambda: ramp_row(double),
    ]
    found += [lambda: flat(), lambda: w6(), lambda: w6(in_order=True), lambda: train_row(single, 8, 10)]
    found += [lambda: case("64 keys, whole, f64", (64,), (64,), double, 1.0, many)()]
    found += [lambda: case("12^3 keys, whole, f64", (12,) * 3, (12,) * 3, double, 1.0, 1 << 22)()]
    return found


def main(limit: float) -> None:
    begin, lines = time.time(), []
    for row in rows():
        if time.time() - begin > limit:
            lines.append("… (out of time)")
            break
        try:
            lines.append(row())
        except Exception as error:  # one case that fails does not end the others
            lines.append(f"FAILED {type(error).__name__}: {str(error)[-300:]}")
        print(f"[{time.time() - begin:.0f} s] {lines[-1]}", flush=True)
    print("\n".join(["", torch.cuda.get_device_name(), *lines]))


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else math.inf)
