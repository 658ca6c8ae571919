"""The command `partita layers`: the weights of a head, matrix by matrix, as numbers and pictures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

import partita as pa
from partita.cli.common import AsJson, Folder, dtype_named, emit
from partita.errors import DomainError
from partita.plots import write_layers

__all__ = ["layers_command"]


def layers_command(
    folder: Folder,
    out: Annotated[Path, typer.Option("--out", help="The folder to write.")],
    form: Annotated[
        str,
        typer.Option(
            "--form",
            help=(
                "log: the paper's construction, two columns per cell and output. indexed: "
                "partita's own, with half as many columns."
            ),
        ),
    ] = "log",
    at: Annotated[
        str | None,
        typer.Option(
            "--at",
            help="The input at which Linear(Z), K, Q, V and the attention are shown: '0.3,0.4'.",
            show_default="0.3 of the way along every axis",
        ),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="float64 or float32.", show_default="that of the head")
    ] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(
            "--tolerance",
            help="The largest error of the layers to accept; 'inf' accepts any.",
            show_default="that of the head",
        ),
    ] = None,
    pictures: Annotated[
        bool, typer.Option("--pictures/--no-pictures", help="Draw the matrices, which takes seconds.")
    ] = True,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the folder if it exists.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write every weight matrix of a head in the paper's form: as numbers, as pictures, and as a page that lists them.

    Layers are Linear(Z) = Σ P_i Z Q_i + C and Attn(Y) = W_V Y softmax((W_K Y)ᵀ W_Q Y) W_O. The folder has index.html (start here),
    tensors.npz (all numbers), and a .csv and an .svg per matrix, with its blocks named as in the paper.

    Example:  partita layers head/ --out weights/ --at 0.3,0.4
    """
    compiled = pa.load(folder)
    point = None if at is None else _point(at)
    chosen = None if dtype is None else dtype_named(dtype)
    place = write_layers(
        compiled, out, form=form, at=point, dtype=chosen, tolerance=tolerance, pictures=pictures, overwrite=overwrite
    )
    data = json.loads((place / "layers.json").read_text(encoding="utf-8"))
    lines = [
        f"wrote {place}: open {place / 'index.html'}",
        f"{data['form']} form in {data['dtype']}, {data['columns']:,} columns",
    ]
    bound = (
        "no proved error" if data["error_bound"] is None else f"error ≤ {data['error_bound']:.6g} in L{data['norm']}"
    )
    lines[1] += f", {data['stored_numbers']:,} stored numbers, {bound}"
    lines += [f"  {m['symbol']:<22} {' × '.join(map(str, m['shape'])):<14} {m['paper']}" for m in data["matrices"]]
    emit({"folder": str(place), **data}, as_json, "\n".join(lines))


def _point(text: str) -> list[float]:
    try:
        return [float(x) for x in text.replace(",", " ").split()]
    except ValueError:
        raise DomainError(
            f"--at {text!r} is not a list of numbers; expected one per input coordinate: '0.3,0.4'."
        ) from None
