"""Tensor-train heads fitted to functions of 10 and 20 variables, beside teneva where it is installed.

    python benchmarks/high_dimension.py [--quick] [--threads 1] [--json FILE]

Every function is a black box; `fit_train` chooses the grid, the ranks and the points where it asks. Errors are the largest seen on
fresh points: 20,000 uniform ones, 2,000 corners, and 2,000 drawn towards the place where the function peaks. They are estimates.
teneva (TT-cross and Chebyshev interpolation, numpy) is given as many points per axis as the fit came to have keys, at most 10⁶
evaluations and half a minute, and truncates at a hundredth of the tolerance; its error is seen on some of the same points.
Times are of this machine; only ratios carry over.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich import box as styles
from rich.console import Console
from rich.table import Table

Array = NDArray[np.float64]

QUERIES = 20_000
PEER_QUERIES = 300  # it answers them one by one
PEER_EVALUATIONS, PEER_SECONDS = 1_000_000, 30


@dataclass(frozen=True)
class Case:
    """A function on [−1, 1]^m and the absolute tolerance asked for."""

    name: str
    dimension: int
    tolerance: float
    function: Callable[[Array], Array]
    quick: bool = False
    peak: float = 0.0


@dataclass
class Row:
    name: str
    m: int
    status: str
    keys: int
    stored: int
    ranks: tuple[int, ...]
    counts: tuple[int, ...]
    evaluations: int
    fit_s: float
    error: float
    relative: float
    estimate: float
    us_per_query: float
    us_float32: float
    peer: dict[str, float]


def tanh_network(z: Array) -> Array:
    rng, m = np.random.default_rng(0), z.shape[1]
    inner, bias = rng.normal(size=(m, 8)) / math.sqrt(m), 0.5 * rng.normal(size=8)
    outer, last = rng.normal(size=(8, 8)) / math.sqrt(8), rng.normal(size=8) / math.sqrt(8)
    return np.tanh(np.tanh(z @ inner + bias) @ outer) @ last


def steps(z: Array) -> Array:
    return z * np.arange(1, z.shape[1] + 1) / 5


CASES = (
    Case("1/(1+|x|²)", 10, 1e-7, lambda z: 1 / (1 + (z**2).sum(axis=1)), quick=True),
    Case("1/(1+|x−0.4|²)", 10, 1e-7, lambda z: 1 / (1 + ((z - 0.4) ** 2).sum(axis=1)), peak=0.4),
    Case("exp(−|x|²/m)", 10, 1e-9, lambda z: np.exp(-(z**2).mean(axis=1)), quick=True),
    Case("cos Σx", 10, 1e-9, lambda z: np.cos(z.sum(axis=1)), quick=True),
    Case("Π(1+½sin(k x/5))", 10, 1e-7, lambda z: np.prod(1 + 0.5 * np.sin(steps(z)), axis=1)),
    Case("Σ sin(k x/5)", 10, 1e-8, lambda z: np.sin(steps(z)).sum(axis=1)),
    Case("tanh network", 10, 1e-3, tanh_network),
    Case("1/(1+|x|²)", 20, 1e-6, lambda z: 1 / (1 + (z**2).sum(axis=1))),
    Case("exp(−|x|²/m)", 20, 1e-9, lambda z: np.exp(-(z**2).mean(axis=1))),
    Case("cos Σx", 20, 1e-9, lambda z: np.cos(z.sum(axis=1))),
    Case("log(1+|x|²)", 20, 1e-6, lambda z: np.log1p((z**2).sum(axis=1)), quick=True),
)


def fresh_points(case: Case) -> Array:
    rng, m = np.random.default_rng(2024), case.dimension
    near = case.peak + rng.random((2000, 1)) ** 2 * (rng.uniform(-1, 1, (2000, m)) - case.peak)
    return np.concatenate([rng.uniform(-1, 1, (QUERIES, m)), rng.choice([-1.0, 1.0], (2000, m)), near])


def best_of(call: Callable[[], Any], repeats: int = 5) -> float:
    taken = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        taken.append(time.perf_counter() - began)
    return min(taken)


def measure(case: Case) -> Row:
    import torch

    from partita.geometry import Box
    from partita.search.train_fit import TrainLimits, fit_train

    box = Box(-np.ones(case.dimension), np.ones(case.dimension))
    began = time.perf_counter()
    fit = fit_train(case.function, box, tolerance=case.tolerance, limits=TrainLimits(evaluations=2_000_000))
    taken = time.perf_counter() - began
    head, points = fit.head(), fresh_points(case)
    exact = case.function(points)
    z = torch.from_numpy(points)
    single, z32 = fit.head(dtype=torch.float32), z[:QUERIES].float()
    error = float(np.abs(head(z).numpy() - exact).max())
    return Row(
        name=case.name,
        m=case.dimension,
        status=fit.status,
        keys=head.num_keys,
        stored=head.num_parameters,
        ranks=fit.ranks,
        counts=fit.grid.counts,
        evaluations=fit.evaluations,
        fit_s=taken,
        error=error,
        relative=error / float(np.abs(exact).max()),
        estimate=fit.error_estimate,
        us_per_query=best_of(lambda: head(z[:QUERIES])) / QUERIES * 1e6,
        us_float32=best_of(lambda: single(z32)) / QUERIES * 1e6,
        peer=measure_peer(case, max(fit.grid.counts), fit.scale) if importlib.util.find_spec("teneva") else {},
    )


def speed_of_a_large_head() -> str:
    """Microseconds per query of a head of rank 16 with 32 keys on each of 10 axes, all of which count."""
    import torch

    from partita.geometry import Box, ProductGrid
    from partita.heads.train_head import TrainHead

    m, count, rank, taken = 10, 32, 16, {}
    grid = ProductGrid.uniform(Box(-np.ones(m), np.ones(m)), count, ghosts=3)
    for dtype in (torch.float64, torch.float32):
        ranks = [1, *[rank] * (m - 1), 1]
        cores = [torch.randn(a, count, b, dtype=dtype) / rank for a, b in pairwise(ranks)]
        head = TrainHead(grid, 0.7 * 13**2, cores, input_shapes=((m,),), output_shape=())
        z = 2 * torch.rand(QUERIES, m, dtype=dtype) - 1
        taken[dtype] = best_of(lambda head=head, z=z: head(z)) / QUERIES * 1e6
    return f"m = 10, P = 32, rank 16: {taken[torch.float64]:.2f} µs a query, in float32 {taken[torch.float32]:.2f}"


def measure_peer(case: Case, per_axis: int, scale: float) -> dict[str, float]:
    """teneva on the same function: cross on Chebyshev points, truncation, interpolation."""
    import teneva

    m, sizes, info = case.dimension, [per_axis] * case.dimension, {}
    lo, hi = [-1.0] * m, [1.0] * m
    small = 0.01 * case.tolerance / scale
    began = time.perf_counter()
    start = teneva.rand(sizes, 1, seed=0)
    train = teneva.cross(
        lambda index: case.function(teneva.ind_to_poi(index, lo, hi, sizes, "cheb")),
        start,
        m=PEER_EVALUATIONS,
        e=small,
        nswp=20,
        dr_max=2,
        info=info,
        cb=lambda *_: time.perf_counter() - began > PEER_SECONDS,
    )
    coefficients = teneva.func_int(teneva.truncate(train, small))
    taken = time.perf_counter() - began
    points = fresh_points(case)
    picked = np.concatenate([points[:PEER_QUERIES], points[QUERIES :: 4000 // PEER_QUERIES]])
    got = teneva.func_get(picked, coefficients, lo, hi)
    seconds = best_of(lambda: teneva.func_get(points[:PEER_QUERIES], coefficients, lo, hi), 2)
    return {
        "fit_s": taken,
        "evaluations": int(info["m"]),
        "rank": max(core.shape[2] for core in coefficients),
        "error": float(np.abs(got - case.function(picked)).max()),
        "us_per_query": seconds / PEER_QUERIES * 1e6,
    }


def table(rows: list[Row], tolerances: list[float]) -> Table:
    columns = ["function", "m", "status", "asked", "keys", "stored", "P", "rank", "evaluations", "fit s"]
    columns += ["error seen", "relative", "own estimate", "µs/query", "float32"]
    peers = any(row.peer for row in rows)
    columns += ["teneva s", "evaluations", "rank", "error seen", "µs/query"] if peers else []
    found = Table(*columns, box=styles.MARKDOWN)
    for row, tolerance in zip(rows, tolerances):
        cells = [
            row.name,
            str(row.m),
            row.status,
            f"{tolerance:.0e}",
            f"10^{math.log10(row.keys):.1f}",
            f"{row.stored:,}",
        ]
        cells += [
            f"{min(row.counts)}–{max(row.counts)}",
            str(max(row.ranks)),
            f"{row.evaluations:,}",
            f"{row.fit_s:.2f}",
        ]
        cells += [f"{row.error:.1e}", f"{row.relative:.1e}", f"{row.estimate:.1e}"]
        cells += [f"{row.us_per_query:.2f}", f"{row.us_float32:.2f}"]
        if row.peer:
            cells += [f"{row.peer['fit_s']:.2f}", f"{row.peer['evaluations']:,}", str(row.peer["rank"])]
            cells += [f"{row.peer['error']:.1e}", f"{row.peer['us_per_query']:.0f}"]
        found.add_row(*cells)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="four functions")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write everything measured to this file")
    options = parser.parse_args()
    import torch

    torch.set_num_threads(options.threads)
    torch.set_grad_enabled(False)
    cases = [case for case in CASES if case.quick or not options.quick]
    rows = []
    for case in cases:
        rows.append(measure(case))
        print(f"\r{len(rows)} functions", end="", file=sys.stderr, flush=True)
    print("\r", end="", file=sys.stderr)
    console = Console(width=240)
    console.print(f"{platform.machine()}, {options.threads} thread(s) for queries, float64", highlight=False)
    console.print(table(rows, [case.tolerance for case in cases]))
    console.print(speed_of_a_large_head(), highlight=False)
    wrong = [row for row in rows if row.status == "reached" and row.estimate > 0 and row.error > 10 * row.estimate]
    for row in wrong:
        console.print(f"FAIL  {row.name}, m = {row.m}: the estimate was too small by {row.error / row.estimate:.0f}")
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
