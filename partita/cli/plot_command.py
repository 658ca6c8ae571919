"""The command `partita plot`: a head as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import partita as pa
from partita.cli.common import AsJson, Folder, emit
from partita.plots import plot_head

__all__ = ["plot_command"]


def plot_command(
    folder: Folder,
    out: Annotated[Path, typer.Option("--out", help="A .svg, .png or .pdf file.")],
    output: Annotated[int, typer.Option("--output", help="Which scalar output to draw.")] = 0,
    axes: Annotated[
        tuple[int, int], typer.Option("--axes", help="Which two coordinates to draw, if there are more.")
    ] = (0, 1),
    as_json: AsJson = False,
) -> None:
    """Draw the head, its cells and its error in one picture."""
    place = plot_head(pa.load(folder), out, output=output, axes=axes)
    emit({"figure": str(place)}, as_json, f"wrote {place}")
