"""How fast claims are proved: enclosures and Taylor models per second, and the proofs of the accuracy table. One thread.

python benchmarks/boxes.py            # all tables, under two minutes
python benchmarks/boxes.py --markdown # as they stand in docs/soundness.md

Seconds are processor time, so that a busy machine does not change the figures.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")

import numpy as np
import torch
from accuracy import must_hold, show

import partita as pa
from partita.functions import Graph, parse

FUNCTIONS = {
    "sin(3x) + x cos(2y)": "sin(3*x0) + x0*cos(2*x1)",
    "x³ − 2xy + y² + ½": "x0^3 - 2*x0*x1 + x1^2 + 0.5",
    "exp(−x² − 2y²)": "exp(-x0^2 - 2*x1^2)",
    "1/(1 + 25(x² + y²))": "1/(1 + 25*(x0^2 + x1^2))",
    "max(x, y) + abs(x − y)": "max(x0, x1) + abs(x0 - x1)",
}
BATCHES = (256, 1024, 4096, 8192, 16384, 65536)
DEGREES = (1, 2, 4, 8)


def boxes(count: int, width: float = 1e-3, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Corners of random boxes of the square [-1, 1]², as narrow as a proof's."""
    lo = np.random.default_rng(seed).uniform(-1, 1 - width, (count, 2))
    return lo, lo + width


def rate(work: Callable[[], object], count: int, *, boxes_in_all: int = 60_000, tries: int = 7) -> float:
    """Boxes per second of processor time: the best of some tries."""
    work()
    repeats, best = max(1, boxes_in_all // count), float("inf")
    for _ in range(tries):
        start = time.process_time()
        for _ in range(repeats):
            work()
        best = min(best, (time.process_time() - start) / repeats)
    return count / best


def graph_of(name: str) -> Graph:
    return parse(FUNCTIONS[name], ["x0", "x1"])


def interval_rows() -> Iterator[tuple[str, ...]]:
    yield ("10⁶ boxes per second, enclosed", *(f"batches of {n:,}" for n in BATCHES), "with slopes, 4,096")
    for name in FUNCTIONS:
        graph = graph_of(name)
        found = []
        for n in BATCHES:
            lo, hi = boxes(n)
            found.append(rate(lambda lo=lo, hi=hi: graph.enclose(lo, hi), n))  # noqa: B023
        lo, hi = boxes(4096)
        slopes = rate(lambda lo=lo, hi=hi: graph.enclose_gradient(lo, hi), 4096)  # noqa: B023
        yield (name, *(f"{x / 1e6:.2f}" for x in found), f"{slopes / 1e6:.2f}")


def taylor_rows() -> Iterator[tuple[str, ...]]:
    yield ("10³ boxes per second, Taylor models", *(f"degree {d}" for d in DEGREES))
    middle, _ = boxes(1024)
    for name in FUNCTIONS:
        graph = graph_of(name)
        found = [rate(lambda d=d: graph.taylor(middle, 1e-3, d), 1024, boxes_in_all=4096) for d in DEGREES]  # noqa: B023
        yield (name, *(f"{x / 1e3:,.0f}" for x in found))


def proof_rows() -> Iterator[tuple[str, ...]]:
    yield ("target", "tolerance", "keys", "bound", "boxes", "seconds to prove again", "seconds of compile")
    for row in must_hold():
        start = time.process_time()
        c = pa.compile(row.expression, row.domain, tolerance=row.tolerance)
        built = time.process_time()
        checks = pa.recheck(c)
        proved = time.process_time()
        if not all(check.holds for check in checks):
            raise SystemExit(f"{row.name}: the proof does not hold when it is made again")
        yield (
            row.name,
            f"{row.tolerance:g}",
            f"{c.num_keys:,}",
            c.certificate.claim,
            f"{int(c.certificate.proof['boxes']):,}",
            f"{proved - built:.2f}",
            f"{built - start:.2f}",
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--markdown", action="store_true", help="tables as Markdown")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    pa.compile("x0", pa.Box([0.0], [1.0]), tolerance=0.1, method="hard")  # kernels compile themselves once
    for rows in (interval_rows, taylor_rows, proof_rows):
        show(rows(), arguments.markdown)


if __name__ == "__main__":
    main()
