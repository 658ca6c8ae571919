"""The command `partita attack`: the search for a point where a claim is false."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from dataclasses import asdict
from typing import Annotated

import typer

import partita as pa
from partita.cli.common import (
    AsJson,
    CheckpointFolder,
    Folder,
    Retries,
    Scheduler,
    Seed,
    Vectorize,
    Workers,
    emit,
    function_named,
    stderr,
    working_with,
)
from partita.cli.exits import NOTHING_CLAIMED, REFUSED

__all__ = ["attack_command"]


def attack_command(
    folder: Folder,
    bound: Annotated[
        float | None, typer.Option("--bound", help="Attack this bound instead of the certificate's.")
    ] = None,
    samples: Annotated[int, typer.Option("--samples", min=1, help="Random points.")] = 1 << 14,
    restarts: Annotated[int, typer.Option("--restarts", min=0, help="Starting points of gradient ascent.")] = 64,
    function: Annotated[
        str | None,
        typer.Option(
            "--function",
            metavar="MODULE:FUNCTION",
            help="The function of a black-box head, which is not stored with it: MODULE:FUNCTION or path/to/file.py:FUNCTION. "
            "Your code is imported and run.",
        ),
    ] = None,
    vectorize: Vectorize = False,
    workers: Workers = None,
    scheduler: Scheduler = None,
    checkpoint: CheckpointFolder = None,
    retries: Retries = 0,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Search for a point where the claim is false. Finding none proves nothing.

    Exit codes: 0 no such point was found, 1 the claim is false, 2 the certificate claims nothing (its error is an estimate).
    """
    c = pa.load(folder)
    claimed = bound is not None or c.certificate.kind != "estimated"
    if claimed or c.target.ask is not None or function is not None:  # the function of a black box is not stored
        with redirect_stdout(sys.stderr), working_with(workers, scheduler, checkpoint, retries) as shared:
            # what the user's function prints goes to stderr
            c = c if function is None else c.with_function(function_named(function), vectorize=vectorize)
            found = pa.attack(c, bound=bound, samples=samples, restarts=restarts, seed=seed, **shared)
        emit({**asdict(found), "claimed": claimed, "refuted": claimed and found.refuted}, as_json, str(found))
    elif as_json:
        emit({"claimed": False, "refuted": False}, as_json, "")
    if not claimed:
        stderr.print(
            "nothing was claimed: this head's error is an estimate, which a larger error does not refute. "
            "Use --bound to attack a bound of your own.",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
        raise typer.Exit(NOTHING_CLAIMED)
    if found.refuted:
        raise typer.Exit(REFUSED)
