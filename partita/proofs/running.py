"""What running a head adds to its error: cells left out, scores and sums rounded, values and inputs stored.

`SCORE_UNITS` and `EXP_UNITS` say what every evaluator of a grid head, on any device, may round: docs/certificates.md lists it.
"""

from __future__ import annotations

import math

from partita.arithmetic.precision import DOUBLE, SINGLE
from partita.arithmetic.rounding import add_up, expm1_up, mul_up
from partita.proofs.certificate import Term

__all__ = ["EXP_UNITS", "SCORE_UNITS", "added_terms", "running_terms", "summed"]

# of the score of an axis, in units u: z − c (twice, as it is squared), two products, log₂e as a constant and as a factor where
# the exponential has base 2, and subtracting the best score make 7; products of errors take less than the eighth
SCORE_UNITS = 8.0
EXP_UNITS = 16.0  # of the exponential, in units u: 7 units in the last place and the logarithm of that


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
    scores = mul_up(expm1_up(mul_up(2.0, score_error)), approximation) if score_error < 300 else math.inf
    if score_error >= 2:  # a mean of the values, whatever the weights are
        scores = min(scores, mul_up(spread, factor))
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

    Scores that are off by at most δ move at most `tanh(δ/2) ≤ min(δ/2, 1)` of the mass, hence the output by that times the
    spread of the values. *Theorem*: `score-rounding`.
    """
    moved = mul_up(0.5, score_error, spread, factor) if score_error < 2 else mul_up(spread, factor)
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


def summed(operations: float, unit: float, largest: float, factor: float = 1.0) -> float:
    """What K products and sums of terms up to `largest` round, in any order: `γ_K·largest`, and what underflow may take.

    Each operation loses at most u of its result, or the tiniest number where the result is subnormal; so do the weights, times
    the values they multiply. `1.01·K·u` exceeds `γ_K` by enough to cover that unless the values are nearly subnormal themselves.
    """
    tiniest = next(p.tiniest for p in (DOUBLE, SINGLE) if unit <= p.unit)
    rounded, lost = (1.01, operations, unit, largest, factor), mul_up(tiniest, add_up(1.0, 2.0 * largest))
    if operations * unit < 1e-3 and lost < 1e-3 * unit * largest:
        return mul_up(*rounded)
    return add_up(mul_up(*rounded), mul_up(operations, lost, factor))


def _summation(operations: float, unit: float, largest: float, factor: float) -> Term:
    value = summed(operations, unit, largest, factor)
    counted = {"operations": operations, "u": unit, "largest": largest}
    return Term("summation", value, "γ_K · max|V|", "score-rounding", counted, source="rounding")
