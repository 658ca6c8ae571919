"""The command `partita compile`: a head with its certificate, saved in a folder."""

from __future__ import annotations

import sys
import warnings
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

import partita as pa
from partita.cli.common import (
    Accept,
    AsJson,
    Budget,
    CheckpointFolder,
    DomainIfAny,
    Dtype,
    ExpressionIfAny,
    Hessian,
    InputColumns,
    Lipschitz,
    MaxBytes,
    MaxEvaluations,
    MaxExcluded,
    MaxHeads,
    MaxLayers,
    MaxValue,
    Method,
    Modulus,
    Norm,
    OnError,
    OutputColumns,
    Overwrite,
    Region,
    Retries,
    SampleTable,
    Scheduler,
    Seed,
    Sharpness,
    Tail,
    Tolerance,
    Vectorize,
    Workers,
    compile_options,
    emit,
    function_named,
    parse_domain,
    shown_progress,
    stderr,
    table_of,
    working_with,
)
from partita.errors import ToleranceMissedWarning
from partita.functions.failures import DEFAULT_MAX_EXCLUDED
from partita.storage import require_free

__all__ = ["compile_command"]


def compile_command(
    tolerance: Tolerance,
    out: Annotated[Path, typer.Option("--out", help="The folder to write.")],
    expression: ExpressionIfAny = None,
    domain: DomainIfAny = None,
    table: SampleTable = None,
    inputs: InputColumns = None,
    outputs: OutputColumns = None,
    region: Region = None,
    norm: Norm = "inf",
    dtype: Dtype = "float64",
    lipschitz: Lipschitz = None,
    modulus: Modulus = None,
    hessian: Hessian = None,
    tail: Tail = None,
    method: Method = "auto",
    accept: Accept = "strongest",
    sharpness: Sharpness = None,
    max_bytes: MaxBytes = None,
    max_value: MaxValue = None,
    max_heads: MaxHeads = None,
    max_layers: MaxLayers = None,
    vectorize: Vectorize = False,
    on_error: OnError = "raise",
    max_excluded: MaxExcluded = DEFAULT_MAX_EXCLUDED,
    budget: Budget = None,
    max_evaluations: MaxEvaluations = None,
    outside: Annotated[
        str, typer.Option("--outside", help="Inputs outside the domain: raise, clamp or allow.")
    ] = "raise",
    workers: Workers = None,
    scheduler: Scheduler = None,
    checkpoint: CheckpointFolder = None,
    retries: Retries = 0,
    seed: Seed = 0,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Build the head of EXPR on a box, or of a table, certify it, attack it, and save it."""
    options = compile_options(locals()) | {"budget": budget, "outside": outside, "seed": seed}
    require_free(out, overwrite=overwrite)
    _require_one_source(expression, domain, table, inputs or outputs)
    where = None if domain is None else parse_domain(domain, region)
    with redirect_stdout(sys.stderr), warnings.catch_warnings():  # what the user's function prints
        warnings.simplefilter("ignore", ToleranceMissedWarning)  # said below
        started = "first evaluations of f" if expression is not None and ":" in expression else "reading f"
        with (
            working_with(workers, scheduler, checkpoint, retries) as shared,
            shown_progress(started, budget) as progress,
        ):
            given = table_of(table, inputs, outputs) if table is not None else function_named(str(expression))
            c = pa.compile(given, where, folder=out, overwrite=overwrite, progress=progress, **shared, **options)
    emit(_summary(c, tolerance, out), as_json, f"{c.explain()}\n\n{c.report()}\n\nsaved in {out}/")
    if not c.tolerance_met:
        stderr.print(
            f"The tolerance {tolerance:g} is not met: the error is {c.certificate.claim}. This is the best head that the limits "
            "allowed. Raise --budget or --max-evaluations, or use a larger --tolerance.",
            highlight=False,
        )
        raise typer.Exit(1)


def _require_one_source(expression: str | None, domain: str | None, table: Path | None, columns: str | None) -> None:
    """Either EXPR with a domain, or a table."""
    if (expression is None) == (table is None):
        found = "neither is" if table is None else "both are"
        raise typer.BadParameter(f"expected EXPR or --table FILE, and {found} given", param_hint="EXPR")
    if table is None and domain is None:
        raise typer.BadParameter("is needed, for example '[-1,1]^2'", param_hint="--domain")
    if table is None and columns is not None:
        raise typer.BadParameter("needs --table FILE", param_hint="--inputs, --outputs")


def _summary(c: pa.Compiled, tolerance: float, place: Path) -> dict[str, Any]:
    counts, witness = getattr(c.head, "counts", None), c.certificate.witness
    return {
        "function": c.target.label,
        "domain": [str(d) for d in c.target.domains],
        "tolerance": tolerance,
        "method": c.candidates[0].method,
        "kind": c.certificate.kind,
        "keys": c.num_keys,
        "keys_per_axis": None if counts is None else list(counts),
        "parameters": c.num_parameters,
        "bytes": sum(t.numel() * t.element_size() for t in c.head.state_dict().values()),
        "sharpness": c.certificate.facts.get("sharpness"),
        "dtype": c.certificate.semantics,
        "error_bound": None if c.error_estimate is not None else c.error_bound,
        "error_estimate": c.error_estimate,
        "tolerance_met": c.tolerance_met,
        "evaluations": c.evaluations,
        "points_asked": c.certificate.facts.get("points_asked"),
        "points_excluded": c.certificate.facts.get("points_excluded"),
        "share_excluded": c.certificate.facts.get("share_excluded"),
        "why": list(c.why),
        "candidates": [asdict(row) for row in c.candidates],
        "worst_error_seen": None if witness is None else witness.error,
        "saved": str(place),
    }
