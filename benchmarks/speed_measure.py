"""How benchmarks/speed.py measures and prints: interleaved repeats, tables of plain numbers, targets beside the figures."""

from __future__ import annotations

import importlib.metadata
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Cell = Any  # a number, a text, a dict that `_way` prints, or None


@dataclass(frozen=True)
class Job:
    """One evaluator: `prepare` brings points `(n, m)` into its own layout, outside the clock; `run` answers them."""

    run: Callable[[Any], Any]
    prepare: Callable[[Array], Any] = lambda z: z
    most: int = 1 << 62  # queries in one call
    whole: bool = False  # never ask fewer: heads run small batches another way

    def __call__(self, z: Array) -> Array:
        return np.asarray(self.run(self.prepare(z))).reshape(len(z), -1)


@dataclass
class Section:
    """What one section measured. Columns are `(name, kind)`; kinds are those of `FORMATS`."""

    name: str
    about: str
    tables: list[dict[str, Any]] = field(default_factory=list)
    targets: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def table(self, title: str, columns: Sequence[tuple[str, str]], rows: list[list[Cell]], shown: bool = True) -> None:
        """Keep a table; one that is not shown is only written to the file."""
        self.tables.append({"title": title, "columns": [list(c) for c in columns], "rows": rows, "shown": shown})

    def target(self, what: str, figure: float | None, limit: float, unit: str = "×", *, least: bool = False) -> None:
        """Keep a figure with its target: at most `limit`, or at least."""
        holds = figure is not None and (figure >= limit if least else figure <= limit)
        self.targets.append(
            {"what": what, "figure": figure, "limit": limit, "unit": unit, "least": least, "holds": bool(holds)}
        )


# ---- clocks --------------------------------------------------------------------------------------


def interleaved(calls: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Seconds of one call, the fastest of the repeats; every call runs once before the clock starts."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for run in calls.values():
        run()
    for _ in range(repeats):
        for name, run in calls.items():
            began = time.perf_counter()
            run()
            taken[name].append(time.perf_counter() - began)
    return {name: min(t) for name, t in taken.items()}


def nanoseconds(jobs: dict[str, Job], z: Array, repeats: int, seconds: float = 0.1) -> dict[str, tuple[float, int]]:
    """Nanoseconds per query and the size of the batch: all of z, or as many queries as take about `seconds`."""
    calls: dict[str, Callable[[], Any]] = {}
    sizes: dict[str, int] = {}
    for name, job in jobs.items():
        most = min(len(z), job.most)
        size = most if job.whole else min(256, most)
        for _ in range(0 if job.whole else 2):
            given = job.prepare(z[:size])
            job.run(given)
            began = time.perf_counter()
            job.run(given)
            each = (time.perf_counter() - began) / size
            size = int(min(most, max(size, seconds / max(each, 1e-12))))
        calls[name], sizes[name] = partial(job.run, job.prepare(z[:size])), size
    found = interleaved(calls, repeats)
    return {name: (found[name] / sizes[name] * 1e9, sizes[name]) for name in jobs}


def whole_batches(jobs: dict[str, Job], z: Array, repeats: int) -> dict[str, float]:
    """Nanoseconds per query of all of z in one call."""
    found = interleaved({name: partial(job.run, job.prepare(z)) for name, job in jobs.items()}, repeats)
    return {name: seconds / len(z) * 1e9 for name, seconds in found.items()}


def device_milliseconds(run: Callable[[], Any], device: str, repeats: int, warm: int = 3) -> float:
    """The median time of one call on a device, by events around it; what the call waits for on the host is included."""
    import torch

    for _ in range(warm):
        run()
    if device == "cpu":
        return statistics.median(_timed(run) for _ in range(repeats)) * 1e3
    torch.cuda.synchronize()
    taken = []
    for _ in range(repeats):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        events[0].record()
        run()
        events[1].record()
        events[1].synchronize()
        taken.append(events[0].elapsed_time(events[1]))
    return float(statistics.median(taken))


def _timed(run: Callable[[], Any]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def largest(difference: Array) -> float:
    """The largest |entry|; NaN if there is one."""
    return float(np.abs(np.asarray(difference)).max())


# ---- the machine -----------------------------------------------------------------------------------

PACKAGES = ("numpy", "scipy", "torch", "numba", "interpn", "pykeops", "triton")


def version(package: str) -> str | None:
    """The installed version, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def machine(device: str) -> dict[str, Any]:
    """What the figures were measured on."""
    import torch

    cpu = Path("/proc/cpuinfo")
    models = [s for s in cpu.read_text().splitlines() if s.startswith("model name")] if cpu.exists() else []
    return {
        "cpu": models[0].split(":")[1].strip() if models else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu, one thread",
        "python": platform.python_version(),
        "packages": {name: version(name) for name in PACKAGES},
    }


def machine_lines(found: dict[str, Any]) -> list[str]:
    """Two lines: the machine, and the packages or "not installed"."""
    packages = ", ".join(f"{n} {v or 'not installed'}" for n, v in found["packages"].items())
    return [f"{found['device']}; {found['cpu']}, {found['cores']} cores; Python {found['python']}", packages]


# ---- what is printed -------------------------------------------------------------------------------


def short(x: float) -> str:
    """Three digits."""
    return f"{x:,.0f}" if abs(x) >= 100 else f"{x:.3g}"


def _way(cell: dict[str, Any]) -> str:
    numbers = "" if cell.get("numbers") is None else f" {count(cell['numbers'])}"
    return f"{short(cell['ns'])}{numbers} {cell['error']:.0e}"


def count(n: float) -> str:
    """1,234, or 1.2e7."""
    return f"{n:,.0f}" if n < 10**5 else f"{n:.1e}".replace("e+0", "e")


FORMATS: dict[str, Callable[[Any], str]] = {
    "text": str,
    "count": lambda n: f"{n:,}",
    "number": short,
    "error": lambda e: f"{e:.1e}",
    "way": _way,
}


def formatted(cell: Cell, kind: str) -> str:
    """A cell as text: "–" for what there is not, texts as they are, numbers by the column's kind."""
    if cell is None or (isinstance(cell, float) and math.isnan(cell) and kind != "error"):
        return "–"
    return cell if isinstance(cell, str) else FORMATS[kind](cell)


def rendered(section: dict[str, Any]) -> str:
    """A section as text: its tables, targets and notes."""
    lines: list[str] = []
    for table in section["tables"]:
        if table["shown"]:
            lines += [table["title"], *_aligned(table["columns"], table["rows"]), ""]
    for t in section["targets"]:
        figure = "not measured" if t["figure"] is None else f"{short(t['figure'])}{t['unit']}"
        sign = "≥" if t["least"] else "≤"
        lines.append(
            f"{'holds' if t['holds'] else 'FAILS'}  {t['what']}: {figure} (target {sign} {t['limit']:g}{t['unit']})"
        )
    return "\n".join([*lines, *section["notes"]]).rstrip() + "\n"


def _aligned(columns: list[list[str]], rows: list[list[Cell]]) -> list[str]:
    cells = [[name for name, _ in columns]]
    cells += [[formatted(c, kind) for c, (_, kind) in zip(row, columns, strict=True)] for row in rows]
    widths = [max(len(r[i]) for r in cells) for i in range(len(columns))]
    left = [kind == "text" for _, kind in columns]
    return [
        "  ".join(c.ljust(w) if first else c.rjust(w) for c, w, first in zip(row, widths, left)).rstrip()
        for row in cells
    ]
