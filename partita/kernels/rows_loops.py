"""Native loops over a tile of scores: the two best keys of each row and its sums, in two passes over numbers in the cache."""

from __future__ import annotations

import numpy as np

from partita.kernels.native_code import exp_native, least_part, loop, part, summed_part

__all__ = ["sum_tile"]

_SEGMENT = 64  # numbers per segment; the maximum of each is kept, so that a place is searched in one segment only
_RUN = 256  # numbers that are summed in the dtype of the scores; these sums are added in float64


@least_part
def _largest(row):
    best = row[0]
    for j in range(len(row)):
        best = row[j] if row[j] > best else best
    return best


@part
def _first_place(row, heights, largest):
    """The first entry equal to the largest; the very first if there is none (NaN)."""
    for segment in range(len(heights)):
        if heights[segment] == largest:
            for j in range(segment * _SEGMENT, min((segment + 1) * _SEGMENT, len(row))):
                if row[j] == largest:
                    return j
    return 0


@summed_part
def _sum_run(row, columns, best, place):
    """Sums of a part of a row, which is overwritten by its weights. The winner is set to −∞, like masked keys, and adds nothing."""
    zero = row.dtype.type(0)
    rest, weighted, squares, below, below_squared, away, seen = zero, zero, zero, zero, zero, zero, zero
    for j in range(len(row)):
        x = row[j] - best
        there = row[j] > -np.inf
        e = exp_native(x)
        t = x if there else zero
        rest += e
        weighted += e * t
        squares += e * e
        below += t
        below_squared += t * t
        away += e * abs(columns[j] - place)
        seen += row.dtype.type(1) if there else zero
        row[j] = e
    return rest, weighted, squares, below, below_squared, away, seen


@summed_part
def _sum_equal(row, numbers, own):
    """The total weight of keys whose token is `own`."""
    total = row.dtype.type(0)
    for j in range(len(row)):
        total += row[j] if numbers[j] == own else row.dtype.type(0)
    return total


@loop
def sum_tile(scores, stride, count, first, last, places, columns, own, tokens, before, sums, found):
    """Sums over the rows from `first` to `last` of a tile. Scores become weights relative to each row's best, 0 at the winner.

    Args:
        scores: flat; row r begins at `r·stride` and has `count` numbers, −∞ where masked.
        stride: numbers from one row to the next.
        count: keys of the tile.
        first: number of the first row.
        last: number after the last row.
        places: `(rows of a head,)`, positions of the queries relative to the first key of the tile, in the dtype of the scores.
        columns: `0, 1, …`, in the dtype of the scores.
        own: `(rows of a head,)` integers, the token of each query; empty if tokens are unknown.
        tokens: `(count,)`, the token of each key.
        before: `(count,)`, the token before each key.
        sums: `(10, rows)` float64: best, margin, rest, weighted, squares, below, below_squared, away, same, after_same, as in
            `RowSums`.
        found: `(3, rows)` integers: winner and runner-up within the tile, number of keys seen.
    """
    heights = np.empty((count + _SEGMENT - 1) // _SEGMENT, scores.dtype)
    for r in range(first, last):
        row, place = scores[r * stride : r * stride + count], places[r % len(places)]
        for segment in range(len(heights)):
            heights[segment] = _largest(row[segment * _SEGMENT : (segment + 1) * _SEGMENT])
        best = _largest(heights)
        winner = _first_place(row, heights, best)
        row[winner] = -np.inf
        home = winner // _SEGMENT
        heights[home] = _largest(row[home * _SEGMENT : (home + 1) * _SEGMENT])
        second = _largest(heights)
        runner_up = _first_place(row, heights, second)
        there = best > -np.inf
        base = best if there else scores.dtype.type(0)
        rest, weighted, squares, below, below_squared, away, seen = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
        for begin in range(0, count, _RUN):
            s = _sum_run(row[begin : begin + _RUN], columns[begin : begin + _RUN], base, place)
            rest += s[0]
            weighted += s[1]
            squares += s[2]
            below += s[3]
            below_squared += s[4]
            away += s[5]
            seen += s[6]
        one = 1.0 if there else 0.0
        sums[0, r], sums[1, r], sums[2, r] = best, np.float64(best) - np.float64(second), rest
        sums[3, r], sums[4, r], sums[5, r], sums[6, r] = weighted, squares + one, below, below_squared
        sums[7, r] = away + one * abs(columns[winner] - place)
        found[0, r], found[1, r], found[2, r] = winner, runner_up, np.int64(seen + one)
        if len(own) > 0:
            token = own[r % len(own)]
            same, after = one if tokens[winner] == token else 0.0, one if before[winner] == token else 0.0
            for begin in range(0, count, _RUN):
                run = row[begin : begin + _RUN]
                same += _sum_equal(run, tokens[begin : begin + _RUN], token)
                after += _sum_equal(run, before[begin : begin + _RUN], token)
            sums[8, r], sums[9, r] = same, after
