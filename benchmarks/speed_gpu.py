"""The sections of benchmarks/speed.py that run on a GPU. They import no more of partita than the heads and `attend`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from speed_measure import Section, device_milliseconds
from speed_peers import curve_order, flex, installed, keops, sdpa
from torch import Tensor

from partita.geometry import Box, ProductGrid
from partita.heads import GridHead
from partita.kernels import ramp_torch, train_torch
from partita.kernels.attention import attend
from partita.kernels.ramp_operator import ramp_sum
from partita.kernels.ramp_torch import RampOperands
from partita.kernels.train_operator import train_sum
from partita.kernels.train_torch import TrainOperands

TOLERANCE = 1e-7  # of what is left out; the target is an error of 1e-6
Axes = list[np.ndarray[Any, Any]]


def attempt(section: Section, run: Callable[[], list[Any]], empty: int, name: list[Any]) -> list[Any]:
    """A row, or one that says that it failed, with the reason in the section's notes; the run goes on."""
    try:
        return run()
    except Exception as problem:
        text = str(problem).strip().splitlines()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        section.notes.append(f"{name[0]}: {type(problem).__name__} {text[0][:110] if text else ''}".rstrip())
        return [*name, "failed", *[None] * (empty - 1)]


def dense_double(points: Tensor, keys: Tensor, values: Tensor, rate: float) -> Tensor:
    """The exact answer in float64, differences first, every key."""
    keys, values = keys.double(), values.double()
    step = max(1, (1 << 26) // len(keys))
    out = []
    for part in points.double().split(step):
        scores = sum((part[:, i, None] - keys[None, :, i]) ** 2 for i in range(keys.shape[1])) * (-rate / 2)
        out.append(scores.softmax(1) @ values)
    return torch.cat(out)


def largest(difference: Tensor) -> float:
    return float(difference.abs().max())


# ---- scattered keys -----------------------------------------------------------------------------------


def uniform_points(n: int, m: int, device: str) -> tuple[Tensor, Tensor, Tensor, float]:
    """Queries, keys and values, and R for κ = 8."""
    g = torch.Generator(device).manual_seed(n + m)
    q, k = (torch.rand((n, m), generator=g, device=device) for _ in range(2))
    return q, k, torch.sin(3 * k.sum(1, keepdim=True)), 8.0 * n ** (2 / m)


def scattered_section(options: Any) -> Section:
    """As many queries as keys, everything included in the time."""
    device, quick = options.device, options.quick
    section = Section(
        "gpu-scattered", "softmax over scattered keys, κ = 8, float32, sorting and index building included"
    )
    n, more = (2_048, 4_096) if quick else (262_144, 1_000_000)
    repeats, checked = (2, 128) if quick else (20, 512)
    rows: list[list[Any]] = []
    columns = ["ms", "error", "backward ms", "ratio"]
    for m, size, limit in ((2, n, 5.0), (3, n, 4.0), (4, n, 10.0), (3, more, 20.0)):
        q, k, v, rate = uniform_points(size, m, device)
        exact = dense_double(q[:checked], k, v, rate)
        ours: dict[str, float] = {}

        def measured(q=q, k=k, v=v, rate=rate, exact=exact, ours=ours, m=m, size=size) -> list[Any]:  # type: ignore[no-untyped-def]
            run = lambda: attend(q, k, v, inverse_temperature=rate, tolerance=TOLERANCE)  # noqa: E731
            ours["error"] = largest(run().output[:checked] - exact)
            ours["ms"] = device_milliseconds(run, device, repeats)
            inputs = [t.clone().requires_grad_(True) for t in (q, k, v)]
            out = attend(*inputs, inverse_temperature=rate, tolerance=TOLERANCE).output
            push = torch.randn_like(out)
            back = lambda: torch.autograd.grad(out, inputs, push, retain_graph=True)  # noqa: E731
            ours["back"] = device_milliseconds(back, device, repeats)
            return ["attend", m, size, size, ours["ms"], ours["error"], ours["back"], ours["back"] / ours["ms"]]

        rows.append(attempt(section, measured, 4, ["attend", m, size, size]))
        section.target(f"m = {m}, {size:,}²: attend", ours.get("ms"), limit, " ms")
        section.target(f"m = {m}, {size:,}²: error", ours.get("error"), 1e-6, "")
        back = ours["back"] / ours["ms"] if "back" in ours else None
        section.target(f"m = {m}, {size:,}²: backward over forward (queries, keys, values)", back, 3.0)
        if size == n:
            rows += peer_rows(section, (q, k, v, rate), exact, options)
    section.table(
        "Milliseconds a call; errors against float64 sums over all keys at 512 queries",
        [
            ("way", "text"),
            ("m", "count"),
            ("keys", "count"),
            ("queries", "count"),
            ("ms", "number"),
            ("error", "error"),
            (columns[2], "number"),
            (columns[3], "number"),
        ],
        rows,
    )
    if not installed("pykeops"):
        section.notes.append("KeOps: not installed")
    return section


def peer_rows(
    section: Section, given: tuple[Tensor, Tensor, Tensor, float], exact: Tensor, options: Any
) -> list[list[Any]]:
    """SDPA by each backend, FlexAttention with a block mask (m = 3), KeOps where it is installed."""
    q, k, v, rate = given
    m, n, device = q.shape[1], len(q), options.device
    few = min(n, 8_192)  # the math backend stores all scores
    ways: list[tuple[str, Callable[[], Callable[[Any], Any]], int]] = [
        ("SDPA math, float32", lambda: sdpa("MATH", torch.float32, k, v, rate), few),
        ("SDPA efficient, float32", lambda: sdpa("EFFICIENT_ATTENTION", torch.float32, k, v, rate), n),
        ("SDPA flash, bfloat16", lambda: sdpa("FLASH_ATTENTION", torch.bfloat16, k, v, rate), n),
        ("SDPA flash, float16", lambda: sdpa("FLASH_ATTENTION", torch.float16, k, v, rate), n),
        ("SDPA cuDNN, bfloat16", lambda: sdpa("CUDNN_ATTENTION", torch.bfloat16, k, v, rate), n),
    ]
    if m != 3:
        ways = ways[1:3]
    elif device != "cpu":
        cut = math.log(n / TOLERANCE)
        ways.append(("FlexAttention, block mask, float32", lambda: flex(k, v, rate, cut), n))
    if installed("pykeops") and m == 3:
        ways.append(("KeOps, float32", lambda: keops(k, v, rate), n))
    rows = []
    for name, make, size in ways:

        def measured(name=name, make=make, size=size) -> list[Any]:  # type: ignore[no-untyped-def]
            run = make()
            wrong = largest(run(q[:size])[: len(exact)].double() - exact)
            taken = device_milliseconds(lambda: run(q[:size]), device, 3, warm=1)
            return [name, m, n, size, taken, wrong, None, None]

        rows.append(attempt(section, measured, 4, [name, m, n, size]))
    return rows


# ---- grids ----------------------------------------------------------------------------------------------


def grid_head(count: int, half_window: int, kappa: float, device: str) -> GridHead:
    """A float32 head of count³ random values. κ is so large that what lies outside the window counts less than 1e-13."""
    grid = ProductGrid.uniform(Box([0.0] * 3, [1.0] * 3), count, dtype=np.float32)
    values = torch.rand((count**3, 1), generator=torch.Generator().manual_seed(0))
    made = GridHead(grid, kappa * count**2, values, half_windows=half_window, input_shapes=((3,),), output_shape=())
    return made.to(device)


def exact_windows(head: GridHead, z: Tensor, width: int = 8) -> Tensor:
    """The head in float64, eight centers per axis."""
    total = torch.ones((len(z), 1), dtype=torch.float64, device=z.device)
    cells = torch.zeros((len(z), 1), dtype=torch.int64, device=z.device)
    for i, centers in enumerate(head.axes):
        c, x, rate = centers.double(), z[:, i].double(), float(head.inverse_temperature[i])
        start = (torch.searchsorted(c, x) - width // 2).clamp(0, max(0, len(c) - width))
        index = start[:, None] + torch.arange(min(width, len(c)), device=z.device)
        share = (-rate / 2 * (x[:, None] - c[index]) ** 2).softmax(1)
        total = (total[:, :, None] * share[:, None, :]).reshape(len(z), -1)
        cells = (cells[:, :, None] * len(c) + index[:, None, :]).reshape(len(z), -1)
    return (total * head.values.detach().double()[cells, 0]).sum(1)


def exact_linear(table: Tensor, z: Tensor) -> Tensor:
    """Linear interpolation with nodes on the corners of the unit cube, in float64."""
    n = table.shape[0]
    at = z.double() * (n - 1)
    low = at.floor().clamp(0, n - 2).long()
    t = at - low
    out = torch.zeros(len(z), dtype=torch.float64, device=z.device)
    for corner in range(8):
        bits = [(corner >> i) & 1 for i in range(3)]
        weight = torch.ones_like(out)
        for i, b in enumerate(bits):
            weight = weight * (t[:, i] if b else 1 - t[:, i])
        out += weight * table[tuple(low[:, i] + b for i, b in enumerate(bits))].double()
    return out


def grids_section(options: Any) -> Section:
    """256³ cells in float32, random and sorted queries, beside grid_sample."""
    device, quick = options.device, options.quick
    count, n, repeats = (16, 1 << 12, 2) if quick else (256, 1 << 26, 10)
    section = Section("gpu-grids", f"grid heads of {count}³ cells, float32, {n:,} queries a call")
    z = torch.rand((n, 3), generator=torch.Generator(device).manual_seed(1), device=device)
    orders = {"random": z, "sorted": z[curve_order(z)].contiguous()}
    limits = {(2, "random"): 14.0, (4, "random"): 5.0, (4, "sorted"): 20.0}
    rows: list[list[Any]] = []
    for width, kappa in ((2, 64.0), (4, 16.0)):
        head = grid_head(count, width // 2, kappa, device)
        for order, q in orders.items():
            found: dict[str, float] = {}

            def measured(head=head, q=q, width=width, order=order, found=found) -> list[Any]:  # type: ignore[no-untyped-def]
                with torch.no_grad():
                    wrong = largest(head.evaluate(q)[:4096, 0].double() - exact_windows(head, q[:4096]))
                    ms = device_milliseconds(lambda: head.evaluate(q), device, repeats)
                found["rate"] = n / ms / 1e6
                row: list[Any] = [f"head, window {width}", order, found["rate"], wrong]
                for name, wants in (("points", (True, False)), ("values", (False, True)), ("both", (True, True))):
                    points, values = q.detach().clone(), head.values
                    points.requires_grad_(wants[0]), values.requires_grad_(wants[1])
                    inputs = [t for t, w in zip((points, values), wants) if w]
                    out = head.evaluate(points)
                    push = torch.randn_like(out)
                    back = lambda out=out, inputs=inputs, push=push: torch.autograd.grad(  # noqa: E731
                        out, inputs, push, retain_graph=True
                    )
                    found[name] = device_milliseconds(back, device, max(2, repeats // 4)) / ms
                    values.requires_grad_(False)
                return [*row, found["points"], found["values"], found["both"]]

            rows.append(attempt(section, measured, 5, [f"head, window {width}", order]))
            if (width, order) in limits:
                name = f"window {width}, {order} queries"
                section.target(name, found.get("rate"), limits[width, order], " Gq/s", least=True)
            if order == "random":
                section.target(
                    f"window {width}, random: backward over forward (points and values)", found.get("both"), 3.0
                )
    table = torch.rand((count,) * 3, generator=torch.Generator().manual_seed(0)).to(device)
    for order, q in orders.items():
        at = (2 * q.flip(1) - 1).view(1, 1, 1, n, 3)

        def sampled(at=at, q=q, order=order) -> list[Any]:  # type: ignore[no-untyped-def]
            run = lambda: torch.nn.functional.grid_sample(table[None, None], at, align_corners=True)  # noqa: E731
            wrong = largest(run().reshape(-1)[:4096].double() - exact_linear(table, q[:4096]))
            return [
                "grid_sample, linear",
                order,
                n / device_milliseconds(run, device, repeats) / 1e6,
                wrong,
                None,
                None,
                None,
            ]

        rows.append(attempt(section, sampled, 5, ["grid_sample, linear", order]))
    section.table(
        "10⁹ queries a second; errors against float64 at 4,096 queries; backward passes as multiples of the forward pass",
        [("way", "text"), ("queries", "text"), ("Gq/s", "number"), ("error", "error")]
        + [(k, "number") for k in ("points", "values", "both")],
        rows,
    )
    return section


# ---- fitted heads -----------------------------------------------------------------------------------------


def waves(x: Any, y: Any, sin: Any = torch.sin, cos: Any = torch.cos) -> Any:
    return sin(3 * x) + x * cos(2 * y)


def fitted_section(options: Any) -> Section:
    """64 keys in float64 beside f itself."""
    from speed_fitted import fitted_head

    device, quick = options.device, options.quick
    n, repeats = (1 << 12, 2) if quick else (1 << 24, 20)
    section = Section("gpu-fitted", f"fitted heads of 64 keys, all keys of every axis, float64, {n:,} queries a call")
    g = torch.Generator(device).manual_seed(2)
    cases = [
        ("8 × 8 keys", (8, 8), lambda x, y: waves(x, y, np.sin, np.cos), waves),
        ("64 keys on a line", (64,), lambda x: 1 / (1 + 25 * x * x), lambda x: 1 / (1 + 25 * x * x)),
    ]
    rows: list[list[Any]] = []
    for name, counts, f, there in cases:
        z = torch.rand((n, len(counts)), generator=g, device=device, dtype=torch.float64) * 2 - 1
        plain = fitted_head(counts, f)
        some = z[:4096].cpu()
        exact = plain.evaluate_dense(some)[:, 0]
        target = torch.from_numpy(np.asarray(f(*some.numpy().T)))
        head = plain.to(device)
        found: dict[str, float] = {}

        def measured(head=head, z=z, exact=exact, target=target, name=name, found=found) -> list[Any]:  # type: ignore[no-untyped-def]
            with torch.no_grad():
                out = head.evaluate(z)[:4096, 0].cpu()
                found["rate"] = n / device_milliseconds(lambda: head.evaluate(z), device, repeats) / 1e6
            return [f"head, {name}", found["rate"], largest(out - exact), largest(out - target)]

        rows.append(attempt(section, measured, 3, [f"head, {name}"]))
        if len(counts) == 2:
            section.target(name, found.get("rate"), 10.0, " Gq/s", least=True)
        for way, run in (("eager", there), ("compiled", torch.compile(there))):
            if quick and way == "compiled":
                continue

            def itself(run=run, z=z, way=way, target=target, name=name) -> list[Any]:  # type: ignore[no-untyped-def]
                columns = [c.contiguous() for c in z.T]
                wrong = largest(run(*columns)[:4096].cpu() - target)
                rate = n / device_milliseconds(lambda: run(*columns), device, repeats) / 1e6
                return [f"f itself, torch, {way} ({name})", rate, None, wrong]

            rows.append(attempt(section, itself, 3, [f"f itself, torch, {way} ({name})"]))
    section.table(
        "10⁹ queries a second; the error against the dense head in float64, and the distance to f",
        [("way", "text"), ("Gq/s", "number"), ("error", "error"), ("distance to f", "error")],
        rows,
    )
    return section


# ---- tensor trains and ramps ------------------------------------------------------------------------------


def train_operands(rank: int, m: int, dtype: torch.dtype, device: str, count: int = 32) -> TrainOperands:
    ranks = [1, *[rank] * (m - 1), 1]
    g = torch.Generator(device).manual_seed(rank + m)
    cores = [
        torch.randn(a, count, b, generator=g, dtype=dtype, device=device) / rank**0.5
        for a, b in itertools.pairwise(ranks)
    ]
    centers = [torch.linspace(-1, 1, count, dtype=dtype, device=device) for _ in range(m)]
    return TrainOperands(centers, torch.full((m,), 200.0, dtype=dtype, device=device), cores)


def trains_section(options: Any) -> Section:
    """Sums over tensor trains and ramps, with their backward passes and the same sums by plain torch operations."""
    device, quick = options.device, options.quick
    n, repeats = (1 << 8, 2) if quick else (1 << 18, 10)
    section = Section("gpu-trains", f"tensor trains of 32 centers an axis, {n:,} queries a call; ramps of 100 anchors")
    single, double = torch.float32, torch.float64
    rows: list[list[Any]] = []
    for rank, m, dtype in ((8, 10, single), (16, 10, single), (64, 6, single), (16, 10, double)):
        train = train_operands(rank, m, dtype, device)
        x = torch.rand((n, m), dtype=dtype, device=device) * 2 - 1
        name, found = f"train, rank {rank}, m = {m}, {str(dtype)[6:]}", {}

        def measured(train=train, x=x, name=name, found=found) -> list[Any]:  # type: ignore[no-untyped-def]
            wide = TrainOperands(
                [c.double() for c in train.centers], train.rates.double(), [c.double() for c in train.cores]
            )
            exact = train_torch.train_sum(x[:4096].double(), wide)
            wrong = largest(train_sum(x, train)[:4096] - exact) / largest(exact)
            ms = device_milliseconds(lambda: train_sum(x, train), device, repeats)
            plain = device_milliseconds(lambda: train_torch.train_sum(x, train), device, 2)
            inputs = [t.clone().requires_grad_() for t in (x, *train.cores)]
            out = train_sum(inputs[0], train._replace(cores=inputs[1:]))
            push = torch.randn_like(out)
            back = lambda: torch.autograd.grad(out, inputs, push, retain_graph=True)  # noqa: E731
            few = x[:4096].double().requires_grad_()
            (slopes,) = torch.autograd.grad(train_torch.train_sum(few, wide), few, push[:4096].double())
            off = largest(back()[0][:4096] - slopes) / largest(slopes)
            found["both"] = device_milliseconds(back, device, repeats) / ms
            work = 2e-9 * len(x) * sum(c.numel() for c in train.cores) / ms
            return [name, len(x) / ms / 1e3, work, wrong, plain / ms, found["both"], off]

        rows.append(attempt(section, measured, 6, [name]))
        section.target(f"{name}: backward over forward (points and cores)", found.get("both"), 3.0)
    for dtype in (single, double):
        numbers = [torch.tensor(v, dtype=dtype, device=device) for v in (-1.0, 0.02, 8.0)]
        ramp, u = RampOperands(*numbers, 100, 6), torch.randn(n << 7, dtype=dtype, device=device)

        def rising(ramp=ramp, u=u, dtype=dtype) -> list[Any]:  # type: ignore[no-untyped-def]
            wide = RampOperands(*(v.double() for v in ramp[:3]), *ramp[3:])
            wrong = largest(ramp_sum(u, ramp)[:4096] - ramp_torch.ramp_sum(u[:4096].double(), wide))
            ms = device_milliseconds(lambda: ramp_sum(u, ramp), device, repeats)
            plain = device_milliseconds(lambda: ramp_torch.ramp_sum(u, ramp), device, 2)
            given = u.clone().requires_grad_()
            out = ramp_sum(given, ramp)
            back = lambda: torch.autograd.grad(out, given, u, retain_graph=True)[0]  # noqa: E731
            few = u[:4096].double().requires_grad_()
            (slopes,) = torch.autograd.grad(ramp_torch.ramp_sum(few, wide), few, u[:4096].double())
            off = largest(back()[:4096] - slopes) / largest(slopes)
            share = device_milliseconds(back, device, repeats) / ms
            return [f"ramp, width 6, {str(dtype)[6:]}", len(u) / ms / 1e3, None, wrong, plain / ms, share, off]

        rows.append(attempt(section, rising, 6, [f"ramp, width 6, {str(dtype)[6:]}"]))
    section.table(
        "10⁶ queries a second; errors against float64 at 4,096 queries (of trains and gradients: of the largest); plain torch "
        "operations and backward as multiples of the forward pass",
        [
            ("way", "text"),
            ("Mq/s", "number"),
            ("TFLOP/s", "number"),
            ("error", "error"),
            ("torch", "number"),
            ("backward", "number"),
            ("its error", "error"),
        ],
        rows,
    )
    return section


SECTIONS: dict[str, Callable[[Any], Section]] = {
    "gpu-scattered": scattered_section,
    "gpu-grids": grids_section,
    "gpu-fitted": fitted_section,
    "gpu-trains": trains_section,
}
