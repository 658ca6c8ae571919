"""The peers of benchmarks/speed.py: interpolators on tables, Chebyshev series, nearest neighbours, dense attention.

Each interpolator is built from values of f on a product of nodes of [−1, 1]^m. `counts` are the nodes per axis.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from numpy.polynomial import chebyshev
from speed_measure import Array, Job, largest

Function = Callable[..., Array]  # takes m arrays that broadcast
Counts = tuple[int, ...]
MOST_NUMBERS = 10**7


def installed(package: str) -> bool:
    """Whether it can be imported; nothing is imported."""
    return find_spec(package) is not None


def at_points(f: Function) -> Callable[[Array], Array]:
    """f of points `(n, m)`."""
    return lambda z: f(*z.T)


def on_product(f: Function, axes: list[Array]) -> Array:
    """Values on a product of nodes, row-major."""
    table = f(*np.meshgrid(*axes, indexing="ij", sparse=True))
    return np.array(np.broadcast_to(table, tuple(map(len, axes))), order="C")  # a copy: torch wants to write


def _uniform(counts: Counts) -> list[Array]:
    return [np.linspace(-1.0, 1.0, n) for n in counts]


# ---- interpolators on tables -----------------------------------------------------------------------


def scipy_linear(f: Function, counts: Counts) -> Job:
    """RegularGridInterpolator, linear."""
    from scipy.interpolate import RegularGridInterpolator

    axes = _uniform(counts)
    return Job(RegularGridInterpolator(axes, on_product(f, axes)))


def scipy_tensor_spline(degree: int) -> Callable[[Function, Counts], Job]:
    """NdBSpline, which RegularGridInterpolator(method="cubic") or "quintic" evaluates.

    The coefficients are solved for axis by axis. RegularGridInterpolator solves for all of them at once, by iterations that end at
    1e-6 and take minutes on large tables.
    """

    def make(f: Function, counts: Counts) -> Job:
        from scipy.interpolate import NdBSpline, make_interp_spline

        axes = _uniform(counts)
        table, knots = on_product(f, axes), []
        for i, x in enumerate(axes):
            spline = make_interp_spline(x, np.moveaxis(table, i, 0), k=degree)
            table = np.moveaxis(spline.c, 0, i)
            knots.append(spline.t)
        return Job(NdBSpline(tuple(knots), np.ascontiguousarray(table), degree))

    return make


def scipy_spline(degree: int) -> Callable[[Function, Counts], Job]:
    """RectBivariateSpline, 2-D."""

    def make(f: Function, counts: Counts) -> Job:
        from scipy.interpolate import RectBivariateSpline

        axes = _uniform(counts)
        peer = RectBivariateSpline(*axes, on_product(f, axes), kx=degree, ky=degree)
        return Job(lambda z: peer.ev(z[0], z[1]), _columns)

    return make


def _columns(z: Array) -> list[Array]:
    return [np.ascontiguousarray(x) for x in z.T]


def interpn_grid(kind: str) -> Callable[[Function, Counts], Job]:
    """interpn, compiled from Rust: Multilinear, Multicubic or MultiBspline on a regular grid."""

    def make(f: Function, counts: Counts) -> Job:
        import interpn

        table = on_product(f, _uniform(counts))
        starts, steps = np.full(len(counts), -1.0), np.array([2.0 / (n - 1) for n in counts])
        peer = getattr(interpn, f"{kind}Regular").new(list(counts), starts, steps, table.ravel())
        return Job(lambda given: peer.eval(*given), lambda z: (_columns(z), np.empty(len(z))))

    return make


def grid_sample(mode: str) -> Callable[[Function, Counts], Job]:
    """torch.nn.functional.grid_sample in float64, 2-D and 3-D."""

    def make(f: Function, counts: Counts) -> Job:
        table = torch.from_numpy(on_product(f, _uniform(counts)))[None, None]
        shape = (1,) * (len(counts) - 1)

        def prepare(z: Array) -> Any:
            return torch.from_numpy(np.ascontiguousarray(z[:, ::-1])).view(*shape, 1, len(z), len(counts))

        options = {"mode": mode, "padding_mode": "border", "align_corners": True}
        return Job(lambda z: torch.nn.functional.grid_sample(table, z, **options).reshape(-1), prepare)

    return make


# ---- Chebyshev series ------------------------------------------------------------------------------


def chebyshev_coefficients(f: Function, counts: Counts) -> Array:
    """Of the tensor interpolant at Chebyshev points."""
    nodes = [np.cos(np.pi * (np.arange(n) + 0.5) / n) for n in counts]
    table = on_product(f, nodes)
    for i, n in enumerate(counts):
        matrix = np.cos(np.outer(np.arange(n), np.arccos(nodes[i]))) * (2 / n)
        matrix[0] /= 2
        table = np.moveaxis(np.tensordot(matrix, table, axes=(1, i)), 0, i)
    return np.ascontiguousarray(table)


def chebyshev_recurrence(f: Function, counts: Counts) -> Job:
    """numpy's chebval: Clenshaw's recurrence on whole arrays."""
    coefficients = chebyshev_coefficients(f, counts)

    def run(z: list[Array]) -> Array:
        sums = coefficients
        for i, x in enumerate(z):
            sums = chebyshev.chebval(x, sums, tensor=i == 0)
        return sums

    return Job(run, _columns)


def chebyshev_products(f: Function, counts: Counts) -> Job:
    """numpy's chebvander and matrix products, in chunks that stay in the cache."""
    coefficients = chebyshev_coefficients(f, counts).reshape(counts[0], -1)
    step = max(1, (1 << 17) // coefficients.shape[1])

    def some(z: Array) -> Array:
        bases = [chebyshev.chebvander(x, n - 1) for x, n in zip(z.T, counts)]
        sums = bases[0] @ coefficients
        for basis in bases[1:]:
            sums = (basis[:, None, :] @ sums.reshape(len(z), basis.shape[1], -1))[:, 0]
        return sums[:, 0]

    return Job(lambda z: np.concatenate([some(z[k : k + step]) for k in range(0, len(z), step)]))


def chebyshev_compiled(f: Function, counts: Counts) -> Job:
    """The same sums in loops compiled by numba, axis after axis."""
    line, series = _compiled_series()
    coefficients, shape = chebyshev_coefficients(f, counts).ravel(), np.array(counts)
    if len(counts) == 1:
        return Job(lambda x: line(x, coefficients), lambda z: np.ascontiguousarray(z[:, 0]))
    return Job(lambda z: series(z, coefficients, shape), np.ascontiguousarray)


@functools.cache
def _compiled_series() -> tuple[Callable[..., Array], Callable[..., Array]]:
    """On a line by Clenshaw's recurrence, 64 queries side by side; else one query after the other."""
    import numba

    width = 64

    @numba.njit(fastmath=True)
    def line(x, coefficients):  # type: ignore[no-untyped-def]
        n, count = len(x), len(coefficients)
        out, at = np.empty(n), np.zeros(width)
        here, last = np.empty(width), np.empty(width)
        for start in range(0, n, width):
            size = min(width, n - start)
            at[:size] = x[start : start + size]
            here[:] = 0.0
            last[:] = 0.0
            for k in range(count - 1, 0, -1):
                c = coefficients[k]
                for q in range(width):
                    following = c + 2.0 * at[q] * here[q] - last[q]
                    last[q] = here[q]
                    here[q] = following
            for q in range(size):
                out[start + q] = coefficients[0] + at[q] * here[q] - last[q]
        return out

    @numba.njit(fastmath=True)
    def series(z, coefficients, counts):  # type: ignore[no-untyped-def]
        n, m = z.shape
        out = np.empty(n)
        sums = np.empty((2, len(coefficients) // counts[0]))
        basis = np.empty(max(2, counts.max()))
        for query in range(n):
            rest = len(coefficients)
            for i in range(m):
                count, x = counts[i], z[query, i]
                rest //= count
                basis[0], basis[1] = 1.0, x
                for k in range(2, count):
                    basis[k] = 2.0 * x * basis[k - 1] - basis[k - 2]
                table = coefficients if i == 0 else sums[(i - 1) % 2]
                if rest == 1:
                    total = 0.0
                    for k in range(count):
                        total += table[k] * basis[k]
                    sums[i % 2, 0] = total
                    continue
                target = sums[i % 2, :rest]
                target[:] = 0.0
                for k in range(count):
                    weight, row = basis[k], table[k * rest : (k + 1) * rest]
                    for j in range(rest):
                        target[j] += weight * row[j]
            out[query] = sums[(m - 1) % 2, 0]
        return out

    return line, series


# ---- the smallest table within a tolerance -----------------------------------------------------------


@dataclass
class Peer:
    """One way to evaluate f from a table. The errors that were measured are kept, by counts."""

    name: str
    family: str
    make: Callable[[Function, Counts], Job]
    least: int = 4  # nodes per axis
    each_axis: bool = False  # counts may differ between the axes
    errors: dict[Counts, float] = field(default_factory=dict)

    def error(self, f: Function, counts: Counts, z: Array, exact: Array) -> float:
        """The largest error at the points, measured once per counts."""
        if counts not in self.errors:
            self.errors[counts] = largest(self.make(f, counts)(z)[:, 0] - exact)
        return self.errors[counts]

    def counts(self, f: Function, m: int, tolerance: float, z: Array, exact: Array) -> Counts | None:
        """The fewest nodes, by doubling and bisection, whose measured error is within the tolerance; None above 10⁷ numbers."""
        enough = lambda n: self.error(f, (n,) * m, z, exact) <= tolerance  # noqa: E731
        below, n = self.least - 1, self.least
        while n**m <= MOST_NUMBERS and not enough(n):
            below, n = n, 2 * n
        if n**m > MOST_NUMBERS:
            n = math.floor(MOST_NUMBERS ** (1 / m) + 1e-9)
            if n <= below or not enough(n):
                return None
        while n - below > max(1, 0 if self.each_axis else n // 8):
            middle = (n + below) // 2
            below, n = (below, middle) if enough(middle) else (middle, n)
        counts = (n,) * m
        for i in range(m) if self.each_axis else ():
            while counts[i] > 1 and self.error(f, fewer := _fewer(counts, i), z, exact) <= tolerance:
                counts = fewer
        return counts


def _fewer(counts: Counts, i: int) -> Counts:
    return (*counts[:i], counts[i] - 1, *counts[i + 1 :])


def peers(m: int) -> list[Peer]:
    """The interpolators that take m dimensions and are installed."""
    found = [
        Peer("RegularGridInterpolator linear", "scipy", scipy_linear),
        Peer("NdBSpline cubic", "scipy", scipy_tensor_spline(3)),
        Peer("NdBSpline quintic", "scipy", scipy_tensor_spline(5), least=6),
    ]
    if m == 2:
        found.append(Peer("RectBivariateSpline cubic", "scipy", scipy_spline(3)))
        found.append(Peer("RectBivariateSpline quintic", "scipy", scipy_spline(5), least=6))
    if installed("interpn"):
        for kind in ("Multilinear", "Multicubic", "MultiBspline"):
            found.append(Peer(kind, "interpn", interpn_grid(kind)))
    series: dict[Counts, float] = {}  # the same series, however it is summed
    found.append(Peer("chebvander", "Chebyshev, numpy", chebyshev_products, 2, True, errors=series))
    found.append(Peer("chebval", "Chebyshev, numpy", chebyshev_recurrence, 2, True, errors=series))
    if installed("numba"):
        found.append(Peer("loops", "Chebyshev, numba", chebyshev_compiled, 2, True, errors=series))
    if m in (2, 3):
        found.append(Peer("linear", "grid_sample", grid_sample("bilinear")))
    if m == 2:
        found.append(Peer("bicubic", "grid_sample", grid_sample("bicubic")))
    return found


FAMILIES = ("interpn", "scipy", "Chebyshev, numpy", "Chebyshev, numba", "grid_sample")
NEEDS = {"interpn": "interpn", "Chebyshev, numba": "numba"}


# ---- attention over points -------------------------------------------------------------------------


def dot_products(
    points: torch.Tensor, keys: torch.Tensor, rate: float, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys whose dot products are the scores −R|q − k|²/2 up to a constant, padded to `width` columns."""
    middle = keys.mean(dim=0)
    q, k = points - middle, keys - middle
    columns = q.shape[1] + 1
    one = torch.ones_like(q[:, :1])
    q = torch.nn.functional.pad(torch.cat([q * rate, one], dim=1), (0, width - columns))
    return q, torch.nn.functional.pad(torch.cat([k, -rate / 2 * (k * k).sum(1, keepdim=True)], 1), (0, width - columns))


def sdpa(
    backend: str, dtype: torch.dtype, keys: torch.Tensor, values: torch.Tensor, rate: float
) -> Callable[[Any], Any]:
    """scaled_dot_product_attention over all keys by one backend: MATH, EFFICIENT_ATTENTION, FLASH_ATTENTION or CUDNN_ATTENTION."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    wide = 8 if keys.shape[1] < 8 else 16
    v = torch.nn.functional.pad(values, (0, wide - values.shape[1])).to(dtype)[None, None]

    def run(q: torch.Tensor) -> torch.Tensor:
        a, b = dot_products(q, keys, rate, wide)
        with sdpa_kernel([getattr(SDPBackend, backend)]):
            found = torch.nn.functional.scaled_dot_product_attention(
                a.to(dtype)[None, None], b.to(dtype)[None, None], v, scale=1.0
            )
        return found[0, 0, :, : values.shape[1]]

    return run


def curve_order(z: torch.Tensor) -> torch.Tensor:
    """The order of points along a Morton curve through their box."""
    n, m = z.shape
    low, high = z.amin(0), z.amax(0)
    bits = min(16, 62 // m)
    k = ((z - low) / (high - low).clamp(min=1e-30) * ((1 << bits) - 1)).long()
    code = torch.zeros(n, dtype=torch.int64, device=z.device)
    for bit in range(bits):
        for i in range(m):
            code |= ((k[:, i] >> bit) & 1) << (bit * m + i)
    return code.argsort()


def flex(keys: torch.Tensor, values: torch.Tensor, rate: float, cut: float, block: int = 128) -> Callable[[Any], Any]:
    """FlexAttention with a block mask: both sides sorted along a curve, blocks of keys whose box is too far left out.

    Sorting, boxes and mask are made in every call, as `attend` does. A key may be left out if its score trails that of some key
    by more than `cut`.
    """
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    compiled = torch.compile(flex_attention, dynamic=False)

    def boxes(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        parts = x.view(-1, block, x.shape[1])
        return parts.amin(1), parts.amax(1)

    def run(q: torch.Tensor) -> torch.Tensor:
        mine, theirs = curve_order(q), curve_order(keys)
        qs, ks, vs = q[mine], keys[theirs], values[theirs]
        (a, b), (c, d) = boxes(qs), boxes(ks)
        near = torch.relu(torch.maximum(c[None] - b[:, None], a[:, None] - d[None])).square().sum(-1)
        far = torch.maximum(d[None] - a[:, None], b[:, None] - c[None]).square().sum(-1)
        kept = rate / 2 * (near - far.amin(1, keepdim=True)) <= cut
        number = kept.sum(1).to(torch.int32)[None, None]
        index = kept.to(torch.int8).argsort(dim=1, descending=True, stable=True).to(torch.int32)[None, None]
        mask = BlockMask.from_kv_blocks(number, index, BLOCK_SIZE=block, seq_lengths=(len(q), len(keys)))
        p, k = dot_products(qs, ks, rate, 16)
        v = torch.nn.functional.pad(vs, (0, 16 - vs.shape[1]))
        found = compiled(p[None, None], k[None, None], v[None, None], block_mask=mask, scale=1.0)
        out = torch.empty_like(values[:1]).expand(len(q), -1).clone()
        out[mine] = found[0, 0, :, : values.shape[1]]
        return out

    return run


def keops(keys: torch.Tensor, values: torch.Tensor, rate: float) -> Callable[[Any], Any]:
    """KeOps: the softmax over all keys, compiled, without storing the scores."""
    from pykeops.torch import LazyTensor

    k, v = LazyTensor(keys[None]), LazyTensor(values[None])

    def run(q: torch.Tensor) -> torch.Tensor:
        scores = -((LazyTensor(q[:, None]) - k) ** 2).sum(-1) * (rate / 2)
        found: torch.Tensor = scores.sumsoftmaxweight(v, axis=1)
        return found

    return run


def dense(points: Array, keys: Array, values: Array, rate: float) -> Array:
    """The exact answer in float64: differences first, every key, few points at a time."""
    out = np.empty((len(points), values.shape[1]))
    for i, q in enumerate(points):
        scores = -rate / 2 * ((keys - q) ** 2).sum(axis=1)
        weights = np.exp(scores - scores.max())
        out[i] = weights @ values / weights.sum()
    return out
