"""How small a head can be: keys against tolerance, and against Chebyshev interpolation at equal error. One thread.

python benchmarks/accuracy.py            # both tables, under a minute
python benchmarks/accuracy.py --markdown # as they stand in docs/benchmarks.md
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")

import numpy as np
import torch

import partita as pa


def sequence_map(norm: float = 1.5, seed: int = 0) -> str:
    """`tanh(Wz)` on two tokens of two coordinates, W of this spectral norm, as an expression."""
    w = np.random.default_rng(seed).normal(size=(4, 4))
    w *= norm / np.linalg.norm(w, 2)
    rows = ["tanh(" + " + ".join(f"({w[i, j]!r})*x{j}" for j in range(4)) + ")" for i in range(4)]
    return f"{rows[0]}, {rows[1]}; {rows[2]}, {rows[3]}".replace("np.float64", "")


@dataclass(frozen=True)
class Row:
    """One line of the first table: at most `limit` keys are allowed."""

    name: str
    expression: str
    domain: pa.Box
    tolerance: float
    limit: int


def must_hold() -> list[Row]:
    cube = [pa.Box([-1] * m, [1] * m) for m in (1, 2, 3)]
    return [
        Row("sin(3x) + x cos(2y)", "sin(3*x0) + x0*cos(2*x1)", cube[1], 1e-6, 144),
        Row("1/(1+25(x²+y²))", "1/(1+25*(x0^2+x1^2))", cube[1], 1e-4, 1450),
        Row("exp(−x²−2y²)·sin(4z)", "exp(-x0^2-2*x1^2)*sin(4*x2)", cube[2], 1e-5, 1800),
        Row("tanh(Wz), 2 × 2 tokens", sequence_map(), pa.Box.sequence(-1, 1, tokens=2, dim=2), 1e-3, 4500),
    ]


@dataclass(frozen=True)
class Function:
    """A function for both sides: numpy for the interpolant, an expression for the head."""

    name: str
    expression: str
    numpy: Callable[..., np.ndarray]
    dimension: int = 1


FUNCTIONS = [
    Function("exp x", "exp(x0)", np.exp),
    Function("sin 3x", "sin(3*x0)", lambda x: np.sin(3 * x)),
    Function("sin(10x+1)", "sin(10*x0+1)", lambda x: np.sin(10 * x + 1)),
    Function("cos 20x", "cos(20*x0)", lambda x: np.cos(20 * x)),
    Function("1/(1+25x²)", "1/(1+25*x0^2)", lambda x: 1 / (1 + 25 * x * x)),
    Function("tanh 5x", "tanh(5*x0)", lambda x: np.tanh(5 * x)),
    Function("exp(−20x²)", "exp(-20*x0^2)", lambda x: np.exp(-20 * x * x)),
    Function("log(1.2+x)", "log(1.2+x0)", lambda x: np.log(1.2 + x)),
    Function("sqrt(1.05+x)", "sqrt(1.05+x0)", lambda x: np.sqrt(1.05 + x)),
    Function("x⁸", "x0^8", lambda x: x**8),
    Function("sin 3x + x cos 2y", "sin(3*x0) + x0*cos(2*x1)", lambda x, y: np.sin(3 * x) + x * np.cos(2 * y), 2),
    Function("1/(1+25(x²+y²))", "1/(1+25*(x0^2+x1^2))", lambda x, y: 1 / (1 + 25 * (x * x + y * y)), 2),
    Function("exp(xy)cos(4x−y)", "exp(x0*x1)*cos(4*x0-x1)", lambda x, y: np.exp(x * y) * np.cos(4 * x - y), 2),
]
TOLERANCES = (1e-4, 1e-6, 1e-8)


def chebyshev_points(n: int) -> np.ndarray:
    return -np.cos(np.pi * (np.arange(n) + 0.5) / n)


def interpolation_matrix(n: int, at: np.ndarray) -> np.ndarray:
    """Values of the polynomial through n Chebyshev points, at other points: `(len(at), n)`."""
    vander = np.polynomial.chebyshev.chebvander
    return vander(at, n - 1) @ np.linalg.inv(vander(chebyshev_points(n), n - 1))


def chebyshev_error(f: Function, counts: tuple[int, ...], tests: int = 400) -> float:
    """The sup error of interpolation at a product of Chebyshev points, on a finer product of points with the ends."""
    at = np.concatenate([[-1.0], chebyshev_points(tests), [1.0]])
    values = f.numpy(*np.meshgrid(*map(chebyshev_points, counts), indexing="ij"))
    for axis, n in enumerate(counts):
        values = np.moveaxis(np.tensordot(interpolation_matrix(n, at), values, axes=(1, axis)), 0, axis)
    return float(np.abs(values - f.numpy(*np.meshgrid(*[at] * f.dimension, indexing="ij"))).max())


def chebyshev_coefficients(f: Function, tolerance: float) -> int:
    """The fewest coefficients with sup error ≤ tolerance; in 2-D the smallest product n_x·n_y."""
    if f.dimension == 1:
        n = 1
        while chebyshev_error(f, (n,), 2000) > tolerance:
            n += 1
        return n
    best = math.inf
    y = 2
    while chebyshev_error(f, (160, y)) > tolerance:
        y += 1
    start = y
    while y <= 2 * start + 8 and y < 160:
        x = 1
        while x * y < best and chebyshev_error(f, (x, y)) > tolerance:
            x += 1
        best = min(best, x * y)
        y += 1
    return int(best)


def size_rows() -> Iterator[tuple[str, ...]]:
    yield ("target", "tolerance", "keys at most", "keys", "stored numbers", "claim", "error", "worst seen", "seconds")
    for row in must_hold():
        start = time.perf_counter()
        c = pa.compile(row.expression, row.domain, tolerance=row.tolerance)
        seconds = time.perf_counter() - start
        verdict = "" if c.num_keys <= row.limit else " (too many)"
        seen = c.attack(samples=20_000, seed=1).error
        yield (
            row.name,
            f"{row.tolerance:g}",
            f"{row.limit:,}",
            f"{c.num_keys:,}{verdict}",
            f"{c.num_parameters:,}",
            c.certificate.kind,
            c.certificate.claim,
            f"{seen:.3g}",
            f"{seconds:.2f}",
        )


def ratio_rows() -> Iterator[tuple[str, ...]]:
    yield ("function on [−1,1]^m", *(f"{t:g}: keys / coefficients" for t in TOLERANCES), "claim")
    logs = []
    for f in FUNCTIONS:
        cells, kinds = [], set()
        for tolerance in TOLERANCES:
            m = f.dimension
            c = pa.compile(f.expression, pa.Box([-1] * m, [1] * m), tolerance=tolerance, method="fitted")
            coefficients = chebyshev_coefficients(f, tolerance)
            ratio = c.num_keys / coefficients
            logs.append(math.log(ratio))
            kinds.add(c.certificate.kind)
            cells.append(f"{c.num_keys} / {coefficients} = {ratio:.2f}")
        yield (f.name, *cells, ", ".join(sorted(kinds)))
    yield ("geometric mean", f"{math.exp(np.mean(logs)):.3f} over {len(logs)} (at most 0.85)", "", "", "")


def show(rows: Iterator[tuple[str, ...]], markdown: bool) -> None:
    for number, row in enumerate(rows):
        if markdown:
            print("| " + " | ".join(row) + " |", flush=True)
            if number == 0:
                print("|" + "---|" * len(row))
        else:
            print("  ".join(cell.ljust(w) for cell, w in zip(row, (24, *[22] * len(row)))).rstrip(), flush=True)
    print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--markdown", action="store_true", help="tables as Markdown")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    pa.compile("x0", pa.Box([0.0], [1.0]), tolerance=0.1, method="hard")  # kernels compile themselves once
    show(size_rows(), arguments.markdown)
    show(ratio_rows(), arguments.markdown)


if __name__ == "__main__":
    main()
