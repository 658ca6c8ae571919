"""Heads whose tables are larger than memory: what building, proving, loading and evaluating one takes for each cell.

    python benchmarks/large_heads.py [--cells 1e7] [--method hard] [--dtype float32] [--folder DIR] [--workers N] [--check]

The tolerance is chosen so that the head has about so many cells. Its table is written to a folder that is removed at the end; 10⁹
cells in float32 take 4 GB there. "Anonymous memory" is RssAnon of this process, sampled every 10 ms, with what Python and torch
take (Linux only). Seconds are of the wall clock, and of this process's processor. `--check` also runs `partita-check` on the
folder, which takes some twenty microseconds for each cell.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

for _name in ("OMP", "OPENBLAS", "MKL", "NUMBA"):
    os.environ.setdefault(f"{_name}_NUM_THREADS", "1")  # before numpy is imported

import torch  # noqa: E402

import partita as pa  # noqa: E402

FUNCTION, DOMAIN = "sin(3*x0)*cos(2*x1) + x2/2", "[-1,1]^3"
QUERIES = 1_000_000
NO_LIMIT = 1 << 60  # bytes


class Memory(threading.Thread):
    """The most anonymous memory that this process had since the last look, in MiB."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most = 0.0

    def run(self) -> None:
        while True:
            self.most = max(self.most, self.now())
            time.sleep(0.01)

    @staticmethod
    def now() -> float:
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("RssAnon")).split()[1]) / 1024


class Table:
    """Prints a row for each step as it ends."""

    def __init__(self, memory: Memory) -> None:
        self.memory, self.cells = memory, 0
        print(f"{'step':<28}{'wall s':>10}{'cpu s':>10}{'ns of cpu':>12}{'anonymous MiB':>16}", flush=True)

    @contextmanager
    def row(self, name: str, per: int | None = None) -> Iterator[None]:
        self.memory.most = 0.0
        wall, cpu = time.perf_counter(), time.process_time()
        yield
        self.add(name, time.perf_counter() - wall, time.process_time() - cpu, per)

    def add(self, name: str, wall: float, cpu: float, per: int | None = None) -> None:
        each = 1e9 * cpu / (per or self.cells)
        most = max(self.memory.most, self.memory.now())
        print(f"{name:<28}{wall:>10.1f}{cpu:>10.1f}{each:>12.1f}{most:>16.0f}", flush=True)


def tolerance_for(cells: float, method: str, dtype: torch.dtype) -> float:
    """A tolerance at which the head has about so many cells, from plans, which evaluate f at few points."""
    tolerance, order, plans = (
        (0.1, 3, 6) if method == "hard" else (1e-3, 1.5, 1)
    )  # affine heads of 10⁵ cells are planned
    for _ in range(plans):
        keys = pa.plan(FUNCTION, DOMAIN, tolerance=tolerance, method=method, dtype=dtype, max_bytes=NO_LIMIT).keys
        tolerance *= (keys / cells) ** (1 / order)
    return tolerance


def build(folder: Path, table: Table, given: argparse.Namespace, tolerance: float) -> pa.Compiled:
    """Compile into the folder: one row until the values are written, one for all that follows."""
    clocks = time.perf_counter, time.process_time
    times = {"start": [clock() for clock in clocks]}

    def watch(what: str, done: int, of: int) -> None:
        if what == "values" and done == of:
            times["values"] = [clock() for clock in clocks]

    table.memory.most = 0.0
    c = pa.compile(
        FUNCTION,
        DOMAIN,
        tolerance=tolerance,
        method=given.method,
        dtype=getattr(torch, given.dtype),
        folder=folder,
        max_bytes=NO_LIMIT,
        executor=given.workers,
        progress=watch,
    )
    table.cells = c.num_keys
    end = [clock() for clock in clocks]
    values = times.get("values", times["start"])
    table.add("plan, compute and write", *(b - a for a, b in zip(times["start"], values)))
    table.add("prove, hash, attack, seal", *(b - a for a, b in zip(values, end)))
    return c


def measure(folder: Path, given: argparse.Namespace, memory: Memory) -> None:
    tolerance = tolerance_for(given.cells, given.method, getattr(torch, given.dtype))
    print(f"{FUNCTION} on {DOMAIN}, method {given.method}, {given.dtype}, tolerance {tolerance:.4g}")
    print(f"before: {memory.now():.0f} MiB of anonymous memory (Python, torch)")
    table = Table(memory)
    c = build(folder, table, given, tolerance)
    counts, bound = " × ".join(map(str, c.head.counts)), c.certificate.error_bound
    size = sum(path.stat().st_size for path in folder.iterdir())
    del c
    with table.row("load, every hash checked"):
        c = pa.load(folder)
    z = torch.rand(QUERIES, 3, generator=torch.Generator().manual_seed(0)).to(c.head.dtype) * 2 - 1
    with torch.no_grad():
        c.head(z * 1e-3)  # loads native kernels, and looks at few cells
        with table.row("10⁶ random queries", QUERIES):
            c.head(z)
        with table.row("the same again", QUERIES):
            c.head(z)
    with table.row("attack"):
        found = pa.attack(c)
    if given.check:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        wall, command = time.perf_counter(), [sys.executable, "-m", "partita_check", str(folder), "--budget", "1e6"]
        said = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        table.add("partita-check (its cpu)", time.perf_counter() - wall, after.ru_utime - before.ru_utime)
        print(said[-1])
    print(
        f"{counts} = {c.num_keys:,} cells, {size:,} bytes on disk, proved error ≤ {bound:.6g}, seen {found.error:.6g}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=float, default=1e7, help="about how many (10⁷)")
    parser.add_argument("--method", choices=["hard", "affine"], default="hard")
    parser.add_argument("--dtype", choices=["float64", "float32"], default="float32")
    parser.add_argument("--folder", type=Path, help="where there is room for the table (the system's temporary folder)")
    parser.add_argument("--workers", type=int, help="processes that compute values and proofs")
    parser.add_argument("--check", action="store_true", help="run partita-check as well")
    given = parser.parse_args()
    torch.set_num_threads(1)
    memory = Memory()
    memory.start()
    place = Path(tempfile.mkdtemp(prefix="large-heads-", dir=given.folder))
    try:
        measure(place / "head", given, memory)
    finally:
        shutil.rmtree(place)


if __name__ == "__main__":
    main()
