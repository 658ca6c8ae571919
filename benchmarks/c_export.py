"""Heads as C beside the native kernels: nanoseconds for one evaluation in a loop, and the largest difference of the two.

`python benchmarks/c_export.py` takes a minute. Each C file is compiled with `-O3 -march=native` and called once per point, from a
loop in another file. The native kernel gets all points in one call, on one thread. The shortest of several runs counts.
"""

from __future__ import annotations

import argparse
import ctypes
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

import partita as pa

CASES = {
    "grid, 8 × 8 keys": lambda: pa.compile("sin(3*x0) + x0*cos(2*x1)", "[-1,1]^2", tolerance=1e-6),
    "grid, 8 × 8 keys, float32": lambda: pa.compile(
        "sin(3*x0) + x0*cos(2*x1)", "[-1,1]^2", tolerance=1e-2, dtype=torch.float32
    ),
    "grid, 3-D": lambda: pa.compile(
        "exp(-x0^2 - 2*x1^2)*sin(4*x2)", "[-1,1]^3", tolerance=1e-5, max_heads=1, max_layers=1
    ),
    "grid, windows and slopes": lambda: pa.compile(
        "sin(3*x0) + x0*cos(2*x1)", "[-1,1]^2", tolerance=1e-3, method="affine"
    ),
    "scattered": lambda: pa.compile("exp(-60*(x0^2+x1^2-0.4)^2)", "[-1,1]^2", tolerance=0.05, method="adaptive"),
    "network, 10-D": lambda: pa.compile(" + ".join(f"sin(3*x{i})" for i in range(10)), "[-1,1]^10", tolerance=1e-6),
}
LOOP = """
#include <time.h>
void head_eval(const REAL *in, REAL *out);
double nanoseconds(const REAL *in, REAL *out, int n, int m, int outs, int repeats)
{
    double best = 1e30;
    for (int r = 0; r < repeats; r++) {
        struct timespec a, b;
        clock_gettime(CLOCK_MONOTONIC, &a);
        for (int i = 0; i < n; i++) head_eval(in + (long)i * m, out + (long)i * outs);
        clock_gettime(CLOCK_MONOTONIC, &b);
        const double took = 1e9 * (double)(b.tv_sec - a.tv_sec) + (double)(b.tv_nsec - a.tv_nsec);
        best = took < best ? took : best;
    }
    return best / n;
}
"""


def in_c(c: pa.Compiled, points: np.ndarray, compiler: str, repeats: int) -> tuple[float, np.ndarray]:
    """Nanoseconds for each call of the C function, and its values."""
    real = "float" if c.head.dtype == torch.float32 else "double"
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        c.export_c(place / "head.c")
        (place / "loop.c").write_text(LOOP.replace("REAL", real))
        flags = ["-O3", "-march=native", "-shared", "-fPIC"]
        subprocess.run([compiler, *flags, "head.c", "loop.c", "-o", "head.so"], cwd=place, check=True)
        loop = ctypes.CDLL(str(place / "head.so")).nanoseconds
    loop.restype, loop.argtypes = ctypes.c_double, [ctypes.c_void_p] * 2 + [ctypes.c_int] * 4
    given = np.ascontiguousarray(points, dtype=np.float32 if real == "float" else np.float64)
    out = np.empty((len(points), c.head.num_outputs), dtype=given.dtype)
    return loop(given.ctypes.data, out.ctypes.data, len(points), points.shape[1], out.shape[1], repeats), out


def natively(c: pa.Compiled, points: np.ndarray, repeats: int) -> tuple[float, np.ndarray]:
    """Nanoseconds for each query of the native kernel, and its values."""
    flat, best = torch.from_numpy(points).to(c.head.dtype), float("inf")
    with torch.no_grad():
        out = c.head.evaluate(flat)
        for _ in range(repeats):
            start = time.perf_counter()
            c.head.evaluate(flat)
            best = min(best, time.perf_counter() - start)
    return best / len(points) * 1e9, out.numpy()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--points", type=int, default=1 << 18, help="queries")
    parser.add_argument("--repeats", type=int, default=15, help="runs of each; the fastest counts")
    options = parser.parse_args()
    torch.set_num_threads(1)
    compilers = [name for name in ("gcc", "clang") if shutil.which(name)]
    print(
        "| head | keys | native ns | "
        + " | ".join(f"{name} ns | over native" for name in compilers)
        + " | difference |"
    )
    print("|---" * (4 + 2 * len(compilers)) + "|")
    for name, make in CASES.items():
        c = make()
        points = c.target.domain.sample(options.points, np.random.default_rng(0))
        points = points.astype(np.float32).astype(np.float64) if c.head.dtype == torch.float32 else points
        native, expected = natively(c, points, options.repeats)
        cells, worst = [], 0.0
        for compiler in compilers:
            took, got = in_c(c, points, compiler, options.repeats)
            worst = max(worst, float(np.abs(got.astype(float) - expected.astype(float)).max()))
            cells.append(f"{took:.1f} | {took / native:.2f}")
        print(f"| {name} | {c.num_keys:,} | {native:.1f} | {' | '.join(cells)} | {worst:.1e} |", flush=True)


if __name__ == "__main__":
    main()
