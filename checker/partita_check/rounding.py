"""What running a head adds: windows, rounded scores, sums in any order, rounded inputs. Derived in docs/checker.md.

u is the unit roundoff; arithmetic is IEEE 754 and exp errs by at most 8 units in the last place (16u): what the certificate
says of the platform, and all that is assumed here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from flint import arb

from partita_check.moments import Gaps, lambert
from partita_check.polynomials import up
from partita_check.reading import Head

__all__ = ["UNIT", "grid_score_error", "grid_sums", "input_shift", "mixing", "window_mass"]

UNIT = {"real": arb(0), "float64": arb(2) ** -53, "float32": arb(2) ** -24}
SMALLEST = {"real": arb(0), "float64": arb(2) ** -1022, "float32": arb(2) ** -126}
LARGEST = {"real": math.inf, "float64": 1e300, "float32": 1e36}


def input_shift(semantics: str, lo: Sequence[float], hi: Sequence[float]) -> list[arb]:
    """How far storing an input may move it: inputs are float64, so only a narrower head moves them."""
    if semantics != "float32":
        return [arb(0)] * len(lo)
    return [arb(max(abs(a), abs(b))) * UNIT[semantics] + SMALLEST[semantics] for a, b in zip(lo, hi)]


def _windows(head: Head, gaps: Sequence[Gaps]) -> list[tuple[int, arb]]:
    """Per axis how many centers a window has, and a bound of the scores R(x − c)²/2 in it."""
    found = []
    for q, axis, rate in zip(head.windows, gaps, head.rates):
        width = min(2 * q, axis.count)
        far = width * axis.most + axis.overhang if axis.count > 1 else axis.radius
        found.append((width, arb(rate) * far * far / 2))
    return found


def window_mass(head: Head, gaps: Sequence[Gaps]) -> arb:
    return sum((g.beyond_window(arb(r), q) for g, r, q in zip(gaps, head.rates, head.windows)), arb(0))


def grid_score_error(head: Head, gaps: Sequence[Gaps], semantics: str) -> arb:
    """δ: how far the logarithm of an unnormalised weight may be off.

    x − c, its square and the product with R/2 leave a relative error of 4u in a score, subtracting the smallest another u
    of the difference (its own error is common to all weights), exp 16u: `1.01u(5s + 16)` per axis, s the largest in the window.
    """
    u, tiny = UNIT[semantics], SMALLEST[semantics]
    windows = _windows(head, gaps)
    if any(not s < LARGEST[semantics] for _, s in windows):
        return arb("inf")
    return sum((1.01 * u * (5 * s + 16) + 4 * arb(r) * tiny for (_, s), r in zip(windows, head.rates)), arb(0))


def mixing(head: Head, gaps: Sequence[Gaps], semantics: str) -> arb:
    """The share of the spread of the values by which rounded scores may move the output, whatever the values are.

    Weights change by factors 1 + ε_j, so the output by at most `η/(1 − η)` of the spread, `η = Σ w_j|ε_j|`. The mean score
    `Σ w s` of an axis is at most `min s + W((P − 1)/e)` (a soft minimum), and `min s ≤ R ρ²/2`. Where errors are large, δ/2 for all alike.
    """
    worst = grid_score_error(head, gaps, semantics)
    if not worst < 0.01:
        return worst / 2 if worst.is_finite() else worst
    u, eta = UNIT[semantics], arb(0)
    for axis, rate in zip(gaps, head.rates):
        eta += 1.01 * u * (5 * (arb(rate) * axis.radius * axis.radius / 2 + lambert(axis.count)) + 16)
        eta += 4 * arb(rate) * SMALLEST[semantics]
    eta *= 1.01
    return min(eta / (1 - eta), worst / 2, key=up)


def grid_sums(head: Head, gaps: Sequence[Gaps], semantics: str, largest: arb) -> arb:
    """`γ_K max|V|`: every axis sums its exponentials, divides, multiplies and sums, in any order; slopes one sum more.

    A term passes through at most `2·width + 4` roundings per axis. Numbers below the smallest normal one may become 0.
    """
    u, m = UNIT[semantics], len(head.rates)
    count = sum(2 * width + 4 for width, _ in _windows(head, gaps)) + 4 + (m + 4 if head.slopes is not None else 0)
    flushed = 4 * (head.keys + sum(map(len, head.axes)) + m) * SMALLEST[semantics] * (1 + largest * (m + 1))
    return 1.01 * count * u * largest + flushed
