"""The second paper in numbers: slopes of the ramps' errors, sizes and times of converted networks, two layers beside one, drift.

    python benchmarks/second_paper.py [ramps] [heads] [mlp] [layers] [descent]

Prints the tables of docs/second-paper.md; everything, in about two minutes on one core, if nothing is named.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import nn

import partita as pa
from partita.errors import SizeError
from partita.networks import encoder_ramp, prefix_ramp
from partita.ramps import multi_head_ramp, ramp, ramp_layers, two_layers

ENDS = (-0.7, 2.1)
TOKEN = pa.Box([-3.0], [3.0])


def row(*cells: object) -> None:
    print("| " + " | ".join(str(c) for c in cells) + " |")


def head(*cells: str) -> None:
    row(*cells)
    row(*("---" for _ in cells))


def kinks(p: int, rng: np.random.Generator) -> np.ndarray:
    """Values of u beside the middles between anchors and at the ends: where ramps err most."""
    spacing = (ENDS[1] - ENDS[0]) / (p - 1)
    offset = 0.5 + np.concatenate([rng.uniform(-0.5, 0.5, 20_000), 0.02 * rng.standard_normal(20_000)])
    u = ENDS[0] + (rng.integers(0, p - 1, 40_000) + offset) * spacing
    return np.concatenate([u, ENDS]).clip(-3, 3)


def ramps() -> None:
    """Errors and bounds of the single head in units of the spacing, by p; then what the literal layers carry."""
    head("p", *(f"{k} {d}: seen/Δ, bound/Δ" for k in ("best", "hard") for d in ("float64", "float32")))
    sizes = np.array([16, 64, 256, 1024, 4096, 16_384, 100_000])
    found: dict[tuple[str, torch.dtype], list[float]] = {}
    for p in sizes:
        cells = [f"{p:,}"]
        for kind in ("best", "hard"):
            for dtype in (torch.float64, torch.float32):
                built = ramp([1.0], 0.0, ENDS, anchors=int(p), domain=TOKEN, sharpness=kind, dtype=dtype)
                u = kinks(int(p), np.random.default_rng(0)).astype(np.float32).astype(np.float64)
                error = np.abs(built.head(torch.from_numpy(u)[:, None])[:, 0].double().numpy() - u.clip(*ENDS)).max()
                found.setdefault((kind, dtype), []).append(error)
                cells.append(f"{error / built.spacing:.4f}, {built.error_bound / built.spacing:.4f}")
        row(*cells)
    print()
    for (kind, dtype), errors in found.items():
        slope = np.polyfit(np.log(sizes - 1), np.log(errors), 1)[0]
        print(f"slope of log error against log(p − 1), {kind}, {dtype}: {slope:.4f}")
    built = ramp(np.ones((10_000, 1)), 0.0, ENDS, anchors=100_000, domain=TOKEN, sharpness="hard", dtype=torch.float32)
    x = torch.rand(1, 10_000, 1) * 6 - 3
    start = time.perf_counter()
    built.head(x)
    print(f"10,000 tokens, 100,000 anchors, float32: {time.perf_counter() - start:.3f} s")
    for kind in ("best", "hard"):
        try:
            ramp_layers(ramp([1.0], 0.0, ENDS, anchors=4096, domain=TOKEN, sharpness=kind, dtype=torch.float32))
        except SizeError as error:
            print(f"layers, {kind}: {error}")


def heads() -> None:
    """Shared anchors in nn.MultiheadAttention, a causal prefix, and a Transformer block."""
    head("n", "H", "anchors", "embed_dim", "seen/Δ", "bound/Δ", "κ needed for 0.01Δ")
    sizes, errors = [], []
    rng = np.random.default_rng(0)
    for n, count in [(4, 4), (6, 8), (4, 64), (18, 32), (34, 64)]:
        w, t = rng.normal(size=(n, 2)), 0.2 * rng.normal(size=n)
        built = multi_head_ramp(w, t, ENDS, heads=count, domain=pa.Box([-1, -1], [1, 1]))
        x = rng.uniform(-1, 1, size=(max(200, 20_000 // n), n, 2))
        u = (x * w).sum(-1) + t
        aim = (
            ENDS[0]
            + (np.floor((u - ENDS[0]) / built.spacing) + 0.5 + 0.02 * rng.standard_normal(u.shape)) * built.spacing
        )
        x = (x + ((aim - u) / (w**2).sum(-1))[..., None] * w).clip(-1, 1)
        with torch.no_grad():
            error = np.abs(built.network(torch.from_numpy(x)).numpy()[..., 0] - ((x * w).sum(-1) + t).clip(*ENDS)).max()
        sizes.append(built.anchors - 1)
        errors.append(error)
        facts = built.certificate.facts
        row(
            n, count, built.anchors, int(facts["embed_dim"]), f"{error / built.spacing:.4f}",
            f"{built.error_bound / built.spacing:.4f}", f"{facts['sharpness_needed']:.2f}",
        )  # fmt: skip
    print(f"\nslope of log error against log((n − 2)H − 1): {np.polyfit(np.log(sizes), np.log(errors), 1)[0]:.4f}")
    shared = multi_head_ramp(np.ones((6, 1)), 0.0, ENDS, heads=4, domain=TOKEN, sharpness=12.0)
    single = ramp(np.ones((6, 1)), 0.0, ENDS, anchors=16, domain=TOKEN, sharpness=12.0)
    block, prefix = encoder_ramp(shared).error_bound, prefix_ramp(single, 6).error_bound
    print(f"16 anchors, κ = 12, bounds: multi-head {shared.error_bound:.5f}, in a pre-norm block {block:.5f},", end=" ")
    print(f"before the sequence under a causal mask {prefix:.5f}")


def mlp() -> None:
    """Two hidden layers of 64 on [−1, 1]²: time to convert, keys, bound and what was seen."""
    head("activation", "tolerance", "seconds", "keys", "bound", "median bound at a point", "seen")
    box = pa.Box([-1, -1], [1, 1])
    x = torch.from_numpy(box.sample(5000, np.random.default_rng(0)))
    for activation in (nn.ReLU(), nn.Hardtanh(), nn.LeakyReLU(0.1), nn.GELU(), nn.Tanh(), nn.Sigmoid(), nn.SiLU()):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 64), activation, nn.Linear(64, 64), activation, nn.Linear(64, 1)).double()
        start = time.perf_counter()
        net = pa.attention_from_mlp(model, box, 1e-3)
        seconds = time.perf_counter() - start
        with torch.no_grad():
            error = (net(x) - model(x)).abs().max().item()
        row(
            type(activation).__name__, "1e-3", f"{seconds:.2f}", net.keys, f"{net.error_bound:.1e}",
            f"{np.median(net.error_bound_at(x)):.1e}", f"{error:.1e}",
        )  # fmt: skip


def layers() -> None:
    """The same cells in two layers, in one layer and a softmax, and in the first paper's single layer; and a fitted head."""
    head("f", "network", "keys", "stored numbers", "bound", "seen")
    for text, box, cells in [
        ("sin(3*x0) + x0*cos(2*x1)", pa.Box([-1, -1], [1, 1]), 16),
        ("x0*x1, x2; x3, x0 - x3", pa.Box.sequence(-1, 1, tokens=2, dim=2), 5),
    ]:
        built = two_layers(text, box, cells=cells)
        points = np.concatenate([box.sample(4000, np.random.default_rng(0)), box.corners()])
        z = torch.from_numpy(points.reshape(-1, *box.shape))
        f = built.target(points)

        def seen(network: Callable[..., torch.Tensor], z: torch.Tensor = z, f: np.ndarray = f) -> str:
            return f"{np.abs(network(z).detach().numpy().reshape(len(f), -1) - f).max():.3g}"

        size = f"{built.anchors} + {built.partition.num_cells}"
        for name, network in (("two layers", built.two_layers), ("layer, then softmax", built.layer_then_softmax)):
            row(f"`{text}`", name, size, f"{network.num_parameters:,}", f"{built.error_bound:.3g}", seen(network))
        single = pa.compile(text, box, tolerance=built.error_bound, method="hard")
        row(
            "",
            "one layer, hard (first paper)",
            single.num_keys,
            f"{single.head.num_parameters:,}",
            f"{single.error_bound:.3g}",
            seen(single.head),
        )
        fitted = pa.compile(text, box, tolerance=built.error_bound)
        row(
            "",
            f"one layer, as `compile` chooses ({fitted.certificate.theorem})",
            fitted.num_keys,
            f"{fitted.head.num_parameters:,}",
            f"{fitted.error_bound:.3g}",
            seen(fitted.head),
        )


def descent() -> None:
    """Drift from exact gradient descent, by loss and prompt."""
    head(
        "loss",
        "examples",
        "keys",
        "seconds",
        "one step, relative",
        "100 steps, relative",
        "proved here",
        "proved a priori",
    )
    rng = np.random.default_rng(0)
    x_box, w_box = pa.Box([-1] * 3, [1] * 3), pa.Box([-3] * 3, [3] * 3)
    for loss, ends, ridge in [
        ("squared", (-2.0, 2.0), 0.0),
        ("squared", (-2.0, 2.0), 0.1),
        ("logistic", (0.0, 1.0), 0.02),
        ("log(cosh(r))", (-2.0, 2.0), 0.01),
        ("where(abs(r) - 1, abs(r) - 0.5, 0.5*r^2)", (-2.0, 2.0), 0.05),
    ]:
        gd = pa.in_context.gradient_descent(
            loss, 100, 0.5, x=x_box, y=pa.Box([ends[0]], [ends[1]]), w=w_box, ridge=ridge
        )
        for examples in (10, 1000, 10_000) if gd.slope.keys < 100 else (10, 1000):
            x = rng.uniform(-1, 1, size=(examples, 3))
            line = x @ np.array([1.0, -0.5, 0.3])
            y = (rng.random(examples) < 1 / (1 + np.exp(-3 * line))).astype(float) if ends[0] == 0 else line.clip(*ends)
            prompt = np.column_stack([x, y])
            start = time.perf_counter()
            attained = gd.trajectory(prompt).numpy()
            seconds = time.perf_counter() - start
            exact = gd.exact(prompt)
            relative = np.linalg.norm(attained - exact, axis=1)[1:] / np.linalg.norm(exact, axis=1)[1:]
            name = f"`{loss}`" + (f", ridge {ridge:g}" if ridge else "")
            row(
                name, f"{examples:,}", gd.slope.keys, f"{seconds:.2f}", f"{relative[0]:.1e}", f"{relative[-1]:.1e}",
                f"{gd.error_bounds_at(prompt)[-1]:.1e}", f"{gd.error_bound_for(examples):.1e}",
            )  # fmt: skip


TABLES = {"ramps": ramps, "heads": heads, "mlp": mlp, "layers": layers, "descent": descent}


def main() -> None:
    for name in sys.argv[1:] or TABLES:
        print(f"\n## {name}\n\n{TABLES[name].__doc__}\n")
        TABLES[name]()


if __name__ == "__main__":
    main()
