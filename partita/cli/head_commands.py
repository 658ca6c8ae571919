"""Commands that make heads and use them: plan, compile, eval, plot, export."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from partita.cli.common import (
    Accept,
    AsJson,
    Budget,
    Domain,
    Dtype,
    Expression,
    Folder,
    Lipschitz,
    MaxBytes,
    Method,
    Norm,
    Sharpness,
    Tolerance,
    dtype_named,
    emit,
    parse_domain,
    shown_progress,
    stderr,
)
from partita.compiler.clock import Clock
from partita.compiler.compile import build
from partita.compiler.compiled import Compiled, load, require_outside
from partita.compiler.planner import plan, report
from partita.errors import DomainError
from partita.functions.probing import split_flat
from partita.methods.method import Plan
from partita.methods.request import DEFAULT_MAX_BYTES
from partita.plots import plot_head
from partita.proofs.proof import Progress
from partita.storage import require_free

__all__ = ["compile_command", "eval_command", "export_command", "plan_command", "plot_command"]


def _plan(
    expression: str,
    domain: str,
    tolerance: float,
    norm: str,
    dtype: str,
    lipschitz: float | None,
    sharpness: float | None,
    max_bytes: int,
    method: str,
    accept: str,
    *,
    progress: Progress | None = None,
) -> Plan:
    return plan(
        expression,
        parse_domain(domain),
        tolerance=tolerance,
        norm=norm,
        dtype=dtype_named(dtype),
        lipschitz=lipschitz,
        sharpness=sharpness,
        max_bytes=max_bytes,
        method=method,
        accept=accept,
        progress=progress,
    )


def plan_command(
    expression: Expression,
    domain: Domain,
    tolerance: Tolerance,
    norm: Norm = "inf",
    dtype: Dtype = "float64",
    lipschitz: Lipschitz = None,
    method: Method = "auto",
    accept: Accept = "strongest",
    sharpness: Sharpness = None,
    max_bytes: MaxBytes = DEFAULT_MAX_BYTES,
    as_json: AsJson = False,
) -> None:
    """Sizes before anything is built: keys, stored numbers, bytes, bound, and why."""
    planned = _plan(expression, domain, tolerance, norm, dtype, lipschitz, sharpness, max_bytes, method, accept)
    emit(
        planned.to_json(),
        as_json,
        f"{planned}\n\n{report(planned.candidates)}\n\nthe certificate will be {planned.kind} (asked: {tolerance:g})",
    )


def compile_command(
    expression: Expression,
    domain: Domain,
    tolerance: Tolerance,
    out: Annotated[Path, typer.Option("--out", help="The folder to write.")],
    norm: Norm = "inf",
    dtype: Dtype = "float64",
    lipschitz: Lipschitz = None,
    method: Method = "auto",
    accept: Accept = "strongest",
    sharpness: Sharpness = None,
    max_bytes: MaxBytes = DEFAULT_MAX_BYTES,
    budget: Budget = None,
    outside: Annotated[
        str, typer.Option("--outside", help="Inputs outside the domain: raise, clamp or allow.")
    ] = "raise",
    seed: Annotated[
        int, typer.Option("--seed", min=0, help="Of the attack whose worst point goes into the certificate.")
    ] = 0,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a head that is already there.")] = False,
    as_json: AsJson = False,
) -> None:
    """Build the head, certify it, attack it, and save it."""
    require_free(out, overwrite=overwrite)
    require_outside(outside)
    with shown_progress("planning") as progress:
        clock = Clock(budget, progress)
        planned = _plan(
            expression,
            domain,
            tolerance,
            norm,
            dtype,
            lipschitz,
            sharpness,
            max_bytes,
            method,
            accept,
            progress=clock.until(0.67),
        )
        compiled = build(planned, outside=outside, seed=seed, progress=clock.until(1.0))
    place = compiled.save(out, overwrite=overwrite)
    summary = {
        **planned.to_json(),
        "method": compiled.candidates[0].method,
        "kind": compiled.certificate.kind,
        "keys": compiled.num_keys,
        "parameters": compiled.num_parameters,
        "error_bound": None if compiled.error_estimate is not None else compiled.error_bound,
        "error_estimate": compiled.error_estimate,
        "candidates": [asdict(c) for c in compiled.candidates],
        "worst_error_seen": compiled.certificate.witness and compiled.certificate.witness.error,
        "saved": str(place),
    }
    emit(summary, as_json, f"{compiled.explain()}\n\n{compiled.report()}\n\nsaved in {place}/")


def eval_command(
    folder: Folder,
    points: Annotated[
        Path,
        typer.Argument(
            metavar="POINTS.csv", help="One point per line, coordinates separated by commas; '-' reads standard input."
        ),
    ],
    outside: Annotated[
        str | None, typer.Option("--outside", help="raise, clamp or allow; the head's own rule by default.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Values at the points of a CSV file, one line each."""
    compiled = load(folder)
    if outside is not None:
        compiled = compiled.with_outside(outside)
    table = _read_points(points, compiled)
    values = compiled(*split_flat(table, compiled.head.input_shapes)).reshape(len(table), -1)
    lines = "\n".join(",".join(repr(float(x)) for x in row) for row in values)
    if as_json:
        print(
            json.dumps(
                {"values": values.tolist(), "error_bound": compiled.error_bound, "kind": compiled.certificate.kind}
            )
        )
    elif lines:
        print(lines)


def _read_points(path: Path, compiled: Compiled) -> np.ndarray:
    text = sys.stdin.read() if str(path) == "-" else _text(path)
    rows, m = [], compiled.head.dimension
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        fields = re.split(r"[,;\s]+", line.strip())
        if number == 1 and not any(map(_is_number, fields)):
            continue  # a header
        if not all(map(_is_number, fields)):
            raise DomainError(f"{path}, line {number}: {line!r} is not a list of numbers.")
        row = [float(x) for x in fields]
        if len(row) != m:
            raise DomainError(f"{path}, line {number}: {len(row)} numbers; this head takes {m}.")
        rows.append(row)
    return np.array(rows, dtype=np.float64).reshape(-1, m)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DomainError(f"{path} cannot be read: {error}.") from None


def plot_command(
    folder: Folder,
    out: Annotated[Path, typer.Option("--out", help="A .svg, .png or .pdf file.")],
    output: Annotated[int, typer.Option("--output", help="Which scalar output.")] = 0,
    axes: Annotated[tuple[int, int], typer.Option("--axes", help="Which two coordinates, when there are more.")] = (
        0,
        1,
    ),
    as_json: AsJson = False,
) -> None:
    """The head, its cells and its error in one picture."""
    place = plot_head(load(folder), out, output=output, axes=axes)
    emit({"figure": str(place)}, as_json, f"wrote {place}")


def export_command(
    folder: Folder,
    onnx: Annotated[Path, typer.Option("--onnx", help="The ONNX file to write.")],
    as_json: AsJson = False,
) -> None:
    """The head as ONNX, with a dynamic batch axis."""
    with stderr.status("exporting"):
        place = load(folder).export_onnx(onnx)
    emit(
        {"onnx": str(place), "bytes": place.stat().st_size}, as_json, f"wrote {place} ({place.stat().st_size:,} bytes)"
    )
