"""What running a head adds to its error: cells left out, scores and sums rounded, values and inputs stored."""

from __future__ import annotations

from partita.arithmetic.rounding import expm1_up, mul_up
from partita.proofs.certificate import Term

__all__ = ["UNIT_ROUNDOFF", "added_terms", "running_terms"]

UNIT_ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24}


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
    left_out = mul_up(mass_left_out, spread, factor)
    scores = mul_up(expm1_up(mul_up(2.0, score_error)), approximation)
    sums = mul_up(1.01, operations, unit_roundoff, largest, factor)
    counted = {"operations": operations, "u": unit_roundoff, "largest": largest}
    terms = [
        Term("window", left_out, "mass left out · spread of the values", "window-tail", {"mass": mass_left_out}),
        Term("score rounding", scores, "(e^{2δ} − 1) · approximation", "score-rounding", {"delta": score_error}),
        Term("summation", sums, "γ_K · max|V|", "score-rounding", counted),
    ]
    if value_error:
        stored = mul_up(value_error, factor)
        terms.append(Term("stored values", stored, "max |V_j − f(v_j)|", "score-rounding", {"error": value_error}))
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
    counted = {"operations": operations, "u": unit_roundoff, "largest": largest}
    return [
        Term(
            "window",
            mul_up(mass_left_out, spread, factor),
            "mass left out · spread of the values",
            "window-tail",
            {"mass": mass_left_out},
        ),
        Term(
            "score rounding",
            mul_up(0.5, score_error, spread, factor),
            "δ/2 · spread of the values",
            "score-rounding",
            {"delta": score_error},
        ),
        Term(
            "summation",
            mul_up(1.01, operations, unit_roundoff, largest, factor),
            "γ_K · max|V|",
            "score-rounding",
            counted,
        ),
    ]
