"""Adaptive centers beside the uniform hard grid: keys, stored numbers, proofs, and how keys grow as the tolerance falls.

    python benchmarks/adaptive.py [--quick] [--json FILE]

Every head is built and proved (expressions) or estimated (black boxes) at the tolerance shown; "seen" is the largest error at
random points. The grid's keys are what `pa.plan(..., method="hard")` would take at the same tolerance, without building it.
Slopes are those of log(keys) against log(1/tolerance), by least squares.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from rich import box as boxes
from rich.console import Console
from rich.table import Table

import partita as pa
from partita.functions.target import Target, make_target
from partita.methods.adaptive import adaptive_construction as adaptive
from partita.search.adaptation import adaptive_cells as adaptive_recipe

Function = str | Callable[[NDArray], NDArray]
SAMPLES = 50_000
PEAK = "exp(-({x}^2 + {y}^2)/(2*0.01^2))"


@dataclass(frozen=True)
class Case:
    """One head: a function on a box, to a tolerance, in a dtype."""

    name: str
    function: Function
    lo: tuple[float, ...]
    hi: tuple[float, ...]
    tolerance: float
    dtype: str = "float64"
    slow: bool = False

    @property
    def box(self) -> pa.Box:
        return pa.Box(self.lo, self.hi)


@dataclass
class Row:
    """What came of it."""

    case: str
    tolerance: float
    keys: int
    numbers: int
    kind: str
    bound: float
    seen: float
    active: int
    boxes: int
    seconds: float
    grid: str


def _square(name: str, function: Function, tolerance: float, **options: bool | str) -> Case:
    return Case(name, function, (-1.0, -1.0), (1.0, 1.0), tolerance, **options)  # type: ignore[arg-type]


def _black_peak(z: NDArray) -> NDArray:
    return np.exp(-(z**2).sum(axis=1) / (2 * 0.01**2))


CASES = [
    _square("peak of width 0.01", PEAK.format(x="x", y="y"), 1e-2),
    _square("the same at (0.3, −0.7)", PEAK.format(x="(x - 0.3)", y="(y + 0.7)"), 1e-2),
    _square("the same, float32", PEAK.format(x="x", y="y"), 1e-2, dtype="float32"),
    _square("the same, black box", _black_peak, 1e-2),
    _square("peak of width 1e-4, hidden", "exp(-((x - 0.1643)^2 + (y + 0.4123)^2)/(2*0.0001^2))", 1e-2),
    Case("peak of width 1e-6, 1-D", "exp(-((x - 0.1643)/0.000001)^2)", (-1.0,), (1.0,), 1e-2),
    _square("|x + 0.7y − 0.1|", "abs(x + 0.7*y - 0.1)", 1e-2),
    _square("kinks + sin x", "max(x + y, 0.3*x - y) + sin(x)", 1e-2),
    _square("curved kink", "abs(x^2 + y - 0.2)", 1e-2),
    _square("boundary layer", "exp(-(1 + x)/0.01)", 1e-2),
    _square("boundary layer · cos 3y", "exp(-(1 + x)/0.01)*cos(3*y)", 1e-2, slow=True),
    _square("front tanh 50(x − y)", "tanh(50*(x - y))", 1e-2),
    _square("smooth", "sin(3*x) + x*cos(2*y)", 1e-2),
    _square("vector", "x*y, max(x, y)", 1e-2, slow=True),
    Case("sin 20x", "sin(20*x)", (-1.0,), (1.0,), 1e-2),
    Case("far from zero", "sin(x)", (1e6,), (1e6 + 1,), 1e-3),
    Case("sides 1 and 100", "sin(10*x)*(1 + y/100)", (0.0, -50.0), (1.0, 50.0), 5e-2),
    Case("Runge 3-D", "1/(1 + 25*(x^2 + y^2 + z^2))", (-1.0,) * 3, (1.0,) * 3, 5e-2, slow=True),
]
RATES = [
    _square("kinks + sin x", "max(x + y, 0.3*x - y) + sin(x)", math.nan),
    _square("curved kink", "abs(x^2 + y - 0.2)", math.nan),
    _square("front tanh 50(x − y)", "tanh(50*(x - y))", math.nan),
    _square("smooth", "sin(3*x) + x*cos(2*y)", math.nan),
]


def measure(case: Case, tolerance: float, *, polish: int = 1) -> Row:
    """Build, prove or estimate, and sample one head."""
    target = make_target(case.function, case.box)
    begin = time.perf_counter()
    recipe = adaptive_recipe(target, tolerance=tolerance, dtype=getattr(torch, case.dtype), polish=polish)
    seconds = time.perf_counter() - begin
    built = adaptive(target, recipe)
    z = case.box.sample(SAMPLES, np.random.default_rng(5))
    with torch.no_grad():
        answers = built.head.evaluate(torch.from_numpy(z).to(built.head.dtype)).double().numpy()
    return Row(
        case=case.name,
        tolerance=tolerance,
        keys=recipe.keys,
        numbers=recipe.parameters,
        kind=built.certificate.kind,
        bound=built.certificate.error_bound,
        seen=float(np.abs(answers - target(z)).max()),
        active=recipe.active,
        boxes=0 if recipe.proof is None else recipe.proof.boxes,
        seconds=seconds,
        grid=grid_keys(target, case, tolerance),
    )


def grid_keys(target: Target, case: Case, tolerance: float) -> str:
    """Keys of the uniform hard grid, or why there is none."""
    if target.graph is None:
        return "–"
    try:
        plan = pa.plan(case.function, case.box, tolerance=tolerance, method="hard", max_bytes=1 << 50)
    except pa.PartitaError as error:
        return type(error).__name__
    return f"{plan.keys:,}"


def slope(tolerances: list[float], keys: list[float]) -> float:
    """d log keys / d log(1/tolerance)."""
    return float(np.polyfit(-np.log(tolerances), np.log(keys), 1)[0])


def show(console: Console, rows: list[Row]) -> None:
    table = Table(box=boxes.SIMPLE, title="adaptive centers")
    for heading in (
        "function",
        "tolerance",
        "keys",
        "numbers",
        "directions",
        "claim",
        "seen",
        "boxes",
        "seconds",
        "uniform hard grid",
    ):
        table.add_column(heading, justify="left" if heading == "function" else "right")
    for r in rows:
        claim = f"≤ {r.bound:.3g} {r.kind}" if math.isfinite(r.bound) else r.kind
        cells = (f"{r.tolerance:g}", f"{r.keys:,}", f"{r.numbers:,}", r.active, claim, f"{r.seen:.2g}", f"{r.boxes:,}")
        table.add_row(r.case, *map(str, cells), f"{r.seconds:.1f}", r.grid)
    console.print(table)


def show_rates(console: Console, rows: dict[str, list[Row]]) -> None:
    tolerances = sorted({r.tolerance for part in rows.values() for r in part}, reverse=True)
    table = Table(box=boxes.SIMPLE, title="keys against tolerance: adaptive / uniform hard grid")
    for heading in ("function", *(f"{t:g}" for t in tolerances), "slope", "slope of the grid"):
        table.add_column(heading, justify="left" if heading == "function" else "right")
    for name, part in rows.items():
        grid = [float(r.grid.replace(",", "")) for r in part]
        cells = [f"{r.keys:,} / {r.grid}" for r in part]
        used = [r.tolerance for r in part]
        table.add_row(name, *cells, f"{slope(used, [float(r.keys) for r in part]):.2f}", f"{slope(used, grid):.2f}")
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer functions, larger tolerances")
    parser.add_argument("--json", type=Path, help="write the rows here too")
    options = parser.parse_args()
    console = Console(width=180)
    rows = [measure(case, case.tolerance) for case in CASES if not (options.quick and case.slow)]
    show(console, rows)
    tolerances = (0.1, 0.03, 0.01) if options.quick else (0.1, 0.03, 0.01, 0.003)
    rates = {case.name: [measure(case, t, polish=0) for t in tolerances] for case in RATES}
    show_rates(console, rates)
    if options.json:
        options.json.write_text(
            json.dumps([asdict(r) for r in [*rows, *(r for part in rates.values() for r in part)]], indent=1)
        )


if __name__ == "__main__":
    main()
