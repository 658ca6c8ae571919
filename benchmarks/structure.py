"""Many variables by structure: what `pa.compile` stores and proves where f is a sum or a composition, beside peers whose error is
sampled. One thread, and a process of its own for every target.

    python benchmarks/structure.py [NAME …]            # the targets: minutes; names may be shortened
    python benchmarks/structure.py --peers [NAME …]    # tensor train, sparse grids, trained network: up to five minutes for each
    python benchmarks/structure.py --show              # the tables, from benchmarks/results/structure.json
    python benchmarks/structure.py --show --page       # writes them into docs/benchmarks.md

Seconds are processor seconds. What was measured is merged into the results file. A line that begins with *holds* or *FAILS* states
what is asked of a target. The exit code is 1 if one fails.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")

import numpy as np
import torch
from torch import nn

import partita as pa
from partita.functions.target import make_target
from partita.heads.network import AttentionNetwork
from partita.reproduction.structured_functions import (
    KNOWN_FUNCTIONS,
    bell_of,
    norm_wave_of,
    sines_of,
    unequal_sines_of,
)

RESULTS = Path(__file__).parent / "results" / "structure.json"
PAGE = Path(__file__).parent.parent / "docs" / "benchmarks.md"
TEST_POINTS, PEER_SECONDS, TRAINING_SECONDS = 10_000, 60.0, 120.0
MLP = "MLP 8-64-64-1, GELU"


@dataclass(frozen=True)
class Case:
    """A function on a box with a tolerance, and what is asked: stored numbers and processor seconds at most, None if nothing is."""

    name: str
    expression: str
    box: pa.Box
    tolerance: float
    numbers: int | None = None
    seconds: float | None = None


def cube(m: int, lo: float = -1.0, hi: float = 1.0) -> pa.Box:
    return pa.Box([lo] * m, [hi] * m)


CASES = (
    Case("Σ sin(3x_i), 10-D", sines_of(10), cube(10), 1e-6, 60, 5.0),
    Case("Σ sin((1+i/50)x_i + i/7), 100-D", unequal_sines_of(100), cube(100), 1e-6, 2500, 60.0),
    Case("exp(−Σ x_i²), 10-D", bell_of(10), cube(10), 1e-5, 250),
    Case("sin(‖x‖), 20-D, [0.5, 1.5]", norm_wave_of(20), cube(20, 0.5, 1.5), 1e-4),
    *(Case(f"{f.name}, {f.box.dimension}-D", f.expression, f.box, 1e-3 * f.span) for f in KNOWN_FUNCTIONS.values()),
)
NAMES = (*(case.name for case in CASES), MLP)


@dataclass
class Row:
    """What was measured of one target. `memory` is what the process needed at its peak beyond the imports, in MB."""

    name: str
    m: int
    tolerance: float
    claim: str = ""
    stored: int = 0
    heads: int = 0
    uses: int = 0
    layers: int = 0
    keys: int = 0
    bound: float = math.inf
    seen: float = math.nan
    seconds: float = math.nan
    memory: float = math.nan
    refused: str = ""
    asked: dict[str, bool] = field(default_factory=dict)

    @property
    def holds(self) -> bool:
        return all(self.asked.values())


# Converted on 2026-11-16, before networks of heads had one path: the first call of a process, 0.01 s for the next.
MLP_BEFORE = Row(
    MLP,
    8,
    1e-3,
    "proved",
    stored=4881,
    heads=2,
    uses=128,
    layers=2,
    keys=1280,
    bound=4.876e-4,
    seen=5.8e-5,
    seconds=0.50,
)


def peak_memory() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(case: Case) -> Row:
    """Compile and attack one target."""
    row = Row(case.name, case.box.dimension, case.tolerance)
    pa.compile("x0", pa.Box([0.0], [1.0]), tolerance=0.1, method="hard")  # kernels compile themselves once
    memory, began = peak_memory(), time.process_time()
    try:
        c = pa.compile(case.expression, case.box, tolerance=case.tolerance)
    except pa.errors.PartitaError as error:
        row.refused = str(error).split("\n")[0]
        row.asked = {"proved": False}
        return row
    row.seconds, row.memory = time.process_time() - began, peak_memory() - memory
    describe(row, c.head)
    row.claim, row.stored = c.certificate.kind, c.num_parameters
    row.bound = c.error_bound if row.claim == "proved" else math.inf
    row.seen = c.attack(samples=20_000, seed=1).error
    row.asked = {
        "proved": row.claim == "proved" and row.bound <= case.tolerance,
        "the attack stays below the bound": row.seen <= row.bound,
    }
    if case.numbers is not None:
        row.asked[f"at most {case.numbers:,} numbers"] = row.stored <= case.numbers
    if case.seconds is not None:
        row.asked[f"at most {case.seconds:g} s"] = row.seconds <= case.seconds
    return row


def describe(row: Row, head: Any) -> None:
    """Heads that are stored, their uses, layers and keys. A single head is a network with one use of one head."""
    if isinstance(head, AttentionNetwork):
        row.heads, row.uses, row.layers = len(head.heads), head.num_uses, head.num_layers
    else:
        row.heads = row.uses = row.layers = 1
    row.keys = head.num_keys


def gelu_network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1)).double()


def measure_mlp() -> Row:
    """The network of the last row, beside what it was before."""
    row, model, box = Row(MLP, 8, 1e-3), gelu_network(), cube(8)
    memory, began = peak_memory(), time.process_time()
    net = pa.attention_from_mlp(model, box, row.tolerance)
    row.seconds, row.memory = time.process_time() - began, peak_memory() - memory
    x = torch.from_numpy(box.sample(20_000, np.random.default_rng(0)))
    with torch.no_grad():
        row.seen = float((net(x) - model(x)).abs().max())
    module = getattr(net, "head", net)
    row.stored = sum(t.numel() for t in module.state_dict().values())
    row.claim, row.bound = net.certificate.kind, net.error_bound
    if isinstance(module, AttentionNetwork):
        describe(row, module)
    else:
        row.heads, row.uses, row.layers, row.keys = 2, 128, 2, net.keys
    before = MLP_BEFORE
    row.asked = {
        "proved": row.claim == "proved" and row.bound <= row.tolerance,
        "the attack stays below the bound": row.seen <= row.bound,
        f"bound at most {before.bound:.2e}": row.bound <= before.bound * 1.001,
        f"at most {before.stored:,} numbers": row.stored <= before.stored,
        "at most 0.6 s": row.seconds <= 0.6,  # 0.5 before, and seconds vary by a fifth
    }
    return row


def measure_peers(case: Case) -> list[dict[str, Any]]:
    """Tensor train, sparse grids and a trained network on the same function."""
    from structure_peers import Peer, adaptive_grid, smolyak, trained_network

    lo, hi = case.box.lo, case.box.hi
    target = make_target(case.expression, case.box)

    def on_the_cube(z: np.ndarray) -> np.ndarray:
        return target(np.clip(lo + (z + 1) / 2 * (hi - lo), lo, hi))[:, 0]

    tests = np.random.default_rng(2024).uniform(-1, 1, (TEST_POINTS, case.box.dimension))
    began = time.process_time()
    try:
        c = pa.compile(case.expression, case.box, tolerance=case.tolerance, method="train", budget=PEER_SECONDS)
        error = float(np.abs(c(lo + (tests + 1) / 2 * (hi - lo)) - on_the_cube(tests)).max())
        found = [Peer("tensor train", c.num_parameters, error, time.process_time() - began, error <= case.tolerance)]
    except pa.errors.PartitaError as error:
        reason = str(error).split("\n")[0]
        found = [Peer("tensor train", 0, math.inf, time.process_time() - began, False, reason)]
    found += [grid(on_the_cube, tests, case.tolerance, PEER_SECONDS) for grid in (smolyak, adaptive_grid)]
    found.append(trained_network(on_the_cube, tests, case.tolerance, TRAINING_SECONDS))
    return [asdict(peer) for peer in found]


def in_its_own_process(name: str, peers: bool) -> Any:
    command = [sys.executable, __file__, "--measure", name, *(["--peers"] if peers else [])]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"{name}: the process ended with {done.returncode}.")
    return json.loads(done.stdout.splitlines()[-1])


# tables


def main_rows(results: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    yield (
        "target", "tolerance", "claim", "stored numbers", "heads (uses)", "layers", "keys", "proved bound", "worst seen",
        "seconds", "MB", "asked",
    )  # fmt: skip
    for name in NAMES:
        rows = [Row(**results["targets"][name])] if name in results["targets"] else []
        for row in rows + ([MLP_BEFORE] if name == MLP else []):
            asked = "holds" if row.holds else "FAILS: " + ", ".join(k for k, v in row.asked.items() if not v)
            if row.refused:
                yield (name, f"{row.tolerance:.3g}", f"refused: {row.refused}", *[""] * 8, asked)
                continue
            yield (
                name if row is not MLP_BEFORE else "the same, before",
                f"{row.tolerance:.3g}",
                row.claim,
                f"{row.stored:,}",
                f"{row.heads} ({row.uses})",
                str(row.layers),
                f"{row.keys:,}",
                f"{row.bound:.2e}",
                f"{row.seen:.2e}",
                f"{row.seconds:.2f}",
                "" if math.isnan(row.memory) else f"{row.memory:.0f}",
                asked if row is not MLP_BEFORE else "",
            )


def peer_rows(results: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    names = ("tensor train", "Smolyak", "adaptive sparse grid", "trained MLP")
    yield ("target", "tolerance", "heads and layers, proved", *(f"{name}, sampled" for name in names))
    for case in CASES:
        if case.name not in results["peers"]:
            continue
        ours = results["targets"].get(case.name, {})
        peers = {peer["name"]: peer for peer in results["peers"][case.name]}
        first = f"{ours['stored']:,}; {ours['bound']:.1e}" if ours.get("stored") else "–"
        yield (case.name, f"{case.tolerance:.3g}", first, *(peer_cell(peers[name]) for name in names))


def peer_cell(peer: dict[str, Any]) -> str:
    if not math.isfinite(peer["error"]):
        return "refused"
    text = f"{peer['stored']:,}; {peer['error']:.1e}; {peer['seconds']:.0f} s"
    return text if peer["met"] else f"missed: {text}"


def show(rows: Iterator[tuple[str, ...]]) -> str:
    """A table as Markdown."""
    header, *others = rows
    return "\n".join("| " + " | ".join(row) + " |" for row in (header, ("---",) * len(header), *others))


def with_tables(page: str, results: dict[str, Any]) -> str:
    """The page, with what is recorded in the place of its two tables."""
    for name, rows in (("targets", main_rows(results)), ("peers", peer_rows(results))):
        before, mark, after = page.partition(f"<!-- benchmarks/structure.py --show --page writes: {name} -->\n")
        page = before + mark + show(rows) + after[after.index("\n\n") :]
    return page


def read(path: Path) -> dict[str, Any]:
    empty: dict[str, Any] = {"targets": {}, "peers": {}, "machine": ""}
    return empty | (json.loads(path.read_text(encoding="utf-8")) if path.exists() else {})


def chosen(parts: list[str]) -> list[str]:
    """The targets whose names begin with one of these words; all if none is given."""
    found = [name for name in NAMES if not parts or any(name.lower().startswith(part.lower()) for part in parts)]
    if not found:
        raise SystemExit(f"no target begins with {parts}; the targets are {', '.join(NAMES)}.")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="targets, by the beginning of their names")
    parser.add_argument("--peers", action="store_true", help="measure the peers")
    parser.add_argument("--show", action="store_true", help="measure nothing")
    parser.add_argument("--page", action="store_true", help="write the tables into docs/benchmarks.md")
    parser.add_argument("--json", type=Path, default=RESULTS, help="the results file")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.measure:
        case = next((case for case in CASES if case.name == options.measure), None)
        row = measure_mlp() if case is None else measure(case) if not options.peers else None
        print(json.dumps(asdict(row) if row is not None else measure_peers(case)))
        return 0
    results = read(options.json)
    for name in [] if options.show else chosen(options.names):
        if options.peers and name == MLP:
            continue
        print(f"{name} …", file=sys.stderr, flush=True)
        results["peers" if options.peers else "targets"][name] = in_its_own_process(name, options.peers)
        results["machine"] = f"{platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}"
        options.json.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(show(main_rows(results)), show(peer_rows(results)), sep="\n\n")
    if options.page:
        PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8"), results), encoding="utf-8")
    rows = [Row(**results["targets"][name]) for name in NAMES if name in results["targets"]]
    return 0 if all(row.holds for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
