"""What the commands share: consoles, the kinds of their arguments, and how results are printed."""

from __future__ import annotations

import inspect
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

import partita as pa
from partita.cli.own_code import names_own_code, object_named, run_own
from partita.errors import AlreadyExistsError, UnsupportedError
from partita.functions.expressions import CONSTANTS, function_names
from partita.workers import processes
from partita.workers import scheduler as dask_scheduler

if TYPE_CHECKING:
    import torch

__all__ = [
    "Accept",
    "AsJson",
    "Budget",
    "CheckpointFolder",
    "Domain",
    "DomainIfAny",
    "Dtype",
    "Expression",
    "ExpressionIfAny",
    "Folder",
    "Hessian",
    "InputColumns",
    "Lipschitz",
    "MaxBytes",
    "MaxExcluded",
    "MaxValue",
    "Method",
    "Norm",
    "OnError",
    "OutputColumns",
    "Overwrite",
    "Region",
    "Retries",
    "SampleTable",
    "Scheduler",
    "Seed",
    "Sharpness",
    "Tolerance",
    "Vectorize",
    "Workers",
    "compile_options",
    "dtype_named",
    "emit",
    "function_named",
    "parse_domain",
    "require_new",
    "shown_progress",
    "stderr",
    "stdout",
    "table_of",
    "working_with",
]

stdout, stderr = Console(), Console(stderr=True)


def _positive(value: float) -> float:
    if not value > 0:
        raise typer.BadParameter(f"{value}; expected a number > 0.", param_hint="--tolerance")
    return value


_EXPRESSION = typer.Argument(
    metavar="EXPR",
    help=(
        "The function in x0, x1, … (or x, y, z for up to three variables): sin(3*x0) + x0*cos(2*x1). 'a, b' makes a "
        f"vector. Constants: {', '.join(CONSTANTS)}. Functions: {function_names()}. where(x > 0.5, a, b) is a where "
        "the comparison holds and b elsewhere (< <= > >=, and, or, not); where(c, a, b) is a where c ≥ 0. "
        "Or a function of your own: MODULE:FUNCTION or path/to/file.py:FUNCTION. Your code is imported and run."
    ),
)
Expression = Annotated[str, _EXPRESSION]
ExpressionIfAny = Annotated[str | None, _EXPRESSION]
_DOMAIN = typer.Option("--domain", help="A box: '[-1,1]^2', '[0,1] x [-2,3]', '[0, 2*pi]'.")
Domain = Annotated[str, _DOMAIN]
DomainIfAny = Annotated[str | None, _DOMAIN]
Region = Annotated[
    list[str] | None,
    typer.Option(
        "--region",
        help=(
            "Keep only the points of the box that satisfy an inequality such as 'x0**2 + x1**2 <= 1' "
            "(<=, >=, 'and', 'or'). If repeated, all must hold."
        ),
    ),
]
Tolerance = Annotated[float, typer.Option("--tolerance", help="The largest error allowed.", callback=_positive)]
Norm = Annotated[str, typer.Option("--norm", help="'inf', or p ≥ 1 for an L_p norm.")]
Dtype = Annotated[
    str, typer.Option("--dtype", help="float64, float32, bfloat16 or float16; the bound includes rounding.")
]
Lipschitz = Annotated[
    float | None,
    typer.Option(
        "--lipschitz", help="Declare a Lipschitz constant (2-norm) instead of the one computed from the expression."
    ),
]
Hessian = Annotated[
    str | None,
    typer.Option(
        "--hessian",
        help=(
            "Declare a bound on the second derivatives of a black box: M with |∇²f|₂ ≤ M, or one number per coordinate, "
            "'M0,M1,…', with |vᵀ∇²f v| ≤ Σ M_i v_i². Not used for expressions."
        ),
    ),
]
Modulus = Annotated[
    str | None,
    typer.Option(
        "--modulus", help="Declare a modulus of continuity ω(t), nondecreasing and concave: 't', '0.5*sqrt(t) + t'."
    ),
]
Tail = Annotated[
    str | None,
    typer.Option(
        "--tail",
        help=(
            "For an unbounded function and a finite --norm p: 'M,τ' clips it to ±M and declares that "
            "the L_p norm of what is cut off is at most τ."
        ),
    ),
]
Sharpness = Annotated[
    float | None,
    typer.Option("--sharpness", help="κ = R h²: how hard the softmax selects. Each method has its own default."),
]
Method = Annotated[
    str,
    typer.Option(
        "--method",
        help=(
            "auto (the smallest of the heads it tries), hard, tuned, corrected, fitted, "
            "affine, adaptive, pieces, two_keys, lines, convex, heads, layers, train or paper."
        ),
    ),
]
Accept = Annotated[
    str,
    typer.Option(
        "--accept",
        help="strongest: prefer a proved head. estimated: take the smallest head, even if its error is only sampled.",
    ),
]
MaxBytes = Annotated[
    int | None,
    typer.Option(
        "--max-bytes",
        min=1,
        help="Refuse larger heads. Tables of hard and affine heads may be larger than memory.",
        show_default="4 GiB",
    ),
]
MaxValue = Annotated[
    float | None,
    typer.Option("--max-value", help="The largest |V| of any key. Fitted values can be much larger than f."),
]
MaxHeads = Annotated[
    int | None,
    typer.Option(
        "--max-heads", min=1, help="The most heads that a layer may have: 1 for one head.", show_default="any"
    ),
]
MaxLayers = Annotated[
    int | None,
    typer.Option("--max-layers", min=1, help="The most layers: 1 for a single layer.", show_default="any"),
]
Budget = Annotated[
    float | None,
    typer.Option(
        "--budget",
        help="Seconds. Then you get the best head so far; if it misses the tolerance, the exit code is 1.",
    ),
]
MaxEvaluations = Annotated[
    int | None,
    typer.Option(
        "--max-evaluations",
        help="How often FUNCTION may be evaluated, at least 100. At the limit you get the best head so far.",
    ),
]
Vectorize = Annotated[bool, typer.Option("--vectorize", help="Call FUNCTION once per point, if it takes no batches.")]
OnError = Annotated[
    str,
    typer.Option(
        "--on-error",
        help="Where FUNCTION fails: raise, or exclude (such points are left out, and the error is an estimate over the others).",
    ),
]
MaxExcluded = Annotated[
    float,
    typer.Option(
        "--max-excluded", help="The largest share of the domain that may be left out, estimated from random points."
    ),
]
Workers = Annotated[
    int | None,
    typer.Option(
        "--workers",
        min=1,
        help="Processes on this machine that share slow work: calls of FUNCTION, long proofs, attacks.",
    ),
]
Scheduler = Annotated[
    str | None,
    typer.Option(
        "--scheduler",
        metavar="ADDRESS",
        help="A running Dask scheduler whose workers share slow work: tcp://host:8786, or its scheduler.json.",
    ),
]
CheckpointFolder = Annotated[
    Path | None,
    typer.Option(
        "--checkpoint",
        metavar="DIR",
        help="A folder that keeps the values of FUNCTION and the results of long steps. After a crash, the same command goes on "
        "where it stopped.",
    ),
]
Retries = Annotated[
    int, typer.Option("--retries", min=0, help="How often FUNCTION is called again where it raises an error.")
]
SampleTable = Annotated[
    Path | None,
    typer.Option(
        "--table",
        metavar="FILE",
        help="Samples in place of EXPR: a CSV file with the names of its columns, or a .parquet file. The claim is an estimate.",
    ),
]
InputColumns = Annotated[
    str | None, typer.Option("--inputs", help="With --table: the columns of the inputs, separated by commas.")
]
OutputColumns = Annotated[
    str | None, typer.Option("--outputs", help="With --table: the columns of the outputs, separated by commas.")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what is already there.")]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Random seed.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout instead of text.")]
Folder = Annotated[Path, typer.Argument(metavar="HEAD", help="A folder written by `partita compile --out`.")]


def function_named(text: str) -> Any:
    """The expression, or the function that `MODULE:FUNCTION` names: if it takes no arguments, what it returns."""
    if not names_own_code(text):
        return text
    stderr.print(f"running your own code: {text}", highlight=False, markup=False, soft_wrap=True)
    found = object_named(text)
    if not callable(found):
        raise UnsupportedError(
            f"{text} is a {type(found).__name__}; expected a function of a batch of points, or a module."
        )
    return run_own(f"{text}()", found) if _takes_nothing(found) else found


def _takes_nothing(function: Any) -> bool:
    try:
        return not inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False


def table_of(path: Path, inputs: str | None, outputs: str | None) -> pa.Table:
    """The table for `--table`, `--inputs` and `--outputs`.

    Args:
        path: a CSV or parquet file.
        inputs: names of columns, separated by commas.
        outputs: names of columns, separated by commas.
    """
    named = []
    for option, text in (("--inputs", inputs), ("--outputs", outputs)):
        if text is None:
            raise typer.BadParameter("is needed with --table: names of columns, such as 'T,I'", param_hint=option)
        named.append([name.strip() for name in text.split(",")])
    read = pa.Table.from_parquet if path.suffix.lower() in (".parquet", ".pq") else pa.Table.from_csv
    return read(path, *named)


def parse_domain(text: str, region: list[str] | None = None) -> pa.Box | pa.Region:
    """The box that `Box.of` reads; the part of it where inequalities hold, if there are any."""
    return pa.Region(text, region) if region else pa.Box.of(text)


_AS_GIVEN = (
    "tolerance",
    "norm",
    "lipschitz",
    "modulus",
    "method",
    "accept",
    "sharpness",
    "max_value",
    "max_heads",
    "max_layers",
)
_OF_FUNCTIONS = ("vectorize", "on_error", "max_excluded", "max_evaluations")


def compile_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options that `plan` and `compile` share, as keyword arguments of `pa.plan` and `pa.compile`.

    Args:
        given: the arguments of the command, by name.
    """
    return {
        **{name: given[name] for name in (*_AS_GIVEN, *_OF_FUNCTIONS)},
        "dtype": dtype_named(given["dtype"], halves=True),
        "hessian": _hessian(given["hessian"]),
        "tail": _tail(given["tail"]),
        **({} if given["max_bytes"] is None else {"max_bytes": given["max_bytes"]}),
    }


def _hessian(text: str | None) -> float | list[float] | None:
    if text is None:
        return None
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        expected = "expected a number, or one per coordinate such as '9,0.5'"
        raise typer.BadParameter(f"{text!r}; {expected}.", param_hint="--hessian") from None
    return numbers if len(numbers) > 1 else numbers[0]


def _tail(text: str | None) -> pa.Tail | None:
    if text is None:
        return None
    try:
        clip, norm = map(float, text.split(","))
    except ValueError:
        raise typer.BadParameter(f"{text!r}; expected two numbers such as '10,0.001'.", param_hint="--tail") from None
    return pa.Tail(clip, norm)


def require_new(place: Path, *, overwrite: bool) -> None:
    """An AlreadyExistsError if a file is there that may not be replaced."""
    if place.exists() and not overwrite:
        raise AlreadyExistsError(f"{place} exists already; choose another name, or use overwrite=True.")


def dtype_named(name: str, *, halves: bool = False) -> torch.dtype:
    """The torch dtype of that name; a usage error for others, and for half types where only full ones will do."""
    import torch

    names = ("float64", "float32", "bfloat16", "float16")[: 4 if halves else 2]
    if name not in names:
        raise typer.BadParameter(f"{name!r}; expected {', '.join(names[:-1])} or {names[-1]}.", param_hint="--dtype")
    found: torch.dtype = getattr(torch, name)
    return found


def emit(data: Any, as_json: bool, text: str) -> None:
    """Print one JSON object, or the text."""
    if as_json:
        print(json.dumps(data, ensure_ascii=False))
    else:
        stdout.print(text, highlight=False, soft_wrap=True, markup=False)


@contextmanager
def working_with(
    workers: int | None, scheduler: str | None, checkpoint: Path | None = None, retries: int = 0
) -> Iterator[dict[str, Any]]:
    """The arguments `executor`, `checkpoint` and `retries` of the library for the options of a command.

    Args:
        workers: of `--workers`.
        scheduler: of `--scheduler`.
        checkpoint: of `--checkpoint`.
        retries: of `--retries`.
    """
    if workers is not None and scheduler is not None:
        raise typer.BadParameter("use --workers or --scheduler, not both", param_hint="--scheduler")
    door = None
    if workers is not None:
        door = processes(workers)
    elif scheduler is not None:
        door = dask_scheduler(scheduler)
    try:
        yield {"executor": door, "checkpoint": checkpoint, "retries": retries}
    finally:
        if door is not None:
            door.close()


_FULLEST = 0.99  # of a bar while the work goes on


@contextmanager
def shown_progress(what: str, budget: float | None = None) -> Iterator[Callable[[str, int, int], None]]:
    """A bar on stderr with the time spent and the time left, and the function that moves it.

    Args:
        what: the text to begin with.
        budget: the seconds that the work may take, if they are limited.
    """
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    start = time.monotonic()

    def left() -> str:
        return "" if budget is None else f", {max(budget - time.monotonic() + start, 0):.0f} s of the budget left"

    with Progress(*columns, console=stderr, transient=True) as bar:
        task = bar.add_task(what + left(), total=None)
        yield lambda what, done, of: bar.update(
            task, description=what + left(), completed=min(done, _FULLEST * of), total=of or None
        )
