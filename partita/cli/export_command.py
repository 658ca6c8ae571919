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
    onnx: Annotated[Path, typer.Option("--onnx", help="The ONNX file to write.")],
    outside: Annotated[
        str,
        typer.Option(
            "--outside",
            help="Inputs outside the domain: allow (a value without a claim), clamp (boxes only) or mark (NaN).",
        ),
    ] = "allow",
    card: Annotated[
        Path | None, typer.Option("--card", help="Also write a card: the claim as Markdown, for people.")
    ] = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Write the head as an ONNX file with a dynamic batch axis.

    The file's metadata has the domain, the kind of claim, the bound and the hash of the certificate; its description is the card.
    """
    require_new(onnx, overwrite=overwrite)
    if card is not None:
        require_new(card, overwrite=overwrite)
    with stderr.status("exporting"):
        c = pa.load(folder)
        place = c.export_onnx(onnx, outside=outside)
        if card is not None:
            write_whole(card, c.card(onnx=onnx.name, outside=outside))
    size = place.stat().st_size
    data = {"onnx": str(place), "bytes": size, "outside": outside} | ({} if card is None else {"card": str(card)})
    emit(data, as_json, f"wrote {place} ({size:,} bytes)" + ("" if card is None else f" and {card}"))
