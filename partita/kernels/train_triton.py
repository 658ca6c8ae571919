"""The sum of a tensor-train head and its gradients on CUDA devices, as Triton kernels; float32 and float64.

One launch per axis multiplies the row vector of every query by its averaged matrix, `row ← Σ_k w_k(x)·(row·G[k])`. The rows lie in
memory as `(rank, n)`, for some queries at a time.

Differences are centred, the exponential is `triton_code.power` (see `grid_triton` for what it adds to a score), and the weights are
divided by their sum after the sum over k, so that a term passes through at most `P_i r_{i−1} + 8` roundings per axis. Products keep
full precision: `input_precision="ieee"`, no TF32. Gradients, about which no certificate speaks, take three products of tensor cores
for one of float32; `benchmarks/speed.py --gpu` prints their errors. Nothing is added atomically, so the same batch gives the same
bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from partita.kernels.triton_code import launch, power

__all__ = ["gradients_on_device", "sum_on_device"]

_AT_ONCE = 1 << 26  # numbers held by one step
_LEAST_SIDE = 16  # of the matrices that `tl.dot` multiplies
_MOST_SIDE = 64
_BLOCK = 64  # queries of a program
_PROGRAMS = 132 * 4
_GRADIENTS = "tf32x3"  # three products of tensor cores for one of float32


@triton.jit
def _axis(points, centers, rates, axis, first, query, inside, count, M: tl.constexpr):
    """Coordinate x of the queries on one axis, R/2, and the least of `½R(x − c)²`."""
    x = tl.load(points + first * M + (query * M + axis), mask=inside, other=0.0)
    half = tl.load(rates + axis) * 0.5
    d = x - tl.load(centers)
    least = half * d * d
    for k in range(1, count):
        d = x - tl.load(centers + k)
        least = tl.minimum(least, half * d * d)
    return x, half, least


@triton.jit(do_not_specialize=["axis"])
def _step(
    points, centers, rates, core, rows, out, n, axis, count, left, right,
    M: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, HALVINGS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`out[s, n] = Σ_k w_k Σ_r rows[r, n]·core[r, k, s]`, for RIGHT of the s."""
    first = tl.program_id(0).to(tl.int64) * BLOCK
    query = tl.arange(0, BLOCK)[:, None]
    inside = query < tl.minimum(n - first, BLOCK).to(tl.int32)
    s = tl.program_id(1) * RIGHT + tl.arange(0, RIGHT)[None, :]
    x, half, least = _axis(points, centers, rates, axis, first, query, inside, count, M)
    mass = x - x  # NaN if x is not finite
    total = tl.zeros([BLOCK, RIGHT], out.dtype.element_ty)
    for begin in range(0, left, LEFT):
        r = begin + tl.arange(0, LEFT)
        row = tl.load(
            rows + r[None, :].to(tl.int64) * n + (first + query), mask=inside & (r[None, :] < left), other=0.0
        )
        matrix = core + r[:, None] * (count * right) + s
        there = (r[:, None] < left) & (s < right)
        for k in range(count):
            d = x - tl.load(centers + k)
            e = power(least - half * d * d, HALVINGS)  # sums of unscaled weights could overflow
            if begin == 0:
                mass += e
            part = tl.load(matrix + k * right, mask=there, other=0.0)
            total = tl.dot(e * row, part, total, input_precision="ieee", out_dtype=total.dtype)
    tl.store(out + s.to(tl.int64) * n + (first + query), total * (1.0 / mass), mask=inside & (s < right))


@triton.jit(do_not_specialize=["axis"])
def _step_back(
    points, centers, rates, core, rows, above, below, slopes, norms, n, axis, count, left, right,
    M: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`below[r, n] = Σ_k w_k Σ_s core[r, k, s]·above[s, n]`, and the gradient of x,
    `R Σ_k w_k (Σ w d − d_k) Σ_r rows·v_k`, v_k the inner sum. `norms` keeps the least score and 1/Σ e.
    """
    first = tl.program_id(0).to(tl.int64) * BLOCK
    query = tl.arange(0, BLOCK)[:, None]
    inside = query < tl.minimum(n - first, BLOCK).to(tl.int32)
    x, half, least = _axis(points, centers, rates, axis, first, query, inside, count, M)
    mass = x - x
    moment = x - x
    for k in range(count):
        d = x - tl.load(centers + k)
        e = power(least - half * d * d, 0)
        mass += e
        moment += e * d
    scale = 1.0 / mass
    mean = moment * scale
    tl.store(norms + (first + query), least, mask=inside)
    tl.store(norms + n + (first + query), scale, mask=inside)
    slope = x - x
    for begin in range(0, left, LEFT):
        r = begin + tl.arange(0, LEFT)[None, :]
        total = tl.zeros([BLOCK, LEFT], core.dtype.element_ty)
        turned = tl.zeros([BLOCK, LEFT], core.dtype.element_ty)
        for start in range(0, right, RIGHT):
            s = start + tl.arange(0, RIGHT)
            top = tl.load(
                above + s[None, :].to(tl.int64) * n + (first + query), mask=inside & (s[None, :] < right), other=0.0
            )
            matrix = core + r * (count * right) + s[:, None]
            there = (r < left) & (s[:, None] < right)
            for k in range(count):
                d = x - tl.load(centers + k)
                e = power(least - half * d * d, 0)
                part = tl.load(matrix + k * right, mask=there, other=0.0)
                v = tl.dot(e * top, part, input_precision=PRECISION, out_dtype=total.dtype)
                total += v
                turned += (mean - d) * v
        there = inside & (r < left)
        row = tl.load(rows + r.to(tl.int64) * n + (first + query), mask=there, other=0.0)
        slope += tl.sum(row * turned, axis=1, keep_dims=True)
        tl.store(below + r.to(tl.int64) * n + (first + query), total * scale, mask=there)
    tl.store(slopes + (first + query) * M + axis, 2 * half * slope * scale, mask=inside)


@triton.jit(do_not_specialize=["axis"])
def _core_block(
    points, centers, rates, rows, above, norms, out, n, axis, left, right,
    M: tl.constexpr, COUNT: tl.constexpr, LEFT: tl.constexpr, LEFTS: tl.constexpr, RIGHT: tl.constexpr,
    TOGETHER: tl.constexpr, PARTS: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A part's share of `Σ_n w_k rows[r, n]·above[s, n]`, for TOGETHER of the k, LEFT of the r and RIGHT of the s."""
    part = tl.program_id(0)
    k = tl.program_id(1) // LEFTS * TOGETHER + tl.arange(0, TOGETHER)
    r = tl.program_id(1) % LEFTS * LEFT + tl.arange(0, LEFT)
    s = tl.program_id(2) * RIGHT + tl.arange(0, RIGHT)[None, :]
    half = tl.load(rates + axis) * 0.5
    center = tl.load(centers + tl.minimum(k, COUNT - 1))[:, None]
    total = tl.zeros([TOGETHER * LEFT, RIGHT], out.dtype.element_ty)
    first = part.to(tl.int64) * BLOCK
    while first < n:
        query = tl.arange(0, BLOCK)[None, :]
        inside = query < tl.minimum(n - first, BLOCK).to(tl.int32)
        d = tl.load(points + first * M + (query * M + axis), mask=inside, other=0.0) - center
        least = tl.load(norms + (first + query), mask=inside, other=0.0)
        scale = tl.load(norms + n + (first + query), mask=inside, other=0.0)
        w = power(least - half * d * d, 0) * scale
        row = tl.load(
            rows + r[:, None].to(tl.int64) * n + (first + query), mask=inside & (r[:, None] < left), other=0.0
        )
        spread = tl.reshape(w[:, None, :] * row[None, :, :], [TOGETHER * LEFT, BLOCK])
        query = tl.arange(0, BLOCK)[:, None]
        inside = query < tl.minimum(n - first, BLOCK).to(tl.int32)
        top = tl.load(above + s.to(tl.int64) * n + (first + query), mask=inside & (s < right), other=0.0)
        total = tl.dot(spread, top, total, input_precision=PRECISION, out_dtype=total.dtype)
        first += PARTS * BLOCK
    line = tl.reshape(r[None, :] * COUNT + k[:, None], [TOGETHER * LEFT, 1])
    there = tl.reshape((r[None, :] < left) & (k[:, None] < COUNT), [TOGETHER * LEFT, 1])
    at = (part * left).to(tl.int64) * COUNT + line
    tl.store(out + at * right + s, total, mask=there & (s < right))


def _side(rank: int) -> int:
    return min(max(1 << (rank - 1).bit_length(), _LEAST_SIDE), _MOST_SIDE)


class _Train:
    """The arguments that do not change from query to query."""

    def __init__(self, centers: Sequence[Tensor], rates: Tensor, cores: Sequence[Tensor]) -> None:
        self.centers, self.rates = [c.contiguous() for c in centers], rates.contiguous()
        self.cores = [core.contiguous() for core in cores]

    def chunks(self, n: int) -> Iterator[slice]:
        """Parts of the queries whose rows are held at once."""
        held = sum(core.shape[0] + core.shape[2] for core in self.cores)
        step = max(1, _AT_ONCE // held)
        return (slice(begin, min(begin + step, n)) for begin in range(0, n, step))

    def step(self, points: Tensor, axis: int, rows: Tensor) -> Tensor:
        (left, count, right), n = self.cores[axis].shape, len(points)
        out = torch.empty((right, n), dtype=points.dtype, device=points.device)
        side = _side(right)
        launch(
            _step,
            (triton.cdiv(n, _BLOCK), triton.cdiv(right, side)),
            *(points, self.centers[axis], self.rates, self.cores[axis], rows, out, n, axis, count, left, right),
            M=points.shape[1],
            LEFT=_side(left),
            RIGHT=side,
            HALVINGS=(count - 1).bit_length(),
            BLOCK=_BLOCK,
            num_warps=4,
        )
        return out

    def step_back(
        self, points: Tensor, axis: int, rows: Tensor, above: Tensor, slopes: Tensor
    ) -> tuple[Tensor, Tensor]:
        """What lies before an axis, from what lies behind it; and what `core_gradient` needs to know of the weights."""
        (left, count, right), n = self.cores[axis].shape, len(points)
        below = torch.empty((left, n), dtype=points.dtype, device=points.device)
        norms = torch.empty((2, n), dtype=points.dtype, device=points.device)
        launch(
            _step_back,
            (triton.cdiv(n, _BLOCK),),
            *(points, self.centers[axis], self.rates, self.cores[axis], rows, above, below, slopes, norms),
            *(n, axis, count, left, right),
            M=points.shape[1],
            LEFT=_side(left),
            RIGHT=_side(right),
            PRECISION=_GRADIENTS,
            BLOCK=_BLOCK,
            num_warps=4,
        )
        return below, norms

    def rows(self, points: Tensor) -> list[Tensor]:
        """The row vectors before axis 0, 1, …"""
        rows = [points.new_ones(1, len(points))]
        for axis in range(len(self.cores) - 1):
            rows.append(self.step(points, axis, rows[-1]))
        return rows

    def core_gradient(self, points: Tensor, axis: int, rows: Tensor, above: Tensor, norms: Tensor) -> Tensor:
        """`Σ_n w_k rows[r, n]·above[s, n]`, `(left, count, right)`."""
        (left, count, right), n = self.cores[axis].shape, len(points)
        sides, together = (_side(left), _side(right)), max(1, _MOST_SIDE // _side(left))
        blocks = triton.cdiv(count, together) * triton.cdiv(left, sides[0]), triton.cdiv(right, sides[1])
        parts = max(1, min(triton.cdiv(n, _BLOCK), _PROGRAMS // (blocks[0] * blocks[1])))
        sums = points.new_empty(parts, left, count, right)
        launch(
            _core_block,
            (parts, *blocks),
            *(points, self.centers[axis], self.rates, rows, above, norms, sums, n, axis, left, right),
            M=points.shape[1],
            COUNT=count,
            LEFT=sides[0],
            LEFTS=triton.cdiv(left, sides[0]),
            RIGHT=sides[1],
            TOGETHER=together,
            PARTS=parts,
            PRECISION=_GRADIENTS,
            BLOCK=_BLOCK,
            num_warps=4,
        )
        return sums.sum(dim=0)


def sum_on_device(points: Tensor, centers: Sequence[Tensor], rates: Tensor, cores: Sequence[Tensor]) -> Tensor:
    """`Π_i (Σ_k w_{i,k}(x_i) G_i[k])`, `w_i` the softmax of `−R_i(x_i − c_i)²/2` over all centers of axis i.

    Args, on one CUDA device and of one dtype, float32 or float64:
        points: `(n, m)`.
        centers: of each axis, `(P_i,)`.
        rates: R_i, `(m,)`.
        cores: `(r_{i−1}, P_i, r_i)`, `r_0 = 1`, `r_m` the number of outputs.

    Returns:
        `(n, r_m)`.
    """
    train, points = _Train(centers, rates, cores), points.contiguous()
    out = points.new_empty(len(points), cores[-1].shape[2])
    for part in train.chunks(len(points)):
        rows = points.new_ones(1, part.stop - part.start)
        for axis in range(len(cores)):
            rows = train.step(points[part], axis, rows)
        out[part] = rows.T
    return out


def gradients_on_device(
    grad: Tensor,
    points: Tensor,
    centers: Sequence[Tensor],
    rates: Tensor,
    cores: Sequence[Tensor],
    needs: Sequence[bool] = (True, True),
) -> tuple[Tensor, list[Tensor]]:
    """The gradients of `Σ grad·sum_on_device(…)` with respect to the points and to the cores; empty where not needed.

    Args:
        grad: `(n, out)`.
        points, centers, rates, cores: as in `sum_on_device`.
        needs: whether the points and the cores need theirs.

    No atomic additions: the same batch gives the same bits.
    """
    train, points = _Train(centers, rates, cores), points.contiguous()
    slopes = torch.empty_like(points)
    of_cores = [torch.zeros_like(core) for core in train.cores] if needs[1] else []
    for part in train.chunks(len(points)):
        some, above = points[part], grad[part].T.contiguous()
        rows = train.rows(some)
        for axis in range(len(cores) - 1, -1, -1):
            below, norms = train.step_back(some, axis, rows[axis], above, slopes[part])
            if needs[1]:
                of_cores[axis] += train.core_gradient(some, axis, rows[axis], above, norms)
            above = below
    unused = [points.new_empty(0) for _ in range(len(cores) + 1)]  # an operator's results must not be one tensor
    return slopes if needs[0] else unused[0], of_cores if needs[1] else unused[1:]
