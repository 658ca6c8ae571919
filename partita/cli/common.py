"""What the commands share: consoles, the kinds of their arguments, and how results are printed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from partita.errors import DomainError
from partita.geometry import Box
from partita.proofs.proof import Progress as Report

__all__ = [
    "REFUSED",
    "USAGE_ERROR",
    "Accept",
    "AsJson",
    "Budget",
    "Domain",
    "Dtype",
    "Expression",
    "Folder",
    "Lipschitz",
    "MaxBytes",
    "Method",
    "Norm",
    "Sharpness",
    "Tolerance",
    "dtype_named",
    "emit",
    "parse_domain",
    "shown_progress",
    "stderr",
    "stdout",
]

USAGE_ERROR, REFUSED = 64, 1
stdout, stderr = Console(), Console(stderr=True)


def _positive(value: float) -> float:
    if not value > 0:
        raise typer.BadParameter(f"{value}; expected a number > 0.", param_hint="--tolerance")
    return value


Expression = Annotated[
    str,
    typer.Argument(
        metavar="EXPR",
        help=(
            "In x0, x1, … (or x, y, z): sin(3*x0) + x0*cos(2*x1). 'a, b' makes a vector. Functions: exp log "
            "sqrt sin cos tan atan tanh sigmoid erf abs min max relu clamp where step …"
        ),
    ),
]
Domain = Annotated[str, typer.Option("--domain", help="A box: '[-1,1]^2', '[0,1]x[-2,3]'.")]
Tolerance = Annotated[float, typer.Option("--tolerance", help="The error allowed.", callback=_positive)]
Norm = Annotated[str, typer.Option("--norm", help="'inf', or p ≥ 1 for an L_p norm.")]
Dtype = Annotated[str, typer.Option("--dtype", help="float64 or float32; rounding is part of the bound.")]
Lipschitz = Annotated[
    float | None,
    typer.Option(
        "--lipschitz", help="Declare a Lipschitz constant (2-norm) instead of the one computed from the expression."
    ),
]
Sharpness = Annotated[
    float | None,
    typer.Option("--sharpness", help="κ = R h²: how hard the softmax selects; each method's own choice by default."),
]
Method = Annotated[
    str,
    typer.Option(
        "--method",
        help="auto (the smallest head), hard, tuned, corrected, fitted, affine, adaptive, pieces or train.",
    ),
]
Accept = Annotated[
    str,
    typer.Option(
        "--accept", help="strongest: a proof before anything else. estimated: the smallest head, proof or not."
    ),
]
MaxBytes = Annotated[int, typer.Option("--max-bytes", min=1, help="Refuse heads that are larger.")]
Budget = Annotated[
    float | None,
    typer.Option("--budget", help="Seconds, roughly; a proof then ends with the valid bound it has reached."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout instead of text.")]
Folder = Annotated[Path, typer.Argument(metavar="HEAD", help="A folder that `partita compile --out` wrote.")]


def parse_domain(text: str) -> Box:
    """`[-1,1]^2`, `[0,1]x[-2,3]`, also mixed: `[0,1]^2x[-2,3]`."""
    sides: list[tuple[float, float]] = []
    for part in re.split(r"(?<=[\]\d])\s*[x×]\s*(?=\[)", text.strip()):
        found = re.fullmatch(r"\[\s*([^,\[\]]+)\s*,\s*([^,\[\]]+)\s*\]\s*(?:\^\s*(\d{1,3}))?", part.strip())
        try:
            if not found:
                raise ValueError
            sides += [(float(found[1]), float(found[2]))] * int(found[3] or 1)
        except ValueError:
            raise DomainError(
                f"the domain {text!r} does not read as a box at {part!r}; expected '[-1,1]^2' or '[0,1]x[-2,3]'."
            ) from None
    return Box([a for a, _ in sides], [b for _, b in sides])


def emit(data: Any, as_json: bool, text: str) -> None:
    """One JSON object, or the text."""
    if as_json:
        print(json.dumps(data, ensure_ascii=False))
    else:
        stdout.print(text, highlight=False, soft_wrap=True, markup=False)


def dtype_named(name: str) -> torch.dtype:
    """float64 or float32."""
    if name not in ("float64", "float32"):
        raise typer.BadParameter(f"{name!r}; expected float64 or float32.", param_hint="--dtype")
    return torch.float64 if name == "float64" else torch.float32


@contextmanager
def shown_progress(what: str) -> Iterator[Report]:
    """A bar on stderr, and the function that moves it."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:3.0f}%"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=stderr, transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda what, done, of: bar.update(task, description=what, completed=done, total=of or None)
