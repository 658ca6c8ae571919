"""The command `partita plan`: sizes before anything is built."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout

import partita as pa
from partita.cli.common import (
    Accept,
    AsJson,
    CheckpointFolder,
    Domain,
    Dtype,
    Expression,
    Hessian,
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
    Region,
    Retries,
    Scheduler,
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
    working_with,
)
from partita.functions.failures import DEFAULT_MAX_EXCLUDED
from partita.methods.planner import report

__all__ = ["plan_command"]


def plan_command(
    expression: Expression,
    domain: Domain,
    tolerance: Tolerance,
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
    max_evaluations: MaxEvaluations = None,
    workers: Workers = None,
    scheduler: Scheduler = None,
    checkpoint: CheckpointFolder = None,
    retries: Retries = 0,
    as_json: AsJson = False,
) -> None:
    """Show the sizes before anything is built: keys, stored numbers, bytes, the bound, and why."""
    options = compile_options(locals())
    where = parse_domain(domain, region)
    with (
        redirect_stdout(sys.stderr),  # what the user's function prints
        working_with(workers, scheduler, checkpoint, retries) as shared,
        shown_progress("planning") as progress,
    ):
        planned = pa.plan(function_named(expression), where, progress=progress, **shared, **options)
    table, kind = report(planned.candidates, built=False), planned.kind
    text = f"{planned}\n\n{table}\n\nthe certificate will be {kind} (tolerance {tolerance:g})"
    emit(planned.to_json(), as_json, text)
