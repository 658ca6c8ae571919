"""The command `partita export`: a head for other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import partita as pa
from partita.cli.common import AsJson, Folder, Overwrite, emit, require_new, stderr
from partita.storage.files import write_whole

__all__ = ["export_command"]


def export_command(
    folder: Folder,
    onnx: Annotated[Path | None, typer.Option("--onnx", help="The ONNX file to write.")] = None,
    c: Annotated[Path | None, typer.Option("--c", help="The C99 file to write.")] = None,
    name: Annotated[
        str | None,
        typer.Option(
            "--name",
            help="C only: NAME in `void NAME_eval(const double *in, double *out)`; the file's stem by default.",
        ),
    ] = None,
    outside: Annotated[
        str,
        typer.Option(
            "--outside",
            help="Inputs outside the domain: allow (a value without a claim), clamp (for boxes) or mark (NaN; in C for boxes).",
        ),
    ] = "allow",
    card: Annotated[
        Path | None, typer.Option("--card", help="Also write a card: the claim as Markdown, for people.")
    ] = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Write the head as an ONNX file with a dynamic batch axis, as a C99 file, or both; and a card that states the claim.

    ONNX: the file's metadata has the domain, the kind of claim, the bound and the hash of the certificate; its description is the
    card.

    C: one file with one function, which needs no library, allocates nothing and keeps no state. The certificate is in its comment,
    and its bound covers the C. Compile the file with -DNAME_SELFTEST (in capitals) for a program that tests it:

        partita export head/ --c wave.c && cc -O2 -DWAVE_SELFTEST wave.c -o test && ./test
    """
    places = {kind: place for kind, place in (("onnx", onnx), ("c", c), ("card", card)) if place is not None}
    if not places:
        raise typer.BadParameter(
            "nothing to write; name a file with --onnx, --c or --card", param_hint="--onnx / --c / --card"
        )
    if name is not None and c is None:
        raise typer.BadParameter("a name is for --c", param_hint="--name")
    for place in places.values():
        require_new(place, overwrite=overwrite)
    compiled = pa.load(folder)
    if onnx is not None:
        with stderr.status("exporting"):
            compiled.export_onnx(onnx, outside=outside)
    if c is not None:
        compiled.export_c(c, name=name, outside=outside)
    if card is not None:
        function = None if c is None else name or c.stem
        write_whole(card, compiled.card(onnx=None if onnx is None else onnx.name, c=function, outside=outside))
    sizes = {kind: place.stat().st_size for kind, place in places.items()}
    found: dict[str, str | int] = {"outside": outside, **{kind: str(place) for kind, place in places.items()}}
    found |= {"bytes": sizes["onnx"]} if "onnx" in sizes else {}
    found |= {"c_bytes": sizes["c"]} if "c" in sizes else {}
    lines = [f"wrote {place} ({sizes[kind]:,} bytes)" for kind, place in places.items()]
    emit(found, as_json, "\n".join(lines))
