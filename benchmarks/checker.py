"""How long a stranger needs: compile (proof included), prove again, check in ball arithmetic, and the bracket that was verified.

python benchmarks/checker.py            # the targets of the accuracy table, and one head of every other construction
python benchmarks/checker.py --markdown # as it stands in docs/checker.md
python benchmarks/checker.py --shards 2 # long checks, whole and in two shards
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import torch
from accuracy import must_hold, show
from partita_check.cli import run, run_merge, run_shard
from partita_check.merging import write_result
from partita_check.shards import Shard

import partita as pa
from partita.reproduction.structured_functions import KNOWN_FUNCTIONS, bell_of, norm_wave_of, sines_of


@dataclass(frozen=True)
class Row:
    """One head: what to compile, and how."""

    name: str
    function: str
    domain: Any
    tolerance: float
    options: dict[str, Any] = field(default_factory=dict)


def rows() -> list[Row]:
    line, square = pa.Box([-1], [1]), pa.Box([-1, -1], [1, 1])
    engineering = [KNOWN_FUNCTIONS[name] for name in ("Ishigami", "OTL circuit", "wing weight", "robot arm")]
    table = [Row(r.name, r.expression, r.domain, r.tolerance) for r in must_hold()]
    return [
        *table,
        Row("sin 3x, 1e-8", "sin(3*x0)", line, 1e-8),
        Row("the first in float32", table[0].function, square, 1e-3, {"dtype": torch.float32}),
        Row("abs(x) sin x", "abs(x0)*sin(x0)", line, 1e-2),
        Row("the first, tuned", table[0].function, square, 2e-2, {"method": "tuned"}),
        Row("the first, hard", table[0].function, square, 1e-1, {"method": "hard"}),
        Row("the first, affine", table[0].function, square, 2e-2, {"method": "affine"}),
        Row("tanh 40x, adaptive", "tanh(40*x0)", line, 1e-2, {"method": "adaptive"}),
        Row("step x in L2", "step(x0)", line, 1e-1, {"norm": 2}),
        Row("Σ sin(3xᵢ), 10-D", sines_of(10), pa.Box([-1] * 10, [1] * 10), 1e-6),
        Row("exp(−Σ xᵢ²), 10-D", bell_of(10), pa.Box([-1] * 10, [1] * 10), 1e-5),
        Row("sin ‖x‖, 20-D", norm_wave_of(20), pa.Box([0.5] * 20, [1] * 20), 1e-4),
        *(Row(f"{f.name}, {len(f.lo)}-D", f.expression, f.box, 1e-3 * f.span) for f in engineering),
    ]


def measured(budget: float) -> Iterator[tuple[str, ...]]:
    yield (
        "target",
        "keys",
        "bound",
        "compile, CPU s",
        "recheck, CPU s",
        "check, CPU s",
        "verdict",
        "upper / lower",
        "how",
    )
    with tempfile.TemporaryDirectory() as place:
        for number, row in enumerate(rows()):
            start = time.process_time()
            compiled = pa.compile(row.function, row.domain, tolerance=row.tolerance, **row.options)
            compiling = time.process_time() - start
            folder = compiled.save(Path(place) / str(number))
            start = time.process_time()
            pa.recheck(pa.load(folder))
            proving = time.process_time() - start
            start = time.process_time()
            report, _ = run(folder, budget=budget)
            checking = time.process_time() - start
            verdict = report["verdict"] if isinstance(report["verdict"], str) else "verified, given …"
            seconds = [f"{s:.2f}" for s in (compiling, proving, checking)]
            ratio = str(report.get("bracket", "")).partition("ratio ")[2] or "–"
            how = str(report.get("method", "")).partition(";")[0]
            yield (row.name, f"{compiled.num_keys:,}", f"{compiled.error_bound:.3g}", *seconds, verdict, ratio, how)


def long_rows() -> list[Row]:
    """Heads with long checks: one that is as hard everywhere, one that is hard in a corner, and mixtures of cells."""
    cube, square = pa.Box([-1] * 3, [1] * 3), pa.Box([-1, -1], [1, 1])
    return [
        Row("exp(−x²−2y²)·sin(4z)", "exp(-x0^2-2*x1^2)*sin(4*x2)", cube, 1e-9, {"method": "fitted"}),
        Row("1/(1.8+x+y/4+z/9)", "1/(1.8+x0+x1/4+x2/9)", cube, 1e-5, {"method": "fitted"}),
        Row("sin(3x) + x cos(2y), affine", must_hold()[0].expression, square, 2e-2, {"method": "affine"}),
    ]


def measured_in(count: int, budget: float) -> Iterator[tuple[str, ...]]:
    """The CPU seconds of whole checks and of every shard, and whether the merge agrees."""
    yield ("target", "keys", "whole, CPU s", *(f"shard {k}/{count}" for k in range(1, count + 1)), "verdict", "merged")
    with tempfile.TemporaryDirectory() as place:
        for number, row in enumerate(long_rows()):
            compiled = pa.compile(row.function, row.domain, tolerance=row.tolerance, **row.options)
            folder = compiled.save(Path(place) / str(number))
            start = time.process_time()
            whole, _ = run(folder, budget=budget)
            seconds, paths = [time.process_time() - start], list[Path]()
            for k in range(1, count + 1):
                start = time.process_time()
                result = run_shard(folder, Shard(k, count), budget)[2]
                seconds.append(time.process_time() - start)
                paths.append(Path(place) / f"{number}-{k}.json")
                if result is not None:
                    write_result(result, paths[-1])
            merged, _ = run_merge(folder, paths)
            verdicts = str(whole["verdict"]), str(merged["verdict"])
            yield (row.name, f"{compiled.num_keys:,}", *(f"{s:.1f}" for s in seconds), *verdicts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--markdown", action="store_true", help="the table as Markdown")
    parser.add_argument("--budget", type=float, default=300.0, help="seconds that one check may take")
    parser.add_argument("--shards", type=int, metavar="N", help="only long checks, whole and in so many shards")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    pa.compile("x0", pa.Box([0.0], [1.0]), tolerance=0.1, method="hard")  # kernels compile themselves once
    found = measured(arguments.budget) if arguments.shards is None else measured_in(arguments.shards, arguments.budget)
    show(found, arguments.markdown)


if __name__ == "__main__":
    main()
