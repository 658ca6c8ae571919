"""The command `partita plot`: a head as a picture, a surface or an animation, the budget of its error, the graph of a network."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import partita as pa
from partita.cli.common import AsJson, Folder, Overwrite, emit, require_new
from partita.errors import UnsupportedError
from partita.plots import (
    animate_temperature,
    plot_error_budget,
    plot_head,
    plot_network,
    plot_surface,
    plot_temperatures,
)

__all__ = ["plot_command"]

_KINDS = ("head", "surface", "budget", "network")


def plot_command(
    folder: Folder,
    out: Annotated[
        Path, typer.Option("--out", help="A .svg, .png or .pdf file; a .gif file animates the temperature.")
    ],
    kind: Annotated[
        str,
        typer.Option(
            "--kind",
            help="head: panels side by side; surface: in space, its cells on the floor; budget: the terms of its error bound; "
            "network: how the heads of a network are wired.",
        ),
    ] = "head",
    output: Annotated[int, typer.Option("--output", help="Which scalar output to draw.")] = 0,
    axes: Annotated[
        tuple[int, int], typer.Option("--axes", help="Which two coordinates to draw, if there are more.")
    ] = (0, 1),
    at: Annotated[
        str | None,
        typer.Option("--at", help="The point through which a slice goes: '0,0,0.5'.", show_default="the middle"),
    ] = None,
    panels: Annotated[
        str | None,
        typer.Option(
            "--panels",
            help="Panels to draw, separated by commas: function, head, cells, weights, error; as a surface function, head, error.",
            show_default="depends on the dimension",
        ),
    ] = None,
    sharpness: Annotated[
        str | None,
        typer.Option(
            "--sharpness", help="Draw the same keys at these κ = R h²: '1,4,16'; for a .gif the first and the last."
        ),
    ] = None,
    camera: Annotated[
        str,
        typer.Option("--camera", help="Of a surface: elevation and azimuth of the camera in degrees."),
    ] = "27,-58",
    titles: Annotated[bool, typer.Option("--titles/--no-titles", help="Write titles.")] = True,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Draw the head, its cells and its error in one picture."""
    require_new(out, overwrite=overwrite)
    if kind not in _KINDS:
        raise UnsupportedError(f"--kind is {kind!r}; expected {', '.join(_KINDS)}.")
    if kind != "head" and (sharpness is not None or out.suffix.lower() == ".gif"):
        raise UnsupportedError(
            f"--kind {kind} draws one temperature", "Leave out --sharpness and name a .svg, .png or .pdf file."
        )
    compiled, kappas, names = pa.load(folder), _numbers("--sharpness", sharpness), panels and panels.split(",")
    place, turned = _numbers("--at", at), _numbers("--camera", camera)
    if kind in ("budget", "network"):
        if names is not None or at is not None:
            what = "the certificate" if kind == "budget" else "the heads of a network"
            raise UnsupportedError(f"--kind {kind} draws {what}, not a place", "Leave out --panels and --at.")
        (plot_error_budget if kind == "budget" else plot_network)(compiled, out, titles=titles)
    elif kind == "surface":
        if turned is None or len(turned) != 2:
            raise UnsupportedError(f"--camera is {camera!r}; expected two angles in degrees, as in '27,-58'.")
        plot_surface(
            compiled,
            out,
            panels=names or "head",
            output=output,
            axes=axes,
            at=place,
            elevation=turned[0],
            azimuth=turned[1],
            titles=titles,
        )
    elif out.suffix.lower() == ".gif":
        ends = [0.25, 32.0] if kappas is None else kappas
        animate_temperature(
            compiled,
            out,
            sharpness=ends,
            panels=names,
            output=output,
            axes=axes,
            at=place,
            titles=titles,
        )
    elif kappas is not None:
        plot_temperatures(compiled, kappas, out, panels=names, output=output, axes=axes, at=place, titles=titles)
    else:
        plot_head(compiled, out, panels=names, output=output, axes=axes, at=place, titles=titles)
    emit({"figure": str(out)}, as_json, f"wrote {out}")


def _numbers(name: str, text: str | None) -> list[float] | None:
    try:
        return None if text is None else [float(part) for part in text.split(",")]
    except ValueError:
        raise UnsupportedError(f"{name} is {text!r}; expected numbers separated by commas, as in '1,4,16'.") from None
