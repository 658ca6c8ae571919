"""The command `partita inspect`: builds a model with the user's own code, runs it once, and writes the page of its heads."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors import SafetensorError
from safetensors.numpy import load_file
from torch import Tensor, nn

from partita.cli.common import Seed, require_new, stderr, stdout
from partita.cli.own_code import names_own_code, object_named, run_own
from partita.errors import DomainError, ShapeError, UnsupportedError
from partita.inspection.captured_heads import CapturedHeads, capture
from partita.inspection.token_ids import labels_of
from partita.plots.model_page import write_inspection

__all__ = ["inspect_command", "load_inputs", "load_labels"]


def inspect_command(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:FUNCTION",
            help="FUNCTION() returns the nn.Module to inspect; MODULE is a Python module, or path/to/file.py. Your code is "
            "imported and run.",
        ),
    ],
    inputs: Annotated[
        str,
        typer.Option(
            "--inputs",
            help="What to call the model with: a .npy file (one array), .npz or .safetensors (keyword arguments by name), or "
            "MODULE:FUNCTION (or path/to/file.py:FUNCTION) that returns a tensor, a tuple or a dict.",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", help="The folder to write.")],
    layers: Annotated[
        list[str] | None, typer.Option("--layers", help="A pattern of module paths, such as 'encoder.*'; repeatable.")
    ] = None,
    heads: Annotated[
        list[int] | None, typer.Option("--head", help="The number of a head within its layer; repeatable.")
    ] = None,
    tokens: Annotated[
        int | None, typer.Option("--tokens", min=1, help="The most queries to read per sequence.")
    ] = None,
    labels: Annotated[
        Path | None,
        typer.Option(
            "--labels",
            help="The tokens of the inputs for the page: a JSON file with a list of strings or of token ids per sequence.",
        ),
    ] = None,
    batch: Annotated[int | None, typer.Option("--batch", min=1, help="The most sequences to read.")] = None,
    budget: Annotated[
        int,
        typer.Option("--budget", min=0, help="Work per head for linear programs, in matrix entries; 0 solves none."),
    ] = 1 << 18,
    stream: Annotated[
        bool,
        typer.Option(
            "--stream",
            help="For long inputs: read the heads while the model runs and keep only their figures. The page then has no planes, "
            "patterns or audit curves, and dead keys are not looked for.",
        ),
    ] = False,
    seed: Seed = 0,
    figures: Annotated[
        bool, typer.Option("--figures/--no-figures", help="Draw figures (needs the extra 'plot').")
    ] = True,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Write into an existing folder.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the report as JSON on stdout instead of text.")
    ] = False,
) -> None:
    """Read the attention heads of a model as partitions. This runs your own code: MODULE is imported and FUNCTION called."""
    require_new(out, overwrite=overwrite)
    words = None if labels is None else load_labels(labels)
    stderr.print(f"running your own code: {model}", highlight=False, markup=False, soft_wrap=True)
    built = _given(model)
    if not isinstance(built, nn.Module):
        raise UnsupportedError(f"{model}() returned {type(built).__name__}; expected an nn.Module.")
    args, kwargs = load_inputs(inputs)
    built.eval()
    if stream and tokens is not None and words is not None:
        raise UnsupportedError("--labels was given with both --stream and --tokens; leave one of the three out.")
    known = words if stream and words is not None else tokens
    chosen = {"layers": layers, "heads": heads, "tokens": known, "batch": batch, "stream": stream, "seed": seed}
    with torch.no_grad(), capture(built, **chosen) as captured:  # type: ignore[arg-type]
        run_own(f"{model}, called with {inputs}", lambda: built(*args, **kwargs))
    if not len(captured):
        raise _nothing_recorded(model, captured, layers, heads)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TimeRemainingColumn(),
        console=stderr,
    )
    with bar, _naming(labels):
        task = bar.add_task("reading heads", total=len(captured))
        page = write_inspection(
            captured,
            out,
            title=model,
            figures=figures,
            tokens=None if stream else words,
            progress=lambda name, done, of: bar.update(task, completed=done, total=of),
            budget=budget,
            seed=seed,
        )
    if as_json:
        print(json.dumps(page.report.to_json(), ensure_ascii=False, allow_nan=False))
    else:
        stdout.print(
            f"{page.report}\n\nwrote {', '.join(map(str, page.files))}", highlight=False, soft_wrap=True, markup=False
        )


@contextmanager
def _naming(labels: Path | None) -> Iterator[None]:
    """Adds the name of the file to errors about the number of tokens."""
    try:
        yield
    except ShapeError as error:
        if labels is None:
            raise
        raise ShapeError(f"--labels {labels}: {error.reason}", error.hint) from None


def _nothing_recorded(
    model: str, captured: CapturedHeads, layers: Sequence[str] | None, heads: Sequence[int] | None
) -> UnsupportedError:
    """The reason why there is no head to read: the options match no head that ran, or no head can be recorded."""
    if not captured.ran:
        return UnsupportedError(
            f"{model} computed no attention that can be recorded",
            captured.advice
            or "Hand-written attention must call pa.inspect.record(q, k, v). Flex attention requires torch ≥ 2.9.",
        )
    given = [f"--layers {pattern}" for pattern in layers or ()] + [f"--head {number}" for number in heads or ()]
    return UnsupportedError(f"{' '.join(given)} matches no head of {model}", captured.describe_ran())


def load_inputs(text: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments from a file of arrays, or from what the user's function returns. Nothing is
    unpickled."""
    suffix = Path(text).suffix.lower()
    if suffix in (".npy", ".npz", ".safetensors"):
        try:
            held = load_file(text) if suffix == ".safetensors" else np.load(text, allow_pickle=False)
            if suffix == ".npy":
                return (_tensor(held),), {}
            return (), {name: _tensor(held[name]) for name in held}
        except (OSError, ValueError, EOFError, TypeError, SafetensorError) as error:
            raise DomainError(f"{text} cannot be read as arrays of numbers: {error}.") from None
    if not names_own_code(text):
        raise UnsupportedError(
            f"--inputs is {text!r}; expected a .npy, .npz or .safetensors file, MODULE:FUNCTION or path/to/file.py:FUNCTION."
        )
    given = _given(text)
    if isinstance(given, dict):
        return (), given
    return (given if isinstance(given, tuple) else (given,)), {}


def load_labels(path: Path) -> list[list[str]]:
    """The tokens of each sequence from a JSON file."""
    try:
        return labels_of(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise DomainError(f"{path} cannot be read as JSON: {error}.") from None


def _tensor(array: Any) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array))


def _given(spec: str) -> Any:
    """What FUNCTION() returns; or the object itself if it is no function: a model, a tensor, a dict."""
    found = object_named(spec)
    return run_own(f"{spec}()", found) if callable(found) and not isinstance(found, nn.Module) else found
