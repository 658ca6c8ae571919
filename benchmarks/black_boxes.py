"""How often `pa.compile` evaluates a black box, beside Chebyshev interpolation on a product grid.

    python benchmarks/black_boxes.py [--markdown] [--fresh 100000]

Nothing is declared about the functions. "evaluations" counts every point that the function received, the first probes and the final
check included. The peer is the smallest product of Chebyshev points whose interpolant meets the tolerance: it is found by trying
all small sizes with the function at hand, so its count is what a user with perfect foresight would need, without any check.
Errors are the largest seen at fresh random points: estimates.
"""

from __future__ import annotations

import argparse
import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich import box as styles
from rich.console import Console
from rich.table import Table

import partita as pa

Array = NDArray[np.float64]


def battery(z: Array) -> Array:
    """The voltage of a battery cell by current, temperature and state of charge."""
    current, kelvin, charge = z.T
    inverse = 1 / kelvin - 1 / 298.15
    open_circuit = 3.4 + 0.6 * charge + 0.1 * np.tanh(8 * (charge - 0.15)) - 0.05 * np.exp(-30 * charge)
    resistance = 0.02 * np.exp(1800 * inverse) * (1 + 0.5 * (charge - 0.5) ** 2)
    exchange = 1.6 * np.exp(-3000 * inverse)
    return open_circuit - current * resistance - 2 * 8.314 * kelvin / 96485 * np.arcsinh(current / exchange)


def cube(dimension: int) -> pa.Box:
    return pa.Box([-1] * dimension, [1] * dimension)


@dataclass(frozen=True, eq=False)
class Case:
    """A black box; `before` was counted once, before black boxes were interpolated; `most` is what is allowed."""

    name: str
    function: Callable[[Array], Array]
    box: pa.Box
    tolerance: float
    before: int
    most: int


CASES = [
    Case("the constant 1", lambda z: np.ones(len(z)), cube(2), 1e-2, 39_393, 350),
    Case("battery voltage", battery, pa.Box([0, 273, 0.05], [3, 323, 1]), 5e-3, 72_455, 1_500),
    Case(
        "exp(−x0²)·cos(x1) + x2·sin(2·x3)",
        lambda z: np.exp(-(z[:, 0] ** 2)) * np.cos(z[:, 1]) + z[:, 2] * np.sin(2 * z[:, 3]),
        cube(4),
        1e-2,
        122_563,
        3_000,
    ),
    Case(
        "sin 3x + x cos 2y", lambda z: np.sin(3 * z[:, 0]) + z[:, 0] * np.cos(2 * z[:, 1]), cube(2), 1e-6, 50_099, 1_000
    ),
    Case("sum of sin(x_i), 6-D", lambda z: np.sin(z).sum(axis=1), cube(6), 1e-2, 649_871, 1_000),
    Case("product of cos(x_i), 6-D", lambda z: np.cos(z).prod(axis=1), cube(6), 1e-2, 472_673, 10_000),
    Case("|x − 0.3|", lambda z: np.abs(z[:, 0] - 0.3), cube(1), 1e-2, 113_084, 2_000),
    Case(
        "|x − 0.3| + |y + 0.2|", lambda z: np.abs(z - np.array([0.3, -0.2])).sum(axis=1), cube(2), 5e-2, 112_422, 5_000
    ),
    Case("|(x, y)|", lambda z: np.sqrt((z**2).sum(axis=1)), cube(2), 3e-2, 73_728, 5_000),
    Case("1/(1 + 25(x² + y²))", lambda z: 1 / (1 + 25 * (z**2).sum(axis=1)), cube(2), 1e-3, 71_337, 5_000),
]


class Counted:
    """A numpy function that counts the rows that it receives."""

    def __init__(self, function: Callable[[Array], Array]) -> None:
        self.function, self.rows = function, 0
        self.__name__ = getattr(function, "__name__", "f")

    def __call__(self, z: Any) -> Array:
        self.rows += len(z)
        return self.function(np.asarray(z))


@dataclass(frozen=True)
class Row:
    """What was measured: keys, rows, the error at fresh points over the tolerance, seconds, and the peer's points."""

    keys: int
    claim: str
    evaluations: int
    ratio: float
    seconds: float
    chebyshev: int | None


def measure(case: Case, fresh: int, *, peer: bool = True) -> Row:
    """Compile one case and compare the head with the function at fresh points."""
    counted, start = Counted(case.function), time.process_time()
    c = pa.compile(counted, case.box, tolerance=case.tolerance)
    seconds = time.process_time() - start
    assert c.evaluations == counted.rows
    points = case.box.sample(fresh, np.random.default_rng(99))
    error = np.abs(c(torch.from_numpy(points)).numpy() - case.function(points)).max()
    sizes = chebyshev_points(case) if peer else None
    return Row(c.num_keys, c.certificate.kind, c.evaluations, float(error / case.tolerance), seconds, sizes)


def chebyshev_points(case: Case, most: int = 100_000) -> int | None:
    """The smallest product of Chebyshev points whose interpolant is within the tolerance at 2,000 points; None beyond `most`."""
    rng, m = np.random.default_rng(7), case.box.dimension
    points = case.box.sample(2_000, rng)
    truth = case.function(points)
    unit = 2 * (points - case.box.lo.ravel()) / case.box.sides - 1
    for scale in range(1, 41):
        small = range(max(1, scale - 12), scale + 1) if m < 4 else range(max(1, scale - 3), scale + 1)
        good = [
            math.prod(counts)
            for counts in itertools.product(small, repeat=m)
            if max(counts) == scale
            and math.prod(counts) <= most
            and _error(case, counts, unit, truth) <= case.tolerance
        ]
        if good:
            return min(good)
        if scale**m > 64 * most:
            return None
    return None


def _error(case: Case, counts: tuple[int, ...], unit: Array, truth: Array) -> float:
    nodes = [-np.cos((np.arange(n) + 0.5) * np.pi / n) for n in counts]
    grid = np.stack([g.ravel() for g in np.meshgrid(*nodes, indexing="ij")], axis=1)
    values = case.function(case.box.lo.ravel() + (grid + 1) / 2 * case.box.sides).reshape(counts)
    out = np.broadcast_to(values, (len(unit), *counts))
    for i, x in enumerate(nodes):
        n = len(x)
        basis = np.cos(np.arange(n) * np.arccos(np.clip(unit[:, i, None], -1, 1)))
        inverse = np.linalg.inv(np.cos(np.arange(n) * np.arccos(x)[:, None]))
        out = np.einsum("pn,pn...->p...", basis @ inverse, out)
    return float(np.abs(out - truth).max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--fresh", type=int, default=100_000, help="points at which the finished head is compared")
    parser.add_argument("--markdown", action="store_true", help="print the table of docs/benchmarks.md")
    options = parser.parse_args()
    names = (
        "function",
        "tolerance",
        "before",
        "evaluations",
        "keys",
        "claim",
        "error/tolerance",
        "seconds",
        "Chebyshev",
    )
    table = Table(*names, box=styles.MARKDOWN if options.markdown else styles.SIMPLE)
    for case in CASES:
        row = measure(case, options.fresh, peer=case.box.dimension < 4)
        shown = (f"{x:,}" for x in (case.before, row.evaluations, row.keys))
        peer = "–" if row.chebyshev is None else f"{row.chebyshev:,}"
        table.add_row(
            case.name.replace("|", "\\|") if options.markdown else case.name,
            f"{case.tolerance:g}",
            *shown,
            row.claim,
            f"{row.ratio:.2f}",
            f"{row.seconds:.1f}",
            peer,
        )
    Console(width=None if not options.markdown else 200).print(table)


if __name__ == "__main__":
    main()
