"""The command `partita export`: a head for other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import partita as pa
from partita.cli.common import AsJson, Folder, Overwrite, emit, require_new, stderr

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
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Write the head as an ONNX file with a dynamic batch axis.

    The file's metadata has the domain, the kind of claim, the bound and the hash of the certificate.
    """
    require_new(onnx, overwrite=overwrite)
    with stderr.status("exporting"):
        place = pa.load(folder).export_onnx(onnx, outside=outside)
    size = place.stat().st_size
    emit({"onnx": str(place), "bytes": size, "outside": outside}, as_json, f"wrote {place} ({size:,} bytes)")
