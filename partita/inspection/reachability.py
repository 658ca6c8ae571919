"""Which keys a query could reach at all: cheap witnesses for almost all of them, linear programs for the rest, within a
budget."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog

from partita.geometry.domains import Array

__all__ = ["DEAD", "MASKED", "REACHABLE", "UNDECIDED", "KeyReach", "key_reach"]

UNDECIDED, REACHABLE, DEAD, MASKED = 0, 1, 2, 3
_ROUNDS = 40
_LEAD = 1e-6  # a key that can lead by no more than this, in units of the score, is called dead
_U = 2.0**-53


@dataclass(frozen=True, eq=False)
class KeyReach:
    """One answer per key.

    Attributes:
        status: REACHABLE (a witness was checked), DEAD (multipliers prove it), UNDECIDED (the budget ran out, or
            the masks are not nested), MASKED (no query sees it).
        witnesses: `(keys, dim)`, a query that makes the key lead, NaN where there is none.
        programs: how many linear programs were solved.
        entries: total number of entries of their matrices.
    """

    status: NDArray[np.int8]
    witnesses: Array
    programs: int
    entries: int


@dataclass(frozen=True, eq=False)
class _Problem:
    """Slopes in units of the reach ρ, so that queries u have |u|_∞ ≤ 1; `rows` are the distinct sets of keys that queries
    see."""

    slopes: Array
    offsets: Array
    rows: NDArray[np.bool_]
    smallest: NDArray[np.int64]  # for each key the row with it and the fewest others; −1 if there is none
    twins: NDArray[np.int64]  # keys with equal numbers share a label

    def rivals(self, keys: NDArray[np.int64]) -> NDArray[np.bool_]:
        """For each of these keys, the keys it has to beat: those of its smallest row, without itself and its exact copies."""
        out: NDArray[np.bool_] = self.rows[self.smallest[keys]] & (self.twins[None, :] != self.twins[keys, None])
        return out

    def contests(self, key: int) -> list[tuple[NDArray[np.int64], bool]]:
        """Sets of rivals to solve a program against, and whether losing to them proves that the key is dead.

        First the rivals seen by every query that sees the key: a key that loses to them loses everywhere. Then, if they differ,
        the rivals of the smallest row: a key that wins there wins somewhere.
        """
        others = self.twins != self.twins[key]
        always = np.flatnonzero(self.rows[self.rows[:, key]].all(axis=0) & others)
        least = np.flatnonzero(self.rows[self.smallest[key]] & others)
        found = [(always, True)] if len(always) else []
        return found if len(least) == len(always) else [*found, (least, False)]

    def leads(
        self, keys: NDArray[np.int64], queries: Array, rivals: NDArray[np.bool_] | None = None
    ) -> tuple[Array, NDArray[np.int64]]:
        """By how much each key leads at its query, minus rounding, and its strongest rival."""
        scores = queries @ self.slopes.T + self.offsets
        own = scores[np.arange(len(keys)), keys]
        scores[~(self.rivals(keys) if rivals is None else rivals)] = -np.inf
        strongest = scores.argmax(axis=1)
        size = np.abs(queries) @ np.abs(self.slopes).max(axis=0) + np.abs(self.offsets).max()
        rounding = 2 * (self.slopes.shape[1] + 4) * _U * size
        return own - scores[np.arange(len(keys)), strongest] - rounding, strongest


def key_reach(
    slopes: Array,
    offsets: Array,
    active: NDArray[np.bool_],
    *,
    queries: Array,
    reach: float = 10.0,
    budget: int = 1 << 18,
) -> KeyReach:
    """Which keys some query x with `|x|_∞ ≤ ρ` can make the largest of those it sees; ρ is `reach` times the largest
    coordinate seen.

    *Theorem*: `key-reach`. A key is reachable if a query was found that makes it lead by more than rounding could account
    for, dead if multipliers λ ≥ 0, Σλ = 1 over the keys that every one of its queries sees prove that it leads by at most
    10⁻⁶ anywhere in the box. Without offsets the answer does not depend on ρ, and dead keys are those inside the convex hull
    of the others. Copies of a key do not compete with it: they share a cell. With masks a query may have any of the recorded rows
    of `active`.

    Args:
        slopes: `(keys, dim)`.
        offsets: `(keys,)`.
        active: `(queries or 1, keys)`, which keys each recorded query sees.
        queries: `(queries, dim)`, the first witnesses that are tried.
        reach: how many times as large as the largest recorded coordinate a query may be.
        budget: for all linear programs together, in entries (keys × dimensions) of their matrices: 2¹⁸ entries are 8 programs
            at 512 keys in R^64, and 2,000 at 64 keys in R^2.
    """
    largest = float(np.abs(queries).max(initial=0.0)) or 1.0
    problem = _problem(slopes * (reach * largest), offsets, active)
    active = np.broadcast_to(active, (len(queries), len(slopes))) if len(active) == 1 else active
    status = np.where(problem.smallest < 0, MASKED, UNDECIDED).astype(np.int8)
    witnesses = np.full(slopes.shape, np.nan)
    _try_queries(problem, queries / (reach * largest), active, status, witnesses)
    _try_directions(problem, status, witnesses)
    programs, entries = _spend(problem, budget, status, witnesses)
    return KeyReach(status, witnesses * (reach * largest), programs, entries)


def _spend(problem: _Problem, budget: int, status: NDArray[np.int8], witnesses: Array) -> tuple[int, int]:
    """Solves linear programs for undecided keys, until one does not fit the budget. Returns their number and their entries."""
    programs = entries = 0
    for key in np.flatnonzero(status == UNDECIDED).tolist():
        for rivals, proves in problem.contests(key):
            work = (len(rivals) + 1) * problem.slopes.shape[1]
            if entries + work > budget:
                return programs, entries
            entries, programs = entries + work, programs + 1
            _solve(problem, key, rivals, status, witnesses, proves=proves)
            if status[key] != UNDECIDED:
                break
    return programs, entries


def _problem(slopes: Array, offsets: Array, active: NDArray[np.bool_]) -> _Problem:
    rows = active[:1]
    if not (active == rows).all():
        _, first = np.unique(np.packbits(active, axis=1), axis=0, return_index=True)
        rows = active[first]
    sizes = rows.sum(axis=1)
    if len(rows):
        smallest = np.where(rows, sizes[:, None], rows.shape[1] + 1).argmin(axis=0)
        smallest = np.where(rows.any(axis=0), smallest, -1)
    else:
        smallest = np.full(len(slopes), -1)
    _, twins = np.unique(np.column_stack([slopes, offsets]), axis=0, return_inverse=True)
    return _Problem(slopes, offsets, rows, smallest, twins.ravel())


def _settle(
    problem: _Problem, keys: NDArray[np.int64], queries: Array, status: NDArray[np.int8], witnesses: Array
) -> tuple[NDArray[np.bool_], Array, NDArray[np.int64]]:
    """Mark the keys that lead at their query."""
    lead, strongest = problem.leads(keys, queries)
    won = lead > 0
    status[keys[won]] = REACHABLE
    witnesses[keys[won]] = queries[won]
    return won, lead, strongest


def _try_queries(
    problem: _Problem, queries: Array, active: NDArray[np.bool_], status: NDArray[np.int8], witnesses: Array
) -> None:
    """Recorded queries: each settles its own cell, against the keys that it sees itself."""
    step = max(1, (1 << 22) // max(len(problem.slopes), 1))
    for start in range(0, len(queries), step):
        part, seen = queries[start : start + step], active[start : start + step]
        scores = np.where(seen, part @ problem.slopes.T + problem.offsets, -np.inf)
        keys = scores.argmax(axis=1)
        seen = seen & (problem.twins[None, :] != problem.twins[keys, None])
        lead, _ = problem.leads(keys, part, seen)
        order = np.argsort(-lead, kind="stable")
        order = order[lead[order] > 0]
        reached, first = np.unique(keys[order], return_index=True)
        fresh = status[reached] == UNDECIDED
        status[reached[fresh]] = REACHABLE
        witnesses[reached[fresh]] = part[order[first[fresh]]]


def _try_directions(problem: _Problem, status: NDArray[np.int8], witnesses: Array) -> None:
    """From the middle towards the key, in whitened coordinates; where a rival is ahead, step away from it (Agmon, Motzkin)."""
    keys = np.flatnonzero(status == UNDECIDED)
    if not len(keys):
        return
    visible = problem.slopes[problem.smallest >= 0]
    centred = visible - visible.mean(axis=0)
    spread, axes = np.linalg.eigh(centred.T @ centred / len(centred))
    keep = spread > 1e-10 * max(float(spread.max()), np.finfo(float).tiny)
    whiten = axes[:, keep] / np.sqrt(spread[keep]) if keep.any() else axes
    directions = (problem.slopes[keys] - visible.mean(axis=0)) @ whiten @ whiten.T
    x = _into_box(directions)
    best, since = np.full(len(keys), -np.inf), np.zeros(len(keys), dtype=int)
    for _ in range(_ROUNDS):
        step = max(1, (1 << 22) // len(problem.slopes))
        parts = [
            _settle(problem, keys[i : i + step], x[i : i + step], status, witnesses) for i in range(0, len(keys), step)
        ]
        won, lead, strongest = (np.concatenate([p[k] for p in parts]) for k in range(3))
        since = np.where(lead > best * (1 - 1e-3) + 1e-12, 0, since + 1)
        best = np.maximum(best, lead)
        left = ~won & (since < 12)
        if not left.any():
            return
        keys, strongest, since = keys[left], strongest[left], since[left]
        x, lead, best = x[left], lead[left], best[left]
        away = problem.slopes[keys] - problem.slopes[strongest]
        length = (away**2).sum(axis=1)
        # 0 where they differ by a constant
        stride = np.divide(1.5 * -lead, length, out=np.zeros_like(lead), where=length > 0)
        moved = x + (stride + 1e-9)[:, None] * away
        x = np.clip(moved, -1, 1) if problem.offsets.any() else _into_box(moved)


def _into_box(directions: Array) -> Array:
    size = np.abs(directions).max(axis=1, keepdims=True)
    return directions / np.where(size > 0, size, 1.0)


def _solve(
    problem: _Problem,
    key: int,
    rivals: NDArray[np.int64],
    status: NDArray[np.int8],
    witnesses: Array,
    *,
    proves: bool,
) -> None:
    """`max t` with `s_key(u) − s_k(u) ≥ t` for its rivals, |u|_∞ ≤ 1: u is a witness if t > 0, the multipliers a proof if t ≤ 0."""
    steps, gaps = problem.slopes[rivals] - problem.slopes[key], problem.offsets[key] - problem.offsets[rivals]
    unit = max(float(np.abs(steps).max()), float(np.abs(gaps).max()), np.finfo(float).tiny)
    d = steps.shape[1]
    answer = linprog(
        np.append(np.zeros(d), -1.0),
        A_ub=np.column_stack([steps / unit, np.ones(len(rivals))]),
        b_ub=gaps / unit,
        bounds=[(-1.0, 1.0)] * d + [(None, 1.0)],
        method="highs",
    )
    if answer.x is None:
        return
    one = np.array([key])
    if _settle(problem, one, np.clip(answer.x[None, :d], -1, 1), status, witnesses)[0][0]:
        return
    shares = np.maximum(-answer.ineqlin.marginals, 0.0)
    if proves and any(_proves(steps, gaps, candidate) for candidate in (shares, _polished(steps, shares))):
        status[key] = DEAD


def _polished(steps: Array, shares: Array) -> Array:
    """The multipliers once more, by least squares on those that are not 0: Σ λ_k (a_k − a_key) = 0, Σ λ = 1."""
    held = np.flatnonzero(shares > 1e-12 * shares.max(initial=0.0))
    unit = max(float(np.abs(steps).max()), np.finfo(float).tiny)
    matrix = np.vstack([steps[held].T / unit, np.ones(len(held))])
    right = np.append(np.zeros(steps.shape[1]), 1.0)
    again = np.zeros(len(shares))
    again[held] = np.linalg.lstsq(matrix, right, rcond=None)[0]
    return again


def _proves(steps: Array, gaps: Array, shares: Array) -> bool:
    """Whether `Σ λ_k gap_k + |Σ λ_k step_k|₁`, rounded up, is at most the lead that counts as none."""
    total = shares.sum()
    if not total > 0 or shares.min() < 0:
        return False
    shares = shares / total
    lead = shares @ gaps + np.abs(shares @ steps).sum()
    terms = shares @ np.abs(gaps) + (shares @ np.abs(steps)).sum()
    return bool(lead + 4 * (len(shares) + steps.shape[1]) * _U * terms <= _LEAD)
