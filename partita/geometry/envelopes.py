"""Upper envelopes of affine functions on the cube |t| ≤ 1, in exact rational arithmetic: which pieces matter, with proofs.

A piece is a row `(b, a_1, …, a_m)`, standing for `b + a·t`; its supremum is `b + |a|₁`. A piece p is dropped only with multipliers
λ ≥ 0, Σλ = 1, and `p + margin ≤ Σ λ_k p_k` on the cube, which is checked in whole numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from partita.arithmetic.progress import Progress, report
from partita.geometry.domains import Array

__all__ = ["Rows", "leading", "within"]

_MAX_PIVOTS = 500
_MAX_WORK = 20_000_000

Rows = NDArray[Any]  # (pieces, 1 + m), Fractions or whole numbers


def leading(rows: Rows, *, progress: Progress | None = None) -> NDArray[np.int64]:
    """Positions of the pieces that make up the maximum on the cube, one of several equal ones; every other has been proved idle.

    Where proving would take long, pieces are kept that may be idle. *Theorem*: `max-affine-values`.

    >>> leading(np.array([[0, 1], [0, -1], [0, 0], [-3, 1]], dtype=object)).tolist()
    [0, 1]
    """
    if len(rows) == 1:
        return np.zeros(1, dtype=np.int64)
    whole, _ = _whole_numbers(rows)
    first = {tuple(row): position for position, row in reversed(list(enumerate(whole)))}
    candidates = np.array(sorted(first.values()))
    scores = _sampled(whole[candidates])
    ranked = np.partition(scores, -2, axis=0) if len(candidates) > 1 else np.vstack([scores - 1, scores])
    clearly = ranked[-1] - ranked[-2] > 1e-9
    winners = candidates[np.unique(scores.argmax(axis=0)[clearly])].tolist()
    if not _is_quick(len(candidates) - len(winners), len(winners), whole.shape[1]):
        return candidates
    return _envelope(whole, candidates, winners, progress)


def within(rows: Rows, margin: Fraction, *, progress: Progress | None = None) -> NDArray[np.int64]:
    """Positions of all pieces but those that are proved to be more than `margin` > 0 below the maximum everywhere on the cube."""
    whole, common = _whole_numbers(rows)
    gap, size = math.ceil(margin * common), int(abs(whole).max()) or 1
    everything = np.arange(len(rows))
    if gap > 2 * whole.shape[1] * size:  # no two pieces are that far apart
        return everything
    scores = _sampled(whole)
    best = scores.argmax(axis=0)
    behind = (scores[best, np.arange(len(best))] - scores).min(axis=1)
    unclear, top = np.flatnonzero(behind > gap / size), whole[np.unique(best)]
    if not _is_quick(len(unclear), len(top), whole.shape[1]):
        return everything
    dropped = []
    for done, t in enumerate(unclear.tolist()):
        report(progress, "pieces", done, len(unclear))
        dropped += [t] if _trails(whole[t], top, gap)[0] else []
    return np.setdiff1d(everything, dropped)


def _whole_numbers(rows: Rows) -> tuple[Rows, int]:
    """The rows times their common denominator, and that."""
    common = math.lcm(*(Fraction(v).denominator for v in rows.flat))
    return np.array([[int(v * common) for v in row] for row in rows], dtype=object), common


def _sampled(whole: Rows) -> Array:
    """The pieces at points of the cube, `(pieces, points)`, in units of their largest entry."""
    size = int(abs(whole).max()) or 1
    pieces = np.array([[v / size for v in row] for row in whole])
    points = max(64, min(2048, (1 << 21) // len(pieces)))
    cube = np.random.default_rng(0).uniform(-1, 1, (points, pieces.shape[1] - 1))
    return pieces[:, :1] + pieces[:, 1:] @ cube.T


def _is_quick(pieces: int, others: int, width: int) -> bool:
    """Whether so many linear programs take seconds at most."""
    return pieces * (others + width) * width**2 <= _MAX_WORK


def _envelope(
    whole: Rows, candidates: NDArray[np.int64], winners: list[int], progress: Progress | None
) -> NDArray[np.int64]:
    """The candidates that make up the maximum, by linear programs against those already known to (Clarkson's scheme)."""
    sure = set(winners)
    top = winners or [int(candidates[whole[candidates, 0].argmax()])]
    for t in candidates.tolist():
        while t not in top:
            report(progress, "pieces", len(top), len(candidates))
            trails, witness = _trails(whole[t], whole[top], 0)
            if trails:
                break
            top.append(t if witness is None else int(candidates[(whole[candidates] @ witness).argmax()]))
    for t in [t for t in top if t not in sure]:  # a tie may have let in one that is idle
        report(progress, "pieces", len(top), len(candidates))
        others = [k for k in top if k != t]
        if others and _trails(whole[t], whole[others], 0)[0]:
            top = others
    return np.array(sorted(top))


def _trails(piece: Rows, others: Rows, gap: int) -> tuple[bool, Rows | None]:
    """Whether `piece + gap ≤ max_k others_k` on the cube is proved; if it is false, (q, q·t) for the t at which it fails most.

    The simplex method, in whole numbers, for `min_λ sup_t (piece − Σ λ_k others_k)(t)`, the dual of `sup_t piece − max_k others_k`:
    one row for Σλ = 1 and one per axis, a column is a piece or a face of the cube. The inverse of the basis is kept as an
    integer matrix over its determinant (Edmonds). What a basis proves is checked once more before it is believed.
    """
    m, count = len(piece) - 1, len(others)
    columns = np.zeros((count + 2 * m, m + 1), dtype=object)
    columns[:count, 0], columns[:count, 1:] = 1, others[:, 1:]
    columns[count:, 1:] = np.concatenate([np.eye(m, dtype=int), -np.eye(m, dtype=int)])
    prices = np.concatenate([-others[:, 0], np.ones(2 * m, dtype=object)])
    start = int((others[:, 0] - abs(others[:, 1:] - piece[1:]).sum(axis=1)).argmax())
    signs = np.where(piece[1:] >= others[start, 1:], 1, -1).astype(object)
    basis = np.array([start, *(count + i + (m if signs[i] < 0 else 0) for i in range(m))])
    inverse, determinant = np.diag(np.array([1, *signs], dtype=object)), 1
    inverse[1:, 0] = -signs * others[start, 1:]
    wanted = np.array([1, *piece[1:]], dtype=object)  # a list of mixed whole numbers could become floats
    for _ in range(_MAX_PIVOTS):
        amounts, dual = inverse @ wanted, prices[basis] @ inverse
        if (piece[0] + gap) * determinant + prices[basis] @ amounts <= 0:
            shares = {int(k): amount for k, amount in zip(basis, amounts) if k < count}
            return _is_proof(piece, others, gap, shares), None
        excess = columns @ dual - determinant * prices
        entering = int(excess.argmax())
        if excess[entering] <= 0:
            return False, np.array([determinant, *dual[1:]], dtype=object)
        change = inverse @ columns[entering]
        leaving = min(np.flatnonzero(change > 0), key=lambda k: Fraction(amounts[k], change[k]))
        row = inverse[leaving]
        inverse = (change[leaving] * inverse - np.multiply.outer(change, row)) // determinant
        inverse[leaving], determinant, basis[leaving] = row, change[leaving], entering
    return False, None


def _is_proof(piece: Rows, others: Rows, gap: int, shares: Mapping[int, int]) -> bool:
    """Whether `piece + gap ≤ Σ λ_k others_k` on the cube, λ = shares/Σ shares ≥ 0: the supremum of `b + a·t` is `b + |a|₁`."""
    whole = sum(shares.values())
    difference = whole * piece - sum(share * others[k] for k, share in shares.items())
    return whole > 0 and min(shares.values()) >= 0 and difference[0] + abs(difference[1:]).sum() + gap * whole <= 0
