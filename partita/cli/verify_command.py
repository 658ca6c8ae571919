"""The command `partita verify`: checks a certificate's hashes and arithmetic again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

import partita as pa
from partita.cli.common import (
    AsJson,
    CheckpointFolder,
    Folder,
    Retries,
    Scheduler,
    Workers,
    stdout,
    table_of,
    working_with,
)
from partita.cli.exits import REFUSED
from partita.cli.own_code import object_named
from partita.errors import UnsupportedError

__all__ = ["verify_command"]


def verify_command(
    folder: Folder,
    function: Annotated[
        str | None,
        typer.Option(
            "--function",
            metavar="MODULE:FUNCTION",
            help=(
                "The black box that was compiled, which is not stored with the head: MODULE:FUNCTION or path/to/file.py:FUNCTION. "
                "Its values and its error are checked. Your code is imported and run."
            ),
        ),
    ] = None,
    table: Annotated[
        Path | None,
        typer.Option(
            "--table",
            metavar="FILE",
            help="The CSV or parquet file that the head was fitted to, which is not stored with it. The estimate is checked.",
        ),
    ] = None,
    workers: Workers = None,
    scheduler: Scheduler = None,
    checkpoint: CheckpointFolder = None,
    retries: Retries = 0,
    as_json: AsJson = False,
) -> None:
    """Check a certificate's hashes and arithmetic again; exit 1 if anything does not hold."""
    if function is not None and table is not None:
        raise typer.BadParameter("use --function or --table, not both", param_hint="--table")
    own, head = None if function is None else object_named(function), pa.load(folder)
    if table is not None:
        own = _table_again(table, head)
    with working_with(workers, scheduler, checkpoint, retries) as shared:
        checks = pa.recheck(head, function=own, **shared)
    holds = all(c.holds for c in checks)
    if as_json:
        lines = [{"name": c.name, "holds": c.holds, "checked": c.checked, "detail": c.detail} for c in checks]
        print(json.dumps({"holds": holds, "checks": lines}, ensure_ascii=False))
    else:
        shown = Table(box=None, show_header=False, pad_edge=False)
        for check in checks:
            mark = "[red]✗[/]" if not check.holds else "[green]✓[/]" if check.checked else "–"
            shown.add_row(mark, check.name, check.detail)
        stdout.print(shown)
    if not holds:
        raise typer.Exit(REFUSED)


def _table_again(path: Path, head: pa.Compiled) -> pa.Table:
    """The columns that the certificate names, from the file."""
    said = head.certificate.function
    if not head.target.is_table:
        raise UnsupportedError(f"this head's function is {head.target.label}, not a table", "Leave --table out.")
    return table_of(path, ",".join(map(str, said["inputs"])), ",".join(map(str, said["outputs"])))
