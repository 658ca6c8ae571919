"""Pictures and tables of docs/benchmarks.md from what benchmarks/speed.py stored."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from speed_measure import machine_lines, rendered

Stored = dict[str, Any]
OURS = {"partita, proved": "black", "partita, estimated": "dimgray"}
# a block that is written here, e.g. `<!-- benchmarks/speed.py --plot writes: cpu error -->` before a fence
BLOCK = re.compile(r"(<!-- benchmarks/speed\.py --plot writes: (\w+) ([\w-]+) -->\n```text\n)(.*?)(```)", re.DOTALL)


def report(results: Path, docs: Path) -> Iterator[Path]:
    """Write docs/images/speed_*.svg and the blocks of docs/benchmarks.md; yield the files."""
    stored: dict[str, Stored] = {p.stem: json.loads(p.read_text("utf-8")) for p in sorted(results.glob("*.json"))}
    if not stored:
        raise SystemExit(f"{results}: no results; expected cpu.json or gpu.json, which `--out` writes.")
    page = docs / "benchmarks.md"
    page.write_text(filled(page.read_text("utf-8"), stored), "utf-8")
    yield page
    sections = {name: s for found in stored.values() for name, s in found["sections"].items()}
    for name, draw in (("error", draw_error), ("growth", draw_growth), ("gpu-scattered", draw_gpu)):
        if name in sections:
            figure = draw(sections[name])
            path = docs / "images" / f"speed_{name.split('-')[0]}.svg"
            figure.savefig(path, metadata={"Date": None}, bbox_inches="tight")
            yield path


def filled(page: str, stored: dict[str, Stored]) -> str:
    """The page with its blocks: `FILE machine` is the machine, `FILE SECTION` a section. Blocks without results stay."""

    def block(match: re.Match[str]) -> str:
        file, name = match[2], match[3]
        if file not in stored or (name != "machine" and name not in stored[file]["sections"]):
            return match[0]
        found = stored[file]
        text = (
            "\n".join(machine_lines(found["machine"])) + "\n"
            if name == "machine"
            else rendered(found["sections"][name])
        )
        return f"{match[1]}{text}{match[5]}"

    return BLOCK.sub(block, page)


def table(section: Stored, start: str) -> Iterator[dict[str, Any]]:
    """The rows of the table whose title starts so, as dicts; of columns with the same name the first counts."""
    found = next(t for t in section["tables"] if t["title"].startswith(start))
    names = [c[0] for c in found["columns"]]
    for row in found["rows"]:
        yield dict(reversed(list(zip(names, row))))


def canvas(columns: int, width: float) -> Any:
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "partita", "font.size": 9})
    from matplotlib import pyplot

    return pyplot.subplots(1, columns, figsize=(width, 3.4), layout="constrained")


def draw_error(section: Stored) -> Any:
    """Time against error, one panel per function: the fastest way of each family within each tolerance."""
    rows = list(table(section, "Every way"))
    functions = list(dict.fromkeys((r["function"], r["m"]) for r in rows))
    families = list(dict.fromkeys(r["family"] for r in rows))
    figure, axes = canvas(len(functions), 3.0 * len(functions))
    for (function, m), axis in zip(functions, [axes] if len(functions) == 1 else axes):
        for family in families:
            best: dict[float, float] = {}
            for r in rows:
                if (r["function"], r["family"]) == (function, family):
                    best[r["tolerance"]] = min(r["ns"], best.get(r["tolerance"], float("inf")))
            look = {"lw": 2.5, "marker": "o"} if family in OURS else {"lw": 1.2, "marker": "."}
            look |= {"color": OURS[family]} if family in OURS else {}
            look |= {"ls": "--", "color": "gray", "marker": ""} if family == "f itself" else {}
            if best:
                axis.plot(*zip(*sorted(best.items())), label=family, zorder=3 if family in OURS else 2, **look)
        axis.set(xscale="log", yscale="log", title=f"{function}, m = {m}", xlabel="tolerance")
        axis.invert_xaxis()
        axis.grid(alpha=0.3)
    first = axes if len(functions) == 1 else axes[0]
    first.set_ylabel("ns per query, one CPU thread")
    lines = {
        line.get_label(): line for axis in figure.axes for line in axis.get_lines()
    }  # not every peer has every dimension
    figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=len(lines), fontsize=8)
    return figure


def draw_growth(section: Stored) -> Any:
    """Cost against keys, queries and dimension."""
    figure, axes = canvas(3, 10.5)
    for title, column, label in (
        ("Keys: grid", "cells", "grid, window 2"),
        ("Keys: scattered", "keys", "scattered, κ = 6"),
    ):
        rows = list(table(section, title))
        axes[0].plot([r[column] for r in rows], [r["ns a query"] for r in rows], marker="o", label=f"{label}, m = 3")
    axes[0].set(xscale="log", yscale="log", xlabel="keys", ylabel="ns per query, one CPU thread", title="Keys")
    rows = list(table(section, "Queries"))
    axes[1].plot(
        [r["queries"] for r in rows], [r["ns a query"] for r in rows], marker="o", label="grid, window 2, m = 3"
    )
    axes[1].set(xscale="log", yscale="log", xlabel="queries in one call", title="Queries")
    rows = list(table(section, "Dimension"))
    for column, label in (("grid ns", "grid, window 2"), ("scattered ns", "scattered, κ = 6")):
        axes[2].plot([r["m"] for r in rows], [r[column] for r in rows], marker="o", label=label)
    axes[2].set(yscale="log", xlabel="dimension", title="Dimension")
    for axis in axes:
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    return figure


def draw_gpu(section: Stored) -> Any:
    """Error against time for scattered keys on a GPU, m = 3, as many queries as keys."""
    rows = [r for r in table(section, "Milliseconds") if r["m"] == 3 and isinstance(r["ms"], float)]
    size = min(r["keys"] for r in rows)
    figure, axis = canvas(1, 5.5)
    for r in rows:
        if r["keys"] == size and r["queries"] == size:
            axis.plot([r["ms"]], [max(r["error"], 1e-16)], "o", label=r["way"], ms=9 if r["way"] == "attend" else 6)
    axis.set(xscale="log", yscale="log", xlabel=f"ms, {size:,} queries × {size:,} keys, m = 3", ylabel="largest error")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=7)
    return figure
