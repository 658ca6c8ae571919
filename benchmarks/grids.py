"""Heads on product grids, 10³ to 10⁷ cells in 1 to 6 dimensions, beside scipy's interpolation and dense attention.

    python benchmarks/grids.py [--quick] [--json FILE] [--threads 1] [--dtype float64]

Each grid carries a smooth function and one head of sharpness κ = 64 that looks at two centers per axis. All evaluators
answer the same queries in the same run, interleaved; the smallest time counts. Errors are against the exact head: a
numpy sum in extended precision that shares no code with the library, and the dense softmax where it is affordable.
Peak memory is that of a fresh process which builds one head and asks it once.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich import box
from rich.console import Console
from rich.table import Table

Array = NDArray[Any]

SHARPNESS = 64.0
QUERIES = 100_000
CHECKED = 1_000  # queries compared with the exact head
CHECKED_DENSE = 100
DENSE_UP_TO = 120_000  # cells: 7⁶ counts as 10⁵
REPEATS = {"native": 15, "torch": 3, "scipy": 3, "sdpa": 3}
GIB = 1 << 30


@dataclass(frozen=True)
class Case:
    """One grid: `count` centers on each of `dimension` axes."""

    dimension: int
    count: int
    dtype: str

    @property
    def cells(self) -> int:
        return self.count**self.dimension


@dataclass
class Row:
    """What was measured on one grid: seconds, nanoseconds per query, largest errors, bytes."""

    case: Case
    cells: int
    build_s: float = math.nan
    ns: dict[str, float] = field(default_factory=dict)
    median_ns: dict[str, float] = field(default_factory=dict)
    error: dict[str, float] = field(default_factory=dict)
    memory: dict[str, int] = field(default_factory=dict)


def cases(dtype: str, quick: bool) -> Iterator[Case]:
    for dimension in (1, 2, 3, 6) if quick else range(1, 7):
        for power in (4, 7) if quick else range(3, 8):
            yield Case(dimension, round(10 ** (power / dimension)), dtype)


# ---- one head ------------------------------------------------------------------------------------


def factor(axis: int, x: Array) -> Array:
    """The function on the grid is the product of these over the axes."""
    return 1.0 + 0.5 * np.sin(3.0 * x + axis)


def smooth(z: Array) -> Array:
    return reduce(np.multiply, (factor(i, z[:, i]) for i in range(z.shape[1])))


def build(case: Case) -> Any:
    """Values at the centers and the head, nothing else."""
    import torch

    import partita as pa
    from partita.heads import GridHead

    m, dtype = case.dimension, getattr(np, case.dtype)
    grid = pa.ProductGrid.uniform(pa.Box([0.0] * m, [1.0] * m), case.count, dtype=dtype)
    values = reduce(np.multiply.outer, (factor(i, a) for i, a in enumerate(grid.axes))).reshape(-1, 1)
    rate = SHARPNESS * case.count**2
    values = torch.from_numpy(values.astype(dtype, copy=False))
    return GridHead(grid, rate, values, half_windows=1, input_shapes=((m,),), output_shape=())


def morton_order(z: Array) -> Array:
    """The order of points of the unit cube along a Morton curve."""
    m = z.shape[1]
    bits = min(20, 62 // m)
    k = (z * (1 << bits)).astype(np.int64)
    code = np.zeros(len(z), np.int64)
    for bit in range(bits):
        for i in range(m):
            code |= ((k[:, i] >> bit) & 1) << (bit * m + i)
    return np.argsort(code, kind="stable")


# ---- what the exact head says --------------------------------------------------------------------


def exact(head: Any, z: Array) -> Array:
    """The head at z in extended precision: four centers per axis, the rest holds less than e^{-100} of the mass."""
    total = np.ones((len(z), 1), np.longdouble)
    cells = np.zeros((len(z), 1), np.int64)
    rates = head.inverse_temperature.numpy().astype(np.longdouble)
    for i, centers in enumerate(a.numpy().astype(np.longdouble) for a in head.axes):
        x = z[:, i].astype(np.longdouble)
        width = min(4, len(centers))
        start = np.clip(np.searchsorted(centers, x) - 2, 0, len(centers) - width)
        index = start[:, None] + np.arange(width)
        scores = -rates[i] / 2 * (x[:, None] - centers[index]) ** 2
        share = np.exp(scores - scores.max(axis=1, keepdims=True))
        share /= share.sum(axis=1, keepdims=True)
        total = (total[:, :, None] * share[:, None, :]).reshape(len(z), -1)
        cells = (cells[:, :, None] * len(centers) + index[:, None, :]).reshape(len(z), -1)
    return (total * head.values.numpy()[cells, 0]).sum(axis=1)


def largest(difference: Array) -> float:
    return float(np.abs(difference).max())


# ---- evaluators ----------------------------------------------------------------------------------


def without_kernel(head: Any) -> Callable[[Any], Any]:
    """The torch path, as where numba is not installed."""
    from partita.kernels import native

    def evaluate(z: Any) -> Any:
        available, native.AVAILABLE = native.AVAILABLE, False
        try:
            return head(z)
        finally:
            native.AVAILABLE = available

    return evaluate


def linear_interpolation(head: Any) -> Callable[[Any], Any]:
    from scipy.interpolate import RegularGridInterpolator

    values = head.values.numpy().reshape(head.counts)
    peer = RegularGridInterpolator([a.numpy() for a in head.axes], values, bounds_error=False, fill_value=None)
    return lambda z: peer(z.numpy())


def measure(case: Case) -> Row:
    """Times and errors of every evaluator on one grid."""
    import torch

    row = Row(case, case.cells)
    began = time.perf_counter()
    head = build(case)
    row.build_s = time.perf_counter() - began
    z = np.random.default_rng(0).random((QUERIES, case.dimension)).astype(case.dtype)
    orders = {"random": torch.from_numpy(z), "spatial": torch.from_numpy(z[morton_order(z)])}
    evaluators: dict[str, Callable[[Any], Any]] = {
        "native": head,
        "torch": without_kernel(head),
        "scipy": linear_interpolation(head),
    }
    jobs = {f"{name} {order}": (f, q) for name, f in evaluators.items() for order, q in orders.items()}
    if case.cells <= DENSE_UP_TO:
        evaluators["sdpa"] = head.as_attention()
        few = max(CHECKED_DENSE, min(QUERIES, 2 * 10**7 // case.cells))
        jobs["sdpa"] = (evaluators["sdpa"], orders["random"][:few])
    times(jobs, row)
    errors(head, evaluators, orders["random"], row)
    return row


def times(jobs: dict[str, tuple[Callable[[Any], Any], Any]], row: Row) -> None:
    taken: dict[str, list[float]] = {name: [] for name in jobs}
    for evaluate, q in jobs.values():
        evaluate(q[: min(5_000, len(q))])  # compiled kernels are loaded here, on both sides of the parallel threshold
        evaluate(q[:10])
    for repeat in range(max(REPEATS.values())):
        for name, (evaluate, q) in jobs.items():
            if repeat < REPEATS[name.split()[0]]:
                began = time.perf_counter()
                evaluate(q)
                taken[name].append((time.perf_counter() - began) / len(q) * 1e9)
    row.ns = {name: min(t) for name, t in taken.items()}
    row.median_ns = {name: float(np.median(t)) for name, t in taken.items()}


def errors(head: Any, evaluators: dict[str, Callable[[Any], Any]], z: Any, row: Row) -> None:
    reference = exact(head, z[:CHECKED].numpy())
    for name, evaluate in evaluators.items():
        if name != "scipy":
            n = CHECKED_DENSE if name == "sdpa" else CHECKED
            row.error[name] = largest(np.asarray(evaluate(z[:n])) - reference[:n])
    if row.cells <= DENSE_UP_TO:
        dense = head.double().evaluate_dense(z[:CHECKED_DENSE].double())[:, 0].numpy()
        row.error["reference"] = largest(dense - reference[:CHECKED_DENSE])
    target = smooth(z[:CHECKED].numpy().astype(np.float64))
    row.error["head to f"] = largest(reference - target)
    row.error["scipy to f"] = largest(np.asarray(evaluators["scipy"](z[:CHECKED])) - target)


# ---- peak memory, in a process of its own --------------------------------------------------------


def peak() -> int:
    """The most bytes this process ever held. On Linux ru_maxrss starts from the parent's size, VmHWM does not."""
    status = Path("/proc/self/status")
    if status.exists():
        return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmHWM")) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def memory_of(case: Case) -> dict[str, int]:
    """Peak bytes of this process: after the imports, after the native path, after the torch path as well."""
    import torch

    stages = {"imports": peak()}
    head = build(case)
    z = torch.from_numpy(np.random.default_rng(0).random((QUERIES, case.dimension)).astype(case.dtype))
    head(z)
    stages["native"] = peak()
    without_kernel(head)(z)
    stages["torch"] = peak()
    return stages


def memory_elsewhere(case: Case, threads: int) -> dict[str, int]:
    command = [sys.executable, __file__, "--threads", str(threads), "--dtype", case.dtype]
    asked = f"{case.dimension},{case.count}"
    done = subprocess.run([*command, "--memory-of", asked], capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


# ---- what is printed -----------------------------------------------------------------------------


def short(x: float | None, digits: int = 3) -> str:
    if x is None or math.isnan(x):
        return "–"
    return f"{x:,.0f}" if x >= 10 ** (digits - 1) else f"{x:.{digits}g}"


def mebibytes(row: Row, stage: str) -> float | None:
    return (row.memory[stage] - row.memory["imports"]) / (1 << 20) if row.memory else None


def table(title: str, columns: list[str], rows: list[list[str]]) -> Table:
    out = Table(title=title, box=box.MARKDOWN, title_justify="left")
    for name in columns:
        out.add_column(name, justify="right", no_wrap=True)
    for cells in rows:
        out.add_row(*cells)
    return out


def tables(rows: list[Row]) -> list[Table]:
    names = [f"{path} {order}" for path in ("native", "torch", "scipy") for order in ("random", "spatial")] + ["sdpa"]
    head = ["m", "cells", "build ms", *names, "scipy/native", "spatial", "sdpa/native"]
    timed, checked = [], []
    for r in rows:
        where = [str(r.case.dimension), f"{r.cells:,}"]
        native, dense = r.ns["native random"], r.ns.get("sdpa")
        peers = [r.ns[f"scipy {order}"] / r.ns[f"native {order}"] for order in ("random", "spatial")]
        ratios = [*peers, dense / native if dense else None]
        timed.append([*where, *(short(x) for x in (r.build_s * 1e3, *(r.ns.get(n) for n in names), *ratios))])
        wrong = [r.error.get(k) for k in ("native", "torch", "sdpa", "reference", "head to f", "scipy to f")]
        sizes = [short(mebibytes(r, "native")), short(mebibytes(r, "torch"))]
        checked.append([*where, *("–" if e is None else f"{e:.1e}" for e in wrong), *sizes])
    errors_head = ["m", "cells", "native", "torch", "sdpa", "dense softmax", "head − f", "scipy − f"]
    return [
        table("Nanoseconds per query, one call of 100,000 queries (sdpa: fewer)", head, timed),
        table(
            "Largest error against the exact head (right: against f); peak MiB above the imports",
            [*errors_head, "MiB native", "MiB torch"],
            checked,
        ),
    ]


def far_read() -> float:
    """Nanoseconds for one value out of 10⁷ at a place not read before."""
    values, rng = np.ones(10**7), np.random.default_rng(0)
    taken = []
    for _ in range(9):
        index = rng.integers(0, len(values), QUERIES)
        began = time.perf_counter()
        values.take(index)
        taken.append((time.perf_counter() - began) / QUERIES * 1e9)
    return min(taken)


def floor_lines(dimensions: list[int]) -> Iterator[str]:
    """What a query cannot do without."""
    far = far_read()
    yield f"floor: one of 10⁷ values read out of order takes {far:.1f} ns here (numpy.take)"
    for m in dimensions:
        reads, lines = 2**m, 2 ** (m - 1)
        yield (
            f"floor m={m}: {reads} values, {8 * reads} bytes on {lines} cache lines or more; {3 * (reads - 1)} flops to "
            f"contract, {m} exp of some 30 flops; out of order at 10⁷ cells {lines * far:.0f} ns"
        )


def statements(rows: list[Row]) -> Iterator[tuple[bool, str]]:
    found = {(r.case.dimension, round(math.log10(r.cells))): r for r in rows}
    small, large = found[3, 4], found[3, 7]
    growth = large.ns["native spatial"] / small.ns["native spatial"]
    grid = f"m = 3, spatial order, {small.cells:,} to {large.cells:,} cells"
    yield growth < 3, f"{grid}: time per query grows by {growth:.2f} < 3"
    for r in rows:
        if r.memory and round(math.log10(r.cells)) == 7:
            grid, most = f"m = {r.case.dimension}, 10⁵ queries on {r.cells:,} cells", r.memory["torch"]
            yield most < GIB, f"{grid}: {most / GIB:.2f} GiB at most, imports included, < 1 GiB"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="four dimensions, 10⁴ and 10⁷ cells")
    parser.add_argument("--json", type=Path, help="write everything measured to this file")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", choices=["float64", "float32"], default="float64")
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    options = arguments()
    os.environ["NUMBA_NUM_THREADS"] = str(options.threads)  # before numba is imported
    import torch

    import partita.heads  # noqa: F401  (importing is no part of a build time)

    torch.set_num_threads(options.threads)
    torch.set_grad_enabled(False)
    if options.memory_of:
        print(json.dumps(memory_of(Case(*map(int, options.memory_of.split(",")), options.dtype))))
        return 0
    rows = []
    for case in cases(options.dtype, options.quick):
        row = measure(case)
        if not options.quick or case.cells > 5 * 10**6:
            row.memory = memory_elsewhere(case, options.threads)
        rows.append(row)
        print(f"\r{len(rows)} grids", end="", file=sys.stderr, flush=True)
    print("\r", end="", file=sys.stderr)
    console = Console(width=200)
    setting = f"{options.threads} thread(s), {options.dtype}, κ = {SHARPNESS:g}, two centers per axis"
    console.print(f"{platform.machine()}, {setting}", highlight=False)
    for part in tables(rows):
        console.print(part)
    for line in floor_lines(sorted({r.case.dimension for r in rows})):
        console.print(line, highlight=False)
    verdicts = list(statements(rows))
    for holds, text in verdicts:
        console.print(f"{'PASS' if holds else 'FAIL'}  {text}", highlight=False)
    if options.json:
        options.json.write_text(json.dumps([asdict(r) for r in rows], indent=1))
    return 0 if all(holds for holds, _ in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
