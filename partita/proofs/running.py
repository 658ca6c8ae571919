"""What running a head adds to its error: cells left out, scores and sums rounded, values and inputs stored."""

from __future__ import annotations

from partita.arithmetic.precision import DOUBLE, SINGLE
from partita.arithmetic.rounding import expm1_up, mul_up
from partita.proofs.certificate import Term

__all__ = ["UNIT_ROUNDOFF", "added_terms", "running_terms"]

UNIT_ROUNDOFF = {p.name: p.unit for p in (DOUBLE, SINGLE)}


def running_terms(
    approximation: float,
    *,
    mass_left_out: float,
    score_error: float,
    operations: float,
    unit_roundoff: float,
    largest: float,
    spread: float,
    value_error: float,
    factor: float = 1.0,
) -> list[Term]:
    """The terms that every head with a bound of the type `Σ w|V − f| ≤ approximation` shares, in any order of summation.

    *Theorem*: `window-tail` for what is left out, `score-rounding` for the rest; `factor` carries the supremum over to L_p.
    """
    scores = mul_up(expm1_up(mul_up(2.0, score_error)), approximation)
    terms = [
        _window(mass_left_out, spread, factor),
        Term(
            "score rounding",
            scores,
            "(e^{2δ} − 1) · approximation",
            "score-rounding",
            {"delta": score_error},
            source="rounding",
        ),
        _summation(operations, unit_roundoff, largest, factor),
    ]
    if value_error:
        stored = mul_up(value_error, factor)
        inputs = {"error": value_error}
        terms.append(Term("stored values", stored, "max |V_j − f(v_j)|", "score-rounding", inputs, source="storage"))
    return terms


def added_terms(
    *,
    mass_left_out: float,
    score_error: float,
    operations: float,
    unit_roundoff: float,
    largest: float,
    spread: float,
    factor: float = 1.0,
) -> list[Term]:
    """The terms that running adds to *any* bound of the exact head, whatever its values are.

    Scores that are off by at most δ move at most `tanh(δ/2) ≤ δ/2` of the mass, hence the output by that times the spread of the
    values. *Theorem*: `score-rounding`.
    """
    moved = mul_up(0.5, score_error, spread, factor)
    return [
        _window(mass_left_out, spread, factor),
        Term(
            "score rounding",
            moved,
            "δ/2 · spread of the values",
            "score-rounding",
            {"delta": score_error},
            source="rounding",
        ),
        _summation(operations, unit_roundoff, largest, factor),
    ]


def _window(mass: float, spread: float, factor: float) -> Term:
    value = mul_up(mass, spread, factor)
    return Term(
        "window", value, "mass left out · spread of the values", "window-tail", {"mass": mass}, source="rounding"
    )


def _summation(operations: float, unit: float, largest: float, factor: float) -> Term:
    value = mul_up(1.01, operations, unit, largest, factor)
    counted = {"operations": operations, "u": unit, "largest": largest}
    return Term("summation", value, "γ_K · max|V|", "score-rounding", counted, source="rounding")
