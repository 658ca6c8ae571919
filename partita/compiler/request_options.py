"""From the arguments of `compile` and `plan` to a request, each checked once, before f is called for the first time."""

from __future__ import annotations

import math
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np
import torch

from partita.arithmetic.arguments import is_number, require_dtype
from partita.arithmetic.environment import require_gradual_underflow
from partita.arithmetic.precision import PRECISIONS
from partita.arithmetic.progress import Progress, report
from partita.errors import (
    BudgetSpentError,
    DomainError,
    NothingKnownError,
    PartitaError,
    SizeError,
    ToleranceError,
    UnsupportedError,
)
from partita.functions.failures import DEFAULT_MAX_EXCLUDED
from partita.functions.probing import Calls
from partita.functions.regions import DomainLike
from partita.functions.regularity import Declared, Knowledge, knowledge_or_obstacle, where_planned
from partita.functions.tails import clipped_for
from partita.functions.target import Tail, Target, make_target
from partita.methods import METHODS, Request

__all__ = ["ACCEPT", "ON_ERROR", "method_names", "request_for"]

ACCEPT = ("strongest", "estimated")
_LEAST_EVALUATIONS, _RESERVED = 100, 272
_MANY = 4  # variables, from which on moduli of f are computed only if a method needs them: that can take a minute
ON_ERROR = ("raise", "exclude")


def method_names() -> list[str]:
    """ "auto" and the names of all methods."""
    return ["auto", *dict.fromkeys(m.name for m in METHODS)]


def request_for(
    function: Any,
    domain: DomainLike,
    *,
    tolerance: float,
    norm: float | str,
    dtype: torch.dtype,
    sharpness: float | None,
    max_bytes: int,
    method: str,
    accept: str,
    declared: dict[str, Any],
    vectorize: bool,
    trace: bool | None,
    max_evaluations: int | None = None,
    best_effort: bool = False,
    asking: Progress | None = None,
    query_values: bool = False,
    max_value: float | None = None,
    max_heads: int | None = None,
    max_layers: int | None = None,
    folder: Path | None = None,
    tail: Tail | None = None,
    on_error: str = "raise",
    max_excluded: float = DEFAULT_MAX_EXCLUDED,
    needs_moduli: bool = True,
    progress: Progress | None = None,
) -> Request:
    """The request with what is known about f, or the error that says which option is wrong.

    Args:
        declared: the arguments of `Declared`. tail: what is declared about a function without a bound.
        best_effort: whether time is limited. asking: called while f is evaluated.
        folder: where large tables are written.
        needs_moduli: whether it is an error if time runs out while moduli of f are looked for.
    """
    if method not in method_names():
        raise UnsupportedError(f"method is {method!r}; expected one of {', '.join(map(repr, method_names()))}.")
    if accept not in ACCEPT:
        raise UnsupportedError(f"accept is {accept!r}; expected one of {', '.join(map(repr, ACCEPT))}.")
    try:
        power = math.inf if norm == "inf" else math.nan if isinstance(norm, bool) else float(norm)
    except (TypeError, ValueError):
        power = math.nan
    if not power >= 1:
        raise UnsupportedError(f"norm is {norm!r}; expected 'inf' or a number p ≥ 1.")
    excluded = _max_excluded(on_error, max_excluded, {**declared, "tail": tail})
    if not (is_number(tolerance) and 0 < tolerance < math.inf):
        raise ToleranceError(f"tolerance is {tolerance!r}; expected a finite number > 0.")
    require_dtype(
        dtype, "To use another dtype, cast the finished head; the certificate does not cover it then.", halves=True
    )
    if sharpness is not None:
        _require_sharpness(sharpness, method)
    if not (is_number(max_bytes) and 1 <= max_bytes < math.inf):
        raise UnsupportedError(f"max_bytes is {max_bytes}; expected a number of bytes ≥ 1.")
    if max_value is not None and not (is_number(max_value) and max_value > 0):
        raise UnsupportedError(f"max_value is {max_value!r}; expected a number > 0, the largest |V| allowed.")
    for name, most in (("max_heads", max_heads), ("max_layers", max_layers)):
        if most is not None and (isinstance(most, bool) or not isinstance(most, Integral) or most < 1):
            raise UnsupportedError(f"{name} is {most!r}; expected an integer ≥ 1, or None for no limit.")
    report(progress, "first evaluations of f" if callable(function) else "reading f")
    calls = Calls(progress=asking)
    if max_evaluations is not None:
        if not (is_number(max_evaluations) and _LEAST_EVALUATIONS <= max_evaluations < math.inf):
            raise UnsupportedError(
                f"max_evaluations is {max_evaluations!r}; expected a number ≥ {_LEAST_EVALUATIONS}: some are needed to find "
                "out how to call f, and some to check the finished head."
            )
        calls.most, calls.reserved = int(max_evaluations), min(_RESERVED, int(max_evaluations) // 4)
    target = make_target(function, domain, vectorize=vectorize, trace=trace, calls=calls, max_excluded=excluded)
    said = Declared(**declared)
    if query_values and len(target.domains) == 1:
        raise UnsupportedError(
            "query_values is True for a single domain; expected a pair of boxes", "Leave query_values out."
        )
    if not isinstance(tail, Tail | None):
        raise DomainError(f"tail is {tail!r}; expected a Tail(clip, norm).")
    target, left = clipped_for(target, tail, power, float(tolerance))
    found: tuple[Knowledge | None, PartitaError | None] | None = None  # None leaves it to the methods that need it
    if target.excluding is None and not (target.graph is not None and target.box.dimension >= _MANY):
        on = where_planned(target, PRECISIONS[str(dtype)])
        try:
            found = knowledge_or_obstacle(on, norm=power, declared=said, progress=progress)
        except BudgetSpentError:
            if needs_moduli:
                raise
            found = None, NothingKnownError(f"time ran out while moduli of {target.label} were looked for")
    elif target.excluding is not None:
        advice = "Use a larger tolerance, or restrict the domain to where the function has values."
        found = None, NothingKnownError(f"{target.label} may fail, so nothing can be proved about it", advice)
    if max_value is not None and math.isinf(power):
        _require_room(target, float(max_value), left)
    require_gradual_underflow()
    seen = PRECISIONS[str(dtype)].widened(target.box.lo.ravel(), target.box.hi.ravel())
    return Request(
        target,
        left,
        power,
        dtype,
        None if sharpness is None else float(sharpness),
        int(max_bytes),
        method,
        accept,
        said,
        progress,
        bool(query_values),
        best_effort or max_evaluations is not None,
        math.inf if max_value is None else float(max_value),
        None if max_heads is None else int(max_heads),
        None if max_layers is None else int(max_layers),
        folder,
        seen,
        {} if found is None else {"knowledge": found},
    )


def _max_excluded(on_error: str, most: float, declared: dict[str, Any]) -> float | None:
    """The share of the points at which f may fail; None if it may not. What is declared of f would be claimed where it fails."""
    if on_error not in ON_ERROR:
        raise UnsupportedError(f"on_error is {on_error!r}; expected one of {', '.join(map(repr, ON_ERROR))}.")
    if not (is_number(most) and 0 < most < 1):
        raise UnsupportedError(f"max_excluded is {most!r}; expected a share of the domain, between 0 and 1.")
    if on_error == "raise":
        return None
    names = [name for name, value in declared.items() if value is not None]
    if names:
        raise UnsupportedError(
            f"on_error is 'exclude', and {names[0]} is declared; nothing can be proved where a function fails, so the "
            "error is only estimated",
            f"Leave {names[0]} out, or restrict the domain to where the function has values.",
        )
    return float(most)


def _require_sharpness(sharpness: float, method: str) -> None:
    name = "hard" if method == "auto" else method  # a sharpness chosen by the caller asks for values at the centers
    if not any(m.takes_sharpness for m in METHODS if m.name == name):
        raise UnsupportedError(
            f"method {method!r} chooses its own sharpness; leave sharpness out", "Or use pa.head, which takes any."
        )
    require_sharpness(sharpness)


def require_sharpness(sharpness: Any) -> None:
    """Raise an UnsupportedError unless this is a finite number > 0."""
    if not (is_number(sharpness) and 0 < sharpness < math.inf):
        raise UnsupportedError(
            f"sharpness is {sharpness!r}; expected a finite κ = R h² > 0 (heads with κ ≥ 8 are called hard)."
        )


def _require_room(target: Target, max_value: float, tolerance: float) -> None:
    """A SizeError if f is larger somewhere than values within the limit can make a head."""
    points, values = target.answered()
    if not len(points):
        points = target.domain.sample(64, np.random.default_rng(2))
        values = target(points)
    size = np.abs(values).max(axis=1)
    worst = int(size.argmax())
    if size[worst] > max_value + tolerance:
        raise SizeError(
            f"|{target.label}| is {size[worst]:.6g} at {points[worst].tolist()}; a head averages its values, so values within "
            f"max_value={max_value:g} cannot come within {tolerance:g} of that",
            f"Use at least max_value={size[worst]:.4g}.",
        )
