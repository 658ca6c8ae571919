"""compile with a table: samples in, the smallest fitted head that is close enough to rows that it has not seen out."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from partita.arithmetic.arguments import is_number, require_dtype
from partita.arithmetic.environment import require_gradual_underflow
from partita.arithmetic.precision import PRECISIONS
from partita.arithmetic.progress import Progress, report
from partita.compiler.compiled import Compiled
from partita.errors import (
    BudgetSpentError,
    DomainError,
    MissingExtraError,
    SizeError,
    ToleranceError,
    UnsupportedError,
)
from partita.functions.regions import DomainLike, Region
from partita.functions.samples import Noise, Table
from partita.functions.target import Target
from partita.geometry.domains import Array, Box
from partita.heads.scattered_head import ScatteredHead
from partita.methods.method import Candidate, size_text
from partita.proofs.claim import claim
from partita.proofs.sampled import SampledError

__all__ = ["held_out_error", "require_table_options", "table_head"]

_FIRST, _MOST = 4, 1000  # keys
_MARGIN = 0.75  # of the tolerance, that leave-one-out errors may take before the held-out rows are looked at
_GAIN, _PATIENCE = 0.98, 3  # a search ends after so many sizes that leave more than this share of the error
_METHOD = "table"
_MEANT_FOR_FUNCTIONS: Mapping[str, tuple[Any, str]] = {
    "lipschitz": (None, "nothing is proved about a table"),
    "modulus": (None, "nothing is proved about a table"),
    "hessian": (None, "nothing is proved about a table"),
    "jumps": (None, "nothing is proved about a table"),
    "tail": (None, "nothing is proved about a table"),
    "norm": ("inf", "a mean over the domain cannot be estimated from rows, which may lie anywhere in it"),
    "method": ("auto", "a table has a method of its own"),
    "sharpness": (None, "the temperature is fitted"),
    "query_values": (False, "a table is a function of one input"),
    "vectorize": (False, "there is no function to call"),
    "trace": (None, "there is no function to trace"),
    "on_error": ("raise", "there is no function that may fail"),
    "max_evaluations": (None, "there is no function to call"),
    "executor": (None, "there is no function to call"),
    "checkpoint": (None, "there is no function to call"),
    "retries": (0, "there is no function to call"),
}


def require_table_options(table: Table, given: Mapping[str, Any]) -> None:
    """An UnsupportedError for an option of `compile` that means nothing for a table.

    Args:
        table: what is compiled.
        given: the options, by name.
    """
    for name, (default, why) in _MEANT_FOR_FUNCTIONS.items():
        if name in given and given[name] is not default and given[name] != default:
            raise UnsupportedError(f"{name} is {given[name]!r}, but {table!r} is a table: {why}", f"Leave {name} out.")


@dataclass(frozen=True, eq=False)
class _Fit:
    """A head of some size, and the largest error at a row of the fit that was left out."""

    keys: int
    head: ScatteredHead
    left_out: float

    @property
    def parameters(self) -> int:
        return self.head.num_parameters


def table_head(
    table: Table,
    domain: DomainLike | None,
    *,
    tolerance: float,
    dtype: torch.dtype,
    outside: str,
    max_bytes: float,
    max_value: float | None,
    seed: int,
    progress: Progress | None,
) -> tuple[Compiled, ToleranceError | None]:
    """The smallest fitted head whose leave-one-out errors leave some room below the tolerance, and its error at held-out rows.

    Sizes are compared by the rows of the fit alone. The held-out rows are looked at when a head is finished that seems good
    enough, and again for the next size if it is not; the certificate counts how often. *Theorem*: `held-out-rows`.

    Args:
        table: the samples.
        domain: a box or a region that contains them; the box around them if None.
        tolerance: the largest error allowed at a held-out row.
        dtype: of the head, torch.float64 or torch.float32.
        outside: what the head does with inputs outside the domain.
        max_bytes: largest size of the head.
        max_value: largest |V| of any key, or None.
        seed: decides which rows are held out.
        progress: called before each fit; an error that it raises because a budget is spent ends the search.

    Returns:
        The head, and the error to raise if it misses the tolerance.

    Raises:
        ToleranceError: rows with the same inputs differ by more than twice the tolerance.
        DomainError: rows lie outside the domain.
        SizeError: no head fits into max_bytes and max_value.
        MissingExtraError: scikit-learn is not installed.
    """
    if not (is_number(tolerance) and 0 < tolerance < math.inf):
        raise ToleranceError(f"tolerance is {tolerance!r}; expected a finite number > 0.")
    if max_value is not None and not (is_number(max_value) and max_value > 0):
        raise UnsupportedError(f"max_value is {max_value!r}; expected a number > 0, the largest |V| allowed.")
    require_dtype(dtype)
    require_gradual_underflow()
    where, noise = _domain(table, domain), table.noise()
    if noise is not None and noise.largest > 2 * tolerance:
        raise ToleranceError(f"{_noisy(table, noise)}: no function is within {tolerance:g} of both", _remedy(noise))
    seen, held = table.split(seed)
    box = where if isinstance(where, Box) else where.bounding_box()
    limits = (box, dtype, float(max_bytes), math.inf if max_value is None else float(max_value))
    tried: list[_Fit] = []
    looked: dict[_Fit, SampledError] = {}
    try:
        for fit in _fits(table, seen, limits, seed, progress):
            tried.append(fit)
            if fit.left_out <= _MARGIN * tolerance:
                looked[fit] = _held_out(fit.head, table, held)
                if looked[fit].estimate <= tolerance:
                    break
            if _is_stuck(tried):
                break
    except BudgetSpentError:
        if not tried:
            raise
    least = min(tried, key=lambda f: f.left_out)
    if not any(error.estimate <= tolerance for error in looked.values()) and least not in looked:
        looked[least] = _held_out(least.head, table, held)
    best = min(looked, key=lambda f: looked[f].estimate)
    error = looked[best]
    compiled = _certified(table, where, best, looked, held, noise, float(tolerance), outside, seed, tried)
    if error.estimate <= tolerance:
        return compiled, None
    near = f" ({_noisy(table, noise)})" if noise is not None else ""
    said = f"{table.name}: the best head ({best.keys:,} keys) errs by {error.estimate:.4g} at one of {len(held):,} held-out rows"
    missed = ToleranceError(
        f"{said}, above the tolerance {tolerance:g}{near}",
        f"Use tolerance={1.1 * error.estimate:.3g}, or add rows around {_place(table, error.point)}.",
    )
    return compiled, missed


def held_out_error(head: ScatteredHead, table: Table, seed: int, share: float) -> float:
    """The largest error of a head at the rows that its fit did not see.

    Args:
        head: a head that was fitted to this table.
        table: the table.
        seed: as the certificate has it.
        share: of the rows, as the certificate has it.
    """
    return _held_out(head, table, table.split(seed, share)[1]).estimate


def _domain(table: Table, domain: DomainLike | None) -> Box | Region:
    if domain is None:
        return table.box
    where = domain if isinstance(domain, (Box, Region)) else None
    if where is None and isinstance(domain, (str, list, tuple)):
        where = Box.of(domain)
    if where is None or where.shape != (len(table.inputs),):
        found = repr(domain) if where is None else f"of shape {where.shape}"
        raise DomainError(
            f"the domain is {found}; for {table!r}, expected a box or a region of {len(table.inputs)} variables."
        )
    outside = np.flatnonzero(~where.contains(table.X))
    if outside.size:
        first = table.row(int(outside[0]))
        raise DomainError(
            f"{table.name}: {outside.size:,} of {len(table.X):,} rows lie outside {where}, the first in {first}",
            "Leave the domain out to take the box around all rows, or leave these rows out of the table.",
        )
    return where


def _fits(
    table: Table,
    seen: NDArray[np.int64],
    limits: tuple[Box, torch.dtype, float, float],
    seed: int,
    progress: Progress | None,
) -> Iterator[_Fit]:
    """Heads with more and more keys."""
    try:
        from partita.learn import PartitionRegressor
    except MissingExtraError:
        raise MissingExtraError.of("tables need", "sklearn") from None
    (box, dtype, max_bytes, max_value), m = limits, len(table.inputs)
    X, y = table.X[seen], table.y[seen]
    most = min(len(np.unique(X, axis=0)), _MOST)
    counts = [*(n for n in (_FIRST << k for k in range(_MOST.bit_length())) if n < most), most]
    refused: SizeError | None = None
    none = True
    for done, count in enumerate(counts):
        report(progress, f"fit with {count:,} keys", done, len(counts))
        values = "auto" if count * (1 + m) <= _MOST else "constant"
        model = PartitionRegressor(count, values, random_state=seed % 2**32).fit(X, y)
        head = model.head_.to(dtype)
        size = sum(t.numel() * t.element_size() for t in head.state_dict().values())
        largest = head.largest_value(box.lo, box.hi)
        if size > max_bytes:
            refused = SizeError(
                f"a head of {count:,} keys takes {size_text(size)}; max_bytes allows {size_text(int(max_bytes))}",
                "Raise max_bytes.",
            )
            break
        if largest > max_value:
            refused = SizeError(
                f"the values of the fitted heads reach {largest:.4g}; max_value allows {max_value:g}",
                "Raise max_value.",
            )
            continue
        none = False
        yield _Fit(head.num_keys, head, float(np.abs(model.loo_predictions_ - y).max()))
    if none and refused is not None:
        raise refused


def _is_stuck(tried: list[_Fit]) -> bool:
    """Whether the last sizes brought next to nothing."""
    errors = [f.left_out for f in tried]
    return len(errors) > _PATIENCE and min(errors[-_PATIENCE:]) > _GAIN * min(errors[:-_PATIENCE])


def _held_out(head: ScatteredHead, table: Table, held: NDArray[np.int64]) -> SampledError:
    """The largest error at held-out rows; those with the same inputs count as one sample."""
    errors = np.abs(_values(head, table.X[held]) - table.columns[held]).max(axis=1)
    worst = int(errors.argmax())
    different = len(np.unique(table.X[held], axis=0))
    return SampledError(float(errors[worst]), different, tuple(table.X[held[worst]].tolist()), from_rows=True)


def _values(head: ScatteredHead, points: Array) -> Array:
    with torch.no_grad():
        return head.evaluate(torch.from_numpy(np.ascontiguousarray(points)).to(head.dtype)).double().numpy()


def _certified(
    table: Table,
    where: Box | Region,
    fit: _Fit,
    looked: Mapping[_Fit, SampledError],
    held: NDArray[np.int64],
    noise: Noise | None,
    tolerance: float,
    outside: str,
    seed: int,
    tried: list[_Fit],
) -> Compiled:
    head, error, box = fit.head, looked[fit], where if isinstance(where, Box) else where.bounding_box()
    head.check_range(*PRECISIONS[str(head.dtype)].widened(box.lo, box.hi))
    squares = ((_values(head, table.X[held]) - table.columns[held]) ** 2).mean()
    counts = {"rows": len(table.X), "rows_held_out": len(held), "looks": len(looked)}
    facts = {**{name: float(n) for name, n in counts.items()}, "rms_held_out": math.sqrt(float(squares))}
    if noise is not None:
        facts |= {"noise": noise.deviation, "inputs_repeated": float(noise.inputs)}
    certificate = claim(
        head,
        table.description(),
        (where,),
        (),
        dtype=head.dtype,
        theorem="held-out-rows",
        details={"type": "scattered", "method": _METHOD},
        tolerance=tolerance,
        facts=facts,
        seen=error,
    )
    target = Target((where,), head.output_shape, None, None, table.name, is_table=True)
    rows = tuple(_candidate(f, f is fit, looked.get(f), box) for f in tried)
    chosen, others = [r for r in rows if r.chosen], [r for r in rows if not r.chosen]
    return Compiled(
        head,
        head.partition(box),
        replace(certificate, seed=seed),
        target,
        outside,
        _why(table, fit, held, where, noise),
        (*chosen, *others),
        table,
    )


def _candidate(fit: _Fit, chosen: bool, looked: SampledError | None, box: Box) -> Candidate:
    note = "its leave-one-out error" if looked is None else "" if chosen else "looked at, and not chosen"
    error = fit.left_out if looked is None else looked.estimate
    because = "It has the fewest keys with which the tolerance is met, or else the smallest error." if chosen else ""
    largest = fit.head.largest_value(box.lo, box.hi)
    sizes = fit.keys, fit.parameters, largest
    return Candidate(_METHOD, "estimated", note, *sizes, None, error, chosen, because=because)


def _why(table: Table, fit: _Fit, held: NDArray[np.int64], where: Box | Region, noise: Noise | None) -> tuple[str, ...]:
    rows = len(table.X)
    lines = [
        f"{fit.keys:,} keys",
        f"fitted to {rows - len(held):,} of {rows:,} rows; the largest leave-one-out error there is {fit.left_out:.4g}",
    ]
    if noise is not None:
        lines.append(_noisy(table, noise))
    beyond = [n for n, a, b, low, high in zip(table.inputs, *_ends(where), *_ends(table.box)) if a < low or b > high]
    if beyond:
        lines.append(f"the domain reaches beyond the rows in {', '.join(beyond)}: the head extrapolates there")
    return tuple(lines)


def _ends(where: Box | Region) -> tuple[list[float], list[float]]:
    box = where if isinstance(where, Box) else where.bounding_box()
    return box.lo.tolist(), box.hi.tolist()


def _noisy(table: Table, noise: Noise) -> str:
    first, second = noise.rows
    several = f"{noise.inputs:,} inputs occur" if noise.inputs > 1 else "one input occurs"
    return (
        f"{table.name} is noisy: {several} in several rows with different outputs, by up to {noise.largest:.4g} "
        f"({table.row(first)} and {table.row(second)}), a standard deviation of about {noise.deviation:.2g}"
    )


def _remedy(noise: Noise) -> str:
    return f"Average rows with the same inputs, or use a tolerance above {noise.largest / 2:.3g}."


def _place(table: Table, point: tuple[float, ...]) -> str:
    return ", ".join(f"{name} = {x:.6g}" for name, x in zip(table.inputs, point))
