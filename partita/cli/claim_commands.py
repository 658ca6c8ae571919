"""Commands about what is claimed of a head: verify, attack, bounds."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.table import Table

from partita.cli.common import REFUSED, AsJson, Folder, emit, shown_progress, stdout
from partita.compiler.attack import attack
from partita.compiler.compiled import load
from partita.compiler.recheck import recheck
from partita.errors import UnsupportedError

__all__ = ["attack_command", "bounds_command", "verify_command"]


def verify_command(folder: Folder, as_json: AsJson = False) -> None:
    """Re-verify a certificate's hashes and arithmetic; exit 1 if anything does not hold."""
    checks = recheck(load(folder))
    holds = all(c.holds for c in checks)
    if as_json:
        lines = [{"name": c.name, "holds": c.holds, "detail": c.detail} for c in checks]
        print(json.dumps({"holds": holds, "checks": lines}, ensure_ascii=False))
    else:
        table = Table(box=None, show_header=False, pad_edge=False)
        for check in checks:
            table.add_row("[green]✓[/]" if check.holds else "[red]✗[/]", check.name, check.detail)
        stdout.print(table)
    if not holds:
        raise typer.Exit(REFUSED)


def attack_command(
    folder: Folder,
    bound: Annotated[
        float | None, typer.Option("--bound", help="A claim to attack instead of the certificate's.")
    ] = None,
    samples: Annotated[int, typer.Option("--samples", min=1, help="Random points.")] = 1 << 14,
    restarts: Annotated[int, typer.Option("--restarts", min=0, help="Points that gradient ascent starts from.")] = 64,
    seed: Annotated[int, typer.Option("--seed", min=0)] = 0,
    as_json: AsJson = False,
) -> None:
    """Search for a point where the claim is false; exit 1 if one is found. Finding none proves nothing."""
    found = attack(load(folder), bound=bound, samples=samples, restarts=restarts, seed=seed)
    emit({**asdict(found), "refuted": found.refuted}, as_json, str(found))
    if found.refuted:
        raise typer.Exit(REFUSED)


def bounds_command(folder: Folder, as_json: AsJson = False) -> None:
    """Proved beyond the error: the range of every output, the error of the gradient, and where the head rises or falls."""
    compiled = load(folder)
    with shown_progress("proof") as progress:
        data: dict[str, object] = {"range": [asdict(r) for r in compiled.bound_range(progress=progress)]}
        try:
            slopes = [compiled.bound_slope(i, progress=progress) for i in range(compiled.head.dimension)]
            data["slopes"] = [[{**asdict(r), "trend": r.trend} for r in ranges] for ranges in slopes]
            data["gradient_error"] = asdict(compiled.bound_gradient_error(progress=progress))
        except UnsupportedError as error:
            data["gradients"] = str(error)
    emit(data, as_json, _in_words(data))


def _in_words(data: dict[str, object]) -> str:
    """The same, line by line."""
    lines: list[str] = []
    for k, r in enumerate(data["range"]):  # type: ignore[arg-type, var-annotated]
        lines.append(
            f"output {k} lies in [{r['lo']:.6g}, {r['hi']:.6g}]  (seen: {r['seen_lo']:.6g} to {r['seen_hi']:.6g})"
        )
    for i, ranges in enumerate(data.get("slopes", [])):  # type: ignore[arg-type, var-annotated]
        for k, r in enumerate(ranges):
            trend = r["trend"] if r["trend"] != "unknown" else "no trend is proved"
            lines.append(f"∂output {k}/∂x{i} lies in [{r['lo']:.6g}, {r['hi']:.6g}]: {trend}")
    gradient = data.get("gradient_error")
    if gradient:
        pairs = zip(gradient["bounds"], gradient["seen"])  # type: ignore[index]
        lines += [f"|∂f/∂x{i} − ∂net/∂x{i}| ≤ {b:.4g}  (seen: {s:.4g})" for i, (b, s) in enumerate(pairs)]
    return "\n".join([*lines, *([str(data["gradients"])] if "gradients" in data else [])])
