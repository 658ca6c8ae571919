"""The command `partita head`: a head with the keys and the temperature of your choice."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated, Any

import typer

import partita as pa
from partita.cli.common import (
    AsJson,
    Domain,
    Dtype,
    Expression,
    Lipschitz,
    Modulus,
    Norm,
    Overwrite,
    Region,
    Seed,
    Vectorize,
    dtype_named,
    emit,
    function_named,
    parse_domain,
    shown_progress,
)
from partita.storage import require_free

__all__ = ["head_command"]


def head_command(
    expression: Expression,
    domain: Domain,
    keys: Annotated[
        str, typer.Option("--keys", help="Keys per axis: '8', or '8,5' for two axes. Ghosts are included.")
    ],
    sharpness: Annotated[
        str,
        typer.Option(
            "--sharpness",
            help="κ = R h² > 0. Several, '0.5,2,64', show the same head at these temperatures in a table.",
        ),
    ] = "2",
    values: Annotated[str, typer.Option("--values", help="centers, corrected, fitted or affine.")] = "centers",
    ghosts: Annotated[str, typer.Option("--ghosts", help="How many of the keys lie beyond each end of an axis.")] = "0",
    out: Annotated[Path | None, typer.Option("--out", help="The folder to write; for one sharpness.")] = None,
    region: Region = None,
    norm: Norm = "inf",
    dtype: Dtype = "float64",
    lipschitz: Lipschitz = None,
    modulus: Modulus = None,
    vectorize: Vectorize = False,
    seed: Seed = 0,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Build the head you choose and print its error bound. No tolerance is needed."""
    kappas, where = _numbers(sharpness, "--sharpness", float), parse_domain(domain, region)
    counts, beyond = _numbers(keys, "--keys", int), _numbers(ghosts, "--ghosts", int)
    if out is not None:
        if len(kappas) > 1:
            raise typer.BadParameter("a folder holds one head; give one --sharpness with --out.", param_hint="--out")
        require_free(out, overwrite=overwrite)
    with redirect_stdout(sys.stderr), shown_progress("building") as progress:  # what the user's function prints
        first = pa.head(
            function_named(expression),
            where,
            keys=counts[0] if len(counts) == 1 else counts,
            sharpness=kappas[0],
            values=values,
            ghosts=beyond[0] if len(beyond) == 1 else beyond,
            norm=norm,
            dtype=dtype_named(dtype),
            lipschitz=lipschitz,
            modulus=modulus,
            vectorize=vectorize,
            seed=seed,
            progress=progress,
        )
        heads = [first, *(first.with_sharpness(k, seed=seed, progress=progress) for k in kappas[1:])]
    place = None if out is None else str(first.save(out, overwrite=overwrite))
    rows = [_row(c, kappa) for c, kappa in zip(heads, kappas)]
    data: dict[str, Any] = {
        "function": first.target.label,
        "domain": [str(d) for d in first.target.domains],
        "values": values,
        "keys": first.num_keys,
        "keys_per_axis": list(getattr(first.head, "counts", ())),
        "parameters": first.num_parameters,
        "dtype": first.certificate.semantics,
        "heads": rows,
        "saved": place,
    }
    text = first.explain() if len(heads) == 1 else _table(first, heads, kappas)
    emit(data, as_json, text if place is None else f"{text}\n\nsaved in {place}/")


def _row(c: pa.Compiled, kappa: float) -> dict[str, Any]:
    witness = c.certificate.witness
    return {
        "sharpness": kappa,
        "kind": c.certificate.kind,
        "error_bound": None if c.error_estimate is not None else c.error_bound,
        "error_estimate": c.error_estimate,
        "worst_error_seen": None if witness is None else witness.error,
    }


def _table(first: pa.Compiled, heads: list[pa.Compiled], kappas: list[float]) -> str:
    lines = [first.why[0], "", f"{'sharpness':>10}  {'claim':<12}  {'error':<24}  worst error seen"]
    for c, kappa in zip(heads, kappas):
        witness = c.certificate.witness
        seen = "" if witness is None else f"{witness.error:.4g}"
        lines.append(f"{kappa:>10g}  {c.certificate.kind:<12}  {c.certificate.claim:<24}  {seen}")
    return "\n".join(lines)


def _numbers(text: str, option: str, kind: type[int] | type[float]) -> list[Any]:
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"{text!r}; expected numbers such as '8' or '8,5'.", param_hint=option) from None
