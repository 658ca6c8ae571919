"""Soft heads, all keys of every axis in the window, beside the dense softmax, Chebyshev series and scipy's cubic splines.

    python benchmarks/soft_grids.py [--quick] [--json FILE] [--threads 1] [--dtype float64]

Each head has fitted values: a pseudo-inverse per axis from samples of f at Chebyshev points inside the domain, four keys
or fewer beyond each end. The peers get as many numbers: a tensor Chebyshev interpolant with as many coefficients, summed
by recurrence (chebval) and as matrix products (chebvander), and a cubic spline with as many nodes. All evaluators answer
the same queries in the same run, interleaved; the smallest time counts. *Rounding* is the distance to the head in
extended precision, a numpy sum that shares no code with the library.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.polynomial import chebyshev
from numpy.typing import NDArray
from rich import box
from rich.console import Console
from rich.table import Table

Array = NDArray[Any]

QUERIES = 20_000
CHECKED = 400  # queries compared with the exact head
DENSE_ENTRIES = 4 * 10**6  # scores of one dense call
CUTOFF = 1e-12  # singular values of an axis below this share are left out of the fit


@dataclass(frozen=True)
class Case:
    """One head on [−1, 1]^m: keys per axis, ghosts beyond each end, κ, f as columns `(n, out)`."""

    name: str
    count: int
    dimension: int
    ghosts: int
    sharpness: float
    function: Callable[[Array], Array]
    affine: bool = False

    @property
    def rate(self) -> float:
        return self.sharpness / (2 / (self.count - 2 * self.ghosts)) ** 2


def waves(z: Array) -> Array:
    return (np.sin(3 * z[:, 0]) + z[:, 0] * np.cos(2 * z[:, 1]))[:, None]


def runge(z: Array) -> Array:
    return 1 / (1 + 25 * (z**2).sum(axis=1, keepdims=True))


def bump(z: Array) -> Array:
    return (np.exp(-(z[:, 0] ** 2) - 2 * z[:, 1] ** 2) * np.sin(4 * z[:, 2]))[:, None]


def four(z: Array) -> Array:
    s, p = z.sum(axis=1), z[:, 0] * z[:, 1]
    return np.stack([np.sin(s), np.cos(p - z[:, 2]), np.exp(-(z**2).sum(axis=1) / 2), p + z[:, 2] * z[:, 3]], axis=1)


CASES = [
    Case("12²", 12, 2, 4, 0.5, waves),
    Case("38²", 38, 2, 4, 0.7, runge),
    Case("12³", 12, 3, 3, 0.7, bump),
    Case("8⁴, 4 outputs", 8, 4, 2, 0.6, four),
    Case("12², affine", 12, 2, 4, 0.5, waves, affine=True),
    Case("12³, affine", 12, 3, 3, 0.7, bump, affine=True),
]


@dataclass
class Row:
    """What was measured of one head: nanoseconds per query, rounding, distance to f, the largest value."""

    name: str
    keys: int
    numbers: int = 0
    largest: float = math.nan
    ns: dict[str, float] = field(default_factory=dict)
    rounding: dict[str, float] = field(default_factory=dict)
    error: dict[str, float] = field(default_factory=dict)


# ---- heads and what they should say ----------------------------------------------------------------


def along_axes(matrix: Array, table: Array, m: int) -> Array:
    """`matrix` applied to each of the first m axes of a table."""
    for i in range(m):
        table = np.moveaxis(np.tensordot(matrix, table, axes=(1, i)), 0, i)
    return table


def on_product(function: Callable[[Array], Array], nodes: Array, m: int) -> Array:
    points = np.stack([a.ravel() for a in np.meshgrid(*[nodes] * m, indexing="ij")], axis=1)
    return function(points).reshape(*[len(nodes)] * m, -1)


def fit(case: Case, centers: Array, function: Callable[[Array], Array]) -> Array:
    """Values `(cells, out)` whose head follows f: one truncated pseudo-inverse for all axes."""
    samples = np.cos(np.pi * (np.arange(3 * case.count) + 0.5) / (3 * case.count))
    weights = np.exp(-case.rate / 2 * (samples[:, None] - centers) ** 2)
    weights /= weights.sum(axis=1, keepdims=True)
    inverse = np.linalg.pinv(weights, rcond=CUTOFF)
    table = along_axes(inverse, on_product(function, samples, case.dimension), case.dimension)
    return table.reshape(case.count**case.dimension, -1)


def build(case: Case, dtype: str) -> Any:
    """The head; an affine one splits `f = (f − Σ_k z_k cos z_k) + Σ_k z_k cos z_k` into values and slopes."""
    import torch

    import partita as pa
    from partita.heads import GridHead

    m = case.dimension
    domain = pa.Box([-1.0] * m, [1.0] * m)
    grid = pa.ProductGrid.uniform(domain, case.count, ghosts=case.ghosts, dtype=getattr(np, dtype))
    slopes, constant = None, case.function
    if case.affine:
        slopes = fit(case, grid.axes[0], np.cos)[:, None, :]
        constant = lambda z: case.function(z) - (z * np.cos(z)).sum(axis=1, keepdims=True)  # noqa: E731
    values = fit(case, grid.axes[0], constant)
    tables = [None if t is None else torch.from_numpy(t.astype(dtype)) for t in (values, slopes)]
    shapes = {"input_shapes": ((m,),), "output_shape": (values.shape[1],)}
    return GridHead(grid, case.rate, tables[0], value_slopes=tables[1], half_windows=case.count, **shapes)


def exact(head: Any, z: Array) -> Array:
    """The head at z in extended precision, every cell listed."""
    wide = {k: t.numpy().astype(np.longdouble) for k, t in head.state_dict().items()}
    x, total = z.astype(np.longdouble), np.ones((len(z), 1), np.longdouble)
    for i in range(z.shape[1]):
        scores = -wide["inverse_temperature"][i] / 2 * (x[:, i, None] - wide[f"centers_{i}"]) ** 2
        share = np.exp(scores - scores.max(axis=1, keepdims=True))
        share /= share.sum(axis=1, keepdims=True)
        total = (total[:, :, None] * share[:, None, :]).reshape(len(z), -1)
    out = total @ wide["values"]
    if "origin" in wide:
        tilts = total @ wide["value_slopes"].reshape(total.shape[1], -1)
        out = out + np.einsum("nom,nm->no", tilts.reshape(*out.shape, -1), x - wide["origin"])
    return out


# ---- evaluators ------------------------------------------------------------------------------------


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


def chebyshev_coefficients(case: Case) -> Array:
    """Of the tensor interpolant at Chebyshev points: as many as the head has keys."""
    nodes = np.cos(np.pi * (np.arange(case.count) + 0.5) / case.count)
    inverse = np.linalg.inv(chebyshev.chebvander(nodes, case.count - 1))
    return along_axes(inverse, on_product(case.function, nodes, case.dimension), case.dimension)


def by_recurrence(case: Case) -> Callable[[Any], Any]:
    """The Chebyshev series summed by numpy's Clenshaw recurrence."""
    coefficients = chebyshev_coefficients(case)

    def evaluate(z: Any) -> Array:
        sums = coefficients
        for i, x in enumerate(z.numpy().T):
            sums = chebyshev.chebval(x, sums, tensor=i == 0)
        return sums.T

    return evaluate


def by_products(case: Case) -> Callable[[Any], Any]:
    """The same series as matrix products, in chunks: what a head does, with polynomials for weights."""
    coefficients = chebyshev_coefficients(case).reshape(case.count, -1)

    def some(z: Array) -> Array:
        bases = [chebyshev.chebvander(x, case.count - 1) for x in z.T]
        sums = bases[0] @ coefficients
        for basis in bases[1:]:
            sums = (basis[:, None, :] @ sums.reshape(len(z), case.count, -1))[:, 0]
        return sums

    step = max(1, (1 << 18) // coefficients.shape[1])
    return lambda z: np.concatenate([some(part) for part in np.split(z.numpy(), range(step, len(z), step))])


def cubic_spline(case: Case) -> Callable[[Any], Any]:
    from scipy.interpolate import RegularGridInterpolator

    nodes, m = np.linspace(-1, 1, case.count), case.dimension
    peer = RegularGridInterpolator([nodes] * m, on_product(case.function, nodes, m), method="cubic")
    return lambda z: peer(z.numpy())


def measure(case: Case, dtype: str, quick: bool) -> Row:
    """Times and errors of every evaluator on one head."""
    import torch

    head = build(case, dtype)
    row = Row(case.name, head.num_keys, head.num_parameters, float(head.values.abs().max()))
    count = QUERIES // 10 if quick else QUERIES
    z = torch.from_numpy(np.random.default_rng(0).uniform(-1, 1, (count, case.dimension)).astype(dtype))
    evaluators: dict[str, Callable[[Any], Any]] = {
        "native": head,
        "torch": without_kernel(head),
        "dense": head.evaluate_dense,
        "chebval": by_recurrence(case),
        "chebvander": by_products(case),
        "cubic": cubic_spline(case),
    }
    few = max(1, DENSE_ENTRIES // head.num_keys)
    jobs = {name: (f, z[:few] if name in ("dense", "cubic") else z) for name, f in evaluators.items()}
    row.ns = times(jobs, 3 if quick else 9)
    reference, target = exact(head, z[:CHECKED].numpy()), case.function(z[:CHECKED].double().numpy())
    for name, evaluate in evaluators.items():
        got = np.asarray(evaluate(z[:CHECKED])).reshape(target.shape)
        row.error[name] = largest(got - target)
        if name in ("native", "torch", "dense"):
            row.rounding[name] = largest(got - reference)
    return row


def times(jobs: dict[str, tuple[Callable[[Any], Any], Any]], repeats: int) -> dict[str, float]:
    taken: dict[str, list[float]] = {name: [] for name in jobs}
    for evaluate, q in jobs.values():
        evaluate(q)  # compiled kernels are loaded here
    for _ in range(repeats):
        for name, (evaluate, q) in jobs.items():
            began = time.perf_counter()
            evaluate(q)
            taken[name].append((time.perf_counter() - began) / len(q) * 1e9)
    return {name: min(t) for name, t in taken.items()}


def largest(difference: Array) -> float:
    return float(np.abs(difference).max())


# ---- what is printed -------------------------------------------------------------------------------


def table(title: str, columns: list[str], rows: list[list[str]]) -> Table:
    out = Table(title=title, box=box.MARKDOWN, title_justify="left")
    for name in columns:
        out.add_column(name, justify="right", no_wrap=True)
    for cells in rows:
        out.add_row(*cells)
    return out


def tables(rows: list[Row]) -> list[Table]:
    names = ["native", "torch", "dense", "chebval", "chebvander", "cubic"]
    timed = [[r.name, f"{r.keys:,}", f"{r.numbers:,}", *(f"{r.ns[n]:,.0f}" for n in names)] for r in rows]
    rounding = [[r.name, f"{r.largest:.1e}", *(f"{r.rounding[n]:.1e}" for n in names[:3])] for r in rows]
    wrong = [[f"{r.error[n]:.1e}" for n in ("native", "chebval", "cubic")] for r in rows]
    return [
        table("Nanoseconds per query", ["head", "keys", "numbers", *names], timed),
        table(
            "Largest rounding (left) and largest distance to f (right)",
            ["head", "max|V|", *names[:3], "head − f", "chebval − f", "cubic − f"],
            [a + b for a, b in zip(rounding, wrong)],
        ),
    ]


def statements(rows: list[Row], unit: float) -> list[tuple[bool, str]]:
    """Roundings against the count: twice the additions of an axis-by-axis sum, of the largest value."""
    found = []
    for r in rows:
        worst, allowed = max(r.rounding["native"], r.rounding["torch"]), 200 * unit * r.largest
        found.append((worst <= allowed, f"{r.name}: rounding {worst:.1e} ≤ 200u·max|V| = {allowed:.1e}"))
    return found


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the queries, three repeats")
    parser.add_argument("--json", type=Path, help="write everything measured to this file")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", choices=["float64", "float32"], default="float64")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    if os.environ.get("OPENBLAS_NUM_THREADS") != str(
        options.threads
    ):  # numpy read it when it was imported: start again
        for library in ("OPENBLAS", "OMP", "NUMBA"):
            os.environ[f"{library}_NUM_THREADS"] = str(options.threads)
        os.execv(sys.executable, [sys.executable, *sys.argv])
    import torch

    torch.set_num_threads(options.threads)
    torch.set_grad_enabled(False)
    rows = [measure(case, options.dtype, options.quick) for case in CASES]
    console = Console(width=200)
    console.print(f"{platform.machine()}, {options.threads} thread(s), {options.dtype}", highlight=False)
    for part in tables(rows):
        console.print(part)
    verdicts = statements(rows, float(np.finfo(options.dtype).eps) / 2)
    for holds, text in verdicts:
        console.print(f"{'PASS' if holds else 'FAIL'}  {text}", highlight=False)
    if options.json:
        options.json.write_text(json.dumps([asdict(r) for r in rows], indent=1))
    return 0 if all(holds for holds, _ in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
