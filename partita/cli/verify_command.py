"""The command `partita verify`: checks a certificate's hashes and arithmetic again."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.table import Table

import partita as pa
from partita.cli.common import AsJson, CheckpointFolder, Folder, Retries, Scheduler, Workers, stdout, working_with
from partita.cli.exits import REFUSED
from partita.cli.own_code import object_named

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
    workers: Workers = None,
    scheduler: Scheduler = None,
    checkpoint: CheckpointFolder = None,
    retries: Retries = 0,
    as_json: AsJson = False,
) -> None:
    """Check a certificate's hashes and arithmetic again; exit 1 if anything does not hold."""
    own = None if function is None else object_named(function)
    with working_with(workers, scheduler, checkpoint, retries) as shared:
        checks = pa.recheck(pa.load(folder), function=own, **shared)
    holds = all(c.holds for c in checks)
    if as_json:
        lines = [{"name": c.name, "holds": c.holds, "checked": c.checked, "detail": c.detail} for c in checks]
        print(json.dumps({"holds": holds, "checks": lines}, ensure_ascii=False))
    else:
        table = Table(box=None, show_header=False, pad_edge=False)
        for check in checks:
            mark = "[red]✗[/]" if not check.holds else "[green]✓[/]" if check.checked else "–"
            table.add_row(mark, check.name, check.detail)
        stdout.print(table)
    if not holds:
        raise typer.Exit(REFUSED)
