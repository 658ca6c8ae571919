"""The command line: thin. Results on stdout, progress on stderr, `--json` everywhere, usage errors exit 64."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from partita.compiler import Compiled, build, load, plan, recheck
from partita.compiler.compiled import require_outside
from partita.compiler.options import DEFAULT_MAX_BYTES
from partita.compiler.planned import Plan, report
from partita.errors import DomainError, ExpressionError, PartitaError, UnsupportedError
from partita.geometry import Box
from partita.plots import plot_head
from partita.reports.command import reproduce_command
from partita.reports.inspect_command import inspect_command
from partita.storage import require_free
from partita.targets.probing import split_flat

__all__ = ["app", "main", "parse_domain"]

USAGE_ERROR, REFUSED = 64, 1
app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None)
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


def _emit(data: Any, as_json: bool, text: str) -> None:
    if as_json:
        print(json.dumps(data, ensure_ascii=False))
    else:
        stdout.print(text, highlight=False, soft_wrap=True, markup=False)


def _dtype(name: str) -> torch.dtype:
    if name not in ("float64", "float32"):
        raise typer.BadParameter(f"{name!r}; expected float64 or float32.", param_hint="--dtype")
    return torch.float64 if name == "float64" else torch.float32


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
) -> Plan:
    return plan(
        expression,
        parse_domain(domain),
        tolerance=tolerance,
        norm=norm,
        dtype=_dtype(dtype),
        lipschitz=lipschitz,
        sharpness=sharpness,
        max_bytes=max_bytes,
        method=method,
        accept=accept,
    )


@app.command("plan")
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
    _emit(
        planned.to_json(),
        as_json,
        f"{planned}\n\n{report(planned.candidates)}\n\nthe certificate will be {planned.kind} (asked: {tolerance:g})",
    )


@app.command("compile")
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
    planned = _plan(expression, domain, tolerance, norm, dtype, lipschitz, sharpness, max_bytes, method, accept)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:3.0f}%"),
        TimeRemainingColumn(),
        console=stderr,
        transient=True,
    ) as bar:
        task = bar.add_task("asking f at the centers", total=planned.keys)
        compiled = build(
            planned,
            outside=outside,
            seed=seed,
            progress=lambda _what, done, of: bar.update(task, completed=done, total=of),
        )
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
    _emit(summary, as_json, f"{compiled.explain()}\n\n{compiled.report()}\n\nsaved in {place}/")


@app.command("eval")
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


@app.command("plot")
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
    _emit({"figure": str(place)}, as_json, f"wrote {place}")


@app.command("export")
def export_command(
    folder: Folder,
    onnx: Annotated[Path, typer.Option("--onnx", help="The ONNX file to write.")],
    as_json: AsJson = False,
) -> None:
    """The head as ONNX, with a dynamic batch axis."""
    with stderr.status("exporting"):
        place = load(folder).export_onnx(onnx)
    _emit(
        {"onnx": str(place), "bytes": place.stat().st_size}, as_json, f"wrote {place} ({place.stat().st_size:,} bytes)"
    )


@app.command("verify")
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


app.command("reproduce")(reproduce_command)
app.command("inspect")(inspect_command)


def _print_version(asked: bool) -> None:
    if asked:
        print(metadata.version("partita"))
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and leave.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Compile functions into single attention layers with proved error bounds.

    Start with:  partita plan "sin(3*x0) + x0*cos(2*x1)" --domain "[-1,1]^2" --tolerance 0.05
    """


def main() -> None:
    """Run the command line: what cannot be read exits 64, what partita refuses exits 1, with the reason on stderr."""
    command = typer.main.get_command(app)
    try:
        sys.exit(command.main(standalone_mode=False) or 0)
    except typer.Abort:
        sys.exit(130)
    except typer.Exit as stop:
        sys.exit(stop.exit_code)
    except PartitaError as error:
        stderr.print(f"{type(error).__name__}: {error}", style="red", highlight=False, markup=False, soft_wrap=True)
        sys.exit(USAGE_ERROR if isinstance(error, (ExpressionError, DomainError, UnsupportedError)) else REFUSED)
    except OSError as error:
        stderr.print(f"{type(error).__name__}: {error}", style="red", highlight=False, markup=False, soft_wrap=True)
        sys.exit(REFUSED)
    except Exception as error:  # click's usage errors, whichever click typer uses
        if not hasattr(error, "format_message"):
            raise
        if type(error).__name__ == "NoArgsIsHelpError":
            print(error.format_message())
            sys.exit(USAGE_ERROR)
        stderr.print(
            f"{error.format_message()}\nTry 'partita --help'.",
            style="red",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
        sys.exit(USAGE_ERROR)


if __name__ == "__main__":
    main()
