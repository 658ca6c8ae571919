"""The command `partita eval`: a head's values at the points of a file."""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from numpy.typing import NDArray

import partita as pa
from partita.cli.common import AsJson, Folder
from partita.errors import DomainError, OutsideDomainError
from partita.functions.probing import split_flat

__all__ = ["eval_command"]


def eval_command(
    folder: Folder,
    points: Annotated[
        Path,
        typer.Argument(
            metavar="POINTS.csv",
            help="One point per line, coordinates separated by commas; a header is allowed. '-' reads standard input.",
        ),
    ],
    outside: Annotated[
        str | None,
        typer.Option(
            "--outside",
            help="What to do with points outside the domain: raise, clamp or allow.",
            show_default="as compiled",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print the head's values at the points of a CSV file, one line per point."""
    compiled = pa.load(folder)
    if outside is not None:
        compiled = compiled.with_outside(outside)
    table = _read_points(points, compiled.head.dimension)
    try:
        values = compiled(*split_flat(table, compiled.head.input_shapes)).reshape(len(table), -1)
    except OutsideDomainError as error:
        raise OutsideDomainError(error.reason, "Use --outside clamp or --outside allow.") from None
    if not as_json:
        print("\n".join(",".join(repr(float(x)) for x in row) for row in values))
        return
    bound = compiled.error_bound if math.isfinite(compiled.error_bound) else None
    print(json.dumps({"values": values.tolist(), "error_bound": bound, "kind": compiled.certificate.kind}))


def _read_points(path: Path, dimension: int) -> NDArray[np.float64]:
    """The points of a CSV file, `(n, dimension)`, n ≥ 1. Empty lines and those that start with # are skipped."""
    text = sys.stdin.read() if str(path) == "-" else _text(path)
    name = "standard input" if str(path) == "-" else str(path)
    rows: list[list[float]] = []
    header = True  # may come next
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        fields = re.split(r"[,;\s]+", line.strip())
        first, header = header, False
        if first and not any(map(_is_number, fields)):
            continue
        if not all(map(_is_number, fields)):
            raise DomainError(f"{name}, line {number}: {line!r} is not a list of numbers.")
        if len(fields) != dimension:
            raise DomainError(f"{name}, line {number}: found {len(fields)} numbers; expected {dimension}.")
        rows.append([float(x) for x in fields])
    if not rows:
        raise DomainError(f"{name} has no points; expected {dimension} numbers on at least one line.")
    return np.array(rows, dtype=np.float64)


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
