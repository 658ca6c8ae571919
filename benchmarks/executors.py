"""What workers are worth: a slow function and a long proof with one and two warm Dask workers, and the cost of having no executor.

`python benchmarks/executors.py` takes about five minutes. `--before FOLDER` also times a checkout from before there were executors.
Every comparison checks that the results are the same bits.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import partita as pa

SQUARE = pa.Box([-1, -1], [1, 1])
CALL = 0.02  # seconds
PROOF = ("sin(3*x0)*cos(2*x1) + x2/2", pa.Box([-1, -1, -1], [1, 1, 1]), 5e-5)  # three million cells
ALONE = """
import sys, time
import partita as pa
case = (("1/(1+25*(x0^2+x1^2))", 1e-4), ("sin(3*x0) + x0*cos(2*x1)", 1e-6), ("abs(x0^2 + x1 - 0.2)", 0.05))
times = []
for text, tolerance in case:
    pa.compile(text, "[-1,1]^2", tolerance=tolerance)
for line in sys.stdin:
    start = time.perf_counter()
    for text, tolerance in case:
        pa.attack(pa.compile(text, "[-1,1]^2", tolerance=tolerance))
    pa.compile(lambda z: (z[:, 0] * z[:, 1]) ** 2, "[-1,1]^2", tolerance=0.01, trace=False)
    print(time.perf_counter() - start, flush=True)
"""


def simulator(point: Any) -> float:
    """A function of one point that computes for 20 ms."""
    ended, x, y = time.perf_counter() + CALL, *map(float, point)
    value = np.sin(3 * x) + x * np.cos(2 * y)
    while time.perf_counter() < ended:
        np.dot(_SQUARE, _SQUARE)
    return float(value)


_SQUARE = np.ones((40, 40))


def bits(c: pa.Compiled) -> list[Any]:
    """All that a result consists of."""
    return [c.certificate.to_json(), *(t.numpy().tobytes() for t in c.head.state_dict().values())]


def timed(work: Callable[[], list[Any]], repeats: int) -> tuple[float, list[Any]]:
    """The shortest time of so many runs, and the result."""
    best, found = float("inf"), []
    for _ in range(repeats):
        start = time.perf_counter()
        found = work()
        best = min(best, time.perf_counter() - start)
    return best, found


def with_workers(count: int, work: Callable[[Any], list[Any]], repeats: int) -> tuple[float, list[Any]]:
    """`work` with a Dask client of so many warm workers."""
    import distributed

    with (
        distributed.LocalCluster(n_workers=count, threads_per_worker=1, dashboard_address=None) as cluster,
        distributed.Client(cluster, set_as_default=False) as client,
    ):
        client.wait_for_workers(count)
        client.run(_warm)
        return timed(lambda: work(client), repeats)


def _warm() -> None:
    """What a worker loads at its first task otherwise."""
    import torch
    from threadpoolctl import threadpool_limits

    threadpool_limits(limits=1)
    torch.set_num_threads(1)
    pa.compile("1/(1+25*(x0^2+x1^2))", SQUARE, tolerance=1e-2)


def slow_function(client: Any) -> list[Any]:
    """Compile a function of 20 ms a call, and attack the head."""
    c = pa.compile(simulator, SQUARE, tolerance=3e-3, vectorize=True, trace=False, executor=client)
    found = pa.attack(c, bound=0.1, samples=1000, restarts=4, executor=client)
    print(f"    {c.evaluations:,} calls for the head", file=sys.stderr)
    return [*bits(c), found]


def long_proof(client: Any) -> list[Any]:
    """Recheck a head whose proof is long."""
    return [[(k.name, k.holds, k.detail) for k in pa.recheck(_head(), executor=client)]]


def _head() -> pa.Compiled:
    if not _HEADS:
        text, box, tolerance = PROOF
        folder = Path(_FOLDER.name) / "head"  # tables of this size are written to a disk
        _HEADS.append(pa.compile(text, box, tolerance=tolerance, method="affine", folder=folder, max_bytes=1 << 30))
    return _HEADS[0]


_HEADS: list[pa.Compiled] = []
_FOLDER = tempfile.TemporaryDirectory()


def without_executor(before: Path, repeats: int) -> tuple[float, float]:
    """Seconds for ordinary work there and here, in processes that take turns: the shortest of the runs."""
    running, best = [], [float("inf"), float("inf")]
    for folder in (before, Path(__file__).parent.parent):
        environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", ALONE]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        running.append(subprocess.Popen(command, text=True, env=environment, cwd="/", **pipes))
    for _ in range(repeats):
        for i, process in enumerate(running):
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write("again\n")
            process.stdin.flush()
            best[i] = min(best[i], float(process.stdout.readline()))
    for process in running:
        process.communicate()
    return best[0], best[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=2, help="runs of each measurement; the fastest counts")
    parser.add_argument("--before", type=Path, help="a checkout from before there were executors")
    parser.add_argument("--only", choices=["function", "proof", "alone"], help="measure one of them")
    options = parser.parse_args()
    cases = {"function": (slow_function, 1.8), "proof": (long_proof, 1.7)}
    for name, (work, asked) in cases.items():
        if options.only not in (None, name):
            continue
        (one, first), (two, second) = (with_workers(count, work, options.repeats) for count in (1, 2))
        same = "same bits" if first == second else "DIFFERENT BITS"
        holds = "holds" if one / two >= asked else "missed"
        print(f"{name:9} one worker {one:6.1f} s, two {two:6.1f} s: {one / two:.2f}x, {same}; {asked} asked: {holds}")
    if options.before is not None and options.only in (None, "alone"):
        there, here = without_executor(options.before, 3 * options.repeats)
        print(f"alone     before {there:.3f} s, now {here:.3f} s: {here / there:.3f}")


if __name__ == "__main__":
    main()
