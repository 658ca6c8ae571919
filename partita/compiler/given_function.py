"""A black box or a table for a head that was loaded from a file: the caller brings it, and it must be the one that was compiled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from partita.errors import AnotherFunctionError, FormatError, ShapeError, UnsupportedError
from partita.functions.samples import Table
from partita.functions.tails import clipped
from partita.functions.target import Target, make_target, sample_hash
from partita.geometry.domains import Array
from partita.geometry.grid import ProductGrid
from partita.heads.head import Head
from partita.proofs.certificate import Certificate

__all__ = ["given_function", "require_same_table"]

_MAY_FAIL = 0.5  # of the domain, for a head that was compiled with on_error="exclude"
_SLACK = (
    1e-6  # of the largest value and of the tolerance: what another machine or library version may round differently
)

_ANSWERS = 256  # that older certificates hash
_AT_RANDOM_POINTS = frozenset(
    ("fitted", "tuned", "corrected", "affine", "train")
)  # methods whose hash is of such values


def given_function(
    target: Target, head: Head, certificate: Certificate, function: Any, *, vectorize: bool = False
) -> Target:
    """The target with a function to evaluate.

    Raises:
        AnotherFunctionError: its values are not those of the function that was compiled, as far as the certificate holds them.
        ShapeError: its values have another shape.
        UnsupportedError: the target has an expression.
    """
    if target.graph is not None or certificate.function.get("type") == "network":
        what = "the expression " if target.graph is not None else ""
        raise UnsupportedError(
            f"this head's function is {what}{target.label}, which is stored with it", "Leave function= out."
        )
    domains = target.domains[0] if len(target.domains) == 1 else target.domains
    may_fail = _MAY_FAIL if "points_excluded" in certificate.facts else None
    given = make_target(function, domains, vectorize=vectorize, trace=False, max_excluded=may_fail)
    if given.output_shape != target.output_shape:
        raise ShapeError(
            f"{given.label} returns values of shape {given.output_shape}; expected {target.output_shape}, the shape that the "
            f"head and its function {target.label} have."
        )
    found = replace(target, ask=given.ask, excluding=given.excluding)
    if target.tail is not None:
        found = replace(target, ask=clipped(given, target.tail, declared=True).ask)
    _require_same(found, head, certificate, given.label)
    return found


def require_same_table(table: Any, stated: Mapping[str, Any]) -> Table:
    """The table, if a certificate is about it.

    Args:
        table: what the caller gave.
        stated: `certificate.function`.

    Raises:
        UnsupportedError: it is not a table.
        AnotherFunctionError: it is another table.
    """
    name = stated.get("label")
    if not isinstance(table, Table):
        raise UnsupportedError(
            f"found a {type(table).__name__} for a head that was fitted to the table {name}; expected this table",
            "Read it again: pa.Table.from_csv(…).",
        )
    if table.sha256 != stated.get("sha256"):
        raise AnotherFunctionError(
            f"{table!r} is not the table that the head was fitted to ({name}): the hash of its numbers and names differs",
            "Give the same columns, with the same names and in the same order.",
        )
    return table


def _require_same(target: Target, head: Head, certificate: Certificate, label: str) -> None:
    """Compare with the values that the certificate holds; older ones hold a hash only."""
    sample = certificate.function.get("sample")
    hint = "Give the function that was compiled, or compile this one."
    if sample is not None:
        points, stored = _read_sample(sample, target)
        found = target(points)
        off = np.abs(found - stored).max(axis=1)
        worst = int(off.argmax())
        if off[worst] > _SLACK * (float(np.abs(stored).max()) + certificate.tolerance):
            raise AnotherFunctionError(
                f"{label} is not the function that was compiled ({target.label}): at {points[worst].tolist()} it is "
                f"{found[worst].tolist()}, but the compiled function returned {stored[worst].tolist()}",
                hint,
            )
        return
    hashed = _hashed(target, head, certificate)
    if hashed is not None and sample_hash(*hashed) != certificate.function.get("sha256"):
        raise AnotherFunctionError(
            f"{label} does not have the values of the function that was compiled ({target.label}): the hash of its values at "
            f"{len(hashed[0]):,} points is different",
            f"{hint} A different rounding on another machine changes the hash, too: then compile again, or attack the head "
            "with pa.attack(c.head, function, domain, bound=c.error_bound).",
        )


def _read_sample(sample: Any, target: Target) -> tuple[Array, Array]:
    """Points `(k, m)` and values `(k, out)` of a certificate; nothing in it is trusted."""
    try:
        points, values = (np.array(sample[name], dtype=np.float64) for name in ("points", "values"))
        fits = points.shape == (len(values), target.domain.dimension) and values.shape == (
            len(points),
            target.num_outputs,
        )
    except (LookupError, TypeError, ValueError):
        fits = False
    if not (fits and len(points) and np.isfinite(points).all() and np.isfinite(values).all()):
        raise FormatError("certificate.json: the sample of the function is not a list of points with finite values.")
    return points, values


def _hashed(target: Target, head: Head, certificate: Certificate) -> tuple[Array, Array] | None:
    """The points and values that the hash of an older certificate was made from; None where they cannot be found again."""
    model, partition = certificate.model, head.partition(target.box)
    if model.get("method") in _AT_RANDOM_POINTS:
        points = target.domain.sample(_ANSWERS, np.random.default_rng(0))
        return points, target(points)
    if "counts" not in model or not isinstance(partition, ProductGrid):
        return None
    points = partition.centers_of(np.arange(min(certificate.function.get("answers", 0), partition.num_cells)))
    return points, torch.from_numpy(target(points)).to(head.dtype).double().numpy()
