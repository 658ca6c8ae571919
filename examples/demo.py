"""Compile a function, certify it, save it, load it, recheck it, draw it, and verify it with the independent checker.

Run it with `make demo`, or `python examples/demo.py --out demo-output`.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.panel import Panel
from rich.table import Table

import partita as pa
from partita.plots import plot_head

EXPRESSION = "sin(3*x0) + x0*cos(2*x1)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("demo-output"))
    out = parser.parse_args().out
    console = Console()

    console.print(
        Panel.fit(
            f"[bold]{EXPRESSION}[/]  on  [bold][-1,1]²[/]  within  [bold]0.000001[/]",
            title="partita",
            border_style="blue",
        )
    )
    started = time.perf_counter()
    compiled = pa.compile(EXPRESSION, pa.Box([-1, -1], [1, 1]), tolerance=1e-6)
    seconds = time.perf_counter() - started
    for line in compiled.report().splitlines():
        console.print(
            f"  {line}", style="bold" if "→" in line else "dim", highlight=False, soft_wrap=True, markup=False
        )

    folder = compiled.save(out / "head", overwrite=True)
    stored = pa.load(folder)
    checks = pa.recheck(stored)
    picture = out / "cells.svg"
    plot_head(stored, picture)
    layers = pa.compile(EXPRESSION, pa.Box([-1, -1], [1, 1]), tolerance=0.5, method="hard").layers("log")

    table = Table(show_header=False, box=None, pad_edge=False)
    witness = stored.certificate.witness
    table.add_row(
        "head",
        f"one softmax over {stored.num_keys:,} keys, {stored.num_parameters:,} stored numbers, built in {seconds:.2f} s",
    )
    table.add_row(
        "claim",
        f"[bold green]{stored.certificate.kind}[/]: |f − head| ≤ [bold]{stored.error_bound:.3g}[/] everywhere on "
        f"the box, rounding included",
    )
    if witness is not None:
        table.add_row(
            "attack",
            f"worst of {witness.samples:,} points: {witness.error:.3g}, {witness.error / stored.error_bound:.0%} of the bound",
        )
    ok = all(check.holds for check in checks)
    table.add_row(
        "rechecked",
        f"{sum(c.holds for c in checks)} of {len(checks)} checks of hashes and arithmetic hold"
        if ok
        else "[bold red]the certificate does not hold[/]",
    )
    z = torch.tensor([[0.3, -0.4]], dtype=torch.float64)
    table.add_row(
        "try it", f"head(0.3, −0.4) = {stored(z).item():.8f}   f(0.3, −0.4) = {np.sin(0.9) + 0.3 * np.cos(0.8):.8f}"
    )
    table.add_row(
        "the paper's layers",
        f"at tolerance 0.5, log form: Linear and attention with {layers.num_keys:,} columns, {layers.num_parameters:,} numbers",
    )
    table.add_row("on disk", f"{folder}/  and  {picture}")
    console.print()
    console.print(table, soft_wrap=True)
    console.print("\n  partita-check, which shares no code with partita:", style="bold", highlight=False)
    sys.stdout.flush()
    command = [sys.executable, "-m", "partita_check", str(folder), "--function", EXPRESSION]
    checked = subprocess.run(command, check=False).returncode
    if not ok or checked:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
